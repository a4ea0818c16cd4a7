"""
What the fault tests share: one consumer under observation, and faults that hit one part of it.

A part is known by its thread, so a `Rule` can wait until just that thread is about to send just
that command, and only then make the server fail it. The log of commands proves that it happened.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.monitoring import (
    CommandFailedEvent,
    CommandListener,
    CommandStartedEvent,
    CommandSucceededEvent,
)

from mscheduler_sync import Consumer, Producer, StopReport, TaskContext
from tests.support import Document, wait_until
from tests.support.invariants import Invariants, Witness, wait_status
from tests.support.workers import play_step

#: Parts of a consumer by their thread; whoever is no thread of the library is a caller.
CALLER = "caller"
_numbers = itertools.count(1)


@attrs.frozen
class Fault:
    """
    What the server's fail point does to one command.
    """

    name: str
    data: Mapping[str, Any]
    #: How often in a row the driver must meet it before the library does.
    is_retried_by_driver: bool = False

    def __str__(self) -> str:
        return self.name

    def happened(self, call: Call) -> bool:
        """
        Return whether *call* shows this fault.
        """
        if "blockTimeMS" in self.data:
            return call.duration_s >= self.data["blockTimeMS"] / 1000 * 0.9 or not call.ok
        if "writeConcernError" in self.data:
            number = self.data["writeConcernError"]["code"]
            return "writeConcernError" in call.reply or call.reply.get("code") == number
        if "errorCode" in self.data:
            return bool(call.reply.get("code") == self.data["errorCode"])
        return not call.ok


def code(number: int, *, retried: bool) -> Fault:
    return Fault(f"code {number}", {"errorCode": number}, is_retried_by_driver=retried)


#: Stepping down, shutting down: the driver tries once more, if it may.
TRANSIENT = tuple(code(number, retried=True) for number in (91, 11600, 189))
#: An unknown trouble of a hosted server, a missing privilege, an interruption.
REFUSED = tuple(code(number, retried=False) for number in (8000, 13, 11601))
FORBIDDEN = REFUSED[1]
CLOSED = Fault("closed", {"closeConnection": True}, is_retried_by_driver=True)
#: A server that goes away in the middle of an update of many documents.
HALF_DONE = Fault("half done", {"closeConnection": True}, is_retried_by_driver=False)
#: The write is done, and yet the reply is an error.
UNCONFIRMED = Fault(
    "write concern", {"writeConcernError": {"code": 64, "errmsg": "replication timed out"}}
)


def blocked(milliseconds: int) -> Fault:
    return Fault(
        f"blocked {milliseconds} ms", {"blockConnection": True, "blockTimeMS": milliseconds}
    )


@attrs.frozen
class Call:
    """
    One command that was sent, and how it ended.
    """

    part: str
    command: str
    ok: bool
    duration_s: float
    reply: Mapping[str, Any]
    sent: Mapping[str, Any]


class Rule:
    """
    A fault that waits for one command of one part. `wait_done` proves that it has happened.
    """

    def __init__(
        self,
        arm: Callable[[Fault, CommandStartedEvent], None],
        faults: Sequence[Fault],
        part: str,
        command: str,
        when: Callable[[Mapping[str, Any]], bool],
    ) -> None:
        self._arm = arm
        self._part = part
        self._command = command
        self._when = when
        self._lock = threading.Lock()
        # All under _lock.
        self._left = list(faults)
        self._flying: dict[int, Fault] = {}
        self._is_held = False
        self._done = threading.Event()

    def hold(self) -> None:
        """
        Do nothing until `release`.
        """
        self._is_held = True

    def release(self) -> None:
        self._is_held = False

    def before(self, part: str, event: CommandStartedEvent) -> None:
        if self._is_held or part != self._part or event.command_name != self._command:
            return
        if not self._when(event.command):
            return
        with self._lock:
            if not self._left or self._flying:
                return
            fault = self._left[0]
            self._flying[event.request_id] = fault
        self._arm(fault, event)

    def after(self, request_id: int, call: Call) -> None:
        with self._lock:
            fault = self._flying.pop(request_id, None)
            # Else another thread's command came in between and took it; the next one tries again.
            if fault is not None and fault.happened(call):
                del self._left[0]
                if not self._left:
                    self._done.set()

    @property
    def is_flying(self) -> bool:
        """
        Whether a command is on its way that will meet a fault.
        """
        with self._lock:
            return bool(self._flying)

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait_done(self, timeout: float = 30) -> None:
        """
        Wait until every fault of this rule has hit its part.
        """
        assert self._done.wait(timeout), f"{self._part} never met {self._left} on {self._command}"


class CommandLog(CommandListener):
    """
    Every command of one client, with the part that sent it.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.rules: list[Rule] = []
        self._flying: dict[int, tuple[str, Mapping[str, Any]]] = {}

    def started(self, event: CommandStartedEvent) -> None:
        part = part_of_thread()
        self._flying[event.request_id] = (part, event.command)
        for rule in self.rules:
            rule.before(part, event)

    def succeeded(self, event: CommandSucceededEvent) -> None:
        self._note(event, True, event.reply)

    def failed(self, event: CommandFailedEvent) -> None:
        self._note(event, False, event.failure)

    def _note(
        self,
        event: CommandSucceededEvent | CommandFailedEvent,
        ok: bool,
        reply: Mapping[str, Any],
    ) -> None:
        part, sent = self._flying.pop(event.request_id, (part_of_thread(), {}))
        call = Call(part, event.command_name, ok, event.duration_micros / 1e6, reply, sent)
        self.calls.append(call)
        for rule in self.rules:
            rule.after(event.request_id, call)

    def of(self, part: str, command: str) -> list[Call]:
        return [call for call in self.calls if (call.part, call.command) == (part, command)]


