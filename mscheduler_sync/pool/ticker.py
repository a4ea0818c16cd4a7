"""
A tick that one node of the pool gets, at each period.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs

from mscheduler_sync._runtime.log import logger
from mscheduler_sync._runtime.service import CrashHandler, Service
from mscheduler_sync.events import deadline_after
from mscheduler_sync.pool import statements
from mscheduler_sync.pool.statements import Document
from mscheduler_sync.pool.store import PoolStore

_log = logger("pool")

#: The shared document is read again this often, in seconds: for a stop or another interval.
_LOOK_S: Final = 1.0
_SLICE_S: Final = 1.0


@attrs.frozen
class Tick:
    """
    One tick, won by this node.
    """

    #: Counts the ticks of this ticker over all nodes.
    number: int
    #: When it was due, by the server's clock; the first one, if some were missed.
    at: dt.datetime


class TickerThread(Service):
    """
    Competes for the ticks of one ticker. *deliver* is called in it; *on_end* once.
    """

    longest_pause_s = 1.0

    def __init__(
        self,
        store: PoolStore,
        ticker_id: str,
        name: str,
        *,
        deliver: Callable[[Tick], None],
        on_end: Callable[[], None],
        on_crash: CrashHandler,
    ) -> None:
        super().__init__(f"ticker:{name}", f"ms-tick:{name}", _log, on_crash)
        self._store = store
        self._id = ticker_id
        self._deliver = deliver
        self._on_end = on_end
        #: A try whose answer was lost.
        self._token: str | None = None
        self._asked = threading.Event()

    def step(self) -> None:
        self._store.measure_clock()
        document = self._store.read_one(statements.ticker(self._id))
        if document is None:
            # Stopped, by somebody, for all.
            self.request_stop()
            return
        if self._token is not None:
            token, self._token = self._token, None
            if document["winner"] == token:
                self._deliver(Tick(int(document["number"]), self._store.clock.now()))
                return
        next_s = self._store.clock.monotonic_at(document["next"])
        wait_s = next_s - time.monotonic()
        if wait_s > 0:
            self.pause(min(wait_s, _LOOK_S))
            if wait_s > _LOOK_S:
                return
        if not self.stopping:
            self._try(document)

    def _try(self, document: Document) -> None:
        interval_ms, number = int(document["interval_ms"]), int(document["number"])
        token = uuid.uuid4().hex
        self._token = token
        _, changed = self._store.write(statements.tick(self._id, interval_ms, number, token))
        self._token = None
        if changed:
            self._deliver(Tick(number + 1, document["next"]))
        else:
            # Another has won it, or it is due a moment later.
            self.pause(0.002)

    def request_stop(self) -> None:
        super().request_stop()
        if not self._asked.is_set():
            self._asked.set()
            self._on_end()


class Ticker:
    """
    Ticks that this node has won: iterate, or `get` one by one. Made by `Node.ticker`.

    Who reads too late finds the last tick only. A callback, if given, gets all of them in the
    ticker's own thread; while it works, other nodes win.
    """

    def __init__(
        self,
        store: PoolStore,
        pool: str,
        name: str,
        interval_s: float,
        *,
        callback: Callable[[Tick], Any] | None,
        on_crash: CrashHandler,
    ) -> None:
        self.name = name
        self._store = store
        self._pool = pool
        self._id = statements.full_id(pool, name)
        self._interval_ms = max(1, round(interval_s * 1000))
        self._callback = callback
        self._changed = threading.Condition()
        # Both under _changed.
        self._tick: Tick | None = None
        self._ended = False
        self.thread = TickerThread(
            store,
            self._id,
            name,
            deliver=self._deliver,
            on_end=self._end,
            on_crash=on_crash,
        )

    def start(self) -> None:
        """
        Make the shared document, or change its interval, and compete from now on.
        """
        self._store.write(statements.set_ticker(self._id, self._pool, self.name, self._interval_ms))
        self.thread.start()

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
                self._changed.wait(min(left_s, _SLICE_S))
            tick, self._tick = self._tick, None
            return tick

    def __iter__(self) -> Iterator[Tick]:
        while (tick := self.get()) is not None:
            yield tick

    @property
    def is_ended(self) -> bool:
        """
        Whether it was stopped, here or elsewhere, or closed.
        """
        with self._changed:
            return self._ended

    def stop(self) -> None:
        """
        End the ticker on all nodes.

        Raises:
            StoreError: The database did not answer; call it again.
        """
        self._store.remove(statements.remove_ticker(self._id))
        self.close()

    def close(self) -> None:
        """
        Take no more part; other nodes go on.
        """
        self.thread.request_stop()

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
                exc_info=error,
                extra={
                    "event": "callback_failed",
                    "ticker": self.name,
                    "error_type": type(error).__name__,
                },
            )

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
