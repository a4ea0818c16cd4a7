"""
Which statement serves a task is the store's business: what is asked for is done either way.
"""

from __future__ import annotations

from typing import Any

import pytest
from pymongo.collection import Collection

from mscheduler_sync import Producer
from mscheduler_sync._stages.claims import ClaimBatch, Won, hint_of
from mscheduler_sync._storage.codec import envelope
from mscheduler_sync._storage.statement import Find, Update
from mscheduler_sync._storage.statements.discovery import discovered_by_key
from mscheduler_sync._storage.store import Success, TaskStore
from mscheduler_sync.errors import StoreRejected, StoreUnavailable
from tests.support import Document

ME = "w"


class CountingStore(TaskStore):
    """
    Counts its commands, and fails those that `failing` says.
    """

    def __init__(self, collection: Collection[Any]) -> None:
        super().__init__(collection)
        self.commands: list[str] = []
        self.failing: list[Exception] = []

    def find(self, query: Find, **options: Any) -> Any:
        self._count("find")
        return super().find(query, **options)

    def update(self, statement: Update, **options: Any) -> tuple[int, int]:
        self._count("update")
        return super().update(statement, **options)

    def _count(self, name: str) -> None:
        self.commands.append(name)
        if self.failing:
            raise self.failing.pop(0)


@pytest.fixture
def store(collection: Collection[Document]) -> CountingStore:
    store = CountingStore(collection)
    store.measure_clock()
    return store


@pytest.fixture
def producer(collection: Collection[Document]) -> Producer:
    return Producer(collection)


def claims_of(store: CountingStore, *keys: str) -> ClaimBatch:
    """
    Claims of *keys* as a pass discovers them. What it reads is not counted.
    """
    found = [envelope(document) for document in store.find(discovered_by_key(keys))]
    store.commands.clear()
    hints = {fields["key"]: hint_of(fields) for fields in found}
    return ClaimBatch(store, {key: hints.get(key) for key in keys}, ME, None)


def finished(claims: ClaimBatch) -> dict[str, Won]:
    """
    Everything that *claims* win.
    """
    won: dict[str, Won] = {}
    while not claims.is_over:
        won.update((one.key, one) for one in claims.proceed())
    assert not claims.undecided
    return won


def succeed(store: CountingStore, *won: Won) -> int:
    """
    End the attempts as succeeded; return how many were.
    """
    store.commands.clear()
    done = store.succeed([Success((w.key, w.running_id), w.key, w.hint) for w in won])
    assert done.errors == {}
    return done.matched


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_batch_takes_two_commands_and_its_end_one(
    store: CountingStore, producer: Producer, count: int, concurrency: int
) -> None:
    """
    One to claim, one to read back, one to store the outcomes: for plain tasks and for others.
    """
    keys = [f"k{number}" for number in range(count)]
    producer.send_many([(key, None, {"concurrency": concurrency}) for key in keys])
    claims = claims_of(store, *keys)
    won = finished(claims)
    assert store.commands == ["update", "find"]
    assert list(won) == claims.keys == keys
    assert (claims.lost, claims.refused, claims.unreadable) == ({}, {}, [])
    assert succeed(store, *won.values()) == count
    assert store.commands == ["update"]


@pytest.mark.parametrize("keys", [["odd"], ["odd", "k"]])
def test_what_only_looks_plain_is_won_all_the_same(
    store: CountingStore, producer: Producer, collection: Collection[Document], keys: list[str]
) -> None:
    """
    The general statement follows at once, for those alone that are due and were not taken.
    """
    producer.send_many([("odd", None), ("k", None)])
    collection.update_one({"key": "odd"}, {"$set": {"cancel": None}})
    claims = claims_of(store, *keys)
    assert set(finished(claims)) == set(keys)
    # A lone task is shown by the reading back; of several, what is not among the won is looked at.
    look = ["find"] if len(keys) > 1 else []
    assert store.commands == ["update", "find", *look, "update", "find"]
    assert not claims.lost


