"""
Options of a send: what is refused and how it is said, and the document that they make.
"""

from __future__ import annotations

import datetime as dt
import enum
import re
from typing import Any

import pytest
from bson import ObjectId

from mscheduler_sync._storage.sending import SendOptions

UTC = dt.timezone.utc
NOW = dt.datetime(2031, 5, 6, 12, tzinfo=UTC)
LATEST = dt.datetime.max.replace(tzinfo=dt.timezone(dt.timedelta(hours=-9)))
EARLIEST = dt.datetime.min.replace(tzinfo=dt.timezone(dt.timedelta(hours=9)))
NAN, INF = float("nan"), float("inf")

_SECONDS = "must be a number of seconds or a timedelta, got"
_WHOLE = "must be a whole number, got"
_TEN_YEARS = "must be at least 0 and at most 3.16224e+08 seconds, got"
_AWARE = "must be a datetime with a time zone, got"
_YEARS = "must lie from 1970 to 9999-12-30, got"
_LEASE = "must be at least 0.1 and at most 2.592e+06 seconds, got"
_BEAT = "must be at least 0.01 and at most 3.16224e+08 seconds, got"
_TIMEOUT = "must be at least 0.001 and at most 3.16224e+08 seconds, got"
_IF_EXISTS = "must be one of 'keep', 'update', 'rerun', 'raise', got"
_ZONE = "must have a time zone (for example datetime.timezone.utc), got"


class NoZone(dt.tzinfo):
    """
    A time zone that does not know its offset: such a datetime counts as naive.
    """

    def utcoffset(self, when: dt.datetime | None) -> None:
        return None

    def dst(self, when: dt.datetime | None) -> None:
        return None

    def tzname(self, when: dt.datetime | None) -> None:
        return None


