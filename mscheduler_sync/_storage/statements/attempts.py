"""
The life of an attempt: claim, heartbeat, outcomes, release.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Final

import attrs

from mscheduler_sync._storage import expressions as x
from mscheduler_sync._storage.derived import DERIVED, derive
from mscheduler_sync._storage.statement import Document, Find, Update
from mscheduler_sync._storage.statements.base import ENDING, READABLE, TASKS, of_tasks, one_or_in
from mscheduler_sync._storage.statements.discovery import allowed_to, eligible_name

#: A call's time-out and some slack, in milliseconds.
_LONGEST_WAIT_MS: Final = 12_000
EXPIRED_REASON: Final = "LeaseExpired: the worker stopped renewing its lease"


#: (key, running_id)
Ref = tuple[str, str]


def claim(
    refs: Sequence[Ref],
    worker_id: str,
    *,
    names: Sequence[str | None] | None = None,
    elapsed_since_outage_ms: int | None = None,
    sent_at: dt.datetime | None = None,
) -> Update:
    """
    Settle expired attempts, then add an attempt of *worker_id* to each task that allows it now.

    Repeating the statement changes nothing where the running_id stands already. Carried
    out a second after *sent_at* (by a frozen server, say) it settles nothing, after a lease or
    12 seconds it adds nothing: nobody waits for its answer any more.
    """
    keys, running_ids = split(refs)
    mine = {"$eq": ["$$e.worker_id", x.literal(worker_id)]}
    may_not_repeat = {"$or": [x.E_SUCCEEDED, {"$not": [x.E_FAILED]}]}
    mine_undecided = x.attempts_where({"$and": [mine, may_not_repeat]})
    mine_failed = x.attempts_where({"$and": [mine, x.E_FAILED]})
    may = {
        "$and": [
            "$$free",
            {"$lte": ["$$ready", x.NOW]},
            {"$lte": [x.NOW, answered_by(sent_at)]},
            {"$eq": [{"$size": mine_undecided}, 0]},
            {"$ne": ["$task_option.specific_worker_ids", [x.NOBODY]]},
            {
                "$or": [
                    {"$ne": ["$retry.scope", "worker"]},
                    {"$lt": [{"$size": mine_failed}, "$task_option.max_unexpected_retries"]},
                ]
            },
        ]
    }
    lease_end = x.server_now_plus(x.number_at("task_option.worker_timeout_ms"))
    attempt = new_attempt(keys, running_ids, worker_id, lease_end)
    return of_tasks(
        keys,
        {
            "task_option.specific_worker_ids": allowed_to(worker_id),
            f"{x.ATTEMPTS}.running_id": {"$nin": running_ids},
            **eligible_name(names),
        },
        [
            *x.settle(
                EXPIRED_REASON, elapsed_since_outage_ms=elapsed_since_outage_ms, sent_at=sent_at
            ),
            *derive(
                by=_running_id(keys, running_ids),
                may_add=may,
                added=attempt,
                lease_end=lease_end,
            ),
        ],
    )


def new_attempt(
    keys: Sequence[str], running_ids: Sequence[str], worker_id: str, lease_end: x.Expr
) -> Document:
    """
    The element that a claim of *keys* adds to the task at hand.
    """
    return {
        "running_id": _running_id(keys, running_ids),
        "worker_id": x.literal(worker_id),
        "ping_expire_time": lease_end,
        "success_time": None,
        "fail_time": None,
        "claim_time": x.NOW,
    }


def _running_id(keys: Sequence[str], running_ids: Sequence[str]) -> x.Expr:
    """
    The one of *running_ids* that goes with the task at hand.
    """
    return x.one_of(running_ids, x.position_of_task(keys))


def answered_by(sent_at: dt.datetime | None) -> x.Expr:
    """
    Until when somebody waits for the answer to a claim, and takes what it adds.
    """
    if sent_at is None:
        return x.NEVER
    lease_ms = x.number_at("task_option.worker_timeout_ms")
    # At least a second: the clock's estimate lags by up to a round trip.
    waited_for_ms = {"$max": [1000, {"$min": [lease_ms, _LONGEST_WAIT_MS]}]}
    return x.date_plus(sent_at, waited_for_ms)


def claimed(refs: Sequence[Ref]) -> Find:
    """
    Read back the tasks in which one of the attempts stands; a lone task in any case. Index: key.
    """
    keys, running_ids = split(refs)
    condition: Document = {"key": one_or_in(keys)}
    if len(refs) > 1:
        condition[f"{x.ATTEMPTS}.running_id"] = {"$in": running_ids}
    # Without its unique index a collection may hold a key twice.
    return Find(TASKS, condition, {f"{x.ATTEMPTS}.returns": 0}, limit=max(2, len(keys)))


def split(refs: Sequence[Ref]) -> tuple[list[str], list[str]]:
    """
    The keys and the running ids of *refs*.
    """
    return [key for key, _ in refs], [running_id for _, running_id in refs]


def _of_open_attempts(refs: Sequence[Ref], facts: Document, *, ends: bool = True) -> Update:
    """
    Set *facts* in each task whose attempt is open; where that *ends* it, perhaps the task too.
    """
    keys, running_ids = split(refs)
    is_open = {"running_id": {"$in": running_ids}, "success_time": None, "fail_time": None}
    return of_tasks(
        keys,
        {x.ATTEMPTS: {**READABLE[x.ATTEMPTS], "$elemMatch": is_open}},
        [
            {"$set": facts},
            *(derive(by=_running_id(keys, running_ids)) if ends else DERIVED),
        ],
    )


def heartbeat(refs: Sequence[Ref], *, progress: object = None) -> Update:
    """
    Extend the leases to the server's now plus the task's lease; never back.

    *progress*, when given, is stored with it (of one task).
    """
    lease_end = x.server_now_plus(x.number_at("task_option.worker_timeout_ms"))
    changes = {"ping_expire_time": {"$max": ["$$e.ping_expire_time", lease_end]}}
    _, running_ids = split(refs)
    return _of_open_attempts(
        refs,
        {
            x.ATTEMPTS: x.replace_attempts(running_ids, changes),
            "heartbeat_at": x.NOW,
            **_progress(progress),
        },
        ends=False,
    )


def _progress(progress: object) -> Document:
    return {} if progress is None else {"progress": x.literal(progress)}


def attempt_state(keys: Sequence[str]) -> Find:
    """
    What must be learned of running tasks: attempts, options, a cancel request, who ended them.
    """
    return Find(
        TASKS,
        {"key": one_or_in(keys)},
        {
            "key": 1,
            "cancel": 1,
            "task_option": 1,
            "retry": 1,
            "timeout_ms": 1,
            "keep_ms": 1,
            **ENDING,
            f"{x.ATTEMPTS}.running_id": 1,
            f"{x.ATTEMPTS}.worker_id": 1,
            f"{x.ATTEMPTS}.success_time": 1,
            f"{x.ATTEMPTS}.fail_time": 1,
            f"{x.ATTEMPTS}.fail_reason": 1,
        },
        limit=len(keys),
    )


def succeed(refs: Sequence[Ref], returns: Sequence[object], *, progress: object = None) -> Update:
    """
    End the attempts as succeeded, with the values that the functions returned.
    """
    _, running_ids = split(refs)
    attempts = x.replace_attempts(running_ids, success(running_ids, returns))
    return _of_open_attempts(refs, {x.ATTEMPTS: attempts, **_progress(progress)})


def success(running_ids: Sequence[str], returns: Sequence[object]) -> Document:
    """
    What success changes in an attempt.
    """
    return {
        "success_time": x.NOW,
        "returns": x.one_of(returns, x.position_of_attempt(running_ids)),
    }


@attrs.frozen
class Failure:
    """
    How one attempt failed.
    """

    reason: str
    retry_delay_ms: int
    for_good: bool = False


def fail(refs: Sequence[Ref], failures: Sequence[Failure], *, progress: object = None) -> Update:
    """
    End the attempts as failed; a task is due again after its delay if attempts are left.
    """
    _, running_ids = split(refs)
    position = x.position_of_attempt(running_ids)
    changes: Document = {
        "fail_time": x.NOW,
        "fail_reason": x.one_of([f.reason for f in failures], position),
        "retry_time": x.server_now_plus(x.one_of([f.retry_delay_ms for f in failures], position)),
    }
    if any(failure.for_good for failure in failures):
        changes["final"] = x.one_of([failure.for_good for failure in failures], position)
    attempts = x.replace_attempts(running_ids, changes)
    return _of_open_attempts(refs, {x.ATTEMPTS: attempts, **_progress(progress)})


def release(refs: Sequence[Ref], *, progress: object = None) -> Update:
    """
    Give the attempts back, unused: their elements are removed and counted.
    """
    return _remove(refs, "released", _progress(progress))


def snooze(refs: Sequence[Ref], delays_ms: Sequence[int], *, progress: object = None) -> Update:
    """
    Give the attempts back, unused, and start each task its delay from now at the earliest.
    """
    keys, _ = split(refs)
    delay = x.one_of(delays_ms, x.position_of_task(keys))
    facts = {"task_state.start_time": x.server_now_plus(delay), **_progress(progress)}
    return _remove(refs, "snoozed", facts)


def _remove(refs: Sequence[Ref], counter: str, facts: Document) -> Update:
    _, running_ids = split(refs)
    return _of_open_attempts(
        refs,
        {
            x.ATTEMPTS: x.attempts_where({"$not": [x.is_one_of(running_ids)]}),
            f"counters.{counter}": {"$add": [x.number_at(f"counters.{counter}"), 1]},
            **facts,
        },
    )


def mark_interrupted(refs: Sequence[Ref], *, progress: object = None) -> Update:
    """
    Say that a stop has abandoned the attempts: once a lease ends, its attempt is not counted.
    """
    _, running_ids = split(refs)
    attempts = x.replace_attempts(running_ids, {"interrupted": True})
    return _of_open_attempts(refs, {x.ATTEMPTS: attempts, **_progress(progress)}, ends=False)


def repair(keys: Sequence[str]) -> Update:
    """
    Recompute the derived fields of documents that a Rust worker or a person wrote or changed.
    """
    return of_tasks(keys, {}, [x.routes(), *DERIVED])
