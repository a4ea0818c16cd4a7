"""
The main job on real input: parse the standard library, and lose a worker on the way.

    make demo                                (or: python examples/demo.py)

Two worker processes of four threads each parse every module of the running interpreter's
standard library, one task per file. Half-way one of them is killed with SIGKILL while it holds
tasks. Once their leases end, the other workers take these tasks over, and nothing is missing at
the end: every result is compared with what this process computes by itself.

Runs on the embedded server; set MSCHEDULER_URI to use another. Linux and macOS only.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import tokenize
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pymongo
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.errors import PyMongoError

from mscheduler_sync import Consumer, MSchedulerError, Producer, Task
from mscheduler_sync.embedded import open_server

STDLIB = Path(sysconfig.get_path("stdlib"))
NOT_PARSED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
THREADS = 4
LEASE_S, HEARTBEAT_S = 6.0, 1.0
VICTIM = "worker-2"
#: In Python 3.11 two threads inside ast.parse now and then make it fail with a SystemError.
one_at_a_time = threading.Lock()
#: With fewer files than this everything is done too soon.
FEWEST = 50
#: Without any task finished for so long, something is wrong.
PATIENCE_S = 60.0


# -- the job, in the worker processes --------------------------------------------------------------


def parse(params: dict[str, str]) -> dict[str, Any]:
    """
    The task: what is in one source file? Repeating it does no harm, as every task should.
    """
    source = (STDLIB / params["path"]).read_bytes()
    with one_at_a_time:
        tree = ast.parse(source)
    nodes = Counter(type(node) for node in ast.walk(tree))
    return {
        "lines": len(source.splitlines()),
        "tokens": sum(1 for _ in tokenize.tokenize(io.BytesIO(source).readline)),
        "functions": nodes[ast.FunctionDef] + nodes[ast.AsyncFunctionDef],
        "classes": nodes[ast.ClassDef],
        "sha256": hashlib.sha256(source).hexdigest(),
    }


def work(uri: str, database: str, worker_id: str) -> None:
    """
    A worker process, from its start until SIGTERM or the death of its parent.
    """
    client: MongoClient[dict[str, Any]] = MongoClient(uri)
    with client:
        consumer = Consumer(client[database].tasks, parse, worker_id=worker_id, max_workers=THREADS)

        def stop_with_parent() -> None:
            os.read(sys.stdin.fileno(), 1)  # the parent only ever closes this pipe
            consumer.request_stop()

        threading.Thread(target=stop_with_parent, daemon=True).start()
        consumer.run_forever()


# -- the parent process: sends the tasks, kills a worker, checks the results -----------------------


def demonstrate(tasks: Collection[Any], uri: str, paths: Sequence[str], screen: Screen) -> bool:
    """
    Run the whole demonstration; return whether everything came out as it should.
    """
    producer = Producer(tasks)
    began_s = time.monotonic()
    with Fleet(uri, tasks.database.name) as fleet:
        fleet.start("worker-1")
        fleet.start(VICTIM)
        sent = producer.send_many(
            [(f"parse:{path}", {"path": path}) for path in paths],
            lease=LEASE_S,
            heartbeat=HEARTBEAT_S,
        )
        failures = [result for result in sent if not result.inserted]
        if failures:
            raise SystemExit(f"not sent: {failures[0]}")
        screen.say(f"{len(sent)} tasks sent; worker-1 and {VICTIM} have {THREADS} threads each")

        def half_done() -> bool:
            return screen.progress(producer.count(status="succeeded")) >= len(paths) // 2

        fleet.wait_until(half_done, screen)
        held = fleet.kill_at_work(VICTIM, producer, screen)
        fleet.start("worker-3")
        screen.say(f"{VICTIM} was killed (SIGKILL) while it held {count_of(held, 'task')}:")
        for key in held:
            screen.say(f"  {key}")
        screen.say(f"worker-3 starts; a lease of {LEASE_S:g} s, counted from the claim, ends first")

        def all_done() -> bool:
            done = screen.progress(producer.count(status="succeeded"))
            for key in list(held):
                taken_over = takeover(producer.get(key))
                if taken_over is not None:
                    held.remove(key)
                    worker_id, after_s = taken_over
                    screen.say(f"  {key}  taken over by {worker_id} after {after_s:.1f} s")
            return done == len(paths)

        fleet.wait_until(all_done, screen)
        took_s = time.monotonic() - began_s
        screen.say("all tasks have succeeded; the workers stop (SIGTERM)")
    for worker_id in fleet.not_ended_well:
        screen.say(f"FAILED: {worker_id} did not end by itself within 10 s, or not with status 0")
    return check(producer, paths, took_s, screen) and not fleet.not_ended_well


def takeover(task: Task | None) -> tuple[str, float] | None:
    """
    Return who took the task over from the victim, and how long after the victim's claim; or None.
    """
    if task is not None:
        # The document keeps every attempt, in the order of their claims.
        for lost, next_one in zip(task.attempts, task.attempts[1:], strict=False):
            has_expired = (lost.fail_reason or "").startswith("LeaseExpired")
            if lost.worker_id == VICTIM and has_expired and lost.claimed_at and next_one.claimed_at:
                return next_one.worker_id, (next_one.claimed_at - lost.claimed_at).total_seconds()
    return None


def check(producer: Producer, paths: Sequence[str], took_s: float, screen: Screen) -> bool:
    """
    Compare every result with a direct computation, print the figures, say whether all is well.
    """
    screen.say("computing the same here, without workers, to compare ...")
    totals: Counter[str] = Counter()
    expected_totals: Counter[str] = Counter()
    differences = []
    for path in paths:
        result, expected = producer.result(f"parse:{path}", timeout=0), parse({"path": path})
        if result != expected:
            differences.append(path)
        for figures, sums in ((result, totals), (expected, expected_totals)):
            sums.update({name: value for name, value in figures.items() if name != "sha256"})
    stored = producer.list(limit=10_000)
    attempts = [attempt for task in stored for attempt in task.attempts]
    by_worker = Counter(attempt.worker_id for attempt in attempts if attempt.succeeded_at)
    takeovers = sum(1 for task in stored if takeover(task) is not None)
    # An overloaded machine may keep a living worker from its heartbeats; that is seen here.
    other_failures = [
        f"{task.key}, {attempt.worker_id}: {(attempt.fail_reason or '').partition(chr(10))[0]}"
        for task in stored
        for attempt in task.attempts
        if attempt.failed_at and attempt.worker_id != VICTIM
    ]

    screen.say("")
    for name, total in totals.items():
        agrees = "as computed here" if total == expected_totals[name] else "WRONG"
        screen.say(f"  {name:<10}{total:>10,}  {agrees}")
    screen.say(f"  {'results':<10}{len(paths):>10,}  {len(differences)} differ from those here")
    screen.say(f"  {'attempts':<10}{len(attempts):>10,}  {takeovers} taken over from {VICTIM}")
    for failure in other_failures:
        screen.say(f"  also failed: {failure}")
    for worker_id, successes in sorted(by_worker.items()):
        screen.say(f"  {worker_id:<10}{successes:>10,}  tasks")
    screen.say(f"  {'seconds':<10}{took_s:>10.1f}  {len(paths) / took_s:.0f} tasks a second")
    screen.say("")
    problems = []
    if differences or totals != expected_totals:
        problems.append(f"results differ: {', '.join(differences[:10])}")
    if sorted(task.key for task in stored) != sorted(f"parse:{path}" for path in paths):
        problems.append("the collection holds other tasks than were sent")
    if sum(by_worker.values()) != len(paths):
        problems.append(f"{sum(by_worker.values())} successes are stored, not {len(paths)}")
    if not takeovers:
        problems.append("no task was taken over")
    for problem in problems:
        screen.say(f"FAILED: {problem}")
    if not problems:
        screen.say("OK: a worker died, no task was lost, none has two results.")
        screen.say("Next: README.md, the pages in docs/, and examples/quickstart.py.")
    return not problems


class Fleet:
    """
    The worker processes. Leaving the block ends them all, whatever has happened.
    """

    def __init__(self, uri: str, database: str) -> None:
        self._uri, self._database = uri, database
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self._pause = threading.Event()
        self.not_ended_well: list[str] = []

    def __enter__(self) -> Fleet:
        return self

    def start(self, worker_id: str) -> None:
        command = [sys.executable, __file__, "--worker", self._uri, self._database, worker_id]
        # In a session of its own: Ctrl-C goes to the parent, which then ends the workers in order.
        self._workers[worker_id] = subprocess.Popen(
            command, stdin=subprocess.PIPE, start_new_session=True
        )

    def wait_until(
        self, done: Callable[[], bool], screen: Screen, *, pause_s: float = 0.25
    ) -> None:
        """
        Wait until *done*, as long as the workers live and something moves.
        """
        while not done():
            for worker_id, process in self._workers.items():
                if process.poll() is not None:
                    raise SystemExit(f"\n{worker_id} ended with status {process.returncode}")
            if screen.seconds_without_progress > PATIENCE_S:
                raise SystemExit(f"\nnothing was finished for {PATIENCE_S:g} s")
            self._pause.wait(pause_s)

    def kill_at_work(self, worker_id: str, producer: Producer, screen: Screen) -> list[str]:
        """
        SIGKILL a worker while it holds tasks; return their keys.
        """
        process = self._workers[worker_id]
        held: list[str] = []

        def caught() -> bool:
            # It must not finish anything while we look; what it has sent already arrives first.
            process.send_signal(signal.SIGSTOP)
            self._pause.wait(0.2)
            held[:] = held_by(worker_id, producer)
            process.send_signal(signal.SIGKILL if held else signal.SIGCONT)
            if screen.progress(producer.count(status="succeeded")) == screen.total:
                raise SystemExit(f"\nall tasks were done before {worker_id} could be killed")
            return bool(held)

        self.wait_until(caught, screen, pause_s=0.05)
        self._end(self._workers.pop(worker_id))
        return held

    def __exit__(self, *_: object) -> None:
        for process in self._workers.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for worker_id, process in self._workers.items():
            if self._end(process) != 0:
                self.not_ended_well.append(worker_id)

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        assert process.stdin is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.stdin.close()
        return process.wait()


def held_by(worker_id: str, producer: Producer) -> list[str]:
    """
    The keys of the tasks that *worker_id* runs, by what stands in their documents.
    """
    return [
        task.key
        for task in producer.list(status="running", limit=1000)
        if any(attempt.worker_id == worker_id and attempt.is_open for attempt in task.attempts)
    ]


def count_of(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}" if len(things) == 1 else f"{len(things)} {name}s"


class Screen:
    """
    A progress bar on a terminal; elsewhere a line for every tenth of the work.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._done = 0
        self._began_s = self._moved_at_s = time.monotonic()

    @property
    def seconds_without_progress(self) -> float:
        return time.monotonic() - self._moved_at_s

    def progress(self, done: int) -> int:
        """
        Show that *done* tasks are done; return *done*.
        """
        before = self._done
        if done > before:
            self._done, self._moved_at_s = done, time.monotonic()
        if self._is_terminal:
            self._draw()
            if before < done == self.total:
                print()
        elif done * 10 // self.total > before * 10 // self.total:
            print(self._text(), flush=True)
        return done

    def say(self, line: str) -> None:
        print(f"\r\x1b[K{line}" if self._is_terminal else line, flush=True)
        if self._is_terminal and self._done < self.total:
            self._draw()

    def _text(self) -> str:
        percent = self._done * 100 // self.total
        elapsed_s = time.monotonic() - self._began_s
        return f"{percent:3d} %  {self._done} of {self.total} files  {elapsed_s:.1f} s"

    def _draw(self) -> None:
        text = self._text()
        columns = shutil.get_terminal_size().columns or 80  # 0: the terminal does not know
        width = min(40, columns - len(text) - 4)
        filled = width * self._done // self.total
        bar = f"[{'#' * filled}{'.' * (width - filled)}] " if width > 0 else ""
        print(f"\r\x1b[K{bar}{text}", end="", flush=True)


