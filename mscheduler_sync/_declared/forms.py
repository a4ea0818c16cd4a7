"""
How values of one type are stored, and why one is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs


@attrs.frozen
class Form:
    """
    How values of one type are stored: both functions raise `Fault` for what is none of them.
    """

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    #: For messages, as in "must be a list".
    what: str


class Fault(Exception):
    """
    A value is refused: *problem* says why, `path` where in it.

    *kind* is the class of the error that a caller of ``send`` gets.
    """

    def __init__(self, problem: str, *, kind: type[Exception] = ValueError, path: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.kind = kind
        self.path = path

    def at(self, step: str) -> Fault:
        """
        Return the fault as seen from outside, *step* above where it was found.
        """
        return Fault(self.problem, kind=self.kind, path=step + self.path)


def mismatch(what: str, value: object) -> Fault:
    """
    Return the fault of a *value* that is not *what*. Does not show the value: it may be a secret.
    """
    return Fault(f"must be {what}, is {type_name(type(value))}", kind=TypeError)


def expect(value: Any, accepted: type | tuple[type, ...], what: str) -> Any:
    """
    Return *value*.

    Raises:
        Fault: If it is no instance of *accepted*.
    """
    if not isinstance(value, accepted):
        raise mismatch(what, value)
    return value


def type_name(kind: type) -> str:
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def converted(function: Callable[[Any], Any], value: Any, what: str) -> Any:
    """
    Return *function* of *value*; whatever it raises is a fault of the value.
    """
    try:
        return function(value)
    except Fault:
        raise
    except Exception as error:
        problem = f"is no readable form of {what}: {type(error).__name__}: {error}"
        raise Fault(problem) from error


def each(function: Callable[[Any], Any], members: Iterable[Any]) -> list[Any]:
    """
    Return *function* of each of *members*, whose positions stand in the path of a fault.
    """
    made: list[Any] = []
    try:
        for member in members:
            made.append(function(member))  # noqa: PERF401 - their number tells where it stopped
    except Fault as fault:
        step = f"[{len(made)}]"
        raise fault.at(step) from fault.__cause__
    return made


def each_value(function: Callable[[Any], Any], mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    """
    Return *mapping* with *function* of each value, whose keys stand in the path of a fault.
    """
    made: dict[Any, Any] = {}
    key: Any = None
    try:
        for key, value in mapping.items():
            made[key] = function(value)
    except Fault as fault:
        step = f".{key}"
        raise fault.at(step) from fault.__cause__
    return made
