"""
The life cycle of consumers and nodes, by an owner without threads of its own.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from pymongo import MongoClient

from mscheduler_sync import Consumer
from mscheduler_sync._runtime import lifecycle
from mscheduler_sync._runtime.lifecycle import Lifecycle, Owner, State
from mscheduler_sync._runtime.log import logger
from mscheduler_sync._runtime.signals import serve
from mscheduler_sync.errors import ComponentCrashed, StoreUnavailable
from mscheduler_sync.pool import Node
from tests.support import Document, wait_until


def nothing() -> None:
    """
    What each step does if a test wants nothing else.
    """


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


class Scripted:
    """
    An owner and its threads, whose steps are noted and do what they are told.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.states: list[State] = []
        self.timeouts_s: list[float] = []
        self.renewals = 0
        self.in_prepare = self.in_start = self.in_stop = nothing
        self.inside: threading.Thread | None = None
        self.life: Lifecycle[str] = Lifecycle(
            Owner(
                kind="thing",
                log=logger("consumer"),
                id=lambda: "me",
                start=self.begin,
                stop=lambda timeout_s: self.life.stop(timeout_s),  # noqa: PLW0108 - not made yet
                empty_report="nothing",
                stop_timeout_s=10.0,
                prepare=self.prepare,
                on_state=self.states.append,
                renew=self.renew,
            )
        )

    def begin(self) -> None:
        self.life.start()

    def prepare(self) -> Scripted:
        self.calls.append("prepare")
        self.in_prepare()
        return self

    def renew(self, _life: Lifecycle[str]) -> None:
        self.renewals += 1

    # -- as its own threads ------------------------------------------------------------------

    def start(self) -> None:
        self.calls.append("start")
        self.in_start()

    def request_stop(self) -> None:
        self.calls.append("request_stop")

    def stop(self, timeout_s: float) -> str:
        self.calls.append("stop")
        self.timeouts_s.append(timeout_s)
        self.in_stop()
        return "done"

    def is_running_here(self) -> bool:
        return threading.current_thread() is self.inside


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    """
    An owner that is new, and stopped at the end of the test.
    """
    one = Scripted()
    yield one
    one.in_stop = nothing
    try:
        one.life.stop()
    except ComponentCrashed:
        assert one.life.state == "crashed"


class Gate:
    """
    A step that says when it is reached, and waits until it may go on.
    """

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.open.wait(10)


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.__dict__["event"] for record in caplog.records]


# -- starting --------------------------------------------------------------------------------------


