"""
Aggregation expressions over one task document, each written once.

All of them are portable: the server's time is `NOW` (bare ``$$NOW`` compares
wrongly on the embedded server), arrays are mapped instead of addressed through
paths, and no expression raises on any document that passes `statements.base.READABLE`,
whatever its array elements look like.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any, Final

Expr = Any
Stage = dict[str, Any]

NOW: Final[Expr] = {"$toDate": {"$toLong": "$$NOW"}}
EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
#: The due time of a task that no worker may ever claim as it stands.
NEVER: Final = dt.datetime(9999, 12, 31, tzinfo=dt.timezone.utc)
#: Stands in ``specific_worker_ids`` of a cancelled task, so that workers that
#: know nothing of cancelling (the Rust crate's) keep off it.
NOBODY: Final = "__cancelled__"
#: Longer durations than a hundred years are refused where they are given, and not computed with.
MAX_DURATION_MS: Final = 100 * 366 * 86_400_000
#: A driver may need seconds to find a server that is back, however often heartbeats are sent.
OUTAGE_PATIENCE_MS: Final = 4000
#: A call that takes longer has met an outage of some kind.
SLOW_CALL_MS: Final = 1000
#: Failed attempts after which a task fails even if its budget is kept per worker.
WORKER_SCOPE_CAP: Final = 100

ATTEMPTS: Final = "task_state.worker_states"
WAITING: Final = "waiting"
RUNNING: Final = "running"
SUCCEEDED: Final = "succeeded"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
TERMINAL: Final = (SUCCEEDED, FAILED, CANCELLED)


def has(path: str) -> Expr:
    """
    True where *path* (with its ``$``) is neither missing nor null. All else is above null in BSON.
    """
    return {"$gt": [path, None]}


E_SUCCEEDED: Final[Expr] = has("$$e.success_time")
E_FAILED: Final[Expr] = has("$$e.fail_time")
#: An open attempt: a worker has it and no outcome stands. What is no object has no worker.
E_OPEN: Final[Expr] = {
    "$and": [
        has("$$e.worker_id"),
        {"$not": [E_SUCCEEDED]},
        {"$not": [E_FAILED]},
    ]
}


def is_date(path: str) -> Expr:
    return {"$eq": [{"$type": path}, "date"]}


def date_or_null(path: str) -> Expr:
    """
    The date at *path* (with its ``$``), or null where anything else stands.
    """
    return {"$cond": [is_date(path), path, None]}


def within_reach(path: str) -> Expr:
    """
    The date at *path*, or `NEVER` if that is earlier: something can be added to it.
    """
    return {"$min": [path, NEVER]}


def literal(value: object) -> Expr:
    """
    Protect *value* from being read as a path or an expression.
    """
    return {"$literal": value}


def date_plus(date: Expr, milliseconds: Expr) -> Expr:
    """
    *date* moved by *milliseconds*. Adding to a date itself is not known to every server.
    """
    return {"$toDate": {"$add": [{"$toLong": date}, milliseconds]}}


def server_now_plus(milliseconds: Expr) -> Expr:
    return date_plus("$$NOW", milliseconds)


def number_at(path: str) -> Expr:
    """
    The number at *path*, or 0 where anything else stands.
    """
    return {"$cond": [{"$isNumber": f"${path}"}, f"${path}", 0]}


def attempts_where(condition: Expr) -> Expr:
    return {"$filter": {"input": f"${ATTEMPTS}", "as": "e", "cond": condition}}


def attempts_mapped(value: Expr, *, source: Expr = f"${ATTEMPTS}") -> Expr:
    return {"$map": {"input": source, "as": "e", "in": value}}


def one_of(values: Sequence[object], position: Expr) -> Expr:
    """
    The value at *position*; stated once where all are the same.
    """
    first = values[0]
    if all(value is first for value in values):
        return literal(first)
    return {"$arrayElemAt": [literal(list(values)), position]}


def replace_attempts(running_ids: Sequence[str], changes: dict[str, Expr]) -> Expr:
    """
    All attempts, with *changes* merged into those called *running_ids*.
    """
    return attempts_mapped(
        {"$cond": [is_one_of(running_ids), {"$mergeObjects": ["$$e", changes]}, "$$e"]}
    )


def is_one_of(running_ids: Sequence[str]) -> Expr:
    return {"$in": ["$$e.running_id", literal(list(running_ids))]}


def position_of_attempt(running_ids: Sequence[str]) -> Expr:
    return {"$indexOfArray": [literal(list(running_ids)), "$$e.running_id"]}


def position_of_task(keys: Sequence[str]) -> Expr:
    return {"$indexOfArray": [literal(list(keys)), "$key"]}


def settle(
    reason: str, *, elapsed_since_outage_ms: int | None, sent_at: dt.datetime | None = None
) -> list[Stage]:
    """
    End every open attempt whose lease has expired: it becomes a failed one with *reason*.

    One that a stopping worker marked as interrupted is removed and counted as
    released instead. Within *elapsed_since_outage_ms* after an outage of the
    store nothing is settled before the task's own heartbeat interval has passed, and
    `OUTAGE_PATIENCE_MS`, so that a living owner can speak first. A statement that was *sent_at*
    more than `SLOW_CALL_MS` ago has itself sat an outage out, and settles nothing either.
    """
    expired: list[Expr] = [E_OPEN, {"$lte": ["$$e.ping_expire_time", NOW]}]
    if elapsed_since_outage_ms is not None:
        patience_ms = {"$max": ["$task_option.ping_interval_ms", OUTAGE_PATIENCE_MS]}
        expired.append({"$lte": [patience_ms, elapsed_since_outage_ms]})
    if sent_at is not None:
        in_time_until = sent_at + dt.timedelta(milliseconds=SLOW_CALL_MS)
        expired.append({"$lte": [NOW, literal(in_time_until)]})
    interrupted: Expr = {"$and": [{"$eq": ["$$e.interrupted", True]}, *expired]}
    as_failed: Expr = {
        "$mergeObjects": [
            "$$e",
            {"fail_time": NOW, "fail_reason": literal(reason), "retry_time": NOW},
        ]
    }
    return [
        {
            "$set": {
                "counters.released": {
                    "$add": [number_at("counters.released"), {"$size": attempts_where(interrupted)}]
                },
                ATTEMPTS: attempts_mapped(
                    {"$cond": [{"$and": expired}, as_failed, "$$e"]},
                    source=attempts_where({"$not": [interrupted]}),
                ),
            }
        }
    ]


#: Route prefixes. A route is a scalar that says who may take a task, for the index (routes, due).
ROUTE_UNNAMED, ROUTE_ANY_NAME, ROUTE_SHARED = "*", "*n", "+"


def route_of_name(name: str) -> str:
    return "=" + name


def route_of_worker(worker_id: str) -> str:
    return "@" + worker_id


def routes() -> Stage:
    """
    Set ``routes`` from name, restriction and sharing: a text, or an array of several.

    A task for several workers, or with a budget per worker, may be due for one
    worker and done for another; such tasks have a route of their own so that they
    never stand before others. A pinned task stands in the routes of its workers.
    """
    ids = "$task_option.specific_worker_ids"
    shared = {
        "$or": [
            {"$gt": ["$task_option.concurrent_worker_cnt", 1]},
            {"$eq": ["$retry.scope", "worker"]},
        ]
    }
    pinned = {
        "$map": {
            "input": ids,
            "as": "id",
            "in": {
                "$cond": [{"$eq": [{"$type": "$$id"}, "string"]}, {"$concat": ["@", "$$id"]}, "@"]
            },
        }
    }
    one_or_all = {"$cond": [{"$eq": [{"$size": ids}, 1]}, {"$arrayElemAt": [pinned, 0]}, pinned]}
    # A cancelled task is barred to all, and yet somebody must see its last lease end.
    is_barred = {"$and": [{"$eq": [ids, [NOBODY]]}, has("$cancel.time")]}
    is_pinned = {"$and": [{"$isArray": [ids]}, {"$ne": [ids, []]}, {"$not": [is_barred]}]}
    is_named = {"$eq": [{"$type": "$name"}, "string"]}
    return {
        "$set": {
            "routes": {
                "$switch": {
                    "branches": [
                        {"case": shared, "then": ROUTE_SHARED},
                        {"case": is_pinned, "then": one_or_all},
                        {
                            "case": is_named,
                            "then": [ROUTE_ANY_NAME, {"$concat": ["=", "$name"]}],
                        },
                    ],
                    "default": ROUTE_UNNAMED,
                }
            }
        }
    }
