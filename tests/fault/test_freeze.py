"""
Workers that stand still for longer than their lease, and then go on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.database import Database

from mscheduler_sync._storage.statements.attempts import EXPIRED_REASON
from tests.support import Document, wait_until
from tests.support.scene import Scene
from tests.support.workers import WorkerProcess, worker_process

#: Minutes of waiting for leases and servers: run with the stress tests.

SHORT = {"lease": 1.2, "heartbeat": 0.3}

#: What the function does in its first attempt, once it may go on.
ENDINGS = ["return", "raise-first", "retry-first"]


@pytest.fixture
def worker(server_uri: str, database: Database[Document]) -> Iterator[WorkerProcess]:
    """
    A worker process that can be frozen.
    """
    with worker_process(server_uri, database.name, "frozen") as worker:
        worker.wait_said("started")
        yield worker


def freeze_past_lease(worker: WorkerProcess, scene: Scene, client: MongoClient[Document]) -> None:
    """
    Freeze *worker*, which runs the task "task", until the lease has lapsed.
    """
    worker.freeze()

    def has_lapsed() -> bool:
        document = scene.tasks.find_one({"key": "task"})
        assert document is not None
        lease_end = document["task_state"]["worker_states"][0]["ping_expire_time"]
        # A command's reply knows nothing of the client's time zones.
        return bool(client.admin.command("hello")["localTime"] > lease_end.replace(tzinfo=None))

    wait_until(has_lapsed, "the lease has lapsed")


def attempts_of(document: Document) -> list[Document]:
    attempts: list[Document] = document["task_state"]["worker_states"]
    return attempts


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_replaced_attempt_is_refused(
    scene: Scene, worker: WorkerProcess, client: MongoClient[Document], ending: str
) -> None:
    """
    A worker that wakes up after it was replaced is told so, and changes nothing (B02, B29).
    """
    scene.send("task", f"wait {ending}", value=1, **SHORT)
    worker.wait_said("began", key="task")
    freeze_past_lease(worker, scene, client)
    with scene.consuming():
        scene.witness.wait_begun("task", times=2)
        worker.thaw()
        assert worker.wait_said("told", key="task")["reason"] == "lease_lost"
        worker.tell("open task")
        lost = worker.wait_said("AttemptLost", key="task")
        first, second = attempts_of(scene.wait_status("task", "running"))
        assert lost["running_id"] == first["running_id"]
        assert (first["worker_id"], first["fail_reason"]) == ("frozen", EXPIRED_REASON)
        assert (second["worker_id"], second["fail_time"]) == ("one", None)
        scene.gate("task").set()
        document = scene.wait_status("task", "succeeded")
        scene.settled()
    assert attempts_of(document)[0] == first
    assert attempts_of(document)[1]["returns"] == 1
    assert scene.witness.count("task") == 2
    worker.tell("stop 5")
    assert worker.wait_end() == 0
    for event in ("TaskSucceeded", "AttemptEnded"):
        assert worker.said(event, key="task") == []


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_unreplaced_attempt_is_accepted(
    scene: Scene, worker: WorkerProcess, client: MongoClient[Document], ending: str
) -> None:
    """
    Work that nobody has taken over meanwhile is not thrown away, however late it comes.
    """
    scene.send("task", f"wait {ending}", value=1, **SHORT)
    worker.wait_said("began", key="task")
    freeze_past_lease(worker, scene, client)
    worker.thaw()
    assert worker.wait_said("told", key="task")["reason"] == "lease_lost"
    worker.tell("open task")
    document = scene.wait_status("task", "succeeded")
    worker.tell("stop 5")
    assert worker.wait_end() == 0
    reasons = [a["fail_reason"].split("\n")[0] for a in attempts_of(document)[:-1]]
    assert (
        reasons
        == {
            "return": [],
            "raise-first": ["ValueError: as told"],
            "retry-first": ["RetryLater: as told"],
        }[ending]
    )
    assert worker.said("AttemptLost") == []
    assert scene.witness.count("task") == len(attempts_of(document))
    scene.invariants.check()


def test_a_function_that_heeds_the_loss(
    scene: Scene, worker: WorkerProcess, client: MongoClient[Document]
) -> None:
    """
    A function that ends itself after the loss of its lease has used an attempt, and is retried.
    """
    scene.send("task", "wait check", max_attempts=2, **SHORT)
    worker.wait_said("began", key="task")
    freeze_past_lease(worker, scene, client)
    worker.thaw()
    worker.wait_said("told", key="task")
    worker.tell("open task")
    document = scene.wait_status("task", "succeeded")
    assert attempts_of(document)[0]["fail_reason"].startswith("LeaseLost")
    worker.tell("stop 5")
    assert worker.wait_end() == 0
    assert scene.witness.count("task") == 2
    scene.invariants.check()


def test_a_held_interpreter_lock(scene: Scene, worker: WorkerProcess) -> None:
    """
    Where a function keeps all threads from running the task is taken over, and fenced (B28).
    """
    scene.send("task", "hold-gil-first", **SHORT)
    worker.wait_said("began", key="task")
    with scene.consuming():
        document = scene.wait_status("task", "succeeded")
        lost = worker.wait_said("AttemptLost", key="task")
        scene.settled()
    first, second = attempts_of(document)
    assert (first["running_id"], first["worker_id"]) == (lost["running_id"], "frozen")
    assert second["worker_id"] == "one"


def test_many_leases_of_healthy_heartbeats(scene: Scene, worker: WorkerProcess) -> None:
    """
    A task that is simply long is not started a second time, whoever waits for it (B10).
    """
    scene.send("task", "wait", lease=1.0, heartbeat=0.2)
    worker.wait_said("began", key="task")
    with scene.consuming(), scene.another_consumer():

        def lasted_leases() -> bool:
            (attempt,) = attempts_of(scene.wait_status("task", "running"))
            held: Any = attempt["ping_expire_time"] - attempt["claim_time"]
            return bool(held.total_seconds() > 4)

        wait_until(lasted_leases, "four leases have gone by")
        worker.tell("open task")
        scene.wait_status("task", "succeeded")
        scene.settled()
    assert scene.witness.count("task") == 1
    assert worker.said("told") == []
