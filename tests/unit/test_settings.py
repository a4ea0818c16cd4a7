"""
Arguments of consumers, and the checks that all arguments share.
"""

from __future__ import annotations

import datetime as dt
import enum
import fractions
import os
import re
import socket
from contextlib import nullcontext
from decimal import Decimal
from typing import Any

import attrs
import pytest

from mscheduler_sync.limits import MAX_THREADS
from mscheduler_sync.settings import (
    ConsumerOptions,
    choice,
    new_worker_id,
    options_from,
    seconds,
    text,
    whole,
)


class Word(str, enum.Enum):
    """
    What programs like to pass for strings.
    """

    RED = "red"


class Level(enum.IntEnum):
    """
    What programs like to pass for numbers.
    """

    HIGH = 7


def exactly(message: str) -> str:
    return f"^{re.escape(message)}$"


# -- durations -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0.0),
        (1, 1.0),
        (0.25, 0.25),
        (Level.HIGH, 7.0),
        (dt.timedelta(minutes=2, microseconds=500), 120.0005),
        (10 * 366 * 86_400, 316_224_000.0),
    ],
)
def test_durations_are_seconds_or_timedelta(value: object, expected: float) -> None:
    """
    Whole and broken numbers and timedelta are taken, up to ten years.
    """
    result = seconds(value, "delay")
    assert result == expected
    assert type(result) is float


@pytest.mark.parametrize(
    "value",
    [None, True, False, "1", b"1", Decimal(1), fractions.Fraction(1), 1j, [1], dt.time(1), object],
)
def test_a_duration_of_the_wrong_type_is_named(value: object) -> None:
    """
    The error names the argument and the value; a bool is no number.
    """
    message = f"delay must be a number of seconds or a timedelta, got {value!r}"
    with pytest.raises(TypeError, match=exactly(message)):
        seconds(value, "delay")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (-1, "-1"),
        (-0.001, "-0.001"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        (316_224_001, "316224001"),
        (10**400, str(10**400)),
        (dt.timedelta(seconds=-1), "-1.0"),
        (dt.timedelta.max, "86400000000000.0"),
    ],
)
def test_a_duration_out_of_range_is_named(value: object, shown: str) -> None:
    """
    The error names the argument, the rule and the value.
    """
    start = "delay must be at least 0 and at most 3.16224e+08 seconds, got "
    with pytest.raises(ValueError, match="^" + re.escape(start)) as caught:
        seconds(value, "delay")
    assert str(caught.value).removeprefix(start).startswith(shown)


def test_bounds_of_durations() -> None:
    """
    A lower bound is included or, where said so, excluded; the upper one is included.
    """
    assert seconds(2, "lease", at_least=2, at_most=3) == 2.0
    assert seconds(3, "lease", at_least=2, at_most=3) == 3.0
    assert seconds(0.001, "lease", above=0) == 0.001
    message = "lease must be above 0 and at most 3 seconds, got 0"
    with pytest.raises(ValueError, match=exactly(message)):
        seconds(0, "lease", above=0, at_most=3)
    message = "lease must be at least 2 and at most 3 seconds, got 1.5"
    with pytest.raises(ValueError, match=exactly(message)):
        seconds(1.5, "lease", at_least=2, at_most=3)


# -- numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, 5, 9, Level.HIGH])
def test_whole_numbers_within_bounds(value: int) -> None:
    """
    Both bounds are included.
    """
    assert whole(value, "priority", 0, 9) == value


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, Decimal(1), float("nan"), [1]])
def test_a_number_that_is_not_whole_is_named(value: object) -> None:
    """
    Neither bools nor floats pass for whole numbers.
    """
    message = f"priority must be a whole number, got {value!r}"
    with pytest.raises(TypeError, match=exactly(message)):
        whole(value, "priority", 0, 9)


@pytest.mark.parametrize("value", [-1, 10, 2**63, -(10**30)])
def test_a_whole_number_out_of_range_is_named(value: int) -> None:
    """
    The error names the argument, the rule and the value.
    """
    with pytest.raises(ValueError, match=exactly(f"priority must be from 0 to 9, got {value}")):
        whole(value, "priority", 0, 9)


# -- texts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["a", " ", "x" * 512, "é" * 256, "\N{SNOWMAN}", "$key", "a.b", "a\0b"]
)
def test_texts_that_can_be_keys(value: str) -> None:
    """
    Anything that is not empty and takes at most 512 bytes.
    """
    assert text(value, "key") == value


@pytest.mark.parametrize("value", [None, 1, True, b"key", ["key"], object()])
def test_a_text_of_the_wrong_type_is_named(value: object) -> None:
    """
    Only strings are taken.
    """
    with pytest.raises(TypeError, match=exactly(f"key must be a string, got {value!r}")):
        text(value, "key")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "key must not be empty"),
        ("a\ud800", r"key must be valid Unicode, got 'a\ud800'"),
        ("x" * 513, "key must take at most 512 bytes, takes 513: '" + "x" * 79),
        ("é" * 257, "key must take at most 512 bytes, takes 514: '" + "é" * 79),
    ],
)
def test_a_text_that_cannot_be_stored_is_named(value: str, message: str) -> None:
    """
    The error names the argument, the rule and the value, long ones shortened.
    """
    with pytest.raises(ValueError, match=exactly(message)):
        text(value, "key")


def test_a_kind_of_string_is_taken_for_the_text_it_is() -> None:
    """
    A member of a string enum stands for its value, as everywhere else.
    """
    result = text(Word.RED, "key")
    assert result == "red"
    assert type(result) is str


