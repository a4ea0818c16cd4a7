"""
The benchmarks' own arithmetic, table, counters, and child processes.
"""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import floor
from benchmarks.__main__ import main
from benchmarks.children import Child, ChildFailed, Children, Line, first_said
from benchmarks.counting import CommandCounter, LostClaims, without_get_more
from benchmarks.figures import (
    Goal,
    Row,
    compared,
    interleaved,
    median_ratio,
    number,
    percentile,
    table,
)
from mscheduler_sync._runtime.log import logger

NUMBERS = st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=60)


# -- figures -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("percent", "expected"), [(1, 1), (5, 1), (6, 2), (50, 10), (95, 19), (99, 20), (100, 20)]
)
def test_percentile_of_twenty(percent: float, expected: float) -> None:
    """
    The percentile is one of the values, by rank.
    """
    values = [float(value) for value in range(20, 0, -1)]
    assert percentile(values, percent) == expected


@given(NUMBERS, st.integers(1, 100))
def test_percentile_leaves_the_rest_above(values: list[float], percent: int) -> None:
    """
    At least so many per cent are not above it, and fewer would be below it.
    """
    result = percentile(values, percent)
    assert result in values
    assert sum(value <= result for value in values) * 100 >= percent * len(values)
    assert sum(value < result for value in values) * 100 < percent * len(values)


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], 0), ([1.0], 100.5)])
def test_percentile_of_nothing(values: list[float], percent: float) -> None:
    """
    No values, or a percentage out of range, is an error.
    """
    with pytest.raises(ValueError, match="needs values and a percentage"):
        percentile(values, percent)


def test_ratio_is_of_neighbours() -> None:
    """
    Runs that took turns are compared in pairs: a slow hour of the machine cancels out.
    """
    # The medians' quotient would be 1.5.
    assert median_ratio([10.0, 60.0, 30.0], [20.0, 20.0, 60.0]) == 0.5


def test_ratio_leaves_out_pairs_without_floor() -> None:
    """
    A floor of zero says nothing; pairs of it alone, or runs without partner, are an error.
    """
    assert median_ratio([5.0, 8.0], [0.0, 4.0]) == 2.0
    with pytest.raises(ValueError, match="no pair"):
        median_ratio([5.0], [0.0])
    with pytest.raises(ValueError, match="shorter"):
        median_ratio([5.0, 6.0], [1.0])


def test_runs_take_turns() -> None:
    """
    The runs are called A B A B, and each result is kept with its own.
    """
    order: list[str] = []

    def run(name: str) -> float:
        order.append(name)
        return float(len(order))

    results = interleaved(3, lambda: run("a"), lambda: run("b"))
    assert order == ["a", "b", "a", "b", "a", "b"]
    assert results == [[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "0"),
        (0.00049, "0.000"),
        (0.25, "0.250"),
        (1.0, "1"),
        (1.25, "1.25"),
        (12.34, "12.3"),
        (123.4, "123"),
        (1234567.0, "1,234,567"),
        (-12.34, "-12.3"),
    ],
)
def test_numbers_are_short(value: float, expected: str) -> None:
    """
    A figure has about three digits that count.
    """
    assert number(value) == expected


@pytest.mark.parametrize(
    ("goal", "value", "is_embedded", "expected"),
    [
        (Goal(">=", 0.5, 2.0), 0.5, True, True),
        (Goal(">=", 0.5, 2.0), 0.49, True, False),
        (Goal(">=", 0.5, 2.0), 1.99, False, False),
        (Goal("<=", 2.2, 2.0), 2.2, True, True),
        (Goal("<=", 2.2, 2.0), 2.1, False, False),
        (Goal(">=", None, 0.9), 0.1, True, None),
        (Goal(">=", None, 0.9), 0.9, False, True),
    ],
)
def test_goals(goal: Goal, value: float, is_embedded: bool, expected: bool | None) -> None:
    """
    Each kind of server has its own limit, which counts as reached; or none.
    """
    assert goal.is_met(value, is_embedded=is_embedded) is expected


def test_a_row_with_a_floor_is_judged_by_its_ratio() -> None:
    """
    A comparison holds medians and the ratio of the pairs; the goal speaks of the ratio.
    """
    row = compared("m", "n", "/s", [10.0, 60.0, 30.0], [20.0, 20.0, 60.0])
    assert row == Row(
        measure="m",
        name="n",
        unit="/s",
        ours=30.0,
        floor=20.0,
        ratio=0.5,
        samples={"ours": [10.0, 60.0, 30.0], "floor": [20.0, 20.0, 60.0]},
    )
    assert row.judged == 0.5
    assert Row(measure="m", name="n", unit="", ours=3.0, floor=1.0).judged == 3.0


ROWS = [
    Row(
        measure="send",
        name="one at a time",
        unit="/s",
        ours=1234.5,
        floor=2000.0,
        ratio=0.617,
        goal=Goal(">=", 0.6, 0.7),
        samples={"ours": (1.0, 2.0)},
    ),
    Row(measure="send", name="commands", unit="", ours=1.0, note="each"),
    Row(measure="idle", name="lost", unit="", ours=3.5, goal=Goal("<=", 2.0, None)),
]


