"""
Fixtures of the integration tests.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from pymongo import MongoClient

from mscheduler_sync import Producer
from mscheduler_sync._storage.store import TaskStore
from tests.support import Document, odd_documents, tables
from tests.support.tables import Case, Table
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


@pytest.fixture(scope="session")
def generated() -> list[tuple[Document, int]]:
    return tables.generated()


@pytest.fixture
def cases(generated: list[tuple[Document, int]]) -> list[Case]:
    return tables.fresh(generated)


@pytest.fixture
def table(collection: Tasks, cases: list[Case]) -> Table:
    return Table(collection, cases, TaskStore(collection))


@pytest.fixture(scope="session")
def generated_odd() -> list[Document]:
    return odd_documents.generated()
