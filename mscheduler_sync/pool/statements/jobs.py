"""
The life of a job: dispatch, claim, start, release, end; stop requests, notifications, reads.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Final

import attrs
from bson.int64 import Int64

from mscheduler_sync._storage import expressions as x
from mscheduler_sync._storage.statement import Delete, Document, Find, Insert, Update
from mscheduler_sync._storage.statements.base import one_or_in
from mscheduler_sync.pool.statements.base import (
    AFTER_SEPARATOR,
    FAILED,
    INBOX_BYTES,
    INBOX_LIMIT,
    PENDING,
    RESULT_KEPT_MS,
    RUNNING,
    SEPARATOR,
    STARTING,
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


def insert(document: Document) -> Insert:
    return Insert("jobs", document, mark="dispatch_id")


def job(job_id: str, projection: Document | None = None) -> Find:
    return Find("jobs", {"_id": job_id}, projection, limit=1)


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


def claim(ids: Sequence[str], worker: str, node: str, claim_id: str) -> Update:
    """
    Take pending jobs that are due. The fence grows, also over removal and a new dispatch.
    """
    return Update(
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


def claimed(ids: Sequence[str], claim_id: str) -> Find:
    return Find("jobs", {"_id": one_or_in(ids), "claim_id": claim_id}, {"inbox": 0}, limit=len(ids))


def states(ids: Sequence[str]) -> Find:
    return Find("jobs", {"_id": one_or_in(ids)}, STATE_OF_JOB, limit=len(ids))


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


def started(owned: Ownership) -> Update:
    """
    The handler's start has returned; whoever dispatched the job is answered by this.
    """
    return Update(
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


def release(owned: Ownership, epoch: int) -> Update:
    """
    Give a job back for others; its handler has stopped. *epoch*: the ring that says to whom.
    """
    return Update("jobs", owned.filter, _freed(x.NOW, epoch={"$max": ["$epoch", Int64(epoch)]}))


def release_all_of(pool: str, node: str, epoch: int) -> Update:
    """
    Give the jobs of a dead node back.
    """
    return Update(
        "jobs",
        {"pool": pool, "node": node},
        _freed(x.NOW, epoch={"$max": ["$epoch", Int64(epoch)]}),
        many=True,
    )


def postpone(owned: Ownership, error: Mapping[str, str] | None, delay_ms: int) -> Update:
    """
    A start has failed, or asked for another try: the job waits, then anybody may claim it.
    """
    return Update(
        "jobs",
        owned.filter,
        _freed(
            x.server_now_plus(delay_ms),
            attempts={"$add": ["$attempts", 1]},
            last_error=x.literal(None if error is None else dict(error)),
        ),
    )


def fail(owned: Ownership, error: Mapping[str, str]) -> Update:
    """
    The first start of a dispatched job has failed: the verdict, until it is filed.
    """
    return Update("jobs", {**owned.filter, "state": STARTING}, _failed(error))


def cancel(job_id: str, dispatch_id: str, error: Mapping[str, str]) -> Update:
    """
    End a dispatched job that nobody has claimed yet, with a verdict for its dispatcher.
    """
    return Update(
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


def remove_failed(job_id: str, dispatch_id: str) -> Delete:
    return Delete("jobs", {"_id": job_id, "state": FAILED, "dispatch_id": dispatch_id})


def remove_pending(job_id: str, dispatch_id: str) -> Delete:
    return Delete("jobs", {"_id": job_id, "state": PENDING, "dispatch_id": dispatch_id})


def remove_owned(owned: Ownership) -> Delete:
    return Delete("jobs", owned.filter)


def put_result(request_id: str, pool: str, key: str, error: Mapping[str, str]) -> Update:
    return Update(
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


def result(request_id: str) -> Find:
    return Find("results", {"_id": request_id}, limit=1)


def ask_stop(job_id: str, dispatch_id: str, stop_id: str, by: str) -> Update:
    """
    Leave a stop request with a job that has an owner; one that stands there already is kept.
    """
    request = {"id": x.literal(stop_id), "by": x.literal(by), "at": x.NOW}
    return Update(
        "jobs",
        {"_id": job_id, "dispatch_id": dispatch_id, "state": {"$in": [STARTING, RUNNING]}},
        changed(stop={"$ifNull": ["$stop", request]}, unread=True),
    )


def stop_failed(owned: Ownership, stop_id: str) -> Update:
    return Update(
        "jobs",
        {**owned.filter, "stop.id": stop_id},
        changed(stop="$$REMOVE", unread={"$gt": [{"$size": "$inbox"}, 0]}),
    )


def push(job_id: str, token: str, payload: object, size: int) -> Update:
    """
    Append a notification, unless it stands there already or the inbox is full.
    """
    message = {
        "seq": {"$add": ["$inbox_seq", 1]},
        "token": x.literal(token),
        "payload": x.literal(payload),
        "size": size,
    }
    sizes = {"$sum": {"$map": {"input": "$inbox", "as": "e", "in": "$$e.size"}}}
    return Update(
        "jobs",
        {"_id": job_id, "state": {"$in": [PENDING, STARTING, RUNNING]}},
        only_if(
            {
                "$and": [
                    {"$ne": ["$inbox_token", x.literal(token)]},
                    {"$lt": [{"$size": "$inbox"}, INBOX_LIMIT]},
                    {"$lte": [{"$add": [sizes, size]}, INBOX_BYTES]},
                ]
            },
            {
                "inbox": {"$concatArrays": ["$inbox", [message]]},
                "inbox_seq": {"$add": ["$inbox_seq", 1]},
                "inbox_token": x.literal(token),
                "unread": True,
            },
        ),
    )


def pushed(job_id: str, token: str) -> Find:
    """
    The job, if the notification *token* waits with it or was the last one to come.
    """
    is_there = [{"inbox_token": token}, {"inbox.token": token}]
    return Find("jobs", {"_id": job_id, "$or": is_there}, {"_id": 1}, limit=1)


def inbox_of(owned: Ownership) -> Find:
    return Find("jobs", owned.filter, {"stop": 1, "inbox": 1}, limit=1)


def took(owned: Ownership, upto: int) -> Update:
    """
    Remove the notifications up to the number *upto* from the inbox: they were delivered.
    """
    left = {"$filter": {"input": "$inbox", "as": "e", "cond": {"$gt": ["$$e.seq", upto]}}}
    wanted = {"$or": [{"$gt": ["$stop", None]}, {"$gt": [{"$size": "$inbox"}, 0]}]}
    return Update("jobs", owned.filter, [{"$set": {"inbox": left}}, {"$set": {"unread": wanted}}])


def in_state(pool: str, state: str, limit: int) -> Find:
    """
    The longest due of the jobs in *state*. Index: pool_state_not_before.
    """
    projection = {**STATE_OF_JOB, "epoch": 1, "node": 1, "fence": 1}
    return Find("jobs", {"pool": pool, "state": state}, projection, [("not_before", 1)], limit)


def unread(pool: str, node: str) -> Find:
    """
    The jobs of *node* with a stop request or notifications. Index: pool_node_unread.
    """
    return Find("jobs", {"pool": pool, "node": node, "unread": True}, {"_id": 1}, limit=1000)


def jobs_of(pool: str) -> Find:
    return Find("jobs", {"pool": pool}, {"key": 1, "state": 1, "answered": 1})


def count_pending(pool: str) -> Find:
    return Find("jobs", {"pool": pool, "state": PENDING})


#: Of no interest to those who wait for what becomes of a job.
ON_THE_WAY: Final = (PENDING, STARTING)


def watch_pipeline(pool: str, *, verdicts_only: bool) -> list[x.Stage]:
    """
    The steps of this pool's jobs, without payloads. No expression here can raise.

    *verdicts_only* leaves out, as far as the server can tell, that a job is on its way: each event
    that is not sent brings the next one sooner.
    """
    wanted: Document = {
        "documentKey._id": {"$gte": pool + SEPARATOR, "$lt": pool + AFTER_SEPARATOR}
    }
    if verdicts_only:
        wanted["operationType"] = {"$ne": "insert"}
        wanted["updateDescription.updatedFields.state"] = {"$nin": list(ON_THE_WAY)}
    fields = ("state", "unread", "answered", "not_before", "epoch")
    shown = {f"fullDocument.{name}": 1 for name in fields}
    # A second notification leaves the mark as it is, but never the number.
    changing = (*fields, "inbox_seq", "stop")
    shown |= {f"updateDescription.updatedFields.{name}": 1 for name in changing}
    return [
        {"$match": wanted},
        {"$project": {"operationType": 1, "documentKey": 1, **shown}},
    ]
