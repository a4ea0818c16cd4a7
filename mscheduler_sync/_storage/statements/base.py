"""
What all statements share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs

from mscheduler_sync._storage import expressions as x

Document = dict[str, Any]

#: What the expressions rely on; a document that fails it is left alone.
READABLE: Final[Document] = {
    x.ATTEMPTS: {"$type": "array"},
    "task_state.start_time": {"$type": "date", "$not": {"$type": "array"}},
    "task_option.concurrent_worker_cnt": {"$gte": 1, "$lte": 1_000_000},
    "task_option.worker_timeout_ms": {"$gte": 1, "$lte": x.MAX_DURATION_MS},
    "task_option.unexpected_retry_delay_ms": {"$gte": 0, "$lte": x.MAX_DURATION_MS},
    "task_option.max_unexpected_retries": {"$gte": 0, "$lte": 2**32},
}


@attrs.frozen
class Update:
    """
    One conditional write of each of some documents, all in one command.
    """

    keys: Sequence[str]
    filter: Document
    pipeline: list[x.Stage]


@attrs.frozen
class Find:
    """
    One bounded read.
    """

    filter: Document
    projection: Document
    sort: list[tuple[str, int]]
    limit: int


def one_or_in(keys: Sequence[str]) -> object:
    """
    The shortest condition for *keys* (at most 100: longer lists cost the server dearly).
    """
    return keys[0] if len(keys) == 1 else {"$in": list(keys)}
