"""
Nodes that join, leave, are killed and frozen at random, and answers that are lost, while jobs
are asked for.

    MSCHEDULER_SOAK_SEED=7 MSCHEDULER_SOAK_MINUTES=10 pytest -m stress -k pool_soak
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter

import pytest
from pymongo import MongoClient
from pymongo.database import Database

from mscheduler_sync import StoreError
from mscheduler_sync.pool import DispatchTimeout, JobExists, JobNotFound, Node
from tests.support import Document, wait_until
from tests.support.pool_fleet import APP_NAME, NodeProcess, fleet
from tests.support.pool_invariants import FencedCounters, broken, started_twice

MINUTES = float(os.environ.get("MSCHEDULER_SOAK_MINUTES", "0.5"))
SEED = int(os.environ.get("MSCHEDULER_SOAK_SEED", str(random.randrange(10_000))))
KEYS = 200
TTL_S = 2.0
MOST_NODES = 5
CALLERS = 4
#: What befalls the answers of commands. The second is carried out nevertheless.
FAULTS = (
    {"closeConnection": True},
    {"writeConcernError": {"code": 64, "errmsg": "replication timed out"}},
    {"blockConnection": True, "blockTimeMS": 700},
)


class Caller(threading.Thread):
    """
    Dispatches, stops and notifies jobs at random; knows which of them must exist.
    """

    def __init__(self, node: Node, keys: list[str], seed: int, stop: threading.Event) -> None:
        super().__init__(name=f"caller-{seed}", daemon=True)
        self._node = node
        self._keys = keys
        self._random = random.Random(seed)
        self._stop_asked = stop
        #: Keys of this caller alone, so it knows their state. None: an answer was lost.
        self.expected: dict[str, bool | None] = dict.fromkeys(keys, False)
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []

    def run(self) -> None:
        while not self._stop_asked.wait(self._random.random() * 0.05):
            key = self._random.choice(self._keys)
            try:
                self._one(key)
            except StoreError as error:
                self.expected[key] = None
                self.outcomes[type(error).__name__] += 1
            except Exception as error:  # noqa: BLE001 - the test tells of it
                self.faults.append(f"{key}: {error!r}")

    def _one(self, key: str) -> None:
        known = self.expected[key]
        if self._random.random() < (0.9 if not known else 0.1):
            try:
                self._node.dispatch(key, key, timeout=self._random.choice([0.05, 1, 30]))
            except JobExists:
                self._check(key, known, False, "was dispatched and not to be found")
                self.outcomes["exists"] += 1
            except DispatchTimeout as error:
                self.expected[key] = None if error.started else False
                self.outcomes["hung" if error.started else "withdrawn"] += 1
            else:
                self._check(key, known, True, "was lost")
                self.outcomes["dispatched"] += 1
                self.expected[key] = True
        elif self._random.random() < 0.5:
            try:
                self._node.notify(key, 1)
                self.outcomes["notified"] += 1
            except JobNotFound:
                self._check(key, known, True, "was lost before a notification")
        else:
            try:
                self._node.stop_job(key, wait=True, timeout=30)
                self.outcomes["stopped"] += 1
                self.expected[key] = False
            except JobNotFound:
                self._check(key, known, True, "was lost before a stop")
                self.expected[key] = False

    def _check(self, key: str, known: bool | None, impossible: bool, what: str) -> None:
        if known is not None and known == impossible:
            self.faults.append(f"{key} {what}")


class Fleet:
    """
    The processes, and what is done to them.
    """

    def __init__(
        self,
        uri: str,
        database: Database[Document],
        processes: list[NodeProcess],
        *,
        watch: bool,
        chance: random.Random,
    ) -> None:
        self._uri = uri
        self._database = database
        self._processes = processes
        self._watch = watch
        self._chance = chance
        self._frozen: dict[NodeProcess, float] = {}
        self.deeds: Counter[str] = Counter()

    def grow(self) -> NodeProcess:
        process = NodeProcess(
            self._uri,
            self._database.name,
            "p",
            f"n{len(self._processes)}",
            worker_ttl=TTL_S,
            shutdown_timeout=10,
            watch=self._watch,
        )
        self._processes.append(process)
        return process

    def thaw(self, *, all_of_them: bool = False) -> None:
        for process, until_s in list(self._frozen.items()):
            if all_of_them or time.monotonic() >= until_s:
                process.signal(signal.SIGCONT)
                del self._frozen[process]

    def fail(self, mode: object, **data: object) -> None:
        self._database.client.admin.command(
            {"configureFailPoint": "failCommand", "mode": mode, "data": data}
        )

    def do(self) -> None:
        chance = self._chance
        alive = [one for one in self._processes if one.alive]
        awake = [one for one in alive if one not in self._frozen]
        deed = chance.choice(["join", "kill", "leave", "freeze", "fault", "rest"])
        if deed == "join" and len(alive) < MOST_NODES:
            self.grow()
        elif deed == "fault":
            self.fail(
                {"skip": chance.randrange(5), "times": chance.randrange(1, 5)},
                failCommands=[chance.choice(["insert", "update", "delete", "find"])],
                appName=chance.choice([APP_NAME, "caller"]),
                **chance.choice(FAULTS),
            )
        elif deed in {"kill", "leave", "freeze"} and len(awake) > 1:
            victim = chance.choice(awake)
            if deed == "freeze":
                victim.signal(signal.SIGSTOP)
                self._frozen[victim] = time.monotonic() + chance.uniform(0.5, 3) * TTL_S
            else:
                victim.signal(signal.SIGKILL if deed == "kill" else signal.SIGTERM)
        else:
            deed = "rest"
        self.deeds[deed] += 1

    def calm_down(self) -> None:
        self.fail("off")
        self.thaw(all_of_them=True)
        if not any(one.alive for one in self._processes):
            self.grow()


@pytest.mark.timeout(MINUTES * 60 + 300)
@pytest.mark.parametrize("watch", [True, False], ids=["stream", "poll"])
def test_pool_soak(server_uri: str, database: Database[Document], watch: bool) -> None:
    """
    Never two accepted writers of a key at once, no job lost, every dispatch with one verdict.
    """
    print(f"seed {SEED}, {MINUTES:g} minutes, watch {watch}")
    chance = random.Random(SEED)
    stop, pause = threading.Event(), threading.Event()
    keys = [f"k{n}" for n in range(KEYS)]
    client: MongoClient[Document]
    with (
        MongoClient(server_uri, appname="caller") as client,
        contextlib.ExitStack() as nodes,
        fleet(server_uri, database.name, "p") as processes,
    ):
        group = Fleet(server_uri, database, processes, watch=watch, chance=chance)
        for _ in range(3):
            group.grow().wait_ready()
        callers = []
        for number in range(CALLERS):
            node = Node(client[database.name], "p", client_only=True, watch=watch)
            nodes.enter_context(node)
            callers.append(Caller(node, keys[number::CALLERS], SEED * 10 + number, stop))
        for caller in callers:
            caller.start()
        end_s = time.monotonic() + MINUTES * 60
        while time.monotonic() < end_s:
            pause.wait(chance.uniform(0.3, 2.0))
            group.thaw()
            group.do()
            assert broken(database, "p") == []
        group.calm_down()
        stop.set()
        for caller in callers:
            caller.join(90)
        outcomes = sum((caller.outcomes for caller in callers), Counter())
        print(f"deeds {dict(group.deeds)}; outcomes {dict(outcomes)}")
        assert [fault for caller in callers for fault in caller.faults] == []
        wait_until(
            lambda: not database.pool_jobs.count_documents({"state": {"$ne": "running"}}),
            "every job runs",
            60,
        )
        there = {job["key"] for job in database.pool_jobs.find({}, {"key": 1})}
        for caller in callers:
            for key, expected in caller.expected.items():
                assert expected is None or expected == (key in there), key
        assert broken(database, "p") == []
        assert started_twice(database.runs) == []
        assert FencedCounters(database.counters).faults() == []
        assert outcomes["dispatched"] > 10
        # Gently, while the server is there: every one gives back what it holds.
        for process in processes:
            process.signal(signal.SIGTERM)
        for process in processes:
            process.process.wait(30)


if __name__ == "__main__":
    pytest.main([__file__, "-m", "stress", "-s"])
