"""
Servers of a test's own, which it may kill, freeze, and start again.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from pymongo import MongoClient
from pymongo.database import Database

from mscheduler_sync.embedded import EmbeddedServer, EmbeddedServerError, find_server_command
from tests.support import Document


class OwnServer:
    """
    An embedded server on one path and one port, through all its deaths.

    `control` is the test's own client of it.
    """

    def __init__(self, path: Path, *args: str) -> None:
        self._path = path
        self._args = args
        self._server = EmbeddedServer(path, args=args)
        self._server.start()
        self.uri = self._server.uri
        self.control: MongoClient[Document] = MongoClient(self.uri, tz_aware=True)

    def kill(self) -> None:
        os.kill(self._server.pid, signal.SIGKILL)
        # Its guard sees that and ends.
        self._server.stop()

    def start_again(self, *args: str) -> None:
        """
        Start it on the same path and port, with other arguments if *args* are given.
        """
        self._server = EmbeddedServer(self._path, self._server.port, args=args or self._args)
        self._server.start()

    def freeze(self) -> None:
        os.kill(self._server.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._server.pid, signal.SIGCONT)

    def database(self, name: str) -> Database[Document]:
        return self.control[name]

    def close(self) -> None:
        if self._server.running:
            self.thaw()
        self.control.close()
        self._server.stop()


@contextlib.contextmanager
def own_server(path: Path, *args: str) -> Iterator[OwnServer]:
    """
    Run an embedded server on *path*, with fail points, whatever server the other tests use.
    """
    try:
        find_server_command()
    except EmbeddedServerError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    server = OwnServer(path, "--enable-test-commands", *args)
    try:
        yield server
    finally:
        server.close()
