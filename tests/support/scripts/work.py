"""
What the programs of this folder share: their arguments, their functions, how they speak.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pymongo import MongoClient
from pymongo.collection import Collection

from mscheduler_sync import Consumer, StopReport, TaskContext
from tests.support.invariants import Witness

Document = dict[str, Any]

URI, DATABASE = sys.argv[1], sys.argv[2]
OPTIONS: dict[str, Any] = json.loads(sys.argv[3])
SHORT = {"serverSelectionTimeoutMS": 20_000}

_began = threading.Event()


def client() -> MongoClient[Document]:
    return MongoClient(URI, tz_aware=True)


def say(what: str, value: object) -> None:
    """
    Print one line: *what*, and *value* as JSON. One write, so that threads do not mix.
    """
    sys.stdout.write(f"{what} {json.dumps(value)}\n")
    sys.stdout.flush()


def say_report(report: StopReport) -> None:
    say(
        "report",
        {
            "finished": sorted(report.finished),
            "released": sorted(report.released),
            "abandoned": sorted(report.abandoned),
            "unstored": sorted(report.unstored),
            "threads": sorted(name.split(":")[0] for name in report.threads),
        },
    )


class _Speaker(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say("log", getattr(record, "event", "-"))


def speak() -> None:
    """
    Print a line ``log "event"`` for each log record of the library.
    """
    log = logging.getLogger("mscheduler_sync")
    log.addHandler(_Speaker())
    log.setLevel(logging.INFO)


def wait_begun() -> None:
    """
    Wait until some function runs.
    """
    assert _began.wait(30)


def wait_gate(name: str) -> None:
    """
    Wait for the test to open the gate, and listen to nothing else.
    """
    gate = Path(f"gate-{name}")
    while not gate.exists():
        time.sleep(0.01)


class Work:
    """
    The function of the tasks: does what ``params["do"]`` says, and writes down that it ran.
    """

    def __init__(self, tasks: Collection[Document]) -> None:
        self._witness = Witness(tasks.database.witness)
        self.consumer: Consumer

    def __call__(self, params: Any, context: TaskContext) -> Any:
        with self._witness.running(context):
            say("began", context.key)
            _began.set()
            what = params["do"]
            if what == "gate":
                wait_gate(context.key)
            elif what == "sleep":
                time.sleep(params["seconds"])
            elif what == "heed":
                context.cancelled.wait(60)
                context.check()
            elif what == "request_stop":
                self.consumer.request_stop()
            elif what == "stop":
                say("stop", repr(self.consumer.stop()))
            say("ended", context.key)
            return what


def name_of(handler: Any) -> str:
    """
    Name a signal handler.
    """
    return str(getattr(handler, "__name__", handler))


def handler_names() -> list[str]:
    return [name_of(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
