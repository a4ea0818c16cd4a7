"""
What a producer does to a task that exists, and to those that have ended.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Final

from mscheduler_sync._storage import expressions as x
from mscheduler_sync._storage.derived import DERIVED
from mscheduler_sync._storage.statement import Delete, Document, Find, Insert, Update
from mscheduler_sync._storage.statements.base import TASKS, of_tasks

_IDS: Final = "task_option.specific_worker_ids"


def new_task(document: Document) -> Insert:
    return Insert(TASKS, document, mark="send_id", unique="key")


def new_task_in_transaction(document: Document) -> Update:
    """
    Insert *document* unless its key is taken: a duplicate would end the transaction.
    """
    return Update(TASKS, {"key": document["key"]}, {"$setOnInsert": document}, upsert=True)


def task(key: str, projection: Mapping[str, object] | None = None) -> Find:
    """
    One task, whole or as *projection* says. Index: key.
    """
    return Find(TASKS, {"key": key}, None if projection is None else dict(projection), limit=1)


def tasks(conditions: Document, *, after: str | None = None, limit: int = 0) -> Find:
    """
    The tasks that fulfil *conditions*, in order of key, from after the key *after*. Index: key.
    """
    page = {} if after is None else {"key": {"$gt": after}}
    return Find(TASKS, {**page, **conditions}, None, [("key", 1)], limit)


def delete_task(key: str) -> Delete:
    return Delete(TASKS, {"key": key})


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
    Apply a send to an existing task.

    *replace* holds params, name, options and facts to set; `None` values in it
    are removed. With *rerun* a task that has ended is armed again; with
    *only_if_idle* nothing is changed while a live attempt runs. What may not be
    applied twice, or may not be applied at all, leaves *send_id* in the document.
    """
    needs_mark = rerun or only_if_idle or clean_success or clean_failed
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
    changes.update(_restriction(changes.pop(_IDS, None), rerun=rerun))
    if rerun and start_time is None:
        changes["task_state.start_time"] = {"$cond": ["$_ended", x.NOW, "$task_state.start_time"]}
    if needs_mark:
        changes["send_id"] = x.literal(send_id)
    guarded = {
        path: {"$cond": ["$_may", value, _unchanged(path)]} for path, value in changes.items()
    }
    return of_tasks(
        [key],
        {},
        [
            *DERIVED,
            {
                "$set": {
                    "_may": {"$and": may},
                    "_ended": {"$in": ["$status", list(x.TERMINAL)]},
                }
            },
            {"$set": guarded},
            {"$unset": ["_may", "_ended"]},
            x.routes(),
            *DERIVED,
        ],
    )


def _restriction(ids: x.Expr | None, *, rerun: bool) -> Document:
    """
    The worker ids, and the request to cancel that may have put them aside.

    A task that stays cancelled stays barred to all; new *ids* wait in the request.
    """
    if ids is None and not rerun:
        return {}
    is_cancelled = {"$and": [x.has("$cancel.time"), {"$eq": [{"$type": "$cancel"}, "object"]}]}
    stays = {"$and": [is_cancelled, {"$not": ["$_ended"]}]} if rerun else is_cancelled
    if ids is None:
        return {
            _IDS: {"$cond": ["$_ended", _original_ids(), f"${_IDS}"]},
            "cancel": {"$cond": [stays, "$cancel", "$$REMOVE"]},
        }
    return {
        _IDS: {"$cond": [stays, [x.NOBODY], ids]},
        "cancel": {
            "$cond": [stays, {"$mergeObjects": ["$cancel", {"worker_ids": ids}]}, "$$REMOVE"]
        },
    }


def _unchanged(path: str) -> x.Expr:
    # Not $ifNull: a null of the application's is a value to keep.
    return {"$cond": [{"$eq": [{"$type": f"${path}"}, "missing"]}, "$$REMOVE", f"${path}"]}


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
            {"$or": [x.has("$cancel.time"), {"$in": ["$status", list(x.TERMINAL)]}]},
            {"$ifNull": ["$cancel", "$$REMOVE"]},
            {"time": x.NOW, "worker_ids": "$task_option.specific_worker_ids"},
        ]
    }
    return of_tasks(
        [key],
        {},
        [
            *DERIVED,
            {"$set": {"cancel": request}},
            {
                "$set": {
                    "task_option.specific_worker_ids": {
                        "$cond": [
                            x.has("$cancel.time"),
                            [x.NOBODY],
                            "$task_option.specific_worker_ids",
                        ]
                    }
                }
            },
            x.routes(),
            *DERIVED,
        ],
    )


def finished_before(cutoff: dt.datetime, statuses: Sequence[str], limit: int) -> Find:
    """
    A page of tasks that ended before *cutoff*, oldest first. Index: finished_at.
    """
    return Find(TASKS, _ended(cutoff, statuses), {"key": 1}, [("finished_at", 1)], limit)


def delete_ended(keys: Sequence[str], cutoff: dt.datetime, statuses: Sequence[str]) -> Delete:
    """
    Delete *keys* (at most 100) as long as they are still ended. Index: key.
    """
    return Delete(TASKS, {"key": {"$in": list(keys)}, **_ended(cutoff, statuses)}, many=True)


def _ended(cutoff: dt.datetime, statuses: Sequence[str]) -> Document:
    return {
        "finished_at": {"$gte": x.EPOCH, "$lt": cutoff},
        "status": {"$in": list(statuses)},
    }
