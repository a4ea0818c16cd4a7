"""
Counts what a client says to the server, and the claims that a consumer loses.
"""

from __future__ import annotations

import collections
import logging
import threading

from pymongo import monitoring


class CommandCounter(monitoring.CommandListener):
    """
    Counts commands by name, and the events that change streams were handed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # All under _lock.
        self._counts: collections.Counter[str] = collections.Counter()
        self._events = 0

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        with self._lock:
            self._counts[event.command_name] += 1

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        if event.command_name != "getMore":
            return
        events = len(event.reply.get("cursor", {}).get("nextBatch", ()))
        with self._lock:
            self._events += events

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        pass

    def take(self) -> tuple[dict[str, int], int]:
        """
        Return the counts and the events since the last call.
        """
        with self._lock:
            counts, self._counts = dict(self._counts), collections.Counter()
            events, self._events = self._events, 0
        return counts, events


def without_get_more(commands: dict[str, int]) -> int:
    """
    How many commands there were; a waiting getMore of a change stream costs nothing and is apart.
    """
    return sum(count for name, count in commands.items() if name != "getMore")


class LostClaims(logging.Handler):
    """
    Counts lost claims in the claimer's debug log. Attach with `attach`, once per process.
    """

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "event", None) == "claims_lost":
            self.count += int(getattr(record, "count", 0))

    def attach(self) -> None:
        log = logging.getLogger("mscheduler_sync.claim")
        log.setLevel(logging.DEBUG)
        log.addHandler(self)
        log.propagate = False

    def detach(self) -> None:
        log = logging.getLogger("mscheduler_sync.claim")
        log.removeHandler(self)
        log.setLevel(logging.NOTSET)
        log.propagate = True
