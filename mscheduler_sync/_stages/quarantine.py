"""
Documents that cannot be handled: whoever meets one quarantines it, and the intake keeps it out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

import attrs
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from cachetools import TTLCache

from mscheduler_sync import model
from mscheduler_sync._runtime.delay_queue import DelayQueue
from mscheduler_sync._runtime.log import LogThrottle, logger
from mscheduler_sync.errors import InvalidTask
from mscheduler_sync.events import EventHub, TaskQuarantined

_log = logger("claim")

#: A document is left alone for this long, and logged at most once within it, in seconds.
QUARANTINE_S: Final = 60.0


@attrs.define(eq=False, repr=False, kw_only=True)
class Quarantine:
    """
    The keys that are quarantined now. Thread-safe.
    """

    _queue: DelayQueue
    _hub: EventHub
    _timer: Callable[[], float] = time.monotonic
    _log_throttle: LogThrottle = attrs.field(init=False)
    _lock: threading.Lock = attrs.field(init=False, factory=threading.Lock)
    # Under _lock.
    _keys: TTLCache[str, None] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._log_throttle = LogThrottle(QUARANTINE_S, timer=self._timer)
        self._keys = TTLCache(10_000, QUARANTINE_S, timer=self._timer)

    def add(self, key: str, reason: str | InvalidTask) -> None:
        """
        Leave *key* alone for a while; say so, with the *reason*, once per interval.
        """
        if isinstance(reason, InvalidTask):
            reason = f"{reason.path} {reason.problem}"
        with self._lock:
            self._keys[key] = None
        self._queue.discard(key)
        if self._log_throttle.allows(key):
            _log.error(
                "a document cannot be handled and is quarantined",
                event="quarantined",
                task_key=key,
                reason=reason,
            )
            self._hub.publish(TaskQuarantined(key=key, reason=reason))

    def check(self, document: RawBSONDocument, codec_options: CodecOptions[Any]) -> None:
        """
        Quarantine *document* if it cannot be read as a task.
        """
        try:
            model.read_task(document, codec_options)
        except InvalidTask as error:
            self.add(str(document.get("key")), error)

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self._keys

    def __len__(self) -> int:
        with self._lock:
            self._keys.expire()
            return len(self._keys)
