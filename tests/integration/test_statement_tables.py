"""
What follows a claim, sends and repairs, on hundreds of documents, against a model in plain Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
from pymongo.collection import Collection

from mscheduler_sync import model
from mscheduler_sync._storage import statements
from mscheduler_sync._storage.sending import SendOptions
from mscheduler_sync._storage.statement import Update
from mscheduler_sync._storage.store import TaskStore
from tests.support import oracle
from tests.support.oracle import FUTURE, PAST, UTC, Document
from tests.support.tables import ALONE, PLAIN, Case, Make, Table, is_barred, is_for_one, plain

# -- attempts ----------------------------------------------------------------------------------


def _refs(cases: Sequence[Case]) -> list[tuple[str, str]]:
    return [case.ref for case in cases]


def _returns(case: Case) -> Any:
    return [None, 7, "$key", {"$add": ["$x"]}, ["$$NOW"]][case.choice % 5]


def _failure(case: Case) -> statements.attempts.Failure:
    return statements.attempts.Failure(
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
        lambda cases: statements.attempts.succeed(_refs(cases), [_returns(case) for case in cases]),
        lambda case: oracle.succeed(case.document, case.running_id, _returns(case)),
    ),
    "fail": (
        lambda cases: statements.attempts.fail(_refs(cases), [_failure(case) for case in cases]),
        _expect_failure,
    ),
    "release": (
        lambda cases: statements.attempts.release(_refs(cases)),
        lambda case: oracle.release(case.document, case.running_id),
    ),
    "snooze": (
        lambda cases: statements.attempts.snooze(_refs(cases), [_delay_ms(case) for case in cases]),
        lambda case: oracle.snooze(case.document, case.running_id, _delay_ms(case)),
    ),
    "mark_interrupted": (
        lambda cases: statements.attempts.mark_interrupted(_refs(cases)),
        lambda case: oracle.mark_interrupted(case.document, case.running_id),
    ),
}


@pytest.mark.parametrize("batched", [True, False], ids=["batched", "alone"])
@pytest.mark.parametrize("name", list(ENDS))
def test_outcomes(table: Table, name: str, batched: bool) -> None:
    """
    An outcome changes an open attempt, also one whose lease has ended, and nothing else.
    """
    make, expect = ENDS[name]
    table = table if batched else table.some()
    table.run(make, batched=batched)
    table.check(expect)
    changed = [oracle.open_attempt(case.document, case.running_id) for case in table.cases]
    assert len(table.cases) / 4 < sum(attempt is not None for attempt in changed)
    assert None in changed
    assert any(attempt is not None and oracle.is_expired(attempt) for attempt in changed)
    table.check_repeating_changes_nothing(make, batched=batched)


@pytest.mark.parametrize("progress", [None, {"$set": ["$$NOW", "$key"]}])
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "alone"])
def test_successes_of_plain_tasks(table: Table, batched: bool, progress: object) -> None:
    """
    The short success does to tasks with one attempt what the long one does, and to others nothing.
    """

    def make(cases: Sequence[Case]) -> Update:
        returns = [_returns(case) for case in cases]
        return statements.plain.succeed_plain(_refs(cases), returns, progress=progress)

    def is_plain(case: Case) -> bool:
        document = case.document
        return len(oracle.attempts_of(document)) == 1 and is_for_one(document)

    def expect(case: Case) -> Document:
        if not is_plain(case):
            return case.document
        after = oracle.succeed(case.document, case.running_id, _returns(case), progress=progress)
        if "finished_by" not in case.document:
            # Of a task with one attempt nobody need ask who has ended it.
            after.pop("finished_by", None)
        return after

    table.run(make, batched=batched)
    found = table.documents()
    for case in table.cases:
        problem = oracle.difference(expect(case), found[case.key], table.earliest, table.latest)
        assert problem is None, (problem, case.document, found[case.key])
    done = [case for case in table.cases if is_plain(case)]
    assert sum(oracle.open_attempt(c.document, c.running_id) is not None for c in done) >= 8
    assert any("expire_at" in found[case.key] for case in done)
    table.check_repeating_changes_nothing(make, batched=batched)


def test_outcomes_carry_progress(table: Table) -> None:
    """
    The last progress is stored with the outcome, whatever it is made of.
    """
    progress = {"$set": ["$$NOW", "$key"]}
    table = table.some()
    table.run(
        lambda cases: statements.attempts.succeed([cases[0].ref], [1], progress=progress),
        batched=False,
    )
    table.check(lambda case: oracle.succeed(case.document, case.running_id, 1, progress=progress))


@pytest.mark.parametrize("batched", [True, False], ids=["batched", "alone"])
def test_heartbeats(table: Table, batched: bool) -> None:
    """
    A heartbeat extends the lease of an open attempt, never moves one back, and notes its time.
    """

    def make(cases: Sequence[Case]) -> Update:
        return statements.attempts.heartbeat(_refs(cases))

    table = table if batched else table.some()
    table.run(make, batched=batched)
    table.check(lambda case: oracle.heartbeat(case.document, case.running_id))
    before = table.documents()
    table.run(make, batched=batched)
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
    table.run(
        lambda cases: statements.attempts.heartbeat([cases[0].ref], progress=progress),
        batched=False,
    )
    table.check(lambda case: oracle.heartbeat(case.document, case.running_id, progress=progress))


HOSTILE: Final = ["$key", "$$NOW", "$x.y", "$$e.running_id", "{$literal: 1}"]


@pytest.mark.parametrize("batched", [True, False], ids=["batched", "alone"])
def test_texts_that_look_like_expressions(collection: Collection[Document], batched: bool) -> None:
    """
    Keys, ids, reasons and values are stored as they are, whatever they look like.
    """
    store = TaskStore(collection)
    refs = [(text, f"{text}!") for text in HOSTILE]
    collection.insert_many(
        [{**plain(max_unexpected_retries=1), "key": key, "name": key} for key in HOSTILE]
    )
    batches = [refs] if batched else [[ref] for ref in refs]
    for batch in batches:
        store.update(statements.attempts.claim(batch, "$worker_id", names=HOSTILE))
        failures = [statements.attempts.Failure(key, 0) for key, _ in batch[1:]]
        store.update(statements.attempts.succeed(batch[:1], [{key: [key]} for key, _ in batch[:1]]))
        if failures:
            store.update(statements.attempts.fail(batch[1:], failures))
    for document in collection.find():
        (attempt,) = oracle.attempts_of(document)
        assert attempt["running_id"] == f"{document['key']}!"
        assert attempt["worker_id"] == "$worker_id"
        if document["status"] == "succeeded":
            assert attempt["returns"] == {document["key"]: [document["key"]]}
        else:
            assert document["status"] == "failed"
            assert attempt["fail_reason"] == document["key"]


# -- producers and repair ----------------------------------------------------------------------


def _has_own_budgets(document: Document) -> bool:
    return bool(document.get("retry", {}).get("scope") == "worker")


@pytest.mark.parametrize("batched", [True, False], ids=["batched", "alone"])
def test_repairs(table: Table, batched: bool) -> None:
    """
    A repair sets what follows from the rest of the document, and a second one changes nothing.
    """

    def make(cases: Sequence[Case]) -> Update:
        return statements.attempts.repair([case.key for case in cases])

    assert {oracle.status_of(case.document) for case in table.cases} == set(model.STATUSES)
    table = table if batched else table.some()
    table.run(make, batched=batched)
    table.check(lambda case: oracle.repair(case.document))
    table.check_repeating_changes_nothing(make, batched=batched)
    for case in table.cases:
        option = case.document["task_option"]
        shared = option["concurrent_worker_cnt"] > 1 or _has_own_budgets(case.document)
        routes = statements.discovery.routes_of(
            name=case.document.get("name"),
            worker_ids=() if is_barred(case.document) else option["specific_worker_ids"],
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
        return statements.producing.cancel(cases[0].key)

    table.run(make, batched=False)
    table.check(lambda case: oracle.cancel(case.document))
    table.check_repeating_changes_nothing(make, batched=False, cases=table.cases[ALONE])


REPLACEMENT: Final = SendOptions.checked(
    concurrency=2, max_attempts=2, name="new", tags=["$t"], worker_ids=["w1"], keep_finished=60
)
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
    return statements.producing.resend(cases[0].key, **_resend_arguments(cases[0]))


def test_sending_again(table: Table) -> None:
    """
    A resend replaces, cleans and arms as asked for, once, and spares a running task if told to.
    """
    table.run(_make_resend, batched=False)
    table.check(lambda case: oracle.resend(case.document, **_resend_arguments(case)))
    table.check_repeating_changes_nothing(_make_resend, batched=False, cases=table.cases[ALONE])


def test_a_refused_resend_changes_nothing(collection: Collection[Document]) -> None:
    """
    A task that runs is left as it is, to the last field, when it was to be spared.
    """
    collection.insert_one({**plain({"ping_expire_time": FUTURE}), "key": "one"})
    store = TaskStore(collection)
    store.update(statements.attempts.repair(["one"]))
    before = collection.find_one()
    store.update(
        statements.producing.resend(
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
