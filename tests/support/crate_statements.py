"""
The statements of the Rust crate mscheduler, as test data.

Written down from what the crate does, in two forms. `EXACT` is what a Rust worker sends: times of
its own clock where it uses that, ``$$NOW`` where it uses the server's, the positional operator.
`PORTABLE` differs from it only where the embedded server needs it: the server's time through
``$toLong``, and ``$[e]`` with array filters. tests/unit/test_crate_statements.py shows that.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
from bson import Int64

Document = dict[str, Any]

#: The first lease of a Rust attempt, whatever the task says; its first ping follows at once.
FIRST_LEASE: Final = dt.timedelta(seconds=10)
STATES: Final = "task_state.worker_states"

#: Keys and options of an index.
Index = tuple[list[tuple[str, int]], Document]


@attrs.frozen
class Write:
    """
    One update of one document.
    """

    filter: Document
    update: Document | list[Document]
    array_filters: list[Document] | None = None
    upsert: bool = False


# -- conditions ------------------------------------------------------------------------------


def _count(condition: Document) -> Document:
    return {"$size": {"$filter": {"input": f"${STATES}", "as": "item", "cond": condition}}}


_SUCCEEDED: Final = {
    "$and": [{"$ne": ["$$item.success_time", None]}, {"$eq": ["$$item.fail_time", None]}]
}


def _live(now: dt.datetime) -> Document:
    return {
        "$and": [
            {"$gt": ["$$item.ping_expire_time", now]},
            {"$eq": ["$$item.success_time", None]},
            {"$eq": ["$$item.fail_time", None]},
        ]
    }


def _not_completely_failed(worker_id: str) -> Document:
    """
    The retry budget is one of each worker.
    """
    mine_failed = {
        "$and": [{"$eq": ["$$item.worker_id", worker_id]}, {"$ne": ["$$item.fail_time", None]}]
    }
    return {"$lt": [_count(mine_failed), "$task_option.max_unexpected_retries"]}


def _not_running_here(worker_id: str, now: dt.datetime) -> Document:
    mine_live = {"$and": [{"$eq": ["$$item.worker_id", worker_id]}, _live(now)]}
    return {"$eq": [_count(mine_live), 0]}


def _has_room(now: dt.datetime) -> Document:
    return {
        "$lt": [
            {"$add": [_count(_SUCCEEDED), _count(_live(now))]},
            "$task_option.concurrent_worker_cnt",
        ]
    }


def _allowed(worker_id: str) -> Document:
    return {
        "$or": [
            {"task_option.specific_worker_ids": []},
            {"task_option.specific_worker_ids": worker_id},
        ]
    }


def _not_completely_successful() -> Document:
    """
    The crate compares with the retries, and for being unequal: a fault of its own.
    """
    return {"$ne": [_count(_SUCCEEDED), "$task_option.max_unexpected_retries"]}


def _wants_successes() -> Document:
    return {"$lt": [_count(_SUCCEEDED), "$task_option.concurrent_worker_cnt"]}


def _running_attempt(key: str, running_id: str, worker_id: str) -> Document:
    return {
        "key": key,
        STATES: {
            "$elemMatch": {
                "running_id": running_id,
                "worker_id": worker_id,
                "fail_time": None,
                "success_time": None,
            }
        },
    }


# -- the two forms ---------------------------------------------------------------------------


class Statements:
    """
    What is alike in both forms. *now* is always the time of the Rust program's own clock.
    """

    name: str
    #: What the crate's ``ensure_index`` makes.
    indexes: Sequence[Index]

    def send(
        self,
        key: str,
        params: object,
        now: dt.datetime,
        *,
        update_existing_params: bool = False,
        run_time: dt.datetime | None = None,
        concurrency: int = 1,
        ping_interval_ms: int = 30_000,
        worker_timeout_ms: int = 60_000,
        specific_worker_ids: Sequence[str] = (),
    ) -> Write:
        """
        The producer's upsert; a task that exists keeps all but what is asked for expressly.
        """
        on_insert: Document = {
            "key": key,
            "task_state.create_time": now,
            "task_state.worker_states": [],
            "task_option": {
                "priority": Int64(0),
                "concurrent_worker_cnt": Int64(concurrency),
                "ping_interval_ms": Int64(ping_interval_ms),
                "worker_timeout_ms": Int64(worker_timeout_ms),
                "specific_worker_ids": list(specific_worker_ids),
                "max_unexpected_retries": Int64(3),
                "unexpected_retry_delay_ms": Int64(10_000),
            },
        }
        always: Document = {}
        (always if update_existing_params else on_insert)["params"] = params
        if run_time is None:
            on_insert["task_state.start_time"] = now
        else:
            always["task_state.start_time"] = run_time
        update = {"$setOnInsert": on_insert, **({"$set": always} if always else {})}
        return Write({"key": key}, update, upsert=True)

    def claim(self, key: str, running_id: str, worker_id: str, now: dt.datetime) -> Write:
        """
        For find_one_and_update, which returns the document from before.
        """
        raise NotImplementedError

    def ping(
        self, key: str, running_id: str, worker_id: str, now: dt.datetime, *, lease: dt.timedelta
    ) -> Write:
        raise NotImplementedError

    def mark_success(
        self, key: str, running_id: str, worker_id: str, now: dt.datetime, *, returns: object
    ) -> Write:
        raise NotImplementedError

    def mark_fail(self, key: str, running_id: str, worker_id: str, now: dt.datetime) -> Write:
        raise NotImplementedError

    def shutdown(
        self, attempts: Sequence[tuple[str, str]], worker_id: str, now: dt.datetime
    ) -> list[Write]:
        """
        A shutdown fails every (key, running id) that runs, one after the other.
        """
        return [self.mark_fail(key, running_id, worker_id, now) for key, running_id in attempts]

    def fetch(self, worker_id: str, now: dt.datetime) -> Document:
        """
        The filter of the batch scan, which reads ten documents in no order.
        """
        return {
            **_allowed(worker_id),
            "$expr": {
                "$and": [
                    _not_completely_successful(),
                    _not_completely_failed(worker_id),
                    _not_running_here(worker_id, now),
                    _wants_successes(),
                ]
            },
        }

    def watch(self, worker_id: str, opened: dt.datetime) -> list[Document]:
        """
        The pipeline of the change stream (with updateLookup); its clock stands still at *opened*.
        """
        return [
            {
                "$addFields": {
                    "task_state": "$fullDocument.task_state",
                    "task_option": "$fullDocument.task_option",
                }
            },
            {"$match": {"operationType": {"$in": ["insert", "replace", "update"]}}},
            {
                "$match": {
                    **_allowed(worker_id),
                    "$expr": {
                        "$and": [
                            _not_running_here(worker_id, opened),
                            _not_completely_successful(),
                            _not_completely_failed(worker_id),
                        ]
                    },
                }
            },
            {"$project": {"_id": 1, "operationType": 1, "ns": 1, "fullDocument": 1}},
        ]

    def _claim_filter(self, key: str, worker_id: str, now: dt.datetime) -> Document:
        return {
            "key": key,
            "$expr": {
                "$and": [
                    _not_completely_failed(worker_id),
                    _not_running_here(worker_id, now),
                    _has_room(now),
                ]
            },
        }


class _Exact(Statements):
    name = "exact"
    indexes = (
        ([("key", 1)], {"name": "key", "unique": True, "background": True}),
        (
            [("key", 1), ("task_state.worker_states.worker_id", 1)],
            {"name": "key_worker_id", "unique": True, "background": True},
        ),
    )

    def claim(self, key: str, running_id: str, worker_id: str, now: dt.datetime) -> Write:
        return Write(
            self._claim_filter(key, worker_id, now),
            [
                {
                    "$set": {
                        "task_state.worker_states": {
                            "$concatArrays": [
                                {
                                    "$filter": {
                                        "input": "$task_state.worker_states",
                                        "as": "item",
                                        "cond": {
                                            "$or": [
                                                {"$gt": ["$$item.ping_expire_time", "$$NOW"]},
                                                {"$ne": ["$$item.success_time", None]},
                                                {"$ne": ["$$item.fail_time", None]},
                                            ]
                                        },
                                    }
                                },
                                [
                                    {
                                        "running_id": running_id,
                                        "worker_id": worker_id,
                                        "ping_expire_time": now + FIRST_LEASE,
                                        "success_time": None,
                                        "fail_time": None,
                                    }
                                ],
                            ]
                        }
                    }
                }
            ],
        )

    def ping(
        self, key: str, running_id: str, worker_id: str, now: dt.datetime, *, lease: dt.timedelta
    ) -> Write:
        return Write(
            _running_attempt(key, running_id, worker_id),
            {"$set": {"task_state.worker_states.$.ping_expire_time": now + lease}},
        )

    def mark_success(
        self, key: str, running_id: str, worker_id: str, now: dt.datetime, *, returns: object
    ) -> Write:
        return Write(
            _running_attempt(key, running_id, worker_id),
            {
                "$set": {
                    "task_state.worker_states.$.success_time": now,
                    "task_state.worker_states.$.returns": returns,
                }
            },
        )

    def mark_fail(self, key: str, running_id: str, worker_id: str, now: dt.datetime) -> Write:
        return Write(
            _running_attempt(key, running_id, worker_id),
            {"$set": {"task_state.worker_states.$.fail_time": now}},
        )


class _Portable(Statements):
    name = "portable"
    indexes = (
        ([("key", 1)], {"name": "key", "unique": True}),
        (
            [("key", 1), ("task_state.worker_states.worker_id", 1)],
            {"name": "key_worker_id", "unique": True},
        ),
    )

    def claim(self, key: str, running_id: str, worker_id: str, now: dt.datetime) -> Write:
        server_now = {"$toDate": {"$toLong": "$$NOW"}}
        return Write(
            self._claim_filter(key, worker_id, now),
            [
                {
                    "$set": {
                        "task_state.worker_states": {
                            "$concatArrays": [
                                {
                                    "$filter": {
                                        "input": "$task_state.worker_states",
                                        "as": "item",
                                        "cond": {
                                            "$or": [
                                                {"$gt": ["$$item.ping_expire_time", server_now]},
                                                {"$ne": ["$$item.success_time", None]},
                                                {"$ne": ["$$item.fail_time", None]},
                                            ]
                                        },
                                    }
                                },
                                [
                                    {
                                        "running_id": running_id,
                                        "worker_id": worker_id,
                                        "ping_expire_time": now + FIRST_LEASE,
                                        "success_time": None,
                                        "fail_time": None,
                                    }
                                ],
                            ]
                        }
                    }
                }
            ],
        )

    def ping(
        self, key: str, running_id: str, worker_id: str, now: dt.datetime, *, lease: dt.timedelta
    ) -> Write:
        return Write(
            _running_attempt(key, running_id, worker_id),
            {"$set": {"task_state.worker_states.$[e].ping_expire_time": now + lease}},
            [_element(running_id, worker_id)],
        )

    def mark_success(
        self, key: str, running_id: str, worker_id: str, now: dt.datetime, *, returns: object
    ) -> Write:
        return Write(
            _running_attempt(key, running_id, worker_id),
            {
                "$set": {
                    "task_state.worker_states.$[e].success_time": now,
                    "task_state.worker_states.$[e].returns": returns,
                }
            },
            [_element(running_id, worker_id)],
        )

    def mark_fail(self, key: str, running_id: str, worker_id: str, now: dt.datetime) -> Write:
        return Write(
            _running_attempt(key, running_id, worker_id),
            {"$set": {"task_state.worker_states.$[e].fail_time": now}},
            [_element(running_id, worker_id)],
        )


def _element(running_id: str, worker_id: str) -> Document:
    # That it is open stands in the filter. Here, the embedded server would look at it again
    # after each field that it has set.
    return {"e.running_id": running_id, "e.worker_id": worker_id}


EXACT: Final[Statements] = _Exact()
PORTABLE: Final[Statements] = _Portable()


# -- what the crate can read -----------------------------------------------------------------

_U32_MAX: Final = 2**32 - 1
_OPTIONS: Final = (
    "priority",
    "concurrent_worker_cnt",
    "ping_interval_ms",
    "worker_timeout_ms",
    "max_unexpected_retries",
    "unexpected_retry_delay_ms",
)


def decode_faults(document: Mapping[str, Any]) -> list[str]:
    """
    Return why the crate's typed decoding would refuse *document*; an empty list if it would not.

    Fields that it does not know are ignored.
    """
    state, option = document.get("task_state"), document.get("task_option")
    if not isinstance(state, Mapping) or not isinstance(option, Mapping):
        return ["task_state and task_option must be documents"]
    faults = [] if isinstance(document.get("key"), str) else ["key"]
    faults += [
        f"task_state.{name}"
        for name in ("create_time", "start_time")
        if not isinstance(state.get(name), dt.datetime)
    ]
    faults += [f"task_option.{name}" for name in _OPTIONS if not _is_u32(option.get(name))]
    if not _are_texts(option.get("specific_worker_ids")):
        faults.append("task_option.specific_worker_ids")
    elements = state.get("worker_states")
    if not isinstance(elements, list):
        return [*faults, STATES]
    for number, element in enumerate(elements):
        faults += [f"{STATES}.{number}.{fault}" for fault in _element_faults(element)]
    return faults


def _element_faults(element: object) -> list[str]:
    if not isinstance(element, Mapping):
        return ["must be a document"]
    faults = [] if isinstance(element.get("worker_id"), str) else ["worker_id"]
    faults += [
        name
        for name in ("running_id", "fail_reason")
        if not isinstance(element.get(name), str | None)
    ]
    faults += [
        name
        for name in ("ping_expire_time", "success_time", "fail_time")
        if not isinstance(element.get(name), dt.datetime | None)
    ]
    # Decoded alike whether null or missing; but an expression takes a missing one for a success.
    faults += [
        f"{name} is missing" for name in ("success_time", "fail_time") if name not in element
    ]
    return faults


def _is_u32(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value == int(value) and 0 <= value <= _U32_MAX


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)
