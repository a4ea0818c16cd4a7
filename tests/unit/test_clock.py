"""
The server's clock as estimated here: never ahead, never from the wall clock, never out of range.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable

import pytest

from mscheduler_sync._runtime.clock import STALE_AFTER_S, ServerClock

UTC = dt.timezone.utc
NOON = dt.datetime(2031, 5, 6, 12, tzinfo=UTC)


def test_knows_nothing_before_the_first_measurement() -> None:
    """
    Asking too early is an error, not a guess from the wall clock.
    """
    clock = ServerClock()
    asks: list[Callable[[], object]] = [
        clock.now,
        lambda: clock.at(1.0),
        lambda: clock.monotonic_at(NOON),
    ]
    for ask in asks:
        with pytest.raises(RuntimeError, match="not measured yet"):
            ask()
    assert clock.offset_s is None
    assert clock.stale


def test_moves_with_the_monotonic_clock() -> None:
    """
    From a measurement on, the time is the server's plus what has passed since the reply.
    """
    clock = ServerClock()
    clock.set(NOON, 1_000.0)
    assert clock.at(1_000.0) == NOON
    assert clock.at(1_030.5) == NOON + dt.timedelta(seconds=30.5)
    assert clock.at(999.0) == NOON - dt.timedelta(seconds=1)
    assert clock.at(1_000.0).tzinfo == UTC


def test_is_never_ahead_of_the_server() -> None:
    """
    The offset counts from the reply's arrival, so that now lies between the server's time and ours.
    """
    clock = ServerClock()
    received_s = time.monotonic()
    clock.set(NOON, received_s)
    now = clock.now()
    assert NOON <= now <= NOON + dt.timedelta(seconds=time.monotonic() - received_s + 0.001)


def test_the_way_back_is_exact() -> None:
    """
    `monotonic_at` undoes `at`, and takes times of any zone.
    """
    clock = ServerClock()
    clock.set(NOON, 500.0)
    assert clock.monotonic_at(NOON) == pytest.approx(500.0)
    later = (NOON + dt.timedelta(hours=1)).astimezone(dt.timezone(dt.timedelta(hours=9)))
    assert clock.monotonic_at(later) == pytest.approx(4_100.0)
    assert clock.monotonic_at(clock.at(777.25)) == pytest.approx(777.25)


def test_a_naive_server_time_is_utc() -> None:
    """
    The driver gives naive times to clients that did not ask for aware ones.
    """
    clock = ServerClock()
    clock.set(NOON.replace(tzinfo=None), 10.0)
    assert clock.at(10.0) == NOON


def test_an_aware_server_time_of_another_zone_is_the_same_moment() -> None:
    """
    Only the moment counts, not how it is written.
    """
    clock = ServerClock()
    clock.set(NOON.astimezone(dt.timezone(dt.timedelta(hours=-5))), 10.0)
    assert clock.at(10.0) == NOON


def test_a_new_measurement_replaces_the_old_one() -> None:
    """
    After a failover the new server's clock counts, also when it is behind.
    """
    clock = ServerClock()
    clock.set(NOON, 10.0)
    clock.set(NOON - dt.timedelta(minutes=3), 11.0)
    assert clock.at(11.0) == NOON - dt.timedelta(minutes=3)


def test_ages_and_can_be_made_stale() -> None:
    """
    A measurement serves on, but a new one is wanted after a minute and after a lost connection.
    """
    clock = ServerClock()
    clock.set(NOON, time.monotonic())
    assert not clock.stale
    clock.invalidate()
    assert clock.stale
    assert clock.now() >= NOON
    clock.set(NOON, time.monotonic() - STALE_AFTER_S - 1)
    assert clock.stale


@pytest.mark.parametrize(
    ("monotonic_s", "expected"),
    [
        (1e300, dt.datetime(9999, 12, 31, tzinfo=UTC)),
        (float("inf"), dt.datetime(9999, 12, 31, tzinfo=UTC)),
        (-1e300, dt.datetime(1970, 1, 1, tzinfo=UTC)),
    ],
)
def test_stays_within_what_a_date_can_hold(monotonic_s: float, expected: dt.datetime) -> None:
    """
    A time beyond all years is clamped instead of raising.
    """
    clock = ServerClock()
    clock.set(NOON, 0.0)
    assert clock.at(monotonic_s) == expected


def test_does_not_read_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A wall clock that is set wrong, or set while we run, changes nothing.
    """
    clock = ServerClock()
    clock.set(NOON, time.monotonic())
    monkeypatch.setattr("time.time", lambda: 0.0)
    now = clock.now()
    assert NOON <= now < NOON + dt.timedelta(minutes=1)
