"""
Several nodes in one process: placement, moves, close, removal, shutdown, tickers, schedules.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from pymongo.database import Database

from mscheduler_sync import MSchedulerError
from mscheduler_sync.pool import (
    DeadNodeRemoved,
    HandlerError,
    Job,
    JobExists,
    JobNotFound,
    JobPlan,
    Node,
    PoolClosed,
    ScheduleStop,
    Tick,
    Worker,
)
from mscheduler_sync.pool.ring import Ring, Slot, hash_of
from tests.support import Document, wait_until
from tests.support.pool_invariants import Member, Recorder, broken, owners

Make = Callable[..., Node]


@pytest.fixture(params=[True, False], ids=["stream", "poll"])
def watch(request: pytest.FixtureRequest) -> bool:
    """
    With change streams, and without.
    """
    return bool(request.param)


@pytest.fixture
def make(database: Database[Document], watch: bool) -> Iterator[Make]:
    """
    Make nodes of the pool "p"; they are closed at the end.
    """
    nodes: list[Node] = []

    def one(**options: Any) -> Node:
        chosen = {"poll_interval": 0.2, "shutdown_timeout": 15, "dispatch_timeout": 20}
        node = Node(database, "p", watch=watch, **{**chosen, **options})
        nodes.append(node)
        return node

    yield one
    for node in nodes:
        node.close()
    assert broken(database, "p") == []


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """
    What the handlers of all nodes of a test were told; it notes what must not be.
    """
    recorder = Recorder()
    yield recorder
    assert recorder.faults == []


def targets(database: Database[Document], keys: list[str]) -> dict[str, str | None]:
    """
    Where the ring in the database puts each key.
    """
    document = database.pool_pools.find_one({"_id": "p"})
    assert document is not None
    slots = tuple(Slot(one["worker"], one["node"]) for one in document["ring"])
    ring = Ring(document["epoch"], slots)
    found = {key: ring.target(hash_of(key)) for key in keys}
    return {key: None if place is None else place.worker for key, place in found.items()}


def acquainted(database: Database[Document], *nodes: Node) -> None:
    """
    Wait until all *nodes* know the present ring: before that, a job may take a detour.
    """
    document = database.pool_pools.find_one({"_id": "p"})
    assert document is not None
    wait_until(
        lambda: {node.health().ring_epoch for node in nodes} == {document["epoch"]},
        "all nodes know the ring",
    )


def settled(database: Database[Document], keys: list[str]) -> bool:
    """
    Whether every job runs on the worker to which the ring assigns it.
    """
    running = database.pool_jobs.count_documents({"pool": "p", "state": "running"})
    return running == len(keys) and owners(database, "p") == targets(database, keys)


def test_jobs_go_where_the_ring_says(
    make: Make, recorder: Recorder, database: Database[Document]
) -> None:
    """
    With two workers of two nodes, keys are spread as the hash says; all nodes see all of it.
    """
    first, second = make(), make()
    workers = [first.add_worker(Member(recorder)), second.add_worker(Member(recorder))]
    acquainted(database, first, second)
    client = make(client_only=True)
    keys = [f"job{n}" for n in range(12)]
    for key in keys:
        client.dispatch(key, key.upper())
    assert settled(database, keys)
    assert {len(worker.jobs()) for worker in workers} != {0, 12}
    for node in (first, second, client):
        assert node.job_keys() == sorted(keys)
        assert [one.id for one in node.pool_workers()] == [one.id for one in workers]
        assert node.job_payload("job3") == "JOB3"
    assert [first.workers(), second.workers(), client.workers()] == [[workers[0]], [workers[1]], []]


def test_a_worker_that_joins_gets_its_share(
    make: Make, recorder: Recorder, database: Database[Document]
) -> None:
    """
    Jobs whose slot changes are stopped first, then started on the new worker; others stay.
    """
    keys = [f"k{n}" for n in range(30)]
    first = make()
    first.add_worker(Member(recorder))
    for key in keys:
        first.dispatch(key, key)
    second = make()
    second.add_worker(Member(recorder))
    wait_until(lambda: settled(database, keys), "every job is in its place", 20)
    moved = [key for key in keys if len(recorder.of(key)) > 1]
    assert 5 < len(moved) < 25
    for key in keys:
        once = [("start", key)]
        assert recorder.of(key) == ([*once, ("stop", None), *once] if key in moved else once)


@pytest.mark.parametrize("how", ["close", "remove"])
def test_leaving_hands_the_jobs_over(
    make: Make, recorder: Recorder, database: Database[Document], how: str
) -> None:
    """
    A node that closes, or a worker that is removed, gives its jobs to the other one.
    """
    keys = [f"k{n}" for n in range(20)]
    first, second = make(), make()
    worker = first.add_worker(Member(recorder))
    other = second.add_worker(Member(recorder))
    acquainted(database, first, second)
    for key in keys:
        second.dispatch(key)
    mine = sorted(job.key for job in worker.jobs())
    assert mine
    report = first.close() if how == "close" else first.remove_worker(worker)
    assert (list(report.released), report.left) == (mine, ())
    wait_until(lambda: settled(database, keys), "every job is in its place", 20)
    assert set(owners(database, "p").values()) == {other.id}
    assert worker.is_stopped
    assert worker.jobs() == []
    assert [one.id for one in second.pool_workers()] == [other.id]
    if how == "remove":
        assert first.workers() == []
        assert not first.is_closed
        with pytest.raises(ValueError, match="no worker"):
            first.remove_worker(worker)


def test_two_nodes_close_one_after_the_other(
    make: Make, recorder: Recorder, database: Database[Document]
) -> None:
    """
    While the first one's jobs are still moving the second closes too: all end on the third.
    """
    keys = [f"k{n}" for n in range(25)]
    nodes = [make() for _ in range(3)]
    workers = [node.add_worker(Member(recorder)) for node in nodes]
    for key in keys:
        nodes[2].dispatch(key, key)
    threads = [threading.Thread(target=node.close) for node in nodes[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    wait_until(lambda: settled(database, keys), "every job is on the third", 20)
    assert sorted(job.key for job in workers[2].jobs()) == sorted(keys)
    assert {job.payload for job in workers[2].jobs()} == set(keys)


def test_stop_and_notify_find_the_owner_after_a_move(
    make: Make, recorder: Recorder, database: Database[Document]
) -> None:
    """
    Wherever a job has moved: the request reaches the worker that has it, and no other.
    """
    keys = [f"k{n}" for n in range(12)]
    first = make()
    first.add_worker(Member(recorder))
    for key in keys:
        first.dispatch(key)
    second = make()
    second.add_worker(Member(recorder))
    for key in keys:
        # In the middle of the move.
        first.notify(key, "x")
    wait_until(lambda: settled(database, keys), "every job is in its place", 20)
    wait_until(lambda: recorder.count("notify") == len(keys), "all notifications arrive")
    for key in keys:
        first.stop_job(key, wait=True)
    assert owners(database, "p") == {}
    assert recorder.running == {}


def test_notifications_keep_their_order_over_moves(
    make: Make, recorder: Recorder, database: Database[Document]
) -> None:
    """
    A row of numbers arrives as it was sent, while workers come and go.
    """
    nodes = [make() for _ in range(2)]
    nodes[0].add_worker(Member(recorder))
    nodes[0].dispatch("a")
    for number in range(30):
        nodes[0].notify("a", number)
        if number % 10 == 5:
            nodes[1].add_worker(Member(recorder))
        if number % 10 == 9:
            nodes[1].remove_worker(nodes[1].workers()[0])
    wait_until(lambda: ("notify", 29) in recorder.of("a"), "the last one arrives", 20)
    got = [value for what, value in recorder.of("a") if what == "notify"]
    # At least once: one that was delivered while the job moved may come again.
    assert sorted(set(got)) == list(range(30))
    assert [one for n, one in enumerate(got) if one not in got[:n]] == list(range(30))


def test_a_storm_of_joins_and_leaves_ends_in_order(
    make: Make, recorder: Recorder, database: Database[Document]
) -> None:
    """
    Each job ends with one owner, that of its slot, and was never started while it ran.
    """
    keys = [f"k{n}" for n in range(40)]
    nodes = [make() for _ in range(3)]
    nodes[0].add_worker(Member(recorder))
    for key in keys:
        nodes[0].dispatch(key)

    def come_and_go(node: Node) -> None:
        for _ in range(4):
            worker = node.add_worker(Member(recorder))
            node.remove_worker(worker)
        node.add_worker(Member(recorder))

    threads = [threading.Thread(target=come_and_go, args=(node,)) for node in nodes[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    wait_until(lambda: settled(database, keys), "every job is in its place", 30)
    assert sorted(recorder.running) == sorted(keys)


def test_a_stop_that_raises_keeps_the_job(
    make: Make, recorder: Recorder, database: Database[Document]
) -> None:
    """
    A move that its handler refuses does not happen; removal and close name the job as left.
    """

    class Stubborn(Member):
        refuses = True

        def stop(self, key: str) -> None:
            if self.refuses:
                raise OSError("not now")
            super().stop(key)

    first, second = make(worker_ttl=2), make(worker_ttl=2)
    handler = Stubborn(recorder)
    worker = first.add_worker(handler)
    keys = [f"k{n}" for n in range(6)]
    for key in keys:
        first.dispatch(key)
    second.add_worker(Member(recorder))
    report = first.remove_worker(worker)
    assert (report.released, list(report.left)) == ((), keys)
    assert set(owners(database, "p").values()) == {worker.id}
    handler.refuses = False
    report = first.remove_worker(worker)
    assert (list(report.released), report.left) == (keys, ())
    wait_until(lambda: settled(database, keys), "every job is in its place", 20)


def test_a_stop_that_hangs_does_not_hold_the_close(
    make: Make, database: Database[Document]
) -> None:
    """
    The close ends in time and names the job; it is started elsewhere once the lease is over.
    """
    release = threading.Event()
    starts: list[tuple[str, float]] = []

    class Handler:
        def __init__(self, name: str) -> None:
            self.name = name

        def start(self, job: Job) -> None:
            starts.append((self.name, time.monotonic()))

        def stop(self, key: str) -> None:
            if self.name == "first":
                release.wait(30)

    first = make(worker_ttl=2)
    first.add_worker(Handler("first"))
    first.dispatch("a")
    second = make(worker_ttl=2)
    began = time.monotonic()
    try:
        report = first.close(1.0)
        # Not the half minute that the handler takes.
        assert time.monotonic() - began < 10
        assert report.left == ("a",)
        assert any("ms-exec" in name for name in report.threads)
        with second.subscribe(DeadNodeRemoved) as removed:
            second.add_worker(Handler("second"))
            assert isinstance(removed.get(10), DeadNodeRemoved)
        wait_until(lambda: len(starts) == 2, "the job is started elsewhere")
        assert [name for name, _ in starts] == ["first", "second"]
    finally:
        release.set()
    wait_until(lambda: owners(database, "p")["a"], "it has an owner")


def test_a_shutdown_ends_the_pool_everywhere(
    make: Make, recorder: Recorder, database: Database[Document]
) -> None:
    """
    Every job is stopped, every node closes, new ones are refused, nothing is left behind.
    """
    nodes = [make() for _ in range(3)]
    for node in nodes:
        node.add_worker(Member(recorder))
    acquainted(database, *nodes)
    client = make(client_only=True)
    keys = [f"k{n}" for n in range(12)]
    for key in keys:
        client.dispatch(key)
    report = nodes[0].shutdown()
    assert report.complete, report
    assert recorder.count("stop") == len(keys)
    assert recorder.running == {}
    for node in nodes:
        wait_until(partial(_is_shutdown, node), "the node is shut down")
        with pytest.raises(PoolClosed):
            node.dispatch("more")
        with pytest.raises(PoolClosed):
            node.add_worker(Member(recorder))
    for name in ("jobs", "workers", "nodes", "pools"):
        assert database[f"pool_{name}"].count_documents({}) == 0, name
    # The name may be used anew.
    fresh = make()
    fresh.add_worker(Member(recorder))
    fresh.dispatch("k1")


def test_a_shutdown_refuses_what_comes_and_tells_what_stays(
    make: Make, database: Database[Document]
) -> None:
    """
    While one handler hangs: the report names its job, and nodes and jobs are refused.
    """
    release = threading.Event()

    class Handler:
        def start(self, job: Job) -> None: ...

        def stop(self, key: str) -> None:
            release.wait(30)

    first, second = make(worker_ttl=2), make(worker_ttl=2)
    first.add_worker(Handler())
    client = make(client_only=True)
    client.dispatch("a")
    try:
        report = second.shutdown(1.5)
        assert not report.complete
        assert report.jobs_left == ("a",)
        assert len(report.nodes_left) == 1
        with pytest.raises(PoolClosed):
            make().start()
        wait_until(lambda: _refuses(client), "the client refuses")
    finally:
        release.set()
    first.close()


@pytest.mark.parametrize("who", ["the same node", "a new node"])
def test_a_shutdown_that_was_not_complete_is_taken_up_again(
    make: Make, recorder: Recorder, database: Database[Document], who: str
) -> None:
    """
    Once what was left has ended: then the pool is gone, and its name may be used anew.
    """
    release = threading.Event()

    class Handler(Member):
        def stop(self, key: str) -> None:
            release.wait(30)
            super().stop(key)

    first, second = make(worker_ttl=2), make(worker_ttl=2)
    first.add_worker(Handler(recorder))
    first.dispatch("a")
    try:
        assert not second.shutdown(0.5).complete
    finally:
        release.set()
    again = second if who == "the same node" else make()
    assert again.shutdown(20).complete
    assert database.pool_pools.count_documents({}) == 0
    with pytest.raises(PoolClosed):
        second.shutdown()
    fresh = make()
    fresh.add_worker(Member(recorder))
    fresh.dispatch("a")
    # The new pool is none of the old one's business.
    with pytest.raises(PoolClosed):
        second.shutdown()
    assert fresh.job_keys() == ["a"]


def _is_shutdown(node: Node) -> bool:
    return node.is_shutdown


def _refuses(client: Node) -> bool:
    try:
        client.dispatch("b", timeout=0.2)
    except PoolClosed:
        return True
    except MSchedulerError:
        return False
    return False


def test_a_job_of_a_removed_ring_place_is_found_all_the_same(
    make: Make, recorder: Recorder, database: Database[Document]
) -> None:
    """
    Strangers in the ring cost a moment: any worker may take what its target does not, and
    the place is taken away.
    """
    node = make(claim_grace=0.3, worker_ttl=1.5)
    node.add_worker(Member(recorder))
    database.pool_pools.update_one(
        {"_id": "p"},
        {
            "$push": {"ring": {"$each": [{"worker": f"x.{n}", "node": "x"} for n in range(9)]}},
            "$inc": {"epoch": 1},
        },
    )
    for number in range(5):
        node.dispatch(f"k{number}")
    wait_until(lambda: len(node.pool_workers()) == 1, "the strangers are gone")


def test_a_workers_missing_place_is_mended(
    make: Make, recorder: Recorder, database: Database[Document]
) -> None:
    """
    A living worker that somebody took out of the ring enters it again.
    """
    node = make()
    worker = node.add_worker(Member(recorder))
    database.pool_pools.update_one({"_id": "p"}, {"$set": {"ring": []}, "$inc": {"epoch": 1}})
    wait_until(lambda: [one.id for one in node.pool_workers()] == [worker.id], "it is back")
    node.dispatch("a")


def test_stale_documents_are_cleaned_up(
    make: Make, recorder: Recorder, database: Database[Document]
) -> None:
    """
    Workers, places and jobs of nodes that are dead or were never seen are given back.
    """
    node = make(worker_ttl=1.5)
    worker = node.add_worker(Member(recorder))
    node.dispatch("live")
    job = database.pool_jobs.find_one({"key": "live"})
    assert job is not None
    for number, state in enumerate(("starting", "running", "running")):
        dead = f"dead{number}"
        database.pool_workers.insert_one(
            {"_id": f"{dead}.1", "pool": "p", "node": dead, "created_at": job["created_at"]}
        )
        if number < 2:
            long_ago = job["created_at"].replace(year=2020)
            database.pool_nodes.insert_one(
                {"_id": dead, "pool": "p", "state": "alive", "lease_until": long_ago}
            )
        ids = {"_id": f"p\x1fjob{number}", "key": f"job{number}"}
        database.pool_jobs.insert_one(
            {**job, **ids, "state": state, "owner": f"{dead}.1", "node": dead}
        )
    keys = ["live", "job0", "job1", "job2"]
    wait_until(lambda: settled(database, keys), "all jobs run here", 20)
    assert set(owners(database, "p").values()) == {worker.id}
    assert [one["_id"] for one in database.pool_workers.find()] == [worker.id]
    assert len(recorder.of("live")) == 1


def test_one_node_wins_each_tick(make: Make) -> None:
    """
    Five nodes, two tickers: no number is won twice, none is left out, and about one a period.
    """
    nodes = [make() for _ in range(5)]
    ticks: dict[str, list[Tick]] = {"a": [], "b": []}
    began = time.monotonic()
    tickers = [node.ticker(name, 0.1, ticks[name].append) for node in nodes for name in ("a", "b")]
    wait_until(lambda: min(len(some) for some in ticks.values()) >= 20, "twenty ticks of each", 60)
    for ticker in tickers:
        ticker.close()
    elapsed_s = time.monotonic() - began
    for some in ticks.values():
        numbers = sorted(tick.number for tick in some)
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) <= elapsed_s / 0.1 + 2
        at = sorted(tick.at for tick in some)
        assert at == [tick.at for tick in sorted(some, key=lambda tick: tick.number)]


def test_a_ticker_is_iterated_changed_and_stopped(make: Make, database: Database[Document]) -> None:
    """
    Another interval counts for all nodes at once; a stop ends it on all.
    """
    first, second = make(), make()
    slow = first.ticker("t", 3600)
    assert slow.get(0.3) is None
    quick = second.ticker("t", 0.05)
    got = [tick for _, tick in zip(range(3), quick, strict=False)]
    assert [tick.number for tick in got] == sorted({tick.number for tick in got})
    document = database.pool_tickers.find_one()
    assert document is not None
    assert (document["name"], document["interval_ms"]) == ("t", 50)
    quick.close()
    # The first node has learnt of the new interval and takes over.
    assert slow.get(10) is not None
    slow.stop()
    assert database.pool_tickers.count_documents({}) == 0
    third = second.ticker("t", 0.05)
    fourth = first.ticker("t", 0.05)
    third.stop()
    wait_until(lambda: fourth.is_ended, "the stop reaches the other node")
    assert list(fourth) == [] or fourth.get(0) is None


def test_tickers_of_two_pools_are_apart(make: Make, database: Database[Document]) -> None:
    """
    The same name in another pool is another ticker; a closed node makes none.
    """
    node = make()
    other = Node(database, "q", poll_interval=0.2)
    try:
        mine, others = node.ticker("t", 0.05), other.ticker("t", 3600)
        assert mine.get(10) is not None
        assert others.get(0.2) is None
        others.stop()
        assert mine.get(10) is not None
    finally:
        other.close()
    with pytest.raises(RuntimeError, match="closed"):
        other.ticker("t", 1)


def test_a_failing_callback_does_not_end_a_ticker(make: Make) -> None:
    """
    Its error is told in the health of the part; the next tick comes.
    """
    node, ticks = make(), []

    def fail(tick: Tick) -> None:
        ticks.append(tick)
        raise ValueError("broken")

    node.ticker("t", 0.05, fail)
    wait_until(lambda: len(ticks) >= 3, "three ticks")
    assert "broken" in str(node.health().components["ticker:t"].last_error)


class Planned:
    """
    A planner that follows a list of plans.
    """

    name = "planned"

    def __init__(self, *plans: JobPlan | Exception) -> None:
        self.plans = list(plans)
        self.calls = 0

    def plan(self) -> JobPlan:
        self.calls += 1
        plan = self.plans.pop(0) if self.plans else ScheduleStop()
        if isinstance(plan, Exception):
            raise plan
        return plan


def test_a_schedule_starts_and_stops_jobs(
    make: Make, recorder: Recorder, database: Database[Document]
) -> None:
    """
    Plan by plan, until ScheduleStop; then the planner is asked no more and the jobs go on.
    """
    node = make()
    node.add_worker(Member(recorder))
    planner = Planned(
        JobPlan(start={"a": 1}),
        JobPlan(stop=["a", "unknown"]),
        JobPlan(start={"b": 2, "c": 3}),
        JobPlan(stop_all=True),
        ValueError("no plan today"),
        JobPlan(start={"d": 4}),
        JobPlan(start={"e": 5}, stop_all=True),
    )
    schedule = node.schedule(planner, 0.05)
    assert schedule.wait_ended(30)
    assert planner.calls == 8
    wait_until(lambda: node.job_keys() == ["e"], "only the last one runs")
    assert recorder.of("a") == [("start", 1), ("stop", None)]
    assert recorder.of("c") == [("start", 3), ("stop", None)]
    assert recorder.of("d") == [("start", 4), ("stop", None)]
    assert database.pool_schedules.count_documents({}) == 0


def test_a_plan_is_made_on_one_node_and_survives_occupied_keys(
    make: Make, recorder: Recorder, database: Database[Document]
) -> None:
    """
    Three nodes, one plan a period; a key that runs already, or cannot start, hinders no other.
    """

    class Picky(Member):
        def start(self, job: Job) -> None:
            if job.key == "bad":
                raise ValueError("no")
            super().start(job)

    nodes = [make() for _ in range(3)]
    for node in nodes:
        node.add_worker(Picky(recorder))
    acquainted(database, *nodes)
    nodes[0].dispatch("k1", "there before")
    keys = ["k0", "k1", "bad", "k3", "k4"]
    planners = []
    for node in nodes:
        planner = Planned(*[JobPlan(start=dict.fromkeys(keys)) for _ in range(3)])
        planners.append(planner)
        node.schedule(planner, 0.2)
    wait_until(
        lambda: (
            nodes[0].job_keys() == ["k0", "k1", "k3", "k4"]
            and sum(one.calls for one in planners) >= 3
        ),
        "the plan is carried out",
        30,
    )
    assert recorder.of("k1") == [("start", "there before")]
    assert recorder.of("k4") == [("start", None)]


@pytest.mark.parametrize(
    "outcome", [JobPlan(start={"old": 1}), JobPlan(stop=["k"]), ScheduleStop()], ids=repr
)
def test_a_plan_that_another_has_taken_over_is_not_carried_out(
    make: Make,
    recorder: Recorder,
    database: Database[Document],
    outcome: JobPlan | ScheduleStop,
) -> None:
    """
    Its planner was taken for dead while it planned: what it comes to is out of date.
    """

    class Overtaken(Planned):
        def plan(self) -> JobPlan:
            if self.calls == 0:
                # As the node would have it that has found this one dead.
                database.pool_schedules.update_one({}, {"$set": {"runner": "another"}})
            return super().plan()

    node = make()
    node.add_worker(Member(recorder))
    node.dispatch("k")
    planner = Overtaken(outcome, JobPlan(start={"new": 2}))
    schedule = node.schedule(planner, 0.05)
    assert schedule.wait_ended(30)
    assert planner.calls == 3
    assert node.job_keys() == ["k", "new"]
    assert recorder.of("k") == [("start", None)]
    assert recorder.of("old") == []


def test_eight_dispatchers_of_the_same_keys(
    make: Make, recorder: Recorder, database: Database[Document]
) -> None:
    """
    Eight nodes dispatch the same twenty keys: one success and seven refusals each.
    """
    nodes = [make() for _ in range(2)] + [make(client_only=True) for _ in range(6)]
    for node in nodes[:2]:
        node.add_worker(Member(recorder))
    for node in nodes:
        node.start()
    acquainted(database, *nodes[:2])
    results: Counter[str] = Counter()
    lock = threading.Lock()

    def dispatch(node: Node) -> None:
        for number in range(20):
            try:
                node.dispatch(f"k{number}")
                outcome = "ok"
            except JobExists:
                outcome = "exists"
            with lock:
                results[f"{outcome} {number}"] += 1

    threads = [threading.Thread(target=dispatch, args=(node,)) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected = {f"ok {n}": 1 for n in range(20)} | {f"exists {n}": 7 for n in range(20)}
    assert results == expected
    assert recorder.count("start") == 20


def test_keys_are_free_again_however_their_nodes_end(make: Make, recorder: Recorder) -> None:
    """
    After stops, failed starts, moves and closes in every order, each key can be dispatched.
    """
    first, second = make(), make()
    first.add_worker(Member(recorder))
    second.add_worker(Member(recorder))
    keys = [f"k{n}" for n in range(8)]
    for key in keys:
        first.dispatch(key)
    first.close()
    for key in keys:
        second.stop_job(key)
    wait_until(lambda: second.job_keys() == [], "all jobs are gone", 20)
    for key in keys:
        second.dispatch(key)
    assert second.job_keys() == keys


def test_the_ring_may_be_in_order_of_creation(
    make: Make, recorder: Recorder, database: Database[Document]
) -> None:
    """
    As in the original: a worker that leaves closes the gap.
    """
    node = make(ring_order="created")
    workers: list[Worker] = [node.add_worker(Member(recorder)) for _ in range(4)]
    node.dispatch("job2")
    assert node.job_owner("job2") == workers[3].id
    node.remove_worker(workers[1])
    document = database.pool_pools.find_one()
    assert document is not None
    left = [one.id for one in (workers[0], workers[2], workers[3])]
    assert [place["worker"] for place in document["ring"]] == left


def test_slots_are_stable(make: Make, recorder: Recorder, database: Database[Document]) -> None:
    """
    A worker that leaves is replaced by the last one; a new one gets the next free slot.
    """
    node = make()
    workers = [node.add_worker(Member(recorder)) for _ in range(4)]
    node.remove_worker(workers[1])
    fresh = node.add_worker(Member(recorder))
    document = database.pool_pools.find_one()
    assert document is not None
    expected = [one.id for one in (workers[0], workers[3], workers[2], fresh)]
    assert [place["worker"] for place in document["ring"]] == expected


def test_errors_of_a_handler_elsewhere_are_told(make: Make) -> None:
    """
    Type and text cross the processes' border; an unknown job does not hang a waiting stop.
    """

    class Bad:
        def start(self, job: Job) -> None:
            raise LookupError("station unknown")

        def stop(self, key: str) -> None: ...

    node, client = make(), make(client_only=True)
    node.add_worker(Bad())
    with pytest.raises(HandlerError, match="LookupError: station unknown"):
        client.dispatch("a")
    with pytest.raises(JobNotFound):
        client.stop_job("a", wait=True)
