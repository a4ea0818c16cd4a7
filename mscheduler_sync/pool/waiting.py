"""
Callers that wait for something to become of a job.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from mscheduler_sync._runtime import backoff


class Waiter:
    """
    One caller that waits for news of one job.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Under _changed.
        self._news = False
        self._answered: str | None = None

    def wait(self, timeout_s: float) -> str | None:
        """
        Wait up to *timeout_s* seconds for news; return the dispatch that was answered, if told.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._news, max(0.0, timeout_s))
            self._news = False
            return self._answered

    def poke(self, answered: str | None) -> None:
        with self._changed:
            self._news = True
            self._answered = answered or self._answered
            self._changed.notify_all()


class Waiters:
    """
    Who waits for which job. Safe from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Under _lock.
        self._waiters: dict[str, list[Waiter]] = {}

    @contextlib.contextmanager
    def of(self, job_id: str) -> Iterator[Waiter]:
        waiter = Waiter()
        with self._lock:
            self._waiters.setdefault(job_id, []).append(waiter)
        try:
            yield waiter
        finally:
            with self._lock:
                self._waiters[job_id].remove(waiter)
                if not self._waiters[job_id]:
                    del self._waiters[job_id]

    def poke(self, job_id: str, answered: str | None = None) -> None:
        """
        There is news of a job; *answered* names a dispatch whose start has succeeded.
        """
        with self._lock:
            waiters = list(self._waiters.get(job_id, ()))
        for waiter in waiters:
            waiter.poke(answered)

    def poke_all(self) -> None:
        with self._lock:
            waiters = [waiter for some in self._waiters.values() for waiter in some]
        for waiter in waiters:
            waiter.poke(None)


def pause_after(failures: int, deadline_s: float) -> bool:
    """
    Wait before another try of what has failed so often; return False if there is no time left.
    """
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        return False
    pause_s = backoff.jittered(backoff.delay_s(failures, first_s=0.05, cap_s=1.0))
    threading.Event().wait(min(pause_s, left_s))
    return True


class Pauses:
    """
    The pauses between looks at the database: growing while nothing tells of changes.
    """

    def __init__(self, longest_s: float, *, told: bool) -> None:
        self._longest_s = longest_s
        self._next_s = longest_s if told else min(0.02, longest_s)

    def next_s(self, deadline_s: float) -> float:
        pause_s = min(self._next_s, max(0.0, deadline_s - time.monotonic()))
        self._next_s = min(self._longest_s, self._next_s * 1.5)
        return pause_s
