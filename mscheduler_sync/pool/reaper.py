"""
Finds nodes whose lease has ended, and gives their jobs back.

Every full node runs it; each step may be done by several at once, be repeated, or be
taken up by another where one has died in the middle.
"""

from __future__ import annotations

import datetime as dt
import time
from typing import Final

import attrs

from mscheduler_sync._runtime.log import logger
from mscheduler_sync._storage.statement import Document
from mscheduler_sync.events import EventHub
from mscheduler_sync.pool import events, statements
from mscheduler_sync.pool.claims import Claims
from mscheduler_sync.pool.ring import PoolView
from mscheduler_sync.pool.runner import JobRunner
from mscheduler_sync.pool.store import PoolStore
from mscheduler_sync.pool.workers import ActiveWorkers

_log = logger("pool")

#: Tombstones are kept for so many TTLs, and at least so many seconds.
_TOMB_TTLS, _TOMB_LEAST_S = 10.0, 60.0
_SHORTEST_PAUSE_S: Final = 0.02
_PAGE: Final = 1000


@attrs.define(eq=False, repr=False, kw_only=True)
class Reaper:
    """
    One sweep after another, in the control thread.
    """

    _store: PoolStore
    _ttl_s: float
    _view: PoolView
    _runner: JobRunner
    _claims: Claims
    _hub: EventHub
    _removed: set[str] = attrs.field(init=False, factory=set)

    def sweep(self, active: ActiveWorkers) -> float:
        """
        Sweep once, for the node of *active*; return the monotonic time of the next sweep.

        What refers to nodes is read before the nodes, so that none is missed which has
        registered meanwhile.
        """
        store, pool = self._store, self._store.pool
        store.measure_clock()
        slots = self._view.refresh().ring.slots
        workers = store.read(statements.members.workers_of_pool(pool))
        starting = store.read(statements.jobs.in_state(pool, statements.STARTING, _PAGE))
        alive = store.read(statements.members.nodes_of(pool, statements.ALIVE))
        ends = [self._end_of(node) for node in alive]
        for node, end_s in zip(alive, ends, strict=True):
            if end_s <= time.monotonic():
                store.update(statements.members.declare_dead(node["_id"]))
        dead = store.read(statements.members.nodes_of(pool, statements.DEAD))
        gone = {node["_id"] for node in dead}
        known = {node["_id"] for node in alive} - gone
        stray = {one["node"] for one in [*workers, *starting]} | {one.node for one in slots}
        for name in (gone | stray) - known - {None}:
            if name not in self._removed or name in stray:
                self.remove(name)
        for node in dead:
            self._forget_in_time(node)
        self._removed &= gone
        self._claims.give_back_late(starting, active)
        self._file_failures()
        return self._next_sweep(ends)

    def remove(self, node: str) -> None:
        """
        Take a dead node's workers out of the ring and give its jobs back.
        """
        store = self._store
        workers = {one["_id"] for one in store.read(statements.members.workers_of_node(node))}
        workers |= {one.worker for one in self._view.ring.slots if one.node == node}
        for worker in sorted(workers):
            store.update(statements.members.leave(self._store.pool, worker))
        # Whoever claims these jobs must know the ring without the dead.
        epoch = self._view.refresh().ring.epoch
        freed, _ = store.update(statements.jobs.release_all_of(self._store.pool, node, epoch))
        for worker in workers:
            store.delete(statements.members.forget_worker(worker))
        self._removed.add(node)
        if workers or freed:
            _log.warning(
                "a dead node's jobs were given back",
                event="dead_node_removed",
                worker_id=node,
                jobs=freed,
            )
            self._hub.publish(events.DeadNodeRemoved(node=node, jobs=freed))

    def _end_of(self, node: Document) -> float:
        end = node.get("lease_until")
        if not isinstance(end, dt.datetime):
            return time.monotonic()
        return self._store.clock.monotonic_at(end)

    def _next_sweep(self, ends: list[float]) -> float:
        now_s = time.monotonic()
        # The estimate of the server's clock lags by a round trip: a little later is early enough.
        regular_s = now_s + self._ttl_s / 3
        return max(now_s + _SHORTEST_PAUSE_S, min([regular_s, *(end_s + 0.005 for end_s in ends)]))

    def _forget_in_time(self, node: Document) -> None:
        died_at = node.get("died_at")
        kept_s = max(_TOMB_TTLS * self._ttl_s, _TOMB_LEAST_S)
        if isinstance(died_at, dt.datetime):
            age_s = (self._store.clock.now() - died_at).total_seconds()
            if age_s > kept_s:
                self._store.delete(statements.members.forget_node(node["_id"]))

    def _file_failures(self) -> None:
        for job in self._store.read(
            statements.jobs.in_state(self._store.pool, statements.FAILED, _PAGE)
        ):
            error = job.get("error")
            self._runner.file_failure(
                job["_id"], job["dispatch_id"], error if isinstance(error, dict) else {}
            )
