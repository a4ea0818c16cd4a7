"""
The parameters of a declared function: what may be sent, how it is stored, how it is read back.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any, Final, NoReturn, Optional, get_args

from mscheduler_sync._declared.forms import Fault, Form
from mscheduler_sync._declared.values import Values
from mscheduler_sync.context import TaskContext
from mscheduler_sync.errors import PermanentFailure

#: Annotations that cannot be resolved when declared: imported for type checkers only.
_CONTEXT_TEXT: Final = re.compile(r"(Optional\[)?([\w.]+\.)?TaskContext\b")


class Parameters:
    """
    Binds arguments by name, as Python does, but quickly and without filling in defaults.

    *aliases* maps former names of parameters, which stand in older documents, to those of today.

    Raises:
        TypeError: If the function cannot be called by name.
        ValueError: If an alias is wrong.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        task: str,
        values: Values,
        aliases: Mapping[str, str],
    ) -> None:
        self._function = function
        self._task = task
        self._values = values
        self._forms: dict[str, Form] = {}
        #: The parameter that gets the `TaskContext`, if there is one.
        self.context: str | None = None
        #: The name of ``**kwargs``, which takes whatever other names are sent.
        self._rest: str | None = None
        self._parameters: dict[str, Parameter] = {}
        for parameter in inspect.signature(function).parameters.values():
            self._add(parameter)
        self.names: Final = frozenset(self._parameters)
        self.defaults: Final[Mapping[str, Any]] = {
            name: one.default
            for name, one in self._parameters.items()
            if one.default is not Parameter.empty
        }
        self._required = self.names - self.defaults.keys()
        self._positional = tuple(
            name
            for name, one in self._parameters.items()
            if one.kind is Parameter.POSITIONAL_OR_KEYWORD
        )
        self._aliases = dict(aliases)
        for old, new in self._aliases.items():
            if new not in self.names or old in self.names:
                msg = (
                    f"task {task!r}: the alias {old!r} must be a former name of a parameter, "
                    f"and {new!r} a parameter"
                )
                raise ValueError(msg)

    def _add(self, parameter: Parameter) -> None:
        name = parameter.name
        if parameter.kind is Parameter.VAR_KEYWORD:
            self._rest = name
        elif parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL):
            shown = "*" * (parameter.kind is Parameter.VAR_POSITIONAL) + name
            kind = "positional-only" if shown == name else "variable"
            msg = f"task {self._task!r}: arguments are stored by name, but {shown} is {kind}"
            raise TypeError(msg)
        elif name in {"self", "cls"} and not self._parameters:
            msg = (
                f"task {self._task!r}: a method cannot be declared, a worker has no {name} for it; "
                "declare a function or a static method"
            )
            raise TypeError(msg)
        elif self._is_context(parameter.annotation):
            if self.context is not None:
                msg = f"task {self._task!r}: {self.context} and {name} both take the TaskContext"
                raise TypeError(msg)
            self.context = name
        else:
            self._parameters[name] = parameter

    def _accepts(self, name: str) -> bool:
        return name in self.names or (self._rest is not None and name != self.context)

    def _is_context(self, annotation: Any) -> bool:
        resolved = _resolved(annotation, self._function)
        if isinstance(resolved, str):
            return _CONTEXT_TEXT.match(resolved.strip("'\"")) is not None
        members = (resolved, *get_args(resolved))
        return any(isinstance(one, type) and issubclass(one, TaskContext) for one in members)

    # -- sending -----------------------------------------------------------------------------

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """
        Return the arguments of a call by name, without defaults.

        Raises:
            TypeError: If the function cannot be called so; names the task and the argument.
        """
        arguments = dict(zip(self._positional, args))  # noqa: B905 - compared below
        if len(args) > len(self._positional):
            self._refuse(
                f"takes {len(self._positional)} positional arguments, {len(args)} were given"
            )
        if kwargs:
            for name in kwargs:
                if name in arguments:
                    self._refuse(f"got two values for the argument {name!r}")
                if not self._accepts(name):
                    self._refuse(self._unknown(name))
            arguments.update(kwargs)
        if not self._required <= arguments.keys():
            self._refuse(self._missing(arguments))
        return arguments

    def encode(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """
        Return *arguments* in their stored form.

        Raises:
            TypeError, ValueError: If a value is wrong or cannot be stored: the task, the
                place in the argument, and why.
        """
        forms = self._forms or self._made_forms()
        stored: dict[str, Any] = {}
        name = ""
        try:
            for name, value in arguments.items():
                stored[name] = (forms.get(name) or forms["**"]).encode(value)
        except Fault as fault:
            msg = f"task {self._task!r} {self._faulty(name, fault)}"
            raise fault.kind(msg) from fault.__cause__
        except RecursionError:
            problem = self._faulty(name, Fault("is nested too deeply or in itself"))
            msg = f"task {self._task!r} {problem}"
            raise ValueError(msg) from None
        return stored

    # -- running -----------------------------------------------------------------------------

    def decode(self, params: Mapping[str, Any] | None) -> dict[str, Any]:
        """
        Return the arguments that a task's document holds.

        Raises:
            PermanentFailure: If they do not fit the function: running it again would not help.
        """
        if params is None:
            params = {}
        if not isinstance(params, Mapping):
            self._fail(f"takes its arguments as an object by name, not {type(params).__name__}")
        forms = self._forms or self._made_forms()
        arguments: dict[str, Any] = {}
        for stored_name, stored in params.items():
            name = self._aliases.get(stored_name, stored_name)
            if name in arguments:
                self._fail(f"got two values for the argument {name!r}")
            if not self._accepts(name):
                self._fail(self._unknown(name))
            try:
                arguments[name] = (forms.get(name) or forms["**"]).decode(stored)
            except Fault as fault:
                self._fail(self._faulty(name, fault), fault)
        if not self._required <= arguments.keys():
            self._fail(self._missing(arguments))
        return arguments

    # -- in common ---------------------------------------------------------------------------

    def prepare(self) -> None:
        """
        Find the stored form of each parameter now instead of at the first call.

        Raises:
            ImportError: If a type takes a package that is missing.
        """
        self._made_forms()

    def _made_forms(self) -> dict[str, Form]:
        """
        Not made when declared: the module may define the classes of annotations further down.
        """
        forms = {"**": self._values.untyped}
        for parameter in inspect.signature(self._function).parameters.values():
            annotation = _resolved(parameter.annotation, self._function)
            if parameter.annotation is Parameter.empty or isinstance(annotation, str):
                annotation = Any
            elif parameter.default is None:
                annotation = Optional[annotation]  # noqa: UP045 - it is an object here
            is_rest = parameter.kind is Parameter.VAR_KEYWORD
            forms["**" if is_rest else parameter.name] = self._values.form_of(annotation)
        self._forms = forms
        return forms

    def result_form(self) -> Form:
        """
        Return how what the function returns is stored.
        """
        annotation = inspect.signature(self._function).return_annotation
        resolved = _resolved(annotation, self._function)
        is_open = annotation is Parameter.empty or isinstance(resolved, str)
        return self._values.form_of(Any if is_open else resolved)

    def _faulty(self, name: str, fault: Fault) -> str:
        return f"got a wrong argument: {name}{fault.path} {fault.problem}"

    def _unknown(self, name: object) -> str:
        if name == self.context:
            return f"gets its argument {name!r} from the worker that runs it"
        takes = ", ".join(self._parameters) or "none"
        return f"has no argument {name!r}; it takes {takes}"

    def _missing(self, arguments: Mapping[str, Any]) -> str:
        missing = [
            repr(name) for name in self._parameters if name in self._required - arguments.keys()
        ]
        return f"lacks the argument {', '.join(missing)}"

    def _refuse(self, problem: str) -> NoReturn:
        msg = f"task {self._task!r} {problem}"
        raise TypeError(msg)

    def _fail(self, problem: str, cause: Exception | None = None) -> NoReturn:
        msg = f"task {self._task!r} {problem}"
        raise PermanentFailure(msg) from cause


def _resolved(annotation: Any, function: Callable[..., Any]) -> Any:
    """
    Return what a string annotation stands for, or the string where that is not known.
    """
    if not isinstance(annotation, str):
        return annotation
    holder = type("", (), {"__annotations__": {"it": annotation}})
    names = getattr(inspect.unwrap(function), "__globals__", {})
    try:
        return typing.get_type_hints(holder, names)["it"]
    except Exception:  # noqa: BLE001 - evaluating a user's text may raise anything
        return annotation
