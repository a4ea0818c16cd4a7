"""
What recurs in a pool: at each period all nodes compete for a shared document, and one wins.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Final

import attrs

from mscheduler_sync._runtime.log import Log, logger
from mscheduler_sync._runtime.service import CrashHandler, Service
from mscheduler_sync._storage.statement import Document
from mscheduler_sync.pool import statements
from mscheduler_sync.pool.store import PoolStore
from mscheduler_sync.settings import deadline_after

_log = logger("pool")

#: The shared document is read again this often, in seconds: for a stop or another interval.
_REREAD_S: Final = 1.0
#: After a lost competition, in seconds: the winner, or the server's clock, was a moment ahead.
BEATEN_S: Final = 0.002


@attrs.define(eq=False, repr=False, kw_only=True)
class Recurring:
    """
    One thing that recurs, as this node takes part in it; the base of tickers and schedules.
    """

    _where: ClassVar[statements.recurring.Recurrent]
    _thread_prefix: ClassVar[str]

    name: str
    _store: PoolStore
    _interval_s: float
    _on_crash: CrashHandler
    thread: Service = attrs.field(init=False)
    _changed: threading.Condition = attrs.field(init=False, factory=threading.Condition)
    # Under _changed.
    _ended: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self.thread = _Thread(
            component=f"{self._where.removesuffix('s')}:{self.name}",
            thread_prefix=self._thread_prefix,
            owner_id=self.name,
            recurring=self,
            on_crash=self._on_crash,
        )

    @property
    def _id(self) -> str:
        return statements.full_id(self._store.pool, self.name)

    @property
    def is_ended(self) -> bool:
        """
        Whether it was stopped, here or elsewhere, or closed.
        """
        with self._changed:
            return self._ended

    def start(self) -> None:
        """
        Make the shared document, or change its interval, and compete from now on.
        """
        pool, interval_ms = self._store.pool, max(1, round(self._interval_s * 1000))
        self._store.update(
            statements.recurring.make(self._where, self._id, pool, self.name, interval_ms)
        )
        self.thread.start()

    def stop(self) -> None:
        """
        End it on all nodes. Jobs that a schedule has started go on.

        Raises:
            StoreError: The database did not answer; call it again.
        """
        self._store.delete(statements.recurring.remove(self._where, self._id))
        self.close()

    def close(self) -> None:
        """
        Take no more part; other nodes go on.
        """
        self.thread.request_stop()

    # -- called by the thread ----------------------------------------------------------------

    def _step(self) -> None:
        """
        Wait for the next period, and compete for it.
        """
        self._store.measure_clock()
        document = self._shared()
        if document is None:
            # Stopped, by somebody, for all.
            self.close()
            return
        if self._recover_win(document):
            return
        wait_s = self._store.clock.monotonic_at(document["next"]) - time.monotonic()
        self.thread.pause(min(wait_s, _REREAD_S))
        if wait_s <= _REREAD_S and not self.thread.stopping:
            self._compete(document)

    def _recover_win(self, document: Document) -> bool:  # noqa: ARG002 - a hook
        """
        Hook: make use of a win whose answer was lost; return whether there was one.
        """
        return False

    def _compete(self, document: Document) -> None:
        """
        The period that *document* tells has come: try to win it.
        """
        raise NotImplementedError

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _shared(self) -> Document | None:
        return self._store.read_one(statements.recurring.read(self._where, self._id))


@attrs.define(eq=False, repr=False, kw_only=True)
class _Thread(Service):
    """
    The thread of one thing that recurs.
    """

    longest_pause_s = 1.0

    log: Log = _log
    _recurring: Recurring

    def step(self) -> None:
        self._recurring._step()

    def request_stop(self) -> None:
        super().request_stop()
        self._recurring._end()


@attrs.frozen
class Tick:
    """
    One tick, won by this node.
    """

    #: Counts the ticks of this ticker over all nodes.
    number: int
    #: When it was due, by the server's clock; the first one, if some were missed.
    at: dt.datetime


@attrs.define(eq=False, repr=False, kw_only=True)
class Ticker(Recurring):
    """
    Ticks that this node has won: iterate, or `get` one by one. Made by `Node.ticker`.

    Who reads too late finds the last tick only. A callback, if given, gets all of them in the
    ticker's own thread; while it works, other nodes win.
    """

    _where = "tickers"
    _thread_prefix = "ms-tick"

    _callback: Callable[[Tick], Any] | None
    # Under _changed.
    _tick: Tick | None = attrs.field(init=False, default=None)
    #: A try whose answer was lost.
    _token: str | None = attrs.field(init=False, default=None)

    def get(self, timeout: float | None = None) -> Tick | None:
        """
        Return the next tick won here, waiting up to *timeout* seconds (None: for ever), else None.

        None also means that the ticker was stopped or closed.
        """
        deadline_s = deadline_after(timeout)
        with self._changed:
            while self._tick is None and not self._ended:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(min(left_s, _REREAD_S))
            tick, self._tick = self._tick, None
            return tick

    def __iter__(self) -> Iterator[Tick]:
        while (tick := self.get()) is not None:
            yield tick

    def _recover_win(self, document: Document) -> bool:
        token, self._token = self._token, None
        if token is None or document["winner"] != token:
            return False
        self._deliver(Tick(int(document["number"]), self._store.clock.now()))
        return True

    def _compete(self, document: Document) -> None:
        interval_ms, number = int(document["interval_ms"]), int(document["number"])
        token = uuid.uuid4().hex
        self._token = token
        _, changed = self._store.update(
            statements.recurring.tick(self._id, interval_ms, number, token)
        )
        self._token = None
        if changed:
            self._deliver(Tick(number + 1, document["next"]))
        else:
            self.thread.pause(BEATEN_S)

    def _deliver(self, tick: Tick) -> None:
        with self._changed:
            self._tick = tick
            self._changed.notify_all()
        if self._callback is None:
            return
        try:
            self._callback(tick)
        except Exception as error:  # noqa: BLE001 - the next tick comes nevertheless
            self.thread.health.note_error(error)
            _log.error(
                "the callback of a ticker has failed",
                event="callback_failed",
                exc_info=error,
                ticker=self.name,
            )
