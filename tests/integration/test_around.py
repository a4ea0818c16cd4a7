"""
What is put around each call, and what the calls keep from each other.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mscheduler_sync import Producer, Snooze, TaskFailed
from tests.support.tasks import Tasks, polling


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
