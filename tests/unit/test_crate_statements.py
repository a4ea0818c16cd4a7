"""
The crate's statements in their two forms: that they say the same, and which documents it can read.
"""

from __future__ import annotations

import copy
import datetime as dt
import re
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from bson import Int64

from tests.support.crate_statements import (
    EXACT,
    PORTABLE,
    Document,
    Statements,
    Write,
    decode_faults,
)

NOW = dt.datetime(2030, 1, 2, 3, 4, 5, tzinfo=dt.timezone.utc)
LEASE = dt.timedelta(seconds=60)

STATEMENTS: dict[str, Callable[[Statements], Any]] = {
    "send": lambda form: form.send("k", {"a": 1}, NOW),
    "send with all options": lambda form: form.send(
        "k",
        1,
        NOW,
        update_existing_params=True,
        run_time=NOW + LEASE,
        concurrency=2,
        ping_interval_ms=1,
        worker_timeout_ms=5,
        specific_worker_ids=["w"],
    ),
    "claim": lambda form: form.claim("k", "1700000000000", "w", NOW),
    "ping": lambda form: form.ping("k", "1700000000000", "w", NOW, lease=LEASE),
    "mark success": lambda form: form.mark_success("k", "1700000000000", "w", NOW, returns=7),
    "mark fail": lambda form: form.mark_fail("k", "1700000000000", "w", NOW),
    "shutdown": lambda form: form.shutdown([("k", "1"), ("l", "2")], "w", NOW),
    "fetch": lambda form: form.fetch("w", NOW),
    "watch": lambda form: form.watch("w", NOW),
}


def made_exact(value: Any) -> Any:
    """
    Undo the two portable spellings in *value*.
    """
    if value == {"$toDate": {"$toLong": "$$NOW"}}:
        return "$$NOW"
    if isinstance(value, Write):
        return attrs.evolve(
            value,
            filter=made_exact(value.filter),
            update=made_exact(value.update),
            array_filters=None,
        )
    if isinstance(value, dict):
        return {re.sub(r"\.\$\[e\]\.", ".$.", k): made_exact(v) for k, v in value.items()}
    return [made_exact(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", STATEMENTS)
def test_forms_differ_only_in_the_spelling_of_now_and_of_positions(name: str) -> None:
    """
    The portable form, respelled, is the exact one.
    """
    make = STATEMENTS[name]
    assert made_exact(make(PORTABLE)) == make(EXACT)


def test_portable_form_has_neither_bare_now_nor_positions() -> None:
    """
    What the embedded server cannot do stands in no portable statement but inside ``$toLong``.
    """
    text = repr([make(PORTABLE) for make in STATEMENTS.values()])
    assert "$$NOW" not in text.replace(repr({"$toLong": "$$NOW"}), "")
    assert ".$." not in text


@pytest.mark.parametrize("name", ["ping", "mark success", "mark fail"])
def test_array_filters_name_the_attempt_of_the_filter(name: str) -> None:
    """
    ``$[e]`` is the element that the positional operator would take: running ids are unique.
    """
    write = STATEMENTS[name](PORTABLE)
    condition = write.filter["task_state.worker_states"]["$elemMatch"]
    identity = {f"e.{name}": condition[name] for name in ("running_id", "worker_id")}
    assert write.array_filters == [identity]


def test_exact_form_uses_the_clock_of_each_side_where_the_crate_does() -> None:
    """
    The claim compares with its own clock, and with the server's only where it drops old elements.
    """
    claim = EXACT.claim("k", "1", "w", NOW)
    assert repr(claim.filter).count(repr(NOW)) == 2
    assert "$$NOW" not in repr(claim.filter)
    assert repr(claim.update).count("$$NOW") == 1
    lease_ends = re.findall(r"'ping_expire_time': datetime", repr(claim.update))
    assert len(lease_ends) == 1


def test_options_are_long_integers_as_the_crate_writes_them() -> None:
    """
    Every number of ``task_option`` is a BSON long.
    """
    option = EXACT.send("k", None, NOW).update
    assert isinstance(option, dict)
    numbers = [
        value
        for value in option["$setOnInsert"]["task_option"].values()
        if not isinstance(value, list)
    ]
    assert [type(number) for number in numbers] == [Int64] * 6


def test_indexes_differ_only_in_the_option_that_is_ignored() -> None:
    """
    The exact indexes are the portable ones, made in the background.
    """
    assert list(EXACT.indexes) == [
        (keys, {**options, "background": True}) for keys, options in PORTABLE.indexes
    ]


READABLE: Document = {
    "_id": 1,
    "key": "k",
    "task_state": {
        "create_time": NOW,
        "start_time": NOW,
        "worker_states": [
            {
                "running_id": None,
                "worker_id": "w",
                "ping_expire_time": None,
                "success_time": None,
                "fail_time": None,
            }
        ],
    },
    "task_option": {
        "priority": 0,
        "concurrent_worker_cnt": Int64(1),
        "ping_interval_ms": 30_000.0,
        "worker_timeout_ms": 60_000,
        "specific_worker_ids": ["w"],
        "max_unexpected_retries": 3,
        "unexpected_retry_delay_ms": 10_000,
    },
    "status": "anything else is ignored",
}


def test_readable_document_has_no_faults() -> None:
    """
    Whole numbers of any kind, null where it is optional, and unknown fields are read.
    """
    assert decode_faults(READABLE) == []


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        ("key", 1, "key"),
        ("task_state", None, "task_state and task_option must be documents"),
        ("task_state.start_time", None, "task_state.start_time"),
        ("task_state.worker_states", None, "task_state.worker_states"),
        ("task_option.priority", -1, "task_option.priority"),
        ("task_option.priority", 0.5, "task_option.priority"),
        ("task_option.worker_timeout_ms", 2**32, "task_option.worker_timeout_ms"),
        ("task_option.max_unexpected_retries", None, "task_option.max_unexpected_retries"),
        ("task_option.specific_worker_ids", [1], "task_option.specific_worker_ids"),
        ("task_state.worker_states", [1], "task_state.worker_states.0.must be a document"),
    ],
)
def test_faults_are_named(path: str, value: object, fault: str) -> None:
    """
    What the crate's types refuse is named by its path.
    """
    document = copy.deepcopy(READABLE)
    *parents, name = path.split(".")
    target = document
    for parent in parents:
        target = target[parent]
    target[name] = value
    assert decode_faults(document) == [fault]


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("worker_id", None, "worker_id"),
        ("running_id", 1, "running_id"),
        ("fail_reason", 1, "fail_reason"),
        ("ping_expire_time", "soon", "ping_expire_time"),
        ("success_time", ..., "success_time is missing"),
        ("fail_time", ..., "fail_time is missing"),
    ],
)
def test_faults_of_attempts_are_named(name: str, value: object, fault: str) -> None:
    """
    An attempt needs its worker, its two outcomes (null or not), and the right kinds of values.
    """
    document = copy.deepcopy(READABLE)
    element = document["task_state"]["worker_states"][0]
    if value is ...:
        del element[name]
    else:
        element[name] = value
    assert decode_faults(document) == [f"task_state.worker_states.0.{fault}"]
