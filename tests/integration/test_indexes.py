"""
Who makes the indexes, and when.
"""

from __future__ import annotations

from pymongo.collection import Collection

from mscheduler_sync import Consumer, Producer
from mscheduler_sync._storage import statements
from tests.support import Document

NAMES = {index.name for index in statements.discovery.INDEXES}


def test_a_consumer_alone_makes_the_indexes(collection: Collection[Document]) -> None:
    """
    Nobody need send first: the first look for tasks makes what it uses.
    """
    with Consumer(collection, lambda _: None, watch=False) as consumer:
        assert consumer.wait_started(20)
    assert set(collection.index_information()) == {"_id_", *NAMES}


def test_a_key_is_unique_even_without_its_index(collection: Collection[Document]) -> None:
    """
    A collection that was dropped under a living producer does not take a key twice.
    """
    producer = Producer(collection)
    producer.send("first")
    collection.drop()
    results = [producer.send("key", n) for n in range(3)]
    assert [result.inserted for result in results] == [True, False, False]
    assert collection.count_documents({}) == 1
