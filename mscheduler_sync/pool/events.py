"""
What a node tells its own process. Events about a write are sent after the write is durable.
"""

from __future__ import annotations

import attrs

from mscheduler_sync.events import Event


@attrs.frozen(kw_only=True)
class JobStarted(Event):
    """
    A handler's start has returned, and the job runs here.
    """

    key: str
    fence: int
    requeued: bool


@attrs.frozen(kw_only=True)
class JobStartFailed(Event):
    """
    A handler's start has raised. *retried* says whether the job waits for another try.
    """

    key: str
    error: str
    retried: bool


@attrs.frozen(kw_only=True)
class JobStopped(Event):
    """
    A job was stopped by request, or by the shutdown of the pool, and is gone.
    """

    key: str
    fence: int


@attrs.frozen(kw_only=True)
class JobReleased(Event):
    """
    A job was stopped here and given back, for another worker to start.
    """

    key: str
    fence: int


@attrs.frozen(kw_only=True)
class JobLost(Event):
    """
    A job is no longer this node's: its lease was not renewed in time. The handler was told.
    """

    key: str
    fence: int


@attrs.frozen(kw_only=True)
class JobStopFailed(Event):
    """
    A handler's stop has raised; the job stays where it is.
    """

    key: str
    error: str


@attrs.frozen(kw_only=True)
class NotifyFailed(Event):
    """
    A handler's notify has raised, or there is none. The notification is not repeated.
    """

    key: str
    error: str


@attrs.frozen(kw_only=True)
class NodeFenced(Event):
    """
    The node's lease is over: it stops its jobs and comes back under another id.
    """

    node: str
    reason: str


@attrs.frozen(kw_only=True)
class NodeBuried(Event):
    """
    This node has given back the jobs of a dead one.
    """

    node: str
    jobs: int


@attrs.frozen(kw_only=True)
class NodeStateChanged(Event):
    """
    The node itself: running, closing, closed, shutdown or crashed.
    """

    state: str
