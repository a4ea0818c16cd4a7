"""
The steps of the pool by hand, with one fault at each of their statements.

Nodes without threads on a real server: a step of the control thread, then the steps of the jobs
that it has begun. Each scene is played once for every statement that it sends and every fault.
"""

from __future__ import annotations

import collections
import datetime as dt
import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import pytest
from bson.raw_bson import RawBSONDocument
from pymongo.database import Database

from mscheduler_sync import RetryLater, StoreUnavailable
from mscheduler_sync._storage.statement import Delete, Find, Update
from mscheduler_sync.pool import Job, JobStarted, Node, statements
from mscheduler_sync.pool.ring import hash_of, jump_hash
from mscheduler_sync.pool.store import PoolStore
from tests.support import Document, wait_until
from tests.support.pool_invariants import broken

_T = TypeVar("_T")
LONG_AGO: Final = dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc)


class Crash(BaseException):
    """
    The process ends here.
    """


class StepStore(PoolStore):
    """
    Numbers the statements of a node; the one numbered *at* meets *fault*.
    """

    fault: Callable[[Callable[[], Any]], Any] | None = None
    at: int = -1
    #: What was sent since `arm`: kind and collection.
    sent: list[str]
    #: The statement *at*, to be sent again later.
    again: Callable[[], object] | None = None

    def arm(self, at: int, fault: Callable[[Callable[[], Any]], Any] | None) -> None:
        self.sent, self.at, self.fault = [], at, fault

    def _meet(self, kind: str, where: str, send: Callable[[], _T]) -> _T:
        sent = self.__dict__.setdefault("sent", [])
        sent.append(f"{kind} {where}")
        if len(sent) - 1 != self.at or self.fault is None:
            return send()
        if kind != "find":
            self.again = send
        return cast("_T", self.fault(send))

    def ensure_indexes(self, *, max_age_s: float = 0.0) -> None:
        """
        None: a scene has a handful of documents.
        """

    def find(self, query: Find, **options: Any) -> list[RawBSONDocument]:
        send = functools.partial(super().find, query, **options)
        return self._meet("find", query.collection, send)

    def update(self, statement: Update, **options: Any) -> tuple[int, int]:
        send = functools.partial(super().update, statement, **options)
        return self._meet("update", statement.collection, send)

    def delete(self, statement: Delete, **options: Any) -> int:
        send = functools.partial(super().delete, statement, **options)
        return self._meet("delete", statement.collection, send)


class ByHand:
    """
    In the place of the executor: `run` takes the steps, one after another.
    """

    def __init__(self, *_: object) -> None:
        self._steps: collections.deque[Callable[[], None]] = collections.deque()

    def submit(self, key: str, step: Callable[[], None]) -> None:
        self._steps.append(step)

    def make_missing_thread(self) -> None: ...

    def run(self) -> None:
        while self._steps:
            self._steps.popleft()()


class Member:
    """
    A node of the pool without threads, and the handler of its only worker.
    """

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.node = Node(
            scene.database, "p", watch=False, worker_ttl=300, claim_grace=600, poll_interval=0.01
        )
        self.engine = self.node._engine
        self.store = cast("StepStore", self.engine.store)
        self.executor = cast("ByHand", self.engine.executor)
        self.running: dict[str, int] = {}
        self.engine.enter()
        self.engine.add_worker(self)
        # Only when a scene says so.
        self.engine.control._next_reap_s = float("inf")

    # -- the handler -------------------------------------------------------------------------

    def start(self, job: Job) -> None:
        self._scene.starts.append(job.fence)
        for error in self._scene.errors[:1]:
            self._scene.errors.pop()
            raise error
        assert job.key not in self.running
        self.running[job.key] = job.fence

    def stop(self, key: str) -> None:
        self.running.pop(key, None)

    def notify(self, key: str, payload: int) -> None:
        assert key in self.running
        self._scene.notified.append(payload)

    # -- what its threads would do -----------------------------------------------------------

    def step(self, *, sweep: bool = False) -> None:
        control = self.engine.control
        control.rescan()
        if sweep:
            control._next_reap_s = 0.0
        try:
            control.step()
            self.executor.run()
        except StoreUnavailable as error:
            control.on_store_error(error)

    def lose_lease(self) -> None:
        """
        Find out that the lease is over, stop everything, and come back under another id.
        """
        lease = self.engine.lease
        while not lease.holds(lease.life):
            lease.step()
            self.executor.run()

    def freeze(self) -> None:
        """
        From now on its lease is over by all clocks.
        """
        self.engine.lease._until_s = 0.0
        self._scene.age_lease(self)


