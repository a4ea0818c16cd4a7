"""
Rust workers of the crate mscheduler beside ours on one collection.

The Rust side is played by its own statements (tests/support/crate_statements.py): in their
portable form everywhere, in their exact form where the server is a MongoDB.
"""

from __future__ import annotations

import datetime as dt
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pymongo import MongoClient, ReturnDocument
from pymongo.collection import Collection

from mscheduler_sync import (
    AttemptEnded,
    AttemptLost,
    AttemptReleased,
    AttemptStarted,
    Consumer,
    Producer,
    TaskContext,
    TaskFailed,
)
from tests.support import wait_until
from tests.support.crate_statements import (
    EXACT,
    FIRST_LEASE,
    PORTABLE,
    Document,
    Statements,
    Write,
    decode_faults,
)

Tasks = Collection[Document]

HOUR = dt.timedelta(hours=1)


@pytest.fixture(params=[EXACT, PORTABLE], ids=lambda form: form.name)
def form(request: pytest.FixtureRequest, client: MongoClient[Document]) -> Statements:
    """
    The two forms of the crate's statements.
    """
    if request.param is EXACT and "secantusVersion" in client.admin.command("buildInfo"):
        pytest.skip("the embedded server compares dates with a bare $$NOW wrongly")
    statements: Statements = request.param
    return statements


@pytest.fixture(autouse=True)
def crate_indexes(collection: Tasks, form: Statements) -> None:
    """
    A Rust program was there first.
    """
    for keys, options in form.indexes:
        collection.create_index(keys, **options)


@pytest.fixture
def producer(collection: Tasks) -> Producer:
    """
    Our producer.
    """
    return Producer(collection)


def polling(collection: Tasks, function: Callable[..., Any], **options: Any) -> Consumer:
    """
    Make one of our workers, without a change stream.
    """
    return Consumer(collection, function, watch=False, poll_interval=0.1, **options)


def now() -> dt.datetime:
    """
    Return the time of a Rust program's clock.
    """
    return dt.datetime.now(dt.timezone.utc)


