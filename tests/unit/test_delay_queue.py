"""
The delay queue: what comes out when, what is dropped when it is full, and who is woken.
"""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mscheduler_sync._runtime.delay_queue import DelayQueue
from tests.support import wait_until

#: Far enough that no test lasts so long.
FAR_S = 10_000.0


def keys(queue: DelayQueue, count: int = 1_000, *, spread: int = 0) -> list[str]:
    """
    The keys that are due now, in the order in which they come out.
    """
    return [entry.key for entry in queue.take(count, 0, spread=spread)]


def test_only_due_keys_come_out() -> None:
    """
    A key comes out once it is due, and one that is due later stays.
    """
    now_s = time.monotonic()
    queue = DelayQueue(100)
    assert queue.push("later", now_s + FAR_S)
    assert queue.push("due", now_s - 1)
    assert keys(queue) == ["due"]
    assert keys(queue) == []
    assert "later" in queue
    assert "due" not in queue
    assert len(queue) == 1


def test_highest_priority_first_then_longest_due() -> None:
    """
    Among due keys the priority decides, and among equals the due time.
    """
    now_s = time.monotonic()
    queue = DelayQueue(100)
    queue.push("low, old", now_s - 30, 0)
    queue.push("high, new", now_s - 10, 2)
    queue.push("high, old", now_s - 20, 2)
    queue.push("below zero", now_s - 40, -1)
    queue.push("highest, not due", now_s + FAR_S, 9)
    assert keys(queue) == ["high, old", "high, new", "low, old", "below zero"]


def test_an_entry_tells_due_time_and_priority() -> None:
    """
    What was pushed comes out whole.
    """
    due_s = time.monotonic() - 5
    queue = DelayQueue(100)
    queue.push("one", due_s, 7)
    (entry,) = queue.take(1, 0)
    assert (entry.key, entry.due_s, entry.priority) == ("one", due_s, 7)


def test_take_returns_no_more_than_asked() -> None:
    """
    The others stay, in their order.
    """
    now_s = time.monotonic()
    queue = DelayQueue(100)
    for number in range(5):
        queue.push(str(number), now_s - 10 + number)
    assert keys(queue, 2) == ["0", "1"]
    assert keys(queue, 2) == ["2", "3"]
    assert keys(queue, 2) == ["4"]


@pytest.mark.parametrize("is_ready", [False, True], ids=["not looked at yet", "found due before"])
def test_pushing_a_key_again_moves_it(is_ready: bool) -> None:
    """
    The last push of a key counts: it can make it due earlier, later, or change its priority.
    """
    now_s = time.monotonic()
    queue = DelayQueue(100)
    queue.push("to later", now_s - 2)
    queue.push("to now", now_s + FAR_S)
    queue.push("to the front", now_s - 1, 0)
    queue.push("unchanged", now_s - 3, 1)
    if is_ready:
        assert queue.count_due() == 3
    queue.push("to later", now_s + FAR_S)
    queue.push("to now", now_s - 1, 5)
    queue.push("to the front", now_s - 1, 9)
    queue.push("unchanged", now_s - 3, 1)
    assert len(queue) == 4
    assert keys(queue) == ["to the front", "to now", "unchanged"]
    assert "to later" in queue


def test_a_key_that_came_out_may_come_in_again() -> None:
    """
    Taking a key forgets it.
    """
    now_s = time.monotonic()
    queue = DelayQueue(100)
    for _ in range(3):
        assert queue.push("one", now_s - 1)
        assert keys(queue) == ["one"]
    assert len(queue) == 0


@pytest.mark.parametrize("is_ready", [False, True], ids=["not looked at yet", "found due before"])
def test_a_discarded_key_does_not_come_out(is_ready: bool) -> None:
    """
    Discarding works for due keys, for later ones, and for unknown ones.
    """
    now_s = time.monotonic()
    queue = DelayQueue(100)
    queue.push("due", now_s - 2)
    queue.push("kept", now_s - 1)
    queue.push("later", now_s + FAR_S)
    if is_ready:
        assert queue.count_due() == 2
    for key in ("due", "later", "unknown"):
        queue.discard(key)
    assert queue.count_due() == 1
    assert len(queue) == 1
    assert keys(queue) == ["kept"]


