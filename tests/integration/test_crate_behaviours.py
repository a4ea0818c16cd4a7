"""
The behaviours of the Rust crate mscheduler: its own tests, and what it left untested.

Where our rules differ on purpose the test says so: a retry delay is honoured, so that tests of
quick retries ask for none.
"""

from __future__ import annotations

import datetime as dt
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from bson.codec_options import CodecOptions, TypeCodec, TypeRegistry
from pymongo import MongoClient
from pymongo.collection import Collection

from mscheduler_sync import (
    AttemptEnded,
    AttemptLost,
    AttemptReleased,
    AttemptStarted,
    Consumer,
    Event,
    Producer,
    SendResult,
    Subscription,
    TaskContext,
    TaskFailed,
    TaskFound,
    TaskRunning,
    TaskSucceeded,
)
from tests.support import Document, fail_point, wait_until, without_id

Tasks = Collection[Document]
Start = Callable[..., Consumer]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def producer(collection: Tasks) -> Producer:
    """
    The producer of the test.
    """
    return Producer(collection)


@pytest.fixture
def start(collection: Tasks) -> Iterator[Start]:
    """
    Start a consumer that is stopped at the end; ``start(function, worker_id, **options)``.

    It polls, often, unless ``watch=True`` is given.
    """
    with ExitStack() as stack:

        def begin(function: Any, worker_id: str | None = None, **options: Any) -> Consumer:
            options = {"watch": False, "poll_interval": 0.05, **options}
            consumer = Consumer(collection, function, worker_id=worker_id, **options)
            stack.callback(consumer.stop, 5)
            consumer.start()
            return consumer

        yield begin


def attempts(producer: Producer, key: str) -> list[tuple[str, str]]:
    """
    Return worker and outcome of each attempt.
    """
    task = producer.get(key)
    assert task is not None
    return [
        (
            attempt.worker_id,
            "open" if attempt.is_open else "failed" if attempt.failed_at else "succeeded",
        )
        for attempt in task.attempts
    ]


def unread(events: Subscription) -> list[Event]:
    """
    Return the events that are there already.
    """
    return list(iter(lambda: events.get(0), None))


def echo(params: Any) -> Any:
    return params


def fail(_params: Any) -> None:
    raise ValueError("always")


class Gate:
    """
    A function that says when it runs, and ends when it is let go or asked to end.
    """

    def __init__(self) -> None:
        self.began = threading.Event()
        self.go = threading.Event()

    def __call__(self, params: Any, context: TaskContext) -> Any:
        self.began.set()
        wait_until(lambda: self.go.is_set() or context.cancelled.is_set(), "the gate is open", 30)
        if not self.go.is_set():
            context.check()
        return params


# -- the crate's own tests ---------------------------------------------------------------------


def test_worker_id_is_taken_from_the_arguments(collection: Tasks) -> None:
    """
    test_config.
    """
    assert Consumer(collection, echo, worker_id="111").worker_id == "111"


def test_send_of_a_new_task(collection: Tasks, producer: Producer) -> None:
    """
    test_send_new_task: it is inserted with its params.
    """
    assert producer.send("111", 42) == SendResult("111", True, False, "waiting")
    document = collection.find_one({"key": "111"})
    assert document is not None
    assert document["params"] == 42


def test_send_of_a_duplicate_task(producer: Producer) -> None:
    """
    test_send_duplicate_task: params stay unless they are updated; an explicit time is taken over.
    """

    def params() -> Any:
        task = producer.get("111")
        assert task is not None
        return task.params

    assert producer.send("111", 1).inserted
    assert producer.send("111", 2) == SendResult("111", False, False, "waiting")
    assert params() == 1
    assert producer.send("111", 2, if_exists="update") == SendResult("111", False, True, "waiting")
    assert params() == 2
    run_at = dt.datetime(2030, 4, 12, 23, 20, 50, 520_000, tzinfo=dt.timezone.utc)
    assert producer.send("111", 3, run_at=run_at) == SendResult("111", False, True, "waiting")
    task = producer.get("111")
    assert task is not None
    assert (task.params, task.start_at) == (2, run_at)


