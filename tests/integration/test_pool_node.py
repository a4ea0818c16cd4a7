"""
The pool on one node, with change streams and without.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.database import Database

from mscheduler_sync import MSchedulerError, RetryLater
from mscheduler_sync.pool import (
    DispatchTimeout,
    HandlerError,
    InboxFull,
    Job,
    JobExists,
    JobNotFound,
    JobStarted,
    JobStartFailed,
    JobStopFailed,
    JobStopped,
    Node,
    NodeStateChanged,
    NotifyFailed,
    PoolFull,
)
from tests.support import Document, wait_until
from tests.support.pool_invariants import Recorder, broken

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
    Make nodes of the pool "p", slow to be declared dead; they are closed at the end.
    """
    nodes: list[Node] = []

    def one(**options: Any) -> Node:
        chosen = {"poll_interval": 0.2, "shutdown_timeout": 10, "dispatch_timeout": 20}
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
    A handler that notes what must not be.
    """
    recorder = Recorder()
    yield recorder
    assert recorder.faults == []


def test_a_job_is_started_notified_and_stopped(make: Make, recorder: Recorder) -> None:
    """
    One job's life: each call reaches the handler in order, with its payload; then it is gone.
    """
    node = make()
    worker = node.add_worker(recorder)
    node.dispatch("a", {"every": 60})
    assert recorder.of("a") == [("start", {"every": 60})]
    assert [job.key for job in worker.jobs()] == ["a"]
    assert node.job_owner("a") == worker.id
    node.notify("a", 1)
    node.notify("a", [2])
    wait_until(lambda: recorder.count("notify") == 2, "both notifications arrive")
    node.stop_job("a", wait=True)
    assert recorder.of("a") == [
        ("start", {"every": 60}),
        ("notify", 1),
        ("notify", [2]),
        ("stop", None),
    ]
    assert worker.jobs() == []
    assert node.job_keys() == []
    for call in (node.stop_job, node.notify, node.job_payload, node.job_owner):
        with pytest.raises(JobNotFound):
            call("a")


def test_what_a_handler_learns_of_a_job(make: Make) -> None:
    """
    Key, payload, a fence, that it is new, and when it was dispatched.
    """
    jobs: list[Job] = []

    class Handler:
        def start(self, job: Job) -> None:
            jobs.append(job)

        def stop(self, key: str) -> None: ...

    node = make()
    node.add_worker(Handler())
    node.dispatch("a", b"\x00")
    node.stop_job("a", wait=True)
    node.dispatch("a", None)
    first, second = jobs
    assert (first.key, first.payload, first.requeued) == ("a", b"\x00", False)
    assert first.created_at.tzinfo is not None
    assert (second.payload, second.requeued) == (None, False)
    assert second.fence > first.fence > 0


def test_payloads_are_read_back(make: Make, recorder: Recorder) -> None:
    """
    A value, none at all, and an unknown job are told apart.
    """
    node = make()
    node.add_worker(recorder)
    node.dispatch("with", [1, "$x", {"$y": None}])
    node.dispatch("without")
    assert node.job_payload("with") == [1, "$x", {"$y": None}]
    assert node.job_payload("without") is None
    with pytest.raises(JobNotFound):
        node.job_payload("unknown")
    node.stop_job("with", wait=True)
    with pytest.raises(JobNotFound):
        node.job_payload("with")


@pytest.mark.parametrize("key", ["=", "$x", "a.b", "\x00", "\x1f", "ü\u2028", "x" * 512])
def test_any_non_empty_string_is_a_key(make: Make, recorder: Recorder, key: str) -> None:
    """
    Also such as look like something else to the database.
    """
    node = make()
    node.add_worker(recorder)
    node.dispatch(key, key)
    node.notify(key, "$note")
    wait_until(lambda: recorder.count("notify"), "the notification arrives")
    assert node.job_keys() == [key]
    node.stop_job(key, wait=True)
    assert recorder.of(key) == [("start", key), ("notify", "$note"), ("stop", None)]


def test_a_key_is_taken_until_its_job_has_ended(make: Make, recorder: Recorder) -> None:
    """
    While the job runs, from every node; afterwards the key is free again.
    """
    node, other = make(), make(client_only=True)
    node.add_worker(recorder)
    node.dispatch("a", 1)
    for one in (node, other):
        with pytest.raises(JobExists) as caught:
            one.dispatch("a", 2)
        assert caught.value.key == "a"
    assert node.job_payload("a") == 1
    node.stop_job("a", wait=True)
    other.dispatch("a", 3)
    assert recorder.of("a") == [("start", 1), ("stop", None), ("start", 3)]


def test_of_many_dispatchers_of_one_key_one_wins(make: Make, recorder: Recorder) -> None:
    """
    Twenty at once: one success, nineteen JobExists, one start.
    """
    node = make()
    node.add_worker(recorder)
    results: list[object] = []
    barrier = threading.Barrier(20)

    def dispatch() -> None:
        barrier.wait()
        try:
            node.dispatch("a")
            results.append(None)
        except MSchedulerError as error:
            results.append(type(error))

    threads = [threading.Thread(target=dispatch) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, results)) == sorted(map(str, [None, *[JobExists] * 19]))
    assert recorder.count("start") == 1


class Failing:
    """
    A handler that fails as it is told.
    """

    def __init__(self) -> None:
        self.start_error: Exception | None = None
        self.stop_error: Exception | None = None
        self.notify_error: Exception | None = None
        self.starts = self.stops = 0

    def start(self, job: Job) -> None:
        self.starts += 1
        if self.start_error is not None:
            raise self.start_error

    def stop(self, key: str) -> None:
        self.stops += 1
        if self.stop_error is not None:
            raise self.stop_error

    def notify(self, key: str, payload: Any) -> None:
        if self.notify_error is not None:
            raise self.notify_error


def test_a_failed_start_is_told_with_type_and_text(
    make: Make, database: Database[Document]
) -> None:
    """
    The caller gets the handler's error, the job is gone, the key is free.
    """
    node, handler = make(), Failing()
    node.add_worker(handler)
    handler.start_error = KeyError("no such station")
    with node.subscribe(JobStartFailed) as failures:
        with pytest.raises(HandlerError, match="no such station") as caught:
            node.dispatch("a")
        assert failures.get(5) == JobStartFailed(key="a", error="KeyError", retried=False)
    assert (caught.value.key, caught.value.type) == ("a", "KeyError")
    wait_until(lambda: database.pool_jobs.count_documents({}) == 0, "the job is gone")
    handler.start_error = None
    node.dispatch("a")
    assert handler.starts == 2


def test_a_start_may_ask_for_another_try(make: Make) -> None:
    """
    RetryLater keeps the dispatch waiting, and the job is started again after the delay.
    """

    class Hesitant(Failing):
        def start(self, job: Job) -> None:
            super().start(job)
            if self.starts < 3:
                raise RetryLater(0.05)

    node, handler = make(), Hesitant()
    node.add_worker(handler)
    node.dispatch("a")
    assert handler.starts == 3


def test_a_failed_stop_is_told_and_the_job_goes_on(make: Make) -> None:
    """
    Who waits for the stop gets the error; the job can be stopped later.
    """
    node, handler = make(), Failing()
    node.add_worker(handler)
    node.dispatch("a")
    handler.stop_error = OSError("busy")
    with node.subscribe(JobStopFailed, JobStopped) as events:
        with pytest.raises(HandlerError, match="busy") as caught:
            node.stop_job("a", wait=True)
        assert caught.value.type == "OSError"
        assert node.job_keys() == ["a"]
        handler.stop_error = None
        node.stop_job("a", wait=True)
        first, second = events.get(5), events.get(5)
    assert first == JobStopFailed(key="a", error="OSError")
    assert isinstance(second, JobStopped)
    assert node.job_keys() == []


def test_a_failed_notification_hurts_nobody(make: Make) -> None:
    """
    It is told as an event, later ones arrive, and the job goes on; so without a method notify.
    """

    class Deaf:
        def start(self, job: Job) -> None: ...

        def stop(self, key: str) -> None: ...

    node, handler = make(), Failing()
    worker = node.add_worker(handler)
    handler.notify_error = ValueError("what?")
    node.dispatch("a")
    with node.subscribe(NotifyFailed) as failures:
        node.notify("a", 1)
        assert failures.get(10) == NotifyFailed(key="a", error="ValueError")
    node.remove_worker(worker)
    node.add_worker(Deaf())
    wait_until(lambda: node.job_owner("a") not in {None, worker.id}, "the job has moved")
    with node.subscribe(NotifyFailed) as failures:
        node.notify("a", 2)
        assert failures.get(10) == NotifyFailed(key="a", error="TypeError")
    assert node.job_keys() == ["a"]


def test_a_dispatch_without_workers_is_withdrawn(
    make: Make, recorder: Recorder, database: Database[Document]
) -> None:
    """
    DispatchTimeout means that it never starts, also when a worker comes later.
    """
    node = make()
    with pytest.raises(DispatchTimeout) as caught:
        node.dispatch("a", timeout=0.3)
    assert (caught.value.key, caught.value.started) == ("a", False)
    assert database.pool_jobs.count_documents({}) == 0
    node.add_worker(recorder)
    node.dispatch("b")
    assert recorder.of("a") == []


def test_a_dispatch_waits_for_its_worker(make: Make, recorder: Recorder) -> None:
    """
    A worker that comes in time gets the waiting job.
    """
    node = make()
    thread = threading.Thread(target=node.dispatch, args=("a",))
    thread.start()
    wait_until(lambda: node.state == "running", "the node runs")
    node.add_worker(recorder)
    thread.join(20)
    assert recorder.of("a") == [("start", None)]


def test_a_start_that_hangs_is_told_and_stopped_later(make: Make) -> None:
    """
    After twice the time-out the caller learns that it hangs; once it returns, it is stopped.
    """
    release, stopped = threading.Event(), threading.Event()

    class Slow:
        def start(self, job: Job) -> None:
            release.wait(20)

        def stop(self, key: str) -> None:
            stopped.set()

    node = make()
    node.add_worker(Slow())
    with pytest.raises(DispatchTimeout) as caught:
        node.dispatch("a", timeout=0.3)
    assert caught.value.started
    release.set()
    assert stopped.wait(10)
    wait_until(lambda: node.job_keys() == [], "the job is gone")


def test_a_slow_start_is_called_once(make: Make) -> None:
    """
    Longer than the dispatch time-out, but within twice of it: the dispatch succeeds.
    """
    starts: list[Job] = []

    class Slow:
        def start(self, job: Job) -> None:
            starts.append(job)
            threading.Event().wait(0.6)

        def stop(self, key: str) -> None: ...

    node = make()
    node.add_worker(Slow())
    node.dispatch("a", timeout=0.5)
    assert len(starts) == 1


def test_too_many_waiting_jobs_are_refused(make: Make) -> None:
    """
    Those that wait already stay; nothing is dropped.
    """
    node = make(max_queued_jobs=3)
    node.start()
    threads = [
        threading.Thread(target=_dispatch_quietly, args=(node, f"k{n}", 3)) for n in range(3)
    ]
    for thread in threads:
        thread.start()
    client = make(client_only=True, max_queued_jobs=3)

    def is_full() -> bool:
        try:
            client.dispatch("more", timeout=0.05)
        except PoolFull as error:
            return error.limit == 3
        except DispatchTimeout:
            return False
        return False

    wait_until(is_full, "the pool is full")
    for thread in threads:
        thread.join()


def _dispatch_quietly(node: Node, key: str, timeout: float) -> None:
    with contextlib.suppress(DispatchTimeout):
        node.dispatch(key, timeout=timeout)


def test_a_stop_before_the_start_is_a_verdict_for_the_dispatcher(make: Make) -> None:
    """
    The waiting job is gone at once, and its dispatcher is told that it was stopped.
    """
    node, errors = make(), []
    node.start()

    def dispatch() -> None:
        try:
            node.dispatch("a", timeout=20)
        except HandlerError as error:
            errors.append(error.type)

    thread = threading.Thread(target=dispatch)
    thread.start()

    def stopped() -> bool:
        try:
            node.stop_job("a", wait=True)
        except JobNotFound:
            return False
        return True

    wait_until(stopped, "the waiting job is stopped")
    thread.join(20)
    assert errors == ["JobStopped"]


def test_a_full_inbox_refuses(make: Make) -> None:
    """
    Notifications of a job that does not read them are bounded in number and bytes.
    """
    entered, release = threading.Event(), threading.Event()

    class Busy(Failing):
        def notify(self, key: str, payload: Any) -> None:
            entered.set()
            release.wait(30)

    node = make()
    node.add_worker(Busy())
    node.dispatch("a")
    node.notify("a")
    assert entered.wait(10)
    try:
        node.notify("a", "x" * 900_000)
        with pytest.raises(InboxFull):
            node.notify("a", "x" * 200_000)
        node.notify("a", "small")
    finally:
        release.set()


def test_keys_do_not_block_each_other(make: Make) -> None:
    """
    While one key's start and another's stop hang, a third key is served.
    """
    release = threading.Event()
    hanging = threading.Semaphore(0)

    class Handler:
        def start(self, job: Job) -> None:
            if job.key == "slow start":
                hanging.release()
                release.wait(30)

        def stop(self, key: str) -> None:
            if key == "slow stop":
                hanging.release()
                release.wait(30)

    node = make()
    node.add_worker(Handler())
    node.dispatch("slow stop")
    node.stop_job("slow stop")
    thread = threading.Thread(target=node.dispatch, args=("slow start",))
    thread.start()
    try:
        assert hanging.acquire(timeout=10)
        assert hanging.acquire(timeout=10)
        node.dispatch("quick")
        node.stop_job("quick", wait=True)
    finally:
        release.set()
        thread.join(20)


def test_stop_and_notify_wait_for_the_start(make: Make, recorder: Recorder) -> None:
    """
    Calls about one key are serial: what comes during a start is done after it.
    """
    entered, release = threading.Event(), threading.Event()

    class Slow:
        start_over = False

        def start(self, job: Job) -> None:
            entered.set()
            release.wait(30)
            recorder.start(job)

        def stop(self, key: str) -> None:
            recorder.stop(key)

        def notify(self, key: str, payload: Any) -> None:
            recorder.notify(key, payload)

    node = make()
    node.add_worker(Slow())
    thread = threading.Thread(target=node.dispatch, args=("a",))
    thread.start()
    assert entered.wait(10)
    node.notify("a", 1)
    node.stop_job("a")
    release.set()
    thread.join(20)
    wait_until(lambda: node.job_keys() == [], "the job is gone")
    assert recorder.of("a") == [("start", None), ("notify", 1), ("stop", None)]


def test_handlers_may_call_the_node(make: Make) -> None:
    """
    A handler dispatches another job, stops itself, and closes the node without waiting for itself.
    """
    node = make()
    stopped = threading.Event()

    class Handler:
        def start(self, job: Job) -> None:
            if job.key == "parent":
                node.dispatch("child")

        def stop(self, key: str) -> None:
            stopped.set()

        def notify(self, key: str, payload: Any) -> None:
            node.stop_job(key)

    node.add_worker(Handler())
    node.dispatch("parent")
    assert node.job_keys() == ["child", "parent"]
    node.notify("child")
    assert stopped.wait(10)


def test_a_dispatch_ends_with_its_node(make: Make, database: Database[Document]) -> None:
    """
    A job that still waits for a worker is withdrawn at the close, long before its time-out.
    """
    node, verdicts = make(client_only=True), []

    def ask() -> None:
        try:
            node.dispatch("a", timeout=600)
        except DispatchTimeout as error:
            verdicts.append(error.started)

    asking = threading.Thread(target=ask, name="asking", daemon=True)
    asking.start()
    wait_until(lambda: database.pool_jobs.count_documents({}), "the job waits")
    node.close()
    asking.join(20)
    assert verdicts == [False]
    assert database.pool_jobs.count_documents({}) == 0


def test_closing_is_final_and_may_be_repeated(make: Make, recorder: Recorder) -> None:
    """
    The jobs are given back; a second close tells the same; calls afterwards are refused.
    """
    node = make()
    worker = node.add_worker(recorder)
    node.dispatch("a")
    with node.subscribe(NodeStateChanged) as changes:
        report = node.close()
    assert (report.released, report.left, report.threads) == (("a",), (), ())
    assert list(changes) == [
        NodeStateChanged(state="closing"),
        NodeStateChanged(state="closed"),
    ]
    assert node.close() == report
    assert (node.is_closed, node.is_shutdown, worker.is_stopped) == (True, False, True)
    assert recorder.of("a") == [("start", None), ("stop", None)]
    for call in (node.start, node.shutdown, node.job_keys):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    with pytest.raises(RuntimeError, match="closed"):
        node.dispatch("b")


def test_a_job_outlives_its_only_node(make: Make, recorder: Recorder) -> None:
    """
    Payload and notifications wait; the next node starts the job as a requeued one.
    """
    first = make()
    first.add_worker(recorder)
    first.dispatch("a", "payload")
    first.close()
    client = make(client_only=True)
    assert client.job_keys() == ["a"]
    assert client.job_owner("a") is None
    client.notify("a", "meanwhile")
    with pytest.raises(JobExists):
        client.dispatch("a")
    second = make()
    with second.subscribe(JobStarted) as starts:
        second.add_worker(recorder)
        event = starts.get(10)
    assert isinstance(event, JobStarted)
    assert event.requeued
    wait_until(lambda: recorder.count("notify"), "the notification arrives")
    assert recorder.of("a") == [
        ("start", "payload"),
        ("stop", None),
        ("start", "payload"),
        ("notify", "meanwhile"),
    ]


def test_a_job_between_two_owners_can_be_stopped(make: Make, recorder: Recorder) -> None:
    """
    It is gone at once, and no later worker starts it.
    """
    first = make()
    first.add_worker(recorder)
    first.dispatch("a")
    first.close()
    client = make(client_only=True)
    client.stop_job("a", wait=True)
    assert client.job_keys() == []
    second = make()
    second.add_worker(recorder)
    second.dispatch("b")
    assert recorder.of("a") == [("start", None), ("stop", None)]


def test_a_moved_job_whose_start_fails_is_kept(make: Make, database: Database[Document]) -> None:
    """
    It is tried again after a growing pause, with the error to be seen; the payload stays.
    """
    first, good = make(), Failing()
    first.add_worker(good)
    first.dispatch("a", "payload")
    first.close()
    second, bad = make(), Failing()
    bad.start_error = OSError("no route")
    with second.subscribe(JobStartFailed) as failures:
        second.add_worker(bad)
        assert failures.get(10) == JobStartFailed(key="a", error="OSError", retried=True)
    job = database.pool_jobs.find_one({"key": "a"})
    assert job is not None
    assert (job["state"], job["owner"], job["attempts"]) == ("pending", None, 1)
    assert job["last_error"] == {"type": "OSError", "text": "no route"}
    assert second.job_payload("a") == "payload"
    bad.start_error = None
    wait_until(lambda: second.job_owner("a"), "the job is started again")


def test_pools_and_prefixes_are_apart(make: Make, database: Database[Document]) -> None:
    """
    Pools of one database do not see each other, also where one's name begins the other's.
    """
    node, recorder = make(), Recorder()
    node.add_worker(recorder)
    others = [Node(database, "p\x20"), Node(database, "pp"), Node(database, "p", prefix="other_")]
    try:
        node.dispatch("a", 1)
        for other in others:
            assert other.job_keys() == []
            assert other.pool_workers() == []
            with pytest.raises(JobNotFound):
                other.stop_job("a")
            with pytest.raises(DispatchTimeout):
                other.dispatch("a", timeout=0.1)
    finally:
        for other in others:
            other.close()
    assert recorder.of("a") == [("start", 1)]


def test_health_tells_of_a_node(make: Make, recorder: Recorder, watch: bool) -> None:
    """
    State, workers, jobs, lease and parts, before, during and after.
    """
    node = make()
    assert not node.health().ok
    worker = node.add_worker(recorder)
    node.dispatch("a")
    if watch:
        wait_until(lambda: node.health().discovery == "stream", "the stream is open")
    health = node.health()
    assert health.ok, health
    assert (health.state, health.node) == ("running", worker.id.rpartition(".")[0])
    assert (health.workers, health.jobs, health.ring_size) == (1, 1, 1)
    assert health.lease_left is not None
    assert 0 < health.lease_left <= 30
    assert {"lease", "control"} <= set(health.components)
    node.close()
    assert not node.health().ok


def test_an_unstorable_payload_is_refused(make: Make) -> None:
    """
    With the place of the fault, before anything is written.
    """
    node = make(client_only=True)
    with pytest.raises(ValueError, match=r"payload\.x cannot be stored"):
        node.dispatch("a", {"x": object()})
    with pytest.raises(ValueError, match="payload takes"):
        node.dispatch("a", "x" * (16 * 1024 * 1024))
    with pytest.raises(ValueError, match=r"payload\[0\] cannot be stored"):
        node.notify("a", [2**70])


def test_a_second_ring_order_is_refused(make: Make) -> None:
    """
    The first node decides for the pool.
    """
    make(ring_order="created").start()
    with pytest.raises(ValueError, match="created"):
        make().start()


@pytest.mark.parametrize(("client_only", "needed"), [(False, 5), (True, 2)])
def test_a_connection_pool_that_is_too_small(
    server_uri: str,
    database: Database[Document],
    caplog: pytest.LogCaptureFixture,
    client_only: bool,
    needed: int,
) -> None:
    """
    One warning for one connection too few, none otherwise.
    """

    def told(size: int) -> list[dict[str, Any]]:
        caplog.clear()
        client: MongoClient[Document]
        with (
            MongoClient(server_uri, maxPoolSize=size) as client,
            Node(client[database.name], "p", client_only=client_only) as node,
        ):
            node.start()
        return [one.__dict__ for one in caplog.records if one.levelname == "WARNING"]

    (warning,) = told(needed - 1)
    assert warning["event"] == "small_pool"
    assert (warning["max_pool_size"], warning["needed"]) == (needed - 1, needed)
    assert told(needed) == []


def test_many_jobs_over_few_connections(
    server_uri: str, database: Database[Document], recorder: Recorder
) -> None:
    """
    With two connections for everything, fifty jobs are dispatched and handed over.
    """
    client: MongoClient[Document]
    with MongoClient(server_uri, maxPoolSize=2) as client:
        with Node(client[database.name], "p", worker_ttl=10) as node:
            node.add_worker(recorder)
            threads = [threading.Thread(target=node.dispatch, args=(f"k{n}",)) for n in range(50)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert len(recorder.running) == 50
            first = node.id
            report = node.close()
        assert (len(report.released), report.left, node.id) == (50, (), first)
