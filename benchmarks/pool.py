"""
What the dedicated pool reaches: ``python -m benchmarks.pool``.

The server is that of MSCHEDULER_URI, else an embedded one. The nodes are processes of their own.
The floor of a dispatch is measured in between: one insert, its change event, one update.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import statistics
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from pymongo import MongoClient, WriteConcern
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.monitoring import (
    CommandFailedEvent,
    CommandListener,
    CommandStartedEvent,
    CommandSucceededEvent,
)

from mscheduler_sync.embedded import open_server
from mscheduler_sync.pool import Job, Node

TTL_S = 5.0
IDLE_S = 40.0
SAMPLES = 100
_processes = multiprocessing.get_context("spawn")


class Handler:
    """
    Starts and stops at once.
    """

    def start(self, job: Job) -> None: ...

    def stop(self, key: str) -> None: ...


def work(uri: str, database: str, ttl_s: float, ready: Any) -> None:
    """
    A node process, until SIGTERM.
    """
    client: MongoClient[Any]
    with MongoClient(uri) as client, Node(client[database], "p", worker_ttl=ttl_s) as node:
        node.add_worker(Handler())
        ready.set()
        node.run_forever()


@contextlib.contextmanager
def nodes(uri: str, database: str, count: int, ttl_s: float = 30.0) -> Iterator[list[BaseProcess]]:
    processes: list[BaseProcess] = []
    for _ in range(count):
        ready = _processes.Event()
        arguments = (uri, database, ttl_s, ready)
        process: BaseProcess = _processes.Process(target=work, args=arguments, daemon=True)
        process.start()
        ready.wait(30)
        processes.append(process)
    try:
        yield processes
    finally:
        # Gently: dead workers would stay in the ring until their leases end.
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(20)
            process.kill()


def wait(condition: Callable[[], object]) -> float:
    began = time.perf_counter()
    while not condition():
        time.sleep(0.01)
    return time.perf_counter() - began


def gone_from(database: Database[Any], process: BaseProcess) -> Callable[[], bool]:
    """
    Whether every job runs, and none on *process*.
    """
    mine = {one["_id"] for one in database.pool_nodes.find({"pid": process.pid}, {"_id": 1})}

    def gone() -> bool:
        jobs = database.pool_jobs.find({"pool": "p"}, {"state": 1, "node": 1})
        return all(job["state"] == "running" and job["node"] not in mine for job in jobs)

    return gone


def jobs_on(database: Database[Any], process: BaseProcess) -> int:
    mine = [one["_id"] for one in database.pool_nodes.find({"pid": process.pid}, {"_id": 1})]
    return database.pool_jobs.count_documents({"pool": "p", "node": {"$in": mine}})


def takeover(uri: str, database: Database[Any], client: Node) -> None:
    """
    From SIGKILL to every job running elsewhere.
    """
    times = []
    for number in range(3):
        with nodes(uri, database.name, 3, TTL_S) as processes:
            for job in range(30):
                client.dispatch(f"t{number}-{job}")
            gone = gone_from(database, processes[0])
            os.kill(processes[0].pid or 0, signal.SIGKILL)
            times.append(wait(gone))
            for key in client.job_keys():
                client.stop_job(key, wait=True)
            wait(lambda: len(client.pool_workers()) == 2)
    print(
        f"takeover after SIGKILL, lease {TTL_S:g} s: "
        f"{', '.join(f'{one:.2f}' for one in times)} s (goal: {TTL_S + 1:g})"
    )


def hand_over(uri: str, database: Database[Any], client: Node) -> None:
    """
    From SIGTERM to 100 jobs running elsewhere.
    """
    with nodes(uri, database.name, 1) as first:
        for number in range(100):
            client.dispatch(f"h{number}")
        with nodes(uri, database.name, 1):
            before = jobs_on(database, first[0])
            wait(lambda: jobs_on(database, first[0]) < 80 and not unsettled(database))
            before = jobs_on(database, first[0])
            gone = gone_from(database, first[0])
            os.kill(first[0].pid or 0, signal.SIGTERM)
            took = wait(gone)
            print(f"graceful hand-over of {before} jobs: {took:.2f} s")
    # All hundred: there is one owner, and the second has only just come.
    with nodes(uri, database.name, 1) as last:
        wait(lambda: not unsettled(database) and jobs_on(database, last[0]) == 100)
        with _pool_of_two(uri, database, last[0]) as gone:
            os.kill(last[0].pid or 0, signal.SIGTERM)
            print(f"graceful hand-over of 100 jobs: {wait(gone):.2f} s (goal: 3, or 1)")
            for key in client.job_keys():
                client.stop_job(key, wait=True)


@contextlib.contextmanager
def _pool_of_two(
    uri: str, database: Database[Any], first: BaseProcess
) -> Iterator[Callable[[], bool]]:
    """
    A second node that is there but has no worker before the first one ends.
    """
    connection: MongoClient[Any]
    with MongoClient(uri) as connection, Node(connection[database.name], "p") as second:
        gone = gone_from(database, first)
        added = threading.Event()

        def all_moved() -> bool:
            if not added.is_set():
                added.set()
                second.add_worker(Handler())
            return gone()

        yield all_moved
        # The jobs are stopped by the caller; the node gives the rest back.


def unsettled(database: Database[Any]) -> int:
    return database.pool_jobs.count_documents({"pool": "p", "state": {"$ne": "running"}})


def dispatching(uri: str, database: Database[Any], client: Node) -> None:
    """
    One after another, interleaved with the floor; then a thousand by eight threads.
    """
    floor_in = database.floor.with_options(write_concern=WriteConcern("majority", j=True))
    with nodes(uri, database.name, 2), Floor(floor_in) as floor:
        ours, floors = [], []
        for number in range(SAMPLES):
            floors.append(floor.once(number))
            began = time.perf_counter()
            client.dispatch(f"d{number}")
            ours.append(time.perf_counter() - began)
        mine, least = statistics.median(ours), statistics.median(floors)
        print(
            f"dispatch to running: p50 {mine * 1000:.1f} ms, floor {least * 1000:.1f} ms, "
            f"{mine / least:.1f} times (goal: 3)"
        )
    with nodes(uri, database.name, 2):
        numbers = iter(range(1000))
        lock = threading.Lock()
        failures: Counter[str] = Counter()

        def dispatch() -> None:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                try:
                    client.dispatch(f"m{number}")
                except Exception as error:  # noqa: BLE001 - counted
                    failures[type(error).__name__] += 1

        threads = [threading.Thread(target=dispatch) for _ in range(8)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took = time.perf_counter() - began
        running = database.pool_jobs.count_documents({"key": {"$gte": "m", "$lt": "n"}})
        print(
            f"1,000 jobs by 8 threads: {took:.1f} s, {1000 / took:.0f} a second, "
            f"{running} run, failures {dict(failures)}"
        )
    database.pool_jobs.delete_many({})


class Floor:
    """
    One insert, its change event in another thread, one update there.
    """

    def __init__(self, collection: Collection[Any]) -> None:
        self._collection = collection
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._done = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Floor:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def once(self, number: int) -> float:
        began = time.perf_counter()
        self._collection.insert_one({"_id": number, "state": 0})
        self._done.acquire()
        return time.perf_counter() - began

    def _read(self) -> None:
        with self._collection.watch(
            [{"$match": {"operationType": "insert"}}, {"$project": {"documentKey": 1}}],
            max_await_time_ms=1000,
        ) as stream:
            self._ready.set()
            while not self._stop.is_set():
                event = stream.try_next()
                if event is not None:
                    self._collection.update_one(event["documentKey"], {"$set": {"state": 1}})
                    self._done.release()


class Counting(CommandListener):
    """
    Counts commands by name.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def started(self, event: CommandStartedEvent) -> None:
        self.counts[event.command_name] += 1

    def succeeded(self, event: CommandSucceededEvent) -> None: ...

    def failed(self, event: CommandFailedEvent) -> None: ...


