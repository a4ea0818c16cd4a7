"""
What is told of an attempt whose outcome is known: one log record, and its events in their order.
"""

from __future__ import annotations

from typing import Final

import attrs

from mscheduler_sync._runtime.clock import ServerClock
from mscheduler_sync._runtime.log import logger
from mscheduler_sync._stages.attempt import Failed, Interrupted, Released, Snoozed, Succeeded
from mscheduler_sync._stages.pending import PendingOutcome
from mscheduler_sync.events import (
    AttemptEnded,
    AttemptLost,
    AttemptReleased,
    EventHub,
    TaskFinished,
    TaskFound,
    TaskSucceeded,
)

_log: Final = logger("outcome")


@attrs.define(eq=False, repr=False, kw_only=True)
class OutcomeNews:
    """
    Tells of outcomes, to the log and to those who listen. Nothing is made for nobody.
    """

    _worker_id: str
    _clock: ServerClock
    _hub: EventHub

    def must_know_end(self, pending: PendingOutcome) -> bool:
        """
        Whether it must be read first if this outcome has ended its task: somebody listens for that.
        """
        if pending.is_end_known or isinstance(pending.outcome, Interrupted):
            return False
        is_success = isinstance(pending.outcome, Succeeded)
        return self._hub.wants(TaskFinished) or (is_success and self._hub.wants(TaskSucceeded))

    def tell(self, pending: PendingOutcome, retry_at_s: float) -> None:
        """
        Tell of *pending*, whose verdict is known; a failed task is tried again at *retry_at_s*.
        """
        outcome, key, running_id = pending.outcome, pending.key, pending.running_id
        fields: dict[str, object] = {
            "worker_id": self._worker_id,
            "task_key": key,
            "running_id": running_id,
        }
        if pending.attempt is not None:
            fields["attempt"] = pending.attempt.number
            fields["duration_s"] = round(pending.attempt.age_s(), 3)
        if pending.verdict == "lost":
            if pending.attempt is not None:
                _log.warning(
                    "the attempt was replaced or its task deleted; the outcome is not stored",
                    event="lease_lost",
                    **fields,
                )
                self._hub.publish(AttemptLost(key=key, running_id=running_id))
        elif isinstance(outcome, Released | Snoozed):
            why = outcome.why if isinstance(outcome, Released) else "snoozed"
            _log.info("an attempt was released", event="released", why=why, **fields)
            self._hub.publish(AttemptReleased(key=key, running_id=running_id, why=why))
        elif isinstance(outcome, Succeeded):
            _log.info("a task succeeded", event="succeeded", **fields)
            if pending.ended == "succeeded" and self._hub.wants(TaskSucceeded):
                self._hub.publish(TaskSucceeded(key=key))
            self._tell_end_of_attempt(pending, succeeded=True)
        elif isinstance(outcome, Failed):
            first_line = outcome.reason.splitlines()[0] if outcome.reason else ""
            _log.warning("an attempt failed", event="failed", reason=first_line, **fields)
            if self._hub.wants(TaskFound) and self._may_run_again(pending, outcome):
                self._hub.publish(TaskFound(key=key, claim_at=self._clock.at(retry_at_s)))
            self._tell_end_of_attempt(pending, succeeded=False)
        if pending.ended is not None and self._hub.wants(TaskFinished):
            self._hub.publish(TaskFinished(key=key, status=pending.ended))

    def _tell_end_of_attempt(self, pending: PendingOutcome, *, succeeded: bool) -> None:
        if self._hub.wants(AttemptEnded):
            self._hub.publish(
                AttemptEnded(key=pending.key, running_id=pending.running_id, succeeded=succeeded)
            )

    def _may_run_again(self, pending: PendingOutcome, outcome: Failed) -> bool:
        """
        Whether another attempt is to be expected, and it is known when.
        """
        if self._clock.offset_s is None or outcome.for_good or pending.ended is not None:
            return False
        attempt = pending.attempt
        if attempt is None or attempt.options.retry_scope == "worker":
            return attempt is not None
        return attempt.number < attempt.options.max_attempts
