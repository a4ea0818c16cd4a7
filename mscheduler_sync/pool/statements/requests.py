"""
Stop requests, notifications, and the reads that find jobs.
"""

from __future__ import annotations

from typing import Final

from mscheduler_sync._storage import expressions as x
from mscheduler_sync.pool.statements.base import (
    AFTER_SEPARATOR,
    INBOX_BYTES,
    INBOX_LIMIT,
    PENDING,
    RUNNING,
    SEPARATOR,
    STARTING,
    Document,
    Read,
    Write,
    changed,
    only_if,
)
from mscheduler_sync.pool.statements.jobs import STATE_OF_JOB, Ownership


def ask_stop(job_id: str, dispatch_id: str, stop_id: str, by: str) -> Write:
    """
    Leave a stop request with a job that has an owner; one that stands there already is kept.
    """
    request = {"id": x.literal(stop_id), "by": x.literal(by), "at": x.NOW}
    return Write(
        "jobs",
        {"_id": job_id, "dispatch_id": dispatch_id, "state": {"$in": [STARTING, RUNNING]}},
        changed(stop={"$ifNull": ["$stop", request]}, unread=True),
    )


def stop_failed(owned: Ownership, stop_id: str) -> Write:
    return Write(
        "jobs",
        {**owned.filter, "stop.id": stop_id},
        changed(stop="$$REMOVE", unread={"$gt": [{"$size": "$inbox"}, 0]}),
    )


def push(job_id: str, token: str, payload: object, size: int) -> Write:
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
    return Write(
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


def pushed(job_id: str, token: str) -> Read:
    """
    The job, if the notification *token* waits with it or was the last one to come.
    """
    is_there = [{"inbox_token": token}, {"inbox.token": token}]
    return Read("jobs", {"_id": job_id, "$or": is_there}, {"_id": 1}, limit=1)


def inbox_of(owned: Ownership) -> Read:
    return Read("jobs", owned.filter, {"stop": 1, "inbox": 1}, limit=1)


def took(owned: Ownership, upto: int) -> Write:
    """
    Remove the notifications up to the number *upto* from the inbox: they were delivered.
    """
    left = {"$filter": {"input": "$inbox", "as": "e", "cond": {"$gt": ["$$e.seq", upto]}}}
    wanted = {"$or": [{"$gt": ["$stop", None]}, {"$gt": [{"$size": "$inbox"}, 0]}]}
    return Write("jobs", owned.filter, [{"$set": {"inbox": left}}, {"$set": {"unread": wanted}}])


def in_state(pool: str, state: str, limit: int) -> Read:
    """
    The longest due of the jobs in *state*. Index: pool_state_not_before.
    """
    projection = {**STATE_OF_JOB, "epoch": 1, "node": 1, "fence": 1}
    return Read("jobs", {"pool": pool, "state": state}, projection, ("not_before", 1), limit)


def unread(pool: str, node: str) -> Read:
    """
    The jobs of *node* with a stop request or notifications. Index: pool_node_unread.
    """
    return Read("jobs", {"pool": pool, "node": node, "unread": True}, {"_id": 1}, limit=1000)


def jobs_of(pool: str) -> Read:
    return Read("jobs", {"pool": pool}, {"key": 1, "state": 1, "answered": 1})


def count_pending(pool: str) -> Document:
    return {"pool": pool, "state": PENDING}


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
