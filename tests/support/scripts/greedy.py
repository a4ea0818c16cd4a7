"""
A service whose function keeps the GIL: no other thread of this process runs meanwhile.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

from mscheduler_sync import AttemptEnded, AttemptLost, Consumer, TaskContext
from tests.support.invariants import Witness
from tests.support.scripts.work import client, say, say_report, speak


def main() -> None:
    speak()
    # Calls through PyDLL do not release the GIL.
    usleep = ctypes.PyDLL(None).usleep
    database = client()[sys.argv[2]]
    witness = Witness(database.witness)

    def work(params: Any, context: TaskContext) -> str:
        with witness.running(context):
            say("began", context.key)
            usleep(round(params["seconds"] * 1_000_000))
            return f"greedy {os.getpid()}"

    consumer = Consumer(database.tasks, work, worker_id="greedy")
    with consumer.subscribe(AttemptLost, AttemptEnded) as events:
        consumer.start()
        event = events.get(60)
        say("event", type(event).__name__)
    consumer.request_stop()
    say_report(consumer.run_forever())


if __name__ == "__main__":
    main()
