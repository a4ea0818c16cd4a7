"""
Keeps the leases of running attempts, and tells their functions when to end.

One thread watches the clocks of all attempts of the consumer; it makes no call
that could block. An attempt that outlives its first heartbeat interval gets a
thread of its own for the talk with the server, so that one call that hangs delays
no other attempt; such threads serve one attempt after another.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from mscheduler_sync._runtime.log import Complaints, logger
from mscheduler_sync._runtime.service import CrashHandler, PartHealth, Service
from mscheduler_sync._stages.attempt import HeldAttempt
from mscheduler_sync._storage import statements
from mscheduler_sync._storage.store import CALL_TIMEOUT_S, TaskStore
from mscheduler_sync.context import Reason
from mscheduler_sync.errors import InvalidTask, StoreError
from mscheduler_sync.model import decode_fields, read_options

_log = logger("heartbeat")

#: From so many entries on, those of attempts that have ended are thrown out.
_PRUNE_FROM: Final = 256
#: A beating thread without an attempt ends after this long, in seconds.
_IDLE_S: Final = 10.0
#: A function that was told of its time-out has this long to end, in seconds, and at most a
#: quarter of its lease, before it is given up.
STUCK_GRACE_S: Final = 10.0
#: The crate allows a heartbeat interval of 0.
_SHORTEST_INTERVAL_S: Final = 0.01


class Heartbeats(Service):
    """
    The watch over all attempts; see the module.

    *on_stuck* is called (once) for a function that does not end after its ``timeout=``.
    """

    def __init__(
        self,
        store: TaskStore,
        worker_id: str,
        *,
        on_stuck: Callable[[HeldAttempt], None],
        on_crash: CrashHandler,
    ) -> None:
        super().__init__("heartbeat", f"ms-beat:{worker_id}", _log, on_crash)
        self._store = store
        self._worker_id = worker_id
        self._on_stuck = on_stuck
        self._changed = threading.Condition()
        # All under _changed.
        self._agenda: list[tuple[float, int, HeldAttempt, Callable[[HeldAttempt], None]]] = []
        self._sequence = itertools.count()
        self._prune_at = _PRUNE_FROM
        self._waiting: list[HeldAttempt] = []
        self._idle_beaters = 0
        self._beaters: set[threading.Thread] = set()
        self._numbers = itertools.count(1)
        self._closing = False
        self.complaints: Final = Complaints(30.0)

    def add(self, attempt: HeldAttempt) -> None:
        """
        Watch *attempt* until it is settled or abandoned.
        """
        interval_s = self.interval_s(attempt)
        with self._changed:
            self._schedule(attempt.claimed_at_s + interval_s, attempt, self._begin_beating)
            if attempt.options.timeout is not None:
                self._schedule(
                    attempt.claimed_at_s + attempt.options.timeout, attempt, self._check_timeout
                )

    @staticmethod
    def interval_s(attempt: HeldAttempt) -> float:
        """
        Return the pause between beats: what the task says, but never above half its lease.
        """
        wanted_s = min(attempt.options.heartbeat, attempt.options.lease / 2)
        return max(_SHORTEST_INTERVAL_S, wanted_s)

    def request_stop(self) -> None:
        super().request_stop()
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        ended = super().join(timeout_s)
        with self._changed:
            beaters = list(self._beaters)
        for thread in beaters:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return ended and not any(thread.is_alive() for thread in beaters)

    def living_threads(self) -> list[str]:
        with self._changed:
            threads = [self._thread, *self._beaters]
        return [thread.name for thread in threads if thread.is_alive()]

    # -- the watch ---------------------------------------------------------------------------

    def step(self) -> None:
        with self._changed:
            while not self._closing:
                now_s = time.monotonic()
                if self._agenda and self._agenda[0][0] <= now_s:
                    break
                wait_s = self._agenda[0][0] - now_s if self._agenda else None
                self._changed.wait(None if wait_s is None else min(wait_s, threading.TIMEOUT_MAX))
            if self._closing:
                return
            _, _, attempt, action = heapq.heappop(self._agenda)
        if not (attempt.settled.is_set() or attempt.abandoned):
            action(attempt)

    def _schedule(
        self, at_s: float, attempt: HeldAttempt, action: Callable[[HeldAttempt], None]
    ) -> None:
        if len(self._agenda) >= self._prune_at:
            self._agenda = [entry for entry in self._agenda if not entry[2].settled.is_set()]
            heapq.heapify(self._agenda)
            self._prune_at = max(_PRUNE_FROM, 2 * len(self._agenda))
        item = (at_s, next(self._sequence), attempt, action)
        heapq.heappush(self._agenda, item)
        if self._agenda[0] is item:
            self._changed.notify_all()

    def _check_lease(self, attempt: HeldAttempt) -> None:
        """
        The lease is no longer believed: tell the function. Beats go on, for it may still be ours.
        """
        if time.monotonic() < attempt.held_until_s:
            with self._changed:
                self._schedule(attempt.held_until_s, attempt, self._check_lease)
            return
        if not attempt.ended.is_set():
            tell(attempt, "lease_lost", "the lease was not renewed in time")

    def _check_timeout(self, attempt: HeldAttempt) -> None:
        at_s = attempt.timeout_at_s
        if time.monotonic() < at_s:
            # Not started yet, or started later than it was claimed.
            again_s = min(at_s, time.monotonic() + 0.05) if at_s == float("inf") else at_s
            with self._changed:
                self._schedule(again_s, attempt, self._check_timeout)
            return
        if attempt.ended.is_set():
            return
        attempt.timed_out = True
        tell(attempt, "timed_out", "the function runs longer than its time-out")
        grace_s = min(STUCK_GRACE_S, attempt.options.lease / 4)
        with self._changed:
            self._schedule(time.monotonic() + grace_s, attempt, self._check_stuck)

    def _check_stuck(self, attempt: HeldAttempt) -> None:
        if not attempt.ended.is_set():
            self._on_stuck(attempt)

    def _begin_beating(self, attempt: HeldAttempt) -> None:
        # Only now: most attempts end before their first beat and need no entry for their lease.
        with self._changed:
            self._schedule(attempt.held_until_s, attempt, self._check_lease)
        self._assign(attempt)

    def _assign(self, attempt: HeldAttempt) -> None:
        """
        Give *attempt* a thread that beats for it.
        """
        with self._changed:
            self._waiting.append(attempt)
            if self._idle_beaters > 0:
                self._idle_beaters -= 1
                self._changed.notify_all()
                return
            thread = threading.Thread(
                target=self._beat_for_attempts,
                name=f"ms-beat:{self._worker_id}_{next(self._numbers)}",
                daemon=True,
            )
            self._beaters.add(thread)
        try:
            thread.start()
        except RuntimeError:
            # The interpreter or the system makes no more threads: the watch itself stands in.
            with self._changed:
                self._beaters.discard(thread)
                if attempt in self._waiting:
                    self._waiting.remove(attempt)
                again_s = time.monotonic() + self.interval_s(attempt)
                self._schedule(again_s, attempt, self._assign)
            Beat(self._store, attempt, self.health, self.complaints).once()

    # -- a beating thread --------------------------------------------------------------------

    def _beat_for_attempts(self) -> None:
        try:
            while (attempt := self._next_attempt()) is not None:
                beat = Beat(self._store, attempt, self.health, self.complaints)
                while self._should_beat(attempt):
                    if not self._beat_once(beat):
                        break
        finally:
            with self._changed:
                self._beaters.discard(threading.current_thread())

    def _next_attempt(self) -> HeldAttempt | None:
        with self._changed:
            if not self._waiting and not self._closing:
                self._idle_beaters += 1
                woken = self._changed.wait_for(lambda: self._waiting or self._closing, _IDLE_S)
                if not woken:
                    self._idle_beaters -= 1
                    return None
            if self._closing or not self._waiting:
                return None
            return self._waiting.pop(0)

    def _should_beat(self, attempt: HeldAttempt) -> bool:
        with self._changed:
            return not (
                self._closing
                or attempt.settled.is_set()
                or attempt.abandoned
                or (attempt.timed_out and not attempt.ended.is_set())
            )

    def _beat_once(self, beat: Beat) -> bool:
        """
        Beat, then wait for the next; return whether to go on. A crash gives up this attempt only.
        """
        attempt = beat.attempt
        try:
            going_on = beat.once()
        except BaseException as error:  # noqa: BLE001 - one attempt's beat must not end the others
            self.health.note_error(error)
            _log.error(
                "a heartbeat failed with a programming error; its attempt is given up",
                exc_info=error,
                extra={
                    "event": "heartbeat_crashed",
                    "worker_id": self._worker_id,
                    "task_key": attempt.key,
                    "running_id": attempt.running_id,
                },
            )
            tell(attempt, "lease_lost", "its heartbeat crashed")
            return False
        if going_on:
            attempt.settled.wait(beat.pause_s(self.interval_s(attempt)))
        return going_on


class Beat:
    """
    The talk with the server about one attempt.
    """

    def __init__(
        self,
        store: TaskStore,
        attempt: HeldAttempt,
        health: PartHealth,
        complaints: Complaints,
    ) -> None:
        self._store = store
        self._health = health
        self._complaints = complaints
        self.attempt: Final = attempt
        self._failing = False

    def pause_s(self, interval_s: float) -> float:
        """
        Return the pause before the next beat: shorter after a failed one.
        """
        return min(1.0, interval_s / 2) if self._failing else interval_s

    def once(self) -> bool:
        """
        Extend the lease once and learn what has changed; return whether to go on beating.
        """
        attempt = self.attempt
        interval_s = Heartbeats.interval_s(attempt)
        # At least a second: a tiny interval must not make every call time out.
        timeout_s = min(max(interval_s, 1.0), CALL_TIMEOUT_S)
        sent_at_s = time.monotonic()
        progress = attempt.take_progress()
        try:
            matched, _ = self._store.update(
                statements.heartbeat(attempt.key, attempt.running_id, progress=progress),
                timeout_s=timeout_s,
            )
            if matched:
                attempt.renewed(sent_at_s)
            found = self._store.find(statements.attempt_state([attempt.key]), timeout_s=timeout_s)
        except StoreError as error:
            self._on_trouble(error, progress)
            return True
        self._failing = False
        self._health.note_success()
        if attempt.settled.is_set():
            return False
        fields = decode_fields(found[0]) if found else {}
        if not matched and not _is_open(fields, attempt.running_id):
            if not attempt.ended.is_set():
                tell(attempt, "lease_lost", "another worker has taken the task over")
            # The outcome will be refused; writing it is still tried, so nothing is decided here.
            return False
        self._learn(fields)
        return True

    def _learn(self, fields: Mapping[str, Any]) -> None:
        attempt = self.attempt
        cancel = fields.get("cancel")
        if isinstance(cancel, Mapping) and cancel.get("time") is not None:
            tell(attempt, "cancel_requested", "the task was cancelled")
            return
        try:
            options = read_options(fields)
        except InvalidTask:
            # Somebody broke the document; the options known at the claim stay in force.
            return
        allowed = options.worker_ids
        if allowed and attempt.context.worker_id not in allowed:
            tell(attempt, "options_changed", "the task may no longer run on this worker")
        attempt.options = options

    def _on_trouble(self, error: StoreError, progress: object) -> None:
        self._failing = True
        self._health.note_error(error)
        if progress is not None:
            self.attempt.restore_progress(progress)
        if self._complaints.is_new(type(error.__cause__)):
            _log.warning(
                "a heartbeat could not be sent; will try again",
                extra={
                    "event": "heartbeat_failed",
                    "worker_id": self.attempt.context.worker_id,
                    "task_key": self.attempt.key,
                    "running_id": self.attempt.running_id,
                    "error": str(error)[:500],
                },
            )


def tell(attempt: HeldAttempt, reason: Reason, why: str) -> None:
    """
    Ask the function to end, once per attempt and reason.
    """
    if attempt.context.cancelled.is_set():
        return
    attempt.context.cancel(reason)
    _log.warning(
        "an attempt is asked to end",
        extra={
            "event": reason,
            "worker_id": attempt.context.worker_id,
            "task_key": attempt.key,
            "running_id": attempt.running_id,
            "why": why,
        },
    )


def _is_open(fields: Mapping[str, Any], running_id: str) -> bool:
    state = fields.get("task_state")
    elements = state.get("worker_states") if isinstance(state, Mapping) else None
    for element in elements if isinstance(elements, list) else []:
        if isinstance(element, Mapping) and element.get("running_id") == running_id:
            return element.get("success_time") is None and element.get("fail_time") is None
    return False
