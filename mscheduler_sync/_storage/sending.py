"""
The checked options of a send, and the document they make.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence, Set
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, get_args

import attrs
from bson import ObjectId

from mscheduler_sync._storage import expressions as x
from mscheduler_sync._storage.statements.discovery import routes_of
from mscheduler_sync.settings import (
    Duration,
    arguments_of,
    as_options,
    check_name,
    choice,
    flag,
    number,
    option,
    seconds,
    texts,
    whole,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

IfExists = Literal["keep", "update", "rerun", "raise"]
IfRunning = Literal["apply", "raise"]
RetryScope = Literal["task", "worker"]


class SharedOptionsDict(TypedDict, total=False):
    """
    The options of a send that a declared task takes as they are, for type checkers and editors.
    """

    run_at: dt.datetime | None
    delay: Duration | None
    priority: int
    concurrency: int
    max_attempts: int
    retry_backoff: float
    retry_max_delay: Duration | None
    retry_jitter: float
    retry_scope: RetryScope
    lease: Duration
    heartbeat: Duration
    timeout: Duration | None
    keep_finished: Duration | None
    worker_ids: Sequence[str]
    tags: Sequence[str]
    if_exists: IfExists
    if_running: IfRunning
    clean_success: bool
    clean_failed: bool


class SendOptionsDict(SharedOptionsDict, total=False):
    """
    The options of `Producer.send` by name, for type checkers and editors.
    """

    retry_delay: Duration
    name: str | None


def _moment(value: object, name: str) -> dt.datetime:
    if not isinstance(value, dt.datetime):
        msg = f"{name} must be a datetime with a time zone, got {value!r}"
        raise TypeError(msg)
    if value.tzinfo is None or value.utcoffset() is None:
        msg = f"{name} must have a time zone (for example datetime.timezone.utc), got {value!r}"
        raise ValueError(msg)
    try:
        in_utc = value.astimezone(dt.timezone.utc)
    except OverflowError:
        in_utc = x.NEVER
    if not x.EPOCH <= in_utc < x.NEVER:
        msg = f"{name} must lie from 1970 to 9999-12-30, got {value!r}"
        raise ValueError(msg)
    return in_utc


#: The crate's options. They are always stored; facts of ours only if they are not at the default.
_CRATE: Final = "task_option"

# Some checks, so that an option below fits a line.
_ATTEMPTS: Final = partial(whole, low=1, high=100)
_PRIORITY: Final = partial(whole, low=0, high=2**31 - 1)
_FACTOR: Final = partial(number, low=1.0, high=1000.0)
_SHARE: Final = partial(number, low=0.0, high=1.0)
_LEASE: Final = partial(seconds, at_least=0.1, at_most=30 * 86_400.0)
_HEARTBEAT: Final = partial(seconds, at_least=0.01)
_TIMEOUT: Final = partial(seconds, at_least=0.001)
_SCOPE: Final = partial(choice, allowed=get_args(RetryScope))
_IF_EXISTS: Final = partial(choice, allowed=get_args(IfExists))
_IF_RUNNING: Final = partial(choice, allowed=get_args(IfRunning))


# Not slotted: what the options make of the document is kept in them.
@attrs.frozen(kw_only=True, slots=False, field_transformer=as_options)
class SendOptions:
    """
    Everything of a send but key and params, checked. Durations are in seconds.

    Each option once: its default, its check, and its path in the document if it is stored; at
    a path ``_ms`` in milliseconds.
    """

    run_at: dt.datetime | None = option(None, _moment)
    delay_s: float | None = option(None, seconds)
    priority: int = option(0, _PRIORITY, "task_option.priority")
    concurrency: int = option(1, _ATTEMPTS, "task_option.concurrent_worker_cnt")
    max_attempts: int = option(3, _ATTEMPTS, "task_option.max_unexpected_retries")
    retry_delay_s: float = option(10, seconds, "task_option.unexpected_retry_delay_ms")
    retry_backoff: float = option(1.0, _FACTOR, "retry.backoff")
    retry_max_delay_s: float | None = option(None, seconds, "retry.max_delay_ms")
    retry_jitter: float = option(0.0, _SHARE, "retry.jitter")
    retry_scope: RetryScope = option("task", _SCOPE, "retry.scope")
    lease_s: float = option(60, _LEASE, "task_option.worker_timeout_ms")
    heartbeat_s: float = option(20, _HEARTBEAT, "task_option.ping_interval_ms")
    timeout_s: float | None = option(None, _TIMEOUT, "timeout_ms")
    keep_finished_s: float | None = option(None, seconds, "keep_ms")
    worker_ids: tuple[str, ...] = option(
        (), partial(texts, most=100), "task_option.specific_worker_ids"
    )
    name: str | None = option(None, check_name, "name")
    tags: tuple[str, ...] = option((), partial(texts, most=50), "tags")
    if_exists: IfExists = option("keep", _IF_EXISTS)
    if_running: IfRunning = option("apply", _IF_RUNNING)
    clean_success: bool = option(False, flag)
    clean_failed: bool = option(False, flag)

    def __attrs_post_init__(self) -> None:
        if self.run_at is not None and self.delay_s is not None:
            msg = f"give run_at or delay, not both: run_at={self.run_at!r}, delay={self.delay_s:g}"
            raise ValueError(msg)
        if self.heartbeat_s > self.lease_s / 2:
            msg = (
                f"heartbeat must be at most half the lease, got heartbeat={self.heartbeat_s:g} s "
                f"and lease={self.lease_s:g} s; one late heartbeat would lose the task"
            )
            raise ValueError(msg)

    @classmethod
    def checked(cls, **options: Unpack[SendOptionsDict]) -> SendOptions:
        """
        Raises:
            TypeError, ValueError: Naming the argument, its value and the rule, or what is no
                option.
        """
        unknown = options.keys() - arguments_of(cls)
        if unknown:
            msg = f"unknown options: {', '.join(sorted(unknown))}"
            raise TypeError(msg)
        arguments: Mapping[str, Any] = options
        return cls(**arguments)

    @property
    def wants_time(self) -> bool:
        """
        Whether a time was asked for expressly.
        """
        return self.run_at is not None or self.delay_s is not None

    def start_time(self, server_now: dt.datetime) -> dt.datetime:
        if self.run_at is not None:
            return self.run_at
        if self.delay_s is not None:
            return min(server_now + dt.timedelta(milliseconds=_ms(self.delay_s)), x.NEVER)
        return server_now

    def document(self, key: str, params: object, server_now: dt.datetime) -> dict[str, Any]:
        """
        Return the whole document of a new task, derived fields included.

        What lies in its fields is shared with the other documents of these options.
        """
        start_time = self.start_time(server_now)
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
            "status": x.WAITING,
            "due": start_time,
            **self._fields,
        }

    @cached_property
    def _fields(self) -> dict[str, Any]:
        """
        The fields of the document that the options alone decide.
        """
        fields: dict[str, Any] = {}
        values = self.__dict__
        for name, (top, leaf), absent_at, store in _STORED.values():
            value = values[name]
            if value == absent_at:
                continue
            if store is not None:
                value = store(value)
            if leaf:
                fields.setdefault(top, {})[leaf] = value
            else:
                fields[top] = value
        fields["routes"] = routes_of(
            name=self.name,
            worker_ids=self.worker_ids,
            shared=self.concurrency > 1 or self.retry_scope == "worker",
        )
        return fields

    def replacement(self, params: object, given: Set[str] | None = None) -> dict[str, Any]:
        """
        Return what an update sets in an existing task, by path; None removes a fact.

        Only what the arguments called *given* say, or everything (None).
        """
        replaced: dict[str, Any] = {}
        if given is None or "params" in given:
            replaced["params"] = params
        for argument, (_, (top, leaf), _, _) in _STORED.items():
            if given is not None and argument not in given:
                continue
            part = self._fields.get(top)
            if leaf and (given is not None or top == _CRATE):
                replaced[f"{top}.{leaf}"] = None if part is None else part.get(leaf)
            else:
                # A fact is replaced as a whole, whatever else stands in it.
                replaced[top] = part
        return replaced


def id_of(key: str) -> ObjectId:
    """
    The ``_id`` of a new task: the first 12 bytes of the key's SHA-256.
    """
    return ObjectId(hashlib.sha256(key.encode()).digest()[:12])


def _ms(duration_s: float) -> int:
    return round(duration_s * 1000)


def _place_of(field: attrs.Attribute[Any]) -> _Place:
    path: str = field.metadata["path"]
    top, _, leaf = path.partition(".")
    store: Callable[[Any], Any] | None = None
    if leaf.endswith("_ms") or top.endswith("_ms"):
        store = _ms
    elif isinstance(field.default, tuple):
        store = list
    return field.name, (top, leaf), None if top == _CRATE else field.default, store


#: Where an option is stored: its field, the place in the document, the value at which the place
#: stays empty (None: at no other), and how a value is stored if not as it is.
_Place = tuple[str, tuple[str, str], object, Callable[[Any], Any] | None]
#: By argument, of the options that are stored.
_STORED: Final = {
    str(field.alias): _place_of(field)
    for field in attrs.fields(SendOptions)
    if field.metadata["path"] is not None
}