def test_a_full_queue_drops_what_is_due_latest() -> None:
    """
    A key that is due earlier takes the place of later ones; the earliest dropped time is kept.
    """
    now_s = time.monotonic()
    queue = DelayQueue(10)
    for number in range(10):
        assert queue.push(f"later {number}", now_s + FAR_S + number)
    assert queue.dropped_from_s == float("inf")
    assert not queue.push("latest", now_s + FAR_S + 50)
    assert queue.dropped_from_s == now_s + FAR_S + 50
    assert not queue.push("later still", now_s + FAR_S + 60)
    assert queue.dropped_from_s == now_s + FAR_S + 50
    assert queue.push("due", now_s - 1)
    assert queue.dropped_from_s == now_s + FAR_S + 9
    assert "later 9" not in queue
    assert len(queue) == 10
    queue.forget_dropped()
    assert queue.dropped_from_s == float("inf")
    assert keys(queue) == ["due"]


def test_a_full_queue_drops_a_tenth_at_once_but_nothing_earlier() -> None:
    """
    Room is made for several, but never at the cost of what is due before the new key.
    """
    now_s = time.monotonic()
    queue = DelayQueue(50)
    for number in range(50):
        queue.push(f"later {number}", now_s + FAR_S + number)
    assert queue.push("new", now_s + FAR_S + 47.5)
    assert len(queue) == 49
    assert {"later 48", "later 49"}.isdisjoint(key for key in _all_keys() if key in queue)
    assert "later 47" in queue
    assert queue.dropped_from_s == now_s + FAR_S + 48


def _all_keys() -> list[str]:
    return [f"later {number}" for number in range(50)]


def test_a_full_queue_never_drops_a_due_key() -> None:
    """
    While everything in it is due, a new key is refused and remembered as dropped.
    """
    now_s = time.monotonic()
    queue = DelayQueue(10)
    for number in range(10):
        queue.push(f"due {number}", now_s - 10 + number)
    assert not queue.push("more urgent", now_s - 50, 99)
    assert queue.dropped_from_s == now_s - 50
    assert keys(queue) == [f"due {number}" for number in range(10)]


def test_a_full_queue_moves_the_keys_that_it_has() -> None:
    """
    A key that is in the queue needs no room.
    """
    now_s = time.monotonic()
    queue = DelayQueue(10)
    for number in range(10):
        queue.push(f"due {number}", now_s - 20 + number)
    assert queue.push("due 9", now_s - 100)
    assert queue.dropped_from_s == float("inf")
    assert keys(queue, 1) == ["due 9"]


def test_a_full_queue_counts_living_entries_only() -> None:
    """
    Moving and discarding keys uses up no room.
    """
    now_s = time.monotonic()
    queue = DelayQueue(10)
    for number in range(100):
        assert queue.push("moved", now_s + FAR_S - number)
        assert queue.push(f"gone {number}", now_s + FAR_S)
        queue.discard(f"gone {number}")
    assert len(queue) == 1
    assert queue.dropped_from_s == float("inf")


def test_moving_later_keys_keeps_the_heap_small() -> None:
    """
    Entries that were replaced before they were due are thrown out.
    """
    now_s = time.monotonic()
    queue = DelayQueue(100)
    for number in range(5_000):
        queue.push(str(number % 10), now_s + FAR_S + number)
    assert len(queue._later) <= 2 * 10 + 64


def test_moving_due_keys_keeps_the_heap_small() -> None:
    """
    Entries that were replaced while they waited for a slot are thrown out as well.
    """
    now_s = time.monotonic()
    queue = DelayQueue(100)
    queue.push("head", now_s - FAR_S, 1)
    for number in range(5_000):
        queue.push(str(number % 10), now_s - FAR_S + number)
        assert queue.count_due() <= 11
    assert len(queue._ready) <= 1_000


def test_equal_due_times_come_out_in_the_order_of_coming_in() -> None:
    """
    Without a spread the queue is fair among equals.
    """
    due_s = time.monotonic() - 1
    queue = DelayQueue(100)
    for number in range(20):
        queue.push(str(number), due_s)
    assert keys(queue) == [str(number) for number in range(20)]


def test_spread_picks_among_the_first_of_equal_priority() -> None:
    """
    With a spread, any of the first keys of one priority may come out, but no other.
    """
    now_s = time.monotonic()
    seen = set()
    for _ in range(100):
        queue = DelayQueue(100)
        for number in range(30):
            queue.push(str(number), now_s - 100 + number, 1)
        queue.push("lower", now_s - 200, 0)
        taken = keys(queue, 2, spread=10)
        assert len(set(taken)) == 2
        seen.update(taken)
    assert seen <= {str(number) for number in range(10)}
    assert len(seen) > 2


