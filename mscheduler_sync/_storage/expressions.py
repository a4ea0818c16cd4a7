"""
Aggregation expressions over one task document, each written once.

All of them are portable: the server's time is `NOW` (bare ``$$NOW`` compares
wrongly on the embedded server), arrays are mapped instead of addressed through
paths, and no expression raises on any document that passes `statements.READABLE`,
whatever its array elements look like.
"""

from __future__ import annotations

import datetime as dt
from typing import Any, Final

Expr = Any
Stage = dict[str, Any]

NOW: Final[Expr] = {"$toDate": {"$toLong": "$$NOW"}}
EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
#: The due time of a task that no worker may ever claim as it stands.
NEVER: Final = dt.datetime(9999, 12, 31, tzinfo=dt.timezone.utc)
#: Longer durations than a hundred years are refused where they are given, and not computed with.
MAX_DURATION_MS: Final = 100 * 366 * 86_400_000
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


def is_attempt(running_id: str) -> Expr:
    return {"$eq": ["$$e.running_id", literal(running_id)]}


def replace_attempt(running_id: str, changes: dict[str, Expr]) -> Expr:
    """
    All attempts, with *changes* merged into the one called *running_id*.
    """
    return attempts_mapped(
        {"$cond": [is_attempt(running_id), {"$mergeObjects": ["$$e", changes]}, "$$e"]}
    )


def settle(reason: str, *, elapsed_since_outage_ms: int | None) -> list[Stage]:
    """
    End every open attempt whose lease has lapsed: it becomes a failed one with *reason*.

    One that a stopping worker marked as interrupted is removed and counted as
    released instead. Within *elapsed_since_outage_ms* after an outage of the
    store nothing is settled before the task's own heartbeat interval has passed,
    so that a living owner can speak first.
    """
    lapsed: list[Expr] = [E_OPEN, {"$lte": ["$$e.ping_expire_time", NOW]}]
    if elapsed_since_outage_ms is not None:
        lapsed.append({"$lte": ["$task_option.ping_interval_ms", elapsed_since_outage_ms]})
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


def tally() -> Stage:
    """
    Count the attempts once, into a temporary field that `derive` reads and removes.
    """
    open_ends = attempts_mapped("$$e.ping_expire_time", source="$$open")
    # A failure written by a Rust worker has no retry time of its own.
    crate_retry_time: Expr = {
        "$cond": [
            {"$eq": [{"$type": "$$e.fail_time"}, "date"]},
            date_plus("$$e.fail_time", number_at("task_option.unexpected_retry_delay_ms")),
            None,
        ]
    }
    retry_times = attempts_mapped({"$ifNull": ["$$e.retry_time", crate_retry_time]}, source="$$bad")
    return {
        "$set": {
            "_tally": {
                "$let": {
                    "vars": {
                        "ok": {"$size": attempts_where(E_SUCCEEDED)},
                        "open": attempts_where(E_OPEN),
                        "bad": attempts_where({"$and": [E_FAILED, {"$not": [E_SUCCEEDED]}]}),
                    },
                    "in": {
                        "ok": "$$ok",
                        "open": {"$size": "$$open"},
                        "lease_end": {"$min": open_ends},
                        "ready": {"$max": ["$task_state.start_time", {"$max": retry_times}]},
                        "spent": {
                            "$or": [
                                {"$gte": [{"$size": "$$bad"}, _MAX_ATTEMPTS]},
                                {
                                    "$in": [
                                        True,
                                        attempts_mapped(
                                            {"$eq": ["$$e.final", True]}, source="$$bad"
                                        ),
                                    ]
                                },
                            ]
                        },
                    },
                }
            }
        }
    }


def derive() -> list[Stage]:
    """
    Set the derived fields from the tally: functions of the document alone, without a clock.

    ``status``: see docs/state_machine.md. ``due``: from when a worker may claim;
    `NEVER` once the task has ended; while every place is taken, or no further
    attempt is allowed, the earliest end of an open lease, so that a dead worker's
    task becomes due by itself.
    """
    full = {
        "$gte": [
            {"$add": ["$_tally.ok", "$_tally.open"]},
            "$task_option.concurrent_worker_cnt",
        ]
    }
    status = {
        "$switch": {
            "branches": [
                {
                    "case": {"$gte": ["$_tally.ok", "$task_option.concurrent_worker_cnt"]},
                    "then": SUCCEEDED,
                },
                {"case": {"$gt": ["$_tally.open", 0]}, "then": RUNNING},
                {"case": has("cancel.time"), "then": CANCELLED},
                {"case": "$_tally.spent", "then": FAILED},
            ],
            "default": WAITING,
        }
    }
    ended = {"$in": ["$status", list(TERMINAL)]}
    no_new_attempt = {"$or": [full, "$_tally.spent", has("cancel.time")]}
    due = {
        "$cond": [
            ended,
            NEVER,
            {
                "$cond": [
                    no_new_attempt,
                    {"$ifNull": ["$_tally.lease_end", EPOCH]},
                    {"$min": ["$_tally.ready", "$_tally.lease_end"]},
                ]
            },
        ]
    }
    ended_at = {
        "$max": [
            {"$max": attempts_mapped("$$e.success_time")},
            {"$max": attempts_mapped("$$e.fail_time")},
            "$cancel.time",
        ]
    }
    expires = {
        "$cond": [
            {
                "$and": [
                    {"$gte": ["$keep_ms", 0]},
                    {"$lte": ["$keep_ms", MAX_DURATION_MS]},
                    {"$eq": [{"$type": "$finished_at"}, "date"]},
                ]
            },
            date_plus("$finished_at", "$keep_ms"),
            "$$REMOVE",
        ]
    }
    return [
        {"$set": {"status": status}},
        {"$set": {"due": due, "finished_at": {"$cond": [ended, ended_at, "$$REMOVE"]}}},
        {"$set": {"expire_at": expires}},
        {"$unset": "_tally"},
    ]


#: Lane prefixes. A lane is a scalar that says who may take a task, for the index (lanes, due).
LANE_UNNAMED, LANE_ANY_NAME, LANE_SHARED = "*", "*n", "+"


def lane_of_name(name: str) -> str:
    return "=" + name


def lane_of_worker(worker_id: str) -> str:
    return "@" + worker_id


def lanes() -> Stage:
    """
    Set ``lanes`` from name, restriction and sharing.

    A task for several workers, or with a budget per worker, may be due for one
    worker and done for another; such tasks have a lane of their own so that they
    never stand before others. A pinned task stands in the lanes of its workers.
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
    is_pinned = {"$and": [{"$isArray": [ids]}, {"$ne": [ids, []]}]}
    is_named = {"$eq": [{"$type": "$name"}, "string"]}
    return {
        "$set": {
            "lanes": {
                "$switch": {
                    "branches": [
                        {"case": shared, "then": [LANE_SHARED]},
                        {"case": is_pinned, "then": pinned},
                        {
                            "case": is_named,
                            "then": [LANE_ANY_NAME, {"$concat": ["=", "$name"]}],
                        },
                    ],
                    "default": [LANE_UNNAMED],
                }
            }
        }
    }
