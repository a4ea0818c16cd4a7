"""
What must hold whatever fails, read from the database and from what the functions have witnessed.

A `Witness` is a second collection: every function writes into it when it begins and when it
ends. It is the only trusted count of how often something ran; the documents of the tasks are what
is checked against it.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
from bson import ObjectId
from bson.codec_options import CodecOptions
from pymongo import WriteConcern
from pymongo.collection import Collection
from pymongo.errors import DuplicateKeyError, PyMongoError

from mscheduler_sync import model
from mscheduler_sync._storage import expressions as x
from mscheduler_sync._storage import statements
from mscheduler_sync.context import TaskContext
from mscheduler_sync.model import Attempt, Status
from tests.support import Document, wait_until

#: How an attempt ends whose function may run on: the task may then run beside it.
MAY_RUN_ON = "did not end"
#: How long a witness waits for a server that is away, in seconds.
WITNESS_PATIENCE_S = 60.0


@attrs.frozen
class Run:
    """
    One execution of a function, in the machine's monotonic time.
    """

    task: str
    attempt: int
    running_id: str
    pid: int
    t0: float
    #: None: it runs still, or its process has died.
    t1: float | None


class Witness:
    """
    Where functions write that they run. Needs a client of its own that no fault touches.
    """

    def __init__(self, collection: Collection[Document]) -> None:
        self._collection = collection.with_options(write_concern=WriteConcern("majority", j=True))

    @contextlib.contextmanager
    def running(self, context: TaskContext) -> Iterator[None]:
        """
        Write down that the attempt of *context* runs while the block does.
        """
        row_id = ObjectId()
        began: Document = {
            "_id": row_id,
            "task": context.key,
            "attempt": context.attempt,
            "running_id": context.running_id,
            "pid": os.getpid(),
            "t0": time.monotonic(),
        }
        self._write(lambda: self._collection.insert_one(began))
        try:
            yield
        finally:
            ended = {"$set": {"t1": time.monotonic()}}
            self._write(lambda: self._collection.update_one({"_id": row_id}, ended))

    @staticmethod
    def _write(call: Callable[[], object]) -> None:
        """
        Repeat *call* while the server is away: what was seen must not be lost.
        """
        end_s = time.monotonic() + WITNESS_PATIENCE_S
        while True:
            try:
                call()
            except DuplicateKeyError:
                return
            except PyMongoError:
                if time.monotonic() > end_s:
                    raise
                threading.Event().wait(0.05)
            else:
                return

    def runs(self, task: str | None = None) -> list[Run]:
        """
        Return the executions of *task* (None: of all) in order of their beginning.
        """
        found = self._collection.find({} if task is None else {"task": task}).sort("t0")
        return [
            Run(
                task=row["task"],
                attempt=row["attempt"],
                running_id=row["running_id"],
                pid=row["pid"],
                t0=row["t0"],
                t1=row.get("t1"),
            )
            for row in found
        ]

    def count(self, task: str) -> int:
        return len(self.runs(task))

    def wait_begun(self, task: str, times: int = 1, timeout: float = 20) -> Run:
        """
        Wait until *task* has begun *times* times; return the latest of these runs.
        """
        wait_until(lambda: self.count(task) >= times, f"run {times} of {task} begins", timeout)
        return self.runs(task)[times - 1]


class Invariants:
    """
    The guarantees about the tasks of one collection, checked after whatever was done to them.

    1. Every task that was sent is there; it has ended, or it can be claimed.
    2. What has ended stays as it ended.
    3. Runs of one task overlap only as far as it wants several workers, or where the document
       says that a lease lapsed, that a stop left the attempt behind, or that its function ran on.
    4. Every run is accounted for, and none has two outcomes.
    5. Failed attempts are bounded.
    6. Status, due time and routes are what the document says otherwise.
    """

    def __init__(self, tasks: Collection[Document], witness: Witness) -> None:
        self._tasks: Collection[Document] = tasks.with_options(
            codec_options=CodecOptions(tz_aware=True)
        )
        self._witness = witness
        self._sent: set[str] = set()
        self._ended: dict[str, Document] = {}

    def sent(self, *keys: str) -> None:
        """
        Remember *keys* as those of tasks that must never be missing from now on.
        """
        self._sent.update(keys)

    def deleted(self, *keys: str) -> None:
        """
        Forget *keys*: the test itself has deleted, or armed again, their tasks.
        """
        self._sent.difference_update(keys)
        for key in keys:
            self._ended.pop(key, None)

    def check(self) -> None:
        """
        Look at everything now. Nothing may start or end meanwhile.

        Raises:
            AssertionError: Naming everything that is wrong.
        """
        # The runs first: an attempt in a document that is read later may not have begun yet, but
        # every run that has begun has its attempt.
        runs: dict[str, list[Run]] = collections.defaultdict(list)
        for run in self._witness.runs():
            runs[run.task].append(run)
        documents = {str(document["key"]): document for document in self._tasks.find({})}
        wrong = [f"{key}: it is gone" for key in self._sent - documents.keys()]
        wrong += [f"{key}: it ran, but was never sent" for key in runs.keys() - documents.keys()]
        for key, document in documents.items():
            problems = [
                *self._problems_of_state(document),
                *self._problems_of_end(key, document),
                *problems_of_runs(document, runs[key]),
            ]
            wrong += [f"{key}: {problem}" for problem in problems]
        wrong += self._query("in limbo", {"status": {"$nin": x.TERMINAL}, "due": {"$gte": x.NEVER}})
        wrong += self._query(
            "ended but due", {"status": {"$in": x.TERMINAL}, "due": {"$lt": x.NEVER}}
        )
        wrong += self._query("never derived", {"routes": None})
        assert not wrong, "\n".join(["the guarantees do not hold:", *wrong])

    def _query(self, what: str, condition: Mapping[str, Any]) -> list[str]:
        return [f"{row['key']}: {what}" for row in self._tasks.find(condition, {"key": 1})]

    def _problems_of_end(self, key: str, document: Document) -> Iterator[str]:
        before = self._ended.get(key)
        end = {
            "status": document["status"],
            "attempts": document["task_state"]["worker_states"],
            "finished_at": document.get("finished_at"),
        }
        if before is not None and end != before:
            yield f"it had ended, and has changed: {before} became {end}"
        if document["status"] in x.TERMINAL:
            self._ended.setdefault(key, end)

    @staticmethod
    def _problems_of_state(document: Document) -> Iterator[str]:
        attempts = model.read_attempts(document)
        options = model.read_options(document)
        status, due = model.derive(document, attempts)
        if (document.get("status"), document.get("due")) != (status, due):
            stored = document.get("status"), document.get("due")
            yield f"status and due are {stored}, not {(status, due)}"
        is_shared = options.concurrency > 1 or options.retry_scope == "worker"
        routes = statements.discovery.routes_of(
            name=document.get("name"),
            worker_ids=() if options.worker_ids == (x.NOBODY,) else options.worker_ids,
            shared=is_shared,
        )
        if document.get("routes") != routes:
            yield f"its routes are {document.get('routes')}, not {routes}"
        if (document.get("finished_at") is not None) != (status in x.TERMINAL):
            yield f"it is {status}, and finished_at is {document.get('finished_at')}"
        failed = [one for one in attempts if one.failed_at is not None]
        is_per_worker = options.retry_scope == "worker"
        most = x.WORKER_SCOPE_CAP if is_per_worker else options.max_attempts
        if len(failed) > most + options.concurrency - 1:
            yield f"{len(failed)} failed attempts, {options.max_attempts} are allowed"
        live = [one for one in attempts if one.is_open or one.succeeded_at is not None]
        if len(live) > options.concurrency:
            yield f"{len(live)} attempts hold or took a place, {options.concurrency} are wanted"


def problems_of_runs(document: Document, runs: list[Run]) -> Iterator[str]:
    """
    Yield what is wrong between the *document* of a task and the *runs* that were witnessed.
    """
    attempts = {one.running_id: one for one in model.read_attempts(document)}
    times = collections.Counter(run.running_id for run in runs)
    yield from (f"the attempt {one} ran {n} times" for one, n in times.items() if n > 1)

    for one in attempts.values():
        if one.succeeded_at is not None and one.failed_at is not None:
            yield f"the attempt {one.running_id} has two outcomes"
        ended = any(run.running_id == one.running_id and run.t1 is not None for run in runs)
        if one.succeeded_at is not None and not ended:
            yield f"the attempt {one.running_id} succeeded, but its function did not end"

    counters = {k: n for k, n in document.get("counters", {}).items() if isinstance(n, int)}
    gone = [run for run in runs if run.running_id not in attempts]
    if len(gone) > sum(counters.values()):
        ids = [run.running_id for run in gone]
        yield f"{ids} ran, but are neither among the attempts nor counted in {counters}"

    places = model.read_options(document).concurrency
    trusted = [run for run in runs if not _may_overlap(attempts.get(run.running_id), counters)]
    for run in runs:
        beside = [
            one
            for one in trusted
            if one is not run and one.t0 <= run.t0 and (one.t1 is None or one.t1 > run.t0)
        ]
        if len(beside) >= places:
            told = [(one, attempts.get(one.running_id)) for one in beside]
            yield f"{run} began beside {told}, whose leases never lapsed"


def _may_overlap(attempt: Attempt | None, counters: Mapping[str, int]) -> bool:
    """
    Return whether the document records that this attempt was not held to its end.
    """
    if attempt is None:
        # Left behind by a stop and removed when its lease ended; or failed in an earlier arm, of
        # which only the number is kept.
        return counters.get("released", 0) + counters.get("failed", 0) > 0
    reason = attempt.fail_reason or ""
    return (
        attempt.interrupted or reason == statements.attempts.EXPIRED_REASON or MAY_RUN_ON in reason
    )


def status_of(tasks: Collection[Document], key: str) -> Status:
    """
    Return the status that stands in the document of the task *key*.
    """
    status: Status = tasks.find_one({"key": key}, {"status": 1})["status"]  # type: ignore[index]
    return status


def wait_status(
    tasks: Collection[Document], key: str, status: Status, timeout: float = 20
) -> Document:
    """
    Wait until the task *key* has *status*; return its document.
    """
    document: Document = {}

    def has_status() -> bool:
        nonlocal document
        document = tasks.find_one({"key": key}) or {}
        return document.get("status") == status

    try:
        wait_until(has_status, f"{key} is {status}", timeout)
    except AssertionError as error:
        msg = f"{error}; it is {document}"
        raise AssertionError(msg) from None
    return document
