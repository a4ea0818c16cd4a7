"""
Which statement has ended a task, read from its document.
"""

from __future__ import annotations

from typing import Any

import pytest

from mscheduler_sync.model import ended_by

MINE = {"running_id": "mine"}
OTHER = {"running_id": "other"}


@pytest.mark.parametrize(
    ("status", "finished_by", "attempts", "expected"),
    [
        # Not over, whatever an earlier arm has left.
        (None, None, [MINE], None),
        ("waiting", "mine", [], None),
        ("running", "mine", [MINE], None),
        # Signed: by a success, a failure, a release that left no element, a claim that settled.
        ("succeeded", "mine", [OTHER, MINE], "succeeded"),
        ("failed", "mine", [MINE], "failed"),
        ("cancelled", "mine", [], "cancelled"),
        ("failed", "mine", [OTHER], "failed"),
        # By another statement.
        ("succeeded", "other", [MINE, OTHER], None),
        ("failed", "other", [MINE], None),
        # The short success does not sign: the only attempt is the one.
        ("succeeded", None, [MINE], "succeeded"),
        ("succeeded", None, [OTHER], None),
        ("succeeded", None, [MINE, OTHER], None),
        ("succeeded", None, [], None),
        # A producer's cancel, or a Rust worker.
        ("cancelled", None, [MINE], None),
        ("failed", None, [MINE], None),
        # Somebody broke it.
        ("succeeded", None, "broken", None),
        ("succeeded", None, ["broken"], None),
        (5, "mine", [MINE], None),
    ],
)
def test_who_ended_a_task(
    status: Any, finished_by: Any, attempts: Any, expected: str | None
) -> None:
    """
    The attempt or claim that signed, or the only attempt of a plain task.
    """
    fields = {"status": status, "task_state": {"worker_states": attempts}}
    if finished_by is not None:
        fields["finished_by"] = finished_by
    assert ended_by(fields, "mine") == expected


def test_document_without_attempts_has_no_finisher() -> None:
    """
    Nothing is claimed of what cannot be read.
    """
    assert ended_by({}, "mine") is None
    assert ended_by({"status": "succeeded"}, "mine") is None
