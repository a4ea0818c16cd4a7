"""
Stopping a consumer: from anywhere, at any time, with and without patience.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mscheduler_sync import (
    AttemptReleased,
    ComponentCrashed,
    ConsumerStateChanged,
    Producer,
    StopReport,
    TaskContext,
)
from tests.support import wait_until
from tests.support.tasks import Tasks, echo, polling, task_of, unread


def test_stop_before_start_and_twice(collection: Tasks) -> None:
    """
    Both are fine, and the report is the same each time.
    """
    consumer = polling(collection, echo)
    assert consumer.stop() == StopReport()
    assert consumer.stop() == StopReport()
    assert consumer.state == "stopped"


def test_second_stop_returns_the_first_report(
    collection: Tasks, producer: Producer, go: threading.Event
) -> None:
    """
    Also when several threads stop at once: all wait, and get one report.
    """
    producer.send("k")
    consumer = polling(collection, lambda _params: go.wait(30))
    consumer.start()
    wait_until(lambda: consumer.running_count, "it runs")
    with ThreadPoolExecutor(4) as pool:
        stops = [pool.submit(consumer.stop, 20) for _ in range(4)]
        wait_until(lambda: consumer.state == "stopping", "the stop has begun")
        go.set()
        reports = [stop.result(30) for stop in stops]
    assert reports == [StopReport(finished=("k",))] * 4
    assert consumer.stop() == reports[0]


def test_stop_from_a_task_asks_for_the_stop(collection: Tasks, producer: Producer) -> None:
    """
    It returns at once; `run_forever` then ends, with the task finished.
    """
    reports: list[StopReport] = []

    def function(_params: Any) -> None:
        reports.append(consumer.stop())

    consumer = polling(collection, function)
    producer.send("k")
    with ThreadPoolExecutor(1) as pool:
        report = pool.submit(consumer.run_forever).result(20)
    assert reports == [StopReport()]
    assert consumer.state == "stopped"
    assert task_of(producer).status == "succeeded"
    assert set(report.finished) <= {"k"}


def test_stop_from_a_task_stops_a_consumer_that_was_only_started(
    collection: Tasks, producer: Producer
) -> None:
    """
    Nobody waits in `run_forever`: the stop is done all the same.
    """
    reports: list[StopReport] = []

    def function(_params: Any) -> None:
        reports.append(consumer.stop())

    consumer = polling(collection, function)
    consumer.start()
    producer.send("k")
    wait_until(lambda: consumer.state == "stopped", "it has stopped", 20)
    assert reports == [StopReport()]
    assert task_of(producer).status == "succeeded"
    assert consumer.stop().finished == ("k",)


def test_request_stop_ends_run_forever(collection: Tasks, producer: Producer) -> None:
    """
    Nothing more is claimed, and `run_forever` returns the report of its stop.
    """
    consumer = polling(collection, echo)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(consumer.run_forever)
        assert wait_until(lambda: consumer.wait_started(10), "it has started")
        consumer.request_stop()
        assert running.result(20) == StopReport()
    producer.send("k", 1)
    assert task_of(producer).status == "waiting"


def test_stop_leaves_a_deaf_function_behind(
    collection: Tasks, producer: Producer, go: threading.Event
) -> None:
    """
    In time, with a report; the attempt is not counted, and the task runs again when its lease ends.
    """
    producer.send("k", "deaf", lease=1.5, heartbeat=0.3, max_attempts=1)
    ended = threading.Event()

    def deaf(_params: Any) -> str:
        go.wait(60)
        ended.set()
        return "late"

    consumer = polling(collection, deaf, worker_id="first")
    consumer.start()
    wait_until(lambda: consumer.running_count, "it runs")
    began_s = time.monotonic()
    report = consumer.stop(0.4)
    assert time.monotonic() - began_s < 4
    assert (report.abandoned, report.released, report.finished) == (("k",), (), ())
    assert any(name.startswith("ms-exec:first") for name in report.threads)
    (attempt,) = task_of(producer).attempts
    assert (attempt.is_open, attempt.interrupted) == (True, True)
    numbers: list[int] = []

    def second(params: Any, context: TaskContext) -> Any:
        numbers.append(context.attempt)
        return params

    with polling(collection, second, worker_id="second"):
        assert producer.result("k", 20) == "deaf"
    go.set()
    assert ended.wait(10)
    task = task_of(producer)
    assert numbers == [1]
    assert [a.worker_id for a in task.attempts] == ["second"]
    assert task.counters["released"] == 1
    assert producer.result("k", 1) == "deaf"


def test_releases_use_no_attempt(collection: Tasks, producer: Producer) -> None:
    """
    However many stops give a task back.
    """
    producer.send("k", max_attempts=1)

    def function(_params: Any, context: TaskContext) -> None:
        assert context.attempt == 1
        context.cancelled.wait(30)
        context.check()

    for _ in range(2):
        consumer = polling(collection, function)
        events = consumer.subscribe(AttemptReleased)
        with consumer:
            wait_until(lambda c=consumer: c.running_count, "it runs")  # type: ignore[misc]
            assert consumer.stop(3).released == ("k",)
        event = events.get(0)
        assert isinstance(event, AttemptReleased)
        assert (event.key, event.why) == ("k", "shutdown")
    task = task_of(producer)
    assert (task.status, task.attempts, task.counters["released"]) == ("waiting", (), 2)


def test_nothing_is_claimed_after_a_stop_has_begun(
    collection: Tasks, producer: Producer, go: threading.Event
) -> None:
    """
    Waiting tasks stay although a slot gets free during the stop.
    """
    producer.send_many([(f"k{n}", n) for n in range(5)])
    consumer = polling(collection, lambda _params: go.wait(30), max_workers=1)
    consumer.start()
    wait_until(lambda: consumer.running_count == 1, "one runs")
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(consumer.stop, 20)
        wait_until(lambda: consumer.state == "stopping", "the stop has begun")
        go.set()
        assert len(stopping.result(30).finished) == 1
    assert producer.count(status="waiting") == 4


def test_stop_without_time_gives_up_at_once(
    collection: Tasks, producer: Producer, go: threading.Event
) -> None:
    """
    A time of 0 asks and leaves; idle consumers stop cleanly with it.
    """
    idle = polling(collection, echo)
    idle.start()
    assert idle.wait_started(10)
    assert idle.stop(0).abandoned == ()
    producer.send("k")
    busy = polling(collection, lambda _params: go.wait(30))
    busy.start()
    wait_until(lambda: busy.running_count, "it runs")
    began_s = time.monotonic()
    assert busy.stop(0).abandoned == ("k",)
    assert time.monotonic() - began_s < 3


@pytest.mark.parametrize("timeout", [-1, "1", float("nan"), True])
def test_wrong_time_for_a_stop_is_refused(collection: Tasks, timeout: Any) -> None:
    """
    ValueError or TypeError; the consumer runs on.
    """
    with polling(collection, echo) as consumer:
        with pytest.raises((ValueError, TypeError), match="timeout"):
            consumer.stop(timeout)
        assert consumer.running


def test_part_that_fails_again_and_again_stops_the_consumer(
    collection: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    ComponentCrashed names the part and carries the failure, from whatever waits and from `stop`.
    """

    def broken(*_arguments: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr("mscheduler_sync._stages.fetcher.Fetcher._pass", broken)
    consumer = polling(collection, echo)
    states = consumer.subscribe(ConsumerStateChanged)
    with pytest.raises(ComponentCrashed, match="fetch") as caught:
        consumer.run_until_idle(30)
    assert isinstance(caught.value.__cause__, TypeError)
    for _ in range(2):
        with pytest.raises(ComponentCrashed):
            consumer.stop()
    assert consumer.state == "crashed"
    assert "a bug" in (consumer.health().crash or "")
    told = [e.state for e in unread(states) if isinstance(e, ConsumerStateChanged)]
    assert told == ["running", "stopping", "crashed"]
