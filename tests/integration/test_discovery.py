"""
How tasks are found: by stream and by poll, by name and restriction, in pages and with small queues.
"""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.monitoring import (
    CommandFailedEvent,
    CommandListener,
    CommandStartedEvent,
    CommandSucceededEvent,
)

from mscheduler_sync import Consumer, Producer, Router, Task, TaskContext
from tests.support import Document, wait_until

Tasks = Collection[Document]

#: Looks so seldom that what is found soon was found by the stream.
STREAM: Document = {"watch": True, "poll_interval": 3600}
POLL: Document = {"watch": False, "poll_interval": 0.1}
both = pytest.mark.parametrize("found_by", [STREAM, POLL], ids=["stream", "poll"])


@pytest.fixture
def producer(collection: Tasks) -> Producer:
    """
    The producer of the test.
    """
    return Producer(collection)


def consumer_of(collection: Tasks, function: Any, found_by: Document, **options: Any) -> Consumer:
    """
    Make a consumer that finds tasks in one of the two ways.
    """
    return Consumer(collection, function, **found_by, **options)


def wait_ready(consumer: Consumer) -> None:
    """
    Wait until *consumer* has looked at what was there, and its stream, if it has one, is open.
    """
    assert consumer.wait_started(20)
    if "watch" in consumer.health().components:
        wait_until(lambda: consumer.health().discovery == "stream", "the stream is open", 20)
    assert consumer.run_until_idle(20)


def echo(params: Any) -> Any:
    return params


def task_of(producer: Producer, key: str) -> Task:
    task = producer.get(key)
    assert task is not None
    return task


# -- names -------------------------------------------------------------------------------------


def test_router_calls_the_function_of_the_name(collection: Tasks, producer: Producer) -> None:
    """
    Each with params, or params and context; the decorated function is unchanged.
    """
    router = Router()

    @router.task("double")
    def double(params: int) -> int:
        return 2 * params

    @router.task("name")
    def name(_params: Any, context: TaskContext) -> str | None:
        return context.name

    router.add("text", str)
    assert double(4) == 8
    producer.send_many(
        [("a", 1, {"name": "double"}), ("b", 2, {"name": "name"}), ("c", 3, {"name": "text"})]
    )
    with consumer_of(collection, router, POLL):
        assert [producer.result(key, 10) for key in "abc"] == [2, "name", "3"]


def test_router_takes_its_names_only(collection: Tasks, producer: Producer) -> None:
    """
    Neither other names nor tasks without a name; those wait for others.
    """
    router = Router()
    router.add("mine", echo)
    producer.send_many(
        [("a", 1, {"name": "mine"}), ("b", 2, {"name": "other"}), ("c", 3)], concurrency=1
    )
    with consumer_of(collection, router, POLL) as consumer:
        assert producer.result("a", 10) == 1
        assert consumer.run_until_idle(10)
        assert [t.key for t in producer.list(status="waiting")] == ["b", "c"]
    with consumer_of(collection, echo, POLL):
        assert [producer.result(key, 10) for key in "bc"] == [2, 3]


def test_default_of_a_router_takes_tasks_without_a_name(
    collection: Tasks, producer: Producer
) -> None:
    """
    And only those: an unknown name is somebody else's.
    """
    router = Router(default=lambda params: f"default {params}")
    router.add("mine", echo)
    producer.send_many([("a", 1, {"name": "mine"}), ("b", 2, {"name": "other"}), ("c", 3)])
    with consumer_of(collection, router, POLL) as consumer:
        assert [producer.result(key, 10) for key in "ac"] == [1, "default 3"]
        assert consumer.run_until_idle(10)
        assert task_of(producer, "b").status == "waiting"


def test_two_routers_share_a_collection(collection: Tasks, producer: Producer) -> None:
    """
    Each consumer runs its own names, whatever the mixture; one router may serve two consumers.
    """
    mails, bills = Router(), Router()
    mails.add("mail", lambda _params: "mail")
    bills.add("bill", lambda _params: "bill")
    names = ["mail", "bill"]
    producer.send_many([(f"k{n}", n, {"name": names[n % 2]}) for n in range(20)])
    with (
        consumer_of(collection, mails, POLL),
        consumer_of(collection, bills, POLL),
        consumer_of(collection, bills, POLL),
    ):
        assert [producer.result(f"k{n}", 20) for n in range(20)] == names * 10