def test_the_table() -> None:
    """
    The table has a heading for each measure, aligned columns, and a verdict beside each goal.
    """
    assert table(ROWS, is_embedded=True).splitlines() == [
        "                     ours     floor  ratio  goal",
        "send",
        "  one at a time  1,234 /s  2,000 /s  0.617  >= 0.600  ok",
        "  commands              1                             each",
        "idle",
        "  lost               3.50                   <= 2      MISSED",
    ]


def test_the_table_of_another_server() -> None:
    """
    The goals are those of the server's kind; without one there is no verdict.
    """
    lines = table(ROWS, is_embedded=False).splitlines()
    assert lines[2].split()[-3:] == [">=", "0.700", "MISSED"]
    assert lines[5].split() == ["lost", "3.50"]


def test_rows_as_json() -> None:
    """
    The JSON holds everything that the table shows, and the single runs.
    """
    found = json.loads(json.dumps([row.as_json(is_embedded=True) for row in ROWS]))
    assert found[0] == {
        "measure": "send",
        "name": "one at a time",
        "unit": "/s",
        "ours": 1234.5,
        "floor": 2000.0,
        "ratio": 0.617,
        "goal": {"sign": ">=", "limit": 0.6, "met": True},
        "note": "",
        "samples": {"ours": [1.0, 2.0]},
    }
    assert [row["goal"] for row in found[1:]] == [None, {"sign": "<=", "limit": 2.0, "met": False}]
    assert ROWS[2].as_json(is_embedded=False)["goal"] is None


# -- what is counted ---------------------------------------------------------------------------


def event(name: str, **fields: Any) -> Any:
    return SimpleNamespace(command_name=name, **fields)


def test_commands_are_counted_by_name() -> None:
    """
    Commands count when they start, change events when they come; taking begins anew.
    """
    counter = CommandCounter()
    for name in ("update", "getMore", "update", "find", "getMore"):
        counter.started(event(name))
    counter.succeeded(event("update", reply={"n": 7}))
    counter.succeeded(event("getMore", reply={"cursor": {"nextBatch": [{}, {}]}}))
    counter.succeeded(event("getMore", reply={"cursor": {"nextBatch": []}}))
    counter.failed(event("find"))

    commands, events = counter.take()
    assert (commands, events) == ({"update": 2, "getMore": 2, "find": 1}, 2)
    assert without_get_more(commands) == 3
    assert counter.take() == ({}, 0)


def test_lost_claims_are_counted_from_the_log() -> None:
    """
    The claimer's debug log says how many claims of a batch were lost.
    """
    log, plain = logger("claim"), logging.getLogger("mscheduler_sync.claim")
    level, propagates = plain.level, plain.propagate
    lost = LostClaims()
    lost.attach()
    log.debug("claims were lost", event="claims_lost", count=3)
    log.debug("a task was claimed", event="claimed")
    log.debug("claims were lost", event="claims_lost", count=1)
    lost.detach()
    log.error("claims were lost", event="claims_lost", count=100)
    assert lost.count == 4
    assert (plain.level, plain.propagate, lost in plain.handlers) == (level, propagates, False)


@given(st.sets(st.integers(0, 10**8 - 1), max_size=200))
def test_keys_are_unique(numbers: set[int]) -> None:
    """
    Different numbers have different keys, all of eight digits.
    """
    keys = {floor.key_of(one) for one in numbers}
    assert len(keys) == len(numbers)
    assert all(len(key) == 8 and key.isdigit() for key in keys)


# -- children ----------------------------------------------------------------------------------


def echo(line: Line, word: str) -> str:
    """
    Say *word*, then return what the parent says.
    """
    line.say(word)
    return f"{word} {line.hear()}"


def fail(_line: Line) -> None:
    msg = "on purpose"
    raise LookupError(msg)


def test_children_start_together_and_tell_of_failures() -> None:
    """
    A child runs one function after another; what a function raises comes out at the parent.
    """
    with Children(2) as children:
        assert children.race(2, echo, "ready") == ["ready go", "ready go"]
        first, second = children.all
        first.begin(fail)
        with pytest.raises(ChildFailed, match="LookupError: on purpose"):
            first.hear(30)
        assert children.race(1, echo, "again") == ["again go"]
        second.begin(echo, "me")
        assert first_said(children.all, 30) == "me"
        with pytest.raises(ChildFailed, match="said nothing for 0 s"):
            second.hear(0)


def test_a_child_that_ends_is_noticed() -> None:
    """
    The end of a child's process comes out as an error, not as a wait.
    """
    child = Child()
    child.tell(None)
    with pytest.raises(ChildFailed, match="has ended"):
        child.hear(30)
    child.end()


def test_unknown_measures_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """
    A wrong name ends the program before a server is started; the text lists the right ones.
    """
    with pytest.raises(SystemExit) as ended:
        main(["send", "sending", "--quick"])
    assert ended.value.code == 2
    assert "no such measure: sending; there are send, backlog," in capsys.readouterr().err
