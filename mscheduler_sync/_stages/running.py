"""
The attempts of this consumer, from the claim until nothing more is to be written for them.

The claimer starts them here, the executor says when their functions have ended, and the outcome
writer when nothing more is to be written for them.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

import attrs

from mscheduler_sync._runtime.log import logger
from mscheduler_sync._runtime.slots import Slots
from mscheduler_sync._stages.attempt import (
    Failed,
    HeldAttempt,
    Interrupted,
    Outcome,
    Released,
    Succeeded,
)
from mscheduler_sync._stages.executor import Executor
from mscheduler_sync._stages.heartbeat_scheduler import HeartbeatScheduler
from mscheduler_sync._stages.outcome import OutcomeWriter
from mscheduler_sync._stages.pending import Verdict

_log = logger("execute")


@attrs.define(eq=False, repr=False, kw_only=True)
class RunningAttempts:
    """
    Starts attempts, takes their outcomes, and knows which are there. Thread-safe.
    """

    _slots: Slots
    _is_stopping: Callable[[], bool]
    _lock: threading.Lock = attrs.field(init=False, factory=threading.Lock)
    # All under _lock.
    _held: dict[str, HeldAttempt] = attrs.field(init=False, factory=dict)
    _keys: collections.Counter[str] = attrs.field(init=False, factory=collections.Counter)
    _begun: int = attrs.field(init=False, default=0)
    _to_requeue: set[str] = attrs.field(init=False, factory=set)
    _stuck: dict[str, HeldAttempt] = attrs.field(init=False, factory=dict)
    _finished_in_stop: list[str] = attrs.field(init=False, factory=list)
    _released_in_stop: list[str] = attrs.field(init=False, factory=list)
    # Set once by `connect`.
    _executor: Executor = attrs.field(init=False)
    _heartbeats: HeartbeatScheduler = attrs.field(init=False)
    _writer: OutcomeWriter = attrs.field(init=False)
    #: `Intake.requeue`; see `holds`.
    _on_free: Callable[[str], None] = attrs.field(init=False)

    def connect(
        self,
        *,
        executor: Executor,
        heartbeats: HeartbeatScheduler,
        writer: OutcomeWriter,
        on_free: Callable[[str], None],
    ) -> None:
        self._executor, self._heartbeats, self._writer = executor, heartbeats, writer
        self._on_free = on_free

    # -- in order of an attempt's life -------------------------------------------------------

    def start(self, attempt: HeldAttempt) -> bool:
        """
        Run *attempt*, whose slot is taken; return False if it had to be released at once.
        """
        with self._lock:
            self._held[attempt.running_id] = attempt
            self._begun += 1
            self._keys[attempt.key] += 1
        self._heartbeats.add(attempt)
        try:
            self._executor.submit(attempt)
        except RuntimeError as error:
            # The interpreter is shutting down, or the system makes no more threads.
            _log.warning(
                "an attempt cannot be started here; it is released",
                event="not_started",
                **attempt.log_fields(),
                error=str(error),
            )
            self.ended(attempt, Released("shutdown"))
            return False
        return True

    def ended(self, attempt: HeldAttempt, outcome: Outcome) -> None:
        """
        The function has returned (or never began): free the slot and have the outcome stored.
        """
        with self._lock:
            first = not attempt.ended
            attempt.ended = True
            was_stuck = self._stuck.pop(attempt.running_id, None) is not None
            abandoned = attempt.abandoned
            if first and not abandoned and isinstance(outcome, Released) and self._is_stopping():
                self._released_in_stop.append(attempt.key)
        if first and not abandoned:
            self._writer.put(attempt, outcome)
        if not (was_stuck and attempt.slot_replaced):
            self._slots.give_back()

    def forget(self, attempt: HeldAttempt, outcome: Outcome, verdict: Verdict) -> None:
        """
        Nothing more will be written for *attempt*.
        """
        is_wanted = False
        with self._lock:
            if self._held.pop(attempt.running_id, None) is not None:
                self._keys[attempt.key] -= 1
                if not self._keys[attempt.key]:
                    del self._keys[attempt.key]
                    is_wanted = attempt.key in self._to_requeue
                    self._to_requeue.discard(attempt.key)
            has_ended = verdict == "stored" and isinstance(outcome, Succeeded | Failed)
            if has_ended and self._is_stopping():
                self._finished_in_stop.append(attempt.key)

        if is_wanted:
            self._on_free(attempt.key)

    def mark_stuck(self, attempt: HeldAttempt) -> None:
        """
        Store the time-out of a function that does not end, and replace its slot up to a limit.
        """
        with self._lock:
            if attempt.ended or attempt.abandoned:
                return
            attempt.ended = True
            attempt.slot_replaced = len(self._stuck) < self._slots.size
            self._stuck[attempt.running_id] = attempt
            count = len(self._stuck)
        _log.error(
            "a function does not end after its time-out",
            event="stuck",
            **attempt.log_fields(),
            stuck=count,
            slot_replaced=attempt.slot_replaced,
        )
        reason = (
            f"TimedOut: the function ran longer than {attempt.options.timeout} s and did not end"
        )
        self._writer.put(attempt, Failed(reason))
        if attempt.slot_replaced:
            self._slots.give_back()

    # -- knowledge ---------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """
        Attempts that are held: their outcome is not stored yet.
        """
        with self._lock:
            return len(self._held)

    @property
    def begun(self) -> int:
        """
        How many attempts there have been.
        """
        with self._lock:
            return self._begun

    def holds(self, key: str) -> bool:
        """
        Whether an attempt of the task *key* is here for which something is still to be written.

        If so, *on_free* is called with the key once that is so no more.
        """
        with self._lock:
            is_held = key in self._keys
            if is_held:
                self._to_requeue.add(key)
            return is_held

    def task_changed(self, key: str) -> None:
        """
        Somebody has changed the task *key*, perhaps cancelled it: its attempts ask the server.
        """
        with self._lock:
            if key not in self._keys:
                return
        for attempt in self._unended():
            if attempt.key == key:
                self._heartbeats.send_now(attempt)

    def stuck_keys(self) -> list[str]:
        """
        Tasks whose functions run on after their time-out.
        """
        with self._lock:
            return [attempt.key for attempt in self._stuck.values()]

    def oldest_age_s(self) -> float | None:
        return max((attempt.age_s() for attempt in self._unended()), default=None)

    def _unended(self) -> list[HeldAttempt]:
        with self._lock:
            return [attempt for attempt in self._held.values() if not attempt.ended]

    # -- stopping ----------------------------------------------------------------------------

    def ask_all_to_end(self) -> None:
        """
        Ask all running functions to end.
        """
        for attempt in self._unended():
            attempt.ask_to_end("shutdown", "the consumer stops")

    def abandon(self, outcome: Interrupted | Released) -> list[HeldAttempt]:
        """
        Abandon all functions that still run, with this *outcome*: what they return is not written.
        """
        with self._lock:
            running = [a for a in self._held.values() if not a.ended]
            for attempt in running:
                attempt.abandoned = True
        for attempt in running:
            self._writer.put(attempt, outcome)
        return running

    def stop_report(self) -> tuple[list[str], list[str]]:
        """
        Return the keys that finished and that were released since the stop began.
        """
        with self._lock:
            return list(self._finished_in_stop), list(self._released_in_stop)
