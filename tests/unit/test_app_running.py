"""
One attempt of a declared task: arguments read, hooks entered, failures judged, results stored.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import random
import traceback
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from mscheduler_sync import App, LeaseLost, PermanentFailure, RetryLater, Snooze, TaskContext
from tests.unit.test_invocation import CONTEXT

TASKS = App(lambda: pytest.fail("an attempt needs no database"))


def context_of(attempt: int) -> TaskContext:
    return TaskContext(
        key="key",
        name="task",
        attempt=attempt,
        running_id="running",
        worker_id="worker",
        deadline=None,
        report=lambda value: None,
    )


# -- arguments -------------------------------------------------------------------------------


def add(a: int, b: int = 10, *, day: dt.date | None = None) -> list[Any]:
    return [a, b, day]


ADD = TASKS.task(name="add", aliases={"first": "a"})(add)


@pytest.mark.parametrize(
    ("params", "result"),
    [
        ({"a": 1}, [1, 10, None]),
        ({"day": "2026-01-02", "b": 2.0, "a": 1}, [1, 2, dt.date(2026, 1, 2)]),
        ({"first": 1}, [1, 10, None]),
    ],
)
def test_a_document_of_any_origin_is_run(params: Any, result: list[Any]) -> None:
    """
    By the names in it, in any order, also former ones; defaults are filled in now.
    """
    stored = ADD.run(params, CONTEXT)
    assert stored[:2] == result[:2]
    assert stored[2] in (None, {"__type__": "date", "value": "2026-01-02"})


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({}, "task 'add' lacks the argument 'a'"),
        (None, "task 'add' lacks the argument 'a'"),
        ({"a": 1, "c": 2}, "task 'add' has no argument 'c'; it takes a, b, day"),
        ({"a": 1, "first": 2}, "task 'add' got two values for the argument 'a'"),
        ({"a": "1"}, "task 'add' got a wrong argument: a must be int, is str"),
        ({"a": 1, "day": 3}, "got a wrong argument: day is no readable form of datetime.date"),
        ([1, 2], "task 'add' takes its arguments as an object by name, not list"),
        (3, "not int"),
    ],
)
def test_what_does_not_fit_fails_for_good(params: Any, problem: str) -> None:
    """
    To run it again would not help; the reason says what is wrong.
    """
    with pytest.raises(PermanentFailure, match=problem):
        ADD.run(params, CONTEXT)


def test_no_params_are_no_arguments() -> None:
    """
    As other programs leave them out.
    """
    task = TASKS.task(name="none")(lambda: "ran")
    assert task.run(None, CONTEXT) == "ran"


def test_further_arguments_reach_keywords() -> None:
    """
    They are read by their annotation, too.
    """

    def rest(**ids: uuid.UUID) -> list[str]:
        return [f"{name} {value.version}" for name, value in ids.items()]

    task = TASKS.task(name="rest")(rest)
    assert task.run({"a": str(uuid.uuid4())}, CONTEXT) == ["a 4"]


@pytest.mark.parametrize("first", [True, False])
def test_the_context_is_passed(first: bool) -> None:
    """
    To the parameter with its annotation, whatever its name and place.
    """

    def before(told: TaskContext, a: int) -> list[Any]:
        return [told.key, a]

    def after(a: int, *, told: TaskContext | None = None) -> list[Any]:
        return [told and told.key, a]

    function: Any = before if first else after
    task = TASKS.task(name=f"told {first}")(function)
    assert task.run({"a": 1}, CONTEXT) == ["key", 1]
    with pytest.raises(PermanentFailure, match="gets its argument 'told' from the worker"):
        task.run({"a": 1, "told": 1}, CONTEXT)


# -- results ---------------------------------------------------------------------------------


def test_the_result_is_stored_by_its_annotation() -> None:
    """
    Readably; without annotation with its type.
    """

    def typed() -> tuple[decimal.Decimal, ...]:
        return (decimal.Decimal(1),)

    assert TASKS.task(name="typed")(typed).run({}, CONTEXT) == ["1"]
    untyped = TASKS.task(name="untyped")(lambda: {1})
    assert untyped.run({}, CONTEXT) == {"__type__": "set", "value": [1]}


def test_a_result_that_cannot_be_stored_fails_for_good() -> None:
    """
    The function has had its effect.
    """

    def wrong() -> list[dt.date]:
        return [dt.date(2026, 1, 2), "tomorrow"]  # type: ignore[list-item]

    text = r"UnstorableResult: the result\[1\] must be datetime.date, is str"
    with pytest.raises(PermanentFailure, match=text):
        TASKS.task(name="wrong")(wrong).run({}, CONTEXT)


# -- failures --------------------------------------------------------------------------------


def raising(error: BaseException, **options: Any) -> Any:
    """
    A task that raises *error*.
    """

    def task() -> None:
        raise error

    return App(lambda: None).task(name="raising", **options)(task)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("error", "options", "ends_with"),
    [
        (ValueError("no"), {}, ValueError),
        (ValueError("no"), {"give_up_on": ValueError}, PermanentFailure),
        (UnicodeError("no"), {"give_up_on": (KeyError, ValueError)}, PermanentFailure),
        (KeyError("no"), {"give_up_on": [ValueError]}, KeyError),
        (ConnectionError("no"), {"retry_on": (OSError,)}, ConnectionError),
        (ValueError("no"), {"retry_on": (OSError,)}, PermanentFailure),
        (
            ConnectionError("no"),
            {"retry_on": OSError, "give_up_on": ConnectionError},
            PermanentFailure,
        ),
        (RetryLater(3), {"give_up_on": Exception}, RetryLater),
        (Snooze(3), {"retry_on": OSError}, Snooze),
        (PermanentFailure("no"), {"retry_on": Exception}, PermanentFailure),
        (LeaseLost("key", "running"), {"give_up_on": Exception}, LeaseLost),
        (SystemExit(3), {"give_up_on": Exception}, SystemExit),
        (ValueError("no"), {"retry_delay": [1]}, RetryLater),
        (ValueError("no"), {"retry_delay": [1], "give_up_on": ValueError}, PermanentFailure),
    ],
)
def test_which_failures_are_retried(
    error: BaseException, options: dict[str, Any], ends_with: type[BaseException]
) -> None:
    """
    By the declaration, unless the function itself has said how the attempt ends.
    """
    with pytest.raises(ends_with) as caught:
        raising(error, **options).run({}, CONTEXT)
    assert type(caught.value) is ends_with
    if caught.value is not error:
        assert caught.value.__cause__ is error
        assert str(caught.value) == f"{type(error).__name__}: {error}"
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert frames[-1].line == "raise error"


def test_a_time_out_is_not_given_up() -> None:
    """
    Whatever the function raises because of it.
    """
    context = context_of(1)
    context.cancel("timed_out")
    with pytest.raises(ValueError, match="no"):
        raising(ValueError("no"), give_up_on=ValueError).run({}, context)


@pytest.mark.parametrize(
    ("retry_delay", "delays"),
    [
        ([1, dt.timedelta(seconds=10), 60], [1, 10, 60, 60]),
        ((5,), [5, 5, 5, 5]),
        (lambda attempt, error: attempt * len(str(error)), [2, 4, 6, 8]),
    ],
)
def test_the_delay_of_each_attempt(retry_delay: Any, delays: list[float]) -> None:
    """
    Of a list the last counts for all others; a function sees attempt and error.
    """
    task = raising(ValueError("no"), retry_delay=retry_delay)
    got = []
    for attempt in range(1, 5):
        with pytest.raises(RetryLater) as caught:
            task.run({}, context_of(attempt))
        got.append(caught.value.delay_s)
    assert got == delays


def test_jitter_and_longest_delay_count_for_a_computed_delay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """
    As for one that is stored.
    """
    options = {"retry_delay": [100, 1000], "retry_jitter": 0.5, "retry_max_delay": 200}
    task = raising(ValueError("no"), **options)
    got = []
    for attempt, chosen in ((1, -1.0), (1, 1.0), (2, 0.0)):
        monkeypatch.setattr(random, "uniform", lambda low, high, chosen=chosen: chosen)
        with pytest.raises(RetryLater) as caught:
            task.run({}, context_of(attempt))
        got.append(caught.value.delay_s)
    assert got == [50.0, 150.0, 200.0]


def test_a_wrong_delay_of_a_function_is_an_ordinary_failure() -> None:
    """
    It says so, and the task is retried by the stored options.
    """
    task = raising(KeyError("k"), retry_delay=lambda attempt, error: -1)
    with pytest.raises(ValueError, match="what retry_delay returns must be at least 0") as caught:
        task.run({}, CONTEXT)
    assert isinstance(caught.value.__context__, KeyError)


# -- hooks -----------------------------------------------------------------------------------


def watched(seen: list[Any], **options: Any) -> App:
    def hook(name: str) -> Any:
        @contextlib.contextmanager
        def around(context: TaskContext) -> Iterator[None]:
            seen.append(f"{name} in {context.key}")
            try:
                yield
            except BaseException as error:
                seen.append(f"{name} {error!r}")
                raise
            seen.append(f"{name} out")

        return around

    given: dict[str, Any] = {
        "hooks": [hook("outer"), hook("inner")],
        "before_run": lambda context: seen.append("before"),
        "after_run": lambda context, result: seen.append(f"after {result}"),
        "on_failure": lambda context, error: seen.append(f"failed {error!r}"),
        **options,
    }
    return App(lambda: None, **given)  # type: ignore[arg-type,return-value]


def test_hooks_stand_around_an_attempt() -> None:
    """
    The first is the outermost; they run in the attempt's thread.
    """
    seen: list[Any] = []

    def run() -> str:
        seen.append("run")
        return "done"

    task = watched(seen).task(name="t")(run)
    assert task.run({}, CONTEXT) == "done"
    order = "outer in key, inner in key, before, run, after done, inner out, outer out"
    assert ", ".join(seen) == order


def test_hooks_see_what_the_function_has_raised() -> None:
    """
    Not what the attempt ends with by the declaration; also when the arguments are wrong.
    """
    seen: list[Any] = []
    tasks = watched(seen)
    with pytest.raises(PermanentFailure):
        tasks.task(name="t", give_up_on=ZeroDivisionError)(lambda: 1 / 0).run({}, CONTEXT)
    error = "ZeroDivisionError('division by zero')"
    assert seen[2:] == ["before", f"failed {error}", f"inner {error}", f"outer {error}"]
    seen.clear()
    with pytest.raises(PermanentFailure):
        tasks.task(name="u")(lambda: None).run({"a": 1}, CONTEXT)
    assert seen[3].startswith("failed PermanentFailure(")


def test_a_hook_may_swallow_an_error() -> None:
    """
    The attempt then succeeds with None.
    """
    tasks = App(lambda: None, hooks=[lambda context: contextlib.suppress(KeyError)])  # type: ignore[arg-type,return-value]

    def task() -> None:
        raise KeyError

    assert tasks.task(name="t")(task).run({}, CONTEXT) is None


@pytest.mark.parametrize("hook", ["before_run", "hooks"])
def test_a_hook_before_the_function_can_fail_the_attempt(hook: str) -> None:
    """
    The function is not called; the declaration judges the error.
    """
    seen: list[Any] = []

    def fail(context: TaskContext) -> Any:
        raise ValueError("not now")

    tasks = watched(seen, **{hook: [fail] if hook == "hooks" else fail})
    task = tasks.task(name="t", give_up_on=ValueError)(lambda: seen.append("run"))
    with pytest.raises(PermanentFailure, match="ValueError: not now"):
        task.run({}, CONTEXT)
    assert "run" not in seen


@pytest.mark.parametrize(
    ("hook", "function", "ends_with"),
    [("after_run", lambda: "done", None), ("on_failure", lambda: 1 / 0, ZeroDivisionError)],
)
def test_a_reporting_hook_does_not_decide(
    hook: str, function: Any, ends_with: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """
    What it raises is logged, and the attempt ends as without it.
    """

    def fail(context: TaskContext, end: Any) -> None:
        raise ValueError("cannot report")

    task = watched([], **{hook: fail}).task(name="t")(function)
    expected = pytest.raises(ends_with) if ends_with else contextlib.nullcontext()
    with expected:
        assert task.run({}, CONTEXT) == "done"
    told = [vars(record) for record in caplog.records]
    assert [(one["event"], one["hook"], one["task_key"]) for one in told] == [
        ("hook_raised", hook, "key")
    ]
