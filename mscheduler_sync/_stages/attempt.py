"""
An attempt that this process holds, and how it ended: what the stages after the claim hand on.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from typing import Any, Final, Literal

import attrs
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument

from mscheduler_sync._runtime.log import logger
from mscheduler_sync._storage import codec
from mscheduler_sync.context import Reason, TaskContext
from mscheduler_sync.model import TaskOptions

_log = logger("heartbeat")

#: The crate allows a heartbeat interval of 0.
_SHORTEST_INTERVAL_S: Final = 0.01
#: The share of a lease, at its end, that is not trusted: clocks differ, and jump at a failover.
_MARGIN_SHARE, _MARGIN_LEAST_S, _MARGIN_MOST_SHARE = 0.1, 2.0, 0.25


def lease_margin_s(lease_s: float, setting_s: float | None = None) -> float:
    """
    Return how long before its end a lease is no longer trusted, in seconds.

    A tenth of it, at least 2 s, never above a quarter; *setting_s* replaces the tenth and the 2 s.
    """
    wanted_s = max(lease_s * _MARGIN_SHARE, _MARGIN_LEAST_S) if setting_s is None else setting_s
    return min(wanted_s, lease_s * _MARGIN_MOST_SHARE)


@attrs.frozen
class Succeeded:
    """
    The function returned; *value* is safe to store and takes *size_bytes*.
    """

    value: object
    size_bytes: int


@attrs.frozen
class Failed:
    """
    The function raised, timed out, or returned what cannot be stored.
    """

    reason: str
    #: None: the task's own retry delay.
    delay_s: float | None = None
    for_good: bool = False


@attrs.frozen
class Released:
    """
    The attempt is given back, unused.
    """

    why: Literal["shutdown", "cancel_requested", "options_changed", "late"]


@attrs.frozen
class Snoozed:
    """
    The attempt is given back, unused; the task starts later.
    """

    delay_s: float


@attrs.frozen
class Interrupted:
    """
    A stop abandons the running function; once the lease ends the attempt is not counted.
    """


Outcome = Succeeded | Failed | Released | Snoozed | Interrupted


@attrs.define(eq=False, repr=False, kw_only=True)
class HeldAttempt:
    """
    One attempt of this process, from the claim until its outcome is stored.

    Written by: the claimer (making it), the executor's thread (`ended`), its
    heartbeat (`trusted_until_s`, `options`), the function through its context (`set_progress`).
    """

    key: str
    name: str | None
    running_id: str
    worker_id: str
    number: int
    #: The claim's, for the store.
    hint: object
    options: TaskOptions
    document: RawBSONDocument | None
    codec_options: CodecOptions[Any]
    claimed_at_s: float
    _margin_s: float | None
    _value_limit_bytes: int
    _deadline: dt.datetime | None
    context: TaskContext = attrs.field(init=False)
    #: Until when the lease is trusted, on the monotonic clock.
    trusted_until_s: float = attrs.field(init=False)
    #: Set once the executor has an outcome.
    ended: bool = attrs.field(init=False, default=False)
    #: Wakes whoever sends its heartbeats: there may be something to learn, or nothing to do.
    wake: threading.Event = attrs.field(init=False, factory=threading.Event)
    #: Nothing more is to be written for it.
    done: bool = attrs.field(init=False, default=False)
    #: A stop has given it up: a late outcome is not written.
    abandoned: bool = attrs.field(init=False, default=False)
    #: The executor's thread has been replaced by another slot.
    slot_replaced: bool = attrs.field(init=False, default=False)
    started_at_s: float | None = attrs.field(init=False, default=None)
    timed_out: bool = attrs.field(init=False, default=False)
    _progress_lock: threading.Lock = attrs.field(init=False, factory=threading.Lock)
    # Under _progress_lock.
    _progress: object = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self.trusted_until_s = self._trusted_until_s(self.claimed_at_s)
        self.context = TaskContext(
            key=self.key,
            name=self.name,
            attempt=self.number,
            running_id=self.running_id,
            worker_id=self.worker_id,
            deadline=self._deadline,
            report=self.set_progress,
        )

    @property
    def heartbeat_interval_s(self) -> float:
        """
        The pause between heartbeats: what the task says, but never above half its lease.
        """
        wanted_s = min(self.options.heartbeat, self.options.lease / 2)
        return max(_SHORTEST_INTERVAL_S, wanted_s)

    @property
    def timeout_at_s(self) -> float:
        """
        When ``timeout=`` ends the attempt, on the monotonic clock, or infinity.
        """
        if self.options.timeout is None or self.started_at_s is None:
            return float("inf")
        return self.started_at_s + self.options.timeout

    def renewed(self, sent_at_s: float) -> None:
        """
        A heartbeat that was first sent at *sent_at_s* has been acknowledged.
        """
        self.trusted_until_s = max(self.trusted_until_s, self._trusted_until_s(sent_at_s))

    def _trusted_until_s(self, sent_at_s: float) -> float:
        lease_s = self.options.lease
        return sent_at_s + lease_s - lease_margin_s(lease_s, self._margin_s)

    def set_progress(self, value: object) -> None:
        frozen = codec.freeze(
            value, self.codec_options, what="progress", limit_bytes=self._value_limit_bytes
        )
        with self._progress_lock:
            self._progress = frozen.value

    def take_progress(self) -> object:
        """
        Return the progress that was not yet written, or None.
        """
        with self._progress_lock:
            value, self._progress = self._progress, None
            return value

    def restore_progress(self, value: object) -> None:
        """
        Put back what `take_progress` gave and could not be written, unless there is newer.
        """
        with self._progress_lock:
            if self._progress is None:
                self._progress = value

    def log_fields(self) -> dict[str, str]:
        """
        Return the fields that tell in a record which attempt is meant.
        """
        return {
            "worker_id": self.worker_id,
            "task_key": self.key,
            "running_id": self.running_id,
        }

    def ask_to_end(self, reason: Reason, why: str) -> None:
        """
        Ask the function to end, unless it was asked before.
        """
        if self.context.cancelled.is_set():
            return
        self.context.cancel(reason)
        _log.warning("an attempt is asked to end", event=reason, **self.log_fields(), why=why)

    def age_s(self) -> float:
        return time.monotonic() - self.claimed_at_s
