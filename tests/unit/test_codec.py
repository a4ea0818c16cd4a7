"""
Users' values to BSON and back: what survives, what is refused, and with what words.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import math
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bson
import pytest
from bson import Binary, Code, DBRef, Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions, TypeCodec, TypeRegistry
from bson.raw_bson import RawBSONDocument
from hypothesis import given, settings
from hypothesis import strategies as st

from mscheduler_sync._storage import codec
from mscheduler_sync._storage.codec import Unstorable, envelope, freeze, thaw

Options = CodecOptions[Any]

UTC = dt.timezone.utc
NAIVE: Options = CodecOptions()
AWARE: Options = CodecOptions(tz_aware=True, tzinfo=UTC)
WITH_UUID: Options = CodecOptions(uuid_representation=UuidRepresentation.STANDARD)
LIMIT = codec.MAX_PARAMS_BYTES
OBJECT_ID = ObjectId("65a1b2c3d4e5f60718293a4b")


def there(value: object, options: Options = NAIVE) -> Any:
    """
    What a document holds for *value* once the library has stored it.
    """
    return freeze(value, options, what="params", limit_bytes=LIMIT).value


def stored(value: object, options: Options = NAIVE) -> RawBSONDocument:
    return RawBSONDocument(bson.encode({"params": there(value, options)}), codec_options=codec.RAW)


def there_and_back(value: object, options: Options = NAIVE) -> Any:
    return thaw(stored(value, options), "params", options)


def refusal(value: object, options: Options = NAIVE) -> str:
    with pytest.raises(Unstorable) as caught:
        there(value, options)
    return str(caught.value)


class Word(str, enum.Enum):
    """
    A string with a name.
    """

    RED = "red"


class Level(enum.IntEnum):
    """
    A number with a name.
    """

    HIGH = 3


class Colour(enum.Enum):
    """
    A name that is neither string nor number.
    """

    RED = 1


class Text(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "something else"


class Number(int):
    def __int__(self) -> int:
        return -1


class Pairs(dict[str, Any]):
    pass


class Things(list[Any]):
    pass


@dataclasses.dataclass
class Invoice:
    """
    What programs would like to send.
    """

    number: int = 1


Point = collections.namedtuple("Point", "x y")


class ReadOnly(Mapping[str, Any]):
    """
    A mapping that is not a dict.
    """

    def __getitem__(self, name: str) -> Any:
        return {"a": 1}[name]

    def __iter__(self) -> Any:
        return iter(["a"])

    def __len__(self) -> int:
        return 1

    def __repr__(self) -> str:
        return "ReadOnly()"


def nested(depth: int, leaf: object = 1) -> object:
    value = leaf
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        -1,
        2**31 - 1,
        1.5,
        -0.0,
        float("inf"),
        float("-inf"),
        5e-324,
        "",
        "é\N{SNOWMAN}\N{GRINNING FACE}",
        "a\0b",
        "$key",
        b"",
        b"\x00\xff",
        [],
        {},
        [1, "a", None, [2.5]],
        {"a": {"b": [{"c": None}]}},
        {"": 1, "a.b": 2, "$set": 3, "_id": 4},
        {"$literal": "$$NOW"},
        dt.datetime(2031, 5, 6, 7, 8, 9, 123_000),  # noqa: DTZ001 - as this client would read it
        dt.datetime(1, 1, 1),  # noqa: DTZ001
        dt.datetime(9999, 12, 31, 23, 59, 59, 999_000),  # noqa: DTZ001
        OBJECT_ID,
        Decimal128("1.10"),
        Decimal128("NaN"),
        Int64(5),
        Timestamp(1, 2),
        MinKey(),
        MaxKey(),
        Code("f()"),
        Binary(b"x", 128),
    ],
    ids=repr,
)
def test_values_that_come_back_as_they_were(value: object) -> None:
    """
    At the top, in a list and in a dict alike, in type and value.
    """
    for wrapped in (value, [value], {"v": value}):
        back = there_and_back(wrapped)
        assert repr(back) == repr(wrapped)
        assert type(back) is type(wrapped)


def test_not_a_number_comes_back() -> None:
    """
    NaN is a value like others.
    """
    assert math.isnan(there_and_back(float("nan")))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((1, (2,)), [1, [2]]),
        (Point(1, 2), [1, 2]),
        (Things([1]), [1]),
        (Word.RED, "red"),
        (Text("text"), "text"),
        (Level.HIGH, 3),
        (Number(5), 5),
        (2**31, Int64(2**31)),
        (2**63 - 1, Int64(2**63 - 1)),
        (-(2**63), Int64(-(2**63))),
        (Regex("^a", "i"), Regex("^a", "i")),
        (DBRef("tasks", 1), DBRef("tasks", 1)),
        (Pairs(a=Pairs(b=1)), {"a": {"b": 1}}),
        (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (collections.defaultdict(list, a=[1]), {"a": [1]}),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (ReadOnly(), {"a": 1}),
        (re.compile("^a", re.IGNORECASE), Regex("^a", "iu")),
        (Binary(b"x"), b"x"),
        (dt.datetime(2031, 1, 1, 0, 0, 0, 999_999), dt.datetime(2031, 1, 1, 0, 0, 0, 999_000)),  # noqa: DTZ001
    ],
    ids=repr,
)  # fmt: skip
def test_values_that_come_back_as_their_plain_kind(value: object, expected: object) -> None:
    """
    A kind of list, dict, string or number comes back plain or as the driver reads it.
    """
    back = there_and_back({"v": value})["v"]
    assert back == expected
    assert type(back) is type(expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (NAIVE, dt.datetime(2031, 5, 6, 3)),  # noqa: DTZ001
        (AWARE, dt.datetime(2031, 5, 6, 3, tzinfo=UTC)),
        (
            CodecOptions(tz_aware=True, tzinfo=dt.timezone(dt.timedelta(hours=2))),
            dt.datetime(2031, 5, 6, 5, tzinfo=dt.timezone(dt.timedelta(hours=2))),
        ),
    ],
    ids=["naive", "aware", "aware, own zone"],
)
def test_datetimes_come_back_as_the_application_reads_them(
    options: Options, expected: dt.datetime
) -> None:
    """
    The moment is kept; naive or aware, and in which zone, is the client's own setting.
    """
    sent = dt.datetime(2031, 5, 6, 12, tzinfo=dt.timezone(dt.timedelta(hours=9)))
    for back in (there_and_back(sent, options), there_and_back([sent], options)[0]):
        assert back == expected
        assert back.tzinfo == expected.tzinfo


def test_naive_datetimes_are_utc() -> None:
    """
    As the driver takes them everywhere.
    """
    back = there_and_back(dt.datetime(2031, 5, 6, 12), AWARE)  # noqa: DTZ001
    assert back == dt.datetime(2031, 5, 6, 12, tzinfo=UTC)


def test_uuids_need_the_clients_setting() -> None:
    """
    With a representation they come back; without, the error says what to set.
    """
    value = uuid.uuid4()
    assert there_and_back({"id": value}, WITH_UUID) == {"id": value}
    message = refusal({"id": value})
    assert message.startswith("params.id cannot be stored: cannot encode native uuid.UUID")
    assert there_and_back({"id": Binary.from_uuid(value)}) == {"id": Binary.from_uuid(value)}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (2**63, "it holds an int beyond 64 bits"),
        (-(2**63) - 1, "it holds an int beyond 64 bits"),
        ("a\ud800b", "it holds text that is not valid Unicode (a lone surrogate)"),
        ({"\ud800": 1}, "it holds text that is not valid Unicode (a lone surrogate)"),
        ({1: 2}, "its key number 1 is not a string but int"),
        ({None: 2}, "its key number 1 is not a string but NoneType"),
        ({b"a": 2}, "its key number 1 is not a string but bytes"),
        ({Colour.RED: 2}, f"its key number 1 is not a string but {__name__}.Colour"),
        ({"a\0b": 1}, "its key number 1 holds a NUL character"),
    ],
    ids=repr,
)
def test_what_bson_cannot_hold_is_told_in_plain_words(value: object, problem: str) -> None:
    """
    The message says where the bad value is and what is wrong with it, however deep it is.
    """
    assert refusal(value) == f"params cannot be stored: {problem}"
    assert refusal({"a": [0, {"b": value}]}) == f"params.a[1].b cannot be stored: {problem}"
    assert refusal(({"x": 1}, value)) == f"params[1] cannot be stored: {problem}"


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        frozenset(),
        lambda: None,
        object(),
        1j,
        Colour.RED,
        Invoice(),
        Invoice,
        decimal.Decimal("1.1"),
        dt.date(2031, 1, 1),
        dt.time(1),
        dt.timedelta(1),
        Path("file"),
        bytearray(b"x"),
        memoryview(b"x"),
        range(3),
        iter([]),
        {}.keys(),
        collections.deque([1]),
        ValueError("x"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_bson_does_not_know_is_named_by_its_type(value: object) -> None:
    """
    The message says where the bad value is and of what type.
    """
    kind = str(type(value))
    for wrapped, path in (
        (value, "params"),
        ([value], "params[0]"),
        ({"a": {"b": (0, value)}}, "params.a.b[1]"),
    ):
        message = refusal(wrapped)
        assert message.startswith(f"{path} cannot be stored: ")
        assert kind in message or type(value).__name__ in message


def test_the_first_of_several_faults_is_named() -> None:
    """
    One fault at a time, in order.
    """
    assert refusal({"good": 1, "bad": 2**64, "worse": {1}}).startswith("params.bad ")


def test_a_value_that_breaks_while_it_is_shown_is_refused_like_others() -> None:
    """
    A broken ``repr`` does not come out as an error of its own.
    """

    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no text")

    assert refusal(Broken()).startswith("params cannot be stored: ")
    assert refusal({"a": [Broken()]}).startswith("params.a[0] cannot be stored: ")


def test_a_mapping_that_breaks_while_it_is_read_is_refused_like_others() -> None:
    """
    What a mapping raises is the reason of the refusal, not an error of its own.
    """

    class Broken(ReadOnly):
        def __getitem__(self, name: str) -> Any:
            raise LookupError("gone")

    assert refusal({"a": Broken()}).startswith("params.a cannot be stored: ")


@pytest.mark.parametrize("inside", [list, dict])
def test_a_value_that_contains_itself_is_refused(inside: type) -> None:
    """
    An endless value is no endless loop.
    """
    value: Any = inside()
    if isinstance(value, list):
        value.append({"again": value})
    else:
        value["again"] = [value]
    assert refusal(value) == "params is nested too deeply, or contains itself"


def test_ninety_levels_come_back() -> None:
    """
    As deep as MongoDB takes documents, less what stands around the value.
    """
    assert there_and_back(nested(90)) == nested(90)


@pytest.mark.parametrize("depth", [91, 150, 600])
def test_more_levels_than_a_server_takes_are_refused(depth: int) -> None:
    """
    Lists, documents and both in turn; what is long but flat is not taken for deep.
    """
    assert refusal(nested(depth)) == "params is nested more than 90 levels deep"
    lists: Any = []
    for _ in range(depth - 1):
        lists = [lists]
    assert refusal(lists) == "params is nested more than 90 levels deep"
    flat = {str(n): [n, {"a": n}] for n in range(5000)}
    assert there_and_back(flat) == flat


def test_absurd_depth_is_refused() -> None:
    """
    What no server takes is refused here, without a crash.
    """
    message = refusal(nested(100_000))
    assert message == "params is nested too deeply, or contains itself"


def test_a_fault_deep_inside_is_refused_like_others() -> None:
    """
    A bad value below very many levels is refused, not answered with an error of the search.
    """
    assert [_kind_of_refusal(depth) for depth in (300, 900, 2_000)] == [Unstorable] * 3


def _kind_of_refusal(depth: int) -> type[BaseException] | None:
    # Not with pytest.raises: the report of a failure would show the value, level by level.
    try:
        there(nested(depth, leaf={1}))
    except Exception as error:  # noqa: BLE001 - any kind is the answer
        return type(error)
    return None


def test_the_limit_of_the_size() -> None:
    """
    A value of just the limit is taken; one byte more is refused with both numbers.
    """
    value = "x" * 100
    size = len(bson.encode({"v": value}))
    frozen = freeze(value, NAIVE, what="result", limit_bytes=size)
    assert frozen.size_bytes == size
    message = f"result takes {size} bytes, more than the limit of {size - 1}"
    with pytest.raises(Unstorable, match=f"^{message}$"):
        freeze(value, NAIVE, what="result", limit_bytes=size - 1)


def test_a_frozen_value_is_a_copy() -> None:
    """
    Changing the original afterwards changes nothing that will be stored.
    """
    value: dict[str, Any] = {"list": [1], "dict": {"a": 1}}
    frozen = there(value)
    value["list"].append(2)
    value["dict"].clear()
    document = RawBSONDocument(bson.encode({"params": frozen}), codec_options=codec.RAW)
    assert thaw(document, "params", NAIVE) == {"list": [1], "dict": {"a": 1}}


def test_an_unstorable_value_is_a_wrong_argument() -> None:
    """
    Callers catch it as a ``ValueError``; the driver's error is its cause.
    """
    with pytest.raises(ValueError, match="cannot be stored") as caught:
        there({1, 2})
    assert caught.value.__cause__ is not None


class DecimalCodec(TypeCodec):
    """
    An application's own rule for decimal numbers.
    """

    python_type = decimal.Decimal
    bson_type = Decimal128

    def transform_python(self, value: decimal.Decimal) -> Decimal128:
        return Decimal128(value)

    def transform_bson(self, value: Decimal128) -> decimal.Decimal:
        return value.to_decimal()


def test_the_applications_own_types_come_back() -> None:
    """
    The collection's type registry and document class count for params and results.
    """
    options: Options = CodecOptions(
        document_class=collections.OrderedDict, type_registry=TypeRegistry([DecimalCodec()])
    )
    value = {"price": decimal.Decimal("9.90"), "list": [decimal.Decimal(1)]}
    back = there_and_back(value, options)
    assert back == value
    assert type(back) is collections.OrderedDict
    assert there_and_back(decimal.Decimal(2), options) == decimal.Decimal(2)


def test_the_applications_fallback_is_asked() -> None:
    """
    What the registry's fallback turns into BSON is stored in that form; the rest is refused.
    """
    options: Options = CodecOptions(
        type_registry=TypeRegistry(
            fallback_encoder=lambda value: sorted(value) if isinstance(value, set) else value
        )
    )
    assert there_and_back({"tags": {"b", "a"}}, options) == {"tags": ["a", "b"]}
    assert refusal({"a": 1j}, options).startswith("params.a cannot be stored: ")


def test_what_the_applications_fallback_raises_is_a_refusal() -> None:
    """
    Any error of the application's own encoder names the place like others.
    """

    def broken(_: object) -> object:
        raise ZeroDivisionError("encoder")

    options: Options = CodecOptions(type_registry=TypeRegistry(fallback_encoder=broken))
    message = refusal({"a": [{1}]}, options)
    assert message == "params.a[0] cannot be stored: encoding set raised ZeroDivisionError"


def test_a_missing_field_is_none() -> None:
    """
    A document of another program may lack params.
    """
    document = RawBSONDocument(bson.encode({"other": 1}), codec_options=codec.RAW)
    assert thaw(document, "params", NAIVE) is None


def test_the_librarys_own_reading_raises_at_nothing() -> None:
    """
    Dates beyond Python's years and broken text are read as something, aware and in UTC otherwise.
    """
    moment = dt.datetime(2031, 5, 6, tzinfo=UTC)
    raw = bson.encode({"date": moment, "far": bson.datetime_ms.DatetimeMS(2**62), "text": "abc"})
    document = RawBSONDocument(raw.replace(b"abc", b"a\xffc"), codec_options=codec.RAW)
    assert envelope(document) == {
        "date": moment,
        "far": bson.datetime_ms.DatetimeMS(2**62),
        "text": "a\ufffdc",
    }


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.binary(max_size=8)
)
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4)
)


@settings(max_examples=50)
@given(VALUES)
def test_any_plain_value_comes_back(value: object) -> None:
    """
    Whatever JSON-like value, with bytes and 64-bit numbers, comes back equal.
    """
    assert there_and_back(value) == value


@settings(max_examples=30)
@given(VALUES, st.sampled_from([{1}, 2**70, "\ud800", 1j]))
def test_one_bad_value_anywhere_is_found(value: object, bad: object) -> None:
    """
    The path in the message leads to the bad value.
    """
    holder = {"good": value, "bad": [value, {"here": bad}]}
    assert refusal(holder).startswith("params.bad[1].here cannot be stored: ")
