"""
What holds for every statement: fences, index use, protected values, and portable expressions.
"""

from __future__ import annotations

import datetime as dt
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import bson
import pytest

from mscheduler_sync._storage import expressions as x
from mscheduler_sync._storage import statements
from mscheduler_sync._storage.sending import SendOptions
from mscheduler_sync._storage.statement import Delete, Find, Update

UTC = dt.timezone.utc
OBJECT_ID = bson.ObjectId("65a1b2c3d4e5f60718293a4b")
MOMENT = dt.datetime(2031, 5, 6, tzinfo=UTC)

#: Texts that would be paths, variables or operators if they were not protected.
KEYS: Final = ["$key", "$$NOW", "$x.y", "$$e.running_id", "$"]
IDS: Final = ["$task_option", "$$ROOT", "$$REMOVE", "$id.a", "$$this"]
WORKER: Final = "$worker_id"
REASONS: Final = ["$reason", "$$CURRENT", "$fail_reason", "$r", "$$value"]
NAMES: Final = ["$name", None, "$$name"]
VALUE: Final = {"$add": ["$$hostile", "$hostile.path"], "nested": [{"$$hostile key": "$hostile"}]}
SEND_ID: Final = "$send_id of a send"
TAG: Final = "$tag"
HOSTILE: Final = [
    *(text for text in (*KEYS, *IDS, *REASONS) if len(text) > 2 and text != "$$NOW"),
    WORKER,
    "$name",
    "$$name",
    SEND_ID,
    TAG,
    "hostile",
]
#: These are hostile as users' texts, and our own as paths or variables.
OWN_PATHS: Final = {"$key", "$name", "$$e.running_id", "$$REMOVE", "$task_option", "$send_id"}

OPTIONS: Final = SendOptions.checked(
    name="$name", tags=[TAG], worker_ids=[WORKER], timeout=5, keep_finished=60, retry_backoff=2
)


def refs(count: int) -> list[tuple[str, str]]:
    return list(zip(KEYS, IDS, strict=True))[:count]


def after_the_claim(count: int) -> dict[str, Update]:
    """
    Every write about attempts that exist, for *count* of them.
    """
    return {
        "heartbeat": statements.attempts.heartbeat(refs(count)),
        "heartbeat with progress": statements.attempts.heartbeat(refs(1), progress=VALUE),
        "succeed": statements.attempts.succeed(refs(count), [VALUE, *REASONS][:count]),
        "succeed with nothing": statements.attempts.succeed(refs(count), [None] * count),
        "succeed with progress": statements.attempts.succeed(refs(1), [VALUE], progress=VALUE),
        "succeed_plain": statements.plain.succeed_plain(refs(count), [VALUE, *REASONS][:count]),
        "succeed_plain with progress": statements.plain.succeed_plain(
            refs(1), [VALUE], progress=VALUE
        ),
        "fail": statements.attempts.fail(
            refs(count),
            [statements.attempts.Failure(reason, 1_000 * n) for n, reason in enumerate(REASONS)][
                :count
            ],
        ),
        "fail for good": statements.attempts.fail(
            refs(count),
            [statements.attempts.Failure(r, 0, for_good=n == 0) for n, r in enumerate(REASONS)][
                :count
            ],
            progress=VALUE if count == 1 else None,
        ),
        "release": statements.attempts.release(refs(count)),
        "snooze": statements.attempts.snooze(refs(count), [5_000 * n for n in range(count)]),
        "mark_interrupted": statements.attempts.mark_interrupted(refs(count)),
    }


def resends() -> list[Update]:
    """
    A resend with every combination of its options.
    """
    return [
        statements.producing.resend(
            KEYS[0],
            SEND_ID,
            start_time=MOMENT if has_time else None,
            replace=OPTIONS.replacement(VALUE) if replaces else None,
            rerun=rerun,
            only_if_idle=only_if_idle,
            clean_success=clean_success,
            clean_failed=clean_failed,
        )
        for has_time, replaces, rerun, only_if_idle, clean_success, clean_failed in (
            itertools.product([False, True], repeat=6)
        )
    ]


