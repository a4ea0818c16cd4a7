"""
The steps of a held job's life: start, notifications, stop, release. Each runs in its key's turn.

Any thread asks for a step; a thread of the handlers' takes it, after all earlier ones of its key.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
from bson.raw_bson import RawBSONDocument

from mscheduler_sync._runtime import backoff
from mscheduler_sync._runtime.failure import name_and_text
from mscheduler_sync._runtime.keyed_executor import KeyedExecutor
from mscheduler_sync._runtime.log import logger
from mscheduler_sync._runtime.service import ComponentHealth
from mscheduler_sync._storage import codec
from mscheduler_sync._storage.statement import Delete, Update
from mscheduler_sync.errors import RetryLater, StoreError
from mscheduler_sync.events import EventHub
from mscheduler_sync.limits import MAX_THREADS
from mscheduler_sync.pool import events, statements
from mscheduler_sync.pool.events import CloseReport
from mscheduler_sync.pool.held import HeldJob, HeldJobs, Holds
from mscheduler_sync.pool.store import PoolStore
from mscheduler_sync.pool.watcher import Waiters
from mscheduler_sync.pool.workers import Worker

_log = logger("execute")

#: Before a job whose start has failed is started again: growing from and up to, in seconds.
_RETRY_FIRST_S, _RETRY_MOST_S = 1.0, 60.0
#: After a failed stop, a move is tried again after so many seconds.
_MOVE_AGAIN_S: Final = 5.0
#: At an end a stop is tried so many times, with these pauses in seconds.
_STOP_PAUSES_S: Final = (0.2, 0.2, 0.0)


@attrs.define(eq=False, repr=False, kw_only=True)
class JobRunner:
    """
    Calls the handlers, and writes what has become of it. *name* is the node's, for its threads.
    """

    _store: PoolStore
    _name: str
    _held: HeldJobs
    #: Whether the lease of a life is trusted still. `Lease.holds`.
    _holds: Holds
    waiters: Waiters
    _hub: EventHub
    #: Returns the epoch of the ring that this node knows.
    _epoch: Callable[[], int]
    #: Once set, no write is tried again.
    _closed: threading.Event
    executor: KeyedExecutor = attrs.field(init=False)
    #: Of the handlers, and of the steps themselves.
    health: ComponentHealth = attrs.field(init=False, factory=ComponentHealth)
    bugs: ComponentHealth = attrs.field(init=False, factory=ComponentHealth)

    def __attrs_post_init__(self) -> None:
        self.executor = KeyedExecutor(self._name, MAX_THREADS, self._on_bug)

    # -- asking for steps; from any thread ---------------------------------------------------

    def start(self, held: HeldJob) -> None:
        self.executor.submit(held.key, lambda: self._start(held))

    def read_inbox(self, held: HeldJob) -> None:
        """
        Deliver the notifications that wait with the job, then carry out its stop request.
        """
        self.executor.submit(held.key, lambda: self._read_inbox(held))

    def release(self, held: HeldJob, *, remove: bool = False) -> None:
        """
        Stop the job and give it back, or *remove* it.
        """
        held.moving = True
        self.executor.submit(held.key, lambda: self._release(held, remove=remove))

    def fence(self, jobs: Sequence[HeldJob], then: Callable[[], None]) -> None:
        """
        Stop *jobs*, whose lease is over; nothing is written. *then* is called at the end of all.
        """
        lock = threading.Lock()
        left = len(jobs)

        def step(held: HeldJob) -> None:
            nonlocal left
            try:
                if held.state in {"starting", "running", "stopping"}:
                    self._call_stop(held)
                    self._hub.publish(events.JobLost(key=held.key, fence=held.ownership.fence))
                held.state = "gone"
            finally:
                with lock:
                    left -= 1
                    is_last = left == 0
                if is_last:
                    then()

        for held in jobs:
            self.executor.submit(held.key, functools.partial(step, held))
        if not jobs:
            then()

    def empty(self, workers: Sequence[Worker], deadline_s: float, *, remove: bool) -> CloseReport:
        """
        Stop the jobs of *workers*, which take no more; give them back, or *remove* them.

        Waits for that until *deadline_s*; a stop that has failed is tried again.
        """
        began = jobs = self._held.of(workers)
        for pause_s in _STOP_PAUSES_S:
            if not jobs or time.monotonic() >= deadline_s:
                break
            # What has no running lease any more is stopped by the fence; nothing to give back.
            for held in jobs:
                self.release(held, remove=remove)
            self._held.wait_released(jobs, deadline_s)
            jobs = self._held.of(workers)
            self._held.wait_gone(jobs, min(pause_s, deadline_s - time.monotonic()))
        return CloseReport(
            released=tuple(sorted(held.key for held in began if held.ended == "released")),
            stopped=tuple(sorted(held.key for held in began if held.ended == "stopped")),
            left=tuple(sorted(held.key for held in self._held.of(workers))),
        )

    # -- start -------------------------------------------------------------------------------

    def _start(self, held: HeldJob) -> None:
        if not self._may_go_on(held):
            return
        if held.moving:
            # Asked to leave before it began: nothing to stop.
            self._give_back(held)
            return
        held.state = "starting"
        try:
            held.worker.handler.start(held.job)
        except BaseException as error:  # noqa: BLE001 - the caller of dispatch is told
            self._after_failed_start(held, error)
            return
        # Before the write: who was told that it runs finds it here.
        held.state = "running"
        matched = self._write(held, statements.jobs.started(held.ownership))
        if matched is None:
            # Not known to be told: the dispatcher finds out, and the end of the lease stops it.
            return
        if matched == 0:
            self._lost(held)
            return
        held.answered = True
        held.attempts = 0
        self.waiters.wake(held.id, held.dispatch_id)
        self._hub.publish(
            events.JobStarted(key=held.key, fence=held.ownership.fence, requeued=held.job.requeued)
        )

    def _after_failed_start(self, held: HeldJob, error: BaseException) -> None:
        stored = _stored(error)
        retried = held.answered or isinstance(error, RetryLater)
        delay_s = backoff.delay_s(held.attempts + 1, first_s=_RETRY_FIRST_S, cap_s=_RETRY_MOST_S)
        if isinstance(error, RetryLater):
            delay_s = error.delay_s
        self._log_failure("a handler's start has failed", "start_failed", held, error)
        statement = statements.jobs.fail(held.ownership, stored)
        if retried:
            delay_ms = round(delay_s * 1000)
            statement = statements.jobs.postpone(held.ownership, stored, delay_ms)
        matched = self._write(held, statement)
        self._held.forget(held)
        if matched and not retried:
            self.file_failure(held.id, held.dispatch_id, stored)
        self._hub.publish(
            events.JobStartFailed(key=held.key, error=stored["type"], retried=retried)
        )

    def file_failure(self, job_id: str, dispatch_id: str, error: dict[str, Any]) -> None:
        """
        File the verdict of a failed job, and wake its dispatcher.
        """
        try:
            self._store.file_failure(job_id, dispatch_id, error)
        except StoreError as failure:
            # The next reading of failed jobs files it.
            self.health.note_error(failure)
        self.waiters.wake(job_id)

    # -- notifications and stop requests -----------------------------------------------------

    def _read_inbox(self, held: HeldJob) -> None:
        if held.state != "running" or not self._may_go_on(held):
            return
        try:
            found = self._store.find(statements.jobs.inbox_of(held.ownership))
        except StoreError as error:
            # The mark stays in the document; the next scan finds it.
            self.health.note_error(error)
            return
        if not found:
            self._lost(held)
            return
        self._deliver(held, found[0])
        request = codec.envelope(found[0]).get("stop")
        if isinstance(request, dict) and self._may_go_on(held):
            self._stop_by_request(held, str(request.get("id")))

    def _deliver(self, held: HeldJob, document: RawBSONDocument) -> None:
        last = None
        for message in document["inbox"]:
            if not self._may_go_on(held):
                return
            last = message["seq"]
            self._notify(held, codec.thaw(message, "payload", self._store.codec_options))
        if last is not None:
            self._write(held, statements.jobs.took(held.ownership, last))

    def _notify(self, held: HeldJob, payload: Any) -> None:
        notify = getattr(held.worker.handler, "notify", None)
        try:
            if notify is None:
                msg = "the handler has no method notify"
                raise TypeError(msg)  # noqa: TRY301 - told like what a handler raises
            notify(held.key, payload)
        except BaseException as error:  # noqa: BLE001 - the job goes on
            self._log_failure("a notification has failed", "notify_failed", held, error)
            self._hub.publish(events.NotifyFailed(key=held.key, error=type(error).__name__))

    def _stop_by_request(self, held: HeldJob, stop_id: str) -> None:
        error = self._call_stop(held)
        if error is None:
            self._remove(held)
            return
        stored = _stored(error)
        self._write(held, statements.jobs.put_result(stop_id, self._store.pool, held.key, stored))
        self._write(held, statements.jobs.stop_failed(held.ownership, stop_id))
        self.waiters.wake(held.id)

    def _remove(self, held: HeldJob) -> None:
        if self._write(held, statements.jobs.remove_owned(held.ownership)) is not None:
            held.ended = "stopped"
            self._hub.publish(events.JobStopped(key=held.key, fence=held.ownership.fence))
        self._held.forget(held)
        self.waiters.wake(held.id)

    # -- leaving -----------------------------------------------------------------------------

    def _release(self, held: HeldJob, *, remove: bool) -> None:
        held.moving = False
        if held.state not in {"claimed", "running"} or not self._may_go_on(held):
            return
        if held.state == "claimed":
            self._give_back(held)
        elif self._call_stop(held) is not None:
            held.move_again_at_s = time.monotonic() + _MOVE_AGAIN_S
        elif remove:
            self._remove(held)
        else:
            self._give_back(held)

    def _give_back(self, held: HeldJob) -> None:
        if self._write(held, statements.jobs.release(held.ownership, self._epoch())) is not None:
            held.ended = "released"
            self._hub.publish(events.JobReleased(key=held.key, fence=held.ownership.fence))
        self._held.forget(held)

    def _call_stop(self, held: HeldJob) -> BaseException | None:
        """
        Call the handler's stop; return what it has raised.
        """
        before = held.state
        held.state = "stopping"
        try:
            held.worker.handler.stop(held.key)
        except BaseException as error:  # noqa: BLE001 - told to whoever wants the stop
            held.state = before
            self._log_failure("a handler's stop has failed", "stop_failed", held, error)
            self._hub.publish(events.JobStopFailed(key=held.key, error=type(error).__name__))
            return error
        return None

    def _lost(self, held: HeldJob) -> None:
        """
        The document says that the job is no longer ours.
        """
        _log.warning(
            "a job was taken away; it is stopped here", event="job_lost", task_key=held.key
        )
        self._call_stop(held)
        self._held.forget(held)
        self._hub.publish(events.JobLost(key=held.key, fence=held.ownership.fence))

    # -- writing -----------------------------------------------------------------------------

    def _may_go_on(self, held: HeldJob) -> bool:
        return held.state != "gone" and self._holds(held.life)

    def _write(self, held: HeldJob, statement: Update | Delete) -> int | None:
        """
        Run *statement* while the lease lasts; return how many it matched, None if unknown.
        """
        return self._store.insist(
            statement,
            may_go_on=lambda: self._holds(held.life),
            give_up=self._closed,
        )

    def _log_failure(self, message: str, event: str, held: HeldJob, error: BaseException) -> None:
        self.health.note_error(error)
        _log.error(
            message, event=event, exc_info=error, worker_id=held.ownership.owner, task_key=held.key
        )

    def _on_bug(self, key: str, error: BaseException) -> None:
        self.bugs.note_error(error)
        _log.error(
            "a step of a job failed with a programming error",
            event="component_failed",
            exc_info=error,
            component="steps",
            task_key=key,
        )


def _stored(error: BaseException) -> dict[str, str]:
    name, text = name_and_text(error)
    return {"type": name, "text": text}
