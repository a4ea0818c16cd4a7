"""
The workers of a node: their handlers, what these are told of jobs, and their slots in the ring.
"""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable
from typing import Any, Protocol

import attrs

from mscheduler_sync.errors import PoolClosed
from mscheduler_sync.pool import statements
from mscheduler_sync.pool.lease import Lease
from mscheduler_sync.pool.ring import PoolView, Ring
from mscheduler_sync.pool.store import PoolStore


@attrs.frozen
class Job:
    """
    One grant of a job to a worker, as `Handler.start` sees it.
    """

    key: str
    payload: Any
    #: Grows with every grant of this key, over all workers and for ever. Pass it on to outside
    #: systems, which then refuse what comes with a smaller one.
    fence: int
    #: Whether the job was granted before: it was moved, or its owner died.
    requeued: bool
    #: When it was dispatched, by the server's clock.
    created_at: dt.datetime


class Handler(Protocol):
    """
    Any object with these methods; ``notify(key, payload)`` is optional.

    Calls about one key come one after another, those about different keys in
    parallel, each from a thread of the node's.
    """

    def start(self, job: Job, /) -> object:
        """
        Begin the job and return soon; it runs on until `stop`. What is raised fails the start.
        """

    def stop(self, key: str, /) -> object:
        """
        End the job; when this returns, another worker may start it. What is raised keeps it here.
        """


def check_handler(handler: object) -> None:
    """
    Raises:
        TypeError: If *handler* lacks a method, or has something else in its place.
    """
    for name in ("start", "stop"):
        if not callable(getattr(handler, name, None)):
            msg = f"a handler needs a method {name}, got {handler!r:.200}"
            raise TypeError(msg)
    notify = getattr(handler, "notify", None)
    if notify is not None and not callable(notify):
        msg = f"notify of a handler must be a method or missing, got {notify!r:.200}"
        raise TypeError(msg)


@attrs.frozen
class WorkerInfo:
    """
    A worker of the pool, wherever it runs.
    """

    id: str
    node: str
    created_at: dt.datetime


@attrs.define(eq=False, repr=False, kw_only=True)
class Worker:
    """
    One handler of a node. Made by `Node.add_worker`.

    Its id changes when the node has lost its lease and comes back under another.
    """

    handler: Handler
    number: int
    #: By the server's clock.
    created_at: dt.datetime
    _jobs_of: Callable[[Worker], list[Job]]
    _lock: threading.Lock = attrs.field(init=False, factory=threading.Lock)
    # Under _lock.
    _id: str = attrs.field(init=False, default="")
    _leaving: bool = attrs.field(init=False, default=False)
    _stopped: bool = attrs.field(init=False, default=False)

    @property
    def id(self) -> str:
        with self._lock:
            return self._id

    @property
    def is_leaving(self) -> bool:
        """
        Whether it is being removed: it takes no more jobs.
        """
        with self._lock:
            return self._leaving

    @property
    def is_stopped(self) -> bool:
        """
        Whether it was removed, or its node was closed.
        """
        with self._lock:
            return self._stopped

    def jobs(self) -> list[Job]:
        """
        Return the jobs that run here, by key.
        """
        return self._jobs_of(self)

    def __repr__(self) -> str:
        return f"Worker({self.id!r}, handler={type(self.handler).__name__})"

    # -- called by the node ------------------------------------------------------------------

    def rename(self, node: str) -> str:
        with self._lock:
            self._id = f"{node}.{self.number}"
            return self._id

    def leave(self) -> None:
        with self._lock:
            self._leaving = True

    def end(self) -> None:
        with self._lock:
            self._leaving = self._stopped = True


@attrs.frozen
class ActiveWorkers:
    """
    Who may claim, as of one life of the node: workers by their ids.
    """

    life: int
    node: str
    workers: dict[str, Worker]


