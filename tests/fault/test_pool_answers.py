"""
Answers that are lost, late or missing: what each party then believes of a job.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bson.int64 import Int64
from pymongo import MongoClient
from pymongo.database import Database
from pymongo.monitoring import (
    CommandFailedEvent,
    CommandListener,
    CommandStartedEvent,
    CommandSucceededEvent,
)

from mscheduler_sync import MSchedulerError, RetryLater, StoreUnavailable
from mscheduler_sync.pool import (
    DispatchTimeout,
    HandlerError,
    InboxFull,
    Job,
    JobLost,
    JobNotFound,
    Node,
    statements,
)
from mscheduler_sync.pool.store import PoolStore
from tests.support import Document, fail_point, wait_until
from tests.support.pool_invariants import Member, Recorder, broken
from tests.support.servers import own_server

TTL_S = 2.0
#: The write is done, and yet the reply is an error.
UNCONFIRMED = {"writeConcernError": {"code": 64, "errmsg": "replication timed out"}}

Make = Callable[..., Node]


@pytest.fixture
def make(server_uri: str, database: Database[Document]) -> Iterator[Make]:
    """
    Make nodes of the pool "p", each with a client that has the node's *name* and repeats nothing.
    """
    with contextlib.ExitStack() as stack:

        def one(name: str = "node", **options: Any) -> Node:
            own: MongoClient[Document] = stack.enter_context(
                MongoClient(
                    server_uri, tz_aware=True, appname=name, retryWrites=False, retryReads=False
                )
            )
            chosen = {"poll_interval": 0.2, "shutdown_timeout": 10, "dispatch_timeout": 20}
            return stack.enter_context(Node(own[database.name], "p", **{**chosen, **options}))

        yield one
    assert broken(database, "p") == []


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """
    A handler that notes what must not be.
    """
    recorder = Recorder()
    yield recorder
    assert recorder.faults == []


class Asking(threading.Thread):
    """
    A dispatch in a thread of its own; `verdict` is the error it got, or None.
    """

    def __init__(self, node: Node, key: str) -> None:
        super().__init__(name="asking", daemon=True)
        self._node = node
        self._key = key
        self.verdict: Exception | None = AssertionError("no verdict yet")
        self.start()

    def run(self) -> None:
        try:
            self._node.dispatch(self._key)
        except MSchedulerError as error:
            self.verdict = error
        else:
            self.verdict = None


class Sent(CommandListener):
    """
    Counts one command of a client.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self.count = 0

    def started(self, event: CommandStartedEvent) -> None:
        self.count += event.command_name == self._command

    def succeeded(self, event: CommandSucceededEvent) -> None: ...

    def failed(self, event: CommandFailedEvent) -> None: ...


@pytest.mark.parametrize("command", ["update", "delete"])
def test_a_withdrawal_is_not_answered(
    make: Make, client: MongoClient[Document], database: Database[Document], command: str
) -> None:
    """
    The dispatcher is told that the job will never start, not that it runs; the key is free.
    """
    caller = make("withdrawing", client_only=True)
    with (
        fail_point(client, [command], {"times": 1}, appName="withdrawing", **UNCONFIRMED),
        pytest.raises(DispatchTimeout) as caught,
    ):
        caller.dispatch("a", timeout=0.3)
    assert not caught.value.started
    with pytest.raises(DispatchTimeout):
        caller.dispatch("a", timeout=0.3)
    assert database.pool_jobs.count_documents({}) == 0


def test_a_start_that_could_not_be_recorded_is_no_verdict(
    make: Make, client: MongoClient[Document], database: Database[Document]
) -> None:
    """
    The lease ends before the start is recorded: the dispatcher waits on for what becomes of it.
    """
    entered, release = threading.Event(), threading.Event()

    class Once:
        starts = 0

        def start(self, job: Job) -> None:
            self.starts += 1
            if self.starts > 1:
                raise OSError("not again")
            entered.set()
            release.wait(20)

        def stop(self, key: str) -> None: ...

    node = make("recording", worker_ttl=TTL_S)
    node.add_worker(Once())
    asking = Asking(node, "a")
    assert entered.wait(10)
    with (
        node.subscribe(JobLost) as lost,
        fail_point(client, ["update"], "alwaysOn", appName="recording", closeConnection=True),
    ):
        release.set()
        # Its turn is over, and with it the attempts to record the start.
        assert isinstance(lost.get(15), JobLost)
    asking.join(30)
    assert isinstance(asking.verdict, HandlerError)
    assert asking.verdict.type == "OSError"
    wait_until(lambda: not database.pool_jobs.count_documents({}), "the job is gone")


