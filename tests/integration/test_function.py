"""
Functions: what they are told, what they may tell back, and whatever they raise or return.
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime as dt
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from bson import Decimal128, ObjectId
from pymongo.collection import Collection

from mscheduler_sync import (
    AttemptLost,
    AttemptReleased,
    Consumer,
    LeaseLost,
    PermanentFailure,
    Producer,
    RetryLater,
    Snooze,
    Task,
    TaskCancelled,
    TaskContext,
    TaskExecuteResult,
    TaskFailed,
    current_task,
)
from tests.support import Document, wait_until

Tasks = Collection[Document]

#: A lease whose heartbeats bring news soon.
LIVELY: Document = {"lease": 2, "heartbeat": 0.1}


@pytest.fixture
def producer(collection: Tasks) -> Producer:
    """
    The producer of the test.
    """
    return Producer(collection)


def polling(collection: Tasks, function: Any, **options: Any) -> Consumer:
    """
    Make a consumer that polls, which ends sooner than a change stream.
    """
    return Consumer(collection, function, watch=False, poll_interval=0.02, **options)


def task_of(producer: Producer, key: str = "k") -> Task:
    task = producer.get(key)
    assert task is not None
    return task


def ran(producer: Producer, collection: Tasks, function: Any, **options: Any) -> Task:
    """
    Send the task ``k``, run it until it has ended or waits for long, and return it.
    """
    producer.send("k", **{"retry_delay": 0, **options})

    def is_at_rest() -> bool:
        task = task_of(producer)
        soon = dt.datetime.now(dt.timezone.utc) + dt.timedelta(minutes=1)
        return task.is_finished or (task.status == "waiting" and task.due_at > soon)

    with polling(collection, function):
        wait_until(is_at_rest, "the task has come to rest", 20)
    return task_of(producer)


def reasons(task: Task) -> list[str]:
    """
    Return the first line of each failure.
    """
    return [(a.fail_reason or "").splitlines()[0] for a in task.attempts if a.failed_at]


# -- the context -------------------------------------------------------------------------------


def test_context_tells_of_the_attempt(producer: Producer, collection: Tasks) -> None:
    """
    Key, name, number, ids and deadline are those of the document; the attempt is the current one.
    """
    seen: list[TaskContext] = []
    currents: list[TaskContext | None] = []

    def function(params: Any, context: TaskContext) -> None:
        seen.append(context)
        currents.append(current_task())
        context.check()
        if len(seen) == 1:
            raise ValueError("once more")

    task = ran(producer, collection, function, params=5, name="n", timeout=50)
    assert [c.attempt for c in seen] == [1, 2]
    assert currents == seen
    assert [c.running_id for c in seen] == [a.running_id for a in task.attempts]
    for context, attempt in zip(seen, task.attempts, strict=True):
        assert (context.key, context.name) == ("k", "n")
        assert context.worker_id == attempt.worker_id
        assert (context.reason, context.cancelled.is_set()) == (None, False)
        assert context.deadline is not None
        assert attempt.claimed_at is not None
        left = context.deadline - attempt.claimed_at
        assert abs(left - dt.timedelta(seconds=50)) < dt.timedelta(seconds=5)
    assert current_task() is None


def test_context_without_name_and_deadline(producer: Producer, collection: Tasks) -> None:
    """
    What the task does not have is None.
    """
    seen: list[TaskContext] = []
    ran(producer, collection, lambda _params, context: seen.append(context))
    assert [(c.name, c.deadline) for c in seen] == [(None, None)]


def test_current_task_is_the_function_s_own(producer: Producer, collection: Tasks) -> None:
    """
    Not of threads that it starts, and not of what runs in its thread before or after.
    """
    inside: list[str | None] = []
    elsewhere: list[TaskContext | None] = []

    def function(_params: Any) -> None:
        task = current_task()
        inside.append(task.key if task else None)
        thread = threading.Thread(target=lambda: elsewhere.append(current_task()))
        thread.start()
        thread.join()

    producer.send_many([("a", 1), ("b", 2)])
    with polling(collection, function, max_workers=1) as consumer:
        assert consumer.run_until_idle(10)
    assert sorted(filter(None, inside)) == ["a", "b"]
    assert elsewhere == [None, None]


@pytest.mark.parametrize("heeds", ["check", "returns", "raises"])
def test_cancel_reaches_the_function(producer: Producer, collection: Tasks, heeds: str) -> None:
    """
    It learns by heartbeat. Heeding it ends the task as cancelled, returning as succeeded.
    """
    began = threading.Event()
    caught: list[LeaseLost] = []

    def function(_params: Any, context: TaskContext) -> str:
        began.set()
        assert context.cancelled.wait(20)
        assert context.reason == "cancel_requested"
        if heeds == "raises":
            raise ValueError("in the middle")
        if heeds == "check":
            try:
                context.check()
            except LeaseLost as error:
                caught.append(error)
                raise
        return "done anyway"

    producer.send("k", **LIVELY)
    with polling(collection, function) as consumer:
        events = consumer.subscribe(AttemptReleased, TaskExecuteResult)
        assert began.wait(10)
        assert producer.cancel("k")
        assert task_of(producer).cancel_requested
        event = events.get(10)
        assert consumer.run_until_idle(10)
    task = task_of(producer)
    if heeds == "check":
        assert isinstance(event, AttemptReleased)
        assert event.why == "cancel_requested"
        assert [(error.key, error.reason) for error in caught] == [("k", "cancel_requested")]
        assert (task.status, task.attempts) == ("cancelled", ())
    elif heeds == "raises":
        assert event == TaskExecuteResult(key="k", success=False)
        assert (task.status, reasons(task)) == ("cancelled", ["ValueError: in the middle"])
    else:
        assert event == TaskExecuteResult(key="k", success=True)
        assert producer.result("k", 1) == "done anyway"
    if heeds != "returns":
        with pytest.raises(TaskCancelled):
            producer.result("k", 1)


def test_lost_lease_reaches_the_function(producer: Producer, collection: Tasks) -> None:
    """
    Somebody took the attempt away: it learns by heartbeat, and nothing of it is stored.
    """
    began = threading.Event()
    told: list[str | None] = []

    def function(_params: Any, context: TaskContext) -> None:
        if context.attempt == 1 and not told:
            began.set()
            assert context.cancelled.wait(20)
            told.append(context.reason)
            context.check()

    producer.send("k", **LIVELY)
    with polling(collection, function, max_workers=1) as consumer:
        events = consumer.subscribe(AttemptReleased, AttemptLost)
        assert began.wait(10)
        first = task_of(producer).attempts[0].running_id
        due = task_of(producer).start_at
        collection.update_one({}, {"$set": {"task_state.worker_states": [], "due": due}})
        event = events.get(10)
        assert isinstance(event, AttemptReleased | AttemptLost)
        assert event.running_id == first
        producer.result("k", 10)
    assert told == ["lease_lost"]
    assert len(task_of(producer).attempts) == 1
    assert task_of(producer).attempts[0].running_id != first


def test_deleted_task_is_a_lost_lease(producer: Producer, collection: Tasks) -> None:
    """
    The function of a deleted task is told; the task does not come back.
    """
    began = threading.Event()
    told: list[str | None] = []

    def function(_params: Any, context: TaskContext) -> None:
        began.set()
        assert context.cancelled.wait(20)
        told.append(context.reason)

    producer.send("k", **LIVELY)
    with polling(collection, function) as consumer:
        events = consumer.subscribe(AttemptLost)
        assert began.wait(10)
        assert producer.delete("k")
        assert isinstance(events.get(10), AttemptLost)
    assert told == ["lease_lost"]
    assert collection.find_one() is None


def test_stop_reaches_the_function(producer: Producer, collection: Tasks) -> None:
    """
    After three quarters of the stop's time it is asked to end; `check` then gives the task back.
    """
    began = threading.Event()
    told: list[str | None] = []

    def function(_params: Any, context: TaskContext) -> None:
        began.set()
        assert context.cancelled.wait(20)
        told.append(context.reason)
        context.check()

    producer.send("k", max_attempts=1)
    with polling(collection, function) as consumer:
        assert began.wait(10)
        report = consumer.stop(3)
    assert told == ["shutdown"]
    assert report.released == ("k",)
    task = task_of(producer)
    assert (task.status, task.attempts, task.counters["released"]) == ("waiting", (), 1)


def test_changed_restriction_reaches_the_function(producer: Producer, collection: Tasks) -> None:
    """
    A task that may no longer run here is given up by `check`, unused, and runs where it may.
    """
    began = threading.Event()
    told: list[str | None] = []

    def function(_params: Any, context: TaskContext) -> str:
        if context.worker_id == "here":
            began.set()
            assert context.cancelled.wait(20)
            told.append(context.reason)
            context.check()
        return context.worker_id

    producer.send("k", max_attempts=1, **LIVELY)
    with (
        polling(collection, function, worker_id="here"),
        polling(collection, function, worker_id="there", max_workers=0) as there,
    ):
        assert began.wait(10)
        producer.update("k", max_attempts=1, worker_ids=["there"], **LIVELY)
        there.max_workers = 1
        assert producer.result("k", 10) == "there"
    assert told == ["options_changed"]


def test_changed_lease_counts_from_the_next_heartbeat(
    producer: Producer, collection: Tasks
) -> None:
    """
    The options of a running task are read again with each heartbeat.
    """
    go = threading.Event()
    producer.send("k", **LIVELY)
    with polling(collection, lambda _params: go.wait(20)):
        wait_until(lambda: task_of(producer).attempts, "it runs")
        producer.update("k", lease=1000, heartbeat=0.1)

        def lease_s() -> float:
            attempt = task_of(producer).attempts[0]
            assert attempt.lease_end is not None
            assert attempt.claimed_at is not None
            return (attempt.lease_end - attempt.claimed_at).total_seconds()

        wait_until(lambda: lease_s() > 900, "the lease is the new one")
        go.set()
        producer.result("k", 10)


def test_progress_is_seen_while_the_task_runs_and_later(
    producer: Producer, collection: Tasks
) -> None:
    """
    The last note rides on a heartbeat or the outcome; a later attempt can read it.
    """
    go = threading.Event()
    inherited: list[Any] = []

    def function(_params: Any, context: TaskContext) -> None:
        inherited.append(task_of(producer).progress)
        for done in range(3):
            context.progress({"done": done})
        if context.attempt == 1:
            go.wait(20)
            context.progress({"done": "first"})
            raise ValueError("again")

    producer.send("k", retry_delay=0, **LIVELY)
    with polling(collection, function):
        wait_until(lambda: task_of(producer).progress == {"done": 2}, "a heartbeat brings it")
        go.set()
        producer.result("k", 10)
    assert inherited == [None, {"done": "first"}]
    assert task_of(producer).progress == {"done": 2}


def test_progress_that_cannot_be_stored_is_refused(producer: Producer, collection: Tasks) -> None:
    """
    ValueError in the function; an earlier note stays.
    """

    def function(_params: Any, context: TaskContext) -> list[str]:
        context.progress("early")
        errors = []
        for value in ({1}, 2**64, "\ud800", "x" * 2000):
            with pytest.raises(ValueError, match="progress") as caught:
                context.progress(value)
            errors.append(str(caught.value))
        return errors

    producer.send("k")
    with polling(collection, function, max_result_bytes=1000):
        assert len(producer.result("k", 10)) == 4
    assert task_of(producer).progress == "early"


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
        events = consumer.subscribe(TaskExecuteResult)
        with pytest.raises(TaskFailed, match="UnstorableResult"):
            producer.result("k", 60)
        assert events.get(10) == TaskExecuteResult(key="k", success=False)
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


# -- time-outs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("heeds", ["check", "raises", "returns"])
def test_time_out_of_a_function_that_heeds_it(
    producer: Producer, collection: Tasks, heeds: str
) -> None:
    """
    It is told, with a reason; however it ends, the attempt has failed as timed out, and is retried.
    """
    told: list[str | None] = []

    def function(_params: Any, context: TaskContext) -> str:
        assert context.cancelled.wait(20)
        told.append(context.reason)
        if heeds == "check":
            context.check()
        if heeds == "raises":
            raise ValueError("something else")
        return "too late"

    task = ran(producer, collection, function, timeout=0.1, max_attempts=2)
    assert told == ["timed_out", "timed_out"]
    assert task.status == "failed"
    assert reasons(task) == ["TimedOut: the function ran longer than 0.1 s"] * 2


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """
    What never-ending functions wait for; set at the end of the test.
    """
    event = threading.Event()
    yield event
    event.set()


def test_function_that_never_ends_is_reported_and_its_slot_replaced(
    producer: Producer, collection: Tasks, stuck: threading.Event
) -> None:
    """
    Its attempt fails as timed out, another task runs in its place, and its late return is nothing.
    """

    def function(params: Any) -> Any:
        if params == "stuck":
            stuck.wait(60)
        return params

    producer.send("k", "stuck", timeout=0.1, lease=1, heartbeat=0.3, max_attempts=1)
    with polling(collection, function, max_workers=1) as consumer:
        events = consumer.subscribe(TaskExecuteResult, AttemptLost)
        wait_until(lambda: consumer.running_count, "it runs")
        producer.send("other", "fine")
        assert producer.result("other", 20) == "fine"
        with pytest.raises(TaskFailed, match=r"TimedOut: .* did not end"):
            producer.result("k", 10)
        assert consumer.health().stuck == ("k",)
        stuck.set()
        wait_until(lambda: not consumer.health().stuck, "the function has ended")
        producer.send("last", "fine")
        assert producer.result("last", 10) == "fine"
        # The database knows of a result a moment before the consumer knows that it is stored.
        wait_until(
            lambda: (consumer.health().slots_taken, consumer.running_count) == (0, 0),
            "every slot is free",
        )
        told = list(iter(lambda: events.get(0), None))
    assert [(e.key, getattr(e, "success", None)) for e in told] == [
        ("k", False),
        ("other", True),
        ("last", True),
    ]
    assert task_of(producer).status == "failed"


def test_slots_are_replaced_up_to_their_number(
    producer: Producer, collection: Tasks, stuck: threading.Event
) -> None:
    """
    As many stuck functions as slots are replaced; the next one keeps its slot until it ends.
    """

    def function(params: Any) -> Any:
        if params == "stuck":
            stuck.wait(60)
        return params

    options = {"timeout": 0.1, "lease": 1, "heartbeat": 0.3, "max_attempts": 1}
    producer.send_many([("a", "stuck"), ("b", "stuck")], **options)
    with polling(collection, function, max_workers=1) as consumer:
        wait_until(lambda: len(consumer.health().stuck) == 2, "both are stuck", 20)
        producer.send("last", "fine")
        assert consumer.health().slots_taken == 1
        assert not consumer.run_until_idle(0.3)
        assert task_of(producer, "last").status == "waiting"
        stuck.set()
        assert producer.result("last", 10) == "fine"
        wait_until(lambda: consumer.health().slots_taken == 0, "all slots are free")


# -- around and isolation ----------------------------------------------------------------------


class _Around:
    """
    An ``around`` that notes what happens, in which thread.
    """

    def __init__(self) -> None:
        self.notes: list[tuple[str, object, int]] = []

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        self.note("enter", None)
        try:
            yield
        except BaseException as error:
            self.note("raised", type(error))
            raise
        else:
            self.note("exit", None)

    def note(self, what: str, detail: object) -> None:
        self.notes.append((what, detail, threading.get_ident()))


@pytest.mark.parametrize("error", [None, ValueError, SystemExit, KeyboardInterrupt, Snooze])
def test_around_encloses_each_call_in_its_thread(
    producer: Producer, collection: Tasks, error: type[BaseException] | None
) -> None:
    """
    Entered before the function, left after it, in the same thread, also when it raises.
    """
    around = _Around()

    def function(_params: Any) -> None:
        around.note("run", None)
        if error is Snooze:
            raise Snooze(1000)
        if error is not None:
            raise error("no")

    producer.send("k", max_attempts=1)
    with polling(collection, function, around=around) as consumer:
        assert consumer.run_until_idle(10)
    after: tuple[str, object] = ("exit", None) if error is None else ("raised", error)
    assert [note[:2] for note in around.notes] == [("enter", None), ("run", None), after]
    assert len({thread for _, _, thread in around.notes}) == 1
    assert around.notes[0][2] != threading.get_ident()


@pytest.mark.parametrize("when", ["call", "enter", "exit", "no context manager"])
def test_around_that_fails_is_a_failure_of_the_attempt(
    producer: Producer, collection: Tasks, when: str
) -> None:
    """
    The reason is stored, and the consumer lives on; the function runs only if it was entered.
    """
    runs: list[int] = []

    class Failing:
        def __enter__(self) -> None:
            if when == "enter":
                raise OSError("the connection is gone")

        def __exit__(self, *_details: object) -> None:
            if when == "exit":
                raise OSError("the connection is gone")

    def around() -> Any:
        if when == "call":
            raise OSError("the connection is gone")
        return 5 if when == "no context manager" else Failing()

    producer.send("k", max_attempts=2, retry_delay=0)
    with polling(collection, runs.append, around=around) as consumer:
        with pytest.raises(TaskFailed) as caught:
            producer.result("k", 10)
        assert consumer.health().ok
    reason = caught.value.reason or ""
    if when == "no context manager":
        # Which of the two depends on the version of Python.
        assert reason.startswith(("TypeError", "AttributeError"))
    else:
        assert reason.startswith("OSError: the connection is gone")
    assert len(runs) == (2 if when == "exit" else 0)


def test_around_that_swallows_an_exception(producer: Producer, collection: Tasks) -> None:
    """
    The function has then ended without a value: a success with None.
    """

    def function(_params: Any) -> None:
        raise ValueError("swallowed")

    producer.send("k", max_attempts=1)
    with polling(collection, function, around=lambda: contextlib.suppress(ValueError)):
        assert producer.result("k", 10) is None


_variable: contextvars.ContextVar[str] = contextvars.ContextVar("_variable", default="unset")


def test_context_variables_are_the_attempt_s_own(producer: Producer, collection: Tasks) -> None:
    """
    What a function sets is not seen by the next one in its thread; what ``around`` sets is seen.
    """
    seen: list[str] = []

    def function(params: Any) -> None:
        seen.append(_variable.get())
        _variable.set(params)

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        seen.append(_variable.get())
        _variable.set("from around")
        yield

    producer.send_many([("a", "a"), ("b", "b"), ("c", "c")])
    with polling(collection, function, max_workers=1, around=around) as consumer:
        assert consumer.run_until_idle(10)
    assert seen == ["unset", "from around"] * 3
    assert _variable.get() == "unset"


# -- what the server refuses -----------------------------------------------------------------------


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


ROOM = 15 * 2**20 - 100


@pytest.mark.parametrize("end", ["return", "raise", "snooze"])
def test_progress_without_room_costs_neither_lease_nor_outcome(
    producer: Producer, collection: Tasks, end: str
) -> None:
    """
    Params and progress may be too much for one document together: the progress is dropped.
    """
    go = threading.Event()
    contexts: list[TaskContext] = []

    def function(_params: Any, context: TaskContext) -> int:
        contexts.append(context)
        if len(contexts) == 1:
            context.progress("p" * (2**20 - 100))
            go.wait(30)
            context.progress("p" * (2**20 - 100))
            if end == "raise":
                raise ValueError("mine")
            if end == "snooze":
                raise Snooze(0)
        return 1

    producer.send("k", "P" * ROOM, lease=3, heartbeat=0.2, max_attempts=2, retry_delay=0)
    with polling(collection, function) as consumer:
        wait_until(lambda: contexts, "it runs", 20)
        first = task_of(producer).attempts[0].lease_end
        wait_until(lambda: task_of(producer).attempts[0].lease_end != first, "it beats", 20)
        assert not contexts[0].cancelled.is_set()
        go.set()
        assert producer.result("k", 20) == 1
        assert consumer.health().ok
    task = task_of(producer)
    assert task.progress is None
    assert reasons(task) == (["ValueError: mine"] if end == "raise" else [])
    assert len(contexts) == (1 if end == "return" else 2)


# -- time-outs that change -------------------------------------------------------------------------


@pytest.mark.parametrize("before", [None, 60])
def test_a_timeout_that_an_update_sets_is_kept(
    producer: Producer, collection: Tasks, before: float | None
) -> None:
    """
    The running function is told when the new time is over, and its deadline says so.
    """
    contexts: list[TaskContext] = []

    def function(_params: Any, context: TaskContext) -> None:
        contexts.append(context)
        context.cancelled.wait(30)
        context.check()

    producer.send("k", timeout=before, max_attempts=1, heartbeat=0.2)
    with polling(collection, function) as consumer:
        wait_until(lambda: contexts, "it runs", 20)
        deadline = contexts[0].deadline
        producer.update("k", timeout=1)
        with pytest.raises(TaskFailed, match="TimedOut"):
            producer.result("k", 20)
        assert contexts[0].reason == "timed_out"
        assert contexts[0].deadline is not None
        assert deadline is None or contexts[0].deadline < deadline
        assert consumer.run_until_idle(10)


def test_a_timeout_that_an_update_takes_away_ends_nothing(
    producer: Producer, collection: Tasks
) -> None:
    """
    The function runs on beyond the time that it had at first.
    """
    contexts: list[TaskContext] = []

    def function(_params: Any, context: TaskContext) -> str:
        contexts.append(context)
        return "told" if context.cancelled.wait(3) else "done"

    producer.send("k", timeout=2, max_attempts=1, heartbeat=0.2)
    with polling(collection, function):
        wait_until(lambda: contexts, "it runs", 20)
        producer.update("k", timeout=None)
        assert producer.result("k", 20) == "done"
        assert contexts[0].deadline is None
