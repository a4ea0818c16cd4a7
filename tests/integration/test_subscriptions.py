"""
The events of a consumer, as its subscriptions get them.
"""

from __future__ import annotations

import datetime as dt
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mscheduler_sync import (
    AttemptEnded,
    AttemptStarted,
    ConsumerStateChanged,
    Producer,
    QueueDrained,
    QueueEmpty,
    TaskFinished,
    TaskFound,
    TaskSucceeded,
)
from tests.support import wait_until, without_id
from tests.support.tasks import Tasks, echo, polling, task_of


def test_events_of_a_success_come_in_order(collection: Tasks, producer: Producer) -> None:
    """
    AttemptStarted, TaskSucceeded, AttemptEnded, TaskFinished; states around them.
    """
    producer.send("k")
    consumer = polling(collection, echo)
    with consumer.subscribe() as events:
        with consumer:
            producer.result("k", 10)
            wait_until(lambda: consumer.running_count == 0, "its events are sent")
        told = list(events)
    assert told[0] == ConsumerStateChanged(state="running")
    assert told[-2:] == [
        ConsumerStateChanged(state="stopping"),
        ConsumerStateChanged(state="stopped"),
    ]
    about_it = [event for event in told if event.key == "k"]
    assert isinstance(about_it[0], TaskFound)
    assert [without_id(event) for event in about_it if not isinstance(event, TaskFound)] == [
        AttemptStarted(key="k", running_id="*"),
        TaskSucceeded(key="k"),
        AttemptEnded(key="k", running_id="*", succeeded=True),
        TaskFinished(key="k", status="succeeded"),
    ]
    assert any(isinstance(event, QueueEmpty) for event in told)


def test_event_of_a_success_comes_after_it_is_stored(collection: Tasks, producer: Producer) -> None:
    """
    Whoever hears TaskSucceeded can read the result.
    """
    with polling(collection, echo) as consumer:
        events = consumer.subscribe(TaskSucceeded)
        producer.send_many([(f"k{n}", n) for n in range(20)])
        for _ in range(20):
            event = events.get(10)
            assert event is not None
            assert event.key is not None
            assert task_of(producer, event.key).status == "succeeded"
            assert producer.result(event.key, 10) == int(event.key[1:])


def test_subscription_from_before_the_action_misses_nothing(
    collection: Tasks, producer: Producer
) -> None:
    """
    All events of many tasks are there, whenever they are read, for each of several subscriptions.
    """
    consumer = polling(collection, echo)
    subscriptions = [consumer.subscribe(AttemptEnded) for _ in range(3)]
    with consumer:
        producer.send_many([(f"k{n}", n) for n in range(100)])
        wait_until(lambda: producer.count(status="succeeded") == 100, "all succeed", 60)
    for subscription in subscriptions:
        keys = [event.key for event in subscription]
        assert sorted(filter(None, keys)) == sorted(f"k{n}" for n in range(100))
        assert subscription.dropped == 0


def test_subscription_that_is_not_read_drops_the_oldest(
    collection: Tasks, producer: Producer
) -> None:
    """
    It keeps the newest, counts what it lost, and hurts nobody.
    """
    consumer = polling(collection, echo, max_workers=1)
    small, large = consumer.subscribe(TaskSucceeded, buffer=3), consumer.subscribe(TaskSucceeded)
    with consumer:
        producer.send_many([(f"k{n}", n) for n in range(10)])
        assert consumer.run_until_idle(20)
    kept, complete = list(small), list(large)
    assert (len(complete), kept) == (10, complete[-3:])
    assert (small.dropped, large.dropped) == (7, 0)


