"""
Attempts that go wrong: lost leases, dead workers, failures, and how many there may be.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from mscheduler_sync import (
    AttemptEnded,
    AttemptLost,
    Producer,
    RetryLater,
    TaskContext,
    TaskFailed,
)
from tests.support import wait_until
from tests.support.tasks import Tasks, polling, reasons, task_of


@pytest.fixture
def no_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Heartbeats do not reach the server.
    """
    monkeypatch.setattr("mscheduler_sync._stages.heartbeat.Heartbeat.send", lambda _: True)


def test_task_that_always_loses_its_lease_to_others_ends_failed(
    collection: Tasks, producer: Producer, no_heartbeats: None
) -> None:
    """
    Each expired attempt counts as a failed one; after the last one the task has failed.
    """
    runs: list[int] = []
    told: list[str | None] = []

    def deaf(_params: Any, context: TaskContext) -> str:
        runs.append(context.attempt)
        wait_until(lambda: task_of(producer).failures >= context.attempt, "it is settled", 30)
        told.append(context.reason)
        return "late"

    producer.send("k", lease=0.4, heartbeat=0.1, max_attempts=3, retry_delay=1000)
    consumers = [polling(collection, deaf) for _ in range(2)]
    events = [consumer.subscribe(AttemptLost, AttemptEnded) for consumer in consumers]
    for consumer in consumers:
        consumer.start()
    with pytest.raises(TaskFailed, match="LeaseExpired"):
        producer.result("k", 30)
    wait_until(lambda: not any(c.running_count for c in consumers), "all functions have ended")
    for consumer in consumers:
        assert consumer.run_until_idle(10)
        consumer.stop()
    task = task_of(producer)
    assert (task.status, runs, told) == ("failed", [1, 2, 3], ["lease_lost"] * 3)
    assert reasons(task) == ["LeaseExpired: the worker stopped renewing its lease"] * 3
    assert [type(event) for stream in events for event in stream] == [AttemptLost] * 3


def test_function_that_heeds_its_lost_leases_ends_failed(
    collection: Tasks, producer: Producer, no_heartbeats: None
) -> None:
    """
    Giving up in time counts too: a task whose leases lapse again and again comes to an end.
    """

    def heeding(_params: Any, context: TaskContext) -> None:
        assert context.cancelled.wait(30)
        context.check()

    producer.send("k", lease=0.4, heartbeat=0.1, max_attempts=3, retry_delay=0)
    with polling(collection, heeding), pytest.raises(TaskFailed, match="LeaseLost"):
        producer.result("k", 30)
    kinds = [reason.split(":")[0] for reason in reasons(task_of(producer))]
    assert kinds == ["LeaseLost"] * 3


def test_expired_attempt_of_a_dead_worker_is_settled_and_followed(
    collection: Tasks, producer: Producer
) -> None:
    """
    It fails with a reason, without a retry delay, and the next attempt has the next number.
    """
    producer.send("k", "p", retry_delay=1000)
    dead_since = task_of(producer).created_at - dt.timedelta(seconds=1)
    dead = {
        "running_id": "dead",
        "worker_id": "dead",
        "ping_expire_time": dead_since,
        "success_time": None,
        "fail_time": None,
    }
    changes = {"task_state.worker_states": [dead], "status": "running", "due": dead_since}
    collection.update_one({}, {"$set": changes})
    numbers: list[int] = []

    def function(params: Any, context: TaskContext) -> Any:
        numbers.append(context.attempt)
        return params

    with polling(collection, function):
        assert producer.result("k", 10) == "p"
    assert numbers == [2]
    assert reasons(task_of(producer)) == ["LeaseExpired: the worker stopped renewing its lease"]


def test_cancelled_task_of_a_dead_worker_ends_cancelled(
    collection: Tasks, producer: Producer
) -> None:
    """
    Nobody is there to hear of it: once the lease has ended the task is cancelled, without a run.
    """
    producer.send("k")
    lease_end = task_of(producer).created_at + dt.timedelta(seconds=1)
    dead = {
        "running_id": "dead",
        "worker_id": "dead",
        "ping_expire_time": lease_end,
        "success_time": None,
        "fail_time": None,
    }
    changes = {"task_state.worker_states": [dead], "status": "running", "due": lease_end}
    collection.update_one({}, {"$set": changes})
    assert producer.cancel("k")
    runs: list[Any] = []
    with polling(collection, runs.append) as consumer:
        wait_until(
            lambda: (collection.find_one() or {})["status"] == "cancelled", "it is cancelled"
        )
        assert consumer.run_until_idle(10)
    assert (runs, task_of(producer).status) == ([], "cancelled")


