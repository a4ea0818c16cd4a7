"""
Whatever was raised, as a bounded text that can be stored.
"""

from __future__ import annotations

import traceback
from typing import Final

#: `fail_reason` is never longer than this, encoded.
MAX_REASON_BYTES: Final = 8 * 1024
_MAX_HEAD_CHARS: Final = 2000
_FRAMES: Final = 30


def describe(error: BaseException) -> str:
    """
    Return type, message and the end of the traceback of *error*; never raises.
    """
    head = f"{_type_name(error)}: {_message(error)}"[:_MAX_HEAD_CHARS]
    try:
        frames = "".join(traceback.format_tb(error.__traceback__, limit=-_FRAMES))
    except Exception:  # noqa: BLE001 - the text of a failure must not become another failure
        frames = ""
    links: list[str] = []
    cause, seen = error, {id(error)}
    while len(links) < 5:  # noqa: PLR2004 - a chain may be a thousand deep
        following = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
        if following is None or id(following) in seen:
            break
        cause = following
        seen.add(id(cause))
        links.append(f"caused by {_type_name(cause)}: {_message(cause)}"[:500])
    return bounded("\n".join([head, *links, frames.rstrip()]).rstrip())


def name_and_text(error: BaseException) -> tuple[str, str]:
    """
    Return class and message of *error*, bounded; never raises.
    """
    return _type_name(error)[:200], bounded(_message(error))


def bounded(text: str) -> str:
    """
    Return *text* as valid Unicode of at most `MAX_REASON_BYTES`, its middle cut out if need be.
    """
    data = text[: 4 * MAX_REASON_BYTES].encode("utf-8", "backslashreplace")
    if len(text) <= 4 * MAX_REASON_BYTES and len(data) <= MAX_REASON_BYTES:
        return data.decode()
    tail = text[-MAX_REASON_BYTES // 2 :].encode("utf-8", "backslashreplace")
    mark = b"\n[...]\n"
    half = (MAX_REASON_BYTES - len(mark)) // 2
    return (data[:half] + mark + tail[-half:]).decode("utf-8", "ignore")


def _type_name(error: BaseException) -> str:
    kind = type(error)
    module = getattr(kind, "__module__", "")
    name = getattr(kind, "__qualname__", "?")
    is_plain = module in {"builtins", "__main__", "", "mscheduler_sync.errors"}
    return name if is_plain else f"{module}.{name}"


def _message(error: BaseException) -> str:
    try:
        return str(error)[: 4 * _MAX_HEAD_CHARS]
    except BaseException as second:  # noqa: BLE001 - a user's __str__ may raise anything
        return f"(its text could not be made: {type(second).__name__})"
