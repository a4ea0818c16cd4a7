"""
Wrong arguments of the pool are refused where they are given, without a database.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.database import Database

from mscheduler_sync.pool import JobPlan, Node
from tests.support import Document


class Handler:
    def start(self, job: object) -> None: ...

    def stop(self, key: str) -> None: ...


@pytest.fixture
def nowhere() -> Iterator[Database[Document]]:
    """
    A database that is never asked.
    """
    client: MongoClient[Document]
    with MongoClient("mongodb://127.0.0.1:1/", connect=False) as client:
        yield client.nowhere


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"pool": ""}, ValueError),
        ({"pool": 7}, TypeError),
        ({"pool": "a\x1fb"}, ValueError),
        ({"pool": "\ud800"}, ValueError),
        ({"worker_ttl": 0}, ValueError),
        ({"worker_ttl": "30"}, TypeError),
        ({"worker_ttl": float("nan")}, ValueError),
        ({"worker_ttl": 10, "lease_margin": 6}, ValueError),
        ({"max_queued_jobs": 0}, ValueError),
        ({"max_queued_jobs": True}, TypeError),
        ({"dispatch_timeout": 0}, ValueError),
        ({"client_only": 1}, TypeError),
        ({"watch": "no"}, TypeError),
        ({"ring_order": "random"}, ValueError),
        ({"prefix": None}, TypeError),
        ({"poll_interval": 0}, ValueError),
    ],
)
def test_wrong_arguments_of_a_node_are_refused(
    nowhere: Database[Document], arguments: dict[str, Any], error: type[Exception]
) -> None:
    """
    By the constructor, which names the argument.
    """
    given = {"pool": "p", **arguments}
    with pytest.raises(
        error, match=next(iter(arguments)).replace("worker_ttl", "worker_ttl|lease")
    ):
        Node(nowhere, **given)


def test_a_node_needs_a_database(nowhere: Database[Document]) -> None:
    """
    A collection or a client is not one.
    """
    with pytest.raises(TypeError, match="database"):
        Node(nowhere.tasks, "p")  # type: ignore[arg-type]


def test_durations_may_be_timedeltas(nowhere: Database[Document]) -> None:
    """
    As everywhere in the library; and nothing is asked of the database.
    """
    node = Node(nowhere, "p", worker_ttl=dt.timedelta(minutes=1))
    assert (node.pool, node.state, node.is_closed, node.is_shutdown) == ("p", "new", False, False)
    assert node.workers() == []
    assert node.close().left == ()
    assert node.state == "closed"
    assert node.is_closed


@pytest.mark.parametrize("missing", ["start", "stop"])
def test_a_handler_needs_start_and_stop(nowhere: Database[Document], missing: str) -> None:
    """
    What lacks one of them is refused before anything is asked of the database.
    """
    handler = Handler()
    setattr(handler, missing, None)
    with pytest.raises(TypeError, match=missing):
        Node(nowhere, "p").add_worker(handler)


def test_notify_of_a_handler_is_a_method_or_missing(nowhere: Database[Document]) -> None:
    """
    Anything else there is a mistake.
    """
    handler = Handler()
    handler.notify = 5  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="notify"):
        Node(nowhere, "p").add_worker(handler)


def test_a_client_has_no_workers_tickers_or_schedules_and_ends_no_pool(
    nowhere: Database[Document],
) -> None:
    """
    Each is refused at the call.
    """
    client = Node(nowhere, "p", client_only=True)
    with pytest.raises(RuntimeError, match="client-only"):
        client.add_worker(Handler())
    with pytest.raises(RuntimeError, match="client-only"):
        client.ticker("t", 1)
    with pytest.raises(RuntimeError, match="client-only"):
        client.schedule(Planner(), 1)
    with pytest.raises(RuntimeError, match="client-only"):
        client.shutdown()


class Planner:
    def plan(self) -> JobPlan:
        return JobPlan()


@pytest.mark.parametrize(
    ("key", "error"),
    [("", ValueError), (7, TypeError), ("\ud800", ValueError), ("x" * 600, ValueError)],
)
def test_wrong_keys_are_refused(
    nowhere: Database[Document], key: Any, error: type[Exception]
) -> None:
    """
    By every call that takes one, before anything is asked of the database.
    """
    node = Node(nowhere, "p")
    for call in (node.dispatch, node.stop_job, node.notify, node.job_payload, node.job_owner):
        with pytest.raises(error, match="key"):
            call(key)


def test_wrong_tickers_and_planners_are_refused(nowhere: Database[Document]) -> None:
    """
    Names, intervals, callbacks and planners.
    """
    node = Node(nowhere, "p")
    with pytest.raises(ValueError, match="name"):
        node.ticker("", 1)
    with pytest.raises(ValueError, match="interval"):
        node.ticker("t", 0)
    with pytest.raises(TypeError, match="callback"):
        node.ticker("t", 1, callback=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="plan"):
        node.schedule(object(), 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="stop"):
        JobPlan(stop="abc")


def test_a_plan_takes_pairs_or_a_dict() -> None:
    """
    Both mean the same.
    """
    assert JobPlan(start=[("a", 1)], stop=["b"]) == JobPlan(start={"a": 1}, stop=("b",))
