"""
How long a consumer leaves tasks to others, from what it has won and lost itself.
"""

from __future__ import annotations

import random
import statistics

import pytest

from mscheduler_sync._stages.contention import Contention


def test_lone_consumer_waits_for_nothing() -> None:
    """
    Nothing lost, nothing felt.
    """
    contention = Contention()
    for number in range(10):
        contention.won([f"k{number}"])
    assert not contention.is_present
    assert (contention.draw_wait_s(), contention.spread) == (0.0, 0)


def test_lost_claims_are_felt_until_enough_are_won() -> None:
    """
    The first lost claim makes itself felt, and the last of a few that are won ends it.
    """
    contention = Contention()
    assert contention.lost(["k"], of=1) == []
    assert contention.is_present
    assert contention.spread > 0
    for number in range(10):
        contention.won([f"k{number}"])
    assert not contention.is_present


def test_key_that_is_lost_again_and_again_is_no_competition() -> None:
    """
    It is named, and it makes nobody wait longer.
    """
    contention = Contention()
    for number in range(20):
        contention.lost([f"k{number}"], of=1)
    longest = contention._wait_s
    contention = Contention()
    contention.lost(["k"], of=1)
    first = contention._wait_s
    for _ in range(20):
        assert contention.lost(["k"], of=1) == ["k"]
    assert contention._wait_s == first < longest <= 1.0


def test_few_lost_of_many_are_not_felt() -> None:
    """
    Less than half of a batch is the price of claiming together.
    """
    contention = Contention()
    contention.lost(["a", "b"], of=8)
    assert not contention.is_present
    contention.lost(["c", "d", "e", "f"], of=8)
    assert contention.is_present


def test_others_at_work_are_felt_as_long_as_they_are_seen() -> None:
    """
    While checks find keys gone, batches that are won prove nothing; lone keys still do.
    """
    contention = Contention()
    contention.lost(["a", "b"], of=2)
    for _ in range(100):
        contention.checked(100, gone=1)
        contention.won(["c", "d"])
    assert contention.is_present
    assert contention.spread
    for _ in range(100):
        contention.checked(100, gone=0)
        contention.won(["c", "d"])
    assert not contention.is_present
    assert not contention.spread


def test_batches_make_nobody_wait_longer_for_a_lone_key() -> None:
    """
    Who has fought for a backlog is as quick with the next new task as after one lost claim.
    """
    contention = Contention()
    contention.lost(["a", "b"], of=2)
    first = contention._wait_s
    for number in range(20):
        contention.lost([f"a{number}", f"b{number}"], of=2)
    assert contention._wait_s == first


def test_who_does_not_go_at_once_leaves_the_others_the_time_of_a_claim() -> None:
    """
    Either nothing, or at least twice what a claim takes.
    """
    contention = Contention()
    for number in range(6):
        contention.lost([f"k{number}"], of=1)
    for _ in range(50):
        contention.claim_took(0.1)
    drawn = [contention.draw_wait_s() for _ in range(1000)]
    assert 0.0 in drawn
    assert min(wait_s for wait_s in drawn if wait_s) > 0.19
    assert max(drawn) < 1.3


@pytest.mark.parametrize("consumers", [2, 4, 16, 64])
def test_idle_consumers_settle_where_one_claim_per_task_is_lost(consumers: int) -> None:
    """
    Whatever their number: of those who go at once, or come before the claim is done, one wins.
    """
    claim_s = 0.01
    chance = random.Random(consumers)
    members = [Contention() for _ in range(consumers)]
    for member in members:
        member.claim_took(claim_s / 0.2)
    lost = []
    for number in range(400):
        key = [f"k{number}"]
        waits = [member.draw_wait_s() if member.is_present else 0.0 for member in members]
        claimants = [
            member
            for member, wait_s in zip(members, waits, strict=True)
            if wait_s < min(waits) + claim_s
        ]
        winner = chance.choice(claimants)
        winner.won(key)
        for member in claimants:
            if member is not winner:
                member.lost(key, of=1)
        lost.append(len(claimants) - 1)
    settled = statistics.mean(lost[100:])
    assert settled <= 2.5
    assert sum(lost[:10]) <= 3 * consumers