def idle(uri: str, database: Database[Any]) -> None:
    """
    Commands of three idle nodes without jobs, and with a thousand running ones.
    """
    counting = Counting()
    connection: MongoClient[Any]
    with (
        MongoClient(uri, event_listeners=[counting]) as connection,
        contextlib.ExitStack() as stack,
    ):
        pool = [
            stack.enter_context(Node(connection[database.name], "idle", shutdown_timeout=60))
            for _ in range(3)
        ]
        for node in pool:
            node.add_worker(Handler())
        totals = []
        for count in (0, 1000):
            if count:
                with contextlib.closing(Node(database, "idle", client_only=True)) as client:
                    for number in range(count):
                        client.dispatch(f"i{number}")
            time.sleep(5)
            before = counting.counts.copy()
            time.sleep(IDLE_S)
            spent = counting.counts - before
            totals.append(sum(spent.values()))
            print(
                f"3 idle nodes, {count} jobs: {totals[-1]} commands in {IDLE_S:g} s {dict(spent)}"
            )
        print(f"difference {100 * (totals[1] / totals[0] - 1):+.1f} % (goal: below 10)")


def main() -> None:
    name = f"bench_pool_{uuid.uuid4().hex[:8]}"
    with open_server() as uri, contextlib.ExitStack() as stack:
        connection: MongoClient[Any] = stack.enter_context(MongoClient(uri))
        stack.callback(connection.drop_database, name)
        database = connection[name]
        with Node(database, "p", client_only=True, max_queued_jobs=10_000) as client:
            takeover(uri, database, client)
            hand_over(uri, database, client)
            dispatching(uri, database, client)
            idle(uri, database)


if __name__ == "__main__":
    main()
