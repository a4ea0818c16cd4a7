"""
Consumers that are started and stopped over and over, while tasks keep coming.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
from pymongo.collection import Collection
from pymongo.database import Database

from mscheduler_sync import Consumer, Producer, StopReport, TaskContext
from tests.support import Document, wait_until
from tests.support.invariants import Invariants, Witness

Tasks = Collection[Document]

ROUNDS, AT_ONCE = 500, 5
FAILED = {"task_state.worker_states": {"$elemMatch": {"fail_time": {"$ne": None}}}}


@pytest.mark.timeout(1200)
def test_five_hundred_lives_under_load(database: Database[Document], collection: Tasks) -> None:
    """
    Stopped at any moment a consumer leaves no claim to lapse and charges no attempt (B06, B70).

    Every task runs exactly once, though its consumers live for fractions of a second.
    """
    witness = Witness(database.witness)
    invariants = Invariants(collection, witness)
    producer = Producer(collection)
    enough = threading.Event()
    sent: list[str] = []
    reports: list[StopReport] = []
    numbers = iter(range(ROUNDS))
    errors: list[BaseException] = []

    def send() -> None:
        while not enough.is_set():
            if producer.count(status="waiting") < 100:
                # Longer than the test: a claim that is left behind would be seen at the end.
                results = producer.send_many(
                    [(None, random.uniform(0, 0.03)) for _ in range(10)], lease=3600, heartbeat=600
                )
                sent.extend(result.key for result in results)
            enough.wait(0.1)

    def work(seconds: Any, context: TaskContext) -> None:
        with witness.running(context):
            time.sleep(seconds)

    def live() -> None:
        try:
            for _ in numbers:
                consumer = Consumer(collection, work, max_workers=random.choice([1, 2, 8]))
                consumer.start()
                time.sleep(random.choice([0, random.uniform(0, 0.02), random.uniform(0, 0.5)]))
                reports.append(consumer.stop())
        except BaseException as error:
            errors.append(error)
            raise

    sender = threading.Thread(target=send)
    lives = [threading.Thread(target=live) for _ in range(AT_ONCE)]
    for thread in [sender, *lives]:
        thread.start()
    for thread in lives:
        thread.join(1100)
    enough.set()
    sender.join(30)

    assert errors == []
    assert len(reports) == ROUNDS
    left = [(r.abandoned, r.unstored, r.threads) for r in reports]
    assert [one for one in left if one != ((), (), ())] == []
    assert producer.count(status="running") == 0
    wait_until(lambda: not library_threads(), "all threads end")
    with Consumer(collection, work) as last:
        assert last.run_until_idle(120)
    assert producer.count(status="succeeded") == len(sent)
    invariants.sent(*sent)
    invariants.check()
    assert sorted(run.task for run in witness.runs()) == sorted(sent)
    assert collection.count_documents(FAILED) == 0
    done = sum(len(report.finished) for report in reports)
    print(f"{len(sent)} tasks, {done} of them finished by a stop")
    assert done > 0


def library_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("ms-")]
