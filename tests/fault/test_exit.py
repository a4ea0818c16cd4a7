"""
Programs that end while their consumer runs.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pymongo.collection import Collection
from pymongo.database import Database

from mscheduler_sync import Consumer, Producer, TaskContext
from tests.support import Document, wait_until
from tests.support.invariants import Invariants, Witness, status_of
from tests.support.scripts import Child, Children, children

Tasks = Collection[Document]

#: How main may end, with which exit status.
WAYS = {"fall_off": 0, "exit": 3, "raise": 1}
#: For an interpreter to start and to end on a slow machine.
SLOW_S = 15.0


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


def assert_quiet(child: Child, way: str) -> None:
    """
    Nothing but the program's own exception was printed.
    """
    if way == "raise":
        assert child.errors.count("Traceback") == 1
        assert child.errors.endswith("KeyError: 'mine'\n")
    else:
        assert child.errors == ""


def counter(tasks: Tasks, name: str) -> int:
    return sum(found.get("counters", {}).get(name, 0) for found in tasks.find())


@pytest.mark.parametrize("way", WAYS)
def test_an_idle_consumer_does_not_hold_up_the_exit(start: Children, way: str) -> None:
    """
    A program that forgets to stop its idle consumer ends at once, and prints nothing.
    """
    child = start.start("leave", way=way, begun=False)
    child.wait_line("leaving")
    assert child.wait_end(SLOW_S) == WAYS[way]
    assert_quiet(child, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seconds", [0.1, 2])
def test_a_running_function_is_let_finish_at_exit(
    start: Children,
    producer: Producer,
    witness: Witness,
    collection: Tasks,
    way: str,
    seconds: float,
) -> None:
    """
    At exit what runs is finished and stored; what waits is left alone, not claimed and released.
    """
    producer.send("first", {"do": "sleep", "seconds": seconds}, priority=9)
    child = start.start("leave", way=way, begun=True, gate="leave", consumer={"max_workers": 2})
    child.wait_line('began "first"')
    for number in range(20):
        # One slot is free, but due when nothing can be started any more.
        producer.send(f"later-{number}", {"do": "nothing"}, delay=seconds / 2)
    child.open_gate("leave")
    child.wait_line("leaving")

    assert child.wait_end(seconds + SLOW_S) == WAYS[way]
    assert_quiet(child, way)
    assert status_of(collection, "first") == "succeeded"
    # Whatever was begun was ended; nothing was given back over and over.
    statuses = {found["status"] for found in collection.find()}
    assert statuses <= {"succeeded", "waiting"}
    assert counter(collection, "released") <= 2
    Invariants(collection, witness).check()


@pytest.mark.parametrize("way", WAYS)
def test_a_function_that_heeds_is_asked_at_exit(
    start: Children, producer: Producer, collection: Tasks, way: str
) -> None:
    """
    At exit too functions are asked to end after three quarters of the stop time-out.
    """
    producer.send("one", {"do": "heed"}, lease=600, heartbeat=200)
    child = start.start("leave", way=way, begun=True, consumer={"stop_timeout": 2})
    child.wait_line("leaving")
    assert child.wait_end(2 + SLOW_S) == WAYS[way]
    assert_quiet(child, way)
    assert status_of(collection, "one") == "waiting"
    assert counter(collection, "released") == 1


def test_a_function_that_does_not_end_is_left_behind_at_exit(
    start: Children, producer: Producer, witness: Witness, collection: Tasks
) -> None:
    """
    After the stop time-out its task is free for others once the lease ends; no attempt is charged.

    The process itself ends when the function does, as Python wants it.
    """
    producer.send("one", {"do": "gate"}, lease=3, heartbeat=1)
    child = start.start("leave", way="fall_off", begun=True, consumer={"stop_timeout": 1})
    child.wait_line('log "stop_incomplete"')

    def again(_: object, context: TaskContext) -> int:
        with witness.running(context):
            return context.attempt

    with Consumer(collection, again):
        assert producer.result("one", 20) == 1
    assert child.alive
    child.open_gate("one")
    assert child.wait_end(SLOW_S) == 0
    assert child.errors == ""
    Invariants(collection, witness).check()


def test_a_program_on_the_command_line(
    start: Children, server_uri: str, producer: Producer, collection: Tasks
) -> None:
    """
    ``python -c`` that starts a consumer and ends: the task that runs is finished.
    """
    program = """
import sys, threading, time
from pymongo import MongoClient
from mscheduler_sync import Consumer
began = threading.Event()
def work(seconds):
    began.set()
    time.sleep(seconds)
