"""
Every filter, pipeline and index of the task scheduler, as pure functions.

This module, `derived` and `expressions` are the only places with field paths of queries.
A conditional write keeps plain field predicates in its filter, ``key`` first
(the index, and the shard key), and the rest of its condition inside the
pipeline, so that it runs alike and fast on every server. All writes after the
claim are fenced by the attempt's ``running_id``; one that changes nothing has
lost a race or was applied before, and may be repeated at will.
"""

from mscheduler_sync._storage.statements import attempts, discovery, plain, producing

__all__ = ["attempts", "discovery", "plain", "producing"]
