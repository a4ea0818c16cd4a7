"""
A batch of claims, from sending it to knowing what became of each.

Nearly every task is plain: for one worker, and at its first try. `statements.plain` has short
statements for those; whether they serve is decided here and in `TaskStore.succeed` alone. What
discovery and claim have seen of a task is carried back to these as a *hint*, which nobody
else reads. A hint that is wrong or old costs a statement more, nothing else.
"""

from __future__ import annotations

import datetime as dt
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
from bson.raw_bson import RawBSONDocument

from mscheduler_sync import model
from mscheduler_sync._runtime.crash_points import reach
from mscheduler_sync._storage import statements
from mscheduler_sync._storage.codec import envelope
from mscheduler_sync._storage.mongo_store import BatchResult
from mscheduler_sync._storage.statement import Update
from mscheduler_sync._storage.statements.attempts import Ref
from mscheduler_sync._storage.store import PLAIN, TaskStore
from mscheduler_sync.errors import InvalidTask, StoreRejected
from mscheduler_sync.model import Attempt, Ended, TaskOptions

#: Longer ago than any heartbeat interval, an outage need not be spoken of, in seconds.
_OUTAGE_MEMORY_S: Final = 3600.0
#: A claim that the server refuses so often is given up for now.
_TRIES_IF_REFUSED: Final = 3


def hint_of(fields: Mapping[str, Any]) -> object:
    """
    What a `ClaimBatch` wants to be told of a document that was discovered as *fields*.
    """
    state, option = fields.get("task_state"), fields.get("task_option")
    is_plain = (
        isinstance(state, Mapping)
        and isinstance(option, Mapping)
        and state.get("worker_states") == []
        and option.get("concurrent_worker_cnt") == 1
    )
    return PLAIN if is_plain else None


@attrs.frozen
class Won:
    """
    An attempt that stands in its task, as that was read back and decoded.
    """

    key: str
    running_id: str
    document: RawBSONDocument
    fields: Mapping[str, Any]
    attempts: tuple[Attempt, ...]
    options: TaskOptions
    #: For `TaskStore.succeed`.
    hint: object


