"""
Stopping many jobs at once, and the end of a whole pool.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Final

from mscheduler_sync.errors import StoreError
from mscheduler_sync.pool import statements
from mscheduler_sync.pool.handling import Handling
from mscheduler_sync.pool.held import HeldJob, HeldJobs
from mscheduler_sync.pool.reports import CloseReport, ShutdownReport
from mscheduler_sync.pool.store import PoolStore
from mscheduler_sync.pool.worker import Worker

#: A stop that has failed is tried again after this pause, in seconds.
_STOP_AGAIN_S, _STOP_TRIES = 0.2, 3
_LOOK_S: Final = 0.1


class Leaving:
    """
    Ends of workers, nodes and pools, in the thread of whoever wants them.
    """

    def __init__(self, store: PoolStore, pool: str, held: HeldJobs, handling: Handling) -> None:
        self._store = store
        self._pool = pool
        self._held = held
        self._handling = handling

    def empty(self, workers: Sequence[Worker], deadline_s: float, *, remove: bool) -> CloseReport:
        """
        Stop the jobs of *workers*, which take no more; give them back, or *remove* them.
        """
        began = self._jobs_of(workers)
        # What has no running lease any more is stopped by the fence; nothing to give back.
        jobs, tries = began, 0
        while jobs and tries < _STOP_TRIES and time.monotonic() < deadline_s:
            tries += 1
            for held in jobs:
                if remove:
                    self._handling.end(held)
                else:
                    self._handling.release(held)
            self._wait_settled(jobs, deadline_s)
            jobs = self._jobs_of(workers)
            if jobs and time.monotonic() + _STOP_AGAIN_S < deadline_s and tries < _STOP_TRIES:
                threading.Event().wait(_STOP_AGAIN_S)
        return CloseReport(
            released=tuple(sorted(held.key for held in began if held.ended == "released")),
            stopped=tuple(sorted(held.key for held in began if held.ended == "stopped")),
            left=tuple(sorted(held.key for held in self._jobs_of(workers))),
        )

    def _jobs_of(self, workers: Sequence[Worker]) -> list[HeldJob]:
        return [held for held in self._held.all() if held.worker in workers]

    def _wait_settled(self, jobs: Sequence[HeldJob], deadline_s: float) -> None:
        """
        Wait until each of *jobs* is gone, or its turn is over without success.
        """
        while time.monotonic() < deadline_s:
            asked = [held for held in jobs if held.moving or held.state == "stopping"]
            if self._held.wait_gone(jobs, min(_LOOK_S, deadline_s - time.monotonic())):
                return
            if not asked:
                return

    def finish_shutdown(self, own: CloseReport, deadline_s: float) -> ShutdownReport:
        """
        Wait for the other nodes, then remove what is left of the pool.
        """
        pool = self._pool
        # This node's reaper has ended with it: dead nodes are declared dead here.
        self._store.deadline_s = float("inf")
        while True:
            nodes: list[str] = []
            with contextlib.suppress(StoreError):
                there = self._store.read_one(statements.pool_document(pool))
                if there is None or there["state"] != statements.CLOSING:
                    # Another has finished it, and the name may be in use anew.
                    return ShutdownReport(own)
                alive = self._store.read(statements.nodes_of(pool, statements.ALIVE))
                for node in alive:
                    self._store.write(statements.condemn(node["_id"]))
                alive = self._store.read(statements.nodes_of(pool, statements.ALIVE))
                nodes = [node["_id"] for node in alive]
                if not nodes and not own.left:
                    break
            if time.monotonic() >= deadline_s:
                return ShutdownReport(own, tuple(nodes), self._running_keys())
            threading.Event().wait(_LOOK_S)
        for removal in statements.forget_pool(pool):
            self._store.remove(removal)
        return ShutdownReport(own)

    def _running_keys(self) -> tuple[str, ...]:
        with contextlib.suppress(StoreError):
            return tuple(
                sorted(job["key"] for job in self._store.read(statements.jobs_of(self._pool)))
            )
        return ()
