"""
Aggregation expressions over one task document, each written once.

All of them are portable: the server's time is `NOW` (bare ``$$NOW`` compares
wrongly on the embedded server), arrays are mapped instead of addressed through
paths, and no expression raises on any document that passes `statements.READABLE`,
whatever its array elements look like.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
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
#: A driver may need seconds to find a server that has come back, however often tasks beat.
OUTAGE_PATIENCE_MS: Final = 4000
#: A call that takes longer has met an outage of some kind.
SAT_OUT_MS: Final = 1000
#: Failed attempts after which a task fails even if its budget is kept per worker.
WORKER_SCOPE_CAP: Final = 100

ATTEMPTS: Final = "task_state.worker_states"
WAITING: Final = "waiting"
RUNNING: Final = "running"
SUCCEEDED: Final = "succeeded"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
TERMINAL: Final = (SUCCEEDED, FAILED, CANCELLED)


# Present: neither missing nor null. In BSON's order everything else is above null.
def _has(path: str) -> Expr:
    return {"$gt": [path, None]}


E_SUCCEEDED: Final[Expr] = _has("$$e.success_time")
E_FAILED: Final[Expr] = _has("$$e.fail_time")
#: An open attempt: a worker has it and no outcome stands. What is no object has no worker.
E_OPEN: Final[Expr] = {
    "$and": [
        _has("$$e.worker_id"),
        {"$not": [E_SUCCEEDED]},
        {"$not": [E_FAILED]},
    ]
}
_MAX_ATTEMPTS: Final[Expr] = {
    "$cond": [
        {"$eq": ["$retry.scope", "worker"]},
        WORKER_SCOPE_CAP,
        "$task_option.max_unexpected_retries",
    ]
}


def _is_date(path: str) -> Expr:
    return {"$eq": [{"$type": path}, "date"]}


def date_or_null(path: str) -> Expr:
    """
    The date at *path* (with its ``$``), or null where anything else stands.
    """
    return {"$cond": [_is_date(path), path, None]}


def _within_reach(path: str) -> Expr:
    """
    The date at *path*, or `NEVER` if that is earlier: something can be added to it.
    """
    return {"$min": [path, NEVER]}


def literal(value: object) -> Expr:
    """
    Protect *value* from being read as a path or an expression.
    """
    return {"$literal": value}


def has(path: str) -> Expr:
    """
    True where the field at *path* is neither missing nor null.
    """
    return _has(f"${path}")


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
    End every open attempt whose lease has lapsed: it becomes a failed one with *reason*.

    One that a stopping worker marked as interrupted is removed and counted as
    released instead. Within *elapsed_since_outage_ms* after an outage of the
    store nothing is settled before the task's own heartbeat interval has passed, and
    `OUTAGE_PATIENCE_MS`, so that a living owner can speak first. A statement that was *sent_at*
    more than `SAT_OUT_MS` ago has itself sat an outage out, and settles nothing either.
    """
    lapsed: list[Expr] = [E_OPEN, {"$lte": ["$$e.ping_expire_time", NOW]}]
    if elapsed_since_outage_ms is not None:
        patience_ms = {"$max": ["$task_option.ping_interval_ms", OUTAGE_PATIENCE_MS]}
        lapsed.append({"$lte": [patience_ms, elapsed_since_outage_ms]})
    if sent_at is not None:
        lapsed.append({"$lte": [NOW, literal(sent_at + dt.timedelta(milliseconds=SAT_OUT_MS))]})
    interrupted: Expr = {"$and": [{"$eq": ["$$e.interrupted", True]}, *lapsed]}
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
                    {"$cond": [{"$and": lapsed}, as_failed, "$$e"]},
                    source=attempts_where({"$not": [interrupted]}),
                ),
            }
        }
    ]


