"""
The node as the application sees it: life, workers, requests, events, health.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pymongo.database import Database

from mscheduler_sync._runtime.lifecycle import ENDS, Lifecycle, Owner, State
from mscheduler_sync._runtime.log import logger
from mscheduler_sync._runtime.signals import serve
from mscheduler_sync.errors import PoolClosed
from mscheduler_sync.events import EventHub, EventSource
from mscheduler_sync.health import crash_text, report_of
from mscheduler_sync.pool import statements
from mscheduler_sync.pool.engine import Engine
from mscheduler_sync.pool.events import (
    CloseReport,
    NodeHealth,
    NodeState,
    NodeStateChanged,
    ShutdownReport,
)
from mscheduler_sync.pool.recurring import Tick, Ticker
from mscheduler_sync.pool.schedule import Planner, Schedule
from mscheduler_sync.pool.settings import NodeOptions, Order, name_of
from mscheduler_sync.pool.workers import Handler, Worker, WorkerInfo, check_handler
from mscheduler_sync.settings import Duration, options_from, seconds, text

_log = logger("pool")


class Node(EventSource):
    """
    A member of a pool of dedicated jobs: each job runs under its key on exactly one worker.

    A node holds workers (`add_worker`) and may ask for jobs (`dispatch`, `stop_job`, `notify`);
    with *client_only* it does the latter alone. Use it as a context manager, or call `start`
    and `close`; what needs a running node starts it. One node is started once. All methods may
    be called from any thread, also by handlers.

    Arguments (durations in seconds or as timedelta):
        database: Where the collections ``pool_*`` live. Its client is never closed.
        pool: The name of the pool.
        client_only: Hold no workers and no lease.
        worker_ttl: How long a silent node is believed to live: jobs of a dead one are started
            elsewhere after this time. A node that cannot renew it gives its jobs up before.
        shutdown_timeout: How long `close`, `remove_worker`, `shutdown`, a signal and the
            interpreter's exit wait for handlers to stop.
        dispatch_timeout: How long `dispatch` waits for a worker by default.
        max_queued_jobs: So many jobs may wait for a worker; more are refused.
        watch: False polls only and opens no change stream.
        poll_interval: The pause between two reads of the pool's state.
        claim_grace: A job that its worker has not taken after this time may be taken by any.
        lease_margin: How long before its end a lease is given up. Default: a tenth of
            *worker_ttl*, at least 2 s, never above a quarter.
        ring_order: ``"slots"`` or, as the original, ``"created"``. The first node decides for
            the pool.
        prefix: Begins the names of the collections.

    Constructing does no I/O.

    Raises:
        TypeError, ValueError: If an argument is wrong; the text names it.
    """

    def __init__(
        self,
        database: Database[Any],
        pool: str,
        *,
        client_only: bool = False,
        worker_ttl: Duration = 30.0,
        shutdown_timeout: Duration = 120.0,
        dispatch_timeout: Duration = 40.0,
        max_queued_jobs: int = 1000,
        watch: bool = True,
        poll_interval: Duration = 1.0,
        claim_grace: Duration = 2.0,
        lease_margin: Duration | None = None,
        ring_order: Order = "slots",
        prefix: str = "pool_",
    ) -> None:
        if not isinstance(database, Database):
            msg = f"database must be a pymongo Database, got {type(database).__name__}"
            raise TypeError(msg)
        self._settings = options_from(NodeOptions, locals())
        self._database = database
        self._life = Lifecycle(
            Owner(
                kind="node",
                log=_log,
                id=lambda: self.id,
                state_name=self._state_name,
                start=self.start,
                stop=self.close,
                empty_report=CloseReport(),
                stop_timeout_s=self._settings.shutdown_timeout_s,
                prepare=self._enter,
                on_state=self._on_state,
                renew=self._renew,
            )
        )

    def _renew(self, life: Lifecycle[CloseReport]) -> None:
        self._hub = EventHub()
        self._engine = Engine(
            self._database,
            self._settings,
            hub=self._hub,
            stop_soon=life.stop_in_thread,
            on_crash=life.on_crash,
        )

    # -- life --------------------------------------------------------------------------------

    def start(self) -> None:
        """
        Enter the pool. Blocks until the database has answered, some ten seconds at most; doing
        it again does nothing.

        Raises:
            StoreError: The database did not answer; nothing has begun, and it may be tried again.
            PoolClosed: The pool is being shut down.
            ValueError: The pool uses another ring order.
            RuntimeError: The node was closed, or belongs to the parent process.
        """
        self._life.start()

    def close(self, timeout: Duration | None = None) -> CloseReport:
        """
        Leave the pool: stop all jobs here, give them back, and end.

        Blocks up to *timeout* seconds (default: `shutdown_timeout`) and about one more.
        Other workers start the jobs at once. A job whose handler does not stop stays this
        node's until its lease ends, and is named in the report. Safe to call again, and from
        any thread; the second caller waits for the first. Called by a handler it only asks
        for the close and returns an empty report.

        Raises:
            ComponentCrashed: If a component had failed for good; the close was done nevertheless.
        """
        return self._life.stop(self._time(timeout))

    def stop(self, timeout: Duration | None = None) -> CloseReport:
        """
        The same as `close`, under the name that consumers use.
        """
        return self.close(timeout)

    def shutdown(self, timeout: Duration | None = None) -> ShutdownReport:
        """
        End the whole pool: every job on every node is stopped and removed, every node closes.

        Blocks up to *timeout* seconds (default: `shutdown_timeout`) for all nodes; a dead one
        is waited for until its lease has ended. The report says what was left. Meanwhile and
        until it is complete, new jobs, workers and nodes are refused; afterwards the name of
        the pool may be used anew. What was left is taken up by calling it again, on this node
        or on a new one.

        Raises:
            RuntimeError: On a client-only node, or after `close`.
            PoolClosed: The pool was shut down already.
            StoreError: The database did not answer; call it again.
        """
        if self._settings.client_only:
            msg = "a client-only node cannot shut the pool down"
            raise RuntimeError(msg)
        timeout_s = self._time(timeout)
        deadline_s = time.monotonic() + timeout_s
        try:
            self._running_engine()
        except PoolClosed:
            if self._engine.view.refresh().state != statements.CLOSING:
                raise
            own = CloseReport()
        else:
            self._engine.begin_shutdown()
            own = self._life.stop(timeout_s)
        return self._engine.finish_shutdown(own, deadline_s)

    def run_forever(self) -> CloseReport:
        """
        Start if needed, and work until SIGINT, SIGTERM, a shutdown or a crash; then close.

        A second signal ends the process at once: the jobs then wait for the lease to end.

        Raises:
            ComponentCrashed: If a component failed again and again; the failure is its cause.
            RuntimeError: If the node was closed before.
        """
        return serve(self._life)

    # -- workers -----------------------------------------------------------------------------

    def add_worker(self, handler: Handler) -> Worker:
        """
        Give *handler* a slot in the ring; from now on jobs are started on it.

        Raises:
            TypeError: If *handler* has no methods start and stop.
            RuntimeError: If the node is client-only or closed.
            PoolClosed: The pool is being shut down.
            StoreError: The database did not answer.
        """
        check_handler(handler)
        if self._settings.client_only:
            msg = "a client-only node has no workers"
            raise RuntimeError(msg)
        self._running_engine()
        return self._engine.add_worker(handler)

    def remove_worker(self, worker: Worker, timeout: Duration | None = None) -> CloseReport:
        """
        Stop the jobs of *worker*, give them back, and forget it.

        Blocks up to *timeout* seconds (default: `shutdown_timeout`). While the report names
        jobs that were left, the worker keeps them, and this may be called again.

        Raises:
            ValueError: If *worker* is not of this node.
            StoreError: The database did not answer; call it again.
        """
        self._running_engine()
        if worker not in self._engine.workers():
            msg = f"{worker!r} is no worker of this node"
            raise ValueError(msg)
        return self._engine.remove_worker(worker, self._time(timeout))

    def workers(self) -> list[Worker]:
        """
        Return the workers of this node.
        """
        return self._engine.workers()

    def pool_workers(self) -> list[WorkerInfo]:
        """
        Return all workers of the pool, in the order of their slots.
        """
        return self._running_engine().membership.pool_workers()

    # -- requests ----------------------------------------------------------------------------

    def dispatch(self, key: str, payload: Any = None, timeout: Duration | None = None) -> None:
        """
        Have a job started on the worker to which *key* belongs; return once its start has.

        *payload* is any BSON value. Blocks up to *timeout* seconds (default:
        `dispatch_timeout`) until a worker has taken the job, and as long again until its
        handler's start has returned.

        Raises:
            JobExists: The key waits or runs already.
            PoolFull: Too many jobs wait for a worker.
            HandlerError: The handler's start has raised; the job is gone.
            DispatchTimeout: No worker has taken it in time, or before this node was closed; it will
                never start.
            PoolClosed: The pool is being shut down.
            StoreError: The database did not answer; the job may or may not be there.
            ValueError, TypeError: A wrong key or payload.
        """
        key = text(key, "key")
        timeout_s = self._settings.dispatch_timeout_s
        if timeout is not None:
            timeout_s = seconds(timeout, "timeout", above=0.0, at_most=86_400.0)
        self._running_engine().requests.dispatch(key, payload, timeout_s)

    def stop_job(self, key: str, *, wait: bool = False, timeout: Duration | None = None) -> None:
        """
        Have a job stopped and removed, wherever it runs; the request travels with the job.

        With *wait*, blocks up to *timeout* seconds (default: `shutdown_timeout`) for the
        handler's verdict.

        Raises:
            JobNotFound: There is no such job.
            HandlerError: With *wait*: the handler's stop has raised; the job goes on.
            TimeoutError: With *wait*: no verdict yet; the request stands.
            StoreError: The database did not answer; ask again.
        """
        key = text(key, "key")
        timeout_s = self._time(timeout)
        self._running_engine().requests.stop_job(key, wait=wait, timeout_s=timeout_s)

    def notify(self, key: str, payload: Any = None) -> None:
        """
        Have *payload* delivered to the handler of a job: in order, at least once.

        Notifications wait with the job while it has no owner. Returns once it is stored.

        Raises:
            JobNotFound: There is no such job.
            InboxFull: A thousand of them, or 1 MiB, wait already.
            StoreError: The database did not answer; it may be stored.
            ValueError, TypeError: A wrong key or payload.
        """
        key = text(key, "key")
        timeout_s = self._settings.dispatch_timeout_s
        self._running_engine().requests.notify(key, payload, timeout_s)

    def job_keys(self) -> list[str]:
        """
        Return the keys of all jobs of the pool that run, or are on the way to another worker.
        """
        return self._running_engine().requests.job_keys()

    def job_payload(self, key: str) -> Any:
        """
        Return what a job was dispatched with. Raises `JobNotFound`.
        """
        key = text(key, "key")
        return self._running_engine().requests.job_payload(key)

    def job_owner(self, key: str) -> str | None:
        """
        Return the id of a job's worker, or None between two. Raises `JobNotFound`.
        """
        key = text(key, "key")
        return self._running_engine().requests.job_owner(key)

    # -- what recurs -------------------------------------------------------------------------

    def ticker(
        self,
        name: str,
        interval: Duration,
        callback: Callable[[Tick], Any] | None = None,
    ) -> Ticker:
        """
        Compete for a tick at each *interval*: over all nodes of the pool one gets it.

        Missed ticks count as one. Another interval for the same name changes it for all nodes.

        Raises:
            RuntimeError: On a client-only or closed node.
            TypeError, ValueError: A wrong name, interval or callback.
            StoreError: The database did not answer; call it again.
        """
        name = name_of(name, "name")
        interval_s = seconds(interval, "interval", at_least=0.01)
        if callback is not None and not callable(callback):
            msg = f"callback must be callable or None, got {callback!r:.200}"
            raise TypeError(msg)
        engine = self._engine_for("a ticker")
        ticker = Ticker(
            store=engine.store,
            name=name,
            interval_s=interval_s,
            callback=callback,
            on_crash=self._life.on_crash,
        )
        ticker.start()
        engine.add_recurring(ticker.thread, alone=False)
        return ticker

    def schedule(self, planner: Planner, interval: Duration, name: str | None = None) -> Schedule:
        """
        Ask *planner* at each *interval*, on one node of the pool, which jobs are to run.

        The first plan is due at once. A node that dies with a plan in hand has it repeated.
        Doing it again on this node replaces the former planner.
        *name* defaults to the planner's attribute ``name``, or else its class's name.

        Raises:
            RuntimeError: On a client-only or closed node.
            TypeError, ValueError: A wrong planner, interval or name.
            StoreError: The database did not answer; call it again.
        """
        if not callable(getattr(planner, "plan", None)):
            msg = f"a planner needs a method plan, got {planner!r:.200}"
            raise TypeError(msg)
        chosen = name if name is not None else getattr(planner, "name", type(planner).__name__)
        checked = name_of(chosen, "name")
        interval_s = seconds(interval, "interval", at_least=0.01)
        engine = self._engine_for("a schedule")
        schedule = Schedule(
            store=engine.store,
            name=checked,
            planner=planner,
            interval_s=interval_s,
            requests=engine.requests,
            dispatch_timeout_s=self._settings.dispatch_timeout_s,
            node=lambda: engine.node,
            on_crash=self._life.on_crash,
        )
        schedule.start()
        engine.add_recurring(schedule.thread, alone=True)
        return schedule

    def _engine_for(self, what: str) -> Engine:
        if self._settings.client_only:
            msg = f"a client-only node cannot have {what}"
            raise RuntimeError(msg)
        return self._running_engine()

    # -- knowledge ---------------------------------------------------------------------------

    @property
    def pool(self) -> str:
        return self._settings.pool

    @property
    def id(self) -> str:
        """
        The id of this node; another one after a lost lease.
        """
        return self._engine.node

    @property
    def state(self) -> NodeState:
        """
        ``new``, ``running``, ``closing``, ``closed``, ``shutdown``, ``crashed``, or ``forked``.
        """
        return self._state_name(self._life.state)

    @property
    def is_closed(self) -> bool:
        """
        Whether it is closed or about to be, for whatever reason.
        """
        return self.state in {"closing", "closed", "shutdown", "crashed"}

    @property
    def is_shutdown(self) -> bool:
        """
        Whether a shutdown of the pool has closed it.
        """
        return self.state == "shutdown"

    def health(self) -> NodeHealth:
        """
        Return a snapshot for monitoring. Never blocks on the database.
        """
        engine = self._engine
        ring = engine.view.ring
        return NodeHealth(
            state=self.state,
            node=engine.node,
            discovery="stream" if engine.is_streaming() else "poll",
            workers=len(engine.workers()),
            jobs=len(engine.held),
            lease_left=engine.lease_left_s(),
            busy=tuple(engine.executor.busy_keys()),
            ring_size=len(ring.slots),
            ring_epoch=ring.epoch,
            components={name: report_of(*one) for name, one in engine.components().items()},
            crash=crash_text(self._life.crash),
        )

    def __enter__(self) -> Node:
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._life.leave(error)

    def __repr__(self) -> str:
        return f"Node({self.pool!r}, id={self.id!r}, state={self.state!r})"

    # -- inside ------------------------------------------------------------------------------

    def _running_engine(self) -> Engine:
        """
        Return the engine of a node that runs, starting it if it is new.
        """
        state = self.state
        if state == "new":
            self.start()
        elif state == "shutdown":
            raise PoolClosed(self.pool)
        elif state != "running":
            msg = f"this node is {state}"
            raise RuntimeError(msg)
        return self._engine

    def _time(self, timeout: Duration | None) -> float:
        if timeout is None:
            return self._settings.shutdown_timeout_s
        return seconds(timeout, "timeout", at_most=86_400.0)

    # -- called by the life cycle ------------------------------------------------------------

    def _enter(self) -> Engine:
        self._engine.enter()
        settings = self._settings
        # A caller and the stream; lease, control and one handler.
        needed = 1 + settings.watch + (0 if settings.client_only else 3)
        self._life.warn_of_small_pool(self._engine.store.max_pool_size, needed)
        return self._engine

    def _state_name(self, state: State) -> NodeState:
        if state == "stopping":
            return "closing"
        if state == "stopped":
            return "shutdown" if self._engine.is_shutdown else "closed"
        return state

    def _on_state(self, state: State) -> None:
        self._hub.publish(NodeStateChanged(state=self._state_name(state)))
        if state in ENDS:
            self._hub.close()
