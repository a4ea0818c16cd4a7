"""
SIGINT and SIGTERM at a consumer that is the purpose of its process.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo.collection import Collection
from pymongo.database import Database

from mscheduler_sync import Consumer, Producer, StopReport, TaskContext
from mscheduler_sync.embedded import EmbeddedServer, EmbeddedServerError, find_server_command
from tests.support import Document, wait_until
from tests.support.invariants import Invariants, Witness, status_of
from tests.support.scripts import Child, Children, children

Tasks = Collection[Document]

SIGNALS = [signal.SIGTERM, signal.SIGINT]
EMPTY: dict[str, list[str]] = {
    "finished": [],
    "released": [],
    "abandoned": [],
    "unstored": [],
    "threads": [],
}


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
    Where the functions of the programs write that they run.
    """
    return Witness(database.witness)


@pytest.fixture
def producer(collection: Tasks) -> Producer:
    """
    The producer of the test's own collection.
    """
    return Producer(collection)


def serve_one(start: Children, producer: Producer, do: str = "gate", **options: Any) -> Child:
    """
    Start a service, and wait until it is in the middle of the task "one".
    """
    producer.send("one", {"do": do}, lease=60, heartbeat=20)
    child = start.start("serve", **options)
    child.wait_line("began")
    return child


def document(tasks: Tasks, key: str) -> Document:
    found = tasks.find_one({"key": key})
    assert found is not None
    return found


def released(tasks: Tasks, key: str) -> int:
    number: int = document(tasks, key).get("counters", {}).get("released", 0)
    return number


# -- the first signal ------------------------------------------------------------------------------


@pytest.mark.parametrize("number", SIGNALS)
def test_running_tasks_finish_and_waiting_ones_stay(
    start: Children,
    producer: Producer,
    witness: Witness,
    collection: Tasks,
    number: signal.Signals,
) -> None:
    """
    At a signal the functions that run are let finish, nothing more is begun, and the exit is clean.
    """
    invariants = Invariants(collection, witness)
    for key in "abcde":
        producer.send(key, {"do": "gate"})
        invariants.sent(key)
    child = start.start("serve", consumer={"max_workers": 2})
    wait_until(lambda: len(witness.runs()) == 2, "two functions run")
    child.send(number)
    child.wait_line('log "consumer_stopping"')
    running = sorted(run.task for run in witness.runs())
    for key in running:
        child.open_gate(key)

    assert child.wait_end() == 0
    assert child.said("report") == {**EMPTY, "finished": running}
    assert child.errors == ""
    assert sorted(run.task for run in witness.runs()) == running
    waiting = [key for key in "abcde" if key not in running]
    assert {key: status_of(collection, key) for key in "abcde"} == {
        **dict.fromkeys(running, "succeeded"),
        **dict.fromkeys(waiting, "waiting"),
    }
    assert [document(collection, key)["task_state"]["worker_states"] for key in waiting] == [[]] * 3
    invariants.check()


@pytest.mark.parametrize("number", SIGNALS)
def test_an_idle_service_ends_at_once(start: Children, number: signal.Signals) -> None:
    """
    Without tasks a signal ends the service in about a second, with nothing left behind.
    """
    child = start.start("serve")
    child.wait_line('log "consumer_running"')
    child.send(number)
    assert child.wait_end(10) == 0
    assert child.said("report") == EMPTY
    assert child.errors == ""


def test_a_signal_in_the_middle_of_the_start_is_not_lost(start: Children) -> None:
    """
    Between the call of run_forever and its first thread a signal already means: stop in good order.
    """
    child = start.start("serve", hit_in_start=True)
    assert child.wait_end(10) == 0
    assert child.said("report") == EMPTY
    assert child.said("state") == "stopped"


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_a_service_whose_server_was_never_there(
    start: Children, number: signal.Signals
) -> None:
    """
    While the first contact is still tried a signal ends the service within its stop time-out.
    """
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        uri = f"mongodb://127.0.0.1:{taken.getsockname()[1]}/?directConnection=true"
        child = start.start("serve", uri=uri, consumer={"stop_timeout": 5})
        child.wait_line('log "consumer_running"')
        began_s = time.monotonic()
        child.send(number)
        assert child.wait_end() == 0
    assert time.monotonic() - began_s < 5 + 1 + 2  # the time-out, its second, and a slow machine
    report = child.said("report")
    assert {**report, "threads": []} == EMPTY
    assert set(report["threads"]) <= {"ms-fetch", "ms-watch", "ms-claim"}
    assert "Traceback" not in child.errors


