"""
Named places where a test can have the process killed, as if by the system.

Armed only by the environment variable ``MSCHEDULER_CRASH_POINT`` at import; without
it a place costs one comparison.
"""

from __future__ import annotations

import os
import signal
from typing import Final

#: In the order of an attempt's life.
CRASH_POINTS: Final = (
    "after_claim",
    "before_submit",
    "before_function",
    "after_function",
    "after_outcome",
    "before_event",
)
_ARMED: Final = os.environ.get("MSCHEDULER_CRASH_POINT")


def reach(name: str) -> None:
    """
    Kill this process (SIGKILL) if the place *name* is armed.
    """
    if _ARMED is not None and name == _ARMED:
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
