"""
Keep one server process for exactly as long as the process that wants it.

A program of its own, run by path with ``python -I``: standard library only, nothing of the
package. `EmbeddedServer` starts it in a session of its own, so that Ctrl-C reaches neither
guard nor server, with the arguments PARENT_PID SCRATCH_FOLDER COMMAND...

- Standard input is a pipe that the parent holds: anything that arrives there, and its end, means
  stop. A forked sibling may hold the pipe open after the parent's death, so the parent's id is
  watched too. SIGTERM means stop as well.
- Standard output gets one JSON object a line: ``{"pid": 1}`` once the command runs,
  ``{"port": 2}`` once it has printed that it listens there, and
  ``{"status": 0, "output": "..."}`` once it has ended.
- The scratch folder is where the command runs, and is removed at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO

#: The parent's life and SIGTERM are looked at so often.
CHECK_S = 0.5
GRACE_S = 5.0
KNOCK_S = 0.02
KNOCKS_PER_SIGNAL = 5
OUTPUT_LIMIT = 8192
LISTENS = re.compile(rb" listening on \S+:(\d+)\s")
PR_SET_PDEATHSIG = 1


def main() -> int:
    parent_pid, scratch, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    stop_asked = _note_sigterm()
    try:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=scratch,
            start_new_session=True,
            preexec_fn=_die_with_guard(),  # noqa: PLW1509 - this process has one thread
        )
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        _report({"status": -1, "output": str(error)})
        return 1
    assert server.stdout is not None
    output = _Output(server.stdout)
    _report({"pid": server.pid})
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        selector.register(output.stream, selectors.EVENT_READ)
        while server.poll() is None and os.getppid() == parent_pid and not stop_asked:
            ready = {key.fileobj for key, _ in selector.select(CHECK_S)}
            if sys.stdin in ready:
                break
            if output.stream in ready and not output.read():
                selector.unregister(output.stream)
                # Its end of the pipe closes a moment before the process is gone.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    server.wait(CHECK_S)
    _stop(server, output)
    output.read()
    shutil.rmtree(scratch, ignore_errors=True)
    _report({"status": server.returncode, "output": output.end.decode(errors="replace")})
    return 0


class _Output:
    """
    What the server prints: its port, which is reported, and the end. Reading never waits.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        os.set_blocking(stream.fileno(), False)
        self.stream = stream
        self.end = b""
        #: 0 until the server listens.
        self.port = 0

    def read(self) -> bool:
        """
        Take what is there; False once there will be no more.
        """
        try:
            while data := os.read(self.stream.fileno(), OUTPUT_LIMIT):
                self.end = (self.end + data)[-OUTPUT_LIMIT:]
                if not self.port and (match := LISTENS.search(self.end)):
                    self.port = int(match[1])
                    _report({"port": self.port})
        except BlockingIOError:
            return True
        return False


def _note_sigterm() -> list[int]:
    """
    Return a list that SIGTERM fills; the other signals of a terminal are ignored.
    """
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: received.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # The thread that started the guard may have had signals blocked; that is inherited.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return received


def _die_with_guard() -> Callable[[], None] | None:
    """
    Return what the server must run first so that a SIGKILL of the guard ends it too (Linux).
    """
    if sys.platform != "linux":
        return None
    try:
        import ctypes

        prctl = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return None
    guard_pid = os.getpid()

    def ask_kernel() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard_pid:
            os._exit(1)

    return ask_kernel


def _stop(server: subprocess.Popen[bytes], output: _Output) -> None:
    deadline_s = time.monotonic() + GRACE_S
    if server.poll() is None:
        server.terminate()
    knocks = 0
    while server.poll() is None and time.monotonic() < deadline_s:
        # One that has seen the signal is held up by its blocked accept() until somebody connects,
        # and then listens no more.
        if _knock(output.port):
            knocks += 1
            if knocks % KNOCKS_PER_SIGNAL == 0:
                # The system gave the signal to a thread other than the one that waits for it.
                server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(KNOCK_S)
        output.read()
    if server.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _knock(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=KNOCK_S).close()
    except OSError:
        return False
    return True


def _report(message: dict[str, object]) -> None:
    # Nobody reads any more when the parent is dead.
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
