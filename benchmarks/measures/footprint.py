"""
What tasks weigh: in a consumer's memory, running or waiting in its queue; in the database.
"""

from __future__ import annotations

from typing import Final

import bson

from benchmarks.children import Children
from benchmarks.figures import Row
from benchmarks.measures.growth import finished_and_future
from benchmarks.setting import Bench, params_of
from benchmarks.standby import bare_threads, hold_memory
from mscheduler_sync import Producer

MEASURE: Final = "memory"
_RUNNING, _WAITING = 100, 5000
_CHUNK: Final = 1000
_KIB: Final = 1024


def run(bench: Bench) -> list[Row]:
    return [*_in_the_consumer(bench), *_in_the_database(bench)]


def _in_the_database(bench: Bench) -> list[Row]:
    with Children(1) as children:
        finished, waiting = finished_and_future(bench, children)
    return [
        Row(
            measure=MEASURE,
            name=f"document of a {name} task, small params",
            unit="bytes",
            ours=float(len(bson.encode(document))),
        )
        for name, document in (("waiting", waiting), ("finished", finished))
    ]


def _in_the_consumer(bench: Bench) -> list[Row]:
    bench.say(f"memory of {_RUNNING} running and {_WAITING:,} waiting tasks")
    with bench.database() as name, Children(2) as children:
        producer = Producer(bench.tasks(name))
        producer.send("first", delay=86_400)
        child, other = children.all
        child.begin(hold_memory, bench.uri, name, _RUNNING)
        idle = child.hear()
        if idle is None:
            # The system does not say how much a process uses.
            child.tell("stop")
            child.hear()
            return []
        producer.send_many(
            [(f"running-{number}", params_of(number)) for number in range(_RUNNING)], heartbeat=1
        )
        child.tell(_RUNNING)
        running = child.hear()
        for start in range(0, _WAITING, _CHUNK):
            numbers = range(start, start + _CHUNK)
            producer.send_many([(f"waiting-{number}", params_of(number)) for number in numbers])
        child.tell(_WAITING)
        waiting = child.hear()
        child.tell("stop")
        child.hear()
        other.begin(bare_threads, _RUNNING)
        threads = other.hear()
    return [
        Row(measure=MEASURE, name="idle consumer, with Python", unit="MiB", ours=idle / _KIB**2),
        Row(
            measure=MEASURE,
            name="per running task",
            unit="KiB",
            ours=(running - idle) / _RUNNING / _KIB,
            floor=threads / _RUNNING / _KIB,
            note="floor: a bare thread of a pool",
        ),
        Row(
            measure=MEASURE,
            name="per task in the local queue",
            unit="KiB",
            ours=(waiting - running) / _WAITING / _KIB,
        ),
    ]
