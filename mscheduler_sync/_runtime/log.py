"""
Loggers and the rate limit of repeated complaints.

Loggers are named by component, which is part of the public surface:
``mscheduler_sync.{watch,fetch,claim,execute,heartbeat,outcome,consumer,store}``.
Messages are constant; values stand in the record's fields (``event``,
``worker_id``, ``task_key``, ``running_id``, ...). Params and results are never logged.
"""

from __future__ import annotations

import logging
import threading
import time

from cachetools import TTLCache

logging.getLogger("mscheduler_sync").addHandler(logging.NullHandler())


def logger(component: str) -> logging.Logger:
    return logging.getLogger(f"mscheduler_sync.{component}")


class Complaints:
    """
    Remembers what was complained of, so that each thing is logged once per interval.
    """

    def __init__(self, interval_s: float = 60.0, size: int = 10_000) -> None:
        self._lock = threading.Lock()
        self._seen: TTLCache[object, None] = TTLCache(size, interval_s, timer=time.monotonic)

    def is_new(self, subject: object) -> bool:
        """
        Return whether *subject* was not complained of within the interval, and note it.
        """
        with self._lock:
            if subject in self._seen:
                return False
            self._seen[subject] = None
            return True
