"""
The producer when the database answers late, wrongly, or not at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from pymongo import MongoClient

from mscheduler_sync import MSchedulerError, Producer, SendResult, StoreUnavailable
from mscheduler_sync._storage.store import TaskStore
from tests.support import Document, fail_point
from tests.support.arranged import arranged, stored
from tests.support.tasks import Tasks


@contextlib.contextmanager
def connected(uri: str, collection: Tasks, *, retry_writes: bool) -> Iterator[Tasks]:
    """
    The collection through a client with or without the driver's own retries.

    It looks at the server twice a second, so that it sees the end of a step-down soon.
    """
    client: MongoClient[Document]
    with MongoClient(
        uri, tz_aware=True, retryWrites=retry_writes, heartbeatFrequencyMS=500
    ) as client:
        yield client[collection.database.name][collection.name]


#: Kinds of trouble that end before or after the server has done the work.
LOST: dict[str, Document] = {
    "cut before it was done": {"closeConnection": True},
    "done, but not by a majority": {"writeConcernError": {"code": 64, "errmsg": "waiting"}},
    "done, but too late": {"blockConnection": True, "blockTimeMS": 700},
    "refused while stepping down": {
        "errorCode": 91,
        "errorLabels": ["RetryableWriteError"],
    },
}


@pytest.fixture(params=LOST)
def trouble(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Document:
    """
    The data of a fail point; where it blocks, calls give up after 0.3 s instead of 10.
    """
    data = LOST[request.param]
    if "blockTimeMS" in data:
        call = TaskStore._call
        monkeypatch.setattr(TaskStore, "_call", lambda store, *_, session=None: call(store, 0.3))
    return data


@pytest.mark.parametrize("retry_writes", [False, True], ids=["plain", "retryWrites"])
def test_lost_reply_of_an_insert(
    server_uri: str,
    client: MongoClient[Document],
    collection: Tasks,
    trouble: Document,
    retry_writes: bool,
) -> None:
    """
    The send succeeds, says truly that it inserted, and there is one document.
    """
    with connected(server_uri, collection, retry_writes=retry_writes) as tasks:
        producer = Producer(tasks)
        producer.send("first")
        with fail_point(client, ["insert"], {"times": 1}, **trouble):
            result = producer.send("k", 1)
            assert result == SendResult("k", inserted=True, updated=False, status="waiting")
        # A blocked insert may come through after the second one.
        assert producer.send("k", 2) == SendResult("k", False, False, "waiting")
    assert [d["params"] for d in collection.find({"key": "k"})] == [1]


@pytest.mark.parametrize("retry_writes", [False, True], ids=["plain", "retryWrites"])
def test_lost_reply_of_an_insert_into_a_taken_key(
    server_uri: str,
    client: MongoClient[Document],
    collection: Tasks,
    trouble: Document,
    retry_writes: bool,
) -> None:
    """
    The send does not take another's task for its own.
    """
    with connected(server_uri, collection, retry_writes=retry_writes) as tasks:
        producer = Producer(tasks)
        producer.send("k", 1)
        with fail_point(client, ["insert"], {"times": 1}, **trouble):
            result = producer.send("k", 2)
    assert result == SendResult("k", inserted=False, updated=False, status="waiting")
    assert [d["params"] for d in collection.find()] == [1]


@pytest.mark.parametrize("retry_writes", [False, True], ids=["plain", "retryWrites"])
def test_lost_reply_of_an_update(
    server_uri: str,
    client: MongoClient[Document],
    collection: Tasks,
    trouble: Document,
    retry_writes: bool,
) -> None:
    """
    The update is applied once, and the send says so.
    """
    with connected(server_uri, collection, retry_writes=retry_writes) as tasks:
        producer = Producer(tasks)
        arranged(producer, collection, "failed")
        with fail_point(client, ["update"], {"times": 1}, **trouble):
            result = producer.send("k", "new", if_exists="rerun")
    assert result == SendResult("k", inserted=False, updated=True, status="waiting")
    document = stored(collection)
    assert document["params"] == "new"
    assert document["counters"] == {"failed": 1, "succeeded": 0}


def test_lost_reply_of_cancel_and_retry(
    server_uri: str, client: MongoClient[Document], collection: Tasks, trouble: Document
) -> None:
    """
    Both are repeated, and their answers are right.
    """
    with connected(server_uri, collection, retry_writes=False) as tasks:
        producer = Producer(tasks)
        producer.send("k", 1)
        with fail_point(client, ["update"], {"times": 1}, **trouble):
            assert producer.cancel("k")
        assert stored(collection)["status"] == "cancelled"
        with fail_point(client, ["update"], {"times": 1}, **trouble):
            assert producer.retry("k")
    assert stored(collection)["status"] == "waiting"


def test_lost_reply_of_send_many(
    server_uri: str, client: MongoClient[Document], collection: Tasks, trouble: Document
) -> None:
    """
    Every item is there once, and each result is right.
    """
    with connected(server_uri, collection, retry_writes=False) as tasks:
        producer = Producer(tasks)
        producer.send("k3", "old")
        with fail_point(client, ["insert"], {"times": 1}, **trouble):
            results = producer.send_many([(f"k{n}", n) for n in range(10)])
    assert [r.key for r in results if not r.inserted] == ["k3"]
    assert sorted(d["key"] for d in collection.find()) == [f"k{n}" for n in range(10)]


def test_lasting_trouble_is_raised_and_a_later_send_of_the_key_works(
    producer: Producer, client: MongoClient[Document], collection: Tasks
) -> None:
    """
    StoreUnavailable, with the driver's error as its cause; sending again is safe.
    """
    producer.send("first")
    with (
        fail_point(client, ["insert"], "alwaysOn", closeConnection=True),
        pytest.raises(StoreUnavailable) as caught,
    ):
        producer.send("k", 1)
    assert caught.value.__cause__ is not None
    result = producer.send("k", 2)
    assert result.inserted
    assert [d["params"] for d in collection.find({"key": "k"})] == [2]


def test_error_texts_hold_no_params(
    producer: Producer, client: MongoClient[Document], collection: Tasks
) -> None:
    """
    What a task carries is not shown in errors, which end up in logs.
    """
    secret = "the very secret word"
    producer.send("first")
    for bad in ({1}, "\ud800", 2**64):
        with pytest.raises(ValueError, match=r"params\.b") as refused:
            producer.send("k", {"a": secret, "b": bad})
        assert secret not in str(refused.value)
    with (
        fail_point(client, ["insert"], "alwaysOn", errorCode=13),
        pytest.raises(MSchedulerError) as failed,
    ):
        producer.send("k", {"a": secret})
    assert secret not in str(failed.value)
