"""
Many sends at once.
"""

from __future__ import annotations

from typing import Any

import pytest

from mscheduler_sync import Producer, StoreRejected, TaskExists
from tests.support import Document
from tests.support.arranged import stored
from tests.support.tasks import Tasks


def test_send_many_sends_all_in_order_of_its_results(producer: Producer, collection: Tasks) -> None:
    """
    More items than one bulk holds, from a generator; each has its result, in order.
    """
    producer.send("k7", "old")
    results = producer.send_many(((f"k{n}", n) for n in range(1500)), priority=3)
    assert [result.key for result in results] == [f"k{n}" for n in range(1500)]
    assert [r.key for r in results if not r.inserted] == ["k7"]
    assert all(result.error is None for result in results)
    assert collection.count_documents({}) == 1500
    assert stored(collection, "k7")["params"] == "old"
    assert stored(collection, "k1499")["task_option"]["priority"] == 3


def test_send_many_reports_bad_items_and_sends_the_others(
    producer: Producer, collection: Tasks
) -> None:
    """
    An item that cannot be sent has its error in its place.
    """
    items: list[Any] = [
        ("a", 1),
        ("", 1),
        ("b", {1, 2}),
        ("c",),
        "dd",
        ("e", 1, {"priority": "high"}),
        ("f", 1, {"unknown": 1}),
        ("g", 1, 5),
        ("h", 1, {"priority": 2}),
    ]
    results = producer.send_many(items, priority=1)
    expected = [None, ValueError, ValueError, *[TypeError] * 5, None]
    for result, error in zip(results, expected, strict=True):
        assert result.inserted == (error is None)
        assert isinstance(result.error, error) if error else result.error is None
    priorities = {d["key"]: d["task_option"]["priority"] for d in collection.find()}
    assert priorities == {"a": 1, "h": 2}


def test_send_many_with_a_key_twice_sends_both_in_order(
    producer: Producer, collection: Tasks
) -> None:
    """
    The second one of a key meets the task that the first has made.
    """
    kept = producer.send_many([("a", 1), ("a", 2)])
    assert [(r.inserted, r.updated) for r in kept] == [(True, False), (False, False)]
    assert stored(collection, "a")["params"] == 1
    changed = producer.send_many([("b", 1), ("b", 2), ("b", 3)], if_exists="update")
    assert [(r.inserted, r.updated) for r in changed] == [(True, False)] + [(False, True)] * 2
    assert stored(collection, "b")["params"] == 3


def test_send_many_makes_keys_and_keeps_existing_rules(
    producer: Producer, collection: Tasks
) -> None:
    """
    Key None makes keys; ``if_exists="raise"`` is an error of its item alone.
    """
    producer.send("taken")
    results = producer.send_many([(None, 1), ("taken", 2), ("free", 3)], if_exists="raise")
    assert [r.inserted for r in results] == [True, False, True]
    assert isinstance(results[1].error, TaskExists)
    assert collection.count_documents({}) == 3


def test_send_many_of_nothing_is_nothing(producer: Producer) -> None:
    """
    No items, no results.
    """
    assert producer.send_many([]) == []


@pytest.mark.parametrize("options", [{"session": None}, {"priority": -1}, {"colour": 1}])
def test_send_many_refuses_wrong_common_options(
    producer: Producer, collection: Tasks, options: Document
) -> None:
    """
    Wrong common options raise, and nothing is sent.
    """
    with pytest.raises((TypeError, ValueError)):
        producer.send_many([("a", 1)], **options)
    assert collection.find_one() is None


def test_another_unique_index_of_the_application_is_an_error_of_its_item(
    producer: Producer, collection: Tasks
) -> None:
    """
    A document that the server refuses though its key is free spoils no other.
    """
    collection.create_index([("params.a", 1)], unique=True, sparse=True, name="theirs")
    results = producer.send_many([("x", {"a": 1}), ("y", {"a": 1}), ("z", {"a": 2})])
    assert [r.inserted for r in results] == [True, False, True]
    assert isinstance(results[1].error, Exception)
    assert sorted(d["key"] for d in collection.find()) == ["x", "z"]


def test_another_unique_index_of_the_application_is_an_error_of_the_send(
    producer: Producer, collection: Tasks
) -> None:
    """
    Neither another's task nor an endless loop: the refusal is raised.
    """
    collection.create_index([("params.a", 1)], unique=True, sparse=True, name="theirs")
    producer.send("x", {"a": 1})
    with pytest.raises(StoreRejected):
        producer.send("y", {"a": 1})
    assert [d["key"] for d in collection.find()] == ["x"]
