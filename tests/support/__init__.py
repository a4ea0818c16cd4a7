"""
What tests of every level share.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import attrs
from pymongo import MongoClient

from mscheduler_sync import AttemptEnded, AttemptStarted, Event

T = TypeVar("T")

Document = dict[str, Any]


def wait_until(condition: Callable[[], T], description: str, timeout: float = 10) -> T:
    """
    Call *condition* until its value is true, and return that value.

    The pauses grow from 2 to 50 ms: conditions that ask the server would keep it busy.

    Raises:
        AssertionError: If it is still false after *timeout* seconds; the message has *description*.
    """
    pause = threading.Event()
    deadline_s = time.monotonic() + timeout
    pause_s = 0.002
    while True:
        # Read before the call: a slow condition is looked at once more after the deadline.
        late = time.monotonic() >= deadline_s
        value = condition()
        if value:
            return value
        if late:
            msg = f"not within {timeout:g} s: {description}"
            raise AssertionError(msg)
        pause.wait(pause_s)
        pause_s = min(pause_s * 1.5, 0.05)


def without_id(event: Event | None) -> Event | None:
    """
    *event* with ``*`` for the id of the attempt, which nobody knows beforehand.
    """
    if isinstance(event, AttemptStarted | AttemptEnded):
        return attrs.evolve(event, running_id="*")
    return event


@contextlib.contextmanager
def fail_point(
    client: MongoClient[Document],
    commands: Sequence[str],
    mode: str | Mapping[str, int],
    **data: Any,
) -> Iterator[None]:
    """
    Make the server fail *commands* as *data* says while the block runs.

    *mode* is ``"alwaysOn"``, ``{"times": n}`` or ``{"skip": n, "times": m}``. *data* is that of the
    server's fail point ``failCommand``: ``errorCode``, ``closeConnection``, ``blockConnection``
    with ``blockTimeMS``, ``writeConcernError``, ``errorLabels``, ``appName``. One at a time: a
    second fail point replaces the first. Every client of the server is hit, save with ``appName``.
    """
    client.admin.command(
        {
            "configureFailPoint": "failCommand",
            "mode": mode,
            "data": {"failCommands": list(commands), **data},
        }
    )
    try:
        yield
    finally:
        client.admin.command({"configureFailPoint": "failCommand", "mode": "off"})
