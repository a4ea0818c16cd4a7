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
import socket
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
from pymongo.errors import OperationFailure, PyMongoError

from mscheduler_sync.errors import MSchedulerError

__all__ = ["EmbeddedServer", "EmbeddedServerError", "find_server_command", "open_server"]

_COMMAND = "secantusd-py"
_HOST = "127.0.0.1"
_DATABASE = "mscheduler"
_PORT_TRIES = 5
_LOOK_S = 0.02
_ANSWER_S = 2.0
_CLIENT_CLOSE_S = 1.0
#: The guard kills a server that has not ended after 5 s; past this the guard itself is stuck.
_GUARD_STOP_S = 10.0


class EmbeddedServerError(MSchedulerError):
    """
    The embedded server cannot be started, or is not in the state that a call needs.

    The message names the problem and ends with what the server printed last, if it printed
    anything. Nothing is left running.
    """


class _PortInUse(EmbeddedServerError):
    pass


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


def _storage_path(path: str | os.PathLike[str] | None) -> Path | None:
    # Absolute now: the server runs in another folder.
    return None if path is None else Path(path).absolute()


def _arguments(args: Iterable[str]) -> tuple[str, ...]:
    if isinstance(args, str):
        msg = f"args must be a sequence of strings, got the string {args!r}"
        raise TypeError(msg)
    return tuple(args)


def _check_port(_: object, __: object, port: int) -> None:
    if not 0 <= port <= 65_535:  # noqa: PLR2004 - what a port is
        msg = f"port must be between 0 and 65535, got {port}"
        raise ValueError(msg)


def _check_startup_timeout(_: object, __: object, startup_timeout: float) -> None:
    if not startup_timeout > 0:
        msg = f"startup_timeout must be more than 0 seconds, got {startup_timeout}"
        raise ValueError(msg)


