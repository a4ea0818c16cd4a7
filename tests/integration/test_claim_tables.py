"""
Claims on hundreds of documents, against a model in plain Python.
"""

from __future__ import annotations

import collections
import datetime as dt
from collections.abc import Sequence
from typing import Any

import pytest
from pymongo.collection import Collection

from mscheduler_sync._stages.routes import Routes
from mscheduler_sync._storage import statements
from mscheduler_sync._storage.statement import Update
from mscheduler_sync._storage.store import TaskStore
from tests.support import oracle
from tests.support.oracle import PAST, Claim, Document
from tests.support.tables import ME, Case, Make, Table, is_for_one, plain


def _new_id(case: Case) -> str:
    """
    The id of a new claim; sometimes one that stands in the document already.
    """
    return case.running_id if case.choice == 0 else f"{case.key}:new"


def _claim(case: Case, **conditions: Any) -> Claim:
    return oracle.claim(case.document, _new_id(case), ME, **conditions)


def _make_claim(
    names: Sequence[str | None] | None = None, since_outage_ms: int | None = None
) -> Make:
    def make(cases: Sequence[Case]) -> Update:
        refs = [(case.key, _new_id(case)) for case in cases]
        return statements.attempts.claim(
            refs, ME, names=names, elapsed_since_outage_ms=since_outage_ms
        )

    return make


@pytest.mark.parametrize("batched", [True, False], ids=["batched", "alone"])
def test_claims(table: Table, batched: bool) -> None:
    """
    A claim is won exactly where the rules allow it, and settles what has expired in any case.
    """
    make = _make_claim()
    refusals = collections.Counter(_claim(case).refusal for case in table.cases)
    table = table if batched else table.some()
    table.run(make, batched=batched)
    table.check(lambda case: _claim(case).document)
    table.check_repeating_changes_nothing(make, batched=batched)
    assert set(refusals) == {
        None,
        "not for this worker",
        "barred to all",
        "stands already",
        "cancelled",
        "not due",
        "no place",
        "spent",
        "mine already",
        "spent by this worker",
    }
    assert refusals[None] > len(table.cases) / 10


def test_claims_are_read_back(table: Table) -> None:
    """
    Reading back finds the documents that were won, and those that held the id before.
    """
    table.run(_make_claim())
    found = set()
    for start in range(0, len(table.cases), 100):
        chunk = table.cases[start : start + 100]
        query = statements.attempts.claimed([(case.key, _new_id(case)) for case in chunk])
        found |= {document["key"] for document in table.store.find(query)}
    expected = {
        case.key
        for case in table.cases
        if any(
            attempt["running_id"] == _new_id(case)
            for attempt in oracle.attempts_of(_claim(case).document)
        )
    }
    assert found == expected


def _claim_plain(case: Case, **conditions: Any) -> Claim:
    """
    What the short claim does: on a plain task the same as the long one, on others nothing.
    """
    document = case.document
    claim = _claim(case, **conditions)
    is_plain = (
        not oracle.attempts_of(document)
        and is_for_one(document)
        and document.get("status") == "waiting"
        and "cancel" not in document
    )
    if claim.refusal is None:
        return claim if is_plain else Claim(document, "not plain")
    if is_plain and claim.refusal == "not due":
        ends = ("finished_at", "finished_by", "expire_at")
        document = {name: value for name, value in document.items() if name not in ends}
    return Claim(document, claim.refusal)


@pytest.mark.parametrize("names", [None, ["a", None]])
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "alone"])
def test_claims_of_plain_tasks(table: Table, batched: bool, names: list[str | None] | None) -> None:
    """
    The short claim does to plain tasks what the long one does, and to others nothing.
    """

    def make(cases: Sequence[Case]) -> Update:
        refs = [(case.key, _new_id(case)) for case in cases]
        return statements.plain.claim_plain(refs, ME, names=names)

    table.run(make, batched=batched)
    found = table.documents()
    for case in table.cases:
        expected, got = _claim_plain(case, names=names), found[case.key]
        problem = oracle.difference(expected.document, got, table.earliest, table.latest)
        assert problem is None, (problem, case.document, got)
    refusals = collections.Counter(_claim_plain(case, names=names).refusal for case in table.cases)
    assert refusals[None] >= 4
    assert {"not due", "not plain", "cancelled", "not for this worker"} <= set(refusals)
    table.check_repeating_changes_nothing(make, batched=batched)


@pytest.mark.parametrize(("under_way_s", "adds"), [(0, True), (6, True), (13, False)])
def test_claims_of_plain_tasks_that_were_long_under_way(
    table: Table, under_way_s: float, adds: bool
) -> None:
    """
    A claim whose answer nobody waits for any more adds nothing.
    """

    def make(cases: Sequence[Case]) -> Update:
        sent_at = table.server_time() - dt.timedelta(seconds=under_way_s)
        refs = [(case.key, _new_id(case)) for case in cases]
        return statements.plain.claim_plain(refs, ME, sent_at=sent_at)

    cases = [
        case
        for case in table.cases
        if _claim_plain(case).refusal is None
        and case.document["task_option"]["worker_timeout_ms"] >= 60_000
    ]
    table.run(make, cases=cases)
    found = table.documents()
    assert cases
    for case in cases:
        assert bool(oracle.attempts_of(found[case.key])) == adds
        assert found[case.key]["status"] == ("running" if adds else "waiting")


