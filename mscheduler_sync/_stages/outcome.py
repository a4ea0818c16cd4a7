"""
Stores how attempts ended, together, fenced, again and again until it is known; then tells.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import attrs

from mscheduler_sync._runtime import failure
from mscheduler_sync._runtime.crash_points import reach
from mscheduler_sync._runtime.log import logger
from mscheduler_sync._runtime.service import CrashHandler, Service
from mscheduler_sync._stages.attempt import (
    Failed,
    HeldAttempt,
    Interrupted,
    Outcome,
    Released,
    Snoozed,
    Succeeded,
)
from mscheduler_sync._stages.pending import (
    Pending,
    Verdict,
    groups_of,
    retry_delay_s,
    store_outcomes,
    verdict_on,
)
from mscheduler_sync._storage import statements
from mscheduler_sync._storage.store import TaskStore
from mscheduler_sync.errors import InvalidTask, StoreRejected, StoreUnavailable
from mscheduler_sync.events import (
    AttemptLost,
    AttemptReleased,
    EventHub,
    MarkSuccess,
    TaskExecuteResult,
    WaitOccupy,
)
from mscheduler_sync.model import Attempt, decode_fields, read_attempts

_log = logger("outcome")

#: While other attempts run, an outcome waits this long for company, in seconds.
GATHER_S: Final = 0.005
_MAX_BATCH: Final = 100


class OutcomeWriter(Service):
    """
    The outcome writer's thread; see the module.

    *on_settled* is called, in this thread, once nothing more will be written for an
    attempt; *on_failure* after a failure was stored, with the monotonic time of the retry.
    """

    def __init__(
        self,
        store: TaskStore,
        worker_id: str,
        hub: EventHub,
        *,
        held_count: Callable[[], int],
        on_settled: Callable[[HeldAttempt, Outcome, Verdict], None],
        on_failure: Callable[[str, float], None],
        on_crash: CrashHandler,
    ) -> None:
        super().__init__("outcome", f"ms-outcome:{worker_id}", _log, on_crash)
        self._store = store
        self._worker_id = worker_id
        self._hub = hub
        self._held_count = held_count
        self._on_settled = on_settled
        self._on_failure = on_failure
        self._changed = threading.Condition()
        #: Keys of claims that a stop gave back before they became attempts; this thread adds.
        self.claims_given_back: list[str] = []
        # Both under _changed.
        self._pending: list[Pending] = []
        self._writing: list[Pending] = []
        self._enough = 1
        self._closing = False

    # -- called by others --------------------------------------------------------------------

    def put(self, attempt: HeldAttempt, outcome: Outcome) -> None:
        """
        Store *outcome*. Never blocks.
        """
        pending = Pending(
            attempt.key,
            attempt.running_id,
            outcome,
            attempt,
            retry_delay_s=retry_delay_s(attempt.options, attempt.number, outcome),
            progress=attempt.take_progress(),
        )
        self._add(pending)

    def release(self, key: str, running_id: str, why: Released) -> bool:
        """
        Give back a claim that never became an attempt. Never blocks.

        Returns False if this part has stopped, and nothing will be written.
        """
        with self._changed:
            if self._closing:
                return False
        self._add(Pending(key, running_id, why, None))
        return True

    def _add(self, pending: Pending) -> None:
        with self._changed:
            self._pending.append(pending)
            # A wake-up costs more than the outcome: only the first and the last needed one do.
            if len(self._pending) == 1 or len(self._pending) >= self._enough:
                self._changed.notify_all()

    @property
    def backlog(self) -> int:
        """
        How many outcomes are not stored yet.
        """
        with self._changed:
            return len(self._pending) + len(self._writing)

    def drain(self, timeout_s: float) -> bool:
        """
        Wait up to *timeout_s* seconds until everything is stored; return whether that is so.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._pending and not self._writing,
                min(timeout_s, threading.TIMEOUT_MAX),
            )

    def unstored(self) -> list[str]:
        """
        The keys whose outcomes are not stored (yet).
        """
        with self._changed:
            waiting = [*self._writing, *self._pending]
            return [pending.key for pending in waiting if not pending.done]

    def request_stop(self) -> None:
        """
        End after the current write. Call `drain` first.
        """
        super().request_stop()
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    # -- the thread --------------------------------------------------------------------------

    def step(self) -> None:
        batch = self._gather()
        if not batch:
            return
        try:
            self._write(batch)
        except StoreUnavailable:
            for pending in batch:
                pending.uncertain = True
            raise
        finally:
            with self._changed:
                self._pending[:0] = [pending for pending in batch if not pending.done]
                self._writing = []
                self._changed.notify_all()

    def pause(self, timeout_s: float) -> bool:
        """
        While stopping, the pauses between tries are short: the time left is.
        """
        if self._store.deadline_s < float("inf"):
            timeout_s = min(timeout_s, 0.2)
        return super().pause(timeout_s)

    def _gather(self) -> list[Pending]:
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closing)
            if not self._pending:
                return []
            self._enough = min(self._held_count(), _MAX_BATCH)
            if len(self._pending) < self._enough:
                self._changed.wait_for(
                    lambda: len(self._pending) >= self._enough or self._closing, GATHER_S
                )
            self._enough = 1
            batch = self._pending[:_MAX_BATCH]
            # One statement per document and bulk: the order of a bulk is not defined.
            seen: set[str] = set()
            chosen = []
            for pending in batch:
                if pending.key not in seen:
                    seen.add(pending.key)
                    chosen.append(pending)
            self._pending = [p for p in self._pending if p not in chosen]
            self._writing = chosen
            return chosen

    def _write(self, batch: Sequence[Pending]) -> None:
        refusal: StoreRejected | None = None
        for group in groups_of(batch):
            try:
                result = store_outcomes(self._store, group)
            except StoreRejected as error:
                # Perhaps a right is missing for a while: tried again, and the others need not
                # wait. If it is this one outcome, the next one of its kind shows that.
                refusal = error
                continue
            reach("after_outcome")
            verdicts: Mapping[str, Verdict]
            if result.matched == len(group):
                verdicts = {pending.running_id: "stored" for pending in group}
            else:
                verdicts = self._read_verdicts(group, result.errors)
            for position, pending in enumerate(group):
                problem = result.errors.get(position)
                if problem is not None:
                    self._on_refused(pending, problem)
                else:
                    self._finish(pending, verdicts[pending.running_id])
                pending.done = True
        if refusal is not None:
            raise refusal

    def _read_verdicts(
        self, batch: Sequence[Pending], errors: Mapping[int, str]
    ) -> dict[str, Verdict]:
        found = self._store.find(statements.attempt_state([p.key for p in batch]))
        attempts: dict[str, tuple[Attempt, ...]] = {}
        for document in found:
            try:
                fields = decode_fields(document)
                attempts[str(fields.get("key"))] = read_attempts(fields)
            except InvalidTask:
                # Unreadable now: nothing can be said of the attempt, so nothing is claimed of it.
                continue
        return {
            pending.running_id: verdict_on(pending, attempts.get(pending.key))
            for position, pending in enumerate(batch)
            if position not in errors
        }

    def _on_refused(self, pending: Pending, problem: str) -> None:
        """
        The server refuses this one statement: without its progress, or as a failure, or not at all.
        """
        if pending.progress is not None:
            _log.error(
                "the progress that came with an outcome was refused by the server",
                extra={
                    "event": "progress_refused",
                    "worker_id": self._worker_id,
                    "task_key": pending.key,
                    "running_id": pending.running_id,
                    "error": problem,
                },
            )
            with self._changed:
                self._pending.append(attrs.evolve(pending, progress=None))
            return
        _log.error(
            "an outcome was refused by the server",
            extra={
                "event": "outcome_refused",
                "worker_id": self._worker_id,
                "task_key": pending.key,
                "running_id": pending.running_id,
                "error": problem,
            },
        )
        if isinstance(pending.outcome, Succeeded):
            pending.outcome = Failed(failure.bounded(f"UnstorableResult: {problem}"), for_good=True)
            again = Pending(pending.key, pending.running_id, pending.outcome, pending.attempt)
            with self._changed:
                self._pending.append(again)
        else:
            self._settle(pending, "lost")

    def _finish(self, pending: Pending, verdict: Verdict) -> None:
        reach("before_event")
        outcome, key = pending.outcome, pending.key
        fields: dict[str, object] = {
            "worker_id": self._worker_id,
            "task_key": key,
            "running_id": pending.running_id,
        }
        if pending.attempt is not None:
            fields["attempt"] = pending.attempt.number
            fields["duration_s"] = round(pending.attempt.age_s(), 3)
        if isinstance(outcome, Interrupted):
            return
        if verdict == "lost":
            if pending.attempt is not None:
                _log.warning(
                    "the attempt was replaced or its task deleted; the outcome is not stored",
                    extra={"event": "lease_lost", **fields},
                )
                self._hub.publish(AttemptLost(key=key, running_id=pending.running_id))
        elif isinstance(outcome, Released | Snoozed):
            why = outcome.why if isinstance(outcome, Released) else "snoozed"
            _log.info("an attempt was released", extra={"event": "released", "why": why, **fields})
            self._hub.publish(AttemptReleased(key=key, running_id=pending.running_id, why=why))
            if pending.attempt is None and why == "shutdown":
                self.claims_given_back.append(key)
        elif isinstance(outcome, Succeeded):
            _log.info("a task succeeded", extra={"event": "succeeded", **fields})
            self._hub.publish(MarkSuccess(key=key))
            self._hub.publish(TaskExecuteResult(key=key, success=True))
        else:
            first_line = outcome.reason.splitlines()[0] if outcome.reason else ""
            _log.warning(
                "an attempt failed", extra={"event": "failed", "reason": first_line, **fields}
            )
            retry_at_s = time.monotonic() + pending.retry_delay_s
            self._on_failure(key, retry_at_s)
            if self._may_run_again(pending, outcome):
                at = self._store.clock.at(retry_at_s)
                self._hub.publish(WaitOccupy(key=key, next_occupy_time=at))
            self._hub.publish(TaskExecuteResult(key=key, success=False))
        self._settle(pending, verdict)

    def _may_run_again(self, pending: Pending, outcome: Failed) -> bool:
        """
        Whether another attempt is to be expected, and somebody wants to know when.
        """
        if not self._hub.has_listeners or self._store.clock.offset_s is None or outcome.for_good:
            return False
        attempt = pending.attempt
        if attempt is None or attempt.options.retry_scope == "worker":
            return attempt is not None
        return attempt.number < attempt.options.max_attempts

    def _settle(self, pending: Pending, verdict: Verdict) -> None:
        if pending.attempt is not None:
            pending.attempt.settled = True
            pending.attempt.wake.set()
            self._on_settled(pending.attempt, pending.outcome, verdict)
