"""
Replies that never arrive: what was asked for has been done, and nobody says so.

A proxy carries commands out and loses their replies, or cuts the network.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.database import Database

from mscheduler_sync import AttemptLost, AttemptReleased, Producer
from tests.support import Document, wait_until
from tests.support.proxy import Proxy, proxy_to
from tests.support.scene import (
    HALF_DONE,
    UNCONFIRMED,
    Fault,
    Scene,
    scene_on,
)

#: Minutes of waiting for leases and servers: run with the stress tests.

SHORT = {"lease": 2.0, "heartbeat": 0.5}


@pytest.fixture
def proxy(server_uri: str) -> Iterator[Proxy]:
    with proxy_to(server_uri) as proxy:
        yield proxy


@pytest.fixture
def plain(
    proxy: Proxy, client: MongoClient[Document], database: Database[Document]
) -> Iterator[Scene]:
    """
    A scene behind the proxy whose driver repeats nothing.
    """
    with scene_on(proxy.uri, database, client, retryWrites=False, retryReads=False) as scene:
        yield scene


@pytest.fixture(params=[False, True], ids=["plain", "retrying"])
def far(
    request: pytest.FixtureRequest,
    proxy: Proxy,
    client: MongoClient[Document],
    database: Database[Document],
) -> Iterator[Scene]:
    """
    A scene behind the proxy, without and with retryable writes.
    """
    retries: bool = request.param
    with scene_on(proxy.uri, database, client, retryWrites=retries, retryReads=retries) as scene:
        yield scene


def test_many_claims_lose_their_reply(far: Scene, proxy: Proxy) -> None:
    """
    A claim that was carried out is run, and not taken for somebody else's (B17).
    """
    with far.consuming() as consumer:
        for number in range(5):
            wait_until(lambda: consumer.running_count == 0, "nothing runs")
            lost = proxy.dropped
            proxy.drop_replies("update")
            # The outcome comes through: its statement is sent after that of the claim.
            far.send(f"task-{number}")
            document = far.wait_status(f"task-{number}", "succeeded")
            assert proxy.dropped == lost + 1
            assert len(document["task_state"]["worker_states"]) == 1
            assert far.witness.count(f"task-{number}") == 1
        far.settled()


def test_many_outcomes_lose_their_reply(far: Scene, proxy: Proxy) -> None:
    """
    An outcome that was stored is told as stored, once; no attempt is charged twice (B06, B16).
    """
    with far.consuming() as consumer, consumer.subscribe(AttemptLost, AttemptReleased) as events:
        for number, do in enumerate(["return", "raise-first", "retry-first", "snooze-first"]):
            key = f"task-{number}"
            far.send(key, f"wait {do}", max_attempts=2)
            far.witness.wait_begun(key)
            lost = proxy.dropped
            proxy.drop_replies("update")
            far.gate(key).set()
            wait_until(lambda lost=lost: proxy.dropped == lost + 1, "the reply is lost")  # type: ignore[misc]
            document = far.wait_status(key, "succeeded")
            attempts = document["task_state"]["worker_states"]
            runs = 1 if do == "return" else 2
            assert far.witness.count(key) == runs
            assert len(attempts) == (1 if do == "snooze-first" else runs)
            assert document.get("counters", {}).get("snoozed", 0) == (do == "snooze-first")
        far.settled()
    told = [(type(event), event.key) for event in events]
    assert told == [(AttemptReleased, "task-3")]


@pytest.mark.parametrize("fault", [HALF_DONE, UNCONFIRMED], ids=str)
@pytest.mark.parametrize("part", ["claim", "outcome"])
def test_a_statement_about_many_fails(scene: Scene, part: str, fault: Fault) -> None:
    """
    Claims and outcomes that go together are settled one by one, also when half of them is done.
    """
    keys = [f"task-{number}" for number in range(6)]
    dos = ["return", "raise-first", "retry-first"] * 2
    scene.producer.send_many(
        [(key, {"do": f"wait {do}"}, {"retry_delay": 0}) for key, do in zip(keys, dos, strict=True)]
    )
    scene.invariants.sent(*keys)

    def is_about_many(command: Mapping[str, Any]) -> bool:
        condition = command["updates"][0]["q"]["key"]
        return isinstance(condition, dict) and len(condition["$in"]) > 1

    rule = scene.app.hit(part, "update", fault, when=is_about_many)
    with scene.consuming(max_workers=6):
        for key in keys:
            scene.witness.wait_begun(key)
        scene.open_all()
        rule.wait_done()
        for key in keys:
            scene.wait_status(key, "succeeded")
        scene.settled()
    assert [scene.witness.count(key) for key in keys] == [1, 2, 2] * 2


@pytest.mark.parametrize("command", ["update", "find"])
def test_heartbeats_lose_their_reply(plain: Scene, proxy: Proxy, command: str) -> None:
    """
    Lost replies to heartbeats charge no attempt and tell the function nothing (B29).
    """
    with plain.consuming():
        plain.send("task", "wait", lease=5.0, heartbeat=0.5)
        plain.witness.wait_begun("task")
        proxy.drop_replies(command, 2)
        wait_until(lambda: proxy.dropped == 2, "two replies are lost")
        heartbeats = len(plain.app.log.of("heartbeat", "update"))
        wait_until(
            lambda: len(plain.app.log.of("heartbeat", "update")) > heartbeats + 1,
            "it sends another heartbeat",
        )
        assert not plain.contexts["task"].cancelled.is_set()
        plain.gate("task").set()
        document = plain.wait_status("task", "succeeded")
        plain.settled()
    assert len(document["task_state"]["worker_states"]) == 1
    assert plain.witness.count("task") == 1


@pytest.mark.parametrize("if_exists", ["keep", "update", "rerun"])
def test_sends_lose_their_reply(far: Scene, proxy: Proxy, if_exists: Any) -> None:
    """
    A send whose reply is lost makes one task, and knows that it made it.
    """
    producer = Producer(far.app_tasks)
    producer.send("before", {"do": "return"}, delay=3600)
    for number in range(2):
        key = f"task-{number}"
        lost = proxy.dropped
        proxy.drop_replies("insert")
        result = producer.send(key, {"do": "return"}, delay=3600, if_exists=if_exists)
        assert (result.inserted, result.updated) == (True, False)
        assert proxy.dropped == lost + 1
        assert far.tasks.count_documents({"key": key}) == 1
        far.invariants.sent(key)
        if if_exists in {"update", "rerun"}:
            proxy.drop_replies("update")
            again = producer.send(key, {"do": "return"}, delay=7200, if_exists=if_exists)
            assert not again.inserted
            # The embedded server carries out a repeated write anew instead of quoting its first
            # answer: the driver's repetition of an update then says that it changed nothing.
            repeated = far.app_tasks.database.client.options.retry_writes
            assert again.updated or (repeated and if_exists == "update")
            assert proxy.dropped == lost + 2
    with far.consuming(watch=False, poll_interval=0.1):
        far.settled()


def test_many_sends_lose_their_reply(far: Scene, proxy: Proxy) -> None:
    """
    A bulk of sends whose reply is lost says of each that it was made.
    """
    producer = Producer(far.app_tasks)
    proxy.drop_replies("insert")
    items = [(f"task-{number}", {"do": "return"}) for number in range(50)]
    results = producer.send_many(items)
    assert proxy.dropped == 1
    assert [(result.inserted, result.error) for result in results] == [(True, None)] * 50
    far.invariants.sent(*(key for key, _ in items))
    with far.consuming() as consumer:
        assert consumer.run_until_idle(30)
        far.settled()
    assert len(far.witness.runs()) == 50 + 2


def test_cancel_and_retry_lose_their_reply(plain: Scene, proxy: Proxy) -> None:
    """
    They are repeated without harm.
    """
    producer = Producer(plain.app_tasks)
    producer.send("task", {"do": "return"}, delay=3600)
    proxy.drop_replies("update")
    assert producer.cancel("task")
    plain.wait_status("task", "cancelled")
    proxy.drop_replies("update")
    assert producer.retry("task")
    assert proxy.dropped == 2
    with plain.consuming():
        plain.wait_status("task", "succeeded")
        plain.settled()
    assert plain.witness.count("task") == 1


@pytest.mark.parametrize("share", [0.4, 0.8, 2.5])
def test_the_network_is_cut_during_a_task(plain: Scene, proxy: Proxy, share: float) -> None:
    """
    A cut shorter than the lease costs nothing; after a longer one the function was told (B29).
    """
    with plain.consuming():
        plain.send("task", "wait", max_attempts=1, **SHORT)
        plain.witness.wait_begun("task")
        wait_until(lambda: plain.app.log.of("heartbeat", "update"), "it sends a heartbeat")
        proxy.cut()
        threading.Event().wait(share * SHORT["lease"])
        proxy.restore()
        context = plain.contexts["task"]
        if share > 1:
            assert context.reason == "lease_lost"
        if share < 0.5:
            assert context.reason is None
        plain.gate("task").set()
        # There is no other worker, so its work counts in any case.
        document = plain.wait_status("task", "succeeded")
        plain.settled()
    assert len(document["task_state"]["worker_states"]) == 1
    assert plain.witness.count("task") == 1


def test_the_network_is_cut_at_the_end_of_a_task(plain: Scene, proxy: Proxy) -> None:
    """
    An outcome that cannot be stored for longer than the lease: one more run at most (B16).
    """
    with plain.consuming():
        plain.send("task", "wait", **SHORT)
        plain.witness.wait_begun("task")
        with plain.another_consumer(worker_id="near"):
            proxy.cut()
            plain.gate("task").set()
            document = plain.wait_status("task", "succeeded", 15)
            proxy.restore()
            assert document["task_state"]["worker_states"][-1]["worker_id"] == "near"
        plain.settled()
    assert plain.witness.count("task") == 2


def test_every_write_waits_for_the_majority(
    server_uri: str, client: MongoClient[Document], database: Database[Document]
) -> None:
    """
    Whatever the application's client is set to: majority and journal, reads from the primary (B63).
    """
    lax = {"w": 1, "journal": False, "readPreference": "secondaryPreferred"}
    with scene_on(server_uri, database, client, None, **lax) as scene, scene.consuming():
        producer = Producer(scene.app_tasks)
        producer.send("task", {"do": "wait raise-first"}, lease=1, heartbeat=0.1, retry_delay=0)
        scene.invariants.sent("task")
        scene.witness.wait_begun("task")
        wait_until(lambda: scene.app.log.of("heartbeat", "update"), "it sends a heartbeat")
        producer.send("task", {"do": "return"}, if_exists="update", delay=0)
        scene.gate("task").set()
        scene.wait_status("task", "succeeded")
        producer.send_many([("many", {"do": "return"})])
        producer.cancel("many")
        scene.settled()
        calls = list(scene.app.log.calls)
    writes = [call for call in calls if call.command in {"insert", "update", "delete"}]
    assert {"caller", "claim", "heartbeat", "outcome"} <= {call.part for call in writes}
    concerns = [call.sent["writeConcern"] for call in writes]
    assert concerns == [{"w": "majority", "j": True}] * len(writes)
    reads = [call for call in calls if call.command in {"find", "aggregate"}]
    modes = {call.sent.get("$readPreference", {}).get("mode", "primary") for call in reads}
    assert modes <= {"primary", "primaryPreferred"}