def updates() -> dict[str, list[Update]]:
    """
    Every write that there is by its name, for one task and for several.
    """
    found: dict[str, list[Update]] = {
        "cancel": [statements.producing.cancel(KEYS[0])],
        "resend": resends(),
    }
    for count in (1, 3, 5):
        for name, update in after_the_claim(count).items():
            found.setdefault(name, []).append(update)
        found.setdefault("repair", []).append(statements.attempts.repair(KEYS[:count]))
        found.setdefault("claim", []).extend(
            [
                statements.attempts.claim(refs(count), WORKER),
                statements.attempts.claim(
                    refs(count), WORKER, names=NAMES, elapsed_since_outage_ms=500
                ),
            ]
        )
        found.setdefault("claim_plain", []).extend(
            [
                statements.plain.claim_plain(refs(count), WORKER),
                statements.plain.claim_plain(refs(count), WORKER, names=NAMES, sent_at=MOMENT),
            ]
        )
    return found


def finds() -> dict[str, Find]:
    """
    Every read that there is.
    """
    return {
        "due_tasks": statements.discovery.due_tasks("*", until=MOMENT, limit=10),
        "due_tasks, eligible": statements.discovery.due_tasks(
            "+",
            until=MOMENT,
            limit=10,
            after=MOMENT,
            eligible=statements.discovery.eligible_in_shared_routes(WORKER, NAMES),
        ),
        "due_tasks, pinned": statements.discovery.due_tasks(
            "@w", until=MOMENT, limit=10, eligible=statements.discovery.eligible_name(NAMES)
        ),
        "underived": statements.discovery.underived(after_id=None, limit=10),
        "underived, next page": statements.discovery.underived(after_id=OBJECT_ID, limit=10),
        "unfinished": statements.discovery.unfinished(after_key="$key", limit=10),
        "discovered_by_id": statements.discovery.discovered_by_id([OBJECT_ID]),
        "discovered_by_key": statements.discovery.discovered_by_key(KEYS),
        "whole": statements.discovery.whole(KEYS),
        "claimed": statements.attempts.claimed(refs(3)),
        "claimed, one": statements.attempts.claimed(refs(1)),
        "attempt_state": statements.attempts.attempt_state(KEYS),
        "task": statements.producing.task(KEYS[0], {"params": 0}),
        "tasks": statements.producing.tasks({"status": "waiting"}, after="$key", limit=10),
        "finished_before": statements.producing.finished_before(MOMENT, list(x.TERMINAL), 10),
    }


UPDATES: Final = updates()
EVERY_UPDATE = pytest.mark.parametrize("name", list(UPDATES))
EVERY_FIND = pytest.mark.parametrize("name", list(finds()))


def keys_of(update: Update) -> list[str]:
    condition = update.filter["key"]
    return [condition] if isinstance(condition, str) else condition["$in"]


def stages(update: Update) -> list[dict[str, Any]]:
    assert isinstance(update.pipeline, list)
    return update.pipeline


def walk(node: object, parent: str = "") -> Iterator[tuple[str, object]]:
    """
    Every part of an expression outside of ``$literal``, with the operator or field above it.
    """
    yield parent, node
    if isinstance(node, Mapping):
        for name, inner in node.items():
            if name != "$literal":
                yield from walk(inner, name)
    elif isinstance(node, (list, tuple)):
        for inner in node:
            yield from walk(inner, parent)


def texts(node: object) -> Iterator[tuple[str, str]]:
    """
    Every string of an expression outside of ``$literal``, names of fields and operators included.
    """
    for parent, part in walk(node):
        if isinstance(part, str):
            yield parent, part
        elif isinstance(part, Mapping):
            for name in part:
                yield parent, name


