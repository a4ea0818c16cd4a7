"""
What comes of whatever a function raises or returns.
"""

from __future__ import annotations

import datetime as dt
import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
from bson import Decimal128, ObjectId

from mscheduler_sync import (
    AttemptEnded,
    Consumer,
    LeaseLost,
    PermanentFailure,
    Producer,
    RetryLater,
    Snooze,
    TaskContext,
    TaskFailed,
)
from tests.support import wait_until, without_id
from tests.support.tasks import Tasks, polling, ran, reasons, task_of

# -- steering ----------------------------------------------------------------------------------


def test_retry_later_uses_an_attempt_and_its_own_delay(
    producer: Producer, collection: Tasks
) -> None:
    """
    The delay replaces the task's; the reason is stored; the last attempt fails the task.
    """

    def function(_params: Any, context: TaskContext) -> None:
        raise RetryLater(0 if context.attempt == 1 else 1000, f"busy {context.attempt}")

    task = ran(producer, collection, function, retry_delay=500)
    assert reasons(task) == ["RetryLater: busy 1", "RetryLater: busy 2"]
    assert task.status == "waiting"
    last = task.attempts[-1]
    assert last.failed_at is not None
    assert task.due_at == last.retry_at == last.failed_at + dt.timedelta(seconds=1000)


def test_retry_later_at_the_last_attempt_fails_the_task(
    producer: Producer, collection: Tasks
) -> None:
    """
    It is a failed attempt like any other.
    """

    def function(_params: Any) -> None:
        raise RetryLater(0)

    task = ran(producer, collection, function, max_attempts=2)
    assert (task.status, task.failures) == ("failed", 2)


def test_fail_for_good_ends_the_task(producer: Producer, collection: Tasks) -> None:
    """
    Whatever attempts are left.
    """

    def function(_params: Any) -> None:
        raise PermanentFailure("the card has expired")

    task = ran(producer, collection, function, max_attempts=5)
    assert (task.status, task.failures) == ("failed", 1)
    assert task.attempts[0].final
    with pytest.raises(TaskFailed, match="the card has expired"):
        producer.result("k", 1)


def test_snooze_uses_no_attempt(producer: Producer, collection: Tasks) -> None:
    """
    However often; the number of the attempt stays, and a delay moves the start.
    """
    numbers: list[int] = []

    def function(_params: Any, context: TaskContext) -> None:
        numbers.append(context.attempt)
        if len(numbers) < 4:
            raise Snooze(0)
        raise Snooze(1000)

    task = ran(producer, collection, function, max_attempts=1)
    assert numbers == [1, 1, 1, 1]
    assert (task.status, task.attempts, task.counters["snoozed"]) == ("waiting", (), 4)
    assert task.start_at - task.created_at > dt.timedelta(seconds=990)
    assert task.due_at == task.start_at


@pytest.mark.parametrize("kind", [RetryLater, Snooze])
@pytest.mark.parametrize("delay", [-1, math.nan, math.inf, 10**12, "1", None, True])
def test_wrong_delay_is_an_error_of_the_function(
    producer: Producer, collection: Tasks, kind: Callable[[Any], Exception], delay: Any
) -> None:
    """
    ValueError or TypeError where it is made; uncaught it is a failure like any other.
    """
    with pytest.raises((ValueError, TypeError), match="delay"):
        kind(delay)


# -- whatever is raised ------------------------------------------------------------------------


class _Mute(Exception):
    """
    An exception whose text cannot be made.
    """

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class _Own(BaseException):
    """
    An exception of the application that is no Exception.
    """


def _chain() -> Exception:
    error = ValueError("the innermost")
    for number in range(1000):
        outer = ValueError(f"level {number}")
        outer.__cause__ = error
        error = outer
    return error


