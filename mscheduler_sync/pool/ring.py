"""
Placement: which worker should run a key. Pure; ownership itself is decided in the database.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import attrs

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
class Place:
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
    places: tuple[Place, ...] = ()

    def target(self, key_hash: int) -> Place | None:
        """
        Return where a key with the hash *key_hash* belongs, or None without workers.
        """
        if not self.places:
            return None
        return self.places[jump_hash(key_hash, len(self.places))]

    def slot_of(self, worker: str) -> int | None:
        for slot, place in enumerate(self.places):
            if place.worker == worker:
                return slot
        return None

    def nodes(self) -> set[str]:
        return {place.node for place in self.places}


def hash_of(key: str) -> int:
    return crc64(key.encode())


def after_leave(workers: Iterable[str], leaving: str) -> list[str]:
    """
    Return the order of slots after *leaving* has left: the last one moves into the gap.

    What `statements.leave` does in the database; for tests and explanations.
    """
    order = list(workers)
    if leaving in order:
        slot = order.index(leaving)
        last = order.pop()
        if slot < len(order):
            order[slot] = last
    return order
