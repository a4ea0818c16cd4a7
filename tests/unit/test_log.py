"""
Loggers, and the rate limit of repeated complaints.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mscheduler_sync._runtime.log import Complaints, logger
from tests.support import wait_until


def test_loggers_are_named_by_component() -> None:
    """
    The names are part of the public surface, whatever file the code is in.
    """
    assert logger("watch") is logging.getLogger("mscheduler_sync.watch")


def test_a_program_without_logging_sees_nothing() -> None:
    """
    A library does not write to standard error by itself.
    """
    code = (
        "from mscheduler_sync._runtime.log import logger\n"
        "logger('store').error('the database is in trouble')\n"
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
    complaints = Complaints()
    assert [complaints.is_new("a") for _ in range(3)] == [True, False, False]
    assert complaints.is_new("b")
    assert complaints.is_new(("store", KeyError))
    assert not complaints.is_new(("store", KeyError))


def test_a_complaint_is_new_again_after_the_interval() -> None:
    """
    Asking does not prolong the silence.
    """
    complaints = Complaints(0.05)
    assert complaints.is_new("a")
    wait_until(lambda: complaints.is_new("a"), "the interval is over")
    assert not complaints.is_new("a")


def test_the_memory_is_bounded() -> None:
    """
    With too many subjects the oldest are forgotten.
    """
    complaints = Complaints(60.0, size=3)
    assert all(complaints.is_new(number) for number in range(10))
    assert not complaints.is_new(9)
    assert complaints.is_new(0)


def test_one_thread_of_many_complains() -> None:
    """
    Of threads that complain of one thing at once, one is told that it is new.
    """
    complaints = Complaints()
    start = threading.Barrier(8)

    def complain(_: int) -> int:
        start.wait(10)
        return sum(complaints.is_new(number) for number in range(100))

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(complain, range(8))) == 100
