"""
Processes that are forked while consumers and producers live: threads and locks do not survive that.
"""

from __future__ import annotations

import datetime as dt
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from pymongo.collection import Collection
from pymongo.database import Database

from mscheduler_sync import Consumer, Producer, TaskContext
from tests.support import Document, wait_until
from tests.support.invariants import Invariants, Witness, status_of, wait_status
from tests.support.scripts import Child, Children, children

Tasks = Collection[Document]

#: Forking a process with threads is what these tests are about.
QUIET = ("-W", "ignore::DeprecationWarning", "-W", "ignore::UserWarning")


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


def play(start: Children, scene: str) -> Child:
    """
    Play *scene* to its end.
    """
    child = start.start("fork", scene=scene, python=QUIET)
    status = child.wait_end(110)
    assert (status, child.errors) == (0, ""), child.output
    return child


def test_a_forked_child_may_call_everything_whatever_lock_was_held(
    start: Children, collection: Tasks
) -> None:
    """
    In a child the parent's consumer says that it is forked; no call hangs, none does harm.
    """
    child = play(start, "calls")
    assert len(child.said("locks")) > 8
    foreign = "RuntimeError: this consumer belongs to the parent process; make one in this process"
    answers = {
        "state": "'forked'",
        "running": "False",
        "running_count": "0",
        "max_workers": "8",
        "health.state": "'forked'",
        "health.ok": "False",
        "start": foreign,
        "run_forever": foreign,
        "run_until_idle": foreign,
        "with": foreign,
        "wait_for_event": "None",
        "subscribe": "[]",
        "request_stop": "None",
        "stop": "StopReport(finished=(), released=(), abandoned=(), unstored=(), threads=())",
        "stop again": "StopReport(finished=(), released=(), abandoned=(), unstored=(), threads=())",
        "threads": "[]",
        "get": "True",
        "count": "True",
        "send": "'in the child'",
    }
    assert {name: child.said(f"{name} ") for name in answers} == answers
    assert child.said("parent") == ["running", True]
    # What the child has sent was run by the parent, which noticed nothing.
    assert status_of(collection, "in the child") == "succeeded"


def test_children_send_with_the_producer_of_their_parent(
    start: Children, witness: Witness, collection: Tasks
) -> None:
    """
    os.fork and Process: the inherited producer sends, and the parent's consumer does the work.
    """
    child = play(start, "send")
    assert child.said("ends") == [True, True, True, 0, 0, 0]
    assert child.said("pids") == [child.said("me")]
    assert child.said("state") == ["running", True]
    assert len(witness.runs()) == 61
    Invariants(collection, witness).check()


def test_a_child_may_have_a_consumer_of_its_own(
    start: Children, witness: Witness, collection: Tasks
) -> None:
    """
    With a client of its own a consumer in the child works beside that of the parent.
    """
    child = play(start, "consume")
    assert child.said("ended") is True
    assert child.said("child idle") is True
    assert child.said("by child") == [child.said("child is")]
    assert child.said("by parent") == [child.said("parent is")]
    Invariants(collection, witness).check()


def test_a_child_that_exits_does_not_stop_the_consumer_of_its_parent(
    start: Children, witness: Witness, collection: Tasks
) -> None:
    """
    The handlers of the interpreter's exit run in the child too: the parent's function goes on.
    """
    producer = Producer(collection)
    producer.send("one", lease=3, heartbeat=0.5)
    child = start.start("fork", scene="exit", python=QUIET)
    child.wait_line('began "one"')
    child.open_gate("fork")
    assert child.said("child ended") == 0
    assert child.said("parent") == ["running", 1]
    child.open_gate("one")
    assert producer.result("one", 20) == "kept"
    child.open_gate("end")
    assert child.wait_end() == 0
    assert child.errors == ""
    assert witness.count("one") == 1


def test_a_child_does_not_keep_the_lease_of_its_dead_parent(
    start: Children, witness: Witness, collection: Tasks
) -> None:
    """
    After the parent's death its task goes to another worker, though a child of it lives on.
    """
    Producer(collection).send("one", lease=2, heartbeat=0.5)
    child = start.start("fork", scene="outlive", python=QUIET)
    orphan = child.said("child")
    try:
        # Longer than the lease: it is the heartbeats that keep it.
        lease_end = lease_end_of(collection)
        wait_until(lambda: lease_end_of(collection) > lease_end, "a heartbeat", 10)
        child.kill()

        def again(_: object, context: TaskContext) -> None:
            with witness.running(context):
                os.kill(orphan, 0)  # raises if it has ended

        with Consumer(collection, again):
            found = wait_status(collection, "one", "succeeded")
    finally:
        os.kill(orphan, signal.SIGKILL)
    first, _ = found["task_state"]["worker_states"]
    assert first["fail_reason"].startswith("LeaseExpired")
    Invariants(collection, witness).check()


def lease_end_of(tasks: Tasks) -> dt.datetime:
    found = tasks.find_one({"key": "one"})
    assert found is not None
    at: dt.datetime = found["task_state"]["worker_states"][0]["ping_expire_time"]
    return at


def test_a_consumer_of_a_preloading_master_serves_its_web_workers(
    start: Children, witness: Witness, collection: Tasks
) -> None:
    """
    Started in the master it runs in the master only; the workers know, and their tasks are done.
    """
    child = play(start, "preload")
    assert child.said("ended") == [True] * 3
    for number in range(3):
        assert child.said(f"worker {number}") == [False, "forked"]
        assert child.said(f"served {number}") == 10
    assert child.said("state") == "running"
    assert {run.pid for run in witness.runs()} == {child.said("me")}
    assert len(witness.runs()) == 30
    Invariants(collection, witness).check()


def test_a_consumer_of_a_preloaded_module_starts_in_each_web_worker(
    start: Children, witness: Witness, collection: Tasks
) -> None:
    """
    Made in the master but never started, it may be started in every worker, each with its own id.
    """
    child = play(start, "post_fork")
    assert child.said("ended") == [True] * 3
    for number in range(3):
        assert child.said(f"worker {number}") == [True, "running"]
        assert child.said(f"served {number}") == 10
        assert child.said(f"report {number}") == [True]
    assert len({child.said(f"id {number}") for number in range(3)}) == 3
    assert child.said("state") == "new"
    assert {run.pid for run in witness.runs()} <= set(child.said("pids"))
    assert len(witness.runs()) == 30
    Invariants(collection, witness).check()
