"""
Outcomes on their way: which share a statement, what it says, and whether it was applied.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final, Literal

import attrs

from mscheduler_sync._runtime import backoff
from mscheduler_sync._stages.attempt import (
    Failed,
    HeldAttempt,
    Interrupted,
    Outcome,
    Released,
    Snoozed,
    Succeeded,
)
from mscheduler_sync._storage import statements
from mscheduler_sync._storage.mongo_store import BatchResult
from mscheduler_sync._storage.statement import Update
from mscheduler_sync._storage.store import Success, TaskStore
from mscheduler_sync.limits import LONGEST_S
from mscheduler_sync.model import Attempt, Ended, TaskOptions

#: Results of one statement, in bytes; a statement may not exceed 16 MiB.
MAX_BATCH_BYTES: Final = 4 * 1024 * 1024

Verdict = Literal["stored", "lost"]


@attrs.define(eq=False)
class PendingOutcome:
    """
    One outcome on its way to the document.
    """

    key: str
    running_id: str
    outcome: Outcome
    #: None for a claim that never became an attempt.
    attempt: HeldAttempt | None
    retry_delay_s: float = 0.0
    progress: object = None
    #: An earlier try may have been applied.
    uncertain: bool = False
    #: Whether it is stored; None: not known yet.
    verdict: Verdict | None = None
    #: The status in which it has ended its task; None: it has not, or that is not known.
    ended: Ended | None = None
    is_end_known: bool = False
    #: Nothing is left to do for it.
    done: bool = False


def retry_delay_s(options: TaskOptions, attempt_number: int, outcome: Outcome) -> float:
    """
    Return how long after this failure the task may run again, in seconds.
    """
    if not isinstance(outcome, Failed):
        return 0.0
    if outcome.delay_s is not None:
        return outcome.delay_s
    cap_s = LONGEST_S if options.retry_max_delay is None else options.retry_max_delay
    grown_s = backoff.delay_s(
        attempt_number,
        first_s=options.retry_delay,
        cap_s=cap_s,
        factor=options.retry_backoff,
    )
    spread = options.retry_jitter
    return min(cap_s, grown_s * random.uniform(1.0 - spread, 1.0 + spread))


def groups_of(batch: Sequence[PendingOutcome]) -> list[list[PendingOutcome]]:
    """
    Split *batch* into what one statement can say: one kind, bounded in size, progress alone.
    """
    groups: list[list[PendingOutcome]] = []
    open_groups: dict[type[Outcome], list[PendingOutcome]] = {}
    sizes: dict[type[Outcome], int] = {}
    for pending in batch:
        kind = type(pending.outcome)
        size = pending.outcome.size_bytes if isinstance(pending.outcome, Succeeded) else 0
        if pending.progress is not None or size > MAX_BATCH_BYTES:
            groups.append([pending])
            continue
        if kind not in open_groups or sizes[kind] + size > MAX_BATCH_BYTES:
            open_groups[kind] = []
            sizes[kind] = 0
            groups.append(open_groups[kind])
        open_groups[kind].append(pending)
        sizes[kind] += size
    return groups


def store_outcomes(store: TaskStore, group: Sequence[PendingOutcome]) -> BatchResult:
    """
    Store the outcomes of *group*, all of one kind, and note which are known to end their tasks.
    """
    successes = [
        Success((p.key, p.running_id), p.outcome.value, p.attempt and p.attempt.hint)
        for p in group
        if isinstance(p.outcome, Succeeded)
    ]
    if successes:
        result = store.succeed(successes, progress=group[0].progress)
        for position in result.ending:
            pending = group[position]
            pending.verdict, pending.ended, pending.is_end_known = "stored", "succeeded", True
        return result
    return store.update_batch(_statement_of, group)


def _statement_of(group: Sequence[PendingOutcome]) -> Update:
    refs = [(pending.key, pending.running_id) for pending in group]
    progress = group[0].progress
    first = group[0].outcome
    if isinstance(first, Failed):
        failures = [
            statements.attempts.Failure(
                p.outcome.reason, round(p.retry_delay_s * 1000), p.outcome.for_good
            )
            for p in group
            if isinstance(p.outcome, Failed)
        ]
        return statements.attempts.fail(refs, failures, progress=progress)
    if isinstance(first, Snoozed):
        delays = [round(p.outcome.delay_s * 1000) for p in group if isinstance(p.outcome, Snoozed)]
        return statements.attempts.snooze(refs, delays, progress=progress)
    if isinstance(first, Interrupted):
        return statements.attempts.mark_interrupted(refs, progress=progress)
    return statements.attempts.release(refs, progress=progress)


def verdict_on(pending: PendingOutcome, attempts: Sequence[Attempt] | None) -> Verdict:
    """
    Say from the document whether *pending* was applied (perhaps by an earlier try) or lost.
    """
    mine = next((a for a in attempts or () if a.running_id == pending.running_id), None)
    outcome = pending.outcome
    if mine is None:
        # An attempt that another worker had settled would stand there as failed: it was removed
        # by an earlier try of ours, or by one that the driver has repeated.
        was_mine = pending.uncertain or pending.attempt is not None
        is_removal = isinstance(outcome, Released | Snoozed)
        return "stored" if was_mine and is_removal and attempts is not None else "lost"
    if isinstance(outcome, Succeeded):
        return "stored" if mine.succeeded_at is not None else "lost"
    if isinstance(outcome, Failed):
        is_mine = mine.failed_at is not None and mine.fail_reason == outcome.reason
        return "stored" if is_mine else "lost"
    return "lost"
