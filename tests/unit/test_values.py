"""
The stored form of values: each row of the table in docs/tasks.md, both ways.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import pathlib
import sys
import uuid
import zoneinfo
from collections.abc import Mapping, Sequence, Set
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, Optional, TypeVar

import attrs
import bson
import pydantic
import pytest
from bson.codec_options import CodecOptions
from hypothesis import example, given
from hypothesis import strategies as st

from mscheduler_sync._declared.forms import Fault
from mscheduler_sync._declared.table import Codec
from mscheduler_sync._declared.values import TAG, Values

VALUES = Values([Codec(fractions.Fraction, str, fractions.Fraction, "fraction")])
T = TypeVar("T")


class Color(enum.Enum):
    RED = "red"
    MIXED = (1, 2)


class Level(enum.IntEnum):
    LOW = 1


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Line:
    article: str
    price: decimal.Decimal
    parts: list[Line] = dataclasses.field(default_factory=list)


@attrs.define
class Order:
    id: uuid.UUID
    lines: list[Line]
    at: dt.datetime | None = None
    color: Color = Color.RED
    _note: str = ""


@attrs.define
class Rush(Order):
    hours: int = 1


@dataclasses.dataclass
class Page(Generic[T]):
    items: list[T]


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)

    id: uuid.UUID = pydantic.Field(alias="ID")
    at: dt.datetime
    tags: set[str]
    price: decimal.Decimal
    inner: dict[str, list[dt.date]] = {}


OrderId = NewType("OrderId", uuid.UUID)
U = uuid.UUID("97577cd6-4c32-44eb-9618-bff66ef05c08")
AT = dt.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=dt.timezone(dt.timedelta(hours=2)))
ORDER = Order(U, [Line("tea", decimal.Decimal("2.50"), [Line("bag", decimal.Decimal(0))])], AT)
STORED_LINE = {
    "article": "tea",
    "price": "2.50",
    "parts": [{"article": "bag", "price": "0", "parts": []}],
}


def through_bson(value: Any) -> Any:
    """
    What comes back from the database of *value*.
    """
    options: CodecOptions[dict[str, Any]] = CodecOptions(document_class=dict)
    return bson.decode(bson.encode({"v": value}), options)["v"]


def round_trip(annotation: Any, value: Any) -> Any:
    form = VALUES.form_of(annotation)
    return form.decode(through_bson(form.encode(value)))


@pytest.mark.parametrize(
    ("annotation", "value", "stored"),
    [
        (str, "text", "text"),
        (int, 3, 3),
        (float, 2.5, 2.5),
        (float, 3, 3),
        (bool, True, True),
        (bytes, b"\x00\xff", b"\x00\xff"),
        (None, None, None),
        (dict, {"a": [1, {"b": None}]}, {"a": [1, {"b": None}]}),
        (dict[str, int], {"a": 1}, {"a": 1}),
        (dict[str, int], {TAG: 1}, {TAG: 1}),
        (Mapping[str, uuid.UUID], {"a": U}, {"a": str(U)}),
        (list, [1, "a"], [1, "a"]),
        (list[dt.date], [dt.date(2026, 1, 2)], ["2026-01-02"]),
        (Sequence[int], [1, 2], [1, 2]),
        (bson.ObjectId, bson.ObjectId(b"0" * 12), bson.ObjectId(b"0" * 12)),
        (uuid.UUID, U, str(U)),
        (OrderId, U, str(U)),
        (Annotated[uuid.UUID, "of an order"], U, str(U)),
        (Optional[uuid.UUID], U, str(U)),  # noqa: UP045 - as older code has it
        (uuid.UUID | None, None, None),
        (decimal.Decimal, decimal.Decimal("-12.50E+7"), "-1.250E+8"),
        (dt.datetime, AT, "2026-01-02T03:04:05.678901+02:00"),
        (dt.datetime, AT.replace(tzinfo=None), "2026-01-02T03:04:05.678901"),
        (dt.date, dt.date(2026, 1, 2), "2026-01-02"),
        (dt.time, dt.time(3, 4, 5, 6), "03:04:05.000006"),
        (dt.time, dt.time(3, tzinfo=dt.timezone.utc), "03:00:00+00:00"),
        (dt.timedelta, dt.timedelta(minutes=1.5), 90),
        (dt.timedelta, dt.timedelta(milliseconds=-1500), -1.5),
        (dt.timedelta, dt.timedelta.max, "86399999999999999999e-6"),
        (pathlib.Path, pathlib.Path("a/b"), "a/b"),
        (pathlib.PurePath, pathlib.PurePath("/a"), "/a"),
        (set[uuid.UUID], {U}, [str(U)]),
        (Set[int], {1}, [1]),
        (frozenset, frozenset({"a"}), ["a"]),
        (tuple[int, uuid.UUID], (1, U), [1, str(U)]),
        (tuple[uuid.UUID, ...], (U, U), [str(U), str(U)]),
        (tuple, (1, "a"), [1, "a"]),
        (tuple[()], (), []),
        (Color, Color.RED, "red"),
        (Color, Color.MIXED, {TAG: "tuple", "value": [1, 2]}),
        (Level, Level.LOW, 1),
        (Rights, Rights.READ | Rights.WRITE, 3),
        (Literal["a", 1], "a", "a"),
        (Literal[Color.RED, "x"], Color.RED, "red"),
        (fractions.Fraction, fractions.Fraction(1, 3), "1/3"),
        (Line, ORDER.lines[0], STORED_LINE),
        (Page[int], Page([1]), {"items": [1]}),
        (
            Order,
            ORDER,
            {
                "id": str(U),
                "lines": [STORED_LINE],
                "at": AT.isoformat(),
                "color": "red",
                "_note": "",
            },
        ),
        (
            Model,
            Model(ID=U, at=AT, tags={"a"}, price=decimal.Decimal("1.50")),
            {"id": str(U), "at": AT.isoformat(), "tags": ["a"], "price": "1.50", "inner": {}},
        ),
        (uuid.UUID | str, str(U), str(U)),
        (uuid.UUID | str, U, {TAG: "uuid", "value": str(U)}),
        (int | str | None, None, None),
        (float | str, 3, 3),
        (Order | Line | str, "none", "none"),
        (Line | Order, ORDER.lines[0], {TAG: "Line", "value": STORED_LINE}),
        (Color | str, "red", "red"),
        (Color | str, Color.RED, {TAG: "Color", "value": "red"}),
        (Level | int, Level.LOW, {TAG: "Level", "value": 1}),
        (list[uuid.UUID] | uuid.UUID, [U], [{TAG: "uuid", "value": str(U)}]),
    ],
)
def test_an_annotated_value_is_stored_readably_and_comes_back(
    annotation: Any, value: Any, stored: Any
) -> None:
    """
    One row each: what stands in the database, and that the same comes back, of the same type.
    """
    form = VALUES.form_of(annotation)
    before = copy.deepcopy(value)
    assert form.encode(value) == stored
    came_back = form.decode(through_bson(stored))
    assert came_back == value == before
    if annotation is not float:
        assert type(came_back) is type(value)


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (U, {TAG: "uuid", "value": str(U)}),
        (decimal.Decimal("1.50"), {TAG: "decimal", "value": "1.50"}),
        (AT, {TAG: "datetime", "value": AT.isoformat()}),
        (dt.date(2026, 1, 2), {TAG: "date", "value": "2026-01-02"}),
        (dt.time(3), {TAG: "time", "value": "03:00:00"}),
        (dt.timedelta(1), {TAG: "timedelta", "value": 86400}),
        (pathlib.Path("a"), {TAG: "path", "value": "a"}),
        (pathlib.PurePosixPath("a"), {TAG: "pure_path", "value": "a"}),
        ({1}, {TAG: "set", "value": [1]}),
        (frozenset([(1, 2)]), {TAG: "frozenset", "value": [{TAG: "tuple", "value": [1, 2]}]}),
        (fractions.Fraction(1, 3), {TAG: "fraction", "value": "1/3"}),
        ({"a": [U]}, {"a": [{TAG: "uuid", "value": str(U)}]}),
        ({TAG: "uuid", "value": "x"}, {TAG: "dict", "value": {TAG: "uuid", "value": "x"}}),
        ({TAG: None}, {TAG: "dict", "value": {TAG: None}}),
        (bson.ObjectId(b"0" * 12), bson.ObjectId(b"0" * 12)),
    ],
)
def test_a_value_without_annotation_comes_back_by_its_tag(value: Any, stored: Any) -> None:
    """
    What BSON would not give back is tagged, and a user's own mapping is never taken for a tag.
    """
    for annotation in (Any, object, TypeVar("V")):
        assert VALUES.form_of(annotation).encode(value) == stored
        came_back = round_trip(annotation, value)
        assert (came_back, type(came_back)) == (value, type(value))


AWARE = st.datetimes(timezones=st.timezones() | st.just(dt.timezone.utc))
SINGLE = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.uuids()
    | st.decimals(allow_nan=False)
    | st.datetimes()
    | st.dates()
    | st.times()
    | st.timedeltas()
)
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])) | st.just(TAG)
ANYTHING = st.recursive(
    SINGLE,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(NAMES, inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.sets(st.uuids() | st.text(), max_size=4)
    ),
    max_leaves=12,
)


@given(value=ANYTHING)
def test_anything_comes_back_without_annotation(value: Any) -> None:
    """
    Nested in any way, with any keys.
    """
    assert round_trip(Any, value) == value


@given(value=ANYTHING)
def test_an_annotated_list_of_anything_comes_back(value: Any) -> None:
    """
    Typed containers around untyped values.
    """
    assert round_trip(dict[str, list[Any]], {TAG: [value]}) == {TAG: [value]}


@given(value=AWARE)
def test_an_aware_datetime_keeps_instant_and_offset(value: dt.datetime) -> None:
    """
    To the microsecond, in every zone, also in an hour that comes twice.
    """
    came_back = round_trip(dt.datetime, value)
    assert came_back.replace(tzinfo=None) == value.replace(tzinfo=None)
    assert came_back.utcoffset() == value.utcoffset()


@given(value=st.timedeltas() | st.timedeltas(-dt.timedelta(99420), dt.timedelta(99422)))
@example(value=dt.timedelta(days=99421, microseconds=1))
@example(value=dt.timedelta(seconds=2**32, microseconds=-1))
def test_a_timedelta_is_exact(value: dt.timedelta) -> None:
    """
    Also beyond the digits of a float.
    """
    assert round_trip(dt.timedelta, value) == value


@given(value=st.decimals())
def test_a_decimal_keeps_its_digits(value: decimal.Decimal) -> None:
    """
    Trailing zeros, exponents, infinities and what is no number.
    """
    assert str(round_trip(decimal.Decimal, value)) == str(value)


@pytest.mark.parametrize(
    ("annotation", "stored", "value"),
    [
        (int, 42.0, 42),
        (int, bson.Int64(42), 42),
        (float, 3, 3.0),
        (uuid.UUID, U, U),
        (uuid.UUID, bson.Binary.from_uuid(U), U),
        (decimal.Decimal, 3, decimal.Decimal(3)),
        (decimal.Decimal, bson.Decimal128("2.50"), decimal.Decimal("2.50")),
        (
            dt.datetime,
            dt.datetime(2026, 1, 2, 3),  # noqa: DTZ001 - as the driver gives it by default
            dt.datetime(2026, 1, 2, 3, tzinfo=dt.timezone.utc),
        ),
        (
            dt.datetime,
            "2026-01-02T03:04:05Z",
            AT.replace(hour=3, microsecond=0, tzinfo=dt.timezone.utc),
        ),
        (dt.timedelta, 1.5, dt.timedelta(seconds=1.5)),
        (Line, {"article": "tea", "price": 2, "color": "green"}, Line("tea", decimal.Decimal(2))),
    ],
)
def test_documents_of_other_programs_are_read(annotation: Any, stored: Any, value: Any) -> None:
    """
    What people and other languages write for these types.
    """
    came_back = VALUES.form_of(annotation).decode(stored)
    assert (came_back, type(came_back)) == (value, type(value))


@pytest.mark.parametrize(
    ("annotation", "value", "path", "problem", "kind"),
    [
        (int, "3", "", "must be int, is str", TypeError),
        (bool, 1, "", "must be bool, is int", TypeError),
        (str, None, "", "must be str, is NoneType", TypeError),
        (uuid.UUID, str(U), "", "must be uuid.UUID, is str", TypeError),
        (dt.date, AT, "", "must be datetime.date, is datetime.datetime", TypeError),
        (list[int], [1, "2"], "[1]", "must be int, is str", TypeError),
        (list[int], "12", "", "must be a list, is str", TypeError),
        (set[int], [1], "", "must be a set, is list", TypeError),
        (tuple[int, int], (1,), "", "must be a tuple of 2, is tuple", TypeError),
        (dict[str, int], {"a": None}, ".a", "must be int, is NoneType", TypeError),
        (Literal["a"], "b", "", "must be one of 'a', is str", TypeError),
        (Literal[1], True, "", "must be one of 1, is bool", TypeError),
        (uuid.UUID | int, "x", "", "must be uuid.UUID or int, is str", TypeError),
        (Color, "red", "", f"must be {__name__}.Color, is str", TypeError),
        (Any, Color.RED, "", "stored only where an annotation names it", ValueError),
        (Any, [{"a": ORDER}], "[0].a", "stored only where an annotation names it", ValueError),
        (Any, Point(1, 2), "", "is the named tuple", ValueError),
        (Order, Rush(U, []), "", "whose own fields would get lost", TypeError),
        (
            Order,
            Order(U, [Line("a", decimal.Decimal(1)), Line("b", 1.5)]),  # type: ignore[arg-type]
            ".lines[1].price",
            "must be decimal.Decimal, is float",
            TypeError,
        ),
        (
            dt.time,
            dt.time(3, tzinfo=zoneinfo.ZoneInfo("Europe/Paris")),
            "",
            "cannot be stored: ValueError: its zone has no offset without a date",
            ValueError,
        ),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(
    annotation: Any, value: Any, path: str, problem: str, kind: type[Exception]
) -> None:
    """
    Where in the argument, what it must be, what it is; never its content.
    """
    with pytest.raises(Fault) as caught:
        VALUES.form_of(annotation).encode(value)
    assert (caught.value.path, caught.value.kind) == (path, kind)
    assert problem in caught.value.problem


@pytest.mark.parametrize(
    ("annotation", "stored", "path", "problem"),
    [
        (int, 42.5, "", "must be int, is float"),
        (uuid.UUID, "x", "", "is no readable form of uuid.UUID: ValueError"),
        (decimal.Decimal, 0.1, "", "a string is needed, it is float"),
        (Color, "green", "", "'green' is not a valid Color"),
        (list[dt.date], ["2026-01-02", 3], "[1]", "a string is needed, it is int"),
        (set[int], [[1]], "[0]", "must be int, is list"),
        (set, [[1]], "", "is no readable form of a set: TypeError"),
        (Order, [], "", "must be a mapping, is list"),
        (Order, {"id": str(U)}, ".lines", "is missing"),
        (
            Order,
            {"id": str(U), "lines": [{"article": "tea", "price": 1.5}]},
            ".lines[0].price",
            "a string is needed, it is float",
        ),
        (Model, {"id": str(U), "at": "?"}, ".at", "is refused by"),
        (Model, [], "", "must be a mapping, is list"),
        (Any, {TAG: "shop.Order"}, "", "has the __type__ 'shop.Order', which has no codec here"),
        (Any, {"a": {TAG: 3}}, ".a", "has the __type__ 3, which has no codec here"),
        (uuid.UUID | int, "x", "", "must be uuid.UUID or int, is str"),
    ],
)
def test_an_unreadable_document_is_refused_with_its_place(
    annotation: Any, stored: Any, path: str, problem: str
) -> None:
    """
    The same words where a task is run.
    """
    with pytest.raises(Fault) as caught:
        VALUES.form_of(annotation).decode(stored)
    assert caught.value.path == path
    assert problem in caught.value.problem


def test_a_codec_counts_for_subclasses_and_before_the_table() -> None:
    """
    One's own rows replace those of the library.
    """

    class Money(decimal.Decimal):
        pass

    values = Values(
        [Codec(decimal.Decimal, lambda d: ("d", str(d)), lambda s: decimal.Decimal(s[1]))]
    )
    form = values.form_of(decimal.Decimal)
    assert form.encode(Money(3)) == {TAG: "tuple", "value": ["d", "3"]}
    assert form.decode({TAG: "tuple", "value": ["d", "3"]}) == decimal.Decimal(3)
    assert values.untyped.encode(Money(3))[TAG] == "decimal.Decimal"


def test_two_codecs_of_one_name_are_refused() -> None:
    """
    A tag stands for one type.
    """
    with pytest.raises(ValueError, match="two codecs have one name"):
        Values([Codec(fractions.Fraction, str, fractions.Fraction, "uuid")])


def test_a_class_without_cattrs_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    The package is asked for where it is needed, and nowhere else.
    """
    monkeypatch.setitem(sys.modules, "cattrs", None)
    values = Values()
    assert values.form_of(uuid.UUID).encode(U) == str(U)
    with pytest.raises(ImportError, match=r"pip install 'mscheduler_sync\[cattrs\]'"):
        values.form_of(Line)
