"""
The checked options of a send, and the document they make.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import uuid
from collections.abc import Mapping, Sequence, Set
from typing import Any, Final, Literal

import attrs
from bson import ObjectId

from mscheduler_sync._storage import expressions as x
from mscheduler_sync._storage.statements import routes_of
from mscheduler_sync.settings import Duration, check_name, choice, seconds, text, whole

IfExists = Literal["keep", "update", "rerun", "raise"]
IfRunning = Literal["apply", "raise"]

#: More attempts than this at once make the document too large.
MAX_CONCURRENCY: Final = 100
MAX_ATTEMPTS: Final = 100
MAX_PRIORITY: Final = 2**31 - 1
MAX_WORKER_IDS: Final = 100
MAX_TAGS: Final = 50
#: Names of the options that `send` takes, in its order; `send_many` refuses others.
OPTION_NAMES: Final = (
    "run_at",
    "delay",
    "priority",
    "concurrency",
    "max_attempts",
    "retry_delay",
    "retry_backoff",
    "retry_max_delay",
    "retry_jitter",
    "retry_scope",
    "lease",
    "heartbeat",
    "timeout",
    "keep_finished",
    "worker_ids",
    "name",
    "tags",
    "if_exists",
    "if_running",
    "clean_success",
    "clean_failed",
)


#: Argument of a send -> path in the document.
_PATHS: Final = {
    "params": "params",
    "priority": "task_option.priority",
    "concurrency": "task_option.concurrent_worker_cnt",
    "heartbeat": "task_option.ping_interval_ms",
    "lease": "task_option.worker_timeout_ms",
    "worker_ids": "task_option.specific_worker_ids",
    "max_attempts": "task_option.max_unexpected_retries",
    "retry_delay": "task_option.unexpected_retry_delay_ms",
    "name": "name",
    "tags": "tags",
    "timeout": "timeout_ms",
    "keep_finished": "keep_ms",
}
#: Argument of a send -> field of the sub-document ``retry``.
_RETRY_FIELDS: Final = {
    "retry_backoff": "backoff",
    "retry_max_delay": "max_delay_ms",
    "retry_jitter": "jitter",
    "retry_scope": "scope",
}


@attrs.frozen(kw_only=True)
class SendOptions:
    """
    Everything of a send but key and params, checked. Durations are in milliseconds.
    """

    run_at: dt.datetime | None
    delay_ms: int | None
    priority: int
    concurrency: int
    max_attempts: int
    retry_delay_ms: int
    retry: Mapping[str, Any]
    lease_ms: int
    heartbeat_ms: int
    timeout_ms: int | None
    keep_ms: int | None
    worker_ids: tuple[str, ...]
    name: str | None
    tags: tuple[str, ...]
    if_exists: IfExists
    if_running: IfRunning
    clean_success: bool
    clean_failed: bool

    @classmethod
    def checked(
        cls,
        *,
        run_at: dt.datetime | None = None,
        delay: Duration | None = None,
        priority: int = 0,
        concurrency: int = 1,
        max_attempts: int = 3,
        retry_delay: Duration = 10,
        retry_backoff: float = 1.0,
        retry_max_delay: Duration | None = None,
        retry_jitter: float = 0.0,
        retry_scope: Literal["task", "worker"] = "task",
        lease: Duration = 60,
        heartbeat: Duration = 20,
        timeout: Duration | None = None,
        keep_finished: Duration | None = None,
        worker_ids: Sequence[str] = (),
        name: str | None = None,
        tags: Sequence[str] = (),
        if_exists: IfExists = "keep",
        if_running: IfRunning = "apply",
        clean_success: bool = False,
        clean_failed: bool = False,
    ) -> SendOptions:
        """
        Raises:
            TypeError, ValueError: Naming the argument, its value and the rule.
        """
        lease_s = seconds(lease, "lease", at_least=0.1, at_most=30 * 86_400.0)
        heartbeat_s = seconds(heartbeat, "heartbeat", at_least=0.01)
        if heartbeat_s > lease_s / 2:
            msg = (
                f"heartbeat must be at most half the lease, got heartbeat={heartbeat_s:g} s "
                f"and lease={lease_s:g} s; one late heartbeat would lose the task"
            )
            raise ValueError(msg)
        if name is not None:
            check_name(name)
        retry: dict[str, Any] = {}
        if _number(retry_backoff, "retry_backoff", 1.0, 1000.0) != 1.0:
            retry["backoff"] = float(retry_backoff)
        if retry_max_delay is not None:
            retry["max_delay_ms"] = _ms(seconds(retry_max_delay, "retry_max_delay"))
        if _number(retry_jitter, "retry_jitter", 0.0, 1.0) != 0.0:
            retry["jitter"] = float(retry_jitter)
        if choice(retry_scope, "retry_scope", ("task", "worker")) == "worker":
            retry["scope"] = "worker"
        for flag_name, flag in (("clean_success", clean_success), ("clean_failed", clean_failed)):
            if not isinstance(flag, bool):
                msg = f"{flag_name} must be True or False, got {flag!r}"
                raise TypeError(msg)
        choice(if_exists, "if_exists", ("keep", "update", "rerun", "raise"))
        choice(if_running, "if_running", ("apply", "raise"))
        return cls(
            run_at=_check_run_at(run_at, delay),
            delay_ms=None if delay is None else _ms(seconds(delay, "delay")),
            priority=whole(priority, "priority", 0, MAX_PRIORITY),
            concurrency=whole(concurrency, "concurrency", 1, MAX_CONCURRENCY),
            max_attempts=whole(max_attempts, "max_attempts", 1, MAX_ATTEMPTS),
            retry_delay_ms=_ms(seconds(retry_delay, "retry_delay")),
            retry=retry,
            lease_ms=_ms(lease_s),
            heartbeat_ms=_ms(heartbeat_s),
            timeout_ms=None
            if timeout is None
            else _ms(seconds(timeout, "timeout", at_least=0.001)),
            keep_ms=None if keep_finished is None else _ms(seconds(keep_finished, "keep_finished")),
            worker_ids=_texts(worker_ids, "worker_ids", MAX_WORKER_IDS),
            name=name,
            tags=_texts(tags, "tags", MAX_TAGS),
            if_exists=if_exists,
            if_running=if_running,
            clean_success=clean_success,
            clean_failed=clean_failed,
        )

    @property
    def wants_time(self) -> bool:
        """
        Whether a time was asked for expressly.
        """
        return self.run_at is not None or self.delay_ms is not None

    def start_time(self, server_now: dt.datetime) -> dt.datetime:
        if self.run_at is not None:
            return self.run_at
        if self.delay_ms is not None:
            return min(server_now + dt.timedelta(milliseconds=self.delay_ms), x.NEVER)
        return server_now

    def document(self, key: str, params: object, server_now: dt.datetime) -> dict[str, Any]:
        """
        Return the whole document of a new task, derived fields included.
        """
        start_time = self.start_time(server_now)
        facts: dict[str, Any] = {
            "name": self.name,
            "tags": list(self.tags) or None,
            "retry": dict(self.retry) or None,
            "timeout_ms": self.timeout_ms,
            "keep_ms": self.keep_ms,
        }
        return {
            # Made of the key: two tasks under one key are impossible even where the unique index
            # is missing for a while (a collection that was dropped, a missing privilege).
            "_id": id_of(key),
            # After a lost reply it tells whose insert it was.
            "send_id": uuid.uuid4().hex,
            "key": key,
            "params": params,
            "task_state": {
                "create_time": server_now,
                "start_time": start_time,
                "worker_states": [],
            },
            "task_option": self.crate_options(),
            "status": x.WAITING,
            "due": start_time,
            "routes": routes_of(
                name=self.name,
                worker_ids=self.worker_ids,
                shared=self.concurrency > 1 or "scope" in self.retry,
            ),
            **{field: value for field, value in facts.items() if value is not None},
        }

    def crate_options(self) -> dict[str, Any]:
        return {
            "priority": self.priority,
            "concurrent_worker_cnt": self.concurrency,
            "ping_interval_ms": self.heartbeat_ms,
            "worker_timeout_ms": self.lease_ms,
            "specific_worker_ids": list(self.worker_ids),
            "max_unexpected_retries": self.max_attempts,
            "unexpected_retry_delay_ms": self.retry_delay_ms,
        }

    def replacement(self, params: object, given: Set[str] | None = None) -> dict[str, Any]:
        """
        Return what an update sets in an existing task, by path; None removes a fact.

        Only what the arguments called *given* say, or everything (None).
        """
        everything: dict[str, Any] = {
            "params": params,
            **{f"task_option.{name}": value for name, value in self.crate_options().items()},
            "name": self.name,
            "tags": list(self.tags) or None,
            "timeout_ms": self.timeout_ms,
            "keep_ms": self.keep_ms,
        }
        if given is None:
            return {**everything, "retry": dict(self.retry) or None}
        chosen = {path: everything[path] for name in given if (path := _PATHS.get(name))}
        for name in given:
            field = _RETRY_FIELDS.get(name)
            if field is not None:
                chosen[f"retry.{field}"] = self.retry.get(field)
        return chosen


def id_of(key: str) -> ObjectId:
    """
    The ``_id`` of a new task: the first 12 bytes of the key's SHA-256.
    """
    return ObjectId(hashlib.sha256(key.encode()).digest()[:12])


def _ms(duration_s: float) -> int:
    return round(duration_s * 1000)


def _number(value: object, name: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        msg = f"{name} must be a number, got {value!r}"
        raise TypeError(msg)
    if not low <= value <= high:
        msg = f"{name} must be from {low:g} to {high:g}, got {value!r}"
        raise ValueError(msg)
    return float(value)


def _texts(value: object, name: str, most: int) -> tuple[str, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, set, frozenset)):
        msg = f"{name} must be a list of strings, got {value!r}"
        raise TypeError(msg)
    texts = tuple(text(one, f"each of {name}", max_bytes=200) for one in value)
    if len(texts) > most:
        msg = f"{name} must have at most {most} entries, has {len(texts)}"
        raise ValueError(msg)
    return texts


def _check_run_at(run_at: object, delay: object) -> dt.datetime | None:
    if run_at is None:
        return None
    if delay is not None:
        msg = f"give run_at or delay, not both: run_at={run_at!r}, delay={delay!r}"
        raise ValueError(msg)
    if not isinstance(run_at, dt.datetime):
        msg = f"run_at must be a datetime with a time zone, got {run_at!r}"
        raise TypeError(msg)
    if run_at.tzinfo is None or run_at.utcoffset() is None:
        msg = f"run_at must have a time zone (for example datetime.timezone.utc), got {run_at!r}"
        raise ValueError(msg)
    try:
        in_utc = run_at.astimezone(dt.timezone.utc)
    except OverflowError:
        in_utc = x.NEVER
    if not x.EPOCH <= in_utc < x.NEVER:
        msg = f"run_at must lie from 1970 to 9999-12-30, got {run_at!r}"
        raise ValueError(msg)
    return in_utc
