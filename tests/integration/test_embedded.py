"""
The embedded server: starting, stopping, what is said when it cannot start, and who outlives whom.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from mscheduler_sync import embedded
from mscheduler_sync.embedded import EmbeddedServer, EmbeddedServerError, open_server
from tests.support import wait_until

ROOT = Path(__file__).parents[2]
#: For what takes one second on an idle machine: half to notice the parent's end, half to stop.
GONE_S = 10.0

Script = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture(scope="module", autouse=True)
def need_command() -> None:
    """
    Skip where the extra is not installed, but never in CI.
    """
    try:
        embedded.find_server_command()
    except EmbeddedServerError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """
    The folder in which this process and its children make their temporary ones.
    """
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


@pytest.fixture
def run_script() -> Iterator[Script]:
    """
    Start Python code in a process and a session of its own, all of which is killed at the end.
    """
    with contextlib.ExitStack() as stack:

        def start(code: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(code)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            stack.enter_context(process)
            stack.callback(_kill_session, process.pid)
            return process

        yield start


def _kill_session(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _alive(pid: int) -> bool:
    """
    Return whether the process runs; one that has ended but was not yet waited for does not.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return not Path("/proc/self").exists()


def _wait_gone(pid: int) -> None:
    wait_until(lambda: not _alive(pid), f"the process {pid} is gone", GONE_S)


def _parent_pid(pid: int) -> int:
    status = subprocess.run(
        ["ps", "-o", "ppid=", "-p", str(pid)], check=True, capture_output=True, text=True
    )
    return int(status.stdout)


def _answers(uri: str) -> bool:
    with MongoClient[dict[str, Any]](uri, serverSelectionTimeoutMS=3000) as client:
        return bool(client.admin.command("ping")["ok"])


