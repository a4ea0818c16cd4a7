"""
The names of the Rust crate: what docs/crate.md says they are is what they are.
"""

from __future__ import annotations

import datetime as dt
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from mscheduler_sync import Producer, crate
from mscheduler_sync.events import AttemptEnded, AttemptStarted, ClaimUndecided

PAGE = Path(__file__).parents[2] / "docs" / "crate.md"
#: Of the table's rows about events: the crate's name and ours.
EVENTS = re.findall(r"^\| event `(\w+)` \| (.+?) \|", PAGE.read_text(), re.MULTILINE)
#: Of the table's rows about options: the crate's name and ours.
OPTIONS = re.findall(r"^\| option `(\w+)` \| `(\w+)=", PAGE.read_text(), re.MULTILINE)
NOON = dt.datetime(2030, 1, 1, 12, tzinfo=dt.timezone.utc)
STARTED = AttemptStarted(key="k", running_id="r")
UNDECIDED = ClaimUndecided(key="k")


def test_every_event_of_the_crate_has_its_row() -> None:
    """
    The five events of the crate, each the class or the classes that the table names.
    """
    names = {
        name: " or ".join(
            kind.__name__ for kind in (alias if isinstance(alias, tuple) else [alias])
        )
        for name, alias in vars(crate).items()
        if name[0].isupper() and name in dict(EVENTS)
    }
    assert names == {name: text.replace("`", "") for name, text in EVENTS}
    assert set(names) == {
        "WaitOccupy",
        "WaitOccupyQueueEmpty",
        "TaskOccupyResult",
        "TaskExecuteResult",
        "MarkSuccess",
    }


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (STARTED, True),
        (UNDECIDED, False),
        (AttemptEnded(key="k", running_id="r", succeeded=True), True),
        (AttemptEnded(key="k", running_id="r", succeeded=False), False),
    ],
)
def test_success_is_the_field_of_the_crate(event: Any, expected: bool) -> None:
    """
    Of a claim: won, or not decided. Of an attempt: succeeded, or failed.
    """
    assert crate.success(event) is expected
    is_claim = isinstance(event, crate.TaskOccupyResult)
    assert is_claim != isinstance(event, crate.TaskExecuteResult)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"run_time": NOON}, {"run_at": NOON}),
        ({"concurrency_cnt": 3}, {"concurrency": 3}),
        ({"ping_interval_ms": 30_000}, {"heartbeat": 30.0}),
        ({"worker_timeout_ms": 1_500}, {"lease": 1.5}),
        ({"specific_worker_ids": ["a"]}, {"worker_ids": ["a"]}),
        ({"specific_worker_ids": []}, {"worker_ids": []}),
        ({"max_unexpected_retries": 5}, {"max_attempts": 5}),
        ({"unexpected_retry_delay_ms": 0}, {"retry_delay": 0.0}),
        ({"priority": 0}, {"priority": 0}),
        ({"update_existing_params": True}, {"if_exists": "update"}),
        ({"update_existing_params": False}, {"if_exists": "keep"}),
        ({"not_update_running": True}, {"if_running": "raise"}),
        ({"not_update_running": False}, {"if_running": "apply"}),
        ({"clean_success": True, "clean_failed": False},) * 2,
        ({"run_time": None, "concurrency_cnt": None}, {}),
    ],
)
def test_options_are_translated(given: dict[str, Any], expected: dict[str, Any]) -> None:
    """
    Names and units become ours; what is not given stays with our defaults.
    """
    assert crate.options(**given) == expected


def test_every_option_of_the_crate_has_its_row() -> None:
    """
    The table names for each option the argument that `options` makes of it, and `send` takes it.
    """
    values: dict[str, Any] = {
        name: NOON if name == "run_time" else 1
        for name in inspect.signature(crate.options).parameters
    }
    translated = {
        name: next(iter(crate.options(**{name: value}))) for name, value in values.items()
    }
    assert translated == dict(OPTIONS)
    assert set(translated.values()) <= set(inspect.signature(Producer.send).parameters)


def test_unknown_option_is_refused() -> None:
    """
    A misspelt option is an error, not nothing.
    """
    with pytest.raises(TypeError, match="ping_interval"):
        crate.options(ping_interval=3)  # type: ignore[call-arg]
