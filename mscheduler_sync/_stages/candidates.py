"""
Where everything that was discovered goes through on its way into the delay queue.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from cachetools import TTLCache

from mscheduler_sync._runtime.clock import ServerClock
from mscheduler_sync._runtime.delay_queue import DelayQueue
from mscheduler_sync._runtime.log import LogThrottle, logger
from mscheduler_sync._stages.contention import Contention
from mscheduler_sync._storage import expressions as x
from mscheduler_sync._storage import statements
from mscheduler_sync._storage.claims import hint_of
from mscheduler_sync.events import EventHub, TaskSetAside, WaitOccupy

_log = logger("claim")

#: A document that cannot be handled is left alone for this long, in seconds.
SET_ASIDE_S: Final = 60.0
#: A worker that has just failed a task lets others go first by up to this long, in seconds.
COURTESY_S: Final = 3.0
#: How long a sign of another worker is remembered, in seconds.
_SEEN_S: Final = 60.0
#: Every pass looks ahead at most this far, in seconds.
LONGEST_HORIZON_S: Final = 30.0
_SHORTEST_HORIZON_S: Final = 0.25
#: The shortest lease is remembered for one to two of these, in seconds.
_LEASE_WINDOW_S: Final = 300.0


class Routes:
    """
    Which routes of the index this consumer may take tasks from.
    """

    def __init__(self, worker_id: str, names: Sequence[str | None] | None) -> None:
        self.worker_id: Final = worker_id
        self.names: Final = None if names is None else tuple(names)
        open_routes = (
            [x.ROUTE_UNNAMED, x.ROUTE_ANY_NAME]
            if names is None
            else [x.ROUTE_UNNAMED if name is None else x.route_of_name(name) for name in names]
        )
        #: (route, condition that the route itself does not imply)
        self.queries: Final[list[tuple[str, dict[str, Any]]]] = [
            *((route, {}) for route in open_routes),
            (x.route_of_worker(worker_id), statements.eligible_name(names)),
            (x.ROUTE_SHARED, statements.eligible_in_shared_routes(worker_id, names)),
        ]
        self._mine = frozenset(route for route, _ in self.queries)

    def include(self, routes: object) -> bool:
        """
        Return whether a task that stands in *routes* may be one for this consumer.
        """
        if isinstance(routes, str):
            return routes in self._mine
        return isinstance(routes, Sequence) and any(route in self._mine for route in routes)


class Candidates:
    """
    The entrance of the delay queue: skips what is set aside, tells the events. Thread-safe.
    """

    def __init__(
        self,
        queue: DelayQueue,
        clock: Callable[[], ServerClock],
        hub: EventHub,
        contention: Contention,
    ) -> None:
        #: Called when the horizon has become shorter.
        self.on_shorter: Callable[[], None] = lambda: None
        self._queue = queue
        self._clock = clock
        self._hub = hub
        self._contention = contention
        self._log_throttle = LogThrottle(SET_ASIDE_S)
        self._lock = threading.Lock()
        # All under _lock.
        self._set_aside: TTLCache[str, None] = TTLCache(10_000, SET_ASIDE_S, timer=time.monotonic)
        self._not_before_s: TTLCache[str, float] = TTLCache(10_000, 300.0, timer=time.monotonic)
        self._others_seen_at_s = float("-inf")
        self._lease_window = (0.0, float("inf"), float("inf"))
        #: What the claimer has in its hands, and what it has had there during a pass.
        self._in_hand: Sequence[str] = ()
        self._taken_in_pass: set[str] | None = None

    def offer(self, fields: Mapping[str, Any], *, by_pass: bool = False) -> bool:
        """
        Take a discovered document (key, due, priority, lease, attempts); return whether it is
        queued now. What a pass has read is old where the claimer was faster.
        """
        key, due = fields.get("key"), fields.get("due")
        if not isinstance(key, str) or not isinstance(due, dt.datetime):
            self.set_aside(str(key), "its key is not a string or its due time not a date")
            return False
        option = fields.get("task_option")
        priority = option.get("priority") if isinstance(option, Mapping) else None
        lease_ms = option.get("worker_timeout_ms") if isinstance(option, Mapping) else None
        if isinstance(lease_ms, (int, float)):
            self.note_lease(lease_ms / 1000)
        due_s = self._clock().monotonic_at(due)
        with self._lock:
            if key in self._set_aside:
                return False
            if by_pass and self._taken_in_pass is not None and key in self._taken_in_pass:
                return False
            due_s = max(due_s, self._not_before_s.get(key, due_s))
        is_number = isinstance(priority, (int, float)) and math.isfinite(priority)
        level = int(priority) if is_number and priority else 0
        defer_s = 0.0 if by_pass else self._defer_s(due_s)
        queued = self._queue.push(key, due_s, level, hint=hint_of(fields), defer_s=defer_s)
        if queued and self._hub.has_listeners:
            self._hub.publish(WaitOccupy(key=key, next_occupy_time=self._clock().at(due_s)))
        return queued

    def _defer_s(self, due_s: float) -> float:
        """
        Of what the stream tells all consumers hear at once: who has lost claims hangs back.
        """
        if not self._contention.is_felt:
            return 0.0
        now_s = time.monotonic()
        if due_s <= now_s and self._queue.count_due():
            # Busy: what is left to others is decided when a slot is free.
            return 0.0
        wait_s = self._contention.draw_wait_s()
        return wait_s + max(0.0, now_s - due_s) if wait_s else 0.0

    def taken(self, keys: Sequence[str]) -> None:
        """
        The claimer has these *keys* in its hands now.
        """
        with self._lock:
            self._in_hand = keys
            if self._taken_in_pass is not None:
                self._taken_in_pass.update(keys)

    @contextlib.contextmanager
    def during_pass(self) -> Iterator[None]:
        """
        While documents are read that will be offered: remember what the claimer takes meanwhile.
        """
        with self._lock:
            self._taken_in_pass = set(self._in_hand)
        try:
            yield
        finally:
            with self._lock:
                self._taken_in_pass = None

    def look_again(self, key: str) -> None:
        """
        Queue *key* as due now: it was passed over while an attempt of it was still held here.
        """
        if key in self._queue:
            # Found again meanwhile, with the time from which it may run.
            return
        now_s = time.monotonic()
        with self._lock:
            due_s = max(now_s, self._not_before_s.get(key, now_s))
        self._queue.push(key, due_s)

    def set_aside(self, key: str, reason: str) -> None:
        """
        Leave *key* alone for a while; complain of it once per interval.
        """
        with self._lock:
            self._set_aside[key] = None
        self._queue.discard(key)
        if self._log_throttle.allows(key):
            _log.error(
                "a document cannot be handled and is set aside",
                extra={"event": "set_aside", "task_key": key, "reason": reason},
            )
            self._hub.publish(TaskSetAside(key=key, reason=reason))

    @property
    def set_aside_count(self) -> int:
        with self._lock:
            self._set_aside.expire()
            return len(self._set_aside)

    def is_set_aside(self, key: str) -> bool:
        with self._lock:
            return key in self._set_aside

    # -- courtesy ----------------------------------------------------------------------------

    def note_other_worker(self) -> None:
        """
        Another worker was seen on this collection.
        """
        with self._lock:
            self._others_seen_at_s = time.monotonic()

    def note_own_failure(self, key: str, due_s: float) -> None:
        """
        This worker has failed *key*, due again at the monotonic *due_s*: let others go first.
        """
        with self._lock:
            if time.monotonic() - self._others_seen_at_s <= _SEEN_S:
                self._not_before_s[key] = due_s + COURTESY_S
            else:
                self._not_before_s.pop(key, None)

    # -- the horizon -------------------------------------------------------------------------

    def note_lease(self, lease_s: float) -> None:
        """
        A task with this lease is about.
        """
        now_s = time.monotonic()
        with self._lock:
            began_s, current_s, previous_s = self._lease_window
            if now_s - began_s > _LEASE_WINDOW_S:
                began_s, current_s, previous_s = now_s, float("inf"), current_s
            shortens = lease_s < min(current_s, previous_s, 2 * LONGEST_HORIZON_S)
            self._lease_window = (began_s, min(current_s, lease_s), previous_s)
        if shortens:
            self.on_shorter()

    def horizon_s(self) -> float:
        """
        How far a pass looks ahead, and the longest pause between passes: half the shortest lease.

        A running task's lease is renewed before half of it is gone, so its end comes
        within the horizon only once its worker is dead; no timer is needed for it.
        """
        with self._lock:
            _, current_s, previous_s = self._lease_window
        half_s = min(current_s, previous_s) / 2
        return max(_SHORTEST_HORIZON_S, min(LONGEST_HORIZON_S, half_s))