def test_router_is_closed_by_the_first_start(collection: Tasks) -> None:
    """
    Functions that come later are refused, as are names that are taken or wrong.
    """
    router = Router()
    router.add("a", echo)
    with pytest.raises(ValueError, match="taken"):
        router.add("a", echo)
    for name, error in (("", ValueError), ("n" * 201, ValueError), (5, TypeError)):
        with pytest.raises(error):
            router.add(name, echo)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        router.add("b", 5)  # type: ignore[arg-type]
    assert router.names == ("a",)
    with consumer_of(collection, router, POLL), pytest.raises(ValueError, match="too late"):
        router.add("b", echo)


@both
def test_plain_function_takes_every_task(
    collection: Tasks, producer: Producer, found_by: Document
) -> None:
    """
    Whatever its name, restriction (if it allows this worker) or number of workers.
    """
    with consumer_of(collection, echo, found_by, worker_id="me") as consumer:
        wait_ready(consumer)
        producer.send_many(
            [
                ("plain", 1),
                ("named", 2, {"name": "n"}),
                ("pinned", 3, {"worker_ids": ["me", "other"]}),
                ("named and pinned", 4, {"name": "n", "worker_ids": ["me"]}),
                ("shared", 5, {"concurrency": 2}),
                ("for each", 6, {"retry_scope": "worker"}),
                ("shared and pinned", 7, {"concurrency": 2, "worker_ids": ["me"]}),
            ]
        )
        keys = [task.key for task in producer.list()]
        wait_until(lambda: all(task_of(producer, key).attempts for key in keys), "all are run", 20)
        assert consumer.run_until_idle(20)
    succeeded = [task.key for task in producer.list(status="succeeded")]
    assert sorted(set(keys) - set(succeeded)) == ["shared", "shared and pinned"]


# -- what cannot be run does not hide the others -------------------------------------------------


@both
def test_tasks_of_others_hide_nothing(
    collection: Tasks, producer: Producer, found_by: Document
) -> None:
    """
    Hundreds that are pinned elsewhere, have unknown names, or are done here, due earlier.
    """
    router = Router(default=echo)
    router.add("mine", echo)
    past = dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc)
    producer.send_many([(f"pinned {n}", n) for n in range(150)], run_at=past, worker_ids=["x"])
    producer.send_many([(f"named {n}", n) for n in range(150)], run_at=past, name="unknown")
    producer.send_many(
        [(f"both {n}", n) for n in range(50)], run_at=past, name="unknown", worker_ids=["me"]
    )
    producer.send_many([(f"shared {n}", n) for n in range(10)], run_at=past, concurrency=2)
    producer.send("before", 1, name="mine")
    with consumer_of(collection, router, found_by, worker_id="me") as consumer:
        assert producer.result("before", 30) == 1
        wait_ready(consumer)
        producer.send_many([("after", 2, {"name": "mine"}), ("unnamed", 3), ("last", 4)])
        assert [producer.result(key, 30) for key in ("after", "unnamed", "last")] == [2, 3, 4]
        assert consumer.health().queue_due == 0
    assert producer.count(status="succeeded") == 4
    assert producer.count(status="waiting") == 360


@pytest.mark.parametrize("page", [5])
def test_pages_reach_what_stands_behind_what_was_set_aside(
    collection: Tasks, producer: Producer, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    """
    More faulty documents than a page holds, all due before the good one.
    """
    monkeypatch.setattr("mscheduler_sync._stages.fetcher.PAGE", page)
    past = dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc)
    producer.send_many([(f"bad {n}", n) for n in range(4 * page)], run_at=past)
    collection.update_many({}, {"$set": {"task_option.worker_timeout_ms": "60000"}})
    producer.send("good", 1)
    with consumer_of(collection, echo, POLL):
        assert producer.result("good", 30) == 1


