"""
QueueDrained: when all that was found has run, once each time.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, Final, cast

import attrs
import pytest

from mscheduler_sync._runtime.delay_queue import DelayQueue
from mscheduler_sync._stages.drain import Drain
from mscheduler_sync._stages.running import RunningAttempts
from mscheduler_sync._storage.store import TaskStore
from mscheduler_sync.events import EventHub, QueueDrained, QueueEmpty, Subscription

LAG_S: Final = 1.0


@attrs.define
class Attempts:
    """
    As much of `RunningAttempts` as is asked for.
    """

    begun: int = 0
    count: int = 0


@attrs.frozen
class Scene:
    queue: DelayQueue
    attempts: Attempts
    hub: EventHub
    drain: Drain

    def told(self, events: Subscription) -> int:
        self.drain.check()
        self.drain.check()
        return len(list(iter(lambda: events.get(0), None)))

    def run_one(self) -> None:
        self.attempts.begun += 1


@pytest.fixture
def scene() -> Scene:
    queue, attempts, hub = DelayQueue(10), Attempts(), EventHub()
    store: Any = SimpleNamespace(clock=SimpleNamespace(lag_s=LAG_S))
    drain = Drain(
        queue=queue,
        running=cast(RunningAttempts, attempts),
        store=cast(TaskStore, store),
        hub=hub,
    )
    return Scene(queue, attempts, hub, drain)


def test_told_once_each_time_that_all_has_run(scene: Scene) -> None:
    """
    Not before anything has run, once after it, and once more after more has run.
    """
    events = scene.hub.subscribe(QueueDrained)
    assert scene.told(events) == 0
    scene.run_one()
    assert scene.told(events) == 1
    assert scene.told(events) == 0
    scene.run_one()
    scene.run_one()
    assert scene.told(events) == 1


def test_not_told_while_an_attempt_is_held(scene: Scene) -> None:
    """
    Held is also one whose outcome is on its way.
    """
    events = scene.hub.subscribe(QueueDrained)
    scene.run_one()
    scene.attempts.count = 1
    assert scene.told(events) == 0
    scene.attempts.count = 0
    assert scene.told(events) == 1


@pytest.mark.parametrize(
    ("due_in_s", "told"), [(-1.0, 0), (LAG_S / 2, 0), (LAG_S + 60, 1)], ids=["due", "lag", "later"]
)
def test_what_is_due_stands_in_the_way(scene: Scene, due_in_s: float, told: int) -> None:
    """
    So does what a clock that lags takes for due in a moment; what is due later does not.
    """
    events = scene.hub.subscribe(QueueDrained)
    scene.run_one()
    scene.queue.push("k", time.monotonic() + due_in_s)
    assert scene.told(events) == told


def test_what_the_claimer_has_in_its_hands_stands_in_the_way(scene: Scene) -> None:
    """
    Until it puts its keys down, with no attempt made of them.
    """
    events = scene.hub.subscribe(QueueDrained)
    scene.run_one()
    scene.queue.push("k", time.monotonic() - 1)
    assert [entry.key for entry in scene.queue.take(1, 0)] == ["k"]
    assert scene.told(events) == 0
    scene.queue.put_down()
    assert scene.told(events) == 1


def test_costs_nothing_while_nobody_listens(scene: Scene) -> None:
    """
    The queue is not even looked through.
    """
    other = scene.hub.subscribe(QueueEmpty)
    scene.run_one()
    scene.queue.is_idle = None  # type: ignore[assignment, method-assign]
    assert scene.told(other) == 0
