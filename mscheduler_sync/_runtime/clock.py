"""
The server's time, read from the local monotonic clock plus a measured offset.
"""

from __future__ import annotations

import datetime as dt
import threading
import time

#: Measure again after this long, in seconds.
STALE_AFTER_S = 60.0
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
#: Before this, a year cannot be written as a date; later ones are clamped.
_MAX_UNIX_S = (dt.datetime(9999, 12, 31, tzinfo=dt.timezone.utc) - _EPOCH).total_seconds()


class ServerClock:
    """
    An estimate of the server's clock that never runs ahead of it.

    The offset is taken when the reply arrives, so that the estimate lags by at
    most one round trip; a task that is due by this clock is due on the server.
    The wall clock is not read. All methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # All change together, under _lock.
        self._offset_s: float | None = None
        self._lag_s = 0.0
        self._measured_at_s = float("-inf")

    def set(
        self, server_time: dt.datetime, received_at_s: float, *, round_trip_s: float = 0.0
    ) -> None:
        """
        Take a measurement: the server said *server_time* in a reply received at *received_at_s*.
        """
        if server_time.tzinfo is None:
            server_time = server_time.replace(tzinfo=dt.timezone.utc)
        with self._lock:
            self._offset_s = (server_time - _EPOCH).total_seconds() - received_at_s
            self._measured_at_s = received_at_s
            self._lag_s = round_trip_s

    def invalidate(self) -> None:
        """
        Ask for a new measurement: the connection was lost, so the server may be another one.
        """
        with self._lock:
            self._measured_at_s = float("-inf")

    @property
    def stale(self) -> bool:
        """
        Whether a new measurement is wanted.
        """
        with self._lock:
            return time.monotonic() - self._measured_at_s > STALE_AFTER_S

    @property
    def lag_s(self) -> float:
        """
        How far the estimate may be behind the server, in seconds.
        """
        with self._lock:
            return self._lag_s

    @property
    def offset_s(self) -> float | None:
        """
        Server time (Unix seconds) minus monotonic time, or None before the first measurement.
        """
        with self._lock:
            return self._offset_s

    def now(self) -> dt.datetime:
        """
        Return the server's time, at most one round trip behind it.

        Raises:
            RuntimeError: If nothing was measured yet.
        """
        return self.at(time.monotonic())

    def at(self, monotonic_s: float) -> dt.datetime:
        """
        Return the server's time at the local monotonic time *monotonic_s*.
        """
        unix_s = min(max(monotonic_s + self._measured(), 0.0), _MAX_UNIX_S)
        return _EPOCH + dt.timedelta(seconds=unix_s)

    def monotonic_at(self, server_time: dt.datetime) -> float:
        """
        Return the local monotonic time, in seconds, at which the server will show *server_time*.
        """
        return (server_time - _EPOCH).total_seconds() - self._measured()

    def _measured(self) -> float:
        offset_s = self.offset_s
        if offset_s is None:
            msg = "the server's time was not measured yet"
            raise RuntimeError(msg)
        return offset_s
