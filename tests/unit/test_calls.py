"""
What a store knows of outages, without a server.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import AutoReconnect, PyMongoError

from mscheduler_sync._storage.calls import ServerCalls
from mscheduler_sync.errors import StoreUnavailable


@pytest.fixture
def calls() -> Any:
    client: MongoClient[Any] = MongoClient("mongodb://127.0.0.1:1/", connect=False)
    yield ServerCalls(client.any)
    client.close()


def test_nothing_is_known_of_an_outage_at_first(calls: ServerCalls) -> None:
    """
    A store that has met no trouble says so.
    """
    assert calls.since_outage_s() == float("inf")
    with calls._call():
        assert calls.since_outage_s() == float("inf")


def test_a_failed_call_is_an_outage_until_the_next_answer(calls: ServerCalls) -> None:
    """
    From the error on, and counted anew from the first answer.
    """
    with pytest.raises(StoreUnavailable), calls._call():
        raise AutoReconnect("gone")
    assert calls.since_outage_s() == 0
    with calls._call():
        pass
    assert 0 < calls.since_outage_s() < 60


def test_a_call_that_hangs_is_an_outage_for_all_others(calls: ServerCalls) -> None:
    """
    While one call gets no answer, another one must not believe that all is well.
    """
    began, go = threading.Event(), threading.Event()

    def hang() -> None:
        with calls._call():
            began.set()
            go.wait(20)

    thread = threading.Thread(target=hang)
    thread.start()
    assert began.wait(10)
    assert calls.since_outage_s() == float("inf")
    threading.Event().wait(1.1)  # longer than any call takes of itself
    assert calls.since_outage_s() == 0
    go.set()
    thread.join()
    assert 0 < calls.since_outage_s() < 60


def test_calls_that_may_take_long_are_no_sign(calls: ServerCalls) -> None:
    """
    An index may take a minute to be made.
    """
    with calls._call(60.0):
        threading.Event().wait(1.1)
        assert calls.since_outage_s() == float("inf")


def test_the_text_of_an_outage_is_short(calls: ServerCalls) -> None:
    """
    It says who did not answer, without the driver's picture of the whole cluster.
    """
    with pytest.raises(StoreUnavailable) as caught, calls._call(0.5):
        calls._database.command("ping")
    assert "127.0.0.1:1" in str(caught.value)
    assert "Topology" not in str(caught.value)
    assert isinstance(caught.value.__cause__, PyMongoError)
