"""
What a consumer tells its own process: event classes and subscriptions.

Each class says what has happened, in the past tense. An event about a write comes after
the write is durable.
"""

from __future__ import annotations

import collections
import datetime as dt
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, Literal

import attrs

from mscheduler_sync.settings import deadline_after

#: Waits are cut into slices, so that Ctrl-C is seen on every system, and no wait overflows.
_SLICE_S: Final = 1.0


@attrs.frozen(kw_only=True)
class Event:
    """
    Base of all events. *key* is the task's, or None where there is none.
    """

    key: str | None = None


@attrs.frozen(kw_only=True)
class TaskFound(Event):
    """
    A task was found, or is to be tried again; a claim follows at *claim_at* (aware, server clock).
    """

    key: str
    claim_at: dt.datetime


@attrs.frozen(kw_only=True)
class QueueEmpty(Event):
    """
    The last found task was taken from the local queue.
    """


@attrs.frozen(kw_only=True)
class QueueDrained(Event):
    """
    Of what was found nothing is due any more, and no attempt is held here.

    Comes once each time that this becomes so after attempts have run. What the server has and
    this consumer has yet to find does not count; `Consumer.run_until_idle` asks for that too.
    """


@attrs.frozen(kw_only=True)
class ClaimUndecided(Event):
    """
    Nobody knows yet what became of a claim: the database did not answer, and is asked again.
    """

    key: str


@attrs.frozen(kw_only=True)
class AttemptStarted(Event):
    """
    A claim was won, and the function is about to be called. Nothing is said of lost races.
    """

    key: str
    running_id: str


@attrs.frozen(kw_only=True)
class AttemptEnded(Event):
    """
    The success or the failure of an attempt is stored. Not told of one that was lost or released.
    """

    key: str
    running_id: str
    succeeded: bool


@attrs.frozen(kw_only=True)
class AttemptLost(Event):
    """
    The outcome of an attempt was refused: another worker has taken the task over.
    """

    key: str
    running_id: str


@attrs.frozen(kw_only=True)
class AttemptReleased(Event):
    """
    An attempt was given back without using one up; *why* says for what reason.
    """

    key: str
    running_id: str
    why: Literal["shutdown", "snoozed", "cancel_requested", "options_changed", "late"]


@attrs.frozen(kw_only=True)
class TaskSucceeded(Event):
    """
    A success that was stored here was the last one that its task needed.

    With ``concurrency=1`` each success is. Comes before the `AttemptEnded` of that attempt.
    """

    key: str


@attrs.frozen(kw_only=True)
class TaskFinished(Event):
    """
    A write of this consumer has ended the task: succeeded, failed for good or cancelled.

    Told exactly once, by the consumer whose write it was, until the task is armed again. Comes
    after the `AttemptEnded` or `AttemptReleased` of the attempt that ended it, if one did.
    """

    key: str
    status: Literal["succeeded", "failed", "cancelled"]


@attrs.frozen(kw_only=True)
class TaskQuarantined(Event):
    """
    A document cannot be handled, and is left alone for a while; *reason* says why.
    """

    reason: str


@attrs.frozen(kw_only=True)
class ConsumerStateChanged(Event):
    """
    The consumer itself: *state* is now running, stopping, stopped or crashed.
    """

    state: str