def test_a_life_from_its_start_to_its_stop(
    scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    """
    Each step comes once; what comes again is answered, and what comes too late is refused.
    """
    caplog.set_level(logging.INFO)
    life = scripted.life
    assert (life.state, life.stop_asked.is_set()) == ("new", False)
    assert life.start()
    assert not life.start()
    assert (life.state, life.stop_asked.is_set()) == ("running", False)
    assert life.stop(3) == "done"
    assert life.stop() == "done"
    assert (life.state, life.stop_asked.is_set()) == ("stopped", True)
    assert scripted.calls == ["prepare", "start", "request_stop", "stop"]
    assert 2.5 < scripted.timeouts_s[0] <= 3
    assert scripted.states == ["running", "stopping", "stopped"]
    assert events(caplog) == ["thing_running", "thing_stopping", "thing_stopped"]
    with pytest.raises(RuntimeError, match="this thing is stopped; a thing is started once"):
        life.start()


def test_a_stop_before_the_start(scripted: Scripted) -> None:
    """
    There is nothing to stop, and nothing to be started any more.
    """
    assert scripted.life.stop() == "nothing"
    assert scripted.life.stop() == "nothing"
    assert scripted.states == ["stopped"]
    with pytest.raises(RuntimeError, match="stopped"):
        scripted.life.start()
    assert scripted.calls == []


def test_a_stop_while_it_starts(scripted: Scripted) -> None:
    """
    The stop does not wait for the preparation, and no thread is started after it.
    """
    gate = scripted.in_prepare = Gate()
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(scripted.life.start)
        assert gate.reached.wait(10)
        assert scripted.life.stop() == "nothing"
        assert scripted.life.state == "stopped"
        gate.open.set()
        with pytest.raises(RuntimeError, match="stopped"):
            starting.result(10)
    assert scripted.calls == ["prepare"]


def test_of_two_starts_one_is_done_and_the_other_waits_for_it(scripted: Scripted) -> None:
    """
    Whoever comes second returns when the threads have been started, and learns that he was second.
    """
    gate = scripted.in_prepare = Gate()
    with ThreadPoolExecutor(2) as pool:
        starts = [pool.submit(scripted.life.start) for _ in range(2)]
        assert gate.reached.wait(10)
        assert not any(start.done() for start in starts)
        gate.open.set()
        assert sorted(start.result(10) for start in starts) == [False, True]
    assert scripted.calls == ["prepare", "start"]


def test_a_failed_preparation_may_be_repeated(scripted: Scripted) -> None:
    """
    It is still new; but who has waited for the failed start is not made to wait for another.
    """
    scripted.in_prepare = raising(StoreUnavailable("no server answers"))
    waiting_since_s = time.monotonic()
    with pytest.raises(StoreUnavailable, match="no server answers"):
        scripted.life.start()
    with pytest.raises(StoreUnavailable, match="no server answers"):
        scripted.life._prepare(waiting_since_s)
    assert scripted.calls == ["prepare"]
    assert scripted.life.state == "new"
    scripted.in_prepare = nothing
    assert scripted.life.start()


def test_threads_that_cannot_be_started_are_stopped(scripted: Scripted) -> None:
    """
    Some of them may run already; the error comes out.
    """
    scripted.in_start = raising(RuntimeError("can't start new thread"))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        scripted.life.start()
    assert scripted.calls == ["prepare", "start", "request_stop", "stop"]
    assert scripted.life.state == "stopped"


@pytest.mark.parametrize(("size", "told"), [(None, []), (5, []), (4, ["small_pool"])])
def test_too_few_connections_are_told(
    scripted: Scripted, caplog: pytest.LogCaptureFixture, size: int | None, told: list[str]
) -> None:
    """
    One warning for one too few; without a limit there are always enough.
    """
    scripted.life.warn_of_small_pool(size, 5)
    assert events(caplog) == told


# -- stopping --------------------------------------------------------------------------------------


def test_of_many_stops_one_is_done_and_all_get_its_report(scripted: Scripted) -> None:
    """
    The others wait for it.
    """
    gate = scripted.in_stop = Gate()
    scripted.life.start()
    with ThreadPoolExecutor(4) as pool:
        stops = [pool.submit(scripted.life.stop) for _ in range(4)]
        assert gate.reached.wait(10)
        assert scripted.life.state == "stopping"
        gate.open.set()
        assert [stop.result(10) for stop in stops] == ["done"] * 4
    assert scripted.calls.count("stop") == 1


def test_a_second_stop_keeps_to_its_own_time(scripted: Scripted) -> None:
    """
    It does not wait for ever for the first, and has nothing to report then.
    """
    gate = scripted.in_stop = Gate()
    scripted.life.start()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(scripted.life.stop)
        assert gate.reached.wait(10)
        assert scripted.life.stop(0) == "nothing"
        gate.open.set()
        assert first.result(10) == "done"


def test_an_interrupted_stop_is_gone_on_with(scripted: Scripted) -> None:
    """
    By the next caller; that it stops is told once.
    """
    scripted.life.start()
    scripted.in_stop = raising(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        scripted.life.stop()
    assert scripted.life.state == "stopping"
    scripted.in_stop = nothing
    assert scripted.life.stop() == "done"
    assert scripted.states == ["running", "stopping", "stopped"]


def test_who_waits_for_an_interrupted_stop_goes_on_with_it(scripted: Scripted) -> None:
    """
    Within the time that is left to him.
    """
    gate = Gate()

    def interrupted() -> None:
        scripted.in_stop = nothing
        gate()
        raise KeyboardInterrupt

    scripted.in_stop = interrupted
    scripted.life.start()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(scripted.life.stop)
        assert gate.reached.wait(10)
        second = pool.submit(scripted.life.stop, 5)
        gate.open.set()
        assert second.result(10) == "done"
        assert isinstance(first.exception(10), KeyboardInterrupt)
    assert 0 < scripted.timeouts_s[1] <= 5
    assert scripted.life.state == "stopped"


def test_a_stop_from_inside_is_done_by_a_thread(scripted: Scripted) -> None:
    """
    What is to be stopped cannot wait for its own end; the time that it gives is kept to.
    """
    scripted.life.start()
    scripted.inside = threading.current_thread()
    assert scripted.life.stop(4) == "nothing"
    assert scripted.life.stop_asked.is_set()
    wait_until(lambda: scripted.life.state == "stopped", "it has stopped")
    assert scripted.timeouts_s[0] <= 4
    scripted.inside = None
    assert scripted.life.stop() == "done"


def test_asking_for_the_stop_moves_nothing(scripted: Scripted) -> None:
    """
    It may come at any time, and again; somebody still has to stop.
    """
    scripted.life.start()
    scripted.life.request_stop()
    scripted.life.request_stop()
    assert scripted.life.state == "running"
    assert scripted.life.stop() == "done"
    assert scripted.states == ["running", "stopping", "stopped"]


def test_serving_ends_when_the_stop_is_asked_for(scripted: Scripted) -> None:
    """
    It starts what is new, waits, and returns the report of its stop.
    """
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve, scripted.life)
        wait_until(lambda: scripted.life.state == "running", "it runs")
        scripted.life.request_stop()
        assert serving.result(10) == "done"


def test_what_runs_at_the_exit_of_the_interpreter_is_stopped(scripted: Scripted) -> None:
    """
    What was never started is left alone.
    """
    running = Scripted()
    running.life.start()
    lifecycle._stop_all()
    assert (running.life.state, scripted.life.state) == ("stopped", "new")


# -- crashes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["start", "later"])
def test_a_crash_stops_it(scripted: Scripted, when: str, caplog: pytest.LogCaptureFixture) -> None:
    """
    By a thread, also while it starts; each stop raises the first failure, as does who waits.
    """
    life, bug = scripted.life, TypeError("a bug")

    def crash() -> None:
        life.on_crash("fetch", bug)
        life.on_crash("claim", KeyError("a consequence"))

    if when == "start":
        scripted.in_start = crash
    life.start()
    if when == "later":
        crash()
    wait_until(lambda: life.state == "crashed", "it has stopped")
    for _ in range(2):
        with pytest.raises(ComponentCrashed, match="fetch") as caught:
            life.stop()
        assert caught.value.__cause__ is bug
    with pytest.raises(ComponentCrashed):
        life.raise_crash()
    with pytest.raises(ComponentCrashed):
        life.leave(None)
    assert scripted.calls.count("stop") == 1
    assert sorted(scripted.states) == ["crashed", "running", "stopping"]
    assert events(caplog).count("component_crashed") == 2


def test_an_exception_on_its_way_is_more_important_than_a_crash(scripted: Scripted) -> None:
    """
    At the end of a ``with`` block the crash is told only if nothing else is.
    """
    scripted.life.start()
    scripted.life.on_crash("fetch", TypeError("a bug"))
    scripted.life.leave(KeyError("mine"))
    assert scripted.life.state == "crashed"
    with pytest.raises(ComponentCrashed):
        scripted.life.leave(None)


# -- forks -----------------------------------------------------------------------------------------


def as_in_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)


