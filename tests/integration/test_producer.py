"""
The producer: what each send makes of each state of a task, and what it says about it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import attrs
import pytest
from bson.codec_options import CodecOptions
from pymongo import MongoClient, ReadPreference, WriteConcern
from pymongo.collection import Collection
from pymongo.errors import OperationFailure

from mscheduler_sync import (
    Consumer,
    InvalidTask,
    MSchedulerError,
    Producer,
    SendResult,
    StoreRejected,
    StoreUnavailable,
    Task,
    TaskCancelled,
    TaskExists,
    TaskFailed,
    TaskNotFound,
    TaskRunning,
)
from mscheduler_sync._storage.store import TaskStore
from tests.support import Document, fail_point

Tasks = Collection[Document]

NEVER = dt.datetime(9999, 12, 31, tzinfo=dt.timezone.utc)
HOUR = dt.timedelta(hours=1)
STATES = ("waiting", "running", "succeeded", "failed", "cancelled")
ENDED = ("succeeded", "failed", "cancelled")
#: What the tasks of these tests were sent with.
OLD: Document = {"priority": 1, "max_attempts": 1, "retry_delay": 0, "lease": 30, "heartbeat": 10}
OLD_OPTION: Document = {
    "priority": 1,
    "concurrent_worker_cnt": 1,
    "ping_interval_ms": 10_000,
    "worker_timeout_ms": 30_000,
    "specific_worker_ids": [],
    "max_unexpected_retries": 1,
    "unexpected_retry_delay_ms": 0,
}
DEFAULT_OPTION: Document = {
    "priority": 0,
    "concurrent_worker_cnt": 1,
    "ping_interval_ms": 20_000,
    "worker_timeout_ms": 60_000,
    "specific_worker_ids": [],
    "max_unexpected_retries": 3,
    "unexpected_retry_delay_ms": 10_000,
}


@pytest.fixture
def producer(collection: Tasks) -> Producer:
    """
    The producer under test.
    """
    return Producer(collection)


def server_now(collection: Tasks) -> dt.datetime:
    hello = collection.database.client.admin.command("hello")
    now: dt.datetime = hello["localTime"].replace(tzinfo=dt.timezone.utc)
    return now


def stored(collection: Tasks, key: str = "k") -> Document:
    """
    Return the task's document without the mark of the last send.
    """
    document = collection.find_one({"key": key})
    assert document is not None
    document.pop("send_id", None)
    return document


def attempt(**changes: object) -> Document:
    return {
        "running_id": "r",
        "worker_id": "w",
        "ping_expire_time": None,
        "success_time": None,
        "fail_time": None,
        **changes,
    }


def arranged(producer: Producer, collection: Tasks, state: str) -> Document:
    """
    Make the task ``k`` in this state, as the library stores it; return its document.
    """
    producer.send("k", "old", **OLD)
    now = server_now(collection)
    if state == "running":
        lease_end = now + HOUR
        changes: Document = {
            "task_state.worker_states": [attempt(ping_expire_time=lease_end)],
            "status": "running",
            "due": lease_end,
        }
        collection.update_one({"key": "k"}, {"$set": changes})
    elif state in {"succeeded", "failed"}:
        outcome = (
            {"success_time": now, "returns": 7}
            if state == "succeeded"
            else {"fail_time": now, "fail_reason": "Boom: it broke\n  in f", "retry_time": now}
        )
        changes = {
            "task_state.worker_states": [attempt(ping_expire_time=now, **outcome)],
            "status": state,
            "due": NEVER,
            "finished_at": now,
        }
        collection.update_one({"key": "k"}, {"$set": changes})
    elif state == "cancelled":
        assert producer.cancel("k")
    document = stored(collection)
    assert document["status"] == state
    return document


# -- a new task --------------------------------------------------------------------------------


def test_only_a_send_makes_keys(producer: Producer) -> None:
    """
    None asks a send for a key of its own; elsewhere it is a mistake, and told as one.
    """
    assert producer.send(None).inserted
    calls: list[Callable[[Any], object]] = [
        producer.get,
        producer.update,
        producer.cancel,
        producer.retry,
        producer.delete,
        producer.result,
    ]
    for call in calls:
        with pytest.raises(TypeError, match="key must be a string"):
            call(None)


@pytest.mark.parametrize("if_exists", ["keep", "update", "rerun", "raise"])
def test_missing_task_is_inserted(
    producer: Producer, collection: Tasks, if_exists: Literal["keep", "update", "rerun", "raise"]
) -> None:
    """
    Whatever is to happen to an existing task, a new one is made, with the crate's fields and ours.
    """
    before = server_now(collection)
    result = producer.send("k", {"a": [1]}, if_exists=if_exists)
    assert result == SendResult("k", inserted=True, updated=False, status="waiting")
    document = stored(collection)
    created = document["task_state"]["create_time"]
    assert abs(created - before) < dt.timedelta(seconds=10)
    assert document == {
        "_id": document["_id"],
        "key": "k",
        "params": {"a": [1]},
        "task_state": {"create_time": created, "start_time": created, "worker_states": []},
        "task_option": DEFAULT_OPTION,
        "status": "waiting",
        "due": created,
        "routes": "*",
    }


def test_options_are_stored_and_read_back(producer: Producer, collection: Tasks) -> None:
    """
    Every option is in the document, and `get` returns it in seconds.
    """
    producer.send(
        "k",
        delay=dt.timedelta(minutes=1),
        priority=5,
        concurrency=2,
        max_attempts=4,
        retry_delay=1.5,
        retry_backoff=2,
        retry_max_delay=60,
        retry_jitter=0.5,
        retry_scope="worker",
        lease=dt.timedelta(seconds=10),
        heartbeat=2.5,
        timeout=30,
        keep_finished=dt.timedelta(days=1),
        worker_ids=["w1", "w2"],
        name="mail.send",
        tags=["a", "b"],
    )
    task = producer.get("k")
    assert task is not None
    assert attrs.asdict(task.options) == {
        "priority": 5,
        "concurrency": 2,
        "lease": 10.0,
        "heartbeat": 2.5,
        "worker_ids": ("w1", "w2"),
        "max_attempts": 4,
        "retry_delay": 1.5,
        "retry_backoff": 2.0,
        "retry_max_delay": 60.0,
        "retry_jitter": 0.5,
        "retry_scope": "worker",
        "timeout": 30.0,
        "keep_finished": 86_400.0,
    }
    assert (task.name, task.tags, task.status, task.attempts) == (
        "mail.send",
        ("a", "b"),
        "waiting",
        (),
    )
    assert task.start_at - task.created_at == dt.timedelta(minutes=1)
    assert task.due_at == task.start_at
    assert not task.is_finished


def test_key_none_makes_unique_keys(producer: Producer) -> None:
    """
    Without a key each send makes a task of its own and says its key.
    """
    keys = {producer.send(None, number).key for number in range(3)}
    assert len(keys) == 3
    assert {task.params for key in keys if (task := producer.get(key))} == {0, 1, 2}


def test_run_at_is_stored_as_given(producer: Producer) -> None:
    """
    An aware time of any zone is kept; it need not lie in the future.
    """
    zone = dt.timezone(dt.timedelta(hours=5))
    run_at = dt.datetime(2030, 4, 12, 23, 20, 50, 520_000, tzinfo=zone)
    producer.send("k", run_at=run_at)
    task = producer.get("k")
    assert task is not None
    assert task.start_at == run_at


def test_params_come_back_with_the_codec_of_the_caller(collection: Tasks) -> None:
    """
    Times in params are aware or naive as the caller's collection decodes them.
    """
    moment = dt.datetime(2030, 1, 2, 3, 4, 5)  # noqa: DTZ001 - what a naive codec gives
    naive = Producer(collection.with_options(codec_options=CodecOptions(tz_aware=False)))
    naive.send("k", {"at": moment})
    mine, theirs = naive.get("k"), Producer(collection).get("k")
    assert mine is not None
    assert theirs is not None
    assert mine.params == {"at": moment}
    assert theirs.params == {"at": moment.replace(tzinfo=dt.timezone.utc)}
    assert mine.created_at.tzinfo is not None


def test_settings_of_the_collection_are_not_trusted(collection: Tasks) -> None:
    """
    A send is acknowledged even through a collection that acknowledges nothing.
    """
    careless = collection.with_options(
        write_concern=WriteConcern(w=0), read_preference=ReadPreference.SECONDARY
    )
    producer = Producer(careless)
    results = [producer.send("k"), producer.send("k")]
    assert [result.inserted for result in results] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"key": ""}, ValueError),
        ({"key": 1}, TypeError),
        ({"key": "\ud800"}, ValueError),
        ({"key": "k" * 600}, ValueError),
        ({"params": {1}}, ValueError),
        ({"params": 2**64}, ValueError),
        ({"params": "\ud800"}, ValueError),
        ({"params": {"a": [lambda: None]}}, ValueError),
        ({"params": b"x" * (16 * 1024 * 1024)}, ValueError),
        ({"run_at": dt.datetime(2030, 1, 1)}, ValueError),  # noqa: DTZ001 - naive on purpose
        ({"run_at": "tomorrow"}, TypeError),
        ({"run_at": dt.datetime(2030, 1, 1, tzinfo=dt.timezone.utc), "delay": 1}, ValueError),
        ({"delay": -1}, ValueError),
        ({"delay": float("nan")}, ValueError),
        ({"delay": True}, TypeError),
        ({"priority": -1}, ValueError),
        ({"priority": 1.5}, TypeError),
        ({"concurrency": 0}, ValueError),
        ({"concurrency": 101}, ValueError),
        ({"max_attempts": 0}, ValueError),
        ({"retry_delay": -1}, ValueError),
        ({"retry_backoff": 0.5}, ValueError),
        ({"retry_jitter": 1.5}, ValueError),
        ({"retry_scope": "both"}, ValueError),
        ({"lease": 10, "heartbeat": 6}, ValueError),
        ({"heartbeat": 0}, ValueError),
        ({"timeout": 0}, ValueError),
        ({"keep_finished": -1}, ValueError),
        ({"worker_ids": "w"}, TypeError),
        ({"worker_ids": [""]}, ValueError),
        ({"name": ""}, ValueError),
        ({"tags": [1]}, TypeError),
        ({"if_exists": "replace"}, ValueError),
        ({"if_running": "wait"}, ValueError),
        ({"clean_success": 1}, TypeError),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_wrong_argument_is_refused_before_anything_is_sent(
    producer: Producer, collection: Tasks, arguments: Document, error: type[Exception]
) -> None:
    """
    Wrong arguments are ValueError or TypeError, name the argument, and store nothing.
    """
    with pytest.raises(error) as caught:
        producer.send(**{"key": "k", **arguments})
    assert not isinstance(caught.value, MSchedulerError)
    assert next(iter(arguments)) in str(caught.value)
    assert collection.find_one() is None


# -- an existing task --------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
def test_keep_changes_nothing(producer: Producer, collection: Tasks, state: Any) -> None:
    """
    The default: an existing task stays as it is, whatever comes with the send.
    """
    before = arranged(producer, collection, state)
    result = producer.send("k", "new", priority=9, max_attempts=9, name="n", tags=["t"])
    assert result == SendResult("k", inserted=False, updated=False, status=state)
    assert stored(collection) == before


@pytest.mark.parametrize("state", STATES)
def test_keep_takes_an_explicit_time(producer: Producer, collection: Tasks, state: Any) -> None:
    """
    An explicit time is the one thing that a kept task takes over; it arms nothing again.
    """
    before = arranged(producer, collection, state)
    run_at = dt.datetime(2035, 1, 1, tzinfo=dt.timezone.utc)
    result = producer.send("k", "new", run_at=run_at)
    assert result == SendResult("k", inserted=False, updated=True, status=state)
    expected = {**before, "task_state": {**before["task_state"], "start_time": run_at}}
    if state == "waiting":
        expected["due"] = run_at
    assert stored(collection) == expected


@pytest.mark.parametrize("state", STATES)
def test_raise_refuses_an_existing_task(producer: Producer, collection: Tasks, state: str) -> None:
    """
    TaskExists names the key; nothing is changed.
    """
    before = arranged(producer, collection, state)
    with pytest.raises(TaskExists) as caught:
        producer.send("k", "new", delay=5, if_exists="raise")
    assert caught.value.key == "k"
    assert stored(collection) == before


def updated(before: Document, **changes: object) -> Document:
    option = {**OLD_OPTION, "priority": 9, "worker_timeout_ms": 60_000, "ping_interval_ms": 20_000}
    return {**before, "params": "new", "task_option": option, **changes}


@pytest.mark.parametrize("state", ["waiting", "running", "succeeded", "failed"])
def test_update_replaces_params_and_options(
    producer: Producer, collection: Tasks, state: Any
) -> None:
    """
    Params, name, tags and options are replaced; attempts and status stay.
    """
    before = arranged(producer, collection, state)
    result = producer.send(
        "k",
        "new",
        priority=9,
        max_attempts=1,
        retry_delay=0,
        name="n",
        tags=["t"],
        if_exists="update",
    )
    assert result == SendResult("k", inserted=False, updated=True, status=state)
    expected = updated(before, name="n", tags=["t"], routes=["*n", "=n"])
    assert stored(collection) == expected


def test_update_leaves_a_cancelled_task_cancelled(producer: Producer, collection: Tasks) -> None:
    """
    A cancelled task takes new params and options, but stays out of every worker's reach.
    """
    before = arranged(producer, collection, "cancelled")
    result = producer.send("k", "new", if_exists="update", worker_ids=["w"])
    assert result == SendResult("k", inserted=False, updated=True, status="cancelled")
    after = stored(collection)
    assert after["params"] == "new"
    assert after["due"] == NEVER
    for path in ("status", "finished_at", "routes"):
        assert after[path] == before[path]
    # Rust workers know nothing of cancelling; this is what keeps them off.
    assert after["task_option"]["specific_worker_ids"] == ["__cancelled__"]
    assert producer.retry("k")
    task = producer.get("k")
    assert task is not None
    assert task.options.worker_ids == ("w",)


def test_update_removes_what_is_not_given(producer: Producer, collection: Tasks) -> None:
    """
    Optional facts that the update does not name are gone, with their options at the defaults.
    """
    producer.send("k", 1, name="n", tags=["t"], timeout=5, keep_finished=5, retry_backoff=2)
    producer.send("k", 2, if_exists="update")
    document = stored(collection)
    assert document["task_option"] == DEFAULT_OPTION
    assert not {"name", "tags", "timeout_ms", "keep_ms", "retry"} & set(document)
    assert document["routes"] == "*"


def test_more_attempts_revive_a_failed_task(producer: Producer, collection: Tasks) -> None:
    """
    A failed task whose attempts are no longer used up waits again.
    """
    arranged(producer, collection, "failed")
    result = producer.send("k", "new", max_attempts=2, if_exists="update")
    assert result == SendResult("k", inserted=False, updated=True, status="waiting")
    document = stored(collection)
    assert "finished_at" not in document
    assert document["due"] < NEVER
    assert len(document["task_state"]["worker_states"]) == 1


@pytest.mark.parametrize("state", ENDED)
def test_rerun_arms_an_ended_task_again(producer: Producer, collection: Tasks, state: str) -> None:
    """
    It waits, from now, with new params; its attempts are folded into counters.
    """
    before = arranged(producer, collection, state)
    result = producer.send("k", "new", if_exists="rerun", **OLD)
    assert result == SendResult("k", inserted=False, updated=True, status="waiting")
    after = stored(collection)
    start_time = after["task_state"]["start_time"]
    assert start_time >= before["task_state"]["start_time"]
    assert after == {
        "_id": before["_id"],
        "key": "k",
        "params": "new",
        "task_state": {**before["task_state"], "start_time": start_time, "worker_states": []},
        "task_option": OLD_OPTION,
        "status": "waiting",
        "due": start_time,
        "routes": "*",
        "counters": {"failed": int(state == "failed"), "succeeded": int(state == "succeeded")},
    }


@pytest.mark.parametrize("state", ["waiting", "running"])
def test_rerun_of_a_task_that_has_not_ended_is_an_update(
    producer: Producer, collection: Tasks, state: Any
) -> None:
    """
    A running attempt goes on; a waiting task starts now.
    """
    before = arranged(producer, collection, state)
    result = producer.send("k", "new", if_exists="rerun", **OLD)
    assert result == SendResult("k", inserted=False, updated=True, status=state)
    after = stored(collection)
    assert after["params"] == "new"
    assert after["status"] == state
    assert after["task_state"]["worker_states"] == before["task_state"]["worker_states"]


def test_rerun_takes_an_explicit_time(producer: Producer, collection: Tasks) -> None:
    """
    The second arm starts when it is told to.
    """
    arranged(producer, collection, "succeeded")
    run_at = dt.datetime(2035, 1, 1, tzinfo=dt.timezone.utc)
    producer.send("k", run_at=run_at, if_exists="rerun")
    document = stored(collection)
    assert (document["status"], document["due"]) == ("waiting", run_at)


def test_counters_grow_with_each_arm(producer: Producer, collection: Tasks) -> None:
    """
    Attempts of several earlier arms are counted together.
    """
    arranged(producer, collection, "failed")
    for _ in range(2):
        producer.send("k", if_exists="rerun", **OLD)
        now = server_now(collection)
        failed = [attempt(ping_expire_time=now, fail_time=now, retry_time=now)]
        collection.update_one({"key": "k"}, {"$set": {"task_state.worker_states": failed}})
    producer.send("k", if_exists="rerun", **OLD)
    task = producer.get("k")
    assert task is not None
    assert (task.counters["failed"], task.attempts) == (3, ())


@pytest.mark.parametrize("if_exists", ["keep", "update", "rerun"])
@pytest.mark.parametrize("clean", [False, True])
def test_if_running_refuses_a_task_that_runs(
    producer: Producer,
    collection: Tasks,
    if_exists: Literal["keep", "update", "rerun"],
    clean: bool,
) -> None:
    """
    TaskRunning names the key; nothing is changed.
    """
    before = arranged(producer, collection, "running")
    with pytest.raises(TaskRunning) as caught:
        producer.send(
            "k", "new", delay=5, if_exists=if_exists, if_running="raise", clean_failed=clean
        )
    assert caught.value.key == "k"
    assert stored(collection) == before


@pytest.mark.parametrize("state", ["waiting", "succeeded", "failed", "cancelled"])
def test_if_running_lets_other_states_pass(
    producer: Producer, collection: Tasks, state: Any
) -> None:
    """
    What does not run is treated as without the guard.
    """
    before = arranged(producer, collection, state)
    kept = producer.send("k", "new", if_running="raise")
    assert (kept.inserted, kept.status) == (False, state)
    assert stored(collection) == before
    rerun = producer.send("k", "new", if_exists="rerun", if_running="raise", **OLD)
    assert rerun == SendResult("k", inserted=False, updated=True, status="waiting")
    assert stored(collection)["params"] == "new"


def test_if_running_takes_a_lapsed_lease_for_not_running(
    producer: Producer, collection: Tasks
) -> None:
    """
    A dead worker's attempt does not block a guarded send.
    """
    arranged(producer, collection, "running")
    lapsed = server_now(collection) - HOUR
    path = "task_state.worker_states.0.ping_expire_time"
    collection.update_one({"key": "k"}, {"$set": {path: lapsed, "due": lapsed}})
    result = producer.send("k", "new", if_exists="update", if_running="raise")
    assert result.updated
    assert stored(collection)["params"] == "new"


def test_clean_success_lets_a_task_run_again(producer: Producer, collection: Tasks) -> None:
    """
    Its successes are forgotten and counted; params stay, unless they are updated too.
    """
    before = arranged(producer, collection, "succeeded")
    result = producer.send("k", "new", clean_success=True)
    assert result == SendResult("k", inserted=False, updated=True, status="waiting")
    after = stored(collection)
    assert after["params"] == "old"
    assert after["task_state"] == {**before["task_state"], "worker_states": []}
    assert after["counters"] == {"failed": 0, "succeeded": 1}
    assert (after["due"], after.get("finished_at")) == (after["task_state"]["start_time"], None)


def test_clean_failed_gives_a_failed_task_its_attempts_back(
    producer: Producer, collection: Tasks
) -> None:
    """
    Its failures are forgotten and counted.
    """
    arranged(producer, collection, "failed")
    result = producer.send("k", clean_failed=True)
    assert result == SendResult("k", inserted=False, updated=True, status="waiting")
    after = stored(collection)
    assert after["task_state"]["worker_states"] == []
    assert after["counters"] == {"failed": 1, "succeeded": 0}


@pytest.mark.parametrize(
    ("clean", "kept", "counters"),
    [
        ({"clean_success": True}, ["bad", "open"], {"failed": 0, "succeeded": 1}),
        ({"clean_failed": True}, ["good", "open"], {"failed": 1, "succeeded": 0}),
        (
            {"clean_success": True, "clean_failed": True},
            ["open"],
            {"failed": 1, "succeeded": 1},
        ),
    ],
)
def test_clean_leaves_other_attempts(
    producer: Producer,
    collection: Tasks,
    clean: dict[str, bool],
    kept: list[str],
    counters: Document,
) -> None:
    """
    Of a task for several workers only the named kind of attempts goes, never a running one.
    """
    producer.send("k", concurrency=3)
    now = server_now(collection)
    elements = [
        attempt(running_id="good", worker_id="a", ping_expire_time=now, success_time=now),
        attempt(running_id="bad", worker_id="b", ping_expire_time=now, fail_time=now),
        attempt(running_id="open", worker_id="c", ping_expire_time=now + HOUR),
    ]
    collection.update_one({"key": "k"}, {"$set": {"task_state.worker_states": elements}})
    result = producer.send("k", **clean)  # type: ignore[arg-type]
    assert result == SendResult("k", inserted=False, updated=True, status="running")
    after = stored(collection)
    assert [e["running_id"] for e in after["task_state"]["worker_states"]] == kept
    assert after["counters"] == counters


def test_send_to_an_unreadable_document_is_refused(producer: Producer, collection: Tasks) -> None:
    """
    InvalidTask names the faulty field; the document is left as it is.
    """
    producer.send("k")
    collection.update_one({"key": "k"}, {"$set": {"task_state.worker_states": None}})
    before = stored(collection)
    for options in ({}, {"if_exists": "update"}, {"if_exists": "rerun"}):
        with pytest.raises(InvalidTask, match="worker_states"):
            producer.send("k", **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidTask):
        producer.get("k")
    assert stored(collection) == before


def test_sixteen_concurrent_sends_of_one_new_key(collection: Tasks) -> None:
    """
    One inserts, all succeed, and there is one document; each with a producer of its own.
    """
    barrier = threading.Barrier(16)

    def send(number: int) -> SendResult:
        producer = Producer(collection)
        barrier.wait(20)
        return producer.send("k", number)

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(send, range(16)))
    assert sum(result.inserted for result in results) == 1
    winner = next(n for n, result in enumerate(results) if result.inserted)
    assert [document["params"] for document in collection.find()] == [winner]


def test_concurrent_updates_of_one_key_all_succeed(producer: Producer, collection: Tasks) -> None:
    """
    The document is one of the sent ones, whole.
    """
    producer.send("k")

    def send(number: int) -> SendResult:
        return producer.send("k", number, priority=number, if_exists="update")

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(send, range(1, 25)))
    assert {(r.inserted, r.updated, r.status) for r in results} == {(False, True, "waiting")}
    (document,) = collection.find()
    assert document["params"] == document["task_option"]["priority"]


# -- many at once ------------------------------------------------------------------------------


def test_send_many_sends_all_in_order_of_its_results(producer: Producer, collection: Tasks) -> None:
    """
    More items than one bulk holds, from a generator; each has its result, in order.
    """
    producer.send("k7", "old")
    results = producer.send_many(((f"k{n}", n) for n in range(1500)), priority=3)
    assert [result.key for result in results] == [f"k{n}" for n in range(1500)]
    assert [r.key for r in results if not r.inserted] == ["k7"]
    assert all(result.error is None for result in results)
    assert collection.count_documents({}) == 1500
    assert stored(collection, "k7")["params"] == "old"
    assert stored(collection, "k1499")["task_option"]["priority"] == 3


def test_send_many_reports_bad_items_and_sends_the_others(
    producer: Producer, collection: Tasks
) -> None:
    """
    An item that cannot be sent has its error in its place.
    """
    items: list[Any] = [
        ("a", 1),
        ("", 1),
        ("b", {1, 2}),
        ("c",),
        "dd",
        ("e", 1, {"priority": "high"}),
        ("f", 1, {"unknown": 1}),
        ("g", 1, 5),
        ("h", 1, {"priority": 2}),
    ]
    results = producer.send_many(items, priority=1)
    expected = [None, ValueError, ValueError, *[TypeError] * 5, None]
    for result, error in zip(results, expected, strict=True):
        assert result.inserted == (error is None)
        assert isinstance(result.error, error) if error else result.error is None
    priorities = {d["key"]: d["task_option"]["priority"] for d in collection.find()}
    assert priorities == {"a": 1, "h": 2}


def test_send_many_with_a_key_twice_sends_both_in_order(
    producer: Producer, collection: Tasks
) -> None:
    """
    The second one of a key meets the task that the first has made.
    """
    kept = producer.send_many([("a", 1), ("a", 2)])
    assert [(r.inserted, r.updated) for r in kept] == [(True, False), (False, False)]
    assert stored(collection, "a")["params"] == 1
    changed = producer.send_many([("b", 1), ("b", 2), ("b", 3)], if_exists="update")
    assert [(r.inserted, r.updated) for r in changed] == [(True, False)] + [(False, True)] * 2
    assert stored(collection, "b")["params"] == 3


def test_send_many_makes_keys_and_keeps_existing_rules(
    producer: Producer, collection: Tasks
) -> None:
    """
    Key None makes keys; ``if_exists="raise"`` is an error of its item alone.
    """
    producer.send("taken")
    results = producer.send_many([(None, 1), ("taken", 2), ("free", 3)], if_exists="raise")
    assert [r.inserted for r in results] == [True, False, True]
    assert isinstance(results[1].error, TaskExists)
    assert collection.count_documents({}) == 3


def test_send_many_of_nothing_is_nothing(producer: Producer) -> None:
    """
    No items, no results.
    """
    assert producer.send_many([]) == []


@pytest.mark.parametrize("options", [{"session": None}, {"priority": -1}, {"colour": 1}])
def test_send_many_refuses_wrong_common_options(
    producer: Producer, collection: Tasks, options: Document
) -> None:
    """
    Wrong common options raise, and nothing is sent.
    """
    with pytest.raises((TypeError, ValueError)):
        producer.send_many([("a", 1)], **options)
    assert collection.find_one() is None


def test_another_unique_index_of_the_application_is_an_error_of_its_item(
    producer: Producer, collection: Tasks
) -> None:
    """
    A document that the server refuses though its key is free spoils no other.
    """
    collection.create_index([("params.a", 1)], unique=True, sparse=True, name="theirs")
    results = producer.send_many([("x", {"a": 1}), ("y", {"a": 1}), ("z", {"a": 2})])
    assert [r.inserted for r in results] == [True, False, True]
    assert isinstance(results[1].error, Exception)
    assert sorted(d["key"] for d in collection.find()) == ["x", "z"]


def test_another_unique_index_of_the_application_is_an_error_of_the_send(
    producer: Producer, collection: Tasks
) -> None:
    """
    Neither another's task nor an endless loop: the refusal is raised.
    """
    collection.create_index([("params.a", 1)], unique=True, sparse=True, name="theirs")
    producer.send("x", {"a": 1})
    with pytest.raises(StoreRejected):
        producer.send("y", {"a": 1})
    assert [d["key"] for d in collection.find()] == ["x"]


# -- transactions ------------------------------------------------------------------------------


def test_send_in_a_transaction_stands_and_falls_with_it(
    producer: Producer, client: MongoClient[Document], collection: Tasks
) -> None:
    """
    Committed with the caller's own writes; gone with an abort; unseen before.
    """
    producer.send("first")
    orders = collection.database.orders
    orders.insert_one({"_id": 0})
    with client.start_session() as session:
        session.start_transaction()
        orders.insert_one({"_id": 1}, session=session)
        assert producer.send("k", 1, session=session).inserted
        assert producer.get("k") is None
        session.abort_transaction()
        assert producer.get("k") is None
        assert orders.count_documents({}) == 1
        session.start_transaction()
        orders.insert_one({"_id": 1}, session=session)
        assert producer.send("k", 2, session=session).inserted
        session.commit_transaction()
    task = producer.get("k")
    assert task is not None
    assert (task.params, orders.count_documents({})) == (2, 2)


def test_send_in_a_transaction_sees_what_the_transaction_did(
    producer: Producer, client: MongoClient[Document]
) -> None:
    """
    A second send of the transaction meets the task of the first.
    """
    producer.send("first")
    with client.start_session() as session, session.start_transaction():
        results = [
            producer.send("k", 1, session=session),
            producer.send("k", 2, session=session),
            producer.send("k", 3, if_exists="update", session=session),
        ]
        with pytest.raises(TaskExists):
            producer.send("k", if_exists="raise", session=session)
    assert [(r.inserted, r.updated) for r in results] == [
        (True, False),
        (False, False),
        (False, True),
    ]
    task = producer.get("k")
    assert task is not None
    assert task.params == 3


def test_existing_task_is_not_an_error_of_the_transaction(
    producer: Producer, client: MongoClient[Document], collection: Tasks
) -> None:
    """
    Sending a key that exists leaves the transaction alive: no duplicate key error ends it.
    """
    producer.send("k", "old")
    orders = collection.database.orders
    orders.insert_one({"_id": 0})
    with client.start_session() as session, session.start_transaction():
        result = producer.send("k", "new", session=session)
        orders.insert_one({"_id": 1}, session=session)
    assert result == SendResult("k", inserted=False, updated=False, status="waiting")
    assert orders.count_documents({}) == 2


def test_trouble_in_a_transaction_is_raised_at_once(
    producer: Producer, client: MongoClient[Document], collection: Tasks
) -> None:
    """
    With a session nothing is retried or renamed: its label tells the caller to repeat it.
    """
    producer.send("first")
    with client.start_session() as session:
        session.start_transaction()
        with (
            fail_point(client, ["update"], {"times": 1}, errorCode=112),
            pytest.raises(OperationFailure) as raised,
        ):
            producer.send("k", session=session)
        assert raised.value.has_error_label("TransientTransactionError")
        session.abort_transaction()
    assert producer.get("k") is None


def test_with_transaction_of_the_driver_repeats_a_conflict(
    producer: Producer, client: MongoClient[Document]
) -> None:
    """
    The driver's own retry of a transaction works with a send inside.
    """
    producer.send("k", 0)
    calls: list[int] = []
    with client.start_session() as first, client.start_session() as second:
        first.start_transaction()
        producer.send("k", 1, if_exists="update", session=first)

        def work(session: Any) -> None:
            calls.append(1)
            if len(calls) == 2:
                first.commit_transaction()
            producer.send("k", 2, if_exists="update", session=session)

        second.with_transaction(work)
    task = producer.get("k")
    assert task is not None
    assert (task.params, len(calls) >= 2) == (2, True)


# -- asking ------------------------------------------------------------------------------------


def test_get_of_a_missing_task_is_none(producer: Producer) -> None:
    """
    No task, no error.
    """
    assert producer.get("k") is None


@pytest.mark.parametrize("state", STATES)
def test_get_tells_the_state(producer: Producer, collection: Tasks, state: str) -> None:
    """
    Status and attempts are read from the document.
    """
    arranged(producer, collection, state)
    task = producer.get("k")
    assert isinstance(task, Task)
    assert (task.status, task.params) == (state, "old")
    assert task.is_finished == (state in ENDED)
    assert len(task.attempts) == (state in {"running", "succeeded", "failed"})
    assert task.failures == (state == "failed")
    assert (task.finished_at is not None) == (state in ENDED)
    assert task.cancel_requested == (state == "cancelled")


def test_list_and_count_filter_and_page(producer: Producer, collection: Tasks) -> None:
    """
    In order of key, by status, name and tag, page after page; unreadable documents are left out.
    """
    producer.send_many([(f"k{n}", n, {"name": "even" if n % 2 == 0 else "odd"}) for n in range(6)])
    producer.send("tagged", tags=["red", "blue"])
    producer.cancel("k1")
    producer.send("z is broken")
    collection.update_one({"key": "z is broken"}, {"$set": {"task_state.start_time": "soon"}})
    assert [t.key for t in producer.list(limit=3)] == ["k0", "k1", "k2"]
    assert [t.key for t in producer.list(after="k4")] == ["k5", "tagged"]
    assert [t.key for t in producer.list(name="even")] == ["k0", "k2", "k4"]
    assert [t.key for t in producer.list(tag="blue")] == ["tagged"]
    assert [t.key for t in producer.list(status="cancelled")] == ["k1"]
    counts = (
        producer.count(),
        producer.count(status="cancelled"),
        producer.count(status="waiting", name="odd"),
        producer.count(tag="red"),
    )
    assert counts == (8, 1, 2, 1)
    with pytest.raises(ValueError, match="status"):
        producer.count(status="done")  # type: ignore[arg-type]


def test_unreadable_documents_do_not_end_a_listing(producer: Producer, collection: Tasks) -> None:
    """
    A page is short only at the end, so that reading page after page reaches every task.
    """
    producer.send_many([(f"a{n}", n) for n in range(3)])
    collection.update_many({}, {"$set": {"task_state.start_time": "soon"}})
    producer.send_many([(f"b{n}", n) for n in range(3)])
    assert [t.key for t in producer.list(limit=2)] == ["b0", "b1"]


def test_result_returns_what_the_function_returned(producer: Producer, collection: Tasks) -> None:
    """
    `result` waits for the end of the task.
    """
    producer.send("k", 20)
    go = threading.Event()

    def double(params: int) -> dict[str, int]:
        go.wait(10)
        return {"twice": 2 * params}

    with (
        Consumer(collection, double, watch=False, poll_interval=0.02),
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(producer.result, "k", 10)
        go.set()
        assert waiting.result(10) == {"twice": 40}


def test_result_of_several_successes(producer: Producer, collection: Tasks) -> None:
    """
    ``all=True`` gives the values in the order of the successes; otherwise it is the last one.
    """
    producer.send("k", concurrency=3)
    now = server_now(collection)
    second = dt.timedelta(seconds=1)
    elements = [
        attempt(worker_id="b", success_time=now + second, returns="second"),
        attempt(worker_id="x", fail_time=now, fail_reason="no"),
        attempt(worker_id="a", success_time=now, returns="first"),
        attempt(worker_id="c", success_time=now + 2 * second),
    ]
    collection.update_one({"key": "k"}, {"$set": {"task_state.worker_states": elements}})
    assert producer.result("k", 1, all=True) == ["first", "second", None]
    assert producer.result("k", 1) is None


def test_result_of_a_missing_task(producer: Producer) -> None:
    """
    TaskNotFound at once, though there would be time.
    """
    with pytest.raises(TaskNotFound) as caught:
        producer.result("k", 60)
    assert caught.value.key == "k"


def test_result_of_a_failed_task(producer: Producer, collection: Tasks) -> None:
    """
    TaskFailed carries the whole stored reason, and its text the first line.
    """
    arranged(producer, collection, "failed")
    with pytest.raises(TaskFailed, match=r"'k' failed: Boom: it broke$") as caught:
        producer.result("k", 60)
    assert (caught.value.key, caught.value.reason) == ("k", "Boom: it broke\n  in f")


def test_result_of_a_cancelled_task(producer: Producer, collection: Tasks) -> None:
    """
    TaskCancelled.
    """
    arranged(producer, collection, "cancelled")
    with pytest.raises(TaskCancelled):
        producer.result("k", 60)


@pytest.mark.parametrize("state", ["waiting", "running"])
def test_result_that_does_not_come_in_time(
    producer: Producer, collection: Tasks, state: str
) -> None:
    """
    The built-in TimeoutError, which says what the task is doing.
    """
    arranged(producer, collection, state)
    for timeout in (0, 0.05):
        with pytest.raises(TimeoutError, match=state):
            producer.result("k", timeout)


def test_result_of_a_task_that_is_deleted_meanwhile(producer: Producer) -> None:
    """
    The wait ends with TaskNotFound.
    """
    producer.send("k")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(producer.result, "k", 30)
        with pytest.raises(TimeoutError):
            producer.result("k", 0.05)
        producer.delete("k")
        with pytest.raises(TaskNotFound):
            waiting.result(10)


@pytest.mark.parametrize("timeout", [-1, float("nan"), "1", True])
def test_result_refuses_a_wrong_timeout(producer: Producer, timeout: Any) -> None:
    """
    ValueError or TypeError, also without a task.
    """
    with pytest.raises((ValueError, TypeError)):
        producer.result("k", timeout)


# -- changing ----------------------------------------------------------------------------------


def test_update_needs_an_existing_task(producer: Producer, collection: Tasks) -> None:
    """
    TaskNotFound, and no task is made.
    """
    with pytest.raises(TaskNotFound):
        producer.update("k", 1)
    assert collection.find_one() is None


def test_update_changes_what_is_given(producer: Producer, collection: Tasks) -> None:
    """
    Params and options that are named are replaced; the others stay as they are.
    """
    before = arranged(producer, collection, "waiting")
    result = producer.update("k", priority=9, max_attempts=1, timeout=5, retry_backoff=2.0)
    assert result == SendResult("k", inserted=False, updated=True, status="waiting")
    option = {**before["task_option"], "priority": 9, "max_unexpected_retries": 1}
    changed = {"task_option": option, "timeout_ms": 5000, "retry": {"backoff": 2.0}}
    assert stored(collection) == {**before, **changed}
    producer.update("k", "new", timeout=None)
    changed = {"task_option": option, "retry": {"backoff": 2.0}, "params": "new"}
    assert stored(collection) == {**before, **changed}


def test_update_checks_a_heartbeat_against_the_stored_lease(
    producer: Producer, collection: Tasks
) -> None:
    """
    Half the lease is the limit, also where only one of the two is given.
    """
    producer.send("k", lease=10, heartbeat=2)
    with pytest.raises(ValueError, match="half the lease"):
        producer.update("k", heartbeat=6)
    producer.update("k", heartbeat=5)
    assert stored(collection)["task_option"]["ping_interval_ms"] == 5000


def test_update_refuses_unknown_options(producer: Producer) -> None:
    """
    A misspelt option is an error, not a silence.
    """
    producer.send("k")
    with pytest.raises(TypeError):
        producer.update("k", "new", colour=1)


@pytest.mark.parametrize("state", STATES)
def test_cancel_in_every_state(producer: Producer, collection: Tasks, state: str) -> None:
    """
    What has not ended is cancelled or told; what has ended stays; a second call changes nothing.
    """
    before = arranged(producer, collection, state)
    asked = producer.cancel("k")
    after = stored(collection)
    assert asked == (state in {"waiting", "running", "cancelled"})
    if state in ENDED:
        assert after == before
    else:
        assert after["status"] == ("cancelled" if state == "waiting" else "running")
        assert after["cancel"]["worker_ids"] == []
        assert after["task_option"]["specific_worker_ids"] == ["__cancelled__"]
        assert after["task_state"] == before["task_state"]
    assert producer.cancel("k") == asked
    assert stored(collection) == after


@pytest.mark.parametrize("state", STATES)
def test_retry_in_every_state(producer: Producer, collection: Tasks, state: str) -> None:
    """
    What has ended waits again, from now, with its own params, options and workers.
    """
    before = arranged(producer, collection, state)
    assert producer.retry("k") == (state in ENDED)
    after = stored(collection)
    if state not in ENDED:
        assert after == before
        return
    assert after["task_state"]["start_time"] >= before["task_state"]["start_time"]
    assert (after["status"], after["params"]) == ("waiting", "old")
    assert after["task_option"] == OLD_OPTION
    assert after["task_state"]["worker_states"] == []
    assert not {"cancel", "finished_at", "expire_at"} & set(after)
    assert after["due"] == after["task_state"]["start_time"]


def test_retry_restores_the_restriction_that_cancel_replaced(producer: Producer) -> None:
    """
    A task for certain workers is one for them after cancel and retry.
    """
    producer.send("k", worker_ids=["a", "b"])
    producer.cancel("k")
    producer.retry("k")
    task = producer.get("k")
    assert task is not None
    assert task.options.worker_ids == ("a", "b")


def test_cancel_and_retry_need_a_task(producer: Producer) -> None:
    """
    TaskNotFound for both.
    """
    for call in (producer.cancel, producer.retry):
        with pytest.raises(TaskNotFound):
            call("k")


def test_delete_says_whether_there_was_a_task(producer: Producer, collection: Tasks) -> None:
    """
    In any state; afterwards the key is free.
    """
    arranged(producer, collection, "running")
    assert producer.delete("k")
    assert not producer.delete("k")
    assert producer.send("k").inserted


def ended_ago(collection: Tasks, key: str, status: str, ago: dt.timedelta) -> None:
    changes = {"status": status, "due": NEVER, "finished_at": server_now(collection) - ago}
    collection.update_one({"key": key}, {"$set": changes})


def test_delete_finished_deletes_what_ended_long_enough_ago(
    producer: Producer, collection: Tasks
) -> None:
    """
    By age and status, more than one page of it; what has not ended stays.
    """
    producer.send_many([(f"old{n}", n) for n in range(150)])
    for n in range(150):
        ended_ago(collection, f"old{n}", "succeeded", 3 * HOUR)
    producer.send_many([("failed", 1), ("young", 1), ("waiting", 1)])
    ended_ago(collection, "failed", "failed", 3 * HOUR)
    ended_ago(collection, "young", "succeeded", HOUR)
    assert producer.delete_finished(2 * HOUR, statuses=["succeeded"]) == 150
    assert {d["key"] for d in collection.find()} == {"failed", "young", "waiting"}
    assert producer.delete_finished(7200) == 1
    assert producer.delete_finished(0) == 1
    assert [d["key"] for d in collection.find()] == ["waiting"]
    with pytest.raises(ValueError, match="statuses"):
        producer.delete_finished(0, statuses=["waiting"])
    with pytest.raises(ValueError, match="older_than"):
        producer.delete_finished(-1)


def test_delete_finished_spares_what_is_armed_again_meanwhile(
    producer: Producer, collection: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Between its look and its delete, a task may begin again.
    """
    for key in ("a", "b"):
        producer.send(key)
        ended_ago(collection, key, "succeeded", HOUR)
    find = TaskStore.find

    def find_then_rearm(store: TaskStore, *args: Any, **options: Any) -> Any:
        found = find(store, *args, **options)
        changes = {"$set": {"status": "waiting"}, "$unset": {"finished_at": ""}}
        collection.update_one({"key": "a"}, changes)
        return found

    monkeypatch.setattr(TaskStore, "find", find_then_rearm)
    assert producer.delete_finished(0) == 1
    assert [d["key"] for d in collection.find()] == ["a"]


