"""
A service whose functions fork processes by multiprocessing, and terminate them.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from typing import Any

from mscheduler_sync import Consumer, TaskContext
from tests.support.scripts.work import client, say, speak


def wait_for_ever(begun: Any) -> None:
    begun.set()
    time.sleep(60)


def work(params: Any, context: TaskContext) -> None:
    processes = multiprocessing.get_context("fork")
    begun = processes.Event()
    process = processes.Process(target=wait_for_ever, args=(begun,))
    process.start()
    assert begun.wait(20)
    process.terminate()
    # Starting a process in one thread reaps those of all others: join may find nothing to wait for
    # before the exit code is known.
    end_s = time.monotonic() + 20
    while process.exitcode is None and time.monotonic() < end_s:
        process.join(0.1)
    say(context.key, process.exitcode)
    process.kill()


if __name__ == "__main__":
    speak()
    Consumer(client()[sys.argv[2]].tasks, work).run_forever()