Consumer(MongoClient(sys.argv[1])[sys.argv[2]].tasks, work).start()
began.wait(30)
"""
    producer.send("one", 1.0)
    child = start.start_command(["-c", program, server_uri, collection.database.name])
    assert child.wait_end(1 + 2 * SLOW_S) == 0
    assert (child.output, child.errors) == ("", "")
    assert status_of(collection, "one") == "succeeded"


@pytest.mark.parametrize("log", ["closed", "stderr_closed"])
@pytest.mark.parametrize("do", ["nothing", "sleep"])
def test_a_log_whose_stream_is_closed_hurts_nothing(
    start: Children, producer: Producer, collection: Tasks, log: str, do: str
) -> None:
    """
    A handler that still points to a closed stream at exit costs no outcome and no time.

    The logging package itself says so on a standard error that is open; nothing else is printed.
    """
    producer.send("one", {"do": do, "seconds": 1})
    child = start.start("leave", way="fall_off", begun=True, log=log)
    child.wait_line("leaving")
    assert child.wait_end(1 + SLOW_S) == 0
    errors = child.errors
    assert errors.count("Traceback") == errors.count("--- Logging error ---")
    assert status_of(collection, "one") == "succeeded"


def test_an_exception_in_the_with_block_waits_for_the_functions(
    start: Children, producer: Producer, witness: Witness, collection: Tasks
) -> None:
    """
    An exception leaves the block through an orderly stop, and is the only one printed.
    """
    producer.send("one", {"do": "sleep", "seconds": 1})
    child = start.start("leave", way="in_with", begun=False)
    assert child.wait_end(1 + 2 * SLOW_S) == 1
    assert_quiet(child, "raise")
    assert status_of(collection, "one") == "succeeded"
    Invariants(collection, witness).check()


def test_a_second_interrupt_while_the_block_is_left(
    start: Children, producer: Producer, witness: Witness, collection: Tasks
) -> None:
    """
    Ctrl-C twice leaves the ``with`` block at once; outcomes are stored before the process ends.
    """
    producer.send("one", {"do": "sleep", "seconds": 2}, lease=600, heartbeat=200)
    child = start.start("leave", way="interrupted", begun=False)
    assert child.wait_end(2 + 2 * SLOW_S) != 0
    assert child.said("interrupts") == 2
    assert child.errors.endswith("KeyboardInterrupt\n")
    assert status_of(collection, "one") in {"succeeded", "waiting"}
    Invariants(collection, witness).check()


@pytest.mark.parametrize("way", ["daemon_thread", "thread"])
@pytest.mark.parametrize("do", ["nothing", "sleep"])
def test_run_forever_in_a_thread_ends_with_main(
    start: Children, producer: Producer, witness: Witness, collection: Tasks, way: str, do: str
) -> None:
    """
    A service in another thread, busy or idle, stops in good order when the main thread has ended.
    """
    producer.send("one", {"do": do, "seconds": 2})
    child = start.start("leave", way=way, begun=False)
    child.wait_line("began")
    assert child.wait_end(2 + SLOW_S) == 0
    assert child.errors == ""
    assert status_of(collection, "one") == "succeeded"
    Invariants(collection, witness).check()


def test_the_exit_does_not_wait_for_a_server_that_is_away(start: Children) -> None:
    """
    With nothing held and no server the exit keeps to the stop time-out.
    """
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        uri = f"mongodb://127.0.0.1:{taken.getsockname()[1]}/?directConnection=true"
        child = start.start(
            "leave",
            uri=uri,
            way="fall_off",
            begun=False,
            started=False,
            consumer={"stop_timeout": 3},
        )
        child.wait_line("leaving")
        began_s = time.monotonic()
        assert child.wait_end() == 0
    assert time.monotonic() - began_s < 3 + 1 + 5  # the time-out, its second, and a slow machine
    assert "Traceback" not in child.errors


def test_the_lease_is_kept_while_the_interpreter_waits(
    start: Children, producer: Producer, witness: Witness, collection: Tasks
) -> None:
    """
    A function that runs on at exit for several leases is heart-beaten: nobody else starts its task.
    """
    producer.send("one", {"do": "gate"}, lease=1.5, heartbeat=0.3)
    child = start.start("leave", way="fall_off", begun=True)
    child.wait_line('log "consumer_stopping"')
    ran: list[str] = []
    with Consumer(collection, lambda _, context: ran.append(context.key)) as consumer:
        leases_end = []
        for _ in range(6):
            leases_end.append(lease_end(collection))
            seen = leases_end[-1]
            wait_until(lambda: lease_end(collection) != seen, "a heartbeat", 10)  # noqa: B023
        child.open_gate("one")
        assert child.wait_end(SLOW_S) == 0
        assert consumer.run_until_idle(20)
    assert ran == []
    assert leases_end == sorted(set(leases_end))
    assert status_of(collection, "one") == "succeeded"
    Invariants(collection, witness).check()


def lease_end(tasks: Tasks) -> str:
    found = tasks.find_one({"key": "one"})
    assert found is not None
    return str(found["task_state"]["worker_states"][0]["ping_expire_time"].isoformat())
