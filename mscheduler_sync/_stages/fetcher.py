"""
Pages of tasks that are due now or soon, into the delay queue.

Reads at the start, after a gap in the change stream, when the queue runs low while
more was there, and at the latest after the horizon: `pass_schedule` decides. Also
reads single documents that the change stream named, and repairs derived fields
that others left stale.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

import attrs

from mscheduler_sync._runtime.delay_queue import DelayQueue
from mscheduler_sync._runtime.log import Log, logger
from mscheduler_sync._runtime.service import Service
from mscheduler_sync._stages.adoption import Adoption
from mscheduler_sync._stages.horizon import Horizon
from mscheduler_sync._stages.intake import Intake
from mscheduler_sync._stages.pass_schedule import PassSchedule, Round
from mscheduler_sync._stages.routes import Routes
from mscheduler_sync._storage import expressions as x
from mscheduler_sync._storage import statements
from mscheduler_sync._storage.store import TaskStore

_log = logger("fetch")

#: Tasks per page, lookups per query, and the most that a pass reads of one route.
PAGE, CHUNK, MOST_PER_ROUTE = 1000, 100, 20_000
#: With fewer due keys than this after a pass, the queue still runs low.
_LOW_MARK: Final = 100


@attrs.define(eq=False, repr=False, kw_only=True)
class Fetcher(Service):
    """
    The fetcher's thread; see the module.
    """

    component: str = "fetch"
    thread_prefix: str = "ms-fetch"
    log: Log = _log
    _store: TaskStore
    _routes: Routes
    _queue: DelayQueue
    _intake: Intake
    _horizon: Horizon
    _adoption: Adoption
    _rust_interop: bool
    #: Somebody has changed the task of this key. `RunningAttempts.task_changed`.
    _on_changed: Callable[[str], None]
    _changed: threading.Condition = attrs.field(init=False, factory=threading.Condition)
    # Under _changed.
    _schedule: PassSchedule

    # -- called by others --------------------------------------------------------------------

    def request_pass(self) -> None:
        """
        Read all routes soon: something may have been missed.
        """
        with self._changed:
            self._schedule.request_pass()
            self._changed.notify_all()

    def request_lookup(self, document_id: object, *, is_foreign: bool = False) -> None:
        """
        Read this document and queue it if it is claimable; after a repair if *is_foreign*.
        """
        with self._changed:
            self._schedule.request_lookup(document_id, is_foreign=is_foreign)
            self._changed.notify_all()

    def set_polling(self, *, polling: bool) -> None:
        """
        The change stream was opened or lost: a pass finds what came meanwhile.

        While *polling*, the passes alone must find everything.
        """
        with self._changed:
            self._schedule.is_polling = polling
            self._schedule.request_pass()
            self._changed.notify_all()

    def queue_runs_low(self) -> None:
        with self._changed:
            dropped_from_s = self._queue.dropped_from_s
            if self._schedule.queue_low(time.monotonic(), dropped_from_s=dropped_from_s):
                self._changed.notify_all()

    def wake(self) -> None:
        """
        The horizon has become shorter, or the stop was asked for: think again.
        """
        with self._changed:
            self._changed.notify_all()

    def wait_first_pass(self, timeout_s: float) -> bool:
        """
        Wait up to *timeout_s* seconds until one pass was done; return whether it was.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._schedule.passes > 0, timeout_s)

    def wait_pass(self, timeout_s: float) -> bool:
        """
        Wait up to *timeout_s* seconds for a pass that begins after now; return whether it came.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            # A pass under way may have read before now: that one does not count.
            target = self._schedule.passes + (2 if self._schedule.in_pass else 1)
            while self._schedule.passes < target and not self.stopping:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._schedule.request_pass()
                self._changed.notify_all()
                self._changed.wait(left_s)
            return self._schedule.passes >= target

    def request_stop(self) -> None:
        super().request_stop()
        self.wake()

    # -- the thread --------------------------------------------------------------------------

    def step(self) -> None:
        following = self._next_round()
        if following is None:
            return
        try:
            self._store.measure_clock()
            self._read_documents(following.lookups)
            left_from_s = self._pass() if following.is_pass else float("inf")
        except BaseException:
            with self._changed:
                self._schedule.round_failed()
            raise
        if following.is_pass:
            with self._changed:
                self._schedule.pass_ended(
                    time.monotonic(),
                    # The leases that this pass has seen may have shortened it.
                    horizon_s=self._horizon.length_s,
                    left_from_s=left_from_s,
                    dropped_from_s=self._queue.dropped_from_s,
                    is_low=self._queue.count_due() < _LOW_MARK,
                )
                self._changed.notify_all()

    def _next_round(self) -> Round | None:
        """
        Wait for what is to be read next; return None if the stop was asked for.
        """
        with self._changed:
            while not self.stopping:
                planned = self._schedule.next_round(
                    time.monotonic(),
                    horizon_s=self._horizon.length_s,
                    dropped_from_s=self._queue.dropped_from_s,
                )
                if isinstance(planned, Round):
                    return planned
                self._changed.wait(min(planned, threading.TIMEOUT_MAX))
            return None

    def _read_documents(self, lookups: Mapping[object, bool]) -> None:
        ids = list(lookups)
        for start in range(0, len(ids), CHUNK):
            found = self._store.find(
                statements.discovery.discovered_by_id(ids[start : start + CHUNK])
            )
            for fields in self._adoption.decode(found):
                key = fields.get("key")
                if isinstance(key, str):
                    self._on_changed(key)
                is_foreign = lookups.get(fields.get("_id"), False)
                if is_foreign or fields.get("routes") is None or fields.get("due") is None:
                    self._adoption.adopt(key)
                else:
                    self._intake.offer_if_near(fields)

    def _pass(self) -> float:
        """
        Read all routes; return from when on more is left in the database (monotonic), or infinity.
        """
        self._store.ensure_indexes()
        self._queue.forget_dropped()
        if self._rust_interop:
            self._adoption.sweep_now_and_then(is_stopping=self._stop.is_set)
        self._adoption.adopt_underived()
        until = self._horizon.end(self._store.clock)
        left_from_s = float("inf")
        with self._intake.during_pass():
            for route, condition in self._routes.queries:
                if self.stopping:
                    break
                left_from_s = min(left_from_s, self._read_route(route, condition, until))
        return left_from_s

    def _read_route(self, route: str, condition: dict[str, object], until: dt.datetime) -> float:
        """
        Queue the due tasks of one route, earliest first, until a page brings something new.

        Return from when on the route has more than was read (monotonic), or infinity.
        """
        after, limit = x.EPOCH, PAGE
        while limit <= MOST_PER_ROUTE:
            found = self._store.find(
                statements.discovery.due_tasks(
                    route, until=until, limit=limit, after=after, eligible=condition
                )
            )
            queued = 0
            last_due: object = None
            for fields in self._adoption.decode(found):
                last_due = fields.get("due")
                queued += self._intake.offer(fields, from_pass=True)
            if len(found) < limit:
                break
            if queued and isinstance(last_due, dt.datetime):
                return self._store.clock.monotonic_at(last_due)
            if queued:
                return float("-inf")
            # A page of nothing but what is quarantined must not hide what stands behind it.
            if isinstance(last_due, dt.datetime) and last_due > after:
                after = last_due
            else:
                limit *= 2
        return float("inf")