def test_consumer_runs_a_task(producer: Producer, start: Start) -> None:
    """
    test_consume_task: one attempt, by this worker, successful.
    """
    assert start(echo, "aaa", watch=True).wait_started(10)
    producer.send("111", 1)
    assert producer.result("111", 10) == 1
    assert attempts(producer, "111") == [("aaa", "succeeded")]


def test_params_and_result_may_differ_in_type(producer: Producer, start: Start) -> None:
    """
    test_consume_string_task: text in, a number out.
    """
    start(len, "aaa")
    producer.send("111", "four")
    assert producer.result("111", 10) == 4


def test_failing_task_is_tried_three_times(producer: Producer, start: Start) -> None:
    """
    test_consume_fail_task: with default options, but without the delay, exactly three failures.
    """
    consumer = start(fail, "aaa")
    producer.send("111", 1, retry_delay=0)
    with pytest.raises(TaskFailed):
        producer.result("111", 10)
    assert consumer.run_until_idle(10)
    assert attempts(producer, "111") == [("aaa", "failed")] * 3


def test_several_workers_run_one_task(producer: Producer, start: Start) -> None:
    """
    test_multiple_consume_task: each of two workers once.
    """
    producer.send("111", 1, concurrency=2)
    start(echo, "aaa")
    start(echo, "bbb")
    assert producer.result("111", 10, all=True) == [1, 1]
    assert sorted(attempts(producer, "111")) == [("aaa", "succeeded"), ("bbb", "succeeded")]


def test_one_of_several_workers_fails(producer: Producer, start: Start) -> None:
    """
    test_partial_success_multiple_consume_task: one success, one failure, which waits for its delay.
    """
    producer.send("111", 1, concurrency=2)
    both_run = threading.Barrier(2)

    def work(_params: Any, context: TaskContext) -> None:
        # A failure delays every worker: it comes when both have claimed.
        both_run.wait(20)
        if context.worker_id == "aaa":
            raise ValueError("one of two")

    start(work, "aaa")
    start(work, "bbb")
    expected = [("aaa", "failed"), ("bbb", "succeeded")]
    wait_until(lambda: sorted(attempts(producer, "111")) == expected, "one failed, one succeeded")
    task = producer.get("111")
    assert task is not None
    assert task.status == "waiting"
    failed = next(attempt for attempt in task.attempts if attempt.failed_at)
    assert failed.failed_at is not None
    assert task.due_at == failed.failed_at + dt.timedelta(seconds=10)


def test_task_for_a_certain_worker(producer: Producer, start: Start) -> None:
    """
    test_consume_task_worker_id: others leave it alone.
    """
    producer.send("111", 1, worker_ids=["bbb"])
    first = start(echo, "aaa")
    assert first.run_until_idle(10)
    assert attempts(producer, "111") == []
    second = start(echo, "bbb")
    assert second.worker_id == "bbb"
    assert producer.result("111", 10) == 1
    assert attempts(producer, "111") == [("bbb", "succeeded")]


def test_tasks_from_before_and_after_the_start(producer: Producer, start: Start) -> None:
    """
    test_consume_continuous: none is left over.
    """
    producer.send_many([("1", 1), ("2", 2)])
    start(echo, "aaa")
    assert [producer.result(key, 10) for key in ("1", "2")] == [1, 2]
    producer.send_many([("3", 3), ("4", 4)])
    assert [producer.result(key, 10) for key in ("3", "4")] == [3, 4]


def test_running_task_is_not_updated(producer: Producer, start: Start) -> None:
    """
    test_consume_no_update_tasks: refused while it runs; afterwards a plain send finds it finished.
    """
    gate = Gate()
    start(gate, "aaa")
    producer.send("111", 1)
    assert gate.began.wait(10)
    with pytest.raises(TaskRunning):
        producer.send("111", 2, if_exists="update", if_running="raise")
    gate.go.set()
    assert producer.result("111", 10) == 1
    assert producer.send("111", 3) == SendResult("111", False, False, "succeeded")


