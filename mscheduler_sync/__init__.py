"""
A synchronous, thread-pool task scheduler on MongoDB.

Start with `Producer` and `Consumer`, or with `mscheduler_sync.pool.Node`; see the README.
"""

from mscheduler_sync._declared.table import Codec
from mscheduler_sync._declared.task import DeclaredTask
from mscheduler_sync._stages.assembly import StopReport
from mscheduler_sync.app import App
from mscheduler_sync.consumer import Consumer
from mscheduler_sync.context import Reason, TaskContext, current_task
from mscheduler_sync.errors import (
    ComponentCrashed,
    DispatchTimeout,
    HandlerError,
    InboxFull,
    InvalidTask,
    JobExists,
    JobNotFound,
    LeaseLost,
    MSchedulerError,
    PermanentFailure,
    PoolClosed,
    PoolFull,
    RetryLater,
    Snooze,
    StoreError,
    StoreRejected,
    StoreUnavailable,
    TaskCancelled,
    TaskExists,
    TaskFailed,
    TaskNotFound,
    TaskRunning,
)
from mscheduler_sync.events import (
    AttemptEnded,
    AttemptLost,
    AttemptReleased,
    AttemptStarted,
    ClaimUndecided,
    ConsumerStateChanged,
    Event,
    QueueDrained,
    QueueEmpty,
    Subscription,
    TaskFinished,
    TaskFound,
    TaskQuarantined,
    TaskSucceeded,
)
from mscheduler_sync.health import ComponentReport, Health
from mscheduler_sync.model import Attempt, Status, Task, TaskOptions
from mscheduler_sync.producer import Producer
from mscheduler_sync.router import Router
from mscheduler_sync.sender import SendResult

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 - grouped by purpose
    # declared tasks
    "App",
    "DeclaredTask",
    "Codec",
    # working
    "Producer",
    "SendResult",
    "Consumer",
    "StopReport",
    "Health",
    "ComponentReport",
    "Router",
    # inside a function
    "TaskContext",
    "Reason",
    "current_task",
    "RetryLater",
    "PermanentFailure",
    "Snooze",
    # reading
    "Task",
    "TaskOptions",
    "Attempt",
    "Status",
    # events
    "Subscription",
    "Event",
    "TaskFound",
    "QueueEmpty",
    "QueueDrained",
    "ClaimUndecided",
    "AttemptStarted",
    "AttemptEnded",
    "AttemptLost",
    "AttemptReleased",
    "TaskSucceeded",
    "TaskFinished",
    "TaskQuarantined",
    "ConsumerStateChanged",
    # errors
    "MSchedulerError",
    "TaskExists",
    "TaskRunning",
    "TaskNotFound",
    "TaskFailed",
    "TaskCancelled",
    "InvalidTask",
    "LeaseLost",
    "StoreError",
    "StoreUnavailable",
    "StoreRejected",
    "ComponentCrashed",
    # errors of the pool
    "JobExists",
    "JobNotFound",
    "PoolFull",
    "InboxFull",
    "PoolClosed",
    "DispatchTimeout",
    "HandlerError",
    "__version__",
]
