"""
The pool's document with its ring, nodes with their leases, and workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bson.int64 import Int64

from mscheduler_sync._storage import expressions as x
from mscheduler_sync._storage.statement import Delete, Document, Find, Update
from mscheduler_sync.pool.statements.base import (
    ALIVE,
    CLOSING,
    DEAD,
    OPEN,
    changed,
    only_if,
)


def ensure_pool(pool: str, order: str) -> Update:
    born = {"state": OPEN, "epoch": Int64(0), "ring": [], "order": order}
    return Update("pools", {"_id": pool}, {"$setOnInsert": born}, upsert=True)


def pool_document(pool: str) -> Find:
    return Find("pools", {"_id": pool}, limit=1)


_RING_WORKERS: Final = {"$map": {"input": "$ring", "as": "e", "in": "$$e.worker"}}


def join(pool: str, worker: str, node: str) -> Update:
    """
    Give *worker* the lowest free slot; the ring has no gaps, so that is its end.
    """
    place = {"worker": x.literal(worker), "node": x.literal(node)}
    return Update(
        "pools",
        {"_id": pool, "state": OPEN},
        only_if(
            {"$not": [{"$in": [x.literal(worker), _RING_WORKERS]}]},
            {"ring": {"$concatArrays": ["$ring", [place]]}, "epoch": {"$add": ["$epoch", 1]}},
        ),
    )


def leave(pool: str, worker: str) -> Update:
    """
    Take *worker* out of the ring: the last one moves into its slot, so that few keys move.

    A pool with ``order: "created"`` closes the gap instead, as the original does.
    """
    place: Document = {
        "$arrayElemAt": ["$ring", {"$cond": [{"$eq": ["$$k", "$$slot"]}, "$$last", "$$k"]}]
    }
    closed = {
        "$filter": {
            "input": "$ring",
            "as": "e",
            "cond": {"$ne": ["$$e.worker", x.literal(worker)]},
        }
    }
    moved = {
        "$let": {
            "vars": {
                "slot": {"$indexOfArray": [_RING_WORKERS, x.literal(worker)]},
                "last": {"$subtract": [{"$size": "$ring"}, 1]},
            },
            "in": {"$map": {"input": {"$range": [0, "$$last"]}, "as": "k", "in": place}},
        }
    }
    return Update(
        "pools",
        {"_id": pool},
        only_if(
            {"$in": [x.literal(worker), _RING_WORKERS]},
            {
                "ring": {"$cond": [{"$eq": ["$order", "created"]}, closed, moved]},
                "epoch": {"$add": ["$epoch", 1]},
            },
        ),
    )


def begin_shutdown(pool: str, node: str) -> Update:
    return Update(
        "pools",
        {"_id": pool, "state": OPEN},
        changed(
            state=CLOSING,
            closing_by=x.literal(node),
            closing_at=x.NOW,
            epoch={"$add": ["$epoch", 1]},
        ),
    )


def forget_pool(pool: str) -> list[Delete]:
    """
    What a shutdown removes at its end, in this order.
    """
    of_pool = {"pool": pool}
    return [
        Delete("jobs", of_pool, many=True),
        Delete("workers", of_pool, many=True),
        Delete("tickers", of_pool, many=True),
        Delete("schedules", of_pool, many=True),
        Delete("nodes", {"pool": pool, "state": DEAD}, many=True),
        Delete("pools", {"_id": pool, "state": CLOSING}),
    ]


def register_node(node: str, pool: str, ttl_ms: int, facts: Mapping[str, Any]) -> Update:
    fields = {name: x.literal(value) for name, value in facts.items()}
    return Update(
        "nodes",
        {"_id": node},
        changed(
            pool=x.literal(pool),
            state=ALIVE,
            started_at=x.NOW,
            lease_until=x.server_now_plus(ttl_ms),
            **fields,
        ),
        upsert=True,
    )


def renew_lease(node: str, ttl_ms: int) -> Update:
    """
    Extend the lease of a living node; it never moves back. Matching nothing means dead.
    """
    end = {"$max": ["$lease_until", x.server_now_plus(ttl_ms)]}
    return Update(
        "nodes", {"_id": node, "state": ALIVE}, changed(lease_until=end, renewed_at=x.NOW)
    )


def declare_dead(node: str) -> Update:
    """
    Declare a node dead whose lease has ended by the server's clock. For good.
    """
    return Update(
        "nodes",
        {"_id": node, "state": ALIVE},
        [
            {
                "$set": {
                    "state": {"$cond": [{"$lte": ["$lease_until", x.NOW]}, DEAD, "$state"]},
                    "died_at": {"$cond": [{"$lte": ["$lease_until", x.NOW]}, x.NOW, None]},
                }
            }
        ],
    )


def retire(node: str) -> Update:
    """
    A node declares itself dead: its handlers have stopped, others need not wait for its lease.
    """
    return Update("nodes", {"_id": node, "state": ALIVE}, changed(state=DEAD, died_at=x.NOW))


def nodes_of(pool: str, state: str) -> Find:
    return Find("nodes", {"pool": pool, "state": state}, {"lease_until": 1, "died_at": 1})


def node_state(node: str) -> Find:
    return Find("nodes", {"_id": node}, {"state": 1}, limit=1)


def forget_node(node: str) -> Delete:
    return Delete("nodes", {"_id": node, "state": DEAD})


def register_worker(worker: str, node: str, pool: str) -> Update:
    return Update(
        "workers",
        {"_id": worker},
        changed(pool=x.literal(pool), node=x.literal(node), created_at=x.NOW),
        upsert=True,
    )


def workers_of_pool(pool: str) -> Find:
    return Find("workers", {"pool": pool})


def workers_of_node(node: str) -> Find:
    return Find("workers", {"node": node}, {"_id": 1})


def forget_worker(worker: str) -> Delete:
    return Delete("workers", {"_id": worker})
