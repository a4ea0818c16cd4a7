"""
The dedicated worker pool: long-running jobs by key, one owner each.

Start with `Node`; see docs/pool.md.
"""

from mscheduler_sync.errors import (
    DispatchTimeout,
    HandlerError,
    InboxFull,
    JobExists,
    JobNotFound,
    PoolClosed,
    PoolFull,
    RetryLater,
)
from mscheduler_sync.pool.events import (
    CloseReport,
    DeadNodeRemoved,
    JobLost,
    JobReleased,
    JobStarted,
    JobStartFailed,
    JobStopFailed,
    JobStopped,
    NodeFenced,
    NodeHealth,
    NodeStateChanged,
    NotifyFailed,
    ShutdownReport,
)
from mscheduler_sync.pool.node import Node
from mscheduler_sync.pool.recurring import Tick, Ticker
from mscheduler_sync.pool.schedule import JobPlan, Planner, Schedule, ScheduleStop
from mscheduler_sync.pool.workers import Handler, Job, Worker, WorkerInfo

__all__ = [  # noqa: RUF022 - grouped by purpose
    "Node",
    "CloseReport",
    "ShutdownReport",
    "NodeHealth",
    # workers and jobs
    "Worker",
    "WorkerInfo",
    "Handler",
    "Job",
    "RetryLater",
    # what recurs
    "Ticker",
    "Tick",
    "Schedule",
    "Planner",
    "JobPlan",
    "ScheduleStop",
    # events
    "JobStarted",
    "JobStartFailed",
    "JobStopped",
    "JobStopFailed",
    "JobReleased",
    "JobLost",
    "NotifyFailed",
    "NodeFenced",
    "DeadNodeRemoved",
    "NodeStateChanged",
    # errors
    "JobExists",
    "JobNotFound",
    "PoolFull",
    "InboxFull",
    "PoolClosed",
    "DispatchTimeout",
    "HandlerError",
]
