"""
Statements take as long beside thousands of other documents as alone: every one uses an index.
"""

from __future__ import annotations

import datetime as dt
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs
import pytest
from bson import ObjectId
from pymongo import MongoClient
from pymongo.collection import Collection

from mscheduler_sync import Consumer, Producer
from mscheduler_sync._stages.routes import Routes
from mscheduler_sync._storage import statements
from mscheduler_sync._storage.statements.attempts import Ref
from mscheduler_sync._storage.store import TaskStore
from tests.support import Document

pytestmark = pytest.mark.timeout(600)

WORKER: Final = "growth"
#: Documents beside the work: half of them finished, half far in the future.
OTHERS: Final = 10_000
#: Pairs of runs. One scan of the others takes longer than 20 uses of an index.
PAIRS: Final = 21
MOST: Final = 3.0
_CHUNK: Final = 2000


@attrs.frozen
class Place:
    """
    One collection with due tasks, beside other documents or not.
    """

    collection: Collection[Document]
    store: TaskStore

    def claimed(self, name: str) -> list[Ref]:
        """
        Claim a task for each pair.
        """
        refs = [(f"{name}-{number}", uuid.uuid4().hex) for number in range(PAIRS)]
        assert self.store.update(statements.attempts.claim(refs, WORKER)) == (PAIRS, PAIRS)
        return refs


@attrs.frozen
class Places:
    alone: Place
    beside_others: Place


@pytest.fixture(scope="module")
def places(client: MongoClient[Document]) -> Iterator[Places]:
    """
    Two collections with the same due tasks; one holds 10,000 other documents as well.
    """
    name = f"test_{uuid.uuid4().hex[:12]}"
    made = []
    for collection in (client[name].alone, client[name].beside_others):
        producer = Producer(collection)
        for test in ("claim", "heartbeat", "succeed", "fail", "release"):
            producer.send_many([(f"{test}-{number}", None) for number in range(PAIRS)])
        made.append(Place(collection, TaskStore(collection)))
    add_others(client[name].beside_others, client[name].models)
    yield Places(*made)
    drop(client, name)


def drop(client: MongoClient[Document], name: str) -> None:
    """
    Drop a database; the embedded server drops full collections far more slowly than empty ones.
    """
    for collection in client[name].list_collection_names():
        client[name][collection].delete_many({})
    client.drop_database(name)


def add_others(collection: Collection[Document], scratch: Collection[Document]) -> None:
    """
    Add copies of a task that has succeeded and of one that is far in the future.
    """
    producer = Producer(scratch)
    producer.send("finished")
    producer.send("future", delay=dt.timedelta(days=3650))
    with Consumer(scratch, lambda params: None) as consumer:
        assert consumer.run_until_idle(30)
    models = [scratch.find_one({"key": key}) or {} for key in ("finished", "future")]
    assert [model["status"] for model in models] == ["succeeded", "waiting"]
    for start in range(0, OTHERS, _CHUNK):
        collection.insert_many(
            {**models[number % 2], "_id": ObjectId(), "key": f"other-{number}"}
            for number in range(start, start + _CHUNK)
        )


def growth(places: Places, run: Callable[[Place, int], Any], *, expected: object) -> float:
    """
    Run both places in turn; return how many times as long it takes beside the others (median).
    """
    quotients = []
    for number in range(PAIRS):
        took_s = []
        for place in (places.alone, places.beside_others):
            began_s = time.perf_counter()
            result = run(place, number)
            took_s.append(time.perf_counter() - began_s)
            assert result == expected
        quotients.append(took_s[1] / took_s[0])
    return statistics.median(quotients)


def test_a_scan_would_be_seen(places: Places) -> None:
    """
    A read without an index takes many times as long: the limit of the other tests is one.
    """

    def scan(place: Place, number: int) -> int:
        return place.collection.count_documents({"task_option.priority": 7})

    assert growth(places, scan, expected=0) > 2 * MOST


def test_finding_what_is_due(places: Places, client: MongoClient[Document]) -> None:
    """
    The queries of one pass cost the due tasks, not the finished and far-future ones.
    """
    if not bounds_by_both_fields(client):
        pytest.skip("this server uses an index on an array for its first field only")
    until = dt.datetime.now(dt.timezone.utc)

    def look(place: Place, number: int) -> list[int]:
        return [
            len(
                place.store.find(
                    statements.discovery.due_tasks(route, until=until, limit=50, eligible=condition)
                )
            )
            for route, condition in Routes(WORKER, None).queries
        ] + [len(place.store.find(statements.discovery.underived(after_id=None, limit=50)))]

    assert growth(places, look, expected=[50, 0, 0, 0, 0]) < MOST


def bounds_by_both_fields(client: MongoClient[Document]) -> bool:
    """
    Whether the server finds a value of an array and a range by their index, as MongoDB does.
    """
    name = f"test_{uuid.uuid4().hex[:12]}"
    collection = client[name].bounds
    collection.create_index([("a", 1), ("b", 1)])
    crowd = [{"a": [1, 0], "b": number} for number in range(OTHERS)]
    collection.insert_many(crowd + [{"a": [2], "b": number} for number in range(10)])

    def took_s(value: int) -> float:
        began_s = time.perf_counter()
        assert len(list(collection.find({"a": value, "b": {"$gte": 0, "$lt": 10}}))) == 10
        return time.perf_counter() - began_s

    quotients = [took_s(1) / took_s(2) for _ in range(PAIRS)]
    drop(client, name)
    return statistics.median(quotients) < MOST


def test_claiming(places: Places) -> None:
    """
    A claim and its reading back find the document by its key.
    """

    def claim(place: Place, number: int) -> tuple[tuple[int, int], int]:
        refs = [(f"claim-{number}", uuid.uuid4().hex)]
        written = place.store.update(statements.attempts.claim(refs, WORKER))
        return written, len(place.store.find(statements.attempts.claimed(refs)))

    assert growth(places, claim, expected=((1, 1), 1)) < MOST


def test_heartbeats(places: Places) -> None:
    """
    A heartbeat and what it learns find the document by its key.
    """
    held = {id(place): place.claimed("heartbeat") for place in (places.alone, places.beside_others)}

    def heartbeat(place: Place, number: int) -> tuple[tuple[int, int], int]:
        key, running_id = held[id(place)][number]
        written = place.store.update(statements.attempts.heartbeat([(key, running_id)]))
        return written, len(place.store.find(statements.attempts.attempt_state([key])))

    assert growth(places, heartbeat, expected=((1, 1), 1)) < MOST


@pytest.mark.parametrize(
    ("outcome", "statement"),
    [
        ("succeed", lambda ref: statements.attempts.succeed([ref], [None])),
        (
            "fail",
            lambda ref: statements.attempts.fail(
                [ref], [statements.attempts.Failure("no", 60_000)]
            ),
        ),
        ("release", lambda ref: statements.attempts.release([ref])),
    ],
)
def test_outcomes(places: Places, outcome: str, statement: Callable[[Ref], Any]) -> None:
    """
    Success, failure and release find the document by its key.
    """
    held = {id(place): place.claimed(outcome) for place in (places.alone, places.beside_others)}

    def end(place: Place, number: int) -> tuple[int, int]:
        return place.store.update(statement(held[id(place)][number]))

    assert growth(places, end, expected=(1, 1)) < MOST
