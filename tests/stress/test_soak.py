"""
A short soak; ``make soak`` runs long ones.
"""

from __future__ import annotations

import random

import pytest

from tests.soak import soak


@pytest.mark.timeout(400)
def test_a_shaken_fleet_keeps_the_guarantees() -> None:
    """
    A minute of kills, freezes, stops, cuts and restarts loses nothing and doubles nothing.
    """
    done = soak(1.0, random.SystemRandom().randrange(1_000_000), quiet=True)
    assert done["kill"] > 0
