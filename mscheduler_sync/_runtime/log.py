"""
Loggers and the rate limit of repeated messages.

Loggers are named by component, which is part of the public surface:
``mscheduler_sync.{watch,fetch,claim,execute,heartbeat,outcome,consumer,store,app,pool}``.
Messages are constant; values stand in the record's fields (``event``,
``worker_id``, ``task_key``, ``running_id``, ...). Params and results are never logged.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from cachetools import TTLCache

logging.getLogger("mscheduler_sync").addHandler(logging.NullHandler())


class Log:
    """
    A logger whose calls never raise: the application's handlers, filters and streams may.

    A worker must not lose a task because a log file is closed or a formatter is wrong.

    Keywords are fields of the record; *exc_info*, an error, brings its traceback and `error_type`.
    """

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, message: str, *, event: str, **fields: Any) -> None:
        self._log(logging.DEBUG, message, event, **fields)

    def info(self, message: str, *, event: str, **fields: Any) -> None:
        self._log(logging.INFO, message, event, **fields)

    def warning(self, message: str, *, event: str, **fields: Any) -> None:
        self._log(logging.WARNING, message, event, **fields)

    def error(self, message: str, *, event: str, **fields: Any) -> None:
        self._log(logging.ERROR, message, event, **fields)

    def critical(self, message: str, *, event: str, **fields: Any) -> None:
        self._log(logging.CRITICAL, message, event, **fields)

    def _log(
        self,
        level: int,
        message: str,
        event: str,
        *,
        exc_info: BaseException | None = None,
        **fields: Any,
    ) -> None:
        if exc_info is not None:
            fields["error_type"] = type(exc_info).__name__
        extra = {"event": event, **fields}
        # Not an error of ours, and there is no place left to tell it.
        with contextlib.suppress(Exception):
            self._logger.log(level, message, exc_info=exc_info, extra=extra, stacklevel=3)


def logger(component: str) -> Log:
    return Log(f"mscheduler_sync.{component}")


class LogThrottle:
    """
    Remembers what was logged, so that each subject is logged once per interval.
    """

    def __init__(
        self,
        interval_s: float = 60.0,
        size: int = 10_000,
        *,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.Lock()
        self._seen: TTLCache[object, None] = TTLCache(size, interval_s, timer=timer)

    def allows(self, subject: object) -> bool:
        """
        Return whether *subject* was not logged within the interval, and note that it is now.
        """
        with self._lock:
            if subject in self._seen:
                return False
            self._seen[subject] = None
            return True
