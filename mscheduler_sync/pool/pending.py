"""
Pending jobs that this node has heard of, and when it may claim each.
"""

from __future__ import annotations

import threading
import time

import attrs


@attrs.define
class Pending:
    """
    One pending job.
    """

    #: From when its target may claim it, on the monotonic clock.
    due_s: float
    #: Whether it may be claimed by anybody once the grace has passed: it was seen as another's.
    looked_at: bool = False


class PendingJobs:
    """
    By id; and a condition that wakes the control thread. Safe from any thread.
    """

    def __init__(self, grace_s: float, most: int = 100_000) -> None:
        self._grace_s = grace_s
        self._most = most
        self._changed = threading.Condition()
        # All under _changed.
        self._jobs: dict[str, Pending] = {}
        self._mail: set[str] = set()
        self._woken = False

    def add(self, job_id: str, due_s: float) -> None:
        """
        A job is pending; it may be claimed from *due_s* on.
        """
        with self._changed:
            if len(self._jobs) < self._most or job_id in self._jobs:
                self._jobs[job_id] = Pending(due_s)
                self._changed.notify_all()

    def add_unknown(self, job_id: str, due_s: float) -> None:
        """
        As `add`, but what is known of the job already stays.
        """
        with self._changed:
            if job_id not in self._jobs and len(self._jobs) < self._most:
                self._jobs[job_id] = Pending(due_s)
                self._changed.notify_all()

    def discard(self, job_id: str) -> None:
        with self._changed:
            self._jobs.pop(job_id, None)

    def add_mail(self, job_id: str) -> None:
        with self._changed:
            self._mail.add(job_id)
            self._changed.notify_all()

    def take_mail(self) -> list[str]:
        with self._changed:
            mail, self._mail = list(self._mail), set()
            return mail

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def look_again(self) -> None:
        """
        The ring has changed: who may claim what is to be decided anew.
        """
        with self._changed:
            for pending in self._jobs.values():
                pending.looked_at = False

    def wait(self, until_s: float) -> None:
        """
        Wait until something is to be done, at most until *until_s*.
        """
        with self._changed:
            while not self._woken and not self._mail:
                now_s = time.monotonic()
                next_s = min([until_s, *(self._next_s(one) for one in self._jobs.values())])
                if next_s <= now_s:
                    break
                self._changed.wait(next_s - now_s)
            self._woken = False

    def take_due(self) -> list[tuple[str, bool]]:
        """
        Return what is to be decided or claimed now: (id, whether anybody may claim it).

        What anybody may claim is forgotten here; what only its target may claim is kept
        until then.
        """
        now_s = time.monotonic()
        due = []
        with self._changed:
            for job_id, pending in list(self._jobs.items()):
                if now_s < self._next_s(pending):
                    continue
                for_anybody = now_s >= pending.due_s + self._grace_s
                if for_anybody:
                    del self._jobs[job_id]
                pending.looked_at = True
                due.append((job_id, for_anybody))
        return due

    def _next_s(self, pending: Pending) -> float:
        return pending.due_s + (self._grace_s if pending.looked_at else 0.0)

    def __len__(self) -> int:
        with self._changed:
            return len(self._jobs)
