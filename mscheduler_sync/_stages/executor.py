"""
Calls the function in a pool thread and turns whatever happens into an outcome.

Stands between the claim, from which it gets attempts, and the outcome writer.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import attrs

from mscheduler_sync import context as task_context
from mscheduler_sync._runtime import failure
from mscheduler_sync._runtime.crash_points import reach
from mscheduler_sync._runtime.log import logger
from mscheduler_sync._stages.attempt import (
    Failed,
    HeldAttempt,
    Outcome,
    Released,
    Snoozed,
    Succeeded,
)
from mscheduler_sync._storage import codec
from mscheduler_sync.context import TaskContext
from mscheduler_sync.errors import LeaseLost, PermanentFailure, RetryLater, Snooze
from mscheduler_sync.invocation import Invocation
from mscheduler_sync.limits import MAX_THREADS
from mscheduler_sync.settings import Around

_log = logger("execute")

FunctionOf = Callable[[str | None], Invocation | None]


@attrs.define(eq=False, repr=False, kw_only=True)
class Executor:
    """
    Runs attempts in a `ThreadPoolExecutor`.

    *on_end* is called in the pool thread, exactly once for each attempt that was
    accepted by `submit`, whatever the function does.
    """

    _worker_id: str
    _function_of: FunctionOf
    _around: Around | None
    _value_limit_bytes: int
    #: `RunningAttempts.ended`.
    _on_end: Callable[[HeldAttempt, Outcome], None]
    _pool: ThreadPoolExecutor = attrs.field(init=False)
    _inside: threading.local = attrs.field(init=False, factory=threading.local)
    _lock: threading.Lock = attrs.field(init=False, factory=threading.Lock)
    # Both under _lock.
    _waiting: collections.deque[HeldAttempt] = attrs.field(init=False, factory=collections.deque)
    _thread_coming: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(
            MAX_THREADS, thread_name_prefix=f"ms-exec:{self._worker_id}"
        )

    def submit(self, attempt: HeldAttempt) -> None:
        """
        Start *attempt* in a thread.

        Raises:
            RuntimeError: If the pool or the interpreter is shutting down; nothing was started.
        """
        with self._lock:
            self._waiting.append(attempt)
            try:
                self._wake_one()
            except RuntimeError:
                self._waiting.remove(attempt)
                raise

    def _wake_one(self) -> None:
        """
        Under _lock: while an attempt waits, one thread is on its way to it; never more.

        Each thread that sets out on an attempt wakes the next. A batch of short attempts is
        so done by few threads, which saves the switches between them.
        """
        if not self._thread_coming:
            self._pool.submit(self._work)
            self._thread_coming = True

    def _work(self) -> None:
        arriving = True
        while True:
            with self._lock:
                if arriving:
                    self._thread_coming = arriving = False
                if not self._waiting:
                    return
                attempt = self._waiting.popleft()
                left: list[HeldAttempt] = []
                if self._waiting:
                    try:
                        self._wake_one()
                    except RuntimeError:
                        # Shutting down: nobody would come for the others.
                        left = list(self._waiting)
                        self._waiting.clear()
            for other in left:
                self._on_end(other, Released("shutdown"))
            self._run(attempt)
            del attempt

    def is_running_here(self) -> bool:
        """
        Whether the calling thread is in the middle of an attempt of this executor.
        """
        return bool(getattr(self._inside, "now", False))

    def close(self) -> None:
        """
        Let idle threads end. Does not wait.
        """
        self._pool.shutdown(wait=False)

    def join_threads(self, timeout_s: float) -> list[str]:
        """
        Wait up to *timeout_s* seconds for the threads; return the names of those that live on.
        """
        deadline_s = time.monotonic() + timeout_s
        # ThreadPoolExecutor keeps its threads in a public-by-habit set; there is no other list.
        threads = list(getattr(self._pool, "_threads", ()))
        for thread in threads:
            left_s = max(0.0, deadline_s - time.monotonic())
            thread.join(min(left_s, threading.TIMEOUT_MAX))
        return [thread.name for thread in threads if thread.is_alive()]

    def _run(self, attempt: HeldAttempt) -> None:
        self._inside.now = True
        attempt.started_at_s = time.monotonic()
        reach("before_function")
        try:
            outcome = contextvars.copy_context().run(self._call, attempt)
        except BaseException as error:  # noqa: BLE001 - the thread and the slot must survive
            outcome = Failed(failure.describe(error))
        reach("after_function")
        attempt.document = None
        self._inside.now = False
        self._on_end(attempt, outcome)

    def _call(self, attempt: HeldAttempt) -> Outcome:
        context = attempt.context
        task_context.enter(context)
        function = self._function_of(attempt.name)
        document = attempt.document
        if function is None or document is None:
            return Released("options_changed")
        try:
            params = codec.thaw(document, "params", attempt.codec_options)
        except Exception as error:  # noqa: BLE001 - a custom type's decoder may raise anything
            return Failed(f"the params cannot be decoded: {failure.describe(error)}")
        del document
        try:
            # None also where `around` swallows what the function has raised.
            value = None
            with self._around() if self._around is not None else contextlib.nullcontext():
                value = function(params, context)
        except BaseException as error:  # noqa: BLE001 - SystemExit and the like end the attempt only
            return _outcome_of(error, attempt)
        if attempt.timed_out:
            return _timed_out(attempt)
        try:
            frozen = codec.freeze(
                value,
                attempt.codec_options,
                what="result",
                limit_bytes=self._value_limit_bytes,
            )
            return Succeeded(frozen.value, frozen.size_bytes)
        except codec.Unstorable as error:
            # The function has had its effect: running it again would not make the value storable.
            return Failed(failure.bounded(f"UnstorableResult: {error}"), for_good=True)


def _outcome_of(error: BaseException, attempt: HeldAttempt) -> Outcome:
    context: TaskContext = attempt.context
    if isinstance(error, Snooze):
        return Snoozed(error.delay_s)
    if isinstance(error, RetryLater):
        return Failed(failure.describe(error), delay_s=error.delay_s)
    if isinstance(error, PermanentFailure):
        return Failed(failure.describe(error), for_good=True)
    if attempt.timed_out or context.reason == "timed_out":
        return _timed_out(attempt)
    if isinstance(error, LeaseLost) and context.reason is not None:
        if context.reason == "lease_lost":
            # Counted: a task whose leases expire again and again must come to an end.
            return Failed("LeaseLost: the lease was not renewed in time, and the function ended")
        return Released(context.reason)
    _log.info(
        "a function raised",
        event="function_raised",
        exc_info=error,
        **attempt.log_fields(),
        attempt=attempt.number,
    )
    return Failed(failure.describe(error))


def _timed_out(attempt: HeldAttempt) -> Outcome:
    return Failed(f"TimedOut: the function ran longer than {attempt.options.timeout} s")
