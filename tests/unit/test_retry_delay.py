"""
How long after a failure a task may run again.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mscheduler_sync._stages.attempt import Failed, Outcome, Released, Snoozed, Succeeded
from mscheduler_sync._stages.pending import retry_delay_s
from mscheduler_sync._storage import statements
from mscheduler_sync._storage.expressions import MAX_DURATION_MS
from mscheduler_sync.model import TaskOptions

TEN_YEARS_S = 10 * 366 * 86_400.0
FAILED = Failed("ValueError: x")


def options(**changes: Any) -> TaskOptions:
    plain = TaskOptions(
        priority=0,
        concurrency=1,
        lease=60.0,
        heartbeat=20.0,
        worker_ids=(),
        max_attempts=3,
        retry_delay=10.0,
        retry_backoff=1.0,
        retry_max_delay=None,
        retry_jitter=0.0,
        retry_scope="task",
        timeout=None,
        keep_finished=None,
    )
    return attrs.evolve(plain, **changes)


def delays(count: int, **changes: Any) -> list[float]:
    return [retry_delay_s(options(**changes), number, FAILED) for number in range(1, count + 1)]


def test_without_growth_each_pause_is_the_same() -> None:
    """
    The default is the crate's ten seconds.
    """
    assert delays(3) == [10.0, 10.0, 10.0]


def test_the_pause_grows_by_the_factor() -> None:
    """
    The first failure costs the plain delay, each further one the factor more.
    """
    assert delays(4, retry_backoff=3.0) == [10.0, 30.0, 90.0, 270.0]


def test_the_cap_ends_the_growth() -> None:
    """
    No pause is longer than the cap, the first one included.
    """
    assert delays(4, retry_backoff=3.0, retry_max_delay=50.0) == [10.0, 30.0, 50.0, 50.0]
    assert delays(2, retry_max_delay=4.0) == [4.0, 4.0]
    assert delays(2, retry_max_delay=0.0) == [0.0, 0.0]


def test_no_delay_stays_none_whatever_the_factor() -> None:
    """
    Zero times anything is zero.
    """
    assert delays(3, retry_delay=0.0, retry_backoff=1000.0) == [0.0, 0.0, 0.0]


def test_growth_beyond_all_numbers_ends_at_ten_years() -> None:
    """
    A thousand to the power of a hundred is no overflow.
    """
    assert retry_delay_s(options(retry_backoff=1000.0), 101, FAILED) == TEN_YEARS_S
    assert retry_delay_s(options(retry_backoff=1000.0), 10**9, FAILED) == TEN_YEARS_S


def test_the_function_may_say_how_long() -> None:
    """
    Its own delay replaces the task's, without growth, cap or jitter.
    """
    outcome = Failed("RetryLater: x", delay_s=7.5)
    chosen = options(retry_backoff=5.0, retry_max_delay=1.0, retry_jitter=1.0)
    assert retry_delay_s(chosen, 4, outcome) == 7.5
    assert retry_delay_s(chosen, 4, Failed("RetryLater: x", delay_s=0.0)) == 0.0


@pytest.mark.parametrize("outcome", [Succeeded(1, 7), Released("shutdown"), Snoozed(60.0)])
def test_only_failures_have_a_pause(outcome: Outcome) -> None:
    """
    What ends otherwise is not tried again on account of a failure.
    """
    assert retry_delay_s(options(), 1, outcome) == 0.0


def test_jitter_spreads_within_its_share() -> None:
    """
    The pause varies by at most the share, in both directions.
    """
    seen = [retry_delay_s(options(retry_jitter=0.2), 1, FAILED) for _ in range(200)]
    assert all(8.0 <= delay <= 12.0 for delay in seen)
    assert min(seen) < 9.5
    assert max(seen) > 10.5


def test_the_cap_counts_with_jitter_too() -> None:
    """
    What was called the longest pause is the longest pause.
    """
    chosen = options(retry_delay=10.0, retry_max_delay=10.0, retry_jitter=0.5)
    assert all(retry_delay_s(chosen, 1, FAILED) <= 10.0 for _ in range(200))


@given(
    number=st.integers(1, 10**6),
    retry_delay=st.floats(0, 100 * 366 * 86_400.0),
    backoff=st.floats(1, 1000),
    cap=st.none() | st.floats(0, 100 * 366 * 86_400.0),
    jitter=st.floats(0, 1),
)
def test_any_options_make_a_pause_that_a_statement_can_hold(
    number: int, retry_delay: float, backoff: float, cap: float | None, jitter: float
) -> None:
    """
    Whatever stands in a document: the pause is not negative and within what dates can hold.
    """
    delay_s = retry_delay_s(
        options(
            retry_delay=retry_delay,
            retry_backoff=backoff,
            retry_max_delay=cap,
            retry_jitter=jitter,
        ),
        number,
        FAILED,
    )
    assert 0.0 <= delay_s <= MAX_DURATION_MS / 1000
    statements.attempts.fail(
        [("key", "id")], [statements.attempts.Failure("x", round(delay_s * 1000))]
    )
    assert dt.timedelta(seconds=delay_s).days < 100 * 366 + 1
