"""
Arguments of consumers and durations, checked where they are given.
"""

from __future__ import annotations

import datetime as dt
import math
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import attrs

from mscheduler_sync.limits import LONGEST_S, MAX_THREADS

Duration = float | int | dt.timedelta
Around = Callable[[], AbstractContextManager[Any]]

MAX_KEY_BYTES: Final = 512
#: Longer names of tasks make the index heavy, in characters.
MAX_NAME_LENGTH: Final = 200
_DEFAULT_MAX_WORKERS: Final = 8


def seconds(
    value: object,
    name: str,
    *,
    at_least: float = 0.0,
    above: float | None = None,
    at_most: float = LONGEST_S,
) -> float:
    """
    Return a duration as seconds.

    Raises:
        TypeError: If *value* is neither a number nor a timedelta.
        ValueError: If it is out of range or not finite.
    """
    if isinstance(value, dt.timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        msg = f"{name} must be a number of seconds or a timedelta, got {value!r}"
        raise TypeError(msg)
    low = above if above is not None else at_least
    bound = f"above {above:g}" if above is not None else f"at least {at_least:g}"
    in_range = (value > low if above is not None else value >= low) and value <= at_most
    if not in_range or not math.isfinite(value):
        msg = f"{name} must be {bound} and at most {at_most:g} seconds, got {value!r}"
        raise ValueError(msg)
    return float(value)


def whole(value: object, name: str, low: int, high: int) -> int:
    """
    Return a whole number.

    Raises:
        TypeError: If *value* is not an int.
        ValueError: If it is not from *low* to *high*.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"{name} must be a whole number, got {value!r}"
        raise TypeError(msg)
    if not low <= value <= high:
        msg = f"{name} must be from {low} to {high}, got {value!r}"
        raise ValueError(msg)
    return value


def text(value: object, name: str, *, max_bytes: int = MAX_KEY_BYTES) -> str:
    """
    Return a non-empty string that BSON and the index can hold.

    Raises:
        TypeError: If *value* is not a string.
        ValueError: If it is empty, too long, or not valid Unicode.
    """
    if not isinstance(value, str):
        msg = f"{name} must be a string, got {value!r}"
        raise TypeError(msg)
    if not value:
        msg = f"{name} must not be empty"
        raise ValueError(msg)
    try:
        data = value.encode()
    except UnicodeEncodeError:
        msg = f"{name} must be valid Unicode, got {value!r}"
        raise ValueError(msg) from None
    if len(data) > max_bytes:
        msg = f"{name} must take at most {max_bytes} bytes, takes {len(data)}: {value!r:.80}"
        raise ValueError(msg)
    # Not str(value): that of a string enum's member is its name.
    return data.decode()


def choice(value: object, name: str, allowed: tuple[str, ...]) -> str:
    """
    Raises:
        ValueError: If *value* is not one of *allowed*.
    """
    if value not in allowed:
        msg = f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}"
        raise ValueError(msg)
    return str(value)


def check_name(name: object) -> None:
    """
    Raises:
        TypeError: If *name* is not a string.
        ValueError: If it is empty or longer than 200 characters, or holds what BSON cannot.
    """
    if not isinstance(name, str):
        msg = f"a task name must be a string, got {name!r}"
        raise TypeError(msg)
    if not name or len(name) > MAX_NAME_LENGTH:
        msg = f"a task name must have 1 to {MAX_NAME_LENGTH} characters, got {name!r:.80}"
        raise ValueError(msg)
    try:
        name.encode()
    except UnicodeEncodeError:
        msg = f"a task name must be valid Unicode, got {name!r}"
        raise ValueError(msg) from None


def new_worker_id() -> str:
    """
    Return an id that no other living worker has: host, process and a random part.
    """
    return f"{socket.gethostname()[:60]}-{os.getpid()}-{secrets.token_hex(4)}"


@attrs.frozen(kw_only=True)
class ConsumerSettings:
    """
    The checked settings of one consumer. Durations are in seconds.
    """

    worker_id: str
    max_workers: int
    around: Around | None
    watch: bool
    poll_interval_s: float
    queue_limit: int
    stop_timeout_s: float
    lease_margin_s: float | None
    result_limit_bytes: int
    rust_interop: bool

    @classmethod
    def checked(
        cls,
        *,
        worker_id: object,
        max_workers: object,
        around: object,
        watch: object,
        poll_interval: object,
        queue_limit: object,
        stop_timeout: object,
        lease_margin: object,
        max_result_bytes: object,
        rust_interop: object,
    ) -> ConsumerSettings:
        """
        Raises:
            TypeError, ValueError: Naming the argument, its value and the rule.
        """
        if around is not None and not callable(around):
            msg = (
                "around must be callable without arguments and return a context manager, "
                f"got {around!r}"
            )
            raise TypeError(msg)
        for name, flag in (("watch", watch), ("rust_interop", rust_interop)):
            if not isinstance(flag, bool):
                msg = f"{name} must be True or False, got {flag!r}"
                raise TypeError(msg)
        default_workers = min(_DEFAULT_MAX_WORKERS, MAX_THREADS)
        checked_around: Callable[[], Any] | None = around
        return cls(
            worker_id=new_worker_id()
            if worker_id is None
            else text(worker_id, "worker_id", max_bytes=200),
            max_workers=check_max_workers(default_workers if max_workers is None else max_workers),
            around=checked_around,
            watch=bool(watch),
            poll_interval_s=seconds(poll_interval, "poll_interval", at_least=0.01, at_most=3600.0),
            queue_limit=whole(queue_limit, "queue_limit", 10, 10_000_000),
            stop_timeout_s=seconds(stop_timeout, "stop_timeout", at_most=86_400.0),
            lease_margin_s=None
            if lease_margin is None
            else seconds(lease_margin, "lease_margin", at_most=3600.0),
            result_limit_bytes=whole(max_result_bytes, "max_result_bytes", 1, 15 * 1024 * 1024),
            rust_interop=bool(rust_interop),
        )


def check_max_workers(value: object) -> int:
    return whole(value, "max_workers", 0, MAX_THREADS)
