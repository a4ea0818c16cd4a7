"""
Turns due keys into attempts: takes slots, claims in batches, reads back what was won.
"""

from __future__ import annotations

import datetime as dt
import random
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from bson.raw_bson import RawBSONDocument
from cachetools import TTLCache

from mscheduler_sync import model
from mscheduler_sync._runtime.crash_points import reach
from mscheduler_sync._runtime.delay_queue import DelayQueue, Entry
from mscheduler_sync._runtime.log import logger
from mscheduler_sync._runtime.service import CrashHandler, Service
from mscheduler_sync._runtime.slots import Slots
from mscheduler_sync._stages.attempt import HeldAttempt, Released
from mscheduler_sync._stages.candidates import Candidates, Lanes
from mscheduler_sync._stages.outcome import OutcomeWriter
from mscheduler_sync._storage import statements
from mscheduler_sync._storage.codec import envelope
from mscheduler_sync._storage.statements import Ref, Update
from mscheduler_sync._storage.store import TaskStore, Together
from mscheduler_sync.errors import InvalidTask, StoreError, StoreRejected
from mscheduler_sync.events import EventHub, TaskOccupyResult, WaitOccupyQueueEmpty

_log = logger("claim")
_T = TypeVar("_T")

#: The most claims in one bulk: its cost at the server grows with the list of keys.
BATCH: Final = 100
#: While slots are busy, a claim waits this long for more of them to get free, in seconds.
GATHER_S: Final = 0.004
_IDLE_WAIT_S: Final = 60.0
_CANNOT_START_PAUSE_S: Final = 1.0
#: Longer ago than any heartbeat interval, an outage need not be spoken of, in seconds.
_OUTAGE_MEMORY_S: Final = 3600.0
#: Bounds of the wait that grows with one's own lost claims, in seconds.
_CONTENTION_FIRST_S, _CONTENTION_CAP_S = 0.02, 1.0
#: A lone key that is lost doubles the wait and one that is won halves it: whatever the number of
#: idle consumers, their waits settle where about one claim per task is lost among all of them.
_CALM_ONE, _CALM_MANY = 0.5, 0.9
_SPREAD_FIRST, _SPREAD_CAP = 64, 2000
#: A claim that the server refuses so often is given up for now.
_TRIES_IF_REFUSED: Final = 3


