"""
What a consumer tells about itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Literal

import attrs

from mscheduler_sync._runtime.delay_queue import DelayQueue
from mscheduler_sync._runtime.service import ComponentHealth, Service
from mscheduler_sync._runtime.slots import Slots
from mscheduler_sync._stages.candidates import Candidates
from mscheduler_sync._stages.outcome import OutcomeWriter
from mscheduler_sync._stages.running import RunningAttempts
from mscheduler_sync._stages.watcher import Watcher
from mscheduler_sync._storage.store import TaskStore

State = Literal["new", "running", "stopping", "stopped", "crashed", "forked"]


@attrs.frozen
class ComponentReport:
    """
    The state of one background part.
    """

    alive: bool
    last_error: str | None
    #: Seconds since `last_error`, or None.
    last_error_age: float | None
    failures_in_a_row: int


@attrs.frozen
class Health:
    """
    A snapshot of one consumer. Ages are in seconds; None means never.
    """

    state: State
    #: How tasks are found: by the change stream, or by polling alone.
    discovery: Literal["stream", "poll"]
    slots: int
    slots_taken: int
    running: int
    #: Age of the oldest running attempt.
    oldest_attempt_age: float | None
    #: Tasks whose functions run on after their time-out.
    stuck: tuple[str, ...]
    #: Found tasks in memory, and how many of them are due.
    queue_length: int
    queue_due: int
    #: Documents that cannot be handled and were left alone within the last minute.
    set_aside: int
    #: Outcomes that are not stored yet.
    outcomes_waiting: int
    last_event_age: float | None
    stream_age: float | None
    #: Server time minus the monotonic clock, or None before the first contact.
    clock_offset: float | None
    components: Mapping[str, ComponentReport]
    #: Why the consumer has crashed, or None.
    crash: str | None

    @property
    def ok(self) -> bool:
        """
        Whether it runs, every thread lives, and no component is in trouble right now.
        """
        return self.state == "running" and all(
            component.alive and component.failures_in_a_row == 0
            for component in self.components.values()
        )


def take_health(
    *,
    state: State,
    crash: BaseException | None,
    services: Sequence[Service],
    watcher: Watcher | None,
    slots: Slots,
    queue: DelayQueue,
    running: RunningAttempts,
    writer: OutcomeWriter | None,
    candidates: Candidates | None,
    store: TaskStore,
) -> Health:
    now_s = time.monotonic()

    def age(at_s: float | None) -> float | None:
        return None if at_s is None else now_s - at_s

    def report(service: Service) -> ComponentReport:
        health: ComponentHealth = service.health
        return ComponentReport(
            alive=service.alive,
            last_error=health.last_error,
            last_error_age=age(health.last_error_at_s),
            failures_in_a_row=health.failures_in_a_row,
        )

    return Health(
        state=state,
        discovery="stream" if watcher is not None and watcher.is_open else "poll",
        slots=slots.size,
        slots_taken=slots.taken,
        running=running.count,
        oldest_attempt_age=running.oldest_age_s(),
        stuck=tuple(running.stuck_keys()),
        queue_length=len(queue),
        queue_due=queue.count_due(),
        set_aside=candidates.set_aside_count if candidates is not None else 0,
        outcomes_waiting=writer.backlog if writer is not None else 0,
        last_event_age=age(watcher.last_event_at_s) if watcher is not None else None,
        stream_age=age(watcher.last_opened_at_s)
        if watcher is not None and watcher.is_open
        else None,
        clock_offset=store.clock.offset_s,
        components={service.component: report(service) for service in services},
        crash=None if crash is None else f"{crash} ({crash.__cause__!r})"[:500],
    )