def test_a_function_that_ignores_the_request_is_named_and_left_behind(
    start: Children, producer: Producer, witness: Witness, collection: Tasks
) -> None:
    """
    A function that does not end in time is reported as abandoned; the process ends when it does.

    Its attempt is not charged: once the lease ends the task runs elsewhere, as its first attempt.
    """
    producer.send("one", {"do": "gate"}, lease=3, heartbeat=1)
    child = start.start("serve", consumer={"stop_timeout": 1})
    child.wait_line("began")
    child.send(signal.SIGTERM)
    assert child.said("report") == {**EMPTY, "abandoned": ["one"], "threads": ["ms-exec"]}
    element = document(collection, "one")["task_state"]["worker_states"][0]
    assert element["interrupted"] is True
    assert child.alive

    attempts: list[int] = []

    def again(_: object, context: TaskContext) -> str:
        attempts.append(context.attempt)
        return "elsewhere"

    with Consumer(collection, again):
        assert producer.result("one", timeout=20) == "elsewhere"
    assert attempts == [1]
    child.open_gate("one")
    assert child.wait_end() == 0
    assert child.errors == ""
    assert producer.result("one", timeout=0) == "elsewhere"
    states = document(collection, "one")["task_state"]["worker_states"]
    assert [state.get("fail_time") for state in states] == [None]


def test_a_function_that_heeds_the_request_gives_its_task_back(
    start: Children, producer: Producer, collection: Tasks
) -> None:
    """
    A function that ends by `check` after the signal has its task released, unused, for others.
    """
    child = serve_one(start, producer, "heed", consumer={"stop_timeout": 2})
    child.send(signal.SIGTERM)
    assert child.wait_end() == 0
    assert child.said("report") == {**EMPTY, "released": ["one"]}
    assert status_of(collection, "one") == "waiting"
    assert released(collection, "one") == 1


# -- the second signal -----------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [(15, 15), (2, 2), (15, 2), (2, 15)])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_second_signal_gives_back_and_ends_the_process(
    start: Children,
    producer: Producer,
    witness: Witness,
    collection: Tasks,
    numbers: tuple[int, int],
    at_once: bool,
) -> None:
    """
    A second signal, however soon after the first, frees the tasks for others and ends at once.
    """
    producer.send("one", {"do": "gate"}, lease=600, heartbeat=200)
    producer.send("two", {"do": "gate"}, lease=600, heartbeat=200)
    child = start.start("serve")
    wait_until(lambda: len(witness.runs()) == 2, "two functions run")
    first, second = map(signal.Signals, numbers)
    child.send(first)
    if at_once:
        # As near as a test can be sure of that they are two: equal ones that wait count as one.
        time.sleep(0.05)
    else:
        child.wait_line('log "consumer_stopping"')
    child.send(second)

    assert child.wait_end(10) == 128 + second
    assert child.errors == ""
    assert [released(collection, key) for key in ("one", "two")] == [1, 1]

    def again(_: object, context: TaskContext) -> None:
        with witness.running(context):
            pass

    with Consumer(collection, again) as consumer:
        assert consumer.run_until_idle(10)
    assert [witness.count(key) for key in ("one", "two")] == [2, 2]
    states = [document(collection, key)["task_state"]["worker_states"] for key in ("one", "two")]
    assert [len(elements) for elements in states] == [1, 1]
    Invariants(collection, witness).check()


def test_a_second_signal_ends_the_process_though_the_server_has_gone(
    tmp_path: Path,
) -> None:
    """
    With the server away a second signal still ends the process within some seconds.
    """
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(own_server())
        producer = Producer(server.collection("tasks"))
        start = stack.enter_context(children(tmp_path, server.uri, "mscheduler"))
        child = serve_one(start, producer)
        server.stop()
        child.send(signal.SIGTERM)
        child.wait_line('log "consumer_stopping"')
        child.send(signal.SIGTERM)
        assert child.wait_end(10) == 128 + 15
    assert "Traceback" not in child.errors


def test_one_signal_during_a_stop_that_was_asked_for_otherwise_does_not_force(
    start: Children, producer: Producer, witness: Witness, collection: Tasks
) -> None:
    """
    After `request_stop` the first signal changes nothing: the functions that run may finish.
    """
    child = serve_one(start, producer)
    producer.send("asks", {"do": "request_stop"})
    child.wait_line('ended "asks"')
    child.wait_line('log "consumer_stopping"')
    child.send(signal.SIGTERM)
    child.open_gate("one")
    assert child.wait_end() == 0
    assert child.said("report")["finished"] == ["asks", "one"]
    assert status_of(collection, "one") == "succeeded"


