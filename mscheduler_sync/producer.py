"""
The producer: sends tasks, asks after them, changes and cancels them.
"""

from __future__ import annotations

import datetime as dt
import os
import random
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from bson.raw_bson import RawBSONDocument
from pymongo.client_session import ClientSession
from pymongo.collection import Collection

from mscheduler_sync import model
from mscheduler_sync._storage import codec, statements
from mscheduler_sync._storage import expressions as x
from mscheduler_sync._storage.calls import CALL_TIMEOUT_S
from mscheduler_sync._storage.sending import (
    IfExists,
    IfRunning,
    RetryScope,
    SendOptions,
    SendOptionsDict,
)
from mscheduler_sync._storage.store import TaskStore
from mscheduler_sync.errors import (
    InvalidTask,
    TaskCancelled,
    TaskFailed,
    TaskNotFound,
)
from mscheduler_sync.model import STATUSES, Status, Task
from mscheduler_sync.sender import (
    WITHOUT_VALUES,
    Send,
    Sender,
    SendResult,
    at_most_twice,
    checked_key,
    status_of,
)
from mscheduler_sync.settings import Duration, choice, deadline_after, options_from, seconds, whole

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: `result` asks again after this long, growing, in seconds.
_FIRST_POLL_S, _LAST_POLL_S = 0.02, 1.0
#: A producer makes sure of the indexes this often, in seconds: collections get dropped.
_INDEXES_AGE_S: Final = 60.0
#: Keys of one query.
_KEY_CHUNK: Final = 100

#: `Producer` has a method of this name.
_Tasks = list[Task]


class _Unchanged:
    def __repr__(self) -> str:
        return "UNCHANGED"


#: For `Producer.update`: the params stay as they are.
UNCHANGED: Final = _Unchanged()


