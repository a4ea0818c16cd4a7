"""
Arguments, checked where they are given: the checks, and classes that list options by them.
"""

from __future__ import annotations

import datetime as dt
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, Final, TypeVar

import attrs

from mscheduler_sync.limits import LONGEST_S, MAX_THREADS

Duration = float | int | dt.timedelta
Around = Callable[[], AbstractContextManager[Any]]
#: Takes a value and the argument's name; returns what is kept, or raises.
Check = Callable[[Any, str], Any]
_Options = TypeVar("_Options", bound=attrs.AttrsInstance)

MAX_KEY_BYTES: Final = 512
#: A longer wait is one without end, in seconds.
_FOR_EVER_S: Final = 1000 * 366 * 86_400
#: Longer names of tasks make the index heavy, in characters.
MAX_NAME_LENGTH: Final = 200


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


def deadline_after(timeout: float | dt.timedelta | None) -> float:
    """
    Return the monotonic time *timeout* seconds from now; None is for ever.

    Raises:
        TypeError, ValueError: If *timeout* is neither a timedelta nor a number of seconds of at
            least 0.
    """
    if timeout is None:
        return float("inf")
    if isinstance(timeout, dt.timedelta):
        timeout = timeout.total_seconds()
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        msg = f"timeout must be a number of seconds or None, got {timeout!r}"
        raise TypeError(msg)
    if not timeout >= 0:
        msg = f"timeout must be at least 0 seconds, got {timeout!r}"
        raise ValueError(msg)
    # An int may be beyond a float; a thousand years are for ever.
    return float("inf") if timeout > _FOR_EVER_S else time.monotonic() + timeout


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


def number(value: object, name: str, low: float, high: float) -> float:
    """
    Return a number.

    Raises:
        TypeError: If *value* is neither an int nor a float.
        ValueError: If it is not from *low* to *high*.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        msg = f"{name} must be a number, got {value!r}"
        raise TypeError(msg)
    if not low <= value <= high:
        msg = f"{name} must be from {low:g} to {high:g}, got {value!r}"
        raise ValueError(msg)
    return float(value)


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


def texts(value: object, name: str, most: int) -> tuple[str, ...]:
    """
    Return up to *most* strings, each as `text` checks it, of at most 200 bytes.

    Raises:
        TypeError: If *value* is no list, tuple or set of strings.
        ValueError: If there are too many, or one of them cannot be stored.
    """
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, set, frozenset)):
        msg = f"{name} must be a list of strings, got {value!r}"
        raise TypeError(msg)
    found = tuple(text(one, f"each of {name}", max_bytes=200) for one in value)
    if len(found) > most:
        msg = f"{name} must have at most {most} entries, has {len(found)}"
        raise ValueError(msg)
    return found


def choice(value: object, name: str, allowed: tuple[str, ...]) -> str:
    """
    Raises:
        ValueError: If *value* is not one of *allowed*.
    """
    if value not in allowed:
        msg = f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}"
        raise ValueError(msg)
    # Not value itself: it may be a member of a string enum.
    return allowed[allowed.index(value)]


def flag(value: object, name: str) -> bool:
    """
    Raises:
        TypeError: If *value* is not a bool.
    """
    if not isinstance(value, bool):
        msg = f"{name} must be True or False, got {value!r}"
        raise TypeError(msg)
    return value


def check_name(value: object, name: str = "name") -> str:
    """
    Return the name of a task.

    Raises:
        TypeError: If *value* is not a string.
        ValueError: If it is empty or longer than 200 characters, or holds what BSON cannot.
    """
    if not isinstance(value, str):
        msg = f"a task {name} must be a string, got {value!r}"
        raise TypeError(msg)
    if not value or len(value) > MAX_NAME_LENGTH:
        msg = f"a task {name} must have 1 to {MAX_NAME_LENGTH} characters, got {value!r:.80}"
        raise ValueError(msg)
    try:
        value.encode()
    except UnicodeEncodeError:
        msg = f"a task {name} must be valid Unicode, got {value!r}"
        raise ValueError(msg) from None
    return value


def new_worker_id() -> str:
    """
    Return an id that no other living worker has: host, process and a random part.
    """
    return f"{socket.gethostname()[:60]}-{os.getpid()}-{secrets.token_hex(4)}"


# -- classes of options ----------------------------------------------------------------------


def option(
    default: object,
    check: Check,
    path: str | None = None,
    *,
    missing: Callable[[], object] = lambda: None,
) -> Any:
    """
    A field of a class of options: the argument's default and check, and its *path* in the
    document of a task if it is stored.

    Where the default is None, None passes unchecked and stands for what *missing* returns.
    """
    metadata = {"check": check, "path": path, "missing": missing}
    return attrs.field(default=default, metadata=metadata)


def as_options(_: type, fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    """
    For `attrs.frozen`: each field is made of the argument of its name, without the unit ``_s``.
    """
    made = []
    for field in fields:
        name = field.name.removesuffix("_s")
        made.append(field.evolve(alias=name, converter=_converter(field, name)))
    return made


def _converter(field: attrs.Attribute[Any], name: str) -> Callable[[object], Any]:
    check: Check = field.metadata["check"]
    missing: Callable[[], object] = field.metadata["missing"]
    default = field.default
    if default is attrs.NOTHING:
        return lambda value: check(value, name)
    if default is None:
        return lambda value: missing() if value is None else check(value, name)
    # Most options of most calls are the default itself.
    checked = check(default, name)
    return lambda value: checked if value is default else check(value, name)


def _arguments_of(cls: type[attrs.AttrsInstance]) -> frozenset[str]:
    return frozenset(str(field.alias) for field in attrs.fields(cls))


#: The names of the arguments that the fields of a class of options are made of.
arguments_of: Final[Callable[[type], frozenset[str]]] = cache(_arguments_of)


def options_from(cls: type[_Options], arguments: Mapping[str, Any]) -> _Options:
    """
    Make *cls* of those of a call's *arguments* (its ``locals()``) that are options.

    Raises:
        TypeError, ValueError: Naming the argument, its value and the rule.
    """
    return cls(**{name: arguments[name] for name in arguments_of(cls)})


def _around(value: object, name: str) -> object:
    if not callable(value):
        msg = (
            f"{name} must be callable without arguments and return a context manager, got {value!r}"
        )
        raise TypeError(msg)
    return value


def check_max_workers(value: object, name: str = "max_workers") -> int:
    return whole(value, name, 0, MAX_THREADS)


@attrs.frozen(kw_only=True, field_transformer=as_options)
class ConsumerOptions:
    """
    The checked options of one consumer, one field each. Durations are in seconds.
    """

    worker_id: str = option(None, partial(text, max_bytes=200), missing=new_worker_id)
    max_workers: int = option(None, check_max_workers, missing=lambda: 8)
    around: Around | None = option(None, _around)
    watch: bool = option(True, flag)
    poll_interval_s: float = option(1.0, partial(seconds, at_least=0.01, at_most=3600.0))
    queue_limit: int = option(10_000, partial(whole, low=10, high=10_000_000))
    stop_timeout_s: float = option(25.0, partial(seconds, at_most=86_400.0))
    lease_margin_s: float | None = option(None, partial(seconds, at_most=3600.0))
    max_result_bytes: int = option(1024 * 1024, partial(whole, low=1, high=15 * 1024 * 1024))
    rust_interop: bool = option(False, flag)
