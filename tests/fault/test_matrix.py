"""
Every command of every part, with every kind of fault.

The parts and their commands: see `PARTS`. After each fault the work is done, once; every slot
works (a probe), every part is well, every guarantee holds.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import attrs
import pytest
from pymongo import MongoClient
from pymongo.database import Database

from mscheduler_sync import Producer, SendResult, StoreError, StoreRejected
from tests.support import Document, fail_point, wait_until
from tests.support.scene import (
    CALLER,
    CLOSED,
    FORBIDDEN,
    REFUSED,
    TRANSIENT,
    UNCONFIRMED,
    Fault,
    Rule,
    Scene,
    blocked,
    scene_on,
)

#: Longer than the lease in `SHORT`.
BLOCKED = blocked(1500)
SHORT: Mapping[str, Any] = {"lease": 1.0, "heartbeat": 0.3}

When = Literal["before the start", "idle", "while it runs", "at its end"]


@attrs.frozen
class Part:
    """
    One command of one part, and when it is sent.
    """

    name: str
    thread: str
    command: str
    sent: When
    #: Tells this command from others of the same name.
    only: Callable[[Mapping[str, Any]], bool] = lambda _: True

    def __str__(self) -> str:
        return self.name


def _reads_attempt(command: Mapping[str, Any]) -> bool:
    return bool(command["projection"] == {"task_state.worker_states.returns": 0})


def _reads_due(command: Mapping[str, Any]) -> bool:
    return isinstance(command["filter"].get("routes"), str)


WRITES = (
    Part("claim", "claim", "update", "idle"),
    Part("heartbeat", "heartbeat", "update", "while it runs"),
    Part("outcome", "outcome", "update", "at its end"),
)
READS = (
    Part("read-back", "claim", "find", "idle", _reads_attempt),
    Part("heartbeat's look", "heartbeat", "find", "while it runs"),
    Part("due query", "fetch", "find", "before the start", _reads_due),
    Part("stream's opening", "watch", "aggregate", "before the start"),
    Part("stream", "watch", "getMore", "before the start"),
    Part("indexes", "fetch", "createIndexes", "before the start"),
)
PARTS = (*WRITES, *READS)


def cells() -> Iterator[tuple[Part, Fault]]:
    """
    Yield parts with faults; of each kind of code another one for each part, in turn.
    """
    for number, part in enumerate(PARTS):
        yield part, TRANSIENT[number % len(TRANSIENT)]
        # A missing privilege means much to the stream: both of its commands meet that.
        yield part, (FORBIDDEN if part.thread == "watch" else REFUSED[number % len(REFUSED)])
        yield part, CLOSED
        yield part, BLOCKED
        if part in WRITES:
            yield part, UNCONFIRMED


@pytest.fixture
def retrying(
    server_uri: str, client: MongoClient[Document], database: Database[Document]
) -> Iterator[Scene]:
    """
    A scene whose driver repeats reads and writes by itself.
    """
    with scene_on(server_uri, database, client, retryWrites=True, retryReads=True) as scene:
        yield scene


def as_the_library_meets_it(fault: Fault) -> list[Fault]:
    """
    Return the faults that make a driver with retries give up, or try twice.
    """
    return [fault, fault] if fault.is_retried_by_driver else [fault]


@pytest.mark.parametrize(("part", "fault"), list(cells()), ids=str)
def test_a_fault_delays_the_work_and_no_more(scene: Scene, part: Part, fault: Fault) -> None:
    """
    One failed command of any part, of any kind, costs time but no task and no second run (B16).
    """
    play(scene, part, [fault])


@pytest.mark.parametrize("fault", [TRANSIENT[0], CLOSED, UNCONFIRMED], ids=str)
@pytest.mark.parametrize("part", WRITES, ids=str)
def test_a_fault_with_retryable_writes(retrying: Scene, part: Part, fault: Fault) -> None:
    """
    It is the same where the driver repeats writes by itself (B17).
    """
    play(retrying, part, as_the_library_meets_it(fault))


def play(scene: Scene, part: Part, faults: list[Fault]) -> None:
    """
    Run tasks until *part* has met *faults*: one, unless another part's command got in between.
    """
    options = SHORT if BLOCKED in faults or part.thread == "heartbeat" else {}
    rule = scene.app.hit(part.thread, part.command, *faults, when=part.only)
    if part.sent != "before the start":
        rule.hold()
    keys: list[str] = []
    with contextlib.ExitStack() as stack:
        if part.sent == "before the start":
            scene.send("task", **options)
        consumer = stack.enter_context(scene.consuming(poll_interval=0.1))
        if part.sent == "before the start":
            rule.wait_done()
            scene.wait_status("task", "succeeded")
            keys.append("task")
        else:
            assert consumer.wait_started(10)
            wait_until(lambda: consumer.health().discovery == "stream", "the stream is open")
        while not rule.done and len(keys) < 5:
            keys.append(f"task-{len(keys)}")
            run_one(scene, part, rule, keys[-1], options)
        rule.wait_done(0)
        scene.settled()
        assert [scene.witness.count(key) for key in keys] == [1] * len(keys)


def run_one(scene: Scene, part: Part, rule: Rule, key: str, options: Mapping[str, Any]) -> None:
    """
    Run one task, with the fault let loose when *part* sends its command.
    """
    if part.sent == "idle":
        rule.release()
        scene.send(key, **options)
    else:
        scene.send(key, "wait", **options)
        scene.witness.wait_begun(key)
        rule.release()
        if part.sent == "while it runs":
            rule.wait_done()
        scene.gate(key).set()
    scene.wait_status(key, "succeeded")


def test_the_outcome_is_refused_many_times(scene: Scene) -> None:
    """
    While the outcome cannot be stored the lease is kept, and no other worker gets the task (B16).
    """
    with scene.consuming():
        scene.send("task", "wait", **SHORT)
        first = scene.witness.wait_begun("task")
        with scene.another_consumer(worker_id="two"):
            rule = scene.app.hit("outcome", "update", *[TRANSIENT[0]] * 3)
            scene.gate("task").set()
            rule.wait_done()
            document = scene.wait_status("task", "succeeded")
        scene.settled()
    assert [run.running_id for run in scene.witness.runs("task")] == [first.running_id]
    assert len(document["task_state"]["worker_states"]) == 1


def test_the_look_before_a_contended_claim_fails(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A claimer that looks once more after lost claims, and fails to, does not forget the task.
    """
    with scene.consuming() as consumer:
        wait_until(lambda: consumer.health().discovery == "stream", "the stream is open")
        # A pass that finds the task instead of the stream leaves it to nobody.
        assert consumer.run_until_idle(10)
        assert consumer._assembly is not None
        # As after claims that went to others.
        contention = consumer._assembly.claimer._contention
        monkeypatch.setattr(contention, "_wait_s", 0.05)
        monkeypatch.setattr(type(contention), "draw_wait_s", lambda _: 0.01)
        rule = scene.app.hit("claim", "find", CLOSED, when=lambda c: list(c["filter"]) == ["key"])
        scene.send("task")
        rule.wait_done()
        scene.wait_status("task", "succeeded", timeout=10)
        scene.settled()


