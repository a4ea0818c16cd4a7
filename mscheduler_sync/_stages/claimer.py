"""
Turns due keys into attempts: takes slots, claims in batches, reads back what was won.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from mscheduler_sync import model
from mscheduler_sync._runtime.crash_points import reach
from mscheduler_sync._runtime.delay_queue import DelayQueue, Entry
from mscheduler_sync._runtime.log import logger
from mscheduler_sync._runtime.service import CrashHandler, Service
from mscheduler_sync._runtime.slots import Slots
from mscheduler_sync._stages.attempt import HeldAttempt, Released
from mscheduler_sync._stages.contention import Contention
from mscheduler_sync._stages.horizon import Horizon
from mscheduler_sync._stages.intake import Intake
from mscheduler_sync._stages.outcome import OutcomeWriter
from mscheduler_sync._stages.quarantine import Quarantine
from mscheduler_sync._stages.routes import Routes
from mscheduler_sync._storage import statements
from mscheduler_sync._storage.claims import ClaimBatch, Won, hint_of
from mscheduler_sync._storage.codec import envelope
from mscheduler_sync._storage.store import TaskStore
from mscheduler_sync.errors import InvalidTask, StoreError
from mscheduler_sync.events import EventHub, TaskOccupyResult, WaitOccupyQueueEmpty

_log = logger("claim")

#: The most claims in one bulk: its cost at the server grows with the list of keys.
BATCH: Final = 100
#: While slots are busy, a claim waits this long for more of them to get free, in seconds.
GATHER_S: Final = 0.004
_IDLE_WAIT_S: Final = 60.0
_CANNOT_START_PAUSE_S: Final = 1.0


class Claimer(Service):
    """
    The claimer's thread; see the module. It is the delay queue's only taker.
    """

    def __init__(
        self,
        store: TaskStore,
        routes: Routes,
        queue: DelayQueue,
        slots: Slots,
        intake: Intake,
        quarantine: Quarantine,
        horizon: Horizon,
        hub: EventHub,
        writer: OutcomeWriter,
        contention: Contention,
        *,
        margin_s: float | None,
        value_limit_bytes: int,
        start: Callable[[HeldAttempt], bool],
        holds: Callable[[str], bool],
        on_low: Callable[[], None],
        on_gap: Callable[[], None],
        on_crash: CrashHandler,
    ) -> None:
        super().__init__("claim", f"ms-claim:{routes.worker_id}", _log, on_crash)
        self._store = store
        self._routes = routes
        self._queue = queue
        self._slots = slots
        self._intake = intake
        self._quarantine = quarantine
        self._horizon = horizon
        self._hub = hub
        self._writer = writer
        self._margin_s = margin_s
        self._value_limit_bytes = value_limit_bytes
        self._start = start
        self._holds = holds
        self._on_low = on_low
        self._on_gap = on_gap
        # Of this thread alone.
        self._contention = contention
        self._cannot_start = False

    # -- the thread --------------------------------------------------------------------------

    def step(self) -> None:
        if self._cannot_start:
            # No thread could be had: claiming at full speed would only pass tasks around.
            self._cannot_start = False
            self.pause(_CANNOT_START_PAUSE_S)
        free = self._free_slots()
        if not free or self.stopping:
            return
        # While others compete, one query about many keys is cheaper than as many lost claims.
        wanted = BATCH if self._contention.is_felt else min(free, BATCH)
        entries = self._queue.take(wanted, _IDLE_WAIT_S, spread=self._contention.spread)
        if not entries or self.stopping:
            return
        try:
            with self._intake.claiming([entry.key for entry in entries]):
                self._claim_entries(entries, free)
        except BaseException:
            # The queue has forgotten these keys; a pass finds them again.
            self._on_gap()
            raise

    def _claim_entries(self, entries: Sequence[Entry], free: int) -> None:
        """
        Claim as many of *entries* as there are slots for; the others go back to the queue.
        """
        if len(self._queue) == 0:
            self._hub.publish(WaitOccupyQueueEmpty())
        if self._queue.count_due() < max(2 * self._slots.size, BATCH):
            self._on_low()
        # A lease that lapsed while the store was slow is ours to renew, not to take over: the
        # function runs here, or its outcome is on its way. The key is requeued after that.
        entries = [entry for entry in entries if not self._holds(entry.key)]
        if entries and (self._contention.is_felt or entries[0].defer_s):
            entries = self._still_due(entries)
        # The number of slots may have been lowered while we waited for keys.
        free = min(free, self._slots.free)
        for entry in entries[free:]:
            self._queue.push(entry.key, entry.due_s, entry.priority, hint=entry.hint)
        if entries and free and not self.stopping:
            self._claim(entries[:free])

    def _free_slots(self) -> int:
        free = self._slots.wait_free(_IDLE_WAIT_S)
        wanted = min(self._queue.count_due(), self._slots.size, BATCH) if free else 0
        if wanted > free:
            # More tasks than slots: claims that share a round trip cost less.
            free = max(free, self._slots.wait_free(GATHER_S, at_least=wanted))
        return free

    def _still_due(self, entries: Sequence[Entry]) -> list[Entry]:
        """
        After lost claims: leave what others have taken meanwhile. A lone key that was not to be
        left to others is claimed without a look.
        """
        if len(entries) == 1 and not entries[0].defer_s:
            return list(entries)
        now = self._store.clock.now()
        still_due = {}
        for document in self._store.find(
            statements.discovered_by_key([entry.key for entry in entries])
        ):
            fields = envelope(document)
            due = fields.get("due")
            if due is None or due <= now:
                still_due[fields.get("key")] = hint_of(fields)
        gone = len(entries) - len(still_due)
        self._contention.looked(len(entries), gone=gone)
        entries = [entry for entry in entries if entry.key in still_due]
        for entry in entries:
            entry.hint = still_due[entry.key]
        return entries

    # -- one batch ---------------------------------------------------------------------------

    def _claim(self, entries: Sequence[Entry]) -> None:
        claims = ClaimBatch(
            self._store,
            {entry.key: entry.hint for entry in entries},
            self._routes.worker_id,
            self._routes.names,
        )
        unused = len(entries)
        self._slots.take(unused)
        try:
            while not claims.is_over:
                for won in self._proceed(claims):
                    unused -= self._begin(won, claims.sent_at_s)
        finally:
            self._slots.give_back(unused)
        self._contention.claim_took(claims.took_s)
        for key, problem in claims.refused.items():
            self._quarantine.add(key, problem)
        for (key, running_id), error in claims.unreadable:
            self._give_back(key, running_id, Released("late"))
            self._quarantine.add(key, f"{error.path} {error.problem}")
        if claims.lost:
            self._learn_of_losses(claims.lost, of=len(entries))
        else:
            self._contention.won([entry.key for entry in entries])

    def _proceed(self, claims: ClaimBatch) -> list[Won]:
        """
        Take the next step of *claims* through any trouble of the database.

        Raises:
            StoreError: If the stop was asked for before an answer came.
        """
        while True:
            try:
                won = claims.proceed()
            except StoreError as error:
                if self.health.failures_in_a_row == 0:
                    for key, _ in claims.undecided:
                        self._hub.publish(TaskOccupyResult(key=key, success=False))
                self._after_store_error(error)
                if self.stopping:
                    # Give back what may have been won.
                    for key, running_id in claims.undecided:
                        self._give_back(key, running_id, Released("shutdown"))
                    raise
            else:
                self.health.note_success()
                return won

    def _begin(self, won: Won, sent_at_s: float) -> bool:
        """
        Start the attempt if it is open; return whether a slot went with it.
        """
        key, running_id = won.key, won.running_id
        attempts, options = won.attempts, won.options
        mine = next((a for a in attempts if a.running_id == running_id), None)
        if any(a.worker_id != self._routes.worker_id for a in attempts):
            self._intake.record_other_worker()
        if mine is None or not mine.is_open:
            return False
        name = won.fields.get("name")
        deadline = None
        if options.timeout is not None and self._store.clock.offset_s is not None:
            deadline = self._store.clock.at(time.monotonic() + options.timeout)
        attempt = HeldAttempt(
            key=key,
            name=name if isinstance(name, str) else None,
            running_id=running_id,
            worker_id=self._routes.worker_id,
            number=1 + sum(1 for a in attempts if a.failed_at is not None),
            hint=won.hint,
            options=options,
            document=won.document,
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
        _log.debug(
            "a task was claimed",
            extra={
                "event": "claimed",
                "worker_id": self._routes.worker_id,
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
                    "worker_id": self._routes.worker_id,
                    "task_key": key,
                    "running_id": running_id,
                    "error": str(error),
                },
            )

    def _learn_of_losses(self, lost: Mapping[str, Mapping[str, Any] | None], *, of: int) -> None:
        now = self._store.clock.now()
        until = self._horizon.end(self._store.clock)
        for fields in lost.values():
            due = None if fields is None else fields.get("due")
            if fields is not None and isinstance(due, dt.datetime) and now < due <= until:
                self._intake.offer(fields)
        _log.debug(
            "claims were lost",
            extra={"event": "claims_lost", "worker_id": self._routes.worker_id, "count": len(lost)},
        )
        self._intake.record_other_worker()
        lost_before = self._contention.lost(list(lost), of=of)
        if lost_before:
            self._inspect(lost_before[:BATCH])

    def _inspect(self, keys: Sequence[str]) -> None:
        """
        Keys that were lost again and again: are their documents readable at all?
        """
        for document in self._store.find(statements.whole(keys)):
            try:
                model.read_task(document, self._store.codec_options)
            except InvalidTask as error:
                self._quarantine.add(str(document.get("key")), f"{error.path} {error.problem}")

    def request_stop(self) -> None:
        super().request_stop()
        self._queue.close()
        self._slots.close()
