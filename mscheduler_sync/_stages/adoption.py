"""
Documents that another program wrote or changed: our derived fields in them are missing or stale.

Where the fetcher meets one, it is repaired before it goes on into the delay queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import attrs
from bson.raw_bson import RawBSONDocument

from mscheduler_sync import model
from mscheduler_sync._runtime.log import LogThrottle, logger
from mscheduler_sync._stages.intake import Intake
from mscheduler_sync._stages.quarantine import Quarantine
from mscheduler_sync._storage import statements
from mscheduler_sync._storage.codec import envelope
from mscheduler_sync._storage.store import TaskStore
from mscheduler_sync.errors import InvalidTask

_log = logger("fetch")

#: Documents per page of the sweep, and keys of one statement.
_PAGE, _CHUNK = 1000, 100
_SWEEP_INTERVAL_S: Final = 60.0
_UNDERIVED_PAGES: Final = 10


@attrs.define(eq=False, repr=False, kw_only=True)
class Adoption:
    """
    Repairs documents and offers what is claimable. Used by the fetcher's thread alone.
    """

    _store: TaskStore
    _intake: Intake
    _quarantine: Quarantine
    _undecodable: LogThrottle = attrs.field(init=False, factory=LogThrottle)
    _next_sweep_s: float = attrs.field(init=False, default=float("-inf"))

    def decode(self, documents: Iterable[RawBSONDocument]) -> Iterator[dict[str, Any]]:
        """
        Decode what can be decoded of *documents*.
        """
        for document in documents:
            try:
                yield envelope(document)
            except Exception as error:  # noqa: BLE001 - one document must not stop the others
                if self._undecodable.allows(bytes(document.raw[:64])):
                    _log.error(
                        "a document cannot be decoded", event="undecodable", error=str(error)[:300]
                    )

    def adopt_underived(self) -> None:
        after: object | None = None
        for _ in range(_UNDERIVED_PAGES):
            found = self._store.find(statements.discovery.underived(after_id=after, limit=_CHUNK))
            for fields in self.decode(found):
                self.adopt(fields.get("key"))
            if len(found) < _CHUNK:
                return
            after = found[-1]["_id"]

    def adopt(self, key: object) -> None:
        """
        Derive what a document of another program lacks; queue it if it is claimable.
        """
        if not isinstance(key, str):
            self._quarantine.add(repr(key)[:200], "its key is not a string")
            return
        if key in self._quarantine:
            return
        matched, _ = self._store.update(statements.attempts.repair([key]))
        if not matched:
            # Perhaps because it cannot be read.
            document = self._store.find_task(key)
            if document is not None:
                self._quarantine.check(document, self._store.codec_options)
            return
        for fields in self.decode(self._store.find(statements.discovery.discovered_by_key([key]))):
            self._intake.offer_if_near(fields)

    def sweep_now_and_then(self, *, is_stopping: Callable[[], bool]) -> None:
        """
        Page over the unfinished documents of a shared collection and repair stale ones.
        """
        if time.monotonic() < self._next_sweep_s:
            return
        self._next_sweep_s = time.monotonic() + _SWEEP_INTERVAL_S
        after = ""
        while not is_stopping():
            found = self._store.find(statements.discovery.unfinished(after_key=after, limit=_PAGE))
            stale = [str(fields["key"]) for fields in self.decode(found) if self._is_stale(fields)]
            for start in range(0, len(stale), _CHUNK):
                self._store.update_batch(statements.attempts.repair, stale[start : start + _CHUNK])
            if len(found) < _PAGE:
                return
            after = str(found[-1]["key"])

    def _is_stale(self, fields: Mapping[str, Any]) -> bool:
        key = fields.get("key")
        if not isinstance(key, str):
            return False
        try:
            derived = model.derive(fields, model.read_attempts(fields))
        except InvalidTask as error:
            self._quarantine.add(key, error)
            return False
        return derived != (fields.get("status"), fields.get("due"))
