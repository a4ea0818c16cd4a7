"""
Tickers and schedules.
"""

from __future__ import annotations

from typing import Literal

from bson.int64 import Int64

from mscheduler_sync._storage import expressions as x
from mscheduler_sync._storage.statement import Delete, Document, Find, Update
from mscheduler_sync.pool.statements.base import (
    changed,
    only_if,
)

Recurrent = Literal["tickers", "schedules"]


def make(where: Recurrent, document_id: str, pool: str, name: str, interval_ms: int) -> Update:
    """
    Make a ticker or a schedule, or give it another interval.

    A schedule's first plan is due now. A ticker with the same interval keeps its next tick.
    """
    same = {"$eq": ["$interval_ms", Int64(interval_ms)]}
    fields: Document = {
        "pool": x.literal(pool),
        "name": x.literal(name),
        "number": {"$ifNull": ["$number", Int64(0)]},
    }
    if where == "tickers":
        fields["next"] = {"$cond": [same, "$next", x.server_now_plus(interval_ms)]}
        fields["winner"] = {"$ifNull": ["$winner", None]}
    else:
        fields["next"] = {"$ifNull": ["$next", x.NOW]}
        fields["runner"] = {"$ifNull": ["$runner", None]}
        fields["runner_node"] = {"$ifNull": ["$runner_node", None]}
        fields["keys"] = {"$ifNull": ["$keys", []]}
    interval = changed(interval_ms=Int64(interval_ms))
    return Update(where, {"_id": document_id}, [*changed(**fields), *interval], upsert=True)


def read(where: Recurrent, document_id: str) -> Find:
    return Find(where, {"_id": document_id}, limit=1)


def remove(where: Recurrent, document_id: str) -> Delete:
    return Delete(where, {"_id": document_id})


def _following(interval_ms: int) -> x.Expr:
    """
    The first future instant of the row that ``next`` begins.
    """
    late = {"$subtract": [{"$toLong": "$$NOW"}, {"$toLong": "$next"}]}
    missed = {"$floor": {"$divide": [late, interval_ms]}}
    steps = {"$toLong": {"$multiply": [interval_ms, {"$add": [missed, 1]}]}}
    return x.date_plus("$next", steps)


def tick(ticker_id: str, interval_ms: int, number: int, token: str) -> Update:
    """
    Win the tick after *number* if it is due; missed ones count as one.
    """
    return Update(
        "tickers",
        {"_id": ticker_id, "interval_ms": interval_ms, "number": number},
        only_if(
            {"$lte": ["$next", x.NOW]},
            {
                "next": _following(interval_ms),
                "number": {"$add": ["$number", 1]},
                "winner": x.literal(token),
            },
        ),
    )


def begin_plan(schedule_id: str, runner: str, node: str, instead_of: str | None) -> Update:
    """
    Take the plan that is due, from nobody or from the dead runner *instead_of*.
    """
    return Update(
        "schedules",
        {"_id": schedule_id, "runner": instead_of},
        only_if(
            {"$lte": ["$next", x.NOW]},
            {"runner": x.literal(runner), "runner_node": x.literal(node)},
        ),
    )


def track(schedule_id: str, runner: str, key: str) -> Update:
    keys = {"$setUnion": ["$keys", [x.literal(key)]]}
    return Update("schedules", {"_id": schedule_id, "runner": runner}, changed(keys=keys))


def untrack(schedule_id: str, runner: str, key: str) -> Update:
    keys = {"$setDifference": ["$keys", [x.literal(key)]]}
    return Update("schedules", {"_id": schedule_id, "runner": runner}, changed(keys=keys))


def end_plan(schedule_id: str, runner: str, interval_ms: int) -> Update:
    return Update(
        "schedules",
        {"_id": schedule_id, "runner": runner},
        changed(
            next={"$cond": [{"$lte": ["$next", x.NOW]}, _following(interval_ms), "$next"]},
            number={"$add": ["$number", 1]},
            runner=None,
            runner_node=None,
        ),
    )


def leave_plan(schedule_id: str, runner: str) -> Update:
    """
    Give back a plan that was not carried out in full: somebody repeats it.
    """
    return Update(
        "schedules",
        {"_id": schedule_id, "runner": runner},
        changed(runner=None, runner_node=None),
    )


def end_schedule(schedule_id: str, runner: str) -> Delete:
    return Delete("schedules", {"_id": schedule_id, "runner": runner})
