"""
Growing and jittered delays.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mscheduler_sync._runtime import backoff


def test_grows_up_to_the_cap() -> None:
    """
    The first failure costs the first delay, each further one the double, up to the cap.
    """
    delays = [backoff.delay_s(n, first_s=1.0, cap_s=30.0) for n in range(1, 8)]
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


@pytest.mark.parametrize("failures", [-5, 0, 1])
def test_never_below_the_first_delay(failures: int) -> None:
    """
    Before the first failure, and with odd counts, the first delay stands.
    """
    assert backoff.delay_s(failures, first_s=2.0, cap_s=30.0) == 2.0


def test_a_cap_below_the_first_delay_wins() -> None:
    """
    The cap is the last word.
    """
    assert backoff.delay_s(1, first_s=60.0, cap_s=5.0) == 5.0


def test_factor_one_stays() -> None:
    """
    Without growth each delay is the first one.
    """
    assert backoff.delay_s(50, first_s=10.0, cap_s=60.0, factor=1.0) == 10.0


@given(
    failures=st.integers(0, 10**9),
    first_s=st.floats(0, 1e9),
    cap_s=st.floats(0, 1e9),
    factor=st.floats(1, 1000),
)
def test_any_numbers_give_a_delay_within_the_cap(
    failures: int, first_s: float, cap_s: float, factor: float
) -> None:
    """
    No count of failures and no growth factor overflows.
    """
    delay_s = backoff.delay_s(failures, first_s=first_s, cap_s=cap_s, factor=factor)
    assert 0.0 <= delay_s <= cap_s
    assert delay_s >= min(first_s, cap_s)


@given(value=st.floats(0, 1e9), share=st.floats(0, 1))
def test_jitter_only_takes_away(value: float, share: float) -> None:
    """
    The result lies between the value less the share and the value.
    """
    result = backoff.jittered(value, share)
    assert value * (1 - share) * (1 - 1e-12) <= result <= value


def test_jitter_spreads() -> None:
    """
    Two workers seldom wait equally long.
    """
    assert len({backoff.jittered(1.0) for _ in range(50)}) > 40