class ClaimBatch:
    """
    Claims of one attempt for each of some tasks. For one thread.

    *hints* are those that `hint_of` made when the tasks were discovered, by key.
    """

    def __init__(
        self,
        store: TaskStore,
        hints: Mapping[str, object],
        worker_id: str,
        names: Sequence[str | None] | None,
    ) -> None:
        self._store = store
        self._worker_id = worker_id
        self._names = names
        batch = uuid.uuid4().hex
        self._running_ids = {key: f"{batch}-{number}" for number, key in enumerate(hints)}
        self._is_short = all(hint == PLAIN for hint in hints.values())
        self._tries = 0
        self._next: Callable[[], list[Won]] | None = self._send
        #: Sent or to be sent, and not known yet: these may have been won.
        self.undecided: list[Ref] = list(self._running_ids.items())
        #: Key -> what the server says.
        self.refused: dict[str, str] = {}
        #: Claims that may have been won, and what is wrong with their documents.
        self.unreadable: list[tuple[Ref, InvalidTask]] = []
        #: Key -> how the task stands now, or None if it is gone.
        self.lost: dict[str, Mapping[str, Any] | None] = {}
        #: When what is undecided was sent first, on the monotonic clock.
        self.sent_at_s = float("-inf")
        #: From the first sending until the first was known, in seconds.
        self.took_s = 0.0

    @property
    def keys(self) -> list[str]:
        return list(self._running_ids)

    @property
    def ended(self) -> dict[str, Ended]:
        """
        Key -> status of the lost tasks that these very claims have ended: they settled the last
        attempt, whose lease was over.
        """
        found = {
            key: model.ended_by(fields, self._running_ids[key])
            for key, fields in self.lost.items()
            if fields is not None
        }
        return {key: status for key, status in found.items() if status is not None}

    @property
    def is_over(self) -> bool:
        """
        Whether there is nothing left to `proceed` with.
        """
        return self._next is None

    def proceed(self) -> list[Won]:
        """
        Run the next statement, and return what it shows to be won; repeat that until `is_over`.

        Raises:
            StoreError: The statement comes next again; it may be repeated at will.
        """
        return [] if self._next is None else self._next()

    def _send(self) -> list[Won]:
        if not self._tries:
            self.sent_at_s = time.monotonic()
        self._tries += 1
        try:
            result = self._store.update_batch(self._statement, self.undecided)
        except StoreRejected as error:
            if self._tries < _TRIES_IF_REFUSED:
                raise
            # Whatever it is, it must not stand before all other tasks for ever.
            result = BatchResult(0, dict.fromkeys(range(len(self.undecided)), str(error)))
        for position, problem in result.errors.items():
            self.refused[self.undecided[position][0]] = problem
        self._next = self._read_back
        return []

    def _statement(self, refs: Sequence[Ref]) -> Update:
        now = self._store.clock.now()
        if self._is_short:
            return statements.plain.claim_plain(
                refs, self._worker_id, names=self._names, sent_at=now
            )
        # Made anew for each try: the time since an outage is part of it.
        since_outage_s = self._store.since_outage_s()
        is_recent = since_outage_s < _OUTAGE_MEMORY_S
        return statements.attempts.claim(
            refs,
            self._worker_id,
            names=self._names,
            elapsed_since_outage_ms=round(since_outage_s * 1000) if is_recent else None,
            sent_at=now,
        )

    def _read_back(self) -> list[Won]:
        reach("after_claim")
        found = self._store.find(statements.attempts.claimed(self.undecided))
        self.took_s = self.took_s or time.monotonic() - self.sent_at_s
        lost: dict[str, Mapping[str, Any] | None] = dict.fromkeys(key for key, _ in self.undecided)
        won: dict[str, Won] = {}
        for document in found:
            key = str(document["key"])
            if key not in lost:
                # An array that holds the key.
                continue
            ref = (key, self._running_ids[key])
            try:
                fields = model.decode_fields(document)
                attempts = model.read_attempts(fields)
                if any(attempt.running_id == ref[1] for attempt in attempts):
                    won[key] = _won(ref, document, fields, attempts)
                else:
                    lost[key] = fields
            except InvalidTask as error:
                self.unreadable.append((ref, error))
        for key in (*won, *self.refused, *(key for (key, _), _ in self.unreadable)):
            lost.pop(key, None)
        self.lost.update(lost)
        # A lone task is shown in any case.
        is_shown = len(self.undecided) == 1
        self.undecided = []
        self._next = None
        if lost and is_shown:
            self._choose_again()
        elif lost:
            self._next = self._read_lost
        return list(won.values())

    def _read_lost(self) -> list[Won]:
        """
        Read how the lost tasks stand now.
        """
        unseen = [key for key, fields in self.lost.items() if fields is None]
        for document in self._store.find(statements.discovery.discovered_by_key(unseen)):
            fields = envelope(document)
            if (key := str(fields.get("key"))) in self.lost:
                self.lost[key] = fields
        self._choose_again()
        return []

    def _choose_again(self) -> None:
        """
        What the short statement did not take, and is due all the same, is left to the general one.
        """
        self._next = None
        if not self._is_short:
            return
        self._is_short = False
        now = self._store.clock.now()
        for key, fields in list(self.lost.items()):
            due = None if fields is None else fields.get("due")
            if isinstance(due, dt.datetime) and due <= now:
                del self.lost[key]
                self.undecided.append((key, self._running_ids[key]))
        if self.undecided:
            self._tries = 0
            self._next = self._send


def _won(
    ref: Ref, document: RawBSONDocument, fields: Mapping[str, Any], attempts: tuple[Attempt, ...]
) -> Won:
    """
    Raises:
        InvalidTask: If an option is missing or of the wrong kind.
    """
    options = model.read_options(fields)
    # The task is for one worker, and had no other attempt.
    hint = PLAIN if len(attempts) == 1 and options.concurrency == 1 else None
    return Won(*ref, document, fields, attempts, options, hint)
