"""
TaskFinished: one for each task that ends, whichever way, over all consumers together.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import attrs
import pytest
from pymongo import MongoClient
from pymongo.collection import Collection

from mscheduler_sync import (
    AttemptEnded,
    AttemptLost,
    AttemptReleased,
    AttemptStarted,
    Consumer,
    Event,
    PermanentFailure,
    Producer,
    Snooze,
    Subscription,
    TaskContext,
    TaskFinished,
    TaskSucceeded,
)
from tests.support import Document, wait_until
from tests.support.scene import CLOSED, UNCONFIRMED, App, Fault

Tasks = Collection[Document]

#: What the function does at each attempt in turn; the last goes for all that follow.
PLANS: Final[dict[str, list[str]]] = {
    "returns": ["return"],
    "fails": ["fail"],
    "fails once": ["fail", "return"],
    "fails for good": ["give up"],
    "snoozes": ["snooze", "return"],
    "snoozes and fails": ["snooze", "fail"],
}
#: What it does once it was told that the task is cancelled.
WHEN_CANCELLED: Final = ["return", "fail", "give up", "snooze", "check"]
#: After a fault nothing is settled for a while, and then found by the next pass; a cancel that came
#: while a claim was under way is learned of with the next heartbeat.
LIVELY: Final[dict[str, Any]] = {"lease": 8, "heartbeat": 2}
#: Which command of which component meets what.
FAULTS: Final = [
    ("outcome", "update", UNCONFIRMED),
    ("outcome", "update", CLOSED),
    ("outcome", "find", CLOSED),
    ("claim", "update", UNCONFIRMED),
    ("claim", "find", CLOSED),
]


@attrs.frozen
class Fleet:
    """
    Two consumers of one collection, to be started, and all that they tell.
    """

    producer: Producer
    tasks: Tasks
    consumers: list[Consumer]
    streams: list[Subscription]
    runs: Counter[str]
    app: App

    def start(self) -> None:
        for consumer in self.consumers:
            consumer.start()

    def stop(self) -> dict[str | None, list[tuple[int, Event]]]:
        """
        Stop both; return what each consumer (by number) has told, by key.
        """
        for consumer in self.consumers:
            consumer.stop()
        told: dict[str | None, list[tuple[int, Event]]] = {}
        for number, stream in enumerate(self.streams):
            for event in stream:
                told.setdefault(event.key, []).append((number, event))
            assert stream.dropped == 0
        return told


@pytest.fixture
def fleet(server_uri: str, client: MongoClient[Document], collection: Tasks) -> Iterator[Fleet]:
    app = App(server_uri, client, retryWrites=False, retryReads=False)
    tasks = app.client[collection.database.name][collection.name]
    runs: Counter[str] = Counter()
    lock = threading.Lock()

    def function(params: dict[str, Any], context: TaskContext) -> int:
        with lock:
            turn = runs[context.key]
            runs[context.key] += 1
        plan: list[str] = params["plan"]
        if params["waits"]:
            assert context.cancelled.wait(30), context.key
        return play(plan[min(turn, len(plan) - 1)], context)

    with contextlib.ExitStack() as stack:
        stack.enter_context(app.client)
        stack.callback(app.disarm)
        consumers = [
            Consumer(tasks, function, worker_id=name, max_workers=20) for name in ("one", "two")
        ]
        # Before the start: nothing is missed.
        streams = [consumer.subscribe() for consumer in consumers]
        for consumer in consumers:
            stack.callback(consumer.stop)
        yield Fleet(Producer(collection), collection, consumers, streams, runs, app)


def play(step: str, context: TaskContext) -> int:
    if step == "fail":
        raise ValueError("no")
    if step == "give up":
        raise PermanentFailure("never")
    if step == "snooze":
        raise Snooze(0)
    if step == "check":
        context.check()
    return 5


def send_all(producer: Producer) -> dict[str, bool]:
    """
    Send a task for each way to its end; return for each key whether it is to be cancelled.
    """
    sent = {}
    for concurrency, max_attempts in itertools.product([1, 2], [1, 2]):
        options: dict[str, Any] = {
            **LIVELY,
            "concurrency": concurrency,
            "max_attempts": max_attempts,
            "retry_delay": 0,
        }
        where = f"concurrency {concurrency}, max_attempts {max_attempts}"
        for name, plan in PLANS.items():
            key = f"{name}, {where}"
            producer.send(key, {"plan": plan, "waits": False}, **options)
            sent[key] = False
        for step in WHEN_CANCELLED:
            key = f"cancelled, then {step}, {where}"
            producer.send(key, {"plan": [step], "waits": True}, **options)
            sent[key] = True
    return sent


def insert_left_behind(tasks: Tasks) -> list[str]:
    """
    Tasks of a dead worker that used up their last attempt, or are cancelled.
    """
    past = dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc)
    producer = Producer(tasks)
    keys = []
    for number, (is_cancelled, concurrency) in enumerate(itertools.product([0, 1], [1, 2])):
        key = f"left behind {number}"
        producer.send(key, max_attempts=1, delay=3600, concurrency=concurrency, **LIVELY)
        attempt = {
            "running_id": f"{key}: dead",
            "worker_id": "dead",
            "ping_expire_time": past,
            "success_time": None,
            "fail_time": None,
        }
        changes: Document = {
            "task_state.worker_states": [attempt],
            "status": "running",
            "due": past,
        }
        if is_cancelled:
            changes["cancel"] = {"time": past, "worker_ids": []}
            changes["task_option.specific_worker_ids"] = ["__cancelled__"]
        tasks.update_one({"key": key}, {"$set": changes})
        keys.append(key)
    return keys


def check(told: list[tuple[int, Event]], status: str, where: str) -> None:
    """
    One TaskFinished with the stored status, after all attempts; its parts in their order.
    """
    finished = [event for _, event in told if isinstance(event, TaskFinished)]
    assert [event.status for event in finished] == [status], where
    succeeded = [event for _, event in told if isinstance(event, TaskSucceeded)]
    assert len(succeeded) == (status == "succeeded"), where
    (teller,) = [number for number, event in told if isinstance(event, TaskFinished)]
    mine = [event for number, event in told if number == teller]
    after = mine[mine.index(finished[0]) + 1 :]
    # Of the others' attempts, one may end later; none of its own does.
    assert not [e for e in after if isinstance(e, AttemptStarted | AttemptEnded)], where
    kinds: dict[str, list[type[Event]]] = {}
    for _, event in told:
        if isinstance(event, AttemptStarted | AttemptEnded | AttemptReleased | AttemptLost):
            kinds.setdefault(event.running_id, []).append(type(event))
    for sequence in kinds.values():
        assert sequence[0] is AttemptStarted, where
        assert len(sequence) == 2, where
    if succeeded:
        at = mine.index(succeeded[0])
        ending = mine[at + 1]
        assert isinstance(ending, AttemptEnded), where
        assert ending.succeeded, where
        assert mine[at + 2] == finished[0], where


def all_ended(tasks: Tasks) -> bool:
    """
    Whether no task may run again, and no attempt is under way.
    """
    is_open = {"$elemMatch": {"success_time": None, "fail_time": None}}
    return not any(
        tasks.count_documents(condition)
        for condition in ({"finished_at": None}, {"task_state.worker_states": is_open})
    )


@pytest.mark.parametrize(
    "fault", [None, *FAULTS], ids=lambda fault: fault and " ".join(map(str, fault))
)
def test_every_task_that_ends_is_told_once(
    fleet: Fleet, fault: tuple[str, str, Fault] | None
) -> None:
    """
    However its attempts end, by whichever consumer, and whatever happens to the replies.
    """
    keys = insert_left_behind(fleet.tasks)
    rule = None
    if fault is not None:
        component, command, what = fault
        rule = fleet.app.hit(component, command, what, what)
    fleet.start()
    sent = send_all(fleet.producer)
    keys += sent
    for key, is_cancelled in sent.items():
        if is_cancelled:
            wait_until(lambda key=key: fleet.runs[key], f"{key} runs", 60)  # type: ignore[misc]
            fleet.producer.cancel(key)
    if rule is not None:
        rule.wait_done()
    wait_until(lambda: all_ended(fleet.tasks), "all tasks have ended", 60)
    told = fleet.stop()
    statuses: Counter[str] = Counter()
    for key in keys:
        task = fleet.producer.get(key)
        assert task is not None
        statuses[task.status] += 1
        check(told.get(key, []), task.status, key)
    assert set(statuses) == {"succeeded", "failed", "cancelled"}


@pytest.mark.parametrize("listens", [False, True])
@pytest.mark.parametrize(
    ("do", "options"),
    [
        ("return", {}),
        ("return", {"concurrency": 2}),
        ("give up", {}),
        ("fail", {"max_attempts": 1}),
    ],
    ids=["plain success", "one success of two", "failure for good", "last failure"],
)
def test_the_end_is_asked_for_only_if_somebody_listens(
    fleet: Fleet, do: str, options: dict[str, Any], listens: bool
) -> None:
    """
    The success of a plain task says itself that it is the end; other outcomes cost one query.
    """
    for stream in fleet.streams:
        stream.close()
    (one, _) = fleet.consumers
    fleet.producer.send("k", {"plan": [do], "waits": False}, **options)
    with one.subscribe(TaskFinished if listens else AttemptEnded):
        one.start()
        wait_until(lambda: fleet.app.log.of("outcome", "update"), "the outcome is stored")
        assert one.run_until_idle(20)
        is_plain_success = do == "return" and not options
        queries = fleet.app.log.of("outcome", "find")
        assert len(queries) == (listens and not is_plain_success)
