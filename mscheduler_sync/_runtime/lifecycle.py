"""
The life of what has threads of its own: consumers, and nodes of the pool.

==========  =====================================================================================
new         Made; nothing runs. `Lifecycle.start` leads to *running*, `Lifecycle.stop` straight to
            *stopped*, whichever comes first, also while the start is still being prepared.
running     Its threads run. The first stop leads to *stopping*.
stopping    One caller stops the threads, the others wait for it. If it is interrupted (Ctrl-C),
            the next one goes on with the stop.
stopped     The stop is done; its report stays.
crashed     The same, after a component had failed for good: each stop raises the failure.
forked      In a child process, whatever had left *new* before the fork: no thread of it is here.
            What was still new is new in the child too, and may be started there.
==========  =====================================================================================

`Lifecycle.request_stop` moves nothing: it ends `run_forever`, which then stops. The stop after a
crash is done by a thread of its own, and so is one from inside the owner's threads, which cannot
wait for their own end. What still runs when the interpreter exits is stopped then.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final, Generic, Literal, NoReturn, Protocol, TypeVar

import attrs

from mscheduler_sync._runtime.log import Log
from mscheduler_sync.errors import ComponentCrashed, StoreError, StoreUnavailable

State = Literal["new", "running", "stopping", "stopped", "crashed", "forked"]
#: Nothing follows these.
ENDS: Final[frozenset[State]] = frozenset({"stopped", "crashed", "forked"})
Report = TypeVar("Report")
_Report_co = TypeVar("_Report_co", covariant=True)


class Threads(Protocol[_Report_co]):
    """
    What an owner starts and stops.
    """

    def start(self) -> None: ...

    def request_stop(self) -> None:
        """
        Begin nothing more: the stop was asked for. Must not block; may come again.
        """

    def stop(self, timeout_s: float) -> _Report_co:
        """
        End within *timeout_s* seconds, and tell how. Comes again if it was interrupted.
        """

    def is_running_here(self) -> bool:
        """
        Whether the calling thread is one that a stop waits for.
        """


@attrs.frozen(kw_only=True)
class Owner(Generic[Report]):
    """
    What a life cycle needs of the object whose life it is.
    """

    #: What it is called in errors and logs: "consumer".
    kind: str
    log: Log
    #: Return the id under which it logs.
    id: Callable[[], str]
    #: Its own word for a state.
    state_name: Callable[[State], str] = str
    #: Its methods as the application calls them; a subclass may have changed them.
    start: Callable[[], None]
    stop: Callable[[float | None], Report]
    #: What a stop reports that had nothing to do.
    empty_report: Report
    #: How long a stop may take by default.
    stop_timeout_s: float
    #: Make the threads, and do what comes before them. May block, and may fail: then it is still
    #: new.
    prepare: Callable[[], Threads[Report]]
    #: Publish the new state; the last event of an owner is that of a state in `ENDS`.
    on_state: Callable[[State], None]
    #: Make whatever takes part in threads or locks: at first, and again in a forked child.
    renew: Callable[[Lifecycle[Report]], None]


class Lifecycle(Generic[Report]):
    """
    The state of one owner, and the moves from one to the next. Safe from any thread.
    """

    def __init__(self, owner: Owner[Report]) -> None:
        self.owner = owner
        self._pid = os.getpid()
        # Changed under _lock.
        self._state: State = "new"
        self.crash: ComponentCrashed | None = None
        # Under _stopping.
        self._report = owner.empty_report
        # Under _starting. The last start that failed, and when, on the monotonic clock.
        self._threads: Threads[Report] | None = None
        self._failed_start: tuple[float, StoreError] | None = None
        self._renew()
        _lives.add(self)

    def _renew(self) -> None:
        self._lock = threading.Lock()
        #: Held during a start, and during a stop, by the one who does it.
        self._starting, self._stopping = threading.Lock(), threading.Lock()
        #: The stop was asked for, or has begun.
        self.stop_asked = threading.Event()
        self.owner.renew(self)

    @property
    def state(self) -> State:
        self._notice_fork()
        return self._state

    def raise_crash(self) -> None:
        if self.crash is not None:
            raise self.crash

    # -- starting ----------------------------------------------------------------------------

    def start(self) -> bool:
        """
        Start the owner, waiting for another who does so; return False if it runs already.

        Raises:
            RuntimeError: If it is neither new nor running. And whatever the owner raises.
        """
        asked_s = time.monotonic()
        self._notice_fork()
        with self._starting:
            if self._state == "running":
                return False
            if self._state != "new":
                self.refuse_start()
            self._threads = threads = self._prepare(asked_s)
            if not self._move("new", "running"):  # somebody has stopped it meanwhile
                self.refuse_start()
            try:
                threads.start()
            except BaseException:
                # Some of them may run already.
                with contextlib.suppress(ComponentCrashed):
                    self.stop()
                raise
        self._tell("running")
        return True

    def ensure_started(self) -> None:
        if self.state != "running":
            self.owner.start()

    def refuse_start(self) -> NoReturn:
        """
        Raise the RuntimeError of a start that comes too late.
        """
        kind, state = self.owner.kind, self.owner.state_name(self._state)
        msg = f"this {kind} is {state}; a {kind} is started once"
        if self._state == "forked":
            msg = f"this {kind} belongs to the parent process; make one in this process"
        raise RuntimeError(msg)

    def _prepare(self, asked_s: float) -> Threads[Report]:
        if self._failed_start is not None and self._failed_start[0] >= asked_s:
            # It failed while this caller waited for its turn: he is not made to wait again.
            raise StoreUnavailable(str(self._failed_start[1])) from self._failed_start[1]
        try:
            return self.owner.prepare()
        except StoreError as error:
            self._failed_start = (time.monotonic(), error)
            raise

    def warn_of_small_pool(self, max_pool_size: float | None, needed: int) -> None:
        """
        Threads that wait for a connection are late with leases; say so once, before it happens.
        """
        if max_pool_size is not None and max_pool_size < needed:
            self.owner.log.warning(
                "the client's connection pool is smaller than the threads that may need it",
                event="small_pool",
                worker_id=self.owner.id(),
                max_pool_size=max_pool_size,
                needed=needed,
            )

    # -- stopping ----------------------------------------------------------------------------

    def request_stop(self) -> None:
        """
        Ask for the stop without waiting.
        """
        self.stop_asked.set()
        if self._threads is not None:
            self._threads.request_stop()

    def stop(self, timeout_s: float | None = None) -> Report:
        """
        Stop the owner and return its report; blocks up to *timeout_s* seconds and one more.

        The second caller waits for the first. From inside the owner, and in a forked child, it
        returns at once, with a report of nothing.

        Raises:
            ComponentCrashed: If a component had failed for good; the stop is done nevertheless.
        """
        if timeout_s is None:
            timeout_s = self.owner.stop_timeout_s
        deadline_s = time.monotonic() + timeout_s
        if self.state == "forked":
            return self.owner.empty_report
        if self._threads is not None and self._threads.is_running_here():
            self.stop_in_thread(timeout_s)
            return self.owner.empty_report
        if self._move("new", "stopped"):
            self.stop_asked.set()
            self._tell("stopped")
        elif self._stopping.acquire(timeout=min(timeout_s + 1.0, threading.TIMEOUT_MAX)):
            try:
                if self._threads is not None and self._state in {"running", "stopping"}:
                    self._stop(self._threads, deadline_s)
            finally:
                self._stopping.release()
        self.raise_crash()
        return self._report

    def _stop(self, threads: Threads[Report], deadline_s: float) -> None:
        is_first = self._move("running", "stopping")
        self.request_stop()
        if is_first:
            self._tell("stopping")
        self._report = threads.stop(max(0.0, deadline_s - time.monotonic()))
        with self._lock:
            self._state = "stopped" if self.crash is None else "crashed"
        self._tell(self._state)

    def stop_in_thread(self, timeout_s: float | None = None) -> None:
        """
        Have a thread do it: the caller must not wait, and perhaps nobody is in `run_forever`.
        """

        def stop() -> None:
            with contextlib.suppress(ComponentCrashed):
                self.owner.stop(timeout_s)

        self.request_stop()
        name = f"ms-stop:{self.owner.id()}"
        threading.Thread(target=stop, name=name, daemon=True).start()

    def on_crash(self, component: str, error: BaseException) -> None:
        """
        A component has failed for good: the owner ends, outside of the failed thread.
        """
        crash = ComponentCrashed(component)
        crash.__cause__ = error
        with self._lock:
            self.crash = self.crash or crash
        self.owner.log.critical(
            "a component failed again and again: all of them are stopped",
            event="component_crashed",
            exc_info=error,
            worker_id=self.owner.id(),
            component=component,
        )
        self.stop_in_thread()

    def leave(self, error: BaseException | None) -> None:
        """
        Stop at the end of a ``with`` block that *error* is leaving, if any.
        """
        try:
            self.owner.stop(None)
        except ComponentCrashed:
            # An exception on its way out of the block is the more important one.
            if error is None:
                raise

    def _move(self, old: State, new: State) -> bool:
        with self._lock:
            if self._state != old:
                return False
            self._state = new
            return True

    def _tell(self, state: State) -> None:
        owner = self.owner
        owner.log.info(
            "the state has changed",
            event=f"{owner.kind}_{owner.state_name(state)}",
            worker_id=owner.id(),
        )
        owner.on_state(state)

    def _notice_fork(self) -> None:
        """
        In a forked child: the threads are not here, and may have left locks held for ever.
        """
        if os.getpid() == self._pid:
            return
        self._pid = os.getpid()
        if self._state != "new":
            self._state, self._threads = "forked", None
        self._renew()
        if self._state == "forked":
            self.stop_asked.set()
            self.owner.on_state("forked")


_lives: Final[weakref.WeakSet[Lifecycle[Any]]] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for life in list(_lives):
        life._notice_fork()


def _stop_all() -> None:
    """
    At interpreter exit: an orderly stop of whatever still runs in this process.
    """
    for life in list(_lives):
        if life.state in {"running", "stopping"}:
            with contextlib.suppress(ComponentCrashed):
                life.owner.stop(None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

# Best before the pools of concurrent.futures are joined: functions can still be told to end,
# outcomes be stored, and nothing is claimed that cannot run any more. That hook has no public
# name; without it the stop comes after the join.
_register_early = getattr(threading, "_register_atexit", None)
if _register_early is not None:
    _register_early(_stop_all)
atexit.register(_stop_all)
