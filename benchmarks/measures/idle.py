"""
What consumers without work cost.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

import attrs

from benchmarks import floor
from benchmarks.children import Child, Children
from benchmarks.counting import without_get_more
from benchmarks.figures import Row
from benchmarks.setting import Bench
from benchmarks.standby import echo, serve
from benchmarks.work import Report
from mscheduler_sync import Producer

MEASURE: Final = "idle"
_PROCESSES, _CONSUMERS_EACH = 4, 4
#: The first passes after the start are over.
_SETTLE_S: Final = 2.0
_MS: Final = 1000.0


@attrs.define
class _Rates:
    """
    What one variant costs per second: one value for each repetition.
    """

    commands: list[float] = attrs.field(factory=list)
    get_mores: list[float] = attrs.field(factory=list)
    server_ms: list[float] = attrs.field(factory=list)
    client_ms: list[float] = attrs.field(factory=list)


def run(bench: Bench) -> list[Row]:
    nothing, stream, single, many = _Rates(), _Rates(), _Rates(), _Rates()
    with Children(_PROCESSES) as children:
        for repetition in range(1 if bench.scale.name == "quick" else 2):
            bench.say(f"idle, round {repetition + 1}: four times {bench.scale.idle_s:g} s")
            _watch(bench, [], nothing)
            _bare_stream(bench, children.all[0], stream)
            _consumers(bench, children.all[:1], 1, single)
            _consumers(bench, children.all, _CONSUMERS_EACH, many)
    return _rows(bench, nothing, stream, single, many)


def _bare_stream(bench: Bench, child: Child, rates: _Rates) -> None:
    with bench.database() as name:
        floor.prepared(bench.client, name)
        child.begin(echo, bench.uri, name)
        _observe(bench, [child], rates)


def _consumers(bench: Bench, children: Sequence[Child], consumers: int, rates: _Rates) -> None:
    with bench.database() as name:
        Producer(bench.tasks(name)).send("first", delay=86_400)
        for child in children:
            child.begin(serve, bench.uri, name, consumers, 8, "tell")
        _observe(bench, children, rates)


def _observe(bench: Bench, children: Sequence[Child], rates: _Rates) -> None:
    for child in children:
        child.hear()
    time.sleep(_SETTLE_S)
    _watch(bench, children, rates)
    for child in children:
        child.tell("stop")
    for child in children:
        child.hear()


def _watch(bench: Bench, children: Sequence[Child], rates: _Rates) -> None:
    """
    Let the idle time pass; note what each second of it has cost.
    """
    counted(children)
    server_s = bench.server_cpu_s()
    time.sleep(bench.scale.idle_s)
    after_s = bench.server_cpu_s()
    reports = counted(children)
    seconds = bench.scale.idle_s
    rates.commands.append(sum(without_get_more(r.commands) for r in reports) / seconds)
    rates.get_mores.append(sum(r.commands.get("getMore", 0) for r in reports) / seconds)
    rates.client_ms.append(sum(r.cpu_s for r in reports) / seconds * _MS)
    if server_s is not None and after_s is not None:
        rates.server_ms.append((after_s - server_s) / seconds * _MS)


def counted(children: Sequence[Child]) -> list[Report]:
    """
    Return what the children have counted since the last call.
    """
    for child in children:
        child.tell("count")
    return [child.hear() for child in children]


def _rows(bench: Bench, nothing: _Rates, stream: _Rates, single: _Rates, many: _Rates) -> list[Row]:
    def row(
        name: str,
        unit: str,
        ours: _Rates,
        of: Callable[[_Rates], list[float]],
        floor_value: float | None = None,
        note: str = "",
    ) -> Row:
        samples = of(ours)
        return Row(
            measure=MEASURE,
            name=name,
            unit=unit,
            ours=statistics.mean(samples),
            floor=floor_value,
            note=note,
            samples={"ours": samples},
        )

    def mean(values: list[float]) -> float:
        return statistics.mean(values)

    short = ""
    if bench.scale.idle_s < 33.0:
        short = "too short to see a pass, which comes every 30 s"
    rows = [
        row("commands per second, 1 consumer", "", single, lambda r: r.commands, 0.0, short),
        row("commands per second, 16 consumers", "", many, lambda r: r.commands, 0.0, short),
        row(
            "getMore per second, 1 consumer",
            "",
            single,
            lambda r: r.get_mores,
            mean(stream.get_mores),
            "floor: a bare change stream",
        ),
        row(
            "client CPU per second, 1 consumer",
            "ms",
            single,
            lambda r: r.client_ms,
            mean(stream.client_ms),
            "floor: a bare change stream",
        ),
    ]
    if nothing.server_ms:
        rest = f"floor: a bare change stream; the server alone {mean(nothing.server_ms):.1f}"
        rows += [
            row(
                f"server CPU per second, {name}",
                "ms",
                rates,
                lambda r: r.server_ms,
                mean(stream.server_ms),
                rest,
            )
            for name, rates in (("1 consumer", single), ("16 consumers", many))
        ]
    return rows
