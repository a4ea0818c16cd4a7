"""
Single values that BSON cannot hold, or not as they are, and how they are stored: one table.
"""

from __future__ import annotations

import datetime as dt
import decimal
import pathlib
import uuid
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import attrs
from bson.binary import UUID_SUBTYPE, Binary
from bson.decimal128 import Decimal128

from mscheduler_sync._declared.forms import type_name

T = TypeVar("T")

#: Floats of seconds below this tell microseconds apart.
_EXACT_S: Final = 2**32


def _full_name(codec: Codec[Any]) -> str:
    return type_name(codec.type)


@attrs.frozen
class Codec(Generic[T]):
    """
    How values of one type, and of its subclasses, are stored as arguments and results.

    *encode* returns what BSON or another codec can hold; *decode* gets that back and returns the
    value. What either raises refuses the value. *name* stands in documents
    where no annotation tells the type; by default it is the type's full name.
    """

    type: type[T]
    encode: Callable[[T], Any]
    decode: Callable[[Any], T]
    name: str = attrs.field(default=attrs.Factory(_full_name, takes_self=True))


def _text(stored: object) -> str:
    if not isinstance(stored, str):
        msg = f"a string is needed, it is {type_name(type(stored))}"
        raise TypeError(msg)
    return stored


def _read_uuid(stored: object) -> uuid.UUID:
    if isinstance(stored, Binary) and stored.subtype == UUID_SUBTYPE:
        return stored.as_uuid()
    return stored if isinstance(stored, uuid.UUID) else uuid.UUID(_text(stored))


def _read_decimal(stored: object) -> decimal.Decimal:
    if isinstance(stored, Decimal128):
        return stored.to_decimal()
    if isinstance(stored, int) and not isinstance(stored, bool):
        return decimal.Decimal(stored)
    # Not of a float: its digits are not those that somebody has written.
    return decimal.Decimal(_text(stored))


def _read_datetime(stored: object) -> dt.datetime:
    if isinstance(stored, dt.datetime):
        # A BSON date, which is in UTC whatever the client's options make of it.
        return stored if stored.tzinfo is not None else stored.replace(tzinfo=dt.timezone.utc)
    text = _text(stored)
    return dt.datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith("Z") else text)


def _write_time(value: dt.time) -> str:
    if value.tzinfo is not None and value.utcoffset() is None:
        msg = "its zone has no offset without a date"
        raise ValueError(msg)
    return value.isoformat()


def _write_timedelta(value: dt.timedelta) -> float | str:
    microseconds = value // dt.timedelta(microseconds=1)
    if microseconds % 1_000_000 == 0:
        return microseconds // 1_000_000
    seconds = microseconds / 1e6
    # Centuries with microseconds have more digits than a float.
    return seconds if abs(seconds) < _EXACT_S else f"{microseconds}e-6"


def _read_timedelta(stored: object) -> dt.timedelta:
    if isinstance(stored, (int, float)) and not isinstance(stored, bool):
        return dt.timedelta(seconds=stored)
    return dt.timedelta(microseconds=int(decimal.Decimal(_text(stored)).scaleb(6)))


#: Documented in docs/tasks.md. Containers, enums and classes are not here: they have members.
TABLE: Final[tuple[Codec[Any], ...]] = (
    Codec(uuid.UUID, str, _read_uuid, "uuid"),
    Codec(decimal.Decimal, str, _read_decimal, "decimal"),
    Codec(dt.datetime, dt.datetime.isoformat, _read_datetime, "datetime"),
    Codec(dt.date, dt.date.isoformat, lambda stored: dt.date.fromisoformat(_text(stored)), "date"),
    Codec(dt.time, _write_time, lambda stored: dt.time.fromisoformat(_text(stored)), "time"),
    Codec(dt.timedelta, _write_timedelta, _read_timedelta, "timedelta"),
    *(
        # Each kind of path comes back as the kind that was asked for.
        Codec(
            kind,
            pathlib.PurePath.as_posix,
            lambda stored, kind=kind: kind(_text(stored)),  # type: ignore[misc]
            name,
        )
        for kind, name in ((pathlib.Path, "path"), (pathlib.PurePath, "pure_path"))
    ),
)
