"""
Placement: which worker should run a key, and the ring that says so, as this process knows it.

Ownership itself is decided in the database.
"""

from __future__ import annotations

import threading
import time
from typing import Final

import attrs

from mscheduler_sync._storage.statement import Document
from mscheduler_sync.pool import statements
from mscheduler_sync.pool.store import PoolStore

_POLYNOMIAL: Final = 0xC96C5795D7870F42  # ECMA-182, reflected
_MASK: Final = 0xFFFFFFFFFFFFFFFF


def _make_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ _POLYNOMIAL if value & 1 else value >> 1
        table.append(value)
    return tuple(table)


_TABLE: Final = _make_table()


def crc64(data: bytes) -> int:
    """
    Return the CRC-64/XZ of *data*.
    """
    value = _MASK
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ _MASK


def jump_hash(number: int, buckets: int) -> int:
    """
    Return the bucket of *number* among *buckets* (Lamping and Veach's jump consistent hash).
    """
    bucket, following = -1, 0
    while following < buckets:
        bucket = following
        number = (number * 2862933555777941757 + 1) & _MASK
        following = int((bucket + 1) * ((1 << 31) / ((number >> 33) + 1)))
    return bucket


@attrs.frozen
class Slot:
    """
    One slot of the ring.
    """

    worker: str
    node: str


@attrs.frozen
class Ring:
    """
    The workers in the order of their slots, as of *epoch*.
    """

    epoch: int = -1
    slots: tuple[Slot, ...] = ()

    def target(self, key_hash: int) -> Slot | None:
        """
        Return the slot of a key with the hash *key_hash*, or None without workers.
        """
        if not self.slots:
            return None
        return self.slots[jump_hash(key_hash, len(self.slots))]

    def number_of(self, worker: str) -> int | None:
        """
        Return the slot's number of *worker*, or None.
        """
        workers = [slot.worker for slot in self.slots]
        return workers.index(worker) if worker in workers else None


def hash_of(key: str) -> int:
    return crc64(key.encode())


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


@attrs.define(eq=False, repr=False)
class PoolView:
    """
    The last reading. Safe from any thread; never goes back to an earlier ring.
    """

    _store: PoolStore
    _lock: threading.Lock = attrs.field(init=False, factory=threading.Lock)
    # Under _lock.
    _seen: Seen = attrs.field(init=False, factory=Seen)

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
        document = self._store.read_one(statements.members.pool_document(self._store.pool))
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
    slots = tuple(Slot(str(one["worker"]), str(one["node"])) for one in document["ring"])
    return Seen(
        state=str(document["state"]),
        order=str(document.get("order", "slots")),
        ring=Ring(int(document["epoch"]), slots),
        at_s=at_s,
    )
