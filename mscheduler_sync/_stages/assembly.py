"""
The threads of a consumer: who hands to whom, and the order of starting and stopping.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import attrs

from mscheduler_sync._runtime.delay_queue import DelayQueue
from mscheduler_sync._runtime.log import logger
from mscheduler_sync._runtime.service import CrashHandler, Service
from mscheduler_sync._runtime.slots import Slots
from mscheduler_sync._stages.adoption import Adoption
from mscheduler_sync._stages.attempt import HeldAttempt, Interrupted, Outcome, Released
from mscheduler_sync._stages.claimer import Claimer
from mscheduler_sync._stages.contention import Contention
from mscheduler_sync._stages.drain import Drain
from mscheduler_sync._stages.executor import Executor, FunctionOf
from mscheduler_sync._stages.fetcher import Fetcher
from mscheduler_sync._stages.heartbeat_scheduler import HeartbeatScheduler
from mscheduler_sync._stages.horizon import Horizon
from mscheduler_sync._stages.intake import Intake
from mscheduler_sync._stages.outcome import OutcomeWriter
from mscheduler_sync._stages.outcome_news import OutcomeNews
from mscheduler_sync._stages.pass_schedule import PassSchedule
from mscheduler_sync._stages.pending import Verdict
from mscheduler_sync._stages.quarantine import Quarantine
from mscheduler_sync._stages.routes import Routes
from mscheduler_sync._stages.running import RunningAttempts
from mscheduler_sync._stages.watcher import Watcher
from mscheduler_sync._storage.store import TaskStore
from mscheduler_sync.events import EventHub
from mscheduler_sync.settings import ConsumerOptions

_log = logger("consumer")

_SLICE_S: Final = 0.5
#: How long a stop waits for its threads once every outcome is stored, in seconds.
_NOTHING_LEFT_S: Final = 1.5
#: Of the time of a stop, the part after which running functions are asked to end,
#: and what is kept for the last writes, in seconds.
_ASK_AFTER_SHARE, _LAST_WRITES_SHARE, _LAST_WRITES_MOST_S = 0.75, 0.2, 1.0


@attrs.frozen
class StopReport:
    """
    What a stop did with the attempts that it found. Keys of tasks.
    """

    #: Functions ended during the stop; their outcomes are stored.
    finished: tuple[str, ...] = ()
    #: Given back unused; other workers may claim them at once.
    released: tuple[str, ...] = ()
    #: Functions that still run; their tasks run again once the lease ends.
    abandoned: tuple[str, ...] = ()
    #: Outcomes that could not be stored in time; these tasks too run again.
    unstored: tuple[str, ...] = ()
    #: Threads that are still alive: abandoned functions, calls inside their own time-out.
    threads: tuple[str, ...] = ()


class Assembly:
    """
    The threads of a consumer and the order of their starting and stopping.
    """

    def __init__(
        self,
        *,
        settings: ConsumerOptions,
        store: TaskStore,
        slots: Slots,
        queue: DelayQueue,
        running: RunningAttempts,
        hub: EventHub,
        names: Sequence[str | None] | None,
        function_of: FunctionOf,
        on_crash: CrashHandler,
    ) -> None:
        worker_id = settings.worker_id
        self._worker_id = worker_id
        self._store = store
        self._slots = slots
        self._running = running
        self._drain = Drain(queue=queue, running=running, store=store, hub=hub)
        routes = Routes(worker_id, names)
        contention = Contention()
        horizon = Horizon()
        self.quarantine = quarantine = Quarantine(queue=queue, hub=hub)
        intake = Intake(
            routes=routes,
            queue=queue,
            clock=store.clock,
            hub=hub,
            contention=contention,
            quarantine=quarantine,
            horizon=horizon,
        )
        self.writer = OutcomeWriter(
            owner_id=worker_id,
            store=store,
            news=OutcomeNews(worker_id=worker_id, clock=store.clock, hub=hub),
            held_count=lambda: running.count,
            on_done=self._on_done,
            on_failure=intake.record_failure,
            on_crash=on_crash,
        )
        self._heartbeats = HeartbeatScheduler(
            owner_id=worker_id, store=store, on_stuck=running.mark_stuck, on_crash=on_crash
        )
        self.executor = Executor(
            worker_id=worker_id,
            function_of=function_of,
            around=settings.around,
            value_limit_bytes=settings.max_result_bytes,
            on_end=running.ended,
        )
        running.connect(
            executor=self.executor,
            heartbeats=self._heartbeats,
            writer=self.writer,
            on_free=intake.requeue,
        )
        self.fetcher = Fetcher(
            owner_id=worker_id,
            store=store,
            routes=routes,
            queue=queue,
            intake=intake,
            horizon=horizon,
            adoption=Adoption(store=store, intake=intake, quarantine=quarantine),
            schedule=PassSchedule(poll_interval_s=settings.poll_interval_s),
            rust_interop=settings.rust_interop,
            on_changed=running.task_changed,
            on_crash=on_crash,
        )
        self.claimer = Claimer(
            owner_id=worker_id,
            store=store,
            routes=routes,
            queue=queue,
            slots=slots,
            intake=intake,
            quarantine=quarantine,
            hub=hub,
            writer=self.writer,
            contention=contention,
            margin_s=settings.lease_margin_s,
            value_limit_bytes=settings.max_result_bytes,
            start=running.start,
            holds=running.holds,
            on_low=self.fetcher.queue_runs_low,
            on_forgotten=self.fetcher.request_pass,
            on_put_down=self._drain.check,
            on_crash=on_crash,
        )
        self.watcher: Watcher | None = None
        #: In the order of their starting: whoever hands on comes after the one that receives.
        self.services: list[Service] = [self.writer, self._heartbeats, self.claimer, self.fetcher]
        if settings.watch:
            self.watcher = Watcher(
                owner_id=worker_id,
                store=store,
                routes=routes,
                intake=intake,
                horizon=horizon,
                fetcher=self.fetcher,
                on_crash=on_crash,
            )
            self.services.append(self.watcher)

    def _on_done(self, attempt: HeldAttempt, outcome: Outcome, verdict: Verdict) -> None:
        self._running.forget(attempt, outcome, verdict)
        self._drain.check()

    def start(self) -> None:
        for service in self.services:
            service.start()

    def request_stop(self) -> None:
        """
        Claim nothing more.
        """
        self.claimer.request_stop()

    def is_running_here(self) -> bool:
        """
        Whether the calling thread runs a task of this consumer.
        """
        return self.executor.is_running_here()

    def stop(self, timeout_s: float) -> StopReport:
        """
        Stop in the direction of the flow; leases are kept until the last function has ended.
        """
        began_s = time.monotonic()
        deadline_s = began_s + timeout_s
        writes_s = min(_LAST_WRITES_MOST_S, timeout_s * _LAST_WRITES_SHARE)
        self._store.deadline_s = deadline_s
        for service in reversed(self.services[2:]):
            service.request_stop()
        # A claim whose answer is under way is given back by the claimer itself.
        self.claimer.join(min(1.0, max(0.0, deadline_s - writes_s - time.monotonic())))
        self._wait_for_functions(began_s, deadline_s - writes_s, timeout_s)
        abandoned = self._running.abandon(Interrupted())
        self.writer.drain(max(0.0, deadline_s - time.monotonic()))
        for service in (self._heartbeats, self.writer):
            service.request_stop()
        self.executor.close()
        # Threads get a moment to notice; calls keep to their own time-outs. With nothing left
        # to be stored, waiting longer for a server that is away would gain nothing.
        now_s = time.monotonic()
        last_s = max(deadline_s, now_s) + 0.5
        if not self._running.count and not self.writer.backlog:
            last_s = min(last_s, now_s + _NOTHING_LEFT_S)
        for service in self.services:
            service.join(last_s - time.monotonic())
        # Threads of abandoned functions are not waited for.
        wait_s = 0.0 if abandoned else last_s - time.monotonic()
        threads = self.executor.join_threads(wait_s)
        finished, released = self._running.stop_report()
        left = [attempt.key for attempt in abandoned]
        unstored = [key for key in self.writer.unstored() if key not in left]
        report = StopReport(
            finished=tuple(finished),
            released=tuple(
                key for key in [*released, *self.writer.claims_given_back] if key not in unstored
            ),
            abandoned=tuple(left),
            unstored=tuple(unstored),
            threads=tuple(
                dict.fromkeys(
                    [
                        *(service.thread_name for service in self.services if service.alive),
                        *self._heartbeats.living_threads(),
                        *threads,
                    ]
                )
            ),
        )
        stuck = self._running.stuck_keys()
        if report.abandoned or report.unstored or stuck:
            _log.warning(
                "the stop is incomplete",
                event="stop_incomplete",
                worker_id=self._worker_id,
                abandoned=list(report.abandoned),
                unstored=list(report.unstored),
                # Their threads keep the process alive.
                stuck=stuck,
            )
        return report

    def _wait_for_functions(self, began_s: float, until_s: float, timeout_s: float) -> None:
        ask_at_s = min(began_s + timeout_s * _ASK_AFTER_SHARE, until_s)
        asked = False
        while (now_s := time.monotonic()) < until_s:
            if not asked and now_s >= ask_at_s:
                asked = True
                self._running.ask_all_to_end()
            next_s = until_s if asked else ask_at_s
            if self._slots.wait_empty(min(_SLICE_S, max(0.0, next_s - now_s))):
                return
        self._running.ask_all_to_end()

    def give_back_everything(self, timeout_s: float) -> None:
        self._store.deadline_s = time.monotonic() + timeout_s
        self.claimer.request_stop()
        self._running.abandon(Released("shutdown"))
        self.writer.drain(timeout_s)
