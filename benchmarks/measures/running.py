"""
What 100 running tasks cost, and what their heartbeats cost another consumer.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Final

import attrs
from pymongo.collection import Collection

from benchmarks import floor
from benchmarks.children import Child, Children
from benchmarks.counting import without_get_more
from benchmarks.figures import Row, compared
from benchmarks.measures.idle import counted
from benchmarks.setting import Bench, Document, params_of
from benchmarks.standby import serve
from benchmarks.work import Report
from mscheduler_sync import Producer

MEASURE: Final = "running"
_TASKS: Final = 100
#: Ten times as often as by default, so that a short time sees many. The lease is the default: a
#: shorter one would make other consumers query more often.
_HEARTBEAT_S, _DEFAULT_HEARTBEAT_S, _LEASE_S = 2.0, 20.0, 60.0
_LOOK_S: Final = 4.0
_MS: Final = 1000.0


@attrs.define
class _Costs:
    """
    Per heartbeat, one value for each repetition.
    """

    commands: list[float] = attrs.field(factory=list)
    client_ms: list[float] = attrs.field(factory=list)
    server_ms: list[float] = attrs.field(factory=list)
    floor_server_ms: list[float] = attrs.field(factory=list)
    others_events: list[float] = attrs.field(factory=list)
    others_commands: list[float] = attrs.field(factory=list)

    def add(
        self, nothing: _Usage, tasks: _Usage, bare: _Usage, heartbeats: int, updates: int
    ) -> None:
        """
        Add a round: what *tasks* used beyond *nothing*, by heartbeat.
        """
        self.commands.append(_beyond(nothing.owner, tasks.owner) / heartbeats)
        self.client_ms.append((tasks.owner.cpu_s - nothing.owner.cpu_s) / heartbeats * _MS)
        self.server_ms.append((tasks.server_ms - nothing.server_ms) / heartbeats)
        self.floor_server_ms.append((bare.server_ms - nothing.server_ms) / updates)
        self.others_events.append(max(0, tasks.other.events - nothing.other.events) / heartbeats)
        self.others_commands.append(max(0, _beyond(nothing.other, tasks.other)) / heartbeats)


@attrs.frozen
class _Usage:
    """
    What was used while the parent looked on.
    """

    server_ms: float
    owner: Report
    other: Report


def _beyond(nothing: Report, tasks: Report) -> int:
    return without_get_more(tasks.commands) - without_get_more(nothing.commands)


class _Scene:
    """
    A consumer that owns the running tasks, and one that has no room for any.
    """

    def __init__(self, bench: Bench, owner: Child, other: Child, name: str) -> None:
        self._bench = bench
        self._owner = owner
        self._producer = Producer(bench.tasks(name))
        self._children = (owner, other)
        self._numbers = itertools.count(1)
        self._bare: Collection[Document] = floor.prepared(bench.client, name)
        keys = [floor.key_of(number) for number in range(_TASKS)]
        self._bare.insert_many(floor.copies(bench.template(), keys), ordered=False)
        self._producer.send("first", delay=86_400)
        for child, slots, kind in ((owner, _TASKS, "hold"), (other, 0, "tell")):
            child.begin(serve, bench.uri, name, 1, slots, kind)
            child.hear()

    def observe(self, while_passing: Callable[[], object]) -> _Usage:
        """
        Call *while_passing*; return what was used meanwhile.
        """
        counted(self._children)
        before_s = self._bench.server_cpu_s() or 0.0
        while_passing()
        after_s = self._bench.server_cpu_s() or 0.0
        return _Usage((after_s - before_s) * _MS, *counted(self._children))

    def look_at_nothing(self) -> _Usage:
        return self.observe(_pass_time)

    def look_at_tasks(self) -> _Usage:
        self._producer.send_many(
            [(f"held-{n}", params_of(n)) for n in itertools.islice(self._numbers, _TASKS)],
            heartbeat=_HEARTBEAT_S,
            lease=_LEASE_S,
        )
        self._owner.tell(_TASKS)
        self._owner.hear()
        # All have begun to send heartbeats.
        time.sleep(_HEARTBEAT_S + 0.5)
        seen = self.observe(_pass_time)
        self._owner.tell("release")
        self._owner.hear()
        time.sleep(0.5)
        return seen

    def look_at_floor(self) -> tuple[_Usage, int]:
        """
        Look at bare guarded updates of as many documents, as often; return also how many.
        """
        updates = 0

        def update() -> None:
            nonlocal updates
            began_s = time.monotonic()
            for number in itertools.cycle(range(_TASKS)):
                now_s = time.monotonic()
                if now_s > began_s + _LOOK_S:
                    return
                self._bare.update_one(
                    {"key": floor.key_of(number), "state": 0}, {"$set": {"updates": updates}}
                )
                updates += 1
                time.sleep(max(0.0, began_s + updates * _HEARTBEAT_S / _TASKS - time.monotonic()))

        return self.observe(update), updates


def _pass_time() -> None:
    time.sleep(_LOOK_S)


def run(bench: Bench) -> list[Row]:
    costs = _Costs()
    repetitions = 1 if bench.scale.name == "quick" else 3
    with bench.database() as name, Children(2) as children:
        owner, other = children.all
        scene = _Scene(bench, owner, other, name)
        for repetition in range(repetitions):
            bench.say(f"{_TASKS} running tasks, round {repetition + 1}")
            nothing = scene.look_at_nothing()
            tasks = scene.look_at_tasks()
            bare, updates = scene.look_at_floor()
            heartbeats = tasks.owner.commands.get("update", 0)
            if not heartbeats or not updates:
                msg = f"{heartbeats} heartbeats and {updates} bare updates; nothing to compare"
                raise RuntimeError(msg)
            costs.add(nothing, tasks, bare, heartbeats, updates)
        for child in children.all:
            child.tell("stop")
        for child in children.all:
            child.hear()
    return _rows(bench, costs)


def _rows(bench: Bench, costs: _Costs) -> list[Row]:
    def row(
        name: str, unit: str, values: list[float], bare: float | None = None, note: str = ""
    ) -> Row:
        return Row(
            measure=MEASURE,
            name=name,
            unit=unit,
            ours=statistics.median(values),
            floor=bare,
            note=note,
            samples={"ours": values},
        )

    per_second = _TASKS / _DEFAULT_HEARTBEAT_S
    rows = [
        row(
            "commands per heartbeat",
            "",
            costs.commands,
            1.0,
            f"100 tasks with the default of 20 s: {per_second:g} heartbeats per second",
        ),
        row("client CPU per heartbeat", "ms", costs.client_ms),
        row("events at another consumer per heartbeat", "", costs.others_events),
        row("commands of another consumer per heartbeat", "", costs.others_commands),
    ]
    if bench.pid is not None:
        rows.append(
            compared(
                MEASURE,
                "server CPU per heartbeat",
                "ms",
                costs.server_ms,
                costs.floor_server_ms,
                note="floor: a bare guarded update",
            )
        )
    return rows
