"""
Events and subscriptions: order, bounds, closing, and waits.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest

from mscheduler_sync import events
from mscheduler_sync.events import (
    AttemptEnded,
    AttemptLost,
    AttemptReleased,
    AttemptStarted,
    ConsumerStateChanged,
    Event,
    EventHub,
    QueueEmpty,
    TaskFound,
    TaskSucceeded,
)
from mscheduler_sync.settings import deadline_after

EMPTY = QueueEmpty()


def numbered(number: int) -> TaskSucceeded:
    return TaskSucceeded(key=str(number))


def waiting(subscription: events.Subscription) -> bool:
    """
    Whether a reader has found nothing and waits.
    """
    return bool(subscription._arrived._cond._waiters)  # type: ignore[attr-defined]


def event_classes() -> list[type[Event]]:
    found = [getattr(events, name) for name in vars(events)]
    return [kind for kind in found if isinstance(kind, type) and issubclass(kind, Event)]


def test_every_event_has_a_key_and_cannot_be_changed() -> None:
    """
    All events are frozen; those without a task have the key None.
    """
    assert len(event_classes()) == 13
    for kind in event_classes():
        assert "key" in {field.name for field in attrs.fields(kind)}
        assert kind.__doc__
    assert EMPTY.key is None
    assert ConsumerStateChanged(state="running").key is None
    event = AttemptStarted(key="one", running_id="r1")
    assert event.key == "one"
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        event.key = "other"  # type: ignore[misc]


def test_events_compare_by_value() -> None:
    """
    Two events with the same content are equal; of another class or content they are not.
    """
    moment = dt.datetime(2030, 1, 1, tzinfo=dt.timezone.utc)
    assert TaskFound(key="a", claim_at=moment) == TaskFound(key="a", claim_at=moment)
    other: Event = AttemptLost(key="a", running_id="r1")
    assert AttemptStarted(key="a", running_id="r1") != other
    assert AttemptStarted(key="a", running_id="r1") != AttemptStarted(key="a", running_id="r2")


def test_events_take_keywords_only() -> None:
    """
    A new field in a later version breaks no caller, because none counts positions.
    """
    with pytest.raises(TypeError):
        TaskSucceeded("a")  # type: ignore[call-arg]


def test_events_come_in_order_to_everybody() -> None:
    """
    Each subscription gets all events from its making on.
    """
    hub = EventHub()
    hub.publish(numbered(0))
    first = hub.subscribe()
    hub.publish(numbered(1))
    second = hub.subscribe()
    hub.publish(numbered(2))
    hub.close()
    assert list(first) == [numbered(1), numbered(2)]
    assert list(second) == [numbered(2)]


def test_a_subscription_may_choose_classes() -> None:
    """
    Only events of the given classes, or of classes derived from them, are kept.
    """
    hub = EventHub()
    chosen = hub.subscribe(TaskSucceeded, AttemptEnded)
    everything = hub.subscribe(Event)
    sent = [EMPTY, numbered(1), AttemptEnded(key="1", running_id="r1", succeeded=True)]
    for event in sent:
        hub.publish(event)
    hub.close()
    assert list(chosen) == sent[1:]
    assert list(everything) == sent


@pytest.mark.parametrize("wrong", [int, "TaskSucceeded", EMPTY, None])
def test_a_subscription_refuses_what_is_no_event_class(wrong: object) -> None:
    """
    A wrong class is named at once instead of never matching.
    """
    with pytest.raises(TypeError, match="an event class is needed, got"):
        EventHub().subscribe(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("buffer", [0, -1, True, 1.5, "10", None])
def test_a_buffer_must_hold_something(buffer: object) -> None:
    """
    The size of the buffer is a whole number above 0.
    """
    with pytest.raises(ValueError, match=r"buffer must be a whole number above 0, got"):
        EventHub().subscribe(buffer=buffer)  # type: ignore[arg-type]


def test_a_reader_that_is_slow_loses_the_oldest_and_is_told() -> None:
    """
    The buffer never holds more than was asked for; what was dropped is counted.
    """
    hub = EventHub()
    slow = hub.subscribe(buffer=3)
    fast = hub.subscribe()
    for number in range(10):
        hub.publish(numbered(number))
        assert fast.get(0) == numbered(number)
    assert slow.dropped == 7
    assert [slow.get(0) for _ in range(4)] == [numbered(7), numbered(8), numbered(9), None]
    hub.publish(numbered(10))
    assert slow.dropped == 7
    assert slow.get(0) == numbered(10)
    assert fast.dropped == 0


def test_classes_that_were_not_chosen_take_no_room() -> None:
    """
    Events that nobody asked for drop nothing.
    """
    hub = EventHub()
    chosen = hub.subscribe(TaskSucceeded, buffer=1)
    hub.publish(numbered(1))
    for _ in range(10):
        hub.publish(EMPTY)
    assert chosen.dropped == 0
    assert chosen.get(0) == numbered(1)


def test_get_returns_what_is_there_whatever_the_timeout() -> None:
    """
    A time-out of 0 asks without waiting.
    """
    hub = EventHub()
    subscription = hub.subscribe()
    assert subscription.get(0) is None
    hub.publish(EMPTY)
    assert subscription.get(0) == EMPTY
    assert subscription.get(timeout=0) is None


@pytest.mark.parametrize("timeout", [None, 60, 1e300, float("inf"), 10**30])
def test_get_waits_for_the_next_event(timeout: float | None) -> None:
    """
    A waiting reader is woken by the event; no time-out is too long.
    """
    hub = EventHub()
    subscription = hub.subscribe()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(subscription.get, timeout)
        while not waiting(subscription):
            threading.Event().wait(0.001)
        hub.publish(EMPTY)
        assert reading.result(10) == EMPTY


def test_get_gives_up_after_its_timeout() -> None:
    """
    Not before, and with None.
    """
    subscription = EventHub().subscribe()
    began_s = time.monotonic()
    assert subscription.get(0.05) is None
    assert time.monotonic() - began_s >= 0.05


@pytest.mark.parametrize(
    ("timeout", "kind", "text"),
    [
        (True, TypeError, "timeout must be a number of seconds or None, got True"),
        ("1", TypeError, "timeout must be a number of seconds or None, got '1'"),
        (-0.1, ValueError, "timeout must be at least 0 seconds, got -0.1"),
        (float("nan"), ValueError, "timeout must be at least 0 seconds, got nan"),
        (float("-inf"), ValueError, "timeout must be at least 0 seconds, got -inf"),
    ],
)
def test_a_wrong_timeout_is_named(timeout: object, kind: type[Exception], text: str) -> None:
    """
    The error names the argument, its value and the rule.
    """
    subscription = EventHub().subscribe()
    calls: list[Callable[[], object]] = [
        lambda: deadline_after(timeout),  # type: ignore[arg-type]
        lambda: subscription.get(timeout),  # type: ignore[arg-type]
        lambda: subscription.wait_for(lambda _: True, timeout),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(kind) as caught:
            call()
        assert str(caught.value) == text


def test_a_timeout_may_be_a_timedelta() -> None:
    """
    Durations are seconds or timedelta, everywhere.
    """
    assert EventHub().subscribe().get(dt.timedelta(0)) is None


def test_a_waiting_reader_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Whatever came before, a wait is one wait and not many.
    """
    hub = EventHub()
    subscription = hub.subscribe()
    hub.publish(EMPTY)
    assert subscription.get(0) == EMPTY
    wait = subscription._arrived.wait
    waits: list[float | None] = []

    def counted(timeout: float | None = None) -> bool:
        waits.append(timeout)
        return wait(timeout)

    monkeypatch.setattr(subscription._arrived, "wait", counted)
    assert subscription.get(0.05) is None
    assert 1 <= len(waits) <= 3


