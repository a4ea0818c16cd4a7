"""
Declared tasks from end to end: sent, stored, run, and their results read.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import threading
import uuid
from collections.abc import Mapping
from typing import Any

import pytest
from pymongo.collection import Collection

from mscheduler_sync import App, InvalidTask, TaskContext, TaskExists, TaskFailed, current_task
from tests.support import Document

IDLE_S = 20


@dataclasses.dataclass
class Line:
    article: str
    price: decimal.Decimal


@dataclasses.dataclass
class Bill:
    id: uuid.UUID
    at: dt.datetime
    total: decimal.Decimal


def run(app: App) -> None:
    with app.consumer(max_workers=4, poll_interval=0.1) as consumer:
        assert consumer.run_until_idle(IDLE_S)


def test_values_reach_the_function_and_its_result_the_sender(
    collection: Collection[Document],
) -> None:
    """
    Through the database, by their annotations.
    """
    app = App(collection)
    at = dt.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=dt.timezone.utc)
    number = uuid.uuid4()

    @app.task(name="bill", key="bill:{number}", lease=30)
    def bill(
        context: TaskContext, number: uuid.UUID, lines: list[Line], *, at: dt.datetime
    ) -> Bill:
        assert context is current_task()
        return Bill(number, at, sum((line.price for line in lines), decimal.Decimal(0)))

    lines = [Line("tea", decimal.Decimal("2.50")), Line("milk", decimal.Decimal("1.10"))]
    sent = bill.send(number, lines, at=at)
    assert (sent.key, sent.inserted) == (f"bill:{number}", True)
    assert not bill.send(number, [], at=at).inserted
    with pytest.raises(TaskExists):
        bill.using(if_exists="raise").send(number, [], at=at)
    run(app)
    assert bill.result(sent.key, timeout=5) == Bill(number, at, decimal.Decimal("3.60"))
    task = bill.get(sent.key)
    assert task is not None
    assert (task.name, task.options.lease, task.options.heartbeat) == ("bill", 30.0, 10.0)
    assert task.params == {
        "number": str(number),
        "lines": [{"article": "tea", "price": "2.50"}, {"article": "milk", "price": "1.10"}],
        "at": "2026-01-02T03:04:05.678901+00:00",
    }


def test_many_calls_are_sent(collection: Collection[Document]) -> None:
    """
    In order, with an error beside each that could not be sent.
    """
    app = App(collection)

    @app.task(name="double", key="double:{n}")
    def double(n: int) -> int:
        return 2 * n

    results = double.send_many([*range(20), "x"])
    assert [result.key for result in results[:20]] == [f"double:{n}" for n in range(20)]
    assert isinstance(results[20].error, TypeError)
    run(app)
    assert double.result("double:19", timeout=5) == 38
    assert app.producer.count(status="succeeded") == 20


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"n": 1, "m": 2}, "PermanentFailure: task 'inc' has no argument 'm'; it takes n"),
        ({}, "PermanentFailure: task 'inc' lacks the argument 'n'"),
        (None, "PermanentFailure: task 'inc' lacks the argument 'n'"),
        ([1], "PermanentFailure: task 'inc' takes its arguments as an object by name, not list"),
        ({"n": "1"}, "PermanentFailure: task 'inc' got a wrong argument: n must be int, is str"),
    ],
)
def test_a_task_that_does_not_fit_fails_at_once(
    collection: Collection[Document], params: Any, reason: str
) -> None:
    """
    After one attempt, with a reason that says what is wrong.
    """
    app = App(collection, defaults={"max_attempts": 5})

    @app.task(name="inc")
    def inc(n: int) -> int:
        return n + 1

    app.producer.send("k", params, name="inc", max_attempts=5)
    run(app)
    with pytest.raises(TaskFailed) as caught:
        inc.result("k", timeout=5)
    assert (caught.value.reason or "").splitlines()[0] == reason
    task = inc.get("k")
    assert task is not None
    assert task.failures == 1


def test_a_document_that_was_sent_by_hand_is_run(collection: Collection[Document]) -> None:
    """
    It needs the names of the arguments only, also former ones.
    """
    app = App(collection)

    @app.task(name="inc", aliases={"number": "n"})
    def inc(n: int, *, by: int = 1) -> int:
        return n + by

    app.producer.send("a", {"by": 2, "n": 1.0}, name="inc")
    app.producer.send("b", {"number": 1}, name="inc")
    run(app)
    assert [inc.result("a", 5), inc.result("b", 5)] == [3, 2]


def test_failures_end_as_declared(collection: Collection[Document]) -> None:
    """
    Retried after the delay of the attempt, or not at all; the reason has the function's own lines.
    """
    app = App(collection, defaults={"max_attempts": 3})
    attempts: list[int] = []

    @app.task(name="flaky", key="flaky", retry_on=ConnectionError, retry_delay=[0.05, 0.1])
    def flaky(context: TaskContext) -> int:
        attempts.append(context.attempt)
        if context.attempt < 3:
            raise ConnectionError("busy")
        return context.attempt

    @app.task(name="hopeless", key="hopeless", give_up_on=ValueError)
    def hopeless() -> None:
        raise ValueError("never")

    flaky.send()
    hopeless.send()
    with app.consumer(poll_interval=0.1):
        assert flaky.result("flaky", timeout=20) == 3
        with pytest.raises(TaskFailed) as caught:
            hopeless.result("hopeless", timeout=20)
    assert attempts == [1, 2, 3]
    reason = caught.value.reason or ""
    assert reason.startswith("PermanentFailure: ValueError: never\n")
    assert 'raise ValueError("never")' in reason
    task = flaky.get("flaky")
    assert task is not None
    assert [(a.fail_reason or "").partition("\n")[0] for a in task.attempts[:2]] == [
        "RetryLater: ConnectionError: busy"
    ] * 2


def test_hooks_run_in_the_threads_of_the_attempts(collection: Collection[Document]) -> None:
    """
    Before and after the function, in its thread.
    """
    seen: list[tuple[str, str]] = []

    def note(what: str) -> None:
        seen.append((what, threading.current_thread().name))

    app = App(
        collection,
        before_run=lambda context: note("before"),
        after_run=lambda context, result: note(f"after {result}"),
    )

    @app.task(name="t")
    def task() -> int:
        note("run")
        return 3

    task.send()
    run(app)
    assert [what for what, _ in seen] == ["before", "run", "after 3"]
    assert len({thread for _, thread in seen}) == 1
    assert seen[0][1].startswith("ms-exec")


def test_a_send_may_be_part_of_a_transaction(collection: Collection[Document]) -> None:
    """
    With ``using(session=...)``; what cannot be stored is refused as without.
    """
    app = App(collection)

    @app.task(name="t", key="t")
    def task(x: Any) -> None: ...

    with pytest.raises(
        ValueError, match=r"task 't' got a wrong argument: x\.a\[1\] cannot be stored: BSON"
    ):
        task.send({"a": [1, object()]})
    (result,) = task.send_many([({"a": object()},)])
    assert str(result.error).startswith("task 't' got a wrong argument: x.a cannot be stored: BSON")
    with collection.database.client.start_session() as session, session.start_transaction():
        task.using(session=session).send(1)
        session.abort_transaction()
    assert task.get("t") is None


def test_a_result_of_another_type_is_told(collection: Collection[Document]) -> None:
    """
    As after a change of the annotation.
    """
    before, after = App(collection), App(collection)

    @before.task(name="t", key="t")
    def old() -> Mapping[str, Any]:
        return {"day": "tomorrow"}

    @after.task(name="t", key="t")
    def new() -> dict[str, dt.date]:
        raise NotImplementedError

    old.send()
    run(before)
    with pytest.raises(InvalidTask, match=r"returns\.day is no readable form of datetime\.date"):
        new.result("t", timeout=5)


def test_an_app_by_uri(collection: Collection[Document], server_uri: str) -> None:
    """
    Sends to the same collection, with a client of its own.
    """
    base, _, options = server_uri.partition("?")
    uri = f"{base.rstrip('/')}/{collection.database.name}?{options}"
    app = App(uri, collection.name)

    @app.task(name="t", key="t")
    def task(x: int) -> int:
        return x

    try:
        task.send(3)
        assert collection.count_documents({"key": "t", "name": "t"}) == 1
        run(app)
        assert task.result("t", timeout=5) == 3
    finally:
        app.close()
