"""
Forks while a consumer runs, and says what the child process sees. ``OPTIONS["scene"]`` chooses.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pymongo.collection import Collection

from mscheduler_sync import Consumer, Producer, StopReport, TaskContext
from tests.support.invariants import Witness
from tests.support.scripts.work import (
    OPTIONS,
    Document,
    client,
    say,
    speak,
    wait_gate,
)

#: A call in a child that takes longer counts as one that never returns.
_HANG_S = 10.0


def in_child(call: Callable[..., object], *arguments: object) -> int:
    """
    Fork; call *call* in the child, which then ends without any clean-up. Return the child's id.
    """
    pid = os.fork()
    if pid == 0:
        # If the call hangs, the test shows where.
        faulthandler.dump_traceback_later(_HANG_S / 2)
        try:
            call(*arguments)
        except BaseException:  # noqa: BLE001 - must not run on as a second parent
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return pid


def has_ended(pid: int, within_s: float) -> bool:
    """
    Wait for the child *pid*; kill it if it takes too long.
    """
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


@contextlib.contextmanager
def held(locks: Mapping[str, Any]) -> Iterator[None]:
    """
    Have another thread hold *locks*, which no call of this process may need meanwhile.
    """
    taken, enough = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for lock in locks.values():
                stack.enter_context(lock)
            taken.set()
            enough.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(10)
    try:
        yield
    finally:
        enough.set()
        thread.join()


def locks_of(one: object, path: str) -> dict[str, Any]:
    """
    Return every lock inside *one* and what it is made of, by its path.
    """
    kinds = (type(threading.Lock()), type(threading.RLock()), threading.Condition)
    found: dict[str, Any] = {}
    seen = {id(one)}
    rooms = [(path, one)]
    while rooms:
        path, room = rooms.pop()
        for name, value in vars(room).items():
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, kinds):
                found[f"{path}.{name}"] = value
            elif type(value).__module__.startswith("mscheduler_sync.") and hasattr(
                value, "__dict__"
            ):
                rooms.append((f"{path}.{name}", value))
    return found


def answer(name: str, call: Callable[[], object]) -> None:
    """
    Say what *call* returns or raises.
    """
    try:
        said = repr(call())
    except Exception as error:  # noqa: BLE001 - the answer is what is wanted
        said = f"{type(error).__name__}: {error}"
    say(name, said)


def calls_of(consumer: Consumer) -> dict[str, Callable[[], object]]:
    """
    What an application may do in a child with the consumer of its parent.
    """

    def entered() -> None:
        with consumer:
            pass

    return {
        "state": lambda: consumer.state,
        "running": lambda: consumer.running,
        "running_count": lambda: consumer.running_count,
        "max_workers": lambda: consumer.max_workers,
        "health.state": lambda: consumer.health().state,
        "health.ok": lambda: consumer.health().ok,
        "start": consumer.start,
        "run_forever": consumer.run_forever,
        "run_until_idle": consumer.run_until_idle,
        "with": entered,
        "wait_for_event": lambda: consumer.wait_for_event(lambda _: True),
        "subscribe": lambda: list(consumer.subscribe()),
        "request_stop": consumer.request_stop,
        "stop": consumer.stop,
        "stop again": lambda: consumer.stop(timeout=5),
        "threads": lambda: [t.name for t in threading.enumerate() if t.name.startswith("ms-")],
    }


def scene_calls(tasks: Collection[Document], witness: Witness) -> None:
    """
    The child calls everything that a consumer has, while another thread of the parent held a lock.
    """
    consumer = Consumer(tasks, lambda _: None)
    producer = Producer(tasks)
    producer.send("before")
    with consumer:
        assert consumer.wait_started(20)
        locks = {**locks_of(consumer, "consumer"), **locks_of(producer, "producer")}
        say("locks", sorted(locks))
        calls = calls_of(consumer)
        key = "in the child"
        calls["get"] = lambda: producer.get("before") is not None
        calls["count"] = lambda: producer.count() > 0
        calls["send"] = lambda: producer.send(key).key
        for name, call in calls.items():
            # The locks are not held while the child answers for the parent: it has copies.
            with held(locks):
                pid = in_child(answer, name, call)
            if not has_ended(pid, _HANG_S):
                say(name, "it hangs")
        say("parent", [consumer.state, consumer.health().ok])
        assert consumer.run_until_idle(20)


def scene_send(tasks: Collection[Document], witness: Witness) -> None:
    """
    Children send with the parent's producer; the parent's consumer runs what they send.
    """
    producer = Producer(tasks)

    def send(number: int) -> None:
        for n in range(10):
            producer.send(f"{number}-{n}")

    def work(_: Any, context: TaskContext) -> int:
        with witness.running(context):
            return os.getpid()

    with Consumer(tasks, work) as consumer:
        assert consumer.wait_started(20)
        ends = [has_ended(in_child(send, n), 30) for n in range(3)]
        processes = multiprocessing.get_context("fork")
        several = [processes.Process(target=send, args=(n,)) for n in range(3, 6)]
        for process in several:
            process.start()
        for process in several:
            process.join(30)
        say("ends", [*ends, *(process.exitcode for process in several)])
        producer.send("parent")
        assert consumer.run_until_idle(30)
        say("pids", sorted({producer.result(f"{n}-{m}") for n in range(6) for m in range(10)}))
        say("me", os.getpid())
        say("state", [consumer.state, consumer.health().ok])
    say("report", [consumer.stop() == StopReport()])


def scene_consume(tasks: Collection[Document], witness: Witness) -> None:
    """
    A child makes a consumer of its own on a client of its own, beside that of the parent.
    """

    def work(_: Any, context: TaskContext) -> int:
        with witness.running(context):
            return os.getpid()

    def child() -> None:
        own = client()[tasks.database.name].tasks
        with Consumer(own, work, worker_id="child") as consumer:
            say("child idle", consumer.run_until_idle(30))
        say("child is", os.getpid())

    producer = Producer(tasks)
    with Consumer(tasks, work, worker_id="parent") as consumer:
        assert consumer.wait_started(20)
        producer.send_many([(f"c{n}", None, {"worker_ids": ["child"]}) for n in range(10)])
        say("ended", has_ended(in_child(child), 60))
        producer.send_many([(f"p{n}", None, {"worker_ids": ["parent"]}) for n in range(10)])
        assert consumer.run_until_idle(30)
        say("by child", sorted({producer.result(f"c{n}", 10) for n in range(10)}))
        say("by parent", sorted({producer.result(f"p{n}", 10) for n in range(10)}))
        say("parent is", os.getpid())


def scene_outlive(tasks: Collection[Document], witness: Witness) -> None:
    """
    A function forks a process that outlives the consumer's.
    """

    def work(_: Any, context: TaskContext) -> None:
        with witness.running(context):
            say("child", in_child(time.sleep, 60))
            wait_gate("never")

    Consumer(tasks, work).run_forever()


def scene_exit(tasks: Collection[Document], witness: Witness) -> None:
    """
    A child ends as programs do: it runs the handlers of the interpreter's exit.
    """

    def work(_: Any, context: TaskContext) -> str:
        with witness.running(context):
            say("began", context.key)
            wait_gate(context.key)
            return "kept"

    consumer = Consumer(tasks, work)
    consumer.start()
    wait_gate("fork")
    pid = os.fork()
    if pid == 0:
        # Leaves through the end of main, with the parent's consumer in hand.
        return
    say("child ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    say("parent", [consumer.state, consumer.running_count])
    wait_gate("end")
    say("report", list(consumer.stop().finished))


class WebWorker:
    """
    What a web server's process does that was forked from a master with the application loaded.
    """

    def __init__(self, producer: Producer, consumer: Consumer) -> None:
        self.producer, self.consumer = producer, consumer

    def serve(self, number: int) -> None:
        keys = [self.producer.send(None, number).key for _ in range(10)]
        say(f"worker {number}", [self.consumer.running, self.consumer.state])
        for key in keys:
            self.producer.result(key, 30)
        say(f"served {number}", len(keys))


def scene_preload(tasks: Collection[Document], witness: Witness) -> None:
    """
    A master loads the application and forks web workers. The consumer is started in the master.
    """

    def work(_: Any, context: TaskContext) -> int:
        with witness.running(context):
            return os.getpid()

    producer, consumer = Producer(tasks), Consumer(tasks, work)
    consumer.start()
    web = WebWorker(producer, consumer)
    pids = [in_child(web.serve, n) for n in range(3)]
    say("ended", [has_ended(pid, 60) for pid in pids])
    say("me", os.getpid())
    say("state", consumer.state)
    consumer.stop()


def scene_post_fork(tasks: Collection[Document], witness: Witness) -> None:
    """
    The same, but the consumer of the module is started in each worker (its post-fork hook).
    """

    def work(_: Any, context: TaskContext) -> int:
        with witness.running(context):
            return os.getpid()

    producer, consumer = Producer(tasks), Consumer(tasks, work)
    web = WebWorker(producer, consumer)

    def worker(number: int) -> None:
        consumer.start()
        say(f"id {number}", consumer.worker_id)
        web.serve(number)
        say(f"report {number}", [consumer.stop().abandoned == ()])

    pids = [in_child(worker, n) for n in range(3)]
    say("ended", [has_ended(pid, 60) for pid in pids])
    say("pids", pids)
    say("state", consumer.state)


if __name__ == "__main__":
    speak()
    database = client()[sys.argv[2]]
    globals()[f"scene_{OPTIONS['scene']}"](database.tasks, Witness(database.witness))