@pytest.mark.parametrize(
    ("name", "value", "kind", "rule"),
    [
        ("run_at", dt.datetime(2030, 1, 1), ValueError, _ZONE),  # noqa: DTZ001
        ("run_at", dt.datetime(2030, 1, 1, tzinfo=NoZone()), ValueError, _ZONE),
        ("run_at", dt.date(2030, 1, 1), TypeError, f"{_AWARE} datetime.date(2030, 1, 1)"),
        ("run_at", "2030-01-01", TypeError, f"{_AWARE} '2030-01-01'"),
        ("run_at", 1_900_000_000, TypeError, f"{_AWARE} 1900000000"),
        ("run_at", True, TypeError, f"{_AWARE} True"),
        ("run_at", dt.datetime(1969, 12, 31, tzinfo=UTC), ValueError, _YEARS),
        ("run_at", dt.datetime(9999, 12, 31, tzinfo=UTC), ValueError, _YEARS),
        ("run_at", LATEST, ValueError, _YEARS),
        ("run_at", EARLIEST, ValueError, _YEARS),
        ("delay", -1, ValueError, f"{_TEN_YEARS} -1"),
        ("delay", NAN, ValueError, f"{_TEN_YEARS} nan"),
        ("delay", INF, ValueError, f"{_TEN_YEARS} inf"),
        ("delay", 1_900_000_000_000, ValueError, f"{_TEN_YEARS} 1900000000000"),
        ("delay", dt.timedelta(days=-1), ValueError, f"{_TEN_YEARS} -86400.0"),
        ("delay", dt.timedelta.max, ValueError, _TEN_YEARS),
        ("delay", True, TypeError, f"{_SECONDS} True"),
        ("delay", "5", TypeError, f"{_SECONDS} '5'"),
        ("priority", -1, ValueError, "must be from 0 to 2147483647, got -1"),
        ("priority", 2**31, ValueError, "must be from 0 to 2147483647, got 2147483648"),
        ("priority", True, TypeError, f"{_WHOLE} True"),
        ("priority", 1.0, TypeError, f"{_WHOLE} 1.0"),
        ("priority", None, TypeError, f"{_WHOLE} None"),
        ("concurrency", 0, ValueError, "must be from 1 to 100, got 0"),
        ("concurrency", 101, ValueError, "must be from 1 to 100, got 101"),
        ("concurrency", True, TypeError, f"{_WHOLE} True"),
        ("max_attempts", 0, ValueError, "must be from 1 to 100, got 0"),
        ("max_attempts", 101, ValueError, "must be from 1 to 100, got 101"),
        ("max_attempts", "3", TypeError, f"{_WHOLE} '3'"),
        ("retry_delay", -0.1, ValueError, f"{_TEN_YEARS} -0.1"),
        ("retry_delay", NAN, ValueError, f"{_TEN_YEARS} nan"),
        ("retry_delay", None, TypeError, f"{_SECONDS} None"),
        ("retry_backoff", 0.5, ValueError, "must be from 1 to 1000, got 0.5"),
        ("retry_backoff", 1000.1, ValueError, "must be from 1 to 1000, got 1000.1"),
        ("retry_backoff", NAN, ValueError, "must be from 1 to 1000, got nan"),
        ("retry_backoff", INF, ValueError, "must be from 1 to 1000, got inf"),
        ("retry_backoff", 10**400, ValueError, "must be from 1 to 1000, got 1000"),
        ("retry_backoff", True, TypeError, "must be a number, got True"),
        ("retry_backoff", "2", TypeError, "must be a number, got '2'"),
        ("retry_backoff", None, TypeError, "must be a number, got None"),
        ("retry_max_delay", -1, ValueError, f"{_TEN_YEARS} -1"),
        ("retry_max_delay", False, TypeError, f"{_SECONDS} False"),
        ("retry_jitter", -0.1, ValueError, "must be from 0 to 1, got -0.1"),
        ("retry_jitter", 1.1, ValueError, "must be from 0 to 1, got 1.1"),
        ("retry_jitter", NAN, ValueError, "must be from 0 to 1, got nan"),
        ("retry_jitter", True, TypeError, "must be a number, got True"),
        ("retry_scope", "all", ValueError, "must be one of 'task', 'worker', got 'all'"),
        ("retry_scope", None, ValueError, "must be one of 'task', 'worker', got None"),
        ("lease", 0, ValueError, f"{_LEASE} 0"),
        ("lease", -60, ValueError, f"{_LEASE} -60"),
        ("lease", 60_000_000, ValueError, f"{_LEASE} 60000000"),
        ("lease", NAN, ValueError, f"{_LEASE} nan"),
        ("lease", True, TypeError, f"{_SECONDS} True"),
        ("heartbeat", 0, ValueError, f"{_BEAT} 0"),
        ("heartbeat", -1, ValueError, f"{_BEAT} -1"),
        ("heartbeat", "20", TypeError, f"{_SECONDS} '20'"),
        ("heartbeat", 30.001, ValueError, "must be at most half the lease, got heartbeat=30.001 s"),
        ("timeout", 0, ValueError, f"{_TIMEOUT} 0"),
        ("timeout", -1, ValueError, f"{_TIMEOUT} -1"),
        ("timeout", True, TypeError, f"{_SECONDS} True"),
        ("keep_finished", -1, ValueError, f"{_TEN_YEARS} -1"),
        ("keep_finished", INF, ValueError, f"{_TEN_YEARS} inf"),
        ("keep_finished", True, TypeError, f"{_SECONDS} True"),
        ("worker_ids", "w1", TypeError, "must be a list of strings, got 'w1'"),
        ("worker_ids", b"w1", TypeError, "must be a list of strings, got b'w1'"),
        ("worker_ids", None, TypeError, "must be a list of strings, got None"),
        ("worker_ids", {"w1": 1}, TypeError, "must be a list of strings, got {'w1': 1}"),
        ("worker_ids", ["w"] * 101, ValueError, "must have at most 100 entries, has 101"),
        ("name", "", ValueError, "must have 1 to 200 characters, got"),
        ("name", "n" * 201, ValueError, "must have 1 to 200 characters, got"),
        ("name", 5, TypeError, "must be a string, got 5"),
        ("name", "\ud800", ValueError, r"must be valid Unicode, got '\ud800'"),
        ("tags", "urgent", TypeError, "must be a list of strings, got 'urgent'"),
        ("tags", 5, TypeError, "must be a list of strings, got 5"),
        ("tags", ["t"] * 51, ValueError, "must have at most 50 entries, has 51"),
        ("if_exists", "skip", ValueError, f"{_IF_EXISTS} 'skip'"),
        ("if_exists", None, ValueError, f"{_IF_EXISTS} None"),
        ("if_running", "wait", ValueError, "must be one of 'apply', 'raise', got 'wait'"),
        ("clean_success", 1, TypeError, "must be True or False, got 1"),
        ("clean_failed", None, TypeError, "must be True or False, got None"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(
    name: str, value: object, kind: type[Exception], rule: str
) -> None:
    """
    The error names the argument, the rule and the value.
    """
    options: dict[str, Any] = {name: value}
    with pytest.raises(kind) as caught:
        SendOptions.checked(**options)
    assert f"{name} {rule}" in str(caught.value)


@pytest.mark.parametrize("name", ["worker_ids", "tags"])
@pytest.mark.parametrize(
    ("entry", "kind", "rule"),
    [
        ("", ValueError, "must not be empty"),
        (1, TypeError, "must be a string, got 1"),
        (None, TypeError, "must be a string, got None"),
        ("\ud800", ValueError, "must be valid Unicode"),
        ("x" * 201, ValueError, "must take at most 200 bytes, takes 201"),
    ],
)
def test_a_wrong_entry_of_a_list_is_named(
    name: str, entry: object, kind: type[Exception], rule: str
) -> None:
    """
    One bad entry among good ones is found.
    """
    options: dict[str, Any] = {name: ["good", entry]}
    with pytest.raises(kind, match=re.escape(f"each of {name} {rule}")):
        SendOptions.checked(**options)


def test_a_time_and_a_delay_exclude_each_other() -> None:
    """
    Which of them would count is not guessed; both are named.
    """
    with pytest.raises(ValueError, match=r"^give run_at or delay, not both: run_at=.*, delay=5$"):
        SendOptions.checked(run_at=NOW, delay=5)


@pytest.mark.parametrize(
    ("lease", "heartbeat"),
    [(60, 30), (0.1, 0.05), (1, 0.2), (dt.timedelta(minutes=1), dt.timedelta(seconds=30))],
)
def test_a_heartbeat_of_half_the_lease_will_do(lease: Any, heartbeat: Any) -> None:
    """
    The bound itself is allowed, in seconds and as timedelta.
    """
    SendOptions.checked(lease=lease, heartbeat=heartbeat)


def test_a_short_lease_needs_a_short_heartbeat() -> None:
    """
    The default heartbeat is too slow for it, and the error says what would happen.
    """
    with pytest.raises(ValueError, match=r"one late heartbeat would lose the task$"):
        SendOptions.checked(lease=10)


def test_what_is_no_option_is_named() -> None:
    """
    All of it, in order; nothing is taken for an option by the name of its field.
    """
    options: dict[str, Any] = {"prio": 1, "lease_s": 5, "priority": 1}
    with pytest.raises(TypeError, match=r"^unknown options: lease_s, prio$"):
        SendOptions.checked(**options)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (dt.datetime(2030, 1, 1, 12, tzinfo=UTC), dt.datetime(2030, 1, 1, 12, tzinfo=UTC)),
        (
            dt.datetime(2030, 1, 1, 12, tzinfo=dt.timezone(dt.timedelta(hours=9))),
            dt.datetime(2030, 1, 1, 3, tzinfo=UTC),
        ),
        (dt.datetime(1970, 1, 1, tzinfo=UTC), dt.datetime(1970, 1, 1, tzinfo=UTC)),
        (
            dt.datetime(9999, 12, 30, 23, 59, tzinfo=UTC),
            dt.datetime(9999, 12, 30, 23, 59, tzinfo=UTC),
        ),
    ],
)
def test_times_of_any_zone_become_utc(value: dt.datetime, expected: dt.datetime) -> None:
    """
    The moment counts, from 1970 to the day before "never".
    """
    options = SendOptions.checked(run_at=value)
    assert options.run_at == expected
    assert options.run_at is not None
    assert options.run_at.tzinfo is UTC
    assert options.wants_time
    assert options.start_time(NOW) == expected


def test_a_delay_counts_from_the_servers_now() -> None:
    """
    A delay is added to the server's time.
    """
    options = SendOptions.checked(delay=dt.timedelta(minutes=5))
    assert options.wants_time
    assert options.start_time(NOW) == NOW + dt.timedelta(minutes=5)


def test_without_a_time_a_task_starts_now() -> None:
    """
    Now is the server's.
    """
    options = SendOptions.checked()
    assert not options.wants_time
    assert options.start_time(NOW) == NOW
    assert SendOptions.checked(delay=0).wants_time


def test_the_default_document() -> None:
    """
    A plain send makes the crate's fields and the derived ones, and nothing else.
    """
    document = SendOptions.checked().document("key", {"a": 1}, NOW)
    assert isinstance(document.pop("_id"), ObjectId)
    assert isinstance(document.pop("send_id"), str)
    assert document == {
        "key": "key",
        "params": {"a": 1},
        "task_state": {"create_time": NOW, "start_time": NOW, "worker_states": []},
        "task_option": {
            "priority": 0,
            "concurrent_worker_cnt": 1,
            "ping_interval_ms": 20_000,
            "worker_timeout_ms": 60_000,
            "specific_worker_ids": [],
            "max_unexpected_retries": 3,
            "unexpected_retry_delay_ms": 10_000,
        },
        "status": "waiting",
        "due": NOW,
        "routes": "*",
    }


def test_a_document_with_everything() -> None:
    """
    Every option is found in the document, durations in milliseconds.
    """
    document = SendOptions.checked(
        run_at=NOW + dt.timedelta(hours=1),
        priority=5,
        concurrency=3,
        max_attempts=7,
        retry_delay=0.5,
        retry_backoff=2,
        retry_max_delay=60,
        retry_jitter=0.1,
        retry_scope="worker",
        lease=2.5,
        heartbeat=1,
        timeout=0.25,
        keep_finished=0,
        worker_ids=("w1", "w2"),
        name="invoice.send",
        tags=["a", "b"],
    ).document("key", None, NOW)
    assert isinstance(document.pop("_id"), ObjectId)
    assert isinstance(document.pop("send_id"), str)
    assert document == {
        "key": "key",
        "params": None,
        "task_state": {
            "create_time": NOW,
            "start_time": NOW + dt.timedelta(hours=1),
            "worker_states": [],
        },
        "task_option": {
            "priority": 5,
            "concurrent_worker_cnt": 3,
            "ping_interval_ms": 1_000,
            "worker_timeout_ms": 2_500,
            "specific_worker_ids": ["w1", "w2"],
            "max_unexpected_retries": 7,
            "unexpected_retry_delay_ms": 500,
        },
        "status": "waiting",
        "due": NOW + dt.timedelta(hours=1),
        "routes": "+",
        "retry": {"backoff": 2.0, "max_delay_ms": 60_000, "jitter": 0.1, "scope": "worker"},
        "timeout_ms": 250,
        "keep_ms": 0,
        "name": "invoice.send",
        "tags": ["a", "b"],
    }


@pytest.mark.parametrize(
    ("options", "routes"),
    [
        ({}, "*"),
        ({"name": "n"}, ["*n", "=n"]),
        ({"worker_ids": ["w1", "w2"]}, ["@w1", "@w2"]),
        ({"worker_ids": ["w1"], "name": "n"}, "@w1"),
        ({"concurrency": 2}, "+"),
        ({"concurrency": 2, "worker_ids": ["w1"], "name": "n"}, "+"),
        ({"retry_scope": "worker"}, "+"),
    ],
)
def test_routes_of_new_tasks(options: dict[str, Any], routes: str | list[str]) -> None:
    """
    A task stands in the route of who may take it; one for several workers stands apart.
    """
    assert SendOptions.checked(**options).document("key", None, NOW)["routes"] == routes


def test_documents_of_one_key_exclude_each_other() -> None:
    """
    Their _id is that of the key, so that there is one; send_id tells whose insert it was.
    """
    options = SendOptions.checked()
    first, second = (options.document("key", None, NOW) for _ in range(2))
    assert first["_id"] == second["_id"] != options.document("other", None, NOW)["_id"]
    assert first["send_id"] != second["send_id"]


def test_a_replacement_sets_every_option_and_removes_what_is_not_given() -> None:
    """
    Options that an update leaves at their defaults are put back to them; facts go.
    """
    assert SendOptions.checked(name="n", timeout=5).replacement({"a": 1}) == {
        "params": {"a": 1},
        "task_option.priority": 0,
        "task_option.concurrent_worker_cnt": 1,
        "task_option.ping_interval_ms": 20_000,
        "task_option.worker_timeout_ms": 60_000,
        "task_option.specific_worker_ids": [],
        "task_option.max_unexpected_retries": 3,
        "task_option.unexpected_retry_delay_ms": 10_000,
        "name": "n",
        "tags": None,
        "retry": None,
        "timeout_ms": 5_000,
        "keep_ms": None,
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (set(), {}),
        ({"params"}, {"params": 1}),
        (
            {"priority", "lease"},
            {"task_option.priority": 9, "task_option.worker_timeout_ms": 80_000},
        ),
        ({"worker_ids"}, {"task_option.specific_worker_ids": ["w1"]}),
        ({"timeout", "keep_finished", "name"}, {"timeout_ms": 5_000, "keep_ms": None, "name": "n"}),
        ({"retry_backoff", "retry_scope"}, {"retry.backoff": 2.0, "retry.scope": None}),
        ({"delay", "if_exists", "if_running", "clean_failed"}, {}),
    ],
)
def test_a_replacement_of_what_was_given(given: set[str], expected: dict[str, Any]) -> None:
    """
    Only these paths are set; a fact at its default is removed, and its neighbours stay.
    """
    options = SendOptions.checked(
        priority=9, lease=80, worker_ids=["w1"], timeout=5, name="n", retry_backoff=2, delay=1
    )
    assert options.replacement(1, given) == expected


def test_a_replacement_of_everything_replaces_the_retry_policy_as_a_whole() -> None:
    """
    What the policy does not say now must not be left over from before.
    """
    assert SendOptions.checked(retry_jitter=0.5).replacement(1)["retry"] == {"jitter": 0.5}


class Name(str, enum.Enum):
    """
    What programs like to pass for names.
    """

    SEND = "invoice.send"


def test_members_of_string_enums_stand_for_their_values() -> None:
    """
    Names, tags and worker ids given as enum members are stored alike, by value.
    """
    options = SendOptions.checked(name=Name.SEND, tags=[Name.SEND], worker_ids=[Name.SEND])
    document = options.document("key", None, NOW)
    assert document["name"] == "invoice.send"
    assert document["tags"] == ["invoice.send"]
    assert document["task_option"]["specific_worker_ids"] == ["invoice.send"]


def test_lists_of_strings_may_be_sets() -> None:
    """
    Any collection of strings with an end is taken.
    """
    assert SendOptions.checked(worker_ids={"w1"}, tags=frozenset({"t"})).tags == ("t",)  # type: ignore[arg-type]
