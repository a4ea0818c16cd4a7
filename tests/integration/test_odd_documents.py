"""
Every statement on documents in which anything may stand.
"""

from __future__ import annotations

import copy
import datetime as dt
from collections.abc import Callable, Sequence
from typing import Any, Final

import bson
import pytest
from bson import Decimal128
from bson.codec_options import CodecOptions, TypeDecoder, TypeRegistry
from bson.datetime_ms import DatetimeMS
from bson.raw_bson import RawBSONDocument
from pymongo.collection import Collection
from pymongo.errors import OperationFailure

from mscheduler_sync import model
from mscheduler_sync._storage import codec, statements
from mscheduler_sync._storage.statement import Update
from mscheduler_sync._storage.store import TaskStore
from mscheduler_sync.errors import InvalidTask
from tests.support import oracle
from tests.support.oracle import FUTURE, Document
from tests.support.tables import CHOSEN, ME, PLAIN, Case, Make, Table, plain


@pytest.fixture
def odd_table(collection: Collection[Document], generated_odd: list[Document]) -> Table:
    """
    Odd documents, and an ordinary one after every tenth of them.
    """
    cases = []
    for number, document in enumerate(copy.deepcopy(generated_odd)):
        document["key"] = f"task {number}"
        state = document["task_state"]
        states = state.get("worker_states") if isinstance(state, dict) else None
        for position, attempt in enumerate(states if isinstance(states, list) else []):
            if isinstance(attempt, dict) and "running_id" not in attempt:
                attempt["running_id"] = f"{document['key']}:{position}"
        cases.append(Case(document, 1))
        if number % 10 == 0:
            chosen = copy.deepcopy(CHOSEN[number // 10 % len(CHOSEN)])
            chosen["key"] = f"task {number + 10_000}"
            for position, attempt in enumerate(oracle.attempts_of(chosen)):
                attempt["running_id"] = f"{chosen['key']}:{position}"
            cases.append(Case(chosen, 1))
    store = TaskStore(collection)
    store.ensure_indexes()
    # The times of the documents are long past: the server would sweep them away.
    collection.drop_index("expire_at")
    collection.insert_many([case.document for case in cases])
    return Table(collection, cases, store, filled=True)


def _is_ordinary(case: Case) -> bool:
    return int(case.key.removeprefix("task ")) >= 10_000


def _first_refs(cases: Sequence[Case]) -> list[tuple[str, str]]:
    """
    The first attempt of each case, as far as it has one.
    """
    return [(case.key, f"{case.key}:0") for case in cases]


ON_ODD_DOCUMENTS: Final[dict[str, tuple[Make, Callable[[Case], Document]]]] = {
    "claim": (
        lambda cases: statements.attempts.claim([(c.key, f"{c.key}:new") for c in cases], ME),
        lambda case: oracle.claim(case.document, f"{case.key}:new", ME).document,
    ),
    "claim after an outage": (
        lambda cases: statements.attempts.claim(
            [(c.key, f"{c.key}:new") for c in cases], ME, names=[None], elapsed_since_outage_ms=100
        ),
        lambda case: (
            oracle.claim(
                case.document, f"{case.key}:new", ME, names=[None], since_outage_ms=100
            ).document
        ),
    ),
    "heartbeat": (
        lambda cases: statements.attempts.heartbeat(_first_refs(cases)),
        lambda case: oracle.heartbeat(case.document, f"{case.key}:0"),
    ),
    "succeed": (
        lambda cases: statements.attempts.succeed(_first_refs(cases), [1] * len(cases)),
        lambda case: oracle.succeed(case.document, f"{case.key}:0", 1),
    ),
    "fail": (
        lambda cases: statements.attempts.fail(
            _first_refs(cases), [statements.attempts.Failure("x", 1_000)] * len(cases)
        ),
        lambda case: oracle.fail(case.document, f"{case.key}:0", "x", 1_000, for_good=False),
    ),
    "release": (
        lambda cases: statements.attempts.release(_first_refs(cases)),
        lambda case: oracle.release(case.document, f"{case.key}:0"),
    ),
    "snooze": (
        lambda cases: statements.attempts.snooze(_first_refs(cases), [5_000] * len(cases)),
        lambda case: oracle.snooze(case.document, f"{case.key}:0", 5_000),
    ),
    "mark_interrupted": (
        lambda cases: statements.attempts.mark_interrupted(_first_refs(cases)),
        lambda case: oracle.mark_interrupted(case.document, f"{case.key}:0"),
    ),
    "repair": (
        lambda cases: statements.attempts.repair([case.key for case in cases]),
        lambda case: oracle.repair(case.document),
    ),
}


@pytest.mark.parametrize("name", list(ON_ODD_DOCUMENTS))
def test_odd_documents_raise_nothing(odd_table: Table, name: str) -> None:
    """
    Whatever stands in a document, a statement changes it or does not; its neighbours are served.
    """
    make, expect = ON_ODD_DOCUMENTS[name]
    before = odd_table.documents()
    odd_table.run(make)
    ordinary = [case for case in odd_table.cases if _is_ordinary(case)]
    odd_table.check(expect, cases=ordinary)
    after = odd_table.documents()
    changed = [
        case.key
        for case in odd_table.cases
        if not _is_ordinary(case) and after[case.key] != before[case.key]
    ]
    # Odd as they are, many of them are readable: the statements have looked at those.
    assert len(changed) > len(odd_table.cases) / 20


@pytest.mark.parametrize("name", ["cancel", "resend"])
def test_odd_documents_raise_nothing_when_sent_again(odd_table: Table, name: str) -> None:
    """
    The same holds for what producers do.
    """

    def make(cases: Sequence[Case]) -> Update:
        (case,) = cases
        number = int(case.key.removeprefix("task "))
        return (
            statements.producing.cancel(case.key)
            if name == "cancel"
            else statements.producing.resend(
                case.key,
                "this send",
                start_time=None,
                replace=PLAIN.replacement(1) if number % 2 else None,
                rerun=number % 4 > 1,
                only_if_idle=number % 3 == 0,
                clean_success=True,
                clean_failed=True,
            )
        )

    odd_table.run(make, batched=False)
    if name == "cancel":
        ordinary = [case for case in odd_table.cases if _is_ordinary(case)]
        odd_table.check(lambda case: oracle.cancel(case.document), cases=ordinary)


def test_odd_documents_are_read_or_refused(generated_odd: list[Document]) -> None:
    """
    A document is a task, or it is refused with the place of the fault; no other error comes out.
    """
    faults = []
    for document in generated_odd:
        try:
            task = _read(document)
        except InvalidTask as error:
            faults.append((error.path, error.problem))
        else:
            assert task.status in model.STATUSES
    assert 0 < len(faults) < len(generated_odd)
    assert all(path and problem for path, problem in faults)


def _read(document: Document, options: CodecOptions[Any] = codec.ENVELOPE) -> model.Task:
    return model.read_task(RawBSONDocument(bson.encode({"key": "k", **document})), options)


def test_a_failure_at_the_end_of_time_is_read_or_refused() -> None:
    """
    A pause after a failure may lead beyond the last year that Python knows.
    """
    document = plain(
        {"running_id": "r", "fail_time": oracle.NEVER},
        unexpected_retry_delay_ms=100 * 366 * 86_400_000,
    )
    try:
        task = _read(document)
    except InvalidTask:
        return
    assert task.due_at >= oracle.NEVER


class _Broken(TypeDecoder):
    """
    An application's own rule for a type of BSON, which fails.
    """

    bson_type = Decimal128

    def transform_bson(self, value: Decimal128) -> object:
        raise LookupError("no such currency")


def test_params_that_the_application_cannot_decode_are_refused() -> None:
    """
    Whatever the application's own decoder raises: it is the document that cannot be read.
    """
    options: CodecOptions[Any] = CodecOptions(type_registry=TypeRegistry([_Broken()]))
    with pytest.raises(InvalidTask, match="no such currency"):
        _read(plain(params={"price": Decimal128("1")}), options)


@pytest.mark.parametrize("statement", ON_ODD_DOCUMENTS)
@pytest.mark.parametrize("milliseconds", [2**63 - 1, -(2**63)])
def test_dates_beyond_all_years_raise_nothing(
    collection: Collection[Document], milliseconds: int, statement: str
) -> None:
    """
    BSON can hold dates of which no calendar knows; nothing that is added to them overflows.
    """
    far = DatetimeMS(milliseconds)
    document = {
        **plain({"ping_expire_time": far, "fail_time": far}),
        "key": "failed",
        "keep_ms": 1000,
    }
    document["task_option"]["unexpected_retry_delay_ms"] = 1000
    document["task_state"]["worker_states"][0]["running_id"] = f"{document['key']}:0"
    try:
        collection.insert_one(document)
    except OperationFailure as error:
        pytest.skip(f"the server takes no such date: {error}")
    ended = {**plain({"success_time": far}), "key": "ended", "keep_ms": 1000}
    collection.insert_one(ended)
    make, _ = ON_ODD_DOCUMENTS[statement]
    store = TaskStore(collection)
    store.update(make([Case(document, 1), Case(ended, 1)]))
    store.update(statements.attempts.repair([document["key"], ended["key"]]))
    (found,) = store.find(statements.discovery.whole(["failed"]))
    if milliseconds > 0:
        # The retry was computed from the last year that there is.
        assert codec.envelope(found)["due"] == oracle.NEVER + dt.timedelta(seconds=1)
    (found,) = store.find(statements.discovery.whole(["ended"]))
    if milliseconds > 0:
        assert codec.envelope(found)["expire_at"] == oracle.NEVER + dt.timedelta(seconds=1)


def test_odd_documents_are_found_without_errors(odd_table: Table) -> None:
    """
    The reads that discover tasks take any document.
    """
    finds = [
        statements.discovery.due_tasks(route, until=FUTURE, limit=1_000, eligible=eligible)
        for route in ("*", "*n", "=x", "+", f"@{ME}")
        for eligible in (
            statements.discovery.eligible_in_shared_routes(ME, ["x", None]),
            statements.discovery.eligible_name(["x"]),
            None,
        )
    ]
    finds += [
        statements.discovery.underived(after_id=None, limit=1_000),
        statements.discovery.unfinished(after_key="", limit=1_000),
        statements.producing.finished_before(FUTURE, list(model.STATUSES), 1_000),
    ]
    found = [document["_id"] for find in finds for document in odd_table.store.find(find)]
    assert len(found) > len(odd_table.cases)


def test_the_due_time_is_always_a_date(odd_table: Table) -> None:
    """
    A due time that is no date would be found by no query.
    """
    odd_table.run(lambda cases: statements.attempts.repair([case.key for case in cases]))
    repaired = [
        d for d in odd_table.documents().values() if isinstance(d.get("routes"), str | list)
    ]
    assert [d["due"] for d in repaired if not isinstance(d["due"], dt.datetime)] == []
