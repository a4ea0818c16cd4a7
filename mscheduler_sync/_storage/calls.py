"""
Calls of the driver: bounded in time, their errors mapped, outages and the server's clock noted.

What the stores of tasks and of the pool share. They do not trust the settings of the
application's collection: writes are acknowledged by a majority and journaled, reads
go to the primary.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pymongo
from bson.raw_bson import RawBSONDocument
from pymongo import ReadPreference, WriteConcern
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import (
    BulkWriteError,
    ConnectionFailure,
    DuplicateKeyError,
    OperationFailure,
    PyMongoError,
    WriteConcernError,
)
from pymongo.read_concern import ReadConcern

from mscheduler_sync._runtime.clock import ServerClock
from mscheduler_sync._runtime.log import LogThrottle
from mscheduler_sync._storage import expressions as x
from mscheduler_sync._storage.codec import RAW
from mscheduler_sync._storage.server_codes import PASSING_CODES
from mscheduler_sync.errors import StoreError, StoreRejected, StoreUnavailable

#: How long one call may take, in seconds, retries of the driver included.
CALL_TIMEOUT_S: Final = 10.0
#: A call that took longer has met an outage, in seconds.
_SLOW_CALL_S: Final = x.SLOW_CALL_MS / 1000
_PASSING_LABELS: Final = ("RetryableWriteError", "TransientTransactionError", "NetworkError")


def translated(error: PyMongoError) -> StoreError:
    """
    Return *error* as one of ours; by class, code and label, never by text.
    """
    code = error.code if isinstance(error, OperationFailure) else None
    passing = (
        isinstance(error, (ConnectionFailure, WriteConcernError))
        or error.timeout
        or code in PASSING_CODES
        or any(error.has_error_label(label) for label in _PASSING_LABELS)
    )
    return StoreUnavailable(_text(error)) if passing else StoreRejected(_text(error))


def _text(error: PyMongoError) -> str:
    """
    What went wrong, without the reply in full: that may hold parts of documents.
    """
    details = error.details if isinstance(error, OperationFailure) else None
    if not isinstance(details, Mapping) or "errmsg" not in details:
        # The driver's picture of all servers says nothing more to a reader.
        told = str(error).partition(", Topology Description:")[0]
        return f"{type(error).__name__}: {told}"[:500]
    name = details.get("codeName", "no name")
    return f"{type(error).__name__}: {details['errmsg']} (code {details.get('code')}, {name})"[:500]


def with_own_settings(collection: Collection[Any]) -> Collection[RawBSONDocument]:
    """
    Return *collection* with the library's own settings; documents leave it undecoded.
    """
    return collection.with_options(
        codec_options=RAW,
        read_preference=ReadPreference.PRIMARY,
        write_concern=WriteConcern("majority", j=True),
        read_concern=ReadConcern("local"),
    )


class ServerCalls:
    """
    The base of a store. Thread-safe; survives a fork (the child measures anew).
    """

    def __init__(self, database: Database[Any]) -> None:
        self._database = database
        self.clock = ServerClock()
        #: While stopping: no call may last beyond this monotonic time.
        self.deadline_s = float("inf")
        self._pid = os.getpid()
        self._lock = threading.Lock()
        # Under _lock.
        self._trouble_since_s: float | None = None
        #: Calls under way -> when they began. Those that may take long by themselves are not here.
        self._under_way: dict[object, float] = {}
        #: Monotonic time of the last recovery from an outage; read without lock.
        self.recovered_at_s = float("-inf")
        self._log_throttle = LogThrottle(3600.0)

    @contextlib.contextmanager
    def _call(
        self, timeout_s: float = CALL_TIMEOUT_S, *, session: ClientSession | None = None
    ) -> Iterator[None]:
        """
        Bound a call in time, map its errors, and remember outages.

        In the caller's *session* the driver's own errors come out: their labels say whether
        the transaction is to be repeated.
        """
        self.notice_fork()
        began_s = time.monotonic()
        left_s = self.deadline_s - began_s
        call = object()
        if timeout_s <= CALL_TIMEOUT_S:
            self._under_way[call] = began_s
        try:
            # A passed deadline still leaves a moment, so that a last write has a chance.
            with pymongo.timeout(min(timeout_s, max(0.5, left_s))):
                yield
        except (DuplicateKeyError, BulkWriteError):
            self._note_answer()
            raise
        except PyMongoError as error:
            if session is not None:
                raise
            mine = translated(error)
            if isinstance(mine, StoreUnavailable):
                self.note_outage()
            else:
                self._note_answer()
            raise mine from error
        finally:
            self._under_way.pop(call, None)
        self._note_answer()
        now_s = time.monotonic()
        if now_s - began_s > _SLOW_CALL_S:
            # The driver has sat something out; the heartbeats of others may not have.
            self.recovered_at_s = now_s

    def note_outage(self) -> None:
        self.clock.invalidate()
        with self._lock:
            if self._trouble_since_s is None:
                self._trouble_since_s = time.monotonic()

    def _note_answer(self) -> None:
        if self._trouble_since_s is None:
            return
        with self._lock:
            if self._trouble_since_s is not None:
                self._trouble_since_s = None
                self.recovered_at_s = time.monotonic()

    def notice_fork(self) -> None:
        """
        In a forked child: forget what the parent knew, and locks that its threads held.
        """
        if os.getpid() == self._pid:
            return
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._trouble_since_s = None
        self._under_way = {}
        self.clock = ServerClock()
        self._log_throttle = LogThrottle(3600.0)

    def since_outage_s(self) -> float:
        """
        Seconds since the database answered again after an outage; 0 while it does not.
        """
        now_s = time.monotonic()
        if self._trouble_since_s is not None:
            return 0.0
        # One operation each on a plain dict: no thread sees it half changed.
        if any(now_s - began_s > _SLOW_CALL_S for began_s in list(self._under_way.values())):
            return 0.0
        return now_s - self.recovered_at_s

    def measure_clock(self) -> None:
        """
        Ask the server for its time if the last answer is old. One short round trip.
        """
        if not self.clock.stale:
            return
        asked_at_s = time.monotonic()
        with self._call():
            reply = self._database.client.admin.command("hello")
        received_at_s = time.monotonic()
        local_time = reply.get("localTime")
        if local_time is not None:
            self.clock.set(local_time, received_at_s, round_trip_s=received_at_s - asked_at_s)