def test_a_claim_that_is_carried_out_late_is_given_back(
    make: Make, recorder: Recorder, database: Database[Document]
) -> None:
    """
    The node has found that it took nothing, and then it is taken: it starts all the same.
    """
    node = make(worker_ttl=TTL_S)
    worker = node.add_worker(Member(recorder))
    now = worker.created_at
    job = statements.jobs.new_job("p", "a", 1, now=now, dispatch_id="d", node="x", epoch=0)
    taken = {"state": "starting", "owner": worker.id, "node": node.id, "claim_id": "late"}
    database.pool_jobs.insert_one({**job, **taken, "fence": Int64(7)})
    wait_until(lambda: recorder.of("a") == [("start", 1)], "the job is started")
    wait_until(lambda: node.job_owner("a") == worker.id, "the job runs")


def test_a_start_that_takes_long_is_not_given_back(
    make: Make, database: Database[Document]
) -> None:
    """
    However often the node looks for late claims meanwhile.
    """
    starts: list[Job] = []
    release = threading.Event()

    class Slow:
        def start(self, job: Job) -> None:
            starts.append(job)
            release.wait(20)

        def stop(self, key: str) -> None: ...

    node = make(worker_ttl=3)
    node.add_worker(Slow())
    asking = Asking(node, "a")
    wait_until(lambda: len(starts) == 1, "the start is called")
    # Each look files the verdicts that a dead owner has left: seen three times.
    for number in range(3):
        job = statements.jobs.new_job(
            "p", f"failed{number}", 1, now=starts[0].created_at, dispatch_id="d", node="x", epoch=0
        )
        database.pool_jobs.insert_one({**job, "state": "failed", "error": {}})
        wait_until(
            lambda: not database.pool_jobs.count_documents({"state": "failed"}), "it has looked"
        )
    release.set()
    asking.join(20)
    assert asking.verdict is None
    assert len(starts) == 1


