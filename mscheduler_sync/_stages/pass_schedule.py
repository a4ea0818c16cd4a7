"""
When the fetcher reads the database, and what: decided from what it is told, without lock and clock.
"""

from __future__ import annotations

from typing import Final

import attrs

from mscheduler_sync._runtime import backoff

#: More lookups than this at once, and a whole pass is cheaper.
MOST_LOOKUPS: Final = 1000


@attrs.frozen
class Round:
    """
    What the fetcher reads next: single documents first, then perhaps all routes.
    """

    #: `_id` -> whether another program has written the document.
    lookups: dict[object, bool]
    is_pass: bool


@attrs.define(eq=False, repr=False, kw_only=True)
class PassSchedule:
    """
    The fetcher tells it what happens and asks it for the next round; under the fetcher's lock.

    Times are monotonic, in seconds. *dropped_from_s* is from when on is due what found
    no room in the delay queue since the last pass, or infinity.
    """

    _poll_interval_s: float
    #: Passes alone must find everything: there is no change stream.
    is_polling: bool = attrs.field(init=False, default=True)
    #: How many passes were done, and whether one is under way.
    passes: int = attrs.field(init=False, default=0)
    in_pass: bool = attrs.field(init=False, default=False)
    _requested: bool = attrs.field(init=False, default=True)
    _lookups: dict[object, bool] = attrs.field(init=False, factory=dict)
    _low_in_pass: bool = attrs.field(init=False, default=False)
    #: From when on is due what the last pass has left in the database.
    _left_from_s: float = attrs.field(init=False, default=float("inf"))
    #: When the next of what was left, or dropped, comes due: a pass of its own brings it. What
    #: was due already when it was left waits until the queue runs low.
    _left_due_s: float = attrs.field(init=False, default=float("inf"))
    _began_s: float = attrs.field(init=False, default=float("-inf"))
    _next_pass_s: float = attrs.field(init=False, default=float("-inf"))

    def request_pass(self) -> None:
        self._requested = True

    def request_lookup(self, document_id: object, *, is_foreign: bool) -> None:
        if len(self._lookups) < MOST_LOOKUPS:
            self._lookups[document_id] = is_foreign or self._lookups.get(document_id, False)
        else:
            self._requested = True

    def queue_low(self, now_s: float, *, dropped_from_s: float) -> bool:
        """
        The delay queue runs low of due keys; return whether that calls for a pass.
        """
        if self.in_pass:
            # It brings more by itself, perhaps not enough.
            self._low_in_pass = True
            return False
        is_more_due = min(self._left_from_s, dropped_from_s) <= now_s
        self._requested = self._requested or is_more_due
        return is_more_due

    def next_round(self, now_s: float, *, horizon_s: float, dropped_from_s: float) -> Round | float:
        """
        Return what is to be read now, which begins with that, or for how long nothing is.
        """
        if dropped_from_s > now_s:
            self._left_due_s = min(self._left_due_s, dropped_from_s)
        pass_s = min(self._next_pass_s, self._began_s + horizon_s, self._left_due_s)
        is_pass = self._requested or pass_s <= now_s
        if not (is_pass or self._lookups):
            return pass_s - now_s
        following = Round(self._lookups, is_pass)
        self._lookups = {}
        self._requested = False
        if is_pass:
            self.in_pass = True
            self._began_s = now_s
            self._left_from_s = self._left_due_s = float("inf")
        return following

    def pass_ended(
        self,
        now_s: float,
        *,
        horizon_s: float,
        left_from_s: float,
        dropped_from_s: float,
        is_low: bool,
    ) -> None:
        """
        All routes were read; what is due from *left_from_s* on was left in the database.

        *is_low* says whether the queue is low of due keys still.
        """
        self.in_pass = False
        self.passes += 1
        self._left_from_s = left_from_s
        if left_from_s > now_s:
            self._left_due_s = left_from_s
        pause_s = min(horizon_s, self._poll_interval_s) if self.is_polling else horizon_s
        self._next_pass_s = now_s + backoff.jittered(pause_s, 0.1)
        if self._low_in_pass and is_low:
            self.queue_low(now_s, dropped_from_s=dropped_from_s)
        self._low_in_pass = False

    def round_failed(self) -> None:
        """
        What it was to find is found by the next pass.
        """
        self.in_pass = self._low_in_pass = False
        self._requested = True