def _fake_command(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    command = folder / "command"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setattr(embedded, "find_server_command", lambda: str(command))


def test_serves_and_leaves_nothing_behind(temporary: Path) -> None:
    """
    A server without a path answers while the block runs; then process and data are gone.
    """
    with EmbeddedServer() as server:
        assert server.running
        assert server.uri == (
            f"mongodb://127.0.0.1:{server.port}/"
            "?directConnection=true&retryWrites=false&w=majority&journal=true"
        )
        assert server.path.is_relative_to(temporary)
        moment = datetime(2024, 5, 6, 7, 8, 9, tzinfo=timezone.utc)
        server.collection("tasks").insert_one({"_id": 1, "at": moment})
        assert server.collection("tasks").find_one() == {"_id": 1, "at": moment}
        assert server.collection("tasks").database.name == "mscheduler"
    assert not server.running
    assert not _alive(server.pid)
    assert list(temporary.iterdir()) == []


def test_is_out_of_reach_of_the_terminal() -> None:
    """
    Server and guard are in sessions of their own, so Ctrl-C does not reach them.
    """
    with EmbeddedServer() as server:
        guard_pid = _parent_pid(server.pid)
        ours = os.getsid(0)
        assert ours not in {os.getsid(server.pid), os.getsid(guard_pid)}


def test_further_arguments_reach_the_command() -> None:
    """
    *args* stand behind ours in the command line.
    """
    with EmbeddedServer(args=["--enable-test-commands"]) as server:
        admin = server.collection("tasks").database.client.admin
        assert admin.command({"configureFailPoint": "failCommand", "mode": "off"})["ok"] == 1


def test_wrong_arguments_are_refused() -> None:
    """
    Mistakes show when the object is made.
    """
    with pytest.raises(TypeError, match="args must be a sequence of strings"):
        EmbeddedServer(args="--auth")
    with pytest.raises(ValueError, match="port must be between 0 and 65535, got 65536"):
        EmbeddedServer(port=65_536)
    with pytest.raises(ValueError, match="startup_timeout must be more than 0 seconds"):
        EmbeddedServer(startup_timeout=0)


def test_may_be_used_once() -> None:
    """
    A second start is refused, running or stopped; stop may be repeated.
    """
    server = EmbeddedServer()
    with pytest.raises(EmbeddedServerError, match="was not started"):
        _ = server.uri
    server.start()
    with pytest.raises(EmbeddedServerError, match="runs already; make a new"):
        server.start()
    server.stop()
    server.stop()
    with pytest.raises(EmbeddedServerError, match="was stopped; make a new"):
        server.start()
    with pytest.raises(EmbeddedServerError, match="was stopped"):
        server.collection("tasks")


def test_stop_before_start() -> None:
    """
    A stop that comes first is kept.
    """
    server = EmbeddedServer()
    server.stop()
    with pytest.raises(EmbeddedServerError, match="was stopped"):
        server.start()


def test_data_survives_on_the_same_path(tmp_path: Path) -> None:
    """
    A new server on the path and the port of a stopped one, and of a killed one, has the data.
    """
    path = tmp_path / "made" / "here"
    with EmbeddedServer(path) as first:
        first.collection("tasks").insert_one({"_id": 1})
        assert first.path == path
    with EmbeddedServer(path, first.port) as second:
        assert second.uri == first.uri
        second.collection("tasks").insert_one({"_id": 2})
        os.kill(second.pid, signal.SIGKILL)
        wait_until(lambda: not second.running, "the server's end is noticed")
    with EmbeddedServer(path) as third:
        assert list(third.collection("tasks").find()) == [{"_id": 1}, {"_id": 2}]


def test_path_in_use(tmp_path: Path, temporary: Path) -> None:
    """
    A second server on a path says so, with the server's own words, and leaves nothing behind.
    """
    with EmbeddedServer(tmp_path / "data") as first:
        before = list(temporary.iterdir())
        second = EmbeddedServer(tmp_path / "data")
        with pytest.raises(EmbeddedServerError, match="data is in use by another") as caught:
            second.start()
        assert "its last output:\n" in str(caught.value)
        second.stop()
        assert list(temporary.iterdir()) == before
        assert _answers(first.uri)


def test_path_that_cannot_be_made(tmp_path: Path, temporary: Path) -> None:
    """
    A path below a file is a clear error.
    """
    (tmp_path / "file").touch()
    with pytest.raises(EmbeddedServerError, match=r"cannot be started: .*Not a directory"):
        EmbeddedServer(tmp_path / "file" / "data").start()
    assert list(temporary.iterdir()) == []


def test_port_in_use(temporary: Path) -> None:
    """
    A port on which something listens is refused in one line.
    """
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(EmbeddedServerError) as caught:
            EmbeddedServer(port=port).start()
    assert str(caught.value) == f"the port {port} is in use"
    assert list(temporary.iterdir()) == []


def test_port_of_another_server() -> None:
    """
    The server of somebody else is not taken for ours; without a port each gets its own.
    """
    with EmbeddedServer() as other, EmbeddedServer() as server:
        assert server.port != other.port
        assert _answers(server.uri)
        with pytest.raises(EmbeddedServerError, match=f"the port {other.port} is in use"):
            EmbeddedServer(port=other.port).start()
        assert _answers(other.uri)


def test_command_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """
    Without the extra the error says what to install.
    """
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EmbeddedServerError, match=r"pip install 'mscheduler_sync\[embedded\]'"):
        EmbeddedServer().start()


def test_command_that_does_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, temporary: Path
) -> None:
    """
    A command that the system cannot execute is reported, not waited for.
    """
    monkeypatch.setattr(embedded, "find_server_command", lambda: str(tmp_path / "absent"))
    with pytest.raises(EmbeddedServerError, match=r"(?s)before it answered.*No such file"):
        EmbeddedServer().start()
    assert list(temporary.iterdir()) == []


def test_server_that_ends_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """
    The error has the exit status and what was printed.
    """
    _fake_command(monkeypatch, tmp_path, "echo out of luck >&2; exit 3")
    with pytest.raises(EmbeddedServerError) as caught:
        EmbeddedServer().start()
    assert str(caught.value) == (
        "the embedded server ended with status 3 before it answered; its last output:\nout of luck"
    )


def test_server_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, temporary: Path
) -> None:
    """
    A server that lives but does not answer in time is ended, and its output shown.
    """
    mark = tmp_path / "pid"
    _fake_command(monkeypatch, tmp_path, f"echo $$ > {mark}; echo thinking; exec sleep 60")
    with pytest.raises(EmbeddedServerError, match=r"(?s)did not answer within 0.5 s.*thinking"):
        EmbeddedServer(startup_timeout=0.5).start()
    assert not _alive(int(mark.read_text()))
    assert list(temporary.iterdir()) == []


def test_talkative_server_is_not_held_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """
    Output is taken in while the server runs, and only its end is kept.
    """
    script = "i=0; while [ $i -lt 20000 ]; do echo line $i of many; i=$((i+1)); done; exit 4"
    _fake_command(monkeypatch, tmp_path, script)
    with pytest.raises(EmbeddedServerError, match="ended with status 4") as caught:
        EmbeddedServer().start()
    assert str(caught.value).endswith("line 19999 of many")
    assert len(str(caught.value)) < 10_000


