"""
The entrance of the delay queue: what is queued, and from when it may be claimed.
"""

from __future__ import annotations

import datetime as dt

import pytest

from mscheduler_sync._runtime.clock import ServerClock
from mscheduler_sync._runtime.delay_queue import DelayQueue, Entry
from mscheduler_sync._stages.contention import Contention
from mscheduler_sync._stages.horizon import Horizon
from mscheduler_sync._stages.intake import BACK_OFF_S, OTHERS_MEMORY_S, Intake
from mscheduler_sync._stages.quarantine import Quarantine
from mscheduler_sync._stages.routes import Routes
from mscheduler_sync._storage import expressions as x
from mscheduler_sync.events import EventHub, TaskFound
from tests.support import Document

#: The server's time at the monotonic time 0. The queue's own clock, the machine's, is far beyond.
EPOCH = dt.datetime(2031, 5, 6, 12, tzinfo=dt.timezone.utc)


class Room:
    """
    An intake with what stands around it, at a time that the test sets.
    """

    def __init__(self) -> None:
        self.now_s = 10.0
        self.clock = ServerClock()
        self.clock.set(EPOCH, received_at_s=0.0)
        self.queue = DelayQueue(1000)
        self.hub = EventHub()
        self.contention = Contention()
        self.quarantine = Quarantine(queue=self.queue, hub=self.hub, timer=self.timer)
        self.horizon = Horizon(timer=self.timer)
        self.intake = Intake(
            routes=Routes("me", ["known"]),
            queue=self.queue,
            clock=self.clock,
            hub=self.hub,
            contention=self.contention,
            quarantine=self.quarantine,
            horizon=self.horizon,
            timer=self.timer,
        )

    def timer(self) -> float:
        return self.now_s

    def queued(self) -> list[Entry]:
        return sorted(self.queue._entries.values(), key=lambda entry: entry.due_s)

    def due_s(self, key: str) -> float:
        return self.queue._entries[key].due_s


@pytest.fixture
def room() -> Room:
    return Room()


def task(key: object = "k", due_s: float = 5.0, **option: object) -> Document:
    return {"key": key, "due": EPOCH + dt.timedelta(seconds=due_s), "task_option": option}


def test_task_is_queued_with_its_time_and_told(room: Room) -> None:
    """
    Its lease is learned on the way.
    """
    events = room.hub.subscribe()
    assert room.intake.offer(task(due_s=5, priority=3, worker_timeout_ms=2_000))
    (entry,) = room.queued()
    assert (entry.key, entry.due_s, entry.priority, entry.defer_s) == ("k", 5.0, 3, 0.0)
    assert events.get(0) == TaskFound(key="k", claim_at=EPOCH + dt.timedelta(seconds=5))
    assert room.horizon.length_s == 1.0


@pytest.mark.parametrize(
    ("priority", "level"),
    [(None, 0), (0, 0), (-2, -2), (7, 7), (2.9, 2), ("9", 0), (float("nan"), 0)],
)
def test_odd_priorities_count_as_none(room: Room, priority: object, level: int) -> None:
    """
    Numbers are whole ones, anything else is 0.
    """
    assert room.intake.offer(task(priority=priority))
    assert [entry.priority for entry in room.queued()] == [level]


@pytest.mark.parametrize(
    "fields",
    [
        task(key=7),
        {"key": "k"},
        {"key": "k", "due": "soon"},
    ],
)
def test_document_without_key_or_time_is_set_aside(room: Room, fields: Document) -> None:
    """
    It is not queued, and will not be for a while.
    """
    assert not room.intake.offer(fields)
    assert len(room.quarantine) == 1
    assert not room.intake.offer(task(key=str(fields["key"])))
    assert room.queued() == []


@pytest.mark.parametrize(
    ("route", "due_s", "queued"),
    [
        ("known", 5, True),
        ("known", 10 + 30, True),
        ("known", 10 + 31, False),
        ("unknown", 5, False),
    ],
)
def test_offer_if_near(room: Room, route: str, due_s: float, queued: bool) -> None:
    """
    What was found by its key is queued if it is for this consumer, and due within the horizon.
    """
    room.intake.offer_if_near({**task(due_s=due_s), "routes": x.route_of_name(route)})
    assert bool(room.queued()) is queued


@pytest.mark.parametrize(
    ("claimed", "from_pass", "queued"),
    [
        ("before", True, True),
        ("when it began", True, False),
        ("meanwhile", True, False),
        ("meanwhile", False, True),
        ("after", True, True),
    ],
)
def test_pass_is_too_late_for_what_is_claimed_meanwhile(
    room: Room, claimed: str, from_pass: bool, queued: bool
) -> None:
    """
    What it read may be from before the claim; what others tell of is newer.
    """
    if claimed == "before":
        with room.intake.claiming(["k"]):
            pass
    if claimed == "when it began":
        with room.intake.claiming(["k"]), room.intake.during_pass():
            assert room.intake.offer(task(), from_pass=from_pass) is queued
        return
    with room.intake.during_pass():
        if claimed == "meanwhile":
            with room.intake.claiming(["k"]):
                pass
        if claimed != "after":
            assert room.intake.offer(task(), from_pass=from_pass) is queued
    if claimed == "after":
        assert room.intake.offer(task(), from_pass=from_pass) is queued


@pytest.mark.parametrize("source", ["stream", "pass", "busy", "alone", "goes at once"])
def test_new_task_is_left_to_others_after_lost_claims(
    room: Room, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """
    Of what the stream tells to all: not of what a pass finds, nor while more is due anyway.
    """
    if source != "alone":
        room.contention.lost(["other"], of=1)
    drawn_s = 0.0 if source == "goes at once" else 0.5
    monkeypatch.setattr(Contention, "draw_wait_s", lambda _: drawn_s)
    if source == "busy":
        room.queue.push("due", 0.0)
    # It came due four seconds ago: the wait counts from now on.
    room.intake.offer(task(due_s=6.0), from_pass=source == "pass")
    defer_s = room.queue._entries["k"].defer_s
    assert defer_s == (4.5 if source == "stream" else 0.0)


def test_own_failure_leaves_the_retry_to_others(room: Room) -> None:
    """
    Only if another worker was seen lately, and only for the task that has failed.
    """
    room.intake.record_failure("alone", 20.0)
    room.intake.record_other_worker()
    room.now_s += OTHERS_MEMORY_S
    room.intake.record_failure("k", 20.0)
    for key in ("alone", "k", "another"):
        room.intake.offer(task(key, due_s=20.0))
    assert [room.due_s(key) for key in ("alone", "k", "another")] == [20.0, 20 + BACK_OFF_S, 20.0]
    room.now_s += 1
    room.intake.record_failure("k", 90.0)
    room.intake.offer(task("k", due_s=90.0))
    assert room.due_s("k") == 90.0


def test_requeue_is_due_now(room: Room) -> None:
    """
    Unless it was found again meanwhile, or is left to others after a failure.
    """
    room.intake.requeue("k")
    assert room.due_s("k") == room.now_s
    room.intake.offer(task("later", due_s=50.0))
    room.intake.requeue("later")
    assert room.due_s("later") == 50.0
    room.intake.record_other_worker()
    room.intake.record_failure("failed", 12.0)
    room.intake.requeue("failed")
    assert room.due_s("failed") == 12.0 + BACK_OFF_S
