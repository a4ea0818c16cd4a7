"""
What threads can do to a consumer: never return, hold the GIL, fail to start, call it all at once.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo.collection import Collection
from pymongo.database import Database

from mscheduler_sync import (
    AttemptEnded,
    AttemptReleased,
    Consumer,
    Event,
    Producer,
    StopReport,
    TaskContext,
    TaskNotFound,
    TaskSucceeded,
)
from tests.support import Document, wait_until, without_id
from tests.support.invariants import Invariants, Witness, status_of, wait_status
from tests.support.scene import LogRecords
from tests.support.scripts import Children, children

#: Minutes of waiting for leases and servers: run with the stress tests.

Tasks = Collection[Document]


@pytest.fixture
def start(tmp_path: Path, server_uri: str, database: Database[Document]) -> Iterator[Children]:
    """
    Starts programs on the test's own database.
    """
    with children(tmp_path, server_uri, database.name) as starter:
        yield starter


@pytest.fixture
def witness(database: Database[Document]) -> Witness:
    """
    Where functions write that they run.
    """
    return Witness(database.witness)


@pytest.fixture
def producer(collection: Tasks) -> Producer:
    """
    The producer of the test's own collection.
    """
    return Producer(collection)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """
    What functions wait for that "never" return. Opened at the end, so that their threads end too.
    """
    gate = threading.Event()
    yield gate
    gate.set()


def executor_threads(consumer: Consumer) -> list[threading.Thread]:
    prefix = f"ms-exec:{consumer.worker_id}_"
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]


# -- functions that do not return ------------------------------------------------------------------


def test_a_function_that_holds_the_gil_never_makes_two_results(
    start: Children, producer: Producer, witness: Witness, collection: Tasks
) -> None:
    """
    Its heartbeats starve and its task is taken over: its late result is refused and it is told so.
    """
    producer.send("one", {"seconds": 4.5}, lease=1.5, heartbeat=0.3, retry_delay=0)
    child = start.start("greedy")
    child.wait_line("began")

    def work(_: object, context: TaskContext) -> str:
        with witness.running(context):
            return "successor"

    with Consumer(collection, work, worker_id="successor") as consumer:
        assert producer.result("one", 30) == "successor"
        assert child.said("event") == "AttemptLost"
        assert child.wait_end() == 0
        assert consumer.run_until_idle(10)
    assert child.output.count('log "lease_lost"') >= 1
    assert producer.result("one", 0) == "successor"
    found = wait_status(collection, "one", "succeeded")
    first, second = found["task_state"]["worker_states"]
    assert [first["worker_id"], second["worker_id"]] == ["greedy", "successor"]
    assert first["fail_reason"].startswith("LeaseExpired")
    assert first["success_time"] is None
    Invariants(collection, witness).check()


def test_a_function_that_holds_the_gil_keeps_its_result_if_nobody_took_over(
    start: Children, producer: Producer, witness: Witness, collection: Tasks
) -> None:
    """
    The lease has lapsed three times over, but no one was there: finished work is not thrown away.
    """
    producer.send("one", {"seconds": 4.5}, lease=1.5, heartbeat=0.3)
    child = start.start("greedy")
    assert child.said("event") == "AttemptEnded"
    assert child.wait_end() == 0
    assert producer.result("one", 0).startswith("greedy ")
    assert witness.count("one") == 1
    Invariants(collection, witness).check()


def test_slots_full_of_functions_that_wait_for_ever_are_seen_and_freed(
    producer: Producer, collection: Tasks, gate: threading.Event
) -> None:
    """
    With ``timeout=`` as many functions as there are slots may hang, and good tasks still run.
    """
    reader, writer = socket.socketpair()
    with reader, writer:

        def work(params: Any) -> str:
            if params == "hang":
                reader.recv(1)
            return "done"

        hanging = [f"hang-{n}" for n in range(4)]
        with Consumer(collection, work, max_workers=4, stop_timeout=1) as consumer:
            for key in hanging:
                producer.send(key, "hang", timeout=0.3, lease=1, heartbeat=0.2, max_attempts=1)
            for key in hanging:
                wait_status(collection, key, "failed")
            assert sorted(consumer.health().stuck) == hanging
            producer.send_many([(f"good-{n}", None) for n in range(20)])
            assert [producer.result(f"good-{n}", 20) for n in range(20)] == ["done"] * 20
            assert len(executor_threads(consumer)) <= 12
            writer.send(b"....")
            wait_until(lambda: not consumer.health().stuck, "they have returned")
            assert consumer.health().slots_taken == 0
        assert {status_of(collection, key) for key in hanging} == {"failed"}


def test_functions_that_wait_for_ever_without_a_timeout_can_be_seen(
    producer: Producer, collection: Tasks, gate: threading.Event
) -> None:
    """
    Nothing ends them, but health shows full slots, the age of the oldest, and what is due behind.
    """
    with Consumer(collection, lambda _: gate.wait(60), max_workers=2) as consumer:
        for number in range(5):
            producer.send(str(number))
        wait_until(lambda: consumer.health().running == 2, "two run")
        # A pass that read before the claims may have queued the running two once more.
        wait_until(lambda: consumer.health().queue_due >= 3, "three tasks wait")
        health = consumer.health()
        assert (health.slots, health.slots_taken, health.stuck) == (2, 2, ())
        wait_until(lambda: (consumer.health().oldest_attempt_age or 0) > 0.2, "they grow old")
        gate.set()
        assert consumer.run_until_idle(20)


@pytest.mark.parametrize("where", ["sleep", "socket"])
def test_cancelling_a_blocked_function_is_a_request_only(
    producer: Producer, collection: Tasks, where: str, gate: threading.Event
) -> None:
    """
    A thread cannot be stopped: the stop names it, is in time, and the task is free after its lease.
    """
    reader, writer = socket.socketpair()
    began = threading.Event()

    def work(_: object) -> None:
        began.set()
        if where == "sleep":
            gate.wait(60)  # as time.sleep would, but the test can end it
        else:
            reader.recv(1)

    with reader, writer:
        consumer = Consumer(collection, work)
        consumer.start()
        producer.send("cancelled", lease=2, heartbeat=0.3)
        assert began.wait(20)
        assert producer.cancel("cancelled")
        producer.send("kept", lease=2, heartbeat=0.3)
        wait_until(lambda: consumer.running_count == 2, "both run")
        began_s = time.monotonic()
        report = consumer.stop(2)
        assert time.monotonic() - began_s < 2 + 1 + 1  # its second, and a slow machine
        assert sorted(report.abandoned) == ["cancelled", "kept"]
        assert len(report.threads) == 2
        with Consumer(collection, lambda _: "elsewhere") as other:
            assert producer.result("kept", 20) == "elsewhere"
            wait_status(collection, "cancelled", "cancelled")
            assert other.run_until_idle(10)
        gate.set()
        writer.send(b"..")
        wait_until(lambda: not executor_threads(consumer), "the threads end")
    assert producer.result("kept", 0) == "elsewhere"
    assert status_of(collection, "cancelled") == "cancelled"


def test_a_function_left_behind_leaves_no_heartbeat_thread(
    producer: Producer, collection: Tasks, gate: threading.Event
) -> None:
    """
    A heartbeat that is far away (here 20 s) keeps no thread: only the function's own is named.
    """
    consumer = Consumer(collection, lambda _: gate.wait(60))
    consumer.start()
    producer.send("one")
    wait_until(lambda: consumer.running_count == 1, "it runs")
    # A change by somebody else begins the heartbeats at once.
    producer.update("one", tags=["changed"])
    beaters = f"ms-heartbeat:{consumer.worker_id}_"
    wait_until(
        lambda: any(thread.name.startswith(beaters) for thread in threading.enumerate()),
        "a thread sends heartbeats",
    )
    report = consumer.stop(0.5)
    assert report.abandoned == ("one",)
    wait_until(
        lambda: not any(thread.name.startswith(beaters) for thread in threading.enumerate()),
        "the thread of its heartbeats has ended",
    )
    gate.set()
    wait_until(lambda: not executor_threads(consumer), "the function's thread ends")


# -- functions and heartbeats that raise -----------------------------------------------------------


def test_no_exception_costs_a_thread_or_a_slot(producer: Producer, collection: Tasks) -> None:
    """
    SystemExit and the like end an attempt only: no thread is lost, none is left, every slot works.
    """
    kinds: list[type[BaseException]] = [
        SystemExit,
        KeyboardInterrupt,
        GeneratorExit,
        type("Rare", (BaseException,), {}),
        StopIteration,
        MemoryError,
        RecursionError,
    ]

    def work(params: Any) -> None:
        time.sleep(0.05)  # longer than a heartbeat interval: each attempt has a thread for them
        if params is not None:
            raise kinds[params % len(kinds)]

    options: dict[str, Any] = {"max_attempts": 1, "lease": 1, "heartbeat": 0.02}
    with Consumer(collection, work, max_workers=4) as consumer:
        producer.send_many([(f"bad-{n}", n) for n in range(70)], **options)
        assert consumer.run_until_idle(60)
        assert producer.count(status="failed") == 70
        assert consumer.health().slots_taken == 0
        assert len(executor_threads(consumer)) <= 8
        producer.send_many([(f"good-{n}", None) for n in range(40)], **options)
        assert consumer.run_until_idle(60)
        assert producer.count(status="succeeded") == 40
        # Some more than slots: a thread of heartbeats, or of a function, may be a moment behind.
        senders = [t.name for t in threading.enumerate() if t.name.startswith("ms-heartbeat")]
        assert len(senders) <= 20, senders


def test_a_heartbeat_that_fails_for_a_bug_gives_up_its_attempt_alone(
    producer: Producer,
    collection: Tasks,
    monkeypatch: pytest.MonkeyPatch,
    gate: threading.Event,
) -> None:
    """
    The function whose heartbeat has crashed is told, loudly; the heartbeats of others go on.
    """
    from mscheduler_sync._stages.heartbeat import Heartbeat

    sent: dict[str, int] = {}
    real = Heartbeat.send

    def send(heartbeat: Heartbeat) -> bool:
        key = heartbeat.attempt.key
        sent[key] = sent.get(key, 0) + 1
        if key == "broken":
            raise TypeError("a bug")
        return real(heartbeat)

    monkeypatch.setattr(Heartbeat, "send", send)
    reasons: dict[str, Any] = {}

    def work(_: object, context: TaskContext) -> None:
        while not gate.is_set() and not context.cancelled.wait(0.01):
            pass
        reasons[context.key] = context.reason

    records = LogRecords()
    with records.listening(), Consumer(collection, work) as consumer:
        producer.send("broken", lease=2, heartbeat=0.1)
        producer.send("healthy", lease=2, heartbeat=0.1)
        wait_until(lambda: "broken" in reasons, "the function is told")
        wait_until(lambda: sent.get("healthy", 0) > 5, "the other one goes on")
        assert reasons == {"broken": "lease_lost"}
        assert sent["broken"] == 1
        gate.set()
        assert consumer.run_until_idle(20)
    assert [record.exc_info is not None for record in records.events("heartbeat_crashed")] == [True]
    assert reasons["healthy"] is None
    assert status_of(collection, "healthy") == "succeeded"


# -- threads that cannot be started ----------------------------------------------------------------


class ThreadLimit:
    """
    Lets only so many executor threads live, as a limit of the system does.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
        self.most = most
        self.refused = 0
        real = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            living = [t for t in threading.enumerate() if t.name.startswith("ms-exec")]
            if thread.name.startswith("ms-exec") and len(living) >= self.most:
                self.refused += 1
                raise RuntimeError("can't start new thread")
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.parametrize("most", [0, 2])
def test_a_system_that_makes_no_more_threads(
    producer: Producer,
    witness: Witness,
    collection: Tasks,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
) -> None:
    """
    What cannot be started is given back, is not run by a later thread, and is not claimed at once.
    """
    limit = ThreadLimit(monkeypatch, most)

    def work(_: object, context: TaskContext) -> None:
        with witness.running(context):
            time.sleep(0.5)

    producer.send_many([(str(n), None) for n in range(12)])
    with Consumer(collection, work, max_workers=6) as consumer:
        with consumer.subscribe(AttemptReleased) as released:
            wait_until(lambda: limit.refused >= (1 if most else 3), "threads are refused", 30)
            limit.most = 1000
            assert consumer.run_until_idle(60)
            assert consumer.health().slots_taken == 0
            count = 0
            while released.get(0) is not None:
                count += 1
        # A pause stands between the tries.
        assert count <= 12 * limit.refused
        assert limit.refused < 30
    assert [len(witness.runs(str(n))) for n in range(12)] == [1] * 12
    assert producer.count(status="succeeded") == 12
    Invariants(collection, witness).check()


