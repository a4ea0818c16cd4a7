"""
What a statement costs does not depend on how many documents stand beside.

Times, not plans: what ``explain`` says of the embedded server is not what it does. Medians of many
calls, alternating between the sizes that are compared.
"""

from __future__ import annotations

import datetime as dt
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from bson import ObjectId
from pymongo import MongoClient
from pymongo.collection import Collection

from mscheduler_sync import Producer
from mscheduler_sync._stages.fetcher import PAGE
from mscheduler_sync._stages.routes import Routes
from mscheduler_sync._storage import expressions as x
from mscheduler_sync._storage import statements
from mscheduler_sync._storage.sending import SendOptions
from mscheduler_sync._storage.statement import Find, Update
from mscheduler_sync._storage.statements.attempts import Failure
from mscheduler_sync._storage.store import TaskStore
from tests.support import Document

Tasks = Collection[Document]

pytestmark = pytest.mark.timeout(1800)

FINISHED, FAR, OF_OTHERS = 50_000, 50_000, 10_000
SMALL, LARGE = 300, 20_000
NOW = dt.datetime.now(dt.timezone.utc)
HOUR = dt.timedelta(hours=1)
ME = "me"


@pytest.fixture(scope="module")
def databases(client: MongoClient[Document]) -> Iterator[Callable[[str], Tasks]]:
    """
    Collections that the tests of this module share, by name.
    """
    name = f"test_scale_{ObjectId()}"
    yield lambda collection: client[name][collection]
    client.drop_database(name)


def insert(tasks: Tasks, documents: Iterator[Document]) -> None:
    chunk: list[Document] = []
    for document in documents:
        chunk.append(document)
        if len(chunk) == 1000:
            tasks.insert_many(chunk, ordered=False)
            chunk = []
    if chunk:
        tasks.insert_many(chunk, ordered=False)


def waiting(prefix: str, count: int, at: dt.datetime, **options: Any) -> Iterator[Document]:
    """
    Yield *count* tasks as a send makes them.
    """
    checked = SendOptions.checked(run_at=at, **options)
    return (checked.document(f"{prefix}-{n}", None, at) for n in range(count))


def attempt(n: int, *, ended: bool, worker: str = "other") -> Document:
    return {
        "running_id": f"r-{n}",
        "worker_id": worker,
        "ping_expire_time": NOW + HOUR,
        "success_time": NOW if ended else None,
        "fail_time": None,
        "claim_time": NOW,
    }


def running(prefix: str, count: int) -> Iterator[Document]:
    """
    Yield *count* tasks that are held by "me".
    """
    for n, document in enumerate(waiting(prefix, count, NOW - HOUR)):
        document["task_state"]["worker_states"] = [attempt(n, ended=False, worker=ME)]
        yield {**document, "status": x.RUNNING, "due": NOW + HOUR}


def finished(prefix: str, count: int) -> Iterator[Document]:
    for n, document in enumerate(waiting(prefix, count, NOW - HOUR)):
        document["task_state"]["worker_states"] = [attempt(n, ended=True)]
        yield {**document, "status": x.SUCCEEDED, "due": x.NEVER, "finished_at": NOW}


def made(tasks: Tasks, *parts: Iterator[Document]) -> TaskStore:
    """
    Fill *tasks*; return a store on it, indexes included.
    """
    for index in statements.discovery.INDEXES:
        tasks.create_index(index.keys, name=index.name, **index.options)
    for part in parts:
        insert(tasks, part)
    return TaskStore(tasks)


