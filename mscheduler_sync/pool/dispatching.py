"""
One job dispatched, and its one verdict awaited. Runs in the caller's thread.
"""

from __future__ import annotations

import contextlib
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
    JobExists,
    MSchedulerError,
    PoolClosed,
    PoolFull,
    StoreError,
    StoreUnavailable,
)
from mscheduler_sync.pool import statements
from mscheduler_sync.pool.settings import NodeSettings
from mscheduler_sync.pool.statements import Document
from mscheduler_sync.pool.store import PoolStore
from mscheduler_sync.pool.view import PoolView
from mscheduler_sync.pool.waiting import Pauses, Waiter, Waiters, pause_after

#: The number of waiting jobs is counted anew after this long, in seconds.
_COUNT_AGAIN_S: Final = 1.0
#: The mark of a job that its dispatcher takes back. No error's class has this name.
_WITHDRAWN: Final = {"type": "", "text": "withdrawn by its dispatcher"}


@attrs.frozen
class _Dispatch:
    key: str
    job_id: str
    id: str
    timeout_s: float


class Dispatches:
    """
    The dispatches of one node or client. *hint* is told of each new job.
    """

    def __init__(
        self,
        store: PoolStore,
        settings: NodeSettings,
        view: PoolView,
        waiters: Waiters,
        *,
        node: Callable[[], str],
        pauses: Callable[[], Pauses],
        hint: Callable[[str], None],
    ) -> None:
        self._store = store
        self._settings = settings
        self._pool = settings.pool
        self._view = view
        self._waiters = waiters
        self._node = node
        self._pauses = pauses
        self._hint = hint
        self._lock = threading.Lock()
        # Both under _lock: how many jobs waited, counted when, plus what was added since.
        self._waiting = 0
        self._counted_at_s = float("-inf")

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
        failures = 0
        while True:
            try:
                if failures and self._store.read_one(statements.result(document["dispatch_id"])):
                    # It was there, and has failed already.
                    return
                if self._store.insert_job(document):
                    return
            except StoreUnavailable:
                # It may be there: the same again tells, or finds the server still away.
                failures += 1
                if not pause_after(failures, deadline_s):
                    raise
                continue
            there = self._store.read_one(statements.job(document["_id"], statements.STATE_OF_JOB))
            if there is None:
                continue
            if there["state"] != statements.FAILED:
                raise JobExists(str(document["key"]))
            # A failed job whose owner died before it filed the verdict: that frees the key.
            self._store.file_failure(there["_id"], self._pool, there["dispatch_id"], there["error"])

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
                raise self._verdict(dispatch, job["error"])
            return bool(job["answered"] == dispatch.id)
        result = self._store.read_one(statements.result(dispatch.id))
        if result is not None:
            raise self._verdict(dispatch, result["error"])
        if self._view.refresh().state != statements.OPEN:
            raise PoolClosed(self._pool)
        # It ran and was stopped again before we looked.
        return True

    def _verdict(self, dispatch: _Dispatch, error: Document) -> MSchedulerError:
        if error.get("type") != _WITHDRAWN["type"]:
            return handler_error(dispatch.key, error)
        if self._view.seen.state != statements.OPEN:
            return PoolClosed(self._pool)
        return DispatchTimeout(dispatch.key, dispatch.timeout_s)

    def _give_up_in_time(self, dispatch: _Dispatch, deadline_s: float, end_s: float) -> None:
        now_s = time.monotonic()
        if now_s < deadline_s and self._view.seen.state == statements.OPEN:
            return
        # Marked, then removed: should the answer be lost, the mark tells what has happened.
        withdrawn = statements.cancel(dispatch.job_id, dispatch.id, _WITHDRAWN)
        if self._store.write(withdrawn)[0]:
            with contextlib.suppress(StoreError):
                # If this fails, the reapers free the key, or its next dispatch does.
                self._store.remove(statements.remove_failed(dispatch.job_id, dispatch.id))
            raise self._verdict(dispatch, _WITHDRAWN)
        # A worker has it: its start is not over yet, and has as long again.
        if now_s >= end_s and not self._is_running(dispatch):
            stop = statements.ask_stop(dispatch.job_id, dispatch.id, dispatch.id, self._node())
            # Nobody has it any more if its start has asked for another try just now.
            if self._store.write(stop)[0]:
                raise DispatchTimeout(dispatch.key, dispatch.timeout_s, started=True)


def handler_error(key: str, error: Document) -> HandlerError:
    return HandlerError(key, str(error.get("type", "?")), str(error.get("text", "")))