@pytest.mark.parametrize("number", [11602, 10107, 13435])
def test_every_command_fails_for_a_while(
    scene: Scene, client: MongoClient[Document], number: int
) -> None:
    """
    A server that steps down or shuts down with tasks in flight costs none of them (B58).
    """
    running = [f"running-{n}" for n in range(3)]
    waiting = [f"waiting-{n}" for n in range(3)]
    commands = ["update", "find", "aggregate", "getMore", "createIndexes"]
    with scene.consuming(max_workers=3):
        for key in running:
            scene.send(key, "wait", **SHORT)
        for key in running:
            scene.witness.wait_begun(key)
        with fail_point(client, commands, "alwaysOn", errorCode=number, appName=scene.app.name):
            scene.gate(running[0]).set()
            for key in waiting:
                scene.send(key)
            for part, command in [
                ("heartbeat", "update"),
                ("outcome", "update"),
                ("watch", "getMore"),
            ]:
                wait_until(partial(has_met, scene, part, command, number), f"{part} meets it")
        scene.open_all()
        for key in (*running, *waiting):
            scene.wait_status(key, "succeeded")
        scene.settled()
    assert [scene.witness.count(key) for key in (*running, *waiting)] == [1] * 6


@pytest.mark.parametrize("fault", [TRANSIENT[0], REFUSED[0], FORBIDDEN, CLOSED, BLOCKED], ids=str)
def test_the_server_does_not_introduce_itself(
    server_uri: str, client: MongoClient[Document], database: Database[Document], fault: Fault
) -> None:
    """
    A consumer whose every ``hello`` fails, the driver's own included, works once they succeed.
    """
    with (
        scene_on(server_uri, database, client, serverSelectionTimeoutMS=500) as scene,
        fail_point(client, ["hello"], "alwaysOn", appName=scene.app.name, **fault.data),
    ):
        scene.send("task", **SHORT)
        with scene.consuming() as consumer:

            def is_in_trouble() -> bool:
                calls = scene.app.log.of("fetch", "hello")
                failed = consumer.health().components["fetch"].last_error is not None
                return failed or any(fault.happened(call) for call in calls)

            wait_until(is_in_trouble, "the fetcher has met it")
            scene.app.disarm()
            scene.wait_status("task", "succeeded")
            scene.settled()
            assert scene.witness.count("task") == 1


