"""
Pages of tasks that are due now or soon, into the delay queue.

Runs at the start, after a gap in the change stream, when the queue runs low while
more was there, and at the latest after the horizon. Also looks up single documents
that the change stream named, and repairs derived fields that others left stale.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Callable
from typing import Final

from mscheduler_sync._runtime import backoff
from mscheduler_sync._runtime.delay_queue import DelayQueue
from mscheduler_sync._runtime.log import logger
from mscheduler_sync._runtime.service import CrashHandler, Service
from mscheduler_sync._stages.adoption import Adoption
from mscheduler_sync._stages.horizon import Horizon
from mscheduler_sync._stages.intake import Intake
from mscheduler_sync._stages.quarantine import Quarantine
from mscheduler_sync._stages.routes import Routes
from mscheduler_sync._storage import expressions as x
from mscheduler_sync._storage import statements
from mscheduler_sync._storage.store import TaskStore

_log = logger("fetch")

#: Tasks per page, look-ups per query, and the most that a pass reads of one route.
PAGE, CHUNK, MOST_PER_ROUTE = 1000, 100, 20_000
#: More look-ups than this at once, and a whole pass is cheaper.
_MOST_LOOKUPS: Final = 1000


class Fetcher(Service):
    """
    The fetcher's thread; see the module.
    """

    def __init__(
        self,
        store: TaskStore,
        routes: Routes,
        queue: DelayQueue,
        intake: Intake,
        quarantine: Quarantine,
        horizon: Horizon,
        *,
        poll_interval_s: float,
        rust_interop: bool,
        on_changed: Callable[[str], None],
        on_crash: CrashHandler,
    ) -> None:
        super().__init__("fetch", f"ms-fetch:{routes.worker_id}", _log, on_crash)
        self._store = store
        self._routes = routes
        self._queue = queue
        self._intake = intake
        self._horizon = horizon
        self._poll_interval_s = poll_interval_s
        self._rust_interop = rust_interop
        self._on_changed = on_changed
        self._adoption = Adoption(
            store, routes, intake, quarantine, horizon, is_stopping=lambda: self.stopping
        )
        self._changed = threading.Condition()
        # All under _changed.
        self._wanted = True
        self._lookups: dict[object, bool] = {}
        self._passes = 0
        self._in_pass = False
        self._ran_low = False
        # Of this thread alone.
        self._polling = True
        #: When what the last pass has left in the database is due: at the earliest. And the next
        #: such time, of what found no room in the queue too, that is yet to come.
        self._more_from_s = float("inf")
        self._needed_at_s = float("inf")
        self._next_pass_s = float("-inf")
        self._passed_at_s = float("-inf")

    # -- called by others --------------------------------------------------------------------

    def request_pass(self) -> None:
        """
        Look again soon: something may have been missed.
        """
        with self._changed:
            self._wanted = True
            self._changed.notify_all()

    def request_lookup(self, document_id: object, *, is_foreign: bool = False) -> None:
        """
        Read this document and queue it if it is claimable; after a repair if *is_foreign*.
        """
        with self._changed:
            if len(self._lookups) < _MOST_LOOKUPS:
                self._lookups[document_id] = is_foreign or self._lookups.get(document_id, False)
            else:
                self._wanted = True
            self._changed.notify_all()

    def set_polling(self, *, polling: bool) -> None:
        """
        The change stream was opened or lost: a pass finds what came meanwhile.

        While *polling*, the passes alone must find everything.
        """
        self._polling = polling
        with self._changed:
            self._wanted = True
            self._changed.notify_all()

    def wake(self) -> None:
        """
        The horizon has become shorter: the next pass may be due earlier.
        """
        with self._changed:
            self._changed.notify_all()

    def queue_runs_low(self) -> None:
        with self._changed:
            if self._in_pass:
                # It brings more by itself, perhaps not enough.
                self._ran_low = True
            elif self._is_more_due():
                self._wanted = True
                self._changed.notify_all()

    def _is_more_due(self) -> bool:
        """
        More than a page was there, or what the stream told found no room, and it is due.
        """
        return min(self._more_from_s, self._queue.dropped_from_s) <= time.monotonic()

    def wait_first_pass(self, timeout_s: float) -> bool:
        """
        Wait up to *timeout_s* seconds until one pass was done; return whether it was.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._passes > 0, timeout_s)

    def wait_pass(self, timeout_s: float) -> bool:
        """
        Wait up to *timeout_s* seconds for a pass that begins after now; return whether it came.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            # A pass under way may have read before now: that one does not count.
            target = self._passes + (2 if self._in_pass else 1)
            while self._passes < target and not self.stopping:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._wanted = True
                self._changed.notify_all()
                self._changed.wait(left_s)
            return self._passes >= target

    def request_stop(self) -> None:
        super().request_stop()
        with self._changed:
            self._changed.notify_all()

    # -- the thread --------------------------------------------------------------------------

    def step(self) -> None:
        lookups, whole = self._next_work()
        if self.stopping:
            return
        done = False
        try:
            self._store.measure_clock()
            if lookups:
                self._look_up(lookups)
            if whole:
                self._pass()
            done = True
        finally:
            with self._changed:
                self._in_pass = False
                if self._ran_low:
                    self._ran_low = False
                    is_low = self._queue.count_due() < CHUNK
                    self._wanted = self._wanted or (is_low and self._is_more_due())
                self._passes += whole and done
                # What a failed round was to find is found by the next pass.
                self._wanted = self._wanted or not done
                self._changed.notify_all()

    def _next_work(self) -> tuple[list[tuple[object, bool]], bool]:
        with self._changed:
            while not self.stopping:
                now_s = time.monotonic()
                due_s = min(self._next_pass_s, self._passed_at_s + self._horizon.length_s)
                # Once each: what is due already waits until the queue runs low.
                for left_s in (self._more_from_s, self._queue.dropped_from_s):
                    if left_s > now_s:
                        self._needed_at_s = min(self._needed_at_s, left_s)
                due_s = min(due_s, self._needed_at_s)
                whole = self._wanted or due_s <= now_s
                if self._lookups or whole:
                    lookups = list(self._lookups.items())
                    self._lookups.clear()
                    self._wanted = False
                    self._in_pass = whole
                    return lookups, whole
                self._changed.wait(min(due_s - now_s, threading.TIMEOUT_MAX))
            return [], False

    def _look_up(self, lookups: list[tuple[object, bool]]) -> None:
        for start in range(0, len(lookups), CHUNK):
            chunk = dict(lookups[start : start + CHUNK])
            found = self._store.find(statements.discovered_by_id(list(chunk)))
            until = self._horizon.end(self._store.clock)
            for document in found:
                fields = self._adoption.decoded(document)
                if fields is None:
                    continue
                key = fields.get("key")
                if isinstance(key, str):
                    self._on_changed(key)
                is_foreign = chunk.get(fields.get("_id"), False)
                if is_foreign or fields.get("routes") is None or fields.get("due") is None:
                    self._adoption.adopt(fields.get("key"))
                elif self._routes.include(fields["routes"]) and fields["due"] <= until:
                    self._intake.offer(fields)

    def _pass(self) -> None:
        self._store.ensure_indexes()
        self._queue.forget_dropped()
        if self._rust_interop:
            self._adoption.sweep_now_and_then()
        self._adoption.adopt_underived()
        self._more_from_s = self._needed_at_s = float("inf")
        self._passed_at_s = time.monotonic()
        until = self._horizon.end(self._store.clock)
        with self._intake.during_pass():
            for route, condition in self._routes.queries:
                if self.stopping:
                    return
                self._read_route(route, condition, until)
        # The leases that this pass has seen may have shortened the horizon.
        pause_s = self._horizon.length_s
        if self._polling:
            pause_s = min(pause_s, self._poll_interval_s)
        self._next_pass_s = time.monotonic() + backoff.jittered(pause_s, 0.1)

    def _read_route(self, route: str, condition: dict[str, object], until: dt.datetime) -> None:
        """
        Queue the due tasks of one route, earliest first, until a page brings something new.
        """
        after, limit = x.EPOCH, PAGE
        while limit <= MOST_PER_ROUTE:
            found = self._store.find(
                statements.due_tasks(
                    route, until=until, limit=limit, after=after, eligible=condition
                )
            )
            queued = 0
            last_due: object = None
            for document in found:
                fields = self._adoption.decoded(document)
                if fields is None:
                    continue
                last_due = fields.get("due")
                queued += self._intake.offer(fields, from_pass=True)
            if len(found) < limit:
                return
            if queued:
                # The page was full.
                left_s = float("-inf")
                if isinstance(last_due, dt.datetime):
                    left_s = self._store.clock.monotonic_at(last_due)
                self._more_from_s = min(self._more_from_s, left_s)
                return
            # A page of nothing but what is set aside must not hide what stands behind it.
            if isinstance(last_due, dt.datetime) and last_due > after:
                after = last_due
            else:
                limit *= 2