class Subscription:
    """
    Events from the moment of its making, in order: iterate, or `get` one by one.

    Holds at most *buffer* events that were not read; older ones are dropped and
    counted in `dropped`. One reader at a time. Use as a context manager.
    """

    def __init__(self, hub: EventHub, types: tuple[type[Event], ...], buffer: int) -> None:
        self._hub = hub
        self._types = types
        self._arrived = threading.Event()
        self._lock = threading.Lock()
        # Under _lock.
        self._events: collections.deque[Event] = collections.deque(maxlen=buffer)
        self._dropped = 0
        self._closed = False

    @property
    def dropped(self) -> int:
        """
        How many events were lost because they were not read in time.
        """
        with self._lock:
            return self._dropped

    def get(self, timeout: float | dt.timedelta | None = None) -> Event | None:
        """
        Return the next event, waiting up to *timeout* seconds (None: for ever), else None.

        None also means that the consumer has stopped and no event is left.
        """
        deadline_s = deadline_after(timeout)
        while True:
            with self._lock:
                if self._events:
                    return self._events.popleft()
                if self._closed:
                    return None
                self._arrived.clear()
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return None
            self._arrived.wait(min(left_s, _SLICE_S))

    def wait_for(
        self, predicate: Callable[[Event], object], timeout: float | dt.timedelta | None = None
    ) -> Event | None:
        """
        Return the next event for which *predicate* is true, dropping those before it, else None.

        *predicate* runs in the calling thread; what it raises comes out here.
        """
        deadline_s = deadline_after(timeout)
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                # Those that are here count; those that keep coming do not prolong the wait.
                with self._lock:
                    here = len(self._events)
                events = (self.get(0) for _ in range(here))
                return next((e for e in events if e is not None and predicate(e)), None)
            event = self.get(left_s)
            if event is None or predicate(event):
                return event

    def __iter__(self) -> Iterator[Event]:
        while (event := self.get()) is not None:
            yield event

    def close(self) -> None:
        """
        End the subscription; events already here can still be read.
        """
        self._hub.remove(self)
        self.end()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # -- called by the hub -------------------------------------------------------------------

    def takes(self, kind: type[Event]) -> bool:
        return not self._types or issubclass(kind, self._types)

    def offer(self, event: Event) -> None:
        if not self.takes(type(event)):
            return
        with self._lock:
            if self._closed:
                return
            if len(self._events) == self._events.maxlen:
                self._dropped += 1
            self._events.append(event)
        self._arrived.set()

    def end(self) -> None:
        with self._lock:
            self._closed = True
        self._arrived.set()


class EventHub:
    """
    Hands every event to every subscription. Publishing never blocks and never raises.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Under _lock; replaced, never changed, so that publishing reads it without.
        self._subscriptions: tuple[Subscription, ...] = ()
        self._closed = False

    def subscribe(self, *types: type[Event], buffer: int = 10_000) -> Subscription:
        for one in types:
            if not (isinstance(one, type) and issubclass(one, Event)):
                msg = f"an event class is needed, got {one!r}"
                raise TypeError(msg)
        if isinstance(buffer, bool) or not isinstance(buffer, int) or buffer < 1:
            msg = f"buffer must be a whole number above 0, got {buffer!r}"
            raise ValueError(msg)
        subscription = Subscription(self, types, buffer)
        with self._lock:
            if self._closed:
                subscription.end()
            else:
                self._subscriptions = (*self._subscriptions, subscription)
        return subscription

    def remove(self, subscription: Subscription) -> None:
        with self._lock:
            self._subscriptions = tuple(s for s in self._subscriptions if s is not subscription)

    def wants(self, kind: type[Event]) -> bool:
        """
        Whether anybody listens to *kind*: only then is it worth making, or finding out.
        """
        # No generator: this is asked several times per task, mostly of nobody.
        for subscription in self._subscriptions:  # noqa: SIM110
            if subscription.takes(kind):
                return True
        return False

    def publish(self, event: Event) -> None:
        for subscription in self._subscriptions:
            subscription.offer(event)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            subscriptions, self._subscriptions = self._subscriptions, ()
        for subscription in subscriptions:
            subscription.end()


class EventSource:
    """
    A consumer or a node, as far as its events go.
    """

    _hub: EventHub

    def subscribe(self, *types: type[Event], buffer: int = 10_000) -> Subscription:
        """
        Return a subscription to the events of this object, of the given classes or all.

        Subscribe before the action whose events matter; nothing from then on is missed
        as long as no more than *buffer* events are left unread.

        Raises:
            TypeError, ValueError: If an argument is wrong.
        """
        return self._hub.subscribe(*types, buffer=buffer)

    def wait_for_event(
        self, predicate: Callable[[Event], object], timeout: float | None = None
    ) -> Event | None:
        """
        Return the first event from now on for which *predicate* is true.

        Blocks up to *timeout* seconds (None: for ever). Returns None after that, and when
        the consumer or node ends. To miss nothing between an action and the wait,
        `subscribe` before the action and use `Subscription.wait_for`.

        Raises:
            TypeError, ValueError: If *timeout* is wrong. And whatever *predicate* raises.
        """
        with self._hub.subscribe() as subscription:
            return subscription.wait_for(predicate, timeout)