def has_met(scene: Scene, part: str, command: str, number: int) -> bool:
    return any(call.reply.get("code") == number for call in scene.app.log.of(part, command))


# -- the producer -------------------------------------------------------------------------------

SENDS = (
    Part("insert", CALLER, "insert", "idle"),
    Part("change", CALLER, "update", "idle"),
    Part("indexes", CALLER, "createIndexes", "idle"),
)


@pytest.mark.parametrize("retries", [False, True], ids=["plain", "retrying"])
@pytest.mark.parametrize("part", SENDS, ids=str)
def test_a_send_meets_every_fault(
    request: pytest.FixtureRequest, part: Part, retries: bool
) -> None:
    """
    A send that returns is stored once, as it says; one that raises may be repeated.
    """
    scene: Scene = request.getfixturevalue("retrying" if retries else "scene")
    with scene.consuming(watch=False, poll_interval=0.1):
        kinds = (*TRANSIENT, *REFUSED, CLOSED, blocked(300), UNCONFIRMED)
        # The driver repeats only some of them.
        for fault in (TRANSIENT[0], CLOSED, UNCONFIRMED) if retries else kinds:
            key = f"{part} {fault}"
            producer = Producer(scene.app_tasks)
            if part.command == "update":
                scene.send(key, delay=3600)
            faults = as_the_library_meets_it(fault) if retries else [fault]
            rule = scene.app.hit(part.thread, part.command, *faults)
            result = send_until_it_returns(producer, key, fault)
            rule.wait_done(0)
            assert (result.inserted, result.updated) == (
                (False, True) if part.command == "update" else (True, False)
            ), key
            scene.invariants.sent(key)
            assert scene.wait_status(key, "succeeded")["params"] == {"do": "return", "value": 1}
            assert scene.tasks.count_documents({"key": key}) == 1
            assert scene.witness.count(key) == 1
        scene.settled()


def send_until_it_returns(producer: Producer, key: str, fault: Fault) -> SendResult:
    """
    Send, and send again after an error, as an application does; at most thrice.
    """
    params = {"do": "return", "value": 1}
    for _ in range(2):
        try:
            return producer.send(key, params, delay=0, if_exists="update")
        except StoreError as error:
            if isinstance(error, StoreRejected) != (fault is FORBIDDEN):
                raise
    return producer.send(key, params, delay=0, if_exists="update")


def test_no_fault_leaves_a_thread_behind(scene: Scene) -> None:
    """
    After faults on all its parts a stopped consumer has left no thread.
    """
    with scene.consuming():
        for part in ("claim", "outcome"):
            rule = scene.app.hit(part, "update", CLOSED)
            scene.send(part)
            rule.wait_done()
            scene.wait_status(part, "succeeded")
        scene.settled()
    names = [t.name for t in threading.enumerate() if t.name.startswith("ms-")]
    assert names == []