def medians_ms(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """
    Return the median duration of each of *calls*, in milliseconds.
    """
    durations: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, taken in zip(calls, durations, strict=True):
            began_s = time.perf_counter()
            call()
            taken.append((time.perf_counter() - began_s) * 1000)
    return [statistics.median(taken) for taken in durations]


def one_pass(store: TaskStore, routes: Routes, until: dt.datetime) -> list[str]:
    """
    Read what a pass of the fetcher reads; return the keys.
    """
    keys = []
    for route, eligible in routes.queries:
        query = statements.discovery.due_tasks(route, until=until, limit=PAGE, eligible=eligible)
        keys += [str(document["key"]) for document in store.find(query)]
    return sorted(keys)


def compare(what: str, few: Callable[[], object], many: Callable[[], object]) -> None:
    """
    Assert that *many* takes at most half as long again as *few*.
    """
    few_ms, many_ms = medians_ms([few, many], 61)
    print(f"{what}: {few_ms:.2f} ms alone, {many_ms:.2f} ms beside: {many_ms / few_ms:.2f}")
    # Half a millisecond is the noise of the clock and the scheduler.
    assert many_ms <= 1.5 * few_ms + 0.5


def test_the_past_and_the_future_do_not_slow_the_search(
    databases: Callable[[str], Tasks],
) -> None:
    """
    With 50,000 finished, 50,000 far, 10,000 due for others beside, a pass takes at most 1.5 times.

    Both of a consumer that takes every task and of one with a router; and that there are no
    documents of Rust workers is found out in the same time.
    """
    until = NOW + HOUR
    routes = Routes(ME, None)
    due = [f"due-{n}" for n in range(50)]
    alone = made(databases("alone"), waiting("due", 50, NOW))
    crowded = made(
        databases("crowded"),
        finished("finished", FINISHED),
        waiting("far", FAR, NOW + 24 * HOUR),
        waiting("pinned", OF_OTHERS, NOW - HOUR, worker_ids=["other"]),
        waiting("due", 50, NOW),
    )
    assert one_pass(alone, routes, until) == one_pass(crowded, routes, until) == sorted(due)
    compare(
        "a pass for all",
        lambda: one_pass(alone, routes, until),
        lambda: one_pass(crowded, routes, until),
    )
    underived = statements.discovery.underived(after_id=None, limit=100)
    compare("underived", lambda: alone.find(underived), lambda: crowded.find(underived))

    named = Routes(ME, ("mine", None))
    insert(databases("alone"), waiting("mine", 50, NOW, name="mine"))
    insert(databases("crowded"), waiting("mine", 50, NOW, name="mine"))
    insert(databases("crowded"), waiting("theirs", OF_OTHERS, NOW - HOUR, name="theirs"))
    due += [f"mine-{n}" for n in range(50)]
    assert one_pass(alone, named, until) == one_pass(crowded, named, until) == sorted(due)
    compare(
        "a pass for a router",
        lambda: one_pass(alone, named, until),
        lambda: one_pass(crowded, named, until),
    )


class Statements:
    """
    Each statement, on the documents of one collection, but for those that page over all of it.
    """

    def __init__(self, tasks: Tasks, size: int) -> None:
        # Spread over the whole of the collection, so that no statement has the first ones only.
        self.producer = Producer(tasks)
        self.store = made(
            tasks, waiting("w", size, NOW - HOUR), running("r", size), finished("f", size)
        )
        self.ids = [found["_id"] for found in tasks.find({}, {"_id": 1}).limit(100)]
        self._next = 0
        self._size = size

    def number(self) -> int:
        self._next = (self._next + 7919) % self._size  # prime to the sizes
        return self._next

    def held(self) -> tuple[str, str]:
        n = self.number()
        return f"r-{n}", f"r-{n}"

    def update(self, statement: Update, *, changes: bool = True) -> None:
        matched, _ = self.store.update(statement)
        count = len(statement.filter["key"]["$in"]) if statement.many else 1
        assert (matched == count) is changes, statement.filter

    def find(self, query: Find, count: int) -> None:
        assert len(self.store.find(query)) == count

    def several(self, name: str) -> list[str]:
        return [f"{name}-{self.number()}" for _ in range(20)]

    def claim(self) -> None:
        refs = [(f"w-{self.number()}", f"claim-{self._next}-{n}") for n in range(5)]
        self.update(statements.attempts.claim(refs, "another", names=None))

    def heartbeat(self) -> None:
        self.update(statements.attempts.heartbeat([self.held()]))

    def succeed(self) -> None:
        self.store.update(statements.attempts.succeed([self.held()], [None]))

    def fail(self) -> None:
        failures = [Failure("reason", 10_000)]
        self.store.update(statements.attempts.fail([self.held()], failures))

    def release(self) -> None:
        self.store.update(statements.attempts.release([self.held()]))

    def snooze(self) -> None:
        self.store.update(statements.attempts.snooze([self.held()], [3_600_000]))

    def mark_interrupted(self) -> None:
        self.store.update(statements.attempts.mark_interrupted([self.held()]))

    def repair(self) -> None:
        self.update(statements.attempts.repair(self.several("f")))

    def cancel(self) -> None:
        self.update(statements.producing.cancel(f"w-{self.number()}"))

    def claimed(self) -> None:
        self.find(statements.attempts.claimed([(f"f-{n}", f"r-{n}") for n in range(5)]), 5)

    def attempt_state(self) -> None:
        self.find(statements.attempts.attempt_state([f"r-{self.number()}"]), 1)

    def discovered_by_id(self) -> None:
        self.find(statements.discovery.discovered_by_id(self.ids[:20]), 20)

    def discovered_by_key(self) -> None:
        self.find(statements.discovery.discovered_by_key(self.several("f")), 20)

    def whole(self) -> None:
        self.find(statements.discovery.whole(self.several("f")), 20)

    def task(self) -> None:
        assert self.store.find_task(f"f-{self.number()}") is not None


HELPERS = {"number", "held", "update", "find", "several"}
NAMES = [name for name in vars(Statements) if name not in HELPERS and not name.startswith("_")]


@pytest.fixture(scope="module")
def sizes(databases: Callable[[str], Tasks]) -> tuple[Statements, Statements]:
    """
    The statements on 900 documents and on 60,000.
    """
    return Statements(databases("small"), SMALL), Statements(databases("large"), LARGE)


def test_each_statement_takes_as_long_in_a_large_collection(
    sizes: tuple[Statements, Statements],
) -> None:
    """
    From 900 to 60,000 documents the median time of no statement grows to the double.
    """
    small, large = sizes
    ratios = {}
    for name in NAMES:
        few, many = medians_ms([getattr(small, name), getattr(large, name)], 31)
        ratios[name] = (few, many, many / (few + 0.5))
        print(f"{name}: {few:.1f} ms, {many:.1f} ms: {many / few:.2f}")
    assert {name: one for name, one in ratios.items() if one[2] > 2} == {}


def test_what_a_producer_asks_takes_as_long_in_a_large_collection(
    sizes: tuple[Statements, Statements],
) -> None:
    """
    Sending, sending again, asking and waiting for a result do not grow with the collection.
    """
    both = [one.producer for one in sizes]
    numbers = iter(range(1_000_000))
    calls: dict[str, Callable[[Producer], object]] = {
        "send": lambda producer: producer.send(None),
        "send again": lambda producer: producer.send("f-7"),
        "update": lambda producer: producer.update(f"w-{next(numbers) % SMALL}", 1),
        "rerun": lambda producer: producer.send(f"f-{next(numbers) % SMALL}", if_exists="rerun"),
        "get": lambda producer: producer.get("f-11"),
        "result": lambda producer: producer.result("f-290", 0),
        "delete": lambda producer: producer.delete(f"f-{next(numbers) % SMALL}"),
    }
    ratios = {}
    for name, call in calls.items():
        few, many = medians_ms([lambda p=p: call(p) for p in both], 21)  # type: ignore[misc] # noqa: B023
        ratios[name] = (few, many, many / (few + 0.5))
        print(f"{name}: {few:.1f} ms, {many:.1f} ms: {many / few:.2f}")
    assert {name: one for name, one in ratios.items() if one[2] > 2} == {}
