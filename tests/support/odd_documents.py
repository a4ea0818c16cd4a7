"""
Documents in which something stands that should not.
"""

from __future__ import annotations

import copy
import datetime as dt
from typing import Any, Final

from bson import Binary, Code, Decimal128, MaxKey, MinKey, ObjectId, Regex, Timestamp
from hypothesis import strategies as st

from tests.support import oracle
from tests.support.oracle import FUTURE, PAST, UTC, Document
from tests.support.tables import CHOSEN, GENERATED, generate, plain

#: What may stand where something else is expected.
ODD_VALUES: Final[list[Any]] = [
    *(None, True, "", "x", "$x", "$$NOW"),
    *(-1, 0, 1.5, 2**62, -(2**62), float("nan"), float("inf"), float("-inf"), 1e308),
    *(Decimal128("5"), Decimal128("NaN"), Decimal128("1E+6000")),
    *([], [1], ["a"], [None], [[1]], [PAST], [{"a": 1}], [{"running_id": "x"}]),
    *({}, {"a": 1}, {"time": PAST}, {"$x": 1}),
    *(PAST, FUTURE, oracle.EPOCH, oracle.NEVER, dt.datetime(1, 1, 1, tzinfo=UTC)),
    *(ObjectId(), Timestamp(1, 1), Binary(b"x"), Regex("a"), MinKey(), MaxKey(), Code("x")),
]
_ATTEMPT = "task_state.worker_states.0"
ODD_PLACES: Final = [
    *("params", "task_state", "task_state.start_time", "task_state.create_time"),
    *("task_state.worker_states", _ATTEMPT, f"{_ATTEMPT}.running_id", f"{_ATTEMPT}.worker_id"),
    *(f"{_ATTEMPT}.ping_expire_time", f"{_ATTEMPT}.success_time", f"{_ATTEMPT}.fail_time"),
    *(f"{_ATTEMPT}.fail_reason", f"{_ATTEMPT}.retry_time", f"{_ATTEMPT}.claim_time"),
    *(f"{_ATTEMPT}.interrupted", f"{_ATTEMPT}.final", f"{_ATTEMPT}.returns"),
    *("task_option", "task_option.priority", "task_option.concurrent_worker_cnt"),
    *("task_option.ping_interval_ms", "task_option.worker_timeout_ms"),
    *("task_option.specific_worker_ids", "task_option.max_unexpected_retries"),
    *("task_option.unexpected_retry_delay_ms", "name", "tags", "retry", "retry.scope"),
    *("keep_ms", "timeout_ms", "cancel", "cancel.time", "cancel.worker_ids", "counters"),
    *("counters.released", "counters.failed", "counters.succeeded", "counters.snoozed"),
    *("status", "finished_at", "expire_at", "heartbeat_at", "progress", "send_id"),
    *("_tally", "_may", "_ended", "_derived", "a.b", ""),
]
#: Fields that statements compute with, and what could break a computation.
COMPUTED_WITH: Final = [
    *("task_state.start_time", f"{_ATTEMPT}.fail_time", "keep_ms"),
    *("task_option.concurrent_worker_cnt", "task_option.worker_timeout_ms"),
    *("task_option.unexpected_retry_delay_ms", "task_option.ping_interval_ms"),
]
#: Fields that statements join with texts, or count up.
JOINED_OR_COUNTED: Final = [
    *("task_option.specific_worker_ids", "name", "cancel.worker_ids", "retry.scope"),
    *("counters.released", "counters.failed"),
]
EXTREMES: Final[list[Any]] = [
    *(2**63 - 1, -(2**63), float("nan"), float("inf"), 1e300, Decimal128("1E+6000")),
    *("x", [1], oracle.NEVER),
]
#: Where a value is an array, the index of routes and due times takes no array beside it.
_WITHOUT_ARRAYS: Final = ["due", "routes"]
ODD_ATTEMPTS: Final[list[Any]] = [
    *(None, 5, "x", {}, [], [[]], {"worker_id": None}, {"worker_id": 5}, {"running_id": "x"}),
    *([{"worker_id": "w"}], {"worker_id": {}}, {"worker_id": "w", "ping_expire_time": "soon"}),
]


def _put_anywhere(document: Document, path: str, value: object) -> None:
    """
    Put *value* at *path*, making what leads there; numbers are positions in arrays.
    """
    if path in {"a.b", ""}:
        document[path] = value
        return
    *holders, name = path.split(".")
    place: Any = document
    for holder in holders:
        if isinstance(place, list):
            place = place[0] if place else {}
        elif isinstance(place, dict):
            place = place.setdefault(holder, {})
    if isinstance(place, list) and place:
        place[0] = value
    elif isinstance(place, dict):
        place[name] = value


@st.composite
def odd_documents(draw: st.DrawFn) -> Document:
    """
    A task of which one to three fields are something else than they should be.
    """
    document: Document = copy.deepcopy(draw(st.sampled_from(CHOSEN)))
    places = st.sampled_from(ODD_PLACES)
    for path in draw(st.lists(places, min_size=1, max_size=3, unique=True)):
        _put_anywhere(document, path, copy.deepcopy(draw(st.sampled_from(ODD_VALUES))))
    if draw(st.sampled_from([False, False, True])):
        scalars = [value for value in ODD_VALUES if not isinstance(value, list)]
        document[draw(st.sampled_from(_WITHOUT_ARRAYS))] = draw(st.sampled_from(scalars))
    state = document["task_state"]
    states = state.get("worker_states") if isinstance(state, dict) else None
    if isinstance(states, list) and draw(st.booleans()):
        odd = draw(st.lists(st.sampled_from(ODD_ATTEMPTS), max_size=3))
        states[draw(st.integers(0, len(states))) :] = copy.deepcopy(odd)
    return document


def generated() -> list[Document]:
    """
    A document for each place and each value that it should not hold, and others by chance.
    """
    wanted: list[tuple[str, Any]] = [(path, None) for path in ODD_PLACES]
    wanted += [(path, value) for path in COMPUTED_WITH for value in EXTREMES]
    wanted += [(path, value) for path in JOINED_OR_COUNTED for value in (5, "x", [1], [None])]
    chosen = [plain({"ping_expire_time": PAST, "fail_time": PAST}) for _ in wanted]
    for document, (path, value) in zip(chosen, wanted, strict=True):
        _put_anywhere(document, path, value)
    leases: list[Any] = ["soon", [PAST], 5, {}]
    chosen += [plain({"ping_expire_time": lease}) for lease in leases]
    starts_in_an_array = plain()
    starts_in_an_array["task_state"]["start_time"] = [PAST]
    return [*chosen, starts_in_an_array, *generate(odd_documents(), GENERATED // 2)]
