"""
What all statements of the pool share: their kinds, names of states, indexes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import attrs

from mscheduler_sync._storage import expressions as x

Document = dict[str, Any]
Where = Literal["pools", "nodes", "workers", "jobs", "results", "tickers", "schedules"]

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

INDEXES: Final[list[tuple[Where, list[tuple[str, int]], Document]]] = [
    ("nodes", [("pool", 1), ("state", 1)], {"name": "pool_state"}),
    ("workers", [("pool", 1)], {"name": "pool"}),
    ("workers", [("node", 1)], {"name": "node"}),
    ("jobs", [("pool", 1), ("state", 1), ("not_before", 1)], {"name": "pool_state_not_before"}),
    ("jobs", [("pool", 1), ("node", 1), ("unread", 1)], {"name": "pool_node_unread"}),
    ("results", [("expire_at", 1)], {"name": "expire_at", "expireAfterSeconds": 0}),
]


@attrs.frozen
class Write:
    """
    One conditional write; *many* documents or one.
    """

    where: Where
    filter: Document
    pipeline: list[x.Stage] | Document
    many: bool = False
    upsert: bool = False


@attrs.frozen
class Read:
    """
    One bounded read.
    """

    where: Where
    filter: Document
    projection: Document | None = None
    sort: tuple[str, int] | None = None
    limit: int = 0


@attrs.frozen
class Removal:
    """
    One conditional removal.
    """

    where: Where
    filter: Document
    many: bool = False


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
