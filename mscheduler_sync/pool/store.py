"""
The store of the pools of a database.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bson.raw_bson import RawBSONDocument
from pymongo.collection import Collection
from pymongo.database import Database

from mscheduler_sync._storage.mongo_store import MongoStore
from mscheduler_sync._storage.statement import Document
from mscheduler_sync.pool import statements

_STOPPED: Final = {"type": "JobStopped", "text": "it was stopped before it started"}


class PoolStore(MongoStore):
    """
    The one way to the collections of the pools of a database, for members of *pool*.
    """

    def __init__(self, database: Database[Any], prefix: str, pool: str) -> None:
        names = {name: f"{prefix}{name}" for name in statements.COLLECTIONS}
        super().__init__(database, names, statements.INDEXES)
        self.pool = pool

    @property
    def jobs(self) -> Collection[RawBSONDocument]:
        """
        The collection of the jobs, for the change stream.
        """
        return self.collections["jobs"]

    def file_failure(self, job_id: str, dispatch_id: str, error: Mapping[str, Any]) -> None:
        """
        Put the verdict of a failed job where its dispatcher finds it, and free the key.

        May be done by anybody, and more than once.
        """
        key = statements.name_in(self.pool, job_id)
        self.update(statements.jobs.put_result(dispatch_id, self.pool, key, error))
        self.delete(statements.jobs.remove_failed(job_id, dispatch_id))

    def end_pending(self, job: Document) -> bool:
        """
        End a pending job that is to be stopped; return False if it is not pending any more.
        """
        job_id, dispatch_id = job["_id"], job["dispatch_id"]
        if job["answered"] is not None:
            return self.delete(statements.jobs.remove_pending(job_id, dispatch_id)) > 0
        if not self.update(statements.jobs.cancel(job_id, dispatch_id, _STOPPED))[0]:
            return False
        self.file_failure(job_id, dispatch_id, _STOPPED)
        return True
