"""
The consumer as the application sees it: life, waiting, events, health.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

import attrs
from pymongo.collection import Collection

from mscheduler_sync._runtime import living
from mscheduler_sync._runtime.delay_queue import DelayQueue
from mscheduler_sync._runtime.log import logger
from mscheduler_sync._runtime.signals import serve
from mscheduler_sync._runtime.slots import Slots
from mscheduler_sync._stages.assembly import Assembly, StopReport
from mscheduler_sync._stages.running import RunningAttempts
from mscheduler_sync._storage.store import TaskStore
from mscheduler_sync.errors import ComponentCrashed
from mscheduler_sync.events import (
    ConsumerStateChanged,
    Event,
    EventHub,
    Subscription,
    deadline_after,
)
from mscheduler_sync.health import Health, State, take_health
from mscheduler_sync.invocation import Invocation, invocation_of
from mscheduler_sync.router import Router
from mscheduler_sync.settings import (
    ConsumerSettings,
    check_max_workers,
    new_worker_id,
    seconds,
)

_log = logger("consumer")

#: Waits are cut into slices, so that Ctrl-C is seen on every system.
_SLICE_S: Final = 0.5
#: Threads of a consumer that talk to the server beside those of running attempts.
_OWN_CONNECTIONS: Final = 4


class Consumer:
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
        poll_interval: The pause between two looks without a change stream.
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
        settings = ConsumerSettings.checked(
            worker_id=worker_id,
            max_workers=max_workers,
            around=around,
            watch=watch,
            poll_interval=poll_interval,
            queue_limit=queue_limit,
            stop_timeout=stop_timeout,
            lease_margin=lease_margin,
            max_result_bytes=max_result_bytes,
            rust_interop=rust_interop,
        )
        self._settings = settings
        self._has_own_id = worker_id is not None
        self._pid = os.getpid()
        self._router = func_or_router if isinstance(func_or_router, Router) else None
        self._function: Invocation | None = None
        if not isinstance(func_or_router, Router):
            self._function = invocation_of(func_or_router)
        self._lock = threading.Lock()
        # Under _lock.
        self._state: State = "new"
        self._crash: ComponentCrashed | None = None
        self._report: StopReport | None = None
        self._being_stopped = False
        self._stop_asked = threading.Event()
        self._stopped = threading.Event()
        self._hub = EventHub()
        self._store = TaskStore(collection)
        self._slots = Slots(settings.max_workers)
        self._queue = DelayQueue(settings.queue_limit)
        self._running = RunningAttempts(self._slots, is_stopping=self._stop_asked.is_set)
        self._assembly: Assembly | None = None

    # -- life --------------------------------------------------------------------------------

    def start(self) -> None:
        """
        Start the threads and return at once, also while the database is away.

        Raises:
            RuntimeError: If it was started or stopped before.
            ValueError: If a router without functions was given.
        """
        if self._router is not None:
            if not self._router.names:
                msg = "the router has no functions; this consumer would never run anything"
                raise ValueError(msg)
            self._router.freeze()
        self._adopt_process()
        self._check_process()
        with self._lock:
            if self._state != "new":
                msg = f"this consumer is {self._state}; a consumer is started once"
                raise RuntimeError(msg)
            self._state = "running"
            self._assembly = Assembly(
                settings=self._settings,
                store=self._store,
                slots=self._slots,
                queue=self._queue,
                running=self._running,
                hub=self._hub,
                names=None if self._router is None else self._router.names,
                function_of=self._function_of,
                on_crash=self._on_crash,
            )
        living.add(self)
        self._warn_of_small_pool()
        self._assembly.start()
        self._say("running")

    def _warn_of_small_pool(self) -> None:
        """
        Threads that wait for a connection beat late; say so once, before it happens.
        """
        size = self._store.collection.database.client.options.pool_options.max_pool_size
        needed = self._settings.max_workers + _OWN_CONNECTIONS
        if size is not None and size < needed:
            _log.warning(
                "the client's connection pool is smaller than the threads that may need it",
                extra={
                    "event": "small_pool",
                    "worker_id": self.worker_id,
                    "max_pool_size": size,
                    "needed": needed,
                },
            )

    def _ensure_started(self) -> None:
        if not self.running:
            self.start()

    def wait_started(self, timeout: float | None = None) -> bool:
        """
        Wait until the first look at the database is done; return whether it is.

        Blocks up to *timeout* seconds (None: for ever, or until the consumer stops).
        """
        deadline_s = deadline_after(timeout)
        assembly = self._assembly
        if assembly is None:
            return False
        while not self._stop_asked.is_set():
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
        that do not are left behind: their threads go on, their results are not
        stored, and their tasks run again elsewhere once the lease ends, without
        having used up an attempt. Safe to call again, and from any thread; the
        second caller waits for the first. Called by a running task, or in a forked
        child, it returns an empty report at once (the former has the stop done by a thread).

        Raises:
            ComponentCrashed: If a component had failed for good; the stop was done nevertheless.
        """
        timeout_s = (
            self._settings.stop_timeout_s if timeout is None else seconds(timeout, "timeout")
        )
        if os.getpid() != self._pid:
            return StopReport()
        if self._assembly is not None and self._assembly.executor.is_running_here():
            # A task cannot wait for its own end, and perhaps nobody waits in run_forever.
            self.request_stop()
            self._stop_in_thread(timeout)
            return StopReport()
        with self._lock:
            state, assembly = self._state, self._assembly
            if state == "new":
                self._state = "stopped"
                self._report = StopReport()
                self._stopped.set()
            is_mine = (
                assembly is not None and not self._being_stopped and not self._stopped.is_set()
            )
            if is_mine:
                self._state = "stopping"
                self._being_stopped = True
        if is_mine and assembly is not None:
            self._stop_asked.set()
            self._stop_assembly(assembly, timeout_s)
        elif state == "new":
            self._hub.close()
        self._stopped.wait(min(timeout_s + 1.0, threading.TIMEOUT_MAX))
        if self._crash is not None:
            raise self._crash
        return self._report or StopReport()

    def _stop_assembly(self, assembly: Assembly, timeout_s: float) -> None:
        """
        Stop the threads. An interrupted stop (Ctrl-C) is not done: the next one goes on with it.
        """
        self._say("stopping")
        try:
            self._report = assembly.stop(timeout_s)
        except BaseException:
            with self._lock:
                self._being_stopped = False
            raise
        with self._lock:
            self._state = "crashed" if self._crash else "stopped"
        living.discard(self)
        self._say(self._state)
        self._hub.close()
        self._stopped.set()

    def request_stop(self) -> None:
        """
        Ask for the stop without waiting: `run_forever` then ends, and nothing more is claimed.

        Without `run_forever`, somebody still has to call `stop`.
        """
        self._stop_asked.set()
        assembly = self._assembly
        if assembly is not None:
            assembly.claimer.request_stop()

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
        return serve(
            start=self._ensure_started,
            asked=self._stop_asked,
            stop=self.stop,
            force=self._force,
            stopped=self._stopped,
        )

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
        self._check_process()
        if self.state == "new":
            self.start()
        assembly = self._assembly
        while assembly is not None and not self._stop_asked.is_set():
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
        self._raise_crash()
        return False

    def _wait_quiet(self, deadline_s: float) -> bool:
        """
        Wait until nothing is due or under way here, or the stop was asked for.
        """
        while not self._stop_asked.is_set():
            if self._is_quiet():
                return True
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            if self._slots.wait_empty(min(_SLICE_S, left_s)):
                # What is due waits for the claimer, or an outcome for the server: a moment.
                self._stop_asked.wait(0.005)
        return False

    def _is_quiet(self) -> bool:
        # In the order in which a key moves on, so that none slips through between two looks.
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
        if os.getpid() != self._pid and self._state != "new":
            return "forked"
        with self._lock:
            return self._state

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
            crash=self._crash,
            services=self._assembly.services if self._assembly is not None else [],
            watcher=self._assembly.watcher if self._assembly is not None else None,
            slots=self._slots,
            queue=self._queue,
            running=self._running,
            writer=self._assembly.writer if self._assembly is not None else None,
            candidates=self._assembly.candidates if self._assembly is not None else None,
            store=self._store,
        )

    # -- events ------------------------------------------------------------------------------

    def subscribe(self, *types: type[Event], buffer: int = 10_000) -> Subscription:
        """
        Return a subscription to the events of this consumer, of the given classes or all.

        Subscribe before the action whose events matter; nothing from then on is missed
        as long as no more than *buffer* events are left unread.

        Raises:
            TypeError, ValueError: If an argument is wrong.
        """
        return self._hub.subscribe(*types, buffer=buffer)

    def wait_for_event(
        self, predicate: Callable[[Event], object], timeout: float | None = None
    ) -> Event | None:
        """
        Return the first event from now on for which *predicate* is true.

        Blocks up to *timeout* seconds (None: for ever). Returns None after that, and when
        the consumer stops. To miss nothing between an action and the wait,
        `subscribe` before the action and use `Subscription.wait_for`.

        Raises:
            TypeError, ValueError: If *timeout* is wrong. And whatever *predicate* raises.
        """
        with self._hub.subscribe() as subscription:
            return subscription.wait_for(predicate, timeout)

    def _say(self, state: str) -> None:
        _log.info(
            "the consumer changed its state",
            extra={"event": f"consumer_{state}", "worker_id": self.worker_id},
        )
        self._hub.publish(ConsumerStateChanged(state=state))

    # -- ends --------------------------------------------------------------------------------

    def __enter__(self) -> Consumer:
        self._ensure_started()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        except ComponentCrashed:
            # An exception on its way out of the block is the more important one.
            if exc is None:
                raise

    def __repr__(self) -> str:
        return (
            f"Consumer({self._store.full_name!r}, worker_id={self.worker_id!r}, "
            f"state={self.state!r})"
        )

    def _on_crash(self, component: str, error: BaseException) -> None:
        crash = ComponentCrashed(component)
        crash.__cause__ = error
        with self._lock:
            if self._crash is None:
                self._crash = crash
        _log.critical(
            "the consumer stops: a component failed again and again",
            exc_info=error,
            extra={
                "event": "component_crashed",
                "worker_id": self.worker_id,
                "component": component,
            },
        )
        self.request_stop()
        # Nobody may be waiting in run_forever: end by ourselves, outside the failed thread.
        self._stop_in_thread(None)

    def _stop_in_thread(self, timeout: float | None) -> None:
        def stop() -> None:
            with contextlib.suppress(ComponentCrashed):
                self.stop(timeout)

        threading.Thread(target=stop, name=f"ms-stop:{self.worker_id}", daemon=True).start()

    def _raise_crash(self) -> None:
        if self._crash is not None:
            raise self._crash

    def _adopt_process(self) -> None:
        """
        One that was made before a fork and never started belongs to the process that starts it.
        """
        if os.getpid() == self._pid or self._state != "new":
            return
        self._pid = os.getpid()
        if not self._has_own_id:
            self._settings = attrs.evolve(self._settings, worker_id=new_worker_id())
        self._renew()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            msg = "this consumer belongs to the parent process; make one in this process"
            raise RuntimeError(msg)

    def become_child(self) -> None:
        """
        In a forked child: nothing running, no events to come.
        """
        self._renew()
        self._stopped.set()
        self._hub.close()
        self._assembly = None

    def _renew(self) -> None:
        """
        Fresh locks: those of before a fork may be held for ever.
        """
        self._lock = threading.Lock()
        self._stop_asked = threading.Event()
        self._stopped = threading.Event()
        self._slots = Slots(self._settings.max_workers)
        self._queue = DelayQueue(self._settings.queue_limit)
        self._running = RunningAttempts(self._slots, is_stopping=self._stop_asked.is_set)
        self._hub = EventHub()
        self._store.notice_fork()

    def _force(self, timeout_s: float) -> None:
        """
        Give back in one update what can be given back; at most *timeout_s* seconds.
        """
        assembly = self._assembly
        if assembly is not None:
            assembly.give_back_everything(timeout_s)

    def _function_of(self, name: str | None) -> Invocation | None:
        return self._function if self._router is None else self._router.find(name)
