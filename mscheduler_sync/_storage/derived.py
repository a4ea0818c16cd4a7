"""
The derived fields of a task: functions of its document alone, without a clock.

Each is an expression with a name. They stand on one another through variables of two levels,
which `in_scope` gives them: what of the attempts counts, and what follows from that.
"""

from __future__ import annotations

from typing import Final

from mscheduler_sync._storage import expressions as x
from mscheduler_sync._storage.expressions import Expr, Stage

# -- of the attempts ---------------------------------------------------------------------------

#: When a failed attempt may be followed by another. A Rust worker writes no time of the retry.
_RETRY_TIME: Final[Expr] = {
    "$cond": [
        x.is_date("$$e.retry_time"),
        "$$e.retry_time",
        {
            "$cond": [
                x.is_date("$$e.fail_time"),
                x.date_plus(
                    x.within_reach("$$e.fail_time"),
                    x.number_at("task_option.unexpected_retry_delay_ms"),
                ),
                None,
            ]
        },
    ]
}
#: When an open attempt's lease ends. What is no date ends it at once: ``due`` is always a date.
_LEASE_END: Final[Expr] = {
    "$cond": [
        {
            "$and": [
                x.has("$$e.ping_expire_time"),
                {"$not": [x.is_date("$$e.ping_expire_time")]},
            ]
        },
        x.EPOCH,
        {"$ifNull": ["$$e.ping_expire_time", None]},
    ]
}
_MAX_FAILURES: Final[Expr] = {
    "$cond": [
        {"$eq": ["$retry.scope", "worker"]},
        x.WORKER_SCOPE_CAP,
        "$task_option.max_unexpected_retries",
    ]
}
_IS_FINAL: Final[Expr] = {
    "$in": [True, x.attempts_mapped({"$eq": ["$$e.final", True]}, source="$$failures")]
}

_COUNTED: Final[dict[str, Expr]] = {
    "successes": {"$size": x.attempts_where(x.E_SUCCEEDED)},
    "open": x.attempts_where(x.E_OPEN),
    "failures": x.attempts_where({"$and": [x.E_FAILED, {"$not": [x.E_SUCCEEDED]}]}),
    "places": "$task_option.concurrent_worker_cnt",
    "cancelled": x.has("$cancel.time"),
}
_JUDGED: Final[dict[str, Expr]] = {
    # No further attempt is allowed, whoever asks.
    "spent": {"$or": [{"$gte": [{"$size": "$$failures"}, _MAX_FAILURES]}, _IS_FINAL]},
    # From when the next attempt may start.
    "ready": {
        "$max": [
            "$task_state.start_time",
            {"$max": x.attempts_mapped(_RETRY_TIME, source="$$failures")},
        ]
    },
    "running": {"$size": "$$open"},
    # The earliest end of an open lease.
    "first_end": {"$min": x.attempts_mapped(_LEASE_END, source="$$open")},
}


def _let(variables: dict[str, Expr], value: Expr) -> Expr:
    return {"$let": {"vars": variables, "in": value}}


def in_scope(value: Expr) -> Expr:
    """
    *value* with the variables that the expressions of this module use.
    """
    return _let(_COUNTED, _let(_JUDGED, value))


# -- of the task -------------------------------------------------------------------------------

