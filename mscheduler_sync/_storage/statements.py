"""
Every filter, pipeline and index of the task scheduler, as pure functions.

This module and `expressions` are the only places with field paths of queries.
A conditional write keeps plain field predicates in its filter, ``key`` first
(the index, and the shard key), and the rest of its condition inside the
pipeline, so that it runs alike and fast on every server. All writes after the
claim are fenced by the attempt's ``running_id``; one that changes nothing has
lost a race or was applied before, and may be repeated at will.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any, Final

import attrs

from mscheduler_sync._storage import expressions as x

Document = dict[str, Any]

EXPIRED_REASON: Final = "LeaseExpired: the worker stopped renewing its lease"
#: Stands in ``specific_worker_ids`` of a cancelled task, so that workers that
#: know nothing of cancelling (the Rust crate's) keep off it.
NOBODY: Final = "__cancelled__"

#: What the expressions rely on; a document that fails it is left alone.
READABLE: Final[Document] = {
    x.ATTEMPTS: {"$type": "array"},
    "task_state.start_time": {"$type": "date"},
    "task_option.concurrent_worker_cnt": {"$gte": 1, "$lte": 1_000_000},
    "task_option.worker_timeout_ms": {"$gte": 1, "$lte": x.MAX_DURATION_MS},
    "task_option.unexpected_retry_delay_ms": {"$gte": 0, "$lte": x.MAX_DURATION_MS},
}


@attrs.frozen
class Update:
    """
    One conditional write of one document.
    """

    filter: Document
    pipeline: list[x.Stage]


@attrs.frozen
class Find:
    """
    One bounded read.
    """

    filter: Document
    projection: Document
    sort: list[tuple[str, int]]
    limit: int


# -- indexes ---------------------------------------------------------------------------------

#: (keys, options). The crate's own two indexes coexist: same name and options for ``key``.
INDEXES: Final[list[tuple[list[tuple[str, int]], Document]]] = [
    ([("key", 1)], {"name": "key", "unique": True}),
    ([("lanes", 1), ("due", 1)], {"name": "lanes_due"}),
    ([("finished_at", 1)], {"name": "finished_at", "sparse": True}),
    ([("expire_at", 1)], {"name": "expire_at", "sparse": True, "expireAfterSeconds": 0}),
]


# -- discovery -------------------------------------------------------------------------------

_DISCOVERED: Final[Document] = {
    "key": 1,
    "due": 1,
    "task_option.priority": 1,
    "task_option.worker_timeout_ms": 1,
}


def due_tasks(
    lane: str,
    *,
    until: dt.datetime,
    limit: int,
    after: dt.datetime = x.EPOCH,
    eligible: Document | None = None,
) -> Find:
    """
    The earliest tasks of one lane that are due in [*after*, *until*]. Index: lanes_due.
    """
    return Find(
        filter={"lanes": lane, "due": {"$gte": after, "$lte": until}, **(eligible or {})},
        projection=_DISCOVERED,
        sort=[("due", 1)],
        limit=limit,
    )


def eligible_in_shared_lanes(worker_id: str, names: Sequence[str | None] | None) -> Document:
    """
    What a lane does not say: allowed, of a known name, and not yet done or held by this worker.
    """
    return {
        "task_option.specific_worker_ids": {"$in": [None, [], worker_id]},
        **_known_name(names),
        x.ATTEMPTS: {
            "$not": {
                "$elemMatch": {"worker_id": worker_id, "fail_time": None},
            }
        },
    }


def _known_name(names: Sequence[str | None] | None) -> Document:
    return {} if names is None else {"name": {"$in": list(names)}}


def eligible_name(names: Sequence[str | None] | None) -> Document:
    """
    The condition on ``name`` of a consumer that knows *names* (None: all).
    """
    return _known_name(names)


def underived(*, after_id: object | None, limit: int) -> Find:
    """
    Documents without derived fields (written by a Rust worker), in order of _id. Index: lanes_due.
    """
    condition: Document = {"lanes": None, "due": None}
    if after_id is not None:
        condition["_id"] = {"$gt": after_id}
    return Find(filter=condition, projection={"key": 1}, sort=[("_id", 1)], limit=limit)


def unfinished(*, after_key: str, limit: int) -> Find:
    """
    A page over all unfinished documents in order of key, for the sweep of a shared collection.
    """
    return Find(
        filter={"key": {"$gt": after_key}, "finished_at": None},
        projection={"params": 0, "progress": 0, f"{x.ATTEMPTS}.returns": 0},
        sort=[("key", 1)],
        limit=limit,
    )


def discovered_by_id(ids: Sequence[object]) -> Find:
    """
    What discovery needs to know of the documents *ids* (at most 100). Index: _id.
    """
    return Find(
        filter={"_id": {"$in": list(ids)}},
        projection={**_DISCOVERED, "lanes": 1},
        sort=[],
        limit=len(ids),
    )


def discovered_by_key(keys: Sequence[str]) -> Find:
    """
    What discovery needs to know of the tasks *keys* (at most 100). Index: key.
    """
    return Find(
        filter={"key": {"$in": list(keys)}},
        projection={**_DISCOVERED, "lanes": 1},
        sort=[],
        limit=len(keys),
    )


def whole(keys: Sequence[str]) -> Find:
    """
    The tasks *keys* (at most 100) without their results. Index: key.
    """
    return Find(
        filter={"key": {"$in": list(keys)}},
        projection={f"{x.ATTEMPTS}.returns": 0},
        sort=[],
        limit=len(keys),
    )


def watch_pipeline() -> list[x.Stage]:
    """
    Change events that may make a task claimable, without clock and without bodies.

    Of our own writes, heartbeats (they touch ``beat``) and steps to running or to
    an end are dropped. A write that touches neither ``status`` nor ``due`` is a
    Rust worker's or a person's: dropped only if it moved nothing but a lease.
    No expression here can raise: it would kill the stream at every resume.
    """
    changed = "updateDescription.updatedFields"
    only_leases = {
        "$allElementsTrue": [
            {
                "$map": {
                    "input": {"$objectToArray": {"$ifNull": [f"${changed}", {}]}},
                    "as": "f",
                    "in": {
                        "$regexMatch": {
                            "input": "$$f.k",
                            "regex": r"^task_state\.worker_states\.\d+\.ping_expire_time$",
                        }
                    },
                }
            }
        ]
    }
    quiet = [x.RUNNING, *x.TERMINAL]
    return [
        {
            "$match": {
                "operationType": {"$in": ["insert", "update", "replace"]},
                f"{changed}.beat": {"$exists": False},
                f"{changed}.status": {"$nin": quiet},
                "$or": [
                    {"operationType": {"$in": ["insert", "replace"]}},
                    {f"{changed}.due": {"$exists": True}},
                    {f"{changed}.status": {"$exists": True}},
                    {"$expr": {"$not": [only_leases]}},
                ],
            }
        },
        {
            "$project": {
                "operationType": 1,
                "documentKey": 1,
                "fullDocument.key": 1,
                "fullDocument.due": 1,
                "fullDocument.lanes": 1,
                "fullDocument.status": 1,
                "fullDocument.task_option.priority": 1,
                "fullDocument.task_option.worker_timeout_ms": 1,
                f"{changed}.due": 1,
            }
        },
    ]


# -- attempts --------------------------------------------------------------------------------


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
            **_known_name(names),
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


def lanes_of(*, name: str | None, worker_ids: Sequence[str], shared: bool) -> list[str]:
    """
    The lanes of a new task; `expressions.lanes` computes the same in the database.
    """
    if shared:
        return [x.LANE_SHARED]
    if worker_ids:
        return [x.lane_of_worker(worker_id) for worker_id in worker_ids]
    if name is not None:
        return [x.LANE_ANY_NAME, x.lane_of_name(name)]
    return [x.LANE_UNNAMED]


# -- producing -------------------------------------------------------------------------------


def task(key: str) -> Document:
    """
    The filter of one task. Index: key.
    """
    return {"key": key}


def tasks(keys: Sequence[str]) -> Document:
    """
    The filter of the tasks *keys* (at most 100). Index: key.
    """
    return {"key": {"$in": list(keys)}}


def resend(
    key: str,
    send_id: str,
    *,
    start_time: dt.datetime | None,
    replace: Document | None,
    rerun: bool,
    only_if_idle: bool,
    clean_success: bool,
    clean_failed: bool,
) -> Update:
    """
    Apply a send to an existing task, once: ``send_id`` in the document says that it was.

    *replace* holds params, name, options and facts to set; `None` values in it
    are removed. With *rerun* a task that has ended is armed again; with
    *only_if_idle* nothing is changed while a live attempt runs.
    """
    live = x.attempts_where({"$and": [x.E_OPEN, {"$gt": ["$$e.ping_expire_time", x.NOW]}]})
    may: list[x.Expr] = [{"$ne": ["$send_id", x.literal(send_id)]}]
    if only_if_idle:
        may.append({"$eq": [{"$size": live}, 0]})
    dropped: list[x.Expr] = []
    if clean_success:
        dropped.append(x.E_SUCCEEDED)
    if clean_failed:
        dropped.append({"$and": [x.E_FAILED, {"$not": [x.E_SUCCEEDED]}]})
    if rerun:
        dropped.append({"$and": ["$_ended", {"$not": [x.E_OPEN]}]})
    changes: Document = {}
    if dropped:
        changes.update(_folded({"$or": dropped}))
    if start_time is not None:
        changes["task_state.start_time"] = start_time
    for path, value in (replace or {}).items():
        changes[path] = "$$REMOVE" if value is None and path != "params" else x.literal(value)
    if rerun:
        changes["cancel"] = {"$cond": ["$_ended", "$$REMOVE", "$cancel"]}
        if "task_option.specific_worker_ids" not in changes and "task_option" not in changes:
            changes["task_option.specific_worker_ids"] = {
                "$cond": ["$_ended", _original_ids(), "$task_option.specific_worker_ids"]
            }
        if start_time is None:
            changes["task_state.start_time"] = {
                "$cond": ["$_ended", x.NOW, "$task_state.start_time"]
            }
    changes["send_id"] = x.literal(send_id)
    guarded = {
        path: {"$cond": ["$_may", value, _unchanged(path)]} for path, value in changes.items()
    }
    return Update(
        filter={"key": key, **READABLE},
        pipeline=[
            x.tally(),
            *x.derive(),
            {
                "$set": {
                    "_may": {"$and": may},
                    "_ended": {"$in": ["$status", list(x.TERMINAL)]},
                }
            },
            {"$set": guarded},
            {"$unset": ["_may", "_ended"]},
            x.lanes(),
            x.tally(),
            *x.derive(),
        ],
    )


def _unchanged(path: str) -> x.Expr:
    return {"$ifNull": [f"${path}", "$$REMOVE"]}


def _folded(dropped: x.Expr) -> Document:
    """
    Remove the attempts that are *dropped*, keeping count of them.
    """
    failed = x.attempts_where({"$and": [dropped, x.E_FAILED, {"$not": [x.E_SUCCEEDED]}]})
    succeeded = x.attempts_where({"$and": [dropped, x.E_SUCCEEDED]})
    return {
        x.ATTEMPTS: x.attempts_where({"$not": [dropped]}),
        "counters.failed": {"$add": [x.number_at("counters.failed"), {"$size": failed}]},
        "counters.succeeded": {"$add": [x.number_at("counters.succeeded"), {"$size": succeeded}]},
    }


def _original_ids() -> x.Expr:
    return {
        "$cond": [
            {"$isArray": ["$cancel.worker_ids"]},
            "$cancel.worker_ids",
            "$task_option.specific_worker_ids",
        ]
    }


def cancel(key: str) -> Update:
    """
    Ask for the end of a task that has not ended: no new attempt, and running ones are told.
    """
    request = {
        "$cond": [
            {"$or": [x.has("cancel.time"), {"$in": ["$status", list(x.TERMINAL)]}]},
            {"$ifNull": ["$cancel", "$$REMOVE"]},
            {"time": x.NOW, "worker_ids": "$task_option.specific_worker_ids"},
        ]
    }
    return Update(
        filter={"key": key, **READABLE},
        pipeline=[
            x.tally(),
            *x.derive(),
            {"$set": {"cancel": request}},
            {
                "$set": {
                    "task_option.specific_worker_ids": {
                        "$cond": [
                            x.has("cancel.time"),
                            [NOBODY],
                            "$task_option.specific_worker_ids",
                        ]
                    }
                }
            },
            x.lanes(),
            x.tally(),
            *x.derive(),
        ],
    )


def finished_before(cutoff: dt.datetime, statuses: Sequence[str], limit: int) -> Find:
    """
    A page of tasks that ended before *cutoff*, oldest first. Index: finished_at.
    """
    return Find(
        filter={
            "finished_at": {"$gte": x.EPOCH, "$lt": cutoff},
            "status": {"$in": list(statuses)},
        },
        projection={"key": 1},
        sort=[("finished_at", 1)],
        limit=limit,
    )


def ended_among(keys: Sequence[str], cutoff: dt.datetime, statuses: Sequence[str]) -> Document:
    """
    The filter that deletes *keys* as long as they are still ended. Index: key.
    """
    return {
        "key": {"$in": list(keys)},
        "finished_at": {"$gte": x.EPOCH, "$lt": cutoff},
        "status": {"$in": list(statuses)},
    }
