"""
How hard others compete for the same tasks, learned from one's own lost claims alone.

The claimer teaches it, and asks how to pick; the intake asks how long to leave new tasks to others.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Final

import attrs
from cachetools import TTLCache

#: Bounds of the wait that grows with one's own lost claims, in seconds.
_FIRST_S, _CAP_S = 0.02, 1.0
#: A lone key that is lost doubles the wait and one that is won halves it: whatever the number of
#: idle consumers, their waits settle where about one claim per task is lost among all of them,
#: which is where two of them go at once.
_DECAY_ONE, _DECAY_MANY = 0.5, 0.9
#: There may be many others: the first lost claim makes three of four step back.
_FIRST_FACTOR: Final = 4
_SPREAD_FIRST, _SPREAD_CAP = 64, 2000
_LOST_BEFORE_S: Final = 60.0
#: Of the moving average of how long a claim takes.
_NEWEST_WEIGHS: Final = 0.2


@attrs.define(eq=False, repr=False)
class Contention:
    """
    Zero on a lone consumer. The claimer's thread tells it; any thread may ask.
    """

    _wait_s: float = attrs.field(init=False, default=0.0)
    _claim_s: float = attrs.field(init=False, default=0.0)
    #: The last check of many keys has shown that others take them.
    _sees_others: bool = attrs.field(init=False, default=False)
    #: From how many equal keys a batch is picked at random.
    spread: int = attrs.field(init=False, default=0)
    _lost_before: TTLCache[str, int] = attrs.field(
        init=False, factory=lambda: TTLCache(1000, _LOST_BEFORE_S, timer=time.monotonic)
    )

    @property
    def is_present(self) -> bool:
        return self._wait_s > 0.0

    def draw_wait_s(self) -> float:
        """
        Return how long to leave a lone key to others, in seconds, before it comes up again.

        At random: the longer the wait has grown, the fewer go at once (0.0). All others leave
        those the time to claim it.
        """
        if random.random() * self._wait_s < _FIRST_S:
            return 0.0
        return 2 * self._claim_s + random.random() * self._wait_s

    def claim_took(self, duration_s: float) -> None:
        """
        A claim was answered, and its result read, within *duration_s* seconds.
        """
        self._claim_s += _NEWEST_WEIGHS * (min(duration_s, _CAP_S) - self._claim_s)

    def checked(self, count: int, *, gone: int) -> None:
        """
        *count* keys were read before they were claimed, and so many were *gone*.
        """
        self._sees_others = count > 1 and gone > 0

    def won(self, keys: Sequence[str]) -> None:
        """
        *keys* were claimed together, and none was lost.
        """
        for key in keys:
            self._lost_before.pop(key, None)
        if len(keys) == 1:
            self._decay(_DECAY_ONE)
        elif not self._sees_others:
            self._decay(_DECAY_MANY)

    def lost(self, keys: Sequence[str], *, of: int) -> list[str]:
        """
        *keys* of a batch of so many were lost; return those that were lost before.
        """
        again = []
        for key in keys:
            times = self._lost_before.get(key, 0) + 1
            self._lost_before[key] = times
            if times > 1:
                again.append(key)
        # A key that is lost again and again is not for us: nobody competes for it.
        if 2 * (len(keys) - len(again)) >= of:
            first_s = _FIRST_FACTOR * _FIRST_S
            # The wait is for lone keys; of batches it only says that a check pays.
            grown_s = 2 * self._wait_s if of == 1 else self._wait_s
            self._wait_s = min(_CAP_S, max(first_s, grown_s))
            self.spread = min(_SPREAD_CAP, max(_SPREAD_FIRST, 2 * self.spread))
        return again

    def _decay(self, factor: float) -> None:
        decayed_s = self._wait_s * factor
        self._wait_s = decayed_s if decayed_s > _FIRST_S / 2 else 0.0
        self.spread = self.spread // 2 if self.spread > _SPREAD_FIRST else 0
