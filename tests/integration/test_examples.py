"""
The examples: each runs as its docstring says, and prints what it promises.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pymongo import MongoClient

from tests.support import Document

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
#: So few files are parsed within seconds, and still leave time to kill a worker.
DEMO = ("demo.py", "--limit", "60")

QUICKSTART = r"""
a new task: True
a second one under the same key: False
invoice to orders@example.com
result: {'sent_to': 'orders@example.com'}
"""
PRINTED = {
    "quickstart": QUICKSTART,
    "declared": r"""
new: True
again: False
refused: task 'declared\.send_invoice' got a wrong argument: order_id must be int, is str
result: 42: 19\.90 due on 24 December, sent in attempt 3
the task 'invoice:43' failed: PermanentFailure: ValueError: nobody owes a negative sum
""",
    "delayed": r"""
soon: done in attempt 1
flaky: done in attempt 3
hopeless: the task 'hopeless' failed: ConnectionError: the other side is busy
flaky: attempt 1 failed, the next one 0\.5 s later
flaky: attempt 2 failed, the next one 1\.0 s later
tomorrow: waiting
""",
    "many_workers": r"""
cache cleared in berlin
cache cleared in paris
cache cleared in rome
shelves counted in rome
report written somewhere
""",
    "events": r"""
AttemptStarted of double:21
TaskSucceeded of double:21
AttemptEnded of double:21
TaskFinished of double:21
result: 42
first failure: double:\?
""",
    "graceful_stop": r"""
first copies atlas from page 0 of 20
first is asked to end, reason: shutdown
finished \(\), released \('copy:atlas',\), abandoned \(\)
second copies atlas from page [1-9]\d? of 20
pages copied: 20
given back: 1, failed: 0
""",
    "router": r"""
invoice:42: invoice sent to orders@example\.com
nameless: waiting, name None
parcel:42: waiting, name parcel\.pack
reminder:42: orders@example\.com reminded
""",
}

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """
    Start an example as its docstring says, with warnings as errors; it is killed at the end.
    """
    with contextlib.ExitStack() as stack:

        def run(
            *command: str, uri: str | None = None, terminal: int | None = None
        ) -> subprocess.Popen[str]:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
            if uri is not None:
                environment["MSCHEDULER_URI"] = uri
            process = subprocess.Popen(
                [sys.executable, str(EXAMPLES / command[0]), *command[1:]],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if terminal is None else terminal,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield run


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_prints_what_it_promises_and_leaves_no_database(
    name: str, start: Start, server_uri: str, client: MongoClient[Document]
) -> None:
    """
    Each small example ends with status 0, prints exactly its lines, and drops its database.
    """
    before = set(client.list_database_names())
    process = start(f"{name}.py", uri=server_uri)
    printed, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert re.fullmatch(PRINTED[name].lstrip(), printed), printed
    assert set(client.list_database_names()) <= before


def test_every_example_is_tested() -> None:
    """
    No example can be added without a line here.
    """
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*PRINTED, "demo", "pool_pollers"}


@pytest.mark.usefixtures("server_uri")
def test_an_example_starts_its_own_server(start: Start) -> None:
    """
    Without MSCHEDULER_URI the quickstart needs nothing but itself.
    """
    process = start("quickstart.py")
    printed, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert re.fullmatch(QUICKSTART.lstrip(), printed), printed


def test_the_demo_loses_a_worker_and_nothing_else(
    start: Start, server_uri: str, client: MongoClient[Document]
) -> None:
    """
    The demonstration in small: a worker is killed at work, its tasks are taken over by name, and
    all results agree with a direct computation.
    """
    process = start(*DEMO, uri=server_uri)
    printed, errors = process.communicate(timeout=100)
    assert (process.returncode, errors) == (0, ""), printed
    assert not re.search(r"WRONG|FAILED|\r|\x1b", printed), printed
    assert re.search(r"^100 %  60 of 60 files ", printed, re.MULTILINE), printed
    assert re.search(r"^  results +60  0 differ ", printed, re.MULTILINE), printed
    killed = re.search(
        r"^worker-2 was killed \(SIGKILL\) while it held \d+ tasks?:\n((?:  parse:\S+\n)+)",
        printed,
        re.MULTILINE,
    )
    assert killed, printed
    taken_over = re.findall(
        r"^  (parse:\S+)  taken over by worker-[13] after (\d+\.\d) s$", printed, re.MULTILINE
    )
    assert sorted(key for key, _ in taken_over) == sorted(killed[1].split())
    # Not before the lease had ended.
    assert all(float(after_s) >= 6.0 for _, after_s in taken_over)
    assert _demo_databases(client) == []


def test_the_demo_ends_cleanly_at_ctrl_c(
    start: Start, server_uri: str, client: MongoClient[Document]
) -> None:
    """
    On a terminal there is a progress bar; an interrupt ends the workers and drops the database.
    """
    controller, terminal = pty.openpty()
    try:
        process = start(*DEMO, uri=server_uri, terminal=terminal)
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # the demonstration has ended: see what it says below
            while b"\r\x1b[K[#" not in shown:
                shown += os.read(controller, 4096)
        process.send_signal(signal.SIGINT)
        # The workers hold the other end of this pipe too: it ends when the last of them does.
        _, errors = process.communicate(timeout=30)
    finally:
        os.close(controller)
    assert process.returncode == 130, (shown, errors)
    assert errors == "\ninterrupted; all that was started has been stopped\n"
    assert _demo_databases(client) == []


def test_the_demo_leaves_no_worker_behind_when_it_is_killed(
    start: Start, server_uri: str, client: MongoClient[Document]
) -> None:
    """
    Workers see the death of their parent, even by SIGKILL, and end.
    """
    process = start(*DEMO, uri=server_uri)
    assert process.stdout is not None
    for line in process.stdout:
        if " of 60 files" in line:
            break
    process.kill()
    # As above: comes to an end only with the last worker.
    process.communicate(timeout=30)
    for name in _demo_databases(client):
        client.drop_database(name)


def _demo_databases(client: MongoClient[Document]) -> list[str]:
    return [name for name in client.list_database_names() if name.startswith("mscheduler_demo_")]
