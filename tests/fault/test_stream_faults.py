"""
The change stream fails in every way; the work goes on, and the stream comes back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.database import Database

from mscheduler_sync import Producer
from mscheduler_sync._stages.watcher import Watcher
from mscheduler_sync._storage import stream
from mscheduler_sync._storage.statements.discovery import INDEXES
from tests.support import Document, fail_point, wait_until
from tests.support.invariants import Witness, status_of
from tests.support.proxy import proxy_to
from tests.support.scene import CLOSED, Fault, LogRecords, Scene, scene_on, stopped_in_time
from tests.support.servers import own_server

#: Minutes of waiting for leases and servers: run with the stress tests.

#: Far below the pause between two regular passes, so that only the stream can be so quick.
SOON_S = 10

RESUMABLE = [6, 7, 89, 91, 189, 10107, 11600, 11602, 13435, 13436]
#: Interrupted, killed, history lost, token invalid, position lost, no such cursor, and others.
FINAL = [11601, 237, 286, 280, 136, 43, 260, 50, 8000, 13]


def streams(scene: Scene) -> bool:
    return scene.consumer.health().discovery == "stream"


def wait_streaming(scene: Scene) -> None:
    wait_until(lambda: streams(scene), "the stream is open", 15)


def coded(number: int, *labels: str) -> Fault:
    return Fault(f"code {number}", {"errorCode": number, "errorLabels": list(labels)})


@pytest.mark.parametrize(
    ("numbers", "labels"),
    [(RESUMABLE, ["ResumableChangeStreamError"]), (FINAL, [])],
    ids=["resumable", "final"],
)
def test_the_stream_meets_a_code(
    scene: Scene, logged: LogRecords, numbers: list[int], labels: list[str]
) -> None:
    """
    Whatever code ends a stream, it is open again and tells of the next task (B42, B48).
    """
    with scene.consuming() as consumer:
        for number in numbers:
            wait_streaming(scene)
            opened = len(scene.app.log.of("watch", "aggregate"))
            rule = scene.app.hit("watch", "getMore", coded(number, *labels))
            # Wakes the stream, and is in the gap.
            scene.send(f"gap {number}")
            rule.wait_done()
            wait_until(
                lambda opened=opened: len(scene.app.log.of("watch", "aggregate")) > opened,  # type: ignore[misc]
                f"the stream is opened again after {number}",
            )
            wait_streaming(scene)
            scene.wait_status(f"gap {number}", "succeeded", SOON_S)
            scene.send(f"next {number}")
            scene.wait_status(f"next {number}", "succeeded", SOON_S)
        assert consumer.health().components["watch"].alive
        scene.settled()
    assert logged.events("polling") == []


def test_the_history_is_lost_for_a_while(
    scene: Scene, client: MongoClient[Document], logged: LogRecords
) -> None:
    """
    While every stream ends at once it is opened ever more seldom, with few words (B42).
    """
    with scene.consuming(poll_interval=0.2):
        wait_streaming(scene)
        scene.app.log.calls.clear()
        with fail_point(client, ["getMore"], "alwaysOn", errorCode=286, appName=scene.app.name):
            for number in range(5):
                scene.send(f"task-{number}")
                # Found by a pass, as long as no stream lives.
                scene.wait_status(f"task-{number}", "succeeded", SOON_S)
            wait_until(lambda: len(scene.app.log.of("watch", "aggregate")) >= 2, "two openings")
        openings = scene.app.log.of("watch", "aggregate")
        assert len(openings) < 12
        assert all("resumeAfter" not in str(call.sent["pipeline"]) for call in openings)
        trouble = [
            r for r in logged.events("store_trouble") if getattr(r, "component", "") == "watch"
        ]
        assert 1 <= len(trouble) <= 2
        wait_until(lambda: streams(scene), "the stream is open again", 15)
        scene.settled()


def test_the_history_is_really_lost(tmp_path: Path, database: Database[Document]) -> None:
    """
    A stream whose place in the history is gone begins anew, and misses no task (B42).
    """
    with (
        own_server(tmp_path / "data", "--oplog-max-entries", "50") as server,
        scene_on(
            server.uri, server.database("short"), server.control, Witness(database.short)
        ) as scene,
        scene.consuming(),
    ):
        wait_streaming(scene)
        rule = scene.app.hit("watch", "getMore", CLOSED)
        noise = server.database("noise").rows
        for _ in range(4):
            noise.insert_many([{} for _ in range(100)])
        scene.send("in the gap")
        for _ in range(4):
            noise.insert_many([{} for _ in range(100)])
        server.control.admin.command("secantusAdmin.pruneOplog")
        rule.wait_done()
        wait_streaming(scene)
        scene.wait_status("in the gap", "succeeded", SOON_S)
        scene.settled()


def test_a_resume_after_other_collections_were_made(
    scene: Scene, client: MongoClient[Document], logged: LogRecords
) -> None:
    """
    A token that the server does not take back does not mean that there are no streams.
    """
    with scene.consuming():
        wait_streaming(scene)
        scene.tasks.database.other.create_index("field")
        rule = scene.app.hit("watch", "getMore", CLOSED)
        scene.send("wakes it")
        rule.wait_done()
        scene.wait_status("wakes it", "succeeded", SOON_S)
        wait_streaming(scene)
        scene.settled()
    assert logged.events("polling") == []


def test_the_cursor_is_killed(scene: Scene, client: MongoClient[Document]) -> None:
    """
    A stream whose cursor an administrator kills is opened again (B48).
    """
    with scene.consuming():
        wait_streaming(scene)
        reply = scene.app.log.of("watch", "aggregate")[-1].reply
        scene.tasks.database.command(
            "killCursors", scene.tasks.name, cursors=[reply["cursor"]["id"]]
        )
        scene.send("task")
        scene.wait_status("task", "succeeded", SOON_S)
        wait_until(lambda: len(scene.app.log.of("watch", "aggregate")) > 1, "it is opened again")
        wait_streaming(scene)
        scene.settled()


# -- the collection itself goes away ------------------------------------------------------------


def drop(tasks: Collection[Document]) -> None:
    tasks.drop()


def drop_database(tasks: Collection[Document]) -> None:
    tasks.database.client.drop_database(tasks.database)


def rename(tasks: Collection[Document]) -> None:
    tasks.rename("elsewhere")


def rename_over(tasks: Collection[Document]) -> None:
    tasks.database.fresh.insert_one({"key": "odd"})
    tasks.database.fresh.delete_many({})
    tasks.database.fresh.rename(tasks.name, dropTarget=True)


@pytest.mark.parametrize("away", [drop, drop_database, rename, rename_over])
def test_the_collection_goes_away(
    scene: Scene, away: Callable[[Collection[Document]], None]
) -> None:
    """
    Dropped, renamed or replaced under a consumer: what is sent then runs, with indexes (B45).
    """
    # A witness that is not dropped with it.
    other = scene.tasks.database.client[f"{scene.tasks.database.name}_witness"]
    scene.witness = Witness(other.witness)
    try:
        with scene.consuming():
            scene.send("before", "wait")
            scene.witness.wait_begun("before")
            away(scene.tasks)
            scene.invariants.deleted("before")
            scene.gate("before").set()
            wait_until(lambda: scene.consumer.running_count == 0, "its outcome goes nowhere", 15)
            for number in range(3):
                Producer(scene.tasks).send(f"after-{number}", {"do": "return"})
                scene.wait_status(f"after-{number}", "succeeded", 15)
            wait_until(lambda: scene.consumer.health().ok, "all components are well", 15)
            wait_streaming(scene)
            scene.probe()
        names = {index.name for index in INDEXES}
        assert names <= set(scene.tasks.index_information())
        assert [scene.witness.count(f"after-{number}") for number in range(3)] == [1, 1, 1]
    finally:
        other.client.drop_database(other)


def test_the_collection_goes_away_without_a_producer(scene: Scene) -> None:
    """
    The consumer by itself makes the indexes again (B45).
    """
    with scene.consuming():
        wait_streaming(scene)
        template = scene.tasks.find_one({"key": "template"})
        scene.send("template", delay=3600)
        template = scene.tasks.find_one({"key": "template"})
        assert template is not None
        scene.invariants.deleted("template")
        scene.tasks.drop()
        names = {index.name for index in INDEXES}
        wait_until(lambda: names <= set(scene.tasks.index_information()), "the indexes are there")
        scene.settled()


# -- rights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["aggregate", "createIndexes"])
def test_a_missing_privilege(
    scene: Scene, client: MongoClient[Document], logged: LogRecords, command: str
) -> None:
    """
    Who may not open streams polls, who may not make indexes works without; it is said once (B44).
    """
    with (
        fail_point(client, [command], "alwaysOn", errorCode=13, appName=scene.app.name),
        scene.consuming(poll_interval=0.1) as consumer,
    ):
        scene.send("task")
        scene.send("future", delay=0.5)
        assert Producer(scene.app_tasks).send("mine", {"do": "return"}).inserted
        for key in ("task", "future", "mine"):
            scene.wait_status(key, "succeeded", SOON_S)
        wait_until(lambda: consumer.health().ok, "all components are well", 15)
        assert streams(scene) == (command != "aggregate")
        scene.probe()
    assert len(logged.events("polling")) == (command == "aggregate")
    refusals = len(logged.events("index_refused"))
    # The consumer's, and the producer's of the same program.
    assert refusals == (2 if command == "createIndexes" else 0)
    scene.invariants.check()


# -- the stream is alive, but not well -----------------------------------------------------------


def test_a_large_task(scene: Scene) -> None:
    """
    The largest task that can be sent does not end the stream; a larger one is refused (B43).
    """
    with scene.consuming():
        wait_streaming(scene)
        opened = len(scene.app.log.of("watch", "aggregate"))
        large = "x" * (15 * 1024 * 1024 - 1024)
        scene.producer.send("large", {"do": "return", "text": large})
        scene.invariants.sent("large")
        with pytest.raises(ValueError, match="params"):
            scene.producer.send("larger", {"do": "return", "text": large + "x" * 2048})
        wait_until(lambda: status_of(scene.tasks, "large") == "succeeded", "it succeeds", 20)
        scene.settled()
        assert len(scene.app.log.of("watch", "aggregate")) == opened
    sizes = [len(str(call.reply)) for call in scene.app.log.of("watch", "getMore")]
    assert max(sizes) < 10_000


def test_the_stream_stands_still(
    server_uri: str, client: MongoClient[Document], database: Database[Document]
) -> None:
    """
    A dead connection that looks like a quiet stream is noticed, and nothing is missed (B47).
    """
    with (
        proxy_to(server_uri) as proxy,
        scene_on(proxy.uri, database, client) as scene,
        scene.consuming(),
    ):
        wait_streaming(scene)
        proxy.silence("getMore")
        scene.send("wakes it")
        scene.send("in the silence")
        # Ten seconds of silence, then a pass.
        scene.wait_status("in the silence", "succeeded", 20)
        proxy.silence()
        wait_streaming(scene)
        scene.settled()


def test_a_stop_does_not_wait_for_the_stream(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A stream without events holds up no stop, however long its server waits for one (B47).
    """
    monkeypatch.setattr(stream, "AWAIT_MS", 9000)
    with scene.consuming() as consumer:
        wait_streaming(scene)
        # What the first pass writes, the indexes, would end the wait as well.
        assert consumer.wait_started(10)
        assert stopped_in_time(consumer, 10, 4).threads == ()


