"""
The names of the Rust crate mscheduler for those who come from it; see docs/crate.md.

Nothing else in this package uses them.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any, Final

from mscheduler_sync.events import (
    AttemptEnded,
    AttemptStarted,
    ClaimUndecided,
    QueueEmpty,
    TaskFound,
    TaskSucceeded,
)

WaitOccupy: Final = TaskFound
WaitOccupyQueueEmpty: Final = QueueEmpty
#: Two classes here; for ``isinstance`` and, with a star, for `Consumer.subscribe`.
TaskOccupyResult: Final = (AttemptStarted, ClaimUndecided)
TaskExecuteResult: Final = AttemptEnded
#: The crate tells each success of a task that several workers run; this comes with the last.
MarkSuccess: Final = TaskSucceeded


def success(event: AttemptStarted | ClaimUndecided | AttemptEnded) -> bool:
    """
    Return the field ``success`` of the crate's ``TaskOccupyResult`` or ``TaskExecuteResult``.
    """
    if isinstance(event, AttemptEnded):
        return event.succeeded
    return isinstance(event, AttemptStarted)


def options(
    *,
    update_existing_params: bool | None = None,
    run_time: dt.datetime | None = None,
    concurrency_cnt: int | None = None,
    not_update_running: bool | None = None,
    ping_interval_ms: int | None = None,
    worker_timeout_ms: int | None = None,
    specific_worker_ids: Sequence[str] | None = None,
    max_unexpected_retries: int | None = None,
    unexpected_retry_delay_ms: int | None = None,
    priority: int | None = None,
    clean_success: bool | None = None,
    clean_failed: bool | None = None,
) -> dict[str, Any]:
    """
    Translate the crate's options of a send into those of `Producer.send`.

    The crate's durations are in milliseconds, those that are returned in seconds. What is not
    given, or None, is left out, so that the defaults of this package hold, not the crate's.
    ``max_unexpected_retries`` counts per worker in the crate and per task here: add
    ``retry_scope="worker"`` to count as it does. `Producer.send` checks the values.
    """
    given: dict[str, Any] = {
        "run_at": run_time,
        "concurrency": concurrency_cnt,
        "heartbeat": _seconds(ping_interval_ms),
        "lease": _seconds(worker_timeout_ms),
        "worker_ids": specific_worker_ids,
        "max_attempts": max_unexpected_retries,
        "retry_delay": _seconds(unexpected_retry_delay_ms),
        "priority": priority,
        "if_exists": _choice(update_existing_params, "update", "keep"),
        "if_running": _choice(not_update_running, "raise", "apply"),
        "clean_success": clean_success,
        "clean_failed": clean_failed,
    }
    return {name: value for name, value in given.items() if value is not None}


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _choice(flag: bool | None, yes: str, no: str) -> str | None:
    return None if flag is None else yes if flag else no
