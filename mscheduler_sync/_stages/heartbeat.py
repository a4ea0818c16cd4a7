"""
One attempt's heartbeat: the exchange with the server about its lease, and what comes of it.

Sent by the threads of the heartbeat scheduler while the function runs and until its outcome is
stored. It learns that the lease is lost, the task cancelled or its options changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from mscheduler_sync._runtime.log import LogThrottle, logger
from mscheduler_sync._runtime.service import ComponentHealth
from mscheduler_sync._stages.attempt import HeldAttempt
from mscheduler_sync._storage import statements
from mscheduler_sync._storage.calls import CALL_TIMEOUT_S
from mscheduler_sync._storage.store import TaskStore
from mscheduler_sync.errors import InvalidTask, StoreError, StoreRejected
from mscheduler_sync.model import decode_fields, read_options

_log = logger("heartbeat")


@attrs.define(eq=False, repr=False, kw_only=True)
class Heartbeat:
    """
    The exchange with the server about one attempt. Of one thread at a time.
    """

    attempt: HeldAttempt
    _store: TaskStore
    _health: ComponentHealth
    _log_throttle: LogThrottle
    _on_new_timeout: Callable[[HeldAttempt], None]
    #: The last one did not get through.
    is_failing: bool = attrs.field(init=False, default=False)

    def send(self) -> bool:
        """
        Extend the lease once and learn what has changed; return whether to go on sending.
        """
        attempt = self.attempt
        # At least a second: a tiny interval must not make every call time out.
        timeout_s = min(max(attempt.heartbeat_interval_s, 1.0), CALL_TIMEOUT_S)
        sent_at_s = time.monotonic()
        progress = attempt.take_progress()
        try:
            matched = self._renew(progress, timeout_s)
            if matched:
                attempt.renewed(sent_at_s)
            found = self._store.find(
                statements.attempts.attempt_state([attempt.key]), timeout_s=timeout_s
            )
        except StoreError as error:
            self._fail(error, progress)
            return True
        self.is_failing = False
        if attempt.done:
            return False
        fields = decode_fields(found[0]) if found else {}
        if not matched and not _is_open(fields, attempt.running_id):
            if not attempt.ended:
                attempt.ask_to_end("lease_lost", "another worker has taken the task over")
            # The outcome will be refused; writing it is still tried, so nothing is decided here.
            return False
        self._learn(fields)
        return True

    def _renew(self, progress: object, timeout_s: float) -> int:
        """
        Extend the lease; progress that the server refuses must not cost it.
        """
        attempt = self.attempt
        refs = [(attempt.key, attempt.running_id)]
        if progress is not None:
            try:
                return self._store.update(
                    statements.attempts.heartbeat(refs, progress=progress), timeout_s=timeout_s
                )[0]
            except StoreRejected as error:
                _log.error(
                    "the progress that came with a heartbeat was refused by the server",
                    event="progress_refused",
                    **attempt.log_fields(),
                    error=str(error)[:500],
                )
        return self._store.update(statements.attempts.heartbeat(refs), timeout_s=timeout_s)[0]

    def _learn(self, fields: Mapping[str, Any]) -> None:
        attempt = self.attempt
        cancel = fields.get("cancel")
        if isinstance(cancel, Mapping) and cancel.get("time") is not None:
            attempt.ask_to_end("cancel_requested", "the task was cancelled")
            return
        try:
            options = read_options(fields)
        except InvalidTask:
            # Somebody broke the document; the options known at the claim stay in force.
            return
        allowed = options.worker_ids
        if allowed and attempt.worker_id not in allowed:
            attempt.ask_to_end("options_changed", "the task may no longer run on this worker")
        if options.timeout != attempt.options.timeout:
            attempt.options = options
            attempt.context.deadline = (
                None if options.timeout is None else self._store.clock.at(attempt.timeout_at_s)
            )
            self._on_new_timeout(attempt)
        attempt.options = options

    def _fail(self, error: StoreError, progress: object) -> None:
        self.is_failing = True
        self._health.note_error(error)
        if progress is not None:
            self.attempt.restore_progress(progress)
        if self._log_throttle.allows(type(error.__cause__)):
            _log.warning(
                "a heartbeat could not be sent; will try again",
                event="heartbeat_failed",
                **self.attempt.log_fields(),
                error=str(error)[:500],
            )


def _is_open(fields: Mapping[str, Any], running_id: str) -> bool:
    state = fields.get("task_state")
    elements = state.get("worker_states") if isinstance(state, Mapping) else None
    for element in elements if isinstance(elements, list) else []:
        if isinstance(element, Mapping) and element.get("running_id") == running_id:
            return element.get("success_time") is None and element.get("fail_time") is None
    return False
