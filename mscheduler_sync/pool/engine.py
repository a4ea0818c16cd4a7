"""
The components of a node: who hands to whom, and the order of starting and stopping.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from pymongo.database import Database

from mscheduler_sync._runtime.log import logger
from mscheduler_sync._runtime.service import ComponentHealth, CrashHandler, Service
from mscheduler_sync.errors import PoolClosed, StoreError
from mscheduler_sync.events import EventHub
from mscheduler_sync.pool import statements
from mscheduler_sync.pool.claims import ClaimQueue, Claims
from mscheduler_sync.pool.control import Control
from mscheduler_sync.pool.events import CloseReport, NodeFenced, ShutdownReport
from mscheduler_sync.pool.held import HeldJobs
from mscheduler_sync.pool.lease import Lease
from mscheduler_sync.pool.reaper import Reaper
from mscheduler_sync.pool.requests import Requests
from mscheduler_sync.pool.ring import PoolView
from mscheduler_sync.pool.runner import JobRunner
from mscheduler_sync.pool.settings import NodeOptions
from mscheduler_sync.pool.store import PoolStore
from mscheduler_sync.pool.watcher import PoolWatcher, Waiters
from mscheduler_sync.pool.workers import Handler, Membership, Worker

_log = logger("pool")

#: Kept of the time of a close for the last writes, in seconds.
_LAST_WRITES_MOST_S: Final = 1.0
#: The other nodes of a pool that is shut down are asked for this often, in seconds.
_SHUTDOWN_POLL_S: Final = 0.1


class Engine:
    """
    The components of one node.
    """

    def __init__(
        self,
        database: Database[Any],
        settings: NodeOptions,
        *,
        hub: EventHub,
        stop_soon: Callable[[], None],
        on_crash: CrashHandler,
    ) -> None:
        self._settings = settings
        self._hub = hub
        self._stop_soon = stop_soon
        self.store = PoolStore(database, settings.prefix, settings.pool)
        self.view = PoolView(self.store)
        #: The whole pool is shut down: jobs are removed, not given back.
        self.is_shutdown = False
        self.held = HeldJobs()
        self._waiters = Waiters()
        #: Set at the end of a close, when the jobs are given up: nobody waits or tries again.
        self._closed = threading.Event()
        self.lease = Lease(
            store=self.store,
            settings=settings,
            on_lost=self._on_lost,
            on_return=self._on_return,
            on_crash=on_crash,
        )
        name = self.lease.node
        self.runner = JobRunner(
            store=self.store,
            name=name,
            held=self.held,
            holds=self.lease.holds,
            waiters=self._waiters,
            hub=hub,
            epoch=self.view.epoch,
            closed=self._closed,
        )
        self.executor = self.runner.executor
        self.membership = Membership(store=self.store, view=self.view, lease=self.lease)
        self.claims = Claims(
            store=self.store,
            view=self.view,
            held=self.held,
            runner=self.runner,
            queue=ClaimQueue(grace_s=settings.claim_grace_s),
        )
        reaper = Reaper(
            store=self.store,
            ttl_s=settings.worker_ttl_s,
            view=self.view,
            runner=self.runner,
            claims=self.claims,
            hub=hub,
        )
        self.control = Control(
            owner_id=name,
            store=self.store,
            poll_interval_s=settings.poll_interval_s,
            view=self.view,
            held=self.held,
            membership=self.membership,
            runner=self.runner,
            claims=self.claims,
            queue=self.claims.queue,
            reaper=reaper,
            is_streaming=self.is_streaming,
            on_closed=self._on_pool_closed,
            on_crash=on_crash,
        )
        self._watcher: PoolWatcher | None = None
        if settings.watch:
            self._watcher = PoolWatcher(
                owner_id=name,
                store=self.store,
                waiters=self._waiters,
                listener=None if settings.client_only else self.control,
                on_crash=on_crash,
            )
        self.requests = Requests(
            store=self.store,
            settings=settings,
            view=self.view,
            waiters=self._waiters,
            node=lambda: self.lease.node,
            is_streaming=self.is_streaming,
            on_inserted=self._on_job_inserted,
            closed=self._closed,
        )
        self._recurring_lock = threading.Lock()
        # Replaced under _recurring_lock, never changed.
        #: Tickers and schedules: stopped before anything else at a close.
        self.recurring: list[Service] = []

    # -- starting ----------------------------------------------------------------------------

    def enter(self) -> None:
        """
        Enter the pool: indexes, the pool's document, the lease.

        Raises:
            StoreError, PoolClosed, ValueError: See `Node.start`.
        """
        settings = self._settings
        self.store.measure_clock()
        self.store.ensure_indexes()
        self.store.update(statements.members.ensure_pool(settings.pool, settings.ring_order))
        seen = self.view.refresh()
        if seen.state != statements.OPEN:
            raise PoolClosed(settings.pool)
        if settings.client_only:
            return
        if seen.order != settings.ring_order:
            msg = f"the pool {settings.pool!r} has the ring order {seen.order!r}"
            raise ValueError(msg)
        self.lease.register()

    def start(self) -> None:
        for service in self._services():
            service.start()

    def _services(self) -> list[Service]:
        services: list[Service] = []
        if not self._settings.client_only:
            services += [self.lease, self.control]
        if self._watcher is not None:
            services.append(self._watcher)
        return services

    def add_recurring(self, thread: Service, *, alone: bool) -> None:
        """
        Stop *thread* with the node; with *alone*, also end a former one for the same thing.
        """
        with self._recurring_lock:
            former = [one for one in self.recurring if not one.stopping]
            if alone:
                for one in former:
                    if one.component == thread.component:
                        one.request_stop()
            self.recurring = [*former, thread]

    # -- knowledge ---------------------------------------------------------------------------

    @property
    def node(self) -> str:
        """
        The id of this node; another one after a lost lease.
        """
        return self.lease.node

    def is_streaming(self) -> bool:
        return self._watcher is not None and self._watcher.is_open

    def lease_left_s(self) -> float | None:
        if self._settings.client_only:
            return None
        return max(0.0, self.lease.until_s - time.monotonic())

    def components(self) -> dict[str, tuple[bool, ComponentHealth]]:
        """
        Every component by name: whether it lives, and its errors.
        """
        components = {one.component: (one.alive, one.health) for one in self._services()}
        components |= {
            one.component: (one.alive, one.health) for one in self.recurring if not one.stopping
        }
        runner = self.runner
        return components | {"handlers": (True, runner.health), "steps": (True, runner.bugs)}

    def _on_job_inserted(self, job_id: str) -> None:
        """
        A job was inserted by this process: the control thread need not wait for the stream.
        """
        if not self._settings.client_only:
            self.claims.queue.add(job_id, time.monotonic())

    # -- workers -----------------------------------------------------------------------------

    def workers(self) -> list[Worker]:
        return self.membership.workers()

    def add_worker(self, handler: Handler) -> Worker:
        worker = self.membership.add(handler, self.held.jobs_of)
        self.control.rescan()
        return worker

    def remove_worker(self, worker: Worker, timeout_s: float) -> CloseReport:
        deadline_s = time.monotonic() + timeout_s
        self.membership.take_out(worker)
        report = self.runner.empty([worker], deadline_s, remove=False)
        if not report.left:
            self.membership.forget(worker)
        return report

    # -- the lease is lost -------------------------------------------------------------------

    def _on_lost(self, old: str, reason: str) -> None:
        """
        Stop everything that runs here; called in the lease's thread.
        """
        self.membership.suspend()
        lost = self.held.begin_life()
        self._hub.publish(NodeFenced(node=old, reason=reason))
        self.runner.fence(lost, then=lambda: self.control.retire(old))

    def _on_return(self) -> None:
        try:
            self.membership.come_back()
        except PoolClosed:
            # The control thread finds out and closes the node.
            return
        self.control.rescan()

    def _on_pool_closed(self) -> None:
        """
        Somebody shuts the pool down. Called in the control thread, which must not wait.
        """
        self.is_shutdown = True
        self._stop_soon()

    # -- ends --------------------------------------------------------------------------------

    def begin_shutdown(self) -> None:
        self.store.update(statements.members.begin_shutdown(self.store.pool, self.node))
        self.view.refresh()
        self.is_shutdown = True

    def request_stop(self) -> None:
        """
        No more ticks and plans; jobs go on.
        """
        for service in self.recurring:
            service.request_stop()
        if self._watcher is not None:
            # It may sit in its call for a second: from now on, so as not to wait for it later.
            self._watcher.request_stop()

    def is_running_here(self) -> bool:
        """
        Whether the calling thread runs a handler.
        """
        return self.executor.is_running_here()

    def stop(self, timeout_s: float) -> CloseReport:
        """
        End this node: jobs first, then the lease, then the threads.
        """
        deadline_s = time.monotonic() + timeout_s
        report = CloseReport()
        if not self._settings.client_only:
            report = self._give_everything_up(deadline_s)
        self._closed.set()
        self._waiters.wake_all()
        self.store.deadline_s = max(deadline_s, time.monotonic() + 0.5)
        for service in [*self._services(), *self.recurring]:
            service.request_stop()
        self.executor.close()
        # Half a second more for threads to notice; calls keep to their own time-outs.
        last_s = max(deadline_s, time.monotonic()) + 0.5
        services = [*self._services(), *self.recurring]
        for service in services:
            service.join(last_s - time.monotonic())
        threads = self.executor.join(0.0 if report.left else last_s - time.monotonic())
        self.is_shutdown = self.is_shutdown or self.view.seen.state != statements.OPEN
        alive = [service.thread_name for service in services if service.alive]
        if report.left:
            _log.warning(
                "the close ran out of time; these jobs wait for the lease to end",
                event="close_incomplete",
                worker_id=self.node,
                left=report.left,
            )
        return CloseReport(report.released, report.stopped, report.left, (*alive, *threads))

    def _give_everything_up(self, deadline_s: float) -> CloseReport:
        writes_s = min(_LAST_WRITES_MOST_S, max(0.0, deadline_s - time.monotonic()) * 0.2)
        workers = self.workers()
        for worker in workers:
            worker.leave()
        self.membership.suspend()
        # No claim is under way after this.
        self.control.request_stop()
        self.control.join(max(0.0, deadline_s - writes_s - time.monotonic()))
        for worker in workers:
            # If this fails, the reapers of others do it.
            with contextlib.suppress(StoreError):
                self.membership.take_out(worker)
        report = self.runner.empty(workers, deadline_s - writes_s, remove=self.is_shutdown)
        for worker in workers:
            worker.end()
        node = self.node
        self.lease.request_stop()
        self.lease.join(max(0.0, deadline_s - time.monotonic()))
        if not report.left:
            with contextlib.suppress(StoreError):
                self.store.update(statements.members.retire(node))
                for worker in workers:
                    self.store.delete(statements.members.forget_worker(worker.id))
                self.store.delete(statements.members.forget_node(node))
        return report

    def finish_shutdown(self, own: CloseReport, deadline_s: float) -> ShutdownReport:
        """
        Wait for the other nodes, then remove what is left of the pool.
        """
        pool = self.store.pool
        # This node's reaper has ended with it: dead nodes are declared dead here.
        self.store.deadline_s = float("inf")
        waiter = threading.Event()
        while True:
            nodes: tuple[str, ...] = ()
            with contextlib.suppress(StoreError):
                there = self.store.read_one(statements.members.pool_document(pool))
                if there is None or there["state"] != statements.CLOSING:
                    # Another has finished it, and the name may be in use anew.
                    return ShutdownReport(own)
                for node in self._nodes_alive():
                    self.store.update(statements.members.declare_dead(node))
                nodes = self._nodes_alive()
                if not nodes and not own.left:
                    break
            if time.monotonic() >= deadline_s:
                return ShutdownReport(own, nodes, self._job_keys())
            waiter.wait(_SHUTDOWN_POLL_S)
        for removal in statements.members.forget_pool(pool):
            self.store.delete(removal)
        return ShutdownReport(own)

    def _nodes_alive(self) -> tuple[str, ...]:
        alive = self.store.read(statements.members.nodes_of(self.store.pool, statements.ALIVE))
        return tuple(node["_id"] for node in alive)

    def _job_keys(self) -> tuple[str, ...]:
        with contextlib.suppress(StoreError):
            jobs = self.store.read(statements.jobs.jobs_of(self.store.pool))
            return tuple(sorted(job["key"] for job in jobs))
        return ()