@pytest.mark.parametrize("names", [["a", "$a"], ["b", None]])
def test_claims_by_name(table: Table, names: list[str | None]) -> None:
    """
    A consumer with names touches no task of another name; None stands for tasks without one.
    """
    table.run(_make_claim(names))
    table.check(lambda case: _claim(case, names=names).document)
    refusals = {_claim(case, names=names).refusal for case in table.cases}
    assert {None, "unknown name"} <= refusals


@pytest.mark.parametrize("since_outage_ms", [0, 3_999, 4_000, 4_999, 5_000])
def test_claims_after_an_outage(table: Table, since_outage_ms: int) -> None:
    """
    Nothing is settled before 4 s and the heartbeat interval have passed since the outage.
    """
    table.run(_make_claim(since_outage_ms=since_outage_ms))
    table.check(lambda case: _claim(case, since_outage_ms=since_outage_ms).document)
    settled = {
        _claim(case, since_outage_ms=since_outage_ms).document["task_option"]["ping_interval_ms"]
        for case in table.cases
        if _expired_at(_claim(case, since_outage_ms=since_outage_ms).document)
    }
    assert settled == {
        interval for interval in (500, 5_000) if max(interval, 4_000) <= since_outage_ms
    }


# Sent in the future, it is not late on a slow machine either.
@pytest.mark.parametrize(("under_way_s", "settles"), [(-60, True), (1.5, False)])
def test_claims_that_were_long_under_way(table: Table, under_way_s: float, settles: bool) -> None:
    """
    A claim that has itself sat an outage out settles nothing: the living owner speaks first.
    """

    def make(cases: Sequence[Case]) -> Update:
        sent_at = table.server_time() - dt.timedelta(seconds=under_way_s)
        return statements.attempts.claim(
            [(case.key, _new_id(case)) for case in cases], ME, sent_at=sent_at
        )

    table.run(make)
    after = table.documents()
    settled = {
        case.key
        for case in table.cases
        if _expired_at(after[case.key]) and not _expired_at(case.document)
    }
    expected = {
        case.key
        for case in table.cases
        if _expired_at(_claim(case).document) and not _expired_at(case.document)
    }
    assert expected
    assert settled == (expected if settles else set())


def _expired_at(document: Document) -> bool:
    return any(a.get("fail_reason") == oracle.EXPIRED for a in oracle.attempts_of(document))


def test_a_claim_settles_every_kind_of_expired_attempt(table: Table) -> None:
    """
    The cases hold expired attempts that have failed, and interrupted ones that were given back.
    """
    after = [_claim(case).document for case in table.cases]
    assert any(_expired_at(document) for document in after)
    released = [
        document.get("counters", {}).get("released", 0)
        - case.document.get("counters", {}).get("released", 0)
        for case, document in zip(table.cases, after, strict=True)
    ]
    assert max(released) > 1


def test_a_worker_that_has_both_succeeded_and_failed_stays_off(
    collection: Collection[Document],
) -> None:
    """
    Where another program has left both outcomes in one attempt, the success counts.
    """
    both = {"worker_id": ME, "success_time": PAST, "fail_time": PAST}
    document = {**plain(both, concurrent_worker_cnt=2), "key": "one"}
    assert oracle.claim(document, "new", ME).refusal == "mine already"
    collection.insert_one(document)
    TaskStore(collection).update(statements.attempts.claim([("one", "new")], ME))
    (found,) = collection.find()
    assert len(oracle.attempts_of(found)) == 1


def _found(table: Table, names: Sequence[str | None] | None) -> set[str]:
    """
    The keys that a consumer finds due.
    """
    return {
        document["key"]
        for route, eligible in Routes(ME, names).queries
        for document in table.store.find(
            statements.discovery.due_tasks(
                route, until=table.latest, limit=10_000, eligible=eligible
            )
        )
    }


@pytest.mark.parametrize("names", [None, ["a"], ["b", None]])
def test_what_may_be_claimed_is_found(table: Table, names: list[str | None] | None) -> None:
    """
    Once its derived fields are right, every task that this worker may claim now is found due.
    """
    table.run(lambda cases: statements.attempts.repair([case.key for case in cases]))
    claimable = {
        case.key
        for case in table.cases
        if _claim(case, names=names).refusal is None and not _is_left_over(case)
    }
    assert claimable
    assert claimable <= _found(table, names)


def _is_left_over(case: Case) -> bool:
    """
    Whether an earlier life of this worker has left an attempt in a task for several workers.
    """
    return oracle.routes_of(case.document) == "+" and any(
        attempt["worker_id"] == ME and oracle.is_expired(attempt)
        for attempt in oracle.attempts_of(case.document)
    )


def test_what_an_earlier_life_has_left_is_found(table: Table) -> None:
    """
    A worker that comes back under its id finds what it was running when it died.
    """
    table.run(lambda cases: statements.attempts.repair([case.key for case in cases]))
    left = [case for case in table.cases if _is_left_over(case)]
    claimable = {case.key for case in left if _claim(case).refusal is None}
    assert claimable
    assert claimable <= _found(table, None)


def test_what_was_refused_is_not_found_again(table: Table) -> None:
    """
    After a claim that was refused a task is due when that may change, and not before.
    """
    table.run(lambda cases: statements.attempts.repair([case.key for case in cases]))
    table.run(_make_claim())
    table.run(_make_claim())
    refused = {case.key: _claim(case).refusal for case in table.cases}
    again = _found(table, None)
    # What this worker runs itself it finds, and passes over.
    fine = {None, "spent by this worker", "stands already", "mine already"}
    assert {refused[key] for key in again} <= fine