def test_spread_keeps_to_the_order_of_priority() -> None:
    """
    A key of higher priority comes out whatever the spread.
    """
    now_s = time.monotonic()
    for _ in range(20):
        queue = DelayQueue(100)
        queue.push("high", now_s - 1, 5)
        for number in range(10):
            queue.push(str(number), now_s - 100, 0)
        taken = keys(queue, 2, spread=50)
        assert taken[0] == "high"
        assert len(taken) == 2


def test_spread_loses_nothing() -> None:
    """
    What was looked at and not picked comes out later.
    """
    now_s = time.monotonic()
    queue = DelayQueue(1_000)
    names = {str(number) for number in range(200)}
    for name in names:
        queue.push(name, now_s - random.random(), random.choice([0, 1]))
    taken: list[str] = []
    while some := keys(queue, 7, spread=50):
        taken.extend(some)
    assert sorted(taken) == sorted(names)


def test_take_waits_for_a_key_to_become_due() -> None:
    """
    A waiting taker gets the key when its time has come, not before.
    """
    queue = DelayQueue(100)
    due_s = time.monotonic() + 0.05
    queue.push("soon", due_s)
    (entry,) = queue.take(1, 10)
    assert entry.key == "soon"
    assert time.monotonic() >= due_s


def test_a_waiting_taker_is_woken_by_an_earlier_key() -> None:
    """
    A key that is due before all others ends the wait of a taker that waits for those.
    """
    queue = DelayQueue(100)
    queue.push("later", time.monotonic() + FAR_S)
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(queue.take, 1, 60)
        wait_until(lambda: queue._changed._waiters, "the taker waits")  # type: ignore[attr-defined]
        queue.push("now", time.monotonic() - 1)
        assert [entry.key for entry in taking.result(10)] == ["now"]


def test_take_gives_up_after_its_timeout() -> None:
    """
    Without a due key it returns nothing, but only after the time-out.
    """
    queue = DelayQueue(100)
    queue.push("later", time.monotonic() + FAR_S)
    began_s = time.monotonic()
    assert queue.take(1, 0.05) == []
    assert time.monotonic() - began_s >= 0.05


def test_take_can_wait_for_ever() -> None:
    """
    An endless time-out is no overflow.
    """
    queue = DelayQueue(100)
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(queue.take, 1, float("inf"))
        wait_until(lambda: queue._changed._waiters, "the taker waits")  # type: ignore[attr-defined]
        queue.push("soon", time.monotonic() + 0.02)
        assert [entry.key for entry in taking.result(10)] == ["soon"]


def test_a_closed_queue_gives_nothing() -> None:
    """
    Closing wakes the taker; due keys stay inside.
    """
    queue = DelayQueue(100)
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(queue.take, 1, 60)
        wait_until(lambda: queue._changed._waiters, "the taker waits")  # type: ignore[attr-defined]
        queue.close()
        assert taking.result(10) == []
    queue.push("due", time.monotonic() - 1)
    assert queue.take(1, 60) == []
    assert len(queue) == 1


def test_each_key_comes_out_once_whoever_pushes() -> None:
    """
    Many threads push and one takes: nothing is lost, nothing comes twice.
    """
    queue = DelayQueue(10_000)
    wanted = {f"{worker}-{number}" for worker in range(4) for number in range(200)}
    start = threading.Barrier(4)

    def push(worker: int) -> None:
        start.wait(10)
        for number in range(200):
            queue.push(f"{worker}-{number}", time.monotonic() - random.random())

    taken: list[str] = []
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(push, range(4)))
        while len(taken) < len(wanted) and (some := queue.take(7, 5)):
            taken.extend(entry.key for entry in some)
    assert sorted(taken) == sorted(wanted)


@attrs.frozen
class Step:
    """
    One call of the queue.
    """

    name: str
    key: str = ""
    is_due: bool = True
    rank: int = 0
    priority: int = 0


STEPS = st.lists(
    st.one_of(
        st.builds(
            Step,
            st.just("push"),
            st.sampled_from("abcdefgh"),
            st.booleans(),
            st.integers(0, 5),
            st.integers(0, 2),
        ),
        st.builds(Step, st.just("discard"), st.sampled_from("abcdefgh")),
        st.builds(Step, st.just("take"), rank=st.integers(1, 4)),
        st.builds(Step, st.just("count")),
    ),
    max_size=40,
)


