"""
Counted room for attempts.
"""

from __future__ import annotations

import threading


class Slots:
    """
    How many attempts may run at once. A counter, not threads; safe from any thread.
    """

    def __init__(self, size: int) -> None:
        self._changed = threading.Condition()
        # All under _changed.
        self._size = size
        self._taken = 0
        self._closed = False
        self._wanted = 1

    @property
    def size(self) -> int:
        with self._changed:
            return self._size

    @property
    def taken(self) -> int:
        with self._changed:
            return self._taken

    @property
    def free(self) -> int:
        with self._changed:
            return max(0, self._size - self._taken)

    def resize(self, size: int) -> None:
        """
        Change the number of slots. Running attempts are not touched.
        """
        with self._changed:
            self._size = size
            self._changed.notify_all()

    def wait_free(self, timeout_s: float, *, at_least: int = 1) -> int:
        """
        Wait up to *timeout_s* seconds for *at_least* free slots; return how many are free.

        Returns 0 at once when `close` was called.
        """
        with self._changed:
            # One taker at a time: who gives back need not wake it before it has enough.
            self._wanted = at_least
            self._changed.wait_for(
                lambda: self._closed or self._size - self._taken >= at_least, timeout_s
            )
            return 0 if self._closed else max(0, self._size - self._taken)

    def wait_empty(self, timeout_s: float) -> bool:
        """
        Wait up to *timeout_s* seconds until no slot is taken; return whether that is so.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._taken == 0, timeout_s)

    def take(self, count: int) -> None:
        with self._changed:
            self._taken += count

    def give_back(self, count: int = 1) -> None:
        with self._changed:
            self._taken -= count
            if self._taken == 0 or self._size - self._taken >= self._wanted:
                self._changed.notify_all()

    def close(self) -> None:
        """
        Wake whoever waits for a free slot; none will be free again.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
