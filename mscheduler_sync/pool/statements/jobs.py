"""
The life of a job: dispatch, claim, start, release, end.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Final

import attrs
from bson.int64 import Int64

from mscheduler_sync._storage import expressions as x
from mscheduler_sync._storage.statements import one_or_in
from mscheduler_sync.pool.statements.base import (
    FAILED,
    PENDING,
    RESULT_KEPT_MS,
    RUNNING,
    STARTING,
    Document,
    Read,
    Removal,
    Write,
    changed,
    full_id,
    only_if,
)


def new_job(
    pool: str,
    key: str,
    payload: object,
    *,
    now: dt.datetime,
    dispatch_id: str,
    node: str,
    epoch: int,
) -> Document:
    """
    A job as it is dispatched. Who claims it must know the ring of *epoch* at least.

    ``answered`` names the dispatch that was told that the job runs; None before the first
    success.
    """
    return {
        "_id": full_id(pool, key),
        "pool": pool,
        "key": key,
        "payload": payload,
        "state": PENDING,
        "owner": None,
        "node": None,
        "claim_id": None,
        "fence": Int64(0),
        "epoch": Int64(epoch),
        "requeued": False,
        "dispatch_id": dispatch_id,
        "dispatched_by": node,
        "answered": None,
        "created_at": now,
        "not_before": now,
        "attempts": 0,
        "last_error": None,
        "inbox": [],
        "inbox_seq": Int64(0),
        "inbox_token": None,
        "unread": False,
    }


def job(job_id: str, projection: Document | None = None) -> Read:
    return Read("jobs", {"_id": job_id}, projection, limit=1)


#: What those who wait need to know of a job.
STATE_OF_JOB: Final[Document] = {
    "state": 1,
    "owner": 1,
    "dispatch_id": 1,
    "answered": 1,
    "stop": 1,
    "error": 1,
    "not_before": 1,
}


def claim(ids: Sequence[str], worker: str, node: str, claim_id: str) -> Write:
    """
    Take pending jobs that are due. The fence grows, also over removal and a new dispatch.
    """
    return Write(
        "jobs",
        {"_id": one_or_in(ids), "state": PENDING, "owner": None, "stop": None},
        only_if(
            {"$lte": ["$not_before", x.NOW]},
            {
                "state": STARTING,
                "owner": x.literal(worker),
                "node": x.literal(node),
                "claim_id": x.literal(claim_id),
                # Server time in ms: larger than any fence of an earlier job under this key.
                "fence": {"$max": [{"$add": ["$fence", 1]}, {"$toLong": "$$NOW"}]},
            },
        ),
        many=len(ids) > 1,
    )


def claimed(ids: Sequence[str], claim_id: str) -> Read:
    return Read("jobs", {"_id": one_or_in(ids), "claim_id": claim_id}, {"inbox": 0}, limit=len(ids))


def states(ids: Sequence[str]) -> Read:
    return Read("jobs", {"_id": one_or_in(ids)}, STATE_OF_JOB, limit=len(ids))


@attrs.frozen
class Ownership:
    """
    What fences an owner's writes.
    """

    job_id: str
    owner: str
    fence: int

    @property
    def filter(self) -> Document:
        return {"_id": self.job_id, "owner": self.owner, "fence": self.fence}


def started(owned: Ownership) -> Write:
    """
    The handler's start has returned; whoever dispatched the job is answered by this.
    """
    return Write(
        "jobs",
        {**owned.filter, "state": {"$in": [STARTING, RUNNING]}},
        changed(
            state=RUNNING,
            answered="$dispatch_id",
            started_at=x.NOW,
            attempts=0,
            last_error=None,
        ),
    )


def _freed(not_before: x.Expr, **more: x.Expr) -> list[x.Stage]:
    return changed(
        state=PENDING,
        owner=None,
        node=None,
        claim_id=None,
        requeued=True,
        not_before=not_before,
        **more,
    )


def release(owned: Ownership, epoch: int) -> Write:
    """
    Give a job back for others; its handler has stopped. *epoch*: the ring that says to whom.
    """
    return Write("jobs", owned.filter, _freed(x.NOW, epoch={"$max": ["$epoch", Int64(epoch)]}))


def release_all_of(pool: str, node: str, epoch: int) -> Write:
    """
    Give the jobs of a dead node back.
    """
    return Write(
        "jobs",
        {"pool": pool, "node": node},
        _freed(x.NOW, epoch={"$max": ["$epoch", Int64(epoch)]}),
        many=True,
    )


def postpone(owned: Ownership, error: Mapping[str, str] | None, delay_ms: int) -> Write:
    """
    A start has failed, or asked for another try: the job waits, then anybody may claim it.
    """
    return Write(
        "jobs",
        owned.filter,
        _freed(
            x.server_now_plus(delay_ms),
            attempts={"$add": ["$attempts", 1]},
            last_error=x.literal(None if error is None else dict(error)),
        ),
    )


def fail(owned: Ownership, error: Mapping[str, str]) -> Write:
    """
    The first start of a dispatched job has failed: the verdict, until it is filed.
    """
    return Write("jobs", {**owned.filter, "state": STARTING}, _failed(error))


def cancel(job_id: str, dispatch_id: str, error: Mapping[str, str]) -> Write:
    """
    End a dispatched job that nobody has claimed yet, with a verdict for its dispatcher.
    """
    return Write(
        "jobs",
        {"_id": job_id, "state": PENDING, "dispatch_id": dispatch_id, "answered": None},
        _failed(error),
    )


def _failed(error: Mapping[str, str]) -> list[x.Stage]:
    return changed(
        state=FAILED,
        owner=None,
        node=None,
        claim_id=None,
        unread=False,
        error=x.literal(dict(error)),
    )


def remove_failed(job_id: str, dispatch_id: str) -> Removal:
    return Removal("jobs", {"_id": job_id, "state": FAILED, "dispatch_id": dispatch_id})


def remove_pending(job_id: str, dispatch_id: str) -> Removal:
    return Removal("jobs", {"_id": job_id, "state": PENDING, "dispatch_id": dispatch_id})


def remove_owned(owned: Ownership) -> Removal:
    return Removal("jobs", owned.filter)


def put_result(request_id: str, pool: str, key: str, error: Mapping[str, str]) -> Write:
    return Write(
        "results",
        {"_id": request_id},
        changed(
            pool=x.literal(pool),
            key=x.literal(key),
            error=x.literal(dict(error)),
            expire_at=x.server_now_plus(RESULT_KEPT_MS),
        ),
        upsert=True,
    )


def result(request_id: str) -> Read:
    return Read("results", {"_id": request_id}, limit=1)
