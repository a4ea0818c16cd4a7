"""
The change stream over the jobs: hints for the node's control thread and for waiting callers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

import attrs

from mscheduler_sync._runtime.log import Log, logger
from mscheduler_sync._storage.stream import StreamReader, Watched
from mscheduler_sync.pool import statements
from mscheduler_sync.pool.store import PoolStore

_log = logger("watch")

#: Shown of updates only; a whole document always has the first.
_UNREAD: Final = frozenset({"inbox_seq", "stop"})


@attrs.define(eq=False, repr=False)
class Waiter:
    """
    One caller that waits for news of one job.
    """

    _changed: threading.Condition = attrs.field(init=False, factory=threading.Condition)
    # Under _changed.
    _news: bool = attrs.field(init=False, default=False)
    _answered: str | None = attrs.field(init=False, default=None)

    def wait(self, timeout_s: float) -> str | None:
        """
        Wait up to *timeout_s* seconds for news; return the dispatch that was answered, if told.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._news, max(0.0, timeout_s))
            self._news = False
            return self._answered

    def wake(self, answered: str | None) -> None:
        with self._changed:
            self._news = True
            self._answered = answered or self._answered
            self._changed.notify_all()


@attrs.define(eq=False, repr=False)
class Waiters:
    """
    Who waits for which job. Safe from any thread.
    """

    _lock: threading.Lock = attrs.field(init=False, factory=threading.Lock)
    # Under _lock.
    _waiters: dict[str, list[Waiter]] = attrs.field(init=False, factory=dict)

    @contextlib.contextmanager
    def of(self, job_id: str) -> Iterator[Waiter]:
        waiter = Waiter()
        with self._lock:
            self._waiters.setdefault(job_id, []).append(waiter)
        try:
            yield waiter
        finally:
            with self._lock:
                self._waiters[job_id].remove(waiter)
                if not self._waiters[job_id]:
                    del self._waiters[job_id]

    def wake(self, job_id: str, answered: str | None = None) -> None:
        """
        There is news of a job; *answered* names a dispatch whose start has succeeded.
        """
        with self._lock:
            waiters = list(self._waiters.get(job_id, ()))
        for waiter in waiters:
            waiter.wake(answered)

    def wake_all(self) -> None:
        with self._lock:
            waiters = [waiter for some in self._waiters.values() for waiter in some]
        for waiter in waiters:
            waiter.wake(None)


@attrs.frozen
class JobChange:
    """
    What a change event says of a job; None where it does not say.
    """

    job_id: str
    #: None also when the job is gone.
    state: str | None
    gone: bool = False
    is_new: bool = False
    has_unread: bool = False
    #: A date, in a healthy document.
    not_before: object = None
    epoch: object = None


class Listener(Protocol):
    """
    Who is told; the node's control thread.
    """

    def note(self, change: JobChange) -> None: ...

    def rescan(self) -> None: ...


@attrs.define(eq=False, repr=False, kw_only=True)
class PoolWatcher(StreamReader):
    """
    The change stream's thread; see the module.
    """

    log: Log = _log
    _store: PoolStore
    _waiters: Waiters
    _listener: Listener | None

    def watched(self) -> Watched:
        pipeline = statements.jobs.watch_pipeline(
            self._store.pool, verdicts_only=self._listener is None
        )
        return Watched(self._store.jobs, pipeline)

    def on_open(self) -> None:
        self._rescan()

    def on_close(self) -> None:
        self._rescan()

    def _rescan(self) -> None:
        self._waiters.wake_all()
        if self._listener is not None:
            self._listener.rescan()

    def on_event(self, event: Mapping[str, Any]) -> None:
        prefix = self._store.pool + statements.SEPARATOR
        document_key = event.get("documentKey")
        job_id = document_key.get("_id") if isinstance(document_key, Mapping) else None
        if not isinstance(job_id, str) or not job_id.startswith(prefix):
            return
        changed = event.get("updateDescription")
        fields = changed.get("updatedFields") if isinstance(changed, Mapping) else None
        if not isinstance(fields, Mapping):
            fields = event.get("fullDocument")
        if not isinstance(fields, Mapping):
            fields = {}
        state, answered = fields.get("state"), fields.get("answered")
        is_new = event.get("operationType") == "insert"
        has_unread = fields.get("unread") is True or not fields.keys().isdisjoint(_UNREAD)
        if self._listener is not None:
            self._listener.note(
                JobChange(
                    job_id,
                    state if isinstance(state, str) else None,
                    gone=event.get("operationType") == "delete",
                    is_new=is_new,
                    has_unread=has_unread,
                    not_before=fields.get("not_before"),
                    epoch=fields.get("epoch"),
                )
            )
        if not is_new and state not in statements.jobs.ON_THE_WAY:
            self._waiters.wake(job_id, answered if isinstance(answered, str) else None)