@given(STEPS)
def test_any_order_of_calls_agrees_with_a_plain_dict(steps: list[Step]) -> None:
    """
    Whatever is pushed, moved, discarded and taken: the queue does what a sorted dict would do.
    """
    now_s = time.monotonic()
    queue = DelayQueue(100)
    model: dict[str, tuple[int, float]] = {}
    for step in steps:
        due = {key for key, (_, due_s) in model.items() if due_s < now_s}
        if step.name == "push":
            due_s = now_s + (-FAR_S if step.is_due else FAR_S) + step.rank
            assert queue.push(step.key, due_s, step.priority)
            model[step.key] = (-step.priority, due_s)
        elif step.name == "discard":
            queue.discard(step.key)
            model.pop(step.key, None)
        elif step.name == "take":
            taken = keys(queue, step.rank)
            expected = sorted(model[key] for key in due)[: step.rank]
            assert set(taken) <= due
            assert [model.pop(key) for key in taken] == expected
        else:
            assert queue.count_due() == len(due)
        assert len(queue) == len(model)
        assert all(key in queue for key in model)


def test_what_was_taken_counts_until_the_taker_comes_back() -> None:
    """
    Between the queue and its slot a key is nowhere else: it must not look as if all was done.
    """
    queue = DelayQueue(10)
    assert queue.is_idle()
    queue.push("later", time.monotonic() + 60)
    assert queue.is_idle()
    queue.push("now", time.monotonic())
    assert not queue.is_idle()
    assert [entry.key for entry in queue.take(5, 1)] == ["now"]
    assert queue.count_due() == 0
    assert not queue.is_idle()
    assert queue.take(5, 0) == []
    assert queue.is_idle()
    queue.push("once more", time.monotonic())
    assert [entry.key for entry in queue.take(5, 1)] == ["once more"]
    queue.put_down()
    assert queue.is_idle()


# -- what is left to others ----------------------------------------------------------------------


def test_deferred_key_comes_out_later_and_is_due_before() -> None:
    """
    While it is left to others it is not taken, but nobody may call the queue idle.
    """
    queue = DelayQueue(10)
    now_s = time.monotonic()
    assert queue.push("k", now_s - 1, defer_s=1.2)
    assert queue.take(1, 0.0) == []
    assert (queue.count_due(), queue.is_idle()) == (0, False)
    assert [entry.key for entry in queue.take(1, 5.0)] == ["k"]
    assert time.monotonic() >= now_s + 0.2
    assert queue.take(1, 0.0) == []
    assert queue.is_idle()


def test_key_that_is_deferred_for_later_is_not_due() -> None:
    """
    What starts later is not due because it is left to others as well.
    """
    queue = DelayQueue(10)
    queue.push("k", time.monotonic() + FAR_S, defer_s=1.0)
    assert queue.is_idle()


def test_key_that_is_due_in_a_moment_is_due_for_who_asks_so() -> None:
    """
    A clock that lags behind makes what is due look as if it came in a moment.
    """
    queue = DelayQueue(10)
    queue.push("k", time.monotonic() + FAR_S)
    assert queue.is_idle()
    assert queue.is_idle(FAR_S - 10)
    assert not queue.is_idle(FAR_S + 10)


def test_deferred_key_that_is_due_is_not_dropped() -> None:
    """
    A full queue drops what is due latest, never what is due.
    """
    queue = DelayQueue(2)
    now_s = time.monotonic()
    queue.push("deferred", now_s - 1, defer_s=FAR_S)
    queue.push("b", now_s - 2)
    assert not queue.push("c", now_s - 3)
    assert "deferred" in queue


def test_deferred_key_that_is_told_again_keeps_its_turn() -> None:
    """
    The same news does not put it off again; news of another time replaces it.
    """
    queue = DelayQueue(10)
    due_s = time.monotonic() - 1
    queue.push("k", due_s, defer_s=1.0)
    queue.push("k", due_s, defer_s=FAR_S)
    assert [entry.key for entry in queue.take(1, 5.0)] == ["k"]
    queue.push("k", due_s, defer_s=FAR_S)
    queue.push("k", due_s + 0.1)
    assert [entry.key for entry in queue.take(1, 0.0)] == ["k"]
