"""
The routes of the index that one consumer may take tasks from.

Asked by whoever discovers tasks: the watcher for each document, the fetcher for its queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from mscheduler_sync._storage import expressions as x
from mscheduler_sync._storage import statements


class Routes:
    """
    The routes of a worker that knows the functions *names* (None: it takes any name). Immutable.
    """

    def __init__(self, worker_id: str, names: Sequence[str | None] | None) -> None:
        self.worker_id: Final = worker_id
        self.names: Final = None if names is None else tuple(names)
        open_routes = (
            [x.ROUTE_UNNAMED, x.ROUTE_ANY_NAME]
            if names is None
            else [x.ROUTE_UNNAMED if name is None else x.route_of_name(name) for name in names]
        )
        #: (route, condition that the route itself does not imply)
        self.queries: Final[list[tuple[str, dict[str, Any]]]] = [
            *((route, {}) for route in open_routes),
            (x.route_of_worker(worker_id), statements.discovery.eligible_name(names)),
            (x.ROUTE_SHARED, statements.discovery.eligible_in_shared_routes(worker_id, names)),
        ]
        self._mine = frozenset(route for route, _ in self.queries)

    def include(self, routes: object) -> bool:
        """
        Return whether a task that stands in *routes* may be one for this consumer.
        """
        if isinstance(routes, str):
            return routes in self._mine
        return isinstance(routes, Sequence) and any(route in self._mine for route in routes)
