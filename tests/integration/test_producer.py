"""
What a producer asks of tasks, and how it changes and deletes them.
"""

from __future__ import annotations

import datetime as dt
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mscheduler_sync import (
    Consumer,
    Producer,
    SendResult,
    Task,
    TaskCancelled,
    TaskFailed,
    TaskNotFound,
)
from mscheduler_sync._storage.store import TaskStore
from tests.support.arranged import (
    ENDED,
    HOUR,
    NEVER,
    OLD_OPTION,
    STATES,
    arranged,
    attempt,
    server_now,
    stored,
)
from tests.support.tasks import Tasks

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
        Consumer(collection, double, watch=False, poll_interval=0.1),
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


def test_update_of_the_lease_alone_is_checked_against_the_stored_heartbeat(
    producer: Producer, collection: Tasks
) -> None:
    """
    A lease too short for the default heartbeat does for a task whose own is shorter.
    """
    producer.send("a", lease=60, heartbeat=2)
    assert producer.update("a", lease=10).updated
    assert collection.find_one({"key": "a"}, {"_id": 0, "task_option.worker_timeout_ms": 1}) == {
        "task_option": {"worker_timeout_ms": 10_000}
    }
    with pytest.raises(ValueError, match="heartbeat must be at most half the lease"):
        producer.update("a", lease=3)


def test_update_of_a_task_that_is_deleted_meanwhile_makes_no_new_one(
    producer: Producer, collection: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    An update changes what exists; what is gone is an error, however late it went.
    """
    producer.send("k", 1)
    update = TaskStore.update

    def delete_first(store: TaskStore, statement: Any, **options: Any) -> tuple[int, int]:
        collection.delete_one({"key": "k"})
        return update(store, statement, **options)

    monkeypatch.setattr(TaskStore, "update", delete_first)
    with pytest.raises(TaskNotFound):
        producer.update("k", 2)
    assert collection.count_documents({}) == 0


def test_update_refuses_unknown_options(producer: Producer) -> None:
    """
    A misspelt option is an error, not a silence.
    """
    producer.send("k")
    with pytest.raises(TypeError):
        producer.update("k", "new", colour=1)  # type: ignore[call-arg]


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
    with Consumer(collection, run, watch=False, poll_interval=0.1) as consumer:
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
