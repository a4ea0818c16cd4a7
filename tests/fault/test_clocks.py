"""
Programs whose wall clocks are wrong: only the server's clock counts.
"""

from __future__ import annotations

import datetime as dt
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pymongo import MongoClient
from pymongo.database import Database

from mscheduler_sync._storage.statements.attempts import EXPIRED_REASON
from tests.support import Document, wait_until
from tests.support.scene import Scene
from tests.support.workers import WorkerProcess, worker_process

HOUR_S = 3600
SHORT = {"lease": 1.5, "heartbeat": 0.4}

#: Imported by Python before everything else. Notes which modules of the library look at the clock.
WRONG_CLOCK = """
import datetime
import os
import sys
import time

SHIFT_S = float(os.environ["WRONG_CLOCK_S"])
read_by = []


def _note():
    name = sys._getframe(2).f_globals.get("__name__", "")
    if name.startswith("mscheduler_sync"):
        read_by.append(name)


def _shifted(function, shift):
    def read(*args):
        _note()
        return function(*args) + shift
    return read


time.time = _shifted(time.time, SHIFT_S)
time.time_ns = _shifted(time.time_ns, int(SHIFT_S * 1e9))
_real = datetime.datetime


class _Kind(type(_real)):
    def __instancecheck__(cls, value):
        return isinstance(value, _real)


class datetime_with_a_wrong_clock(_real, metaclass=_Kind):
    @classmethod
    def now(cls, tz=None):
        _note()
        return _real.now(tz) + datetime.timedelta(seconds=SHIFT_S)

    @classmethod
    def utcnow(cls):
        _note()
        return _real.now(datetime.timezone.utc).replace(tzinfo=None)


datetime.datetime = datetime_with_a_wrong_clock
"""


@pytest.fixture(params=[-HOUR_S, HOUR_S], ids=["slow", "fast"])
def wrong(
    request: pytest.FixtureRequest, server_uri: str, database: Database[Document], tmp_path: Path
) -> Iterator[WorkerProcess]:
    """
    A worker and producer process whose clock is wrong by an hour.
    """
    (tmp_path / "sitecustomize.py").write_text(WRONG_CLOCK)
    environment = {"PYTHONPATH": str(tmp_path), "WRONG_CLOCK_S": str(request.param)}
    with worker_process(server_uri, database.name, "wrong", environment=environment) as worker:
        shift_s = worker.wait_said("started")["time"] - time.time()
        assert abs(shift_s - request.param) < 60, "its clock is not wrong"
        yield worker


def server_now(client: MongoClient[Document]) -> dt.datetime:
    now: dt.datetime = client.admin.command("hello")["localTime"]
    return now.replace(tzinfo=dt.timezone.utc)


def test_a_producer_with_a_wrong_clock(
    scene: Scene, wrong: WorkerProcess, client: MongoClient[Document]
) -> None:
    """
    Delays and times are those of the server, whoever sends and whoever runs (B14, B52).
    """
    began = server_now(client)
    at = began + dt.timedelta(seconds=1.5)
    everyone: dict[str, dt.datetime] = {}
    wrong.tell("send now {}")
    wrong.tell('send delayed {"delay": 1.5}')
    wrong.tell("send timed " + json.dumps({"run_at": at.isoformat()}))
    with scene.consuming():
        scene.send("right delayed", delay=1.5)
        for key in ("now", "delayed", "timed", "right delayed"):
            scene.invariants.sent(key)
            document = scene.wait_status(key, "succeeded")
            (attempt,) = document["task_state"]["worker_states"]
            everyone[key] = document["task_state"]["create_time"]
            start = document["task_state"]["start_time"]
            assert attempt["claim_time"] >= start, key
            # Not late by more than a busy machine is.
            assert attempt["claim_time"] - start < dt.timedelta(seconds=8), key
            wait = dt.timedelta(seconds=0 if key == "now" else 1.5)
            if key == "timed":
                assert abs(start - at) < dt.timedelta(milliseconds=2)
            else:
                assert start - everyone[key] == wait, key
        ended = server_now(client)
        assert all(began - dt.timedelta(seconds=1) < time < ended for time in everyone.values())
        scene.settled()
    wrong.tell("stop 5")
    assert wrong.wait_said("stopped")["clock_reads"] == []


def test_a_worker_with_a_wrong_clock(scene: Scene, wrong: WorkerProcess) -> None:
    """
    Its leases last as long as everybody's, and nobody's are taken from it or by it (B52).
    """
    scene.send("its", "wait", worker_ids=["wrong"], **SHORT)
    wrong.wait_said("began", key="its")
    # Both may be taken over by anybody, once their leases have lapsed.
    scene.producer.update("its", {"do": "wait"}, worker_ids=[])
    with scene.consuming():
        scene.send("ours", "wait", worker_ids=["one"], **SHORT)
        scene.witness.wait_begun("ours")
        scene.producer.update("ours", {"do": "wait"}, worker_ids=[])

        def beaten() -> bool:
            attempts = [
                attempt
                for key in ("its", "ours")
                for attempt in scene.wait_status(key, "running")["task_state"]["worker_states"]
            ]
            held = [one["ping_expire_time"] - one["claim_time"] for one in attempts]
            return len(held) == 2 and min(held) > dt.timedelta(seconds=3.5)

        wait_until(beaten, "more than two leases have gone by", 20)
        assert [scene.witness.count(key) for key in ("its", "ours")] == [1, 1]
        scene.gate("ours").set()
        scene.wait_status("ours", "succeeded")
        wrong.kill()
        scene.gate("its").set()
        first, second = scene.wait_status("its", "succeeded")["task_state"]["worker_states"]
        assert (first["worker_id"], first["fail_reason"]) == ("wrong", EXPIRED_REASON)
        assert second["worker_id"] == "one"
        assert second["claim_time"] >= first["ping_expire_time"]
        # Looked at as a lease: its end is a lease after the last sign of life, by the server.
        late = second["claim_time"] - first["ping_expire_time"]
        assert late < dt.timedelta(seconds=6)
        scene.settled()


def test_the_library_reads_no_wall_clock() -> None:
    """
    The words do not even stand in its source.
    """
    folder = Path(__file__).parents[2] / "mscheduler_sync"
    words = ("time.time(", "time_ns(", "datetime.now(", "utcnow(", ".today(", "gmtime(", "ctime(")
    found = [
        f"{path.name}: {word}"
        for path in sorted(folder.rglob("*.py"))
        for word in words
        if word in path.read_text()
    ]
    assert found == []
