"""
What child processes do on an idle system: be consumers that wait, or that hold their tasks.

Each function is called with the line to the parent.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from benchmarks import floor
from benchmarks.children import Line
from benchmarks.counting import CommandCounter, LostClaims
from benchmarks.work import TASKS, Stopwatch, attached, contact
from mscheduler_sync import Consumer

#: A busy machine takes its time.
_PATIENCE_S: Final = 180.0


def serve(line: Line, uri: str, database: str, consumers: int, slots: int, kind: str) -> None:
    """
    Be idle consumers until told ``stop``; say ``ready``, and a report at each ``count``.

    With *kind* ``"tell"`` the functions say the task's number and when they began; with
    ``"hold"`` they wait until the parent says ``release``.
    """
    counter, lost = CommandCounter(), LostClaims()
    lock = threading.Lock()
    released = threading.Event()
    running = 0

    def tell(params: Any) -> None:
        line.say((params["number"], time.monotonic()))

    def hold(_params: Any) -> None:
        nonlocal running
        with lock:
            running += 1
        released.wait()
        with lock:
            running -= 1

    function: Callable[[Any], None] = hold if kind == "hold" else tell
    with contact(uri, counter) as client, attached(lost, kind == "tell"):
        members = [
            Consumer(client[database][TASKS], function, max_workers=slots) for _ in range(consumers)
        ]
        for member in members:
            member.start()
        try:
            for member in members:
                _wait(functools.partial(_is_settled, member), "the consumers are idle")
            line.say("ready")
            watch = Stopwatch(counter, lost)
            while (order := line.hear()) != "stop":
                if order == "count":
                    with lock:
                        line.say(watch.report(running))
                    watch = Stopwatch(counter, lost)
                elif order == "release":
                    released.set()
                    _wait(lambda: not any(m.running_count for m in members), "the tasks ended")
                    released.clear()
                    line.say("released")
                else:
                    wanted: int = order
                    _wait(lambda: running >= wanted, "the tasks run")  # noqa: B023 - at once
                    line.say("running")
        finally:
            released.set()
            for member in members:
                member.request_stop()
            for member in members:
                member.stop()


def _is_settled(consumer: Consumer) -> bool:
    return consumer.wait_started(0) and consumer.health().discovery == "stream"


def _sending_heartbeats() -> int:
    return sum(thread.name.startswith("ms-heartbeat:") for thread in threading.enumerate())


def _wait(
    condition: Callable[[], object], description: str, timeout_s: float = _PATIENCE_S
) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            msg = f"not within {timeout_s:g} s: {description}"
            raise TimeoutError(msg)
        time.sleep(0.01)


def echo(line: Line, uri: str, database: str) -> None:
    """
    The floor of a start: a bare change stream and one update, until told ``stop``.
    """
    stopping = threading.Event()
    counter = CommandCounter()
    with contact(uri, counter) as client:
        collection = floor.durable(client[database]["floor"])
        with floor.open_stream(collection) as stream:
            line.say("ready")

            def run() -> None:
                while not stopping.is_set():
                    started = floor.next_started(stream, collection)
                    if started is not None:
                        line.say(started)

            thread = threading.Thread(target=run)
            thread.start()
            watch = Stopwatch(counter, None)
            while line.hear() != "stop":
                line.say(watch.report())
                watch = Stopwatch(counter, None)
            stopping.set()
            thread.join()


def resident_bytes() -> int | None:
    """
    Return how much memory this process has, or None if the system does not say.
    """
    gc.collect()
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def hold_memory(line: Line, uri: str, database: str, slots: int) -> None:
    """
    Say the memory of an idle consumer; then, as told, with running tasks and with waiting ones.
    """
    released = threading.Event()
    lock = threading.Lock()
    running = 0

    def hold(_params: Any) -> None:
        nonlocal running
        with lock:
            running += 1
        released.wait()

    with contact(uri) as client:
        consumer = Consumer(client[database][TASKS], hold, max_workers=slots)
        consumer.start()
        try:
            _wait(lambda: _is_settled(consumer), "the consumer is idle")
            line.say(resident_bytes())
            if (wanted := line.hear()) != "stop":
                _wait(lambda: running >= wanted, "the tasks run")
                # What a heartbeat takes belongs to a running task, if it takes anything.
                with contextlib.suppress(TimeoutError):
                    _wait(
                        lambda: _sending_heartbeats() >= wanted, "the tasks send heartbeats", 10.0
                    )
                time.sleep(3.0)
                line.say(resident_bytes())
                wanted = line.hear()
                _wait(lambda: consumer.health().queue_length >= wanted, "the tasks wait here")
                line.say(resident_bytes())
                line.hear()
        finally:
            consumer.request_stop()
            released.set()
            consumer.stop()


def bare_threads(_line: Line, count: int) -> int | None:
    """
    Return how much memory *count* threads of a pool take that wait for an event.
    """
    before = resident_bytes()
    released = threading.Event()
    with ThreadPoolExecutor(count) as pool:
        for _ in range(count):
            pool.submit(released.wait)
        time.sleep(0.5)
        after = resident_bytes()
        released.set()
    return None if before is None or after is None else after - before
