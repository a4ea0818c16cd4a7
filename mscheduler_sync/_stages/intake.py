"""
The entrance of the delay queue: what the watcher, the fetcher and the claimer find goes in here.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
from cachetools import TTLCache

from mscheduler_sync._runtime.clock import ServerClock
from mscheduler_sync._runtime.delay_queue import DelayQueue
from mscheduler_sync._stages.claims import hint_of
from mscheduler_sync._stages.contention import Contention
from mscheduler_sync._stages.horizon import Horizon
from mscheduler_sync._stages.quarantine import Quarantine
from mscheduler_sync._stages.routes import Routes
from mscheduler_sync.events import EventHub, TaskFound

#: A worker that has just failed a task lets others go first by this long, in seconds.
BACK_OFF_S: Final = 3.0
#: How long a sign of another worker is remembered, in seconds.
OTHERS_MEMORY_S: Final = 60.0


@attrs.define(eq=False, repr=False, kw_only=True)
class Intake:
    """
    Decides whether a discovered task is queued, and from when it may be claimed. Thread-safe.
    """

    _routes: Routes
    _queue: DelayQueue
    _clock: ServerClock
    _hub: EventHub
    _contention: Contention
    _quarantine: Quarantine
    _horizon: Horizon
    _timer: Callable[[], float] = time.monotonic
    _lock: threading.Lock = attrs.field(init=False, factory=threading.Lock)
    # All under _lock.
    _not_before_s: TTLCache[str, float] = attrs.field(init=False)
    _others_seen_at_s: float = attrs.field(init=False, default=float("-inf"))
    #: What the claimer has in its hands, and what it has had there during a pass.
    _in_hand: Sequence[str] = attrs.field(init=False, default=())
    _claimed_in_pass: set[str] | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._not_before_s = TTLCache(10_000, 300.0, timer=self._timer)

    def offer(self, fields: Mapping[str, Any], *, from_pass: bool = False) -> bool:
        """
        Queue a discovered document unless there is a reason not to; return whether it is queued.

        What a pass has read is old where the claimer was faster.
        """
        key, due = fields.get("key"), fields.get("due")
        if not isinstance(key, str) or not isinstance(due, dt.datetime):
            self._quarantine.add(str(key), "its key is not a string or its due time not a date")
            return False
        self._horizon.observe(fields)
        due_s = self._clock.monotonic_at(due)
        if key in self._quarantine:
            return False
        with self._lock:
            if from_pass and self._claimed_in_pass is not None and key in self._claimed_in_pass:
                return False
            due_s = max(due_s, self._not_before_s.get(key, due_s))
        option = fields.get("task_option")
        priority = option.get("priority") if isinstance(option, Mapping) else None
        is_level = isinstance(priority, (int, float)) and math.isfinite(priority)
        level = int(priority) if is_level and priority else 0
        defer_s = 0.0 if from_pass else self._defer_s(due_s)
        queued = self._queue.push(key, due_s, level, hint=hint_of(fields), defer_s=defer_s)
        if queued and self._hub.wants(TaskFound):
            self._hub.publish(TaskFound(key=key, claim_at=self._clock.at(due_s)))
        return queued

    def offer_if_near(self, fields: Mapping[str, Any]) -> None:
        """
        Offer a document that no query of ours has chosen: if it is for us, and due soon.
        """
        is_near = self._horizon.reaches(fields.get("due"), self._clock)
        if is_near and self._routes.include(fields.get("routes")):
            self.offer(fields)

    def _defer_s(self, due_s: float) -> float:
        """
        Return how long to leave to others what all consumers hear of at once, in seconds.
        """
        if not self._contention.is_present:
            return 0.0
        now_s = self._timer()
        if due_s <= now_s and self._queue.count_due():
            # Busy: what is left to others is decided when a slot is free.
            return 0.0
        wait_s = self._contention.draw_wait_s()
        return wait_s + max(0.0, now_s - due_s) if wait_s else 0.0

    def requeue(self, key: str) -> None:
        """
        Queue *key* as due now: it was passed over while an attempt of it was still held here.
        """
        if key in self._queue:
            # Found again meanwhile, with the time from which it may run.
            return
        now_s = self._timer()
        with self._lock:
            due_s = max(now_s, self._not_before_s.get(key, now_s))
        self._queue.push(key, due_s)

    # -- what the claimer has in hand --------------------------------------------------------

    @contextlib.contextmanager
    def claiming(self, keys: Sequence[str]) -> Iterator[None]:
        """
        While *keys* are in the claimer's hands: a pass that reads them meanwhile is too late.
        """
        with self._lock:
            self._in_hand = keys
            if self._claimed_in_pass is not None:
                self._claimed_in_pass.update(keys)
        try:
            yield
        finally:
            with self._lock:
                self._in_hand = ()

    @contextlib.contextmanager
    def during_pass(self) -> Iterator[None]:
        """
        While documents are read that will be offered: remember what the claimer takes meanwhile.
        """
        with self._lock:
            self._claimed_in_pass = set(self._in_hand)
        try:
            yield
        finally:
            with self._lock:
                self._claimed_in_pass = None

    # -- back-off after a failure of one's own -----------------------------------------------

    def record_other_worker(self) -> None:
        """
        Another worker was seen on this collection.
        """
        with self._lock:
            self._others_seen_at_s = self._timer()

    def record_failure(self, key: str, due_s: float) -> None:
        """
        This worker has failed *key*, due again at the monotonic *due_s*: let others go first.
        """
        with self._lock:
            if self._timer() - self._others_seen_at_s <= OTHERS_MEMORY_S:
                self._not_before_s[key] = due_s + BACK_OFF_S
            else:
                self._not_before_s.pop(key, None)
