"""
A worker process is killed at each named point of an attempt's life; another one finishes the work.
"""

from __future__ import annotations

import datetime as dt
import signal
import time
from typing import Any

import pytest
from pymongo.database import Database

from mscheduler_sync import TaskFound
from mscheduler_sync._runtime.crash_points import CRASH_POINTS
from mscheduler_sync._storage import statements
from mscheduler_sync._storage.statements.attempts import EXPIRED_REASON
from tests.support import Document, wait_until
from tests.support.scene import Scene
from tests.support.workers import worker_process

LEASE_S = 1.5
#: An idle fleet takes a task over within the lease and a second; a busy machine gets more.
TAKE_OVER_S = LEASE_S + 5

BEFORE_THE_OUTCOME = CRASH_POINTS[: CRASH_POINTS.index("after_outcome")]
#: The second comes right after the first.
AFTER_THE_OUTCOME = CRASH_POINTS[CRASH_POINTS.index("after_outcome") :]


@pytest.fixture
def crash(server_uri: str, database: Database[Document], scene: Scene) -> Any:
    """
    Run a worker that dies at a point while it has the task; return the task's document then.
    """

    def run(point: str, do: str = "return", **options: Any) -> Document:
        scene.send("task", do, **{"lease": LEASE_S, "heartbeat": 0.4, **options})
        environment = {"MSCHEDULER_CRASH_POINT": point}
        with worker_process(server_uri, database.name, "dies", environment=environment) as worker:
            assert worker.wait_end() == -signal.SIGKILL, f"{point} was not reached"
        document = database.tasks.find_one({"key": "task"})
        assert document is not None
        return document

    return run


def attempts_of(document: Document) -> list[Document]:
    attempts: list[Document] = document["task_state"]["worker_states"]
    return attempts


@pytest.mark.parametrize("point", BEFORE_THE_OUTCOME)
def test_a_crash_before_the_outcome(scene: Scene, crash: Any, point: str) -> None:
    """
    The dead worker's task runs again, once, soon after its lease (B07, B09, B17).
    """
    with scene.consuming(max_workers=0) as consumer:
        left = crash(point)
        died_s = time.monotonic()
        assert [(a["worker_id"], a["success_time"]) for a in attempts_of(left)] == [("dies", None)]
        runs_of_the_dead = scene.witness.count("task")
        assert runs_of_the_dead == (1 if point == "after_function" else 0)
        consumer.max_workers = 2
        document = scene.wait_status("task", "succeeded")
        assert time.monotonic() - died_s < TAKE_OVER_S
        first, second = attempts_of(document)
        assert (first["worker_id"], first["fail_reason"]) == ("dies", EXPIRED_REASON)
        assert second["worker_id"] == "one"
        assert scene.witness.count("task") == runs_of_the_dead + 1
        scene.settled()


@pytest.mark.parametrize(
    ("point", "do"),
    [
        (AFTER_THE_OUTCOME[0], "return"),
        (AFTER_THE_OUTCOME[0], "raise"),
        (AFTER_THE_OUTCOME[1], "return"),
    ],
)
def test_a_crash_after_the_outcome(scene: Scene, crash: Any, point: str, do: str) -> None:
    """
    What is stored is done: a success never runs again, a failure is not charged twice (B06, B09).
    """
    left = crash(point, do, max_attempts=1, lease=0.5, heartbeat=0.2)
    status = "succeeded" if do == "return" else "failed"
    assert left["status"] == status
    with scene.consuming() as consumer:
        # Longer than the lease would have lasted.
        scene.send("later", delay=1)
        scene.wait_status("later", "succeeded")
        assert consumer.run_until_idle(10)
        scene.settled()
    assert scene.wait_status("task", status) == left
    assert scene.witness.count("task") == 1


