"""
The consumer: its life, its slots, its events, and what it makes of attempts that go wrong.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.collection import Collection

from mscheduler_sync import (
    AttemptLost,
    AttemptReleased,
    ComponentCrashed,
    Consumer,
    ConsumerStateChanged,
    Event,
    Health,
    MarkSuccess,
    Producer,
    RetryLater,
    Router,
    StopReport,
    Subscription,
    Task,
    TaskContext,
    TaskExecuteResult,
    TaskFailed,
    TaskOccupyResult,
    WaitOccupy,
    WaitOccupyQueueEmpty,
)
from tests.support import Document, wait_until

Tasks = Collection[Document]


@pytest.fixture
def producer(collection: Tasks) -> Producer:
    """
    The producer of the test.
    """
    return Producer(collection)


@pytest.fixture
def nowhere() -> Iterator[Tasks]:
    """
    A collection of a server that is not there.
    """
    client: MongoClient[Document]
    with MongoClient("mongodb://127.0.0.1:1") as client:
        yield client.nowhere.tasks


@pytest.fixture
def go() -> Iterator[threading.Event]:
    """
    What functions of the test wait for; set at its end at the latest.
    """
    event = threading.Event()
    yield event
    event.set()


def polling(collection: Tasks, function: Any, **options: Any) -> Consumer:
    """
    Make a consumer that polls, which ends sooner than a change stream.
    """
    return Consumer(collection, function, **{"watch": False, "poll_interval": 0.02, **options})


def echo(params: Any) -> Any:
    return params


def task_of(producer: Producer, key: str = "k") -> Task:
    task = producer.get(key)
    assert task is not None
    return task


def unread(events: Subscription) -> list[Event]:
    """
    Return the events that are there already.
    """
    return list(iter(lambda: events.get(0), None))


def reasons(task: Task) -> list[str]:
    """
    Return the first line of each failure.
    """
    return [(a.fail_reason or "").splitlines()[0] for a in task.attempts if a.failed_at]


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
    with Consumer(collection, echo) as consumer, consumer.subscribe(MarkSuccess) as events:
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
        set_aside=0,
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


# -- stopping ----------------------------------------------------------------------------------


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


# -- events ------------------------------------------------------------------------------------


def test_events_of_a_success_come_in_order(collection: Tasks, producer: Producer) -> None:
    """
    TaskOccupyResult before MarkSuccess before TaskExecuteResult; states around them.
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
    assert isinstance(about_it[0], WaitOccupy)
    assert [event for event in about_it if not isinstance(event, WaitOccupy)] == [
        TaskOccupyResult(key="k", success=True),
        MarkSuccess(key="k"),
        TaskExecuteResult(key="k", success=True),
    ]
    assert any(isinstance(event, WaitOccupyQueueEmpty) for event in told)


def test_event_of_a_success_comes_after_it_is_stored(collection: Tasks, producer: Producer) -> None:
    """
    Whoever hears MarkSuccess can read the result.
    """
    with polling(collection, echo) as consumer:
        events = consumer.subscribe(MarkSuccess)
        producer.send_many([(f"k{n}", n) for n in range(20)])
        for _ in range(20):
            event = events.get(10)
            assert event is not None
            assert event.key is not None
            assert producer.result(event.key, 0) == int(event.key[1:])


def test_subscription_from_before_the_action_misses_nothing(
    collection: Tasks, producer: Producer
) -> None:
    """
    All events of many tasks are there, whenever they are read, for each of several subscriptions.
    """
    consumer = polling(collection, echo)
    subscriptions = [consumer.subscribe(TaskExecuteResult) for _ in range(3)]
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
    small, large = consumer.subscribe(MarkSuccess, buffer=3), consumer.subscribe(MarkSuccess)
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
    events = consumer.subscribe(MarkSuccess, TaskOccupyResult)
    with consumer:
        producer.send("k")
        producer.result("k", 10)
        wait_until(lambda: consumer.running_count == 0, "its events are sent")
    assert {type(event) for event in events} == {MarkSuccess, TaskOccupyResult}
    for wrong in (str, "MarkSuccess", MarkSuccess(key="k")):
        with pytest.raises(TypeError):
            consumer.subscribe(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="buffer"):
        consumer.subscribe(buffer=0)


def test_closed_subscription_gets_nothing_more(collection: Tasks, producer: Producer) -> None:
    """
    What was there can still be read; a subscription to a stopped consumer is over at once.
    """
    with polling(collection, echo) as consumer:
        events = consumer.subscribe(MarkSuccess)
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
            lambda event: isinstance(event, TaskExecuteResult) and event.key == "k",
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
        assert waiting.result() == TaskExecuteResult(key="k", success=True)
        with pytest.raises(ZeroDivisionError):
            failing.result()
        forever = pool.submit(consumer.wait_for_event, lambda _event: False)
        consumer.stop()
        assert forever.result(10) is None


def test_failure_is_told_with_the_time_of_the_next_try(
    collection: Tasks, producer: Producer
) -> None:
    """
    After the claim: WaitOccupy with the retry's time, then TaskExecuteResult without success.
    """

    def function(_params: Any) -> None:
        raise ValueError("no")

    producer.send("k", retry_delay=1000)
    with polling(collection, function) as consumer:
        events = consumer.subscribe(TaskExecuteResult, WaitOccupy, MarkSuccess)
        wait_until(lambda: task_of(producer).failures == 1, "it has failed")
        assert consumer.run_until_idle(10)
    told = [event for event in events if event.key == "k"][-2:]
    assert isinstance(told[0], WaitOccupy)
    retry_at = task_of(producer).attempts[0].retry_at
    assert retry_at is not None
    assert abs(told[0].next_occupy_time - retry_at) < dt.timedelta(seconds=5)
    assert told[1] == TaskExecuteResult(key="k", success=False)


# -- attempts that go wrong --------------------------------------------------------------------


@pytest.fixture
def no_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Heartbeats do not reach the server.
    """
    monkeypatch.setattr("mscheduler_sync._stages.beat.Beat.once", lambda _beat: True)


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
    events = [consumer.subscribe(AttemptLost, TaskExecuteResult) for consumer in consumers]
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
