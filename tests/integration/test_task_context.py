"""
What a function is told while it runs (cancelled, lease lost, stopping), and its progress.
"""

from __future__ import annotations

import datetime as dt
import threading
from typing import Any

import pytest

from mscheduler_sync import (
    AttemptEnded,
    AttemptLost,
    AttemptReleased,
    LeaseLost,
    Producer,
    Snooze,
    TaskCancelled,
    TaskContext,
    current_task,
)
from tests.support import Document, wait_until, without_id
from tests.support.tasks import Tasks, polling, ran, reasons, task_of

#: A lease whose heartbeats bring news soon.
LIVELY: Document = {"lease": 2, "heartbeat": 0.1}


def test_context_tells_of_the_attempt(producer: Producer, collection: Tasks) -> None:
    """
    Key, name, number, ids and deadline are those of the document; the attempt is the current one.
    """
    seen: list[TaskContext] = []
    currents: list[TaskContext | None] = []

    def function(params: Any, context: TaskContext) -> None:
        seen.append(context)
        currents.append(current_task())
        context.check()
        if len(seen) == 1:
            raise ValueError("once more")

    task = ran(producer, collection, function, params=5, name="n", timeout=50)
    assert [c.attempt for c in seen] == [1, 2]
    assert currents == seen
    assert [c.running_id for c in seen] == [a.running_id for a in task.attempts]
    for context, attempt in zip(seen, task.attempts, strict=True):
        assert (context.key, context.name) == ("k", "n")
        assert context.worker_id == attempt.worker_id
        assert (context.reason, context.cancelled.is_set()) == (None, False)
        assert context.deadline is not None
        assert attempt.claimed_at is not None
        left = context.deadline - attempt.claimed_at
        assert abs(left - dt.timedelta(seconds=50)) < dt.timedelta(seconds=5)
    assert current_task() is None


def test_context_without_name_and_deadline(producer: Producer, collection: Tasks) -> None:
    """
    What the task does not have is None.
    """
    seen: list[TaskContext] = []
    ran(producer, collection, lambda _params, context: seen.append(context))
    assert [(c.name, c.deadline) for c in seen] == [(None, None)]


def test_current_task_is_the_function_s_own(producer: Producer, collection: Tasks) -> None:
    """
    Not of threads that it starts, and not of what runs in its thread before or after.
    """
    inside: list[str | None] = []
    elsewhere: list[TaskContext | None] = []

    def function(_params: Any) -> None:
        task = current_task()
        inside.append(task.key if task else None)
        thread = threading.Thread(target=lambda: elsewhere.append(current_task()))
        thread.start()
        thread.join()

    producer.send_many([("a", 1), ("b", 2)])
    with polling(collection, function, max_workers=1) as consumer:
        assert consumer.run_until_idle(10)
    assert sorted(filter(None, inside)) == ["a", "b"]
    assert elsewhere == [None, None]


@pytest.mark.parametrize("heeds", ["check", "returns", "raises"])
def test_cancel_reaches_the_function(producer: Producer, collection: Tasks, heeds: str) -> None:
    """
    It learns by heartbeat. Heeding it ends the task as cancelled, returning as succeeded.
    """
    began = threading.Event()
    caught: list[LeaseLost] = []

    def function(_params: Any, context: TaskContext) -> str:
        began.set()
        assert context.cancelled.wait(20)
        assert context.reason == "cancel_requested"
        if heeds == "raises":
            raise ValueError("in the middle")
        if heeds == "check":
            try:
                context.check()
            except LeaseLost as error:
                caught.append(error)
                raise
        return "done anyway"

    producer.send("k", **LIVELY)
    with polling(collection, function) as consumer:
        events = consumer.subscribe(AttemptReleased, AttemptEnded)
        assert began.wait(10)
        assert producer.cancel("k")
        assert task_of(producer).cancel_requested
        event = events.get(10)
        assert consumer.run_until_idle(10)
    task = task_of(producer)
    if heeds == "check":
        assert isinstance(event, AttemptReleased)
        assert event.why == "cancel_requested"
        assert [(error.key, error.reason) for error in caught] == [("k", "cancel_requested")]
        assert (task.status, task.attempts) == ("cancelled", ())
    elif heeds == "raises":
        assert without_id(event) == AttemptEnded(key="k", running_id="*", succeeded=False)
        assert (task.status, reasons(task)) == ("cancelled", ["ValueError: in the middle"])
    else:
        assert without_id(event) == AttemptEnded(key="k", running_id="*", succeeded=True)
        assert producer.result("k", 1) == "done anyway"
    if heeds != "returns":
        with pytest.raises(TaskCancelled):
            producer.result("k", 1)


