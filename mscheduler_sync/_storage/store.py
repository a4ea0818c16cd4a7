"""
Runs the statements about tasks: unknown outcomes, refused documents, indexes.

With `calls` the only module that talks to the driver about tasks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import attrs
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import InsertOne
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import BulkWriteError, DocumentTooLarge, DuplicateKeyError, WriteError

from mscheduler_sync._runtime.log import logger
from mscheduler_sync._storage import statements
from mscheduler_sync._storage.calls import CALL_TIMEOUT_S, ServerCalls, trusted
from mscheduler_sync._storage.server_codes import DUPLICATE_KEY
from mscheduler_sync._storage.statements import Find, Ref, Update
from mscheduler_sync.errors import StoreRejected, StoreUnavailable

_log = logger("store")
_Item = TypeVar("_Item")

#: A bulk of inserts may take longer than other calls, in seconds.
_MANY_TIMEOUT_S: Final = 20.0


@attrs.frozen
class BatchResult:
    """
    What became of a statement about several documents.
    """

    matched: int
    #: Position of the item -> the server's complaint about it alone.
    errors: Mapping[int, str]


#: The hint that a task is plain: for one worker, and at its first try. See `claims`.
PLAIN: Final = "plain"


@attrs.frozen
class Success:
    """
    An attempt that succeeded, what its function returned, and the hint of its claim.
    """

    ref: Ref
    value: object
    hint: object


class TaskStore(ServerCalls):
    """
    The one way to the collection.
    """

    def __init__(self, collection: Collection[Any]) -> None:
        super().__init__(collection.database)
        #: How the application codes its values.
        self.codec_options: CodecOptions[Any] = collection.codec_options
        self._collection = trusted(collection)
        # Under _lock.
        self._indexes_at_s = float("-inf")

    @property
    def full_name(self) -> str:
        return self._collection.full_name

    @property
    def collection(self) -> Collection[RawBSONDocument]:
        """
        The collection with the library's own settings, for the change stream.
        """
        return self._collection

    def ensure_indexes(self, *, max_age_s: float = float("inf")) -> None:
        """
        Create the indexes unless that was done within *max_age_s* seconds.

        A missing privilege costs one warning, not the work.
        """
        with self._lock:
            if time.monotonic() - self._indexes_at_s < max_age_s:
                return
        for keys, options in statements.INDEXES:
            try:
                with self._call(60.0):
                    self._collection.create_index(keys, **options)
            except (StoreRejected, DuplicateKeyError) as error:
                self._complain_of_index(str(options["name"]), error)
        with self._lock:
            self._indexes_at_s = time.monotonic()

    def _complain_of_index(self, name: str, error: Exception) -> None:
        if isinstance(error, DuplicateKeyError):
            # Not slower but wrong: two tasks under one key.
            _log.error(
                "several documents have the same key; mend the collection",
                extra={
                    "event": "duplicate_keys",
                    "index": name,
                    "collection": self.full_name,
                },
            )
        elif self._log_throttle.allows("indexes"):
            _log.warning(
                "an index could not be created; tasks work, slower",
                extra={"event": "index_refused", "index": name, "error": str(error)[:500]},
            )

    def forget_indexes(self) -> None:
        """
        Create the indexes again at the next chance: the collection was dropped or replaced.
        """
        with self._lock:
            self._indexes_at_s = float("-inf")

    # -- reading -----------------------------------------------------------------------------

    def find(self, query: Find, *, timeout_s: float = CALL_TIMEOUT_S) -> list[RawBSONDocument]:
        """
        Run one bounded read.
        """
        with self._call(timeout_s):
            cursor = self._collection.find(
                query.filter, query.projection or None, limit=query.limit
            )
            if query.sort:
                cursor = cursor.sort(query.sort)
            # One batch: a second round trip would be a second command.
            return list(cursor.batch_size(max(query.limit, 2)) if query.limit else cursor)

    def find_task(
        self,
        key: str,
        projection: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        session: ClientSession | None = None,
    ) -> RawBSONDocument | None:
        with self._call(timeout_s, session=session):
            return self._collection.find_one(statements.task(key), projection, session=session)

    def count(self, condition: Mapping[str, Any]) -> int:
        with self._call():
            return self._collection.count_documents(condition)

    # -- writing -----------------------------------------------------------------------------

    def insert(self, document: Mapping[str, Any]) -> bool:
        """
        Insert a new task; return False where the key is taken.

        An unknown outcome is settled by trying again: ``send_id`` says whose it is.
        """
        try:
            with self._call():
                self._collection.insert_one(document)  # type: ignore[arg-type]
        except DuplicateKeyError as error:
            if not _is_about_key(error.details):
                fields = list((error.details or {}).get("keyPattern", ()))
                msg = f"another unique index of the collection refuses it, on {fields}"
                raise StoreRejected(msg) from error
            return self._is_mine(document)
        return True

    def insert_many(
        self, documents: Sequence[Mapping[str, Any]]
    ) -> tuple[list[bool], dict[int, str]]:
        """
        Insert new tasks unordered; return which were inserted, and the errors by position.

        A position that is neither inserted nor in error had a key that is taken.
        """
        inserted = [True] * len(documents)
        errors: dict[int, str] = {}
        try:
            with self._call(_MANY_TIMEOUT_S):
                self._collection.bulk_write(
                    [InsertOne(document) for document in documents],  # type: ignore[arg-type]
                    ordered=False,
                )
        except BulkWriteError as error:
            for failure in error.details.get("writeErrors", []):
                position = failure["index"]
                inserted[position] = False
                if failure.get("code") != DUPLICATE_KEY or not _is_about_key(failure):
                    errors[position] = str(failure.get("errmsg", failure.get("code")))[:500]
                elif self._is_mine(documents[position]):
                    inserted[position] = True
            if error.details.get("writeConcernErrors"):
                raise StoreUnavailable(str(error.details["writeConcernErrors"])[:500]) from error
        return inserted, errors

    def _is_mine(self, document: Mapping[str, Any]) -> bool:
        found = self.find_task(document["key"], {"send_id": 1})
        return found is not None and found.get("send_id") == document["send_id"]

    def update(
        self,
        statement: Update,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        session: ClientSession | None = None,
    ) -> tuple[int, int]:
        """
        Run one conditional write; return how many documents it matched and changed.
        """
        with self._call(timeout_s, session=session):
            if len(statement.keys) == 1:
                result = self._collection.update_one(
                    statement.filter, statement.pipeline, session=session
                )
            else:
                result = self._collection.update_many(
                    statement.filter, statement.pipeline, session=session
                )
        return result.matched_count, result.modified_count

    def update_batch(
        self,
        make: Callable[[Sequence[_Item]], Update],
        items: Sequence[_Item],
        *,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> BatchResult:
        """
        Run the statement that *make* makes of *items*, one document each, in one command.

        Where the server refuses it, each item is tried alone, so that no other suffers from
        one that cannot be stored.

        Raises:
            StoreUnavailable: Some of it may have happened; running it again is safe.
            StoreRejected: The server refuses every item, and not for a document's sake.
        """
        try:
            matched, _ = self.update(make(items), timeout_s=timeout_s)
        except StoreRejected as error:
            if len(items) == 1:
                if not isinstance(error.__cause__, (WriteError, DocumentTooLarge)):
                    raise
                return BatchResult(0, {0: str(error)})
        else:
            return BatchResult(matched, {})
        matched = 0
        errors: dict[int, str] = {}
        refusal: StoreRejected | None = None
        for position, item in enumerate(items):
            try:
                one = self.update_batch(make, [item], timeout_s=timeout_s)
            except StoreRejected as error:
                refusal = error
                errors[position] = str(error)
            else:
                matched += one.matched
                if one.errors:
                    errors[position] = one.errors[0]
        if refusal is not None and len(errors) == len(items):
            raise refusal
        return BatchResult(matched, errors)

    def succeed(self, successes: Sequence[Success], *, progress: object = None) -> BatchResult:
        """
        End attempts as succeeded; *progress* is that of a lone one. See `update_batch`.
        """

        def run(statement: Callable[..., Update], positions: Sequence[int]) -> BatchResult:
            def make(some: Sequence[int]) -> Update:
                refs = [successes[position].ref for position in some]
                values = [successes[position].value for position in some]
                return statement(refs, values, progress=progress)

            if not positions:
                return BatchResult(0, {})
            result = self.update_batch(make, positions)
            errors = {positions[at]: problem for at, problem in result.errors.items()}
            return BatchResult(result.matched, errors)

        plain = [n for n, success in enumerate(successes) if success.hint == PLAIN]
        short = run(statements.succeed_plain, plain)
        # If some are no plain tasks any more, all are tried: those that are done match no more.
        done = set(plain) if short.matched == len(plain) else set(short.errors)
        general = run(statements.succeed, [n for n in range(len(successes)) if n not in done])
        return BatchResult(short.matched + general.matched, {**short.errors, **general.errors})

    def upsert(
        self, document: Mapping[str, Any], *, session: ClientSession | None
    ) -> tuple[bool, int]:
        """
        Insert *document* unless its key is taken; return whether it was, and the matched count.
        """
        with self._call(session=session):
            result = self._collection.update_one(
                statements.task(document["key"]),
                {"$setOnInsert": document},
                upsert=True,
                session=session,
            )
        return result.upserted_id is not None, result.matched_count

    def delete(self, key: str, *, session: ClientSession | None = None) -> bool:
        with self._call(session=session):
            return (
                self._collection.delete_one(statements.task(key), session=session).deleted_count > 0
            )

    def delete_matching(self, condition: Mapping[str, Any]) -> int:
        with self._call(60.0):
            return self._collection.delete_many(condition).deleted_count


def _is_about_key(failure: Mapping[str, Any] | None) -> bool:
    """
    Whether a duplicate is one of the task's key (or _id), not of an index of the application.
    """
    pattern = (failure or {}).get("keyPattern")
    return not isinstance(pattern, Mapping) or list(pattern) in (["key"], ["_id"])
