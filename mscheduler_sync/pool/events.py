"""
What a node tells its own process: events, reports of its ends, and its health.

Events about a write are sent after the write is durable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs

from mscheduler_sync.events import Event
from mscheduler_sync.health import ComponentReport

NodeState = Literal["new", "running", "closing", "closed", "shutdown", "crashed", "forked"]


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
class DeadNodeRemoved(Event):
    """
    This node has removed a dead one from the pool, and given its *jobs* jobs back.
    """

    node: str
    jobs: int


@attrs.frozen(kw_only=True)
class NodeStateChanged(Event):
    """
    The node itself: running, closing, closed, shutdown or crashed.
    """

    state: str


@attrs.frozen
class CloseReport:
    """
    What became of the jobs that a node or worker held. Keys of jobs.
    """

    #: Stopped and given back: other workers start them.
    released: tuple[str, ...] = ()
    #: Stopped and removed, by the shutdown of the pool.
    stopped: tuple[str, ...] = ()
    #: Their handlers did not stop. They stay this node's until its lease ends.
    left: tuple[str, ...] = ()
    #: Threads that are still alive: handler calls that have not returned.
    threads: tuple[str, ...] = ()


@attrs.frozen
class ShutdownReport:
    """
    How the shutdown of a pool has ended.
    """

    #: What this node did with its own jobs.
    own: CloseReport
    #: Nodes that were still alive at the end of the time.
    nodes_left: tuple[str, ...] = ()
    #: Jobs that were still running somewhere then.
    jobs_left: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """
        Whether every job of the pool was stopped and every node has left.
        """
        return not (self.nodes_left or self.jobs_left or self.own.left)


@attrs.frozen
class NodeHealth:
    """
    A snapshot of one node. Ages are in seconds.
    """

    state: NodeState
    node: str
    #: How news arrives: by the change stream, or by polling alone.
    discovery: Literal["stream", "poll"]
    workers: int
    jobs: int
    #: For how long the lease is trusted from now on; None for a client.
    lease_left: float | None
    #: Keys whose handlers are at work now or wait for a thread.
    busy: tuple[str, ...]
    #: Slot count and epoch of the ring as this node knows it.
    ring_size: int
    ring_epoch: int
    components: Mapping[str, ComponentReport]
    #: Why the node has crashed, or None.
    crash: str | None

    @property
    def ok(self) -> bool:
        """
        Whether it runs, every thread lives, and no component is in trouble right now.
        """
        return self.state == "running" and all(
            component.alive and component.failures_in_a_row == 0
            for component in self.components.values()
        )
