"""
The control thread of a node: claims, stop requests, notifications, moves, the reaper.

It is woken by hints, and reads for itself at every poll: hints are never needed.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from collections.abc import Callable
from typing import Final

import attrs

from mscheduler_sync._runtime.log import Log, logger
from mscheduler_sync._runtime.service import Service
from mscheduler_sync.errors import PoolClosed, StoreError
from mscheduler_sync.pool import statements
from mscheduler_sync.pool.claims import ClaimQueue, Claims
from mscheduler_sync.pool.held import HeldJobs
from mscheduler_sync.pool.reaper import Reaper
from mscheduler_sync.pool.ring import PoolView
from mscheduler_sync.pool.runner import JobRunner
from mscheduler_sync.pool.store import PoolStore
from mscheduler_sync.pool.watcher import JobChange
from mscheduler_sync.pool.workers import Membership

_log = logger("pool")

#: With an open change stream, jobs are read only this often, in seconds.
_SCAN_S: Final = 5.0
_PAGE: Final = 1000


@attrs.define(eq=False, repr=False, kw_only=True)
class Control(Service):
    """
    The control thread; see the module. *on_closed* is told that the pool is being shut down.
    """

    longest_pause_s = 2.0

    component: str = "control"
    thread_prefix: str = "ms-pool"
    log: Log = _log
    _store: PoolStore
    _poll_interval_s: float
    _view: PoolView
    _held: HeldJobs
    _membership: Membership
    _runner: JobRunner
    _claims: Claims
    _queue: ClaimQueue
    _reaper: Reaper
    #: Whether a change stream brings news of jobs.
    _is_streaming: Callable[[], bool]
    _on_closed: Callable[[], None]
    _next_poll_s: float = attrs.field(init=False, default=0.0)
    _next_scan_s: float = attrs.field(init=False, default=0.0)
    _next_reap_s: float = attrs.field(init=False, default=0.0)
    _is_told_closed: bool = attrs.field(init=False, default=False)
    _refresh_wanted: bool = attrs.field(init=False, default=False)
    _scan_wanted: bool = attrs.field(init=False, default=True)
    _retiring: list[str] = attrs.field(init=False, factory=list)

    # -- hints; from any thread --------------------------------------------------------------

    def note(self, change: JobChange) -> None:
        if change.state == statements.PENDING:
            if change.is_new and self._held.find(change.job_id) is not None:
                return
            if isinstance(change.epoch, int) and change.epoch > self._view.epoch():
                self._refresh_wanted = True
            self._queue.add(change.job_id, self._claims.due_s(change.not_before))
        elif change.state is not None or change.gone:
            self._queue.discard(change.job_id)
        if change.has_unread:
            # Whether the job is held here is asked later: its claim may be under way.
            self._queue.add_unread(change.job_id)

    def rescan(self) -> None:
        """
        Read everything at once: something may have been missed, or was changed.
        """
        self._scan_wanted = True
        self._queue.decide_again()
        self._queue.wake()

    def retire(self, node: str) -> None:
        """
        The handlers of a life that is over have stopped: its jobs may be had at once.
        """
        self._retiring.append(node)
        self._queue.wake()

    def request_stop(self) -> None:
        super().request_stop()
        self._queue.wake()

    # -- the thread --------------------------------------------------------------------------

    def step(self) -> None:
        self._queue.wait(min(self._next_poll_s, self._next_reap_s))
        if self.stopping:
            return
        self._runner.executor.make_missing_thread()
        if self._scan_wanted or self._refresh_wanted or time.monotonic() >= self._next_poll_s:
            self._poll()
        self._claims.claim_due(self._membership.active())
        self._read_inboxes()
        if time.monotonic() >= self._next_reap_s:
            self._next_reap_s = self._reaper.sweep(self._membership.active())
        while self._retiring:
            node = self._retiring[0]
            self._store.update(statements.members.retire(node))
            self._reaper.remove(node)
            self._retiring.pop(0)

    def on_store_error(self, error: StoreError) -> None:  # noqa: ARG002 - a hook
        # What was taken up and not finished is found again by a scan.
        self._scan_wanted = True
        self._queue.decide_again()

    def _poll(self) -> None:
        self._store.measure_clock()
        # Before the reads: what is asked for from now on is done in another round.
        scan = self._scan_wanted or not self._is_streaming()
        scan = scan or time.monotonic() >= self._next_scan_s
        self._refresh_wanted = self._scan_wanted = False
        before = self._view.epoch()
        seen = self._view.refresh()
        self._next_poll_s = time.monotonic() + self._poll_interval_s
        if seen.state != statements.OPEN:
            if not self._is_told_closed:
                self._is_told_closed = True
                self._on_closed()
            return
        if seen.ring.epoch != before:
            self._queue.decide_again()
        with contextlib.suppress(PoolClosed):
            # A shutdown that has begun since is found by the next poll.
            self._membership.repair(seen.ring)
        if scan:
            self._scan()
            self._next_scan_s = time.monotonic() + _SCAN_S
        self._rebalance()

    def _scan(self) -> None:
        for job in self._store.read(
            statements.jobs.in_state(self._store.pool, statements.PENDING, _PAGE)
        ):
            if job.get("stop") is not None:
                self._claims.cancel(job)
            elif isinstance(job.get("not_before"), dt.datetime):
                due_s = self._store.clock.monotonic_at(job["not_before"])
                self._queue.add(job["_id"], due_s, replace=False)
        for job in self._store.read(
            statements.jobs.unread(self._store.pool, self._membership.active().node)
        ):
            self._queue.add_unread(job["_id"])

    # -- what befalls held jobs --------------------------------------------------------------

    def _read_inboxes(self) -> None:
        for job_id in self._queue.take_unread():
            held = self._held.find(job_id)
            if held is not None:
                self._runner.read_inbox(held)

    def _rebalance(self) -> None:
        """
        Move jobs that belong elsewhere by the present ring.
        """
        ring = self._view.ring
        now_s = time.monotonic()
        for held in self._held.all():
            if held.epoch >= ring.epoch or held.state != "running" or held.moving:
                continue
            slot = ring.target(held.key_hash)
            if slot is None or slot.worker == held.ownership.owner:
                held.epoch = ring.epoch
            elif now_s >= held.move_again_at_s:
                self._runner.release(held)