def test_lost_lease_reaches_the_function(producer: Producer, collection: Tasks) -> None:
    """
    Somebody took the attempt away: it learns by heartbeat, and nothing of it is stored.
    """
    began = threading.Event()
    told: list[str | None] = []

    def function(_params: Any, context: TaskContext) -> None:
        if context.attempt == 1 and not told:
            began.set()
            assert context.cancelled.wait(20)
            told.append(context.reason)
            context.check()

    producer.send("k", **LIVELY)
    with polling(collection, function, max_workers=1) as consumer:
        events = consumer.subscribe(AttemptReleased, AttemptLost)
        assert began.wait(10)
        first = task_of(producer).attempts[0].running_id
        due = task_of(producer).start_at
        collection.update_one({}, {"$set": {"task_state.worker_states": [], "due": due}})
        event = events.get(10)
        assert isinstance(event, AttemptReleased | AttemptLost)
        assert event.running_id == first
        producer.result("k", 10)
    assert told == ["lease_lost"]
    assert len(task_of(producer).attempts) == 1
    assert task_of(producer).attempts[0].running_id != first


def test_deleted_task_is_a_lost_lease(producer: Producer, collection: Tasks) -> None:
    """
    The function of a deleted task is told; the task does not come back.
    """
    began = threading.Event()
    told: list[str | None] = []

    def function(_params: Any, context: TaskContext) -> None:
        began.set()
        assert context.cancelled.wait(20)
        told.append(context.reason)

    producer.send("k", **LIVELY)
    with polling(collection, function) as consumer:
        events = consumer.subscribe(AttemptLost)
        assert began.wait(10)
        assert producer.delete("k")
        assert isinstance(events.get(10), AttemptLost)
    assert told == ["lease_lost"]
    assert collection.find_one() is None


def test_stop_reaches_the_function(producer: Producer, collection: Tasks) -> None:
    """
    After three quarters of the stop's time it is asked to end; `check` then gives the task back.
    """
    began = threading.Event()
    told: list[str | None] = []

    def function(_params: Any, context: TaskContext) -> None:
        began.set()
        assert context.cancelled.wait(20)
        told.append(context.reason)
        context.check()

    producer.send("k", max_attempts=1)
    with polling(collection, function) as consumer:
        assert began.wait(10)
        report = consumer.stop(3)
    assert told == ["shutdown"]
    assert report.released == ("k",)
    task = task_of(producer)
    assert (task.status, task.attempts, task.counters["released"]) == ("waiting", (), 1)


def test_changed_restriction_reaches_the_function(producer: Producer, collection: Tasks) -> None:
    """
    A task that may no longer run here is given up by `check`, unused, and runs where it may.
    """
    began = threading.Event()
    told: list[str | None] = []

    def function(_params: Any, context: TaskContext) -> str:
        if context.worker_id == "here":
            began.set()
            assert context.cancelled.wait(20)
            told.append(context.reason)
            context.check()
        return context.worker_id

    producer.send("k", max_attempts=1, **LIVELY)
    with (
        polling(collection, function, worker_id="here"),
        polling(collection, function, worker_id="there", max_workers=0) as there,
    ):
        assert began.wait(10)
        producer.update("k", max_attempts=1, worker_ids=["there"], **LIVELY)
        there.max_workers = 1
        assert producer.result("k", 10) == "there"
    assert told == ["options_changed"]