def test_failed_attempts_are_bounded_whatever_their_kind(
    collection: Tasks, producer: Producer
) -> None:
    """
    Errors, time-outs and retries on purpose count together.
    """

    def function(_params: Any, context: TaskContext) -> None:
        if context.attempt == 1:
            raise ValueError("first")
        if context.attempt == 2:
            context.cancelled.wait(30)
            context.check()
        raise RetryLater(0, "third")

    producer.send("k", timeout=0.1, retry_delay=0)
    with polling(collection, function), pytest.raises(TaskFailed):
        producer.result("k", 20)
    kinds = [reason.split(":")[0].rsplit(".", 1)[-1] for reason in reasons(task_of(producer))]
    assert kinds == ["ValueError", "TimedOut", "RetryLater"]


def test_retry_delays_grow_to_their_cap(collection: Tasks, producer: Producer) -> None:
    """
    By the factor, up to the cap, as stored with each failure.
    """

    def function(_params: Any) -> None:
        raise ValueError("no")

    producer.send("k", max_attempts=4, retry_delay=0.01, retry_backoff=3, retry_max_delay=0.05)
    with polling(collection, function), pytest.raises(TaskFailed):
        producer.result("k", 20)
    delays = []
    for attempt in task_of(producer).attempts:
        assert attempt.retry_at is not None
        assert attempt.failed_at is not None
        delays.append((attempt.retry_at - attempt.failed_at) / dt.timedelta(milliseconds=1))
    assert delays == [10, 30, 50, 50]


def test_retry_delay_is_spread_by_its_jitter(collection: Tasks, producer: Producer) -> None:
    """
    Within the share that was asked for, and not all alike.
    """

    def function(_params: Any) -> None:
        raise ValueError("no")

    producer.send_many(
        [(f"k{n}", n) for n in range(12)], retry_delay=1000, retry_jitter=0.5, max_attempts=2
    )
    with polling(collection, function):
        wait_until(lambda: all(t.failures for t in producer.list()), "all have failed once")
    delays = []
    for task in producer.list():
        (attempt,) = task.attempts
        assert attempt.retry_at is not None
        assert attempt.failed_at is not None
        delays.append((attempt.retry_at - attempt.failed_at).total_seconds())
    assert 500 <= min(delays) < max(delays) <= 1500


def test_budget_of_each_worker(collection: Tasks, producer: Producer) -> None:
    """
    With ``retry_scope="worker"`` one worker's failures leave another its own attempts.
    """

    def function(_params: Any, context: TaskContext) -> str:
        if context.worker_id == "bad":
            raise ValueError("no")
        return "good"

    producer.send("k", max_attempts=2, retry_scope="worker", retry_delay=0)
    with polling(collection, function, worker_id="bad") as consumer:
        wait_until(lambda: task_of(producer).failures == 2, "its attempts are used up", 20)
        assert consumer.run_until_idle(10)
        assert (task_of(producer).status, task_of(producer).failures) == ("waiting", 2)
    with polling(collection, function, worker_id="good"):
        assert producer.result("k", 10) == "good"


def test_worker_that_succeeded_does_not_run_the_task_again(
    collection: Tasks, producer: Producer
) -> None:
    """
    A task for two waits for another worker, and does not keep the first one busy.
    """
    runs: list[str] = []

    def function(_params: Any, context: TaskContext) -> None:
        runs.append(context.worker_id)

    producer.send("k", concurrency=2)
    with polling(collection, function, worker_id="a") as first:
        wait_until(lambda: runs == ["a"], "the first has run it")
        assert first.run_until_idle(10)
        assert task_of(producer).status == "waiting"
        with polling(collection, function, worker_id="b"):
            producer.result("k", 10)
        assert first.run_until_idle(10)
    assert sorted(runs) == ["a", "b"]


def test_failed_task_does_not_stop_the_others(collection: Tasks, producer: Producer) -> None:
    """
    Good and bad tasks of one consumer have nothing to do with each other.
    """

    def function(params: int) -> int:
        if params % 3 == 0:
            raise ValueError(params)
        return params

    producer.send_many([(f"k{n:02}", n) for n in range(30)], max_attempts=1)
    with polling(collection, function) as consumer:
        assert consumer.run_until_idle(30)
    assert [t.params for t in producer.list(status="failed")] == list(range(0, 30, 3))
    assert producer.count(status="succeeded") == 20
