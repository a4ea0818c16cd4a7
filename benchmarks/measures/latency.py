"""
From a send on an idle system to the start of the function, and the claims lost on the way.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

import attrs

from benchmarks import floor
from benchmarks.children import Child, Children, first_said
from benchmarks.figures import Goal, Row, percentile
from benchmarks.setting import Bench, params_of
from benchmarks.standby import echo, serve
from benchmarks.work import Report
from mscheduler_sync import Producer

MEASURE: Final = "start latency"
_PROCESSES, _CONSUMERS_EACH = 4, 4
_SLOTS: Final = 8
#: Between two sends; each finds the system idle.
_PAUSE_S: Final = (0.06, 0.14)
_SETTLE_S: Final = 0.5
_PATIENCE_S: Final = 30.0
_MS: Final = 1000.0
_VARIANTS: Final = ("floor", "1 consumer", "16 consumers")


def run(bench: Bench) -> list[Row]:
    blocks: dict[str, list[list[float]]] = {variant: [] for variant in _VARIANTS}
    lost: list[float] = []
    count = bench.scale.latency_per_block
    with Children(_PROCESSES) as children:
        for block in range(bench.scale.latency_blocks):
            bench.say(f"start latency, block {block + 1}: {count} sends each")
            blocks["floor"].append(_floor(bench, children.all[0], count))
            latencies, _ = _ours(bench, children.all[:1], 1, count)
            blocks["1 consumer"].append(latencies)
            latencies, losses = _ours(bench, children.all, _CONSUMERS_EACH, count)
            blocks["16 consumers"].append(latencies)
            lost.append(losses / count)
    return _rows(blocks, lost)


def _ours(
    bench: Bench, children: Sequence[Child], consumers: int, count: int
) -> tuple[list[float], int]:
    """
    Return the latencies of *count* sends, and how many claims were lost.
    """
    with bench.database() as name:
        producer = Producer(bench.tasks(name))
        # Makes the indexes.
        producer.send("first", params_of(0), delay=86_400)
        for child in children:
            child.begin(serve, bench.uri, name, consumers, _SLOTS, "tell")
        for child in children:
            child.hear()

        def send(number: int) -> None:
            producer.send(floor.key_of(number), params_of(number))

        latencies = _latencies(count, send, lambda: first_said(children, _PATIENCE_S))
        for child in children:
            child.tell("count")
        reports: list[Report] = [child.hear() for child in children]
        for child in children:
            child.tell("stop")
        for child in children:
            child.hear()
    return latencies, sum(report.claims_lost for report in reports)


def _floor(bench: Bench, child: Child, count: int) -> list[float]:
    with bench.database() as name:
        collection = floor.prepared(bench.client, name)
        documents = floor.copies(
            bench.template(), [floor.key_of(number) for number in range(count)]
        )
        numbers = {document["key"]: number for number, document in enumerate(documents)}
        child.begin(echo, bench.uri, name)
        child.hear()

        def started() -> tuple[int, float]:
            key, at_s = child.hear(_PATIENCE_S)
            return numbers[key], at_s

        latencies = _latencies(
            count, lambda number: collection.insert_one(documents[number]), started
        )
        child.tell("stop")
        child.hear()
    return latencies


def _latencies(
    count: int, send: Callable[[int], object], started: Callable[[], tuple[int, float]]
) -> list[float]:
    """
    Send one after another, and wait for each to start; return the milliseconds between.
    """
    time.sleep(_SETTLE_S)
    latencies = []
    for wanted in range(count):
        time.sleep(random.uniform(*_PAUSE_S))
        sent_at_s = time.monotonic()
        send(wanted)
        number, at_s = started()
        if number != wanted:
            msg = f"task {number} has started, {wanted} was sent"
            raise RuntimeError(msg)
        latencies.append((at_s - sent_at_s) * _MS)
    return latencies


def _rows(blocks: dict[str, list[list[float]]], lost: list[float]) -> list[Row]:
    bare, single, many = (
        [value for block in blocks[variant] for value in block] for variant in _VARIANTS
    )
    rows = [
        _row(f"p{percent}, {variant}", percent, latencies, bare)
        for variant, latencies in (("1 consumer", single), ("16 consumers", many))
        for percent in (50, 95, 99)
    ]
    rows[0] = attrs.evolve(rows[0], goal=Goal("<=", 2.2, 2.0))
    against = _row("p50, 16 consumers against 1", 50, many, single)
    return [
        *rows,
        attrs.evolve(against, goal=Goal("<=", 2.0, 2.0)),
        Row(
            measure=MEASURE,
            name="failed claims per task, 16 consumers",
            unit="",
            ours=statistics.mean(lost),
            goal=Goal("<=", 2.0, 2.0),
            note="one task at a time",
            samples={"ours": lost},
        ),
    ]


def _row(name: str, percent: int, ours: list[float], bare: list[float]) -> Row:
    """
    Compare percentiles of all blocks together: a single block has too few for its tail.
    """
    mine, theirs = percentile(ours, percent), percentile(bare, percent)
    return Row(
        measure=MEASURE,
        name=name,
        unit="ms",
        ours=mine,
        floor=theirs,
        ratio=mine / theirs,
        samples={"ours": ours, "floor": bare} if percent == 50 else {},
    )
