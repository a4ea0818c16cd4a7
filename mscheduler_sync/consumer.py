"""
The consumer as the application sees it: life, waiting, events, health.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import attrs
from pymongo.collection import Collection

from mscheduler_sync._runtime.delay_queue import DelayQueue
from mscheduler_sync._runtime.lifecycle import ENDS, Lifecycle, Owner, State
from mscheduler_sync._runtime.log import logger
from mscheduler_sync._runtime.signals import serve
from mscheduler_sync._runtime.slots import Slots
from mscheduler_sync._stages.assembly import Assembly, StopReport
from mscheduler_sync._stages.running import RunningAttempts
from mscheduler_sync._storage.store import TaskStore
from mscheduler_sync.events import (
    ConsumerStateChanged,
    EventHub,
    EventSource,
)
from mscheduler_sync.health import Health, take_health
from mscheduler_sync.invocation import Invocation, invocation_of
from mscheduler_sync.router import Router
from mscheduler_sync.settings import (
    ConsumerOptions,
    check_max_workers,
    deadline_after,
    new_worker_id,
    options_from,
    seconds,
)

_log = logger("consumer")

#: Waits are cut into slices, so that Ctrl-C is seen on every system.
_SLICE_S: Final = 0.5
#: Threads of a consumer that talk to the server beside those of running attempts.
_OWN_CONNECTIONS: Final = 4


class Consumer(EventSource):
    """
    Runs tasks of one collection in threads of this process.

    *func_or_router* is a function, called ``func(params)`` or ``func(params, context)``
    with a `TaskContext`, which takes every task whatever its name; or a `Router`.

    Use it as a context manager, or call `start` and `stop`. One consumer is started
    once. All methods may be called from any thread; a function that runs as a task
    may call `stop`, which then only asks for the stop.

    Arguments (durations in seconds or as timedelta):
        worker_id: Identity, unique among the living. Default: host, process and a
            random part.
        max_workers: Tasks that run at once; default 8, at most 1000. May be changed later.
        around: Called without arguments in the executing thread before each function; the
            context manager that it returns is entered around the function.
        watch: False polls only and opens no change stream.
        poll_interval: The pause between two passes without a change stream.
        queue_limit: How many found tasks are held in memory.
        stop_timeout: How long `stop`, leaving the ``with`` block, a signal and the
            interpreter's exit wait for running functions.
        lease_margin: How long before its end a lease is no longer trusted. Default: a tenth
            of it, at least 2 s, never above a quarter.
        max_result_bytes: Larger results become a stored failure.
        rust_interop: Rust workers share the collection: look through all unfinished
            documents every minute for what they have left stale.

    Does no I/O. The collection's client stays the caller's and is never closed.

    Raises:
        TypeError, ValueError: If an argument is wrong; the text names it.
    """

    def __init__(
        self,
        collection: Collection[Any],
        func_or_router: Callable[..., Any] | Router,
        *,
        worker_id: str | None = None,
        max_workers: int | None = None,
        around: Callable[[], Any] | None = None,
        watch: bool = True,
        poll_interval: float = 1.0,
        queue_limit: int = 10_000,
        stop_timeout: float = 25.0,
        lease_margin: float | None = None,
        max_result_bytes: int = 1024 * 1024,
        rust_interop: bool = False,
    ) -> None:
        if not isinstance(collection, Collection):
            msg = f"collection must be a pymongo Collection, got {type(collection).__name__}"
            raise TypeError(msg)
        self._settings = settings = options_from(ConsumerOptions, locals())
        self._has_own_id = worker_id is not None
        self._router = func_or_router if isinstance(func_or_router, Router) else None
        self._function: Invocation | None = None
        if not isinstance(func_or_router, Router):
            self._function = invocation_of(func_or_router)
        self._store = TaskStore(collection)
        self._life = Lifecycle(
            Owner(
                kind="consumer",
                log=_log,
                id=lambda: self.worker_id,
                start=self.start,
                stop=self.stop,
                empty_report=StopReport(),
                stop_timeout_s=settings.stop_timeout_s,
                prepare=self._assemble,
                on_state=self._on_state,
                renew=self._renew,
            )
        )

    def _renew(self, life: Lifecycle[StopReport]) -> None:
        if life.state == "new" and not self._has_own_id:
            self._settings = attrs.evolve(self._settings, worker_id=new_worker_id())
        self._store.notice_fork()
        self._hub = EventHub()
        self._slots = Slots(self._settings.max_workers)
        self._queue = DelayQueue(self._settings.queue_limit)
        self._running = RunningAttempts(slots=self._slots, is_stopping=life.stop_asked.is_set)
        self._assembly: Assembly | None = None

    # -- life --------------------------------------------------------------------------------

    def start(self) -> None:
        """
        Start the threads and return at once, also while the database is away.

        Raises:
            RuntimeError: If it was started or stopped before.
            ValueError: If a router without functions was given.
        """
        if not self._life.start():
            self._life.refuse_start()

    def wait_started(self, timeout: float | None = None) -> bool:
        """
        Wait until the first pass over the database is done; return whether it is.

        Blocks up to *timeout* seconds (None: for ever, or until the consumer stops).
        """
        deadline_s = deadline_after(timeout)
        assembly = self._assembly
        if assembly is None:
            return False
        while not self._life.stop_asked.is_set():
            left_s = deadline_s - time.monotonic()
            if assembly.fetcher.wait_first_pass(min(max(left_s, 0.0), _SLICE_S)):
                return True
            if left_s <= 0:
                return False
        return False

    def stop(self, timeout: float | None = None) -> StopReport:
        """
        Take no more tasks, let running functions finish, store their outcomes, and end.

        Blocks up to *timeout* seconds (default: `stop_timeout`) and about one more,
        whatever the server or a function does. After three quarters of the time the
        functions are asked to end (``context.cancelled``, reason ``shutdown``); those
        that do not are abandoned: their threads go on, their results are not
        stored, and their tasks run again elsewhere once the lease ends, without
        having used up an attempt. Safe to call again, and from any thread; the
        second caller waits for the first. Called by a running task, or in a forked
        child, it returns an empty report at once (the former has the stop done by a thread).

        Raises:
            ComponentCrashed: If a component had failed for good; the stop was done nevertheless.
        """
        return self._life.stop(None if timeout is None else seconds(timeout, "timeout"))

    def request_stop(self) -> None:
        """
        Ask for the stop without waiting: `run_forever` then ends, and nothing more is claimed.

        Without `run_forever`, somebody still has to call `stop`.
        """
        self._life.request_stop()

    def run_forever(self) -> StopReport:
        """
        Start if needed, and work until SIGINT, SIGTERM, `request_stop` or a crash; then stop.

        In the main thread it takes the two signals over unless they are ignored, calls the
        handlers that were there (but for Python's own Ctrl-C; what they raise comes out
        after the stop), and puts them back at the end. A second
        signal releases what it can in one update and ends the process with 128 + signal.

        Raises:
            ComponentCrashed: If a component failed again and again; the failure is its cause.
            RuntimeError: If the consumer was stopped before.
        """
        return serve(self._life, self._give_back_everything)

    def run_until_idle(self, timeout: float | None = None) -> bool:
        """
        Start if needed, and work until no task is due for this consumer and none runs.

        Blocks up to *timeout* seconds (None: for ever). Returns whether it became idle; the
        consumer goes on running. Tasks that are due later (delayed, or waiting for a
        retry) do not count.

        Raises:
            ComponentCrashed: If a component failed again and again.
        """
        deadline_s = deadline_after(timeout)
        if self.state in {"new", "forked"}:
            self.start()
        assembly = self._assembly
        while assembly is not None and not self._life.stop_asked.is_set():
            if deadline_s <= time.monotonic():
                return False
            begun = self._running.begun
            if not self._wait_quiet(deadline_s):
                continue
            left_s = min(_SLICE_S, deadline_s - time.monotonic())
            # What the pass finds goes through the claimer's hands, and may not be for us. An
            # attempt that came and went meanwhile may have failed, and be due once more.
            if (
                assembly.fetcher.wait_pass(left_s)
                and self._wait_quiet(deadline_s)
                and self._running.begun == begun
            ):
                return True
        self._life.raise_crash()
        return False

    def _wait_quiet(self, deadline_s: float) -> bool:
        """
        Wait until nothing is due or under way here, or the stop was asked for.
        """
        while not self._life.stop_asked.is_set():
            if self._is_quiet():
                return True
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            if self._slots.wait_empty(min(_SLICE_S, left_s)):
                # What is due waits for the claimer, or an outcome for the server: a moment.
                self._life.stop_asked.wait(0.005)
        return False

    def _is_quiet(self) -> bool:
        # In the order in which a key moves on, so that none slips through between two checks.
        # What has just been sent may be due on the server, and not yet by our clock.
        is_idle = self._queue.is_idle(self._store.clock.lag_s)
        return is_idle and not self._slots.taken and self._running.count == 0

    # -- knowledge ---------------------------------------------------------------------------

    @property
    def worker_id(self) -> str:
        return self._settings.worker_id

    @property
    def state(self) -> State:
        """
        ``new``, ``running``, ``stopping``, ``stopped``, ``crashed``; ``forked`` in a child process.
        """
        return self._life.state

    @property
    def running(self) -> bool:
        """
        Whether this process runs it. False in a forked child: threads do not survive a fork.
        """
        return self.state == "running"

    @property
    def running_count(self) -> int:
        """
        How many attempts are held: running, or their outcome not stored yet.
        """
        return self._running.count

    @property
    def max_workers(self) -> int:
        """
        How many tasks may run at once. May be set at any time; 0 stops claiming.

        Setting it lower ends no running task. Raises TypeError or ValueError.
        """
        return self._slots.size

    @max_workers.setter
    def max_workers(self, value: int) -> None:
        self._slots.resize(check_max_workers(value))

    def health(self) -> Health:
        """
        Return a snapshot for monitoring. Never blocks on the database.
        """
        return take_health(
            state=self.state,
            crash=self._life.crash,
            assembly=self._assembly,
            slots=self._slots,
            queue=self._queue,
            running=self._running,
            store=self._store,
        )

    # -- ends --------------------------------------------------------------------------------

    def __enter__(self) -> Consumer:
        self._life.ensure_started()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._life.leave(error)

    def __repr__(self) -> str:
        return (
            f"Consumer({self._store.collection.full_name!r}, worker_id={self.worker_id!r}, "
            f"state={self.state!r})"
        )

    # -- called by the life cycle ------------------------------------------------------------

    def _assemble(self) -> Assembly:
        if self._router is not None:
            if not self._router.names:
                msg = "the router has no functions; this consumer would never run anything"
                raise ValueError(msg)
            self._router.freeze()
        needed = self._settings.max_workers + _OWN_CONNECTIONS
        self._life.warn_of_small_pool(self._store.max_pool_size, needed)
        assembly = Assembly(
            settings=self._settings,
            store=self._store,
            slots=self._slots,
            queue=self._queue,
            running=self._running,
            hub=self._hub,
            names=None if self._router is None else self._router.names,
            function_of=self._function_of,
            on_crash=self._life.on_crash,
        )
        self._assembly = assembly
        return assembly

    def _on_state(self, state: State) -> None:
        self._hub.publish(ConsumerStateChanged(state=state))
        if state in ENDS:
            self._hub.close()

    def _give_back_everything(self, timeout_s: float) -> None:
        if self._assembly is not None:
            self._assembly.give_back_everything(timeout_s)

    def _function_of(self, name: str | None) -> Invocation | None:
        return self._function if self._router is None else self._router.find(name)
