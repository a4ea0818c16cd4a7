"""
Consumers that poll, and what tests ask of tasks and of events.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

from pymongo.collection import Collection

from mscheduler_sync import Consumer, Event, Producer, Subscription, Task
from tests.support import Document, wait_until

Tasks = Collection[Document]


def polling(collection: Tasks, function: Any, **options: Any) -> Consumer:
    """
    Make a consumer that polls, often.
    """
    return Consumer(collection, function, **{"watch": False, "poll_interval": 0.1, **options})


def echo(params: Any) -> Any:
    return params


def task_of(producer: Producer, key: str = "k") -> Task:
    task = producer.get(key)
    assert task is not None
    return task


def unread(events: Subscription) -> list[Event]:
    """
    Return the events that are there already.
    """
    return list(iter(lambda: events.get(0), None))


def reasons(task: Task) -> list[str]:
    """
    Return the first line of each failure.
    """
    return [(a.fail_reason or "").splitlines()[0] for a in task.attempts if a.failed_at]


def ran(producer: Producer, collection: Tasks, function: Any, **options: Any) -> Task:
    """
    Send the task ``k``, run it until it has ended or waits for long, and return it.
    """
    producer.send("k", **{"retry_delay": 0, **options})

    def is_at_rest() -> bool:
        task = task_of(producer)
        soon = dt.datetime.now(dt.timezone.utc) + dt.timedelta(minutes=1)
        return task.is_finished or (task.status == "waiting" and task.due_at > soon)

    with polling(collection, function):
        wait_until(is_at_rest, "the task has come to rest", 20)
    return task_of(producer)
