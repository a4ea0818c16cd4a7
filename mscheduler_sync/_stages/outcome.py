"""
Stores how attempts ended: in batches, fenced, tried until the result is known; then tells.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs

from mscheduler_sync._runtime import failure
from mscheduler_sync._runtime.crash_points import reach
from mscheduler_sync._runtime.log import Log, logger
from mscheduler_sync._runtime.service import Service
from mscheduler_sync._stages.attempt import (
    Failed,
    HeldAttempt,
    Interrupted,
    Outcome,
    Released,
    Succeeded,
)
from mscheduler_sync._stages.outcome_news import OutcomeNews
from mscheduler_sync._stages.pending import (
    PendingOutcome,
    Verdict,
    groups_of,
    retry_delay_s,
    store_outcomes,
    verdict_on,
)
from mscheduler_sync._storage import statements
from mscheduler_sync._storage.store import TaskStore
from mscheduler_sync.errors import InvalidTask, StoreRejected, StoreUnavailable
from mscheduler_sync.model import Attempt, decode_fields, ended_by, read_attempts

_log = logger("outcome")

#: While other attempts run, an outcome waits this long for company, in seconds.
GATHER_S: Final = 0.005
_MAX_BATCH: Final = 100


@attrs.define(eq=False, repr=False, kw_only=True)
class OutcomeWriter(Service):
    """
    The outcome writer's thread; see the module.
    """

    component: str = "outcome"
    thread_prefix: str = "ms-outcome"
    log: Log = _log
    _store: TaskStore
    _news: OutcomeNews
    #: How many attempts the consumer holds: so many outcomes may still come.
    _held_count: Callable[[], int]
    #: Nothing more will be written for an attempt. Called in this thread.
    _on_done: Callable[[HeldAttempt, Outcome, Verdict], None]
    #: A failure is stored: key and monotonic time of the retry. `Intake.record_failure`.
    _on_failure: Callable[[str, float], None]
    #: Keys of claims that a stop gave back before they became attempts; this thread adds.
    claims_given_back: list[str] = attrs.field(init=False, factory=list)
    _changed: threading.Condition = attrs.field(init=False, factory=threading.Condition)
    # All under _changed.
    _pending: list[PendingOutcome] = attrs.field(init=False, factory=list)
    _writing: list[PendingOutcome] = attrs.field(init=False, factory=list)
    _enough: int = attrs.field(init=False, default=1)
    _closing: bool = attrs.field(init=False, default=False)

    # -- called by others --------------------------------------------------------------------

    def put(self, attempt: HeldAttempt, outcome: Outcome) -> None:
        """
        Store *outcome*. Never blocks.
        """
        pending = PendingOutcome(
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

        Returns False if the writer has stopped, and nothing will be written.
        """
        with self._changed:
            if self._closing:
                return False
        self._add(PendingOutcome(key, running_id, why, None))
        return True

    def _add(self, pending: PendingOutcome) -> None:
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
            return [p.key for p in waiting if not p.done and p.verdict is None]

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

    def _gather(self) -> list[PendingOutcome]:
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

    def _write(self, batch: Sequence[PendingOutcome]) -> None:
        refusal: StoreRejected | None = None
        for group in groups_of([pending for pending in batch if pending.verdict is None]):
            try:
                result = store_outcomes(self._store, group)
            except StoreRejected as error:
                # Perhaps a right is missing for a while: tried again, and the others need not
                # wait. If it is this one outcome, the next one of its kind shows that.
                refusal = error
                continue
            reach("after_outcome")
            sent = []
            for position, pending in enumerate(group):
                problem = result.errors.get(position)
                if problem is None:
                    sent.append(pending)
                else:
                    self._on_refused(pending, problem)
                    pending.done = True
            if result.matched == len(group):
                for pending in sent:
                    pending.verdict = "stored"
            else:
                self._read_back([pending for pending in sent if pending.verdict is None])
            self._finish_all([pending for pending in sent if not self._news.must_know_end(pending)])
        # Somebody listens for the ends of these tasks.
        unread = [pending for pending in batch if pending.verdict is not None and not pending.done]
        if unread:
            self._read_back(unread)
            self._finish_all(unread)
        if refusal is not None:
            raise refusal

    def _read_back(self, sent: Sequence[PendingOutcome]) -> None:
        """
        Read what has become of outcomes that were sent, and of their tasks.
        """
        found: dict[str, Mapping[str, Any]] = {}
        attempts: dict[str, tuple[Attempt, ...]] = {}
        keys = [pending.key for pending in sent]
        for document in self._store.find(statements.attempts.attempt_state(keys)) if keys else ():
            try:
                fields = decode_fields(document)
                found[str(fields.get("key"))] = fields
                attempts[str(fields.get("key"))] = read_attempts(fields)
            except InvalidTask:
                # Unreadable now: nothing can be said of the attempt, so nothing is claimed of it.
                continue
        for pending in sent:
            if pending.verdict is None:
                pending.verdict = verdict_on(pending, attempts.get(pending.key))
            pending.ended = ended_by(found.get(pending.key, {}), pending.running_id)
            pending.is_end_known = True

    def _on_refused(self, pending: PendingOutcome, problem: str) -> None:
        """
        The server refuses this one statement: without its progress, or as a failure, or not at all.
        """
        if pending.progress is not None:
            _log.error(
                "the progress that came with an outcome was refused by the server",
                event="progress_refused",
                worker_id=self.owner_id,
                task_key=pending.key,
                running_id=pending.running_id,
                error=problem,
            )
            with self._changed:
                self._pending.append(attrs.evolve(pending, progress=None))
            return
        _log.error(
            "an outcome was refused by the server",
            event="outcome_refused",
            worker_id=self.owner_id,
            task_key=pending.key,
            running_id=pending.running_id,
            error=problem,
        )
        if isinstance(pending.outcome, Succeeded):
            pending.outcome = Failed(failure.bounded(f"UnstorableResult: {problem}"), for_good=True)
            again = PendingOutcome(
                pending.key, pending.running_id, pending.outcome, pending.attempt
            )
            with self._changed:
                self._pending.append(again)
        else:
            pending.verdict = "lost"
            self._mark_done(pending)

    def _finish_all(self, decided: Sequence[PendingOutcome]) -> None:
        for pending in decided:
            self._finish(pending)
            pending.done = True

    def _finish(self, pending: PendingOutcome) -> None:
        reach("before_event")
        outcome = pending.outcome
        if isinstance(outcome, Interrupted):
            return
        retry_at_s = time.monotonic() + pending.retry_delay_s
        if pending.verdict == "stored":
            if isinstance(outcome, Failed):
                self._on_failure(pending.key, retry_at_s)
            elif pending.attempt is None and outcome == Released("shutdown"):
                self.claims_given_back.append(pending.key)
        self._news.tell(pending, retry_at_s)
        self._mark_done(pending)

    def _mark_done(self, pending: PendingOutcome) -> None:
        if pending.attempt is not None and pending.verdict is not None:
            pending.attempt.done = True
            pending.attempt.wake.set()
            self._on_done(pending.attempt, pending.outcome, pending.verdict)
