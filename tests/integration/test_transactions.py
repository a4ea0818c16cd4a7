"""
Sends in the application's own transactions.
"""

from __future__ import annotations

from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from mscheduler_sync import Producer, SendResult, TaskExists
from tests.support import Document, fail_point
from tests.support.tasks import Tasks


def test_send_in_a_transaction_stands_and_falls_with_it(
    producer: Producer, client: MongoClient[Document], collection: Tasks
) -> None:
    """
    Committed with the caller's own writes; gone with an abort; unseen before.
    """
    producer.send("first")
    orders = collection.database.orders
    orders.insert_one({"_id": 0})
    with client.start_session() as session:
        session.start_transaction()
        orders.insert_one({"_id": 1}, session=session)
        assert producer.send("k", 1, session=session).inserted
        assert producer.get("k") is None
        session.abort_transaction()
        assert producer.get("k") is None
        assert orders.count_documents({}) == 1
        session.start_transaction()
        orders.insert_one({"_id": 1}, session=session)
        assert producer.send("k", 2, session=session).inserted
        session.commit_transaction()
    task = producer.get("k")
    assert task is not None
    assert (task.params, orders.count_documents({})) == (2, 2)


def test_send_in_a_transaction_sees_what_the_transaction_did(
    producer: Producer, client: MongoClient[Document]
) -> None:
    """
    A second send of the transaction meets the task of the first.
    """
    producer.send("first")
    with client.start_session() as session, session.start_transaction():
        results = [
            producer.send("k", 1, session=session),
            producer.send("k", 2, session=session),
            producer.send("k", 3, if_exists="update", session=session),
        ]
        with pytest.raises(TaskExists):
            producer.send("k", if_exists="raise", session=session)
    assert [(r.inserted, r.updated) for r in results] == [
        (True, False),
        (False, False),
        (False, True),
    ]
    task = producer.get("k")
    assert task is not None
    assert task.params == 3


def test_existing_task_is_not_an_error_of_the_transaction(
    producer: Producer, client: MongoClient[Document], collection: Tasks
) -> None:
    """
    Sending a key that exists leaves the transaction alive: no duplicate key error ends it.
    """
    producer.send("k", "old")
    orders = collection.database.orders
    orders.insert_one({"_id": 0})
    with client.start_session() as session, session.start_transaction():
        result = producer.send("k", "new", session=session)
        orders.insert_one({"_id": 1}, session=session)
    assert result == SendResult("k", inserted=False, updated=False, status="waiting")
    assert orders.count_documents({}) == 2


def test_trouble_in_a_transaction_is_raised_at_once(
    producer: Producer, client: MongoClient[Document], collection: Tasks
) -> None:
    """
    With a session nothing is retried or renamed: its label tells the caller to repeat it.
    """
    producer.send("first")
    with client.start_session() as session:
        session.start_transaction()
        with (
            fail_point(client, ["update"], {"times": 1}, errorCode=112),
            pytest.raises(OperationFailure) as raised,
        ):
            producer.send("k", session=session)
        assert raised.value.has_error_label("TransientTransactionError")
        session.abort_transaction()
    assert producer.get("k") is None


def test_with_transaction_of_the_driver_repeats_a_conflict(
    producer: Producer, client: MongoClient[Document]
) -> None:
    """
    The driver's own retry of a transaction works with a send inside.
    """
    producer.send("k", 0)
    calls: list[int] = []
    with client.start_session() as first, client.start_session() as second:
        first.start_transaction()
        producer.send("k", 1, if_exists="update", session=first)

        def work(session: Any) -> None:
            calls.append(1)
            if len(calls) == 2:
                first.commit_transaction()
            producer.send("k", 2, if_exists="update", session=session)

        second.with_transaction(work)
    task = producer.get("k")
    assert task is not None
    assert (task.params, len(calls) >= 2) == (2, True)