def test_changed_lease_counts_from_the_next_heartbeat(
    producer: Producer, collection: Tasks
) -> None:
    """
    The options of a running task are read again with each heartbeat.
    """
    go = threading.Event()
    producer.send("k", **LIVELY)
    with polling(collection, lambda _params: go.wait(20)):
        wait_until(lambda: task_of(producer).attempts, "it runs")
        producer.update("k", lease=1000, heartbeat=0.1)

        def lease_s() -> float:
            attempt = task_of(producer).attempts[0]
            assert attempt.lease_end is not None
            assert attempt.claimed_at is not None
            return (attempt.lease_end - attempt.claimed_at).total_seconds()

        wait_until(lambda: lease_s() > 900, "the lease is the new one")
        go.set()
        producer.result("k", 10)


def test_progress_is_seen_while_the_task_runs_and_later(
    producer: Producer, collection: Tasks
) -> None:
    """
    The last note rides on a heartbeat or the outcome; a later attempt can read it.
    """
    go = threading.Event()
    inherited: list[Any] = []

    def function(_params: Any, context: TaskContext) -> None:
        inherited.append(task_of(producer).progress)
        for done in range(3):
            context.progress({"done": done})
        if context.attempt == 1:
            go.wait(20)
            context.progress({"done": "first"})
            raise ValueError("again")

    producer.send("k", retry_delay=0, **LIVELY)
    with polling(collection, function):
        wait_until(lambda: task_of(producer).progress == {"done": 2}, "a heartbeat brings it")
        go.set()
        producer.result("k", 10)
    assert inherited == [None, {"done": "first"}]
    assert task_of(producer).progress == {"done": 2}


def test_progress_that_cannot_be_stored_is_refused(producer: Producer, collection: Tasks) -> None:
    """
    ValueError in the function; an earlier note stays.
    """

    def function(_params: Any, context: TaskContext) -> list[str]:
        context.progress("early")
        errors = []
        for value in ({1}, 2**64, "\ud800", "x" * 2000):
            with pytest.raises(ValueError, match="progress") as caught:
                context.progress(value)
            errors.append(str(caught.value))
        return errors

    producer.send("k")
    with polling(collection, function, max_result_bytes=1000):
        assert len(producer.result("k", 10)) == 4
    assert task_of(producer).progress == "early"


ROOM = 15 * 2**20 - 100


@pytest.mark.parametrize("end", ["return", "raise", "snooze"])
def test_progress_without_room_costs_neither_lease_nor_outcome(
    producer: Producer, collection: Tasks, end: str
) -> None:
    """
    Params and progress may be too much for one document together: the progress is dropped.
    """
    go = threading.Event()
    contexts: list[TaskContext] = []

    def function(_params: Any, context: TaskContext) -> int:
        contexts.append(context)
        if len(contexts) == 1:
            context.progress("p" * (2**20 - 100))
            go.wait(30)
            context.progress("p" * (2**20 - 100))
            if end == "raise":
                raise ValueError("mine")
            if end == "snooze":
                raise Snooze(0)
        return 1

    producer.send("k", "P" * ROOM, lease=30, heartbeat=0.5, max_attempts=2, retry_delay=0)
    with polling(collection, function) as consumer:
        wait_until(lambda: contexts, "it runs", 20)
        first = task_of(producer).attempts[0].lease_end
        wait_until(
            lambda: task_of(producer).attempts[0].lease_end != first, "it sends a heartbeat", 20
        )
        assert not contexts[0].cancelled.is_set()
        go.set()
        assert producer.result("k", 20) == 1
        assert consumer.health().ok
    task = task_of(producer)
    assert task.progress is None
    assert reasons(task) == (["ValueError: mine"] if end == "raise" else [])
    assert len(contexts) == (1 if end == "return" else 2)
