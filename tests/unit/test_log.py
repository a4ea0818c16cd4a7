"""
Loggers, and the rate limit of repeated messages.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mscheduler_sync._runtime.log import LogThrottle, logger
from tests.support import wait_until


def test_loggers_are_named_by_component(caplog: pytest.LogCaptureFixture) -> None:
    """
    The names are part of the public surface, whatever file the code is in.
    """
    logger("watch").warning("polling", event="polling")
    assert [(r.name, r.message, r.levelname) for r in caplog.records] == [
        ("mscheduler_sync.watch", "polling", "WARNING")
    ]


class _Broken(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise ValueError("the stream is closed")


def test_a_handler_that_raises_hurts_nobody() -> None:
    """
    The application's logging may be broken; a thread that tells something must not die of it.
    """
    target = logging.getLogger("mscheduler_sync.watch")
    broken = _Broken()
    target.addHandler(broken)
    try:
        logger("watch").error("told", event="told", exc_info=OSError("x"))
    finally:
        target.removeHandler(broken)


def test_a_program_without_logging_sees_nothing() -> None:
    """
    A library does not write to standard error by itself.
    """
    code = (
        "from mscheduler_sync._runtime.log import logger\n"
        "logger('store').error('the database is in trouble', event='store_trouble')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_a_complaint_is_new_once() -> None:
    """
    Within the interval each subject is told once; other subjects are independent.
    """
    throttle = LogThrottle()
    assert [throttle.allows("a") for _ in range(3)] == [True, False, False]
    assert throttle.allows("b")
    assert throttle.allows(("store", KeyError))
    assert not throttle.allows(("store", KeyError))


def test_a_complaint_is_new_again_after_the_interval() -> None:
    """
    Asking does not prolong the silence.
    """
    throttle = LogThrottle(0.05)
    assert throttle.allows("a")
    wait_until(lambda: throttle.allows("a"), "the interval is over")
    assert not throttle.allows("a")


def test_the_memory_is_bounded() -> None:
    """
    With too many subjects the oldest are forgotten.
    """
    throttle = LogThrottle(60.0, size=3)
    assert all(throttle.allows(number) for number in range(10))
    assert not throttle.allows(9)
    assert throttle.allows(0)


def test_one_thread_of_many_complains() -> None:
    """
    Of threads that log one thing at once, one is told that it is new.
    """
    throttle = LogThrottle()
    start = threading.Barrier(8)

    def is_allowed(_: int) -> int:
        start.wait(10)
        return sum(throttle.allows(number) for number in range(100))

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(is_allowed, range(8))) == 100
