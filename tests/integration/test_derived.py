"""
The named expressions behind the derived fields, each evaluated on hundreds of documents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

from mscheduler_sync._storage import derived
from tests.support import oracle
from tests.support.oracle import Document
from tests.support.tables import Table


def _count(is_counted: Callable[[Document], bool]) -> Callable[[Document], int]:
    return lambda document: sum(map(is_counted, oracle.attempts_of(document)))


def _given_status(expression: Any) -> Any:
    return {"$let": {"vars": {"status": derived.STATUS}, "in": expression}}


#: Expression, what it must say of a document, and how many different answers there are at least.
PIECES: Final[dict[str, tuple[Any, Callable[[Document], Any], int]]] = {
    "successes": ("$$successes", _count(oracle.succeeded), 3),
    "open attempts": ("$$running", _count(oracle.is_open), 3),
    "failures": ({"$size": "$$failures"}, _count(oracle.failed), 3),
    "cancelled": ("$$cancelled", oracle.is_cancelled, 2),
    "spent": ("$$spent", oracle.is_spent, 2),
    "ready": ("$$ready", oracle.ready_of, 20),
    "first end of a lease": ("$$first_end", oracle.lease_end_of, 20),
    "free": (derived.IS_FREE, oracle.is_free, 2),
    "status": (derived.STATUS, oracle.status_of, 5),
    "due": (_given_status(derived.DUE), oracle.due_of, 20),
    "ended at": (_given_status(derived.ENDED_AT), oracle.ended_at_of, 5),
}


@pytest.mark.parametrize("name", list(PIECES))
def test_a_piece_of_the_derived_fields(table: Table, name: str) -> None:
    """
    It says of every document what the rules say.
    """
    expression, expect, answers = PIECES[name]
    table.collection.insert_many([case.document for case in table.cases])
    fields = {"_id": 0, "key": 1, "value": derived.in_scope(expression)}
    found = {one["key"]: one["value"] for one in table.collection.aggregate([{"$project": fields}])}
    expected = {case.key: expect(case.document) for case in table.cases}
    assert found == expected
    assert len(set(expected.values())) >= answers