def test_subscription_takes_the_kinds_that_it_names(collection: Tasks, producer: Producer) -> None:
    """
    Others do not reach it; what is no event class is refused.
    """
    consumer = polling(collection, echo)
    events = consumer.subscribe(TaskSucceeded, AttemptStarted)
    with consumer:
        producer.send("k")
        producer.result("k", 10)
        wait_until(lambda: consumer.running_count == 0, "its events are sent")
    assert {type(event) for event in events} == {TaskSucceeded, AttemptStarted}
    for wrong in (str, "TaskSucceeded", TaskSucceeded(key="k")):
        with pytest.raises(TypeError):
            consumer.subscribe(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="buffer"):
        consumer.subscribe(buffer=0)


def test_closed_subscription_gets_nothing_more(collection: Tasks, producer: Producer) -> None:
    """
    What was there can still be read; a subscription to a stopped consumer is over at once.
    """
    with polling(collection, echo) as consumer:
        events = consumer.subscribe(TaskSucceeded)
        producer.send("a")
        producer.result("a", 10)
        assert consumer.run_until_idle(10)
        events.close()
        producer.send("b")
        producer.result("b", 10)
        assert [event.key for event in events] == ["a"]
    assert list(consumer.subscribe()) == []
    assert consumer.wait_for_event(lambda _event: True) is None


def test_wait_for_event_returns_the_first_that_fits(collection: Tasks, producer: Producer) -> None:
    """
    None when the time is over, and when the consumer stops; the predicate's error comes out.
    """
    with polling(collection, echo) as consumer, ThreadPoolExecutor(2) as pool:
        assert consumer.wait_for_event(lambda event: event.key == "k", 0.05) is None
        waiting = pool.submit(
            consumer.wait_for_event,
            lambda event: isinstance(event, AttemptEnded) and event.key == "k",
            20,
        )
        failing = pool.submit(consumer.wait_for_event, lambda event: 1 / 0, 20)
        # Sent until the waits have begun: they hear only what comes after.
        number = 0
        while not (waiting.done() and failing.done()):
            number += 1
            producer.send("k", if_exists="rerun")
            producer.send(f"other {number}")
            producer.result("k", 10)
        assert without_id(waiting.result()) == AttemptEnded(key="k", running_id="*", succeeded=True)
        with pytest.raises(ZeroDivisionError):
            failing.result()
        forever = pool.submit(consumer.wait_for_event, lambda _event: False)
        consumer.stop()
        assert forever.result(10) is None


def test_failure_is_told_with_the_time_of_the_next_try(
    collection: Tasks, producer: Producer
) -> None:
    """
    After the claim: TaskFound with the retry's time, then AttemptEnded without success.
    """

    def function(_params: Any) -> None:
        raise ValueError("no")

    producer.send("k", retry_delay=1000)
    with polling(collection, function) as consumer:
        events = consumer.subscribe(AttemptEnded, TaskFound, TaskSucceeded)
        wait_until(lambda: task_of(producer).failures == 1, "it has failed")
        assert consumer.run_until_idle(10)
    told = [event for event in events if event.key == "k"][-2:]
    assert isinstance(told[0], TaskFound)
    retry_at = task_of(producer).attempts[0].retry_at
    assert retry_at is not None
    assert abs(told[0].claim_at - retry_at) < dt.timedelta(seconds=5)
    assert without_id(told[1]) == AttemptEnded(key="k", running_id="*", succeeded=False)


def test_drained_queue_is_told_once_all_has_run(collection: Tasks, producer: Producer) -> None:
    """
    After the last event of the last attempt, once for each burst; what is due later does not count.
    """
    producer.send("later", delay=1000)
    with polling(collection, echo, max_workers=2) as consumer:
        events = consumer.subscribe(QueueDrained, TaskFinished)
        for burst in range(2):
            producer.send_many([(f"{burst}:{number}", number) for number in range(10)])
            assert consumer.run_until_idle(20)
    told = list(events)
    assert len([event for event in told if isinstance(event, TaskFinished)]) == 20
    drained = [n for n, event in enumerate(told) if isinstance(event, QueueDrained)]
    # A page that a query reads may come in pieces; the last word is that all has run.
    assert drained
    assert drained[-1] == len(told) - 1
    assert all(isinstance(told[n - 1], TaskFinished) for n in drained)
