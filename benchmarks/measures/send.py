"""
Sending: one task at a time, and many at once.
"""

from __future__ import annotations

import itertools
import time
from typing import Final

from benchmarks import floor
from benchmarks.counting import CommandCounter, without_get_more
from benchmarks.figures import Goal, Row, compared, interleaved
from benchmarks.setting import Bench, params_of
from benchmarks.work import TASKS, contact
from mscheduler_sync import Producer

MEASURE: Final = "send"
#: Singles per run; items per send_many, and calls of it per run.
_SINGLES, _ITEMS, _CALLS = 50, 1000, 2


def run(bench: Bench) -> list[Row]:
    return [*_singles(bench), *_many(bench)]


def _singles(bench: Bench) -> list[Row]:
    bench.say("send, one at a time")
    counter = CommandCounter()
    numbers = itertools.count(1)
    sent = 0
    with bench.database() as name, contact(bench.uri, counter) as client:
        producer = Producer(client[name][TASKS])
        bare = floor.prepared(client, name)
        template = bench.template()

        def ours() -> float:
            nonlocal sent
            began_s = time.perf_counter()
            for number in itertools.islice(numbers, _SINGLES):
                producer.send(floor.key_of(number), params_of(number))
            sent += _SINGLES
            return _SINGLES / (time.perf_counter() - began_s)

        def theirs() -> float:
            documents = floor.copies(template, _keys(numbers, _SINGLES))
            began_s = time.perf_counter()
            for document in documents:
                bare.insert_one(document)
            return _SINGLES / (time.perf_counter() - began_s)

        # The first send makes the indexes.
        interleaved(1, ours, theirs)
        counter.take()
        before = sent
        repetitions = 2 * bench.scale.repetitions
        results = interleaved(repetitions, ours, theirs)
        commands, _ = counter.take()
    # Both go through one client; the floor's are one for each document.
    mine = without_get_more(commands) - _SINGLES * repetitions
    return [
        compared(MEASURE, "send, one at a time", "/s", *results),
        Row(
            measure=MEASURE,
            name="commands per send",
            unit="",
            ours=mine / (sent - before),
            floor=1.0,
        ),
    ]


def _many(bench: Bench) -> list[Row]:
    bench.say("send_many")
    numbers = itertools.count(1)
    with bench.database() as name:
        producer = Producer(bench.tasks(name))
        bare = floor.prepared(bench.client, name)
        template = bench.template()

        def ours() -> float:
            batches = [
                [(key, params_of(0)) for key in _keys(numbers, _ITEMS)] for _ in range(_CALLS)
            ]
            began_s = time.perf_counter()
            for items in batches:
                producer.send_many(items)
            return _CALLS * _ITEMS / (time.perf_counter() - began_s)

        def theirs() -> float:
            batches = [floor.copies(template, _keys(numbers, _ITEMS)) for _ in range(_CALLS)]
            began_s = time.perf_counter()
            for documents in batches:
                bare.insert_many(documents, ordered=False)
            return _CALLS * _ITEMS / (time.perf_counter() - began_s)

        interleaved(1, ours, theirs)
        results = interleaved(bench.scale.repetitions, ours, theirs)
    return [
        compared(
            MEASURE,
            f"send_many, {_ITEMS:,} at once",
            "/s",
            *results,
            goal=Goal(">=", 0.6, 0.6),
        )
    ]


def _keys(numbers: itertools.count[int], count: int) -> list[str]:
    return [floor.key_of(number) for number in itertools.islice(numbers, count)]
