"""
The thread of a change stream: opens it, reads it, opens it anew after any error.

What comes out are hints. A resume token is never trusted to be complete: a stream
begins from now, and its owner then reads what was missed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any, Final

import attrs
import pymongo
from bson.raw_bson import RawBSONDocument
from pymongo.change_stream import ChangeStream
from pymongo.collection import Collection
from pymongo.errors import OperationFailure, PyMongoError
from pymongo.read_concern import ReadConcern

from mscheduler_sync._runtime import backoff
from mscheduler_sync._runtime.service import Service
from mscheduler_sync._storage.calls import translated
from mscheduler_sync._storage.codec import ENVELOPE
from mscheduler_sync._storage.server_codes import NO_STREAMS_CODES

#: How long one getMore waits for events on the server, in milliseconds.
AWAIT_MS: Final = 1000
#: A reply that stays away this long, in seconds, counts as a dead connection.
_SILENCE_S: Final = 10.0
#: How long the server may take to end a getMore that a stop cuts short, in seconds.
_CUT_SHORT_S: Final = 0.5
#: Without change streams: try again after this long, in seconds.
REPROBE_S: Final = 300.0


@attrs.frozen
class Watched:
    """
    What a stream tells of: changes of one collection, as *pipeline* shows them.
    """

    collection: Collection[RawBSONDocument]
    pipeline: list[dict[str, Any]]


@attrs.define(eq=False, repr=False, kw_only=True)
class StreamReader(Service):
    """
    Reads the change stream of one collection; see the module.

    Subclasses say what is watched, and what to do with an event, and at an opening, a close
    and an end.
    """

    component: str = "watch"
    thread_prefix: str = "ms-watch"
    _told_about_polling: bool = attrs.field(init=False, default=False)
    #: Set by the thread; `join` closes it.
    _stream: ChangeStream[Any] | None = attrs.field(init=False, default=None)
    #: Read by `health`.
    is_open: bool = attrs.field(init=False, default=False)
    last_event_at_s: float | None = attrs.field(init=False, default=None)
    last_opened_at_s: float | None = attrs.field(init=False, default=None)

    def watched(self) -> Watched:
        raise NotImplementedError

    def on_event(self, event: Mapping[str, Any]) -> None:
        """
        Hook: the stream has brought *event*. What is raised here is treated as in `step`.
        """
        raise NotImplementedError

    def on_open(self) -> None:
        """
        Hook: the stream is open; what happened before must be looked for.
        """

    def on_close(self) -> None:
        """
        Hook: the stream is closed; what happens from now on is not told.
        """

    def on_end(self) -> None:
        """
        Hook: the stream has ended by itself: the collection was dropped or renamed.
        """

    def join(self, timeout_s: float) -> bool:
        """
        Wait for the end as a service does, but not for the events that the server may wait for.
        """
        deadline_s = time.monotonic() + timeout_s
        stream = self._stream
        if stream is not None and self.stopping and timeout_s > 0:
            # The thread closes it in any case; from here it ends the getMore under way.
            with (
                contextlib.suppress(PyMongoError),
                pymongo.timeout(min(timeout_s, _CUT_SHORT_S)),
            ):
                stream.close()
        return super().join(deadline_s - time.monotonic())

    def step(self) -> None:
        """
        Open the stream and read it until it ends, fails, or the stop is asked for.
        """
        try:
            stream = self._open()
        except PyMongoError as error:
            # Only here: while reading, the same codes mean that this stream cannot go on.
            if isinstance(error, OperationFailure) and error.code in NO_STREAMS_CODES:
                self._poll_instead(error)
                return
            raise translated(error) from error
        try:
            with stream:
                self._stream = stream
                self.is_open = True
                self.last_opened_at_s = time.monotonic()
                self.on_open()
                self._read(stream)
        except PyMongoError as error:
            if not self.stopping:
                raise translated(error) from error
        finally:
            self._stream = None
            self._close()

    def _open(self) -> ChangeStream[Any]:
        watched = self.watched()
        # A stream takes no other read concern than majority.
        collection = watched.collection.with_options(
            codec_options=ENVELOPE, read_concern=ReadConcern("majority")
        )
        with pymongo.timeout(_SILENCE_S):
            return collection.watch(watched.pipeline, max_await_time_ms=AWAIT_MS)

    def _close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.on_close()

    def _read(self, stream: ChangeStream[Any]) -> None:
        while not self.stopping and stream.alive:
            with pymongo.timeout(_SILENCE_S):
                event = stream.try_next()
            self.health.note_success()
            if event is not None:
                self.last_event_at_s = time.monotonic()
                self.on_event(event)
        if not self.stopping:
            # Dropped or renamed: it may be there again, without its indexes.
            self.log.warning(
                "the change stream has ended; opening it again",
                event="stream_ended",
                worker_id=self.owner_id,
            )
            self.on_end()
            self.pause(backoff.jittered(1.0))

    def _poll_instead(self, error: OperationFailure) -> None:
        self.health.note_error(translated(error))
        # Known and lived with: polling is the regular way here.
        self.health.note_success()
        if not self._told_about_polling:
            self._told_about_polling = True
            self.log.warning(
                "change streams are not to be had here; polling instead",
                event="polling",
                worker_id=self.owner_id,
                code=error.code,
                error=str(translated(error)),
            )
        self.pause(REPROBE_S)
