"""
What a consumer tells about itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Literal

import attrs

from mscheduler_sync._runtime.delay_queue import DelayQueue
from mscheduler_sync._runtime.lifecycle import State
from mscheduler_sync._runtime.service import ComponentHealth
from mscheduler_sync._runtime.slots import Slots
from mscheduler_sync._stages.assembly import Assembly
from mscheduler_sync._stages.running import RunningAttempts
from mscheduler_sync._storage.store import TaskStore


@attrs.frozen
class ComponentReport:
    """
    The state of one component: a background thread of the consumer.
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
    quarantined: int
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


def report_of(alive: bool, health: ComponentHealth) -> ComponentReport:
    return ComponentReport(
        alive=alive,
        last_error=health.last_error,
        last_error_age=_age(health.last_error_at_s),
        failures_in_a_row=health.failures_in_a_row,
    )


def crash_text(crash: BaseException | None) -> str | None:
    return None if crash is None else f"{crash} ({crash.__cause__!r})"[:500]


def _age(at_s: float | None) -> float | None:
    return None if at_s is None else time.monotonic() - at_s


def take_health(
    *,
    state: State,
    crash: BaseException | None,
    assembly: Assembly | None,
    slots: Slots,
    queue: DelayQueue,
    running: RunningAttempts,
    store: TaskStore,
) -> Health:
    watcher = assembly.watcher if assembly is not None else None
    is_streaming = watcher is not None and watcher.is_open
    services = assembly.services if assembly is not None else []
    return Health(
        state=state,
        discovery="stream" if is_streaming else "poll",
        slots=slots.size,
        slots_taken=slots.taken,
        running=running.count,
        oldest_attempt_age=running.oldest_age_s(),
        stuck=tuple(running.stuck_keys()),
        queue_length=len(queue),
        queue_due=queue.count_due(),
        quarantined=len(assembly.quarantine) if assembly is not None else 0,
        outcomes_waiting=assembly.writer.backlog if assembly is not None else 0,
        last_event_age=_age(watcher.last_event_at_s) if watcher is not None else None,
        stream_age=_age(watcher.last_opened_at_s) if watcher is not None and is_streaming else None,
        clock_offset=store.clock.offset_s,
        components={one.component: report_of(one.alive, one.health) for one in services},
        crash=crash_text(crash),
    )
