"""
How far a pass reads ahead, learned from the leases of the tasks that are discovered.

The intake and the watcher teach it; the fetcher reads and waits by it.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs

from mscheduler_sync._runtime.clock import ServerClock

#: Bounds of the horizon, in seconds.
SHORTEST_HORIZON_S, LONGEST_HORIZON_S = 0.25, 30.0
#: The shortest lease is remembered for one to two of these, in seconds.
LEASE_WINDOW_S: Final = 300.0


@attrs.define(eq=False, repr=False, kw_only=True)
class Horizon:
    """
    Half the shortest lease seen lately; also the longest pause between passes. Thread-safe.

    A running task's lease is renewed before half of it is gone, so its end comes
    within the horizon only once its worker is dead; no timer is needed for it.
    """

    _timer: Callable[[], float] = time.monotonic
    _lock: threading.Lock = attrs.field(init=False, factory=threading.Lock)
    # All under _lock: the shortest lease of this window, and of the one before it.
    _window_began_s: float = attrs.field(init=False, default=float("-inf"))
    _shortest_s: float = attrs.field(init=False, default=float("inf"))
    _shortest_before_s: float = attrs.field(init=False, default=float("inf"))

    def observe(self, fields: Mapping[str, Any]) -> bool:
        """
        Learn the lease of a discovered document; return whether the horizon is shorter for it.
        """
        option = fields.get("task_option")
        lease_ms = option.get("worker_timeout_ms") if isinstance(option, Mapping) else None
        if not isinstance(lease_ms, (int, float)):
            return False
        lease_s, now_s = lease_ms / 1000, self._timer()
        with self._lock:
            if now_s - self._window_began_s > LEASE_WINDOW_S:
                self._window_began_s = now_s
                self._shortest_before_s, self._shortest_s = self._shortest_s, float("inf")
            known_s = min(self._shortest_s, self._shortest_before_s, 2 * LONGEST_HORIZON_S)
            self._shortest_s = min(self._shortest_s, lease_s)
            return lease_s < known_s

    @property
    def length_s(self) -> float:
        """
        The horizon, in seconds from now.
        """
        with self._lock:
            half_s = min(self._shortest_s, self._shortest_before_s) / 2
        return max(SHORTEST_HORIZON_S, min(LONGEST_HORIZON_S, half_s))

    def reaches(self, due: object, clock: ServerClock) -> bool:
        """
        Return whether *due* comes before the next pass would find it. What is odd counts as soon.
        """
        return not isinstance(due, dt.datetime) or due <= self.end(clock)

    def end(self, clock: ServerClock) -> dt.datetime:
        """
        Return the server's time until which what comes due is wanted in the delay queue.
        """
        return clock.at(self._timer() + self.length_s)
