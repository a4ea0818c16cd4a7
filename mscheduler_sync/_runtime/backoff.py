"""
Growing, jittered delays.
"""

from __future__ import annotations

import random


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