@both
@pytest.mark.parametrize("page", [7])
def test_many_tasks_are_read_page_by_page(
    collection: Tasks,
    producer: Producer,
    monkeypatch: pytest.MonkeyPatch,
    found_by: Document,
    page: int,
) -> None:
    """
    More than a page of each kind, from before the start: none is left.
    """
    monkeypatch.setattr("mscheduler_sync._stages.fetcher.PAGE", page)
    producer.send_many([(f"plain {n}", n) for n in range(5 * page)])
    producer.send_many([(f"named {n}", n) for n in range(2 * page)], name="n")
    producer.send_many([(f"pinned {n}", n) for n in range(2 * page)], worker_ids=["me"])
    with consumer_of(collection, echo, found_by, worker_id="me") as consumer:
        wait_until(lambda: producer.count(status="succeeded") == 9 * page, "all are run", 60)
        assert consumer.health().ok


def test_later_tasks_do_not_hold_up_what_is_due(
    collection: Tasks, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    The queue runs low when what is due runs low, however much waits in it for later.
    """
    monkeypatch.setattr("mscheduler_sync._stages.fetcher.PAGE", 50)
    may_end = threading.Event()
    producer.send_many([(f"due {n}", n) for n in range(130)])
    with consumer_of(collection, lambda _: may_end.wait(30), STREAM) as consumer:
        wait_until(lambda: consumer.running_count == 8, "all slots are taken", 20)
        # Within reach of the pass that was just made; the next one comes when these are due.
        producer.send_many([(f"later {n}", n) for n in range(120)], delay=28)
        wait_until(lambda: consumer.health().queue_length >= 120 + 40, "those are queued", 20)
        may_end.set()
        wait_until(lambda: producer.count(status="succeeded") >= 130, "what is due is run", 20)


def test_tasks_for_soon_cause_no_storm_of_passes(
    collection: Tasks, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    More than a page that is due one after the other: a pass when the next page begins, no more.
    """
    monkeypatch.setattr("mscheduler_sync._stages.fetcher.PAGE", 50)
    producer.send_many([(f"k{n}", n, {"delay": 1 + n * 0.02}) for n in range(200)])
    with consumer_of(collection, echo, STREAM) as consumer:
        wait_until(lambda: producer.count(status="succeeded") == 200, "all are run", 25)
        assert consumer._assembly is not None
        assert consumer._assembly.fetcher._schedule.passes <= 20


def test_low_mark_waits_for_the_end_of_a_pass(collection: Tasks) -> None:
    """
    Said while a pass ends, it is not said in vain.
    """
    with consumer_of(collection, echo, STREAM) as consumer:
        wait_ready(consumer)
        assert consumer._assembly is not None
        fetcher = consumer._assembly.fetcher
        claimer = threading.Thread(target=fetcher.queue_runs_low)
        with fetcher._changed:
            claimer.start()
            claimer.join(0.2)
            assert claimer.is_alive()
        claimer.join(10)
        assert not claimer.is_alive()


@both
def test_key_that_stands_twice_does_not_hide_the_one_that_waits(
    collection: Tasks, producer: Producer, found_by: Document
) -> None:
    """
    Without the unique index an ended document may have the same key: that is said, and no more.
    """
    producer.send("k", 7)
    waiting = collection.find_one({"key": "k"})
    assert waiting is not None
    with consumer_of(collection, echo, found_by):
        assert producer.result("k", 15) == 7
    collection.drop_index("key")
    collection.insert_one({**waiting, "_id": "another", "params": 8})
    ran: list[int] = []
    with consumer_of(collection, ran.append, found_by):
        wait_until(lambda: ran, "the one that waits is run", 15)
    assert ran == [8]


@both
def test_lone_consumer_competes_with_nobody(
    collection: Tasks,
    producer: Producer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    found_by: Document,
) -> None:
    """
    A page that was read while its tasks were being claimed does not bring them back.
    """
    caplog.set_level("DEBUG", logger="mscheduler_sync")
    monkeypatch.setattr("mscheduler_sync._stages.fetcher.PAGE", 30)
    producer.send_many([(f"k{n}", n) for n in range(250)])
    with consumer_of(collection, echo, found_by) as consumer:
        wait_until(lambda: producer.count(status="succeeded") == 250, "all are run", 60)
        assert consumer.run_until_idle(20)
    lost = [r.__dict__ for r in caplog.records if r.__dict__.get("event") == "claims_lost"]
    # A claimer that is held up between taking keys and saying so may lose a batch all the same.
    assert sum(record["count"] for record in lost) <= 8


@both
def test_task_that_only_looks_plain_runs(
    collection: Tasks, producer: Producer, found_by: Document
) -> None:
    """
    What the short claim does not take is left to the long one, at once.
    """
    producer.send("k", 7)
    collection.update_one({"key": "k"}, {"$set": {"cancel": None}})
    with consumer_of(collection, echo, found_by):
        assert producer.result("k", 15) == 7


def test_success_of_a_task_that_is_plain_no_more(collection: Tasks, producer: Producer) -> None:
    """
    An outcome is stored whatever became of the task's options while it ran.
    """

    def run(params: int) -> int:
        if params == 1:
            producer.update("k", concurrency=2)
        return params

    producer.send_many([("k", 1), ("other", 2)])
    with consumer_of(collection, run, STREAM) as consumer:
        for kind in ("k", "other"):
            wait_until(lambda: _successes(producer, kind) == 1, f"{kind} is stored", 15)  # noqa: B023
        assert consumer.run_until_idle(20)
    assert task_of(producer, "k").status == "waiting"
    assert _successes(producer, "k") == 1
    assert task_of(producer, "other").status == "succeeded"


def _successes(producer: Producer, key: str) -> int:
    return sum(a.succeeded_at is not None for a in task_of(producer, key).attempts)


def test_small_queue_loses_nothing(collection: Tasks, producer: Producer) -> None:
    """
    200 tasks, from before and after the start, through a queue of ten: in the end all are run.
    """
    check_small_queue(collection, producer, POLL)


def test_small_queue_loses_nothing_of_the_stream(collection: Tasks, producer: Producer) -> None:
    """
    Nor does anything wait for the next look of the long kind, which comes after 30 s.
    """
    check_small_queue(collection, producer, STREAM)


def check_small_queue(collection: Tasks, producer: Producer, found_by: Document) -> None:
    producer.send_many([(f"before {n}", n) for n in range(100)])
    with consumer_of(collection, echo, found_by, queue_limit=10) as consumer:
        wait_until(lambda: producer.count(status="succeeded") >= 10, "some are run", 30)
        producer.send_many([(f"after {n}", n) for n in range(100)])
        wait_until(lambda: producer.count(status="succeeded") == 200, "all are run", 25)
        assert consumer.health().queue_length <= 10


def test_small_queue_loses_nothing_that_is_due_later(collection: Tasks, producer: Producer) -> None:
    """
    Delayed tasks beyond the queue's limit are found again in time.
    """
    producer.send_many([(f"k{n}", n, {"delay": 0.3 + n / 100}) for n in range(60)])
    with consumer_of(collection, echo, STREAM, queue_limit=10):
        wait_until(lambda: producer.count(status="succeeded") == 60, "all are run", 60)
    for task in producer.list():
        claimed_at = task.attempts[0].claimed_at
        assert claimed_at is not None
        assert claimed_at >= task.start_at


# -- times -------------------------------------------------------------------------------------


@both
def test_delayed_task_runs_at_its_time(
    collection: Tasks, producer: Producer, found_by: Document
) -> None:
    """
    Found at once, claimed not before its time, and without a look of the long kind.
    """
    with consumer_of(collection, echo, found_by) as consumer:
        wait_ready(consumer)
        producer.send("k", 1, delay=0.5)
        assert producer.result("k", 20) == 1
    task = task_of(producer, "k")
    claimed_at = task.attempts[0].claimed_at
    assert claimed_at is not None
    assert claimed_at >= task.start_at


@both
def test_task_that_is_brought_forward_runs_at_its_new_time(
    collection: Tasks, producer: Producer, found_by: Document
) -> None:
    """
    By `send` with a time, or by hand in the database.
    """
    with consumer_of(collection, echo, found_by) as consumer:
        wait_ready(consumer)
        producer.send_many([("a", 1), ("b", 2)], delay=1000)
        assert consumer.run_until_idle(20)
        producer.send("a", delay=0)
        assert producer.result("a", 20) == 1
        now = task_of(producer, "b").created_at
        changes = {"task_state.start_time": now, "due": now}
        collection.update_one({"key": "b"}, {"$set": changes})
        assert producer.result("b", 20) == 2


@both
def test_task_that_is_put_off_does_not_run_at_its_old_time(
    collection: Tasks, producer: Producer, found_by: Document
) -> None:
    """
    The claim asks the document, not the queue.
    """
    with consumer_of(collection, echo, found_by) as consumer:
        wait_ready(consumer)
        producer.send_many([("k", 1, {"delay": 0.4}), ("marker", 2, {"delay": 0.8})])
        producer.send("k", delay=1000)
        assert producer.result("marker", 20) == 2
        assert consumer.run_until_idle(20)
    assert task_of(producer, "k").status == "waiting"
    assert task_of(producer, "k").attempts == ()


@both
def test_retry_comes_at_its_time(collection: Tasks, producer: Producer, found_by: Document) -> None:
    """
    The second attempt is claimed not before the first one's retry time.
    """

    def function(_params: Any, context: TaskContext) -> int:
        if context.attempt == 1:
            raise ValueError("again")
        return context.attempt

    with consumer_of(collection, function, found_by) as consumer:
        wait_ready(consumer)
        producer.send("k", retry_delay=0.3)
        assert producer.result("k", 20) == 2
    first, second = task_of(producer, "k").attempts
    assert first.retry_at is not None
    assert second.claimed_at is not None
    assert second.claimed_at >= first.retry_at


# -- tasks that change -------------------------------------------------------------------------


@both
def test_task_that_becomes_mine_is_found(
    collection: Tasks, producer: Producer, found_by: Document
) -> None:
    """
    By its restriction, its name, a rerun or a retry.
    """
    router = Router()
    router.add("mine", echo)
    producer.send("pinned", 1, name="mine", worker_ids=["other"])
    producer.send("named", 2, name="other")
    producer.send("cancelled", 3, name="mine")
    producer.cancel("cancelled")
    with consumer_of(collection, router, found_by, worker_id="me") as consumer:
        wait_ready(consumer)
        producer.send("pinned", 1, if_exists="update", name="mine", worker_ids=["me"])
        assert producer.result("pinned", 20) == 1
        producer.send("named", 2, if_exists="update", name="mine")
        assert producer.result("named", 20) == 2
        producer.retry("cancelled")
        assert producer.result("cancelled", 20) == 3
        producer.send("named", 4, if_exists="rerun", name="mine")
        assert producer.result("named", 20) == 4


def test_task_that_another_worker_gives_back_is_found(
    collection: Tasks, producer: Producer
) -> None:
    """
    Released by a stop, it runs here at once.
    """
    began = threading.Event()

    def function(params: Any, context: TaskContext) -> Any:
        if context.worker_id == "first":
            began.set()
            context.cancelled.wait(30)
            context.check()
        return params

    producer.send("k", 1, worker_ids=["first", "second"])
    first = consumer_of(collection, function, POLL, worker_id="first")
    first.start()
    assert began.wait(20)
    with consumer_of(collection, function, STREAM, worker_id="second") as second:
        wait_ready(second)
        assert first.stop(3).released == ("k",)
        assert producer.result("k", 20) == 1


@both
def test_end_of_a_dead_worker_s_lease_is_noticed(
    collection: Tasks,
    producer: Producer,
    monkeypatch: pytest.MonkeyPatch,
    found_by: Document,
) -> None:
    """
    An idle consumer takes over soon after the lease has ended, by stream or poll.
    """
    monkeypatch.setattr("mscheduler_sync._stages.heartbeat.Heartbeat.send", lambda _: True)

    def function(_params: Any, context: TaskContext) -> str:
        if context.worker_id == "deaf":
            wait_until(lambda: len(task_of(producer, "k").attempts) == 2, "it is taken over", 30)
        return context.worker_id

    with (
        consumer_of(collection, function, POLL, worker_id="deaf") as deaf,
        consumer_of(collection, function, found_by, worker_id="next", max_workers=0) as following,
    ):
        wait_until(lambda: deaf.wait_started(10) and following.wait_started(10), "both run")
        producer.send("k", lease=1, heartbeat=0.3)
        wait_until(lambda: deaf.running_count, "the first one has it")
        following.max_workers = 1
        assert producer.result("k", 20) == "next"
    first, second = task_of(producer, "k").attempts
    assert first.lease_end is not None
    assert second.claimed_at is not None
    late = second.claimed_at - first.lease_end
    assert dt.timedelta(0) <= late < dt.timedelta(seconds=5)


def test_collection_that_is_dropped_is_used_again(collection: Tasks, producer: Producer) -> None:
    """
    The stream is opened anew, the indexes are made again, and new tasks run.
    """
    with consumer_of(collection, echo, STREAM) as consumer:
        wait_ready(consumer)
        producer.send("before", 1)
        assert producer.result("before", 20) == 1
        collection.drop()
        wait_until(lambda: "key" in collection.index_information(), "the indexes are back", 20)
        wait_until(lambda: consumer.health().discovery == "stream", "the stream is open", 20)
        producer.send("after", 2)
        assert producer.result("after", 20) == 2
    assert set(collection.index_information()) == {
        "_id_",
        "key",
        "routes_due",
        "finished_at",
        "expire_at",
    }


# -- costs -------------------------------------------------------------------------------------


class Commands(CommandListener):
    """
    The names of the commands that a client has sent, and what they asked for.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.questions: list[str] = []

    def started(self, event: CommandStartedEvent) -> None:
        self.names.append(event.command_name)
        if event.command_name not in {"getMore", "hello", "ping"}:
            asked = event.command.get("filter") or event.command.get("updates")
            self.questions.append(f"{event.command_name} {asked!s:.200}")

    def succeeded(self, event: CommandSucceededEvent) -> None:
        pass

    def failed(self, event: CommandFailedEvent) -> None:
        pass


@pytest.fixture
def commands() -> Commands:
    """
    What the client of `watched` has sent.
    """
    return Commands()


@pytest.fixture
def watched(server_uri: str, collection: Tasks, commands: Commands) -> Iterator[Tasks]:
    """
    The collection through a client whose commands are noted.
    """
    client: MongoClient[Document]
    with MongoClient(server_uri, tz_aware=True, event_listeners=[commands]) as client:
        yield client[collection.database.name].tasks


def test_polling_opens_no_change_stream(
    watched: Tasks, producer: Producer, commands: Commands
) -> None:
    """
    ``watch=False`` never asks for one.
    """
    with consumer_of(watched, echo, POLL) as consumer:
        producer.send("k", 1)
        assert producer.result("k", 10) == 1
        health = consumer.health()
    assert (health.discovery, health.stream_age) == ("poll", None)
    assert not {"aggregate", "getMore"} & set(commands.names)


@pytest.mark.parametrize("pause_s", [0.5])
def test_idle_consumer_asks_next_to_nothing(
    collection: Tasks, watched: Tasks, producer: Producer, commands: Commands, pause_s: float
) -> None:
    """
    With a stream: no looks while nothing happens, whatever others run, have done or want later.
    """
    producer.send_many([(f"later {n}", n) for n in range(20)], delay=1000)
    producer.send_many([(f"shared {n}", n) for n in range(3)], concurrency=2)
    producer.send("pinned", worker_ids=["x"])
    producer.send("busy", worker_ids=["busy"], heartbeat=0.05)
    go = threading.Event()
    with (
        consumer_of(collection, lambda _params: go.wait(30), POLL, worker_id="busy") as busy,
        consumer_of(watched, echo, STREAM) as idle,
    ):
        wait_until(lambda: busy.running_count == 4, "the other one is busy")
        shared = [f"shared {n}" for n in range(3)]
        wait_until(
            lambda: all(len(task_of(producer, key).attempts) == 2 for key in shared), "its part"
        )
        wait_ready(idle)

        def is_at_rest() -> bool:
            commands.questions.clear()
            threading.Event().wait(pause_s)
            return commands.questions == []

        # The other one's heartbeats alone are twenty a second.
        wait_until(is_at_rest, "nothing is asked for a while", 15)
        go.set()
