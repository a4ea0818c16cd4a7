"""
What a send makes of each state of a task, and what it says about it.
"""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import attrs
import pytest
from bson.codec_options import CodecOptions
from pymongo import ReadPreference, WriteConcern

from mscheduler_sync import (
    InvalidTask,
    MSchedulerError,
    Producer,
    SendResult,
    TaskExists,
    TaskRunning,
)
from tests.support import Document
from tests.support.arranged import (
    DEFAULT_OPTION,
    ENDED,
    HOUR,
    NEVER,
    OLD,
    OLD_OPTION,
    STATES,
    arranged,
    attempt,
    server_now,
    stored,
)
from tests.support.tasks import Tasks

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
