"""
A fleet of pollers: one long-running job for each weather station, over three processes.

    make demo-pool                           (or: python examples/pool_pollers.py)

Each process has a node with one worker, which fetches its stations over HTTP every half second.
This process is the weather service: it sees who asks for which station. It then has one poller
process killed, one station told to poll faster, another process ended gently, and shows where
the stations have gone.

Runs on the embedded server; set MSCHEDULER_URI to use another. Linux and macOS only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pymongo import MongoClient

from mscheduler_sync.embedded import open_server
from mscheduler_sync.pool import Job, JobExists, Node

STATIONS = [f"station:{number:02d}" for number in range(1, 13)]
POLLERS = ("berlin", "paris", "rome")
EVERY_S = 0.5
#: Short, so that the demonstration is; the default is 30.
TTL_S = 4.0
PATIENCE_S = 30.0


# -- a poller process ------------------------------------------------------------------------------


class Poller:
    """
    Polls many stations from one thread: `start` and `stop` only change its list.
    """

    def __init__(self, name: str, url: str) -> None:
        self._name = name
        self._url = url
        self._lock = threading.Lock()
        self._every: dict[str, float] = {}
        self._next: dict[str, float] = {}
        threading.Thread(target=self._poll, daemon=True).start()

    def start(self, job: Job) -> None:
        with self._lock:
            self._every[job.key] = job.payload["every"]
            self._next[job.key] = 0.0

    def stop(self, key: str) -> None:
        with self._lock:
            del self._every[key], self._next[key]

    def notify(self, key: str, payload: Any) -> None:
        with self._lock:
            self._every[key] = payload["every"]

    def _poll(self) -> None:
        while True:
            with self._lock:
                now = time.monotonic()
                due = [key for key, at in self._next.items() if at <= now]
                for key in due:
                    self._next[key] = now + self._every[key]
            for key in due:
                request = urllib.request.Request(f"{self._url}/{key}")
                request.add_header("X-Poller", self._name)
                with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=2):
                    pass
            time.sleep(0.05)


def work(uri: str, database: str, name: str, url: str) -> None:
    """
    The program of one poller process, until SIGTERM.
    """
    client: MongoClient[dict[str, Any]]
    with MongoClient(uri) as client, Node(client[database], "weather", worker_ttl=TTL_S) as node:
        node.add_worker(Poller(name, url))
        print("ready", flush=True)
        node.run_forever()


# -- the weather service ---------------------------------------------------------------------------


class Service(ThreadingHTTPServer):
    """
    Answers requests for stations, and remembers who has asked last, and how often.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.asked_by: dict[str, str] = {}
        self.count: Counter[str] = Counter()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Service)
        station = self.path[1:]
        self.server.asked_by[station] = self.headers["X-Poller"]
        self.server.count[station] += 1
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """
        Silence.
        """


# -- the demonstration -----------------------------------------------------------------------------


def wait_until(condition: Callable[[], object], what: str) -> float:
    """
    Wait for *condition*; return the seconds that took.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > PATIENCE_S:
            raise SystemExit(f"not within {PATIENCE_S:g} s: {what}")
        time.sleep(0.02)
    return time.monotonic() - began


def show(service: Service) -> None:
    """
    Print who polls which station.
    """
    for name in POLLERS:
        mine = [key.split(":")[1] for key, by in sorted(service.asked_by.items()) if by == name]
        if mine:
            print(f"  {name:7} polls {len(mine):2}: {' '.join(mine)}")


def demonstrate(client: Node, service: Service, pollers: dict[str, subprocess.Popen[str]]) -> None:
    for station in STATIONS:
        client.dispatch(station, {"every": EVERY_S})
    wait_until(lambda: len(service.asked_by) == len(STATIONS), "all stations are polled")
    print(f"{len(STATIONS)} stations over {len(POLLERS)} processes:")
    show(service)
    try:
        client.dispatch(STATIONS[0], {"every": 1})
    except JobExists as error:
        print(f"a second dispatch: {error}")

    victim = service.asked_by[STATIONS[0]]
    lost = [key for key, by in service.asked_by.items() if by == victim]
    pollers[victim].kill()
    took = wait_until(
        lambda: victim not in {service.asked_by[key] for key in lost}, "its stations are polled"
    )
    print(f"{victim} was killed (SIGKILL); its {len(lost)} stations moved after {took:.1f} s:")
    show(service)

    station = STATIONS[-1]
    client.notify(station, {"every": 0.1})
    before = dict(service.count)
    wait_until(lambda: service.count[station] - before[station] >= 10, "it is polled faster")
    others = max(service.count[key] - before[key] for key in STATIONS[:-1])
    print(f"{station} was told to poll faster: 10 times, the others at most {others} times")

    leaving = next(name for name in POLLERS if name not in {victim, service.asked_by[station]})
    pollers[leaving].send_signal(signal.SIGTERM)
    took = wait_until(
        lambda: set(service.asked_by.values()) == set(POLLERS) - {victim, leaving},
        "the last one polls all",
    )
    print(f"{leaving} was ended (SIGTERM); its stations moved after {took:.1f} s:")
    show(service)

    for key in STATIONS:
        client.stop_job(key, wait=True)
    print(f"all stopped; jobs left: {len(client.job_keys())}")


def main() -> None:
    database = f"demo_pool_{uuid.uuid4().hex[:8]}"
    service = Service()
    threading.Thread(target=service.serve_forever, daemon=True).start()
    with open_server() as uri, contextlib.ExitStack() as stack:
        connection: MongoClient[dict[str, Any]] = stack.enter_context(MongoClient(uri))
        stack.callback(connection.drop_database, database)
        pollers: dict[str, subprocess.Popen[str]] = {}
        for name in POLLERS:
            command = [sys.executable, __file__, "--work", uri, database, name, service.url]
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, env={**os.environ}
            )
            pollers[name] = stack.enter_context(process)
            stack.callback(process.kill)
        for process in pollers.values():
            assert process.stdout is not None
            process.stdout.readline()
        with Node(connection[database], "weather", client_only=True) as client:
            demonstrate(client, service, pollers)
    service.shutdown()
    service.server_close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:])
    else:
        main()
