"""
Values of users to BSON and back, with errors that name the place.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Mapping
from typing import Any, Final

import attrs
import bson
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.errors import InvalidDocument
from bson.raw_bson import RawBSONDocument

#: MongoDB nests documents and arrays at most 100 deep (https://www.mongodb.com/docs/manual/reference/limits/);
#: the task's document has its own levels around a value.
MAX_DEPTH: Final = 90
#: A level of nesting takes at least so many bytes.
_LEVEL_BYTES: Final = 8
#: A document may not exceed 16 MiB; the rest of it needs some room.
MAX_PARAMS_BYTES: Final = 15 * 1024 * 1024

#: How the library itself reads: aware UTC dates; a date beyond Python's years does not raise.
ENVELOPE: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    document_class=dict,
    tz_aware=True,
    tzinfo=dt.timezone.utc,
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
    unicode_decode_error_handler="replace",
)
#: How documents leave the driver: undecoded, so that a faulty one spoils no other.
RAW: Final[CodecOptions[RawBSONDocument]] = CodecOptions(
    document_class=RawBSONDocument, datetime_conversion=DatetimeConversion.DATETIME_AUTO
)


class Unstorable(ValueError):
    """
    A value cannot be stored; the message says where in it and why.
    """


@attrs.frozen
class Frozen:
    """
    An encoded value and its size.
    """

    value: Any
    size_bytes: int


def freeze(value: object, options: CodecOptions[Any], *, what: str, limit_bytes: int) -> Frozen:
    """
    Return *value* encoded with the caller's *options*: safe to store, and a copy.

    Raises:
        Unstorable: If BSON cannot hold it (named by its path) or it exceeds *limit_bytes*.
    """
    if value is None:
        # What most functions return.
        return Frozen(None, 0)
    try:
        raw = bson.encode({"v": value}, codec_options=options)
    except RecursionError:
        msg = f"{what} is nested too deeply, or contains itself"
        raise Unstorable(msg) from None
    except Exception as error:
        path, problem = _find_fault(value, options, what)
        msg = f"{path} cannot be stored: {problem}"
        raise Unstorable(msg) from error
    if len(raw) > MAX_DEPTH * _LEVEL_BYTES and _is_deeper(value, MAX_DEPTH):
        msg = f"{what} is nested more than {MAX_DEPTH} levels deep"
        raise Unstorable(msg)
    if len(raw) > limit_bytes:
        msg = f"{what} takes {len(raw)} bytes, more than the limit of {limit_bytes}"
        raise Unstorable(msg)
    return Frozen(RawBSONDocument(raw, codec_options=RAW)["v"], len(raw))


def _is_deeper(value: object, levels: int) -> bool:
    """
    Return whether *value* has more than *levels* mappings and lists inside one another.
    """
    containers: list[object] = [value]
    for _ in range(levels + 1):
        containers = [one for one in containers if isinstance(one, (Mapping, list, tuple))]
        if not containers:
            return False
        containers = [
            inner
            for one in containers
            for inner in (one.values() if isinstance(one, Mapping) else one)  # type: ignore[attr-defined]
        ]
    return True


def thaw(document: RawBSONDocument, field: str, options: CodecOptions[Any]) -> Any:
    """
    Return a field of *document* as the caller's *options* decode it, or None where it is missing.
    """
    if field not in document:
        return None
    value = document[field]
    if isinstance(value, RawBSONDocument):
        return bson.decode(value.raw, codec_options=options)
    raw = bson.encode({"v": value}, codec_options=RAW)
    decoded: Mapping[str, Any] = bson.decode(raw, codec_options=options)
    return decoded["v"]


def envelope(document: RawBSONDocument) -> dict[str, Any]:
    """
    Decode a document for the library's own use.
    """
    return bson.decode(document.raw, codec_options=ENVELOPE)


def _problem_of(error: BaseException, value: object) -> str:
    """
    Say why *value* cannot be encoded, without showing it: it may be a secret.
    """
    if isinstance(error, UnicodeEncodeError):
        return "it holds text that is not valid Unicode (a lone surrogate)"
    if isinstance(error, OverflowError):
        return "it holds an int beyond 64 bits"
    if isinstance(value, uuid.UUID):
        # Tells of the client's uuidRepresentation.
        return str(error).split("\n", maxsplit=1)[0][:300]
    if isinstance(error, InvalidDocument) and not isinstance(value, (Mapping, list, tuple)):
        return f"BSON has no type for {_type_of(value)}"
    return f"encoding {_type_of(value)} raised {type(error).__name__}"


def _type_of(value: object) -> str:
    cls = type(value)
    return (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )


def _find_fault(value: object, options: CodecOptions[Any], path: str) -> tuple[str, str]:
    """
    Return the path of the innermost value that cannot be encoded, and why.
    """
    while True:
        try:
            inner = _faulty_part(value, options)
        except Exception as error:  # noqa: BLE001 - a user's object may break while it is read
            return path, _problem_of(error, value)
        if inner is None:
            break
        step, value = inner
        path += step
    for number, name in enumerate(value if isinstance(value, Mapping) else (), 1):
        if not isinstance(name, str):
            return path, f"its key number {number} is not a string but {_type_of(name)}"
        if "\x00" in name:
            return path, f"its key number {number} holds a NUL character"
    try:
        bson.encode({"v": value}, codec_options=options)
    except Exception as error:  # noqa: BLE001 - whatever the user's value raises is the answer
        return path, _problem_of(error, value)
    return path, "it could not be encoded"


def _faulty_part(value: object, options: CodecOptions[Any]) -> tuple[str, object] | None:
    """
    Return the first part of *value* that cannot be encoded by itself: (its step of the path, it).
    """
    if isinstance(value, Mapping):
        steps = [(f".{name}", inner) for name, inner in value.items() if isinstance(name, str)]
    elif isinstance(value, (list, tuple)):
        steps = [(f"[{number}]", inner) for number, inner in enumerate(value)]
    else:
        return None
    return next((step for step in steps if not _encodes(step[1], options)), None)


def _encodes(value: object, options: CodecOptions[Any]) -> bool:
    try:
        bson.encode({"v": value}, codec_options=options)
    except Exception:  # noqa: BLE001 - see _find_fault
        return False
    return True