def test_successes_of_tasks_that_are_plain_no_more(
    store: CountingStore, producer: Producer
) -> None:
    """
    They are stored by one more statement.
    """
    producer.send_many([(key, None) for key in ("a", "b", "c")])
    won = finished(claims_of(store, "a", "b", "c"))
    producer.update("b", concurrency=2)
    assert succeed(store, *won.values()) == 3
    assert store.commands == ["update", "update"]
    assert {
        key: len(task.attempts) for key in "abc" if (task := producer.get(key))
    } == dict.fromkeys("abc", 1)


@pytest.mark.parametrize("hint_is_right", [True, False])
def test_what_is_lost_is_told_as_it_looks_now(
    store: CountingStore,
    producer: Producer,
    collection: Collection[Document],
    hint_is_right: bool,
) -> None:
    """
    Taken by another worker, or put off: with its due time. Deleted: as nothing.
    """
    producer.send_many([(key, None) for key in ("taken", "later", "gone", "mine")])
    claims = claims_of(store, "taken", "later", "gone", "mine")
    if not hint_is_right:
        claims = ClaimBatch(store, dict.fromkeys(claims.keys), ME, None)
    finished(ClaimBatch(store, {"taken": None}, "another", None))
    producer.update("later", delay=60)
    producer.delete("gone")
    store.commands.clear()
    assert list(finished(claims)) == ["mine"]
    assert store.commands == ["update", "find", "find"]
    assert list(claims.lost) == ["taken", "later", "gone"]
    assert claims.lost["gone"] is None
    due = [fields["due"] for fields in claims.lost.values() if fields is not None]
    assert due == [collection.find_one({"key": key})["due"] for key in ("taken", "later")]  # type: ignore[index]


def test_what_cannot_be_read_is_told_with_its_claim(
    store: CountingStore, producer: Producer, collection: Collection[Document]
) -> None:
    """
    It may have been won, so that it can be given back.
    """
    producer.send_many([("odd", None), ("k", None)])
    collection.update_one({"key": "odd"}, {"$set": {"task_option.priority": "high"}})
    claims = claims_of(store, "odd", "k")
    assert list(finished(claims)) == ["k"]
    (((key, running_id), error),) = claims.unreadable
    assert (key, error.path) == ("odd", "task_option.priority")
    document = collection.find_one({"key": "odd"})
    assert document is not None
    assert document["task_state"]["worker_states"][0]["running_id"] == running_id
    assert not claims.lost


def test_each_step_may_be_repeated(store: CountingStore, producer: Producer) -> None:
    """
    After an error the same statement comes next, and its lease counts from the first sending.
    """
    producer.send_many([("a", None), ("b", None)])
    claims = claims_of(store, "a", "b")
    for step in ("update", "find"):
        store.commands.clear()
        store.failing = [StoreUnavailable("away")]
        with pytest.raises(StoreUnavailable):
            claims.proceed()
        sent_at_s = claims.sent_at_s
        assert [key for key, _ in claims.undecided] == ["a", "b"]
        won = [one.key for one in claims.proceed()]
        assert won == ([] if step == "update" else ["a", "b"])
        assert store.commands == [step, step]
        assert claims.sent_at_s == sent_at_s
    assert claims.is_over


def test_what_the_server_keeps_refusing_is_given_up(
    store: CountingStore, producer: Producer
) -> None:
    """
    The third refusal counts; it is read back all the same.
    """
    producer.send("k")
    claims = claims_of(store, "k")
    store.failing = [StoreRejected("no")] * 3
    for _ in range(2):
        with pytest.raises(StoreRejected):
            claims.proceed()
    assert finished(claims) == {}
    assert claims.refused == {"k": "no"}
    assert store.commands == ["update"] * 3 + ["find"]
    assert not claims.lost
