"""
Growing, jittered delays.
"""

from __future__ import annotations

import random
import time


def delay_s(failures: int, *, first_s: float, cap_s: float, factor: float = 2.0) -> float:
    """
    Return the pause before try number *failures* + 1: exponential up to *cap_s*, without jitter.
    """
    # The exponent is bounded: a float overflows at 2**1024.
    return min(cap_s, first_s * factor ** min(max(failures - 1, 0), 64))


def jittered(value: float, share: float = 0.5) -> float:
    """
    Return *value* less a random part of it, at most *share*.
    """
    # Not a secret: the spread only keeps workers apart.
    return value * (1.0 - share * random.random())


class Pauses:
    """
    The pauses of one caller who asks again and again, in seconds: growing up to *longest_s*.
    """

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._next_s = min(first_s, longest_s)
        self._longest_s = longest_s

    def next_s(self, deadline_s: float) -> float:
        """
        Return the next pause; it ends at the monotonic time *deadline_s* at the latest.
        """
        pause_s = min(self._next_s, max(0.0, deadline_s - time.monotonic()))
        self._next_s = min(self._longest_s, self._next_s * 1.5)
        return pause_s
