"""
One named background thread that repeats a step, and what is known of its health.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import ClassVar

import attrs

from mscheduler_sync._runtime import backoff
from mscheduler_sync._runtime.log import Log, LogThrottle
from mscheduler_sync.errors import StoreError

#: So many programming errors within so many seconds stop the consumer.
CRASH_COUNT, CRASH_WINDOW_S = 5, 60.0

CrashHandler = Callable[[str, BaseException], None]


@attrs.define
class ComponentHealth:
    """
    The last error of a component and how many it has had in a row.
    """

    last_error: str | None = None
    last_error_at_s: float | None = None
    failures_in_a_row: int = 0

    def note_error(self, error: BaseException) -> None:
        try:
            text = str(error)
        except Exception:  # noqa: BLE001 - the text of an error must not become another error
            text = "(its text could not be made)"
        # A store error's text names the driver's error and is free of documents.
        is_plain = isinstance(error, StoreError)
        self.last_error = (text if is_plain else f"{type(error).__name__}: {text}")[:500]
        self.last_error_at_s = time.monotonic()
        self.failures_in_a_row += 1

    def note_success(self) -> None:
        self.failures_in_a_row = 0


@attrs.define(eq=False, repr=False, kw_only=True)
class Service:
    """
    One named background thread: start once, stop once, never restart.

    Repeats `step` until it is told to stop. A database error is retried after a
    growing pause (1 s to `longest_pause_s`) and logged at most once per interval. Any other error
    is a bug: it is logged with its traceback and the step is run again; five within
    a minute are reported to *on_crash* and end the thread.

    Stopping before starting, or twice, is fine. Subclasses give the first three fields a default.
    """

    #: Short enough that all components work again within 10 s of a server's return.
    longest_pause_s: ClassVar[float] = 8.0

    #: In records, reports and health.
    component: str
    #: Begins the thread's name; a colon and the owner follow.
    thread_prefix: str
    log: Log
    #: Whose thread this is.
    owner_id: str
    _on_crash: CrashHandler
    health: ComponentHealth = attrs.field(init=False, factory=ComponentHealth)
    _log_throttle: LogThrottle = attrs.field(init=False, factory=lambda: LogThrottle(30.0))
    _stop: threading.Event = attrs.field(init=False, factory=threading.Event)
    _crashes: collections.deque[float] = attrs.field(
        init=False, factory=lambda: collections.deque(maxlen=CRASH_COUNT)
    )
    _thread: threading.Thread = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        name = f"{self.thread_prefix}:{self.owner_id}"
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def thread_name(self) -> str:
        return self._thread.name

    def request_stop(self) -> None:
        """
        Ask the thread to end. Never blocks; may be repeated, and may precede `start`.
        """
        self._stop.set()

    def join(self, timeout_s: float) -> bool:
        """
        Wait up to *timeout_s* seconds; return whether the thread has ended (or never began).
        """
        if self._thread.ident is not None:
            self._thread.join(min(max(0.0, timeout_s), threading.TIMEOUT_MAX))
        return not self._thread.is_alive()

    def step(self) -> None:
        """
        Do one round of work, waiting in it for what there is to do.
        """
        raise NotImplementedError

    def after_step(self) -> None:
        """
        Hook: a step has ended well.
        """
        self.health.note_success()

    def on_store_error(self, error: StoreError) -> None:
        """
        Hook: a step has failed for want of the database.
        """

    def pause(self, timeout_s: float) -> bool:
        """
        Wait up to *timeout_s* seconds; return whether the stop was asked for.
        """
        return self._stop.wait(max(0.0, timeout_s))

    def _main(self) -> None:
        while not self._stop.is_set():
            try:
                self.step()
                self.after_step()
            except StoreError as error:
                self._after_store_error(error)
            except BaseException as error:  # noqa: BLE001 - a thread must not die silently
                if self._after_bug(error):
                    return

    def _after_store_error(self, error: StoreError) -> None:
        self.health.note_error(error)
        if self._log_throttle.allows(type(error.__cause__)):
            self.log.warning(
                "the database is in trouble; will try again",
                event="store_trouble",
                worker_id=self.owner_id,
                component=self.component,
                error_type=type(error.__cause__ or error).__name__,
                error=str(error)[:500],
            )
        self.on_store_error(error)
        pause_s = backoff.delay_s(
            self.health.failures_in_a_row, first_s=1.0, cap_s=self.longest_pause_s
        )
        self.pause(backoff.jittered(pause_s))

    def _after_bug(self, error: BaseException) -> bool:
        """
        Log *error*; return whether the thread should end.
        """
        now_s = time.monotonic()
        self.health.note_error(error)
        self._crashes.append(now_s)
        self.log.error(
            "a component failed with a programming error",
            event="component_failed",
            exc_info=error,
            worker_id=self.owner_id,
            component=self.component,
        )
        full = len(self._crashes) == CRASH_COUNT
        if full and now_s - self._crashes[0] <= CRASH_WINDOW_S:
            self._on_crash(self.component, error)
            return True
        self.pause(0.1)
        return False
