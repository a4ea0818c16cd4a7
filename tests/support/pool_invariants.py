"""
What must hold of the pool's documents at any moment, and of what its handlers have seen.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import DuplicateKeyError

from mscheduler_sync.pool import Job
from tests.support import Document

STATES = {"pending", "starting", "running", "failed"}


class Recorder:
    """
    A handler that remembers what it was told, and notes what must not be.

    Shared by the workers of a test's process: a start of a key that runs already, a stop or
    notification of one that does not, or a fence that did not grow are errors.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls: list[tuple[str, str, Any]] = []
        self.running: dict[str, Job] = {}
        self.fences: dict[str, int] = {}
        self.faults: list[str] = []

    def start(self, job: Job) -> None:
        with self.lock:
            self.calls.append(("start", job.key, job.payload))
            if job.key in self.running:
                self.faults.append(f"{job.key} was started while it ran")
            if job.fence <= self.fences.get(job.key, -1):
                self.faults.append(f"the fence of {job.key} did not grow")
            self.fences[job.key] = job.fence
            self.running[job.key] = job

    def stop(self, key: str) -> None:
        with self.lock:
            self.calls.append(("stop", key, None))
            if self.running.pop(key, None) is None:
                self.faults.append(f"{key} was stopped and did not run")

    def notify(self, key: str, payload: Any) -> None:
        with self.lock:
            self.calls.append(("notify", key, payload))
            if key not in self.running:
                self.faults.append(f"{key} was notified and did not run")

    def of(self, key: str) -> list[tuple[str, Any]]:
        """
        The calls about *key*, in order.
        """
        with self.lock:
            return [(what, value) for what, one, value in self.calls if one == key]

    def count(self, what: str) -> int:
        with self.lock:
            return sum(one == what for one, _, _ in self.calls)


class Member:
    """
    A handler of one worker that reports to a common `Recorder` and keeps its own keys.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.keys: set[str] = set()

    def start(self, job: Job) -> None:
        self.recorder.start(job)
        self.keys.add(job.key)

    def stop(self, key: str) -> None:
        self.recorder.stop(key)
        self.keys.discard(key)

    def notify(self, key: str, payload: Any) -> None:
        if key not in self.keys:
            self.recorder.faults.append(f"a notification of {key} reached the wrong worker")
        self.recorder.notify(key, payload)


def broken(database: Database[Document], pool: str, prefix: str = "pool_") -> list[str]:
    """
    Return what is wrong with the documents of a pool; safe at any moment.
    """
    wrong = []
    for job in database[f"{prefix}jobs"].find({"pool": pool}):
        key, state = job["key"], job["state"]
        owned = state in {"starting", "running"}
        if state not in STATES:
            wrong.append(f"{key} has the state {state!r}")
        if owned != (job["owner"] is not None) or owned != (job["node"] is not None):
            wrong.append(f"{key} is {state} and has the owner {job['owner']!r}")
        if owned and not job["owner"].startswith(job["node"] + "."):
            wrong.append(f"{key} has an owner of another node")
        if job["_id"] != f"{pool}\x1f{key}":
            wrong.append(f"{key} has the id {job['_id']!r}")
        numbers = [message["seq"] for message in job["inbox"]]
        if numbers != sorted(set(numbers)) or (numbers and numbers[-1] > job["inbox_seq"]):
            wrong.append(f"the inbox of {key} is not in order")
        if numbers and not job["unread"]:
            wrong.append(f"the inbox of {key} is not marked as unread")
    for document in database[f"{prefix}pools"].find({"_id": pool}):
        workers = [place["worker"] for place in document["ring"]]
        if len(workers) != len(set(workers)):
            wrong.append("a worker has two slots")
    return wrong


def owners(database: Database[Document], pool: str, prefix: str = "pool_") -> dict[str, str | None]:
    """
    Return who owns each job of a pool.
    """
    jobs = database[f"{prefix}jobs"].find({"pool": pool}, {"key": 1, "owner": 1})
    return {job["key"]: job["owner"] for job in jobs}


class FencedCounters:
    """
    An outside system that honours fences: per key a number that only its present owner raises.
    """

    def __init__(self, collection: Collection[Document]) -> None:
        self._collection = collection

    def raise_(self, key: str, fence: int, writer: str) -> bool:
        """
        Add one for *key*; return whether that was accepted.
        """
        accepted = self._collection.update_one(
            {"_id": key, "fence": fence, "writer": writer}, {"$inc": {"n": 1}}
        )
        if accepted.matched_count:
            return True
        taken_over = self._collection.update_one(
            {"_id": key, "fence": {"$lt": fence}},
            {"$set": {"fence": fence, "writer": writer}, "$inc": {"n": 1, "owners": 1}},
        )
        if taken_over.matched_count:
            return True
        try:
            self._collection.insert_one(
                {"_id": key, "fence": fence, "writer": writer, "n": 1, "owners": 1}
            )
        except DuplicateKeyError:
            found = self._collection.find_one({"_id": key})
            if found and found["fence"] == fence and found["writer"] != writer:
                self._collection.update_one(
                    {"_id": key}, {"$push": {"faults": f"{writer} has the fence of another"}}
                )
            return False
        return True

    def faults(self) -> list[str]:
        found = self._collection.find({"faults": {"$exists": True}})
        return [f"{one['_id']}: {fault}" for one in found for fault in one["faults"]]


def overlaps(runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """
    Return where two runs of one key overlap; *runs* have key, began and ended (None: for ever).
    """
    of_key: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for run in runs:
        of_key[run["key"]].append(run)
    wrong = []
    for key, some in of_key.items():
        ordered = sorted(some, key=lambda run: float(run["began"]))
        for first, second in itertools.pairwise(ordered):
            if first["ended"] is None or first["ended"] > second["began"]:
                wrong.append(f"{key}: {dict(first)} and {dict(second)}")
    return wrong


def started_twice(runs: Collection[Document]) -> list[str]:
    """
    Return the keys whose start was called twice under one fence; *runs* have key and fence.
    """
    found = runs.find({}, {"key": 1, "fence": 1})
    counts = Counter((run["key"], run["fence"]) for run in found)
    return [f"{key} under {fence}" for (key, fence), count in counts.items() if count > 1]


def monotonic_s() -> float:
    """
    A clock that all processes of one machine share.
    """
    return time.clock_gettime(time.CLOCK_MONOTONIC)
