"""
The claim and the success of plain tasks, in few words: for the server's and the client's sake.

Nearly every task runs once, on one worker, and succeeds. What the statements of `attempts`
compute for such a document is known beforehand, and these two say it. Their filters admit no
document for which the others would do anything else. What they do not match is left to those:
nothing depends on a guess that a task is plain, but the time it takes.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any, Final

from mscheduler_sync._storage import expressions as x
from mscheduler_sync._storage.derived import expiry
from mscheduler_sync._storage.statement import Document, Update
from mscheduler_sync._storage.statements.attempts import (
    Ref,
    answered_by,
    new_attempt,
    split,
    success,
)
from mscheduler_sync._storage.statements.base import READABLE, of_tasks
from mscheduler_sync._storage.statements.discovery import eligible_name

#: One worker is enough. An array would pass for its elements.
_FOR_ONE: Final[Document] = {
    "task_option.concurrent_worker_cnt": {"$eq": 1, "$not": {"$type": "array"}}
}
_MAX: Final = "task_option.max_unexpected_retries"


def claim_plain(
    refs: Sequence[Ref],
    worker_id: str,
    *,
    names: Sequence[str | None] | None = None,
    sent_at: dt.datetime | None = None,
) -> Update:
    """
    Add an attempt of *worker_id* to each task for one worker that nobody has tried yet.

    Carried out so late that `claim` would add nothing, it adds nothing either.
    """
    keys, running_ids = split(refs)
    lease_end = x.server_now_plus(x.number_at("task_option.worker_timeout_ms"))
    attempt = new_attempt(keys, running_ids, worker_id, lease_end)
    may = {
        "$and": [
            {"$lte": ["$task_state.start_time", x.NOW]},
            {"$lte": [x.NOW, answered_by(sent_at)]},
        ]
    }
    return of_tasks(
        keys,
        {
            **_FOR_ONE,
            x.ATTEMPTS: {**READABLE[x.ATTEMPTS], "$size": 0},
            _MAX: {**READABLE[_MAX], "$gte": 1},
            # As we have derived it.
            "status": x.WAITING,
            "cancel": {"$exists": False},
            "task_option.specific_worker_ids": {"$in": [None, [], worker_id]},
            **eligible_name(names),
        },
        [
            {"$set": {"_may": may}},
            {
                "$set": {
                    x.ATTEMPTS: {"$cond": ["$_may", [attempt], []]},
                    "status": {"$cond": ["$_may", x.RUNNING, x.WAITING]},
                    "due": {"$cond": ["$_may", lease_end, "$due"]},
                }
            },
            # What is waiting has no end; another program may have left one there.
            {"$unset": ["_may", "finished_at", "finished_by", "expire_at"]},
        ],
    )


def succeed_plain(
    refs: Sequence[Ref], returns: Sequence[object], *, progress: object = None
) -> Update:
    """
    End the attempts as succeeded where each is the only one of a task for one worker.

    It leaves no ``finished_by``: of a task with one attempt nobody need ask who ended it.
    """
    keys, running_ids = split(refs)
    changes = success(running_ids, returns)
    is_ours: dict[str, Any] = {
        "running_id": {"$in": running_ids},
        "success_time": None,
        "fail_time": None,
    }
    facts: Document = {
        x.ATTEMPTS: x.attempts_mapped({"$mergeObjects": ["$$e", changes]}),
        "status": x.SUCCEEDED,
        "due": x.NEVER,
        "finished_at": {"$max": [x.NOW, x.date_or_null("$cancel.time")]},
    }
    if progress is not None:
        facts["progress"] = x.literal(progress)
    return of_tasks(
        keys,
        {
            **_FOR_ONE,
            x.ATTEMPTS: {**READABLE[x.ATTEMPTS], "$size": 1, "$elemMatch": is_ours},
        },
        [{"$set": facts}, {"$set": {"expire_at": expiry("$finished_at")}}],
    )
