"""
When heartbeats are sent, from the claim until the outcome is stored, and when time-outs are over.

One thread watches the clocks of all attempts of the consumer; it makes no call
that could block. An attempt that outlives its first heartbeat interval gets a
thread of its own that sends its heartbeats, so that one call that hangs delays
no other attempt; such threads serve one attempt after another.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Final

import attrs

from mscheduler_sync._runtime.log import Log, logger
from mscheduler_sync._runtime.service import Service
from mscheduler_sync._stages.attempt import HeldAttempt
from mscheduler_sync._stages.heartbeat import Heartbeat
from mscheduler_sync._storage.store import TaskStore

_log = logger("heartbeat")

#: From so many entries on, those of attempts that have ended are thrown out.
_PRUNE_FROM: Final = 256
#: A sending thread without an attempt ends after this long, in seconds.
_IDLE_S: Final = 10.0
#: A function that was told of its time-out has this long to end, in seconds, and at most a
#: quarter of its lease, before it is given up.
STUCK_GRACE_S: Final = 10.0

_Entry = tuple[float, int, HeldAttempt, Callable[[HeldAttempt], None]]


@attrs.define(eq=False, repr=False, kw_only=True)
class HeartbeatScheduler(Service):
    """
    The scheduler's thread, and those that send; see the module.

    *on_stuck* is called (once) for a function that does not end after its ``timeout=``.
    """

    component: str = "heartbeat"
    thread_prefix: str = "ms-heartbeat"
    log: Log = _log
    _store: TaskStore
    #: `RunningAttempts.mark_stuck`.
    _on_stuck: Callable[[HeldAttempt], None]
    _changed: threading.Condition = attrs.field(init=False, factory=threading.Condition)
    # All under _changed.
    _agenda: list[_Entry] = attrs.field(init=False, factory=list)
    _sequence: Iterator[int] = attrs.field(init=False, factory=itertools.count)
    _prune_at: int = attrs.field(init=False, default=_PRUNE_FROM)
    _waiting: list[HeldAttempt] = attrs.field(init=False, factory=list)
    _sending: weakref.WeakSet[HeldAttempt] = attrs.field(init=False, factory=weakref.WeakSet)
    _failing: set[HeldAttempt] = attrs.field(init=False, factory=set)
    _senders: set[threading.Thread] = attrs.field(init=False, factory=set)
    _idle_senders: int = attrs.field(init=False, default=0)
    _numbers: Iterator[int] = attrs.field(init=False, factory=lambda: itertools.count(1))
    _closing: bool = attrs.field(init=False, default=False)

    def add(self, attempt: HeldAttempt) -> None:
        """
        Watch *attempt* until it is done or abandoned.
        """
        claimed_s = attempt.claimed_at_s
        self._schedule(claimed_s + attempt.heartbeat_interval_s, attempt, self._begin_sending)
        if attempt.options.timeout is not None:
            self._schedule(claimed_s + attempt.options.timeout, attempt, self._check_timeout)

    def send_now(self, attempt: HeldAttempt) -> None:
        """
        Ask the server about *attempt* at once: its task was changed by somebody. Never blocks.
        """
        attempt.wake.set()
        with self._changed:
            if attempt not in self._sending:
                self._schedule(time.monotonic(), attempt, self._begin_sending)

    def request_stop(self) -> None:
        super().request_stop()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            # Functions that a stop has abandoned would keep their senders waiting.
            for attempt in self._sending:
                attempt.wake.set()

    def join(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        ended = super().join(timeout_s)
        with self._changed:
            senders = list(self._senders)
        for thread in senders:
            left_s = max(0.0, deadline_s - time.monotonic())
            thread.join(min(left_s, threading.TIMEOUT_MAX))
        return ended and not any(thread.is_alive() for thread in senders)

    def living_threads(self) -> list[str]:
        with self._changed:
            threads = [self._thread, *self._senders]
        return [thread.name for thread in threads if thread.is_alive()]

    # -- the thread --------------------------------------------------------------------------

    def step(self) -> None:
        with self._changed:
            while not self._closing:
                next_s = self._agenda[0][0] if self._agenda else float("inf")
                wait_s = next_s - time.monotonic()
                if wait_s <= 0:
                    break
                self._changed.wait(min(wait_s, threading.TIMEOUT_MAX))
            if self._closing:
                return
            _, _, attempt, action = heapq.heappop(self._agenda)
        if not (attempt.done or attempt.abandoned):
            action(attempt)

    def _schedule(
        self, at_s: float, attempt: HeldAttempt, action: Callable[[HeldAttempt], None]
    ) -> None:
        with self._changed:
            if len(self._agenda) >= self._prune_at:
                self._agenda = [entry for entry in self._agenda if not entry[2].done]
                heapq.heapify(self._agenda)
                self._prune_at = max(_PRUNE_FROM, 2 * len(self._agenda))
            item = (at_s, next(self._sequence), attempt, action)
            heapq.heappush(self._agenda, item)
            if self._agenda[0] is item:
                self._changed.notify_all()

    def _check_lease(self, attempt: HeldAttempt) -> None:
        """
        The lease is no longer trusted: tell the function. It may still be ours: sending goes on.
        """
        if time.monotonic() < attempt.trusted_until_s:
            self._schedule(attempt.trusted_until_s, attempt, self._check_lease)
        elif not attempt.ended:
            attempt.ask_to_end("lease_lost", "the lease was not renewed in time")

    def _check_timeout(self, attempt: HeldAttempt) -> None:
        if attempt.timed_out or attempt.options.timeout is None:
            return
        at_s = attempt.timeout_at_s
        if time.monotonic() < at_s:
            # Not started yet, or started later than it was claimed.
            again_s = min(at_s, time.monotonic() + 0.05) if at_s == float("inf") else at_s
            self._schedule(again_s, attempt, self._check_timeout)
        elif not attempt.ended:
            attempt.timed_out = True
            attempt.ask_to_end("timed_out", "the function runs longer than its time-out")
            grace_s = min(STUCK_GRACE_S, attempt.options.lease / 4)
            self._schedule(time.monotonic() + grace_s, attempt, self._check_stuck)

    def _check_stuck(self, attempt: HeldAttempt) -> None:
        if not attempt.ended:
            self._on_stuck(attempt)

    def _begin_sending(self, attempt: HeldAttempt) -> None:
        with self._changed:
            if attempt in self._sending:
                return
            self._sending.add(attempt)
            # Only now: most attempts end before their first heartbeat and need no such entry.
            self._schedule(attempt.trusted_until_s, attempt, self._check_lease)
        self._assign(attempt)

    def _assign(self, attempt: HeldAttempt) -> None:
        """
        Give *attempt* a thread that sends its heartbeats.
        """
        with self._changed:
            self._waiting.append(attempt)
            if self._idle_senders > 0:
                self._idle_senders -= 1
                self._changed.notify_all()
                return
            thread = threading.Thread(
                target=self._send_for_attempts,
                name=f"{self.thread_name}_{next(self._numbers)}",
                daemon=True,
            )
            self._senders.add(thread)
        try:
            thread.start()
        except RuntimeError:
            # The interpreter or the system makes no more threads: the scheduler's own stands in.
            with self._changed:
                self._senders.discard(thread)
                if attempt in self._waiting:
                    self._waiting.remove(attempt)
            self._schedule(time.monotonic() + attempt.heartbeat_interval_s, attempt, self._assign)
            self._heartbeat_of(attempt).send()

    def _heartbeat_of(self, attempt: HeldAttempt) -> Heartbeat:
        def check_timeout(attempt: HeldAttempt) -> None:
            self._schedule(time.monotonic(), attempt, self._check_timeout)

        return Heartbeat(
            store=self._store,
            attempt=attempt,
            health=self.health,
            log_throttle=self._log_throttle,
            on_new_timeout=check_timeout,
        )

    # -- a sending thread --------------------------------------------------------------------

    def _send_for_attempts(self) -> None:
        try:
            while (attempt := self._next_attempt()) is not None:
                heartbeat = self._heartbeat_of(attempt)
                while self._needs_heartbeat(attempt) and self._send(heartbeat):
                    # Sooner after one that did not get through.
                    pause_s = attempt.heartbeat_interval_s
                    attempt.wake.wait(min(1.0, pause_s / 2) if heartbeat.is_failing else pause_s)
                    attempt.wake.clear()
                self._set_failing(attempt, failing=False)
        finally:
            with self._changed:
                self._senders.discard(threading.current_thread())

    def _next_attempt(self) -> HeldAttempt | None:
        with self._changed:
            if not self._waiting and not self._closing:
                self._idle_senders += 1
                woken = self._changed.wait_for(lambda: self._waiting or self._closing, _IDLE_S)
                if not woken:
                    self._idle_senders -= 1
                    return None
            if self._closing or not self._waiting:
                return None
            return self._waiting.pop(0)

    def _needs_heartbeat(self, attempt: HeldAttempt) -> bool:
        with self._changed:
            return not (
                self._closing
                or attempt.done
                or attempt.abandoned
                or (attempt.timed_out and not attempt.ended)
            )

    def _send(self, heartbeat: Heartbeat) -> bool:
        """
        Send one; return whether to go on. A bug in it gives up this attempt only.
        """
        attempt = heartbeat.attempt
        try:
            going_on = heartbeat.send()
            self._set_failing(attempt, failing=heartbeat.is_failing)
        except BaseException as error:  # noqa: BLE001 - one attempt's bug must not end the others
            self.health.note_error(error)
            _log.error(
                "a heartbeat failed with a programming error; its attempt is given up",
                event="heartbeat_crashed",
                exc_info=error,
                **attempt.log_fields(),
            )
            attempt.ask_to_end("lease_lost", "its heartbeat crashed")
            return False
        return going_on

    # -- health ------------------------------------------------------------------------------

    def _set_failing(self, attempt: HeldAttempt, *, failing: bool) -> None:
        """
        The component has as many failures as there are attempts whose last heartbeat failed.
        """
        with self._changed:
            if failing:
                self._failing.add(attempt)
            else:
                self._failing.discard(attempt)
            self.health.failures_in_a_row = len(self._failing)

    def after_step(self) -> None:
        """
        The scheduler itself talks to nobody: sending keeps the health.
        """
