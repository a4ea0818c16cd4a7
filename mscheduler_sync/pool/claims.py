"""
Takes pending jobs: many in one statement, and whose they are is read back.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import random
import time
import uuid
from collections.abc import Sequence
from typing import Any, Final

import attrs
from bson.raw_bson import RawBSONDocument

from mscheduler_sync._runtime.log import logger
from mscheduler_sync._runtime.service import ComponentHealth
from mscheduler_sync._storage import codec
from mscheduler_sync.errors import StoreError
from mscheduler_sync.pool import statements
from mscheduler_sync.pool.held import HeldJob, HeldJobs
from mscheduler_sync.pool.job import Job
from mscheduler_sync.pool.pending import PendingJobs
from mscheduler_sync.pool.ring import hash_of
from mscheduler_sync.pool.runner import JobRunner
from mscheduler_sync.pool.statements import Document, Grant
from mscheduler_sync.pool.store import PoolStore
from mscheduler_sync.pool.view import PoolView
from mscheduler_sync.pool.worker import Worker

_log = logger("claim")

#: A job that cannot be read waits so long, in milliseconds.
_UNREADABLE_MS: Final = 60_000
_CANCELLED: Final = {"type": "JobStopped", "text": "a stop was requested before it started"}


@attrs.frozen
class Crew:
    """
    Who may claim, as of one life of the node: workers by their ids.
    """

    life: int
    node: str
    workers: dict[str, Worker]


@attrs.frozen
class _Claim:
    """
    A claim whose outcome is not known yet.
    """

    crew: Crew
    worker: str
    ids: Sequence[str]
    grant: str


class Claims:
    """
    The claims of a node; used by its control thread alone, but for `due_s`.
    """

    def __init__(
        self,
        store: PoolStore,
        pool: str,
        *,
        view: PoolView,
        held: HeldJobs,
        pending: PendingJobs,
        runner: JobRunner,
    ) -> None:
        self._store = store
        self._pool = pool
        self._view = view
        self._held = held
        self._pending = pending
        self._runner = runner
        self._health: ComponentHealth = runner.health
        self._unsettled: list[_Claim] = []

    def due_s(self, not_before: object) -> float:
        """
        Return from when a job may be claimed, on the monotonic clock; never in the past.
        """
        now_s = time.monotonic()
        if not isinstance(not_before, dt.datetime) or self._store.clock.offset_s is None:
            return now_s
        return max(now_s, self._store.clock.monotonic_at(not_before))

    def claim_due(self, crew: Crew) -> None:
        """
        Claim what belongs here, or to nobody who wants it.
        """
        if not crew.workers or self._view.seen.state != statements.OPEN:
            return
        ring = self._view.ring
        ids_of: dict[str, list[str]] = {}
        for job_id, for_anybody in self._pending.take_due():
            place = ring.target(hash_of(statements.name_in(self._pool, job_id)))
            if place is not None and place.worker in crew.workers:
                ids_of.setdefault(place.worker, []).append(job_id)
            elif for_anybody:
                worker = random.choice(list(crew.workers))
                ids_of.setdefault(worker, []).append(job_id)
        for worker, ids in ids_of.items():
            for first in range(0, len(ids), statements.MOST_IDS):
                page = ids[first : first + statements.MOST_IDS]
                self._claim(_Claim(crew, worker, page, uuid.uuid4().hex))

    def _claim(self, claim: _Claim) -> None:
        self._unsettled.append(claim)
        statement = statements.claim(claim.ids, claim.worker, claim.crew.node, claim.grant)
        matched, _ = self._store.write(statement)
        won = self._store.read_raw(statements.claimed(claim.ids, claim.grant)) if matched else []
        self._unsettled.remove(claim)
        self._accept(claim, won)
        lost = set(claim.ids) - {document["_id"] for document in won}
        if lost:
            self._look_again(sorted(lost))

    def settle(self) -> None:
        """
        Find out what has become of claims whose answers were lost.
        """
        for claim in list(self._unsettled):
            won = self._store.read_raw(statements.claimed(claim.ids, claim.grant))
            self._unsettled.remove(claim)
            self._accept(claim, won)

    def _accept(self, claim: _Claim, won: Sequence[RawBSONDocument]) -> None:
        for document in won:
            self._pending.discard(document["_id"])
            grant = Grant(document["_id"], claim.worker, int(document["fence"]))
            try:
                held = self._held_from(claim, grant, document)
            except Exception as error:  # noqa: BLE001 - one unreadable job spoils no other
                self._set_aside(grant, error)
                continue
            if not self._held.add(held):
                # Claimed by a life that is over. If this fails, the reaper does it.
                with contextlib.suppress(StoreError):
                    self._store.write(statements.release(grant, self._view.epoch()))
                continue
            if held.worker.is_leaving:
                # It may have been removed while the claim was under way: nothing starts there.
                self._runner.release(held)
                continue
            self._runner.start(held)
            if document.get("mail"):
                self._runner.read_inbox(held)

    def give_back_late(self, starting: Sequence[Document], crew: Crew) -> None:
        """
        Give back what is *starting* under this node's name and not held: such a claim was
        carried out after its time-out, when it was known to have taken nothing.
        """
        for job in starting:
            if job["node"] != crew.node:
                continue
            held = self._held.find(job["_id"])
            if held is not None and held.grant.fence == job["fence"]:
                continue
            # In this order: if the lease was lost meanwhile, its handlers may still be at work.
            if self._held.life == crew.life:
                grant = Grant(job["_id"], str(job["owner"]), int(job["fence"]))
                self._store.write(statements.release(grant, self._view.epoch()))

    def _set_aside(self, grant: Grant, error: Exception) -> None:
        """
        A job whose document or payload cannot be read here; maybe elsewhere, or later.
        """
        self._health.note_error(error)
        _log.error(
            "a job cannot be read",
            exc_info=error,
            extra={"event": "job_unreadable", "job_id": grant.job_id},
        )
        stored = {"type": type(error).__name__, "text": str(error)[:500]}
        with contextlib.suppress(StoreError):
            self._store.write(statements.postpone(grant, stored, _UNREADABLE_MS))

    def _held_from(self, claim: _Claim, grant: Grant, document: RawBSONDocument) -> HeldJob:
        facts: dict[str, Any] = codec.envelope(document)
        payload = codec.thaw(document, "payload", self._store.codec_options)
        key = str(facts["key"])
        return HeldJob(
            job=Job(
                key=key,
                payload=payload,
                fence=grant.fence,
                requeued=bool(facts["requeued"]),
                created_at=facts["created_at"],
            ),
            grant=grant,
            worker=claim.crew.workers[claim.worker],
            life=claim.crew.life,
            key_hash=hash_of(key),
            dispatch_id=str(facts["dispatch_id"]),
            answered=facts["answered"] is not None,
            attempts=int(facts["attempts"]),
            epoch=self._view.epoch(),
        )

    def _look_again(self, ids: Sequence[str]) -> None:
        """
        Jobs that were pending and could not be claimed: what are they waiting for?
        """
        for job in self._store.read(statements.states(ids)):
            if job["state"] != statements.PENDING:
                self._pending.discard(job["_id"])
            elif job.get("stop") is not None:
                self.cancel(job)
            else:
                due_s = max(self.due_s(job["not_before"]), time.monotonic() + 0.01)
                self._pending.add(job["_id"], due_s)

    def cancel(self, job: Document) -> None:
        """
        A pending job with a stop request: its last owner has stopped it, or died.
        """
        job_id, dispatch_id = job["_id"], job["dispatch_id"]
        if job.get("answered") is not None:
            self._store.remove(statements.remove_pending(job_id, dispatch_id))
        elif self._store.write(statements.cancel(job_id, dispatch_id, _CANCELLED))[0]:
            self._runner.file_failure(job_id, dispatch_id, _CANCELLED)
        self._pending.discard(job_id)
