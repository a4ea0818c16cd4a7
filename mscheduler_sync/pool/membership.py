"""
The workers of this node and their places in the ring.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from mscheduler_sync.errors import PoolClosed
from mscheduler_sync.pool import statements
from mscheduler_sync.pool.claims import Crew
from mscheduler_sync.pool.job import Handler, Job
from mscheduler_sync.pool.lease import Lease
from mscheduler_sync.pool.ring import Ring
from mscheduler_sync.pool.store import PoolStore
from mscheduler_sync.pool.view import PoolView
from mscheduler_sync.pool.worker import Worker


class Membership:
    """
    Who may claim for this node now. Safe from any thread.
    """

    def __init__(self, store: PoolStore, pool: str, view: PoolView, lease: Lease) -> None:
        self._store = store
        self._pool = pool
        self._view = view
        self._lease = lease
        self._lock = threading.Lock()
        # All under _lock.
        self._workers: list[Worker] = []
        self._numbers = 0
        self._crew = Crew(0, lease.node, {})

    def crew(self) -> Crew:
        with self._lock:
            return self._crew

    def workers(self) -> list[Worker]:
        with self._lock:
            return list(self._workers)

    def add(self, handler: Handler, jobs_of: Callable[[Worker], list[Job]]) -> Worker:
        """
        Give *handler* a place in the ring.

        Raises:
            StoreError: The database did not answer; nothing is left behind for good.
            PoolClosed: The pool is being shut down.
        """
        with self._lock:
            self._numbers += 1
            worker = Worker(handler, self._numbers, self._store.clock.now(), jobs_of)
        worker.rename(self._lease.node)
        with self._lock:
            self._workers.append(worker)
        try:
            self._enter(worker)
        except BaseException:
            # What may stand in the ring already is taken out by `tidy`.
            with self._lock:
                self._workers.remove(worker)
            raise
        if not worker.id.startswith(self._lease.node):
            # The node came back under another id meanwhile.
            worker.rename(self._lease.node)
            self._enter(worker)
        self._publish()
        return worker

    def take_out(self, worker: Worker) -> None:
        """
        Take *worker* out of the ring: it gets no more jobs. It may still hold some.
        """
        worker.leave()
        self._publish()
        self._store.write(statements.leave(self._pool, worker.id))
        self._view.refresh()

    def forget(self, worker: Worker) -> None:
        worker.end()
        with self._lock:
            if worker in self._workers:
                self._workers.remove(worker)
        self._publish()
        self._store.remove(statements.forget_worker(worker.id))

    def suspend(self) -> None:
        """
        The lease is lost: nobody claims until `come_back`.
        """
        with self._lock:
            self._crew = Crew(self._lease.life, self._lease.node, {})

    def come_back(self) -> None:
        """
        Enter the ring again, under the new ids.
        """
        for worker in self.workers():
            if not worker.is_leaving:
                worker.rename(self._lease.node)
        self.rejoin()

    def rejoin(self) -> None:
        for worker in self.workers():
            if not worker.is_leaving:
                self._enter(worker)
        self._publish()

    def tidy(self, ring: Ring) -> None:
        """
        Mend what does not agree: workers without a place, places without a worker.
        """
        node = self._lease.node
        staying = {worker.id: worker for worker in self.workers() if not worker.is_leaving}
        for place in ring.places:
            if place.node == node and place.worker not in staying:
                self._store.write(statements.leave(self._pool, place.worker))
        if not self.crew().workers:
            # Suspended, or without workers.
            return
        for worker_id, worker in staying.items():
            if ring.slot_of(worker_id) is None:
                self._enter(worker)

    def _enter(self, worker: Worker) -> None:
        worker_id, node = worker.id, self._lease.node
        self._store.write(statements.register_worker(worker_id, node, self._pool))
        matched, _ = self._store.write(statements.join(self._pool, worker_id, node))
        if not matched:
            self._store.remove(statements.forget_worker(worker_id))
            raise PoolClosed(self._pool)
        self._view.refresh()

    def _publish(self) -> None:
        life, node = self._lease.life, self._lease.node
        with self._lock:
            mine = {
                worker.id: worker
                for worker in self._workers
                if not worker.is_leaving and worker.id.startswith(f"{node}.")
            }
            self._crew = Crew(life, node, mine)
