"""
The change stream over the jobs: hints for the node's control thread and for waiting callers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

import attrs

from mscheduler_sync._runtime.log import logger
from mscheduler_sync._runtime.service import CrashHandler
from mscheduler_sync._storage.stream import StreamReader
from mscheduler_sync.pool import statements
from mscheduler_sync.pool.store import PoolStore
from mscheduler_sync.pool.waiting import Waiters

_log = logger("watch")

#: Shown of updates only; a whole document always has the first.
_MAIL: Final = frozenset({"inbox_seq", "stop"})


@attrs.frozen
class Step:
    """
    What a change event says of a job; None where it does not say.
    """

    job_id: str
    #: None also when the job is gone.
    state: str | None
    gone: bool = False
    is_new: bool = False
    has_mail: bool = False
    #: A date, in a healthy document.
    not_before: object = None
    epoch: object = None


class Listener(Protocol):
    """
    Who is told; the node's control thread.
    """

    def note(self, step: Step) -> None: ...

    def look_around(self) -> None: ...


class PoolWatcher(StreamReader):
    """
    The change stream's thread; see the module.
    """

    def __init__(
        self,
        store: PoolStore,
        pool: str,
        node: str,
        *,
        waiters: Waiters,
        listener: Listener | None,
        on_crash: CrashHandler,
    ) -> None:
        super().__init__(
            store.jobs,
            statements.watch_pipeline(pool, verdicts_only=listener is None),
            owner_id=node,
            log=_log,
            on_crash=on_crash,
        )
        self._prefix = pool + statements.SEPARATOR
        self._waiters = waiters
        self._listener = listener

    def on_open(self) -> None:
        self._look_around()

    def on_close(self) -> None:
        self._look_around()

    def _look_around(self) -> None:
        self._waiters.poke_all()
        if self._listener is not None:
            self._listener.look_around()

    def take(self, event: Mapping[str, Any]) -> None:
        document_key = event.get("documentKey")
        job_id = document_key.get("_id") if isinstance(document_key, Mapping) else None
        if not isinstance(job_id, str) or not job_id.startswith(self._prefix):
            return
        changed = event.get("updateDescription")
        fields = changed.get("updatedFields") if isinstance(changed, Mapping) else None
        if not isinstance(fields, Mapping):
            fields = event.get("fullDocument")
        if not isinstance(fields, Mapping):
            fields = {}
        state, answered = fields.get("state"), fields.get("answered")
        is_new = event.get("operationType") == "insert"
        if self._listener is not None:
            self._listener.note(
                Step(
                    job_id,
                    state if isinstance(state, str) else None,
                    gone=event.get("operationType") == "delete",
                    is_new=is_new,
                    has_mail=fields.get("mail") is True or not fields.keys().isdisjoint(_MAIL),
                    not_before=fields.get("not_before"),
                    epoch=fields.get("epoch"),
                )
            )
        if not is_new and state not in statements.ON_THE_WAY:
            self._waiters.poke(job_id, answered if isinstance(answered, str) else None)
