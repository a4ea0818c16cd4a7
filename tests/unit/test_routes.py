"""
Which routes of the index a consumer takes tasks from.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mscheduler_sync._stages.routes import Routes
from mscheduler_sync._storage import expressions as x

MINE, OTHERS = x.route_of_worker("me"), x.route_of_worker("other")
KNOWN, UNKNOWN = x.route_of_name("known"), x.route_of_name("unknown")


@pytest.mark.parametrize(
    ("names", "queried"),
    [
        (None, [x.ROUTE_UNNAMED, x.ROUTE_ANY_NAME, MINE, x.ROUTE_SHARED]),
        (["known"], [KNOWN, MINE, x.ROUTE_SHARED]),
        (["known", None], [KNOWN, x.ROUTE_UNNAMED, MINE, x.ROUTE_SHARED]),
    ],
)
def test_queries(names: Sequence[str | None] | None, queried: list[str]) -> None:
    """
    Open routes first, then what is for this worker by its id, then what several may run.
    """
    assert [route for route, _ in Routes("me", names).queries] == queried


@pytest.mark.parametrize(
    ("names", "routes", "expected"),
    [
        (None, x.ROUTE_UNNAMED, True),
        (None, [x.ROUTE_ANY_NAME, UNKNOWN], True),
        (["known"], KNOWN, True),
        (["known"], UNKNOWN, False),
        (["known"], [x.ROUTE_ANY_NAME, KNOWN], True),
        (["known"], [x.ROUTE_ANY_NAME, UNKNOWN], False),
        (["known"], x.ROUTE_UNNAMED, False),
        (["known", None], x.ROUTE_UNNAMED, True),
        (None, MINE, True),
        (None, OTHERS, False),
        (None, [OTHERS, MINE], True),
        (["known"], x.ROUTE_SHARED, True),
        (None, [], False),
        (None, None, False),
        (None, 7, False),
    ],
)
def test_include(names: Sequence[str | None] | None, routes: object, expected: bool) -> None:
    """
    One route in common is enough, in either form that documents store; odd values are for nobody.
    """
    assert Routes("me", names).include(routes) is expected