class Producer:
    """
    Sends tasks to one collection. Thread-safe; may live at module level; survives a fork.

    Does no I/O when made; the indexes are created at the first send, once per process.
    Every call blocks for at most 10 seconds per round trip (a write is tried twice) and then raises
    `StoreUnavailable`; a send that raised it may be repeated with the same key.

    Raises:
        TypeError: If *collection* is not a pymongo collection.
    """

    def __init__(self, collection: Collection[Any]) -> None:
        if not isinstance(collection, Collection):
            msg = f"collection must be a pymongo Collection, got {type(collection).__name__}"
            raise TypeError(msg)
        self._store = TaskStore(collection)
        self._sender = Sender(self._store)
        self._pid = os.getpid()
        self._ready_lock = threading.Lock()

    # -- sending -----------------------------------------------------------------------------

    def send(
        self,
        key: str | None,
        params: Any = None,
        *,
        run_at: dt.datetime | None = None,
        delay: Duration | None = None,
        priority: int = 0,
        concurrency: int = 1,
        max_attempts: int = 3,
        retry_delay: Duration = 10,
        retry_backoff: float = 1.0,
        retry_max_delay: Duration | None = None,
        retry_jitter: float = 0.0,
        retry_scope: RetryScope = "task",
        lease: Duration = 60,
        heartbeat: Duration = 20,
        timeout: Duration | None = None,
        keep_finished: Duration | None = None,
        worker_ids: Sequence[str] = (),
        name: str | None = None,
        tags: Sequence[str] = (),
        if_exists: IfExists = "keep",
        if_running: IfRunning = "apply",
        clean_success: bool = False,
        clean_failed: bool = False,
        session: ClientSession | None = None,
    ) -> SendResult:
        """
        Make sure that there is a task under *key*. Durations are seconds or timedelta.

        The key is the identity: sending it again makes no second task. *key* None makes a
        unique one. Once this returns, the task is stored by a majority and will be
        found. Sending concurrently from anywhere is fine: one inserts, all succeed.

        Arguments:
            params: What the function gets; see docs/producer.md for the types.
            run_at, delay: Not to run before; an aware datetime, or from now on the server's clock.
            priority: 0 to 2**31-1, higher first among the tasks a consumer holds.
            concurrency: How many workers are to run it, each once; 1 to 100.
            max_attempts: Failed attempts (errors, time-outs, lost leases) until it fails; 1 to 100.
            retry_delay, retry_backoff, retry_max_delay, retry_jitter: The pause after a failure,
                its growth factor, its cap, and the share added or taken at random (0 to 1).
            retry_scope: "worker" counts the attempts of each worker id apart, as the crate does.
            lease, heartbeat: How long an attempt is trusted without a sign of life, and how
                often it gives one; at most half the lease.
            timeout: How long one attempt may take.
            keep_finished: How long the document stays after its end; None keeps it.
            worker_ids: Only these workers may run it.
            name: For consumers with a `Router`.
            tags: For `list` and `count`; 50, of 200 bytes each.
            if_exists: "keep" changes nothing but an explicit time; "update" replaces params,
                time and options (a running attempt goes on); "rerun" also arms a finished
                task again; "raise" raises `TaskExists`.
            if_running: "raise" raises `TaskRunning` instead of changing a task that runs.
            clean_success, clean_failed: Forget successful or failed attempts of an existing task.
            session: Take part in the caller's transaction; nothing is retried or hidden then.

        Raises:
            TypeError, ValueError: If an argument is wrong: its name, its value and the rule.
            TaskExists, TaskRunning: As asked for.
            InvalidTask: If the key belongs to a document that is not a readable task.
            StoreUnavailable, StoreRejected: The database did not, or would not, do it.
        """
        options = options_from(SendOptions, locals())
        send = self._sender.checked(key, params, options, session)
        self._ready(in_transaction=session is not None)
        return self._sender.send(send)

    def send_many(
        self,
        items: Iterable[tuple[str | None, Any] | tuple[str | None, Any, Mapping[str, Any]]],
        **options: Unpack[SendOptionsDict],
    ) -> list[SendResult]:
        """
        Send many tasks, in few round trips: ``(key, params)`` or ``(key, params, options)`` each.

        *options* are those of `send` (without ``session``) and count for all items; an item's
        own come on top. Returns one result per item, in order; an item that could not
        be sent has its `error` set and does not stop the others. A key that comes twice
        is sent in order.

        Raises:
            TypeError, ValueError: If the common *options* are wrong; nothing was sent.
            StoreUnavailable, StoreRejected: The database did not, or would not, do it; sending
                the same items again is safe.
        """
        if isinstance(items, (str, bytes, Mapping)):
            msg = f"items must be (key, params) pairs, got {type(items).__name__}"
            raise TypeError(msg)
        sends = self._sender.checked_items(items, options)
        self._ready()
        return self._sender.send_many(sends)

    # -- changing ----------------------------------------------------------------------------

    def update(
        self, key: str, params: Any = UNCHANGED, **options: Unpack[SendOptionsDict]
    ) -> SendResult:
        """
        Change params or options of an existing task; what is not given stays as it is.

        *options* are those of `send` but ``if_exists`` and ``session``; None takes an optional
        one away. A running attempt goes on, and learns of changed options at a heartbeat.

        Raises:
            TaskNotFound: If there is no such task.
            TypeError, ValueError, TaskRunning, StoreError: As `send`.
        """
        key = checked_key(key)
        options["if_exists"] = "update"
        pair = {"lease", "heartbeat"}
        checkable = options.copy()
        if len(pair & options.keys()) == 1:
            # It may fit what is stored, though not the default of the other.
            checkable.pop("lease", None)
            checkable.pop("heartbeat", None)
        SendOptions.checked(**checkable)
        frozen = None if params is UNCHANGED else self._sender.freeze(params)
        given = {*options} if params is UNCHANGED else {*options, "params"}
        self._ready()
        document = self._store.find_task(key, WITHOUT_VALUES)
        if document is None:
            raise TaskNotFound(key)
        if given & pair:
            # They are checked against each other, the one not given as it is stored.
            stored = model.read_options(model.decode_fields(document))
            options = {"lease": stored.lease, "heartbeat": stored.heartbeat, **options}
        send = Send(key, frozen, SendOptions.checked(**options), given=given)
        return self._sender.send_to_existing(send)

    def cancel(self, key: str) -> bool:
        """
        Ask for the end of a task: no new attempt starts, running functions are told.

        Returns whether the task is cancelled or being cancelled now; False if it has
        ended otherwise. A running function that does not heed `TaskContext.cancelled`
        goes on; if it succeeds, the task has succeeded. A cancelled task never runs again
        unless it is armed by `retry` or ``if_exists="rerun"``.

        Raises:
            TaskNotFound: If there is no such task.
            StoreError: As `send`.
        """
        key = checked_key(key)
        self._ready()
        at_most_twice(lambda: self._store.update(statements.producing.cancel(key)))
        document = self._store.find_task(key, WITHOUT_VALUES)
        if document is None:
            raise TaskNotFound(key)
        status = status_of(document)
        return status == x.CANCELLED or (status == x.RUNNING and "cancel" in document)

    def retry(self, key: str) -> bool:
        """
        Arm a task that has ended (failed, cancelled or succeeded) again, to run now.

        Returns whether it was; False if it has not ended.

        Raises:
            TaskNotFound: If there is no such task.
            StoreError: As `send`.
        """
        key = checked_key(key)
        self._ready()
        before = self.get(key)
        if before is None:
            raise TaskNotFound(key)
        if not before.is_finished:
            return False
        again = statements.producing.resend(
            key,
            uuid.uuid4().hex,
            start_time=None,
            replace=None,
            rerun=True,
            only_if_idle=False,
            clean_success=False,
            clean_failed=False,
        )
        at_most_twice(lambda: self._store.update(again))
        return True

    def delete(self, key: str) -> bool:
        """
        Delete a task, whatever its state; return whether there was one.

        A function that runs is not stopped; its outcome is then refused.
        """
        return self._store.delete(statements.producing.delete_task(checked_key(key))) > 0

    def delete_finished(
        self,
        older_than: Duration,
        *,
        statuses: Sequence[Status] = ("succeeded", "failed", "cancelled"),
    ) -> int:
        """
        Delete the tasks that ended more than *older_than* ago; return how many.

        Works in small steps; a task that is armed again meanwhile stays.

        Raises:
            TypeError, ValueError: If an argument is wrong.
        """
        age_s = seconds(older_than, "older_than")
        for status in statuses:
            choice(status, "each of statuses", x.TERMINAL)
        self._ready()
        cutoff = self._store.clock.now() - dt.timedelta(seconds=age_s)
        deleted = 0
        while True:
            found = self._store.find(
                statements.producing.finished_before(cutoff, statuses, _KEY_CHUNK)
            )
            if not found:
                return deleted
            keys = [str(document["key"]) for document in found]
            count = self._store.delete(statements.producing.delete_ended(keys, cutoff, statuses))
            deleted += count
            if not count:
                return deleted

    # -- asking ------------------------------------------------------------------------------

    def get(self, key: str) -> Task | None:
        """
        Return the task, or None.

        Raises:
            InvalidTask: If its document cannot be read.
        """
        document = self._store.find_task(checked_key(key))
        return None if document is None else self._read(document)

    def list(
        self,
        *,
        status: Status | None = None,
        name: str | None = None,
        tag: str | None = None,
        limit: int = 100,
        after: str = "",
    ) -> list[Task]:
        """
        Return up to *limit* tasks in order of key, after the key *after*.

        Unreadable documents are left out. The conditions other than the key use no index.
        """
        whole(limit, "limit", 1, 10_000)
        condition = _condition(status, name, tag)
        tasks: _Tasks = []
        # A page is short only at the end, however many of its documents are unreadable.
        while len(tasks) < limit:
            wanted = limit - len(tasks)
            found = self._store.find(
                statements.producing.tasks(condition, after=after, limit=wanted)
            )
            tasks.extend(self._readable(found))
            if len(found) < wanted:
                break
            after = str(found[-1]["key"])
        return tasks

    def count(
        self, *, status: Status | None = None, name: str | None = None, tag: str | None = None
    ) -> int:
        """
        Count the tasks, by their stored status. Reads the whole collection.
        """
        return self._store.count(statements.producing.tasks(_condition(status, name, tag)))

    def result(self, key: str, timeout: float | None = None, *, all: bool = False) -> Any:
        """
        Wait until the task has ended; return what its function returned.

        With *all*, return the values of all successes, oldest first (concurrency above 1).
        Asks the database every 20 ms at first, then more and more seldom, up to 1 s.

        Raises:
            TaskNotFound: If there is no such task, or it was deleted meanwhile.
            TaskFailed: If it has failed; with the stored reason.
            TaskCancelled: If it was cancelled.
            TimeoutError: If it has not ended within *timeout* seconds (None: wait for ever).
            TypeError, ValueError: If an argument is wrong.
            StoreError: If the database is in trouble for longer than one call may take.
        """
        key = checked_key(key)
        deadline_s = deadline_after(timeout)
        pause_s = _FIRST_POLL_S
        waiter = threading.Event()
        while True:
            left_s = max(_FIRST_POLL_S, deadline_s - time.monotonic())
            document = self._store.find_task(
                key, {"params": 0}, timeout_s=min(CALL_TIMEOUT_S, left_s)
            )
            if document is None:
                raise TaskNotFound(key)
            task = self._read(document)
            if task.status == x.SUCCEEDED:
                values = self._values(document)
                if all:
                    return [*values]
                return values[-1] if values else None
            if task.status == x.CANCELLED:
                raise TaskCancelled(key)
            if task.status == x.FAILED:
                failures = [a for a in task.attempts if a.failed_at is not None]
                raise TaskFailed(key, failures[-1].fail_reason if failures else None)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                msg = (
                    f"the task {key!r} has not ended within {timeout} seconds; it is {task.status}"
                )
                raise TimeoutError(msg)
            jitter = 1.0 - 0.2 * random.random()
            waiter.wait(min(pause_s * jitter, left_s))
            pause_s = min(_LAST_POLL_S, pause_s * 1.5)

    def _values(self, document: RawBSONDocument) -> Sequence[Any]:
        attempts = document["task_state"]["worker_states"]
        elements = [one for one in attempts if one.get("success_time") is not None]
        elements.sort(key=lambda one: one["success_time"])
        options = self._store.codec_options
        return [codec.thaw(element, "returns", options) for element in elements]

    def _read(self, document: RawBSONDocument) -> Task:
        return model.read_task(document, self._store.codec_options)

    def _readable(self, documents: Iterable[RawBSONDocument]) -> Iterator[Task]:
        for document in documents:
            try:
                yield self._read(document)
            except InvalidTask:
                continue

    # -- in common ---------------------------------------------------------------------------

    def _ready(self, *, in_transaction: bool = False) -> None:
        """
        Before a write: know the server's time, and have the indexes.
        """
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._ready_lock = threading.Lock()
            self._store.notice_fork()
        with self._ready_lock:
            self._store.measure_clock()
            if not in_transaction:
                self._store.ensure_indexes(max_age_s=_INDEXES_AGE_S)

    def __repr__(self) -> str:
        return f"Producer({self._store.collection.full_name!r})"


def _condition(status: str | None, name: str | None, tag: str | None) -> dict[str, Any]:
    if status is not None:
        choice(status, "status", STATUSES)
    given = {"status": status, "name": name, "tags": tag}
    return {field: value for field, value in given.items() if value is not None}