def test_heartbeats_keep_the_task_until_its_failure_frees_it(
    producer: Producer, start: Start
) -> None:
    """
    test_ping_task: the lease moves, the second worker waits; after the failure it tries.
    """
    go = threading.Event()
    began: list[str] = []

    def work(params: Any, context: TaskContext) -> None:
        if params == "warm-up":
            return
        began.append(context.worker_id)
        go.wait(30)
        if context.worker_id == "aaa":
            raise ValueError("after a while")

    # A worker that has failed waits longer than the others only if it knows of others.
    producer.send("warm-up", "warm-up", concurrency=2)
    earlier = start(work, "bbb")
    wait_until(lambda: attempts(producer, "warm-up") == [("bbb", "succeeded")], "bbb was here")
    earlier.stop()
    first = start(work, "aaa")
    assert producer.result("warm-up", 10) is None
    producer.send("111", lease=1, heartbeat=0.2, retry_delay=0)
    wait_until(lambda: began == ["aaa"], "aaa runs it")
    second = start(work, "bbb")

    def lease_end() -> dt.datetime:
        task = producer.get("111")
        assert task is not None
        assert task.attempts[0].lease_end is not None
        return task.attempts[0].lease_end

    at_first = lease_end()
    # Two heartbeats prove more than one: the first end of the lease has passed by then.
    wait_until(lambda: lease_end() > at_first + dt.timedelta(seconds=1.1), "the lease has moved")
    assert (first.running_count, second.running_count) == (1, 0)
    ended = first.subscribe(AttemptEnded)
    occupied = second.subscribe(AttemptStarted)
    go.set()
    assert without_id(ended.get(10)) == AttemptEnded(key="111", running_id="*", succeeded=False)
    assert without_id(occupied.get(10)) == AttemptStarted(key="111", running_id="*")
    producer.result("111", 10)
    assert attempts(producer, "111") == [("aaa", "failed"), ("bbb", "succeeded")]


def test_found_task_is_told(producer: Producer, start: Start) -> None:
    """
    test_find_task: TaskFound with the time of the next claim.
    """
    consumer = start(echo, watch=True)
    events = consumer.subscribe(TaskFound)
    producer.send("111")
    event = events.wait_for(lambda event: event.key == "111", 10)
    assert isinstance(event, TaskFound)
    task = producer.get("111")
    assert task is not None
    assert abs(event.claim_at - task.start_at) < dt.timedelta(seconds=5)


def test_claimed_task_is_told(producer: Producer, start: Start) -> None:
    """
    test_occupy_task: AttemptStarted.
    """
    events = start(echo, watch=True).subscribe(AttemptStarted)
    producer.send("111")
    assert without_id(events.get(10)) == AttemptStarted(key="111", running_id="*")


def test_of_three_workers_two_get_the_task(producer: Producer, start: Start) -> None:
    """
    test_concurrent_occupy_task: concurrency 2 is a limit.
    """
    gate = Gate()
    consumers = [start(gate, name, watch=True) for name in ("aaa", "bbb", "ccc")]
    streams = [consumer.subscribe(AttemptStarted) for consumer in consumers]
    producer.send("111", concurrency=2)
    wait_until(lambda: len(attempts(producer, "111")) == 2, "two workers have it")
    gate.go.set()
    producer.result("111", 10)
    for consumer in consumers:
        assert consumer.run_until_idle(10)
    assert sorted(len(unread(stream)) for stream in streams) == [0, 1, 1]
    assert len(attempts(producer, "111")) == 2


def test_task_from_before_the_start_is_claimed(producer: Producer, collection: Tasks) -> None:
    """
    test_occupy_existing_task.
    """
    producer.send("111")
    consumer = Consumer(collection, echo)
    events = consumer.subscribe(AttemptStarted)
    with consumer:
        assert without_id(events.get(10)) == AttemptStarted(key="111", running_id="*")


