"""
A MongoDB-compatible server for tests, demonstrations and small programs.

`EmbeddedServer` starts SecantusDB as a child process and stops it again. It needs the extra:
``pip install 'mscheduler_sync[embedded]'``. From the shell::

    python -m mscheduler_sync.embedded --path ./data --port 27017

prints the URI and serves until Ctrl-C or SIGTERM.

SecantusDB is under the GPL and therefore only ever started through its own command, never
imported. It is a beta with one server process and no replication: use MongoDB for what matters.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import queue
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import attrs
import pymongo
from pymongo import MongoClient
from pymongo.collection import Collection

from mscheduler_sync.errors import MSchedulerError

__all__ = ["EmbeddedServer", "EmbeddedServerError", "find_server_command", "open_server"]

_COMMAND = "secantusd-py"
_HOST = "127.0.0.1"
_DATABASE = "mscheduler"
_CLIENT_CLOSE_S = 1.0
#: The guard kills a server that has not ended after 5 s; past this the guard itself is stuck.
_GUARD_STOP_S = 10.0


class EmbeddedServerError(MSchedulerError):
    """
    The embedded server cannot be started, or is not in the state that a call needs.

    The message names the problem and ends with what the server printed last, unless that tells
    nothing more. Nothing is left running.
    """


def find_server_command() -> str:
    """
    Return the path of the server's command: beside the interpreter, else the one on PATH.

    Raises:
        EmbeddedServerError: If it is not installed, or the system is not a POSIX one.
    """
    if os.name != "posix":
        msg = "the embedded server needs Linux or macOS; set MSCHEDULER_URI to a MongoDB server"
        raise EmbeddedServerError(msg)
    # The folder first: a virtual environment works without having been activated.
    for folder in (str(Path(sys.executable).parent), None):
        command = shutil.which(_COMMAND, path=folder)
        if command is not None:
            return command
    msg = (
        f"the command {_COMMAND} is neither beside {sys.executable} nor on PATH; "
        "install it: pip install 'mscheduler_sync[embedded]' (Python 3.10 to 3.13)"
    )
    raise EmbeddedServerError(msg)


class EmbeddedServer:
    """
    A server process of this process's own, on the loopback interface, without passwords.

    A context manager; may be used once. The server ends with this process in every case, a
    SIGKILL included, but serves other processes too while it lives: give them `uri`. A forked
    child may use the object; only the process that started the server can stop it.

    Everything acknowledged is on disk: after a crash, start a new object on the same *path*.

    Args:
        path: Folder of the data, made if missing. None: a temporary one, removed by `stop`.
        port: TCP port on 127.0.0.1. 0: a free one.
        args: Further arguments of the server's command; its log level is always INFO.
        startup_timeout: Seconds that the server may take to answer.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        port: int = 0,
        *,
        args: Iterable[str] = (),
        startup_timeout: float = 30.0,
    ) -> None:
        if isinstance(args, str):
            msg = f"args must be a sequence of strings, got the string {args!r}"
            raise TypeError(msg)
        if not 0 <= port <= 65_535:  # noqa: PLR2004 - what a port is
            msg = f"port must be between 0 and 65535, got {port}"
            raise ValueError(msg)
        if not startup_timeout > 0:
            msg = f"startup_timeout must be more than 0 seconds, got {startup_timeout}"
            raise ValueError(msg)
        # Absolute now: the server runs in another folder.
        self._path = None if path is None else Path(path).absolute()
        self._port = port
        self._args = tuple(args)
        self._startup_timeout_s = startup_timeout
        self._lock = threading.Lock()
        # Under _lock.
        self._running: _Running | None = None
        self._stopped = False
        #: Its own, since `start` holds the other for long.
        self._client_lock = threading.Lock()
        # Under _client_lock. By process: a forked child inherits that of its parent.
        self._clients: dict[int, MongoClient[dict[str, Any]]] = {}

    def __enter__(self) -> EmbeddedServer:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """
        Start the server and return once it answers: about a second, at most *startup_timeout*.

        Raises:
            EmbeddedServerError: If the server is not installed, its path or port is in use, it
                ended or did not answer in time, or this object was started before.
        """
        with self._lock:
            if self._running is not None or self._stopped:
                what = "was stopped" if self._stopped else "runs already"
                msg = f"this embedded server {what}; make a new EmbeddedServer"
                raise EmbeddedServerError(msg)
            self._running = self._start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """
        Close the client of `collection` and end the server: some 0.1 s, at most about 11 s.

        May be called again, before `start`, and by a forked child, where the server stays.
        """
        with self._client_lock:
            client = self._clients.pop(os.getpid(), None)
            if client is not None:
                # It tells the server which sessions end; with the server dead it looks for one.
                with pymongo.timeout(_CLIENT_CLOSE_S):
                    client.close()
        if self._running is not None and self._running.owner_pid != os.getpid():
            return
        with self._lock:
            if self._running is not None and not self._stopped:
                self._running.end()
            self._stopped = True
        atexit.unregister(self.stop)

    @property
    def running(self) -> bool:
        """
        Whether the server process lives, as far as this process can tell. Does not block.
        """
        running = self._running
        if running is None or self._stopped:
            return False
        return running.owner_pid != os.getpid() or running.guard.poll() is None

    @property
    def uri(self) -> str:
        """
        The connection string. Like `port`, `pid` and `path` it stays readable after `stop`.

        Raises:
            EmbeddedServerError: If the server was not started.
        """
        # The server's table of retryable writes makes each write slower than the one before.
        options = "directConnection=true&retryWrites=false&w=majority&journal=true"
        return f"mongodb://{_HOST}:{self.port}/?{options}"

    @property
    def port(self) -> int:
        """
        The TCP port on 127.0.0.1. Raises like `uri`.
        """
        return self._started().port

    @property
    def pid(self) -> int:
        """
        The id of the server process. Raises like `uri`.
        """
        return self._started().server_pid

    @property
    def path(self) -> Path:
        """
        The folder of the data. Raises like `uri`.
        """
        return self._started().path

    def collection(self, name: str) -> Collection[dict[str, Any]]:
        """
        Return the collection *name* of the database ``mscheduler``, with aware datetimes.

        All share one client, which is made at the first call and closed by `stop`. A forked
        child gets a client of its own.

        Raises:
            EmbeddedServerError: If the server does not run.
        """
        uri = self.uri
        with self._client_lock:
            if self._stopped:
                msg = "this embedded server was stopped"
                raise EmbeddedServerError(msg)
            client = self._clients.get(os.getpid())
            if client is None:
                client = self._clients[os.getpid()] = MongoClient(uri, tz_aware=True)
            return client[_DATABASE][name]

    def _started(self) -> _Running:
        running = self._running
        if running is None:
            msg = "this embedded server was not started"
            raise EmbeddedServerError(msg)
        return running

    def _start(self) -> _Running:
        command = find_server_command()
        scratch = Path(tempfile.mkdtemp(prefix="mscheduler-embedded-"))
        try:
            # Without one the server reads what it finds in the current and the home folder.
            config = scratch / "empty.toml"
            config.touch()
            path = self._path or scratch / "data"
            path.mkdir(parents=True, exist_ok=True)
            guard = _start_guard(
                scratch,
                [
                    command,
                    *("--config", str(config)),
                    *("--host", _HOST),
                    *("--port", str(self._port)),
                    *("--storage-path", str(path)),
                    "--sync-on-commit",
                    *("--noop-heartbeat-seconds", "10"),
                    *self._args,
                    # The guard reads there that the server listens, and on which port.
                    *("--log-level", "INFO"),
                ],
            )
        except OSError as error:
            shutil.rmtree(scratch, ignore_errors=True)
            msg = f"the embedded server cannot be started: {error}"
            raise EmbeddedServerError(msg) from error
        running = _Running(guard, path, scratch)
        try:
            in_time = running.wait_ready(self._startup_timeout_s)
        finally:
            if not running.port:
                running.end()
        if not running.port:
            raise self._failure(running, in_time=in_time)
        return running

    def _failure(self, ended: _Running, *, in_time: bool) -> EmbeddedServerError:
        output = ended.output.strip()
        if not in_time:
            problem = f"the embedded server did not answer within {self._startup_timeout_s:g} s"
        elif "address already in use" in output.lower():
            return EmbeddedServerError(f"the port {self._port} is in use")
        elif "resource busy" in output.lower():
            problem = f"the path {ended.path} is in use by another embedded server"
        else:
            problem = f"the embedded server ended with status {ended.status} before it answered"
        return EmbeddedServerError(f"{problem}; its last output:\n{output}" if output else problem)


