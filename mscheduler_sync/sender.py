"""
How a send is carried out: inserted, or applied to the task that is there; also after a lost reply.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Final, TypeVar

import attrs
from bson.raw_bson import RawBSONDocument
from pymongo.client_session import ClientSession

from mscheduler_sync import model
from mscheduler_sync._storage import codec, statements
from mscheduler_sync._storage import expressions as x
from mscheduler_sync._storage.sending import SendOptions, SendOptionsDict
from mscheduler_sync._storage.statement import Update
from mscheduler_sync._storage.store import TaskStore
from mscheduler_sync.errors import (
    InvalidTask,
    StoreUnavailable,
    TaskExists,
    TaskNotFound,
    TaskRunning,
)
from mscheduler_sync.model import Status
from mscheduler_sync.settings import text

_T = TypeVar("_T")

#: Documents of one bulk insert.
_CHUNK: Final = 500
#: What `status_of` does not need.
WITHOUT_VALUES: Final[Mapping[str, Any]] = {
    "params": 0,
    "progress": 0,
    "task_state.worker_states.returns": 0,
}


@attrs.frozen
class SendResult:
    """
    What a send has done.
    """

    key: str
    #: A new task was made.
    inserted: bool
    #: An existing document was changed. A rerun, a clean and `if_running="raise"` note in it
    #: that they were applied, and so count as a change.
    updated: bool
    #: The task's status after the send; None for an item that was not sent.
    status: Status | None
    #: Only in `send_many`: why this item was not sent, or None.
    error: Exception | None = None


@attrs.frozen
class Send:
    """
    One checked send: the params as BSON, in the caller's transaction if there is a session.
    """

    key: str
    params: object
    options: SendOptions
    session: ClientSession | None = None
    #: Only what these arguments say is changed in an existing task; None: everything.
    given: Set[str] | None = None

    def document(self, server_now: dt.datetime) -> dict[str, Any]:
        return self.options.document(self.key, self.params, server_now)

    def inserted_result(self) -> SendResult:
        return SendResult(self.key, inserted=True, updated=False, status="waiting")

    def refused_result(self, error: Exception) -> SendResult:
        return SendResult(self.key, inserted=False, updated=False, status=None, error=error)


class Sender:
    """
    Carries out sends. Thread-safe. Errors are those of `Producer.send`.
    """

    def __init__(self, store: TaskStore) -> None:
        self._store = store

    def checked(
        self,
        key: object,
        params: object,
        options: SendOptions,
        session: ClientSession | None = None,
    ) -> Send:
        """
        Raises:
            TypeError, ValueError: If *key* is not a key, or the params cannot be stored.
        """
        checked = uuid.uuid4().hex if key is None else checked_key(key)
        return Send(checked, self.freeze(params), options, session)

    def freeze(self, params: object) -> object:
        return codec.freeze(
            params,
            self._store.codec_options,
            what="params",
            limit_bytes=codec.MAX_PARAMS_BYTES,
        ).value

    def checked_items(
        self, items: Iterable[object], options: SendOptionsDict
    ) -> list[Send | SendResult]:
        """
        Check what `Producer.send_many` was given; an item that cannot be sent is its result.

        Raises:
            TypeError, ValueError: If the *options* of all are wrong.
        """
        common = SendOptions.checked(**options)
        checked: list[Send | SendResult] = []
        for item in items:
            try:
                key, params, own = _split_item(item)
                of_item = common
                if own:
                    merged: dict[str, Any] = {**options, **own}
                    of_item = SendOptions.checked(**merged)
                checked.append(self.checked(key, params, of_item))
            except (TypeError, ValueError) as error:
                key = item[0] if isinstance(item, (tuple, list)) and item else item
                shown = key if isinstance(key, str) else repr(key)[:200]
                checked.append(SendResult(shown, False, False, None, error))
        return checked

    def send(self, send: Send) -> SendResult:
        """
        Insert the task, or apply the send to the one that is there.
        """
        return send.inserted_result() if self._insert(send) else self.send_to_existing(send)

    def send_many(self, checked: Sequence[Send | SendResult]) -> list[SendResult]:
        """
        Carry out each in order; what is a result already stays one.
        """
        sends = [one for one in checked if isinstance(one, Send)]
        results: list[SendResult] = []
        for start in range(0, len(sends), _CHUNK):
            results += self._send_chunk(sends[start : start + _CHUNK])
        of_sends = iter(results)
        return [next(of_sends) if isinstance(one, Send) else one for one in checked]

    def _send_chunk(self, sends: Sequence[Send]) -> list[SendResult]:
        now = self._store.clock.now()
        inserts = [statements.producing.new_task(send.document(now)) for send in sends]
        inserted, errors = at_most_twice(lambda: self._store.insert_many(inserts))
        results = []
        for position, send in enumerate(sends):
            if inserted[position]:
                result = send.inserted_result()
            elif position in errors:
                msg = f"the server refused the task {send.key!r}: {errors[position]}"
                result = send.refused_result(ValueError(msg))
            else:
                try:
                    result = self.send_to_existing(send)
                except (TaskExists, TaskRunning, InvalidTask) as error:
                    result = send.refused_result(error)
            results.append(result)
        return results

    def send_to_existing(self, send: Send) -> SendResult:
        """
        Apply the send to the task under its key, which is made anew if it has gone.

        Raises:
            TaskNotFound: If it has gone, and only some of it was to be changed.
        """
        while (result := self._apply(send)) is None:
            if send.given is not None:
                raise TaskNotFound(send.key)
            if self._insert(send):
                return send.inserted_result()
        return result

    def _insert(self, send: Send) -> bool:
        document = send.document(self._store.clock.now())
        if send.session is not None:
            statement = statements.producing.new_task_in_transaction(document)
            return self._store.update(statement, session=send.session)[1] > 0
        insert = statements.producing.new_task(document)
        return at_most_twice(lambda: self._store.insert(insert))

    def _apply(self, send: Send) -> SendResult | None:
        """
        Apply *send* to the task under its key; None if there is no such task any more.
        """
        options = send.options
        if options.if_exists == "raise":
            raise TaskExists(send.key)
        keeps = options.if_exists == "keep"
        cleans = options.clean_success or options.clean_failed
        guarded = options.if_running == "raise"
        send_id = uuid.uuid4().hex
        changed = False
        if not keeps or options.wants_time or cleans or guarded:
            now = self._store.clock.now()
            statement = statements.producing.resend(
                send.key,
                send_id,
                start_time=options.start_time(now) if options.wants_time else None,
                replace=None if keeps else options.replacement(send.params, send.given),
                rerun=options.if_exists == "rerun",
                only_if_idle=guarded,
                clean_success=options.clean_success,
                clean_failed=options.clean_failed,
            )
            changed = self._has_changed(statement, send.session)
        document = self._store.find_task(send.key, WITHOUT_VALUES, session=send.session)
        if document is None:
            return None
        is_ours = document.get("send_id") == send_id
        status = status_of(document)
        if guarded and not is_ours:
            if status == x.RUNNING:
                raise TaskRunning(send.key)
            # It ran when we tried and has ended since.
            return self._apply(send)
        # After a lost reply the driver may say that its repetition changed nothing.
        return SendResult(send.key, inserted=False, updated=changed or is_ours, status=status)

    def _has_changed(self, statement: Update, session: ClientSession | None) -> bool:
        """
        Run a resend; return whether the document was changed. Repeating it is harmless.
        """
        try:
            return self._store.update(statement, session=session)[1] > 0
        except StoreUnavailable:
            if session is not None:
                raise
            self._store.update(statement)
            return True


def _split_item(item: object) -> tuple[object, object, Mapping[str, Any]]:
    """
    Key, params and own options of an item of `send_many`.
    """
    if not isinstance(item, (tuple, list)) or len(item) not in {2, 3}:
        length = f" of {len(item)}" if isinstance(item, (tuple, list)) else ""
        msg = (
            "an item must be (key, params) or (key, params, options), "
            f"got {type(item).__name__}{length}"
        )
        raise TypeError(msg)
    key, params, own = (*item, {})[:3]
    if not isinstance(own, Mapping):
        msg = f"the options of an item must be a mapping, got {type(own).__name__}"
        raise TypeError(msg)
    return key, params, own


def checked_key(key: object) -> str:
    return text(key, "key")


def at_most_twice(write: Callable[[], _T]) -> _T:
    """
    Run a repeatable write, and once more if its outcome is not known.

    Perhaps only the reply was lost: the write finds in the document whether it was applied.
    """
    try:
        return write()
    except StoreUnavailable:
        return write()


def status_of(document: RawBSONDocument) -> Status:
    """
    Raises:
        InvalidTask: If the document cannot be read.
    """
    fields = model.decode_fields(document)
    return model.derive(fields, model.read_attempts(fields))[0]
