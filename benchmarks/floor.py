"""
What the server allows at best: hand-written loops without leases, fencing or events.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from pymongo import MongoClient, UpdateOne, WriteConcern
from pymongo.collection import Collection

#: The floor reads pages of so many keys.
PAGE = 100


def durable(collection: Collection[Any]) -> Collection[Any]:
    """
    The collection with the library's own write concern.
    """
    return collection.with_options(write_concern=WriteConcern("majority", j=True))


def fill(collection: Collection[Any], documents: list[dict[str, Any]]) -> None:
    durable(collection).insert_many(documents, ordered=False)


def drain(collection: Collection[Any], threads: int) -> float:
    """
    Work off all documents with ``state: 0``; return the seconds it took.

    Pages of 100 keys; per task one update guarded by a plain field to claim, one to complete.
    """
    collection = durable(collection)
    lock = threading.Lock()
    page: list[str] = []

    def next_key() -> str | None:
        with lock:
            if not page:
                found = collection.find({"state": 0}, {"key": 1}).sort("key", 1).limit(PAGE)
                page.extend(document["key"] for document in found)
            return page.pop() if page else None

    def work() -> None:
        while (key := next_key()) is not None:
            claimed = collection.update_one({"key": key, "state": 0}, {"$set": {"state": 1}})
            if claimed.modified_count:
                collection.update_one({"key": key, "state": 1}, {"$set": {"state": 2}})

    workers = [threading.Thread(target=work) for _ in range(threads)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - began


def change_event_latencies(collection: Collection[Any], count: int) -> list[float]:
    """
    Seconds from the start of an insert to its change event, plus one guarded update, *count* times.
    """
    collection = durable(collection)
    latencies: list[float] = []
    with collection.with_options(read_concern=None).watch(
        [{"$match": {"operationType": "insert"}}, {"$project": {"fullDocument.key": 1}}],
        max_await_time_ms=1000,
    ) as stream:
        stream.try_next()
        sent: dict[str, float] = {}
        go = threading.Event()

        def send() -> None:
            for number in range(count):
                go.wait()
                go.clear()
                threading.Event().wait(0.02)
                key = f"floor-{number}"
                sent[key] = time.perf_counter()
                collection.insert_one({"key": key, "state": 0})

        sender = threading.Thread(target=send)
        sender.start()
        go.set()
        while len(latencies) < count:
            event = stream.try_next()
            if event is None:
                continue
            key = event["fullDocument"]["key"]
            collection.update_one({"key": key, "state": 0}, {"$set": {"state": 1}})
            latencies.append(time.perf_counter() - sent[key])
            go.set()
        sender.join()
    return latencies


def prepared(client: MongoClient[Any], name: str) -> Collection[Any]:
    """
    A fresh collection with the one index that the floor needs.
    """
    database = client[name]
    collection: Collection[Any] = database["floor"]
    collection.drop()
    collection.create_index("key", unique=True)
    collection.create_index([("state", 1), ("key", 1)])
    return collection


__all__ = ["UpdateOne", "change_event_latencies", "drain", "fill", "prepared"]
