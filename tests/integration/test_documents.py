"""
Documents that are not as they should be: set aside with a reason, or read tolerantly.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from typing import Any

import pytest
from bson import DatetimeMS, Int64, ObjectId
from pymongo.collection import Collection
from pymongo.errors import OperationFailure

from mscheduler_sync import (
    Consumer,
    InvalidTask,
    Producer,
    Subscription,
    TaskQuarantined,
)
from tests.support import Document, wait_until

Tasks = Collection[Document]

STATES = "task_state.worker_states"
#: A path and what is put there.
Case = tuple[str, object]
#: For `$unset` instead of `$set`.
MISSING = object()
NAN = float("nan")


@pytest.fixture
def producer(collection: Tasks) -> Producer:
    """
    The producer of the test.
    """
    return Producer(collection)


def polling(collection: Tasks, function: Any, **options: Any) -> Consumer:
    """
    Make a consumer that polls, often.
    """
    return Consumer(collection, function, watch=False, poll_interval=0.1, **options)


def echo(params: Any) -> Any:
    return params


def change(collection: Tasks, key: str, path: str, value: object) -> Document:
    """
    Put *value* at *path* of the task; return its document.
    """
    update = {"$unset": {path: ""}} if value is MISSING else {"$set": {path: value}}
    assert collection.update_one({"key": key}, update).modified_count == 1
    document = collection.find_one({"key": key})
    assert document is not None
    return document


def unread(events: Subscription) -> list[Any]:
    """
    Return the events that are there already.
    """
    return list(iter(lambda: events.get(0), None))


def element(**changes: object) -> Document:
    values = {
        "running_id": "r",
        "worker_id": "w",
        "ping_expire_time": dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc),
        "success_time": None,
        "fail_time": None,
        **changes,
    }
    return {name: value for name, value in values.items() if value is not MISSING}


#: (path, value): the task cannot be run, and the reason names the path.
UNREADABLE: list[Case] = [
    (STATES, None),
    (STATES, MISSING),
    (STATES, "none"),
    (STATES, {"0": element()}),
    (STATES, [None]),
    (STATES, [5]),
    (STATES, [{}]),
    (STATES, [element(worker_id=5)]),
    (STATES, [element(ping_expire_time="soon")]),
    (STATES, [element(fail_time=5)]),
    ("task_state", MISSING),
    ("task_state", "state"),
    ("task_state.start_time", None),
    ("task_state.start_time", MISSING),
    ("task_state.start_time", "soon"),
    ("task_state.start_time", 5),
    ("task_option", MISSING),
    ("task_option", None),
    ("task_option", [1]),
    ("task_option.concurrent_worker_cnt", 0),
    ("task_option.concurrent_worker_cnt", -1),
    ("task_option.concurrent_worker_cnt", 1.5),
    ("task_option.concurrent_worker_cnt", NAN),
    ("task_option.concurrent_worker_cnt", "1"),
    ("task_option.concurrent_worker_cnt", None),
    ("task_option.concurrent_worker_cnt", Int64(2**40)),
    ("task_option.worker_timeout_ms", 0),
    ("task_option.worker_timeout_ms", NAN),
    ("task_option.worker_timeout_ms", "60000"),
    ("task_option.worker_timeout_ms", MISSING),
    ("task_option.worker_timeout_ms", Int64(2**62)),
    ("task_option.ping_interval_ms", -1),
    ("task_option.ping_interval_ms", "often"),
    ("task_option.ping_interval_ms", MISSING),
    ("task_option.max_unexpected_retries", "3"),
    ("task_option.unexpected_retry_delay_ms", -1),
    ("task_option.unexpected_retry_delay_ms", "10"),
    ("task_option.unexpected_retry_delay_ms", MISSING),
    ("task_option.priority", "high"),
    ("task_option.priority", MISSING),
    ("task_option.specific_worker_ids", "w"),
    ("task_option.specific_worker_ids", [5]),
    ("task_option.specific_worker_ids", {"a": 1}),
]


def name_of(case: Case) -> str:
    """
    Return a key that says what is odd about its task.
    """
    return f"{case[0]}={'missing' if case[1] is MISSING else repr(case[1])}"


def path_of(key: str) -> str:
    return key.partition("=")[0]


def spoiled(producer: Producer, collection: Tasks, cases: list[Case]) -> dict[str, Document]:
    """
    Make one task for each case; return the documents by key.
    """
    documents = {}
    for case in cases:
        path, value = case
        key = name_of(case)
        producer.send(key, "p", retry_delay=0)
        if value is MISSING:
            # So that there is something to take away.
            collection.update_one({"key": key, path: {"$exists": False}}, {"$set": {path: None}})
        documents[key] = change(collection, key, path, value)
    assert len(documents) == len(cases)
    return documents


def check_set_aside(
    producer: Producer, collection: Tasks, cases: list[Case], *, rust_interop: bool
) -> None:
    """
    Each case is told once, names its place, and stays as it is, while good tasks run.
    """
    bad = spoiled(producer, collection, cases)
    producer.send_many([(f"good{n}", n) for n in range(3)])
    runs: list[Any] = []
    consumer = polling(collection, runs.append, rust_interop=rust_interop)
    events = consumer.subscribe(TaskQuarantined)
    told: dict[str | None, str] = {}

    def all_told() -> bool:
        for event in unread(events):
            assert event.key not in told
            told[event.key] = event.reason
        return len(told) >= len(bad)

    with consumer:
        for number in range(3):
            assert producer.result(f"good{number}", 30) is None
        with contextlib.suppress(AssertionError):
            wait_until(all_told, "all are told", 20)
        assert sorted(set(bad) - set(told)) == []
        producer.send("later", "later")
        assert producer.result("later", 30) is None
        assert all_told()
        assert consumer.health().ok
    assert set(told) == set(bad)
    assert sorted(runs, key=str) == [0, 1, 2, "later"]
    wrong_place = {
        (key, told[key])
        for key in bad
        if not (told[key].startswith(path_of(key)) or path_of(key).startswith(told[key].split()[0]))
    }
    assert wrong_place == set()
    # A claim that finds a faulty attempt has settled the expired ones before.
    untouched = ["params", "task_option", *(["task_state", "status"] if rust_interop else [])]
    for key, before in bad.items():
        after = collection.find_one({"key": key})
        assert after is not None
        for field in untouched:
            # By their text, because NaN does not equal itself.
            assert repr(after.get(field)) == repr(before.get(field)), key
        with pytest.raises(InvalidTask) as caught:
            producer.get(key)
        assert caught.value.key == key
    assert [task.key for task in producer.list()] == ["good0", "good1", "good2", "later"]


@pytest.mark.parametrize("rust_interop", [False, True])
def test_unreadable_documents_are_set_aside_while_others_run(
    producer: Producer, collection: Tasks, rust_interop: bool
) -> None:
    """
    One TaskQuarantined tells key and place; the function never sees them, nothing breaks.
    """
    check_set_aside(producer, collection, UNREADABLE, rust_interop=rust_interop)


def test_unreadable_number_of_attempts_does_not_end_a_task(
    producer: Producer, collection: Tasks
) -> None:
    """
    A task whose budget cannot be read has not failed: it is set aside like others.
    """
    path = "task_option.max_unexpected_retries"
    cases: list[Case] = [(path, value) for value in (None, NAN, -1)]
    check_set_aside(producer, collection, cases, rust_interop=False)


def test_document_that_is_mended_runs(producer: Producer, collection: Tasks) -> None:
    """
    What was set aside runs once it is right: at the latest by a consumer that starts then.
    """
    producer.send("k", "p")
    change(collection, "k", "task_option.worker_timeout_ms", "60000")
    consumer = polling(collection, echo)
    events = consumer.subscribe(TaskQuarantined)
    with consumer:
        assert events.get(10) is not None
    change(collection, "k", "task_option.worker_timeout_ms", 60_000)
    with polling(collection, echo):
        assert producer.result("k", 10) == "p"


@pytest.mark.parametrize(
    "key",
    [5, None, MISSING, {"a": 1}, ObjectId("65a1b2c3d4e5f60718293a4b")],
    ids=["int", "null", "missing", "document", "ObjectId"],
)
@pytest.mark.parametrize("derived", [True, False])
def test_document_whose_key_is_no_text_is_set_aside(
    producer: Producer, collection: Tasks, key: object, derived: bool
) -> None:
    """
    With our derived fields or without them.
    """
    producer.send("good", 1)
    document = collection.find_one({"key": "good"})
    assert document is not None
    document["_id"] = "bad"
    document["key"] = key
    if key is MISSING:
        del document["key"]
    if not derived:
        for field in ("due", "routes", "status"):
            del document[field]
    collection.insert_one(document)
    consumer = polling(collection, echo)
    events = consumer.subscribe(TaskQuarantined)
    with consumer:
        told = events.get(10)
        assert isinstance(told, TaskQuarantined)
        assert "key" in told.reason
        assert producer.result("good", 10) == 1
        producer.send("later", 2)
        assert producer.result("later", 10) == 2
        assert consumer.health().ok


#: (path, value): of no consequence, or read as if it were not there.
TOLERATED: list[Case] = [
    ("task_state.create_time", MISSING),
    ("task_option.specific_worker_ids", None),
    ("task_option.specific_worker_ids", MISSING),
    ("task_option.priority", 1.0),
    ("task_option.concurrent_worker_cnt", 1.0),
    ("task_option.ping_interval_ms", 0),
    ("task_option.unknown", 5),
    ("params", MISSING),
    ("status", "who knows"),
    ("status", MISSING),
    ("name", 5),
    ("tags", "red"),
    ("tags", [1, "red"]),
    ("counters", "many"),
    ("counters", {"released": "many", "failed": None}),
    ("retry", "often"),
    ("retry", {"scope": 5, "backoff": "x", "jitter": -1, "max_delay_ms": NAN}),
    ("timeout_ms", "x"),
    ("timeout_ms", -5),
    ("keep_ms", "x"),
    ("keep_ms", -5),
    ("keep_ms", Int64(2**62)),
    ("cancel", "x"),
    ("cancel", {"time": None}),
    ("send_id", 5),
    ("progress", "x"),
    ("finished_at", "yesterday"),
    ("expire_at", "never"),
    ("heartbeat_at", "x"),
    ("_tally", "x"),
    ("unknown", {"$weird": [1, {"a.b": 2}]}),
    (STATES, [element(running_id=5)]),
    (STATES, [element(fail_reason=5, fail_time=dt.datetime(2020, 1, 1))]),  # noqa: DTZ001
    (STATES, [element(success_time=MISSING, fail_time=MISSING)]),
    (STATES, [element(unknown={"a": [1]})]),
]


def check_tolerated(producer: Producer, collection: Tasks, cases: list[Case]) -> None:
    """
    Each case runs to its success, and nothing is logged as wrong.
    """
    odd = spoiled(producer, collection, cases)
    consumer = polling(collection, echo)
    events = consumer.subscribe(TaskQuarantined)

    def left() -> set[str]:
        done = {d["key"] for d in collection.find({"status": "succeeded"}, {"key": 1})}
        return set(odd) - done

    with consumer:
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not left(), "all have run", 20)
        assert left() == set()
        assert consumer.health().ok
        assert unread(events) == []


def test_odd_documents_run(producer: Producer, collection: Tasks) -> None:
    """
    Facts of ours that are of the wrong kind, fields that are not ours, and optional ones.
    """
    check_tolerated(producer, collection, TOLERATED)
    assert producer.result(name_of(("params", MISSING)), 1) is None
    assert producer.result(name_of(("name", 5)), 1) == "p"


def test_unreadable_documents_do_not_end_the_stream(producer: Producer, collection: Tasks) -> None:
    """
    Inserted, changed or replaced while the stream is open, they hide nothing that comes after.
    """
    bad = list(spoiled(producer, collection, UNREADABLE).values())
    collection.delete_many({})
    with Consumer(collection, echo, poll_interval=3600) as consumer:
        wait_until(lambda: consumer.health().discovery == "stream", "the stream is open")
        assert consumer.run_until_idle(10)
        opened = consumer.health().stream_age
        for document in bad:
            collection.insert_one(document)
            collection.update_one({"_id": document["_id"]}, {"$set": {"touched": True}})
            collection.replace_one({"_id": document["_id"]}, document)
        for number in range(3):
            producer.send(f"good{number}", number)
            assert producer.result(f"good{number}", 20) == number
        health = consumer.health()
        # It was not opened anew meanwhile.
        assert opened is not None
        assert health.stream_age is not None
        assert health.stream_age > opened
        assert health.ok


@pytest.mark.parametrize("rust_interop", [False, True])
def test_many_unreadable_documents_do_not_hide_a_good_one(
    producer: Producer, collection: Tasks, rust_interop: bool
) -> None:
    """
    Whatever their number and kind, with our derived fields or without.
    """
    producer.send("good", 1, delay=0.5)
    template = collection.find_one()
    assert template is not None
    bad = []
    for number in range(150):
        document = {
            **template,
            "_id": number,
            "key": f"bad{number}",
            "task_option": {**template["task_option"], "concurrent_worker_cnt": "1"},
            "due": dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc),
        }
        if number % 2:
            for field in ("due", "routes", "status"):
                del document[field]
        bad.append(document)
    collection.insert_many(bad)
    with polling(collection, echo, rust_interop=rust_interop) as consumer:
        assert producer.result("good", 30) == 1
        assert consumer.health().ok


def test_dates_that_python_cannot_hold(producer: Producer, collection: Tasks) -> None:
    """
    A task of the year 300,000 waits; the others run.
    """
    producer.send("far", 1)
    far = DatetimeMS(9_500_000_000_000_000)
    changes = {"task_state.start_time": far, "due": far}
    try:
        collection.update_one({"key": "far"}, {"$set": changes})
    except OperationFailure as error:
        pytest.skip(f"the server has no such dates either: {error}"[:100])
    producer.send("near", 2)
    with polling(collection, echo) as consumer:
        assert producer.result("near", 10) == 2
        assert consumer.run_until_idle(10)
        assert consumer.health().ok
    assert collection.count_documents({"key": "far", "status": "waiting"}) == 1
