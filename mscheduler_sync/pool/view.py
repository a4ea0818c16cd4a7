"""
What this process knows of the pool's own document: its state and its ring.
"""

from __future__ import annotations

import threading
import time

import attrs

from mscheduler_sync.pool import statements
from mscheduler_sync.pool.ring import Place, Ring
from mscheduler_sync.pool.statements import Document
from mscheduler_sync.pool.store import PoolStore


@attrs.frozen
class Seen:
    """
    The pool's document as it was at a time.
    """

    #: open, closing, or gone: a shutdown has removed it.
    state: str = "open"
    order: str = "slots"
    ring: Ring = attrs.field(factory=Ring)
    at_s: float = float("-inf")


class PoolView:
    """
    The last reading. Safe from any thread; never goes back to an earlier ring.
    """

    def __init__(self, store: PoolStore, pool: str) -> None:
        self._store = store
        self._pool = pool
        self._lock = threading.Lock()
        # Under _lock.
        self._seen = Seen()

    @property
    def seen(self) -> Seen:
        with self._lock:
            return self._seen

    @property
    def ring(self) -> Ring:
        return self.seen.ring

    def epoch(self) -> int:
        return self.seen.ring.epoch

    def refresh(self, *, older_than_s: float = 0.0) -> Seen:
        """
        Read the document again unless that was done within *older_than_s* seconds.
        """
        seen = self.seen
        if older_than_s > 0 and time.monotonic() - seen.at_s < older_than_s:
            return seen
        began_s = time.monotonic()
        document = self._store.read_one(statements.pool_document(self._pool))
        fresh = _seen(document, began_s)
        with self._lock:
            if fresh.state != "open" or fresh.ring.epoch >= self._seen.ring.epoch:
                self._seen = fresh
            else:
                # A slow answer, or a pool that was removed and made anew.
                is_new_pool = began_s > self._seen.at_s
                self._seen = fresh if is_new_pool else self._seen
            return self._seen


def _seen(document: Document | None, at_s: float) -> Seen:
    if document is None:
        return Seen(state="gone", at_s=at_s)
    places = tuple(Place(str(one["worker"]), str(one["node"])) for one in document["ring"])
    return Seen(
        state=str(document["state"]),
        order=str(document.get("order", "slots")),
        ring=Ring(int(document["epoch"]), places),
        at_s=at_s,
    )
