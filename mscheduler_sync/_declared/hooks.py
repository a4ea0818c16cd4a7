"""
What an application wants around each attempt of its declared tasks, in the attempt's thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import attrs

from mscheduler_sync._runtime.log import logger
from mscheduler_sync.context import TaskContext

_log = logger("app")
R = TypeVar("R")

#: Returns a context manager that is entered around one attempt.
Hook = Callable[[TaskContext], AbstractContextManager[Any]]
BeforeRun = Callable[[TaskContext], object]
AfterRun = Callable[[TaskContext, Any], object]
OnFailure = Callable[[TaskContext, BaseException], object]


@attrs.frozen
class Hooks:
    """
    The hooks of an app.

    Context managers and *before_run* are part of the attempt: what they raise fails it.
    *after_run* and *on_failure* are told of its end and do not change it: what they raise is
    logged.
    """

    around: tuple[Hook, ...]
    before_run: BeforeRun | None
    after_run: AfterRun | None
    on_failure: OnFailure | None

    @classmethod
    def checked(
        cls,
        hooks: Iterable[Hook],
        before_run: BeforeRun | None,
        after_run: AfterRun | None,
        on_failure: OnFailure | None,
    ) -> Hooks:
        """
        Raises:
            TypeError: If one is not callable.
        """
        around = tuple(hooks)
        given = {"before_run": before_run, "after_run": after_run, "on_failure": on_failure}
        for name, hook in [*(("each of hooks", hook) for hook in around), *given.items()]:
            if hook is not None and not callable(hook):
                msg = f"{name} must be callable, got {hook!r}"
                raise TypeError(msg)
        return cls(around, before_run, after_run, on_failure)

    def call(self, function: Callable[[], R], context: TaskContext) -> R | None:
        """
        Return what *function* returns, or None where a context manager swallows its error.
        """
        with contextlib.ExitStack() as stack:
            for hook in self.around:
                stack.enter_context(hook(context))
            try:
                if self.before_run is not None:
                    self.before_run(context)
                result = function()
            except BaseException as error:
                self._tell("on_failure", self.on_failure, context, error)
                raise
            self._tell("after_run", self.after_run, context, result)
            return result
        return None

    def _tell(
        self,
        name: str,
        hook: Callable[[TaskContext, Any], object] | None,
        context: TaskContext,
        end: object,
    ) -> None:
        if hook is None:
            return
        try:
            hook(context, end)
        except Exception as error:  # noqa: BLE001 - a reporter must not decide about the task
            _log.error(
                "a hook raised; the attempt ends as if it had not",
                event="hook_raised",
                exc_info=error,
                worker_id=context.worker_id,
                task_key=context.key,
                running_id=context.running_id,
                hook=name,
            )