class Claimer(Service):
    """
    The claimer's thread; see the module. It is the delay queue's only taker.
    """

    def __init__(
        self,
        store: TaskStore,
        lanes: Lanes,
        queue: DelayQueue,
        slots: Slots,
        candidates: Candidates,
        hub: EventHub,
        writer: OutcomeWriter,
        *,
        margin_s: float | None,
        value_limit_bytes: int,
        start: Callable[[HeldAttempt], bool],
        holds: Callable[[str], bool],
        on_low: Callable[[], None],
        on_gap: Callable[[], None],
        on_crash: CrashHandler,
    ) -> None:
        super().__init__("claim", f"ms-claim:{lanes.worker_id}", _log, on_crash)
        self._store = store
        self._lanes = lanes
        self._queue = queue
        self._slots = slots
        self._candidates = candidates
        self._hub = hub
        self._writer = writer
        self._margin_s = margin_s
        self._value_limit_bytes = value_limit_bytes
        self._start = start
        self._holds = holds
        self._on_low = on_low
        self._on_gap = on_gap
        # Of this thread alone.
        self._contention_s = 0.0
        self._spread = 0
        self._cannot_start = False
        self._lost_before: TTLCache[str, int] = TTLCache(1000, 60.0, timer=time.monotonic)

    # -- the thread --------------------------------------------------------------------------

    def step(self) -> None:
        if self._cannot_start:
            # No thread could be had: claiming at full speed would only pass tasks around.
            self._cannot_start = False
            self.pause(_CANNOT_START_PAUSE_S)
        free = self._free_slots()
        if not free or self.stopping:
            return
        # While others compete, one look at many keys is cheaper than as many lost claims.
        wanted = BATCH if self._contention_s > 0.0 else min(free, BATCH)
        entries = self._queue.take(wanted, _IDLE_WAIT_S, spread=self._spread)
        if not entries or self.stopping:
            return
        left = len(self._queue)
        if left == 0:
            self._hub.publish(WaitOccupyQueueEmpty())
        if left < max(2 * self._slots.size, BATCH):
            self._on_low()
        # A lease that lapsed while the store was slow is ours to renew, not to take over: the
        # function runs here, or its outcome is on its way. The key is looked at again then.
        entries = [entry for entry in entries if not self._holds(entry.key)]
        done = False
        try:
            if self._contention_s > 0.0 and entries:
                entries = self._still_due(entries)
            # The number of slots may have been lowered while we waited for keys.
            free = min(free, self._slots.free)
            for entry in entries[free:]:
                self._queue.push(entry.key, entry.due_s, entry.priority)
            if entries and free and not self.stopping:
                self._claim(entries[:free])
            done = True
        finally:
            if not done:
                # The queue has forgotten these keys; a pass finds them again.
                self._on_gap()

    def _free_slots(self) -> int:
        free = self._slots.wait_free(_IDLE_WAIT_S)
        wanted = min(self._queue.count_due(), self._slots.size, BATCH) if free else 0
        if wanted > free:
            # More tasks than slots: claims that share a round trip cost less.
            free = max(free, self._slots.wait_free(GATHER_S, at_least=wanted))
        return free

    def _still_due(self, entries: Sequence[Entry]) -> list[Entry]:
        """
        After lost claims: leave what others have taken meanwhile; a single key after a random wait.
        """
        if len(entries) == 1:
            self.pause(random.random() * self._contention_s)
        now = self._store.clock.now()
        due_keys = set()
        for document in self._store.find(
            statements.discovered_by_key([entry.key for entry in entries])
        ):
            fields = envelope(document)
            due = fields.get("due")
            if due is None or due <= now:
                due_keys.add(fields.get("key"))
        if len(entries) > 1:
            self._calm(_CALM_MANY)
        return [entry for entry in entries if entry.key in due_keys]

    def _calm(self, factor: float) -> None:
        calmed_s = self._contention_s * factor
        self._contention_s = calmed_s if calmed_s > _CONTENTION_FIRST_S / 2 else 0.0

    # -- one batch ---------------------------------------------------------------------------

    def _claim(self, entries: Sequence[Entry]) -> None:
        batch = uuid.uuid4().hex
        refs = [(entry.key, f"{batch}-{number}") for number, entry in enumerate(entries)]
        self._slots.take(len(refs))
        unused = len(refs)
        try:
            sent_at_s = time.monotonic()
            try:
                refused = self._send(refs)
                reach("after_claim")
                documents = self._read_back(refs)
            except StoreError:
                # Stopping before the outcome is known: give back what may have been won.
                for key, running_id in refs:
                    self._give_back(key, running_id, Released("shutdown"))
                raise
            for key, running_id in refs:
                document = documents.get(key)
                if document is not None and self._begin(key, running_id, document, sent_at_s):
                    unused -= 1
        finally:
            self._slots.give_back(unused)
        self._learn_of_losses([key for key, _ in refs], documents, refused)

    def _send(self, refs: Sequence[Ref]) -> set[str]:
        """
        Run the claims until the server has answered; return the keys that it refused.
        """

        def make(some: Sequence[Ref]) -> Update:
            # Made anew for each try: the time since an outage is part of it.
            since_outage_s = self._store.since_outage_s()
            is_recent = since_outage_s < _OUTAGE_MEMORY_S
            return statements.claim(
                some,
                self._lanes.worker_id,
                names=self._lanes.names,
                elapsed_since_outage_ms=round(since_outage_s * 1000) if is_recent else None,
                sent_at=self._store.clock.now(),
            )

        tries = 0

        def send() -> Together:
            nonlocal tries
            tries += 1
            try:
                return self._store.update_together(make, refs)
            except StoreRejected as error:
                if tries < _TRIES_IF_REFUSED:
                    raise
                # Whatever it is, it must not stand before all other tasks for ever.
                return Together(0, dict.fromkeys(range(len(refs)), str(error)))

        result = self._until_answered(refs, send)
        for position, problem in result.errors.items():
            self._candidates.set_aside(refs[position][0], problem)
        return {refs[position][0] for position in result.errors}

    def _read_back(self, refs: Sequence[Ref]) -> dict[str, RawBSONDocument]:
        query = statements.claimed(refs)
        found = self._until_answered(refs, lambda: self._store.find(query))
        return {str(document["key"]): document for document in found}

    def _until_answered(self, refs: Sequence[Ref], call: Callable[[], _T]) -> _T:
        """
        Repeat *call* through any trouble of the database; a claim may be repeated at will.

        Raises:
            StoreError: If the stop was asked for before an answer came.
        """
        while True:
            try:
                answer = call()
            except StoreError as error:
                if self.health.failures_in_a_row == 0:
                    for key, _ in refs:
                        self._hub.publish(TaskOccupyResult(key=key, success=False))
                self._after_store_error(error)
                if self.stopping:
                    raise
            else:
                self.health.note_success()
                return answer

    def _begin(
        self, key: str, running_id: str, document: RawBSONDocument, sent_at_s: float
    ) -> bool:
        """
        Start the attempt if it was won; return whether a slot went with it.
        """
        try:
            fields = model.decode_fields(document)
            attempts = model.read_attempts(fields)
            options = model.read_options(fields)
        except InvalidTask as error:
            self._give_back(key, running_id, Released("late"))
            self._candidates.set_aside(key, f"{error.path} {error.problem}")
            return False
        mine = next((a for a in attempts if a.running_id == running_id), None)
        if any(a.worker_id != self._lanes.worker_id for a in attempts):
            self._candidates.note_other_worker()
        if mine is None or not mine.is_open:
            return False
        name = fields.get("name")
        deadline = None
        if options.timeout is not None and self._store.clock.offset_s is not None:
            deadline = self._store.clock.at(time.monotonic() + options.timeout)
        attempt = HeldAttempt(
            key=key,
            name=name if isinstance(name, str) else None,
            running_id=running_id,
            worker_id=self._lanes.worker_id,
            number=1 + sum(1 for a in attempts if a.failed_at is not None),
            options=options,
            document=document,
            claimed_at_s=sent_at_s,
            margin_s=self._margin_s,
            value_limit_bytes=self._value_limit_bytes,
            codec_options=self._store.codec_options,
            deadline=deadline,
        )
        if self.stopping or time.monotonic() >= attempt.held_until_s:
            why = Released("shutdown" if self.stopping else "late")
            self._give_back(key, running_id, why)
            return False
        self._lost_before.pop(key, None)
        _log.debug(
            "a task was claimed",
            extra={
                "event": "claimed",
                "worker_id": self._lanes.worker_id,
                "task_key": key,
                "running_id": running_id,
                "attempt": attempt.number,
            },
        )
        self._hub.publish(TaskOccupyResult(key=key, success=True))
        reach("before_submit")
        if not self._start(attempt):
            self._cannot_start = True
        return True

    def _give_back(self, key: str, running_id: str, why: Released) -> None:
        """
        Release a claim that does not become an attempt; by ourselves if the stop is over already.
        """
        if self._writer.release(key, running_id, why):
            return
        try:
            self._store.update(statements.release([(key, running_id)]))
        except StoreError as error:
            _log.warning(
                "a late claim could not be given back; its lease has to end first",
                extra={
                    "event": "claim_left",
                    "worker_id": self._lanes.worker_id,
                    "task_key": key,
                    "running_id": running_id,
                    "error": str(error),
                },
            )

    def _learn_of_losses(
        self,
        keys: Sequence[str],
        documents: dict[str, RawBSONDocument],
        refused: set[str],
    ) -> None:
        lost = [key for key in keys if key not in documents and key not in refused]
        if not lost:
            self._calm(_CALM_MANY if len(keys) > 1 else _CALM_ONE)
            self._spread = self._spread // 2 if self._spread > _SPREAD_FIRST else 0
            return
        _log.debug(
            "claims were lost",
            extra={"event": "claims_lost", "worker_id": self._lanes.worker_id, "count": len(lost)},
        )
        self._candidates.note_other_worker()
        # A key that is lost again and again is not for us: nobody competes for it.
        fresh = [key for key in lost if key not in self._lost_before]
        if 2 * len(fresh) >= len(keys):
            grown_s = max(_CONTENTION_FIRST_S, 2 * self._contention_s)
            self._contention_s = min(_CONTENTION_CAP_S, grown_s)
            self._spread = min(_SPREAD_CAP, max(_SPREAD_FIRST, 2 * self._spread))
        self._offer_later_ones(lost)
        suspicious = []
        for key in lost:
            times = self._lost_before.get(key, 0) + 1
            self._lost_before[key] = times
            if times > 1:
                suspicious.append(key)
        if suspicious:
            self._inspect(suspicious[:BATCH])

    def _offer_later_ones(self, keys: Sequence[str]) -> None:
        """
        Of lost keys: queue those again that are to come up within the horizon.
        """
        now = self._store.clock.now()
        until = self._store.clock.at(time.monotonic() + self._candidates.horizon_s())
        for document in self._store.find(statements.discovered_by_key(keys)):
            fields = envelope(document)
            due = fields.get("due")
            if isinstance(due, dt.datetime) and now < due <= until:
                self._candidates.offer(fields)

    def _inspect(self, keys: Sequence[str]) -> None:
        """
        Keys that were lost again and again: are their documents readable at all?
        """
        for document in self._store.find(statements.whole(keys)):
            try:
                model.read_task(document, self._store.codec_options)
            except InvalidTask as error:
                self._candidates.set_aside(
                    str(document.get("key")), f"{error.path} {error.problem}"
                )

    def request_stop(self) -> None:
        super().request_stop()
        self._queue.close()
        self._slots.close()
