"""
What a handler is, and what it is told of a job.
"""

from __future__ import annotations

import datetime as dt
from typing import Any, Protocol

import attrs


@attrs.frozen
class Job:
    """
    One grant of a job to a worker, as `Handler.start` sees it.
    """

    key: str
    payload: Any
    #: Grows with every grant of this key, over all workers and for ever. Pass it on to outside
    #: systems, which then refuse what comes with a smaller one.
    fence: int
    #: Whether the job was granted before: it was moved, or its owner died.
    requeued: bool
    #: When it was dispatched, by the server's clock.
    created_at: dt.datetime


class Handler(Protocol):
    """
    Any object with these methods; ``notify(key, payload)`` is optional.

    Calls about one key come one after another, those about different keys in
    parallel, each from a thread of the node's.
    """

    def start(self, job: Job, /) -> object:
        """
        Begin the job and return soon; it runs on until `stop`. What is raised fails the start.
        """

    def stop(self, key: str, /) -> object:
        """
        End the job; when this returns, another worker may start it. What is raised keeps it here.
        """


def check_handler(handler: object) -> None:
    """
    Raises:
        TypeError: If *handler* lacks a method, or has something else in its place.
    """
    for name in ("start", "stop"):
        if not callable(getattr(handler, name, None)):
            msg = f"a handler needs a method {name}, got {handler!r:.200}"
            raise TypeError(msg)
    notify = getattr(handler, "notify", None)
    if notify is not None and not callable(notify):
        msg = f"notify of a handler must be a method or missing, got {notify!r:.200}"
        raise TypeError(msg)


@attrs.frozen
class WorkerInfo:
    """
    A worker of the pool, wherever it runs.
    """

    id: str
    node: str
    created_at: dt.datetime