def part_of_thread() -> str:
    """
    Return the part that the current thread belongs to.
    """
    name = threading.current_thread().name
    return name[3:].split(":")[0] if name.startswith("ms-") else CALLER


class App:
    """
    A client of its own, as an application has one; faults hit it and no other.
    """

    def __init__(self, uri: str, control: MongoClient[Document], **options: Any) -> None:
        self.name = f"app-{next(_numbers)}-{time.monotonic_ns()}"
        self.log = CommandLog()
        self._control = control
        # After "not the primary" a driver waits for its next look at the server: not 10 s here.
        chosen: dict[str, Any] = {"heartbeatFrequencyMS": 500, **options}
        self.client: MongoClient[Document] = MongoClient(
            uri, appname=self.name, event_listeners=[self.log], tz_aware=True, **chosen
        )

    def hit(
        self,
        part: str,
        command: str,
        *faults: Fault,
        when: Callable[[Mapping[str, Any]], bool] = lambda _: True,
    ) -> Rule:
        """
        Make the next *command* of *part* (for which *when* is true) meet each of *faults*.
        """
        rule = Rule(self._arm, faults, part, command, when)
        self.log.rules.append(rule)
        return rule

    def _arm(self, fault: Fault, event: CommandStartedEvent) -> None:
        if fault is HALF_DONE:
            (update,) = event.command["updates"]
            some = update["q"]["key"]["$in"]
            done = {**update["q"], "key": {"$in": some[: len(some) // 2]}}
            self._control[event.database_name][event.command["update"]].update_many(
                done, update["u"]
            )
        self._control.admin.command(
            {
                "configureFailPoint": "failCommand",
                "mode": {"times": 1},
                "data": {
                    "failCommands": [event.command_name],
                    "appName": self.name,
                    **fault.data,
                },
            }
        )

    def disarm(self) -> None:
        self.log.rules.clear()
        self._control.admin.command({"configureFailPoint": "failCommand", "mode": "off"})


class Scene:
    """
    One consumer on a collection, what its functions do, and who watches them.

    *tasks* is seen through the test's own client; the consumer uses that of *app*. The function
    takes the steps that ``params["do"]`` names.
    """

    def __init__(self, tasks: Collection[Document], app: App, witness: Witness) -> None:
        self.tasks = tasks
        self.app = app
        self.witness = witness
        self.producer = Producer(tasks)
        self.invariants = Invariants(tasks, witness)
        self.contexts: dict[str, TaskContext] = {}
        self._gates: dict[str, threading.Event] = {}
        self._gates_lock = threading.Lock()
        self._are_all_open = False
        self._meeting = threading.Barrier(1)
        self.consumer: Consumer

    @property
    def app_tasks(self) -> Collection[Document]:
        """
        The collection as the application under test sees it.
        """
        return self.app.client[self.tasks.database.name][self.tasks.name]

    @contextlib.contextmanager
    def consuming(self, **options: Any) -> Iterator[Consumer]:
        """
        Run a consumer while the block runs; then stop it, with all gates open.
        """
        chosen = {"max_workers": 2, "stop_timeout": 10.0, "worker_id": "one", **options}
        self.consumer = Consumer(self.app_tasks, self.function, **chosen)
        with self._running(self.consumer):
            yield self.consumer

    @contextlib.contextmanager
    def another_consumer(self, **options: Any) -> Iterator[Consumer]:
        """
        Run a second consumer, with the same functions, that no fault hits.
        """
        consumer = Consumer(self.tasks, self.function, **options)
        with self._running(consumer):
            yield consumer

    @contextlib.contextmanager
    def _running(self, consumer: Consumer) -> Iterator[None]:
        self._are_all_open = False
        try:
            consumer.start()
            yield
        finally:
            self.open_all()
            consumer.stop()

    def function(self, params: Any, context: TaskContext) -> Any:
        # A snoozed attempt is not counted, and a failed one may have been another process's.
        is_first = context.attempt == 1 and context.key not in self.contexts
        self.contexts[context.key] = context
        with self.witness.running(context):
            for step in params["do"].split():
                if step == "wait":
                    self.gate(context.key).wait(60)
                elif step == "meet":
                    self._meeting.wait(30)
                else:
                    play_step(step, context, is_first=is_first)
            return params.get("value")

    def send(self, key: str, do: str = "return", *, value: object = None, **options: Any) -> None:
        """
        Send a task past all faults, with a short lease unless *options* say otherwise.
        """
        wanted = {"lease": 60, "heartbeat": 20, "retry_delay": 0, **options}
        self.producer.send(key, {"do": do, "value": value}, **wanted)
        self.invariants.sent(key)

    def gate(self, key: str) -> threading.Event:
        """
        Return the gate before which the task *key* waits.
        """
        with self._gates_lock:
            gate = self._gates.setdefault(key, threading.Event())
            if self._are_all_open:
                gate.set()
            return gate

    def open_all(self) -> None:
        """
        Open all gates, also those at which a function has yet to arrive.
        """
        with self._gates_lock:
            self._are_all_open = True
            for gate in self._gates.values():
                gate.set()

    def wait_status(self, key: str, status: Any, timeout: float = 20) -> Document:
        return wait_status(self.tasks, key, status, timeout)

    def probe(self, timeout: float = 20) -> None:
        """
        Prove that every slot works: as many tasks as there are slots meet inside their functions.
        """
        slots = self.consumer.max_workers
        self._meeting = threading.Barrier(slots)
        keys = [f"probe-{next(_numbers)}" for _ in range(slots)]
        for key in keys:
            self.send(key, "meet", worker_ids=[self.consumer.worker_id])
        for key in keys:
            self.wait_status(key, "succeeded", timeout)

    def settled(self) -> None:
        """
        After a fault: every slot works, every part is well, every guarantee holds.
        """
        self.app.disarm()
        self.probe()
        wait_until(lambda: self.consumer.health().ok, "all parts are well again", 15)
        wait_until(lambda: self.consumer.running_count == 0, "nothing runs", 15)
        self.invariants.check()


@contextlib.contextmanager
def scene_on(
    uri: str,
    database: Database[Document],
    control: MongoClient[Document],
    witness: Witness | None = None,
    **client_options: Any,
) -> Iterator[Scene]:
    """
    Set the scene on the collection ``tasks`` of *database*, a database of *control*.
    """
    app = App(uri, control, **client_options)
    try:
        yield Scene(database.tasks, app, witness or Witness(database.witness))
    finally:
        app.disarm()
        app.client.close()


class LogRecords(logging.Handler):
    """
    Collects what the library logs.
    """

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def events(self, name: str) -> list[logging.LogRecord]:
        """
        Return the records whose field ``event`` is *name*.
        """
        return [record for record in self.records if getattr(record, "event", None) == name]

    @contextlib.contextmanager
    def listening(self) -> Iterator[LogRecords]:
        log = logging.getLogger("mscheduler_sync")
        log.addHandler(self)
        try:
            yield self
        finally:
            log.removeHandler(self)


def stopped_in_time(consumer: Consumer, timeout: float, within: float) -> StopReport:
    """
    Stop *consumer*; assert that it took at most *within* seconds.
    """
    began_s = time.monotonic()
    report = consumer.stop(timeout)
    took_s = time.monotonic() - began_s
    assert took_s <= within, f"stop({timeout}) took {took_s:.1f} s: {report}"
    return report
