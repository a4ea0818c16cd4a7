"""
The ring: hashing and slots.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mscheduler_sync.pool.ring import Ring, Slot, crc64, hash_of, jump_hash

SIZES = (1, 2, 3, 4, 5, 8, 16, 100)
BUCKETS = {
    "alpha": (0, 0, 2, 2, 2, 2, 2, 75),
    "beta": (0, 1, 1, 1, 1, 1, 13, 41),
    "job1": (0, 0, 2, 2, 2, 2, 2, 2),
    "job2": (0, 0, 0, 3, 3, 5, 9, 69),
    "": (0, 0, 0, 0, 0, 0, 0, 0),
}


def after_leave(workers: Iterable[str], leaving: str) -> list[str]:
    """
    Return the order of slots after *leaving* has left: the last one moves into the gap.

    What `statements.members.leave` does in the database; for tests and explanations.
    """
    order = list(workers)
    if leaving in order:
        slot = order.index(leaving)
        last = order.pop()
        if slot < len(order):
            order[slot] = last
    return order


def test_the_checksum_is_that_of_the_original() -> None:
    """
    CRC-64/XZ, by its check value.
    """
    assert crc64(b"123456789") == 0x995DC9BBDF1939FA
    assert crc64(b"") == 0


@pytest.mark.parametrize(("key", "buckets"), BUCKETS.items())
def test_keys_fall_into_the_buckets_of_the_original(key: str, buckets: tuple[int, ...]) -> None:
    """
    The same key goes to the same place as in Pulse, for rings of every size.
    """
    assert tuple(jump_hash(hash_of(key), size) for size in SIZES) == buckets


@given(st.integers(0, 2**64 - 1), st.integers(1, 200))
def test_a_larger_ring_moves_keys_only_to_the_new_slot(number: int, size: int) -> None:
    """
    What does not move to the new last slot stays where it is.
    """
    before, after = jump_hash(number, size), jump_hash(number, size + 1)
    assert 0 <= before < size
    assert after in {before, size}


@pytest.mark.parametrize("leaving", range(10))
def test_few_keys_move_whichever_worker_leaves(leaving: int) -> None:
    """
    One of ten workers leaves: about two tenths of the keys move at most, and all of its own.
    """
    workers = [f"w{n}" for n in range(10)]
    rest = after_leave(workers, f"w{leaving}")
    assert sorted(rest) == sorted(set(workers) - {f"w{leaving}"})
    before = Ring(1, tuple(Slot(name, "n") for name in workers))
    after = Ring(2, tuple(Slot(name, "n") for name in rest))
    hashes = [hash_of(f"key-{n}") for n in range(4000)]
    moved = sum(before.target(one) != after.target(one) for one in hashes)
    assert 0.05 < moved / len(hashes) < 0.25


def test_an_empty_ring_has_no_target() -> None:
    """
    Without workers there is no place for any key.
    """
    assert Ring().target(hash_of("a")) is None
    assert Ring(1, (Slot("w", "n"),)).number_of("other") is None


def test_nobody_leaves_a_ring_twice() -> None:
    """
    A worker that is not in the ring changes nothing by leaving.
    """
    assert after_leave(["a", "b"], "c") == ["a", "b"]
    assert after_leave(["a"], "a") == []