def test_nothing_starts_on_a_worker_that_was_removed(
    make: Make,
    recorder: Recorder,
    database: Database[Document],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """
    A claim that was under way when the worker left is given back unstarted.
    """
    asked, go = threading.Event(), threading.Event()
    claim = statements.jobs.claim

    def slow(*args: Any) -> Any:
        asked.set()
        go.wait(20)
        return claim(*args)

    node = make()
    worker = node.add_worker(Member(recorder))
    monkeypatch.setattr(statements.jobs, "claim", slow)
    asking = Asking(make("caller", client_only=True), "a")
    assert asked.wait(10)
    report = node.remove_worker(worker)
    assert (report.released, report.left, report.threads) == ((), (), ())
    go.set()

    def is_back() -> int:
        return database.pool_jobs.count_documents({"fence": {"$gt": 0}, "state": "pending"})

    wait_until(is_back, "the job is given back")
    assert recorder.calls == []
    node.add_worker(Member(recorder))
    asking.join(20)
    assert asking.verdict is None
    assert recorder.of("a") == [("start", None)]


def test_a_hanging_start_asks_for_another_try_at_the_last_moment(
    make: Make, database: Database[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Between the dispatcher's last look and its stop request: then it takes the job back.
    """
    release = threading.Event()
    ask_stop = statements.jobs.ask_stop
    caller = make("caller", client_only=True)

    class Hesitant:
        starts = 0

        def start(self, job: Job) -> None:
            self.starts += 1
            release.wait(20)
            raise RetryLater(60)

        def stop(self, key: str) -> None: ...

    def late(*args: Any) -> Any:
        release.set()
        wait_until(lambda: caller.job_owner("a") is None, "the job waits again")
        return ask_stop(*args)

    node, handler = make(), Hesitant()
    node.add_worker(handler)
    monkeypatch.setattr(statements.jobs, "ask_stop", late)
    with pytest.raises(DispatchTimeout) as caught:
        caller.dispatch("a", timeout=0.3)
    assert not caught.value.started
    assert database.pool_jobs.count_documents({}) == 0
    assert handler.starts == 1


def test_a_stop_request_is_for_the_job_that_was_seen(
    make: Make, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A job that was stopped and dispatched anew between the look and the request runs on.
    """
    node = make()
    node.add_worker(Member(recorder))
    node.dispatch("a", 1)
    ask_stop = statements.jobs.ask_stop

    def late(*args: Any) -> Any:
        monkeypatch.setattr(statements.jobs, "ask_stop", ask_stop)
        node.stop_job("a", wait=True)
        node.dispatch("a", 2)
        return ask_stop(*args)

    monkeypatch.setattr(statements.jobs, "ask_stop", late)
    node.stop_job("a", wait=True)
    node.notify("a", "still there")
    wait_until(lambda: recorder.count("notify"), "the notification arrives")
    assert recorder.of("a") == [
        ("start", 1),
        ("stop", None),
        ("start", 2),
        ("notify", "still there"),
    ]


def test_a_notification_for_a_full_inbox_is_not_answered(
    make: Make, client: MongoClient[Document], database: Database[Document]
) -> None:
    """
    Sent again it finds the inbox full: that is told. One that was stored is not told as refused.
    """
    entered, release = threading.Event(), threading.Event()

    class Busy:
        def start(self, job: Job) -> None: ...

        def stop(self, key: str) -> None: ...

        def notify(self, key: str, payload: Any) -> None:
            entered.set()
            release.wait(30)

    node, caller = make(), make("notifying", client_only=True)
    node.add_worker(Busy())
    caller.dispatch("a")
    caller.notify("a")
    assert entered.wait(10)
    try:
        with fail_point(client, ["update"], {"times": 1}, appName="notifying", **UNCONFIRMED):
            caller.notify("a", "x" * 900_000)
        with (
            fail_point(client, ["update"], {"times": 1}, appName="notifying", closeConnection=True),
            pytest.raises(InboxFull),
        ):
            caller.notify("a", "x" * 200_000)
        job = database.pool_jobs.find_one({}, {"inbox.size": 1})
        assert job is not None
        assert len(job["inbox"]) == 2
    finally:
        release.set()


@pytest.mark.parametrize(
    ("step", "who", "command", "skip"),
    [
        ("dispatch", "caller", "insert", 0),
        ("claim", "node", "update", 0),
        ("started", "node", "update", 1),
        ("stop request", "caller", "update", 0),
        ("removal", "node", "delete", 0),
    ],
)
def test_the_answer_to_a_step_of_a_job_is_lost(
    make: Make,
    recorder: Recorder,
    client: MongoClient[Document],
    step: str,
    who: str,
    command: str,
    skip: int,
) -> None:
    """
    The step was done, and whoever asked for it finds that out: nothing is done twice, or given
    back.
    """
    jobs: list[Job] = []

    class Handler(Member):
        def start(self, job: Job) -> None:
            jobs.append(job)
            super().start(job)

    # Its heartbeats are far apart, so that the fault meets none of them.
    node, caller = make("node", worker_ttl=300), make("caller", client_only=True)
    node.add_worker(Handler(recorder))
    caller.job_keys()
    fault = fail_point(client, [command], {"skip": skip, "times": 1}, appName=who, **UNCONFIRMED)
    with fault if step in {"dispatch", "claim", "started"} else contextlib.nullcontext():
        caller.dispatch("a", 1)
    assert [job.requeued for job in jobs] == [False]
    with fault if step in {"stop request", "removal"} else contextlib.nullcontext():
        with contextlib.suppress(StoreUnavailable):
            caller.stop_job("a", wait=True)
        # Who got no answer asks again.
        with contextlib.suppress(JobNotFound):
            caller.stop_job("a", wait=True)
    assert recorder.of("a") == [("start", 1), ("stop", None)]
    assert caller.job_keys() == []


@pytest.mark.parametrize(
    "fault", [UNCONFIRMED, {"closeConnection": True}], ids=["done", "not done"]
)
def test_the_answer_to_a_tick_is_lost(
    make: Make, client: MongoClient[Document], fault: Document
) -> None:
    """
    It is delivered once, by whatever way the node learns that it has won it; and ticks go on.
    """
    ticks: list[int] = []
    node = make("ticking", worker_ttl=300)
    node.ticker("t", 0.1, lambda tick: ticks.append(tick.number))
    wait_until(lambda: len(ticks) >= 2, "it ticks")
    for _ in range(3):
        with fail_point(client, ["update"], {"times": 1}, appName="ticking", **fault):
            before = len(ticks)
            wait_until(lambda before=before: len(ticks) >= before + 3, "it ticks again")  # type: ignore[misc]
    assert ticks == list(range(1, len(ticks) + 1))


@pytest.mark.parametrize("command", ["insert", "update"])
def test_a_server_in_trouble_is_not_pressed(
    make: Make,
    server_uri: str,
    client: MongoClient[Document],
    database: Database[Document],
    command: str,
) -> None:
    """
    What fails at once is tried again after growing pauses, until the time is over.
    """
    sent = Sent(command)
    node = make()
    node.add_worker(Member(Recorder()))
    own: MongoClient[Document]
    with (
        MongoClient(server_uri, appname="pressing", event_listeners=[sent]) as own,
        Node(own[database.name], "p", client_only=True, dispatch_timeout=1) as caller,
    ):
        caller.dispatch("there")
        before = sent.count
        calls = {"insert": lambda: caller.dispatch("a"), "update": lambda: caller.notify("there")}
        # "Exceeded time limit": at once, and nothing was done.
        with (
            fail_point(client, [command], "alwaysOn", appName="pressing", errorCode=262),
            pytest.raises(StoreUnavailable),
        ):
            calls[command]()
        assert 2 <= sent.count - before < 20


@pytest.mark.parametrize("how", ["gone", "frozen"])
def test_a_node_is_started_while_the_database_is_away(tmp_path: Path, how: str) -> None:
    """
    All ways of starting, used at once, say so in some ten seconds and leave nothing behind; later
    the same node starts.
    """
    recorder = Recorder()
    own: MongoClient[Document]
    with own_server(tmp_path) as server, MongoClient(server.uri, tz_aware=True) as own:
        node = Node(own.away, "p", shutdown_timeout=5)
        server.control.admin.command("ping")
        if how == "gone":
            server.kill()
        else:
            server.freeze()
        ways: list[Callable[[], object]] = [node.start, node.__enter__, node.job_keys]
        ways += [lambda: node.dispatch("a"), lambda: node.add_worker(recorder)]
        errors: list[Exception] = []

        def go(way: Callable[[], object]) -> None:
            try:
                way()
            except StoreUnavailable as error:
                errors.append(error)

        began_s = time.monotonic()
        threads = [threading.Thread(target=go, args=(way,)) for way in ways]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert time.monotonic() - began_s < 18
        assert len(errors) == len(ways)
        if how == "gone":
            with pytest.raises(StoreUnavailable):
                node.run_forever()
        assert node.state == "new"
        if how == "gone":
            server.start_again()
        else:
            server.thaw()
        with node:
            node.add_worker(recorder)
            node.dispatch("a")
    assert recorder.of("a") == [("start", None), ("stop", None)]


def test_a_node_that_could_not_start_is_closed() -> None:
    """
    There is nothing to give back, and nothing waits for the database.
    """
    own: MongoClient[Document]
    with MongoClient("mongodb://127.0.0.1:9/?directConnection=true") as own:
        node = Node(own.away, "p")
        with pytest.raises(StoreUnavailable):
            node.start()
        began_s = time.monotonic()
        assert node.close().left == ()
        assert time.monotonic() - began_s < 5
        assert node.state == "closed"


def test_a_short_time_out_is_kept(
    server_uri: str, client: MongoClient[Document], database: Database[Document]
) -> None:
    """
    The last heartbeat of a lease ends when the lease does, not half a second later.
    """
    took = []
    own: MongoClient[Document]
    with MongoClient(server_uri, appname="silent", retryWrites=False) as own:
        store = PoolStore(own[database.name], "pool_", "p")
        store.update(statements.members.renew_lease("n", 1000))
        with fail_point(
            client, ["update"], "alwaysOn", appName="silent", blockConnection=True, blockTimeMS=1000
        ):
            # The machine may stall once, hardly three times.
            for _ in range(3):
                began_s = time.monotonic()
                with pytest.raises(StoreUnavailable):
                    store.update(statements.members.renew_lease("n", 1000), timeout_s=0.1)
                took.append(time.monotonic() - began_s)
    assert min(took) < 0.4