def test_server_that_dies_later() -> None:
    """
    A killed server is noticed, and stop does not mind.
    """
    with EmbeddedServer() as server:
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: not server.running, "the server's end is noticed")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_server_ends_with_its_guard() -> None:
    """
    Even a guard that is killed takes the server along.
    """
    with EmbeddedServer() as server:
        os.kill(_parent_pid(server.pid), signal.SIGKILL)
        _wait_gone(server.pid)


PARENT = """
    import os, signal, sys, threading
    from mscheduler_sync.embedded import EmbeddedServer

    server = EmbeddedServer()
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join()
    sibling = 0
"""
FORKED = """
    sibling = os.fork()
    if not sibling:
        signal.pause()
"""
WAITING = """
    assert server.collection("tasks").count_documents({}) == 0
    print(os.getpid(), server.pid, sibling, flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("fork", [False, True], ids=["alone", "forked"])
def test_server_ends_with_its_killed_parent(
    temporary: Path, run_script: Script, fork: bool
) -> None:
    """
    A SIGKILL of the parent ends the server, though a forked sibling holds every pipe open.

    The thread that started the server had ended before; that did not matter.
    """
    process = run_script(PARENT + (FORKED if fork else "") + WAITING)
    parent, server, sibling = map(int, _line(process).split())
    assert _alive(server)
    os.kill(parent, signal.SIGKILL)
    _wait_gone(server)
    if fork:
        assert _alive(sibling)
    wait_until(lambda: list(temporary.iterdir()) == [], "the temporary folder is removed")


def test_stop_with_a_forked_sibling_alive(run_script: Script) -> None:
    """
    The parent's stop works though a forked child holds the pipe to the guard open.
    """
    process = run_script(PARENT + FORKED + "    server.stop(); print(server.pid, flush=True)")
    assert not _alive(int(_line(process)))
    assert process.wait(10) == 0


def test_exit_without_stop(run_script: Script) -> None:
    """
    A program that forgets to stop the server ends, and the server with it.
    """
    process = run_script(PARENT + "    print(server.pid, flush=True)")
    server = int(_line(process))
    assert process.wait(10) == 0
    assert not _alive(server)


def test_forked_child_cannot_stop_the_server(run_script: Script) -> None:
    """
    A child uses the server with its own client; neither its stop nor its exit ends the server.
    """
    process = run_script(
        PARENT
        + """
    server.collection("tasks").insert_one({"_id": 1})
    child = os.fork()
    if not child:
        server.collection("tasks").insert_one({"_id": 2})
        assert server.running
        server.stop()
        sys.exit(7)
    _, status = os.waitpid(child, 0)
    ids = [task["_id"] for task in server.collection("tasks").find()]
    print(os.waitstatus_to_exitcode(status), ids, server.running, flush=True)
    """
    )
    assert _line(process) == "7 [1, 2] True"
    assert process.wait(10) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serving_from_the_shell(temporary: Path, number: signal.Signals) -> None:
    """
    The module prints the URI on one line and serves until it is told to end, with status 0.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "mscheduler_sync.embedded", "--path", str(temporary / "data")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        uri = _line(process)
        with MongoClient[dict[str, Any]](uri) as client:
            server = client.admin.command("serverStatus")["pid"]
        os.killpg(process.pid, number)
        assert process.communicate(timeout=10)[0] == ""
        assert process.returncode == 0
    assert not _alive(server)
    assert [folder.name for folder in temporary.iterdir()] == ["data"]


def test_serving_from_the_shell_fails() -> None:
    """
    A server that cannot start is one line on standard error and status 1.
    """
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        process = subprocess.run(
            [sys.executable, "-m", "mscheduler_sync.embedded", "--port", str(port)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr == f"the port {port} is in use\n"


def test_open_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """
    MSCHEDULER_URI is used as it is; without it a server is started and stopped.
    """
    monkeypatch.setenv("MSCHEDULER_URI", "mongodb://elsewhere/")
    with open_server(tmp_path / "data") as uri:
        assert uri == "mongodb://elsewhere/"
    assert not (tmp_path / "data").exists()

    monkeypatch.delenv("MSCHEDULER_URI")
    with open_server(tmp_path / "data") as uri:
        assert _answers(uri)
    assert (tmp_path / "data").is_dir()
