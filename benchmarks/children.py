"""
Child processes that consume: each runs one function after another that the parent names.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Final

#: Not fork: a forked MongoClient may hang.
_SPAWN: Final = multiprocessing.get_context("spawn")
#: Longer than anything that a child is told to do.
_PATIENCE_S: Final = 600.0


class ChildFailed(Exception):
    """
    A child raised, ended, or said nothing for too long; the message holds what is known.
    """


class Line:
    """
    The child's end: it says things to the parent and hears what the parent says.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def say(self, thing: object) -> None:
        """
        Tell the parent. From any thread.
        """
        with self._lock:
            self._connection.send(("said", thing))

    def hear(self) -> Any:
        return self._connection.recv()


class Child:
    """
    One child process.
    """

    def __init__(self) -> None:
        self.connection, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, function: Callable[..., object], *args: object) -> None:
        """
        Have ``function(line, *args)`` called there. Both must be importable or picklable.
        """
        self.connection.send((function, args))

    def tell(self, thing: object) -> None:
        self.connection.send(thing)

    def hear(self, timeout_s: float = _PATIENCE_S) -> Any:
        """
        Return what the function says next, or, at its end, what it returns.

        Raises:
            ChildFailed: If it raised, its process ended, or nothing came in time.
        """
        if not self.connection.poll(timeout_s):
            msg = f"a child process said nothing for {timeout_s:g} s"
            raise ChildFailed(msg)
        try:
            kind, thing = self.connection.recv()
        except EOFError:
            msg = "a child process has ended"
            raise ChildFailed(msg) from None
        if kind == "failed":
            raise ChildFailed(thing)
        return thing

    def end(self) -> None:
        if self._process.is_alive():
            with contextlib.suppress(OSError):
                self.connection.send(None)
            self._process.join(5.0)
        if self._process.is_alive():
            # It may be in the middle of something; only a failed benchmark ends so.
            self._process.terminate()
            self._process.join(5.0)
        self.connection.close()


class Children:
    """
    Several children that do the same thing at the same time. A context manager.
    """

    def __init__(self, size: int) -> None:
        self.all: Final = [Child() for _ in range(size)]

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in self.all:
            child.end()

    def race(self, size: int, function: Callable[..., object], *args: object) -> list[Any]:
        """
        Have the first *size* children prepare, then start together; return their results.

        The function says something once it is prepared, and hears something as the start.
        """
        team = self.all[:size]
        for child in team:
            child.begin(function, *args)
        for child in team:
            child.hear()
        for child in team:
            child.tell("go")
        return [child.hear() for child in team]


def first_said(children: Sequence[Child], timeout_s: float) -> Any:
    """
    Return what any of the children says next.

    Raises:
        ChildFailed: As `Child.hear`.
    """
    deadline_s = time.monotonic() + timeout_s
    ready = wait([child.connection for child in children], timeout_s)
    for child in children:
        if child.connection in ready:
            return child.hear(max(0.0, deadline_s - time.monotonic()))
    msg = f"no child process said anything for {timeout_s:g} s"
    raise ChildFailed(msg)


def _serve(connection: Connection) -> None:
    """
    In the child: call what the parent names until it names nothing, or is gone.
    """
    line = Line(connection)
    while True:
        try:
            order = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        if order is None:
            return
        function, args = order
        try:
            connection.send(("done", function(line, *args)))
        except KeyboardInterrupt:
            return
        except BaseException:  # noqa: BLE001 - the parent reports it
            connection.send(("failed", traceback.format_exc()))
