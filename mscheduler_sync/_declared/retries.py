"""
Which failures of a declared task are retried, and when.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import attrs

from mscheduler_sync.context import TaskContext
from mscheduler_sync.errors import LeaseLost, PermanentFailure, RetryLater, Snooze
from mscheduler_sync.settings import Duration, seconds

#: The same pause after each failure; one for the first, the second ..., the last for all others;
#: or a function of the attempt's number and the error.
RetryDelay = Duration | Sequence[Duration] | Callable[[int, Exception], Duration]

#: What a function raises to say itself how its attempt ends.
_STEERING = (RetryLater, PermanentFailure, Snooze, LeaseLost)


@attrs.frozen
class RetryPolicy:
    """
    What the worker decides about a failure; everything else is decided by the stored options.
    """

    #: Only these are retried; None: all.
    retry_on: tuple[type[BaseException], ...] | None
    #: These are not, whatever `retry_on` says.
    give_up_on: tuple[type[BaseException], ...]
    #: None: the stored options have the delay.
    delay: Callable[[int, Exception], Duration] | None
    jitter: float
    longest_s: float

    @classmethod
    def checked(cls, task: str, options: Mapping[str, Any]) -> RetryPolicy:
        """
        Raises:
            TypeError, ValueError: Naming the task, the option and the rule.
        """
        retry_on, give_up_on = options.get("retry_on"), options.get("give_up_on")
        longest = options.get("retry_max_delay")
        return cls(
            retry_on=None if retry_on is None else _classes(task, "retry_on", retry_on),
            give_up_on=() if give_up_on is None else _classes(task, "give_up_on", give_up_on),
            delay=_computed(task, options.get("retry_delay")),
            jitter=options.get("retry_jitter", 0.0),
            longest_s=float("inf") if longest is None else seconds(longest, "retry_max_delay"),
        )

    def ending(self, error: Exception, context: TaskContext) -> Exception:
        """
        Return what to raise instead of *error*, so that the attempt ends as declared.
        """
        if isinstance(error, _STEERING) or context.reason == "timed_out":
            return error
        is_retried = self.retry_on is None or isinstance(error, self.retry_on)
        text = f"{type(error).__qualname__}: {error}"
        if not is_retried or isinstance(error, self.give_up_on):
            return PermanentFailure(text)
        if self.delay is None:
            return error
        delay_s = seconds(self.delay(context.attempt, error), "what retry_delay returns")
        spread = 1.0 + self.jitter * random.uniform(-1.0, 1.0)
        return RetryLater(min(delay_s * spread, self.longest_s), text)


def stored_delay(delay: Any) -> dict[str, Any]:
    """
    Return the option to store for a declared *delay*: it counts where no function was left to
    raise, as after a crash.
    """
    if _is_list(delay):
        return {"retry_delay": delay[0]}
    return {} if delay is None or callable(delay) else {"retry_delay": delay}


def _is_list(delay: Any) -> bool:
    return isinstance(delay, Sequence) and not isinstance(delay, (str, bytes))


def _computed(task: str, delay: Any) -> Callable[[int, Exception], Duration] | None:
    if callable(delay):
        return cast("Callable[[int, Exception], Duration]", delay)
    if not _is_list(delay):
        return None  # one pause, or nothing that it could be: `send` has the rule
    delays = [seconds(one, f"task {task!r}: each of retry_delay") for one in delay]
    if not delays:
        msg = f"task {task!r}: retry_delay must not be empty"
        raise ValueError(msg)
    return lambda attempt, _: delays[min(attempt, len(delays)) - 1]


def _classes(task: str, option: str, given: Any) -> tuple[type[BaseException], ...]:
    classes = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    for one in classes:
        if not isinstance(one, type) or not issubclass(one, BaseException):
            msg = f"task {task!r}: {option} must be exception classes, got {one!r}"
            raise TypeError(msg)
    return classes
