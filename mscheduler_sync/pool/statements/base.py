"""
What all statements of the pool share: collections, indexes, names of states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mscheduler_sync._storage import expressions as x
from mscheduler_sync._storage.statement import Index

PENDING: Final = "pending"
STARTING: Final = "starting"
RUNNING: Final = "running"
FAILED: Final = "failed"
OPEN: Final = "open"
CLOSING: Final = "closing"
ALIVE: Final = "alive"
DEAD: Final = "dead"

#: Between the pool's name and the rest of an id.
SEPARATOR: Final = "\x1f"
AFTER_SEPARATOR: Final = "\x20"
#: Results are kept for those who wait for them, in milliseconds.
RESULT_KEPT_MS: Final = 3_600_000
#: How many notifications may wait for their job, and their bytes.
INBOX_LIMIT, INBOX_BYTES = 1000, 1024 * 1024
MOST_IDS: Final = 100

COLLECTIONS: Final = ("pools", "nodes", "workers", "jobs", "results", "tickers", "schedules")
INDEXES: Final = (
    Index("nodes", "pool_state", [("pool", 1), ("state", 1)]),
    Index("workers", "pool", [("pool", 1)]),
    Index("workers", "node", [("node", 1)]),
    Index("jobs", "pool_state_not_before", [("pool", 1), ("state", 1), ("not_before", 1)]),
    Index("jobs", "pool_node_unread", [("pool", 1), ("node", 1), ("unread", 1)]),
    Index("results", "expire_at", [("expire_at", 1)], {"expireAfterSeconds": 0}),
)


def full_id(pool: str, name: str) -> str:
    return f"{pool}{SEPARATOR}{name}"


def name_in(pool: str, full: str) -> str:
    return full[len(pool) + 1 :]


def changed(**fields: Any) -> list[x.Stage]:
    return [{"$set": fields}]


def only_if(condition: x.Expr, fields: Mapping[str, x.Expr]) -> list[x.Stage]:
    """
    Set *fields* where *condition* holds; change nothing otherwise. The fields must exist.
    """
    chosen = {path: {"$cond": ["$_may", value, f"${path}"]} for path, value in fields.items()}
    return [{"$set": {"_may": condition}}, {"$set": chosen}, {"$unset": "_may"}]