def hold_locks(life: Lifecycle[str]) -> None:
    """
    Take the locks as threads of the parent may have left them.
    """
    for lock in (life._lock, life._starting, life._stopping):
        assert lock.acquire(timeout=0)


def test_what_ran_before_a_fork_is_foreign_in_the_child(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Whatever lock was held, every call returns, and none touches the threads of the parent.
    """
    life = scripted.life
    life.start()
    with monkeypatch.context() as child:
        hold_locks(life)
        as_in_a_child(child)
        assert life.state == "forked"
        assert life.stop() == "nothing"
        life.request_stop()
        life.leave(None)
        for call in (life.start, life.ensure_started, lambda: serve(life)):
            with pytest.raises(RuntimeError, match="this thing belongs to the parent process"):
                call()
        lifecycle._stop_all()
    assert scripted.renewals == 2
    assert scripted.calls == ["prepare", "start"]
    assert scripted.states == ["running", "forked"]


def test_what_was_new_before_a_fork_may_be_started_in_the_child(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    It lives there as if it had been made there, with everything made anew, once.
    """
    life = scripted.life
    hold_locks(life)
    as_in_a_child(monkeypatch)
    lifecycle._after_fork_in_child()
    assert (life.state, scripted.renewals) == ("new", 2)
    assert life.start()
    assert life.stop() == "done"
    assert scripted.renewals == 2
    assert scripted.states == ["running", "stopping", "stopped"]


def test_a_new_consumer_or_node_gets_an_id_of_its_own_in_a_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """
    Unless it was given one; whoever subscribes in the child before the start misses nothing.
    """
    client: MongoClient[Document]
    with MongoClient(connect=False) as client:
        named = Consumer(client.db.tasks, nothing_of, worker_id="named")
        consumer, node = Consumer(client.db.tasks, nothing_of), Node(client.db, "p")
        before = (consumer.worker_id, node.id)
        as_in_a_child(monkeypatch)
        lifecycle._after_fork_in_child()
        after = (consumer.worker_id, node.id)
        assert all(
            old != new and str(os.getpid()) in new for old, new in zip(before, after, strict=True)
        )
        assert named.worker_id == "named"
        assert (consumer.state, node.state) == ("new", "new")
        subscriptions = [one.subscribe() for one in (consumer, node)]
        consumer.stop()
        node.close()
        assert [len(list(one)) for one in subscriptions] == [1, 1]
        assert (consumer.state, node.state) == ("stopped", "closed")


def nothing_of(_params: object) -> None:
    """
    A task's function.
    """
