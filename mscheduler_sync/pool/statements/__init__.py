"""
Every filter, pipeline and index of the pool, as pure functions; the only place with field paths.

One job is one document; each step of its life is one conditional write of it. All
writes of an owner are fenced by (owner, fence). A write that matches nothing has
lost a race or was applied before, and may be repeated at will.
"""

from mscheduler_sync.pool.statements import jobs, members, recurring
from mscheduler_sync.pool.statements.base import (
    ALIVE,
    CLOSING,
    COLLECTIONS,
    DEAD,
    FAILED,
    INBOX_BYTES,
    INBOX_LIMIT,
    INDEXES,
    MOST_IDS,
    OPEN,
    PENDING,
    RESULT_KEPT_MS,
    RUNNING,
    SEPARATOR,
    STARTING,
    full_id,
    name_in,
)

__all__ = [
    "ALIVE",
    "CLOSING",
    "COLLECTIONS",
    "DEAD",
    "FAILED",
    "INBOX_BYTES",
    "INBOX_LIMIT",
    "INDEXES",
    "MOST_IDS",
    "OPEN",
    "PENDING",
    "RESULT_KEPT_MS",
    "RUNNING",
    "SEPARATOR",
    "STARTING",
    "full_id",
    "jobs",
    "members",
    "name_in",
    "recurring",
]
