"""
A fleet of node processes for tests: the program of one, and its control from the test.

    python -m tests.support.pool_fleet URI DATABASE POOL NAME OPTIONS

Each process has one node with one worker, or with a planner if it has the option plan_interval.
A job's start begins a run: while it lasts, a thread of the process raises the fenced counter of
its key and keeps the run's document up.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pymongo import MongoClient
from pymongo.database import Database
from pymongo.errors import PyMongoError

from mscheduler_sync import StoreError
from mscheduler_sync.pool import Job, JobPlan, Node
from tests.support import Document, wait_until
from tests.support.pool_invariants import FencedCounters, monotonic_s

ROOT = Path(__file__).parents[2]
#: Of the processes' clients, for fail points.
APP_NAME = "pool_fleet"


class CountingHandler:
    """
    Runs jobs as entries of one loop, as a poller of many stations would.
    """

    def __init__(self, database: Database[Document], name: str) -> None:
        self._name = name
        self._counters = FencedCounters(database.counters)
        self._runs = database.runs
        self._lock = threading.Lock()
        self._jobs: dict[str, tuple[Job, str]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="counting", daemon=True)
        self._thread.start()

    def start(self, job: Job) -> None:
        run_id = uuid.uuid4().hex
        run = {
            "_id": run_id,
            "key": job.key,
            "fence": job.fence,
            "name": self._name,
            "pid": os.getpid(),
            "payload": job.payload,
            "began": monotonic_s(),
            "ended": None,
            "notes": [],
        }
        with self._lock:
            self._jobs[job.key] = (job, run_id)
        with contextlib.suppress(PyMongoError):
            self._runs.insert_one(run)

    def stop(self, key: str) -> None:
        with self._lock:
            _, run_id = self._jobs.pop(key)
        ended = monotonic_s()
        with contextlib.suppress(PyMongoError):
            self._runs.update_one({"_id": run_id}, {"$set": {"ended": ended}})

    def notify(self, key: str, payload: Any) -> None:
        with self._lock:
            _, run_id = self._jobs[key]
        self._runs.update_one({"_id": run_id}, {"$push": {"notes": payload}})

    def end(self) -> None:
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._stop.wait(0.1):
            with self._lock:
                jobs = list(self._jobs.values())
            for job, run_id in random.sample(jobs, min(len(jobs), 5)):
                with contextlib.suppress(PyMongoError):
                    self._counters.raise_(job.key, job.fence, run_id)


class WantedJobs:
    """
    Plans what the document "wanted" says. After reading it, waits while it is told to hold this
    process.
    """

    name = "wanted"

    def __init__(self, database: Database[Document], name: str) -> None:
        self._control = database.control
        self._plans = database.plans
        self._name = name

    def plan(self) -> JobPlan:
        wanted = self._control.find_one({"_id": "wanted"})
        assert wanted is not None
        self._plans.insert_one({"name": self._name, "keys": wanted["keys"]})
        wait_until(lambda: not self._is_held(), "the plan may go on", 60)
        return JobPlan(start=dict.fromkeys(wanted["keys"]), stop_all=True)

    def _is_held(self) -> bool:
        wanted = self._control.find_one({"_id": "wanted"})
        return wanted is not None and wanted["hold"] == self._name


def insist(call: Callable[[], object]) -> None:
    """
    Do as an application does that is started before its database answers.
    """
    while True:
        try:
            call()
        except StoreError:
            continue
        return


def main() -> None:
    uri, database_name, pool, name, options = sys.argv[1:]
    client: MongoClient[Document] = MongoClient(
        uri, serverSelectionTimeoutMS=3000, appname=APP_NAME
    )
    database = client[database_name]
    arguments = json.loads(options)
    interval = arguments.pop("plan_interval", None)
    handler = CountingHandler(database, name)
    node = Node(database, pool, **arguments)
    insist(node.start)
    if interval is None:
        insist(lambda: node.add_worker(handler))
    else:
        insist(lambda: node.schedule(WantedJobs(database, name), interval))
    print("ready", node.id, flush=True)
    report = node.run_forever()
    handler.end()
    client.close()
    print("closed", json.dumps({"left": report.left, "released": len(report.released)}), flush=True)


class NodeProcess:
    """
    One process of the fleet.
    """

    def __init__(self, uri: str, database: str, pool: str, name: str, **options: Any) -> None:
        self.name = name
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.support.pool_fleet"),
                *(uri, database, pool, name, json.dumps(options)),
            ],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, name=f"reader-{name}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())

    def wait_ready(self) -> str:
        """
        Wait until its worker is in the ring; return the node's id.
        """
        line = wait_until(
            lambda: next((one for one in self.lines if one.startswith("ready")), None),
            f"{self.name} is ready",
            30,
        )
        assert line is not None
        return line.split()[1]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        """
        Kill it and wait for its end.
        """
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(10)
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def fleet(uri: str, database: str, pool: str, **options: Any) -> Iterator[list[NodeProcess]]:
    """
    A list to which the test adds processes with `grow`; all are killed at the end.
    """
    processes: list[NodeProcess] = []
    try:
        yield processes
    finally:
        for process in processes:
            process.end()


if __name__ == "__main__":
    main()
