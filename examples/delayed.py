"""
Tasks for later, and tasks that are tried again.

    python examples/delayed.py

Uses the embedded server (pip install 'mscheduler_sync[embedded]'), or the server that
MSCHEDULER_URI names, in a database of its own that is dropped at the end.
"""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any

from pymongo import MongoClient
from pymongo.collection import Collection

from mscheduler_sync import Consumer, Producer, TaskContext, TaskFailed
from mscheduler_sync.embedded import open_server


def call(params: dict[str, Any], context: TaskContext) -> str:
    """
    Raise until the attempt that is to succeed. Any exception is a failed attempt.
    """
    if context.attempt < params.get("succeeds_at", 1):
        raise ConnectionError("the other side is busy")
    return f"done in attempt {context.attempt}"


def run(tasks: Collection[Any]) -> None:
    producer = Producer(tasks)
    tomorrow = dt.datetime.now(dt.timezone.utc) + dt.timedelta(days=1)
    producer.send("tomorrow", {}, run_at=tomorrow)  # a datetime with a time zone
    producer.send("soon", {}, delay=1)  # seconds, or a timedelta
    # Tried again after 0.5 s, then 1 s, 2 s, and so on; but after 10 s at the most.
    producer.send("flaky", {"succeeds_at": 3}, retry_delay=0.5, retry_backoff=2, retry_max_delay=10)
    producer.send("hopeless", {"succeeds_at": 99}, max_attempts=2, retry_delay=0.5)

    with Consumer(tasks, call):
        for key in ("soon", "flaky", "hopeless"):
            try:
                print(f"{key}: {producer.result(key, timeout=30)}")
            except TaskFailed as error:
                print(f"{key}: {error}")

    flaky, later = producer.get("flaky"), producer.get("tomorrow")
    assert flaky is not None
    assert later is not None
    for number, attempt in enumerate(flaky.attempts, start=1):
        if attempt.failed_at and attempt.retry_at:
            pause_s = (attempt.retry_at - attempt.failed_at).total_seconds()
            print(f"flaky: attempt {number} failed, the next one {pause_s:.1f} s later")
    print(f"tomorrow: {later.status}")


def main() -> None:
    with open_server() as uri:
        client: MongoClient[dict[str, Any]] = MongoClient(uri)
        tasks = client[f"example_{uuid.uuid4().hex[:8]}"].tasks
        try:
            run(tasks)
        finally:
            client.drop_database(tasks.database)
            client.close()


if __name__ == "__main__":
    main()
