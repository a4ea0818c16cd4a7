"""
A declared task: a function that can be called, or sent.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, TypeVar, cast

import attrs

from mscheduler_sync._declared.forms import Fault, Form
from mscheduler_sync._declared.hooks import Hooks
from mscheduler_sync._declared.naming import KeyMaker, key_maker
from mscheduler_sync._declared.options import (
    DELAY_OPTIONS,
    WORKER_OPTIONS,
    CallOptions,
    check_known,
    checked,
)
from mscheduler_sync._declared.parameters import Parameters
from mscheduler_sync._declared.retries import RetryPolicy, stored_delay
from mscheduler_sync._declared.values import Values
from mscheduler_sync._storage.codec import Unstorable
from mscheduler_sync.context import TaskContext
from mscheduler_sync.errors import InvalidTask, PermanentFailure
from mscheduler_sync.invocation import check_plain
from mscheduler_sync.model import Task
from mscheduler_sync.producer import Producer
from mscheduler_sync.sender import SendResult

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

P = ParamSpec("P")
R = TypeVar("R")


@attrs.frozen
class AppParts:
    """
    What a task has of its app.
    """

    producer: Callable[[], Producer]
    values: Values
    hooks: Hooks


class DeclaredTask(Generic[P, R]):
    """
    A function declared with ``@app.task``. Called, it is the plain function; `send` has a worker
    run it. Thread-safe.

    ``P`` are its parameters without the `TaskContext`, ``R`` is what it returns.
    """

    # That of the function.
    __name__: str

    def __init__(
        self,
        function: Callable[..., R],
        name: str,
        app: AppParts,
        *,
        key: str | Callable[..., str] | None,
        aliases: Mapping[str, str],
        options: Mapping[str, Any],
    ) -> None:
        check_plain(function)
        #: The task's name, which its documents have.
        self.name: Final = name
        #: The function itself.
        self.function: Final = function
        self._app = app
        self._parameters = Parameters(function, name, app.values, aliases)
        self._key_of: KeyMaker = key_maker(key, name, self._parameters)
        self._policy = RetryPolicy.checked(name, options)
        self._options = {
            option: value for option, value in options.items() if option not in WORKER_OPTIONS
        } | stored_delay(options.get("retry_delay"))
        self._send_options = checked(self._options, name)
        self._result_form: Form | None = None
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    # -- sending -----------------------------------------------------------------------------

    def send(self, /, *args: P.args, **kwargs: P.kwargs) -> SendResult:
        """
        Have a worker call the function with these arguments; see `Producer.send`.

        Raises:
            TypeError: If the function cannot be called so, or an argument is not what its
                annotation says: names the task and the argument.
            ValueError: If an argument cannot be stored: names the place in it.
            TaskExists, TaskRunning, InvalidTask, StoreError: As `Producer.send`.
        """
        key, params = self._sendable(args, kwargs)
        try:
            return self._app.producer().send(key, params, **self._send_options)
        except Unstorable as error:
            raise self._unstorable(error) from error

    def send_many(self, calls: Iterable[Any]) -> list[SendResult]:
        """
        Send many calls, in few round trips; see `Producer.send_many`.

        Each of *calls* is a mapping of arguments by name, a tuple of positional arguments, or
        anything else as the only argument; a single mapping or tuple stands in a tuple.
        Returns one result per call, in order; a call that could not be sent has its `error`
        set and does not stop the others.

        Raises:
            TypeError: If *calls* cannot be iterated, or the options include a session.
            StoreError: As `Producer.send_many`; sending the same calls again is safe if the
                task makes its keys of the arguments.
        """
        results: list[SendResult | None] = []
        items: list[tuple[str | None, Any]] = []
        for call in calls:
            try:
                items.append(self._sendable(*_as_call(call)))
                results.append(None)
            except (TypeError, ValueError) as error:
                results.append(SendResult(repr(call)[:200], False, False, None, error))
        sent = iter(self._app.producer().send_many(items, **self._send_options))
        return [self._told(next(sent)) if result is None else result for result in results]

    def using(self, **options: Unpack[CallOptions]) -> Self:
        """
        Return the same task with other options for its sends, those of `Producer.send` and ``key``.

        Raises:
            TypeError, ValueError: If an option is wrong; names it.
        """
        given = dict(options)
        check_known(given, CallOptions, f"task {self.name!r}")
        if self._policy.delay is not None and (fixed := DELAY_OPTIONS & given.keys()):
            msg = (
                f"task {self.name!r} computes its retry_delay where it runs; "
                f"{', '.join(sorted(fixed))} cannot be changed for one send"
            )
            raise ValueError(msg)
        other = copy.copy(self)
        if "key" in given:
            key = cast("str | None", given.pop("key"))
            other._key_of = lambda _: key
        other._options = {**self._options, **given}
        other._send_options = checked(other._options, self.name)
        return other

    def _sendable(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[str | None, dict[str, Any]]:
        arguments = self._parameters.bind(args, kwargs)
        params = self._parameters.encode(arguments)
        return self._key_of({**self._parameters.defaults, **arguments}), params

    def _told(self, result: SendResult) -> SendResult:
        if not isinstance(result.error, Unstorable):
            return result
        return attrs.evolve(result, error=self._unstorable(result.error))

    def _unstorable(self, error: Unstorable) -> ValueError:
        problem = str(error).removeprefix("params.")
        return ValueError(f"task {self.name!r} got a wrong argument: {problem}")

    # -- asking ------------------------------------------------------------------------------

    def get(self, key: str) -> Task | None:
        """
        Return the task under *key*, its params as they are stored, or None; as `Producer.get`.
        """
        return self._app.producer().get(key)

    def result(self, key: str, timeout: float | None = None) -> R:
        """
        Wait until the task has ended; return what the function returned; as `Producer.result`.

        Raises:
            InvalidTask: If the stored value is not what the return annotation says.
            TaskNotFound, TaskFailed, TaskCancelled, TimeoutError, StoreError: As `Producer.result`.
        """
        stored = self._app.producer().result(key, timeout)
        try:
            return cast("R", self._form_of_result().decode(stored))
        except Fault as fault:
            raise InvalidTask(key, f"returns{fault.path}", fault.problem) from fault

    # -- running -----------------------------------------------------------------------------

    def prepare(self) -> None:
        """
        Called by the app before a consumer starts: find what is missing for its types now.
        """
        self._parameters.prepare()
        self._form_of_result()

    def run(self, params: Any, context: TaskContext) -> Any:
        """
        Called by a consumer: run one attempt with the arguments of a stored task.
        """

        def attempt() -> Any:
            arguments = self._parameters.decode(params)
            if self._parameters.context is not None:
                arguments[self._parameters.context] = context
            return self._encoded(self.function(**arguments))

        try:
            return self._app.hooks.call(attempt, context)
        except Exception as error:
            ending = self._policy.ending(error, context)
            if ending is error:
                raise
            # With the frames of the function: they are what its failure is explained by.
            raise ending.with_traceback(error.__traceback__) from error

    def _encoded(self, result: Any) -> Any:
        try:
            return self._form_of_result().encode(result)
        except Fault as fault:
            # The function has had its effect: running it again would not make the value storable.
            msg = f"UnstorableResult: the result{fault.path} {fault.problem}"
            raise PermanentFailure(msg) from fault

    def _form_of_result(self) -> Form:
        if self._result_form is None:
            self._result_form = self._parameters.result_form()
        return self._result_form

    def __repr__(self) -> str:
        return f"DeclaredTask({self.name!r})"


class ContextTask(DeclaredTask[P, R]):
    """
    What type checkers see of a task whose function takes its `TaskContext` first: it is given to a
    plain call, and not to `send`.
    """

    def __call__(  # type: ignore[override]
        self, context: TaskContext, /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        return self.function(context, *args, **kwargs)


def _as_call(call: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(call, Mapping):
        return (), call
    return (call if isinstance(call, tuple) else (call,)), {}
