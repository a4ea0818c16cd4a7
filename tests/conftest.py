"""
Fixtures of every level, and the marks that follow from a test's folder.

Nothing here starts a server until a test asks for one, so the unit tests need none.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.database import Database

from mscheduler_sync.embedded import EmbeddedServer, EmbeddedServerError, find_server_command
from tests.support import Document, wait_until

TESTS = Path(__file__).parent
MARKED_FOLDERS = {"integration", "fault", "stress", "soak", "bench"}
THREAD_END_S = 3.0

# A machine that does other things as well makes single examples slow.
settings.register_profile("mscheduler_sync", deadline=None)
if not os.environ.get("CI"):
    # With CI set hypothesis chooses its own profile: the same examples in every run.
    settings.load_profile("mscheduler_sync")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """
    Mark each test with the name of its folder.
    """
    for item in items:
        if item.path.is_relative_to(TESTS):
            for folder in MARKED_FOLDERS.intersection(item.path.relative_to(TESTS).parts):
                item.add_marker(folder)


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """
    Fail the test if a thread of the library that it started outlives it by more than 3 s.
    """
    before = set(threading.enumerate())
    yield

    def left() -> list[str]:
        now = set(threading.enumerate()) - before
        return sorted(thread.name for thread in now if thread.name.startswith("ms-"))

    with contextlib.suppress(AssertionError):
        wait_until(lambda: not left(), "the library's threads end", THREAD_END_S)
    names = left()
    if names:
        pytest.fail(f"the test left threads behind: {', '.join(names)}")


@pytest.fixture(scope="session")
def server_uri() -> Iterator[str]:
    """
    The URI of the session's server: MSCHEDULER_URI, else an embedded one with fail points.
    """
    uri = os.environ.get("MSCHEDULER_URI")
    if uri:
        yield uri
        return
    try:
        find_server_command()
    except EmbeddedServerError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    with EmbeddedServer(args=("--enable-test-commands",)) as server:
        yield server.uri


@pytest.fixture(scope="session")
def client(server_uri: str) -> Iterator[MongoClient[Document]]:
    """
    The session's client, with aware datetimes.
    """
    client: MongoClient[Document]
    with MongoClient(server_uri, tz_aware=True) as client:
        yield client


@pytest.fixture
def database(client: MongoClient[Document]) -> Iterator[Database[Document]]:
    """
    A database of the test's own, dropped at its end.
    """
    database = client[f"test_{uuid.uuid4().hex[:12]}"]
    yield database
    client.drop_database(database)


@pytest.fixture
def collection(database: Database[Document]) -> Collection[Document]:
    """
    The collection ``tasks`` of the test's own database.
    """
    return database.tasks
