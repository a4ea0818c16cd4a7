"""
The base of every store: runs statements, resolves unknown results, makes indexes.

With `calls` the only module that talks to the driver about documents.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import attrs
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import InsertOne
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import BulkWriteError, DocumentTooLarge, DuplicateKeyError, WriteError

from mscheduler_sync._runtime import backoff
from mscheduler_sync._runtime.log import logger
from mscheduler_sync._storage.calls import CALL_TIMEOUT_S, ServerCalls, with_own_settings
from mscheduler_sync._storage.codec import envelope
from mscheduler_sync._storage.server_codes import DUPLICATE_KEY
from mscheduler_sync._storage.statement import Delete, Document, Find, Index, Insert, Update
from mscheduler_sync.errors import StoreError, StoreRejected, StoreUnavailable

_log = logger("store")
_Item = TypeVar("_Item")

#: A bulk of inserts, and what works on many documents, may take longer than other calls: seconds.
_BULK_TIMEOUT_S, _MANY_TIMEOUT_S = 20.0, 60.0


@attrs.frozen
class BatchResult:
    """
    What became of a statement about several documents.
    """

    matched: int
    #: Position of the item -> what the server says of it alone.
    errors: Mapping[int, str]


class MongoStore(ServerCalls):
    """
    The one way to some collections. Thread-safe.

    *collections* has their names in the database by those in statements.
    """

    def __init__(
        self,
        database: Database[Any],
        collections: Mapping[str, str],
        indexes: Sequence[Index],
        codec_options: CodecOptions[Any] | None = None,
    ) -> None:
        super().__init__(database)
        #: How the application codes its values.
        self.codec_options: Final = codec_options or database.codec_options
        #: With the library's own settings; for the change stream.
        self.collections: Final[Mapping[str, Collection[RawBSONDocument]]] = {
            name: with_own_settings(database[real]) for name, real in collections.items()
        }
        self._indexes = indexes
        # Under _lock.
        self._indexes_at_s = float("-inf")

    @property
    def max_pool_size(self) -> int | None:
        """
        How many connections the application's client opens at most; None: any number.
        """
        size = self._database.client.options.pool_options.max_pool_size
        return None if size is None else int(size)

    # -- indexes -----------------------------------------------------------------------------

    def ensure_indexes(self, *, max_age_s: float = float("inf")) -> None:
        """
        Create the indexes unless that was done within *max_age_s* seconds.

        A missing privilege costs one warning, not the work.
        """
        with self._lock:
            if time.monotonic() - self._indexes_at_s < max_age_s:
                return
        for index in self._indexes:
            collection = self.collections[index.collection]
            about = {"index": index.name, "collection": collection.full_name}
            try:
                with self._call(_MANY_TIMEOUT_S):
                    collection.create_index(index.keys, name=index.name, **index.options)
            except DuplicateKeyError:
                # Not slower but wrong: two documents under one key.
                _log.error(
                    "several documents have the same key; remove all but one of them",
                    event="duplicate_keys",
                    **about,
                )
            except StoreRejected as error:
                if self._log_throttle.allows("indexes"):
                    _log.warning(
                        "an index could not be created; everything works, slower",
                        event="index_refused",
                        **about,
                        error=str(error)[:500],
                    )
        with self._lock:
            self._indexes_at_s = time.monotonic()

    def forget_indexes(self) -> None:
        """
        Create the indexes again at the next chance: the collection was dropped or replaced.
        """
        with self._lock:
            self._indexes_at_s = float("-inf")

    # -- reading -----------------------------------------------------------------------------

    def find(
        self,
        query: Find,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        session: ClientSession | None = None,
    ) -> list[RawBSONDocument]:
        """
        Run one bounded read; the documents are not decoded.
        """
        with self._call(timeout_s, session=session):
            cursor = self.collections[query.collection].find(
                query.filter, query.projection or None, limit=query.limit, session=session
            )
            if query.sort:
                cursor = cursor.sort(query.sort)
            # One batch: a second round trip would be a second command.
            return list(cursor.batch_size(max(query.limit, 2)) if query.limit else cursor)

    def read(self, query: Find) -> list[Document]:
        """
        Run one bounded read, and decode what it finds with the library's own codec.
        """
        return [envelope(document) for document in self.find(query)]

    def read_one(self, query: Find) -> Document | None:
        found = self.read(query)
        return found[0] if found else None

    def count(self, query: Find) -> int:
        """
        Count what *query* would find without its limit.
        """
        with self._call():
            return self.collections[query.collection].count_documents(query.filter)

    # -- writing -----------------------------------------------------------------------------

    def insert(self, statement: Insert) -> bool:
        """
        Insert a new document; return False where its key is taken by another.

        An unknown result is resolved by trying again: the mark says whose document is there.
        """
        try:
            with self._call():
                self.collections[statement.collection].insert_one(statement.document)  # type: ignore[arg-type]
        except DuplicateKeyError as error:
            if not _is_about_key(error.details, statement):
                raise _refused_by_index(error) from error
            return self._is_mine(statement)
        return True

    def insert_many(self, statements: Sequence[Insert]) -> tuple[list[bool], dict[int, str]]:
        """
        Insert new documents of one collection unordered; return which were inserted, and the
        errors by position.

        A position that is neither inserted nor in error had a key that is taken.
        """
        inserted = [True] * len(statements)
        errors: dict[int, str] = {}
        try:
            with self._call(_BULK_TIMEOUT_S):
                self.collections[statements[0].collection].bulk_write(
                    [InsertOne(statement.document) for statement in statements],  # type: ignore[arg-type]
                    ordered=False,
                )
        except BulkWriteError as error:
            for failure in error.details.get("writeErrors", []):
                position = failure["index"]
                statement = statements[position]
                inserted[position] = False
                is_taken = failure.get("code") == DUPLICATE_KEY
                if not is_taken or not _is_about_key(failure, statement):
                    errors[position] = str(failure.get("errmsg", failure.get("code")))[:500]
                elif self._is_mine(statement):
                    inserted[position] = True
            if error.details.get("writeConcernErrors"):
                raise StoreUnavailable(str(error.details["writeConcernErrors"])[:500]) from error
        return inserted, errors

    def _is_mine(self, statement: Insert) -> bool:
        where = {statement.unique: statement.document[statement.unique]}
        found = self.read_one(Find(statement.collection, where, {statement.mark: 1}, limit=1))
        return found is not None and found.get(statement.mark) == statement.document[statement.mark]

    def update(
        self,
        statement: Update,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        session: ClientSession | None = None,
    ) -> tuple[int, int]:
        """
        Run one conditional write; return how many documents it matched (or made) and changed.
        """
        collection = self.collections[statement.collection]
        update = collection.update_many if statement.many else collection.update_one
        arguments = (statement.filter, statement.pipeline, statement.upsert)
        try:
            with self._call(timeout_s, session=session):
                result = update(*arguments, session=session)
        except DuplicateKeyError as error:
            if session is not None:
                raise
            if not statement.upsert:
                raise _refused_by_index(error) from error
            # Two upserts at once: the second finds what the first has made.
            try:
                with self._call(timeout_s):
                    result = update(*arguments)
            except DuplicateKeyError as again:
                raise StoreUnavailable(str(again)[:500]) from again
        made = 0 if result.upserted_id is None else 1
        return result.matched_count + made, result.modified_count + made

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

    def delete(self, statement: Delete, *, session: ClientSession | None = None) -> int:
        """
        Run one conditional removal; return how many documents are gone.
        """
        collection = self.collections[statement.collection]
        with self._call(_MANY_TIMEOUT_S if statement.many else CALL_TIMEOUT_S, session=session):
            remove = collection.delete_many if statement.many else collection.delete_one
            return remove(statement.filter, session=session).deleted_count

    def insist(
        self,
        statement: Update | Delete,
        *,
        may_go_on: Callable[[], bool],
        give_up: threading.Event,
    ) -> int | None:
        """
        Run *statement* until it is acknowledged; return how many documents it matched.

        None: it was given up, for *may_go_on* says no or *give_up* is set; it may have happened.
        """
        failures = 0
        while may_go_on():
            try:
                if isinstance(statement, Update):
                    return self.update(statement)[0]
                return self.delete(statement)
            except StoreError as error:
                failures += 1
                if isinstance(error, StoreRejected) and self._log_throttle.allows(str(error)):
                    _log.error(
                        "the server refuses a statement; will try again",
                        event="write_refused",
                        exc_info=error,
                    )
                pause_s = backoff.delay_s(failures, first_s=0.1, cap_s=1.0)
                if give_up.wait(backoff.jittered(pause_s)):
                    return None
        return None


def _is_about_key(failure: Mapping[str, Any] | None, statement: Insert) -> bool:
    """
    Whether a duplicate is one of the document's key (or _id), not of an index of the application.
    """
    pattern = (failure or {}).get("keyPattern")
    return not isinstance(pattern, Mapping) or list(pattern) in ([statement.unique], ["_id"])


def _refused_by_index(error: DuplicateKeyError) -> StoreRejected:
    fields = list((error.details or {}).get("keyPattern", ()))
    return StoreRejected(f"another unique index of the collection refuses it, on {fields}")
