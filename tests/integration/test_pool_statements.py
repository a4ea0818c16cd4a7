"""
Each statement of the pool against documents on which it must act, and on which it must not.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import pytest
from bson.int64 import Int64
from pymongo.database import Database

from mscheduler_sync._storage.statement import Delete, Update
from mscheduler_sync.pool import statements
from mscheduler_sync.pool.statements.jobs import Ownership
from mscheduler_sync.pool.store import PoolStore
from tests.support import Document, wait_until

JOB = "p\x1fa"
OWNERSHIP = Ownership(JOB, "n.1", 7)
ERROR = {"type": "OSError", "text": "no"}
HOUR = dt.timedelta(hours=1)


@pytest.fixture
def store(database: Database[Document]) -> PoolStore:
    """
    The store of the test's own database.
    """
    store = PoolStore(database, "pool_", "p")
    store.measure_clock()
    return store


def put_job(store: PoolStore, database: Database[Document], **fields: Any) -> Document:
    """
    Insert a pending job "a" with *fields* instead of its own; return it as it is stored.
    """
    job = statements.jobs.new_job(
        "p", "a", 1, now=store.clock.now(), dispatch_id="d", node="x", epoch=0
    )
    database.pool_jobs.insert_one({**job, **fields})
    return the_job(database)


def the_job(database: Database[Document]) -> Document:
    job = database.pool_jobs.find_one({"_id": JOB})
    assert job is not None
    return job


OWNED: Document = {
    "state": "starting",
    "owner": "n.1",
    "node": "n",
    "claim_id": "g",
    "fence": Int64(7),
    "stop": {"id": "s"},
    "inbox": [{"seq": 1, "token": "t", "payload": 1, "size": 5}],
    "inbox_seq": 1,
    "unread": True,
}
FENCED: dict[str, Callable[[Ownership], Update | Delete]] = {
    "started": statements.jobs.started,
    "release": lambda owned: statements.jobs.release(owned, 1),
    "postpone": lambda owned: statements.jobs.postpone(owned, ERROR, 1000),
    "fail": lambda owned: statements.jobs.fail(owned, ERROR),
    "stop_failed": lambda owned: statements.jobs.stop_failed(owned, "s"),
    "took": lambda owned: statements.jobs.took(owned, 1),
    "remove_owned": statements.jobs.remove_owned,
}


def run(store: PoolStore, statement: Update | Delete) -> int:
    """
    Run *statement*; return how many documents it matched.
    """
    return store.delete(statement) if isinstance(statement, Delete) else store.update(statement)[0]


@pytest.mark.parametrize("name", FENCED)
@pytest.mark.parametrize(
    ("owned", "does_it"),
    [
        (OWNERSHIP, True),
        (Ownership(JOB, "n.1", 6), False),
        (Ownership(JOB, "n.1", 8), False),
        (Ownership(JOB, "m.1", 7), False),
        (Ownership("p\x1fb", "n.1", 7), False),
    ],
    ids=["the owner", "an older claim", "a newer claim", "another owner", "another job"],
)
def test_an_owners_writes_are_fenced(
    store: PoolStore, database: Database[Document], name: str, owned: Ownership, does_it: bool
) -> None:
    """
    By owner and fence: what comes from an earlier claim, even to the same worker, does nothing.
    """
    before = put_job(store, database, **OWNED)
    assert run(store, FENCED[name](owned)) == does_it
    assert (database.pool_jobs.find_one({"_id": JOB}) == before) is not does_it


@pytest.mark.parametrize(
    ("fields", "does_it"),
    [
        ({}, True),
        ({"state": "starting", "owner": "m.1"}, False),
        ({"state": "running", "owner": "m.1"}, False),
        ({"state": "failed"}, False),
        ({"stop": {"id": "s"}}, False),
        ({"not_before": dt.datetime(2100, 1, 1, tzinfo=dt.timezone.utc)}, False),
    ],
    ids=["pending", "starting", "running", "failed", "to be stopped", "not due"],
)
def test_only_what_waits_is_claimed(
    store: PoolStore, database: Database[Document], fields: Document, does_it: bool
) -> None:
    """
    Then owner, node and the claim's id are set, and the fence is larger than any before it.
    """
    before = put_job(store, database, fence=Int64(5), **fields)
    store.update(statements.jobs.claim([JOB], "n.1", "n", "g"))
    won = store.read(statements.jobs.claimed([JOB], "g"))
    assert bool(won) is does_it
    if does_it:
        (job,) = won
        assert (job["state"], job["owner"], job["node"]) == ("starting", "n.1", "n")
        # The server's time: later jobs under this key begin above it.
        assert job["fence"] > before["created_at"].timestamp() * 1000 - 60_000
    else:
        assert the_job(database) == before


def test_a_fence_ahead_of_the_clock_grows_all_the_same(
    store: PoolStore, database: Database[Document]
) -> None:
    """
    By one.
    """
    put_job(store, database, fence=Int64(2**53))
    store.update(statements.jobs.claim([JOB], "n.1", "n", "g"))
    assert the_job(database)["fence"] == 2**53 + 1


@pytest.mark.parametrize("how", ["release", "release_all_of", "postpone"])
def test_what_travels_with_a_job(store: PoolStore, database: Database[Document], how: str) -> None:
    """
    Payload, notifications and a stop request stay with it when it loses its owner.
    """
    put_job(store, database, **OWNED)
    statement: dict[str, Update] = {
        "release": statements.jobs.release(OWNERSHIP, 3),
        "release_all_of": statements.jobs.release_all_of("p", "n", 3),
        "postpone": statements.jobs.postpone(OWNERSHIP, ERROR, 1000),
    }
    assert store.update(statement[how])[0] == 1
    job = the_job(database)
    assert (job["state"], job["owner"], job["node"], job["requeued"]) == (
        *("pending", None, None, True),
    )
    assert {name: job[name] for name in ("stop", "inbox", "unread", "fence")} == {
        name: OWNED[name] for name in ("stop", "inbox", "unread", "fence")
    }
    assert job["payload"] == 1
    assert job["epoch"] == (0 if how == "postpone" else 3)


def test_only_the_jobs_of_the_dead_node_are_given_back(
    store: PoolStore, database: Database[Document]
) -> None:
    """
    Not those of others, and not those of another pool.
    """
    before = put_job(store, database, **OWNED)
    assert store.update(statements.jobs.release_all_of("p", "m", 1))[0] == 0
    assert store.update(statements.jobs.release_all_of("q", "n", 1))[0] == 0
    assert the_job(database) == before


@pytest.mark.parametrize(("ago", "state"), [(HOUR, "dead"), (-HOUR, "alive")])
def test_a_node_is_declared_dead_by_the_servers_clock(
    store: PoolStore, database: Database[Document], ago: dt.timedelta, state: str
) -> None:
    """
    Only when its lease has ended there; and then it stays dead.
    """
    end = store.clock.now() - ago
    database.pool_nodes.insert_one({"_id": "n", "pool": "p", "state": "alive", "lease_until": end})
    store.update(statements.members.declare_dead("n"))
    node = database.pool_nodes.find_one({"_id": "n"})
    assert node is not None
    assert node["state"] == state
    assert store.update(statements.members.renew_lease("n", 1000))[0] == (state == "alive")
    # A longer lease is not made shorter.
    node = database.pool_nodes.find_one({"_id": "n"})
    assert node is not None
    assert abs(node["lease_until"] - end) < dt.timedelta(milliseconds=1)


def test_a_notification_is_stored_once_and_within_limits(
    store: PoolStore, database: Database[Document]
) -> None:
    """
    The same one again changes nothing; a thousand of them, or a mebibyte, is the most.
    """
    put_job(store, database)
    assert store.update(statements.jobs.push(JOB, "t0", "x", 10)) == (1, 1)
    assert store.update(statements.jobs.push(JOB, "t0", "x", 10)) == (1, 0)
    assert store.update(statements.jobs.push(JOB, "t1", "x", 1024 * 1024 - 10)) == (1, 1)
    assert store.update(statements.jobs.push(JOB, "t2", "x", 1)) == (1, 0)
    job = the_job(database)
    assert [one["token"] for one in job["inbox"]] == ["t0", "t1"]
    assert (job["inbox_seq"], job["unread"]) == (2, True)
    assert store.read(statements.jobs.pushed(JOB, "t0"))
    assert not store.read(statements.jobs.pushed(JOB, "t2"))
    many = [{"seq": n, "token": f"m{n}", "payload": n, "size": 1} for n in range(1, 1000)]
    database.pool_jobs.update_one({"_id": JOB}, {"$set": {"inbox": many, "inbox_seq": 999}})
    assert store.update(statements.jobs.push(JOB, "t3", "x", 1)) == (1, 1)
    assert store.update(statements.jobs.push(JOB, "t4", "x", 1)) == (1, 0)


def test_a_tick_is_won_once_and_when_it_is_due(
    store: PoolStore, database: Database[Document]
) -> None:
    """
    By whoever knows the present number and interval; missed ones count as one.
    """
    store.update(statements.recurring.make("tickers", "t", "p", "t", 1000))
    assert store.update(statements.recurring.tick("t", 1000, 0, "early"))[1] == 0
    due = store.clock.now() - dt.timedelta(seconds=3.5)
    database.pool_tickers.update_one({"_id": "t"}, {"$set": {"next": due}})
    assert store.update(statements.recurring.tick("t", 500, 0, "another interval"))[0] == 0
    assert store.update(statements.recurring.tick("t", 1000, 0, "won"))[1] == 1
    database.pool_tickers.update_one({"_id": "t"}, {"$set": {"next": due}})
    assert store.update(statements.recurring.tick("t", 1000, 0, "late"))[0] == 0
    store.update(statements.recurring.tick("t", 1000, 1, "next"))
    ticker = database.pool_tickers.find_one({"_id": "t"})
    assert ticker is not None
    assert (ticker["number"], ticker["winner"]) == (2, "next")
    left = ticker["next"] - store.clock.now()
    assert dt.timedelta(0) < left + dt.timedelta(milliseconds=200)
    assert left <= dt.timedelta(seconds=1)


def test_a_plan_has_one_runner(store: PoolStore, database: Database[Document]) -> None:
    """
    It is taken from nobody or from the very runner that was seen; the former can do nothing more.
    """
    store.update(statements.recurring.make("schedules", "s", "p", "s", 60_000))
    assert store.update(statements.recurring.begin_plan("s", "r1", "n", None))[1] == 1
    assert store.update(statements.recurring.begin_plan("s", "r2", "m", None))[0] == 0
    assert store.update(statements.recurring.begin_plan("s", "r2", "m", "other"))[0] == 0
    assert store.update(statements.recurring.begin_plan("s", "r2", "m", "r1"))[1] == 1
    before = database.pool_schedules.find_one()
    former: list[Update | Delete] = [
        statements.recurring.track("s", "r1", "a"),
        statements.recurring.untrack("s", "r1", "a"),
        statements.recurring.end_plan("s", "r1", 60_000),
        statements.recurring.leave_plan("s", "r1"),
        statements.recurring.end_schedule("s", "r1"),
    ]
    assert [run(store, one) for one in former] == [0] * 5
    assert database.pool_schedules.find_one() == before
    assert store.update(statements.recurring.end_plan("s", "r2", 60_000))[0] == 1
    # The next one is not due yet.
    assert store.update(statements.recurring.begin_plan("s", "r3", "n", None))[1] == 0


def test_a_closing_pool_takes_no_workers(store: PoolStore, database: Database[Document]) -> None:
    """
    One that leaves still gets out of the ring; one that is in it already is not added again.
    """
    store.update(statements.members.ensure_pool("p", "slots"))
    for worker in ("n.1", "n.2", "n.1"):
        store.update(statements.members.join("p", worker, "n"))
    store.update(statements.members.begin_shutdown("p", "n"))
    assert store.update(statements.members.join("p", "n.3", "n"))[0] == 0
    store.update(statements.members.leave("p", "n.1"))
    pool = database.pool_pools.find_one()
    assert pool is not None
    assert [place["worker"] for place in pool["ring"]] == ["n.2"]
    assert (pool["state"], pool["epoch"]) == ("closing", 4)


@pytest.mark.parametrize("verdicts_only", [False, True])
def test_what_a_change_stream_tells(
    store: PoolStore, database: Database[Document], verdicts_only: bool
) -> None:
    """
    Nodes hear of each step, those that only wait for verdicts not of a job on its way.
    """
    seen: list[tuple[str, str | None]] = []
    pipeline = statements.jobs.watch_pipeline("p", verdicts_only=verdicts_only)
    database.create_collection("pool_jobs")
    with database.pool_jobs.watch(pipeline, max_await_time_ms=100) as stream:
        put_job(store, database)
        store.update(statements.jobs.claim([JOB], "n.1", "n", "g"))
        owned = Ownership(JOB, "n.1", int(the_job(database)["fence"]))
        store.update(statements.jobs.started(owned))
        store.update(statements.jobs.ask_stop(JOB, "d", "s", "n"))
        store.delete(statements.jobs.remove_owned(owned))

        def is_over() -> bool:
            event = stream.try_next()
            if event is not None:
                fields = event.get("updateDescription", event).get("updatedFields")
                fields = fields or event.get("fullDocument") or {}
                seen.append((event["operationType"], fields.get("state")))
            return bool(seen) and seen[-1][0] == "delete"

        wait_until(is_over, "the removal is told")
    on_the_way = [("insert", "pending"), ("update", "starting")]
    told = [("update", "running"), ("update", None), ("delete", None)]
    assert seen == (told if verdicts_only else on_the_way + told)
