"""
What a consumer tells: waiting for an event without missing it.

    python examples/events.py

Uses the embedded server (pip install 'mscheduler_sync[embedded]'), or the server that
MSCHEDULER_URI names, in a database of its own that is dropped at the end.
"""

from __future__ import annotations

import uuid
from typing import Any

from pymongo import MongoClient
from pymongo.collection import Collection

from mscheduler_sync import (
    AttemptEnded,
    AttemptStarted,
    Consumer,
    Event,
    Producer,
    TaskFinished,
    TaskSucceeded,
)
from mscheduler_sync.embedded import open_server


def double(params: dict[str, int]) -> int:
    return 2 * params["number"]


def run(tasks: Collection[Any]) -> None:
    producer = Producer(tasks)
    with Consumer(tasks, double, max_workers=2) as consumer:
        # Subscribe before you act: whatever happens from then on is kept until you read it.
        kinds = (AttemptStarted, TaskSucceeded, AttemptEnded, TaskFinished)
        with consumer.subscribe(*kinds) as events:
            producer.send("double:21", {"number": 21})
            for event in events:
                print(f"{type(event).__name__} of {event.key}")
                if isinstance(event, TaskFinished):
                    break
        # An event about a write comes after the write is stored.
        print("result:", producer.result("double:21", timeout=0))

        # The short form hears what happens from the call on, so it suits what comes later.
        def failed(event: Event) -> bool:
            return isinstance(event, AttemptEnded) and not event.succeeded

        producer.send("double:?", {}, delay=1)
        seen = consumer.wait_for_event(failed, timeout=30)
        print("first failure:", seen.key if seen else "none within 30 s")


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
