"""
What callers ask of the pool: stop, notify, reads; for dispatch see `dispatching`. Runs in the
caller's thread.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Final

from mscheduler_sync._storage import codec
from mscheduler_sync.errors import InboxFull, JobNotFound, StoreUnavailable
from mscheduler_sync.pool import statements
from mscheduler_sync.pool.dispatching import Dispatches, handler_error
from mscheduler_sync.pool.job import WorkerInfo
from mscheduler_sync.pool.settings import NodeSettings
from mscheduler_sync.pool.statements import Document
from mscheduler_sync.pool.store import PoolStore
from mscheduler_sync.pool.view import PoolView
from mscheduler_sync.pool.waiting import Pauses, Waiter, Waiters, pause_after

#: A stop request that finds the job between two owners is tried again after so long.
_MOVING_S: Final = 0.05
_NOTE_LIMIT: Final = statements.INBOX_BYTES


class Requests:
    """
    Stop, notify, reads and dispatch for one node or client.
    """

    def __init__(
        self,
        store: PoolStore,
        settings: NodeSettings,
        view: PoolView,
        waiters: Waiters,
        *,
        node: Callable[[], str],
        is_told: Callable[[], bool],
        hint: Callable[[str], None],
    ) -> None:
        self._store = store
        self._settings = settings
        self._pool = settings.pool
        self._view = view
        self._waiters = waiters
        self._node = node
        self._is_told = is_told
        dispatches = Dispatches(
            store, settings, view, waiters, node=node, pauses=self._pauses, hint=hint
        )
        self.dispatch = dispatches.dispatch

    def _pauses(self) -> Pauses:
        told = self._is_told()
        longest_s = self._settings.poll_interval_s if told else 0.25
        return Pauses(longest_s, told=told)

    # -- stop --------------------------------------------------------------------------------

    def stop_job(self, key: str, *, wait: bool, timeout_s: float) -> None:
        job_id = statements.full_id(self._pool, key)
        deadline_s = time.monotonic() + timeout_s
        stop_id = uuid.uuid4().hex
        with self._waiters.of(job_id) as waiter:
            asked = self._ask_stop(key, job_id, stop_id, deadline_s)
            if asked is None or not wait:
                return
            self._wait_stopped(key, job_id, asked, waiter, timeout_s)

    def _ask_stop(
        self, key: str, job_id: str, stop_id: str, deadline_s: float
    ) -> tuple[str, str] | None:
        """
        End a pending job, or leave a stop request; return the dispatch and the request's id.
        """
        while True:
            job = self._store.read_one(statements.job(job_id, statements.STATE_OF_JOB))
            if job is None or job["state"] == statements.FAILED:
                raise JobNotFound(key)
            dispatch_id = str(job["dispatch_id"])
            if job["state"] == statements.PENDING:
                if self._end_pending(job):
                    self._waiters.poke(job_id)
                    return None
            else:
                request = statements.ask_stop(job_id, dispatch_id, stop_id, self._node())
                self._store.write(request)
                left = self._store.read_one(statements.job(job_id, statements.STATE_OF_JOB))
                if left is None or left["dispatch_id"] != dispatch_id:
                    return None
                standing = left.get("stop")
                if standing is not None:
                    return dispatch_id, str(standing["id"])
            # It changed hands between the two looks.
            if time.monotonic() >= deadline_s:
                msg = f"the job {key!r} changes hands too fast to be stopped"
                raise StoreUnavailable(msg)
            threading.Event().wait(_MOVING_S)

    def _end_pending(self, job: Document) -> bool:
        if job["answered"] is not None:
            removal = statements.remove_pending(job["_id"], job["dispatch_id"])
            return self._store.remove(removal) > 0
        error = {"type": "JobStopped", "text": "it was stopped before it started"}
        cancelled = statements.cancel(job["_id"], job["dispatch_id"], error)
        if not self._store.write(cancelled)[0]:
            return False
        self._store.file_failure(job["_id"], self._pool, job["dispatch_id"], error)
        return True

    def _wait_stopped(
        self, key: str, job_id: str, asked: tuple[str, str], waiter: Waiter, timeout_s: float
    ) -> None:
        dispatch_id, stop_id = asked
        deadline_s = time.monotonic() + timeout_s
        pauses = self._pauses()
        while True:
            waiter.wait(pauses.next_s(deadline_s))
            there = self._store.read_one(statements.job(job_id, statements.STATE_OF_JOB))
            if there is None or there["dispatch_id"] != dispatch_id:
                return
            request = there.get("stop")
            if request is None or request["id"] != stop_id:
                result = self._store.read_one(statements.result(stop_id))
                if result is not None:
                    raise handler_error(key, result["error"])
            if time.monotonic() >= deadline_s:
                msg = f"the job {key!r} was not stopped within {timeout_s:g} s"
                raise TimeoutError(msg)

    # -- notify and reads --------------------------------------------------------------------

    def notify(self, key: str, payload: Any, timeout_s: float) -> None:
        frozen = codec.freeze(
            payload, self._store.codec_options, what="payload", limit_bytes=_NOTE_LIMIT
        )
        job_id = statements.full_id(self._pool, key)
        token = uuid.uuid4().hex
        statement = statements.push(job_id, token, frozen.value, frozen.size_bytes)
        deadline_s = time.monotonic() + timeout_s
        failures = 0
        answer: tuple[int, int] | None = None
        while answer is None:
            try:
                answer = self._store.write(statement)
            except StoreUnavailable:
                failures += 1
                if not pause_after(failures, deadline_s):
                    raise
        matched, changed = answer
        if not matched:
            raise JobNotFound(key)
        # Sent twice and nothing changed: the first one was applied, or found the inbox full too.
        if not changed and not (failures and self._store.read(statements.pushed(job_id, token))):
            raise InboxFull(key)

    def job_keys(self) -> list[str]:
        jobs = self._store.read(statements.jobs_of(self._pool))
        owned = (statements.STARTING, statements.RUNNING)
        return sorted(
            job["key"]
            for job in jobs
            if job["state"] in owned or (job["answered"] and job["state"] == statements.PENDING)
        )

    def job_payload(self, key: str) -> Any:
        job_id = statements.full_id(self._pool, key)
        found = self._store.read_raw(statements.job(job_id, {"payload": 1, "state": 1}))
        if not found or found[0]["state"] == statements.FAILED:
            raise JobNotFound(key)
        return codec.thaw(found[0], "payload", self._store.codec_options)

    def job_owner(self, key: str) -> str | None:
        job_id = statements.full_id(self._pool, key)
        job = self._store.read_one(statements.job(job_id, statements.STATE_OF_JOB))
        if job is None or job["state"] == statements.FAILED:
            raise JobNotFound(key)
        owner = job["owner"]
        return None if owner is None else str(owner)

    def pool_workers(self) -> list[WorkerInfo]:
        places = self._view.refresh().ring.places
        known = {
            one["_id"]: one for one in self._store.read(statements.workers_of_pool(self._pool))
        }
        return [
            WorkerInfo(id=place.worker, node=place.node, created_at=facts["created_at"])
            for place in places
            if (facts := known.get(place.worker)) is not None
        ]
