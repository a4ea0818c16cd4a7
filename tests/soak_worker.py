"""
A worker process of the soak: runs what the params say, and writes down that it runs.

    python -m tests.soak_worker URI DATABASE OPTIONS(JSON)
"""

from __future__ import annotations

import json
import logging
import random
import sys
import threading
from typing import Any

from pymongo import MongoClient

from mscheduler_sync import Consumer, PermanentFailure, RetryLater, Snooze, TaskContext
from tests.support import Document
from tests.support.invariants import Witness


def main(uri: str, database_name: str, options: dict[str, Any]) -> int:
    logging.basicConfig(level=logging.ERROR, format="%(process)d %(name)s %(message)s")
    # The witness has a client of its own: the faults of the soak are for the consumer's.
    witness_client: MongoClient[Document] = MongoClient(uri, appname="soak-witness")
    client: MongoClient[Document] = MongoClient(
        uri, appname="soak-worker", serverSelectionTimeoutMS=5000
    )
    witness = Witness(witness_client[database_name]["runs"])

    def function(params: Document, context: TaskContext) -> Any:
        with witness.running(context):
            return act(params, context)

    consumer = Consumer(client[database_name]["tasks"], function, **options)
    report = consumer.run_forever()
    print(json.dumps({"abandoned": report.abandoned, "unstored": report.unstored}))
    return 0


def act(params: Document, context: TaskContext) -> Any:
    """
    Take as long as the params say, and end as they say.
    """
    heeds = bool(params.get("heeds", True))
    seconds = float(params.get("seconds", 0))
    if heeds:
        context.cancelled.wait(seconds)
        context.check()
    else:
        # Deaf to all requests, like a function that knows nothing of its context.
        threading.Event().wait(seconds)
    context.progress({"attempt": context.attempt})
    match random.choices(["return", *params.get("moods", [])])[0]:
        case "raise":
            raise ValueError("a bad day")
        case "later":
            raise RetryLater(0.2)
        case "snooze":
            raise Snooze(0.3)
        case "final":
            raise PermanentFailure("enough")
        case _:
            return {"key": context.key, "attempt": context.attempt}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
