"""
The store of tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Final

import attrs
from bson.raw_bson import RawBSONDocument
from pymongo.client_session import ClientSession
from pymongo.collection import Collection

from mscheduler_sync._storage import statements
from mscheduler_sync._storage.calls import CALL_TIMEOUT_S
from mscheduler_sync._storage.mongo_store import BatchResult, MongoStore
from mscheduler_sync._storage.statement import Update
from mscheduler_sync._storage.statements.attempts import Ref
from mscheduler_sync._storage.statements.base import TASKS

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


@attrs.frozen
class SuccessResult(BatchResult):
    """
    What became of some successes.
    """

    #: Positions of those that are known to have ended their tasks.
    ending: Set[int]


class TaskStore(MongoStore):
    """
    The one way to the collection of the tasks.
    """

    def __init__(self, collection: Collection[Any]) -> None:
        super().__init__(
            collection.database,
            {TASKS: collection.name},
            statements.discovery.INDEXES,
            collection.codec_options,
        )

    @property
    def collection(self) -> Collection[RawBSONDocument]:
        return self.collections[TASKS]

    def find_task(
        self,
        key: str,
        projection: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        session: ClientSession | None = None,
    ) -> RawBSONDocument | None:
        query = statements.producing.task(key, projection)
        found = self.find(query, timeout_s=timeout_s, session=session)
        return found[0] if found else None

    def succeed(self, successes: Sequence[Success], *, progress: object = None) -> SuccessResult:
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
        short = run(statements.plain.succeed_plain, plain)
        # If some are no plain tasks any more, all are tried: those that are done match no more.
        ending = set(plain) if short.matched == len(plain) else set()
        done = ending or set(short.errors)
        general = run(
            statements.attempts.succeed, [n for n in range(len(successes)) if n not in done]
        )
        # A success that the short statement has stored was the only one that its task needed.
        return SuccessResult(
            short.matched + general.matched, {**short.errors, **general.errors}, ending
        )
