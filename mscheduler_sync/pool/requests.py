"""
What callers ask of the pool: dispatch, stop, notify, reads. Runs in the caller's thread.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Final

import attrs

from mscheduler_sync._storage import codec
from mscheduler_sync._storage.codec import MAX_PARAMS_BYTES
from mscheduler_sync.errors import (
    DispatchTimeout,
    HandlerError,
    InboxFull,
    JobExists,
    JobNotFound,
    PoolClosed,
    PoolFull,
    StoreUnavailable,
)
from mscheduler_sync.pool import statements
from mscheduler_sync.pool.job import WorkerInfo
from mscheduler_sync.pool.settings import NodeSettings
from mscheduler_sync.pool.statements import Document
from mscheduler_sync.pool.store import PoolStore
from mscheduler_sync.pool.view import PoolView
from mscheduler_sync.pool.waiting import Pauses, Waiter, Waiters

#: The number of waiting jobs is counted anew after this long, in seconds.
_COUNT_AGAIN_S: Final = 1.0
#: A stop request that finds the job between two owners is tried again after so long.
_MOVING_S: Final = 0.05
_NOTE_LIMIT: Final = statements.INBOX_BYTES


@attrs.frozen
class _Dispatch:
    key: str
    job_id: str
    id: str
    timeout_s: float


class Requests:
    """
    Dispatch, stop, notify and reads for one node or client.
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
        self._hint = hint
        self._lock = threading.Lock()
        # Both under _lock: how many jobs waited, counted when, plus what was added since.
        self._waiting = 0
        self._counted_at_s = float("-inf")

    # -- dispatch ----------------------------------------------------------------------------

    def dispatch(self, key: str, payload: Any, timeout_s: float) -> None:
        frozen = codec.freeze(
            payload, self._store.codec_options, what="payload", limit_bytes=MAX_PARAMS_BYTES
        )
        self._check_open()
        self._check_room()
        job_id = statements.full_id(self._pool, key)
        dispatch = _Dispatch(key, job_id, uuid.uuid4().hex, timeout_s)
        self._store.measure_clock()
        document = statements.new_job(
            self._pool,
            key,
            frozen.value,
            now=self._store.clock.now(),
            dispatch_id=dispatch.id,
            node=self._node(),
            epoch=max(0, self._view.epoch()),
        )
        with self._waiters.of(job_id) as waiter:
            deadline_s = time.monotonic() + timeout_s
            self._insert(document, deadline_s)
            self._hint(job_id)
            self._wait_running(dispatch, waiter, deadline_s)

    def _check_open(self) -> None:
        seen = self._view.refresh(older_than_s=self._settings.poll_interval_s)
        if seen.state != statements.OPEN:
            raise PoolClosed(self._pool)

    def _check_room(self) -> None:
        """
        Raise if too many jobs wait. The count is exact when it matters, and saved when not.
        """
        limit = self._settings.max_queued_jobs
        with self._lock:
            is_fresh = time.monotonic() - self._counted_at_s < _COUNT_AGAIN_S
            if is_fresh and self._waiting < limit // 2:
                self._waiting += 1
                return
        count = self._store.count("jobs", statements.count_pending(self._pool))
        if count >= limit:
            raise PoolFull(self._pool, limit)
        with self._lock:
            self._waiting = count + 1
            self._counted_at_s = time.monotonic()

    def _insert(self, document: Document, deadline_s: float) -> None:
        unsure = False
        while True:
            try:
                if unsure and self._store.read_one(statements.result(document["dispatch_id"])):
                    # It was there, and has failed already.
                    return
                if self._store.insert_job(document):
                    return
            except StoreUnavailable:
                # It may be there: the same again tells, or finds the server still away.
                unsure = True
                if time.monotonic() >= deadline_s:
                    raise
                continue
            there = self._store.read_one(statements.job(document["_id"], statements.STATE_OF_JOB))
            if there is None:
                continue
            if there["state"] != statements.FAILED:
                raise JobExists(str(document["key"]))
            # A failed job whose owner died before it filed the verdict: that frees the key.
            self._file(str(document["key"]), there)

    def _file(self, key: str, failed: Document) -> None:
        dispatch_id, error = failed["dispatch_id"], failed["error"]
        self._store.write(statements.put_result(dispatch_id, self._pool, key, error))
        self._store.remove(statements.remove_failed(failed["_id"], dispatch_id))

    def _wait_running(self, dispatch: _Dispatch, waiter: Waiter, deadline_s: float) -> None:
        """
        Return once the job runs; raise what else has become of it.
        """
        pauses = self._pauses()
        end_s = deadline_s + dispatch.timeout_s
        while True:
            now_s = time.monotonic()
            until_s = deadline_s if now_s < deadline_s else end_s
            if waiter.wait(pauses.next_s(until_s)) == dispatch.id:
                return
            try:
                if self._is_running(dispatch):
                    return
                self._give_up_in_time(dispatch, deadline_s, end_s)
            except StoreUnavailable:
                # Not known is not decided: ask again while there is time.
                if time.monotonic() >= end_s:
                    raise

    def _is_running(self, dispatch: _Dispatch) -> bool:
        job = self._store.read_one(statements.job(dispatch.job_id, statements.STATE_OF_JOB))
        if job is not None and job["dispatch_id"] == dispatch.id:
            if job["state"] == statements.FAILED:
                raise _handler_error(dispatch.key, job["error"])
            return bool(job["answered"] == dispatch.id)
        result = self._store.read_one(statements.result(dispatch.id))
        if result is not None:
            raise _handler_error(dispatch.key, result["error"])
        if self._view.refresh().state != statements.OPEN:
            raise PoolClosed(self._pool)
        # It ran and was stopped again before we looked.
        return True

    def _give_up_in_time(self, dispatch: _Dispatch, deadline_s: float, end_s: float) -> None:
        now_s = time.monotonic()
        closed = self._view.seen.state != statements.OPEN
        if now_s < deadline_s and not closed:
            return
        if self._store.remove(statements.withdraw(dispatch.job_id, dispatch.id)):
            if closed:
                raise PoolClosed(self._pool)
            raise DispatchTimeout(dispatch.key, dispatch.timeout_s)
        # A worker has it: its start is not over yet, and has as long again.
        if now_s >= end_s and not self._is_running(dispatch):
            self._store.write(statements.ask_stop(dispatch.job_id, dispatch.id, self._node()))
            raise DispatchTimeout(dispatch.key, dispatch.timeout_s, started=True)

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
            dispatch_id, stop_id = asked
            self._wait_stopped(_Dispatch(key, job_id, dispatch_id, timeout_s), stop_id, waiter)

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
                if self._end_pending(key, job):
                    self._waiters.poke(job_id)
                    return None
            else:
                self._store.write(statements.ask_stop(job_id, stop_id, self._node()))
                left = self._store.read_one(statements.job(job_id, statements.STATE_OF_JOB))
                if left is None or left["dispatch_id"] != dispatch_id:
                    return None
                request = left.get("stop")
                if request is not None:
                    return dispatch_id, str(request["id"])
            # It changed hands between the two looks.
            if time.monotonic() >= deadline_s:
                msg = f"the job {key!r} changes hands too fast to be stopped"
                raise StoreUnavailable(msg)
            threading.Event().wait(_MOVING_S)

    def _end_pending(self, key: str, job: Document) -> bool:
        if job["answered"] is not None:
            removal = statements.remove_pending(job["_id"], job["dispatch_id"])
            return self._store.remove(removal) > 0
        error = {"type": "JobStopped", "text": "it was stopped before it started"}
        cancelled = statements.cancel(job["_id"], job["dispatch_id"], error)
        if not self._store.write(cancelled)[0]:
            return False
        self._file(key, {**job, "error": error})
        return True

    def _wait_stopped(self, job: _Dispatch, stop_id: str, waiter: Waiter) -> None:
        deadline_s = time.monotonic() + job.timeout_s
        pauses = self._pauses()
        while True:
            waiter.wait(pauses.next_s(deadline_s))
            there = self._store.read_one(statements.job(job.job_id, statements.STATE_OF_JOB))
            if there is None or there["dispatch_id"] != job.id:
                return
            request = there.get("stop")
            if request is None or request["id"] != stop_id:
                result = self._store.read_one(statements.result(stop_id))
                if result is not None:
                    raise _handler_error(job.key, result["error"])
            if time.monotonic() >= deadline_s:
                msg = f"the job {job.key!r} was not stopped within {job.timeout_s:g} s"
                raise TimeoutError(msg)

    # -- notify and reads --------------------------------------------------------------------

    def notify(self, key: str, payload: Any, timeout_s: float) -> None:
        frozen = codec.freeze(
            payload, self._store.codec_options, what="payload", limit_bytes=_NOTE_LIMIT
        )
        job_id = statements.full_id(self._pool, key)
        statement = statements.push(job_id, uuid.uuid4().hex, frozen.value, frozen.size_bytes)
        deadline_s = time.monotonic() + timeout_s
        retried = False
        answer: tuple[int, int] | None = None
        while answer is None:
            try:
                answer = self._store.write(statement)
            except StoreUnavailable:
                if time.monotonic() >= deadline_s:
                    raise
                retried = True
        matched, changed = answer
        if not matched:
            raise JobNotFound(key)
        # Sent twice and nothing changed: the first one was applied.
        if not changed and not retried:
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


def _handler_error(key: str, error: Document) -> HandlerError:
    return HandlerError(key, str(error.get("type", "?")), str(error.get("text", "")))