def test_wait_for_returns_the_next_event_that_fits() -> None:
    """
    The events before it are gone, those after it are still there.
    """
    hub = EventHub()
    subscription = hub.subscribe()
    for number in range(4):
        hub.publish(numbered(number))
    found = subscription.wait_for(lambda event: event.key == "2", 10)
    assert found == numbered(2)
    assert subscription.get(0) == numbered(3)


def test_wait_for_sees_what_happened_before_the_wait() -> None:
    """
    An event between subscribing and waiting is not missed, also without any time to wait.
    """
    hub = EventHub()
    subscription = hub.subscribe()
    hub.publish(EMPTY)
    assert subscription.wait_for(lambda event: event == EMPTY, 0) == EMPTY


def test_wait_for_gives_up_after_its_timeout() -> None:
    """
    Events that do not fit do not prolong the wait, once no more come.
    """
    hub = EventHub()
    subscription = hub.subscribe()
    hub.publish(EMPTY)
    began_s = time.monotonic()
    assert subscription.wait_for(lambda _: False, 0.05) is None
    assert time.monotonic() - began_s >= 0.05


def test_wait_for_gives_up_while_other_events_keep_coming() -> None:
    """
    A stream of events that do not fit cannot hold the caller beyond the time-out.
    """
    hub = EventHub()
    subscription = hub.subscribe()
    hub.publish(EMPTY)
    deadline_s = time.monotonic() + 0.5

    def another(_: Event) -> bool:
        hub.publish(EMPTY)
        # Without this, a wait that does not end would hold the whole test run.
        return time.monotonic() > deadline_s

    assert subscription.wait_for(another, 0.02) is None


def test_what_a_predicate_raises_comes_out_and_hurts_nobody_else() -> None:
    """
    The event is gone for this reader; the subscription and the others go on.
    """
    hub = EventHub()
    subscription = hub.subscribe()
    other = hub.subscribe()
    hub.publish(numbered(1))
    hub.publish(numbered(2))

    def broken(event: Event) -> bool:
        raise ZeroDivisionError(event.key)

    with pytest.raises(ZeroDivisionError, match="1"):
        subscription.wait_for(broken, 10)
    assert subscription.get(0) == numbered(2)
    hub.close()
    assert list(other) == [numbered(1), numbered(2)]