def test_task_of_a_killed_worker_is_claimed_once_its_lease_has_ended(
    producer: Producer, start: Start, collection: Tasks, server_uri: str
) -> None:
    """
    test_occupy_expired_task: the first worker is a process that is killed, heartbeats and all.
    """
    producer.send("111", lease=1.5, heartbeat=0.5)
    code = f"""
        import time
        from pymongo import MongoClient
        from mscheduler_sync import Consumer

        def work(params):
            print("running", flush=True)
            time.sleep(100)

        client = MongoClient({server_uri!r})
        collection = client[{collection.database.name!r}][{collection.name!r}]
        Consumer(collection, work, worker_id="aaa").run_forever()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
        finally:
            os.kill(process.pid, signal.SIGKILL)
    start(echo, "bbb")
    producer.result("111", 20)
    task = producer.get("111")
    assert task is not None
    first, second = task.attempts
    assert (first.worker_id, second.worker_id) == ("aaa", "bbb")
    assert (first.fail_reason or "").startswith("LeaseExpired")
    assert first.lease_end is not None
    assert second.claimed_at is not None
    assert second.claimed_at >= first.lease_end


def test_each_try_is_told(producer: Producer, start: Start) -> None:
    """
    test_max_retry_count: three claims, each after a TaskFound; then no more.
    """
    consumer = start(fail)
    events = consumer.subscribe(TaskFound, AttemptStarted, AttemptEnded)
    producer.send("111", retry_delay=0)
    seen: list[Event] = []
    while [type(event) for event in seen].count(AttemptEnded) < 3:
        event = events.get(10)
        assert event is not None
        seen.append(event)
    assert consumer.run_until_idle(10)
    seen += unread(events)
    kinds = [type(event) for event in seen]
    assert kinds.count(AttemptStarted) == kinds.count(AttemptEnded) == 3
    waits = [n for n, kind in enumerate(kinds) if kind is TaskFound]
    claims = [n for n, kind in enumerate(kinds) if kind is AttemptStarted]
    for number, claim in enumerate(claims):
        assert len([wait for wait in waits if wait < claim]) > number
    assert {event.key for event in seen} == {"111"}


def test_success_is_told(producer: Producer, start: Start) -> None:
    """
    test_success_task: TaskSucceeded.
    """
    events = start(echo).subscribe(TaskSucceeded)
    producer.send("111")
    assert events.get(10) == TaskSucceeded(key="111")


# -- what the crate left untested --------------------------------------------------------------


def test_shutdown_gives_a_running_task_back_unused(producer: Producer, start: Start) -> None:
    """
    The function is asked to end; its attempt is released, not failed, and another worker goes on.
    """
    gate = Gate()
    first = start(gate, "aaa")
    producer.send("111", 1, max_attempts=1)
    assert gate.began.wait(10)
    report = first.stop(3)
    assert (report.released, report.abandoned, report.finished) == (("111",), (), ())
    assert attempts(producer, "111") == []
    numbers: list[int] = []

    def work(_params: Any, context: TaskContext) -> None:
        numbers.append(context.attempt)

    start(work, "bbb")
    producer.result("111", 10)
    assert numbers == [1]


def test_shutdown_lets_running_tasks_finish_and_leaves_waiting_ones(
    producer: Producer, start: Start
) -> None:
    """
    What runs is finished and stored; what waits stays for others.
    """
    gate = Gate()
    consumer = start(gate, max_workers=1)
    producer.send_many([("running", 1), ("waiting", 1)])
    assert gate.began.wait(10)
    (running,) = (key for key in ("running", "waiting") if attempts(producer, key))
    threading.Timer(0.2, gate.go.set).start()
    report = consumer.stop(10)
    assert report.finished == (running,)
    statuses = sorted(task.status for task in producer.list())
    assert statuses == ["succeeded", "waiting"]


def test_capacity_is_never_exceeded(producer: Producer, start: Start) -> None:
    """
    No more than max_workers at once, and nothing is dropped for want of room.
    """
    lock = threading.Lock()
    running, most = 0, 0

    def work(_params: Any) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.02)
        with lock:
            running -= 1

    producer.send_many([(f"k{n}", n) for n in range(20)])
    consumer = start(work, max_workers=3)
    assert consumer.run_until_idle(30)
    assert producer.count(status="succeeded") == 20
    assert most == 3


def test_finished_task_is_updated_although_running_ones_are_not(
    producer: Producer, start: Start
) -> None:
    """
    not_update_running means what it says: a finished task is changed, and may be run again.
    """
    consumer = start(echo)
    producer.send("111", 1)
    producer.result("111", 10)
    consumer.stop()
    result = producer.send("111", 2, if_exists="rerun", if_running="raise")
    assert result == SendResult("111", False, True, "waiting")
    start(echo)
    assert producer.result("111", 10) == 2


def test_time_to_run_is_honoured(producer: Producer, start: Start) -> None:
    """
    A delayed task is found early and not claimed before its time.
    """
    consumer = start(echo)
    assert consumer.wait_started(10)
    producer.send("111", 1, delay=0.7)
    assert consumer.run_until_idle(10)
    assert attempts(producer, "111") == []
    producer.result("111", 10)
    task = producer.get("111")
    assert task is not None
    claimed_at = task.attempts[0].claimed_at
    assert claimed_at is not None
    assert claimed_at >= task.start_at


def test_lost_lease_ends_the_attempt_without_a_trace(
    producer: Producer, start: Start, collection: Tasks
) -> None:
    """
    Another worker's attempt in its place: the function is told, its result is not stored.
    """
    told = threading.Event()

    def work(_params: Any, context: TaskContext) -> str:
        if context.cancelled.wait(20) and context.reason == "lease_lost":
            told.set()
        return "late"

    consumer = start(work, "aaa")
    events = consumer.subscribe(AttemptLost, AttemptReleased, AttemptEnded)
    producer.send("111", lease=2, heartbeat=0.1)
    wait_until(lambda: attempts(producer, "111"), "it runs")
    theirs = {
        "running_id": "theirs",
        "worker_id": "bbb",
        "ping_expire_time": dt.datetime(2100, 1, 1, tzinfo=dt.timezone.utc),
        "success_time": None,
        "fail_time": None,
    }
    collection.update_one({}, {"$set": {"task_state.worker_states": [theirs]}})
    assert told.wait(10)
    assert isinstance(events.get(10), AttemptLost)
    assert attempts(producer, "111") == [("bbb", "open")]


def test_change_stream_survives_a_change_of_the_schema(
    producer: Producer, start: Start, client: MongoClient[Document], collection: Tasks
) -> None:
    """
    The embedded server cannot resume a stream behind an index build (code 13): it is opened anew.
    """
    producer.send("before", 0)
    consumer = start(echo, watch=True, poll_interval=3600)
    assert producer.result("before", 20) == 0
    wait_until(lambda: consumer.health().discovery == "stream", "the stream is open")
    with fail_point(client, ["getMore"], {"times": 1}, errorCode=43):
        collection.create_index("params")
        # The call under way returns, and the next one meets the fail point.
        threading.Event().wait(1.2)
    producer.send("after", 1)
    # Without the stream it would take until the next look, about 30 s later.
    assert producer.result("after", 20) == 1
    assert consumer.health().discovery == "stream"


@pytest.mark.parametrize("code", [286, 43, 136])
def test_change_stream_is_opened_again(
    producer: Producer, start: Start, client: MongoClient[Document], code: int
) -> None:
    """
    After an error of the stream its work goes on; with long pauses between looks only it is quick.
    """
    producer.send("before", 0)
    consumer = start(echo, watch=True, poll_interval=3600)
    wait_until(lambda: consumer.health().discovery == "stream", "the stream is open")
    assert producer.result("before", 20) == 0
    with fail_point(client, ["getMore"], {"times": 1}, errorCode=code):
        producer.send("during", 1)
        assert producer.result("during", 20) == 1
    wait_until(lambda: consumer.health().discovery == "stream", "the stream is open again")
    producer.send("after", 2)
    assert producer.result("after", 20) == 2


def test_higher_priority_comes_first(producer: Producer, start: Start) -> None:
    """
    Among due tasks, the order is that of priority, then of due time.
    """
    order: list[str] = []

    def work(_params: Any, context: TaskContext) -> None:
        order.append(context.key)

    producer.send_many(
        [
            ("low", 0),
            ("high", 0, {"priority": 9}),
            ("middle, later", 0, {"priority": 5}),
            (
                "middle, earlier",
                0,
                {"priority": 5, "run_at": dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc)},
            ),
        ]
    )
    consumer = start(work, max_workers=0)
    wait_until(lambda: consumer.health().queue_due == 4, "all are found")
    consumer.max_workers = 1
    assert consumer.run_until_idle(10)
    assert order == ["high", "middle, earlier", "middle, later", "low"]


def test_tasks_behind_many_that_cannot_run_are_found(producer: Producer, start: Start) -> None:
    """
    More than ten pending tasks of others do not hide one's own.
    """
    producer.send_many([(f"a{n}", n) for n in range(30)], worker_ids=["elsewhere"])
    producer.send_many([(f"b{n}", n) for n in range(15)])
    consumer = start(echo, "aaa")
    assert consumer.run_until_idle(20)
    assert producer.count(status="succeeded") == 15


def test_success_limit_is_the_concurrency(producer: Producer, start: Start) -> None:
    """
    Five workers, five successes: not hidden after the third, and not more than five.
    """
    producer.send("111", 1, concurrency=5)
    consumers = [start(echo, f"w{n}") for n in range(6)]
    assert producer.result("111", 20, all=True) == [1] * 5
    for consumer in consumers:
        assert consumer.run_until_idle(10)
    workers = [worker for worker, _ in attempts(producer, "111")]
    assert len(workers) == len(set(workers)) == 5


def test_result_is_stored(producer: Producer, start: Start, collection: Tasks) -> None:
    """
    What the function returned stands in the attempt, under the crate's name.
    """
    start(echo)
    producer.send("111", {"a": [1, None, "x"]})
    producer.result("111", 10)
    document = collection.find_one()
    assert document is not None
    assert document["task_state"]["worker_states"][0]["returns"] == {"a": [1, None, "x"]}


class _Picky(TypeCodec):
    """
    A codec of the application that cannot read some stored values.
    """

    python_type = complex
    bson_type = bytes

    def transform_python(self, value: Any) -> bytes:
        return str(value).encode()

    def transform_bson(self, value: Any) -> complex:
        return complex(value.decode())


def test_params_of_a_wrong_type_are_a_failure_of_the_task(
    producer: Producer, collection: Tasks
) -> None:
    """
    Params that cannot be decoded fail their task with a reason, and others run.
    """
    producer.send("bad", b"not a number", max_attempts=1)
    producer.send("good", b"1+2j")
    options: CodecOptions[Document] = CodecOptions(type_registry=TypeRegistry([_Picky()]))
    seen: list[complex] = []
    picky = collection.with_options(codec_options=options)
    with Consumer(picky, seen.append, watch=False, poll_interval=0.1):
        assert producer.result("good", 10) is None
        with pytest.raises(TaskFailed) as caught:
            producer.result("bad", 10)
    assert "params cannot be decoded" in (caught.value.reason or "")
    assert seen == [1 + 2j]


def test_worker_id_is_never_empty(collection: Tasks) -> None:
    """
    Given ones must name somebody; made ones differ.
    """
    with pytest.raises(ValueError, match="worker_id"):
        Consumer(collection, echo, worker_id="")
    made = {Consumer(collection, echo).worker_id for _ in range(3)}
    assert len(made) == 3
