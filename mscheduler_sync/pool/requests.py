"""
What callers ask of the pool: dispatch, stop, notify, reads. Runs in the caller's thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Final

import attrs

from mscheduler_sync._runtime import backoff
from mscheduler_sync._storage import codec
from mscheduler_sync._storage.codec import MAX_PARAMS_BYTES
from mscheduler_sync._storage.statement import Document
from mscheduler_sync.errors import (
    DispatchTimeout,
    HandlerError,
    InboxFull,
    JobExists,
    JobNotFound,
    MSchedulerError,
    PoolClosed,
    PoolFull,
    StoreError,
    StoreUnavailable,
)
from mscheduler_sync.pool import statements
from mscheduler_sync.pool.ring import PoolView
from mscheduler_sync.pool.settings import NodeOptions
from mscheduler_sync.pool.store import PoolStore
from mscheduler_sync.pool.watcher import Waiter, Waiters

#: The number of waiting jobs is counted anew after this long, in seconds.
_COUNT_AGAIN_S: Final = 1.0
#: A stop request that finds the job between two owners is tried again after so long.
_MOVING_S: Final = 0.05
#: Without a change stream, the pauses of a caller that waits grow up to this, in seconds.
_LONGEST_POLL_S: Final = 0.25
#: The mark of a job that its dispatcher takes back. No error's class has this name.
_WITHDRAWN: Final = {"type": "", "text": "withdrawn by its dispatcher"}


@attrs.frozen
class _Dispatch:
    key: str
    job_id: str
    id: str
    timeout_s: float


@attrs.define(eq=False, repr=False, kw_only=True)
class Requests:
    """
    The requests of one node or client.
    """

    _store: PoolStore
    _settings: NodeOptions
    _view: PoolView
    _waiters: Waiters
    #: Returns the id of the node.
    _node: Callable[[], str]
    #: Whether a change stream brings news of jobs.
    _is_streaming: Callable[[], bool]
    #: Called with the id of each job that was inserted here: the node need not wait for the stream.
    _on_inserted: Callable[[str], None]
    #: Set when the node is at its end: nobody waits on.
    _closed: threading.Event
    _lock: threading.Lock = attrs.field(init=False, factory=threading.Lock)
    # Both under _lock: how many jobs waited, counted when, plus what was added since.
    _waiting: int = attrs.field(init=False, default=0)
    _counted_at_s: float = attrs.field(init=False, default=float("-inf"))

    def _job(self, job_id: str) -> Document | None:
        return self._store.read_one(statements.jobs.job(job_id, statements.jobs.STATE_OF_JOB))

    def _existing_job(self, key: str) -> Document:
        job = self._job(statements.full_id(self._store.pool, key))
        if job is None or job["state"] == statements.FAILED:
            raise JobNotFound(key)
        return job

    def _pauses(self) -> backoff.Pauses:
        if self._is_streaming():
            longest_s = self._settings.poll_interval_s
            return backoff.Pauses(longest_s, longest_s)
        return backoff.Pauses(0.02, _LONGEST_POLL_S)

    def _pause_after(self, failures: int, deadline_s: float) -> bool:
        """
        Wait before another try of what has failed so often; return False if there is none.
        """
        left_s = deadline_s - time.monotonic()
        pause_s = backoff.jittered(backoff.delay_s(failures, first_s=0.05, cap_s=1.0))
        return left_s > 0 and not self._closed.wait(min(pause_s, left_s))

    # -- dispatch ----------------------------------------------------------------------------

    def dispatch(self, key: str, payload: Any, timeout_s: float) -> None:
        frozen = codec.freeze(
            payload, self._store.codec_options, what="payload", limit_bytes=MAX_PARAMS_BYTES
        )
        self._check_open()
        self._check_room()
        job_id = statements.full_id(self._store.pool, key)
        dispatch = _Dispatch(key, job_id, uuid.uuid4().hex, timeout_s)
        self._store.measure_clock()
        document = statements.jobs.new_job(
            self._store.pool,
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
            self._on_inserted(job_id)
            self._wait_running(dispatch, waiter, deadline_s)

    def _check_open(self) -> None:
        seen = self._view.refresh(older_than_s=self._settings.poll_interval_s)
        if seen.state != statements.OPEN:
            raise PoolClosed(self._store.pool)

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
        count = self._store.count(statements.jobs.count_pending(self._store.pool))
        if count >= limit:
            raise PoolFull(self._store.pool, limit)
        with self._lock:
            self._waiting = count + 1
            self._counted_at_s = time.monotonic()

    def _insert(self, document: Document, deadline_s: float) -> None:
        failures = 0
        while True:
            try:
                if failures and self._store.read_one(
                    statements.jobs.result(document["dispatch_id"])
                ):
                    # It was there, and has failed already.
                    return
                if self._store.insert(statements.jobs.insert(document)):
                    return
            except StoreUnavailable:
                # It may be there: the same again tells, or finds the server still away.
                failures += 1
                if not self._pause_after(failures, deadline_s):
                    raise
                continue
            there = self._job(document["_id"])
            if there is None:
                continue
            if there["state"] != statements.FAILED:
                raise JobExists(str(document["key"]))
            # A failed job whose owner died before it filed the verdict: that frees the key.
            self._store.file_failure(there["_id"], there["dispatch_id"], there["error"])

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
        job = self._job(dispatch.job_id)
        if job is not None and job["dispatch_id"] == dispatch.id:
            if job["state"] == statements.FAILED:
                raise self._verdict(dispatch, job["error"])
            return bool(job["answered"] == dispatch.id)
        result = self._store.read_one(statements.jobs.result(dispatch.id))
        if result is not None:
            raise self._verdict(dispatch, result["error"])
        if self._view.refresh().state != statements.OPEN:
            raise PoolClosed(self._store.pool)
        # It ran and was stopped again before this was read.
        return True

    def _verdict(self, dispatch: _Dispatch, error: Document) -> MSchedulerError:
        if error.get("type") != _WITHDRAWN["type"]:
            return _handler_error(dispatch.key, error)
        if self._view.seen.state != statements.OPEN:
            return PoolClosed(self._store.pool)
        return DispatchTimeout(dispatch.key, dispatch.timeout_s)

    def _give_up_in_time(self, dispatch: _Dispatch, deadline_s: float, end_s: float) -> None:
        now_s = time.monotonic()
        is_open = self._view.seen.state == statements.OPEN and not self._closed.is_set()
        if now_s < deadline_s and is_open:
            return
        # Marked, then removed: should the answer be lost, the mark tells what has happened.
        withdrawn = statements.jobs.cancel(dispatch.job_id, dispatch.id, _WITHDRAWN)
        if self._store.update(withdrawn)[0]:
            with contextlib.suppress(StoreError):
                # If this fails, the reapers free the key, or its next dispatch does.
                self._store.delete(statements.jobs.remove_failed(dispatch.job_id, dispatch.id))
            raise self._verdict(dispatch, _WITHDRAWN)
        # A worker has it: its start is not over yet, and has as long again.
        if now_s >= end_s and not self._is_running(dispatch):
            stop = statements.jobs.ask_stop(dispatch.job_id, dispatch.id, dispatch.id, self._node())
            # Nobody has it any more if its start has asked for another try just now.
            if self._store.update(stop)[0]:
                raise DispatchTimeout(dispatch.key, dispatch.timeout_s, started=True)

    # -- stop --------------------------------------------------------------------------------

    def stop_job(self, key: str, *, wait: bool, timeout_s: float) -> None:
        job_id = statements.full_id(self._store.pool, key)
        deadline_s = time.monotonic() + timeout_s
        with self._waiters.of(job_id) as waiter:
            asked = self._ask_stop(key, deadline_s)
            if asked is not None and wait and not self._is_stopped(key, asked, waiter, deadline_s):
                msg = f"the job {key!r} was not stopped within {timeout_s:g} s"
                raise TimeoutError(msg)

    def _ask_stop(self, key: str, deadline_s: float) -> tuple[str, str] | None:
        """
        End a pending job, or leave a stop request; return the dispatch and the request's id.
        """
        stop_id = uuid.uuid4().hex
        while True:
            job = self._existing_job(key)
            job_id, dispatch_id = job["_id"], str(job["dispatch_id"])
            if job["state"] == statements.PENDING:
                if self._store.end_pending(job):
                    self._waiters.wake(job_id)
                    return None
            else:
                request = statements.jobs.ask_stop(job_id, dispatch_id, stop_id, self._node())
                self._store.update(request)
                left = self._job(job_id)
                if left is None or left["dispatch_id"] != dispatch_id:
                    return None
                if (standing := left.get("stop")) is not None:
                    return dispatch_id, str(standing["id"])
            # It changed hands between the two statements.
            if time.monotonic() >= deadline_s or self._closed.wait(_MOVING_S):
                msg = f"the job {key!r} changes hands too fast to be stopped"
                raise StoreUnavailable(msg)

    def _is_stopped(
        self, key: str, asked: tuple[str, str], waiter: Waiter, deadline_s: float
    ) -> bool:
        """
        Wait for the end of the job; return whether it has come in time.
        """
        dispatch_id, stop_id = asked
        pauses = self._pauses()
        while True:
            waiter.wait(pauses.next_s(deadline_s))
            there = self._job(statements.full_id(self._store.pool, key))
            if there is None or there["dispatch_id"] != dispatch_id:
                return True
            request = there.get("stop")
            if request is None or request["id"] != stop_id:
                result = self._store.read_one(statements.jobs.result(stop_id))
                if result is not None:
                    raise _handler_error(key, result["error"])
            if time.monotonic() >= deadline_s:
                return False

    # -- notify and reads --------------------------------------------------------------------

    def notify(self, key: str, payload: Any, timeout_s: float) -> None:
        frozen = codec.freeze(
            payload, self._store.codec_options, what="payload", limit_bytes=statements.INBOX_BYTES
        )
        job_id = statements.full_id(self._store.pool, key)
        token = uuid.uuid4().hex
        statement = statements.jobs.push(job_id, token, frozen.value, frozen.size_bytes)
        deadline_s = time.monotonic() + timeout_s
        failures = 0
        answer: tuple[int, int] | None = None
        while answer is None:
            try:
                answer = self._store.update(statement)
            except StoreUnavailable:
                failures += 1
                if not self._pause_after(failures, deadline_s):
                    raise
        matched, changed = answer
        if not matched:
            raise JobNotFound(key)
        # Sent twice and nothing changed: the first one was applied, or found the inbox full too.
        if not changed and not (
            failures and self._store.read(statements.jobs.pushed(job_id, token))
        ):
            raise InboxFull(key)

    def job_keys(self) -> list[str]:
        jobs = self._store.read(statements.jobs.jobs_of(self._store.pool))
        owned = (statements.STARTING, statements.RUNNING)
        return sorted(
            job["key"]
            for job in jobs
            if job["state"] in owned or (job["answered"] and job["state"] == statements.PENDING)
        )

    def job_payload(self, key: str) -> Any:
        job_id = statements.full_id(self._store.pool, key)
        found = self._store.find(statements.jobs.job(job_id, {"payload": 1, "state": 1}))
        if not found or found[0]["state"] == statements.FAILED:
            raise JobNotFound(key)
        return codec.thaw(found[0], "payload", self._store.codec_options)

    def job_owner(self, key: str) -> str | None:
        owner = self._existing_job(key)["owner"]
        return None if owner is None else str(owner)


def _handler_error(key: str, error: Document) -> HandlerError:
    return HandlerError(key, str(error.get("type", "?")), str(error.get("text", "")))
