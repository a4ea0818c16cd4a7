"""
What becomes of documents that cannot be handled.
"""

from __future__ import annotations

import pytest

from mscheduler_sync._runtime.delay_queue import DelayQueue
from mscheduler_sync._stages.quarantine import QUARANTINE_S, Quarantine
from mscheduler_sync.events import Event, EventHub, TaskQuarantined


def test_key_is_set_aside_for_its_time(caplog: pytest.LogCaptureFixture) -> None:
    """
    It leaves the queue, is told with its reason once per interval, and comes back after that.
    """
    now_s = 1000.0
    queue, hub = DelayQueue(10), EventHub()
    events = hub.subscribe()
    quarantine = Quarantine(queue=queue, hub=hub, timer=lambda: now_s)
    queue.push("bad", 0.0)
    queue.push("good", 0.0)

    def told() -> list[Event]:
        found = []
        while (event := events.get(0)) is not None:
            found.append(event)
        return found

    quarantine.add("bad", "no lease")
    assert ("bad" in queue, "good" in queue) == (False, True)
    assert ("bad" in quarantine, "good" in quarantine) == (True, False)
    assert len(quarantine) == 1
    assert told() == [TaskQuarantined(key="bad", reason="no lease")]
    (record,) = caplog.records
    assert (record.levelname, record.__dict__["event"]) == ("ERROR", "quarantined")
    assert (record.__dict__["task_key"], record.__dict__["reason"]) == ("bad", "no lease")

    now_s += QUARANTINE_S / 2
    quarantine.add("bad", "no lease")
    assert told() == []
    # Set aside anew, though nothing was said.
    now_s += QUARANTINE_S * 3 / 4
    assert "bad" in quarantine
    now_s += QUARANTINE_S
    assert "bad" not in quarantine
    assert len(quarantine) == 0
    quarantine.add("bad", "still no lease")
    assert told() == [TaskQuarantined(key="bad", reason="still no lease")]