@attrs.define(eq=False)
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
        args: Further arguments of the server's command.
        startup_timeout: Seconds that the server may take to answer.
    """

    _path: Path | None = attrs.field(default=None, converter=_storage_path)
    _port: int = attrs.field(default=0, validator=_check_port)
    _args: tuple[str, ...] = attrs.field(default=(), kw_only=True, converter=_arguments)
    _startup_timeout_s: float = attrs.field(
        default=30.0, kw_only=True, alias="startup_timeout", validator=_check_startup_timeout
    )
    _running: _Running | None = attrs.field(default=None, init=False, repr=False)
    _stopped: bool = attrs.field(default=False, init=False)
    #: Guards `_running` and `_stopped`.
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False, repr=False)
    _client: MongoClient[dict[str, Any]] | None = attrs.field(default=None, init=False, repr=False)
    _client_pid: int = attrs.field(default=0, init=False, repr=False)
    #: Guards `_client` and `_client_pid`; its own, since `start` holds the other for long.
    _client_lock: threading.Lock = attrs.field(factory=threading.Lock, init=False, repr=False)

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
            self._running = self._start_on_some_port(find_server_command())
        atexit.register(self.stop)

    def stop(self) -> None:
        """
        Close the client of `collection` and end the server: some 0.1 s, at most about 11 s.

        May be called again, before `start`, and by a forked child, where the server stays.
        """
        self._close_client()
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
        return _uri(self._started().port)

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
            if self._client is None or self._client_pid != os.getpid():
                self._client = MongoClient(uri, tz_aware=True)
                self._client_pid = os.getpid()
            return self._client[_DATABASE][name]

    def _close_client(self) -> None:
        with self._client_lock:
            # A client that was inherited by a fork is the parent's.
            if self._client is not None and self._client_pid == os.getpid():
                # It tells the server which sessions end; with the server dead it looks for one.
                with pymongo.timeout(_CLIENT_CLOSE_S):
                    self._client.close()
                self._client = None

    def _started(self) -> _Running:
        running = self._running
        if running is None:
            msg = "this embedded server was not started"
            raise EmbeddedServerError(msg)
        return running

    def _start_on_some_port(self, command: str) -> _Running:
        for _ in range(_PORT_TRIES - 1):
            try:
                return self._start_on(self._port or _free_port(), command)
            except _PortInUse:
                if self._port:
                    raise
        return self._start_on(self._port or _free_port(), command)

    def _start_on(self, port: int, command: str) -> _Running:
        _check_free(port)
        scratch = Path(tempfile.mkdtemp(prefix="mscheduler-embedded-"))
        try:
            # Without one the server reads what it finds in the current and the home folder.
            config = scratch / "empty.toml"
            config.touch()
            path = self._path or scratch / "data"
            path.mkdir(parents=True, exist_ok=True)
            guard = _start_guard(
                port,
                scratch,
                [
                    command,
                    *("--config", str(config)),
                    *("--host", _HOST),
                    *("--port", str(port)),
                    *("--storage-path", str(path)),
                    "--sync-on-commit",
                    *("--noop-heartbeat-seconds", "10"),
                    *("--log-level", "WARNING"),
                    *self._args,
                ],
            )
        except OSError as error:
            shutil.rmtree(scratch, ignore_errors=True)
            msg = f"the embedded server cannot be started: {error}"
            raise EmbeddedServerError(msg) from error
        running = _Running(guard, port, path, scratch)
        try:
            running.wait_ready(self._startup_timeout_s)
        except BaseException:
            running.end()
            raise
        return running


@attrs.define(eq=False)
class _Running:
    """
    A guard process and the server below it, as the process that started them sees them.
    """

    guard: subprocess.Popen[bytes]
    port: int
    path: Path
    scratch: Path
    owner_pid: int = attrs.field(factory=os.getpid, init=False)
    #: 0 until the guard has told.
    server_pid: int = attrs.field(default=0, init=False)
    #: What the guard said at the end: the server's exit status, and the end of its output.
    status: int | None = attrs.field(default=None, init=False)
    output: str = attrs.field(default="", init=False)
    _heard: bytes = attrs.field(default=b"", init=False)

    def wait_ready(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        answering_pid: int | None = None
        while time.monotonic() < deadline_s:
            if not self._listen(_LOOK_S):
                raise self._early_end()
            if self.server_pid:
                answering_pid = _answering_pid(self.port, self.server_pid)
                if answering_pid == self.server_pid:
                    return
        self.end()
        msg = f"the embedded server did not answer on port {self.port} within {timeout_s:g} s"
        if answering_pid is not None:
            msg += f", but the process {answering_pid} did"
        raise EmbeddedServerError(msg + self._last_output())

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
        with contextlib.suppress(OSError):
            self.guard.stdin.close()
        deadline_s = time.monotonic() + _GUARD_STOP_S
        while (left_s := deadline_s - time.monotonic()) > 0 and self._listen(left_s):
            pass
        if left_s <= 0:
            # Server first: as the child of a living guard its id cannot have been given away.
            if self.server_pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.server_pid, signal.SIGKILL)
            self.guard.kill()
        self.guard.wait()
        self.guard.stdout.close()
        # Again, in case the guard was killed.
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _listen(self, timeout_s: float) -> bool:
        """
        Take in what the guard reports, for at most *timeout_s*; False once the guard has ended.
        """
        assert self.guard.stdout is not None
        if self.guard.stdout.closed:
            return False
        with selectors.DefaultSelector() as selector:
            selector.register(self.guard.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                return True
        data = os.read(self.guard.stdout.fileno(), 65_536)
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            self._take(line)
        return data != b""

    def _take(self, line: bytes) -> None:
        try:
            message: dict[str, Any] = json.loads(line)
            self.server_pid = message.get("pid", self.server_pid)
            self.status = message.get("status", self.status)
            self.output = message.get("output", self.output)
        except (ValueError, AttributeError):
            # The guard's own traceback.
            self.output += line.decode(errors="replace") + "\n"

    def _early_end(self) -> EmbeddedServerError:
        output = self.output.lower()
        if "address already in use" in output:
            return self._port_in_use()
        if "resource busy" in output:
            msg = f"the path {self.path} is in use by another embedded server"
        else:
            msg = f"the embedded server ended with status {self.status} before it answered"
        return EmbeddedServerError(msg + self._last_output())

    def _port_in_use(self) -> EmbeddedServerError:
        return _PortInUse(f"the port {self.port} is in use{self._last_output()}")

    def _last_output(self) -> str:
        return f"; its last output:\n{self.output.strip()}" if self.output.strip() else ""


def _start_guard(port: int, scratch: Path, command: Sequence[str]) -> subprocess.Popen[bytes]:
    # What is set for this program's interpreter (warnings as errors, a home) is not the server's.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTHON") or name == "PYTHONPATH"
    }
    guard = Path(__file__).with_name("_embedded_guard.py")
    return subprocess.Popen(
        [sys.executable, "-I", str(guard), str(os.getpid()), str(port), str(scratch), *command],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Not the caller's: a program that reads that to its end would wait for the guard.
        stderr=subprocess.STDOUT,
        cwd="/",
        env=environment,
        start_new_session=True,
    )


def _uri(port: int) -> str:
    # The server's table of retryable writes makes each write slower than the one before.
    options = "directConnection=true&retryWrites=false&w=majority&journal=true"
    return f"mongodb://{_HOST}:{port}/?{options}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        # As the server does it: connections that have ended do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            msg = f"the port {port} cannot be used: {error.strerror}"
            raise _PortInUse(msg) from error


def _answering_pid(port: int, expected_pid: int) -> int | None:
    """
    Return the id of the process that answers on *port*, None if none does; at most some seconds.

    An answer without an id counts as that of *expected_pid*.
    """
    try:
        # Cheaper than a client that finds nobody.
        socket.create_connection((_HOST, port), timeout=_ANSWER_S).close()
    except OSError:
        return None
    milliseconds = int(_ANSWER_S * 1000)
    client: MongoClient[dict[str, Any]] = MongoClient(
        _uri(port), serverSelectionTimeoutMS=milliseconds, socketTimeoutMS=milliseconds
    )
    with client:
        try:
            client.admin.command("ping")
            pid: int = client.admin.command("serverStatus")["pid"]
        except OperationFailure:
            # With --auth it talks to nobody unknown.
            return expected_pid
        except (PyMongoError, KeyError):
            return None
        return pid


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