def derive(
    *, may_add: Callable[[], Expr] | None = None, added: Expr = None, lease_end: Expr = None
) -> list[Stage]:
    """
    Set the derived fields: functions of the document alone, without a clock.

    ``status``: see docs/state_machine.md. ``due``: from when a worker may claim;
    `NEVER` once the task has ended; while every place is taken, or no further
    attempt is allowed, the earliest end of an open lease, so that a dead worker's
    task becomes due by itself.

    A claim adds an attempt in the same breath: *added*, with the lease *lease_end*, where
    *may_add* holds. That condition may use ``$$free`` (a place and a try are left,
    nobody cancelled) and ``$$ready`` (from when the next attempt may start).
    """
    # A failure written by a Rust worker has no retry time of its own.
    crate_retry_time: Expr = {
        "$cond": [
            _is_date("$$e.fail_time"),
            date_plus(
                _within_reach("$$e.fail_time"), number_at("task_option.unexpected_retry_delay_ms")
            ),
            None,
        ]
    }
    retry_times = attempts_mapped(
        {"$cond": [_is_date("$$e.retry_time"), "$$e.retry_time", crate_retry_time]}, source="$$bad"
    )
    # What is no date ends a lease at once: the due time is always a date.
    lease_ends = attempts_mapped(
        {
            "$cond": [
                {
                    "$and": [
                        _has("$$e.ping_expire_time"),
                        {"$not": [_is_date("$$e.ping_expire_time")]},
                    ]
                },
                EPOCH,
                {"$ifNull": ["$$e.ping_expire_time", None]},
            ]
        },
        source="$$open",
    )
    is_final = {"$in": [True, attempts_mapped({"$eq": ["$$e.final", True]}, source="$$bad")]}
    counted = {
        "ok": {"$size": attempts_where(E_SUCCEEDED)},
        "open": attempts_where(E_OPEN),
        "bad": attempts_where({"$and": [E_FAILED, {"$not": [E_SUCCEEDED]}]}),
        "places": "$task_option.concurrent_worker_cnt",
        "cancelled": has("cancel.time"),
    }
    judged = {
        "spent": {"$or": [{"$gte": [{"$size": "$$bad"}, _MAX_ATTEMPTS]}, is_final]},
        "ready": {"$max": ["$task_state.start_time", {"$max": retry_times}]},
        "held": {"$size": "$$open"},
        "ends": {"$min": lease_ends},
    }
    free = {
        "$not": [
            {
                "$or": [
                    "$$cancelled",
                    "$$spent",
                    {"$gte": [{"$add": ["$$ok", "$$held"]}, "$$places"]},
                ]
            }
        ]
    }
    status = {
        "$switch": {
            "branches": [
                {"case": {"$gte": ["$$ok", "$$places"]}, "then": SUCCEEDED},
                {"case": {"$gt": ["$$held", 0]}, "then": RUNNING},
                {"case": "$$cancelled", "then": CANCELLED},
                {"case": "$$spent", "then": FAILED},
            ],
            "default": WAITING,
        }
    }
    due = {
        "$cond": [
            {"$in": ["$$status", list(TERMINAL)]},
            NEVER,
            {
                "$cond": [
                    free,
                    {"$min": ["$$ready", "$$ends"]},
                    {"$ifNull": ["$$ends", EPOCH]},
                ]
            },
        ]
    }
    ended_at = {
        "$cond": [
            {"$in": ["$$status", list(TERMINAL)]},
            {
                "$max": [
                    {"$max": attempts_mapped(date_or_null("$$e.success_time"))},
                    {"$max": attempts_mapped(date_or_null("$$e.fail_time"))},
                    date_or_null("$cancel.time"),
                    EPOCH,
                ]
            },
            None,
        ]
    }
    result: Expr = {
        "$let": {
            "vars": {"status": status},
            "in": {"status": "$$status", "due": due, "ended_at": ended_at, "add": False},
        }
    }
    if may_add is not None:
        result = {
            "$let": {
                "vars": {"free": free},
                "in": {
                    "$cond": [
                        may_add(),
                        {
                            "$let": {
                                "vars": {
                                    "held": {"$add": ["$$held", 1]},
                                    "ends": {"$min": ["$$ends", lease_end]},
                                    "status": RUNNING,
                                },
                                "in": {
                                    "status": "$$status",
                                    "due": due,
                                    "ended_at": None,
                                    "add": True,
                                },
                            }
                        },
                        result,
                    ]
                },
            }
        }
    fields: dict[str, Expr] = {
        "status": "$_derived.status",
        "due": "$_derived.due",
        "finished_at": {"$ifNull": ["$_derived.ended_at", "$$REMOVE"]},
        "expire_at": expiry("$_derived.ended_at"),
    }
    if may_add is not None:
        attempts = f"${ATTEMPTS}"
        fields[ATTEMPTS] = {
            "$cond": ["$_derived.add", {"$concatArrays": [attempts, [added]]}, attempts]
        }
    return [
        {
            "$set": {
                "_derived": {
                    "$let": {
                        "vars": counted,
                        "in": {"$let": {"vars": judged, "in": result}},
                    }
                }
            }
        },
        {"$set": fields},
        {"$unset": "_derived"},
    ]


def expiry(ended_at: str) -> Expr:
    """
    When a task is deleted that ended at the path *ended_at*; nothing if it is kept or has no end.
    """
    return {
        "$cond": [
            {
                "$and": [
                    {"$gte": ["$keep_ms", 0]},
                    {"$lte": ["$keep_ms", MAX_DURATION_MS]},
                    _is_date(ended_at),
                ]
            },
            date_plus(_within_reach(ended_at), "$keep_ms"),
            "$$REMOVE",
        ]
    }


#: The derived fields of a document to which nothing is added; shared, not to be changed.
DERIVED: Final[list[Stage]] = derive()

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
    is_barred = {"$and": [{"$eq": [ids, [NOBODY]]}, has("cancel.time")]}
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