def test_choices() -> None:
    """
    One of the allowed words is returned; anything else is named with the rule.
    """
    assert choice("keep", "if_exists", ("keep", "raise")) == "keep"
    for wrong in ("", "KEEP", None, 1, ["keep"]):
        message = f"if_exists must be one of 'keep', 'raise', got {wrong!r}"
        with pytest.raises(ValueError, match=exactly(message)):
            choice(wrong, "if_exists", ("keep", "raise"))


# -- consumers -------------------------------------------------------------------------------

DEFAULTS: dict[str, Any] = {
    "worker_id": "w1",
    "max_workers": 4,
    "around": None,
    "watch": True,
    "poll_interval": 1.0,
    "queue_limit": 10_000,
    "stop_timeout": 25.0,
    "lease_margin": None,
    "max_result_bytes": 1024 * 1024,
    "rust_interop": False,
}


def test_settings_are_kept_in_seconds() -> None:
    """
    Every argument ends up in its field.
    """
    arguments: dict[str, Any] = {
        "worker_id": "w1",
        "max_workers": 0,
        "around": nullcontext,
        "watch": False,
        "poll_interval": dt.timedelta(milliseconds=500),
        "queue_limit": 10,
        "stop_timeout": 0,
        "lease_margin": dt.timedelta(seconds=3),
        "max_result_bytes": 1,
        "rust_interop": True,
    }
    result = options_from(ConsumerOptions, {"self": None, **arguments})
    assert attrs.asdict(result) == {
        "worker_id": "w1",
        "max_workers": 0,
        "around": nullcontext,
        "watch": False,
        "poll_interval_s": 0.5,
        "queue_limit": 10,
        "stop_timeout_s": 0.0,
        "lease_margin_s": 3.0,
        "max_result_bytes": 1,
        "rust_interop": True,
    }


def test_defaults_of_workers() -> None:
    """
    Without an id one is made; without a number there are eight workers.
    """
    result = ConsumerOptions(**{**DEFAULTS, "worker_id": None, "max_workers": None})
    assert result.max_workers == 8
    assert result.lease_margin_s is None
    assert result.worker_id != ConsumerOptions(**{**DEFAULTS, "worker_id": None}).worker_id


_WHOLE = "must be a whole number, got"
_SECONDS = "must be a number of seconds or a timedelta, got"
_POLL = "must be at least 0.01 and at most 3600 seconds, got"
_STOP = "must be at least 0 and at most 86400 seconds, got"


@pytest.mark.parametrize(
    ("name", "value", "kind", "rule"),
    [
        ("worker_id", "", ValueError, "must not be empty"),
        ("worker_id", 7, TypeError, "must be a string, got 7"),
        ("worker_id", "\udfff", ValueError, r"must be valid Unicode, got '\udfff'"),
        ("worker_id", "w" * 201, ValueError, "must take at most 200 bytes, takes 201: 'www"),
        ("max_workers", -1, ValueError, f"must be from 0 to {MAX_THREADS}, got -1"),
        ("max_workers", 1001, ValueError, f"must be from 0 to {MAX_THREADS}, got 1001"),
        ("max_workers", True, TypeError, f"{_WHOLE} True"),
        ("max_workers", 2.0, TypeError, f"{_WHOLE} 2.0"),
        ("max_workers", "8", TypeError, f"{_WHOLE} '8'"),
        ("around", 5, TypeError, "must be callable without arguments and return a context manager"),
        ("watch", 1, TypeError, "must be True or False, got 1"),
        ("watch", None, TypeError, "must be True or False, got None"),
        ("rust_interop", "yes", TypeError, "must be True or False, got 'yes'"),
        ("poll_interval", 0, ValueError, f"{_POLL} 0"),
        ("poll_interval", 3601, ValueError, f"{_POLL} 3601"),
        ("poll_interval", float("nan"), ValueError, f"{_POLL} nan"),
        ("poll_interval", None, TypeError, f"{_SECONDS} None"),
        ("queue_limit", 9, ValueError, "must be from 10 to 10000000, got 9"),
        ("queue_limit", 10**8, ValueError, "must be from 10 to 10000000, got 100000000"),
        ("queue_limit", None, TypeError, f"{_WHOLE} None"),
        ("stop_timeout", -1, ValueError, f"{_STOP} -1"),
        ("stop_timeout", float("inf"), ValueError, f"{_STOP} inf"),
        ("stop_timeout", True, TypeError, f"{_SECONDS} True"),
        ("lease_margin", -0.5, ValueError, "must be at least 0 and at most 3600 seconds, got -0.5"),
        ("lease_margin", "2", TypeError, f"{_SECONDS} '2'"),
        ("max_result_bytes", 0, ValueError, "must be from 1 to 15728640, got 0"),
        ("max_result_bytes", 2**24, ValueError, "must be from 1 to 15728640, got 16777216"),
        ("max_result_bytes", 1e6, TypeError, f"{_WHOLE} 1000000.0"),
    ],
)  # fmt: skip
def test_wrong_settings_are_named(
    name: str, value: object, kind: type[Exception], rule: str
) -> None:
    """
    The error names the argument, the rule and the value.
    """
    with pytest.raises(kind, match="^" + re.escape(f"{name} {rule}")):
        ConsumerOptions(**{**DEFAULTS, name: value})


def test_worker_ids_say_where_and_differ() -> None:
    """
    Host and process can be read from an id; no two are alike.
    """
    ids = {new_worker_id() for _ in range(1_000)}
    assert len(ids) == 1_000
    start = f"{socket.gethostname()[:60]}-{os.getpid()}-"
    assert all(one.startswith(start) for one in ids)
    assert text(ids.pop(), "worker_id", max_bytes=200)


def test_the_longest_host_name_still_makes_a_worker_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A long host name is cut.
    """
    monkeypatch.setattr("socket.gethostname", lambda: "h" * 255)
    assert len(new_worker_id()) < 100