def test_the_answer_of_a_predicate_is_taken_for_its_truth() -> None:
    """
    Any true value will do.
    """
    hub = EventHub()
    subscription = hub.subscribe()
    hub.publish(EMPTY)
    hub.publish(numbered(1))
    assert subscription.wait_for(lambda event: event.key, 0) == numbered(1)


def test_waits_do_not_read_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A wall clock that is set while we wait changes no time-out.
    """

    def wrong() -> float:
        raise AssertionError("the wall clock was read")

    subscription = EventHub().subscribe()
    monkeypatch.setattr("time.time", wrong)
    assert subscription.get(0.01) is None
    assert subscription.wait_for(lambda _: True, 0.01) is None


@pytest.mark.parametrize("how", ["hub", "subscription", "block"])
def test_a_closed_subscription_can_be_read_to_its_end(how: str) -> None:
    """
    What had arrived is still there; nothing comes after it, and no read waits any more.
    """
    hub = EventHub()
    subscription = hub.subscribe()
    hub.publish(numbered(1))
    if how == "hub":
        hub.close()
    elif how == "subscription":
        subscription.close()
        subscription.close()
    else:
        with subscription as same:
            assert same is subscription
    hub.publish(numbered(2))
    subscription.offer(numbered(3))
    assert list(subscription) == [numbered(1)]
    assert subscription.get() is None
    assert subscription.wait_for(lambda _: True) is None
    assert subscription.dropped == 0


@pytest.mark.parametrize("closes_hub", [True, False])
def test_closing_wakes_who_waits(closes_hub: bool) -> None:
    """
    A reader that waits for ever returns when the consumer stops or the subscription is closed.
    """
    hub = EventHub()
    subscription = hub.subscribe()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(list, subscription)
        while not waiting(subscription):
            threading.Event().wait(0.001)
        hub.publish(EMPTY)
        if closes_hub:
            hub.close()
        else:
            subscription.close()
        assert reading.result(10) == [EMPTY]


def test_a_subscription_to_a_stopped_consumer_is_at_its_end() -> None:
    """
    Nobody waits for events that cannot come.
    """
    hub = EventHub()
    hub.close()
    hub.close()
    subscription = hub.subscribe()
    assert subscription.get() is None
    assert not hub.wants(Event)


def test_the_hub_knows_whether_anybody_listens() -> None:
    """
    Events that nobody reads need not be made: not of this class, not of one below it.
    """
    hub = EventHub()
    assert not hub.wants(AttemptEnded)
    endings = hub.subscribe(AttemptEnded, TaskSucceeded)
    assert [hub.wants(kind) for kind in (AttemptEnded, TaskSucceeded)] == [True, True]
    assert not hub.wants(TaskFound)
    assert not hub.wants(Event)
    everything = hub.subscribe()
    assert hub.wants(TaskFound)
    everything.close()
    assert not hub.wants(TaskFound)
    base = hub.subscribe(Event)
    assert hub.wants(TaskFound)
    endings.close()
    base.close()
    assert not hub.wants(AttemptEnded)
    base.close()
    hub.publish(EMPTY)


def test_publishing_from_many_threads_loses_nothing() -> None:
    """
    Each thread's events arrive, in that thread's order, while others come and go.
    """
    hub = EventHub()
    subscription = hub.subscribe()
    start = threading.Barrier(5)

    def publish(worker: int) -> None:
        start.wait(10)
        for number in range(200):
            hub.publish(TaskSucceeded(key=f"{worker}:{number}"))

    def come_and_go() -> None:
        start.wait(10)
        for _ in range(200):
            with hub.subscribe() as passing:
                passing.get(0)

    with ThreadPoolExecutor(5) as pool:
        publishing = [pool.submit(publish, worker) for worker in range(4)]
        passing = pool.submit(come_and_go)
        for future in (*publishing, passing):
            future.result(10)
    hub.close()
    keys = [event.key or "" for event in subscription]
    assert len(keys) == 800
    for worker in range(4):
        own = [key for key in keys if key.startswith(f"{worker}:")]
        assert own == [f"{worker}:{number}" for number in range(200)]


def test_releases_say_why() -> None:
    """
    The reason of a release is part of the event.
    """
    event = AttemptReleased(key="a", running_id="r", why="shutdown")
    assert attrs.asdict(event) == {"key": "a", "running_id": "r", "why": "shutdown"}


@pytest.mark.parametrize(
    ("timeout", "least_s"), [(None, float("inf")), (0, 0.0), (5, 5.0), (2.5, 2.5)]
)
def test_deadlines_are_on_the_monotonic_clock(timeout: float | None, least_s: float) -> None:
    """
    None is for ever; everything else counts from now.
    """
    before_s = time.monotonic()
    deadline_s = deadline_after(timeout)
    assert before_s + least_s <= deadline_s <= time.monotonic() + least_s
