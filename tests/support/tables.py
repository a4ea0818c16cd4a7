"""
Hundreds of documents, generated and chosen, and tables of them for statements to be run on.
"""

from __future__ import annotations

import copy
import datetime as dt
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import attrs
from bson import Int64
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pymongo import UpdateOne
from pymongo.collection import Collection

from mscheduler_sync import model
from mscheduler_sync._storage import expressions as x
from mscheduler_sync._storage.sending import SendOptions
from mscheduler_sync._storage.statement import Update
from mscheduler_sync._storage.store import TaskStore
from tests.support import oracle
from tests.support.oracle import FUTURE, PAST, UTC, Document

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


# -- documents ---------------------------------------------------------------------------------


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
        "heartbeat_at": draw(maybe(past)),
        "send_id": draw(maybe(st.just("an earlier send"))),
        # What is derived may be stale in any way.
        "status": draw(maybe(st.sampled_from(model.STATUSES))),
        "due": draw(maybe(past | future)),
        "routes": draw(maybe(st.sampled_from(["*", ["+"], []]))),
        "finished_at": draw(maybe(past)),
        "expire_at": draw(maybe(future)),
    }
    document.update({name: value for name, value in facts.items() if value is not None})
    if document.get("status") in oracle.ENDED and "finished_at" in document:
        document["finished_by"] = "an earlier attempt"
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
    plain(status="waiting", finished_at=PAST, finished_by="an earlier attempt", expire_at=PAST),
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


def generate(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
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


# -- running statements ------------------------------------------------------------------------


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

    def run(self, make: Make, *, batched: bool = True, cases: Iterable[Case] | None = None) -> None:
        """
        Run the statement that *make* makes, for a hundred cases at once or for each alone.
        """
        chosen = list(self.cases if cases is None else cases)
        if not self.filled:
            self._insert()
            self.filled = True
        self.earliest = self.server_time() - SLACK
        if batched:
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
        self, make: Make, *, batched: bool = True, cases: Iterable[Case] | None = None
    ) -> None:
        """
        Run a statement again and compare every document with what it was.
        """
        before = self.documents()
        self.run(make, batched=batched, cases=cases)
        after = self.documents()
        for key, document in before.items():
            problem = oracle.difference(document, after[key], self.earliest, self.latest)
            assert problem is None, (problem, document, after[key])


def is_for_one(document: Document) -> bool:
    return int(document["task_option"]["concurrent_worker_cnt"]) == 1


def is_barred(document: Document) -> bool:
    """
    Whether *document* is of a cancelled task that waits for nobody but its settling.
    """
    is_cancelled = bool(document.get("cancel")) and document["cancel"].get("time") is not None
    return is_cancelled and document["task_option"]["specific_worker_ids"] == [x.NOBODY]


PLAIN: Final = SendOptions.checked()


def generated() -> list[tuple[Document, int]]:
    """
    The documents of every truth table, each with a choice.
    """
    chosen = [(document, 1 + number % 11) for number, document in enumerate(CHOSEN)]
    return chosen + generate(st.tuples(documents(), st.integers(0, 11)), GENERATED)


def fresh(generated: list[tuple[Document, int]]) -> list[Case]:
    """
    Copies of the generated documents, with keys and ids.
    """
    found = []
    for number, (document, choice) in enumerate(copy.deepcopy(generated)):
        document["key"] = f"task {number}"
        for position, attempt in enumerate(oracle.attempts_of(document)):
            attempt["running_id"] = f"{document['key']}:{position}"
        found.append(Case(document, choice))
    return found
