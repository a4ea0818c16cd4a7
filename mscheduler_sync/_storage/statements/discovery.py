"""
Indexes, the reads that find tasks, and the change stream's pipeline.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Final

from mscheduler_sync._storage import expressions as x
from mscheduler_sync._storage.statement import Document, Find, Index
from mscheduler_sync._storage.statements.base import ENDING, TASKS, one_or_in

#: The crate's own two indexes coexist: same name and options for ``key``.
INDEXES: Final = (
    Index(TASKS, "key", [("key", 1)], {"unique": True}),
    Index(TASKS, "routes_due", [("routes", 1), ("due", 1)]),
    Index(TASKS, "finished_at", [("finished_at", 1)], {"sparse": True}),
    Index(TASKS, "expire_at", [("expire_at", 1)], {"sparse": True, "expireAfterSeconds": 0}),
)

_DISCOVERED: Final[Document] = {
    "key": 1,
    "due": 1,
    "task_option.priority": 1,
    "task_option.worker_timeout_ms": 1,
    "task_option.concurrent_worker_cnt": 1,
    f"{x.ATTEMPTS}.running_id": 1,
}


def due_tasks(
    route: str,
    *,
    until: dt.datetime,
    limit: int,
    after: dt.datetime = x.EPOCH,
    eligible: Document | None = None,
) -> Find:
    """
    The earliest tasks of one route that are due in [*after*, *until*]. Index: routes_due.
    """
    condition = {"routes": route, "due": {"$gte": after, "$lte": until}, **(eligible or {})}
    return Find(TASKS, condition, _DISCOVERED, [("due", 1)], limit)


def eligible_in_shared_routes(worker_id: str, names: Sequence[str | None] | None) -> Document:
    """
    What a route does not say: allowed, of a known name, and not yet done by this worker.

    One that it holds is found all the same: its earlier life may have left it.
    """
    return {
        "task_option.specific_worker_ids": allowed_to(worker_id),
        **eligible_name(names),
        x.ATTEMPTS: {
            "$not": {
                "$elemMatch": {
                    "worker_id": worker_id,
                    "success_time": {"$ne": None},
                },
            }
        },
    }


def allowed_to(worker_id: str) -> Document:
    """
    The condition on ``specific_worker_ids``. A cancelled task passes: its attempts must be settled.
    """
    return {"$in": [None, [], worker_id, [x.NOBODY]]}


def eligible_name(names: Sequence[str | None] | None) -> Document:
    """
    The condition on ``name`` of a consumer that knows *names* (None: all).
    """
    return {} if names is None else {"name": {"$in": list(names)}}


def underived(*, after_id: object | None, limit: int) -> Find:
    """
    Documents without routes (written by a Rust worker), in order of _id. Index: routes_due.
    """
    condition: Document = {"routes": None}
    if after_id is not None:
        condition["_id"] = {"$gt": after_id}
    return Find(TASKS, condition, {"key": 1}, [("_id", 1)], limit)


def unfinished(*, after_key: str, limit: int) -> Find:
    """
    A page over all unfinished documents in order of key, for the sweep of a shared collection.
    """
    return Find(
        TASKS,
        {"key": {"$gt": after_key}, "finished_at": None},
        {"params": 0, "progress": 0, f"{x.ATTEMPTS}.returns": 0},
        [("key", 1)],
        limit,
    )


def discovered_by_id(ids: Sequence[object]) -> Find:
    """
    What discovery needs to know of the documents *ids* (at most 100). Index: _id.
    """
    return _discovered({"_id": {"$in": list(ids)}}, len(ids))


def discovered_by_key(keys: Sequence[str]) -> Find:
    """
    What discovery needs to know of the tasks *keys* (at most 100), and who ended them. Index: key.
    """
    return _discovered({"key": one_or_in(keys)}, len(keys))


def _discovered(condition: Document, limit: int) -> Find:
    return Find(TASKS, condition, {**_DISCOVERED, "routes": 1, **ENDING}, limit=limit)


def whole(keys: Sequence[str]) -> Find:
    """
    The tasks *keys* (at most 100) without their results. Index: key.
    """
    return Find(TASKS, {"key": one_or_in(keys)}, {f"{x.ATTEMPTS}.returns": 0}, limit=len(keys))


def watch_pipeline() -> list[x.Stage]:
    """
    Change events that may make a task claimable, without clock and without bodies.

    Of our own writes, heartbeats (they set ``heartbeat_at``) and steps to running or to
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
                f"{changed}.heartbeat_at": {"$exists": False},
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
                **{f"fullDocument.{path}": 1 for path in (*_DISCOVERED, "routes", "status")},
                f"{changed}.due": 1,
                f"{changed}.status": 1,
            }
        },
    ]


def routes_of(*, name: str | None, worker_ids: Sequence[str], shared: bool) -> str | list[str]:
    """
    The routes of a new task; `expressions.routes` computes the same in the database.
    """
    if shared:
        return x.ROUTE_SHARED
    if worker_ids:
        routes = [x.route_of_worker(worker_id) for worker_id in worker_ids]
        return routes[0] if len(routes) == 1 else routes
    if name is not None:
        return [x.ROUTE_ANY_NAME, x.route_of_name(name)]
    return x.ROUTE_UNNAMED
