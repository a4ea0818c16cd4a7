"""
The measures by name, in the order of the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from benchmarks.figures import Row
from benchmarks.measures import backlog, footprint, growth, idle, latency, running, send
from benchmarks.setting import Bench

MEASURES: Final[dict[str, Callable[[Bench], list[Row]]]] = {
    "send": send.run,
    "backlog": backlog.run,
    "latency": latency.run,
    "idle": idle.run,
    "running": running.run,
    "growth": growth.run,
    "memory": footprint.run,
}
