"""
What a producer does to a task that exists, and to those that have ended.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Final

from mscheduler_sync._storage import expressions as x
from mscheduler_sync._storage.statements.base import READABLE, Document, Find, Update

_IDS: Final = "task_option.specific_worker_ids"


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
    return Update(
        keys=[key],
        filter={"key": key, **READABLE},
        pipeline=[
            *x.DERIVED,
            {
                "$set": {
                    "_may": {"$and": may},
                    "_ended": {"$in": ["$status", list(x.TERMINAL)]},
                }
            },
            {"$set": guarded},
            {"$unset": ["_may", "_ended"]},
            x.routes(),
            *x.DERIVED,
        ],
    )


def _restriction(ids: x.Expr | None, *, rerun: bool) -> Document:
    """
    The worker ids, and the request to cancel that may have put them aside.

    A task that stays cancelled stays barred to all; new *ids* wait in the request.
    """
    if ids is None and not rerun:
        return {}
    is_cancelled = {"$and": [x.has("cancel.time"), {"$eq": [{"$type": "$cancel"}, "object"]}]}
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
            {"$or": [x.has("cancel.time"), {"$in": ["$status", list(x.TERMINAL)]}]},
            {"$ifNull": ["$cancel", "$$REMOVE"]},
            {"time": x.NOW, "worker_ids": "$task_option.specific_worker_ids"},
        ]
    }
    return Update(
        keys=[key],
        filter={"key": key, **READABLE},
        pipeline=[
            *x.DERIVED,
            {"$set": {"cancel": request}},
            {
                "$set": {
                    "task_option.specific_worker_ids": {
                        "$cond": [
                            x.has("cancel.time"),
                            [x.NOBODY],
                            "$task_option.specific_worker_ids",
                        ]
                    }
                }
            },
            x.routes(),
            *x.DERIVED,
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
