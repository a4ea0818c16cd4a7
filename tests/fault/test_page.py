"""
The page for whoever is on call names tests that exist, and the defaults that are in force.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from mscheduler_sync import Consumer, Producer

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "guarantees.md").read_text()
_TEST = re.compile(r"`(test_\w+)::(test_\w+)`")
_DEFAULT = re.compile(r"^\| `(\w+)` \| ([\d.]+)(?: s)? \|", re.MULTILINE)


def test_every_test_that_the_page_names_exists() -> None:
    """
    A guarantee stands on the page with tests that are there.
    """
    named = _TEST.findall(PAGE)
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not re.search(rf"^def {test}\(", (HERE / f"{file}.py").read_text(), re.MULTILINE)
    ]
    assert len(named) > 40
    assert missing == []


def test_the_defaults_are_those_of_the_page() -> None:
    """
    Numbers on the page are those of the code.
    """
    parameters = {
        **inspect.signature(Producer.send).parameters,
        **inspect.signature(Consumer).parameters,
    }
    told = {name: float(value) for name, value in _DEFAULT.findall(PAGE)}
    # None stands for 8, which the signature does not say.
    assert told.pop("max_workers") == 8
    assert told == {name: parameters[name].default for name in told}
    assert {"lease", "heartbeat", "max_attempts", "stop_timeout", "poll_interval"} <= told.keys()
