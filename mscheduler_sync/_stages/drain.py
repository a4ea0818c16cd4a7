"""
Tells when the consumer has run all that it has found.
"""

from __future__ import annotations

import threading

import attrs

from mscheduler_sync._runtime.delay_queue import DelayQueue
from mscheduler_sync._stages.running import RunningAttempts
from mscheduler_sync._storage.store import TaskStore
from mscheduler_sync.events import EventHub, QueueDrained


@attrs.define(eq=False, repr=False, kw_only=True)
class Drain:
    """
    Publishes `QueueDrained`, once each time that it becomes true. Thread-safe.

    `check` is to be called after each step that may make it true: an attempt is done, or
    the claimer has put its keys down.
    """

    _queue: DelayQueue
    _running: RunningAttempts
    _store: TaskStore
    _hub: EventHub
    _lock: threading.Lock = attrs.field(init=False, factory=threading.Lock)
    #: How many attempts had begun when it was last told; under _lock.
    _told_after: int = attrs.field(init=False, default=0)

    def check(self) -> None:
        if not self._hub.wants(QueueDrained):
            return
        # Two threads may both see the end of the last attempt.
        with self._lock:
            begun = self._running.begun
            if begun == self._told_after or self._running.count:
                return
            # In the order in which a key moves on, so that none slips through between two checks.
            if self._queue.is_idle(self._store.clock.lag_s) and not self._running.count:
                self._told_after = begun
                self._hub.publish(QueueDrained())