# -- logging ---------------------------------------------------------------------------------------


class Raises(logging.Handler):
    """
    A handler as a closed stream makes one.
    """

    def emit(self, record: logging.LogRecord) -> None:
        raise ValueError("I/O operation on closed file")


def test_a_log_handler_that_raises_hurts_nobody(producer: Producer, collection: Tasks) -> None:
    """
    With every record raising in its handler the consumer works, stops, and leaves no thread.
    """

    def work(params: Any) -> str:
        if params == "raise":
            raise KeyError(params)
        return "done"

    handler, log = Raises(), logging.getLogger("mscheduler_sync")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        producer.send("bad", "raise", max_attempts=1)
        producer.send("good", None, lease=1, heartbeat=0.1)
        consumer = Consumer(collection, work)
        consumer.start()
        assert producer.result("good", 20) == "done"
        wait_status(collection, "bad", "failed")
        assert consumer.run_until_idle(20)
        assert consumer.health().ok
        assert consumer.running_count == 0
        assert consumer.stop() == StopReport()
        assert consumer.state == "stopped"
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


# -- calls from everywhere -------------------------------------------------------------------------


def test_everybody_may_stop_at_once(producer: Producer, collection: Tasks) -> None:
    """
    Twenty threads that stop the same consumer all get the same report, once it has stopped.
    """
    producer.send_many([(str(n), None) for n in range(4)])
    begun = threading.Semaphore(0)

    def work(_: object) -> None:
        begun.release()
        time.sleep(0.3)

    consumer = Consumer(collection, work, max_workers=4)
    consumer.start()
    for _ in range(4):
        assert begun.acquire(timeout=20)
    barrier = threading.Barrier(20)
    reports: list[tuple[StopReport, str]] = []

    def stop() -> None:
        barrier.wait(20)
        report = consumer.stop()
        reports.append((report, consumer.state))

    threads = [threading.Thread(target=stop) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(reports) == 20
    assert {state for _, state in reports} == {"stopped"}
    assert len({report for report, _ in reports}) == 1
    assert sorted(reports[0][0].finished) == ["0", "1", "2", "3"]


def test_a_start_that_races_with_a_stop(collection: Tasks) -> None:
    """
    Whoever comes first: afterwards the consumer has stopped, and none of its threads lives.
    """
    for _ in range(30):
        consumer = Consumer(collection, lambda _: None, watch=False)
        barrier = threading.Barrier(2)

        def start(consumer: Consumer = consumer, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(10)
            # A stop that came first leaves nothing to start.
            with contextlib.suppress(RuntimeError):
                consumer.start()

        thread = threading.Thread(target=start)
        thread.start()
        barrier.wait(10)
        consumer.stop()
        thread.join(20)
        assert consumer.state == "stopped"
        mine = f":{consumer.worker_id}"
        wait_until(
            lambda: not [t for t in threading.enumerate() if mine in t.name],  # noqa: B023
            "its threads end",
        )


def test_a_task_of_one_consumer_may_stop_another(producer: Producer, collection: Tasks) -> None:
    """
    Only a consumer's own task cannot wait for its stop, however alike the worker ids are.
    """
    one = Consumer(collection, lambda _: None, worker_id="w1")
    one.start()
    with Consumer(collection, lambda _: repr(one.stop()), worker_id="w10"):
        producer.send("stop", worker_ids=["w10"])
        assert producer.result("stop", 20) == repr(StopReport())
        assert one.state == "stopped"


# -- absurd time-outs ------------------------------------------------------------------------------

WRONG = [-1, -0.001, float("nan"), float("-inf"), "1", True, [], object()]
#: Longer than any lock can wait for, or than a float can hold.
ENDLESS = [10**9, 1e18, float("inf"), 10**400, 10.0**300]


def waits(consumer: Consumer, producer: Producer) -> dict[str, Callable[[Any], object]]:
    """
    Every call that waits, by name; each is answered at once.
    """

    def get(timeout: Any) -> object:
        with consumer.subscribe() as events:
            producer.send(None)
            return events.get(timeout)

    def wait_for_event(timeout: Any) -> object:
        threading.Timer(0.05, producer.send, [None]).start()
        return consumer.wait_for_event(lambda event: isinstance(event, TaskSucceeded), timeout)

    return {
        "wait_started": consumer.wait_started,
        "get": get,
        "wait_for_event": wait_for_event,
        "result": lambda timeout: producer.result("done", timeout) == "value",
        "run_until_idle": consumer.run_until_idle,
    }


@pytest.fixture
def serving(producer: Producer, collection: Tasks) -> Iterator[Consumer]:
    """
    A consumer that has done the task "done".
    """
    with Consumer(collection, lambda _: "value") as consumer:
        producer.send("done")
        assert consumer.run_until_idle(20)
        yield consumer


@pytest.mark.parametrize("name", ["wait_started", "get", "wait_for_event", "result"])
def test_endless_waits_end_when_there_is_an_answer(
    producer: Producer, serving: Consumer, name: str
) -> None:
    """
    However long a wait is allowed to be, it ends with its answer, and no clock overflows.
    """
    call = waits(serving, producer)[name]
    assert [bool(call(timeout)) for timeout in ENDLESS] == [True] * len(ENDLESS)


def test_run_until_idle_may_wait_for_ever(producer: Producer, serving: Consumer) -> None:
    """
    The same for run_until_idle.
    """
    assert [serving.run_until_idle(timeout) for timeout in ENDLESS] == [True] * len(ENDLESS)


@pytest.mark.parametrize(
    "name", ["wait_started", "get", "wait_for_event", "result", "run_until_idle"]
)
def test_wrong_timeouts_are_refused(producer: Producer, serving: Consumer, name: str) -> None:
    """
    Negative, not a number, no number at all: refused where they are given, and nothing is broken.
    """
    call = waits(serving, producer)[name]
    for timeout in WRONG:
        with pytest.raises((ValueError, TypeError), match="timeout"):
            call(timeout)
    with pytest.raises((ValueError, TypeError), match="timeout"):
        serving.stop(float("nan"))
    assert serving.running


@pytest.mark.parametrize(
    "timeout",
    [-1, float("nan"), float("inf"), 10**400, "5", True],
    ids=["negative", "nan", "inf", "huge", "text", "bool"],
)
def test_a_wrong_stop_timeout_leaves_the_consumer_running(serving: Consumer, timeout: Any) -> None:
    """
    A stop is not begun with a time-out that makes no sense; the next one is an ordinary one.
    """
    with pytest.raises((ValueError, TypeError), match="timeout"):
        serving.stop(timeout)
    assert serving.running
    assert serving.stop(20) == StopReport()


def test_a_system_whose_waits_are_short(
    producer: Producer, collection: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Where one wait may last only 4294 s (Windows), far tasks and long time-outs are no trouble.
    """
    limit_s = 4294.0
    real_wait, real_join = threading.Condition.wait, threading.Thread.join

    def check(timeout: float | None) -> None:
        if timeout is not None and timeout > limit_s:
            raise OverflowError("timeout value is too large")

    def wait(self: threading.Condition, timeout: float | None = None) -> bool:
        check(timeout)
        return real_wait(self, timeout)

    def join(self: threading.Thread, timeout: float | None = None) -> None:
        check(timeout)
        real_join(self, timeout)

    monkeypatch.setattr(threading, "TIMEOUT_MAX", limit_s)
    monkeypatch.setattr(threading.Condition, "wait", wait)
    monkeypatch.setattr(threading.Thread, "join", join)
    producer.send("far", delay=100 * 86_400)
    producer.send("long", "hold", lease=20 * 86_400, heartbeat=10 * 86_400)
    producer.send("late", timeout=200 * 86_400)
    begun, gate = threading.Event(), threading.Event()

    def work(params: Any) -> str:
        if params == "hold":
            begun.set()
            gate.wait(30)
        return "done"

    with Consumer(collection, work, stop_timeout=80_000) as consumer:
        assert begun.wait(20)
        assert producer.result("late", 10**9) == "done"
        assert consumer.wait_started(10**9)
        health = consumer.health()
        assert [name for name, component in health.components.items() if component.last_error] == []
        gate.set()
        assert consumer.stop(9 * 86_400).abandoned == ()
    assert status_of(collection, "long") == "succeeded"
    assert status_of(collection, "far") == "waiting"


# -- waiting for events ----------------------------------------------------------------------------


def test_two_hundred_wait_and_all_are_woken(producer: Producer, serving: Consumer) -> None:
    """
    Two hundred threads that wait for one event all get it; none is left waiting or subscribed.
    """
    got: list[Event | None] = []
    threads = [
        threading.Thread(
            target=lambda: got.append(
                serving.wait_for_event(
                    lambda event: isinstance(event, TaskSucceeded) and event.key == "awaited", 60
                )
            )
        )
        for _ in range(200)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(subscriptions(serving)) == 200, "all wait", 30)
    producer.send("awaited")
    for thread in threads:
        thread.join(60)
    assert got == [TaskSucceeded(key="awaited")] * 200
    assert subscriptions(serving) == ()


def subscriptions(consumer: Consumer) -> tuple[object, ...]:
    return tuple(consumer._hub._subscriptions)


def test_a_stop_wakes_all_who_wait(collection: Tasks) -> None:
    """
    Who waits without a limit gets None when the consumer stops.
    """
    consumer = Consumer(collection, lambda _: None)
    consumer.start()
    got: list[Event | None] = []
    threads = [
        threading.Thread(target=lambda: got.append(consumer.wait_for_event(lambda _: False)))
        for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(subscriptions(consumer)) == 20, "all wait")
    consumer.stop()
    for thread in threads:
        thread.join(20)
    assert got == [None] * 20


def test_a_wait_keeps_its_time(serving: Consumer, producer: Producer) -> None:
    """
    A wait for what never comes ends at its time-out, also while other events keep coming.
    """
    busy = threading.Event()

    def make_events() -> None:
        while not busy.wait(0.005):
            producer.send(None)

    thread = threading.Thread(target=make_events)
    thread.start()
    try:
        for timeout in (0, 0.05, 0.5):
            began_s = time.monotonic()
            assert serving.wait_for_event(lambda _: False, timeout) is None
            took_s = time.monotonic() - began_s
            assert timeout <= took_s < timeout + 1  # a slow machine
    finally:
        busy.set()
        thread.join(20)
    assert subscriptions(serving) == ()


def test_a_predicate_may_call_the_library_or_raise(serving: Consumer, producer: Producer) -> None:
    """
    A predicate runs in the waiting thread: it may send and ask; what it raises comes out there.
    """
    with serving.subscribe(AttemptEnded) as events:
        producer.send("one")

        def ask(event: Event) -> bool:
            assert event.key is not None
            producer.send(f"{event.key}+", if_exists="keep") if len(event.key) < 5 else None
            task = producer.get(event.key)
            return task is not None and task.status == "succeeded" and event.key == "one++"

        event = without_id(events.wait_for(ask, 20))
        assert event == AttemptEnded(key="one++", running_id="*", succeeded=True)

    def fail(_: Event) -> bool:
        raise LookupError("mine")

    threading.Timer(0.1, producer.send, ["two"]).start()
    with pytest.raises(LookupError, match="mine"):
        serving.wait_for_event(fail, 20)
    assert subscriptions(serving) == ()
    assert serving.health().ok


def test_a_result_that_will_never_come(serving: Consumer, producer: Producer) -> None:
    """
    Waiting for a task that is deleted meanwhile, or never was, ends with an error, not with a hang.
    """
    producer.send("doomed", delay=3600)
    threading.Timer(0.2, producer.delete, ["doomed"]).start()
    with pytest.raises(TaskNotFound):
        producer.result("doomed", 20)
    with pytest.raises(TaskNotFound):
        producer.result("never was", 20)
    producer.send("slow", delay=3600)
    with pytest.raises(TimeoutError, match="waiting"):
        producer.result("slow", 0.1)


def test_switching_threads_all_the_time(producer: Producer, collection: Tasks) -> None:
    """
    With a thread switch after every microsecond nothing is lost, doubled, or left over.
    """
    runs: list[str] = []
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with Consumer(collection, lambda _, context: runs.append(context.key)) as consumer:
            producer.send_many([(str(n), None) for n in range(300)])
            assert consumer.run_until_idle(60)
            assert consumer.health().slots_taken == 0
    finally:
        sys.setswitchinterval(before)
    assert sorted(runs, key=int) == [str(n) for n in range(300)]
    assert producer.count(status="succeeded") == 300