def test_a_task_that_kills_its_worker(scene: Scene, crash: Any, database: Any) -> None:
    """
    It is not tried for ever: after its attempts it has failed, and says why (B32, B34).
    """
    for number in (1, 2):
        left = crash("after_function", max_attempts=2)
        assert len(attempts_of(left)) == number
    with scene.consuming():
        document = scene.wait_status("task", "failed")
        assert [a["fail_reason"] for a in attempts_of(document)] == [EXPIRED_REASON] * 2
        scene.settled()
    assert scene.witness.count("task") == 2


def test_a_crash_leaves_the_other_tasks_of_the_worker_claimable(
    scene: Scene, server_uri: str, database: Database[Document]
) -> None:
    """
    Every task of a dead worker comes back by itself, each charged once (B07, B25, B32, B35).
    """
    keys = [f"task-{n}" for n in range(6)]
    with (
        scene.consuming(max_workers=0) as consumer,
        worker_process(server_uri, database.name, "dies", max_workers=6) as worker,
    ):
        for key in keys:
            scene.send(key, "wait", lease=LEASE_S, heartbeat=0.4)
        for key in keys:
            scene.witness.wait_begun(key)
        # Long after the start of the other, whose look at the time must not be of then (B15).
        wait_until(
            lambda: all(
                one["ping_expire_time"] - one["claim_time"] > 2 * dt.timedelta(seconds=LEASE_S)
                for row in database.tasks.find()
                for one in attempts_of(row)
            ),
            "all leases were renewed more than once",
        )
        worker.kill()
        # Whatever else might know of the worker: there is nothing but the tasks themselves.
        assert set(database.list_collection_names()) == {"tasks", "witness"}
        consumer.max_workers = 2
        for key in keys:
            scene.gate(key).set()
        for key in keys:
            document = scene.wait_status(key, "succeeded")
            reasons = [a.get("fail_reason") for a in attempts_of(document)]
            assert reasons == [EXPIRED_REASON, None]
        scene.settled()
    assert [scene.witness.count(key) for key in keys] == [2] * 6


def test_a_short_lease_among_long_ones(scene: Scene) -> None:
    """
    A worker that knew only of long leases looks often enough once it hears of a short one.
    """
    with scene.consuming() as consumer:
        scene.send("long", lease=600, heartbeat=200)
        scene.wait_status("long", "succeeded")
        consumer.max_workers = 0
        with consumer.subscribe(TaskFound) as events:
            scene.send("task", lease=LEASE_S, heartbeat=0.4)
            assert events.wait_for(lambda event: event.key == "task", 10) is not None
        # It knows of the task; another worker is faster, and dies.
        claim = statements.attempts.claim([("task", "orphan")], "dead")
        assert scene.tasks.update_one(claim.filter, claim.pipeline).modified_count == 1
        consumer.max_workers = 2
        document = scene.wait_status("task", "succeeded", timeout=TAKE_OVER_S)
        scene.settled()
    assert [a["worker_id"] for a in attempts_of(document)] == ["dead", "one"]


def test_a_worker_of_a_task_for_several_dies(
    scene: Scene, server_uri: str, database: Database[Document]
) -> None:
    """
    A task that two are to run has two successes in the end, and never three runs at a time.
    """
    with (
        worker_process(server_uri, database.name, "dies") as worker,
        scene.consuming(max_workers=0) as consumer,
        scene.another_consumer(worker_id="two", max_workers=0) as other,
    ):
        scene.send("task", "wait", concurrency=2, lease=LEASE_S, heartbeat=0.4)
        worker.wait_said("began", key="task")
        consumer.max_workers = 2
        scene.witness.wait_begun("task", times=2)
        other.max_workers = 2
        worker.kill()
        scene.witness.wait_begun("task", times=3)
        scene.gate("task").set()
        document = scene.wait_status("task", "succeeded")
        scene.settled()
    ended = [(a["worker_id"], a["success_time"] is not None) for a in attempts_of(document)]
    assert ended == [("dies", False), ("one", True), ("two", True)]
