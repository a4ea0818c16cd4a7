"""
What has threads in this process: stopped at the interpreter's exit, disowned in a forked child.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from typing import Final, Protocol

from mscheduler_sync.errors import ComponentCrashed


class Living(Protocol):
    """
    Something with threads of its own.
    """

    def stop(self) -> object: ...

    def become_child(self) -> None:
        """
        This process is a forked child: none of the threads is here, locks may be held for ever.
        """


_living: Final[weakref.WeakSet[Living]] = weakref.WeakSet()


def add(one: Living) -> None:
    _living.add(one)


def discard(one: Living) -> None:
    _living.discard(one)


def _after_fork_in_child() -> None:
    for one in list(_living):
        one.become_child()


def _stop_all() -> None:
    """
    At interpreter exit: an orderly stop of whatever still runs in this process.
    """
    for one in list(_living):
        with contextlib.suppress(ComponentCrashed):
            one.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

# Best before the pools of concurrent.futures are joined: functions can still be told to end,
# outcomes be stored, and nothing is claimed that cannot run any more. That hook has no public
# name; without it the stop comes after the join.
_register_early = getattr(threading, "_register_atexit", None)
if _register_early is not None:
    _register_early(_stop_all)
atexit.register(_stop_all)