def operators(node: object) -> set[str]:
    return {
        name
        for _, part in walk(node)
        if isinstance(part, Mapping)
        for name in part
        if name.startswith("$")
    }


# -- filters ---------------------------------------------------------------------------------


@EVERY_UPDATE
def test_a_write_finds_its_documents_by_key(name: str) -> None:
    """
    The key is the first clause (the index, and the shard key), and nothing else picks documents.
    """
    for update in UPDATES[name]:
        assert next(iter(update.filter)) == "key"
        assert update.filter["key"] == statements.base.one_or_in(keys_of(update))
        assert update.many is (len(keys_of(update)) > 1)


@EVERY_UPDATE
def test_a_write_has_plain_conditions(name: str) -> None:
    """
    No operator stands at the top of a filter: such a filter reads the whole collection.
    """
    for update in UPDATES[name]:
        assert not [name for name in update.filter if name.startswith("$")]


@EVERY_UPDATE
def test_a_write_leaves_unreadable_documents_alone(name: str) -> None:
    """
    What the expressions rely on is a condition of the filter.
    """
    for update in UPDATES[name]:
        for path, condition in statements.base.READABLE.items():
            stated = update.filter[path]
            # Exactly one, and nothing else, is narrower than any bounds.
            is_exact = stated == {"$eq": 1, "$not": {"$type": "array"}}
            assert is_exact or all(
                stated.get(operator) == value or (operator, stated[operator]) == ("$gte", 1)
                for operator, value in condition.items()
            )


@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("name", list(after_the_claim(1)))
def test_a_write_after_the_claim_is_fenced(name: str, count: int) -> None:
    """
    It matches only where one of these very attempts is still open.
    """
    update = after_the_claim(count)[name]
    assert update.filter[x.ATTEMPTS]["$elemMatch"] == {
        "running_id": {"$in": IDS[: len(keys_of(update))]},
        "success_time": None,
        "fail_time": None,
    }


@pytest.mark.parametrize("count", [1, 3])
def test_a_claim_is_not_repeated(count: int) -> None:
    """
    Where its attempt stands already, a claim does not match.
    """
    filter_ = statements.attempts.claim(refs(count), WORKER, names=NAMES).filter
    assert filter_[f"{x.ATTEMPTS}.running_id"] == {"$nin": IDS[:count]}
    allowed = {"$in": [None, [], WORKER, [x.NOBODY]]}
    assert filter_["task_option.specific_worker_ids"] == allowed
    assert filter_["name"] == {"$in": NAMES}
    assert "name" not in statements.attempts.claim(refs(count), WORKER).filter


@EVERY_FIND
def test_a_read_begins_with_an_indexed_field(name: str) -> None:
    """
    The first clause is one that an index serves, and no operator stands at the top.
    """
    find = finds()[name]
    first, condition = next(iter(find.filter.items()))
    leading = {index.keys[0][0] for index in statements.discovery.INDEXES} | {"_id"}
    assert first in leading
    assert not [name for name in find.filter if name.startswith("$")]
    if isinstance(condition, Mapping):
        assert set(condition) <= {"$in", "$gt", "$gte", "$lt", "$lte"}


@EVERY_FIND
def test_a_read_is_bounded(name: str) -> None:
    """
    Every read says how many documents it wants at most.
    """
    find = finds()[name]
    assert find.limit >= 1


def test_due_times_are_looked_for_between_two_bounds() -> None:
    """
    Tasks that are never due, and documents without a due time, cost nothing.
    """
    find = statements.discovery.due_tasks("*", until=MOMENT, limit=10)
    assert find.filter == {"routes": "*", "due": {"$gte": x.EPOCH, "$lte": MOMENT}}
    assert find.sort == [("due", 1)]
    assert MOMENT < x.NEVER


