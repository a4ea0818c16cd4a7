"""
Every exception that this library raises on purpose, in one tree.

Wrong arguments are plain ``ValueError`` and ``TypeError``. "Lost the race" and
"lost the lease" inside the consumer are ordinary results, not exceptions.
"""

from __future__ import annotations

from mscheduler_sync.limits import LONGEST_S


class MSchedulerError(Exception):
    """
    Base of all errors of this library.
    """


class TaskExists(MSchedulerError):
    """
    `Producer.send` was told ``if_exists="raise"`` and the key is taken. Nothing was changed.
    """

    def __init__(self, key: str) -> None:
        super().__init__(f"a task with the key {key!r} exists")
        self.key = key


class TaskRunning(MSchedulerError):
    """
    `Producer.send` was told ``if_running="raise"`` and an attempt runs. Nothing was changed.
    """

    def __init__(self, key: str) -> None:
        super().__init__(f"the task {key!r} is running")
        self.key = key


class TaskNotFound(MSchedulerError):
    """
    No document has this key (any more). Nothing was changed.
    """

    def __init__(self, key: str) -> None:
        super().__init__(f"there is no task with the key {key!r}")
        self.key = key


class TaskFailed(MSchedulerError):
    """
    `Producer.result`: the task has used up its attempts or failed for good.

    *reason* is the stored text of the last failure, or None.
    """

    def __init__(self, key: str, reason: str | None) -> None:
        first_line = (reason or "no reason was stored").splitlines()[0]
        super().__init__(f"the task {key!r} failed: {first_line}")
        self.key = key
        self.reason = reason


class TaskCancelled(MSchedulerError):
    """
    `Producer.result`: the task was cancelled.
    """

    def __init__(self, key: str) -> None:
        super().__init__(f"the task {key!r} was cancelled")
        self.key = key


class InvalidTask(MSchedulerError):
    """
    A stored document is not a task that this version can read.

    *path* names the faulty field. The document is left as it is.
    """

    def __init__(self, key: object, path: str, problem: str) -> None:
        super().__init__(f"the document {key!r} is not a readable task: {path} {problem}")
        self.key = key
        self.path = path
        self.problem = problem


class LeaseLost(MSchedulerError):
    """
    Raised inside a function by `TaskContext.check` once its attempt should end early.

    *reason* is one of the values of `TaskContext.reason`.
    """

    def __init__(self, key: str, running_id: str, reason: str = "lease_lost") -> None:
        super().__init__(f"the attempt {running_id} of the task {key!r} should end: {reason}")
        self.key = key
        self.running_id = running_id
        self.reason = reason


class StoreError(MSchedulerError):
    """
    The database refused or could not answer; the driver's error is the ``__cause__``.
    """


class StoreUnavailable(StoreError):
    """
    The database could not be reached or did not answer in time; trying again may help.

    A write may or may not have happened. Every write of this library may be repeated safely.
    """


class StoreRejected(StoreError):
    """
    The database answered with an error that repeating does not change: a missing
    privilege, a document that is too large, a statement that it does not know.
    """


class ComponentCrashed(MSchedulerError):
    """
    A component of the consumer failed again and again with a programming
    error; the consumer has stopped. The last failure is the ``__cause__``.
    """

    def __init__(self, component: str) -> None:
        super().__init__(f"the component {component!r} failed repeatedly; the consumer has stopped")
        self.component = component


class JobExists(MSchedulerError):
    """
    `Node.dispatch`: the pool has a job under this key, waiting or running. Nothing was changed.
    """

    def __init__(self, key: str) -> None:
        super().__init__(f"a job with the key {key!r} exists")
        self.key = key


class JobNotFound(MSchedulerError):
    """
    The pool has no job under this key (any more). Nothing was changed.
    """

    def __init__(self, key: str) -> None:
        super().__init__(f"there is no job with the key {key!r}")
        self.key = key


class PoolFull(MSchedulerError):
    """
    `Node.dispatch`: as many jobs as allowed wait for a worker already. Nothing was changed.
    """

    def __init__(self, pool: str, limit: int) -> None:
        super().__init__(f"{limit} jobs of the pool {pool!r} wait for a worker already")
        self.pool = pool
        self.limit = limit


class InboxFull(MSchedulerError):
    """
    `Node.notify`: too many notifications wait for this job. Nothing was changed.
    """

    def __init__(self, key: str) -> None:
        super().__init__(f"too many notifications wait for the job {key!r}")
        self.key = key


class PoolClosed(MSchedulerError):
    """
    The pool is being shut down, or this node was closed by its shutdown. Nothing was started.
    """

    def __init__(self, pool: str) -> None:
        super().__init__(f"the pool {pool!r} is shut down")
        self.pool = pool


class DispatchTimeout(MSchedulerError):
    """
    `Node.dispatch`: no worker has taken the job in time. It was withdrawn and will never start.

    *started* is True in one case only: the handler's ``start`` was called and has not
    returned for twice the time-out. The job is then stopped as soon as it returns.
    """

    def __init__(self, key: str, timeout_s: float, *, started: bool = False) -> None:
        what = "its start hangs; it will be stopped" if started else "it will never start"
        super().__init__(f"the job {key!r} does not run after {timeout_s:g} s: {what}")
        self.key = key
        self.timeout_s = timeout_s
        self.started = started


class HandlerError(MSchedulerError):
    """
    A handler has raised in another thread or process: *type* is its exception's class by name.

    From `Node.dispatch`: the start failed, the job is gone. From `Node.stop_job`: the
    stop failed, the job goes on.
    """

    def __init__(self, key: str, type_name: str, text: str) -> None:
        super().__init__(f"the handler of the job {key!r} raised {type_name}: {text}")
        self.key = key
        self.type = type_name
        self.text = text


class RetryLater(Exception):
    """
    Raise in a function: this attempt failed, try again after *delay* seconds.

    Uses an attempt; the task's own retry delay is replaced by *delay*.

    Raises:
        ValueError: If *delay* is negative or not a number of seconds up to ten years.
    """

    def __init__(self, delay: float, reason: str = "") -> None:
        super().__init__(reason or f"retry after {delay} s")
        self.delay_s = _steering_delay(delay)


class PermanentFailure(Exception):
    """
    Raise in a function: the task is to fail now, whatever attempts are left.
    """


class Snooze(Exception):
    """
    Raise in a function: not now; run again after *delay* seconds. Uses no attempt.

    Raises:
        ValueError: If *delay* is negative or not a number of seconds up to ten years.
    """

    def __init__(self, delay: float) -> None:
        super().__init__(f"snooze for {delay} s")
        self.delay_s = _steering_delay(delay)


def _steering_delay(delay: float) -> float:
    if isinstance(delay, bool) or not isinstance(delay, (int, float)):
        msg = f"delay must be a number of seconds, got {delay!r}"
        raise TypeError(msg)
    if not 0.0 <= delay <= LONGEST_S:
        msg = f"delay must be between 0 seconds and ten years, got {delay!r}"
        raise ValueError(msg)
    return float(delay)
