"""
What child processes do with a backlog, ours or the floor's; what they report.

Each function is called with the line to the parent. Imports, the client and its first
contact come before the start; everything else is measured.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import attrs
from pymongo import MongoClient

from benchmarks import floor
from benchmarks.children import Line
from benchmarks.counting import CommandCounter, LostClaims
from mscheduler_sync import Consumer

#: The collection of tasks in a measure's database.
TASKS: Final = "tasks"
_PATIENCE_S: Final = 300.0


@attrs.frozen(kw_only=True)
class Report:
    """
    What one child has seen. Times are monotonic, which processes of one machine share.
    """

    began_s: float
    ended_s: float
    #: CPU time of the process.
    cpu_s: float
    #: CPU time by the role of the thread.
    cpu_by_role: dict[str, float] = attrs.field(factory=dict)
    tasks: int = 0
    commands: dict[str, int] = attrs.field(factory=dict)
    #: Change events handed out to the client.
    events: int = 0
    claims_lost: int = 0


@contextlib.contextmanager
def contact(uri: str, counter: CommandCounter | None = None) -> Iterator[MongoClient[Any]]:
    """
    A client that has spoken with the server.
    """
    listeners = [] if counter is None else [counter]
    client: MongoClient[Any]
    with MongoClient(uri, tz_aware=True, event_listeners=listeners) as client:
        client.admin.command("ping")
        if counter is not None:
            counter.take()
        yield client


class Stopwatch:
    """
    Wall time, CPU time, commands and lost claims from its making to `report`.
    """

    def __init__(self, counter: CommandCounter | None, lost: LostClaims | None) -> None:
        self._counter = counter
        self._lost = lost
        if counter is not None:
            counter.take()
        self._lost_before = 0 if lost is None else lost.count
        self._roles_before = cpu_by_role()
        self._cpu_s = time.process_time()
        self._began_s = time.monotonic()

    def report(self, tasks: int = 0) -> Report:
        ended_s = time.monotonic()
        cpu_s = time.process_time() - self._cpu_s
        commands, events = ({}, 0) if self._counter is None else self._counter.take()
        roles = {
            role: used_s - self._roles_before.get(role, 0.0)
            for role, used_s in cpu_by_role().items()
        }
        return Report(
            began_s=self._began_s,
            ended_s=ended_s,
            cpu_s=cpu_s,
            cpu_by_role=roles,
            tasks=tasks,
            commands=commands,
            events=events,
            claims_lost=0 if self._lost is None else self._lost.count - self._lost_before,
        )


def cpu_by_role() -> dict[str, float]:
    """
    Return the CPU seconds of the living threads by role (``ms-claim``), where the system tells.
    """
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    if clock_of is None:
        return {}
    used_s: dict[str, float] = {}
    for thread in threading.enumerate():
        role = thread.name.partition(":")[0].partition("_")[0]
        with contextlib.suppress(OSError):
            if thread.ident is not None:
                seconds = time.clock_gettime(clock_of(thread.ident))
                used_s[role] = used_s.get(role, 0.0) + seconds
    return used_s


def drain(line: Line, uri: str, database: str, slots: int, counts_losses: bool) -> Report:
    """
    Work off everything that is due with a consumer of *slots* slots.
    """
    counter, lost = CommandCounter(), LostClaims()
    tasks = 0

    def work(_params: Any) -> None:
        nonlocal tasks
        # Not exact among threads, and only told: the parent counts in the database.
        tasks += 1

    with contact(uri, counter) as client, attached(lost, counts_losses):
        consumer = Consumer(client[database][TASKS], work, max_workers=slots)
        _ready(line)
        watch = Stopwatch(counter, lost)
        consumer.start()
        done = consumer.run_until_idle(_PATIENCE_S)
        report = watch.report(tasks)
        consumer.stop()
    if not done:
        msg = f"the backlog was not worked off within {_PATIENCE_S:g} s"
        raise TimeoutError(msg)
    return report


def drain_some(line: Line, uri: str, database: str, slots: int, wanted: int) -> Report:
    """
    Run the first *wanted* tasks of a longer backlog; the rest stays.
    """
    counter = CommandCounter()
    lock = threading.Lock()
    enough = threading.Event()
    tasks = 0

    def work(_params: Any) -> None:
        nonlocal tasks
        with lock:
            tasks += 1
            if tasks >= wanted:
                enough.set()

    with contact(uri, counter) as client:
        consumer = Consumer(client[database][TASKS], work, max_workers=slots)
        _ready(line)
        watch = Stopwatch(counter, None)
        consumer.start()
        done = enough.wait(_PATIENCE_S)
        report = watch.report(tasks)
        consumer.stop()
    if not done:
        msg = f"{wanted} tasks were not run within {_PATIENCE_S:g} s"
        raise TimeoutError(msg)
    return report


def drain_floor(line: Line, uri: str, database: str, threads: int, shared: bool) -> Report:
    """
    Work off everything with the hand-written loop.
    """
    counter = CommandCounter()
    with contact(uri, counter) as client:
        collection = client[database]["floor"]
        _ready(line)
        watch = Stopwatch(counter, None)
        done, lost = floor.drain(collection, threads, shared=shared)
        return attrs.evolve(watch.report(done), claims_lost=lost)


def _ready(line: Line) -> None:
    gc.collect()
    line.say("ready")
    line.hear()


@contextlib.contextmanager
def attached(lost: LostClaims, wanted: bool) -> Iterator[None]:
    if wanted:
        lost.attach()
    try:
        yield
    finally:
        if wanted:
            lost.detach()
