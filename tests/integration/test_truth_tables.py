"""
Every statement on hundreds of documents, against a model in plain Python; and on odd documents.
"""

from __future__ import annotations

import collections
import copy
import datetime as dt
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import attrs
import bson
import pytest
from bson import (
    Binary,
    Code,
    Decimal128,
    Int64,
    MaxKey,
    MinKey,
    ObjectId,
    Regex,
    Timestamp,
)
from bson.codec_options import CodecOptions, TypeDecoder, TypeRegistry
from bson.datetime_ms import DatetimeMS
from bson.raw_bson import RawBSONDocument
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pymongo import UpdateOne
from pymongo.collection import Collection
from pymongo.errors import OperationFailure

from mscheduler_sync import model
from mscheduler_sync._stages.candidates import Routes
from mscheduler_sync._storage import codec, statements
from mscheduler_sync._storage import expressions as x
from mscheduler_sync._storage.sending import SendOptions
from mscheduler_sync._storage.statements import Update
from mscheduler_sync._storage.store import TaskStore
from mscheduler_sync.errors import InvalidTask
from tests.support import oracle
from tests.support.oracle import FUTURE, PAST, UTC, Claim, Document

ME: Final = "me"
WORKERS: Final = [ME, ME, "w1", "w2", "w3"]
#: Documents of each truth table that are generated, once and the same in every run.
GENERATED: Final = 120
#: The server's two clocks, asked and used, may differ by this.
SLACK: Final = dt.timedelta(seconds=1)

_PAST_TIMES = st.datetimes(dt.datetime(2001, 1, 1), PAST.replace(tzinfo=None))  # noqa: DTZ001
_FUTURE_TIMES = st.datetimes(FUTURE.replace(tzinfo=None), dt.datetime(2200, 1, 1))  # noqa: DTZ001


