"""
A worker: one handler of a node, with a slot of its own in the ring.
"""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable

from mscheduler_sync.pool.job import Handler, Job


class Worker:
    """
    One handler of a node. Made by `Node.add_worker`.

    Its id changes when the node has lost its lease and comes back under another.
    """

    def __init__(
        self,
        handler: Handler,
        number: int,
        created_at: dt.datetime,
        jobs_of: Callable[[Worker], list[Job]],
    ) -> None:
        self.handler = handler
        self.number = number
        #: By the server's clock.
        self.created_at = created_at
        self._jobs_of = jobs_of
        self._lock = threading.Lock()
        # Under _lock.
        self._id = ""
        self._leaving = False
        self._stopped = False

    @property
    def id(self) -> str:
        with self._lock:
            return self._id

    @property
    def is_leaving(self) -> bool:
        """
        Whether it is being removed: it takes no more jobs.
        """
        with self._lock:
            return self._leaving

    @property
    def is_stopped(self) -> bool:
        """
        Whether it was removed, or its node was closed.
        """
        with self._lock:
            return self._stopped

    def jobs(self) -> list[Job]:
        """
        Return the jobs that run here, by key.
        """
        return self._jobs_of(self)

    def __repr__(self) -> str:
        return f"Worker({self.id!r}, handler={type(self.handler).__name__})"

    # -- called by the node ------------------------------------------------------------------

    def rename(self, node: str) -> str:
        with self._lock:
            self._id = f"{node}.{self.number}"
            return self._id

    def leave(self) -> None:
        with self._lock:
            self._leaving = True

    def end(self) -> None:
        with self._lock:
            self._leaving = self._stopped = True