def test_keep_finished_sets_a_date_at_the_end_and_unsets_it_on_rearm(
    producer: Producer, collection: Tasks
) -> None:
    """
    The date of the TTL index is the end plus the time to keep, for every kind of end.
    """
    assert collection.find_one() is None
    producer.send_many(
        [("good", 1), ("bad", 1), ("gone", 1), ("kept", 1, {"keep_finished": None})],
        keep_finished=HOUR,
        max_attempts=1,
    )

    def run(_params: Any, context: Any) -> None:
        if context.key == "bad":
            raise ValueError("bad")

    assert all("expire_at" not in document for document in collection.find())
    producer.cancel("gone")
    with Consumer(collection, run, watch=False, poll_interval=0.02) as consumer:
        assert consumer.run_until_idle(20)
    documents = {d["key"]: d for d in collection.find()}
    for key in ("good", "bad", "gone"):
        assert documents[key]["expire_at"] == documents[key]["finished_at"] + HOUR
    assert "expire_at" not in documents["kept"]
    assert collection.index_information()["expire_at"]["expireAfterSeconds"] == 0
    for key in ("good", "bad", "gone"):
        assert producer.retry(key)
        assert not {"expire_at", "finished_at"} & set(stored(collection, key))


def test_keep_finished_follows_an_update(producer: Producer, collection: Tasks) -> None:
    """
    Updating a finished task changes how long it is kept from its end on.
    """
    before = arranged(producer, collection, "succeeded")
    producer.send("k", if_exists="update", keep_finished=2 * HOUR)
    assert stored(collection)["expire_at"] == before["finished_at"] + 2 * HOUR
    producer.send("k", if_exists="update")
    assert "expire_at" not in stored(collection)


# -- trouble with the database -----------------------------------------------------------------


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
