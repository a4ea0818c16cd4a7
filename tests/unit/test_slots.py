"""
Slots: how many are free, who is woken, and what closing does.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mscheduler_sync._runtime.slots import Slots
from tests.support import wait_until


def numbers(slots: Slots) -> tuple[int, int, int]:
    return slots.size, slots.taken, slots.free


def wait_for_waiter(slots: Slots) -> None:
    wait_until(lambda: slots._changed._waiters, "somebody waits")  # type: ignore[attr-defined]


def test_taking_and_giving_back_are_counted() -> None:
    """
    Size, taken and free always add up.
    """
    slots = Slots(3)
    assert numbers(slots) == (3, 0, 3)
    slots.take(2)
    assert numbers(slots) == (3, 2, 1)
    slots.give_back()
    assert numbers(slots) == (3, 1, 2)
    slots.give_back(0)
    slots.give_back(1)
    assert numbers(slots) == (3, 0, 3)


def test_shrinking_below_what_is_taken_leaves_none_free() -> None:
    """
    Running attempts keep their slots; there is never less than nothing free.
    """
    slots = Slots(4)
    slots.take(3)
    slots.resize(1)
    assert numbers(slots) == (1, 3, 0)
    assert slots.wait_free(0) == 0
    slots.give_back(3)
    assert slots.wait_free(0) == 1


def test_waiting_with_free_slots_returns_their_number_at_once() -> None:
    """
    There is nothing to wait for.
    """
    slots = Slots(5)
    slots.take(2)
    assert slots.wait_free(60) == 3


def test_waiting_ends_after_the_timeout() -> None:
    """
    A wait that is not fulfilled says how many are free nevertheless.
    """
    slots = Slots(3)
    slots.take(2)
    began_s = time.monotonic()
    assert slots.wait_free(0.05, at_least=2) == 1
    assert time.monotonic() - began_s >= 0.05


def test_size_zero_never_has_a_free_slot() -> None:
    """
    Nothing is claimed with no workers, until there are some again.
    """
    slots = Slots(0)
    assert slots.wait_free(0) == 0
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(slots.wait_free, 60)
        wait_for_waiter(slots)
        slots.resize(2)
        assert waiting.result(10) == 2


def test_a_waiter_wakes_once_enough_were_given_back() -> None:
    """
    A wait for two slots is not fulfilled by one.
    """
    slots = Slots(2)
    slots.take(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(slots.wait_free, 60, at_least=2)
        wait_for_waiter(slots)
        slots.give_back()
        assert not waiting.done()
        slots.give_back()
        assert waiting.result(10) == 2


def test_waiting_until_none_is_taken() -> None:
    """
    `wait_empty` says whether all were given back in time.
    """
    slots = Slots(2)
    assert slots.wait_empty(0)
    slots.take(2)
    assert not slots.wait_empty(0.01)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(slots.wait_empty, 60)
        wait_for_waiter(slots)
        slots.give_back()
        slots.give_back()
        assert waiting.result(10)


def test_waiting_until_none_is_taken_with_no_slots_left() -> None:
    """
    The last attempt is seen to end also where nothing may be claimed any more.
    """
    slots = Slots(1)
    slots.take(1)
    slots.resize(0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(slots.wait_empty, 60)
        wait_for_waiter(slots)
        slots.give_back()
        assert waiting.result(10)


@pytest.mark.parametrize("taken", [0, 2])
def test_closing_wakes_the_waiters_and_frees_nothing_any_more(taken: int) -> None:
    """
    After closing no slot is handed out, but those taken can still be given back and awaited.
    """
    slots = Slots(2)
    slots.take(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(slots.wait_free, 60)
        wait_for_waiter(slots)
        slots.close()
        assert waiting.result(10) == 0
    slots.give_back(2 - taken)
    assert slots.wait_free(60) == 0
    assert slots.wait_empty(0) == (taken == 0)
    slots.give_back(taken)
    assert slots.wait_empty(0)


def test_many_threads_leave_the_count_right() -> None:
    """
    Taking and giving back from many threads loses no slot.
    """
    slots = Slots(8)
    start = threading.Barrier(8)

    def use(_: int) -> None:
        start.wait(10)
        for _ in range(200):
            slots.take(1)
            slots.give_back()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(8)))
    assert numbers(slots) == (8, 0, 8)