@attrs.define(eq=False)
class _Running:
    """
    A guard process and the server below it, as the process that started them sees them.
    """

    guard: subprocess.Popen[bytes]
    path: Path
    scratch: Path
    owner_pid: int = attrs.field(factory=os.getpid, init=False)
    # What the guard tells; 0 until it has.
    server_pid: int = attrs.field(default=0, init=False)
    port: int = attrs.field(default=0, init=False)
    # At the end: the server's exit status, and the last of its output.
    status: int | None = attrs.field(default=None, init=False)
    output: str = attrs.field(default="", init=False)

    def wait_ready(self, timeout_s: float) -> bool:
        """
        Wait until the server listens or has ended; return whether it was in time.
        """
        assert self.guard.stdout is not None
        deadline_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.guard.stdout, selectors.EVENT_READ)
            while not self.port:
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    return False
                line = self.guard.stdout.readline()
                if not line:
                    break
                self._take(line)
        return True

    def end(self) -> None:
        """
        Make the guard stop the server and wait for it, at most 10 s.
        """
        assert self.guard.stdin is not None
        assert self.guard.stdout is not None
        # The end of the pipe alone would not do: a forked child may hold it open. It is closed
        # here already if an earlier call was interrupted.
        with contextlib.suppress(OSError, ValueError):
            self.guard.stdin.write(b"stop")
        try:
            told, _ = self.guard.communicate(timeout=_GUARD_STOP_S)
        except subprocess.TimeoutExpired:
            # Server first: as the child of a living guard its id cannot have been given away.
            if self.server_pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.server_pid, signal.SIGKILL)
            self.guard.kill()
            self.guard.wait()
            self.guard.stdout.close()
        else:
            for line in told.splitlines():
                self._take(line)
        # Again, in case the guard was killed.
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _take(self, line: bytes) -> None:
        try:
            message: dict[str, Any] = json.loads(line)
            self.server_pid = message.get("pid", self.server_pid)
            self.port = message.get("port", self.port)
            self.status = message.get("status", self.status)
            self.output = message.get("output", self.output)
        except (ValueError, AttributeError):
            # The guard's own traceback.
            self.output += line.decode(errors="replace").rstrip() + "\n"


