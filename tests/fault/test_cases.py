"""
Failures that other systems had, where no other test of faults plays them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.database import Database

from mscheduler_sync import Consumer, Producer, TaskFound
from mscheduler_sync._storage import statements
from mscheduler_sync._storage.statements.attempts import EXPIRED_REASON
from tests.support import Document, fail_point, wait_until
from tests.support.scene import Scene, blocked, stopped_in_time
from tests.support.workers import worker_process

SHORT: Mapping[str, Any] = {"lease": 1.0, "heartbeat": 0.3}


def orphan(scene: Scene, key: str, running_id: str = "orphan") -> None:
    """
    Claim *key* for a worker that will never be heard of again.
    """
    claim = statements.attempts.claim([(key, running_id)], "dead")
    assert scene.tasks.update_one(claim.filter, claim.pipeline).modified_count == 1


def wait_lapsed(scene: Scene, client: MongoClient[Document], key: str) -> None:
    """
    Wait until the latest attempt of *key* has lost its lease.
    """

    def has_lapsed() -> bool:
        document = scene.tasks.find_one({"key": key})
        assert document is not None
        lease_end = document["task_state"]["worker_states"][-1]["ping_expire_time"]
        # A command's reply knows nothing of the client's time zones.
        return bool(client.admin.command("hello")["localTime"] > lease_end.replace(tzinfo=None))

    wait_until(has_lapsed, "the lease has lapsed")


def attempts_of(document: Document) -> list[Document]:
    attempts: list[Document] = document["task_state"]["worker_states"]
    return attempts


@pytest.fixture
def knowing(scene: Scene, client: MongoClient[Document]) -> Iterator[Consumer]:
    """
    A consumer that knows of the dead worker's task "task", and waits for a slot to take it over.
    """
    with scene.consuming(max_workers=0) as consumer, consumer.subscribe(TaskFound) as events:
        scene.send("task", "wait", **SHORT)
        orphan(scene, "task")
        wait_lapsed(scene, client, "task")
        assert events.wait_for(lambda event: event.key == "task", 10) is not None
        yield consumer


def run_something_else(scene: Scene, consumer: Consumer) -> None:
    """
    Let the consumer try what it has in mind, and prove that it has come past it.
    """
    consumer.max_workers = 2
    scene.send("else", priority=0)
    scene.wait_status("else", "succeeded")
    assert consumer.run_until_idle(10)


def test_the_owner_finishes_before_the_reclaim(scene: Scene, knowing: Consumer) -> None:
    """
    A task that was finished after the look is not run again (B01).
    """
    succeed = statements.attempts.succeed([("task", "orphan")], [None])
    assert scene.tasks.update_one(succeed.filter, succeed.pipeline).modified_count == 1
    ended = scene.wait_status("task", "succeeded")
    run_something_else(scene, knowing)
    assert scene.tasks.find_one({"key": "task"}) == ended
    assert scene.witness.count("task") == 0


def test_another_worker_reclaims_first(scene: Scene, knowing: Consumer) -> None:
    """
    An attempt that another worker has begun after the look is left alone (B01).
    """
    with scene.another_consumer(worker_id="two"):
        second = scene.witness.wait_begun("task")
        run_something_else(scene, knowing)
        open_attempt = attempts_of(scene.wait_status("task", "running"))[-1]
        assert (open_attempt["running_id"], open_attempt["worker_id"]) == (second.running_id, "two")
        scene.gate("task").set()
        scene.wait_status("task", "succeeded")
        scene.settled()
    assert scene.witness.count("task") == 1


def test_the_user_cancels_before_the_reclaim(scene: Scene, knowing: Consumer) -> None:
    """
    A task that was cancelled after the look never runs again (B01, B23).
    """
    assert scene.producer.cancel("task")
    run_something_else(scene, knowing)
    scene.wait_status("task", "cancelled")
    scene.settled()
    assert scene.witness.count("task") == 0


def test_a_cancelled_task_whose_worker_dies(
    scene: Scene, server_uri: str, database: Database[Document]
) -> None:
    """
    Cancelled, and its worker killed before it could know: cancelled in the end (B23).
    """
    with worker_process(server_uri, database.name, "dies") as worker, scene.consuming():
        scene.send("task", "wait", worker_ids=["dies"], **SHORT)
        worker.wait_said("began", key="task")
        worker.freeze()
        assert scene.producer.cancel("task")
        worker.kill()
        document = scene.wait_status("task", "cancelled")
        assert [a["fail_reason"] for a in attempts_of(document)] == [EXPIRED_REASON]
        scene.settled()
    assert scene.witness.count("task") == 1


def test_cancelled_between_failure_and_retry(scene: Scene) -> None:
    """
    A task that waits for its retry and is cancelled is not retried (B23).
    """
    with scene.consuming() as consumer:
        scene.send("task", "raise", retry_delay=1)
        scene.witness.wait_begun("task")
        scene.wait_status("task", "waiting")
        assert scene.producer.cancel("task")
        scene.send("later", delay=1.5)
        scene.wait_status("later", "succeeded")
        assert consumer.run_until_idle(10)
        scene.wait_status("task", "cancelled")
        scene.settled()
    assert scene.witness.count("task") == 1


def test_heartbeats_go_on_while_draining(scene: Scene) -> None:
    """
    A stop that waits for a function keeps its lease, however long it takes (B05).
    """
    with scene.consuming() as consumer:
        scene.send("task", "wait", **SHORT)
        scene.witness.wait_begun("task")
        with scene.another_consumer(worker_id="two"):
            stopping = threading.Thread(target=consumer.stop, args=[20])
            stopping.start()
            heartbeats = len(scene.app.log.of("heartbeat", "update"))
            wait_until(
                lambda: len(scene.app.log.of("heartbeat", "update")) >= heartbeats + 8,
                "eight heartbeats",
            )
            scene.gate("task").set()
            stopping.join()
            document = scene.wait_status("task", "succeeded")
    assert [a["worker_id"] for a in attempts_of(document)] == ["one"]
    assert scene.witness.count("task") == 1
    scene.invariants.check()


def test_stops_while_outcomes_are_slow(scene: Scene) -> None:
    """
    What ended during a stop is stored, also by a slow server, and never runs again (B06).
    """
    for number in range(6):
        key = f"task-{number}"
        with scene.consuming(worker_id=f"worker-{number}") as consumer:
            scene.send(key, "wait")
            scene.witness.wait_begun(key)
            scene.app.hit("outcome", "update", blocked(300))
            # Around the beginning of the stop.
            threading.Timer(number * 0.02, scene.gate(key).set).start()
            assert consumer.stop(10).finished == (key,)
        scene.wait_status(key, "succeeded")
    with scene.consuming() as consumer:
        assert consumer.run_until_idle(10)
        scene.settled()
    assert [scene.witness.count(f"task-{number}") for number in range(6)] == [1] * 6


def test_no_more_is_held_than_runs(scene: Scene) -> None:
    """
    A worker claims what it has slots for, so that others find work at once (B13).
    """
    keys = [f"task-{number}" for number in range(12)]
    scene.producer.send_many([(key, {"do": "wait"}) for key in keys], **SHORT)
    scene.invariants.sent(*keys)

    def held_by(worker_id: str) -> list[str]:
        held = {"worker_id": worker_id, "success_time": None, "fail_time": None}
        found = scene.tasks.find({"task_state.worker_states": {"$elemMatch": held}})
        return [row["key"] for row in found]

    with scene.consuming(max_workers=2):
        wait_until(lambda: len(held_by("one")) == 2, "its slots are full")
        with scene.another_consumer(worker_id="two", max_workers=2):
            wait_until(lambda: len(held_by("two")) == 2, "the other finds work")
            while scene.tasks.count_documents({"status": "succeeded"}) < len(keys):
                for worker_id in ("one", "two"):
                    held = held_by(worker_id)
                    # Two run; as many may have ended, with their outcomes on the way.
                    assert len(held) <= 4
                    for key in held[:1]:
                        scene.gate(key).set()
        scene.settled()
    assert [scene.witness.count(key) for key in keys] == [1] * len(keys)


@pytest.mark.parametrize("ending", ["return", "raise-first", "retry-first", "snooze-first"])
def test_what_is_edited_during_a_run_survives_it(scene: Scene, ending: str) -> None:
    """
    An outcome touches nothing but itself; the next run has what was edited (B21).
    """
    with scene.consuming():
        scene.send("task", f"wait {ending}", max_attempts=5)
        scene.witness.wait_begun("task")
        scene.producer.update(
            "task", {"do": "return", "value": "new"}, priority=7, tags=["edited"], retry_delay=0
        )
        scene.tasks.update_one({"key": "task"}, {"$set": {"note": "the user's own"}})
        scene.gate("task").set()
        document = scene.wait_status("task", "succeeded")
        scene.settled()
    assert document["params"] == {"do": "return", "value": "new"}
    assert document["task_option"]["priority"] == 7
    assert (document["tags"], document["note"]) == (["edited"], "the user's own")
    returned = attempts_of(document)[-1]["returns"]
    assert returned == (None if ending == "return" else "new")


def test_a_stop_leaves_a_running_task_behind(scene: Scene) -> None:
    """
    A task whose function did not end in time runs again by itself, and is not charged (B24, B34).
    """
    with scene.consuming(worker_id="leaves") as consumer:
        scene.send("task", "wait", max_attempts=1, **SHORT)
        scene.witness.wait_begun("task")
        assert consumer.stop(1).abandoned == ("task",)
        scene.gate("task").set()
    with scene.consuming():
        document = scene.wait_status("task", "succeeded")
        scene.settled()
    assert [a["worker_id"] for a in attempts_of(document)] == ["one"]
    assert document["counters"]["released"] == 1
    assert scene.witness.count("task") == 2


def test_a_claim_that_is_answered_after_the_stop(scene: Scene) -> None:
    """
    A claim that a slow server carries out after the stop is given back, and charges nothing (B24).
    """
    with scene.consuming(worker_id="stops") as consumer:
        assert consumer.wait_started(10)
        rule = scene.app.hit("claim", "update", blocked(2500))
        scene.send("task", max_attempts=1, **SHORT)
        wait_until(lambda: rule.is_flying, "the claim is on its way")
        stopped_in_time(consumer, 1, 3)
        rule.wait_done()
    scene.app.disarm()
    with scene.consuming():
        document = scene.wait_status("task", "succeeded")
        scene.settled()
    assert [a["worker_id"] for a in attempts_of(document)] == ["one"]
    assert scene.witness.count("task") == 1


def test_a_claim_that_is_carried_out_too_late(
    scene: Scene, server_uri: str, client: MongoClient[Document], database: Database[Document]
) -> None:
    """
    A claim that the server gets to after the lease would have ended does nothing (B17).
    """
    block = {"blockConnection": True, "blockTimeMS": 2500, "appName": "slow"}
    with (
        worker_process(f"{server_uri}&appName=slow", database.name, "slow") as worker,
        fail_point(client, ["update"], {"times": 1}, **block),
    ):
        worker.wait_said("started")
        scene.send("task", max_attempts=1, **SHORT)
        worker.wait_said("TaskFound", key="task")
        # Now its claim is on its way. Whoever sent it will never know.
        threading.Event().wait(0.5)
        worker.kill()
        with scene.consuming(max_workers=0) as consumer:
            wait_until(lambda: consumer.health().queue_length > 0, "it knows of the task")
            threading.Event().wait(3)
            (document,) = scene.tasks.find({"key": "task"})
            assert attempts_of(document) == []
            consumer.max_workers = 2
            scene.wait_status("task", "succeeded")
            scene.settled()
    assert scene.witness.count("task") == 1


def test_a_claim_that_is_rolled_back(scene: Scene) -> None:
    """
    Where the database forgets a claim (as after a failover) the function is told (B63).
    """
    with scene.consuming():
        scene.send("task", "wait", **SHORT)
        scene.witness.wait_begun("task")
        forget = {"task_state.worker_states": [], "status": "waiting"}
        scene.tasks.update_one({"key": "task"}, {"$set": forget})
        assert scene.contexts["task"].cancelled.wait(10)
        assert scene.contexts["task"].reason == "lease_lost"
        scene.gate("task").set()
        wait_until(lambda: scene.witness.count("task") == 2, "it runs again")
        scene.wait_status("task", "succeeded")
        scene.probe()


def test_losses_of_earlier_lives_do_not_count(scene: Scene, client: MongoClient[Document]) -> None:
    """
    A task that is armed again and again may lose a worker each time (B33).
    """
    document: Document = {}
    with scene.consuming(max_workers=0) as consumer:
        for number in range(4):
            scene.invariants.deleted("task")
            Producer(scene.tasks).send(
                "task",
                {"do": "return"},
                lease=0.2,
                heartbeat=0.1,
                max_attempts=2,
                retry_delay=0,
                if_exists="rerun",
            )
            orphan(scene, "task", f"orphan-{number}")
            consumer.max_workers = 2
            document = scene.wait_status("task", "succeeded")
            assert len(attempts_of(document)) == 2
            wait_until(lambda: consumer.running_count == 0, "nothing runs")
            consumer.max_workers = 0
        consumer.max_workers = 2
        scene.settled()
    assert scene.witness.count("task") == 4
    # On a slow machine a claim of so short a lease may come back late, and is given back.
    counters = {**document["counters"], "released": 0}
    assert counters == {"released": 0, "failed": 3, "succeeded": 3}


@pytest.mark.parametrize("most", [1, 2, 3])
def test_every_way_to_fail_is_counted_alike(
    scene: Scene, client: MongoClient[Document], most: int
) -> None:
    """
    Raising, taking too long, dying: as many attempts as allowed, and no more (B32, B34).
    """
    with scene.consuming():
        scene.send("raises", "raise", max_attempts=most)
        scene.send("retries", "retry", max_attempts=most)
        scene.send("too long", "wait check", max_attempts=most, timeout=0.3, **SHORT)
        scene.gate("too long")
        for key in ("raises", "retries"):
            document = scene.wait_status(key, "failed")
            assert len(attempts_of(document)) == most
            assert scene.witness.count(key) == most
        # It does not end by itself, so each time-out stands before its function ends.
        document = scene.wait_status("too long", "failed")
        assert len(attempts_of(document)) == most
        assert all("TimedOut" in a["fail_reason"] for a in attempts_of(document))
        scene.gate("too long").set()
        scene.settled()
    for number in range(most):
        if number == 0:
            scene.send("dies", max_attempts=most, lease=0.2, heartbeat=0.1)
        orphan(scene, "dies", f"orphan-{number}")
        wait_lapsed(scene, client, "dies")
    with scene.consuming():
        document = scene.wait_status("dies", "failed")
        assert [a["fail_reason"] for a in attempts_of(document)] == [EXPIRED_REASON] * most
        scene.settled()
    assert scene.witness.count("dies") == 0