class Scene:
    """
    A pool of two or three nodes and one job, that belongs to the first of them.
    """

    def __init__(self, database: Database[Document]) -> None:
        self.database = database
        #: What the next starts raise.
        self.errors: list[BaseException] = []
        #: The fences of all starts, and all notifications that were delivered.
        self.starts: list[int] = []
        self.notified: list[int] = []
        self.members: list[Member] = []
        # The slot of this key is the first one of up to three.
        self.key = next(key for key in map(str, range(100)) if jump_hash(hash_of(key), 3) == 0)

    def join(self, count: int) -> None:
        self.members = [Member(self) for _ in range(count)]
        for member in self.members:
            member.engine.view.refresh()

    def dispatch(self) -> None:
        store = self.members[0].store
        job = statements.jobs.new_job(
            "p", self.key, 1, now=store.clock.now(), dispatch_id="d", node="x", epoch=0
        )
        store.insert(
            statements.jobs.insert({**job, "created_at": LONG_AGO, "not_before": LONG_AGO})
        )

    def running(self, member: Member) -> None:
        """
        Dispatch the job and have it started by *member*.
        """
        self.dispatch()
        member.step()
        assert list(member.running) == [self.key]

    def job(self) -> Document | None:
        return self.database.pool_jobs.find_one({"key": self.key})

    def age_lease(self, member: Member) -> None:
        self.database.pool_nodes.update_one(
            {"_id": member.engine.node}, {"$set": {"lease_until": LONG_AGO}}
        )

    def leave_dead(self, member: Member) -> None:
        """
        The process of *member* is no more.
        """
        if member in self.members:
            self.members.remove(member)
        self.age_lease(member)

    def take_over(self, member: Member) -> None:
        """
        All others find *member* dead, and take its job, while it hangs.
        """
        member.freeze()
        others = [one for one in self.members if one is not member]

        def is_done() -> bool:
            for other in others:
                other.step(sweep=True)
            job = self.job()
            is_settled = job is None or job["state"] == "running"
            return is_settled and (job is None or job["node"] != member.engine.node)

        wait_until(is_done, "the others have taken over")

    def settle(self, is_done: Callable[[], bool]) -> None:
        """
        Let all live members go on until *is_done*.
        """

        def round_() -> bool:
            for member in self.members:
                member.lose_lease()
                member.step(sweep=True)
            return is_done()

        wait_until(round_, "the pool comes to rest")
        assert broken(self.database, "p") == []
        # A start again has a fence of its own, larger than any before: the older one is stale.
        assert self.starts == sorted(set(self.starts))

    def runs_once(self) -> bool:
        """
        Whether the job runs where the database says, and nowhere else.
        """
        job = self.job()
        if job is None or job["state"] != "running":
            return False
        there = [(one.engine.node, one.running.get(job["key"])) for one in self.members]
        return [one for one in there if one[1] is not None] == [(job["node"], job["fence"])]

    def is_gone(self) -> bool:
        return self.job() is None and not any(member.running for member in self.members)


