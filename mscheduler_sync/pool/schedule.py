"""
A planner that says, at each period and on one node, which jobs are to run.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import attrs

from mscheduler_sync._runtime.log import logger
from mscheduler_sync._storage.statement import Document
from mscheduler_sync.errors import JobExists, JobNotFound, MSchedulerError, StoreError
from mscheduler_sync.pool import statements
from mscheduler_sync.pool.recurring import BEATEN_S, Recurring
from mscheduler_sync.pool.requests import Requests

_log = logger("pool")


class ScheduleStop(Exception):
    """
    Raise in `Planner.plan`: the schedule is over, on all nodes. Its jobs go on.
    """


def _as_dict(value: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return dict(value)


def _as_keys(value: Iterable[str]) -> tuple[str, ...]:
    if isinstance(value, str):
        msg = f"stop must be a collection of keys, got {value!r}"
        raise TypeError(msg)
    return tuple(value)


@attrs.frozen
class JobPlan:
    """
    What a planner wants.
    """

    #: Key -> payload of the jobs that are to run. What runs already goes on.
    start: dict[str, Any] = attrs.field(factory=dict, converter=_as_dict)
    #: Keys of jobs that are to be stopped.
    stop: tuple[str, ...] = attrs.field(default=(), converter=_as_keys)
    #: Stop every job that this schedule has started and that is not in *start*.
    stop_all: bool = False


class Planner(Protocol):
    """
    Any object with this method. Its attribute ``name``, or else its class's, names the schedule.
    """

    def plan(self) -> JobPlan:
        """
        Say what is to run. May raise `ScheduleStop`; other errors are logged, and it goes on.
        """


@attrs.define(eq=False, repr=False, kw_only=True)
class Schedule(Recurring):
    """
    A schedule in which this node takes part. Made by `Node.schedule`.
    """

    _where = "schedules"
    _thread_prefix = "ms-plan"

    _planner: Planner
    _requests: Requests
    _dispatch_timeout_s: float
    _node: Callable[[], str]

    def wait_ended(self, timeout: float | None = None) -> bool:
        """
        Wait up to *timeout* seconds (None: for ever) for the end; return whether it has come.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._ended, timeout)

    def _compete(self, document: Document) -> None:
        if not self._may_take(document):
            self.thread.pause(min(1.0, document["interval_ms"] / 1000))
            return
        runner = uuid.uuid4().hex
        self._store.update(
            statements.recurring.begin_plan(self._id, runner, self._node(), document["runner"])
        )
        taken = self._shared()
        if taken is None or taken["runner"] != runner:
            self.thread.pause(BEATEN_S)
            return
        self._run(runner, taken)

    def _may_take(self, document: Document) -> bool:
        """
        Whether nobody has the plan in hand, or a dead node has, or a former try of this one.
        """
        owner = document["runner_node"]
        if document["runner"] is None or owner == self._node():
            return True
        found = self._store.read_one(statements.members.node_state(owner))
        return found is None or found["state"] != statements.ALIVE

    def _run(self, runner: str, document: Document) -> None:
        interval_ms = int(document["interval_ms"])
        try:
            plan = self._planner.plan()
            if not isinstance(plan, JobPlan):
                msg = f"plan() must return a JobPlan, got {type(plan).__name__}"
                raise TypeError(msg)  # noqa: TRY301 - logged like what a planner raises
        except ScheduleStop:
            if self._store.delete(statements.recurring.end_schedule(self._id, runner)):
                self.close()
            # Else it is another's by now, or gone: the next step tells.
            return
        except Exception as error:  # noqa: BLE001 - the next plan may be better
            self._log_failure("a planner has failed", "plan_failed", None, error)
            self._store.update(statements.recurring.end_plan(self._id, runner, interval_ms))
            return
        if self._carry_out(runner, plan, set(document["keys"])):
            self._store.update(statements.recurring.end_plan(self._id, runner, interval_ms))
        else:
            self._store.update(statements.recurring.leave_plan(self._id, runner))

    def _carry_out(self, runner: str, plan: JobPlan, tracked: set[str]) -> bool:
        """
        Start, then stop; return False if this node's stop has come between, or another runner:
        who was taken for dead must not carry out an old plan beside a new one.
        """
        for key, payload in plan.start.items():
            # Before the dispatch: a planner that dies between the two forgets no job.
            if (
                self.thread.stopping
                or not self._store.update(statements.recurring.track(self._id, runner, key))[0]
            ):
                return False
            self._start_job(runner, key, payload)
        ending = tracked - set(plan.start) if plan.stop_all else set(plan.stop)
        for key in sorted(ending):
            if self.thread.stopping or not self._is_mine(runner):
                return False
            self._stop_job(runner, key)
        return True

    def _is_mine(self, runner: str) -> bool:
        document = self._shared()
        return document is not None and document["runner"] == runner

    def _start_job(self, runner: str, key: str, payload: Any) -> None:
        try:
            self._requests.dispatch(key, payload, self._dispatch_timeout_s)
        except JobExists:
            return
        except StoreError:
            raise
        except (MSchedulerError, TypeError, ValueError) as error:
            self._log_failure("a planned job could not be started", "start_failed", key, error)
            self._store.update(statements.recurring.untrack(self._id, runner, key))

    def _stop_job(self, runner: str, key: str) -> None:
        try:
            self._requests.stop_job(key, wait=False, timeout_s=self._dispatch_timeout_s)
        except JobNotFound:
            pass
        except StoreError:
            raise
        except (MSchedulerError, TypeError, ValueError) as error:
            self._log_failure("a planned job could not be stopped", "stop_failed", key, error)
            return
        self._store.update(statements.recurring.untrack(self._id, runner, key))

    def _log_failure(self, message: str, event: str, key: str | None, error: Exception) -> None:
        self.thread.health.note_error(error)
        _log.error(message, event=event, exc_info=error, schedule=self.name, task_key=key)
