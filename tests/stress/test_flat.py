"""
What a consumer's process takes up does not grow with what it has done, or with what is to come.
"""

from __future__ import annotations

import datetime as dt
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo.collection import Collection
from pymongo.database import Database

from mscheduler_sync import Producer
from mscheduler_sync._storage.sending import SendOptions
from tests.support import Document, wait_until
from tests.support.scripts import Child, Children, children

Tasks = Collection[Document]

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc"),
]

TASKS, FAR, BROUGHT = 20_000, 100_000, 3000


@pytest.fixture
def start(tmp_path: Path, server_uri: str, database: Database[Document]) -> Iterator[Children]:
    """
    Starts programs on the test's own database.
    """
    with children(tmp_path, server_uri, database.name) as starter:
        yield starter


def rss_mb(child: Child) -> float:
    """
    Return the resident memory of *child*, in megabytes.
    """
    for line in Path(f"/proc/{child.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


def measured(child: Child, producer: Producer) -> tuple[float, int, int]:
    """
    Return memory in megabytes, threads, and connections of *child*.
    """
    taken: dict[str, Any] = producer.result(producer.send(None, "measure", priority=9).key, 60)
    # Threads that send heartbeats come and go.
    threads = sum(n for kind, n in taken["threads"].items() if kind != "ms-heartbeat")
    return rss_mb(child), threads, taken["connections"]


def test_twenty_thousand_tasks_leave_nothing_behind(start: Children, collection: Tasks) -> None:
    """
    After 20,000 tasks there are as many threads and connections as after 2,000, and no more memory.
    """
    producer = Producer(collection)
    child = start.start("measured", consumer={"max_workers": 8})
    child.wait_line("ready")
    seen = []
    for _ in range(10):
        items = [(None, {"text": "x" * 500}) for _ in range(TASKS // 10)]
        producer.send_many(items, keep_finished=3600)
        wait_slowly(lambda: producer.count(status="succeeded") == len(items), "all are done")  # noqa: B023
        seen.append(measured(child, producer))
        collection.delete_many({})
    print("\n".join(f"{mb:.1f} MB, {threads} threads, {n} open" for mb, threads, n in seen))
    child.send(signal.SIGTERM)
    assert child.wait_end() == 0
    memory, threads, connections = (list(column) for column in zip(*seen, strict=True))
    # The ceilings of the pools; whether all of them are needed at once is chance.
    assert max(threads[1:]) <= max(threads[0], 8 + 12)
    assert max(connections[1:]) <= max(connections[0], 8 + 12)
    assert memory[-1] - memory[1] < 10


@pytest.mark.parametrize("when", ["before", "while it runs"])
def test_a_hundred_thousand_tasks_for_tomorrow_cost_no_memory(
    start: Children, collection: Tasks, when: str
) -> None:
    """
    Tasks that are due tomorrow are not held in memory, whether found at the start or told (B53).

    The same for more tasks of today than the queue may hold; and all that is due is found.
    """
    producer = Producer(collection)
    producer.send("warm")
    tomorrow = dt.datetime.now(dt.timezone.utc) + dt.timedelta(days=1)
    if when == "before":
        insert(collection, "far", FAR, tomorrow)
    child = start.start("measured", consumer={"max_workers": 8, "queue_limit": 1000})
    child.wait_line("ready")
    producer.result("warm", 60)
    before, _, _ = measured(child, producer)
    if when != "before":
        insert(collection, "far", FAR, tomorrow)
    producer.result(producer.send(None, "after").key, 60)
    grown = rss_mb(child) - before
    print(f"for tomorrow: {before:.1f} MB + {grown:.1f} MB")
    assert grown < 50

    # Brought forward, far more than the queue holds: it stays bounded, and nothing is forgotten.
    gates = [f"gate-{n}" for n in range(8)]
    producer.send_many([(key, "gate") for key in gates], priority=9)
    held = {"key": {"$in": gates}, "status": "running"}
    wait_slowly(lambda: collection.count_documents(held) == 8, "every slot is taken")
    brought = [f"far-{n}" for n in range(BROUGHT)]
    for first in range(0, len(brought), 100):
        keys = {"key": {"$in": brought[first : first + 100]}}
        now = dt.datetime.now(dt.timezone.utc)
        collection.update_many(keys, {"$set": {"due": now, "task_state.start_time": now}})
    child.open_gate("work")
    for first in range(0, len(brought), 100):
        some = {"key": {"$in": brought[first : first + 100]}, "status": "succeeded"}
        wait_slowly(lambda: collection.count_documents(some) == 100, "all are done")  # noqa: B023
    grown = rss_mb(child) - before
    print(f"after {BROUGHT} of them: {before:.1f} MB + {grown:.1f} MB")
    assert grown < 50
    child.send(signal.SIGTERM)
    assert child.wait_end() == 0


def wait_slowly(condition: Callable[[], bool], what: str) -> None:
    """
    Wait for minutes, and ask the server seldom.
    """
    pause = threading.Event()
    wait_until(lambda: condition() or pause.wait(0.3), what, 900)


def insert(tasks: Tasks, name: str, count: int, at: dt.datetime) -> None:
    """
    Insert *count* tasks that are due at *at*, as `Producer.send_many` would, in less time.
    """
    options = SendOptions.checked(run_at=at)
    for first in range(0, count, 1000):
        numbers = range(first, min(first + 1000, count))
        documents = [options.document(f"{name}-{n}", name, at) for n in numbers]
        tasks.insert_many(documents, ordered=False)
