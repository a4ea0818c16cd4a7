"""
Nodes that join, leave, are killed and frozen at random, while jobs are asked for.

    MSCHEDULER_SOAK_SEED=7 MSCHEDULER_SOAK_MINUTES=10 pytest -m stress -k pool_soak
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter

import pytest
from pymongo.database import Database

from mscheduler_sync import StoreError
from mscheduler_sync.pool import DispatchTimeout, HandlerError, JobExists, JobNotFound, Node
from tests.pool_fleet import NodeProcess, fleet
from tests.pool_invariants import FencedCounters, broken
from tests.support import Document, wait_until

MINUTES = float(os.environ.get("MSCHEDULER_SOAK_MINUTES", "0.5"))
SEED = int(os.environ.get("MSCHEDULER_SOAK_SEED", str(random.randrange(10_000))))
KEYS = 200
TTL_S = 2.0
MOST_NODES = 5


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
                self._node.dispatch(key, key, timeout=30)
            except JobExists:
                self._check(key, known, False, "was dispatched and not to be found")
                self.outcomes["exists"] += 1
            except (DispatchTimeout, HandlerError) as error:
                self.expected[key] = None
                self.outcomes[type(error).__name__] += 1
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


@pytest.mark.timeout(MINUTES * 60 + 300)
def test_pool_soak(  # noqa: PLR0912, PLR0915 - one story
    server_uri: str, database: Database[Document]
) -> None:
    """
    Never two accepted writers of a key at once, no job lost, every dispatch with one verdict.
    """
    print(f"seed {SEED}, {MINUTES:g} minutes")
    chance = random.Random(SEED)
    stop = threading.Event()
    keys = [f"k{n}" for n in range(KEYS)]
    deeds: Counter[str] = Counter()
    with fleet(server_uri, database.name, "p") as processes:
        frozen: dict[NodeProcess, float] = {}

        def grow() -> NodeProcess:
            process = NodeProcess(
                server_uri,
                database.name,
                "p",
                f"n{len(processes)}",
                worker_ttl=TTL_S,
                shutdown_timeout=10,
                watch=chance.random() < 0.7,
            )
            processes.append(process)
            return process

        for _ in range(3):
            grow().wait_ready()
        clients = [
            Node(database, "p", client_only=True, watch=n % 2 == 0, max_queued_jobs=10_000)
            for n in range(4)
        ]
        callers = [Caller(one, keys[n::4], SEED * 10 + n, stop) for n, one in enumerate(clients)]
        for caller in callers:
            caller.start()
        end_s = time.monotonic() + MINUTES * 60
        while time.monotonic() < end_s:
            time.sleep(chance.uniform(0.3, 2.0))
            for process, until_s in list(frozen.items()):
                if time.monotonic() >= until_s:
                    process.signal(signal.SIGCONT)
                    del frozen[process]
            alive = [one for one in processes if one.alive]
            awake = [one for one in alive if one not in frozen]
            deed = chance.choice(["join", "kill", "leave", "freeze", "rest"])
            if deed == "join" and len(alive) < MOST_NODES:
                grow()
            elif deed in {"kill", "leave", "freeze"} and len(awake) > 1:
                victim = chance.choice(awake)
                if deed == "freeze":
                    victim.signal(signal.SIGSTOP)
                    frozen[victim] = time.monotonic() + chance.uniform(0.5, 3) * TTL_S
                else:
                    victim.signal(signal.SIGKILL if deed == "kill" else signal.SIGTERM)
            else:
                deed = "rest"
            deeds[deed] += 1
            assert broken(database, "p") == []
        for process in frozen:
            process.signal(signal.SIGCONT)
        if not any(one.alive for one in processes):
            grow()
        stop.set()
        for caller in callers:
            caller.join(90)
        outcomes = sum((caller.outcomes for caller in callers), Counter())
        print(f"deeds {dict(deeds)}; outcomes {dict(outcomes)}")
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
        assert FencedCounters(database.counters).faults() == []
        assert outcomes["dispatched"] > 10
        for client in clients:
            client.close()


if __name__ == "__main__":
    pytest.main([__file__, "-m", "stress", "-s"])
