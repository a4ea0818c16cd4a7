"""
Fixtures of the fault tests.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pymongo import MongoClient
from pymongo.database import Database

from tests.support import Document
from tests.support.scene import LogRecords, Scene, scene_on


@pytest.fixture
def scene(
    server_uri: str, client: MongoClient[Document], database: Database[Document]
) -> Iterator[Scene]:
    """
    A scene whose client leaves all repeating to the library.
    """
    with scene_on(server_uri, database, client, retryWrites=False, retryReads=False) as scene:
        yield scene


@pytest.fixture
def logged() -> Iterator[LogRecords]:
    """
    What the library logs during the test.
    """
    with LogRecords().listening() as records:
        yield records
