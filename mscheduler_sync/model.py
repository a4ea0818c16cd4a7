"""
A task as the application sees it, read tolerantly from its document.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any, Final, Literal, NoReturn, TypeVar

import attrs
from bson.codec_options import CodecOptions
from bson.errors import BSONError
from bson.raw_bson import RawBSONDocument

from mscheduler_sync._storage import codec
from mscheduler_sync._storage.expressions import (
    CANCELLED,
    EPOCH,
    FAILED,
    NEVER,
    RUNNING,
    SUCCEEDED,
    TERMINAL,
    WAITING,
    WORKER_SCOPE_CAP,
)
from mscheduler_sync.errors import InvalidTask

Status = Literal["waiting", "running", "succeeded", "failed", "cancelled"]
Ended = Literal["succeeded", "failed", "cancelled"]
STATUSES: Final[tuple[Status, ...]] = ("waiting", "running", "succeeded", "failed", "cancelled")


@attrs.frozen
class Attempt:
    """
    One run of a task by one worker. Times are aware, in UTC, on the server's clock.
    """

    running_id: str | None
    worker_id: str
    #: When the lease ends or ended (the crate's ``ping_expire_time``).
    lease_end: dt.datetime | None
    claimed_at: dt.datetime | None
    succeeded_at: dt.datetime | None
    failed_at: dt.datetime | None
    fail_reason: str | None
    #: From when the task may be tried again after this failure.
    retry_at: dt.datetime | None
    #: The function asked to fail the task for good.
    final: bool = False
    #: A stop has abandoned this attempt.
    interrupted: bool = False

    @property
    def is_open(self) -> bool:
        """
        No outcome stands. Whether its lease has expired is for the reader to compare.
        """
        return self.succeeded_at is None and self.failed_at is None


@attrs.frozen
class TaskOptions:
    """
    The stored options of a task. Durations are in seconds.
    """

    priority: int
    concurrency: int
    lease: float
    heartbeat: float
    worker_ids: tuple[str, ...]
    max_attempts: int
    retry_delay: float
    retry_backoff: float
    retry_max_delay: float | None
    retry_jitter: float
    retry_scope: Literal["task", "worker"]
    timeout: float | None
    keep_finished: float | None


@attrs.frozen
class Task:
    """
    One task. Times are aware, in UTC, on the server's clock.
    """

    key: str
    name: str | None
    params: Any
    status: Status
    created_at: dt.datetime
    #: Not to run before this.
    start_at: dt.datetime
    #: From when a worker may claim it; 9999-12-31 once it has ended.
    due_at: dt.datetime
    finished_at: dt.datetime | None
    cancel_requested: bool
    options: TaskOptions
    attempts: tuple[Attempt, ...]
    #: Attempts that are not in `attempts` any more: released, snoozed, and, from before the
    #: task was armed again, failed and succeeded.
    counters: Mapping[str, int]
    tags: tuple[str, ...]
    progress: Any

    @property
    def is_finished(self) -> bool:
        """
        Whether the task has ended: succeeded, failed or cancelled.
        """
        return self.status in TERMINAL

    @property
    def failures(self) -> int:
        """
        Failed attempts since the task was last armed.
        """
        return sum(1 for attempt in self.attempts if _is_failed(attempt))


def _is_failed(attempt: Attempt) -> bool:
    return attempt.failed_at is not None and attempt.succeeded_at is None


_T = TypeVar("_T")


class _Reader:
    """
    Takes typed fields out of one level of a document.

    What must be of a kind and is not raises `InvalidTask`, which names its path.
    """

    def __init__(self, fields: Mapping[str, Any], key: object, prefix: str = "") -> None:
        self.get = fields.get
        self._key = key
        self._prefix = prefix

    def refuse(self, name: str, problem: str) -> NoReturn:
        raise InvalidTask(self._key, self._prefix + name, problem)

    def inner(self, name: str) -> _Reader:
        return self._reader_of(name, self.get(name))

    def inner_list(self, name: str) -> list[_Reader]:
        values = self.get(name)
        if not isinstance(values, list):
            self.refuse(name, f"must be an array, is {_kind(values)}")
        return [self._reader_of(f"{name}.{number}", value) for number, value in enumerate(values)]

    def _reader_of(self, name: str, value: object) -> _Reader:
        if not isinstance(value, Mapping):
            self.refuse(name, f"must be an object, is {_kind(value)}")
        return _Reader(value, self._key, f"{self._prefix}{name}.")

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            self.refuse(name, f"must be a string, is {_kind(value)}")
        return value

    def date(self, name: str) -> dt.datetime:
        value = self.get(name)
        if not isinstance(value, dt.datetime):
            self.refuse(name, f"must be a date, is {_kind(value)}")
        return value

    def date_or_none(self, name: str) -> dt.datetime | None:
        return None if self.get(name) is None else self.date(name)

    def whole(self, name: str, low: int, high: int) -> int:
        value = self.get(name)
        if type(value) is int and low <= value <= high:
            # Nearly always.
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.refuse(name, f"must be a number, is {_kind(value)}")
        if not low <= value <= high or int(value) != value:
            self.refuse(name, f"must be a whole number from {low} to {high}, is {value!r}")
        return int(value)


# Facts of ours: whatever else stands in their place counts as if nothing did.


def _if_is(kind: type[_T], value: object) -> _T | None:
    return value if isinstance(value, kind) else None


def _number(value: object, default: float, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return default
    return float(value) if low <= value <= high else default


def _seconds(value_ms: object, *, at_least_ms: float = 0.0) -> float | None:
    value = _number(value_ms, -1.0, at_least_ms, _FAR_MS)
    return None if value < 0 else value / 1000


def _is_cancelled(fields: Mapping[str, Any]) -> bool:
    return (_if_is(dict, fields.get("cancel")) or {}).get("time") is not None


def _kind(value: object) -> str:
    return "missing or null" if value is None else f"of type {type(value).__name__}"


#: The path of a fault of the document as a whole.
DOCUMENT: Final = "document"
_FAR_MS: Final = 100 * 366 * 86_400_000


def read_task(document: RawBSONDocument, options: CodecOptions[Any]) -> Task:
    """
    Decode *document*; params with the application's codec *options*, the rest with our own.

    Raises:
        InvalidTask: If a field that matters is missing or of the wrong kind.
    """
    fields = decode_fields(document)
    key = fields.get("key")
    attempts = read_attempts(fields)
    status, due_at = derive(fields, attempts)
    try:
        params = codec.thaw(document, "params", options)
        progress = codec.thaw(document, "progress", options)
    except Exception as error:  # an application's own decoder may raise anything
        raise InvalidTask(key, "params", f"cannot be decoded: {error}") from error
    reader = _Reader(fields, key)
    state = reader.inner("task_state")
    counters = _if_is(dict, fields.get("counters")) or {}
    tags = _if_is(list, fields.get("tags")) or []
    return Task(
        key=reader.text("key"),
        name=_if_is(str, fields.get("name")),
        params=params,
        status=status,
        created_at=state.date("create_time"),
        start_at=state.date("start_time"),
        due_at=due_at,
        finished_at=_if_is(dt.datetime, fields.get("finished_at")),
        cancel_requested=_is_cancelled(fields),
        options=read_options(fields),
        attempts=attempts,
        counters={name: count for name, count in counters.items() if isinstance(count, int)},
        tags=tuple(tag for tag in tags if isinstance(tag, str)),
        progress=progress,
    )


def decode_fields(document: RawBSONDocument) -> dict[str, Any]:
    """
    Decode all of *document* with the library's own codec.

    Raises:
        InvalidTask: If the bytes are not a readable document.
    """
    try:
        return codec.envelope(document)
    except (BSONError, ValueError, OverflowError) as error:
        problem = f"cannot be decoded: {error}"
        raise InvalidTask(None, DOCUMENT, problem) from error


def ended_by(fields: Mapping[str, Any], running_id: str) -> Ended | None:
    """
    Return the status in which a task has ended, if a statement about *running_id* has ended it.

    None: it has not ended, or by another statement. *fields* have what `statements.base.ENDING`
    asks for, and the ids of the attempts.
    """
    status = fields.get("status")
    if status not in TERMINAL:
        return None
    finisher = fields.get("finished_by")
    if finisher is None and status == SUCCEEDED:
        # A plain task: its only attempt.
        state = fields.get("task_state")
        elements = state.get("worker_states") if isinstance(state, Mapping) else None
        if isinstance(elements, list) and len(elements) == 1 and isinstance(elements[0], Mapping):
            finisher = elements[0].get("running_id")
    return status if finisher == running_id else None


def read_options(fields: Mapping[str, Any]) -> TaskOptions:
    """
    Raises:
        InvalidTask: If an option is missing or of the wrong kind.
    """
    stored = _Reader(fields, fields.get("key")).inner("task_option")
    worker_ids = stored.get("specific_worker_ids")
    if worker_ids is None:
        worker_ids = []
    if not isinstance(worker_ids, list) or not all(isinstance(i, str) for i in worker_ids):
        stored.refuse("specific_worker_ids", "must be an array of strings")
    retry = _if_is(dict, fields.get("retry")) or {}
    return TaskOptions(
        priority=stored.whole("priority", -(2**31), 2**32),
        concurrency=stored.whole("concurrent_worker_cnt", 1, 1_000_000),
        lease=stored.whole("worker_timeout_ms", 1, _FAR_MS) / 1000,
        heartbeat=stored.whole("ping_interval_ms", 0, _FAR_MS) / 1000,
        worker_ids=tuple(worker_ids),
        max_attempts=stored.whole("max_unexpected_retries", 0, 2**32),
        retry_delay=stored.whole("unexpected_retry_delay_ms", 0, _FAR_MS) / 1000,
        retry_backoff=_number(retry.get("backoff"), 1.0, 1.0, 1000.0),
        retry_max_delay=_seconds(retry.get("max_delay_ms")),
        retry_jitter=_number(retry.get("jitter"), 0.0, 0.0, 1.0),
        retry_scope="worker" if retry.get("scope") == "worker" else "task",
        timeout=_seconds(fields.get("timeout_ms"), at_least_ms=1.0),
        keep_finished=_seconds(fields.get("keep_ms")),
    )


def read_attempts(fields: Mapping[str, Any]) -> tuple[Attempt, ...]:
    """
    Raises:
        InvalidTask: If the attempts are not an array of attempts.
    """
    state = _Reader(fields, fields.get("key")).inner("task_state")
    return tuple(
        Attempt(
            running_id=_if_is(str, element.get("running_id")),
            worker_id=element.text("worker_id"),
            lease_end=element.date_or_none("ping_expire_time"),
            claimed_at=element.date_or_none("claim_time"),
            succeeded_at=element.date_or_none("success_time"),
            failed_at=element.date_or_none("fail_time"),
            fail_reason=_if_is(str, element.get("fail_reason")),
            retry_at=element.date_or_none("retry_time"),
            final=element.get("final") is True,
            interrupted=element.get("interrupted") is True,
        )
        for element in state.inner_list("worker_states")
    )


def derive(fields: Mapping[str, Any], attempts: tuple[Attempt, ...]) -> tuple[Status, dt.datetime]:
    """
    Compute status and due time from the truth in the document.

    The same rules as `_storage.derived`, for documents whose derived
    fields another program has left stale.

    Raises:
        InvalidTask: If an option or the start time is missing or of the wrong kind.
    """
    options = read_options(fields)
    start_at = _Reader(fields, fields.get("key")).inner("task_state").date("start_time")
    is_cancelled = _is_cancelled(fields)
    succeeded = sum(1 for attempt in attempts if attempt.succeeded_at is not None)
    failed = [attempt for attempt in attempts if _is_failed(attempt)]
    running = [attempt for attempt in attempts if attempt.is_open]
    budget = WORKER_SCOPE_CAP if options.retry_scope == "worker" else options.max_attempts
    is_spent = len(failed) >= budget or any(attempt.final for attempt in failed)

    status: Status
    if succeeded >= options.concurrency:
        status = SUCCEEDED
    elif running:
        status = RUNNING
    elif is_cancelled:
        status = CANCELLED
    elif is_spent:
        status = FAILED
    else:
        status = WAITING
    if status in TERMINAL:
        return status, NEVER

    lease_ends = [attempt.lease_end for attempt in running if attempt.lease_end is not None]
    if is_cancelled or is_spent or succeeded + len(running) >= options.concurrency:
        return status, min(lease_ends, default=EPOCH)
    retries = [at for a in failed if (at := _retry_at(fields, a, options)) is not None]
    return status, min([max([start_at, *retries]), *lease_ends])


def _retry_at(
    fields: Mapping[str, Any], failure: Attempt, options: TaskOptions
) -> dt.datetime | None:
    if failure.retry_at is not None or failure.failed_at is None:
        return failure.retry_at
    try:
        return failure.failed_at + dt.timedelta(seconds=options.retry_delay)
    except OverflowError as error:
        problem = f"{failure.failed_at} leads beyond the year 9999"
        raise InvalidTask(fields.get("key"), "task_state.worker_states", problem) from error
