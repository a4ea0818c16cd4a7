"""
What a function is told about its attempt.
"""

from __future__ import annotations

import contextvars
import datetime as dt
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mscheduler_sync import context as module
from mscheduler_sync.context import Reason, TaskContext, current_task
from mscheduler_sync.errors import LeaseLost


def make(report: Any = None) -> TaskContext:
    return TaskContext(
        key="key",
        name="name",
        attempt=2,
        running_id="running",
        worker_id="worker",
        deadline=dt.datetime(2031, 1, 1, tzinfo=dt.timezone.utc),
        report=report or (lambda value: None),
    )


def test_tells_who_and_which_attempt() -> None:
    """
    All that a function may want to know about itself.
    """
    context = make()
    assert (context.key, context.name, context.attempt) == ("key", "name", 2)
    assert (context.running_id, context.worker_id) == ("running", "worker")
    assert context.deadline == dt.datetime(2031, 1, 1, tzinfo=dt.timezone.utc)
    assert repr(context) == "TaskContext(key='key', attempt=2, reason=None)"


def test_checking_does_nothing_as_long_as_all_is_well() -> None:
    """
    A function may check as often as it likes.
    """
    context = make()
    context.check()
    assert not context.cancelled.is_set()
    assert context.reason is None


def test_the_first_reason_to_end_counts() -> None:
    """
    A lost lease is not relabelled by the shutdown that comes after it.
    """
    context = make()
    context.cancel("lease_lost")
    context.cancel("shutdown")
    assert context.cancelled.is_set()
    assert context.reason == "lease_lost"


@pytest.mark.parametrize(
    "reason", ["lease_lost", "cancel_requested", "shutdown", "options_changed", "timed_out"]
)
def test_checking_raises_once_the_attempt_should_end(reason: Reason) -> None:
    """
    The error carries the task, the attempt and the reason.
    """
    context = make()
    context.cancel(reason)
    for _ in range(2):
        with pytest.raises(LeaseLost) as caught:
            context.check()
        error = caught.value
        assert (error.key, error.running_id, error.reason) == ("key", "running", reason)


def test_a_function_that_waits_is_woken() -> None:
    """
    Waiting on `cancelled` instead of sleeping ends at once.
    """
    context = make()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(context.cancelled.wait, 60)
        context.cancel("shutdown")
        assert waiting.result(10)


def test_progress_is_handed_on_with_its_errors() -> None:
    """
    What cannot be stored is refused where it is noted.
    """
    noted: list[object] = []
    make(noted.append).progress({"done": 3})
    assert noted == [{"done": 3}]

    def refuse(value: object) -> None:
        raise ValueError("progress cannot be stored")

    with pytest.raises(ValueError, match="progress cannot be stored"):
        make(refuse).progress(object())


def test_the_current_task_is_that_of_the_calling_code() -> None:
    """
    Outside of an attempt there is none, and another thread does not see it.
    """
    assert current_task() is None
    context = make()
    seen: list[TaskContext | None] = []

    def function() -> None:
        module.enter(context)
        seen.append(current_task())
        thread = threading.Thread(target=lambda: seen.append(current_task()))
        thread.start()
        thread.join(10)

    contextvars.copy_context().run(function)
    assert seen[0] is context
    assert current_task() is None
