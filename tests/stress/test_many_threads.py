"""
Many threads on one producer and one consumer.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from pymongo.collection import Collection

from mscheduler_sync import Consumer, Producer, TaskSucceeded
from tests.support import Document

Tasks = Collection[Document]

THREADS, EACH = 50, 20


@pytest.fixture(params=[None, 1e-6], ids=["as usual", "1 us"])
def switch_interval(request: pytest.FixtureRequest) -> Iterator[None]:
    """
    How long a thread may run before another one gets its turn.
    """
    before = sys.getswitchinterval()
    if request.param is not None:
        sys.setswitchinterval(request.param)
    yield
    sys.setswitchinterval(before)


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("switch_interval")
def test_fifty_threads_send_and_wait_for_their_results(collection: Tasks) -> None:
    """
    Each thread gets the results of its own tasks, and every task has run once.
    """
    producer = Producer(collection)
    runs: list[str] = []
    wrong: list[object] = []

    def work(params: Any, context: Any) -> Any:
        runs.append(context.key)
        return params * 2

    def use(number: int) -> None:
        try:
            for n in range(EACH):
                key = f"{number}-{n}"
                producer.send(key, number * 1000 + n, lease=600, heartbeat=200)
                value = producer.result(key, 300)
                if value != 2 * (number * 1000 + n):
                    wrong.append((key, value))
        except BaseException as error:
            wrong.append(error)
            raise

    with Consumer(collection, work, max_workers=16) as consumer:
        threads = [threading.Thread(target=use, args=(number,)) for number in range(THREADS)]
        with consumer.subscribe(TaskSucceeded) as events:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(800)
            assert wrong == []
            assert consumer.run_until_idle(60)
            seen = []
            while (event := events.get(0)) is not None:
                seen.append(event.key)
        assert consumer.health().slots_taken == 0
    keys = sorted(f"{number}-{n}" for number in range(THREADS) for n in range(EACH))
    assert sorted(runs) == keys
    assert sorted(str(key) for key in seen) == keys
    assert producer.count(status="succeeded") == THREADS * EACH


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("switch_interval")
def test_many_consumers_of_one_process_share_the_work(collection: Tasks) -> None:
    """
    Ten consumers on one client race for the same tasks: each task runs once.
    """
    producer = Producer(collection)
    runs: list[str] = []
    producer.send_many([(str(n), None) for n in range(500)], lease=600, heartbeat=200)
    consumers = [
        Consumer(collection, lambda _, context: runs.append(context.key), max_workers=4)
        for _ in range(10)
    ]
    for consumer in consumers:
        consumer.start()
    for consumer in consumers:
        assert consumer.run_until_idle(300)
    for consumer in consumers:
        assert consumer.stop().abandoned == ()
    assert sorted(runs, key=int) == [str(n) for n in range(500)]
    assert producer.count(status="succeeded") == 500