def test_deleting_what_ended_goes_by_key_and_checks_again() -> None:
    """
    A task that was armed meanwhile stays.
    """
    delete = statements.producing.delete_ended(KEYS, MOMENT, ["failed"])
    assert delete.filter == {
        "key": {"$in": KEYS},
        "finished_at": {"$gte": x.EPOCH, "$lt": MOMENT},
        "status": {"$in": ["failed"]},
    }
    assert next(iter(delete.filter)) == "key"
    assert delete.many
    assert statements.producing.delete_task("$key") == Delete(
        statements.base.TASKS, {"key": "$key"}
    )


def test_a_list_of_one_is_no_list() -> None:
    """
    One key is looked for as itself.
    """
    assert statements.discovery.whole(["a"]).filter == {"key": "a"}
    assert statements.discovery.whole(["a", "b"]).filter == {"key": {"$in": ["a", "b"]}}


# -- pipelines -------------------------------------------------------------------------------


@EVERY_UPDATE
def test_users_texts_are_protected(name: str) -> None:
    """
    Keys, ids, reasons, names and values stand inside of ``$literal``, or in plain conditions.
    """
    for update in UPDATES[name]:
        for _, found in texts(update.pipeline):
            for hostile in HOSTILE:
                if hostile not in OWN_PATHS:
                    assert found != hostile
                    assert "hostile" not in found


@EVERY_UPDATE
def test_no_field_is_named_by_a_user(name: str) -> None:
    """
    The names of fields in filters and pipelines are our own.
    """
    for update in UPDATES[name]:
        for node in (update.filter, update.pipeline):
            for _, part in walk(node):
                if isinstance(part, Mapping):
                    assert not [name for name in part if name in {*KEYS, *IDS} - {"$"}]


def test_protected_texts_are_there() -> None:
    """
    The checks above look for texts that the statements do hold.
    """
    written = json.dumps([u.pipeline for group in UPDATES.values() for u in group], default=str)
    for hostile in (*IDS, *REASONS, WORKER, SEND_ID, TAG, "$$hostile key", *KEYS[:3]):
        assert json.dumps(hostile) in written


@EVERY_UPDATE
def test_the_servers_time_is_only_used_as_a_number(name: str) -> None:
    """
    Bare ``$$NOW`` compares wrongly on one server, so it is turned into a number at once.
    """
    for update in UPDATES[name]:
        uses = [parent for parent, part in walk(update.pipeline) if part == "$$NOW"]
        assert set(uses) <= {"$toLong"}
        for _, part in walk(update.pipeline):
            if isinstance(part, Mapping) and part.get("$toLong") == "$$NOW":
                assert part == {"$toLong": "$$NOW"}


@EVERY_UPDATE
def test_no_path_leads_through_an_array(name: str) -> None:
    """
    Fields of attempts are read by mapping over them.
    """
    for update in UPDATES[name]:
        for _, found in texts(update.pipeline):
            assert not found.startswith(f"${x.ATTEMPTS}.")


@EVERY_UPDATE
def test_fields_are_set_to_expressions(name: str) -> None:
    """
    A sub-document in ``$set`` is merged by one server and stored by another; there is none.
    """
    for update in UPDATES[name]:
        for stage in stages(update):
            assert len(stage) == 1
            for value in stage.get("$set", {}).values():
                assert not isinstance(value, dict) or (
                    len(value) == 1 and next(iter(value)).startswith("$")
                )


@EVERY_UPDATE
def test_nothing_temporary_is_left(name: str) -> None:
    """
    Every field that begins with an underscore is removed by a later stage.
    """
    for update in UPDATES[name]:
        left = set()
        for stage in stages(update):
            left |= {path.split(".")[0] for path in stage.get("$set", {}) if path.startswith("_")}
            unset = stage.get("$unset", [])
            left -= {unset} if isinstance(unset, str) else set(unset)
        assert not left