#: A place and a try are left, and nobody has cancelled.
IS_FREE: Final[Expr] = {
    "$not": [
        {
            "$or": [
                "$$cancelled",
                "$$spent",
                {"$gte": [{"$add": ["$$successes", "$$running"]}, "$$places"]},
            ]
        }
    ]
}
#: See docs/state_machine.md.
STATUS: Final[Expr] = {
    "$switch": {
        "branches": [
            {"case": {"$gte": ["$$successes", "$$places"]}, "then": x.SUCCEEDED},
            {"case": {"$gt": ["$$running", 0]}, "then": x.RUNNING},
            {"case": "$$cancelled", "then": x.CANCELLED},
            {"case": "$$spent", "then": x.FAILED},
        ],
        "default": x.WAITING,
    }
}
_HAS_ENDED: Final[Expr] = {"$in": ["$$status", list(x.TERMINAL)]}
#: From when a worker may claim, given ``$$status``: `NEVER` once the task has ended; while every
#: place is taken, or no further attempt is allowed, the earliest end of an open lease, so that a
#: dead worker's task becomes due by itself.
DUE: Final[Expr] = {
    "$cond": [
        _HAS_ENDED,
        x.NEVER,
        {
            "$cond": [
                IS_FREE,
                {"$min": ["$$ready", "$$first_end"]},
                {"$ifNull": ["$$first_end", x.EPOCH]},
            ]
        },
    ]
}
#: The last outcome or the cancellation, given ``$$status``; null while the task has not ended.
ENDED_AT: Final[Expr] = {
    "$cond": [
        _HAS_ENDED,
        {
            "$max": [
                {"$max": x.attempts_mapped(x.date_or_null("$$e.success_time"))},
                {"$max": x.attempts_mapped(x.date_or_null("$$e.fail_time"))},
                x.date_or_null("$cancel.time"),
                x.EPOCH,
            ]
        },
        None,
    ]
}
_AS_IT_STANDS: Final[Expr] = _let(
    {"status": STATUS}, {"status": "$$status", "due": DUE, "ended_at": ENDED_AT, "add": False}
)


def _with_another(may_add: Expr, lease_end: Expr) -> Expr:
    """
    The derived fields after an attempt with this lease was added, if *may_add* allows it.
    """
    added = _let(
        {
            "running": {"$add": ["$$running", 1]},
            "first_end": {"$min": ["$$first_end", lease_end]},
            "status": x.RUNNING,
        },
        {"status": "$$status", "due": DUE, "ended_at": None, "add": True},
    )
    return _let({"free": IS_FREE}, {"$cond": [may_add, added, _AS_IT_STANDS]})


def derive(
    *, by: Expr = None, may_add: Expr = None, added: Expr = None, lease_end: Expr = None
) -> list[Stage]:
    """
    Set the derived fields.

    And ``finished_by``, which comes and goes with ``finished_at`` but is none of them: *by*, the
    id of the attempt that a statement ends or claims, where this very statement ends the task.

    A claim adds an attempt in the same breath: *added*, with the lease *lease_end*, where
    *may_add* holds. That condition may use ``$$free`` (see `IS_FREE`) and ``$$ready`` (from when
    the next attempt may start).
    """
    adds = may_add is not None
    # In one stage every expression sees the status that stood before.
    had_ended = {"$in": ["$status", list(x.TERMINAL)]}
    finisher = "$finished_by" if by is None else {"$cond": [had_ended, "$finished_by", by]}
    fields: dict[str, Expr] = {
        "status": "$_derived.status",
        "due": "$_derived.due",
        "finished_at": {"$ifNull": ["$_derived.ended_at", "$$REMOVE"]},
        "finished_by": {
            "$cond": [{"$in": ["$_derived.status", list(x.TERMINAL)]}, finisher, "$$REMOVE"]
        },
        "expire_at": expiry("$_derived.ended_at"),
    }
    if adds:
        attempts = f"${x.ATTEMPTS}"
        fields[x.ATTEMPTS] = {
            "$cond": ["$_derived.add", {"$concatArrays": [attempts, [added]]}, attempts]
        }
    result = _with_another(may_add, lease_end) if adds else _AS_IT_STANDS
    return [{"$set": {"_derived": in_scope(result)}}, {"$set": fields}, {"$unset": "_derived"}]


def expiry(ended_at: str) -> Expr:
    """
    When a task is deleted that ended at the path *ended_at*; nothing if it is kept or has no end.
    """
    return {
        "$cond": [
            {
                "$and": [
                    {"$gte": ["$keep_ms", 0]},
                    {"$lte": ["$keep_ms", x.MAX_DURATION_MS]},
                    x.is_date(ended_at),
                ]
            },
            x.date_plus(x.within_reach(ended_at), "$keep_ms"),
            "$$REMOVE",
        ]
    }


#: The derived fields of a document to which nothing is added; shared, not to be changed.
DERIVED: Final[list[Stage]] = derive()