@pytest.fixture
def scene(database: Database[Document], monkeypatch: pytest.MonkeyPatch) -> Scene:
    """
    A scene whose nodes have no threads.
    """
    monkeypatch.setattr("mscheduler_sync.pool.engine.PoolStore", StepStore)
    monkeypatch.setattr("mscheduler_sync.pool.runner.KeyedExecutor", ByHand)
    return Scene(database)


#: The node is taken for dead before a statement or after it; or its lease's thread has found out.
PAUSES: Final = ("pause before", "pause after", "lease lost after")
#: A read changes nothing: whether its answer is lost, or it is sent twice, is all one.
FAULTS_OF_READS: Final = ("crash before", "not sent", *PAUSES)
CRASHES: Final = ("crash before", "crash after")
FAULTS: Final = (*FAULTS_OF_READS, "crash after", "no answer", "sent twice", "sent again later")


def play(scene: Scene, member: Member, fault: str, at: int, act: Callable[[], None]) -> None:
    """
    Do *act*, whose statement number *at* meets *fault*; then what follows from the fault.
    """

    def meet(send: Callable[[], Any]) -> Any:
        if fault == "crash before":
            raise Crash
        if fault == "not sent":
            raise StoreUnavailable(fault)
        if fault == "pause before":
            scene.take_over(member)
        reply = send()
        if fault in {"pause after", "lease lost after"}:
            scene.take_over(member)
        if fault == "lease lost after":
            member.engine.lease.step()
        if fault == "crash after":
            raise Crash
        if fault == "no answer":
            raise StoreUnavailable(fault)
        return send() if fault == "sent twice" else reply

    member.store.arm(at, meet)
    try:
        act()
    except Crash:
        scene.leave_dead(member)
    assert len(member.store.sent) > at, f"only {member.store.sent} was sent"
    if fault == "sent again later" and member.store.again is not None:
        member.store.again()
    member.store.arm(-1, None)


#: What a step of the control thread reads before anything else.
POLL: Final = ("read pool", "read pending", "read unread")


def faults_at(*names: str, first: int = 0) -> Callable[[Any], Any]:
    """
    Parametrize a test by the statement, of *names* in their order from *first* on, and the fault.
    """
    cases = [
        pytest.param(at, fault, id=f"{fault}: {name} {at}")
        for at, name in enumerate(names, first)
        for fault in (FAULTS_OF_READS if name.startswith("read") else FAULTS)
    ]
    return pytest.mark.parametrize(("at", "fault"), cases)


@faults_at(*POLL, "claim", "read claimed", "started")
def test_a_job_is_claimed_and_started(scene: Scene, at: int, fault: str) -> None:
    """
    Whatever happens in between, it runs in one place in the end, and each start has its own fence.
    """
    scene.join(2)
    scene.dispatch()
    first = scene.members[0]
    with first.node.subscribe(JobStarted) as told:
        play(scene, first, fault, at, first.step)
        scene.settle(scene.runs_once)
        is_recorded = at == len(POLL) + 2 and fault in {"pause after", "lease lost after"}
        is_over = fault in {*CRASHES, *PAUSES} and not is_recorded
        assert (told.get(0) is None) == is_over
    job = scene.job()
    assert job is not None
    assert job["answered"] == "d"
    if fault in {"not sent", "no answer"}:
        # Found out, without another start.
        assert (len(scene.starts), job["requeued"]) == (1, False)


@faults_at("read inbox", "remove", first=len(POLL))
def test_a_job_is_stopped_by_request(scene: Scene, at: int, fault: str) -> None:
    """
    In the end it is gone, runs nowhere, and never starts again once its stop was asked for.
    """
    scene.join(2)
    first = scene.members[0]
    scene.running(first)
    store = first.store
    store.update(statements.jobs.ask_stop(f"p\x1f{scene.key}", "d", "s", "x"))
    play(scene, first, fault, at, first.step)
    scene.settle(scene.is_gone)
    assert len(scene.starts) == 1