class RustWorker:
    """
    The statements of one Rust worker; each method runs one and says whether it matched.
    """

    def __init__(self, collection: Tasks, form: Statements, worker_id: str = "rust") -> None:
        self.worker_id = worker_id
        self._collection = collection
        self._form = form
        self._millis = itertools.count(time.time_ns() // 1_000_000)

    def send(self, key: str, params: object = None, **options: Any) -> bool:
        """
        Send a task; return whether it is a new one.
        """
        write = self._form.send(key, params, now(), **options)
        result = self._collection.update_one(write.filter, write.update, upsert=True)
        return result.upserted_id is not None

    def claim(self, key: str, *, clock_error: dt.timedelta = dt.timedelta(0)) -> str | None:
        """
        Try to claim *key*; return the running id, or None.
        """
        running_id = str(next(self._millis))
        write = self._form.claim(key, running_id, self.worker_id, now() + clock_error)
        before = self._collection.find_one_and_update(
            write.filter, write.update, return_document=ReturnDocument.BEFORE
        )
        return None if before is None else running_id

    def ping(self, key: str, running_id: str, lease: dt.timedelta) -> bool:
        return self._mark(self._form.ping(key, running_id, self.worker_id, now(), lease=lease))

    def succeed(self, key: str, running_id: str, returns: object = None) -> bool:
        write = self._form.mark_success(key, running_id, self.worker_id, now(), returns=returns)
        return self._mark(write)

    def fail(self, key: str, running_id: str) -> bool:
        return self._mark(self._form.mark_fail(key, running_id, self.worker_id, now()))

    def shut_down(self, attempts: list[tuple[str, str]]) -> list[bool]:
        return [self._mark(w) for w in self._form.shutdown(attempts, self.worker_id, now())]

    def fetch(self) -> list[str]:
        """
        Return the keys of one batch scan.
        """
        found = self._collection.find(self._form.fetch(self.worker_id, now())).limit(10)
        return [document["key"] for document in found]

    def _mark(self, write: Write) -> bool:
        result = self._collection.update_one(
            write.filter, write.update, array_filters=write.array_filters
        )
        return result.matched_count == 1


class RustStream:
    """
    The change stream of one Rust worker, opened when this is made.
    """

    def __init__(self, collection: Tasks, form: Statements, worker_id: str) -> None:
        self._stream = collection.watch(
            form.watch(worker_id, now()), full_document="updateLookup", max_await_time_ms=200
        )

    def wait_for_update(self, *, status: str) -> Document:
        """
        Return the document of the next update after which our status is *status*.
        """
        found: list[Document] = []

        def look() -> bool:
            event = self._stream.try_next()
            if event is not None and event["operationType"] == "update":
                found.append(event["fullDocument"])
            return bool(found) and found[-1]["status"] == status

        wait_until(look, f"an update to {status}")
        return found[-1]

    def close(self) -> None:
        self._stream.close()


@pytest.fixture
def rust(collection: Tasks, form: Statements) -> RustWorker:
    """
    A Rust worker called ``rust``.
    """
    return RustWorker(collection, form)


@pytest.fixture
def rust_stream(collection: Tasks, form: Statements) -> Iterator[RustStream]:
    """
    The change stream of ``rust``.
    """
    stream = RustStream(collection, form, "rust")
    yield stream
    stream.close()


def document(collection: Tasks, key: str) -> Document:
    """
    Return the task's document, which the crate must be able to read in every state.
    """
    found = collection.find_one({"key": key})
    assert found is not None
    assert decode_faults(found) == []
    return found


def states(collection: Tasks, key: str) -> list[Document]:
    elements: list[Document] = document(collection, key)["task_state"]["worker_states"]
    return elements


class Gate:
    """
    A function that says when it runs, and ends when it is let go or asked to end.
    """

    def __init__(self) -> None:
        self.began = threading.Event()
        self.go = threading.Event()

    def __call__(self, params: Any, context: TaskContext) -> Any:
        self.began.set()
        wait_until(lambda: self.go.is_set() or context.cancelled.is_set(), "the gate is open", 30)
        if not self.go.is_set():
            context.check()
        return params


# -- one task through the hands of both ---------------------------------------------


def test_task_of_ours_is_readable_at_every_step_of_a_rust_worker(
    collection: Tasks, producer: Producer, rust: RustWorker
) -> None:
    """
    Sent by us; claimed, pinged, failed and finished by Rust: each state is read right.
    """
    producer.send("k", {"n": 1}, retry_delay=0)
    assert rust.fetch() == ["k"]
    first = rust.claim("k")
    assert first is not None

    def seen() -> tuple[object, ...]:
        task = producer.get("k")
        assert task is not None
        ends = [(a.worker_id, a.is_open, a.failed_at is None) for a in task.attempts]
        return task.status, task.params, ends, task.failures

    assert seen() == ("running", {"n": 1}, [("rust", True, True)], 0)
    assert rust.ping("k", first, HOUR)
    task = producer.get("k")
    assert task is not None
    assert task.due_at == task.attempts[0].lease_end
    assert rust.fail("k", first)
    assert seen() == ("waiting", {"n": 1}, [("rust", False, False)], 1)
    second = rust.claim("k")
    assert second is not None
    assert rust.succeed("k", second, {"ok": True})
    expected = [("rust", False, False), ("rust", False, True)]
    assert seen() == ("succeeded", {"n": 1}, expected, 1)
    assert producer.result("k", 1) == {"ok": True}


def test_attempt_of_a_rust_worker_needs_neither_reason_nor_result(
    collection: Tasks, producer: Producer, rust: RustWorker
) -> None:
    """
    Without a fail_reason and without returns the task is read, and its result is None.
    """
    producer.send("good")
    producer.send("bad", max_attempts=1)
    good, bad = rust.claim("good"), rust.claim("bad")
    assert good is not None
    assert bad is not None
    rust.succeed("good", good)
    rust.fail("bad", bad)
    for key in ("good", "bad"):
        unset = {"task_state.worker_states.0.returns": ""}
        collection.update_one({"key": key}, {"$unset": unset})
    assert producer.result("good", 1) is None
    with pytest.raises(TaskFailed, match="no reason was stored") as caught:
        producer.result("bad", 1)
    assert caught.value.reason is None


def test_task_of_rust_is_worked_by_us_and_stays_readable_for_rust(
    collection: Tasks, producer: Producer, rust: RustWorker
) -> None:
    """
    Sent by Rust; claimed, pinged and finished by us: the crate can read each state.
    """
    assert rust.send("k", "p", ping_interval_ms=100, worker_timeout_ms=1000)
    assert "due" not in document(collection, "k")
    gate = Gate()
    with polling(collection, gate, worker_id="ours"):
        assert gate.began.wait(10)
        (claimed,) = states(collection, "k")
        wait_until(
            lambda: states(collection, "k")[0]["ping_expire_time"] > claimed["ping_expire_time"],
            "a heartbeat",
        )
        gate.go.set()
        assert producer.result("k", 10) == "p"
    (ended,) = states(collection, "k")
    assert (ended["worker_id"], ended["fail_time"], ended["returns"]) == ("ours", None, "p")
    assert isinstance(ended["success_time"], dt.datetime)


def test_failed_and_retried_task_of_rust_stays_readable_for_rust(
    collection: Tasks, producer: Producer, rust: RustWorker
) -> None:
    """
    Our failures carry a reason, and Rust counts them for the worker that made them.
    """
    rust.send("k")
    collection.update_one({"key": "k"}, {"$set": {"task_option.unexpected_retry_delay_ms": 0}})

    def fail(_params: Any) -> None:
        raise ValueError("no good")

    with (
        polling(collection, fail, worker_id="rust"),
        pytest.raises(TaskFailed, match="no good"),
    ):
        producer.result("k", 30)
    reasons = [element["fail_reason"].splitlines()[0] for element in states(collection, "k")]
    assert reasons == ["ValueError: no good"] * 3
    assert rust.claim("k") is None


# -- leases ------------------------------------------------------------------------------


def test_our_live_attempt_blocks_a_rust_claim(
    collection: Tasks, producer: Producer, rust: RustWorker
) -> None:
    """
    While our lease lives, Rust's claim matches nothing.
    """
    producer.send("k")
    gate = Gate()
    with polling(collection, gate, worker_id="ours"):
        assert gate.began.wait(10)
        assert rust.claim("k") is None
        gate.go.set()
        producer.result("k", 10)
    assert [element["worker_id"] for element in states(collection, "k")] == ["ours"]


def test_our_expired_attempt_is_dropped_by_rust_and_our_late_result_refused(
    collection: Tasks, producer: Producer, rust: RustWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Rust takes an expired attempt over by removing it; our late success then changes nothing.
    """
    monkeypatch.setattr("mscheduler_sync._stages.heartbeat.Heartbeat.send", lambda _: True)
    producer.send("k", "ours", lease=0.5, heartbeat=0.25)
    began, go = threading.Event(), threading.Event()

    def deaf(params: Any) -> Any:
        began.set()
        go.wait(30)
        return params

    with polling(collection, deaf, worker_id="ours", max_workers=1) as consumer:
        lost = consumer.subscribe(AttemptLost, AttemptEnded)
        assert began.wait(10)
        running_id = wait_until(lambda: rust.claim("k") or "", "our lease lapses; Rust claims")
        assert [element["worker_id"] for element in states(collection, "k")] == ["rust"]
        go.set()
        event = lost.wait_for(lambda _event: True, 10)
        assert isinstance(event, AttemptLost)
        assert rust.succeed("k", running_id, "theirs")
        assert producer.result("k", 10) == "theirs"
    assert [element["worker_id"] for element in states(collection, "k")] == ["rust"]


def test_our_function_is_told_that_rust_has_taken_over(
    collection: Tasks, producer: Producer, rust: RustWorker
) -> None:
    """
    The heartbeat notices that the attempt has vanished, and the function is told.
    """
    producer.send("k", lease=2, heartbeat=0.1)
    gate = Gate()
    reasons: list[object] = []

    def function(params: Any, context: TaskContext) -> Any:
        try:
            return gate(params, context)
        finally:
            reasons.append(context.reason)

    with polling(collection, function, worker_id="ours") as consumer:
        events = consumer.subscribe(AttemptReleased, AttemptLost, AttemptEnded)
        assert gate.began.wait(10)
        # What Rust's claim does to an expired attempt, without waiting for its expiry.
        collection.update_one({"key": "k"}, {"$set": {"task_state.worker_states": []}})
        running_id = rust.claim("k")
        assert running_id is not None
        event = events.get(10)
        assert isinstance(event, AttemptReleased | AttemptLost)
        rust.succeed("k", running_id)
    assert reasons == ["lease_lost"]
    assert [element["worker_id"] for element in states(collection, "k")] == ["rust"]


def test_live_attempt_of_rust_keeps_us_off_until_it_ends(
    collection: Tasks, producer: Producer, rust: RustWorker
) -> None:
    """
    We neither run nor settle what a Rust worker holds.
    """
    producer.send("k", "p")
    running_id = rust.claim("k")
    assert running_id is not None
    with polling(collection, lambda params: params, worker_id="ours") as consumer:
        occupied = consumer.subscribe(AttemptStarted)
        assert consumer.run_until_idle(10)
        producer.send("after")
        producer.result("after", 10)
        assert [event.key for event in iter(lambda: occupied.get(0), None)] == ["after"]
        assert rust.succeed("k", running_id, 1)
    assert producer.result("k", 10) == 1
    assert len(states(collection, "k")) == 1


# -- what Rust makes of our failures and releases ------------------------------------


def test_attempt_that_we_settled_counts_for_rust_against_its_worker_only(
    collection: Tasks, producer: Producer, rust: RustWorker, form: Statements
) -> None:
    """
    A dead worker's attempt becomes a failed one: another Rust worker may still claim, at once.
    """
    producer.send("k", max_attempts=1)
    almost = -FIRST_LEASE + dt.timedelta(seconds=0.3)
    assert rust.claim("k", clock_error=almost) is not None
    with (
        polling(collection, lambda params: params, worker_id="ours"),
        pytest.raises(TaskFailed, match="LeaseExpired"),
    ):
        producer.result("k", 10)
    (element,) = states(collection, "k")
    assert (element["worker_id"], element["success_time"]) == ("rust", None)
    assert element["fail_reason"].startswith("LeaseExpired")
    assert rust.claim("k") is None
    assert RustWorker(collection, form, "other").claim("k") is not None


def test_release_of_ours_is_seen_and_claimed_by_rust_at_once(
    collection: Tasks, producer: Producer, rust: RustWorker, rust_stream: RustStream
) -> None:
    """
    A stop that gives an attempt back makes an event in Rust's stream, and the task is free.
    """
    producer.send("k")
    gate = Gate()
    with polling(collection, gate, worker_id="ours") as consumer:
        assert gate.began.wait(10)
        rust_stream.wait_for_update(status="running")
        report = consumer.stop(3)
    assert report.released == ("k",)
    seen = rust_stream.wait_for_update(status="waiting")
    assert seen["task_state"]["worker_states"] == []
    assert rust.claim("k") is not None


# -- races and ends ------------------------------------------------------------------


def test_concurrency_holds_when_both_race_for_one_task(
    collection: Tasks, producer: Producer, form: Statements
) -> None:
    """
    Of three consumers and three Rust workers two get the task that two may run.
    """
    producer.send("k", concurrency=2)
    gate = Gate()
    barrier = threading.Barrier(3)
    claims: list[str] = []

    def race(worker: RustWorker) -> None:
        barrier.wait(10)
        wins = [worker.claim("k") for _ in range(5)]
        claims.extend(worker.worker_id for running_id in wins if running_id is not None)

    consumers = [polling(collection, gate, worker_id=f"ours {n}") for n in range(3)]
    threads = [
        threading.Thread(target=race, args=(RustWorker(collection, form, f"rust {n}"),))
        for n in range(3)
    ]
    try:
        for consumer in consumers:
            consumer.start()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_until(lambda: len(states(collection, "k")) == 2, "both places are taken")
        for consumer in consumers:
            consumer.run_until_idle(0.2)
        holders = [element["worker_id"] for element in states(collection, "k")]
    finally:
        gate.go.set()
        for consumer in consumers:
            consumer.stop()
    assert len(holders) == len(set(holders)) == 2
    assert sorted(name for name in holders if name.startswith("rust")) == sorted(claims)


def test_finished_task_is_claimed_by_nobody(
    collection: Tasks, producer: Producer, rust: RustWorker, rust_stream: RustStream
) -> None:
    """
    Rust still gets an event for a task that succeeded, but neither claims it nor do we.
    """
    producer.send("k")
    runs: list[Any] = []
    with polling(collection, runs.append, worker_id="ours") as consumer:
        producer.result("k", 10)
        rust_stream.wait_for_update(status="succeeded")
        assert rust.claim("k") is None
        assert rust.fetch() == []
        assert consumer.run_until_idle(10)
    assert len(runs) == 1
    assert len(states(collection, "k")) == 1


def test_task_finished_by_rust_is_not_run_by_us(
    collection: Tasks, producer: Producer, rust: RustWorker
) -> None:
    """
    The stored status is stale, the attempts count.
    """
    producer.send("k")
    running_id = rust.claim("k")
    assert running_id is not None
    rust.succeed("k", running_id)
    runs: list[Any] = []
    with polling(collection, runs.append, worker_id="ours") as consumer:
        assert consumer.run_until_idle(10)
        wait_until(
            lambda: document(collection, "k")["status"] == "succeeded", "the status is repaired"
        )
    assert runs == []


# -- indexes ------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["ours", "rust"])
def test_indexes_of_both_are_made_in_either_order(
    collection: Tasks, form: Statements, first: str
) -> None:
    """
    Both programs make their indexes on the same collection without a conflict.
    """
    collection.drop_indexes()

    def ours() -> None:
        Producer(collection).send("k")

    def theirs() -> None:
        for keys, options in form.indexes:
            collection.create_index(keys, **options)

    for make in (ours, theirs) if first == "ours" else (theirs, ours):
        make()
    names = set(collection.index_information())
    assert names == {"_id_", "key", "key_worker_id", "routes_due", "finished_at", "expire_at"}


# -- rust_interop -----------------------------------------------------------------------------


@pytest.mark.parametrize("watch", [True, False], ids=["stream", "poll"])
def test_task_that_rust_inserts_is_adopted(
    collection: Tasks, producer: Producer, rust: RustWorker, watch: bool
) -> None:
    """
    A document without our derived fields gets them, and runs.
    """
    interval = 30.0 if watch else 0.05
    with Consumer(
        collection, lambda params: params, watch=watch, poll_interval=interval, rust_interop=True
    ) as consumer:
        assert consumer.wait_started(10)
        if watch:
            wait_until(lambda: consumer.health().discovery == "stream", "the stream is open")
            assert consumer.run_until_idle(10)
        rust.send("k", {"n": 1})
        assert producer.result("k", 10) == {"n": 1}
    adopted = document(collection, "k")
    assert (adopted["status"], adopted["routes"]) == ("succeeded", "*")


@pytest.mark.parametrize("count", [120])
def test_many_tasks_that_rust_inserted_before_are_adopted(
    collection: Tasks, producer: Producer, rust: RustWorker, count: int
) -> None:
    """
    More documents without derived fields than one page holds are all adopted.
    """
    for number in range(count):
        rust.send(f"k{number}", number)
    with polling(collection, lambda params: params, max_workers=50) as consumer:
        assert consumer.run_until_idle(60)
    assert producer.count(status="succeeded") == count


@pytest.mark.parametrize("routes", [None, "missing"])
def test_task_that_has_lost_its_routes_only_is_adopted(
    collection: Tasks, producer: Producer, routes: str | None
) -> None:
    """
    Whoever took the routes away and left the due time: a pass finds the task without the stream.
    """
    producer.send("k", "p")
    change = {"$set": {"routes": None}} if routes is None else {"$unset": {"routes": ""}}
    collection.update_one({"key": "k"}, change)
    with polling(collection, lambda params: params):
        assert producer.result("k", 20) == "p"
    assert document(collection, "k")["routes"] == "*"


def test_claim_of_a_rust_worker_that_died_is_taken_over(
    collection: Tasks, producer: Producer, rust: RustWorker
) -> None:
    """
    A Rust attempt whose lease lapsed is settled, and the task runs.
    """
    producer.send("k", "p")
    assert rust.claim("k", clock_error=-FIRST_LEASE + dt.timedelta(seconds=0.5)) is not None
    with polling(collection, lambda params: params, worker_id="ours"):
        assert producer.result("k", 10) == "p"
    workers = [(e["worker_id"], e["fail_time"] is None) for e in states(collection, "k")]
    assert workers == [("rust", False), ("ours", True)]


@pytest.fixture
def quick_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    The sweep over a shared collection comes several times a second.
    """
    monkeypatch.setattr("mscheduler_sync._stages.adoption._SWEEP_INTERVAL_S", 0.2)


def test_sweep_finds_a_dead_rust_claim_behind_a_stale_due_time(
    collection: Tasks, producer: Producer, rust: RustWorker, quick_sweep: None
) -> None:
    """
    Rust ignores a retry delay, claims and dies: only the sweep can see it, and settles the attempt.
    """
    producer.send("k", max_attempts=2, retry_delay=3600)

    def fail(_params: Any) -> None:
        raise ValueError("ours")

    with polling(collection, fail, worker_id="ours", rust_interop=True) as consumer:
        wait_until(
            lambda: any(element["fail_time"] for element in states(collection, "k")), "our failure"
        )
        assert document(collection, "k")["due"] > now() + dt.timedelta(minutes=50)
        assert rust.claim("k", clock_error=-FIRST_LEASE + dt.timedelta(seconds=0.3)) is not None
        with pytest.raises(TaskFailed, match="LeaseExpired"):
            producer.result("k", 10)
        assert consumer.health().ok
    assert [e["worker_id"] for e in states(collection, "k")] == ["ours", "rust"]


def test_sweep_finds_a_retry_that_a_rust_failure_made_due_earlier(
    collection: Tasks, producer: Producer, rust: RustWorker, quick_sweep: None
) -> None:
    """
    Stored as due is the end of the Rust lease; Rust shuts down before: the retry comes at once.
    """
    producer.send("k", "p", retry_delay=0)
    running_id = rust.claim("k")
    assert running_id is not None
    assert rust.ping("k", running_id, HOUR)
    with polling(collection, lambda params: params, worker_id="ours", rust_interop=True):
        wait_until(
            lambda: document(collection, "k")["due"] > now() + HOUR / 2,
            "the due time is the lease's end",
        )
        assert rust.shut_down([("k", running_id)]) == [True]
        assert producer.result("k", 10) == "p"
    workers = [(e["worker_id"], e["fail_time"] is None) for e in states(collection, "k")]
    assert workers == [("rust", False), ("ours", True)]


# -- cancelled and restricted tasks ------------------------------------------------------------


def test_cancelled_task_is_kept_from_rust_by_its_restriction(
    collection: Tasks, producer: Producer, rust: RustWorker
) -> None:
    """
    Rust knows no cancel mark: neither its scan nor its stream's filter lets the task through.
    """
    producer.send("k")
    assert producer.cancel("k")
    assert rust.fetch() == []
    assert document(collection, "k")["task_option"]["specific_worker_ids"] == ["__cancelled__"]
    assert producer.retry("k")
    assert rust.fetch() == ["k"]


def test_task_for_one_rust_worker_is_left_to_it(
    collection: Tasks, producer: Producer, rust: RustWorker
) -> None:
    """
    We never run what is restricted to another worker.
    """
    rust.send("k", specific_worker_ids=["rust"])
    runs: list[Any] = []
    with polling(collection, runs.append, worker_id="ours") as consumer:
        assert consumer.run_until_idle(10)
        producer.send("other")
        producer.result("other", 10)
    assert len(runs) == 1
    assert document(collection, "k")["routes"] == "@rust"
    assert rust.claim("k") is not None
