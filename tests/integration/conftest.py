"""
Fixtures of the integration tests.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from pymongo import MongoClient

from mscheduler_sync import Producer
from tests.support import Document
from tests.support.tasks import Tasks


@pytest.fixture
def producer(collection: Tasks) -> Producer:
    """
    The producer of the test.
    """
    return Producer(collection)


@pytest.fixture
def nowhere() -> Iterator[Tasks]:
    """
    A collection of a server that is not there.
    """
    client: MongoClient[Document]
    with MongoClient("mongodb://127.0.0.1:1") as client:
        yield client.nowhere.tasks


@pytest.fixture
def go() -> Iterator[threading.Event]:
    """
    What functions of the test wait for; set at its end at the latest.
    """
    event = threading.Event()
    yield event
    event.set()
