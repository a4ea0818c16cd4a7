"""
Whatever was raised, as a bounded text that can be stored.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from typing import Any

import bson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mscheduler_sync._runtime.failure import MAX_REASON_BYTES, bounded, describe


def raised(function: Callable[[], object]) -> BaseException:
    """
    The exception that *function* raises, with its traceback.
    """
    try:
        function()
    except BaseException as error:  # noqa: BLE001 - any kind is wanted
        return error
    raise AssertionError("nothing was raised")


def raising(error: BaseException) -> BaseException:
    def act() -> None:
        raise error

    return raised(act)


def disk_fails() -> None:
    raise OSError("disk")


def check(text: str) -> str:
    """
    Return *text*, which MongoDB can store and which is within the limit.
    """
    assert len(text.encode()) <= MAX_REASON_BYTES
    assert bson.decode(bson.encode({"fail_reason": text}))["fail_reason"] == text
    return text


class OwnError(Exception):
    """
    An application's error.
    """


def test_type_message_and_place() -> None:
    """
    The first line says what happened, the end says where.
    """
    text = check(describe(raising(ValueError("no such invoice"))))
    lines = text.splitlines()
    assert lines[0] == "ValueError: no such invoice"
    assert "in act" in text
    assert lines[-1].strip() in {"raise error", "^^^^^^^^^^^"}


def test_own_types_are_named_with_their_module() -> None:
    """
    Two errors of one name can be told apart.
    """
    assert describe(OwnError("x")).startswith(f"{__name__}.OwnError: x")


def test_an_error_that_was_never_raised_has_no_place() -> None:
    """
    Without a traceback the text is type and message alone.
    """
    assert describe(KeyError("k")) == "KeyError: 'k'"
    assert describe(ValueError()) == "ValueError:"


@pytest.mark.parametrize(
    ("error", "first_line"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (GeneratorExit("x"), "GeneratorExit: x"),
        (BaseException("base"), "BaseException: base"),
    ],
)
def test_what_is_meant_to_end_a_program_is_told_too(error: BaseException, first_line: str) -> None:
    """
    Every kind of exception makes a text.
    """
    assert check(describe(raising(error))).splitlines()[0] == first_line


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt, RecursionError])
def test_an_error_whose_text_cannot_be_made(kind: type[BaseException]) -> None:
    """
    A ``__str__`` that raises, whatever it raises, costs only the text.
    """

    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise kind

    text = check(describe(raising(Unspeakable())))
    assert f"Unspeakable: (its text could not be made: {kind.__name__})" in text.splitlines()[0]


def test_an_error_whose_text_is_no_text() -> None:
    """
    A ``__str__`` that returns something else is one that raises.
    """

    class Wrong(Exception):
        def __str__(self) -> str:
            return 5  # type: ignore[return-value]  # noqa: PLE0307

    assert "(its text could not be made: TypeError)" in check(describe(Wrong()))


def test_the_cause_is_told() -> None:
    """
    What lies behind an error stands in the text, nearest first.
    """

    def chained() -> None:
        try:
            try:
                disk_fails()
            except OSError as error:
                raise RuntimeError("storage") from error
        except RuntimeError as error:
            raise OwnError("invoice") from error

    lines = check(describe(raised(chained))).splitlines()
    assert lines[0].endswith("OwnError: invoice")
    assert lines[1:3] == ["caused by RuntimeError: storage", "caused by OSError: disk"]


def test_what_was_being_handled_counts_unless_it_was_hidden() -> None:
    """
    As in Python's own tracebacks.
    """

    def implicit() -> None:
        try:
            disk_fails()
        except OSError:
            raise RuntimeError("storage")  # noqa: B904 - the implicit context is what is tested

    def hidden() -> None:
        try:
            disk_fails()
        except OSError:
            raise RuntimeError("storage") from None

    assert "caused by OSError: disk" in describe(raised(implicit))
    assert "disk" not in describe(raised(hidden)).splitlines()[1]
    assert "caused by" not in describe(raised(hidden))


def test_a_chain_that_is_very_long() -> None:
    """
    Of a thousand causes the nearest are told.
    """
    error = ValueError(0)
    for number in range(1, 1_001):
        following = ValueError(number)
        following.__cause__ = error
        error = following
    lines = check(describe(error)).splitlines()
    assert lines == [
        "ValueError: 1000",
        *(f"caused by ValueError: {n}" for n in range(999, 994, -1)),
    ]


def test_a_chain_that_is_a_circle() -> None:
    """
    Errors that are causes of each other end the text, not the program.
    """
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert describe(first) == "ValueError: first\ncaused by ValueError: second"
    first.__cause__ = first
    assert describe(first) == "ValueError: first"


def test_a_cause_whose_text_cannot_be_made() -> None:
    """
    The rest of the text stands.
    """

    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    error = ValueError("told")
    error.__cause__ = Unspeakable()
    assert "caused by" in check(describe(error))
    assert "its text could not be made" in describe(error)


def test_a_deep_stack_is_cut() -> None:
    """
    Of very many frames the last ones are told, where the error was.
    """

    def deeper(depth: int) -> int:
        if depth == 0:
            raise ZeroDivisionError("at the bottom")
        return other(depth - 1) + 1

    # Two functions in turn: a line that is repeated would be told only once.
    def other(depth: int) -> int:
        return deeper(depth) + 1

    text = check(describe(raised(lambda: deeper(300))))
    assert text.startswith("ZeroDivisionError: at the bottom")
    assert 1 <= text.count("in deeper") + text.count("in other") <= 30


def test_a_stack_that_has_run_out() -> None:
    """
    A recursion error is told like others.
    """

    def endless() -> Any:
        return endless()

    assert check(describe(raised(endless))).startswith("RecursionError: ")


def test_fifty_megabytes_of_text() -> None:
    """
    A huge message is cut to the limit, and its first part is kept.
    """
    text = check(describe(raising(ValueError("start " + "x" * 50_000_000))))
    assert text.startswith("ValueError: start xxx")
    assert "in act" in text


@pytest.mark.parametrize("filler", ["x", "é", "\N{SNOWMAN}", "\N{GRINNING FACE}", "\ud800", "\0"])
def test_long_texts_of_any_characters(filler: str) -> None:
    """
    Nothing is cut in the middle of a character, and the limit is one of bytes.
    """
    for length in (100, 8_000, 8_193, 33_000, 100_000):
        check(bounded(filler * length))
    check(describe(raising(ValueError(filler * 100_000))))


def test_lone_surrogates_can_be_stored() -> None:
    """
    Text that is not valid Unicode is written out.
    """
    assert check(bounded("a\ud800b")) == r"a\ud800b"
    assert check(describe(ValueError("a\udfffb"))) == r"ValueError: a\udfffb"


def test_nul_characters_are_kept() -> None:
    """
    BSON strings may hold them.
    """
    assert check(bounded("a\0b")) == "a\0b"


def test_a_text_that_is_too_long_loses_its_middle() -> None:
    """
    Beginning and end are kept, with a mark between them.
    """
    text = check(bounded("b" * 50_000 + "e" * 50_000))
    assert text.startswith("bbb")
    assert text.endswith("eee")
    assert text.count("\n[...]\n") == 1
    assert len(text) > MAX_REASON_BYTES - 10


def test_a_text_within_the_limit_is_kept_whole() -> None:
    """
    Not a byte is lost up to the limit.
    """
    assert bounded("x" * MAX_REASON_BYTES) == "x" * MAX_REASON_BYTES
    assert bounded("é" * (MAX_REASON_BYTES // 2)) == "é" * (MAX_REASON_BYTES // 2)
    assert bounded("") == ""


@given(st.text(st.characters(), max_size=50), st.integers(1, 2_000))
def test_any_text_can_be_stored(text: str, times: int) -> None:
    """
    Whatever characters, surrogates included, the result is valid, bounded, and stays as it is.
    """
    result = check(bounded(text * times))
    assert bounded(result) == result


def test_types_with_odd_names() -> None:
    """
    A type whose module or name is unusual is named somehow.
    """
    odd = type("Odd", (Exception,), {"__module__": None})
    assert "Odd: x" in check(describe(odd("x")))
    surrogate = type("Bad", (Exception,), {"__module__": "m\ud800"})
    assert r"m\ud800.Bad: x" in check(describe(surrogate("x")))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups are new in 3.11")
def test_groups_of_errors() -> None:
    """
    A group is told by its own message.
    """
    group = vars(builtins)["ExceptionGroup"]
    text = check(describe(raising(group("several", [ValueError(1)] * 1_000))))
    assert text.startswith("ExceptionGroup: several (1000 sub-exceptions)")
