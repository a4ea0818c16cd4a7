"""
Several kinds of tasks in one collection: names and a router.

    python examples/router.py

Uses the embedded server (pip install 'mscheduler_sync[embedded]'), or the server that
MSCHEDULER_URI names, in a database of its own that is dropped at the end.
"""

from __future__ import annotations

import uuid
from typing import Any

from pymongo import MongoClient
from pymongo.collection import Collection

from mscheduler_sync import Consumer, Producer, Router
from mscheduler_sync.embedded import open_server

router = Router()


@router.task("invoice.send")
def send_invoice(params: dict[str, Any]) -> str:
    return f"invoice sent to {params['email']}"


@router.task("invoice.remind")
def remind(params: dict[str, Any]) -> str:
    return f"{params['email']} reminded"


def run(tasks: Collection[Any]) -> None:
    producer = Producer(tasks)
    params = {"email": "orders@example.com"}
    producer.send("invoice:42", params, name="invoice.send")
    producer.send("reminder:42", params, name="invoice.remind")
    # No function here has this name: the task waits for a consumer that has one.
    producer.send("parcel:42", params, name="parcel.pack")
    # A task without a name is taken only by Router(default=...), or by a plain function.
    producer.send("nameless", params)

    with Consumer(tasks, router) as consumer:
        consumer.run_until_idle(timeout=30)
    for task in producer.list():
        if task.is_finished:
            print(f"{task.key}: {producer.result(task.key)}")
        else:
            print(f"{task.key}: {task.status}, name {task.name}")


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
