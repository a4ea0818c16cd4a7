"""
The database goes away, in every state of a consumer, and comes back.

It is killed and started again on the same files, or stands still with its connections open. The
witness is on another server, which stays.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
from pymongo import MongoClient
from pymongo.database import Database
from pymongo.errors import PyMongoError

from mscheduler_sync import (
    Consumer,
    Producer,
    SendResult,
    StopReport,
    StoreUnavailable,
    TaskSucceeded,
)
from mscheduler_sync._storage import statements
from tests.support import Document, wait_until
from tests.support.invariants import Witness
from tests.support.scene import LogRecords, Scene, scene_on, stopped_in_time
from tests.support.servers import OwnServer, own_server

#: Minutes of waiting for leases and servers: run with the stress tests.

Kind = Literal["killed", "frozen"]

SHORT: Mapping[str, Any] = {"lease": 2.0, "heartbeat": 0.5}
#: All components work again within 10 s; a busy machine gets a little more.
BACK_S = 12.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OwnServer]:
    with own_server(tmp_path / "data") as server:
        yield server


@pytest.fixture
def scenes(server: OwnServer, database: Database[Document]) -> Iterator[Callable[[str], Scene]]:
    """
    Set scenes on the test's own server, by name; the witness is on the other one.
    """
    with contextlib.ExitStack() as stack:

        def scene(name: str) -> Scene:
            witness = Witness(database[name])
            context = scene_on(server.uri, server.database(name), server.control, witness)
            return stack.enter_context(context)

        yield scene


@contextlib.contextmanager
def away(server: OwnServer, kind: Kind) -> Iterator[None]:
    """
    The server is away while the block runs.
    """
    (server.kill if kind == "killed" else server.freeze)()
    try:
        yield
    finally:
        (server.start_again if kind == "killed" else server.thaw)()


def orphan(scene: Scene, key: str) -> None:
    """
    Claim *key* for a worker that will never be heard of again.
    """
    statement = statements.attempts.claim([(key, "orphan")], "dead")
    result = scene.tasks.update_one(statement.filter, statement.pipeline)
    assert result.modified_count == 1


def all_parts_work(scene: Scene) -> None:
    """
    Prove of each component that it works, within `BACK_S` in all.
    """
    deadline_s = time.monotonic() + BACK_S

    def left_s() -> float:
        return max(0.1, deadline_s - time.monotonic())

    with scene.consumer.subscribe(TaskSucceeded) as events:
        scene.send("back-orphan", **SHORT, retry_delay=0)
        with contextlib.suppress(AssertionError):
            # The consumer may be faster; then the claimer needs no more proof.
            orphan(scene, "back-orphan")
        scene.send("back-insert")
        scene.send("back-future", delay=1.0)
        scene.send("back-retry", "raise-first", retry_delay=0.5)
        scene.send("back-long", "wait", lease=1.0, heartbeat=0.2)
        first_end = scene.wait_status("back-long", "running", left_s())["due"]
        for key in ("back-insert", "back-future", "back-retry", "back-orphan"):
            scene.wait_status(key, "succeeded", left_s())
        wait_until(
            lambda: scene.wait_status("back-long", "running")["due"] > first_end,
            "the lease is renewed",
            left_s(),
        )
        scene.gate("back-long").set()
        assert events.wait_for(lambda event: event.key == "back-long", left_s()) is not None
    wait_until(lambda: scene.consumer.health().discovery == "stream", "it streams", left_s())
    wait_until(lambda: scene.consumer.health().ok, "all components are well", left_s())


@pytest.mark.parametrize(
    ("kind", "seconds"), [("killed", 1), ("frozen", 5), ("killed", 9), ("frozen", 9)]
)
def test_an_outage_in_every_state(
    server: OwnServer, scenes: Callable[[str], Scene], kind: Kind, seconds: int
) -> None:
    """
    Idle, busy, draining or starting: it lives on; nothing is lost or repeated (B16, B58, B59).
    """
    idle, busy, draining, starting = map(scenes, ["idle", "busy", "draining", "starting"])
    reports: list[StopReport] = []
    sent: list[SendResult] = []
    timeout_s = seconds + 8

    def stop() -> None:
        reports.append(stopped_in_time(draining.consumer, timeout_s, timeout_s + 2))

    def send() -> None:
        producer = Producer(busy.app_tasks)
        while not sent:
            # A call waits at most 10 s for a server.
            with contextlib.suppress(StoreUnavailable):
                sent.append(producer.send("sent during", {"do": "return"}))

    with contextlib.ExitStack() as stack:
        for scene in (idle, busy, draining):
            consumer = stack.enter_context(scene.consuming())
            assert consumer.wait_started(10)
        # Come due, or are to be retried, while the server is away or after it.
        idle.send("future", delay=0.5)
        idle.send("failing", "raise-first", retry_delay=0.8)
        for key in ("ends during", "ends after"):
            busy.send(key, "wait", **SHORT)
            busy.witness.wait_begun(key)
        draining.send("drained", "wait", **SHORT)
        draining.witness.wait_begun("drained")
        starting.send("waiting", **SHORT)
        idle.witness.wait_begun("failing")
        threads = [threading.Thread(target=target) for target in (stop, send)]
        threads[0].start()
        with away(server, kind):
            threads[1].start()
            stack.enter_context(starting.consuming())
            draining.gate("drained").set()
            busy.gate("ends during").set()
            threading.Event().wait(seconds)
        busy.gate("ends after").set()
        for thread in threads:
            thread.join()

        assert [report.finished for report in reports] == [("drained",)]
        assert [result.inserted for result in sent] == [True]
        ended = {
            idle: ["future", "failing"],
            busy: ["ends during", "ends after", "sent during"],
            draining: ["drained"],
            starting: ["waiting"],
        }
        for scene, keys in ended.items():
            for key in keys:
                scene.wait_status(key, "succeeded")
        with ThreadPoolExecutor() as pool:
            list(pool.map(all_parts_work, [idle, busy, starting]))
        for scene in (idle, busy, starting):
            scene.settled()
    draining.invariants.check()
    # What ended during the outage is not done again, however long it lasted.
    assert [busy.witness.count(key) for key in ended[busy]] == [1, 1, 1]
    assert draining.witness.count("drained") == 1
    assert [idle.witness.count(key) for key in ended[idle]] == [1, 2]


@pytest.mark.parametrize("kind", ["killed", "frozen"])
def test_an_outage_takes_nothing_from_the_living(
    server: OwnServer, scenes: Callable[[str], Scene], kind: Kind
) -> None:
    """
    After an outage longer than the lease the others let its owner speak first (B01, B29).
    """
    scene = scenes("busy")
    with scene.consuming(worker_id="owner"):
        for key in ("ends during", "ends after"):
            scene.send(key, "wait", lease=4.0, heartbeat=2.0)
            scene.witness.wait_begun(key)
        with scene.another_consumer(worker_id="other") as other:
            assert other.wait_started(10)
            with away(server, kind):
                scene.gate("ends during").set()
                threading.Event().wait(6)
            scene.wait_status("ends during", "succeeded")
            # Longer than the lease, counted from the return.
            scene.send("later", delay=4.5)
            scene.wait_status("later", "succeeded")
            scene.gate("ends after").set()
            document = scene.wait_status("ends after", "succeeded")
        scene.settled()
    assert [a["worker_id"] for a in document["task_state"]["worker_states"]] == ["owner"]
    assert [scene.witness.count(key) for key in ("ends during", "ends after")] == [1, 1]


@pytest.mark.parametrize("kind", ["killed", "frozen"])
def test_a_stop_without_a_server(
    server: OwnServer, scenes: Callable[[str], Scene], kind: Kind
) -> None:
    """
    A stop returns in its time whatever the consumer was doing, and says what is left (B47, B60).
    """
    names = ["idle", "running", "ended", "claiming", "starting"]
    scene_of = {name: scenes(name) for name in names}
    reports: dict[str, StopReport] = {}

    def stop(name: str) -> None:
        reports[name] = stopped_in_time(scene_of[name].consumer, 2, 4)

    with contextlib.ExitStack() as stack:
        for name in names[:-1]:
            consumer = stack.enter_context(scene_of[name].consuming())
            assert consumer.wait_started(10)
        for name in ("running", "ended"):
            scene_of[name].send("task", "wait", **SHORT)
            scene_of[name].witness.wait_begun("task")
        scene_of["claiming"].send("task", delay=1.0, **SHORT)
        scene_of["starting"].send("task", **SHORT)
        with away(server, kind):
            stack.enter_context(scene_of["starting"].consuming())
            scene_of["ended"].gate("task").set()
            # By then the claimer is stuck with the task that has come due.
            threading.Event().wait(1.5)
            stops = [threading.Thread(target=stop, args=[name]) for name in names]
            for thread in stops:
                thread.start()
            for thread in stops:
                thread.join()
        assert reports.keys() == set(names), "a stop took too long"
        assert reports["running"].abandoned == ("task",)
        assert (reports["ended"].abandoned, reports["ended"].unstored) == ((), ("task",))
        for name in ("idle", "claiming", "starting"):
            assert reports[name].abandoned == ()
        scene_of["running"].gate("task").set()
    for name in names[1:]:
        scene = scene_of[name]
        with scene.consuming(worker_id="next"):
            scene.wait_status("task", "succeeded")
            scene.settled()
    counts = {name: scene_of[name].witness.count("task") for name in names[1:]}
    # An outcome that could not be stored in time: once more, unless its last try came through.
    assert counts.pop("ended") in {1, 2}
    assert counts == {"running": 2, "claiming": 1, "starting": 1}


def test_no_component_sleeps_on(scenes: Callable[[str], Scene]) -> None:
    """
    However long an outage lasted, every component asks again soon enough to be back in time (B59).
    """
    with scenes("idle").consuming() as consumer:
        assert consumer._assembly is not None
        pauses = {one.component: one.longest_pause_s for one in consumer._assembly.services}
    assert set(pauses) == {"outcome", "heartbeat", "claim", "fetch", "watch"}
    assert max(pauses.values()) <= BACK_S


def test_a_stand_alone_server(
    tmp_path: Path, database: Database[Document], logged: LogRecords
) -> None:
    """
    Without change streams it says so once, polls, and is well (B44).
    """
    with (
        own_server(tmp_path / "data", "--standalone") as server,
        scene_on(
            server.uri, server.database("alone"), server.control, Witness(database.alone)
        ) as scene,
    ):
        with scene.consuming(poll_interval=0.1) as consumer:
            scene.send("future", delay=0.5)
            scene.send("failing", "raise-first", retry_delay=0.3)
            scene.send("orphan", delay=1.0, **SHORT)
            for key in ("future", "failing", "orphan"):
                scene.wait_status(key, "succeeded")
            assert (consumer.health().ok, consumer.health().discovery) == (True, "poll")
            scene.settled()
            aggregates = scene.app.log.of("watch", "aggregate")
        assert len(logged.events("polling")) == 1
        assert len(aggregates) == 1, "it asks for the stream again and again"


def test_a_server_that_never_was() -> None:
    """
    A consumer of a server that does not exist starts at once, and stops in its time (B60).
    """
    with MongoClient[Document]("mongodb://127.0.0.1:9/?directConnection=true") as client:
        consumer = Consumer(client.nowhere.tasks, print)
        began_s = time.monotonic()
        consumer.start()
        # It has waited for no server: that takes ten seconds.
        assert time.monotonic() - began_s < 5
        assert not consumer.wait_started(0.5)
        report = stopped_in_time(consumer, 1, 3)
        assert (report.finished, report.released, report.abandoned) == ((), (), ())
        # Calls that are under way end within their own 10 s. To have them end now:
        client.close()


def test_a_small_connection_pool(
    server_uri: str, client: MongoClient[Document], database: Database[Document]
) -> None:
    """
    More threads than connections, and functions that use them too, only make it slower (B62).
    """
    with scene_on(server_uri, database, client, maxPoolSize=2, waitQueueTimeoutMS=200) as scene:
        own = scene.app.client[database.name].own
        done = threading.Event()

        def busy() -> None:
            while not done.wait(0.01):
                with contextlib.suppress(PyMongoError):
                    own.insert_one({})

        threads = [threading.Thread(target=busy) for _ in range(6)]
        with scene.consuming(max_workers=6):
            for thread in threads:
                thread.start()
            try:
                keys = [f"task-{n}" for n in range(6)]
                for key in keys:
                    scene.send(key, "wait", lease=5, heartbeat=1)
                for key in keys:
                    scene.witness.wait_begun(key)
                wait_until(
                    lambda: len(scene.app.log.of("heartbeat", "update")) >= 18, "18 heartbeats"
                )
                scene.open_all()
                for key in keys:
                    scene.wait_status(key, "succeeded")
            finally:
                done.set()
                for thread in threads:
                    thread.join()
            scene.settled()
        assert [scene.witness.count(key) for key in keys] == [1] * 6