@pytest.mark.parametrize(
    ("error", "first_line"),
    [
        (ValueError("plain"), "ValueError: plain"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (GeneratorExit(), "GeneratorExit: "),
        (MemoryError("none left"), "MemoryError: none left"),
        (StopIteration(5), "StopIteration: 5"),
        (_Own("mine"), f"{__name__}._Own: mine"),
        (_Mute(), f"{__name__}._Mute: (its text could not be made: RuntimeError)"),
        (ValueError("lone \ud800 surrogate"), "ValueError: lone \\ud800 surrogate"),
        (ValueError("zero \x00 byte"), "ValueError: zero \x00 byte"),
        (ValueError(b"\xff"), "ValueError: b'\\xff'"),
        (_chain(), "ValueError: level 999"),
        (LeaseLost("k", "r"), "LeaseLost: "),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_whatever_is_raised_is_a_failure(
    producer: Producer, collection: Tasks, error: BaseException, first_line: str
) -> None:
    """
    The reason is stored, the task is tried again as its options say, and the consumer lives on.
    """

    def function(params: Any) -> Any:
        if params == "raise":
            raise error
        return params

    producer.send("k", "raise", retry_delay=0, max_attempts=2)
    with polling(collection, function, max_workers=1) as consumer:
        with pytest.raises(TaskFailed):
            producer.result("k", 20)
        producer.send("next", "fine")
        assert producer.result("next", 10) == "fine"
        assert consumer.health().ok
        assert consumer.health().slots_taken == 0
    task = task_of(producer)
    assert [reason.startswith(first_line) for reason in reasons(task)] == [True, True]


def test_huge_reason_is_cut(producer: Producer, collection: Tasks) -> None:
    """
    At most 8 KiB are stored, beginning with the type.
    """

    def function(_params: Any) -> None:
        raise ValueError("ä" * 10_000_000)

    task = ran(producer, collection, function, max_attempts=1)
    reason = task.attempts[0].fail_reason
    assert reason is not None
    assert reason.startswith("ValueError: ää")
    assert len(reason.encode()) <= 8192


def test_reason_shows_where_it_happened(producer: Producer, collection: Tasks) -> None:
    """
    The traceback and the cause are part of it.
    """

    def inner_function_of_the_test() -> None:
        raise KeyError("cause")

    def function(_params: Any) -> None:
        try:
            inner_function_of_the_test()
        except KeyError as error:
            raise ValueError("effect") from error

    task = ran(producer, collection, function, max_attempts=1)
    reason = task.attempts[0].fail_reason
    assert reason is not None
    assert reason.splitlines()[:2] == ["ValueError: effect", "caused by KeyError: 'cause'"]
    assert "in function" in reason


# -- whatever is returned ----------------------------------------------------------------------


def _recursive() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0.5,
        -(2**63),
        "text",
        b"bytes",
        [1, [2, {"a": None}]],
        {"a.b": 1, "$c": 2, "": 3},
        "$value",
        {"$literal": 1},
        ObjectId("0123456789ab0123456789ab"),
        Decimal128("1.10"),
        dt.datetime(2030, 1, 2, 3, 4, 5, 678_000, tzinfo=dt.timezone.utc),
    ],
    ids=repr,
)
def test_storable_result_comes_back_as_it_was(
    producer: Producer, collection: Tasks, value: Any
) -> None:
    """
    Whatever BSON can hold, without being taken for a statement.
    """
    producer.send("k", value)
    with polling(collection, lambda params: params):
        assert producer.result("k", 10) == value


def test_infinite_and_missing_numbers_come_back(producer: Producer, collection: Tasks) -> None:
    """
    NaN and the infinities are values like others; a tuple becomes a list.
    """
    producer.send("k")
    with polling(collection, lambda _params: (math.nan, math.inf, -math.inf)):
        first, second, third = producer.result("k", 10)
    assert math.isnan(first)
    assert (second, third) == (math.inf, -math.inf)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (lambda: None, "result cannot be stored"),
        ((n for n in range(3)), "result cannot be stored"),
        ({1, 2}, "result cannot be stored"),
        (2**64, "result cannot be stored: it holds an int beyond 64 bits"),
        (object(), "result cannot be stored"),
        ("lone \ud800", "result cannot be stored: it holds text that is not valid Unicode"),
        ({"a": [1, {2}]}, "result.a[1] cannot be stored"),
        ({1: "one"}, "result cannot be stored: its key number 1 is not a string but int"),
        ({"a\x00b": 1}, "holds a NUL character"),
        (_recursive(), "result is nested too deeply, or contains itself"),
        ("x" * 20_000, "more than the limit of 10000"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_unstorable_result_is_a_failure_without_another_run(
    producer: Producer, collection: Tasks, value: Any, problem: str
) -> None:
    """
    The function has had its effect: it is not run again, though attempts are left.
    """
    runs: list[int] = []

    def function(_params: Any) -> Any:
        runs.append(1)
        return value

    producer.send("k", retry_delay=0, max_attempts=3)
    with polling(collection, function, max_result_bytes=10_000) as consumer:
        with pytest.raises(TaskFailed):
            producer.result("k", 20)
        assert consumer.run_until_idle(10)
        assert consumer.health().ok
    assert len(runs) == 1
    (reason,) = reasons(task_of(producer))
    assert reason.startswith("UnstorableResult: ")
    assert problem in reason


def test_result_that_the_document_has_no_room_for_is_a_failure(
    producer: Producer, collection: Tasks
) -> None:
    """
    Params and result together pass 16 MB: the server refuses, and that is stored.
    """
    runs: list[int] = []

    def function(_params: Any) -> bytes:
        runs.append(1)
        return b"x" * (9 * 1024 * 1024)

    producer.send("k", b"x" * (9 * 1024 * 1024), retry_delay=0)
    with polling(collection, function, max_result_bytes=10 * 1024 * 1024) as consumer:
        events = consumer.subscribe(AttemptEnded)
        with pytest.raises(TaskFailed, match="UnstorableResult"):
            producer.result("k", 60)
        assert without_id(events.get(10)) == AttemptEnded(key="k", running_id="*", succeeded=False)
    assert len(runs) == 1


def test_changed_params_do_not_reach_the_next_attempt(
    producer: Producer, collection: Tasks
) -> None:
    """
    Each attempt gets params of its own, whatever the function does with them.
    """
    seen: list[Any] = []

    def function(params: dict[str, list[int]], context: TaskContext) -> dict[str, list[int]]:
        seen.append([*params["list"]])
        params["list"].append(context.attempt)
        if context.attempt < 3:
            raise ValueError("again")
        return params

    task = ran(producer, collection, function, params={"list": [0]})
    assert seen == [[0], [0], [0]]
    assert task.params == {"list": [0]}
    assert producer.result("k", 1) == {"list": [0, 3]}


def test_function_may_send_tasks(producer: Producer, collection: Tasks) -> None:
    """
    A task may send its successor, under its own consumer.
    """

    def function(params: int) -> int:
        if params < 5:
            producer.send(f"k{params + 1}", params + 1)
        return params

    producer.send("k0", 0)
    with polling(collection, function, max_workers=1) as consumer:
        assert producer.result("k0", 10) == 0
        wait_until(lambda: producer.get("k5"), "the last one is sent")
        assert producer.result("k5", 10) == 5
        assert consumer.run_until_idle(10)
    assert producer.count(status="succeeded") == 6


class _Callable:
    def __call__(self, params: Any) -> str:
        return f"called {params}"

    def method(self, params: Any, context: TaskContext) -> str:
        return f"method {params} {context.key}"


@pytest.mark.parametrize(
    ("function", "result"),
    [
        (lambda params: params, 5),
        (lambda params, context: context.key, "k"),
        (lambda params, ctx=None: ctx.key, "k"),
        (lambda params, other=7: other, 7),
        (lambda *args: len(args), 1),
        (lambda params, /, *, loud=False: loud, False),
        (functools.partial(lambda extra, params: extra + params, 10), 15),
        (str, "5"),
        (_Callable(), "called 5"),
        (_Callable().method, "method 5 k"),
    ],
)
def test_forms_of_functions(
    producer: Producer, collection: Tasks, function: Any, result: Any
) -> None:
    """
    Params alone, or params and the context, as the function's signature says.
    """
    producer.send("k", 5)
    with polling(collection, function):
        assert producer.result("k", 10) == result


# -- what the server refuses -------------------------------------------------------------------


def test_a_result_that_the_server_cannot_take_holds_up_no_other(
    producer: Producer, collection: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A refusal that names no document is found by trying each alone.
    """
    monkeypatch.setattr("mscheduler_sync._storage.codec.MAX_DEPTH", 10_000)
    together = threading.Barrier(6)

    def function(params: Any) -> Any:
        if params != "company":
            together.wait(20)
        value: Any = 1
        for _ in range(600 if params == "deep" else 0):
            value = {"a": value}
        return value

    producer.send("deep", "deep", max_attempts=1)
    producer.send_many([(f"flat-{n}", n) for n in range(5)])
    with Consumer(collection, function, max_workers=6) as consumer:
        assert [producer.result(f"flat-{n}", 20) for n in range(5)] == [1] * 5

        def has_ended() -> bool:
            # Alone it is tried again; beside one that is stored it is known to be the fault.
            producer.send(None, "company")
            return task_of(producer, "deep").is_finished

        wait_until(has_ended, "the deep one has ended", 30)
        assert consumer.run_until_idle(20)
    if task_of(producer, "deep").status == "failed":
        assert reasons(task_of(producer, "deep"))[0].startswith("UnstorableResult: ")
