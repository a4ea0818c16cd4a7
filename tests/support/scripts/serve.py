"""
A service: `Consumer.run_forever` in the main thread, with signal handlers of its own before.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from mscheduler_sync import Consumer
from tests.support.scripts.work import OPTIONS, Work, client, handler_names, say, say_report, speak


def mine(number: int, _frame: FrameType | None) -> None:
    say("mine", signal.Signals(number).name)
    if OPTIONS["handler"] == "exit":
        sys.exit(7)


class HitInStart(Consumer):
    """
    Gets a SIGTERM after `run_forever` was called and before a thread was started.
    """

    def start(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        super().start()


def main() -> None:
    speak()
    tasks = client()[sys.argv[2]].tasks
    work = Work(tasks)
    if "handler" in OPTIONS:
        signal.signal(signal.SIGTERM, mine)
    if OPTIONS.get("ignore_interrupt"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    kind = HitInStart if OPTIONS.get("hit_in_start") else Consumer
    consumer = kind(tasks, work, **OPTIONS.get("consumer", {}))
    work.consumer = consumer
    before = handler_names()
    try:
        say_report(consumer.run_forever())
    finally:
        say("state", consumer.state)
        say("handlers", [before, handler_names()])


if __name__ == "__main__":
    main()