@attrs.define(eq=False, repr=False, kw_only=True)
class Membership:
    """
    Who may claim for this node now. Safe from any thread.
    """

    _store: PoolStore
    _view: PoolView
    _lease: Lease
    _lock: threading.Lock = attrs.field(init=False, factory=threading.Lock)
    # All under _lock.
    _workers: list[Worker] = attrs.field(init=False, factory=list)
    _numbers: int = attrs.field(init=False, default=0)
    _active: ActiveWorkers = attrs.field(init=False)

    @_active.default
    def _nobody(self) -> ActiveWorkers:
        return ActiveWorkers(self._lease.life, self._lease.node, {})

    def active(self) -> ActiveWorkers:
        with self._lock:
            return self._active

    def workers(self) -> list[Worker]:
        with self._lock:
            return list(self._workers)

    def pool_workers(self) -> list[WorkerInfo]:
        """
        Return the workers of all nodes, in the order of their slots.
        """
        slots = self._view.refresh().ring.slots
        workers = self._store.read(statements.members.workers_of_pool(self._store.pool))
        created_at = {one["_id"]: one["created_at"] for one in workers}
        return [
            WorkerInfo(slot.worker, slot.node, created_at[slot.worker])
            for slot in slots
            if slot.worker in created_at
        ]

    def add(self, handler: Handler, jobs_of: Callable[[Worker], list[Job]]) -> Worker:
        """
        Give *handler* a slot in the ring.

        Raises:
            StoreError: The database did not answer; nothing is left behind for good.
            PoolClosed: The pool is being shut down.
        """
        with self._lock:
            self._numbers += 1
            worker = Worker(
                handler=handler,
                number=self._numbers,
                created_at=self._store.clock.now(),
                jobs_of=jobs_of,
            )
        worker.rename(self._lease.node)
        with self._lock:
            self._workers.append(worker)
        try:
            self._enter(worker)
        except BaseException:
            # What may stand in the ring already is taken out by `repair`.
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
        self._store.update(statements.members.leave(self._store.pool, worker.id))
        self._view.refresh()

    def forget(self, worker: Worker) -> None:
        worker.end()
        with self._lock:
            if worker in self._workers:
                self._workers.remove(worker)
        self._publish()
        self._store.delete(statements.members.forget_worker(worker.id))

    def suspend(self) -> None:
        """
        The lease is lost: nobody claims until `come_back`.
        """
        with self._lock:
            self._active = self._nobody()

    def come_back(self) -> None:
        """
        Enter the ring again, under the new ids.
        """
        for worker in self.workers():
            if not worker.is_leaving:
                worker.rename(self._lease.node)
        for worker in self.workers():
            if not worker.is_leaving:
                self._enter(worker)
        self._publish()

    def repair(self, ring: Ring) -> None:
        """
        Repair what does not agree: workers without a slot, slots without a worker.
        """
        node = self._lease.node
        staying = {worker.id: worker for worker in self.workers() if not worker.is_leaving}
        for slot in ring.slots:
            if slot.node == node and slot.worker not in staying:
                self._store.update(statements.members.leave(self._store.pool, slot.worker))
        if not self.active().workers:
            # Suspended, or without workers.
            return
        for worker_id, worker in staying.items():
            if ring.number_of(worker_id) is None:
                self._enter(worker)

    def _enter(self, worker: Worker) -> None:
        worker_id, node = worker.id, self._lease.node
        self._store.update(statements.members.register_worker(worker_id, node, self._store.pool))
        matched, _ = self._store.update(statements.members.join(self._store.pool, worker_id, node))
        if not matched:
            self._store.delete(statements.members.forget_worker(worker_id))
            raise PoolClosed(self._store.pool)
        self._view.refresh()

    def _publish(self) -> None:
        life, node = self._lease.life, self._lease.node
        with self._lock:
            mine = {
                worker.id: worker
                for worker in self._workers
                if not worker.is_leaving and worker.id.startswith(f"{node}.")
            }
            self._active = ActiveWorkers(life, node, mine)