def test_an_event_that_cannot_be_handled(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, logged: LogRecords
) -> None:
    """
    A programming error at one event is logged, and the task is found all the same (B48).
    """
    with scene.consuming() as consumer:
        wait_streaming(scene)
        assert consumer._assembly is not None
        watcher = consumer._assembly.watcher
        assert watcher is not None
        on_event = watcher.on_event
        broken = iter([True])

        def break_once(_: Watcher, event: Mapping[str, Any]) -> None:
            if next(broken, False):
                raise TypeError("as told")
            on_event(event)

        monkeypatch.setattr(Watcher, "on_event", break_once)
        scene.send("task")
        scene.wait_status("task", "succeeded", SOON_S)
        wait_streaming(scene)
        scene.settled()
    (record,) = logged.events("component_failed")
    assert (record.levelno, getattr(record, "component", "")) == (logging.ERROR, "watch")


def test_streams_are_cut_while_tasks_pour_in(scene: Scene) -> None:
    """
    However often the stream ends, every task is found, and runs once (B19).
    """
    keys = [f"task-{n}" for n in range(120)]
    with scene.consuming(max_workers=4), scene.another_consumer(worker_id="two"):
        rule = scene.app.hit("watch", "getMore", *[CLOSED, coded(286), coded(43)] * 3)

        def send() -> None:
            producer = Producer(scene.tasks)
            for key in keys[::2]:
                producer.send(key, {"do": "return"})

        sender = threading.Thread(target=send)
        sender.start()
        for start in range(1, len(keys), 50):
            scene.producer.send_many(
                [(key, {"do": "return"}) for key in keys[start : start + 50 : 2]]
            )
        sender.join()
        scene.invariants.sent(*keys)
        wait_until(lambda: scene.tasks.count_documents({"status": "succeeded"}) == 120, "all", 40)
        scene.send("wakes it")
        rule.wait_done(40)
        scene.settled()
    assert [scene.witness.count(key) for key in keys] == [1] * 120
