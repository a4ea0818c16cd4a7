"""
A collection that is found at its first use.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from pymongo import MongoClient
from pymongo.collection import Collection


class LazyCollection:
    """
    A collection, or how to get one: found at the first `get`, once per process. Thread-safe.

    Of a URI and of a function, a forked child gets a collection of its own; a collection that
    was given stays the same.

    Raises:
        TypeError, ValueError: If *source* is none of these, or the URI names no database.
    """

    def __init__(
        self, source: Collection[Any] | str | Callable[[], Collection[Any]], name: str | None
    ) -> None:
        if isinstance(source, str):
            parts = urlsplit(source)
            if parts.scheme not in {"mongodb", "mongodb+srv"} or len(parts.path) < 2:  # noqa: PLR2004
                msg = "the URI must be like mongodb://host/database"  # not shown: has a password
                raise ValueError(msg)
            if not name:
                msg = "a URI needs the collection's name beside it: App(uri, 'tasks')"
                raise ValueError(msg)
        elif name is not None:
            msg = "the collection's name is given only beside a URI"
            raise TypeError(msg)
        elif not isinstance(source, Collection) and not callable(source):
            msg = (
                "a collection, a URI or a function that returns a collection is needed, "
                f"got {type(source).__name__}"
            )
            raise TypeError(msg)
        self._source = source
        self._name = name
        self._renew()

    def _renew(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        # Under _lock.
        self._client: MongoClient[Any] | None = None
        self._found: Collection[Any] | None = (
            self._source if isinstance(self._source, Collection) else None
        )

    def get(self) -> Collection[Any]:
        """
        Return the collection.

        Raises:
            TypeError: If the function that was given returned something else.
        """
        if self._pid != os.getpid():
            self._renew()
        found = self._found
        if found is not None:
            return found
        with self._lock:
            if self._found is None:
                self._found = self._opened()
            return self._found

    def _opened(self) -> Collection[Any]:
        if isinstance(self._source, str):
            self._client = MongoClient(self._source)
            atexit.register(self.close)
            return self._client.get_default_database()[str(self._name)]
        if isinstance(self._source, Collection):
            return self._source
        found = self._source()
        if not isinstance(found, Collection):
            msg = f"the function must return a pymongo Collection, got {type(found).__name__}"
            raise TypeError(msg)
        return found

    def close(self) -> None:
        """
        Close the client of a URI. The next `get` opens another.
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            client, self._client = self._client, None
            if client is not None:
                self._found = None
                client.close()
