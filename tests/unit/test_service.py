"""
The life of a background thread: starting, stopping, database trouble, and programming errors.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mscheduler_sync._runtime.log import logger
from mscheduler_sync._runtime.service import CRASH_COUNT, ComponentHealth, Service
from mscheduler_sync.errors import StoreRejected, StoreUnavailable
from tests.support import wait_until

LOG = logger("fetch")


class Scripted(Service):
    """
    A service whose step does what it is told and then waits for the stop.

    Its pauses after an error are noted instead of waited for.
    """

    def __init__(self, *acts: Callable[[], None]) -> None:
        self.crashes: list[tuple[str, BaseException]] = []
        self.crashed = threading.Event()
        super().__init__(
            component="fetch",
            thread_prefix="ms-fetch",
            log=LOG,
            owner_id="test",
            on_crash=self._note_crash,
        )
        self.acts = iter(acts)
        self.steps = 0
        self.store_errors: list[BaseException] = []
        self.pauses_s: list[float] = []
        self.idle = threading.Event()

    def step(self) -> None:
        self.steps += 1
        act = next(self.acts, None)
        if act is not None:
            act()
            return
        self.idle.set()
        super().pause(60)

    def pause(self, timeout_s: float) -> bool:
        self.pauses_s.append(timeout_s)
        return super().pause(0)

    def on_store_error(self, error: BaseException) -> None:
        self.store_errors.append(error)

    def _note_crash(self, part: str, error: BaseException) -> None:
        self.crashes.append((part, error))
        self.crashed.set()


@pytest.fixture
def run() -> Iterator[Callable[..., Scripted]]:
    """
    Start a scripted service; it is stopped at the end of the test.
    """
    services: list[Scripted] = []

    def start(*acts: Callable[[], None]) -> Scripted:
        service = Scripted(*acts)
        services.append(service)
        service.start()
        return service

    yield start
    for service in services:
        service.request_stop()
    for service in services:
        assert service.join(10)


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def unavailable(cause: BaseException | None = None) -> StoreUnavailable:
    error = StoreUnavailable("no server answers")
    error.__cause__ = cause
    return error


def nothing() -> None:
    """
    A step without trouble.
    """


def records(caplog: pytest.LogCaptureFixture, event: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if getattr(record, "event", None) == event]


def test_repeats_its_step_until_it_is_stopped(run: Callable[..., Scripted]) -> None:
    """
    The step runs again and again; a stop ends a pause inside of it.
    """
    service = run(nothing, nothing, nothing)
    assert service.idle.wait(10)
    assert service.steps == 4
    assert service.alive
    assert not service.stopping
    service.request_stop()
    assert service.join(10)
    assert service.stopping
    assert not service.alive
    assert service.steps == 4


def test_a_stop_before_the_start_is_not_lost() -> None:
    """
    A thread that is started after its stop was asked for does nothing.
    """
    service = Scripted(nothing)
    service.request_stop()
    service.start()
    assert service.join(10)
    assert service.steps == 0


def test_stopping_without_starting_and_twice_is_fine(run: Callable[..., Scripted]) -> None:
    """
    `request_stop` and `join` may be called at any time, and again.
    """
    never_started = Scripted()
    never_started.request_stop()
    never_started.request_stop()
    assert never_started.join(0)
    assert not never_started.alive
    service = run()
    for _ in range(2):
        service.request_stop()
        assert service.join(10)


def test_join_tells_that_the_thread_still_runs(run: Callable[..., Scripted]) -> None:
    """
    A join that runs out of time says so; a negative time is none at all.
    """
    service = run()
    assert service.idle.wait(10)
    assert not service.join(0.01)
    assert not service.join(-5)


def test_the_thread_has_a_name_and_does_not_hold_the_process(run: Callable[..., Scripted]) -> None:
    """
    The name says which part it is; a forgotten stop does not keep the interpreter alive.
    """
    service = run()
    (thread,) = [t for t in threading.enumerate() if t.name == "ms-fetch:test"]
    assert service.thread_name == "ms-fetch:test"
    assert thread.daemon


def test_cannot_be_started_again(run: Callable[..., Scripted]) -> None:
    """
    A service lives once.
    """
    service = run()
    with pytest.raises(RuntimeError):
        service.start()


def test_database_trouble_is_retried_told_once_and_forgotten(
    run: Callable[..., Scripted], caplog: pytest.LogCaptureFixture
) -> None:
    """
    The step runs again after a pause; a second failure of the same kind is not logged again.
    """
    error = unavailable(ConnectionResetError("cut"))
    service = run(raising(error), raising(error), nothing)
    assert service.idle.wait(30)
    assert service.store_errors == [error, error]
    assert service.crashes == []
    (record,) = records(caplog, "store_trouble")
    assert record.levelno == logging.WARNING
    assert (record.__dict__["component"], record.__dict__["error_type"]) == (
        "fetch",
        "ConnectionResetError",
    )
    assert service.health.failures_in_a_row == 0
    assert service.health.last_error == "no server answers"


def test_another_kind_of_trouble_is_told_too(
    run: Callable[..., Scripted], caplog: pytest.LogCaptureFixture
) -> None:
    """
    LogThrottle are counted by the kind of the driver's error.
    """
    rejected = StoreRejected("not allowed")
    rejected.__cause__ = PermissionError("no")
    service = run(raising(unavailable(ConnectionResetError("cut"))), raising(rejected))
    assert service.idle.wait(30)
    kinds = [record.__dict__["error_type"] for record in records(caplog, "store_trouble")]
    assert kinds == ["ConnectionResetError", "PermissionError"]


def test_the_pauses_grow_while_the_trouble_lasts(run: Callable[..., Scripted]) -> None:
    """
    From one second they double up to thirty, less at most a half; no crash is reported.
    """
    service = run(*[raising(unavailable())] * 9)
    assert service.idle.wait(10)
    full_s = [1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0]
    assert len(service.pauses_s) == len(full_s)
    for pause_s, most_s in zip(service.pauses_s, full_s, strict=True):
        assert most_s / 2 <= pause_s <= most_s
    assert service.crashes == []
    assert service.alive


def test_the_pauses_begin_anew_after_a_success(run: Callable[..., Scripted]) -> None:
    """
    The next trouble is another one.
    """
    service = run(*[raising(unavailable())] * 4, nothing, raising(unavailable()))
    assert service.idle.wait(10)
    assert service.pauses_s[3] >= 4.0
    assert service.pauses_s[4] <= 1.0


def test_a_stop_ends_a_pause() -> None:
    """
    A service that waits for its next try need not be waited for; a negative pause is none.
    """
    service = Service(
        component="fetch",
        thread_prefix="ms-fetch",
        log=LOG,
        owner_id="test",
        on_crash=lambda component, error: None,
    )
    assert not service.pause(-1)
    with ThreadPoolExecutor(1) as pool:
        pausing = pool.submit(service.pause, 60)
        service.request_stop()
        assert pausing.result(10)


def test_a_programming_error_is_logged_and_the_step_runs_again(
    run: Callable[..., Scripted], caplog: pytest.LogCaptureFixture
) -> None:
    """
    One bug costs one round, and leaves its traceback in the log.
    """
    service = run(raising(ZeroDivisionError("one")))
    assert service.idle.wait(10)
    assert service.crashes == []
    (record,) = records(caplog, "component_failed")
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError
    assert record.__dict__["error_type"] == "ZeroDivisionError"
    assert service.health.last_error == "ZeroDivisionError: one"


@pytest.mark.parametrize("kind", [KeyError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_errors_of_every_kind_leave_the_thread_alive(
    run: Callable[..., Scripted], kind: type[BaseException]
) -> None:
    """
    Not even what is meant to end a program ends the thread.
    """
    service = run(raising(kind("x")))
    assert service.idle.wait(10)
    assert service.alive


def test_five_programming_errors_in_a_minute_end_the_thread_loudly(
    run: Callable[..., Scripted],
) -> None:
    """
    The crash is reported once, with the part and its last error, even if other steps went well.
    """
    errors = [ValueError(number) for number in range(CRASH_COUNT)]
    acts: list[Callable[[], None]] = []
    for error in errors:
        acts += [raising(error), nothing]
    service = run(*acts)
    assert service.crashed.wait(10)
    assert service.join(10)
    assert service.crashes == [("fetch", errors[-1])]


def test_programming_errors_over_a_long_time_do_not_end_the_thread(
    run: Callable[..., Scripted],
) -> None:
    """
    Only errors within one minute count together.
    """
    service = Scripted(*[raising(ValueError("x"))] * CRASH_COUNT)
    service._crashes.extend([time.monotonic() - 61.0] * (CRASH_COUNT - 1))
    service.acts = iter([raising(ValueError("x"))])
    service.start()
    assert service.idle.wait(10)
    assert service.crashes == []
    service.request_stop()
    assert service.join(10)


def test_an_error_that_cannot_be_shown_is_an_error_like_others(
    run: Callable[..., Scripted],
) -> None:
    """
    An exception with a broken ``__str__`` neither kills the thread nor goes unnoticed.
    """

    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    service = run(raising(Unspeakable()))
    wait_until(lambda: service.idle.is_set() or not service.alive, "the step is over")
    assert service.alive


def test_health_counts_failures_in_a_row() -> None:
    """
    A success ends the row but keeps the last error for people to read.
    """
    health = ComponentHealth()
    assert (health.last_error, health.last_error_at_s, health.failures_in_a_row) == (None, None, 0)
    before_s = time.monotonic()
    health.note_error(ValueError("first"))
    health.note_error(unavailable(TimeoutError("second")))
    assert health.failures_in_a_row == 2
    assert health.last_error == "no server answers"
    assert health.last_error_at_s is not None
    assert before_s <= health.last_error_at_s <= time.monotonic()
    health.note_success()
    assert health.failures_in_a_row == 0
    assert health.last_error == "no server answers"


def test_health_keeps_long_texts_short() -> None:
    """
    The text of an error is bounded.
    """
    health = ComponentHealth()
    health.note_error(ValueError("x" * 10_000))
    assert health.last_error is not None
    assert len(health.last_error) == 500
