"""
A backlog of tasks that do nothing: throughput, commands, lost claims, the client's CPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Final

import attrs

from benchmarks import floor
from benchmarks.children import Children
from benchmarks.counting import without_get_more
from benchmarks.figures import Goal, Row, compared, interleaved, number
from benchmarks.setting import Bench, params_of
from benchmarks.work import Report, drain, drain_floor
from mscheduler_sync import Producer

MEASURE: Final = "backlog"
#: (processes, slots of each)
_SHAPES: Final = ((1, 1), (1, 4), (1, 8), (1, 32), (2, 8), (4, 8))
_CHUNK: Final = 1000
_US: Final = 1e6


@attrs.define
class _Runs:
    """
    The runs of one shape.
    """

    ours: list[float] = attrs.field(factory=list)
    floor: list[float] = attrs.field(factory=list)
    commands: list[float] = attrs.field(factory=list)
    lost: list[float] = attrs.field(factory=list)
    floor_lost: list[float] = attrs.field(factory=list)
    cpu_us: list[float] = attrs.field(factory=list)
    floor_cpu_us: list[float] = attrs.field(factory=list)
    roles_us: list[dict[str, float]] = attrs.field(factory=list)


@attrs.frozen
class _Costs:
    """
    What all processes of one run have used together.
    """

    commands: int
    cpu_s: float
    roles_s: dict[str, float]

    @classmethod
    def of(cls, reports: Sequence[Report]) -> _Costs:
        return cls(
            commands=sum(without_get_more(r.commands) for r in reports),
            cpu_s=sum(r.cpu_s for r in reports),
            roles_s={
                role: sum(r.cpu_by_role.get(role, 0.0) for r in reports)
                for role in {role for r in reports for role in r.cpu_by_role}
            },
        )


def run(bench: Bench) -> list[Row]:
    runs: dict[tuple[int, int], _Runs] = {}
    with Children(max(processes for processes, _ in _SHAPES)) as children:
        for shape in _SHAPES:
            runs[shape] = _measured(bench, children, *shape)
    return [
        *(_throughput(shape, runs[shape]) for shape in _SHAPES),
        *_commands(runs),
        *_losses(runs),
        *_cpu(runs),
    ]


def _measured(bench: Bench, children: Children, processes: int, slots: int) -> _Runs:
    count = bench.backlog()
    if slots == 1:
        # A single thread is slower: half as many tasks take long enough.
        count //= 2
    elif processes > 1:
        # The last ones, over which all processes compete, are not to count for much.
        count *= 2
    bench.say(f"backlog of {count:,}: {_shape_name(processes, slots)}")
    runs = _Runs()
    start, floor_start = _start_ups(bench, children, processes, slots)

    def ours() -> float:
        with bench.database() as name:
            fill(bench, name, range(count))
            reports: list[Report] = children.race(
                processes, drain, bench.uri, name, slots, processes > 1
            )
            producer = Producer(bench.tasks(name))
            _check(producer.count(status="succeeded"), count)
        costs = _Costs.of(reports)
        runs.commands.append((costs.commands - start.commands) / count)
        runs.lost.append(sum(r.claims_lost for r in reports) / count)
        runs.cpu_us.append((costs.cpu_s - start.cpu_s) / count * _US)
        runs.roles_us.append(
            {
                role: (used_s - start.roles_s.get(role, 0.0)) / count * _US
                for role, used_s in costs.roles_s.items()
            }
        )
        return count / duration_s(reports)

    def theirs() -> float:
        with bench.database() as name:
            collection = floor.prepared(bench.client, name)
            template = bench.template()
            keys = [floor.key_of(number) for number in range(count)]
            collection.insert_many(floor.copies(template, keys), ordered=False)
            reports: list[Report] = children.race(
                processes, drain_floor, bench.uri, name, slots, processes > 1
            )
            _check(collection.count_documents({"state": 2}), count)
        runs.floor_lost.append(sum(r.claims_lost for r in reports) / count)
        cpu_s = _Costs.of(reports).cpu_s - floor_start.cpu_s
        runs.floor_cpu_us.append(cpu_s / count * _US)
        return count / duration_s(reports)

    runs.ours, runs.floor = interleaved(bench.scale.repetitions, ours, theirs)
    return runs


def _start_ups(
    bench: Bench, children: Children, processes: int, slots: int
) -> tuple[_Costs, _Costs]:
    """
    Return what starting and finding nothing costs: ours and the floor's; no part of a task.
    """
    with bench.database() as name:
        Producer(bench.tasks(name)).send("later", delay=86_400)
        ours = children.race(processes, drain, bench.uri, name, slots, processes > 1)
        floor.prepared(bench.client, name)
        theirs = children.race(processes, drain_floor, bench.uri, name, slots, processes > 1)
    return _Costs.of(ours), _Costs.of(theirs)


def fill(bench: Bench, name: str, numbers: Iterable[int]) -> None:
    """
    Send a task for each number.
    """
    producer = Producer(bench.tasks(name))
    items = [(floor.key_of(number), params_of(number)) for number in numbers]
    for start in range(0, len(items), _CHUNK):
        producer.send_many(items[start : start + _CHUNK])


def duration_s(reports: Sequence[Report]) -> float:
    """
    Return the time from the first start to the last end.
    """
    return max(r.ended_s for r in reports) - min(r.began_s for r in reports)


def _check(done: int, wanted: int) -> None:
    if done != wanted:
        msg = f"{done} of {wanted} tasks are done; the figures would mean nothing"
        raise RuntimeError(msg)


def _shape_name(processes: int, slots: int) -> str:
    name = f"{slots} slot{'s' if slots > 1 else ''}"
    return f"{processes} processes, {name} each" if processes > 1 else f"1 process, {name}"


def _throughput(shape: tuple[int, int], runs: _Runs) -> Row:
    goal = Goal(">=", 0.5, 2.0) if shape == (1, 8) else None
    return compared(MEASURE, _shape_name(*shape), "/s", runs.ours, runs.floor, goal=goal)


def _commands(runs: dict[tuple[int, int], _Runs]) -> list[Row]:
    goals = {8: Goal("<=", 0.5, 0.5), 32: Goal("<=", 0.2, 0.2)}
    return [
        Row(
            measure=MEASURE,
            name=f"commands per task, {slots} slot{'s' if slots > 1 else ''}",
            unit="",
            ours=statistics.median(runs[1, slots].commands),
            floor=2.0,
            goal=goals.get(slots),
            samples={"ours": runs[1, slots].commands},
        )
        for slots in (1, 4, 8, 32)
    ]


def _losses(runs: dict[tuple[int, int], _Runs]) -> list[Row]:
    return [
        Row(
            measure=MEASURE,
            name=f"failed claims per task, {processes} processes",
            unit="",
            ours=statistics.median(runs[processes, 8].lost),
            floor=statistics.median(runs[processes, 8].floor_lost),
            goal=Goal("<=", 0.3, 0.3) if processes == 4 else None,
            samples={"ours": runs[processes, 8].lost, "floor": runs[processes, 8].floor_lost},
        )
        for processes in (2, 4)
    ]


def _cpu(runs: dict[tuple[int, int], _Runs]) -> list[Row]:
    rows = []
    for slots in (8, 32):
        mine = runs[1, slots]
        roles: dict[str, float] = {
            role: statistics.median(one.get(role, 0.0) for one in mine.roles_us)
            for role in {role for one in mine.roles_us for role in one}
        }
        parts = sorted(roles.items(), key=lambda item: -item[1])[:5]
        rows.append(
            Row(
                measure=MEASURE,
                name=f"client CPU per task, {slots} slots",
                unit="us",
                ours=statistics.median(mine.cpu_us),
                floor=statistics.median(mine.floor_cpu_us),
                goal=Goal("<=", 250.0, 250.0),
                note=", ".join(f"{role.removeprefix('ms-')} {number(us)}" for role, us in parts),
                samples={"ours": mine.cpu_us, "floor": mine.floor_cpu_us, **_as_samples(roles)},
            )
        )
    return rows


def _as_samples(roles: dict[str, float]) -> dict[str, list[float]]:
    return {f"thread {role}": [us] for role, us in sorted(roles.items())}
