"""
The lease of a node, step by step, on a store that answers as it is told.
"""

from __future__ import annotations

import threading
import time
from typing import cast

import pytest
from pymongo import MongoClient

from mscheduler_sync import StoreUnavailable
from mscheduler_sync._storage.statement import Update
from mscheduler_sync.pool import Node
from mscheduler_sync.pool.lease import Lease
from mscheduler_sync.pool.settings import NodeOptions
from mscheduler_sync.pool.store import PoolStore


class ScriptedStore:
    """
    Gives one reply after another; an exception is raised. Remembers what was asked.
    """

    pool = "p"

    def __init__(self, *replies: int | Exception, takes_s: float = 0.0) -> None:
        self._replies = list(replies)
        self._takes_s = takes_s
        self.asked: list[tuple[Update, float]] = []

    def update(self, statement: Update, *, timeout_s: float = 10.0) -> tuple[int, int]:
        self.asked.append((statement, timeout_s))
        threading.Event().wait(self._takes_s)
        reply = self._replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply, reply


class Lost:
    """
    What a lease has told of its end.
    """

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def __call__(self, node: str, reason: str) -> None:
        self.told.append((node, reason))


def lease_of(store: ScriptedStore, lost: Lost, worker_ttl: float, margin: float) -> Lease:
    client: MongoClient[dict[str, object]]
    with MongoClient("mongodb://127.0.0.1:9/", connect=False) as client:
        node = Node(client.nowhere, "p", worker_ttl=worker_ttl, lease_margin=margin)
    settings: NodeOptions = node._settings
    return Lease(
        store=cast("PoolStore", store),
        settings=settings,
        on_lost=lost,
        on_return=lambda: None,
        on_crash=unexpected,
    )


def unexpected(part: str, error: BaseException) -> None:
    raise AssertionError(part) from error


def test_a_lease_is_believed_from_before_it_was_asked_for() -> None:
    """
    Until its length, less the margin, has passed: by the clock, whether or not a thread looks.
    """
    lease = lease_of(ScriptedStore(1, takes_s=0.1), Lost(), 0.4, 0.2)
    assert not lease.holds(0)
    before_s = time.monotonic()
    lease.register()
    assert before_s + 0.2 <= lease.until_s <= time.monotonic() - 0.1 + 0.2
    assert not lease.holds(1)
    threading.Event().wait(max(0.0, lease.until_s - time.monotonic()))
    assert not lease.holds(0)


def test_a_renewal_extends_the_lease() -> None:
    """
    And a failed one leaves it as it is.
    """
    store = ScriptedStore(1, StoreUnavailable("down"), 1)
    lease = lease_of(store, Lost(), 3600, 0)
    lease.register()
    first_s = lease.until_s
    assert not lease._renew(first_s)
    assert lease.until_s == first_s
    assert lease._renew(first_s)
    assert lease.until_s > first_s
    assert lease.holds(0)


def test_no_renewal_outlasts_the_lease() -> None:
    """
    It may take as long as the lease is trusted, and after that none is sent.
    """
    store = ScriptedStore(1, StoreUnavailable("down"))
    lease = lease_of(store, Lost(), 3600, 0)
    lease.register()
    assert not lease._renew(time.monotonic() + 0.25)
    assert store.asked[-1][1] <= 0.25
    assert not lease._renew(time.monotonic())
    assert len(store.asked) == 2


@pytest.mark.parametrize(
    ("reply", "reason"),
    [(0, "others have declared"), (StoreUnavailable("down"), "not renewed in time")],
    ids=["declared dead", "no answer"],
)
def test_a_lost_lease_is_told_and_another_id_taken(reply: int | Exception, reason: str) -> None:
    """
    Once; what was held under the old one is not trusted any more.
    """
    store, lost = ScriptedStore(1, *[reply] * 1000), Lost()
    lease = lease_of(store, lost, 0.2, 0.05)
    old = lease.node
    lease.register()
    lease.step()
    ((node, why),) = lost.told
    assert (node, why.find(reason) >= 0) == (old, True)
    assert lease.node != old
    assert lease.life == 1
    assert not lease.holds(0)
    assert not lease.holds(1)