def stdlib_files() -> list[str]:
    """
    The modules of the standard library, largest first, as paths below it.
    """
    found = [
        path
        for path in STDLIB.rglob("*.py")
        if not NOT_PARSED.intersection(path.relative_to(STDLIB).parts[:-1])
    ]
    found.sort(key=lambda path: (-path.stat().st_size, path))
    return [path.relative_to(STDLIB).as_posix() for path in found]


@contextlib.contextmanager
def scratch_collection(uri: str) -> Iterator[Collection[Any]]:
    """
    A collection in a database of its own, which is dropped at the end.
    """
    client: MongoClient[dict[str, Any]] = MongoClient(uri)
    with client:
        database = client[f"mscheduler_demo_{uuid.uuid4().hex[:12]}"]
        try:
            yield database.tasks
        finally:
            with contextlib.suppress(PyMongoError), pymongo.timeout(5):
                client.drop_database(database)


def main() -> int:
    parser = argparse.ArgumentParser(description="Parse the standard library and lose a worker.")
    parser.add_argument("--limit", type=int, help="take only the N largest files", metavar="N")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(*options.worker)
        return 0
    if options.limit is not None and options.limit < FEWEST:
        parser.error(f"N must be at least {FEWEST}, so that there is time to kill a worker")
    paths = stdlib_files()[: options.limit]
    if not paths:
        parser.error(f"there are no source files in {STDLIB}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    screen = Screen(len(paths))
    try:
        screen.say(f"{count_of(paths, 'file')} in {STDLIB}; starting the server ...")
        with open_server() as uri, scratch_collection(uri) as tasks:
            return 0 if demonstrate(tasks, uri, paths, screen) else 1
    except KeyboardInterrupt:
        print("\ninterrupted; all that was started has been stopped", file=sys.stderr)
        return 130
    except MSchedulerError as error:
        print(f"\nthe demonstration cannot go on: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read this has gone; nothing may be written at the exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
