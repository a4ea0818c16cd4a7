"""
Programs that the fault tests start as processes of their own, and how they are started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mscheduler_sync
from tests.support import wait_until

FOLDER = Path(__file__).parent
_ROOT = Path(mscheduler_sync.__file__).parents[1]


class Child:
    """
    One program as a process of its own. Its output is kept in files, so it never waits for us.
    """

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        self.folder = folder
        self._out, self._err = folder / "out", folder / "err"
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=folder,
                env=environment,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def output(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def errors(self) -> str:
        """
        What it wrote to its standard error.
        """
        return self._err.read_text(errors="replace")

    def wait_line(self, start: str, timeout: float = 30) -> str:
        """
        Wait until it has printed a line that begins with *start*; return the rest of that line.
        """

        def found() -> list[str]:
            lines = self.output.split("\n")[:-1]
            hits = [line[len(start) :].strip() for line in lines if line.startswith(start)]
            assert hits or self.alive, f"it ended without {start!r}:\n{self.output}{self.errors}"
            return hits

        return wait_until(found, f"it prints {start!r}", timeout)[0]

    def said(self, start: str) -> Any:
        """
        Wait for the line that begins with *start*; return what its JSON says.
        """
        return json.loads(self.wait_line(start))

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_end(self, timeout: float = 30) -> int:
        """
        Wait until it has ended; return its exit status.
        """
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            msg = f"it has not ended within {timeout:g} s:\n{self.output}{self.errors}"
            raise AssertionError(msg) from None

    def open_gate(self, name: str) -> None:
        """
        Let the functions go on that wait for the gate *name*.
        """
        (self.folder / f"gate-{name}").touch()

    def kill(self) -> None:
        if self.alive:
            self.process.kill()
        self.process.wait()


class Children:
    """
    Starts programs on one database of one server.
    """

    def __init__(self, folder: Path, uri: str, database: str) -> None:
        self._folder = folder
        self._uri = uri
        self._database = database
        self._started: list[Child] = []

    def start(
        self, script: str, *, uri: str | None = None, python: Sequence[str] = (), **options: Any
    ) -> Child:
        """
        Start ``script.py`` of this folder. It gets the URI, the database's name and *options*.
        """
        arguments = [uri or self._uri, self._database, json.dumps(options)]
        return self.start_command([*python, str(FOLDER / f"{script}.py"), *arguments])

    def start_command(self, command: Sequence[str]) -> Child:
        folder = self._folder / f"child-{len(self._started)}"
        folder.mkdir()
        child = Child(folder, command)
        self._started.append(child)
        return child

    def end(self) -> None:
        for child in self._started:
            child.kill()


@contextlib.contextmanager
def children(folder: Path, uri: str, database: str) -> Iterator[Children]:
    """
    Give a starter of programs; none of them outlives the block.
    """
    starter = Children(folder, uri, database)
    try:
        yield starter
    finally:
        starter.end()
