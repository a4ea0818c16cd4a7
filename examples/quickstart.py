"""
Send a task, run it, read its result.

    python examples/quickstart.py

Uses the embedded server (pip install 'mscheduler_sync[embedded]'), or the server that
MSCHEDULER_URI names, in a database of its own that is dropped at the end.
"""

from __future__ import annotations

import uuid
from typing import Any

from pymongo import MongoClient
from pymongo.collection import Collection

from mscheduler_sync import Consumer, Producer
from mscheduler_sync.embedded import open_server


def send_invoice(params: dict[str, Any]) -> dict[str, Any]:
    """
    The task's function. May run again after a crash: make it repeatable.
    """
    print("invoice to", params["email"])
    return {"sent_to": params["email"]}


def run(tasks: Collection[Any]) -> None:
    producer = Producer(tasks)
    sent = producer.send("invoice:42", {"email": "orders@example.com"}, delay=0.5)
    print("a new task:", sent.inserted)
    again = producer.send("invoice:42", {"email": "orders@example.com"})
    print("a second one under the same key:", again.inserted)

    with Consumer(tasks, send_invoice, max_workers=8):
        # A service calls run_forever() on its consumer here: until Ctrl-C or SIGTERM.
        print("result:", producer.result("invoice:42", timeout=30))
    # Leaving the block stops the consumer: running tasks finish, waiting ones stay.


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
