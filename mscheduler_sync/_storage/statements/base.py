"""
What all statements share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mscheduler_sync._storage import expressions as x
from mscheduler_sync._storage.statement import Document, Update

#: The collection of the tasks in statements.
TASKS: Final = "tasks"

#: What `model.ended_by` reads, beside the ids of the attempts.
ENDING: Final[Document] = {"status": 1, "finished_by": 1}

#: What the expressions rely on; a document that fails it is left alone.
READABLE: Final[Document] = {
    x.ATTEMPTS: {"$type": "array"},
    "task_state.start_time": {"$type": "date", "$not": {"$type": "array"}},
    "task_option.concurrent_worker_cnt": {"$gte": 1, "$lte": 1_000_000},
    "task_option.worker_timeout_ms": {"$gte": 1, "$lte": x.MAX_DURATION_MS},
    "task_option.unexpected_retry_delay_ms": {"$gte": 0, "$lte": x.MAX_DURATION_MS},
    "task_option.max_unexpected_retries": {"$gte": 0, "$lte": 2**32},
}


def of_tasks(keys: Sequence[str], conditions: Document, pipeline: list[x.Stage]) -> Update:
    """
    A conditional write of each of the tasks *keys*, if it is readable. Index: key.
    """
    return Update(
        TASKS,
        {"key": one_or_in(keys), **READABLE, **conditions},
        pipeline,
        many=len(keys) != 1,
    )


def one_or_in(keys: Sequence[str]) -> object:
    """
    The shortest condition for *keys* (at most 100: longer lists cost the server dearly).
    """
    return keys[0] if len(keys) == 1 else {"$in": list(keys)}
