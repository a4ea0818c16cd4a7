"""
An attempt that this process holds, and how it ended: what the stages after the claim hand on.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Final, Literal

import attrs
from bson.raw_bson import RawBSONDocument

from mscheduler_sync._runtime.log import logger
from mscheduler_sync._storage import codec
from mscheduler_sync.context import Reason, TaskContext
from mscheduler_sync.model import TaskOptions

_log = logger("heartbeat")

#: The crate allows a heartbeat interval of 0.
_SHORTEST_INTERVAL_S: Final = 0.01
#: The part of a lease that is not believed: clocks and their steps (DESIGN: settable).
_MARGIN_SHARE, _MARGIN_LEAST_S, _MARGIN_MOST_SHARE = 0.1, 2.0, 0.25


def lease_margin_s(lease_s: float, setting_s: float | None = None) -> float:
    """
    Return how long before its end a lease is no longer believed, in seconds.

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
    A stop leaves the running function behind; once the lease ends the attempt is not counted.
    """


Outcome = Succeeded | Failed | Released | Snoozed | Interrupted


class HeldAttempt:
    """
    One attempt of this process, from the claim until its outcome is stored.

    Written by: the claimer (making it), the executor's thread (`ended`), its
    heartbeat (`held_until_s`, `options`), the function through its context (`set_progress`).
    """

    def __init__(
        self,
        *,
        key: str,
        name: str | None,
        running_id: str,
        worker_id: str,
        number: int,
        hint: object,
        options: TaskOptions,
        document: RawBSONDocument,
        claimed_at_s: float,
        margin_s: float | None,
        value_limit_bytes: int,
        codec_options: Any,
        deadline: Any,
    ) -> None:
        self.key: Final = key
        self.name: Final = name
        self.running_id: Final = running_id
        self.number: Final = number
        #: The claim's, for the store.
        self.hint: Final = hint
        self.options = options
        self.document: RawBSONDocument | None = document
        self.codec_options: Final = codec_options
        self.claimed_at_s: Final = claimed_at_s
        self._margin_setting_s = margin_s
        self._value_limit_bytes = value_limit_bytes
        #: Until when the lease is believed, on the monotonic clock.
        self.held_until_s = claimed_at_s + options.lease - lease_margin_s(options.lease, margin_s)
        #: Set once the executor has an outcome.
        self.ended = False
        #: Wakes whoever sends its heartbeats: there may be something to learn, or nothing to do.
        self.wake: Final = threading.Event()
        #: Nothing more is to be written for it.
        self.settled = False
        #: A stop has given it up: a late outcome is not written.
        self.abandoned = False
        #: The executor's thread has been replaced by another slot.
        self.slot_replaced = False
        self.started_at_s: float | None = None
        self.timed_out = False
        self._progress_lock = threading.Lock()
        self._progress: object = None
        self.context: Final = TaskContext(
            key=key,
            name=name,
            attempt=number,
            running_id=running_id,
            worker_id=worker_id,
            deadline=deadline,
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
        lease_s = self.options.lease
        believed_s = sent_at_s + lease_s - lease_margin_s(lease_s, self._margin_setting_s)
        self.held_until_s = max(self.held_until_s, believed_s)

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

    def log_fields(self, event: str, **more: object) -> dict[str, Any]:
        """
        Return what a record of the *event* says of this attempt.
        """
        return {
            "event": event,
            "worker_id": self.context.worker_id,
            "task_key": self.key,
            "running_id": self.running_id,
            **more,
        }

    def ask_to_end(self, reason: Reason, why: str) -> None:
        """
        Ask the function to end, unless it was asked before.
        """
        if self.context.cancelled.is_set():
            return
        self.context.cancel(reason)
        _log.warning("an attempt is asked to end", extra=self.log_fields(reason, why=why))

    def age_s(self) -> float:
        return time.monotonic() - self.claimed_at_s