def test_a_task_that_calls_stop_ends_run_forever(
    start: Children, producer: Producer, collection: Tasks
) -> None:
    """
    `stop` inside a function asks only; run_forever then stops, and the function's outcome is kept.
    """
    child = serve_one(start, producer, "stop")
    assert child.wait_end() == 0
    assert child.said("stop") == repr(StopReport())
    assert child.said("report") == {**EMPTY, "finished": ["one"]}


# -- whose handlers --------------------------------------------------------------------------------


def test_the_handlers_that_were_there_are_called_and_put_back(
    start: Children, producer: Producer
) -> None:
    """
    A handler of the application is called too, and stands again when run_forever has returned.
    """
    child = serve_one(start, producer, handler="note")
    child.send(signal.SIGTERM)
    assert child.said("mine") == "SIGTERM"
    child.open_gate("one")
    assert child.wait_end() == 0
    before, after = child.said("handlers")
    assert before == ["default_int_handler", "mine"]
    assert after == before


def test_a_handler_that_exits_does_so_after_the_stop(
    start: Children, producer: Producer, collection: Tasks
) -> None:
    """
    A handler that raises SystemExit does not cut the stop short; its status is the process's.
    """
    child = serve_one(start, producer, handler="exit")
    child.send(signal.SIGTERM)
    child.wait_line('log "consumer_stopping"')
    child.open_gate("one")
    assert child.wait_end() == 7
    assert child.said("state") == "stopped"
    assert status_of(collection, "one") == "succeeded"
    assert child.errors == ""


def test_an_ignored_signal_stays_ignored(start: Children, producer: Producer) -> None:
    """
    A SIGINT that was ignored before (nohup, a shell's background job) stops nothing.
    """
    child = serve_one(start, producer, ignore_interrupt=True)
    child.send(signal.SIGINT)
    producer.send("two", {"do": "nothing"})
    child.wait_line('ended "two"')
    producer.result("two", 20)
    child.send(signal.SIGTERM)
    child.wait_line('log "consumer_stopping"')
    child.open_gate("one")
    assert child.wait_end() == 0
    assert child.said("report")["finished"] == ["one"]


def test_a_process_that_a_function_forks_can_be_terminated(
    start: Children, producer: Producer
) -> None:
    """
    `Process.terminate` in a function ends the forked process: it has none of our handlers.
    """
    child = start.start("forking")
    for number in range(20):
        producer.send(f"fork-{number}")
    assert [child.said(f"fork-{number} ") for number in range(20)] == [-signal.SIGTERM] * 20
    child.send(signal.SIGTERM)
    assert child.wait_end() == 0


# -- threads ---------------------------------------------------------------------------------------


def test_run_forever_works_outside_the_main_thread(collection: Tasks, producer: Producer) -> None:
    """
    In another thread run_forever touches no signal handler, and ends by `request_stop`.
    """
    before = [signal.getsignal(number) for number in SIGNALS]
    reports: list[StopReport] = []
    during: list[object] = []

    def look(_: object) -> None:
        during.extend(signal.getsignal(number) for number in SIGNALS)

    consumer = Consumer(collection, look)
    thread = threading.Thread(target=lambda: reports.append(consumer.run_forever()))
    thread.start()
    producer.send("one")
    producer.result("one", timeout=20)
    consumer.request_stop()
    thread.join(20)
    assert not thread.is_alive()
    assert [signal.getsignal(number) for number in SIGNALS] == before == during
    assert [(report.abandoned, report.unstored, report.threads) for report in reports] == [
        ((), (), ())
    ]


def test_the_with_block_works_outside_the_main_thread(
    collection: Tasks, producer: Producer
) -> None:
    """
    A consumer may be entered and left in any thread; signal handlers are not touched.
    """
    before = [signal.getsignal(number) for number in SIGNALS]
    results: list[object] = []

    def use() -> None:
        with Consumer(collection, lambda params: params + 1):
            results.append(producer.result("one", timeout=20))

    producer.send("one", 1)
    thread = threading.Thread(target=use)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert results == [2]
    assert [signal.getsignal(number) for number in SIGNALS] == before


def own_server() -> EmbeddedServer:
    """
    Return a server that the test may stop, or skip the test.
    """
    try:
        find_server_command()
    except EmbeddedServerError as error:
        pytest.skip(str(error))
    return EmbeddedServer()
