"""
Functions by task name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from mscheduler_sync.invocation import Invocation, invocation_of
from mscheduler_sync.settings import check_name

_F = TypeVar("_F", bound=Callable[..., Any])


class Router:
    """
    Maps task names to functions.

    A consumer with a router claims tasks of these names only; tasks without a name
    only if there is a *default* function. Register all functions before the
    consumer starts; later ones are refused. Thread-safe.

    Raises:
        TypeError: If *default* is not a function of one or two arguments.
    """

    def __init__(self, *, default: Callable[..., Any] | None = None) -> None:
        self._lock = threading.Lock()
        # Under _lock.
        self._functions: dict[str | None, Invocation] = {}
        self._frozen = False
        if default is not None:
            self._functions[None] = invocation_of(default)

    def task(self, name: str) -> Callable[[_F], _F]:
        """
        Decorate the function for the tasks called *name*; the function itself is unchanged.

        Raises:
            ValueError: If *name* is empty, too long or taken, or a consumer uses the router.
            TypeError: If *name* is not a string, or the function cannot take ``params``.
        """

        def register(function: _F) -> _F:
            self.add(name, function)
            return function

        check_name(name)
        return register

    def add(self, name: str, function: Callable[..., Any]) -> None:
        """
        Register *function* for the tasks called *name*. Raises as `task` does.
        """
        check_name(name)
        invocation = invocation_of(function)
        with self._lock:
            if self._frozen:
                msg = f"{name!r} comes too late: a consumer has started with this router"
                raise ValueError(msg)
            if name in self._functions:
                msg = f"the name {name!r} is taken"
                raise ValueError(msg)
            self._functions[name] = invocation

    @property
    def names(self) -> tuple[str | None, ...]:
        """
        The names that are served; None stands for tasks without a name.
        """
        with self._lock:
            return tuple(self._functions)

    def freeze(self) -> None:
        """
        Called by a consumer at its start.
        """
        with self._lock:
            self._frozen = True

    def find(self, name: str | None) -> Invocation | None:
        """
        Return how to call the function for *name*, or None.
        """
        with self._lock:
            return self._functions.get(name)
