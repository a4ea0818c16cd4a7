"""
Keys that become due later, and due ones that wait for a slot.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time

import attrs


@attrs.define(eq=False)
class Entry:
    """
    One key in the queue.
    """

    key: str
    #: When it becomes due, on the monotonic clock.
    due_s: float
    priority: int
    #: What whoever pushed it wants to be told again; of no meaning here.
    hint: object = None
    #: For so long after it is due it is left to others, in seconds.
    defer_s: float = 0.0
    #: False once it was taken, moved or dropped.
    live: bool = True
    #: It was found due, and waits for a slot.
    ready: bool = False


class DelayQueue:
    """
    A bounded ``heapq`` of keys by due time, and behind it one of due keys by priority.

    Pushing a key again replaces its time. When the queue is full, keys that are due
    latest are dropped, never due ones; `dropped_from_s` remembers the earliest of
    them, so that they are fetched again in time. Safe from any thread.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._changed = threading.Condition()
        # All under _changed. Heaps may hold dead entries; _entries holds only living ones.
        self._entries: dict[str, Entry] = {}
        self._later: list[tuple[float, int, Entry]] = []
        self._ready: list[tuple[int, float, int, Entry]] = []
        self._ready_count = 0
        self._in_hand = 0
        self._sequence = itertools.count()
        self._dropped_from_s = float("inf")
        self._closed = False

    def __len__(self) -> int:
        with self._changed:
            return len(self._entries)

    def __contains__(self, key: object) -> bool:
        with self._changed:
            return key in self._entries

    @property
    def dropped_from_s(self) -> float:
        """
        The earliest due time that was dropped since the last `forget_dropped`, or infinity.
        """
        with self._changed:
            return self._dropped_from_s

    def forget_dropped(self) -> None:
        with self._changed:
            self._dropped_from_s = float("inf")

    def push(
        self,
        key: str,
        due_s: float,
        priority: int = 0,
        *,
        hint: object = None,
        defer_s: float = 0.0,
    ) -> bool:
        """
        Add *key*, or move it; return whether it is in the queue now.

        It comes out with the *hint* of the last push, *defer_s* seconds after it is due; for
        `is_idle` it is due before.
        """
        with self._changed:
            old = self._entries.get(key)
            if old is not None:
                if old.due_s == due_s and old.priority == priority:
                    old.hint = hint
                    return True
                self._remove(old)
            elif len(self._entries) >= self._limit and not self._make_room(due_s):
                self._dropped_from_s = min(self._dropped_from_s, due_s)
                return False
            entry = Entry(key, due_s, priority, hint, defer_s)
            self._entries[key] = entry
            heapq.heappush(self._later, (due_s + defer_s, next(self._sequence), entry))
            if self._later[0][2] is entry:
                self._changed.notify_all()
            if len(self._later) + len(self._ready) > 2 * len(self._entries) + 64:
                self._later = [item for item in self._later if item[2].live]
                heapq.heapify(self._later)
                self._ready = [item for item in self._ready if item[3].live]
                heapq.heapify(self._ready)
            return True

    def discard(self, key: str) -> None:
        with self._changed:
            entry = self._entries.get(key)
            if entry is not None:
                self._remove(entry)

    def take(self, count: int, timeout_s: float, *, spread: int = 0) -> list[Entry]:
        """
        Wait up to *timeout_s* seconds for due keys; remove and return up to *count* of them.

        Highest priority first, then longest due. With *spread*, the keys are picked
        at random from the first *spread* of equal priority, so that several consumers
        that see the same keys do not all reach for the same ones.

        What is returned counts as due until the taker, of whom there is one, calls `put_down`
        or comes back.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._in_hand = 0
            while not self._closed:
                now_s = time.monotonic()
                self._promote(now_s)
                if self._ready:
                    taken = self._pop(count, spread)
                    self._in_hand = len(taken)
                    return taken
                wait_s = deadline_s - now_s
                if wait_s <= 0:
                    break
                if self._later:
                    wait_s = min(wait_s, self._later[0][0] - now_s)
                self._changed.wait(min(wait_s, threading.TIMEOUT_MAX))
            return []

    def put_down(self) -> None:
        """
        The taker has nothing in its hands any more.
        """
        with self._changed:
            self._in_hand = 0

    def count_due(self) -> int:
        """
        Return how many keys are due now.
        """
        with self._changed:
            self._promote(time.monotonic())
            return self._ready_count

    def is_idle(self, within_s: float = 0.0) -> bool:
        """
        Whether no key is due within *within_s* seconds, and none is in the hands of the taker.
        """
        with self._changed:
            now_s = time.monotonic()
            self._promote(now_s)
            if self._ready_count or self._in_hand:
                return False
            until_s = now_s + within_s
            return not any(entry.live and entry.due_s <= until_s for _, _, entry in self._later)

    def close(self) -> None:
        """
        Wake whoever waits in `take`; nothing comes out any more.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- under _changed ----------------------------------------------------------------------

    def _remove(self, entry: Entry) -> None:
        """
        Take *entry* out; its places in the heaps are passed over later.
        """
        entry.live = False
        self._ready_count -= entry.ready
        del self._entries[entry.key]

    def _promote(self, now_s: float) -> None:
        while self._later and (self._later[0][0] <= now_s or not self._later[0][2].live):
            due_s, number, entry = heapq.heappop(self._later)
            if entry.live:
                entry.ready = True
                self._ready_count += 1
                heapq.heappush(self._ready, (-entry.priority, due_s, number, entry))
        while self._ready and not self._ready[0][3].live:
            heapq.heappop(self._ready)

    def _pop(self, count: int, spread: int) -> list[Entry]:
        candidates: list[tuple[int, float, int, Entry]] = []
        wanted = max(count, spread)
        while self._ready and len(candidates) < wanted:
            item = heapq.heappop(self._ready)
            if not item[3].live:
                continue
            if len(candidates) >= count and item[0] != candidates[-1][0]:
                heapq.heappush(self._ready, item)
                break
            candidates.append(item)
        if len(candidates) > count:
            lowest = candidates[count - 1][0]
            fixed = [item for item in candidates if item[0] < lowest]
            equals = [item for item in candidates if item[0] == lowest]
            random.shuffle(equals)
            candidates = fixed + equals
            for item in candidates[count:]:
                heapq.heappush(self._ready, item)
            del candidates[count:]
        taken = [item[3] for item in candidates]
        for entry in taken:
            self._remove(entry)
        return taken

    def _make_room(self, due_s: float) -> bool:
        """
        Drop the tenth of the keys that is due latest, if *due_s* is earlier than those.
        """
        now_s = time.monotonic()
        self._promote(now_s)
        waiting = sorted(
            (entry for _, _, entry in self._later if entry.live and entry.due_s > now_s),
            key=lambda entry: entry.due_s,
        )
        if not waiting or waiting[-1].due_s <= due_s:
            return False
        surplus = waiting[-max(1, self._limit // 10) :]
        doomed = [entry for entry in surplus if entry.due_s > due_s]
        for entry in doomed:
            self._remove(entry)
        self._dropped_from_s = min(self._dropped_from_s, doomed[0].due_s)
        self._later = [item for item in self._later if item[2].live]
        heapq.heapify(self._later)
        return True
