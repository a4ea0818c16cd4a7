"""
The consumer: its start, its slots, when it is idle, and its health.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pymongo import MongoClient

from mscheduler_sync import (
    Consumer,
    Health,
    Producer,
    Router,
    StopReport,
    TaskContext,
    TaskSucceeded,
)
from tests.support import Document, wait_until
from tests.support.tasks import Tasks, echo, polling

# -- making and starting -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"worker_id": ""}, ValueError),
        ({"worker_id": 5}, TypeError),
        ({"worker_id": "\ud800"}, ValueError),
        ({"max_workers": -1}, ValueError),
        ({"max_workers": 1001}, ValueError),
        ({"max_workers": 1.5}, TypeError),
        ({"max_workers": True}, TypeError),
        ({"around": 5}, TypeError),
        ({"watch": 1}, TypeError),
        ({"poll_interval": 0}, ValueError),
        ({"poll_interval": "1"}, TypeError),
        ({"queue_limit": 1}, ValueError),
        ({"stop_timeout": -1}, ValueError),
        ({"lease_margin": -1}, ValueError),
        ({"max_result_bytes": 0}, ValueError),
        ({"rust_interop": "yes"}, TypeError),
    ],
    ids=repr,
)
def test_wrong_argument_is_refused(
    nowhere: Tasks, arguments: Document, error: type[Exception]
) -> None:
    """
    ValueError or TypeError naming the argument, without any talk to a server.
    """
    with pytest.raises(error, match=next(iter(arguments))):
        Consumer(nowhere, echo, **arguments)


async def _coroutine(_params: Any) -> None:
    pass


def _generator(_params: Any) -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    "function",
    [
        5,
        None,
        "name",
        _coroutine,
        _generator,
        lambda: None,
        lambda a, b, c: None,
        lambda a, *, b: None,
    ],
)
def test_wrong_function_is_refused(nowhere: Tasks, function: Any) -> None:
    """
    What cannot be called with params, or would not run when called, is a TypeError.
    """
    with pytest.raises(TypeError):
        Consumer(nowhere, function)


def test_wrong_collection_is_refused(client: MongoClient[Document]) -> None:
    """
    A database or a client is no collection.
    """
    for wrong in (client, client.some, "tasks"):
        with pytest.raises(TypeError, match="collection"):
            Consumer(wrong, echo)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="collection"):
            Producer(wrong)  # type: ignore[arg-type]


def test_consumer_with_an_empty_router_is_refused_at_the_start(collection: Tasks) -> None:
    """
    ValueError; the consumer may be started once the router has functions.
    """
    router = Router()
    consumer = polling(collection, router)
    with pytest.raises(ValueError, match="router"):
        consumer.start()
    router.add("n", echo)
    with consumer:
        assert consumer.running


def test_start_and_stop_with_the_server_away(nowhere: Tasks) -> None:
    """
    The start returns at once; so does the stop, which names the threads whose calls go on.
    """
    consumer = Consumer(nowhere, echo)
    consumer.start()
    assert consumer.running
    assert not consumer.wait_started(0.2)
    health = consumer.health()
    assert (health.state, health.discovery, health.clock_offset) == ("running", "poll", None)
    began_s = time.monotonic()
    report = consumer.stop(0.3)
    assert time.monotonic() - began_s < 4
    assert f"ms-fetch:{consumer.worker_id}" in report.threads
    assert (report.finished, report.abandoned, consumer.state) == ((), (), "stopped")
    # Its calls end now; otherwise they would within ten seconds.
    nowhere.database.client.close()


def test_client_that_the_application_closes(server_uri: str, collection: Tasks) -> None:
    """
    The consumer is in trouble and says so; it stops cleanly.
    """
    client: MongoClient[Document]
    with MongoClient(server_uri) as client:
        consumer = polling(client[collection.database.name].tasks, echo)
        consumer.start()
        assert consumer.wait_started(10)
        assert consumer.health().ok
    wait_until(lambda: not consumer.health().ok, "the trouble is seen")
    fetch = consumer.health().components["fetch"]
    assert fetch.alive
    assert "InvalidOperation" in (fetch.last_error or "")
    assert consumer.stop(5) == StopReport()


def test_start_twice_is_refused(collection: Tasks) -> None:
    """
    RuntimeError, and the first start stands.
    """
    with polling(collection, echo) as consumer:
        with pytest.raises(RuntimeError, match="running"):
            consumer.start()
        assert consumer.running


def test_start_after_stop_is_refused(collection: Tasks) -> None:
    """
    A consumer is started once, also by `run_forever` and ``with``.
    """
    consumer = polling(collection, echo)
    with consumer:
        pass
    with pytest.raises(RuntimeError, match="stopped"):
        consumer.start()
    with pytest.raises(RuntimeError, match="stopped"):
        consumer.run_forever()
    assert not consumer.run_until_idle(1)
    assert not consumer.wait_started(1)


def test_context_manager_leaves_a_started_consumer_running(
    collection: Tasks, producer: Producer
) -> None:
    """
    ``with`` starts what is new, takes what runs, and stops either; an exception comes through.
    """
    consumer = polling(collection, echo)
    consumer.start()

    def use() -> None:
        with consumer as same:
            assert same is consumer
            producer.send("k", 1)
            assert producer.result("k", 10) == 1
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        use()
    assert consumer.state == "stopped"


def test_wait_started_tells_of_the_first_look(collection: Tasks) -> None:
    """
    False before the start; True once the database was looked at.
    """
    consumer = polling(collection, echo)
    assert not consumer.wait_started(0)
    with consumer:
        assert consumer.wait_started(10)
        assert consumer.wait_started(0)


def test_several_consumers_share_the_work(collection: Tasks, producer: Producer) -> None:
    """
    Each of many tasks is run once, by one of three consumers.
    """
    lock = threading.Lock()
    runs: list[tuple[str, str]] = []

    def function(_params: Any, context: TaskContext) -> None:
        with lock:
            runs.append((context.key, context.worker_id))

    producer.send_many([(f"k{n}", n) for n in range(120)])
    consumers = [polling(collection, function, max_workers=4) for _ in range(3)]
    for consumer in consumers:
        consumer.start()
    wait_until(lambda: producer.count(status="succeeded") == 120, "all tasks succeed", 60)
    for consumer in consumers:
        consumer.stop()
    assert sorted(key for key, _ in runs) == sorted(f"k{n}" for n in range(120))


# -- slots -------------------------------------------------------------------------------------


def test_no_workers_claim_nothing(collection: Tasks, producer: Producer) -> None:
    """
    With 0 slots tasks are found and wait; raised at run time, they run.
    """
    producer.send_many([(f"k{n}", n) for n in range(3)])
    with polling(collection, echo, max_workers=0) as consumer:
        wait_until(lambda: consumer.health().queue_due == 3, "the tasks are found")
        assert not consumer.run_until_idle(0.2)
        assert producer.count(status="waiting") == 3
        assert consumer.max_workers == 0
        consumer.max_workers = 2
        assert consumer.run_until_idle(10)
        assert producer.count(status="succeeded") == 3


def test_workers_set_to_none_at_run_time_claim_nothing_more(
    collection: Tasks, producer: Producer
) -> None:
    """
    Also what arrives right after the change stays unclaimed, though the consumer was idle before.
    """
    with polling(collection, echo) as consumer:
        assert consumer.run_until_idle(10)
        consumer.max_workers = 0
        producer.send_many([(f"k{n}", n) for n in range(3)])
        wait_until(
            lambda: consumer.health().queue_due + producer.count(status="succeeded") >= 3,
            "the tasks are found",
        )
        assert not consumer.run_until_idle(0.3)
        assert producer.count(status="waiting") == 3


def test_fewer_workers_at_run_time_end_nothing_and_claim_less(
    collection: Tasks, producer: Producer, go: threading.Event
) -> None:
    """
    Running tasks go on; new ones come only as the lower number allows.
    """
    lock = threading.Lock()
    running, most_later = 0, 0

    def function(params: Any) -> None:
        nonlocal running, most_later
        with lock:
            running += 1
            if params == "later":
                most_later = max(most_later, running)
        if params == "first":
            go.wait(30)
        threading.Event().wait(0.01)
        with lock:
            running -= 1

    producer.send_many([(f"a{n}", "first") for n in range(3)])
    with polling(collection, function, max_workers=3) as consumer:
        wait_until(lambda: running == 3, "three run")
        consumer.max_workers = 1
        producer.send_many([(f"b{n}", "later") for n in range(6)])
        wait_until(lambda: consumer.health().queue_due >= 6, "the others are found")
        assert (running, consumer.running_count) == (3, 3)
        go.set()
        assert consumer.run_until_idle(20)
    assert most_later == 1
    assert producer.count(status="succeeded") == 9


@pytest.mark.parametrize("value", [-1, 1001, 2.0, "3", None, True])
def test_wrong_number_of_workers_is_refused_at_run_time(collection: Tasks, value: Any) -> None:
    """
    ValueError or TypeError; the number stays.
    """
    consumer = Consumer(collection, echo, max_workers=5)
    with pytest.raises((ValueError, TypeError), match="max_workers"):
        consumer.max_workers = value
    assert consumer.max_workers == 5


# -- idleness ----------------------------------------------------------------------------------


def test_run_until_idle_waits_for_what_is_due_and_for_what_runs(
    collection: Tasks, producer: Producer
) -> None:
    """
    It starts the consumer, runs what is due (also what tasks send), and leaves what is due later.
    """

    def function(params: int) -> None:
        if params < 3:
            producer.send(f"child {params}", params + 1)

    producer.send("parent", 0)
    producer.send("later", 9, delay=1000)
    consumer = polling(collection, function)
    try:
        assert consumer.run_until_idle(20)
        assert consumer.running
        assert {t.key: t.status for t in producer.list()} == {
            "parent": "succeeded",
            "child 0": "succeeded",
            "child 1": "succeeded",
            "child 2": "succeeded",
            "later": "waiting",
        }
    finally:
        consumer.stop()


@pytest.mark.parametrize("rounds", [20])
def test_run_until_idle_right_after_a_send(
    collection: Tasks, producer: Producer, rounds: int
) -> None:
    """
    What was sent before the call is done after it, every time.
    """
    with polling(collection, echo, poll_interval=1) as consumer:
        for number in range(rounds):
            producer.send(f"k{number}", number)
            assert consumer.run_until_idle(20)
            assert producer.result(f"k{number}", 0) == number


def test_run_until_idle_with_a_clock_that_lags(collection: Tasks, producer: Producer) -> None:
    """
    What was just sent is due, though a consumer that had to wait for the server's time thinks not.
    """
    with Consumer(collection, lambda _: None) as consumer:
        assert consumer.run_until_idle(20)
        clock = consumer._store.clock
        lag_s = 0.7
        late = clock.now() - dt.timedelta(seconds=lag_s)
        clock.set(late, time.monotonic(), round_trip_s=lag_s)
        producer.send("k")
        assert consumer.run_until_idle(20)
        assert producer.result("k", 0) is None


def test_waits_beyond_every_timer(collection: Tasks, producer: Producer) -> None:
    """
    Tasks of the far future and time-outs of centuries overflow no timer of the system (B50).
    """
    last = dt.datetime(9999, 12, 30, tzinfo=dt.timezone.utc)
    producer.send("in ten years", delay=dt.timedelta(days=3650))
    producer.send("the last", run_at=last)
    with Consumer(collection, echo) as consumer, consumer.subscribe(TaskSucceeded) as events:
        assert consumer.wait_started(1e12)
        producer.send("now", 5)
        assert producer.result("now", 1e12) == 5
        assert events.wait_for(lambda event: event.key == "now", 1e12) is not None
        assert consumer.run_until_idle(1e12)
        health = consumer.health()
        assert health.ok
        assert health.queue_length == 0
    assert producer.count(status="waiting") == 2


def test_run_until_idle_gives_up_in_time(
    collection: Tasks, producer: Producer, go: threading.Event
) -> None:
    """
    False while a function runs on.
    """
    producer.send("k")
    with polling(collection, lambda _params: go.wait(30)) as consumer:
        assert not consumer.run_until_idle(0.2)
        assert not consumer.run_until_idle(0)
        go.set()
        assert consumer.run_until_idle(10)


# -- health ------------------------------------------------------------------------------------


def test_health_of_each_stage_of_life(
    collection: Tasks, producer: Producer, go: threading.Event
) -> None:
    """
    New, running with work, and stopped: a snapshot without any talk to the database.
    """
    consumer = Consumer(collection, lambda _params: go.wait(30), max_workers=3)
    assert consumer.health() == Health(
        state="new",
        discovery="poll",
        slots=3,
        slots_taken=0,
        running=0,
        oldest_attempt_age=None,
        stuck=(),
        queue_length=0,
        queue_due=0,
        quarantined=0,
        outcomes_waiting=0,
        last_event_age=None,
        stream_age=None,
        clock_offset=None,
        components={},
        crash=None,
    )
    assert not consumer.health().ok
    with consumer:
        wait_until(lambda: consumer.health().discovery == "stream", "the stream is open")
        producer.send_many([(f"k{n}", n) for n in range(5)])
        wait_until(lambda: consumer.running_count == 3, "three run")
        wait_until(lambda: consumer.health().queue_due >= 2, "two wait")
        health = consumer.health()
        assert health.ok
        assert (health.slots, health.slots_taken, health.running) == (3, 3, 3)
        assert health.queue_length >= health.queue_due >= 2
        ages = (health.oldest_attempt_age, health.last_event_age, health.stream_age)
        assert all(age is not None and age >= 0 for age in ages)
        assert health.clock_offset is not None
        assert set(health.components) == {"outcome", "heartbeat", "claim", "fetch", "watch"}
        assert {component.last_error for component in health.components.values()} == {None}
        go.set()
        assert consumer.run_until_idle(20)
        assert consumer.health().running == 0
    health = consumer.health()
    assert (health.state, health.ok) == ("stopped", False)
    assert not any(component.alive for component in health.components.values())
