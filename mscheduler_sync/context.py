"""
What a function is told about its attempt, and what it may tell back.
"""

from __future__ import annotations

import contextvars
import datetime as dt
import threading
from collections.abc import Callable
from typing import Any, Final, Literal

import attrs

from mscheduler_sync.errors import LeaseLost

Reason = Literal["lease_lost", "cancel_requested", "shutdown", "options_changed", "timed_out"]

_current: Final[contextvars.ContextVar[TaskContext | None]] = contextvars.ContextVar(
    "mscheduler_sync_task", default=None
)


@attrs.define(eq=False, kw_only=True, slots=False)
class TaskContext:
    """
    One attempt, as its function sees it. Thread-safe.

    Pass it on to threads that the function starts itself; those do not inherit
    `current_task`.
    """

    #: The task's key.
    key: str
    #: The task's name, or None.
    name: str | None
    #: 1 for the first attempt, one more after each failed one.
    attempt: int
    #: The attempt's own id: a fencing token that outside systems may check.
    running_id: str
    worker_id: str
    #: When ``timeout=`` ends the attempt (aware, server clock), or None. An update of the
    #: task moves it.
    deadline: dt.datetime | None
    #: Set once the attempt should end early; `reason` says why.
    cancelled: threading.Event = attrs.field(init=False, factory=threading.Event)
    _report: Callable[[Any], None]
    _reason: Reason | None = attrs.field(init=False, default=None)

    @property
    def reason(self) -> Reason | None:
        """
        Why `cancelled` was set (the first reason), or None.
        """
        return self._reason

    def check(self) -> None:
        """
        Raise `LeaseLost` once the attempt should end early; otherwise do nothing.

        Left uncaught it ends the attempt in the way that fits the reason: failed after a lost
        lease or a time-out, else released without using an attempt.
        """
        if self.cancelled.is_set():
            raise LeaseLost(self.key, self.running_id, self._reason or "lease_lost")

    def progress(self, value: Any) -> None:
        """
        Note *value* (anything storable) as the task's progress; never blocks.

        It rides on the next heartbeat or outcome; the last one noted wins. Read it
        in `Producer.get(key).progress`, also in a later attempt.

        Raises:
            ValueError: If *value* cannot be stored or exceeds the size limit of a result.
        """
        self._report(value)

    def cancel(self, reason: Reason) -> None:
        """
        Called by the consumer: tell the function to end.
        """
        if self._reason is None:
            self._reason = reason
        self.cancelled.set()

    def __repr__(self) -> str:
        return f"TaskContext(key={self.key!r}, attempt={self.attempt}, reason={self._reason!r})"


def current_task() -> TaskContext | None:
    """
    Return the context of the attempt that the calling code runs in, or None outside of one.
    """
    return _current.get()


def enter(context: TaskContext) -> None:
    """
    Called by the executor, inside the attempt's own `contextvars` context.
    """
    _current.set(context)
