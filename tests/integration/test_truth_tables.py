"""
Every statement on hundreds of documents, against a model in plain Python; and on odd documents.
"""

from __future__ import annotations

import collections
import copy
import datetime as dt
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import attrs
import pytest
from bson import Int64
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pymongo import UpdateOne
from pymongo.collection import Collection

from mscheduler_sync import model
from mscheduler_sync._storage import statements
from mscheduler_sync._storage.sending import SendOptions
from mscheduler_sync._storage.statements import Update
from mscheduler_sync._storage.store import TaskStore
from tests import oracle
from tests.oracle import FUTURE, PAST, UTC, Claim, Document

ME: Final = "me"
WORKERS: Final = [ME, ME, "w1", "w2", "w3"]
#: Documents of each truth table that are generated, once and the same in every run.
GENERATED: Final = 200
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
    kind = draw(
        st.sampled_from(
            ["live", "live", "expired", "expired", "succeeded"] + ["failed"] * 4 + ["both"]
        )
    )
    attempt: Document = {
        "worker_id": draw(st.sampled_from(WORKERS)),
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
        "lanes": draw(maybe(st.sampled_from([["*"], ["+"], []]))),
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


def plain(*states: Document, **changes: Any) -> Document:
    """
    A task with these attempts that could run now; *changes* replace options, by name, or fields.
    """
    document: Document = {
        "params": None,
        "task_state": {
            "create_time": PAST,
            "start_time": PAST,
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

    def _server_time(self) -> dt.datetime:
        reply = self.collection.database.client.admin.command("hello")
        return _stored(reply["localTime"])

    def run(
        self, make: Make, *, together: bool = True, cases: Iterable[Case] | None = None
    ) -> None:
        """
        Run the statement that *make* makes, for a hundred cases at once or for each alone.
        """
        chosen = list(self.cases if cases is None else cases)
        self.earliest = self._server_time() - SLACK
        if together:
            for start in range(0, len(chosen), 100):
                self.store.update(make(chosen[start : start + 100]))
        else:
            each = [make([case]) for case in chosen]
            writes = [UpdateOne(update.filter, update.pipeline) for update in each]
            self.collection.bulk_write(writes, ordered=False)
        self.latest = self._server_time() + SLACK

    def documents(self) -> dict[str, Document]:
        return {document["key"]: document for document in self.collection.find()}

    def check(
        self, expect: Callable[[Case], Document], *, cases: Iterable[Case] | None = None
    ) -> None:
        """
        Compare every document with what it was expected to become.
        """
        found = self.documents()
        assert len(found) == len(self.cases)
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
            assert after[key] == document


@pytest.fixture
def table(collection: Collection[Document], cases: list[Case]) -> Table:
    store = TaskStore(collection)
    store.ensure_indexes()
    # The times of the documents are long past: the server would sweep them away.
    collection.drop_index("expire_at")
    collection.insert_many([case.document for case in cases])
    return Table(collection, cases, store)


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
    table.run(make, together=together)
    table.check(lambda case: _claim(case).document)
    refusals = collections.Counter(_claim(case).refusal for case in table.cases)
    assert set(refusals) == {
        None,
        "not for this worker",
        "stands already",
        "cancelled",
        "not due",
        "no place",
        "spent",
        "mine already",
        "spent by this worker",
    }
    assert refusals[None] > len(table.cases) / 10
    table.check_repeating_changes_nothing(make, together=together)


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


@pytest.mark.parametrize("names", [["a"], ["b", None], ["$a", "unknown"]])
def test_claims_by_name(table: Table, names: list[str | None]) -> None:
    """
    A consumer with names touches no task of another name; None stands for tasks without one.
    """
    table.run(_make_claim(names))
    table.check(lambda case: _claim(case, names=names).document)
    refusals = {_claim(case, names=names).refusal for case in table.cases}
    assert {None, "unknown name"} <= refusals


@pytest.mark.parametrize("since_outage_ms", [0, 500, 4_999, 5_000])
def test_claims_after_an_outage(table: Table, since_outage_ms: int) -> None:
    """
    Nothing is settled before the task's own heartbeat interval has passed since the outage.
    """
    table.run(_make_claim(since_outage_ms=since_outage_ms))
    table.check(lambda case: _claim(case, since_outage_ms=since_outage_ms).document)
    settled = {
        _claim(case, since_outage_ms=since_outage_ms).document["task_option"]["ping_interval_ms"]
        for case in table.cases
        if _expired_at(_claim(case, since_outage_ms=since_outage_ms).document)
    }
    assert settled == {interval for interval in (500, 5_000) if interval <= since_outage_ms}


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
    table.run(make, together=together)
    table.check(expect)
    changed = [oracle.open_attempt(case.document, case.running_id) for case in table.cases]
    assert len(table.cases) / 4 < sum(attempt is not None for attempt in changed)
    assert None in changed
    assert any(attempt is not None and oracle.is_expired(attempt) for attempt in changed)
    table.check_repeating_changes_nothing(make, together=together)


def test_outcomes_carry_progress(table: Table) -> None:
    """
    The last progress is stored with the outcome, whatever it is made of.
    """
    progress = {"$set": ["$$NOW", "$key"]}
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
    table.run(lambda cases: statements.heartbeat([cases[0].ref], progress=progress), together=False)
    table.check(lambda case: oracle.heartbeat(case.document, case.running_id, progress=progress))


# -- producers and repair --------------------------------------------------------------------


@pytest.mark.parametrize("together", [True, False], ids=["together", "alone"])
def test_repairs(table: Table, together: bool) -> None:
    """
    A repair sets what follows from the rest of the document, and a second one changes nothing.
    """

    def make(cases: Sequence[Case]) -> Update:
        return statements.repair([case.key for case in cases])

    table.run(make, together=together)
    table.check(lambda case: oracle.repair(case.document))
    assert {oracle.status_of(case.document) for case in table.cases} == set(model.STATUSES)
    for document in table.store.collection.find():
        task = model.read_task(document, table.collection.codec_options)
        assert task.status == document["status"]
        assert task.due_at == document["due"].replace(tzinfo=UTC)
    table.check_repeating_changes_nothing(make, together=together)


def test_cancelling(table: Table) -> None:
    """
    A task that has not ended is marked once, with its own worker ids kept; one that has stays.
    """

    def make(cases: Sequence[Case]) -> Update:
        return statements.cancel(cases[0].key)

    table.run(make, together=False)
    table.check(lambda case: oracle.cancel(case.document))
    table.check_repeating_changes_nothing(make, together=False)


REPLACEMENT: Final = SendOptions.checked(
    concurrency=2, max_attempts=2, name="new", tags=["$t"], worker_ids=["w1"], keep_finished=60
)
PLAIN: Final = SendOptions.checked()


def _resend_arguments(case: Case) -> dict[str, Any]:
    """
    How a case is sent again: any combination of ways, over all cases.
    """
    bits = int(case.key.removeprefix("task "))
    replace = [None, None, PLAIN.replacement({"$p": 1}), REPLACEMENT.replacement("new")]
    return {
        "send_id": "an earlier send" if case.choice == 0 else "this send",
        "start_time": [None, oracle.PAST, oracle.FUTURE][bits % 3],
        "replace": replace[bits % 4],
        "rerun": bits & 4 > 0,
        "only_if_idle": bits & 8 > 0,
        "clean_success": bits & 16 > 0,
        "clean_failed": bits & 32 > 0,
    }


def _make_resend(cases: Sequence[Case]) -> Update:
    return statements.resend(cases[0].key, **_resend_arguments(cases[0]))


def _keeps_its_mark(case: Case) -> bool:
    """
    Whether a resend replaces the options of a task that is cancelled and stays so.
    """
    after = oracle.resend(case.document, **_resend_arguments(case))
    return "cancel" in after and _resend_arguments(case)["replace"] is not None


def test_sending_again(table: Table) -> None:
    """
    A resend replaces, cleans and arms as asked for, once, and spares a running task if told to.
    """
    chosen = [case for case in table.cases if not _keeps_its_mark(case)]
    table.run(_make_resend, together=False, cases=chosen)
    table.check(lambda case: oracle.resend(case.document, **_resend_arguments(case)), cases=chosen)
    table.check_repeating_changes_nothing(_make_resend, together=False, cases=chosen)


@pytest.mark.xfail(reason="the new worker ids take the place of the mark that keeps workers off")
def test_sending_a_cancelled_task_again(table: Table) -> None:
    """
    An update leaves a cancelled task closed to all; its new worker ids count once it is armed.
    """
    chosen = [case for case in table.cases if _keeps_its_mark(case)]
    assert chosen
    table.run(_make_resend, together=False, cases=chosen)
    table.check(lambda case: oracle.resend(case.document, **_resend_arguments(case)), cases=chosen)
