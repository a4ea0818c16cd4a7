"""
Every filter, pipeline and index of the task scheduler, as pure functions.

This module, `derived` and `expressions` are the only places with field paths of queries.
A conditional write keeps plain field predicates in its filter, ``key`` first
(the index, and the shard key), and the rest of its condition inside the
pipeline, so that it runs alike and fast on every server. All writes after the
claim are fenced by the attempt's ``running_id``; one that changes nothing has
lost a race or was applied before, and may be repeated at will.
"""

from mscheduler_sync._storage.statement import Delete, Find, Insert, Update
from mscheduler_sync._storage.statements.attempts import (
    EXPIRED_REASON,
    Failure,
    Ref,
    attempt_state,
    claim,
    claimed,
    fail,
    heartbeat,
    mark_interrupted,
    release,
    repair,
    snooze,
    succeed,
)
from mscheduler_sync._storage.statements.base import READABLE, TASKS, one_or_in
from mscheduler_sync._storage.statements.discovery import (
    INDEXES,
    discovered_by_id,
    discovered_by_key,
    due_tasks,
    eligible_in_shared_routes,
    eligible_name,
    routes_of,
    underived,
    unfinished,
    watch_pipeline,
    whole,
)
from mscheduler_sync._storage.statements.plain import claim_plain, succeed_plain
from mscheduler_sync._storage.statements.producing import (
    cancel,
    delete_ended,
    delete_task,
    finished_before,
    new_task,
    new_task_in_transaction,
    resend,
    task,
    tasks,
)

__all__ = [
    "EXPIRED_REASON",
    "INDEXES",
    "READABLE",
    "TASKS",
    "Delete",
    "Failure",
    "Find",
    "Insert",
    "Ref",
    "Update",
    "attempt_state",
    "cancel",
    "claim",
    "claim_plain",
    "claimed",
    "delete_ended",
    "delete_task",
    "discovered_by_id",
    "discovered_by_key",
    "due_tasks",
    "eligible_in_shared_routes",
    "eligible_name",
    "fail",
    "finished_before",
    "heartbeat",
    "mark_interrupted",
    "new_task",
    "new_task_in_transaction",
    "one_or_in",
    "release",
    "repair",
    "resend",
    "routes_of",
    "snooze",
    "succeed",
    "succeed_plain",
    "task",
    "tasks",
    "underived",
    "unfinished",
    "watch_pipeline",
    "whole",
]
