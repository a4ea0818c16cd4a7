"""
The change stream: hints that some task may be claimable, for the intake and the fetcher.

Everything stays right without it, only slower. It is opened anew after any error,
from now, and the fetcher then reads what was missed: a resume token is never
trusted to be complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from mscheduler_sync._runtime.log import Log, logger
from mscheduler_sync._stages.fetcher import Fetcher
from mscheduler_sync._stages.horizon import Horizon
from mscheduler_sync._stages.intake import Intake
from mscheduler_sync._stages.routes import Routes
from mscheduler_sync._storage import statements
from mscheduler_sync._storage.store import TaskStore
from mscheduler_sync._storage.stream import StreamReader, Watched
from mscheduler_sync.errors import StoreError, StoreUnavailable

_log = logger("watch")


@attrs.define(eq=False, repr=False, kw_only=True)
class Watcher(StreamReader):
    """
    The change stream's thread; see the module.
    """

    log: Log = _log
    _store: TaskStore
    _routes: Routes
    _intake: Intake
    _horizon: Horizon
    _fetcher: Fetcher

    def watched(self) -> Watched:
        return Watched(self._store.collection, statements.discovery.watch_pipeline())

    def on_open(self) -> None:
        self._fetcher.set_polling(polling=False)

    def on_close(self) -> None:
        self._fetcher.set_polling(polling=True)

    def on_store_error(self, error: StoreError) -> None:
        if isinstance(error, StoreUnavailable):
            self._store.note_outage()

    def on_end(self) -> None:
        # The collection may be a new one by the next pass.
        self._store.forget_indexes()

    def on_event(self, event: Mapping[str, Any]) -> None:
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
        if due is not None and not self._horizon.reaches(due, self._store.clock):
            return
        # A change that leaves our derived fields alone is another program's: they may be stale.
        is_foreign = not (isinstance(fields, Mapping) and fields)
        self._fetcher.request_lookup(document_key.get("_id"), is_foreign=is_foreign)

    def _take_document(self, document: Mapping[str, Any], document_key: object) -> None:
        if document.get("routes") is None or document.get("due") is None:
            if isinstance(document_key, Mapping):
                self._fetcher.request_lookup(document_key.get("_id"))
        elif self._routes.include(document["routes"]):
            if self._horizon.observe(document):
                self._fetcher.wake()
            self._intake.offer_if_near(document)
