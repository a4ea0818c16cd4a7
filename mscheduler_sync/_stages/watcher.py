"""
The change stream: hints that some task may be claimable.

Everything stays right without it, only slower. It is opened anew after any error,
from now, and the fetcher then looks for what was missed: a resume token is never
trusted to be complete.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import pymongo
from pymongo.change_stream import ChangeStream
from pymongo.errors import OperationFailure, PyMongoError
from pymongo.read_concern import ReadConcern

from mscheduler_sync._runtime import backoff
from mscheduler_sync._runtime.log import logger
from mscheduler_sync._runtime.service import CrashHandler, Service
from mscheduler_sync._stages.candidates import Candidates, Lanes
from mscheduler_sync._stages.fetcher import Fetcher
from mscheduler_sync._storage import statements
from mscheduler_sync._storage.codec import ENVELOPE
from mscheduler_sync._storage.store import TaskStore, translated

_log = logger("watch")

#: How long one getMore waits for events on the server, in milliseconds.
AWAIT_MS: Final = 1000
#: A reply that stays away this long, in seconds, counts as a dead connection.
_SILENCE_S: Final = 10.0
#: Without change streams: look again after this long, in seconds.
REPROBE_S: Final = 300.0
#: Not a replica set; no privilege; not supported here.
_NO_STREAMS_CODES: Final = frozenset({13, 59, 115, 160, 40573, 40324, 20})


class Watcher(Service):
    """
    The change stream's thread; see the module.
    """

    def __init__(
        self,
        store: TaskStore,
        lanes: Lanes,
        candidates: Candidates,
        fetcher: Fetcher,
        on_crash: CrashHandler,
    ) -> None:
        super().__init__("watch", f"ms-watch:{lanes.worker_id}", _log, on_crash)
        self._store = store
        self._lanes = lanes
        self._candidates = candidates
        self._fetcher = fetcher
        self._told_about_polling = False
        #: Read by `health`.
        self.is_open = False
        self.last_event_at_s: float | None = None
        self.last_opened_at_s: float | None = None

    def step(self) -> None:
        """
        Open the stream and read it until it ends, fails, or the stop is asked for.
        """
        try:
            with self._open() as stream:
                self.is_open = True
                self.last_opened_at_s = time.monotonic()
                self._fetcher.set_polling(polling=False)
                # What happened before the stream was open is found by a pass.
                self._fetcher.request_pass()
                self._read(stream)
        except PyMongoError as error:
            self._close()
            if isinstance(error, OperationFailure) and error.code in _NO_STREAMS_CODES:
                self._poll_instead(error)
                return
            if not self.stopping:
                raise translated(error) from error
        finally:
            self._close()

    def _open(self) -> ChangeStream[Any]:
        # A stream takes no other read concern than majority.
        collection = self._store.collection.with_options(
            codec_options=ENVELOPE, read_concern=ReadConcern("majority")
        )
        with pymongo.timeout(_SILENCE_S):
            return collection.watch(statements.watch_pipeline(), max_await_time_ms=AWAIT_MS)

    def _close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._fetcher.set_polling(polling=True)
            self._fetcher.request_pass()

    def _read(self, stream: ChangeStream[Any]) -> None:
        while not self.stopping and stream.alive:
            with pymongo.timeout(_SILENCE_S):
                event = stream.try_next()
            self.health.note_success()
            if event is not None:
                self.last_event_at_s = time.monotonic()
                self._take(event)
        if not self.stopping:
            # Dropped or renamed: it may be there again, without its indexes.
            _log.warning(
                "the change stream has ended; opening it again",
                extra={"event": "stream_ended", "worker_id": self._lanes.worker_id},
            )
            self._fetcher.want_indexes()
            self.pause(backoff.jittered(1.0))

    def _take(self, event: Mapping[str, Any]) -> None:
        if self._store.clock.offset_s is None:
            self._fetcher.request_pass()
            return
        document = event.get("fullDocument")
        document_key = event.get("documentKey")
        if isinstance(document, Mapping):
            self._take_document(document, document_key)
            return
        if not isinstance(document_key, Mapping):
            return
        changed = event.get("updateDescription")
        fields = changed.get("updatedFields") if isinstance(changed, Mapping) else None
        due = fields.get("due") if isinstance(fields, Mapping) else None
        if due is not None and not self._is_soon(due):
            return
        # A change that leaves our derived fields alone is another program's: they may be stale.
        is_foreign = not (isinstance(fields, Mapping) and fields)
        self._fetcher.look_up(document_key.get("_id"), is_foreign=is_foreign)

    def _take_document(self, document: Mapping[str, Any], document_key: object) -> None:
        if document.get("lanes") is None or document.get("due") is None:
            if isinstance(document_key, Mapping):
                self._fetcher.look_up(document_key.get("_id"))
        elif self._lanes.include(document["lanes"]):
            if self._is_soon(document["due"]):
                self._candidates.offer(document)
            option = document.get("task_option")
            lease_ms = option.get("worker_timeout_ms") if isinstance(option, Mapping) else None
            if isinstance(lease_ms, (int, float)) and self._candidates.note_lease(lease_ms / 1000):
                # The pauses between passes were too long for so short a lease.
                self._fetcher.request_pass()

    def _is_soon(self, due: object) -> bool:
        """
        Whether *due* comes before the next pass would find it. Anything odd counts as soon.
        """
        try:
            at_s = self._store.clock.monotonic_at(due)  # type: ignore[arg-type]
        except (TypeError, AttributeError, OverflowError):
            return True
        return at_s <= time.monotonic() + self._candidates.horizon_s()

    def _poll_instead(self, error: OperationFailure) -> None:
        self.health.note_error(translated(error))
        if not self._told_about_polling:
            self._told_about_polling = True
            _log.warning(
                "change streams are not to be had here; polling instead",
                extra={
                    "event": "polling",
                    "worker_id": self._lanes.worker_id,
                    "code": error.code,
                    "error": str(translated(error)),
                },
            )
        self.pause(REPROBE_S)
