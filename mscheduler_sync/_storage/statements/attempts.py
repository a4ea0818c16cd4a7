"""
The life of an attempt: claim, heartbeat, outcomes, release.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mscheduler_sync._storage import expressions as x
from mscheduler_sync._storage.statements.base import READABLE, Document, Find, Update
from mscheduler_sync._storage.statements.discovery import eligible_name

EXPIRED_REASON: Final = "LeaseExpired: the worker stopped renewing its lease"


def claim(
    key: str,
    running_id: str,
    worker_id: str,
    *,
    names: Sequence[str | None] | None = None,
    elapsed_since_outage_ms: int | None = None,
) -> Update:
    """
    Settle expired attempts, then add an attempt of *worker_id* if the task allows it now.

    Repeating the statement changes nothing where *running_id* stands already.
    """
    mine = {"$eq": ["$$e.worker_id", x.literal(worker_id)]}
    mine_undecided = x.attempts_where({"$and": [mine, {"$not": [x.E_FAILED]}]})
    mine_failed = x.attempts_where({"$and": [mine, x.E_FAILED]})
    may = {
        "$and": [
            {"$lte": ["$_tally.ready", x.NOW]},
            {
                "$lt": [
                    {"$add": ["$_tally.ok", "$_tally.open"]},
                    "$task_option.concurrent_worker_cnt",
                ]
            },
            {"$not": ["$_tally.spent"]},
            {"$not": [x.has("cancel.time")]},
            {"$eq": [{"$size": mine_undecided}, 0]},
            {
                "$or": [
                    {"$ne": ["$retry.scope", "worker"]},
                    {"$lt": [{"$size": mine_failed}, "$task_option.max_unexpected_retries"]},
                ]
            },
        ]
    }
    lease_end = x.server_now_plus(x.number_at("task_option.worker_timeout_ms"))
    attempt = {
        "running_id": x.literal(running_id),
        "worker_id": x.literal(worker_id),
        "ping_expire_time": lease_end,
        "success_time": None,
        "fail_time": None,
        "claim_time": x.NOW,
    }
    attempts = f"${x.ATTEMPTS}"
    return Update(
        filter={
            "key": key,
            **READABLE,
            "task_option.specific_worker_ids": {"$in": [None, [], worker_id]},
            f"{x.ATTEMPTS}.running_id": {"$ne": running_id},
            **eligible_name(names),
        },
        pipeline=[
            *x.settle(EXPIRED_REASON, elapsed_since_outage_ms=elapsed_since_outage_ms),
            x.tally(),
            {"$set": {"_may": may}},
            {
                "$set": {
                    x.ATTEMPTS: {
                        "$cond": ["$_may", {"$concatArrays": [attempts, [attempt]]}, attempts]
                    },
                    "_tally.open": {"$add": ["$_tally.open", {"$cond": ["$_may", 1, 0]}]},
                    "_tally.lease_end": {
                        "$min": [
                            "$_tally.lease_end",
                            {"$cond": ["$_may", lease_end, "$_tally.lease_end"]},
                        ]
                    },
                }
            },
            {"$unset": "_may"},
            *x.derive(),
        ],
    )


def claimed(keys: Sequence[str], running_ids: Sequence[str]) -> Find:
    """
    Read back the tasks *keys* in which one of *running_ids* stands. Index: key.
    """
    return Find(
        filter={
            "key": {"$in": list(keys)} if len(keys) > 1 else keys[0],
            f"{x.ATTEMPTS}.running_id": {"$in": list(running_ids)},
        },
        projection={f"{x.ATTEMPTS}.returns": 0},
        sort=[],
        limit=len(keys),
    )


def _of_open_attempt(key: str, running_id: str, pipeline: list[x.Stage]) -> Update:
    return Update(
        filter={
            "key": key,
            **READABLE,
            x.ATTEMPTS: {
                "$type": "array",
                "$elemMatch": {
                    "running_id": running_id,
                    "success_time": None,
                    "fail_time": None,
                },
            },
        },
        pipeline=[*pipeline, x.tally(), *x.derive()],
    )


def heartbeat(key: str, running_id: str, *, progress: object = None) -> Update:
    """
    Extend the lease to the server's now plus the task's lease; never back.

    *progress*, when given, is stored with it.
    """
    lease_end = x.server_now_plus(x.number_at("task_option.worker_timeout_ms"))
    changes = {"ping_expire_time": {"$max": ["$$e.ping_expire_time", lease_end]}}
    facts: Document = {x.ATTEMPTS: x.replace_attempt(running_id, changes), "beat": x.NOW}
    if progress is not None:
        facts["progress"] = x.literal(progress)
    return _of_open_attempt(key, running_id, [{"$set": facts}])


def attempt_state(keys: Sequence[str]) -> Find:
    """
    What a heartbeat must learn of its tasks: the attempts, options and a cancel request.
    """
    return Find(
        filter={"key": {"$in": list(keys)} if len(keys) > 1 else keys[0]},
        projection={
            "key": 1,
            "cancel": 1,
            "task_option": 1,
            f"{x.ATTEMPTS}.running_id": 1,
            f"{x.ATTEMPTS}.worker_id": 1,
            f"{x.ATTEMPTS}.success_time": 1,
            f"{x.ATTEMPTS}.fail_time": 1,
            f"{x.ATTEMPTS}.fail_reason": 1,
        },
        sort=[],
        limit=len(keys),
    )


def succeed(key: str, running_id: str, returns: object, *, progress: object = None) -> Update:
    """
    End the attempt as succeeded, with the value that the function returned.
    """
    changes = {"success_time": x.NOW, "returns": x.literal(returns)}
    facts: Document = {x.ATTEMPTS: x.replace_attempt(running_id, changes)}
    if progress is not None:
        facts["progress"] = x.literal(progress)
    return _of_open_attempt(key, running_id, [{"$set": facts}])


def fail(
    key: str,
    running_id: str,
    reason: str,
    *,
    retry_delay_ms: int,
    for_good: bool = False,
    progress: object = None,
) -> Update:
    """
    End the attempt as failed; the task is due again *retry_delay_ms* later if attempts are left.
    """
    changes: Document = {
        "fail_time": x.NOW,
        "fail_reason": x.literal(reason),
        "retry_time": x.server_now_plus(retry_delay_ms),
    }
    if for_good:
        changes["final"] = True
    facts: Document = {x.ATTEMPTS: x.replace_attempt(running_id, changes)}
    if progress is not None:
        facts["progress"] = x.literal(progress)
    return _of_open_attempt(key, running_id, [{"$set": facts}])


def release(key: str, running_id: str) -> Update:
    """
    Give the attempt back, unused: its element is removed and counted.
    """
    return _remove(key, running_id, "released", {})


def snooze(key: str, running_id: str, *, delay_ms: int) -> Update:
    """
    Give the attempt back, unused, and start the task *delay_ms* from now at the earliest.
    """
    return _remove(
        key, running_id, "snoozed", {"task_state.start_time": x.server_now_plus(delay_ms)}
    )


def _remove(key: str, running_id: str, counter: str, facts: Document) -> Update:
    changes = {
        x.ATTEMPTS: x.attempts_where({"$not": [x.is_attempt(running_id)]}),
        f"counters.{counter}": {"$add": [x.number_at(f"counters.{counter}"), 1]},
        **facts,
    }
    return _of_open_attempt(key, running_id, [{"$set": changes}])


def mark_interrupted(key: str, running_id: str) -> Update:
    """
    Say that a stop left this attempt behind: once its lease ends it is removed, not counted.
    """
    attempts = x.replace_attempt(running_id, {"interrupted": True})
    return _of_open_attempt(key, running_id, [{"$set": {x.ATTEMPTS: attempts}}])


def repair(key: str) -> Update:
    """
    Recompute the derived fields of a document that a Rust worker or a person wrote or changed.
    """
    return Update(
        filter={"key": key, **READABLE},
        pipeline=[x.lanes(), x.tally(), *x.derive()],
    )
