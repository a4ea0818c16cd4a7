"""
What the change stream tells of, and that no document ends it.
"""

from __future__ import annotations

import collections
import copy
import time
from typing import Any, Final

import pytest
from pymongo import UpdateOne
from pymongo.collection import Collection

from mscheduler_sync._storage import statements
from mscheduler_sync._storage.statement import Update
from mscheduler_sync._storage.store import TaskStore
from tests.support import oracle
from tests.support.odd_documents import ODD_VALUES
from tests.support.oracle import FUTURE, PAST, Document
from tests.support.tables import ME, plain


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
    with collection.watch(statements.discovery.watch_pipeline(), max_await_time_ms=100) as stream:
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
    ("a heartbeat", _attempt(ping_expire_time=PAST), statements.attempts.heartbeat(ONE), False),
    ("a claim", plain(), statements.attempts.claim([("one", "new")], ME), False),
    ("a lost claim", _attempt(), statements.attempts.claim([("one", "new")], "w2"), False),
    ("a success", _attempt(), statements.attempts.succeed(ONE, [1]), False),
    (
        "a failure that leaves an attempt",
        _attempt(),
        statements.attempts.fail(ONE, [statements.attempts.Failure("x", 0)]),
        True,
    ),
    (
        "a failure for good",
        _attempt(),
        statements.attempts.fail(ONE, [statements.attempts.Failure("x", 0, for_good=True)]),
        False,
    ),
    ("a release", _attempt(), statements.attempts.release(ONE), True),
    ("a snooze", _attempt(), statements.attempts.snooze(ONE, [1_000]), True),
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
    ("a cancellation", plain(), statements.producing.cancel("one"), False),
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
    Of our own writes only those that leave something to claim; of others' all but heartbeats.
    """
    collection.insert_one({**copy.deepcopy(document), "key": "one"})
    store = TaskStore(collection)
    # Its derived fields, and the counter that a first claim would add, are as they should be.
    store.update(statements.attempts.repair(["one"]))
    collection.update_one({"key": "one"}, {"$set": {"counters.released": 0}})
    with collection.watch(statements.discovery.watch_pipeline(), max_await_time_ms=100) as stream:
        stream.try_next()
        if isinstance(write, Update):
            assert store.update(write)[0] == 1
        else:
            assert collection.update_one({"key": "one"}, write).modified_count == 1
        collection.insert_one({"key": "last"})
        events = _events_until(stream, "last")
    assert (len(events) == 2) == is_told