def _stored(moment: dt.datetime) -> dt.datetime:
    """
    *moment* as the database gives it back: aware, in milliseconds.
    """
    return moment.replace(microsecond=moment.microsecond // 1000 * 1000, tzinfo=UTC)


past: Final = _PAST_TIMES.map(_stored)
future: Final = _FUTURE_TIMES.map(_stored)


def often(usual: st.SearchStrategy[Any], seldom: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """
    Three of four times the first.
    """
    return st.sampled_from([usual, usual, usual, seldom]).flatmap(lambda chosen: chosen)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """
    A value or, more often, None.
    """
    return often(st.none(), strategy)


# -- documents -------------------------------------------------------------------------------


@st.composite
def attempts(draw: st.DrawFn) -> Document:
    """
    An attempt in any state, as this library or a Rust worker writes it.
    """
    worker_id = draw(st.sampled_from(WORKERS))
    kind = draw(
        st.sampled_from(
            ["live", "live", "expired", "expired", "succeeded"] + ["failed"] * 4 + ["both"]
        )
    )
    attempt: Document = {
        # Both outcomes at once: see below.
        "worker_id": "w3" if kind == "both" else worker_id,
        "ping_expire_time": draw(past if kind == "expired" else future),
        "success_time": draw(past) if kind in {"succeeded", "both"} else None,
        "fail_time": draw(past) if kind in {"failed", "both"} else None,
    }
    if kind == "expired" and draw(st.sampled_from([False, False, False, True])):
        attempt["ping_expire_time"] = None
    if kind == "failed":
        attempt["fail_reason"] = "ValueError: x"
        retry_time = draw(st.none() | often(past, future))
        if retry_time is not None:
            attempt["retry_time"] = retry_time
        if draw(st.sampled_from([True, False, False, False, False])):
            attempt["final"] = True
    if kind == "succeeded":
        attempt["returns"] = draw(st.sampled_from([None, 5, {"$x": ["$y"]}]))
    if draw(st.sampled_from([True, False, False])):
        attempt["interrupted"] = True
    if draw(st.booleans()):
        # The crate leaves out what is not set.
        attempt = {name: value for name, value in attempt.items() if value is not None}
    return attempt


def _numbers(*values: int) -> st.SearchStrategy[Any]:
    """
    One of *values*, in any of the types that clients write numbers in.
    """
    return st.builds(
        lambda value, kind: kind(value),
        st.sampled_from(values),
        st.sampled_from([int, Int64, float]),
    )


@st.composite
def documents(draw: st.DrawFn) -> Document:
    """
    A readable task in any state, with derived fields that are right, stale, or missing.
    """
    document: Document = {
        "params": draw(st.sampled_from([{"a": 1}, {"$b": "$c"}, [], "text"])),
        "task_state": {
            "create_time": draw(past),
            "start_time": draw(often(past, future)),
            "worker_states": draw(
                st.lists(attempts(), min_size=draw(st.integers(0, 3)), max_size=5)
            ),
        },
        "task_option": {
            "priority": draw(_numbers(0, 5)),
            "concurrent_worker_cnt": draw(_numbers(1, 2, 3, 4)),
            "ping_interval_ms": draw(_numbers(500, 5_000)),
            "worker_timeout_ms": draw(_numbers(1_000, 60_000, 86_400_000)),
            "specific_worker_ids": draw(
                often(st.sampled_from([[], [ME]]), st.sampled_from([["w1"], ["w1", ME]]))
            ),
            "max_unexpected_retries": draw(_numbers(1, 2, 3, 5, 100)),
            "unexpected_retry_delay_ms": draw(_numbers(0, 10_000)),
        },
    }
    retries = [{"scope": "worker"}, {"scope": "worker"}, {"scope": "task"}, {"backoff": 2.0}]
    facts = {
        "name": draw(maybe(st.sampled_from(["a", "b", "$a"]))),
        "retry": draw(st.none() | st.sampled_from(retries)),
        "keep_ms": draw(maybe(_numbers(0, 60_000))),
        "timeout_ms": draw(maybe(st.just(5_000))),
        "tags": draw(maybe(st.just(["t"]))),
        "counters": draw(maybe(st.just({"released": 2, "failed": 1}))),
        "progress": draw(maybe(st.just({"done": 1}))),
        "beat": draw(maybe(past)),
        "send_id": draw(maybe(st.just("an earlier send"))),
        # What is derived may be stale in any way.
        "status": draw(maybe(st.sampled_from(model.STATUSES))),
        "due": draw(maybe(past | future)),
        "routes": draw(maybe(st.sampled_from(["*", ["+"], []]))),
        "finished_at": draw(maybe(past)),
        "expire_at": draw(maybe(future)),
    }
    document.update({name: value for name, value in facts.items() if value is not None})
    if draw(st.sampled_from([True] + [False] * 7)):
        option = document["task_option"]
        document["cancel"] = {
            "time": draw(past),
            "worker_ids": option["specific_worker_ids"],
        }
        # Somebody else may have changed the ids since.
        if draw(st.booleans()):
            option["specific_worker_ids"] = [oracle.NOBODY]
    return document


PLAIN_STATE: Final[Document] = {
    "create_time": PAST,
    "start_time": PAST,
    "worker_states": [],
}


def plain(*states: Document, **changes: Any) -> Document:
    """
    A task with these attempts that could run now; *changes* replace options, by name, or fields.
    """
    document: Document = {
        "params": None,
        "task_state": {
            **PLAIN_STATE,
            "worker_states": [
                {"worker_id": "w1", "success_time": None, "fail_time": None, **state}
                for state in states
            ],
        },
        "task_option": {
            "priority": 0,
            "concurrent_worker_cnt": 1,
            "ping_interval_ms": 500,
            "worker_timeout_ms": 60_000,
            "specific_worker_ids": [],
            "max_unexpected_retries": 3,
            "unexpected_retry_delay_ms": 10_000,
        },
    }
    for name, value in changes.items():
        holder = document["task_option"] if name in document["task_option"] else document
        holder[name] = value
    return document


#: One document for each answer that a claim can get, so that none of them depends on luck.
CHOSEN: Final = [
    plain(),
    plain(name="a"),
    plain({"ping_expire_time": FUTURE}),
    plain({"ping_expire_time": FUTURE}, concurrent_worker_cnt=2),
    plain({"ping_expire_time": PAST}),
    plain({"ping_expire_time": PAST, "interrupted": True}),
    plain(*[{"ping_expire_time": PAST, "interrupted": True}] * 2, concurrent_worker_cnt=2),
    plain({"ping_expire_time": PAST}, max_unexpected_retries=1),
    plain({"ping_expire_time": PAST, "fail_time": PAST}),
    plain({"ping_expire_time": PAST, "fail_time": PAST, "retry_time": FUTURE}),
    plain({"ping_expire_time": PAST, "fail_time": PAST, "final": True}),
    plain({"ping_expire_time": PAST, "success_time": PAST}, keep_ms=1_000),
    plain(
        {"ping_expire_time": PAST, "success_time": PAST, "worker_id": ME}, concurrent_worker_cnt=2
    ),
    plain({"ping_expire_time": FUTURE, "worker_id": ME}, concurrent_worker_cnt=2),
    plain({"ping_expire_time": PAST, "worker_id": ME}, concurrent_worker_cnt=2),
    plain({"ping_expire_time": PAST, "worker_id": ME}, retry={"scope": "worker"}),
    plain(
        {"ping_expire_time": PAST, "fail_time": PAST, "worker_id": ME},
        max_unexpected_retries=1,
        retry={"scope": "worker"},
    ),
    plain(
        {"ping_expire_time": PAST, "fail_time": PAST},
        max_unexpected_retries=1,
        retry={"scope": "worker"},
    ),
    plain(*[{"fail_time": PAST}] * 100, max_unexpected_retries=100, retry={"scope": "worker"}),
    plain(cancel={"time": PAST, "worker_ids": []}),
    plain(
        {"ping_expire_time": PAST},
        cancel={"time": PAST, "worker_ids": ["w1"]},
        specific_worker_ids=[oracle.NOBODY],
    ),
    plain(specific_worker_ids=["w1"]),
    plain(specific_worker_ids=["w1", ME]),
    plain(status="waiting"),
    plain(status="waiting", finished_at=PAST, expire_at=PAST),
    plain(status="waiting", name="a", retry={"scope": "worker"}),
    plain(status="waiting", specific_worker_ids=["w1"]),
    plain(status="waiting", specific_worker_ids=["w1", ME]),
    plain(status="waiting", specific_worker_ids=[oracle.NOBODY]),
    plain(status="waiting", concurrent_worker_cnt=2),
    plain(status="waiting", max_unexpected_retries=1),
    plain(status="waiting", cancel={"time": PAST, "worker_ids": []}),
    plain(status="waiting", task_state={**PLAIN_STATE, "start_time": FUTURE}),
    plain({"ping_expire_time": FUTURE}, keep_ms=1_000),
    plain({"ping_expire_time": PAST}, keep_ms=0, progress={"done": 1}),
    plain({"ping_expire_time": FUTURE}, cancel={"time": FUTURE, "worker_ids": []}, keep_ms=5),
]


@attrs.frozen
class Case:
    """
    A document, and what is to be done to it.
    """

    document: Document
    #: Picks an attempt, or another choice of a test.
    choice: int

    @property
    def key(self) -> str:
        key: str = self.document["key"]
        return key

    @property
    def running_id(self) -> str:
        """
        An attempt of the document, mostly an open one; sometimes one that it does not have.
        """
        states = oracle.attempts_of(self.document)
        wanted = [a for a in states if oracle.is_open(a)] if self.choice % 4 else states
        return wanted[self.choice % len(wanted)]["running_id"] if wanted else f"{self.key}:none"

    @property
    def ref(self) -> tuple[str, str]:
        return self.key, self.running_id


def _generated(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """
    As many values, the same in every run.
    """
    found: list[Any] = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


@pytest.fixture(scope="module")
def generated() -> list[tuple[Document, int]]:
    chosen = [(document, 1 + number % 11) for number, document in enumerate(CHOSEN)]
    return chosen + _generated(st.tuples(documents(), st.integers(0, 11)), GENERATED)


@pytest.fixture
def cases(generated: list[tuple[Document, int]]) -> list[Case]:
    """
    Fresh copies of the generated documents, with keys and ids.
    """
    found = []
    for number, (document, choice) in enumerate(copy.deepcopy(generated)):
        document["key"] = f"task {number}"
        for position, attempt in enumerate(oracle.attempts_of(document)):
            attempt["running_id"] = f"{document['key']}:{position}"
        found.append(Case(document, choice))
    return found


# -- running statements ----------------------------------------------------------------------

Make = Callable[[Sequence[Case]], Update]


#: Fewer cases where each is a statement of its own.
ALONE: Final = slice(None, None, 3)


@attrs.define
class Table:
    """
    Documents in a collection, and statements that are run on them.
    """

    collection: Collection[Document]
    cases: list[Case]
    store: TaskStore
    earliest: dt.datetime = oracle.EPOCH
    latest: dt.datetime = oracle.NEVER
    filled: bool = False

    def some(self) -> Table:
        """
        The same table with some of the cases; before the first run.
        """
        return attrs.evolve(self, cases=self.cases[ALONE])

    def _insert(self) -> None:
        self.collection.create_index("key", unique=True)
        self.collection.insert_many([case.document for case in self.cases])

    def server_time(self) -> dt.datetime:
        reply = self.collection.database.client.admin.command("hello")
        return _stored(reply["localTime"])

    def run(
        self, make: Make, *, together: bool = True, cases: Iterable[Case] | None = None
    ) -> None:
        """
        Run the statement that *make* makes, for a hundred cases at once or for each alone.
        """
        chosen = list(self.cases if cases is None else cases)
        if not self.filled:
            self._insert()
            self.filled = True
        self.earliest = self.server_time() - SLACK
        if together:
            for start in range(0, len(chosen), 100):
                self.store.update(make(chosen[start : start + 100]))
        else:
            each = [make([case]) for case in chosen]
            writes = [UpdateOne(update.filter, update.pipeline) for update in each]
            self.collection.bulk_write(writes, ordered=False)
        self.latest = self.server_time() + SLACK

    def documents(self) -> dict[str, Document]:
        return {document["key"]: document for document in self.collection.find()}

    def check(
        self, expect: Callable[[Case], Document], *, cases: Iterable[Case] | None = None
    ) -> None:
        """
        Compare every document with what it was expected to become.
        """
        found = self.documents()
        for case in self.cases if cases is None else cases:
            expected, got = expect(case), found[case.key]
            problem = oracle.difference(expected, got, self.earliest, self.latest)
            assert problem is None, (problem, case.document, got)
            self._check_model(got)

    def _check_model(self, got: Document) -> None:
        """
        The library's own reading of a document agrees with the rules, whatever is stored.
        """
        derived = model.derive(got, model.read_attempts(got))
        assert derived == (oracle.status_of(got), oracle.due_of(got)), got

    def check_repeating_changes_nothing(
        self, make: Make, *, together: bool = True, cases: Iterable[Case] | None = None
    ) -> None:
        """
        Run a statement again and compare every document with what it was.
        """
        before = self.documents()
        self.run(make, together=together, cases=cases)
        after = self.documents()
        for key, document in before.items():
            problem = oracle.difference(document, after[key], self.earliest, self.latest)
            assert problem is None, (problem, document, after[key])


@pytest.fixture
def table(collection: Collection[Document], cases: list[Case]) -> Table:
    return Table(collection, cases, TaskStore(collection))


# -- claiming --------------------------------------------------------------------------------


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
        return statements.claim(refs, ME, names=names, elapsed_since_outage_ms=since_outage_ms)

    return make


@pytest.mark.parametrize("together", [True, False], ids=["together", "alone"])
def test_claims(table: Table, together: bool) -> None:
    """
    A claim is won exactly where the rules allow it, and settles what has expired in any case.
    """
    make = _make_claim()
    refusals = collections.Counter(_claim(case).refusal for case in table.cases)
    table = table if together else table.some()
    table.run(make, together=together)
    table.check(lambda case: _claim(case).document)
    table.check_repeating_changes_nothing(make, together=together)
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
        query = statements.claimed([(case.key, _new_id(case)) for case in chunk])
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


def _is_for_one(document: Document) -> bool:
    return int(document["task_option"]["concurrent_worker_cnt"]) == 1


def _claim_plain(case: Case, **conditions: Any) -> Claim:
    """
    What the short claim does: on a plain task the same as the long one, on others nothing.
    """
    document = case.document
    claim = _claim(case, **conditions)
    is_plain = (
        not oracle.attempts_of(document)
        and _is_for_one(document)
        and document.get("status") == "waiting"
        and "cancel" not in document
    )
    if claim.refusal is None:
        return claim if is_plain else Claim(document, "not plain")
    if is_plain and claim.refusal == "not due":
        ends = ("finished_at", "expire_at")
        document = {name: value for name, value in document.items() if name not in ends}
    return Claim(document, claim.refusal)


@pytest.mark.parametrize("names", [None, ["a", None]])
@pytest.mark.parametrize("together", [True, False], ids=["together", "alone"])
def test_claims_of_plain_tasks(
    table: Table, together: bool, names: list[str | None] | None
) -> None:
    """
    The short claim does to plain tasks what the long one does, and to others nothing.
    """

    def make(cases: Sequence[Case]) -> Update:
        refs = [(case.key, _new_id(case)) for case in cases]
        return statements.claim_plain(refs, ME, names=names)

    table.run(make, together=together)
    found = table.documents()
    for case in table.cases:
        expected, got = _claim_plain(case, names=names), found[case.key]
        problem = oracle.difference(expected.document, got, table.earliest, table.latest)
        assert problem is None, (problem, case.document, got)
    refusals = collections.Counter(_claim_plain(case, names=names).refusal for case in table.cases)
    assert refusals[None] >= 4
    assert {"not due", "not plain", "cancelled", "not for this worker"} <= set(refusals)
    table.check_repeating_changes_nothing(make, together=together)


@pytest.mark.parametrize(("under_way_s", "adds"), [(0, True), (11, True), (13, False)])
def test_claims_of_plain_tasks_that_were_long_under_way(
    table: Table, under_way_s: float, adds: bool
) -> None:
    """
    A claim whose answer nobody waits for any more adds nothing.
    """
    sent_at = table.server_time() - dt.timedelta(seconds=under_way_s)
    cases = [
        case
        for case in table.cases
        if _claim_plain(case).refusal is None
        and case.document["task_option"]["worker_timeout_ms"] >= 60_000
    ]
    table.run(
        lambda some: statements.claim_plain(
            [(case.key, _new_id(case)) for case in some], ME, sent_at=sent_at
        ),
        cases=cases,
    )
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


@pytest.mark.parametrize(("under_way_s", "settles"), [(0, True), (1.5, False)])
def test_claims_that_were_long_under_way(table: Table, under_way_s: float, settles: bool) -> None:
    """
    A claim that has itself sat an outage out settles nothing: the living owner speaks first.
    """

    def make(cases: Sequence[Case]) -> Update:
        sent_at = table.server_time() - dt.timedelta(seconds=under_way_s)
        return statements.claim([(case.key, _new_id(case)) for case in cases], ME, sent_at=sent_at)

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
    TaskStore(collection).update(statements.claim([("one", "new")], ME))
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
            statements.due_tasks(route, until=table.latest, limit=10_000, eligible=eligible)
        )
    }


@pytest.mark.parametrize("names", [None, ["a"], ["b", None]])
def test_what_may_be_claimed_is_found(table: Table, names: list[str | None] | None) -> None:
    """
    Once its derived fields are right, every task that this worker may claim now is found due.
    """
    table.run(lambda cases: statements.repair([case.key for case in cases]))
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
    table.run(lambda cases: statements.repair([case.key for case in cases]))
    left = [case for case in table.cases if _is_left_over(case)]
    claimable = {case.key for case in left if _claim(case).refusal is None}
    assert claimable
    assert claimable <= _found(table, None)


def _is_barred(document: Document) -> bool:
    """
    Whether *document* is of a cancelled task that waits for nobody but its settling.
    """
    is_cancelled = bool(document.get("cancel")) and document["cancel"].get("time") is not None
    return is_cancelled and document["task_option"]["specific_worker_ids"] == [x.NOBODY]


def test_what_was_refused_is_not_found_again(table: Table) -> None:
    """
    After a claim that was refused a task is due when that may change, and not before.
    """
    table.run(lambda cases: statements.repair([case.key for case in cases]))
    table.run(_make_claim())
    table.run(_make_claim())
    refused = {case.key: _claim(case).refusal for case in table.cases}
    again = _found(table, None)
    # What this worker runs itself it finds, and passes over.
    fine = {None, "spent by this worker", "stands already", "mine already"}
    assert {refused[key] for key in again} <= fine


# -- attempts --------------------------------------------------------------------------------


def _refs(cases: Sequence[Case]) -> list[tuple[str, str]]:
    return [case.ref for case in cases]


def _returns(case: Case) -> Any:
    return [None, 7, "$key", {"$add": ["$x"]}, ["$$NOW"]][case.choice % 5]


def _failure(case: Case) -> statements.Failure:
    return statements.Failure(
        ["$fail_reason", "ValueError: x", ""][case.choice % 3],
        [0, 10_000, 86_400_000][case.choice % 3],
        for_good=case.choice % 4 == 0,
    )


def _delay_ms(case: Case) -> int:
    return [0, 60_000, 3_600_000][case.choice % 3]


def _expect_failure(case: Case) -> Document:
    failure = _failure(case)
    return oracle.fail(
        case.document,
        case.running_id,
        failure.reason,
        failure.retry_delay_ms,
        for_good=failure.for_good,
    )


ENDS: Final[dict[str, tuple[Make, Callable[[Case], Document]]]] = {
    "succeed": (
        lambda cases: statements.succeed(_refs(cases), [_returns(case) for case in cases]),
        lambda case: oracle.succeed(case.document, case.running_id, _returns(case)),
    ),
    "fail": (
        lambda cases: statements.fail(_refs(cases), [_failure(case) for case in cases]),
        _expect_failure,
    ),
    "release": (
        lambda cases: statements.release(_refs(cases)),
        lambda case: oracle.release(case.document, case.running_id),
    ),
    "snooze": (
        lambda cases: statements.snooze(_refs(cases), [_delay_ms(case) for case in cases]),
        lambda case: oracle.snooze(case.document, case.running_id, _delay_ms(case)),
    ),
    "mark_interrupted": (
        lambda cases: statements.mark_interrupted(_refs(cases)),
        lambda case: oracle.mark_interrupted(case.document, case.running_id),
    ),
}


@pytest.mark.parametrize("together", [True, False], ids=["together", "alone"])
@pytest.mark.parametrize("name", list(ENDS))
def test_outcomes(table: Table, name: str, together: bool) -> None:
    """
    An outcome changes an open attempt, also one whose lease has ended, and nothing else.
    """
    make, expect = ENDS[name]
    table = table if together else table.some()
    table.run(make, together=together)
    table.check(expect)
    changed = [oracle.open_attempt(case.document, case.running_id) for case in table.cases]
    assert len(table.cases) / 4 < sum(attempt is not None for attempt in changed)
    assert None in changed
    assert any(attempt is not None and oracle.is_expired(attempt) for attempt in changed)
    table.check_repeating_changes_nothing(make, together=together)


@pytest.mark.parametrize("progress", [None, {"$set": ["$$NOW", "$key"]}])
@pytest.mark.parametrize("together", [True, False], ids=["together", "alone"])
def test_successes_of_plain_tasks(table: Table, together: bool, progress: object) -> None:
    """
    The short success does to tasks with one attempt what the long one does, and to others nothing.
    """

    def make(cases: Sequence[Case]) -> Update:
        returns = [_returns(case) for case in cases]
        return statements.succeed_plain(_refs(cases), returns, progress=progress)

    def is_plain(case: Case) -> bool:
        document = case.document
        return len(oracle.attempts_of(document)) == 1 and _is_for_one(document)

    def expect(case: Case) -> Document:
        if not is_plain(case):
            return case.document
        return oracle.succeed(case.document, case.running_id, _returns(case), progress=progress)

    table.run(make, together=together)
    found = table.documents()
    for case in table.cases:
        problem = oracle.difference(expect(case), found[case.key], table.earliest, table.latest)
        assert problem is None, (problem, case.document, found[case.key])
    done = [case for case in table.cases if expect(case) is not case.document]
    assert sum(oracle.open_attempt(c.document, c.running_id) is not None for c in done) >= 8
    assert any("expire_at" in found[case.key] for case in done)
    table.check_repeating_changes_nothing(make, together=together)


def test_outcomes_carry_progress(table: Table) -> None:
    """
    The last progress is stored with the outcome, whatever it is made of.
    """
    progress = {"$set": ["$$NOW", "$key"]}
    table = table.some()
    table.run(
        lambda cases: statements.succeed([cases[0].ref], [1], progress=progress), together=False
    )
    table.check(lambda case: oracle.succeed(case.document, case.running_id, 1, progress=progress))


@pytest.mark.parametrize("together", [True, False], ids=["together", "alone"])
def test_heartbeats(table: Table, together: bool) -> None:
    """
    A heartbeat extends the lease of an open attempt, never moves one back, and says that it beat.
    """

    def make(cases: Sequence[Case]) -> Update:
        return statements.heartbeat(_refs(cases))

    table = table if together else table.some()
    table.run(make, together=together)
    table.check(lambda case: oracle.heartbeat(case.document, case.running_id))
    before = table.documents()
    table.run(make, together=together)
    table.check(lambda case: oracle.heartbeat(before[case.key], case.running_id))
    for key, document in table.documents().items():
        for earlier, later in zip(
            oracle.attempts_of(before[key]), oracle.attempts_of(document), strict=True
        ):
            end = earlier.get("ping_expire_time")
            assert end is None or later["ping_expire_time"] >= end


def test_heartbeats_carry_progress(table: Table) -> None:
    """
    Progress rides on a heartbeat, whatever it is made of.
    """
    progress = ["$key", {"$literal": "$$NOW"}]
    table = table.some()
    table.run(lambda cases: statements.heartbeat([cases[0].ref], progress=progress), together=False)
    table.check(lambda case: oracle.heartbeat(case.document, case.running_id, progress=progress))


HOSTILE: Final = ["$key", "$$NOW", "$x.y", "$$e.running_id", "{$literal: 1}"]


@pytest.mark.parametrize("together", [True, False], ids=["together", "alone"])
def test_texts_that_look_like_expressions(collection: Collection[Document], together: bool) -> None:
    """
    Keys, ids, reasons and values are stored as they are, whatever they look like.
    """
    store = TaskStore(collection)
    refs = [(text, f"{text}!") for text in HOSTILE]
    collection.insert_many(
        [{**plain(max_unexpected_retries=1), "key": key, "name": key} for key in HOSTILE]
    )
    batches = [refs] if together else [[ref] for ref in refs]
    for batch in batches:
        store.update(statements.claim(batch, "$worker_id", names=HOSTILE))
        failures = [statements.Failure(key, 0) for key, _ in batch[1:]]
        store.update(statements.succeed(batch[:1], [{key: [key]} for key, _ in batch[:1]]))
        if failures:
            store.update(statements.fail(batch[1:], failures))
    for document in collection.find():
        (attempt,) = oracle.attempts_of(document)
        assert attempt["running_id"] == f"{document['key']}!"
        assert attempt["worker_id"] == "$worker_id"
        if document["status"] == "succeeded":
            assert attempt["returns"] == {document["key"]: [document["key"]]}
        else:
            assert document["status"] == "failed"
            assert attempt["fail_reason"] == document["key"]


# -- producers and repair --------------------------------------------------------------------


def _has_own_budgets(document: Document) -> bool:
    return bool(document.get("retry", {}).get("scope") == "worker")


@pytest.mark.parametrize("together", [True, False], ids=["together", "alone"])
def test_repairs(table: Table, together: bool) -> None:
    """
    A repair sets what follows from the rest of the document, and a second one changes nothing.
    """

    def make(cases: Sequence[Case]) -> Update:
        return statements.repair([case.key for case in cases])

    assert {oracle.status_of(case.document) for case in table.cases} == set(model.STATUSES)
    table = table if together else table.some()
    table.run(make, together=together)
    table.check(lambda case: oracle.repair(case.document))
    table.check_repeating_changes_nothing(make, together=together)
    for case in table.cases:
        option = case.document["task_option"]
        shared = option["concurrent_worker_cnt"] > 1 or _has_own_budgets(case.document)
        routes = statements.routes_of(
            name=case.document.get("name"),
            worker_ids=() if _is_barred(case.document) else option["specific_worker_ids"],
            shared=shared,
        )
        assert routes == oracle.routes_of(case.document)
    keys = [case.key for case in table.cases]
    for document in table.store.collection.find({"key": {"$in": keys}}):
        task = model.read_task(document, table.collection.codec_options)
        assert task.status == document["status"]
        assert task.due_at == document["due"].replace(tzinfo=UTC)


def test_cancelling(table: Table) -> None:
    """
    A task that has not ended is marked once, with its own worker ids kept; one that has stays.
    """

    def make(cases: Sequence[Case]) -> Update:
        return statements.cancel(cases[0].key)

    table.run(make, together=False)
    table.check(lambda case: oracle.cancel(case.document))
    table.check_repeating_changes_nothing(make, together=False, cases=table.cases[ALONE])


REPLACEMENT: Final = SendOptions.checked(
    concurrency=2, max_attempts=2, name="new", tags=["$t"], worker_ids=["w1"], keep_finished=60
)
PLAIN: Final = SendOptions.checked()
REPLACEMENTS: Final = [
    None,
    None,
    PLAIN.replacement({"$p": 1}),
    REPLACEMENT.replacement("new"),
    # Only some of the options.
    REPLACEMENT.replacement(None, {"params", "name"}),
    REPLACEMENT.replacement(None, {"worker_ids", "keep_finished", "retry_jitter"}),
    SendOptions.checked(retry_scope="worker").replacement(None, {"retry_scope", "retry_backoff"}),
]


def _resend_arguments(case: Case) -> dict[str, Any]:
    """
    How a case is sent again: any combination of ways, over all cases.
    """
    bits = int(case.key.removeprefix("task "))
    return {
        "send_id": "an earlier send" if case.choice == 0 else "this send",
        "start_time": [None, oracle.PAST, oracle.FUTURE][bits % 3],
        "replace": REPLACEMENTS[bits % 7],
        "rerun": bits & 4 > 0,
        "only_if_idle": bits & 8 > 0,
        "clean_success": bits & 16 > 0,
        "clean_failed": bits & 32 > 0,
    }


def _make_resend(cases: Sequence[Case]) -> Update:
    return statements.resend(cases[0].key, **_resend_arguments(cases[0]))


def test_sending_again(table: Table) -> None:
    """
    A resend replaces, cleans and arms as asked for, once, and spares a running task if told to.
    """
    table.run(_make_resend, together=False)
    table.check(lambda case: oracle.resend(case.document, **_resend_arguments(case)))
    table.check_repeating_changes_nothing(_make_resend, together=False, cases=table.cases[ALONE])


def test_a_refused_resend_changes_nothing(collection: Collection[Document]) -> None:
    """
    A task that runs is left as it is, to the last field, when it was to be spared.
    """
    collection.insert_one({**plain({"ping_expire_time": FUTURE}), "key": "one"})
    store = TaskStore(collection)
    store.update(statements.repair(["one"]))
    before = collection.find_one()
    store.update(
        statements.resend(
            "one",
            "this send",
            start_time=PAST,
            replace=REPLACEMENT.replacement("new"),
            rerun=True,
            only_if_idle=True,
            clean_success=False,
            clean_failed=False,
        )
    )
    after = collection.find_one()
    assert before is not None
    assert after is not None
    assert after.pop("counters", {}).keys() <= {"failed", "succeeded"}
    assert after == before


def test_sending_what_is_cancelled_again_is_among_the_cases(cases: list[Case]) -> None:
    """
    Some of the cases stay barred to all workers while their options are replaced.
    """
    after = [oracle.resend(case.document, **_resend_arguments(case)) for case in cases]
    barred = [
        document["cancel"]["worker_ids"]
        for document in after
        if "cancel" in document
        and document["task_option"]["specific_worker_ids"] == [oracle.NOBODY]
    ]
    assert ["w1"] in barred


# -- odd documents ---------------------------------------------------------------------------

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
    *("status", "finished_at", "expire_at", "beat", "progress", "send_id"),
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


@pytest.fixture(scope="module")
def generated_odd() -> list[Document]:
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
    return [*chosen, starts_in_an_array, *_generated(odd_documents(), GENERATED // 2)]


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
        lambda cases: statements.claim([(c.key, f"{c.key}:new") for c in cases], ME),
        lambda case: oracle.claim(case.document, f"{case.key}:new", ME).document,
    ),
    "claim after an outage": (
        lambda cases: statements.claim(
            [(c.key, f"{c.key}:new") for c in cases], ME, names=[None], elapsed_since_outage_ms=100
        ),
        lambda case: (
            oracle.claim(
                case.document, f"{case.key}:new", ME, names=[None], since_outage_ms=100
            ).document
        ),
    ),
    "heartbeat": (
        lambda cases: statements.heartbeat(_first_refs(cases)),
        lambda case: oracle.heartbeat(case.document, f"{case.key}:0"),
    ),
    "succeed": (
        lambda cases: statements.succeed(_first_refs(cases), [1] * len(cases)),
        lambda case: oracle.succeed(case.document, f"{case.key}:0", 1),
    ),
    "fail": (
        lambda cases: statements.fail(
            _first_refs(cases), [statements.Failure("x", 1_000)] * len(cases)
        ),
        lambda case: oracle.fail(case.document, f"{case.key}:0", "x", 1_000, for_good=False),
    ),
    "release": (
        lambda cases: statements.release(_first_refs(cases)),
        lambda case: oracle.release(case.document, f"{case.key}:0"),
    ),
    "snooze": (
        lambda cases: statements.snooze(_first_refs(cases), [5_000] * len(cases)),
        lambda case: oracle.snooze(case.document, f"{case.key}:0", 5_000),
    ),
    "mark_interrupted": (
        lambda cases: statements.mark_interrupted(_first_refs(cases)),
        lambda case: oracle.mark_interrupted(case.document, f"{case.key}:0"),
    ),
    "repair": (
        lambda cases: statements.repair([case.key for case in cases]),
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
            statements.cancel(case.key)
            if name == "cancel"
            else statements.resend(
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

    odd_table.run(make, together=False)
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
    store.update(statements.repair([document["key"], ended["key"]]))
    (found,) = store.find(statements.whole(["failed"]))
    if milliseconds > 0:
        # The retry was reckoned from the last year that there is.
        assert codec.envelope(found)["due"] == oracle.NEVER + dt.timedelta(seconds=1)
    (found,) = store.find(statements.whole(["ended"]))
    if milliseconds > 0:
        assert codec.envelope(found)["expire_at"] == oracle.NEVER + dt.timedelta(seconds=1)


def test_odd_documents_are_found_without_errors(odd_table: Table) -> None:
    """
    The reads that discover tasks take any document.
    """
    finds = [
        statements.due_tasks(route, until=FUTURE, limit=1_000, eligible=eligible)
        for route in ("*", "*n", "=x", "+", f"@{ME}")
        for eligible in (
            statements.eligible_in_shared_routes(ME, ["x", None]),
            statements.eligible_name(["x"]),
            None,
        )
    ]
    finds += [
        statements.underived(after_id=None, limit=1_000),
        statements.unfinished(after_key="", limit=1_000),
        statements.finished_before(FUTURE, list(model.STATUSES), 1_000),
    ]
    found = [document["_id"] for find in finds for document in odd_table.store.find(find)]
    assert len(found) > len(odd_table.cases)


def test_the_due_time_is_always_a_date(odd_table: Table) -> None:
    """
    A due time that is no date would be found by no query.
    """
    odd_table.run(lambda cases: statements.repair([case.key for case in cases]))
    repaired = [
        d for d in odd_table.documents().values() if isinstance(d.get("routes"), str | list)
    ]
    assert [d["due"] for d in repaired if not isinstance(d["due"], dt.datetime)] == []


# -- the stream ------------------------------------------------------------------------------


def _events_until(stream: Any, key: str) -> list[Document]:
    """
    The events up to the one that inserts *key*.
    """
    found: list[Document] = []
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        event = stream.try_next()
        assert stream.alive
        if event is not None:
            found.append(event)
            if event.get("fullDocument", {}).get("key") == key:
                return found
    pytest.fail(f"the event of {key!r} did not come; there were {len(found)} others")


def test_the_stream_survives_odd_documents(
    collection: Collection[Document], generated_odd: list[Document]
) -> None:
    """
    Inserting, changing, replacing and deleting anything at all does not end the stream.
    """
    with collection.watch(statements.watch_pipeline(), max_await_time_ms=100) as stream:
        stream.try_next()
        odd = [{**copy.deepcopy(document), "key": n} for n, document in enumerate(generated_odd)]
        collection.insert_many(odd)
        collection.bulk_write(
            [
                UpdateOne(
                    {"_id": document["_id"]},
                    {"$set": {"due": ODD_VALUES[n % len(ODD_VALUES)], "other.x": [n]}},
                )
                for n, document in enumerate(odd)
            ],
            ordered=False,
        )
        collection.update_many({}, {"$unset": {"task_state": 1, "key": 1, "due": 1}})
        collection.replace_one({"_id": odd[0]["_id"]}, {"updateDescription": {"a": [1]}})
        collection.delete_one({"_id": odd[1]["_id"]})
        collection.insert_one({"key": "last"})
        events = _events_until(stream, "last")
    kinds = collections.Counter(event["operationType"] for event in events)
    assert kinds["insert"] == len(odd) + 1
    assert kinds["update"] > len(odd) / 2
    assert kinds["replace"] == 1
    assert set(kinds) == {"insert", "update", "replace"}


def _attempt(**changes: Any) -> Document:
    return plain({"running_id": "r", "worker_id": ME, "ping_expire_time": FUTURE, **changes})


ONE: Final = [("one", "r")]
_WRITES: Final[list[tuple[str, Document, Any, bool]]] = [
    ("a heartbeat", _attempt(ping_expire_time=PAST), statements.heartbeat(ONE), False),
    ("a claim", plain(), statements.claim([("one", "new")], ME), False),
    ("a lost claim", _attempt(), statements.claim([("one", "new")], "w2"), False),
    ("a success", _attempt(), statements.succeed(ONE, [1]), False),
    (
        "a failure that leaves an attempt",
        _attempt(),
        statements.fail(ONE, [statements.Failure("x", 0)]),
        True,
    ),
    (
        "a failure for good",
        _attempt(),
        statements.fail(ONE, [statements.Failure("x", 0, for_good=True)]),
        False,
    ),
    ("a release", _attempt(), statements.release(ONE), True),
    ("a snooze", _attempt(), statements.snooze(ONE, [1_000]), True),
    (
        "a crate's heartbeat",
        _attempt(),
        {"$set": {"task_state.worker_states.0.ping_expire_time": oracle.NEVER}},
        False,
    ),
    (
        "a crate's success",
        _attempt(),
        {"$set": {"task_state.worker_states.0.success_time": PAST}},
        True,
    ),
    ("a person's change", plain(), {"$set": {"task_option.priority": 5}}, True),
    ("a cancellation", plain(), statements.cancel("one"), False),
]


@pytest.mark.parametrize(
    ("document", "write", "is_told"),
    [case[1:] for case in _WRITES],
    ids=[case[0] for case in _WRITES],
)
def test_the_stream_tells_of_what_may_be_claimed(
    collection: Collection[Document], document: Document, write: Any, is_told: bool
) -> None:
    """
    Of our own writes only those that leave something to claim; of other programs' all but beats.
    """
    collection.insert_one({**copy.deepcopy(document), "key": "one"})
    store = TaskStore(collection)
    # Its derived fields, and the counter that a first claim would add, are as they should be.
    store.update(statements.repair(["one"]))
    collection.update_one({"key": "one"}, {"$set": {"counters.released": 0}})
    with collection.watch(statements.watch_pipeline(), max_await_time_ms=100) as stream:
        stream.try_next()
        if isinstance(write, Update):
            assert store.update(write)[0] == 1
        else:
            assert collection.update_one({"key": "one"}, write).modified_count == 1
        collection.insert_one({"key": "last"})
        events = _events_until(stream, "last")
    assert (len(events) == 2) == is_told
