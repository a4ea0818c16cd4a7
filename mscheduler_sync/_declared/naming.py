"""
The name of a declared task, and the key of each of its sends.
"""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mscheduler_sync._declared.parameters import Parameters

#: Makes a key of the arguments of a send, defaults included; None: a unique one.
KeyMaker = Callable[[Mapping[str, Any]], str | None]


def name_of(function: Callable[..., Any]) -> str:
    """
    Return the name under which sender and worker know *function*: its module's and its own.

    For a program's main module that is the name under which others import it: of
    ``python -m shop.tasks`` it is ``shop.tasks``, of ``python tasks.py`` it is ``tasks``.

    Raises:
        ValueError: If the function has no name of its own.
    """
    own = getattr(function, "__qualname__", "<unnamed>")
    if own.endswith(("<lambda>", "<unnamed>")):
        msg = f"{function!r} has no name of its own; declare it with name="
        raise ValueError(msg)
    module = function.__module__
    if module in {"__main__", "__mp_main__"}:
        names = getattr(inspect.unwrap(function), "__globals__", {})
        if names.get("__spec__") is not None:
            module = names["__spec__"].name
        elif names.get("__file__"):
            module = Path(names["__file__"]).stem
    return f"{module}.{own}"


def key_maker(key: str | Callable[..., str] | None, task: str, parameters: Parameters) -> KeyMaker:
    """
    Return what makes the keys of a task.

    Raises:
        TypeError, ValueError: If *key* is neither a template nor a function, or asks for
            something that is no parameter of the task.
    """
    if key is None:
        return lambda _: None
    if isinstance(key, str):
        _check_fields(_fields_of(key, task), task, parameters)
        return key.format_map
    if not callable(key):
        msg = f"task {task!r}: key must be a template or a function, got {key!r}"
        raise TypeError(msg)
    wanted = inspect.signature(key).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in wanted):
        return lambda arguments: key(**arguments)
    names = [one.name for one in wanted]
    _check_fields(names, task, parameters)
    return lambda arguments: key(**{name: arguments[name] for name in names})


def _fields_of(template: str, task: str) -> list[str]:
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template)]
    except ValueError as error:
        msg = f"task {task!r}: the key {template!r} is no template: {error}"
        raise ValueError(msg) from error
    # Of "order.id" and "order[id]" the part that is a parameter.
    return [f.partition(".")[0].partition("[")[0] for f in fields if f is not None]


def _check_fields(names: list[str], task: str, parameters: Parameters) -> None:
    for name in names:
        if name not in parameters.names:
            known = ", ".join(sorted(parameters.names)) or "none"
            msg = f"task {task!r}: its key asks for {name!r}, but the parameters are {known}"
            raise ValueError(msg)