def _start_guard(scratch: Path, command: Sequence[str]) -> subprocess.Popen[bytes]:
    # What is set for this program's interpreter (warnings as errors, a home) is not the server's.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTHON") or name == "PYTHONPATH"
    }
    guard = Path(__file__).with_name("_embedded_guard.py")
    return subprocess.Popen(
        [sys.executable, "-I", str(guard), str(os.getpid()), str(scratch), *command],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Not the caller's: a program that reads that to its end would wait for the guard.
        stderr=subprocess.STDOUT,
        cwd="/",
        env=environment,
        start_new_session=True,
    )


@contextlib.contextmanager
def open_server(path: str | os.PathLike[str] | None = None) -> Iterator[str]:
    """
    Yield the URI of a server: of the environment's MSCHEDULER_URI, else of an embedded one.

    With MSCHEDULER_URI set nothing is started and *path* is not looked at; else see
    `EmbeddedServer`.

    Raises:
        EmbeddedServerError: As `EmbeddedServer.start`.
    """
    uri = os.environ.get("MSCHEDULER_URI")
    if uri:
        yield uri
        return
    with EmbeddedServer(path) as server:
        yield server.uri


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Serve until SIGINT or SIGTERM; return the exit status of ``python -m mscheduler_sync.embedded``.
    """
    parser = argparse.ArgumentParser(
        prog="python -m mscheduler_sync.embedded",
        description="Start a MongoDB-compatible server, print its URI, serve until interrupted.",
    )
    parser.add_argument("--path", help="folder of the data (default: a temporary one)")
    parser.add_argument("--port", type=int, default=0, help="TCP port (default: a free one)")
    options = parser.parse_args(arguments)

    # Its put() may run in a signal handler; setting an Event there can deadlock.
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()

    def note(number: int, _frame: FrameType | None) -> None:
        signals.put(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    try:
        with EmbeddedServer(options.path, options.port) as server:
            print(server.uri, flush=True)
            while server.running:
                with contextlib.suppress(queue.Empty):
                    signals.get(timeout=0.5)
                    return 0
    except (EmbeddedServerError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print("the embedded server has ended by itself", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