#: What MongoDB 4.4 and the embedded server have in common, as far as it is used here.
KNOWN_OPERATORS: Final = {
    *("$set", "$unset", "$literal", "$let", "$cond", "$switch", "$ifNull", "$and", "$or", "$not"),
    *("$eq", "$ne", "$gt", "$gte", "$lt", "$lte", "$in", "$max", "$min", "$add", "$size"),
    *("$filter", "$map", "$mergeObjects", "$concatArrays", "$arrayElemAt", "$indexOfArray"),
    *("$isArray", "$isNumber", "$type", "$concat", "$toDate", "$toLong"),
}


@EVERY_UPDATE
def test_only_operators_that_every_server_knows(name: str) -> None:
    """
    A new operator is looked up before it is used: MongoDB 4.4 must have it.
    """
    for update in UPDATES[name]:
        assert operators(update.pipeline) <= KNOWN_OPERATORS


@EVERY_UPDATE
def test_statements_can_be_encoded(name: str) -> None:
    """
    Everything in a statement is BSON.
    """
    for update in UPDATES[name]:
        assert bson.encode({"q": update.filter, "u": update.pipeline})


def test_statements_depend_on_their_arguments_alone() -> None:
    """
    The same call makes the same statement, so that repeating it repeats it.
    """
    assert updates() == UPDATES
    assert finds() == finds()
    assert statements.discovery.watch_pipeline() == statements.discovery.watch_pipeline()


def test_a_statement_for_many_is_not_much_larger() -> None:
    """
    The expressions stand once, however many tasks a statement is for.
    """
    many = [(f"key {n}", f"{n:032x}") for n in range(100)]
    one = len(bson.encode({"u": statements.attempts.claim(many[:1], "w").pipeline}))
    assert len(bson.encode({"u": statements.attempts.claim(many, "w").pipeline})) < one + 100 * 120


# -- the stream ------------------------------------------------------------------------------


def test_the_stream_has_no_clock_and_no_bodies() -> None:
    """
    It lives for hours, and nobody reads params or results from it.
    """
    match, project = statements.discovery.watch_pipeline()
    assert "$$NOW" not in json.dumps([match, project])
    shown = project["$project"]
    assert set(shown.values()) == {1}
    assert not [path for path in shown if "params" in path or "returns" in path]
    attempts = "fullDocument.task_state.worker_states"
    assert {path for path in shown if path.startswith(attempts)} == {f"{attempts}.running_id"}
    assert {"documentKey", "fullDocument.key", "fullDocument.due"} <= set(shown)


def test_the_stream_begins_with_cheap_conditions() -> None:
    """
    Heartbeats, claims and ends are dropped by plain conditions on what has changed.
    """
    (match,) = statements.discovery.watch_pipeline()[0].values()
    assert match["operationType"] == {"$in": ["insert", "update", "replace"]}
    assert match["updateDescription.updatedFields.heartbeat_at"] == {"$exists": False}
    quiet = match["updateDescription.updatedFields.status"]["$nin"]
    assert quiet == ["running", "succeeded", "failed", "cancelled"]


# -- indexes ---------------------------------------------------------------------------------


def test_the_indexes() -> None:
    """
    The key as the crate has it; who may take what when; and two that hold finished tasks only.
    """
    assert {index.name: (index.keys, index.options) for index in statements.discovery.INDEXES} == {
        "key": ([("key", 1)], {"unique": True}),
        "routes_due": ([("routes", 1), ("due", 1)], {}),
        "finished_at": ([("finished_at", 1)], {"sparse": True}),
        "expire_at": ([("expire_at", 1)], {"sparse": True, "expireAfterSeconds": 0}),
    }


def test_routes_cannot_be_mistaken_for_each_other() -> None:
    """
    Whatever names and worker ids are, a route of one kind is never one of another.
    """
    names = ["", "n", "+", "*", "*n", "=n", "@w"]
    routes = [x.route_of_name(name) for name in names] + [x.route_of_worker(name) for name in names]
    routes += [x.ROUTE_UNNAMED, x.ROUTE_ANY_NAME, x.ROUTE_SHARED]
    assert len(set(routes)) == len(routes)
