"""
Throughput beside many documents that are no work now, and at the head of long backlogs.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any, Final

from bson import ObjectId
from pymongo.collection import Collection

from benchmarks.children import Children
from benchmarks.figures import Goal, Row, interleaved, median_ratio
from benchmarks.measures.backlog import duration_s, fill
from benchmarks.setting import Bench, Document, params_of
from benchmarks.work import Report, drain, drain_some
from mscheduler_sync import Producer

MEASURE: Final = "growth"
_SLOTS: Final = 8
_CHUNK: Final = 2000
_TEN_YEARS_S: Final = 3650 * 86_400
#: Keys of the documents that are no work; those of the work are digits, which sort before.
_OTHERS: Final = "other-"
#: A head of so many tasks leaves something of the shortest backlog.
_HEAD: Final = 800


def run(bench: Bench) -> list[Row]:
    with Children(1) as children:
        return [*_others(bench, children), *_waiting(bench, children)]


def _others(bench: Bench, children: Children) -> list[Row]:
    sizes = bench.scale.others
    count = bench.backlog()
    with contextlib.ExitStack() as stack:
        runs = []
        for size in sizes:
            bench.say(f"growth: {size:,} other documents")
            name = stack.enter_context(bench.database())
            _add_others(bench, children, name, size)
            runs.append(_beside_others(bench, children, name, count))
        results = interleaved(bench.scale.repetitions, *runs)
    return _rows(
        results,
        [f"{size:,} finished and far-future documents" for size in sizes],
        goals={100_000: Goal(">=", None, 0.9)},
        sizes=sizes,
        note="against none",
    )


def _beside_others(bench: Bench, children: Children, name: str, count: int) -> Callable[[], float]:
    def run_once() -> float:
        fill(bench, name, range(count))
        reports: list[Report] = children.race(1, drain, bench.uri, name, _SLOTS, False)
        work = {"key": {"$lt": _OTHERS}}
        collection = bench.tasks(name)
        done = collection.count_documents({**work, "status": "succeeded"})
        if done != count:
            msg = f"{done} of {count} tasks are done; the figures would mean nothing"
            raise RuntimeError(msg)
        collection.delete_many(work)
        return count / duration_s(reports)

    return run_once


def _add_others(bench: Bench, children: Children, name: str, size: int) -> None:
    """
    Add *size* documents: half of them finished, half far in the future.
    """
    collection = bench.tasks(name)
    # The first send makes the indexes.
    Producer(collection).send("0", params_of(0), delay=_TEN_YEARS_S)
    collection.delete_many({})
    models = finished_and_future(bench, children)
    for start in range(0, size, _CHUNK):
        collection.insert_many(
            [
                {**models[number % 2], "_id": ObjectId(), "key": f"{_OTHERS}{number:08d}"}
                for number in range(start, min(start + _CHUNK, size))
            ],
            ordered=False,
        )


def finished_and_future(bench: Bench, children: Children) -> tuple[Document, Document]:
    """
    Return the documents of a task that has succeeded, and of one that is far in the future.
    """
    with bench.database() as name:
        collection = bench.tasks(name)
        fill(bench, name, range(1))
        children.race(1, drain, bench.uri, name, 1, False)
        finished = _only(collection)
        collection.delete_many({})
        Producer(collection).send("0", params_of(0), delay=_TEN_YEARS_S)
        return finished, _only(collection)


def _only(collection: Collection[Document]) -> Document:
    document: Any = collection.find_one()
    if document is None:
        msg = "a task that was sent is not there"
        raise RuntimeError(msg)
    return dict(document)


def _waiting(bench: Bench, children: Children) -> list[Row]:
    sizes = bench.scale.waiting
    with contextlib.ExitStack() as stack:
        runs = []
        for size in sizes:
            bench.say(f"growth: {size:,} waiting tasks")
            name = stack.enter_context(bench.database())
            runs.append(_head_of(bench, children, name, size))
        results = interleaved(bench.scale.repetitions, *runs)
    return _rows(
        results,
        [f"head of {size:,} waiting tasks" for size in sizes],
        goals={},
        sizes=sizes,
        note=f"against {sizes[0]:,}",
    )


def _head_of(bench: Bench, children: Children, name: str, size: int) -> Callable[[], float]:
    numbers = _counted_up()
    wanted = min(_HEAD, bench.backlog())

    def run_once() -> float:
        missing = size - bench.tasks(name).count_documents({"status": "waiting"})
        fill(bench, name, [next(numbers) for _ in range(missing)])
        reports: list[Report] = children.race(1, drain_some, bench.uri, name, _SLOTS, wanted)
        return wanted / duration_s(reports)

    return run_once


def _counted_up() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def _rows(
    results: list[list[float]],
    names: list[str],
    *,
    goals: dict[int, Goal],
    sizes: tuple[int, ...],
    note: str,
) -> list[Row]:
    """
    Compare each size with the first.
    """
    reference = results[0]
    return [
        Row(
            measure=MEASURE,
            name=name,
            unit="/s",
            ours=statistics.median(runs),
            floor=statistics.median(reference) if position else None,
            ratio=median_ratio(runs, reference) if position else None,
            goal=goals.get(size),
            note=note if position else "",
            samples={"ours": runs},
        )
        for position, (runs, name, size) in enumerate(zip(results, names, sizes, strict=True))
    ]
