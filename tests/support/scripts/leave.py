"""
A program that ends while its consumer runs. ``OPTIONS["way"]`` says how its main thread ends.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

from mscheduler_sync import Consumer
from tests.support.scripts.work import (
    OPTIONS,
    Work,
    client,
    say,
    say_report,
    speak,
    wait_begun,
    wait_gate,
)


def log_to(stream: io.TextIOBase) -> None:
    handler = logging.StreamHandler(stream)
    log = logging.getLogger("mscheduler_sync")
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)


def leave(consumer: Consumer, way: str) -> None:
    if way == "exit":
        sys.exit(3)
    if way == "raise":
        raise KeyError("mine")
    if way == "in_with":
        with consumer:
            wait_begun()
            raise KeyError("mine")
    if way == "interrupted":
        # Ctrl-C in the block, then Ctrl-C again while leaving it waits.
        threading.Thread(target=interrupt_twice, args=(consumer,), daemon=True).start()
        with consumer:
            time.sleep(60)
    if way in {"daemon_thread", "thread"}:
        thread = threading.Thread(
            target=lambda: say_report(consumer.run_forever()), daemon=way == "daemon_thread"
        )
        thread.start()
        wait_begun()


def interrupt_twice(consumer: Consumer) -> None:
    wait_begun()
    os.kill(os.getpid(), signal.SIGINT)
    while consumer.state != "stopping":
        time.sleep(0.01)
    time.sleep(0.2)
    say("interrupts", 2)
    os.kill(os.getpid(), signal.SIGINT)


def main() -> None:
    way, where = OPTIONS["way"], OPTIONS.get("log", "speak")
    tasks = client()[sys.argv[2]].tasks
    work = Work(tasks)
    consumer = Consumer(tasks, work, **OPTIONS.get("consumer", {}))
    if where == "speak":
        speak()
    stream = Path("log").open("w") if where == "closed" else None  # noqa: SIM115 - closed below
    if stream is not None:
        log_to(stream)
    if where == "stderr_closed":
        log_to(sys.stderr)  # type: ignore[arg-type]
    if way not in {"in_with", "interrupted", "daemon_thread", "thread"}:
        consumer.start()
        if OPTIONS["begun"]:
            wait_begun()
        elif OPTIONS.get("started", True):
            assert consumer.wait_started(30)
    if "gate" in OPTIONS:
        wait_gate(OPTIONS["gate"])
    if stream is not None:
        stream.close()
    if where == "stderr_closed":
        sys.stderr.close()
    say("leaving", way)
    leave(consumer, way)


if __name__ == "__main__":
    main()
