"""
The pool under faults: processes killed and frozen, the server away, answers lost.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.database import Database

from mscheduler_sync import JobNotFound, StoreError
from mscheduler_sync.pool import (
    JobLost,
    JobStarted,
    Node,
    NodeFenced,
)
from tests.support import Document, fail_point, wait_until
from tests.support.pool_fleet import NodeProcess, fleet
from tests.support.pool_invariants import FencedCounters, Member, Recorder, broken, overlaps, owners

Grow = Callable[..., NodeProcess]
TTL_S = 2.0


@pytest.fixture(params=[True, False], ids=["stream", "poll"])
def watch(request: pytest.FixtureRequest) -> bool:
    """
    With change streams, and without.
    """
    return bool(request.param)


@pytest.fixture
def grow(server_uri: str, database: Database[Document], watch: bool) -> Iterator[Grow]:
    """
    Add processes to a fleet of the pool "p" with leases of two seconds.
    """
    with fleet(server_uri, database.name, "p") as processes:

        def one(name: str, **options: Any) -> NodeProcess:
            process = NodeProcess(
                server_uri,
                database.name,
                "p",
                name,
                worker_ttl=TTL_S,
                watch=watch,
                poll_interval=0.2,
                shutdown_timeout=10,
                **options,
            )
            processes.append(process)
            return process

        yield one


@pytest.fixture
def caller(database: Database[Document], watch: bool) -> Iterator[Node]:
    """
    A client of the pool.
    """
    with Node(database, "p", client_only=True, watch=watch, poll_interval=0.2) as node:
        yield node
    assert broken(database, "p") == []


def running_on(database: Database[Document], process: NodeProcess, count: int) -> bool:
    """
    Whether all *count* jobs run on nodes of *process*.
    """
    node = database.pool_nodes.find_one({"pid": process.process.pid, "state": "alive"})
    jobs = list(database.pool_jobs.find({"pool": "p"}, {"state": 1, "node": 1}))
    return len(jobs) == count and all(
        job["state"] == "running" and node is not None and job["node"] == node["_id"]
        for job in jobs
    )


def test_jobs_of_killed_nodes_move_on(
    grow: Grow, caller: Node, database: Database[Document]
) -> None:
    """
    Two of three nodes are killed one after the other: within the lease plus a second each
    job runs elsewhere, in the end all on the third, each payload unharmed.
    """
    processes = [grow(f"n{n}") for n in range(3)]
    for process in processes:
        process.wait_ready()
    for number in range(25):
        caller.dispatch(f"k{number}", number)
    for victim in processes[:2]:
        dead = {
            one["_id"] for one in database.pool_nodes.find({"pid": victim.process.pid}, {"_id": 1})
        }
        victim.signal(signal.SIGKILL)
        began = time.monotonic()

        def moved(dead: set[Any] = dead) -> bool:
            jobs = list(database.pool_jobs.find({}, {"state": 1, "node": 1}))
            return all(job["state"] == "running" and job["node"] not in dead for job in jobs)

        wait_until(moved, "the jobs run elsewhere", 20)
        assert time.monotonic() - began < TTL_S + 3
    assert running_on(database, processes[2], 25)
    payloads = {run["key"]: run["payload"] for run in database.runs.find()}
    assert payloads == {f"k{n}": n for n in range(25)}
    wait_until(lambda: len(caller.pool_workers()) == 1, "the dead have left the ring")
    assert FencedCounters(database.counters).faults() == []


def test_a_frozen_node_wakes_up_and_gives_way(
    grow: Grow, caller: Node, database: Database[Document]
) -> None:
    """
    Frozen beyond its lease and thawed, a node stops what it held and returns under another
    id; nothing of what it then writes is accepted, and its jobs have larger fences elsewhere.
    """
    frozen, other = grow("frozen"), grow("other")
    old = frozen.wait_ready()
    other.wait_ready()
    for number in range(12):
        caller.dispatch(f"k{number}")
    wait_until(
        lambda: database.pool_jobs.count_documents({"node": old}) > 0, "it has jobs of its own"
    )
    before = {job["key"]: job["fence"] for job in database.pool_jobs.find({"node": old})}
    assert before
    frozen.signal(signal.SIGSTOP)
    wait_until(lambda: running_on(database, other, 12), "all run on the other", 20)
    after = {job["key"]: job["fence"] for job in database.pool_jobs.find()}
    assert all(after[key] > fence for key, fence in before.items())
    thawed_s = time.monotonic()
    frozen.signal(signal.SIGCONT)
    wait_until(
        lambda: database.pool_nodes.count_documents({"pid": frozen.process.pid, "state": "alive"}),
        "it has come back",
    )
    assert database.pool_nodes.count_documents({"_id": old, "state": "alive"}) == 0
    for key, fence in before.items():
        wait_until(
            lambda key=key, fence=fence: database.runs.count_documents(  # type: ignore[misc]
                {"key": key, "fence": fence, "ended": {"$ne": None}}
            ),
            f"the old run of {key} was stopped",
        )
    assert time.monotonic() - thawed_s < 10
    assert FencedCounters(database.counters).faults() == []
    late = database.runs.count_documents({"key": {"$in": list(before)}, "fence": {"$exists": 1}})
    assert late >= 2 * len(before)


def test_a_node_that_loses_the_server_gives_up_before_others_take_over(
    grow: Grow, caller: Node, database: Database[Document], client: MongoClient[Document]
) -> None:
    """
    Its heartbeats fail for longer than the lease: it stops its jobs first, then the other node
    starts them; no two runs of a key overlap. Afterwards it is a member again.
    """
    recorder = Recorder()
    name = "cutoff"
    uri_client: MongoClient[Document]
    host, port = client.address or ("127.0.0.1", 27017)
    options = "directConnection=true&retryWrites=false"
    with MongoClient(f"mongodb://{host}:{port}/?{options}", appname=name) as uri_client:
        node = Node(
            uri_client[database.name], "p", worker_ttl=TTL_S, poll_interval=0.2, shutdown_timeout=5
        )
        with node, node.subscribe(NodeFenced, JobLost, JobStarted) as events:
            node.add_worker(Member(recorder))
            for number in range(6):
                caller.dispatch(f"k{number}")
            other = grow("other")
            other.wait_ready()
            wait_until(lambda: 0 < len(recorder.running) < 6, "the jobs are spread")
            first_id = node.id
            with fail_point(
                client,
                ["update", "find", "insert", "delete"],
                "alwaysOn",
                closeConnection=True,
                appName=name,
            ):
                assert events.wait_for(lambda one: isinstance(one, NodeFenced), 15)
                wait_until(lambda: recorder.running == {}, "it has stopped its jobs")
                wait_until(lambda: running_on(database, other, 6), "all run on the other", 20)
            wait_until(lambda: node.id != first_id and node.health().ring_size == 2, "it is back")
            wait_until(lambda: len(recorder.running) > 0, "it has jobs again", 20)
            assert recorder.faults == []
    assert FencedCounters(database.counters).faults() == []


def test_a_short_outage_moves_nothing(
    caller: Node, database: Database[Document], client: MongoClient[Document], watch: bool
) -> None:
    """
    A part of a lease without answers: no job is stopped or started, and requests work afterwards.
    """
    recorder = Recorder()
    with Node(
        database, "p", worker_ttl=12, watch=watch, poll_interval=0.2, shutdown_timeout=5
    ) as node:
        node.add_worker(Member(recorder))
        for number in range(5):
            caller.dispatch(f"k{number}")
        before, node_id = owners(database, "p"), node.id
        with fail_point(client, ["update", "find"], "alwaysOn", closeConnection=True):
            time.sleep(3)
        caller.dispatch("after", timeout=20)
        assert node.id == node_id
        assert {key: owners(database, "p")[key] for key in before} == before
        assert recorder.count("start") == 6
        assert recorder.count("stop") == 0
    assert recorder.faults == []


@pytest.mark.parametrize("command", ["insert", "update", "delete", "find"])
@pytest.mark.parametrize("skip", [0, 1, 2])
def test_lost_answers_double_and_lose_nothing(
    caller: Node,
    database: Database[Document],
    client: MongoClient[Document],
    watch: bool,
    command: str,
    skip: int,
) -> None:
    """
    Connections that break at each command of a job's life: it is started once, stopped once,
    and gone in the end.
    """
    recorder = Recorder()
    with Node(
        database, "p", worker_ttl=10, watch=watch, poll_interval=0.2, shutdown_timeout=5
    ) as node:
        node.add_worker(Member(recorder))
        with fail_point(client, [command], {"skip": skip, "times": 1}, closeConnection=True):
            caller.dispatch("a", 1, timeout=30)
        with fail_point(client, [command], {"skip": skip, "times": 1}, closeConnection=True):
            wait_until(lambda: _stopped(caller), "the job is stopped", 30)
        wait_until(lambda: owners(database, "p") == {}, "the job is gone", 30)
    assert recorder.of("a") == [("start", 1), ("stop", None)]
    assert recorder.faults == []


def _stopped(caller: Node) -> bool:
    try:
        caller.stop_job("a", wait=True, timeout=20)
    except StoreError:
        return False
    except JobNotFound:
        return True
    return True


def test_graceful_ends_overlap_nowhere(
    grow: Grow, caller: Node, database: Database[Document]
) -> None:
    """
    Nodes come and are ended by SIGTERM: of every key, no two runs overlap by the machine's clock.
    """
    processes = [grow("n0")]
    processes[0].wait_ready()
    for number in range(20):
        caller.dispatch(f"k{number}")
    for number in range(1, 4):
        processes.append(grow(f"n{number}"))
        processes[number].wait_ready()
        processes[number - 1].signal(signal.SIGTERM)
        assert processes[number - 1].process.wait(20) == 0
    wait_until(lambda: running_on(database, processes[3], 20), "all run on the last one", 20)
    assert overlaps(list(database.runs.find())) == []
    assert FencedCounters(database.counters).faults() == []
    assert [
        line for one in processes[:3] for line in one.lines if "closed" in line and "[]" in line
    ]


class Planning:
    """
    What the planners of the processes are to plan, and what they have planned.
    """

    def __init__(self, database: Database[Document], grow: Grow) -> None:
        self._database = database
        self._grow = grow

    def want(self, *keys: str, hold: str = "") -> None:
        """
        Have *keys* run and nothing else; the process *hold* stops in the middle of its next plan.
        """
        self._database.control.replace_one(
            {"_id": "wanted"}, {"keys": list(keys), "hold": hold}, upsert=True
        )

    def grow(self, name: str) -> NodeProcess:
        process = self._grow(name, plan_interval=0.3)
        process.wait_ready()
        return process

    def count(self, name: str) -> int:
        return self._database.plans.count_documents({"name": name})

    def runs(self) -> dict[str, int]:
        """
        How often each key was started.
        """
        return Counter(run["key"] for run in self._database.runs.find({}, {"key": 1}))

    def is_running(self, *keys: str) -> bool:
        jobs = self._database.pool_jobs.find({"pool": "p"}, {"key": 1, "state": 1})
        return {job["key"]: job["state"] for job in jobs} == dict.fromkeys(keys, "running")


@pytest.fixture
def planning(grow: Grow, caller: Node, database: Database[Document]) -> Planning:
    """
    A node for the jobs, and the planners to come.
    """
    grow("worker").wait_ready()
    return Planning(database, grow)


def test_a_planner_is_killed_in_the_middle_of_a_plan(planning: Planning) -> None:
    """
    Another node makes the plan when the lease has ended, and each job is started once.
    """
    planning.want("k0", "k1", "k2", hold="killed")
    killed = planning.grow("killed")
    wait_until(lambda: planning.count("killed") == 1, "it plans")
    planning.grow("other")
    assert planning.count("other") == 0
    killed.signal(signal.SIGKILL)
    wait_until(lambda: planning.count("other") >= 3, "the other plans, again and again", 20)
    wait_until(lambda: planning.is_running("k0", "k1", "k2"), "the plan is carried out")
    assert planning.runs() == {"k0": 1, "k1": 1, "k2": 1}
    assert planning.count("killed") == 1


def test_a_planner_freezes_in_the_middle_of_a_plan(planning: Planning) -> None:
    """
    Another node makes it, and later ones. Thawed, the first one does not carry the old plan out.
    """
    planning.want("k0", "k1", "k2", hold="frozen")
    frozen = planning.grow("frozen")
    wait_until(lambda: planning.count("frozen") == 1, "it plans")
    other = planning.grow("other")
    frozen.signal(signal.SIGSTOP)
    wait_until(lambda: planning.is_running("k0", "k1", "k2"), "the other plans", 20)
    planning.want("z")
    wait_until(lambda: planning.is_running("z"), "the plan is another by now", 20)
    frozen.signal(signal.SIGCONT)
    other.signal(signal.SIGTERM)
    assert other.process.wait(20) == 0
    wait_until(lambda: planning.count("frozen") >= 2, "the first one plans anew", 20)
    wait_until(lambda: planning.is_running("z"), "its new plan is carried out")
    assert planning.runs() == {"k0": 1, "k1": 1, "k2": 1, "z": 1}
