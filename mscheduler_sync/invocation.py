"""
How the user's function wants to be called.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from mscheduler_sync.context import TaskContext

Invocation = Callable[[Any, TaskContext], Any]

_CONTEXT_NAMES = frozenset({"context", "ctx", "task", "task_context"})


def check_plain(function: object) -> None:
    """
    Check that *function* does its work when it is called, in the thread that calls it.

    Raises:
        TypeError: If it is not callable, or is a coroutine function or a generator function.
    """
    if not callable(function):
        msg = f"a function is needed, got {function!r}"
        raise TypeError(msg)
    # What is called may be a function, or the __call__ of an object, perhaps inside partials.
    called: Any = function
    while isinstance(called, functools.partial):
        called = called.func
    for code in (called, type(called).__call__):
        if inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code):
            msg = f"{function!r} is async; this library runs plain functions in threads"
            raise TypeError(msg)
        if inspect.isgeneratorfunction(code):
            msg = f"{function!r} is a generator function; its body would never run"
            raise TypeError(msg)


def invocation_of(function: Callable[..., Any]) -> Invocation:
    """
    Return a call of *function* as ``function(params)`` or ``function(params, context)``.

    The context is passed if a second positional parameter is required, or is called
    ``context``, ``ctx``, ``task`` or ``task_context``. A function whose signature
    cannot be read is called with params alone.

    Raises:
        TypeError: If *function* is not callable, is a coroutine function, or takes neither form.
    """
    check_plain(function)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return _without_context(function)
    positional = [
        p
        for p in parameters
        if p.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    required = [p for p in positional if p.default is inspect.Parameter.empty]
    takes_any = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    keyword_only = [
        p.name
        for p in parameters
        if p.kind is inspect.Parameter.KEYWORD_ONLY and p.default is inspect.Parameter.empty
    ]
    if len(required) > 2 or keyword_only or not (positional or takes_any):  # noqa: PLR2004
        msg = f"{function!r} must be callable as function(params) or function(params, context)"
        raise TypeError(msg)
    wants_context = len(required) == 2 or (  # noqa: PLR2004
        len(positional) > 1 and positional[1].name in _CONTEXT_NAMES
    )
    return function if wants_context else _without_context(function)


def _without_context(function: Callable[[Any], Any]) -> Invocation:
    def call(params: Any, _context: TaskContext) -> Any:
        return function(params)

    return call
