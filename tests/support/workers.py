"""
A worker as a process of its own, so that a test can kill it, freeze it, or give it a wrong clock.

Run as ``python -m tests.support.workers SETTINGS``, with the settings as JSON. It consumes the
collection ``tasks``, lets its functions write to the collection ``witness``, prints what happens as
one JSON object a line, and obeys the lines ``open KEY``, ``send KEY OPTIONS`` (as JSON) and
``stop SECONDS`` on its standard input.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime as dt
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from pymongo import MongoClient

from mscheduler_sync import Consumer, Event, Producer, RetryLater, Snooze, TaskContext
from tests.support import Document, wait_until
from tests.support.invariants import Witness

ROOT = Path(__file__).parents[2]


class WorkerProcess:
    """
    The parent's end of a worker process.
    """

    def __init__(self, settings: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.workers", json.dumps(settings)],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._said: list[Document] = []
        self._reader = threading.Thread(target=self._read, name="worker-output")
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def said(self, what: str, **fields: object) -> list[Document]:
        """
        Return what it has said about *what*, with these *fields*.
        """
        wanted = {"said": what, **fields}
        return [line for line in self._said if wanted.items() <= line.items()]

    def wait_said(self, what: str, timeout: float = 30, **fields: object) -> Document:
        """
        Wait until it says *what* with these *fields*.
        """
        found = wait_until(
            lambda: self.said(what, **fields) or not self._reader.is_alive(),
            f"the worker says {what} {fields}, not only {self._said}",
            timeout,
        )
        assert isinstance(found, list), f"the worker ended without saying {what}: {self._said}"
        first: Document = found[0]
        return first

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def freeze(self) -> None:
        """
        Stop it as a suspended machine would, and wait until it stands still.
        """
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self.wait_end()

    def wait_end(self, timeout: float = 30) -> int:
        """
        Wait until it has ended; return its exit status.
        """
        status = self._process.wait(timeout)
        self._reader.join(timeout)
        return status

    def close(self) -> None:
        """
        End it if it runs, and free what belongs to it.
        """
        if self._process.poll() is None:
            self.kill()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.append(json.loads(line))


@contextlib.contextmanager
def worker_process(
    uri: str,
    database: str,
    worker_id: str,
    *,
    environment: Mapping[str, str] | None = None,
    witness_uri: str | None = None,
    **options: Any,
) -> Iterator[WorkerProcess]:
    """
    Run a worker on ``tasks`` of *database*; it is killed at the end of the block if it still runs.

    *options* are those of its consumer.
    """
    settings = {
        "uri": uri,
        "witness_uri": witness_uri or uri,
        "database": database,
        "options": {"worker_id": worker_id, **options},
    }
    process = WorkerProcess(settings, environment or {})
    try:
        yield process
    finally:
        process.close()


def play_step(step: str, context: TaskContext, *, is_first: bool) -> None:
    """
    Take one step of a function. Those that end in ``-first`` are for its first run only.
    """
    if step.endswith("-first") and not is_first:
        return
    what = step.removesuffix("-first")
    if what == "raise":
        raise ValueError("as told")
    if what == "retry":
        raise RetryLater(0, "as told")
    if what == "snooze":
        raise Snooze(0)
    if what == "check":
        context.check()
    elif what == "hold-gil":
        # A call of this kind keeps the lock of the interpreter: no other thread runs meanwhile.
        ctypes.PyDLL(None).usleep(3_000_000)
    else:
        assert what == "return", what


# -- the worker itself --------------------------------------------------------------------------


class Worker:
    """
    The consumer of a worker process, and what its functions do.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._client: MongoClient[Document] = MongoClient(settings["uri"], tz_aware=True)
        self._witness_client: MongoClient[Document] = MongoClient(settings["witness_uri"])
        self._witness = Witness(self._witness_client[settings["database"]].witness)
        self._gates: dict[str, threading.Event] = {}
        self._seen: set[str] = set()
        self._lock = threading.Lock()
        tasks = self._client[settings["database"]].tasks
        self.producer = Producer(tasks)
        self.consumer = Consumer(tasks, self.function, **settings["options"])

    def function(self, params: Any, context: TaskContext) -> Any:
        with self._lock:
            is_first = context.attempt == 1 and context.key not in self._seen
            self._seen.add(context.key)
        with self._witness.running(context):
            self.say("began", key=context.key, attempt=context.attempt)
            for step in params["do"].split():
                if step == "wait":
                    self._wait_for_gate(context)
                else:
                    play_step(step, context, is_first=is_first)
            return params.get("value")

    def _wait_for_gate(self, context: TaskContext) -> None:
        gate = self._gate(context.key)
        while not gate.wait(0.01):
            if context.cancelled.is_set():
                self.say("told", key=context.key, reason=context.reason)
                gate.wait(60)

    def _gate(self, key: str) -> threading.Event:
        with self._lock:
            return self._gates.setdefault(key, threading.Event())

    def work(self) -> None:
        """
        Work until told to stop.
        """
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()

        def read() -> None:
            for line in sys.stdin:
                lines.put(line)
            lines.put("stop 10")

        threading.Thread(target=read, daemon=True).start()
        with self.consumer.subscribe() as subscription:
            teller = threading.Thread(target=self._tell_all, args=[subscription])
            self.consumer.start()
            teller.start()
            self.say("started", time=time.time())
            while True:
                command, argument, *rest = lines.get().split(maxsplit=2)
                if command == "open":
                    self._gate(argument).set()
                elif command == "send":
                    self._send(argument, json.loads(rest[0]))
                else:
                    report = self.consumer.stop(float(argument))
                    teller.join()
                    self.say("stopped", report=attrs.asdict(report), clock_reads=clock_reads())
                    return

    def _send(self, key: str, options: Document) -> None:
        if "run_at" in options:
            options["run_at"] = dt.datetime.fromisoformat(options["run_at"])
        do = options.pop("do", "return")
        self.producer.send(key, {"do": do}, **options)
        self.say("sent", key=key)

    def _tell_all(self, events: Iterable[Event]) -> None:
        for event in events:
            self.say(type(event).__name__, **attrs.asdict(event))

    def say(self, said: str, **fields: object) -> None:
        # One write each: whole lines, whatever the process is in the middle of when it dies.
        line = json.dumps({"said": said, **fields}, default=str)
        os.write(sys.stdout.fileno(), line.encode() + b"\n")


def clock_reads() -> list[str]:
    """
    Return the modules of the library that have read the wall clock, where that is watched.
    """
    return list(getattr(sys.modules.get("sitecustomize"), "read_by", []))


if __name__ == "__main__":
    Worker(json.loads(sys.argv[1])).work()
