"""
The soak: a fleet that is killed, frozen, stopped, cut off and robbed of its server at random.

    python -m tests.soak --minutes 10 --seed 7

Producers send, re-send, change and cancel meanwhile. At the end everything is given peace, every
task must end, and the invariants must hold. The seed decides what is done and in which order;
threads and processes still interleave as they like.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from mscheduler_sync import (
    InvalidTask,
    Producer,
    StoreError,
    TaskExists,
    TaskNotFound,
    TaskRunning,
)
from mscheduler_sync.embedded import EmbeddedServer
from tests.support import Document, wait_until
from tests.support.invariants import Invariants, Witness

WORKERS, PRODUCERS = 4, 2
OPEN = {"status": {"$in": ["waiting", "running"]}}
#: Producers wait while so many tasks are open: the fleet must be able to end them.
MOST_OPEN = 100
#: The most that is waited for the fleet to end all tasks in peace, in seconds.
PEACE_S = 120.0


class Server:
    """
    The server of the soak: an embedded one that can be killed and restarted, or a given one.
    """

    def __init__(self, path: Path) -> None:
        self._given = os.environ.get("MSCHEDULER_URI")
        self._path = path
        self._server: EmbeddedServer | None = None
        self._port = 0

    @property
    def can_restart(self) -> bool:
        return self._given is None

    @property
    def uri(self) -> str:
        if self._given is not None:
            return self._given
        assert self._server is not None
        return self._server.uri

    def start(self) -> None:
        if self._given is None:
            self._server = EmbeddedServer(self._path, self._port, args=("--enable-test-commands",))
            self._server.start()
            self._port = self._server.port

    def stop(self, *, kill: bool = False) -> None:
        if self._server is not None:
            if kill and self._server.pid is not None:
                os.kill(self._server.pid, signal.SIGKILL)
            self._server.stop()
            self._server = None


class Soak:
    """
    One run of the soak; see the module.
    """

    def __init__(self, server: Server, seed: int, *, quiet: bool = False) -> None:
        self._server = server
        self._random = random.Random(seed)
        self._quiet = quiet
        self._database_name = f"soak_{uuid.uuid4().hex[:8]}"
        self._workers: dict[int, subprocess.Popen[str]] = {}
        self._numbers = iter(range(1, 1_000_000))
        self._stop = threading.Event()
        self._sent: dict[str, None] = {}
        self._sent_lock = threading.Lock()
        self._fixed: dict[str, dict[str, int]] = {}
        self.done: collections.Counter[str] = collections.Counter()
        self._client: MongoClient[Document] = MongoClient(
            server.uri, appname="soak", tz_aware=True, serverSelectionTimeoutMS=20_000
        )
        tasks = self._client[self._database_name]["tasks"]
        self._tasks = tasks
        self._producer = Producer(tasks)
        witness = Witness(self._client[self._database_name]["runs"])
        self._invariants = Invariants(tasks, witness)

    # -- the fleet ---------------------------------------------------------------------------

    def _start_worker(self) -> None:
        number = next(self._numbers)
        options: dict[str, Any] = {
            "worker_id": f"soak-{number}",
            "max_workers": self._random.choice([2, 4, 8]),
            "watch": self._random.random() < 0.7,
            "poll_interval": 0.3,
            "stop_timeout": 3.0,
            "rust_interop": self._random.random() < 0.2,
        }
        self._workers[number] = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.soak_worker",
                self._server.uri,
                self._database_name,
                json.dumps(options),
            ],
            stdout=subprocess.DEVNULL,
            text=True,
            cwd=Path(__file__).parents[1],
        )

    def _take_worker(self) -> subprocess.Popen[str]:
        return self._workers.pop(self._random.choice(list(self._workers)))

    # -- what is done to it ------------------------------------------------------------------

    def _kill(self) -> None:
        worker = self._take_worker()
        worker.kill()
        worker.wait()
        self._start_worker()

    def _freeze(self) -> None:
        worker = self._random.choice(list(self._workers.values()))
        worker.send_signal(signal.SIGSTOP)
        self._stop.wait(self._random.uniform(0.2, 4.0))
        worker.send_signal(signal.SIGCONT)

    def _terminate(self) -> None:
        worker = self._take_worker()
        worker.terminate()
        self._start_worker()
        _assert_ended_well(worker)

    def _terminate_twice(self) -> None:
        worker = self._take_worker()
        worker.terminate()
        self._stop.wait(0.2)
        worker.terminate()
        self._start_worker()
        _assert_ended_well(worker, 128 + signal.SIGTERM)

    def _cut(self) -> None:
        commands = self._random.sample(["update", "find", "getMore", "aggregate", "hello"], 2)
        fault: dict[str, Any] = self._random.choice(
            [
                {"closeConnection": True},
                {"errorCode": 91},
                {"errorCode": 11601},
                {"blockConnection": True, "blockTimeMS": 700},
            ]
        )
        self._client.admin.command(
            {
                "configureFailPoint": "failCommand",
                "mode": {"times": self._random.randint(1, 30)},
                "data": {"failCommands": commands, "appName": "soak-worker", **fault},
            }
        )

    def _restart_server(self) -> None:
        self._server.stop(kill=self._random.random() < 0.7)
        self._stop.wait(self._random.choice([0.0, 0.5, 2.0, 6.0]))
        self._server.start()

    def _actions(self) -> list[tuple[int, Callable[[], None]]]:
        actions = [
            (6, self._kill),
            (4, self._freeze),
            (4, self._terminate),
            (1, self._terminate_twice),
            (4, self._cut),
        ]
        if self._server.can_restart:
            actions.append((1, self._restart_server))
        return actions

    # -- the producers -----------------------------------------------------------------------

    def _produce(self, seed: int) -> None:
        chance = random.Random(seed)
        while not self._stop.wait(chance.uniform(0.0, 0.25)):
            try:
                if self._tasks.count_documents(OPEN) < MOST_OPEN:
                    self._produce_once(chance)
            except PyMongoError:
                self.done["producer errors"] += 1
            except (StoreError, TaskExists, TaskRunning, TaskNotFound):
                self.done["producer errors"] += 1

    def _produce_once(self, chance: random.Random) -> None:
        known = list(self._sent)
        what = chance.choices(
            ["new", "many", "again", "update", "rerun", "cancel", "retry"],
            [8, 2, 2, 2, 1, 1, 1],
        )[0]
        self.done[what] += 1
        if what == "new" or not known:
            key = f"task-{uuid.uuid4().hex[:12]}"
            # Not changed later: two successes cannot become one, nor five failures three.
            fixed = {
                "concurrency": chance.choice([1, 1, 1, 1, 2]),
                "max_attempts": chance.choice([3, 5, 10]),
            }
            options = {**self._options(chance), **fixed}
            self._producer.send(key, self._params(chance), **options)
            self._remember(key)
            self._fixed[key] = fixed
        elif what == "many":
            items = [(f"many-{uuid.uuid4().hex[:12]}", {"seconds": 0}) for _ in range(20)]
            results = self._producer.send_many(items, **self._options(chance))
            self._remember(*(result.key for result in results if result.error is None))
        elif what == "again":
            self._producer.send(chance.choice(known), {"seconds": 0})
        elif what == "update":
            self._send_again(chance, chance.choice(known), "update")
        elif what == "rerun":
            self._send_again(chance, chance.choice(known), "rerun")
        elif what == "cancel":
            self._producer.cancel(chance.choice(known))
        else:
            self._producer.retry(chance.choice(known))

    def _send_again(self, chance: random.Random, key: str, if_exists: str) -> None:
        options = {
            **self._options(chance),
            **self._fixed.get(key, {}),
            "if_exists": if_exists,
        }
        self._producer.send(key, self._params(chance), **options)

    def _remember(self, *keys: str) -> None:
        with self._sent_lock:
            self._sent.update(dict.fromkeys(keys))

    @staticmethod
    def _params(chance: random.Random) -> Document:
        return {
            "seconds": chance.choice([0, 0, 0, 0.05, 0.3, 1.5, 4.0]),
            "heeds": chance.random() < 0.7,
            "moods": chance.choice([[], [], ["raise"], ["later"], ["snooze"], ["final"]]),
        }

    @staticmethod
    def _options(chance: random.Random) -> dict[str, Any]:
        return {
            "lease": 2.0,
            "heartbeat": 0.5,
            "priority": chance.randint(0, 3),
            "retry_delay": chance.choice([0, 0.2]),
            "delay": chance.choice([None, None, 0.5, 2.0]),
            "timeout": chance.choice([None, None, 1.0]),
        }

    # -- a run -------------------------------------------------------------------------------

    def run(self, minutes: float) -> None:
        """
        Raise AssertionError if a guarantee does not hold.
        """
        until_s = time.monotonic() + minutes * 60
        producers = [
            threading.Thread(target=self._produce, args=(self._random.random(),), daemon=True)
            for _ in range(PRODUCERS)
        ]
        try:
            for _ in range(WORKERS):
                self._start_worker()
            for producer in producers:
                producer.start()
            weights, actions = zip(*self._actions(), strict=True)
            while time.monotonic() < until_s:
                action = self._random.choices(actions, weights)[0]
                self.done[action.__name__.strip("_")] += 1
                with contextlib.suppress(PyMongoError):
                    action()
                self._say(f"{action.__name__.strip('_'):16} {len(self._sent)} tasks sent")
                self._stop.wait(self._random.uniform(0.2, 1.5))
            self._stop.set()
            for producer in producers:
                producer.join(60)
            self._peace()
        finally:
            self._stop.set()
            self._end_workers()
            with contextlib.suppress(PyMongoError):
                self._client.drop_database(self._database_name)
            self._client.close()

    def _peace(self) -> None:
        self._client.admin.command({"configureFailPoint": "failCommand", "mode": "off"})
        self._invariants.sent(*self._sent)
        try:
            wait_until(
                lambda: self._tasks.count_documents(OPEN) == 0,
                "every task ends in peace",
                timeout=PEACE_S,
            )
        except AssertionError as error:
            left = list(self._tasks.find(OPEN).limit(5))
            living = [n for n, worker in self._workers.items() if worker.poll() is None]
            msg = f"{error}; workers {living}; for example {left}"
            raise AssertionError(msg) from None
        self._end_workers()
        self._invariants.check()
        # And nothing comes back to life by itself.
        self._invariants.check()
        counts = collections.Counter(
            document["status"] for document in self._tasks.find({}, {"status": 1})
        )
        self.done.update({f"tasks {status}": count for status, count in counts.items()})

    def _end_workers(self) -> None:
        for worker in self._workers.values():
            worker.send_signal(signal.SIGCONT)
            worker.terminate()
        for worker in self._workers.values():
            try:
                worker.wait(30)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
                raise
        self._workers.clear()

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(text, flush=True)


def _assert_ended_well(worker: subprocess.Popen[str], *codes: int) -> None:
    # -SIGTERM: it was still importing, and had taken no signal over.
    code = worker.wait(60)
    assert code in {0, -signal.SIGTERM, *codes}, f"a worker ended with {code}"


@contextlib.contextmanager
def _server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
        server = Server(Path(folder) / "data")
        server.start()
        try:
            yield server
        finally:
            server.stop()


def soak(minutes: float, seed: int, *, quiet: bool = False) -> collections.Counter[str]:
    """
    Run one soak; return how often what was done.

    Raises:
        AssertionError: With the seed, if a guarantee does not hold.
    """
    with _server() as server:
        one = Soak(server, seed, quiet=quiet)
        try:
            one.run(minutes)
        except (AssertionError, InvalidTask) as error:
            msg = f"seed {seed}: {error}"
            raise AssertionError(msg) from error
        return one.done


def main() -> int:
    parser = argparse.ArgumentParser(description="Shake a fleet and check the guarantees.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}, {arguments.minutes:g} minutes", flush=True)
    done = soak(arguments.minutes, arguments.seed)
    for what, count in sorted(done.items()):
        print(f"{what:20} {count}")
    print(f"OK: the guarantees held (seed {arguments.seed})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
