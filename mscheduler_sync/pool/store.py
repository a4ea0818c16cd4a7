"""
Runs the statements of the pool.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import pymongo
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import DuplicateKeyError

from mscheduler_sync._runtime import backoff
from mscheduler_sync._runtime.log import logger
from mscheduler_sync._storage.calls import CALL_TIMEOUT_S, ServerCalls, trusted
from mscheduler_sync._storage.codec import envelope
from mscheduler_sync.errors import StoreError, StoreRejected, StoreUnavailable
from mscheduler_sync.pool import statements
from mscheduler_sync.pool.statements import Document, Read, Removal, Where, Write

_log = logger("pool")

#: Shorter time-outs are kept to by this module itself, in seconds.
_SHORT_S: Final = 0.5
_STOPPED: Final = {"type": "JobStopped", "text": "it was stopped before it started"}
_WHERE: Final[tuple[Where, ...]] = (
    "pools",
    "nodes",
    "workers",
    "jobs",
    "results",
    "tickers",
    "schedules",
)


class PoolStore(ServerCalls):
    """
    The one way to the collections of the pools of a database, for members of *pool*.
    """

    def __init__(self, database: Database[Any], prefix: str, pool: str) -> None:
        super().__init__(database)
        self.pool = pool
        #: How the application codes its values.
        self.codec_options: CodecOptions[Any] = database.codec_options
        self._collections: dict[Where, Collection[RawBSONDocument]] = {
            where: trusted(database[f"{prefix}{where}"]) for where in _WHERE
        }

    @property
    def max_pool_size(self) -> int | None:
        """
        How many connections the application's client opens at most; None: any number.
        """
        size = self._database.client.options.pool_options.max_pool_size
        return None if size is None else int(size)

    @property
    def jobs(self) -> Collection[RawBSONDocument]:
        """
        The collection of the jobs, for the change stream.
        """
        return self._collections["jobs"]

    def ensure_indexes(self) -> None:
        """
        Create the indexes. A missing privilege costs one warning, not the work.
        """
        for where, keys, options in statements.INDEXES:
            try:
                with self._call(60.0):
                    self._collections[where].create_index(keys, **options)
            except StoreRejected as error:
                if self._log_throttle.allows("indexes"):
                    _log.warning(
                        "an index could not be created; the pool works, slower",
                        extra={
                            "event": "index_refused",
                            "index": options["name"],
                            "error": str(error)[:500],
                        },
                    )

    def read_raw(self, query: Read) -> list[RawBSONDocument]:
        with self._call():
            cursor = self._collections[query.where].find(
                query.filter, query.projection, limit=query.limit
            )
            if query.sort:
                cursor = cursor.sort([query.sort])
            # One batch: a second round trip would be a second command.
            return list(cursor.batch_size(max(query.limit, 2)) if query.limit else cursor)

    def read(self, query: Read) -> list[Document]:
        return [envelope(document) for document in self.read_raw(query)]

    def read_one(self, query: Read) -> Document | None:
        found = self.read(query)
        return found[0] if found else None

    def count(self, where: Where, condition: Document) -> int:
        with self._call():
            return self._collections[where].count_documents(condition)

    def insert_job(self, document: Document) -> bool:
        """
        Insert a new job; return False where the key is taken by another dispatch.

        An unknown outcome is settled by trying again: the dispatch id says whose it is.
        """
        try:
            with self._call():
                self._collections["jobs"].insert_one(document)  # type: ignore[arg-type]
        except DuplicateKeyError:
            found = self.read_one(statements.jobs.job(document["_id"], {"dispatch_id": 1}))
            return found is not None and found["dispatch_id"] == document["dispatch_id"]
        return True

    def write(self, statement: Write, *, timeout_s: float = CALL_TIMEOUT_S) -> tuple[int, int]:
        """
        Run one conditional write; return how many documents it matched (or made) and changed.
        """
        collection = self._collections[statement.where]
        update = collection.update_many if statement.many else collection.update_one
        for again in (True, False):
            try:
                with self._call(timeout_s), _exactly(timeout_s):
                    result = update(statement.filter, statement.pipeline, upsert=statement.upsert)
                made = 0 if result.upserted_id is None else 1
                return result.matched_count + made, result.modified_count + made
            except DuplicateKeyError as error:
                # Two upserts at once: the second finds what the first has made.
                if not again:
                    raise StoreUnavailable(str(error)[:500]) from error
        raise AssertionError

    def remove(self, statement: Removal) -> int:
        collection = self._collections[statement.where]
        with self._call():
            if statement.many:
                return collection.delete_many(statement.filter).deleted_count
            return collection.delete_one(statement.filter).deleted_count

    def file_failure(self, job_id: str, dispatch_id: str, error: Mapping[str, Any]) -> None:
        """
        Put the verdict of a failed job where its dispatcher finds it, and free the key.

        May be done by anybody, and more than once.
        """
        key = statements.name_in(self.pool, job_id)
        self.write(statements.jobs.put_result(dispatch_id, self.pool, key, error))
        self.remove(statements.jobs.remove_failed(job_id, dispatch_id))

    def end_pending(self, job: Document) -> bool:
        """
        End a pending job that is to be stopped; return False if it is not pending any more.
        """
        job_id, dispatch_id = job["_id"], job["dispatch_id"]
        if job["answered"] is not None:
            return self.remove(statements.jobs.remove_pending(job_id, dispatch_id)) > 0
        if not self.write(statements.jobs.cancel(job_id, dispatch_id, _STOPPED))[0]:
            return False
        self.file_failure(job_id, dispatch_id, _STOPPED)
        return True

    def insist(
        self,
        statement: Write | Removal,
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
                if isinstance(statement, Write):
                    return self.write(statement)[0]
                return self.remove(statement)
            except StoreError as error:
                failures += 1
                if isinstance(error, StoreRejected) and self._log_throttle.allows(str(error)):
                    _log.error(
                        "the server refuses a statement; will try again",
                        exc_info=error,
                        extra={"event": "write_refused"},
                    )
                pause_s = backoff.delay_s(failures, first_s=0.1, cap_s=1.0)
                if give_up.wait(backoff.jittered(pause_s)):
                    return None
        return None


def _exactly(timeout_s: float) -> AbstractContextManager[None]:
    """
    Bound a call by a short time-out: all calls are left half a second, but leases hang on this.
    """
    return pymongo.timeout(timeout_s) if timeout_s < _SHORT_S else nullcontext()
