"""
Takes pending jobs: many in one statement, and whose they are is read back.

From a job that is due to its start the way leads down through this module: the queue,
`Claims.claim_due`, the claim, what it has won; and on in `runner`.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import random
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final

import attrs
from bson.raw_bson import RawBSONDocument

from mscheduler_sync._runtime.log import logger
from mscheduler_sync._storage import codec
from mscheduler_sync._storage.statement import Document
from mscheduler_sync.errors import StoreError
from mscheduler_sync.pool import statements
from mscheduler_sync.pool.held import HeldJob, HeldJobs
from mscheduler_sync.pool.ring import PoolView, hash_of
from mscheduler_sync.pool.runner import JobRunner
from mscheduler_sync.pool.statements.jobs import Ownership
from mscheduler_sync.pool.store import PoolStore
from mscheduler_sync.pool.workers import ActiveWorkers, Job

_log = logger("claim")

#: So many pending jobs are remembered; the others are found again by later scans.
_MOST_QUEUED: Final = 100_000
#: A job that could not be claimed though it is due is tried again after this, in seconds.
_AGAIN_S: Final = 0.01
#: A job that cannot be read waits so long, in milliseconds.
_UNREADABLE_MS: Final = 60_000


@attrs.define
class _Queued:
    """
    One job of the queue.
    """

    #: From when its own worker may claim it, on the monotonic clock.
    due_s: float
    #: Whether it was found to be another's: then only after the grace is it decided again.
    is_decided: bool = False


@attrs.define(eq=False, repr=False, kw_only=True)
class ClaimQueue:
    """
    The pending jobs that this node has heard of, and a condition that wakes the control thread.

    Safe from any thread.
    """

    _grace_s: float
    _changed: threading.Condition = attrs.field(init=False, factory=threading.Condition)
    # All under _changed.
    _jobs: dict[str, _Queued] = attrs.field(init=False, factory=dict)
    _unread: set[str] = attrs.field(init=False, factory=set)
    _woken: bool = attrs.field(init=False, default=False)

    def add(self, job_id: str, due_s: float, *, replace: bool = True) -> None:
        """
        A job is pending; it may be claimed from *due_s* on. Without *replace*, what is known stays.
        """
        with self._changed:
            is_known = job_id in self._jobs
            if (is_known and replace) or (not is_known and len(self._jobs) < _MOST_QUEUED):
                self._jobs[job_id] = _Queued(due_s)
                self._changed.notify_all()

    def discard(self, job_id: str) -> None:
        with self._changed:
            self._jobs.pop(job_id, None)

    def add_unread(self, job_id: str) -> None:
        """
        A stop request or notifications wait with a job.
        """
        with self._changed:
            self._unread.add(job_id)
            self._changed.notify_all()

    def take_unread(self) -> list[str]:
        with self._changed:
            unread, self._unread = list(self._unread), set()
            return unread

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def decide_again(self) -> None:
        """
        The ring has changed: who may claim what is to be decided anew.
        """
        with self._changed:
            for queued in self._jobs.values():
                queued.is_decided = False

    def wait(self, until_s: float) -> None:
        """
        Wait until something is to be done, at most until *until_s*.
        """
        with self._changed:
            while not self._woken and not self._unread:
                now_s = time.monotonic()
                next_s = min([until_s, *(self._next_s(one) for one in self._jobs.values())])
                if next_s <= now_s:
                    break
                self._changed.wait(next_s - now_s)
            self._woken = False

    def take_due(self) -> list[tuple[str, bool]]:
        """
        Return what is to be decided or claimed now: (id, whether anybody may claim it).

        What anybody may claim is forgotten here; what only its own worker may claim is kept
        until then.
        """
        now_s = time.monotonic()
        due = []
        with self._changed:
            for job_id, queued in list(self._jobs.items()):
                if now_s < self._next_s(queued):
                    continue
                for_anybody = now_s >= queued.due_s + self._grace_s
                if for_anybody:
                    del self._jobs[job_id]
                queued.is_decided = True
                due.append((job_id, for_anybody))
        return due

    def _next_s(self, queued: _Queued) -> float:
        return queued.due_s + (self._grace_s if queued.is_decided else 0.0)


@attrs.frozen
class _Claim:
    """
    One claim of one worker. Its id in the documents tells later what it has won.
    """

    active: ActiveWorkers
    worker: str
    ids: Sequence[str]
    id: str = attrs.field(factory=lambda: uuid.uuid4().hex)


@attrs.define(eq=False, repr=False, kw_only=True)
class Claims:
    """
    The claims of a node; used by its control thread alone, but for the queue and `due_s`.
    """

    _store: PoolStore
    _view: PoolView
    _held: HeldJobs
    _runner: JobRunner
    queue: ClaimQueue
    #: Claims whose outcome is not known yet.
    _undecided: list[_Claim] = attrs.field(init=False, factory=list)

    def due_s(self, not_before: object) -> float:
        """
        Return from when a job may be claimed, on the monotonic clock; never in the past.
        """
        now_s = time.monotonic()
        if not isinstance(not_before, dt.datetime) or self._store.clock.offset_s is None:
            return now_s
        return max(now_s, self._store.clock.monotonic_at(not_before))

    def claim_due(self, active: ActiveWorkers) -> None:
        """
        Claim what belongs to this node's workers or to nobody who wants it, and start it.
        """
        for claim in list(self._undecided):
            # Its answer was lost.
            self._read_back(claim)
        for claim in self._next_claims(active):
            self._undecided.append(claim)
            statement = statements.jobs.claim(claim.ids, claim.worker, active.node, claim.id)
            matched, _ = self._store.update(statement)
            won = self._read_back(claim, matched=matched)
            self._after_lost_race([job_id for job_id in claim.ids if job_id not in won])

    def _next_claims(self, active: ActiveWorkers) -> Iterator[_Claim]:
        if not active.workers or self._view.seen.state != statements.OPEN:
            return
        ring = self._view.ring
        ids_of: dict[str, list[str]] = {}
        for job_id, for_anybody in self.queue.take_due():
            slot = ring.target(hash_of(statements.name_in(self._store.pool, job_id)))
            if slot is not None and slot.worker in active.workers:
                ids_of.setdefault(slot.worker, []).append(job_id)
            elif for_anybody:
                ids_of.setdefault(random.choice(list(active.workers)), []).append(job_id)
        for worker, ids in ids_of.items():
            for first in range(0, len(ids), statements.MOST_IDS):
                yield _Claim(active, worker, ids[first : first + statements.MOST_IDS])

    def _read_back(self, claim: _Claim, *, matched: int = 1) -> set[str]:
        """
        Read back what *claim* has won, and start it; return the ids.
        """
        won = self._store.find(statements.jobs.claimed(claim.ids, claim.id)) if matched else []
        self._undecided.remove(claim)
        for document in won:
            self._accept(claim, document)
        return {document["_id"] for document in won}

    def _accept(self, claim: _Claim, document: RawBSONDocument) -> None:
        self.queue.discard(document["_id"])
        ownership = Ownership(document["_id"], claim.worker, int(document["fence"]))
        try:
            held = self._held_from(claim, ownership, document)
        except Exception as error:  # noqa: BLE001 - one unreadable job spoils no other
            self._postpone_unreadable(ownership, error)
            return
        if not self._held.add(held):
            # Claimed by a life that is over. If this fails, the reaper does it.
            with contextlib.suppress(StoreError):
                self._store.update(statements.jobs.release(ownership, self._view.epoch()))
        elif held.worker.is_leaving:
            # It may have been removed while the claim was under way: nothing starts there.
            self._runner.release(held)
        else:
            self._runner.start(held)
            if document.get("unread"):
                self._runner.read_inbox(held)

    def _held_from(self, claim: _Claim, ownership: Ownership, document: RawBSONDocument) -> HeldJob:
        facts: dict[str, Any] = codec.envelope(document)
        key = str(facts["key"])
        return HeldJob(
            job=Job(
                key=key,
                payload=codec.thaw(document, "payload", self._store.codec_options),
                fence=ownership.fence,
                requeued=bool(facts["requeued"]),
                created_at=facts["created_at"],
            ),
            ownership=ownership,
            worker=claim.active.workers[claim.worker],
            life=claim.active.life,
            key_hash=hash_of(key),
            dispatch_id=str(facts["dispatch_id"]),
            answered=facts["answered"] is not None,
            attempts=int(facts["attempts"]),
            epoch=self._view.epoch(),
        )

    # -- what was not won, or cannot be started ----------------------------------------------

    def _after_lost_race(self, ids: Sequence[str]) -> None:
        """
        Jobs that were pending and could not be claimed: what are they waiting for?
        """
        for job in self._store.read(statements.jobs.states(ids)) if ids else ():
            if job["state"] != statements.PENDING:
                self.queue.discard(job["_id"])
            elif job.get("stop") is not None:
                self.cancel(job)
            else:
                due_s = max(self.due_s(job["not_before"]), time.monotonic() + _AGAIN_S)
                self.queue.add(job["_id"], due_s)

    def cancel(self, job: Document) -> None:
        """
        A pending job with a stop request: its last owner has stopped it, or died.
        """
        if self._store.end_pending(job):
            self._runner.waiters.wake(job["_id"])
        self.queue.discard(job["_id"])

    def give_back_late(self, starting: Sequence[Document], active: ActiveWorkers) -> None:
        """
        Give back what is *starting* under this node's name and not held: such a claim was
        carried out after its time-out, when it was known to have taken nothing.
        """
        for job in starting:
            if job["node"] != active.node:
                continue
            held = self._held.find(job["_id"])
            if held is not None and held.ownership.fence == job["fence"]:
                continue
            # In this order: if the lease was lost meanwhile, its handlers may still be at work.
            if self._held.life == active.life:
                ownership = Ownership(job["_id"], str(job["owner"]), int(job["fence"]))
                self._store.update(statements.jobs.release(ownership, self._view.epoch()))

    def _postpone_unreadable(self, ownership: Ownership, error: Exception) -> None:
        """
        A job whose document or payload cannot be read here; maybe elsewhere, or later.
        """
        self._runner.health.note_error(error)
        _log.error(
            "a job cannot be read", event="job_unreadable", exc_info=error, job_id=ownership.job_id
        )
        stored = {"type": type(error).__name__, "text": str(error)[:500]}
        with contextlib.suppress(StoreError):
            self._store.update(statements.jobs.postpone(ownership, stored, _UNREADABLE_MS))
