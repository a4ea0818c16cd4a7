"""
Turns due keys into attempts: takes slots, claims in batches, starts what was won.

Stands between the delay queue, whose only taker it is, and the running attempts.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Sequence
from typing import Final, Literal

import attrs

from mscheduler_sync._runtime.crash_points import reach
from mscheduler_sync._runtime.delay_queue import DelayQueue, Entry
from mscheduler_sync._runtime.log import Log, logger
from mscheduler_sync._runtime.service import Service
from mscheduler_sync._runtime.slots import Slots
from mscheduler_sync._stages.attempt import HeldAttempt, Released
from mscheduler_sync._stages.claims import ClaimBatch, Won, hint_of
from mscheduler_sync._stages.contention import Contention
from mscheduler_sync._stages.intake import Intake
from mscheduler_sync._stages.outcome import OutcomeWriter
from mscheduler_sync._stages.quarantine import Quarantine
from mscheduler_sync._stages.routes import Routes
from mscheduler_sync._storage import statements
from mscheduler_sync._storage.codec import envelope
from mscheduler_sync._storage.statements.attempts import Ref
from mscheduler_sync._storage.store import TaskStore
from mscheduler_sync.errors import StoreError
from mscheduler_sync.events import (
    AttemptStarted,
    ClaimUndecided,
    EventHub,
    QueueEmpty,
    TaskFinished,
)

_log = logger("claim")

#: The most claims in one bulk: its cost at the server grows with the list of keys.
BATCH: Final = 100
#: While slots are busy, a claim waits this long for more of them to get free, in seconds.
GATHER_S: Final = 0.004
_IDLE_WAIT_S: Final = 60.0
_CANNOT_START_PAUSE_S: Final = 1.0


@attrs.define(eq=False, repr=False, kw_only=True)
class Claimer(Service):
    """
    The claimer's thread; see the module.
    """

    component: str = "claim"
    thread_prefix: str = "ms-claim"
    log: Log = _log
    _store: TaskStore
    _routes: Routes
    _queue: DelayQueue
    _slots: Slots
    _intake: Intake
    _quarantine: Quarantine
    _hub: EventHub
    _writer: OutcomeWriter
    _margin_s: float | None
    _value_limit_bytes: int
    #: Starts what was won; False if it could not be. `RunningAttempts.start`.
    _start: Callable[[HeldAttempt], bool]
    #: Whether an attempt of this key is here still. `RunningAttempts.holds`.
    _holds: Callable[[str], bool]
    #: The queue runs low of due keys. `Fetcher.queue_runs_low`.
    _on_low: Callable[[], None]
    #: Keys that the queue has handed out were forgotten. `Fetcher.request_pass`.
    _on_forgotten: Callable[[], None]
    #: There is nothing in the claimer's hands any more. `Drain.check`.
    _on_put_down: Callable[[], None]
    # Of this thread alone.
    _contention: Contention
    _cannot_start: bool = attrs.field(init=False, default=False)

    # -- the thread --------------------------------------------------------------------------

    def step(self) -> None:
        if self._cannot_start:
            # No thread could be had: claiming at full speed would only pass tasks around.
            self._cannot_start = False
            self.pause(_CANNOT_START_PAUSE_S)
        free = self._free_slots()
        if not free or self.stopping:
            return
        entries = self._due_entries(free)
        if not entries or self.stopping:
            return
        try:
            with self._intake.claiming([entry.key for entry in entries]):
                chosen = self._within_slots(self._still_due(entries), free)
                if chosen and not self.stopping:
                    self._claim(chosen)
        except BaseException:
            # The queue has forgotten these keys; a pass finds them again.
            self._on_forgotten()
            raise
        finally:
            self._queue.put_down()
            self._on_put_down()

    def _free_slots(self) -> int:
        free = self._slots.wait_free(_IDLE_WAIT_S)
        wanted = min(self._queue.count_due(), self._slots.size, BATCH) if free else 0
        if wanted > free:
            # More tasks than slots: claims that share a round trip cost less.
            free = max(free, self._slots.wait_free(GATHER_S, at_least=wanted))
        return free

    def _due_entries(self, free: int) -> list[Entry]:
        """
        Wait for due keys; say if the queue is empty, or runs low, without them.
        """
        # While others compete, one query about many keys is cheaper than as many lost claims.
        wanted = BATCH if self._contention.is_present else min(free, BATCH)
        entries = self._queue.take(wanted, _IDLE_WAIT_S, spread=self._contention.spread)
        if entries and not self.stopping:
            if self._hub.wants(QueueEmpty) and len(self._queue) == 0:
                self._hub.publish(QueueEmpty())
            if self._queue.count_due() < max(2 * self._slots.size, BATCH):
                self._on_low()
        return entries

    def _still_due(self, entries: Sequence[Entry]) -> list[Entry]:
        """
        Leave out what is held here; after lost claims, also what others have taken meanwhile.
        """
        # A lease that expired while the store was slow is ours to renew, not to take over: the
        # function runs here, or its outcome is on its way. The key is requeued after that.
        entries = [entry for entry in entries if not self._holds(entry.key)]
        is_deferred = bool(entries and entries[0].defer_s)
        # A lone key is checked only after it was left to others.
        if not (is_deferred or (self._contention.is_present and len(entries) > 1)):
            return entries
        now = self._store.clock.now()
        hints = {}
        query = statements.discovery.discovered_by_key([entry.key for entry in entries])
        for fields in map(envelope, self._store.find(query)):
            due = fields.get("due")
            if due is None or due <= now:
                hints[fields.get("key")] = hint_of(fields)
        self._contention.checked(len(entries), gone=len(entries) - len(hints))
        entries = [entry for entry in entries if entry.key in hints]
        for entry in entries:
            entry.hint = hints[entry.key]
        return entries

    def _within_slots(self, entries: Sequence[Entry], free: int) -> Sequence[Entry]:
        """
        Return to the queue what there is no slot for.
        """
        # The number of slots may have been lowered while we waited for keys.
        free = min(free, self._slots.free)
        for entry in entries[free:]:
            self._queue.push(entry.key, entry.due_s, entry.priority, hint=entry.hint)
        return entries[:free]

    # -- one batch ---------------------------------------------------------------------------

    def _claim(self, entries: Sequence[Entry]) -> None:
        claims = ClaimBatch(
            self._store,
            {entry.key: entry.hint for entry in entries},
            self.owner_id,
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
        for key, problem in claims.refused.items():
            self._quarantine.add(key, problem)
        for ref, error in claims.unreadable:
            self._give_back(ref, "late")
            self._quarantine.add(ref[0], error)
        self._learn(claims)

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
                        self._hub.publish(ClaimUndecided(key=key))
                self._after_store_error(error)
                if self.stopping:
                    # Give back what may have been won.
                    for ref in claims.undecided:
                        self._give_back(ref, "shutdown")
                    raise
            else:
                self.health.note_success()
                return won

    def _begin(self, won: Won, sent_at_s: float) -> bool:
        """
        Start the attempt if it is open; return whether a slot went with it.
        """
        if any(attempt.worker_id != self.owner_id for attempt in won.attempts):
            self._intake.record_other_worker()
        if not any(a.running_id == won.running_id and a.is_open for a in won.attempts):
            return False
        attempt = self._held(won, sent_at_s)
        if self.stopping or time.monotonic() >= attempt.trusted_until_s:
            self._give_back((won.key, won.running_id), "shutdown" if self.stopping else "late")
            return False
        _log.debug(
            "a task was claimed", event="claimed", **attempt.log_fields(), attempt=attempt.number
        )
        if self._hub.wants(AttemptStarted):
            self._hub.publish(AttemptStarted(key=attempt.key, running_id=attempt.running_id))
        reach("before_submit")
        if not self._start(attempt):
            self._cannot_start = True
        return True

    def _held(self, won: Won, sent_at_s: float) -> HeldAttempt:
        name, timeout = won.fields.get("name"), won.options.timeout
        clock = self._store.clock
        deadline = None
        if timeout is not None and clock.offset_s is not None:
            deadline = clock.at(time.monotonic() + timeout)
        return HeldAttempt(
            key=won.key,
            name=name if isinstance(name, str) else None,
            running_id=won.running_id,
            worker_id=self.owner_id,
            number=1 + sum(1 for attempt in won.attempts if attempt.failed_at is not None),
            hint=won.hint,
            options=won.options,
            document=won.document,
            claimed_at_s=sent_at_s,
            margin_s=self._margin_s,
            value_limit_bytes=self._value_limit_bytes,
            codec_options=self._store.codec_options,
            deadline=deadline,
        )

    def _give_back(self, ref: Ref, why: Literal["shutdown", "late"]) -> None:
        """
        Release a claim that does not become an attempt; by ourselves if the stop is over already.
        """
        key, running_id = ref
        if self._writer.release(key, running_id, Released(why)):
            return
        try:
            self._store.update(statements.attempts.release([ref]))
        except StoreError as error:
            _log.warning(
                "a late claim could not be given back; its lease has to end first",
                event="claim_left",
                worker_id=self.owner_id,
                task_key=key,
                running_id=running_id,
                error=str(error),
            )

    # -- what a batch teaches ----------------------------------------------------------------

    def _learn(self, claims: ClaimBatch) -> None:
        """
        Queue again what was lost and comes up soon; find out what is lost again and again.
        """
        self._contention.claim_took(claims.took_s)
        if not claims.lost:
            self._contention.won(claims.keys)
            return
        _log.debug(
            "claims were lost", event="claims_lost", worker_id=self.owner_id, count=len(claims.lost)
        )
        for key, status in claims.ended.items():
            self._hub.publish(TaskFinished(key=key, status=status))
        now = self._store.clock.now()
        for fields in claims.lost.values():
            due = None if fields is None else fields.get("due")
            if fields is not None and isinstance(due, dt.datetime) and due > now:
                self._intake.offer_if_near(fields)
        self._intake.record_other_worker()
        lost_before = self._contention.lost(list(claims.lost), of=len(claims.keys))
        if lost_before:
            # Are their documents readable at all?
            for document in self._store.find(statements.discovery.whole(lost_before[:BATCH])):
                self._quarantine.check(document, self._store.codec_options)

    def request_stop(self) -> None:
        super().request_stop()
        self._queue.close()
        self._slots.close()
