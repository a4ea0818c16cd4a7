"""
What the server allows at best: hand-written loops without leases, fencing or events.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any, Final

from bson import ObjectId
from pymongo import MongoClient, WriteConcern
from pymongo.collection import Collection

Document = dict[str, Any]

#: The loop reads pages of so many keys.
PAGE: Final = 100


def durable(collection: Collection[Document]) -> Collection[Document]:
    """
    Return the collection with the library's own write concern.
    """
    return collection.with_options(write_concern=WriteConcern("majority", j=True))


def key_of(number: int) -> str:
    """
    Return a key of its own for *number*; keys of neighbours lie far apart.
    """
    # The factor has no divisor in common with the modulus: no two numbers share a key.
    return f"{number * 2_654_435_761 % 10**8:08d}"


def prepared(client: MongoClient[Document], database: str) -> Collection[Document]:
    """
    Return a new collection with the two indexes that the loop needs.
    """
    collection = durable(client[database]["floor"])
    collection.drop()
    collection.create_index("key", unique=True)
    collection.create_index([("state", 1), ("key", 1)])
    return collection


def copies(template: Document, keys: list[str]) -> list[Document]:
    """
    Return a document for each key, of the size of *template*, which is a task's document.
    """
    return [{**template, "_id": ObjectId(), "key": key, "state": 0} for key in keys]


def drain(collection: Collection[Document], threads: int, *, shared: bool) -> tuple[int, int]:
    """
    Work off all documents with ``state: 0``; return how many, and how many claims were lost.

    Pages of keys; for each one update guarded by a plain field to claim, one to complete. Where
    the documents are *shared* with other processes, each page begins at a random key: loops that
    all began at the first would lose most of their claims, and be no floor.
    """
    collection = durable(collection)
    lock = threading.Lock()
    page: list[str] = []
    done = lost = 0

    def read(after: str) -> list[str]:
        condition: Document = {"state": 0}
        if after:
            condition["key"] = {"$gte": after}
        found = collection.find(condition, {"key": 1}).sort("key", 1).limit(PAGE)
        return [document["key"] for document in found]

    def next_key() -> str | None:
        with lock:
            if not page:
                after = f"{random.randrange(10**8):08d}" if shared else ""
                page.extend(read(after) or (read("") if after else []))
                page.reverse()
            return page.pop() if page else None

    def work() -> None:
        nonlocal done, lost
        won = missed = 0
        while (key := next_key()) is not None:
            claimed = collection.update_one({"key": key, "state": 0}, {"$set": {"state": 1}})
            if claimed.modified_count:
                collection.update_one({"key": key, "state": 1}, {"$set": {"state": 2}})
                won += 1
            else:
                missed += 1
        with lock:
            done += won
            lost += missed

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return done, lost


def open_stream(collection: Collection[Document]) -> Any:
    """
    Return a bare change stream that hands out the keys of inserted documents.
    """
    stream = collection.watch(
        [{"$match": {"operationType": "insert"}}, {"$project": {"fullDocument.key": 1}}],
        max_await_time_ms=1000,
    )
    # Opened by the first look; from then on nothing is missed.
    stream.try_next()
    return stream


def next_started(stream: Any, collection: Collection[Document]) -> tuple[str, float] | None:
    """
    Wait up to a second for an insert, and claim it with one guarded update; return key and time.
    """
    event = stream.try_next()
    if event is None:
        return None
    key = event["fullDocument"]["key"]
    collection.update_one({"key": key, "state": 0}, {"$set": {"state": 1}})
    return key, time.monotonic()
