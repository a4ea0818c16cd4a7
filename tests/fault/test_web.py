"""
Web applications: producers in views, consumers in threads beside the request threads.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import random
import signal
import sqlite3
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pymongo.collection import Collection
from pymongo.database import Database

from mscheduler_sync import Consumer, Producer, TaskContext, TaskNotFound, current_task
from tests.support import Document, wait_until
from tests.support.invariants import Invariants, Witness, status_of
from tests.support.scripts import Child, Children, children

Tasks = Collection[Document]


@pytest.fixture
def start(tmp_path: Path, server_uri: str, database: Database[Document]) -> Iterator[Children]:
    """
    Starts programs on the test's own database.
    """
    with children(tmp_path, server_uri, database.name) as starter:
        yield starter


@pytest.fixture
def witness(database: Database[Document]) -> Witness:
    """
    Where functions write that they run.
    """
    return Witness(database.witness)


@pytest.fixture
def producer(collection: Tasks) -> Producer:
    """
    The producer of the test's own collection.
    """
    return Producer(collection)


class Site:
    """
    A running web application.
    """

    def __init__(self, child: Child) -> None:
        self.child = child
        self._address = f"http://127.0.0.1:{child.said('port')}"

    def ask(self, method: str, path: str) -> tuple[int, Any]:
        request = urllib.request.Request(self._address + path, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def order(self, number: int, seconds: float = 0) -> str:
        status, key = self.ask("POST", f"/orders/{number}/{seconds}")
        assert status == 201
        return str(key)


def test_views_send_and_threads_beside_them_work(
    start: Children, witness: Witness, collection: Tasks
) -> None:
    """
    Many requests at once send and wait; the tasks run in the context of the application.
    """
    site = Site(start.start("web"))

    def visit(number: int) -> Any:
        return site.ask("GET", f"/results/{site.order(number)}")

    with ThreadPoolExecutor(16) as visitors:
        answers = list(visitors.map(visit, range(100)))
    assert answers == [(200, {"order": number, "app": "shop"}) for number in range(100)]
    assert site.ask("GET", "/health") == (200, {"slots": "0/2", "state": "running"})
    assert site.ask("GET", "/results/nothing") == (404, None)
    assert len(witness.runs()) == 100
    Invariants(collection, witness).check()


def test_an_interrupted_web_server_finishes_its_tasks(
    start: Children, witness: Witness, collection: Tasks
) -> None:
    """
    Ctrl-C ends the web server as it would without us; what its threads run is finished and stored.
    """
    site = Site(start.start("web"))
    keys = [site.order(number, seconds=1) for number in range(5)]
    wait_until(lambda: len(witness.runs()) == 2, "two functions run")
    site.child.send(signal.SIGINT)
    assert site.child.wait_end() != 0
    assert site.child.errors.count("Traceback") == 1
    assert site.child.errors.endswith("KeyboardInterrupt\n")
    begun = sorted(run.task for run in witness.runs())
    assert len(begun) == 2
    statuses = {key: status_of(collection, key) for key in keys}
    assert sorted(key for key, status in statuses.items() if status == "succeeded") == begun
    assert set(statuses.values()) == {"succeeded", "waiting"}
    Invariants(collection, witness).check()


def test_a_reloader_that_starts_everything_twice(
    start: Children, witness: Witness, collection: Tasks
) -> None:
    """
    Two processes with the same consumer, as a debug reloader makes them, do each task once.
    """
    sites = [Site(start.start("web")) for _ in range(2)]
    keys = [sites[number % 2].order(number) for number in range(60)]
    for number, key in enumerate(keys):
        answer = sites[(number + 1) % 2].ask("GET", f"/results/{key}")
        assert answer == (200, {"order": number, "app": "shop"})
    assert sorted(run.task for run in witness.runs()) == sorted(keys)
    Invariants(collection, witness).check()


def test_web_processes_without_consumers_leave_the_work_to_another(
    start: Children, witness: Witness, collection: Tasks
) -> None:
    """
    Workers that only send need no consumer: their health says so, and a process of its own works.
    """
    site = Site(start.start("web", consume=False))
    assert site.ask("GET", "/health") == (503, {"slots": "0/2", "state": "new"})
    keys = [site.order(number) for number in range(10)]

    def work(params: Any, context: TaskContext) -> Any:
        with witness.running(context):
            return params["order"]

    with Consumer(collection, work) as consumer:
        assert consumer.run_until_idle(30)
    assert [site.ask("GET", f"/results/{key}") for key in keys] == [(200, n) for n in range(10)]
    site.child.send(signal.SIGINT)
    assert site.child.wait_end() != 0


def test_many_workers_and_somebody_who_changes_tasks_meanwhile(
    start: Children, producer: Producer, witness: Witness, collection: Tasks
) -> None:
    """
    Four processes race for tasks that are deleted, cancelled, changed, sent again: none dies.
    """
    sites = [Site(start.start("web")) for _ in range(4)]
    # Not secret: which task is changed is chance.
    chance = random.Random(1)
    keys = [str(n) for n in range(60)]
    producer.send_many([(key, {"order": 0, "seconds": 0.01}) for key in keys], delay=0.2)
    deleted = set()
    for _ in range(150):
        key = chance.choice(keys)
        with contextlib.suppress(TaskNotFound):
            what = chance.randrange(4)
            if what == 0:
                producer.delete(key)
                deleted.add(key)
            elif what == 1:
                producer.cancel(key)
            elif what == 2:
                producer.update(key, {"order": 1})
            else:
                producer.send(key, {"order": 2}, if_exists="rerun")
    order = sites[0].order(7)
    assert sites[3].ask("GET", f"/results/{order}")[0] == 200

    def unfinished() -> int:
        return producer.count(status="waiting") + producer.count(status="running")

    wait_until(lambda: unfinished() == 0, "all tasks have ended", 60)
    assert [site.ask("GET", "/health")[0] for site in sites] == [200] * 4
    for site in sites:
        site.child.send(signal.SIGINT)
        site.child.wait_end()
        assert site.child.errors.count("Traceback") == 1
    assert {found["status"] for found in collection.find()} <= {"succeeded", "cancelled"}


# -- around ----------------------------------------------------------------------------------------


class Connections:
    """
    Database connections as an ORM keeps them: one for each thread, made when it is needed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._local = threading.local()
        self._lock = threading.Lock()
        self.open = 0
        self.most = 0
        self.made = 0

    def get(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = sqlite3.connect(self._path, timeout=30)
            self._local.connection = connection
            with self._lock:
                self.open += 1
                self.made += 1
                self.most = max(self.most, self.open)
        return connection

    def close_old(self) -> None:
        """
        Close the connection of this thread, undoing what was not committed.
        """
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            connection.rollback()
            connection.close()
            self._local.connection = None
            with self._lock:
                self.open -= 1

    @contextlib.contextmanager
    def fresh(self) -> Iterator[None]:
        self.close_old()
        try:
            yield
        finally:
            self.close_old()


def test_connections_of_an_orm_are_closed_around_each_task(
    producer: Producer, collection: Tasks, tmp_path: Path
) -> None:
    """
    Opened and closed in the task's own thread, never more than slots, nothing carried over.
    """
    connections = Connections(tmp_path / "shop.sqlite")
    with connections.fresh():
        connections.get().execute("create table orders (n integer)")
        connections.get().commit()

    def work(number: int) -> None:
        connection = connections.get()
        assert not connection.in_transaction
        connection.execute("insert into orders values (?)", [number])
        if number % 10 == 3:
            raise ValueError("the transaction stays open")
        if number % 10 == 4:
            raise SystemExit
        connection.commit()

    producer.send_many([(str(n), n) for n in range(100)], max_attempts=1)
    with Consumer(collection, work, around=connections.fresh, max_workers=4) as consumer:
        assert consumer.run_until_idle(60)
    assert (producer.count(status="succeeded"), producer.count(status="failed")) == (80, 20)
    assert connections.open == 0
    assert connections.most <= 4
    with connections.fresh():
        rows = sorted(n for (n,) in connections.get().execute("select n from orders"))
    assert rows == [n for n in range(100) if n % 10 not in {3, 4}]


def test_an_application_context_is_left_whatever_happens(
    producer: Producer, collection: Tasks
) -> None:
    """
    The context is there in each function, new each time, and gone after any exception.
    """
    current: contextvars.ContextVar[dict[str, Any]] = contextvars.ContextVar("current")
    entered, left, dirty = [], [], []

    @contextlib.contextmanager
    def app_context() -> Iterator[None]:
        if current.get(None) is not None:
            dirty.append("a context of the task before")
        task = current_task()
        entered.append(task.key if task is not None else None)
        token = current.set({})
        try:
            yield
        finally:
            current.reset(token)
            left.append(task.key if task is not None else None)

    kinds: list[type[BaseException]] = [KeyError, SystemExit, KeyboardInterrupt, GeneratorExit]

    def work(number: int) -> None:
        if current.get():
            dirty.append("a session that was used before")
        current.get()["session"] = number
        if number % 5:
            raise kinds[number % 5 - 1]

    producer.send_many([(str(n), n) for n in range(50)], max_attempts=1)
    with Consumer(collection, work, around=app_context, max_workers=2) as consumer:
        assert consumer.run_until_idle(60)
    assert dirty == []
    keys = sorted(str(n) for n in range(50))
    assert sorted(map(str, entered)) == sorted(map(str, left)) == keys
    assert producer.count(status="succeeded") == 10
    assert producer.count(status="failed") == 40
