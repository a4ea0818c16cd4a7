"""
Tasks in each of their states, as the library stores them.
"""

from __future__ import annotations

import datetime as dt

from mscheduler_sync import Producer
from tests.support import Document
from tests.support.tasks import Tasks

NEVER = dt.datetime(9999, 12, 31, tzinfo=dt.timezone.utc)
HOUR = dt.timedelta(hours=1)
STATES = ("waiting", "running", "succeeded", "failed", "cancelled")
ENDED = ("succeeded", "failed", "cancelled")
#: What the tasks of these tests were sent with.
OLD: Document = {"priority": 1, "max_attempts": 1, "retry_delay": 0, "lease": 30, "heartbeat": 10}
OLD_OPTION: Document = {
    "priority": 1,
    "concurrent_worker_cnt": 1,
    "ping_interval_ms": 10_000,
    "worker_timeout_ms": 30_000,
    "specific_worker_ids": [],
    "max_unexpected_retries": 1,
    "unexpected_retry_delay_ms": 0,
}
DEFAULT_OPTION: Document = {
    "priority": 0,
    "concurrent_worker_cnt": 1,
    "ping_interval_ms": 20_000,
    "worker_timeout_ms": 60_000,
    "specific_worker_ids": [],
    "max_unexpected_retries": 3,
    "unexpected_retry_delay_ms": 10_000,
}


def server_now(collection: Tasks) -> dt.datetime:
    hello = collection.database.client.admin.command("hello")
    now: dt.datetime = hello["localTime"].replace(tzinfo=dt.timezone.utc)
    return now


def stored(collection: Tasks, key: str = "k") -> Document:
    """
    Return the task's document without the mark of the last send.
    """
    document = collection.find_one({"key": key})
    assert document is not None
    document.pop("send_id", None)
    return document


def attempt(**changes: object) -> Document:
    return {
        "running_id": "r",
        "worker_id": "w",
        "ping_expire_time": None,
        "success_time": None,
        "fail_time": None,
        **changes,
    }


def arranged(producer: Producer, collection: Tasks, state: str) -> Document:
    """
    Make the task ``k`` in this state, as the library stores it; return its document.
    """
    producer.send("k", "old", **OLD)
    now = server_now(collection)
    if state == "running":
        lease_end = now + HOUR
        changes: Document = {
            "task_state.worker_states": [attempt(ping_expire_time=lease_end)],
            "status": "running",
            "due": lease_end,
        }
        collection.update_one({"key": "k"}, {"$set": changes})
    elif state in {"succeeded", "failed"}:
        outcome = (
            {"success_time": now, "returns": 7}
            if state == "succeeded"
            else {"fail_time": now, "fail_reason": "Boom: it broke\n  in f", "retry_time": now}
        )
        changes = {
            "task_state.worker_states": [attempt(ping_expire_time=now, **outcome)],
            "status": state,
            "due": NEVER,
            "finished_at": now,
        }
        collection.update_one({"key": "k"}, {"$set": changes})
    elif state == "cancelled":
        assert producer.cancel("k")
    document = stored(collection)
    assert document["status"] == state
    return document
