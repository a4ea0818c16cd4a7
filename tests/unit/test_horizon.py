"""
How far a pass looks ahead, from the leases that were seen.
"""

from __future__ import annotations

import datetime as dt

import pytest

from mscheduler_sync._runtime.clock import ServerClock
from mscheduler_sync._stages.horizon import (
    LEASE_WINDOW_S,
    LONGEST_HORIZON_S,
    SHORTEST_HORIZON_S,
    Horizon,
)
from tests.support import Document


def task(lease_ms: object) -> Document:
    return {"task_option": {"worker_timeout_ms": lease_ms}}


@pytest.mark.parametrize(
    ("seen", "expected_s"),
    [
        ([], LONGEST_HORIZON_S),
        ([task(60_000)], 30.0),
        ([task(10_000)], 5.0),
        ([task(10_000), task(2_000), task(8_000)], 1.0),
        ([task(1)], SHORTEST_HORIZON_S),
        ([task(86_400_000)], LONGEST_HORIZON_S),
        ([task("60000"), task(None), {}, {"task_option": 7}], LONGEST_HORIZON_S),
    ],
)
def test_half_the_shortest_lease(seen: list[Document], expected_s: float) -> None:
    """
    Within bounds, whatever the order; what is no lease is passed over.
    """
    horizon = Horizon()
    for fields in seen:
        horizon.observe(fields)
    assert horizon.length_s == expected_s


def test_says_whether_it_became_shorter() -> None:
    """
    Only a lease that is shorter than all, and than twice the longest horizon, changes it.
    """
    horizon = Horizon()
    leases = [60_000, 59_000, 59_000, 59_500, 100, 99]
    assert [horizon.observe(task(lease_ms)) for lease_ms in leases] == [
        False,
        True,
        False,
        False,
        True,
        True,
    ]


def test_forgets_a_lease_after_one_to_two_windows() -> None:
    """
    A short lease counts for its window and the next one, then only what was seen since.
    """
    now_s = 1000.0
    horizon = Horizon(timer=lambda: now_s)
    horizon.observe(task(2_000))
    now_s += LEASE_WINDOW_S + 1
    assert not horizon.observe(task(10_000))
    assert horizon.length_s == 1.0
    now_s += LEASE_WINDOW_S + 1
    assert not horizon.observe(task(20_000))
    assert horizon.length_s == 5.0


def test_end_is_in_the_servers_time() -> None:
    """
    The server's time now, and the horizon.
    """
    clock = ServerClock()
    noon = dt.datetime(2031, 5, 6, 12, tzinfo=dt.timezone.utc)
    clock.set(noon, received_at_s=100.0)
    horizon = Horizon(timer=lambda: 101.0)
    horizon.observe(task(8_000))
    end = noon + dt.timedelta(seconds=1 + 4)
    assert horizon.end(clock) == end
    later = end + dt.timedelta(milliseconds=1)
    assert [horizon.reaches(due, clock) for due in (end, later, "odd", None)] == [
        True,
        False,
        True,
        True,
    ]