@faults_at("read inbox", "took", first=len(POLL))
def test_notifications_are_delivered(scene: Scene, at: int, fault: str) -> None:
    """
    All, in order, at least once; those that were taken are not delivered to a next owner.
    """
    scene.join(2)
    first = scene.members[0]
    scene.running(first)
    for number in (1, 2):
        push = statements.jobs.push(f"p\x1f{scene.key}", f"t{number}", number, 1)
        first.store.update(push)
    play(scene, first, fault, at, first.step)

    def is_done() -> bool:
        job = scene.job()
        assert job is not None
        return scene.runs_once() and not job["inbox"] and not job["unread"]

    scene.settle(is_done)
    assert scene.notified[:2] == [1, 2]
    assert scene.notified in ([1, 2], [1, 2, 1, 2])


@faults_at("release")
def test_a_job_is_released(scene: Scene, at: int, fault: str) -> None:
    """
    It is stopped before, and starts again, under another fence.
    """
    scene.join(2)
    first = scene.members[0]
    scene.running(first)
    held = first.engine.held.all()

    def release() -> None:
        first.engine.runner.release(held[0])
        first.executor.run()

    play(scene, first, fault, at, release)
    scene.settle(scene.runs_once)
    assert len(scene.starts) == 2


@faults_at("fail", "result", "remove", first=len(POLL) + 2)
def test_a_first_start_fails(scene: Scene, at: int, fault: str) -> None:
    """
    Its dispatcher finds the verdict, or else the job runs: never both, never neither.
    """
    scene.join(2)
    scene.errors.append(OSError("no"))
    scene.dispatch()
    first = scene.members[0]
    play(scene, first, fault, at, first.step)
    scene.settle(lambda: scene.is_gone() or scene.runs_once())
    result = scene.database.pool_results.find_one({"_id": "d"})
    assert (result is None) == scene.runs_once()
    assert result is None or result["error"]["type"] == "OSError"


@faults_at("postpone", first=len(POLL) + 2)
def test_a_start_asks_for_another_try(scene: Scene, at: int, fault: str) -> None:
    """
    It gets it, under another fence.
    """
    scene.join(2)
    scene.errors.append(RetryLater(0))
    scene.dispatch()
    first = scene.members[0]
    play(scene, first, fault, at, first.step)
    scene.settle(scene.runs_once)
    assert len(scene.starts) in {2, 3}


@faults_at(
    *("read pool", "read workers", "read starting", "read alive", "declare dead", "read dead"),
    *("read its workers", "leave", "read pool", "release", "forget worker", "read failed"),
    first=len(POLL),
)
def test_a_dead_node_is_removed(scene: Scene, at: int, fault: str) -> None:
    """
    Its job runs elsewhere, once, whoever of the others finds it dead, and wherever that one stops.
    """
    scene.join(3)
    dead, reaper, _ = scene.members
    scene.running(dead)
    scene.leave_dead(dead)
    play(scene, reaper, fault, at, lambda: reaper.step(sweep=True))
    scene.settle(scene.runs_once)
    assert len(scene.starts) in {2, 3}
    ring = scene.database.pool_pools.find_one({"_id": "p"})
    assert ring is not None
    assert dead.engine.node not in {slot["node"] for slot in ring["ring"]}


def test_the_statements_of_each_step(scene: Scene) -> None:
    """
    The scenes above name the statements that are really sent.
    """
    scene.join(2)
    first, other = scene.members
    scene.dispatch()
    first.store.arm(-1, None)
    first.step()
    poll = ["find pools", "find jobs", "find jobs"]
    assert first.store.sent == [*poll, "update jobs", "find jobs", "update jobs"]
    scene.leave_dead(first)
    other.store.arm(-1, None)
    other.step(sweep=True)
    assert other.store.sent == [
        *poll,
        *("find pools", "find workers", "find jobs", "find nodes", "update nodes", "find nodes"),
        *("find workers", "update pools", "find pools", "update jobs", "delete workers"),
        "find jobs",
    ]
