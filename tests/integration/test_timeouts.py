"""
Time-outs of functions: heeded, not heeded, and changed while the function runs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mscheduler_sync import AttemptEnded, AttemptLost, Producer, TaskContext, TaskFailed
from tests.support import wait_until
from tests.support.tasks import Tasks, polling, ran, reasons, task_of

# -- time-outs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("heeds", ["check", "raises", "returns"])
def test_time_out_of_a_function_that_heeds_it(
    producer: Producer, collection: Tasks, heeds: str
) -> None:
    """
    It is told, with a reason; however it ends, the attempt has failed as timed out, and is retried.
    """
    told: list[str | None] = []

    def function(_params: Any, context: TaskContext) -> str:
        assert context.cancelled.wait(20)
        told.append(context.reason)
        if heeds == "check":
            context.check()
        if heeds == "raises":
            raise ValueError("something else")
        return "too late"

    task = ran(producer, collection, function, timeout=0.1, max_attempts=2)
    assert told == ["timed_out", "timed_out"]
    assert task.status == "failed"
    assert reasons(task) == ["TimedOut: the function ran longer than 0.1 s"] * 2


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """
    What never-ending functions wait for; set at the end of the test.
    """
    event = threading.Event()
    yield event
    event.set()


def test_function_that_never_ends_is_reported_and_its_slot_replaced(
    producer: Producer, collection: Tasks, stuck: threading.Event
) -> None:
    """
    Its attempt fails as timed out, another task runs in its place, and its late return is nothing.
    """

    def function(params: Any) -> Any:
        if params == "stuck":
            stuck.wait(60)
        return params

    producer.send("k", "stuck", timeout=0.1, lease=1, heartbeat=0.3, max_attempts=1)
    with polling(collection, function, max_workers=1) as consumer:
        events = consumer.subscribe(AttemptEnded, AttemptLost)
        wait_until(lambda: consumer.running_count, "it runs")
        producer.send("other", "fine")
        assert producer.result("other", 20) == "fine"
        with pytest.raises(TaskFailed, match=r"TimedOut: .* did not end"):
            producer.result("k", 10)
        assert consumer.health().stuck == ("k",)
        stuck.set()
        wait_until(lambda: not consumer.health().stuck, "the function has ended")
        producer.send("last", "fine")
        assert producer.result("last", 10) == "fine"
        # The database knows of a result a moment before the consumer knows that it is stored.
        wait_until(
            lambda: (consumer.health().slots_taken, consumer.running_count) == (0, 0),
            "every slot is free",
        )
        told = list(iter(lambda: events.get(0), None))
    assert [(e.key, getattr(e, "succeeded", None)) for e in told] == [
        ("k", False),
        ("other", True),
        ("last", True),
    ]
    assert task_of(producer).status == "failed"


def test_slots_are_replaced_up_to_their_number(
    producer: Producer, collection: Tasks, stuck: threading.Event
) -> None:
    """
    As many stuck functions as slots are replaced; the next one keeps its slot until it ends.
    """

    def function(params: Any) -> Any:
        if params == "stuck":
            stuck.wait(60)
        return params

    producer.send_many(
        [("a", "stuck"), ("b", "stuck")], timeout=0.1, lease=1, heartbeat=0.3, max_attempts=1
    )
    with polling(collection, function, max_workers=1) as consumer:
        wait_until(lambda: len(consumer.health().stuck) == 2, "both are stuck", 20)
        producer.send("last", "fine")
        assert consumer.health().slots_taken == 1
        assert not consumer.run_until_idle(0.3)
        assert task_of(producer, "last").status == "waiting"
        stuck.set()
        assert producer.result("last", 10) == "fine"
        wait_until(lambda: consumer.health().slots_taken == 0, "all slots are free")


# -- time-outs that change ---------------------------------------------------------------------


@pytest.mark.parametrize("before", [None, 60])
def test_a_timeout_that_an_update_sets_is_kept(
    producer: Producer, collection: Tasks, before: float | None
) -> None:
    """
    The running function is told when the new time is over, and its deadline says so.
    """
    contexts: list[TaskContext] = []

    def function(_params: Any, context: TaskContext) -> None:
        contexts.append(context)
        context.cancelled.wait(30)
        context.check()

    producer.send("k", timeout=before, max_attempts=1, heartbeat=0.2)
    with polling(collection, function) as consumer:
        wait_until(lambda: contexts, "it runs", 20)
        deadline = contexts[0].deadline
        producer.update("k", timeout=1)
        with pytest.raises(TaskFailed, match="TimedOut"):
            producer.result("k", 20)
        assert contexts[0].reason == "timed_out"
        assert contexts[0].deadline is not None
        assert deadline is None or contexts[0].deadline < deadline
        assert consumer.run_until_idle(10)


def test_a_timeout_that_an_update_takes_away_ends_nothing(
    producer: Producer, collection: Tasks
) -> None:
    """
    The function runs on beyond the time that it had at first.
    """
    contexts: list[TaskContext] = []

    def function(_params: Any, context: TaskContext) -> str:
        contexts.append(context)
        return "told" if context.cancelled.wait(3) else "done"

    producer.send("k", timeout=2, max_attempts=1, heartbeat=0.2)
    with polling(collection, function):
        wait_until(lambda: contexts, "it runs", 20)
        producer.update("k", timeout=None)
        assert producer.result("k", 20) == "done"
        assert contexts[0].deadline is None
