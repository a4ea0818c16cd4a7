"""
A consumer whose process can be measured: the task "measure" returns what it takes up.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import Any

from pymongo import MongoClient
from pymongo.monitoring import (
    ConnectionCheckedInEvent,
    ConnectionCheckedOutEvent,
    ConnectionCheckOutFailedEvent,
    ConnectionCheckOutStartedEvent,
    ConnectionClosedEvent,
    ConnectionCreatedEvent,
    ConnectionPoolListener,
    ConnectionReadyEvent,
    PoolClearedEvent,
    PoolClosedEvent,
    PoolCreatedEvent,
    PoolReadyEvent,
)

from mscheduler_sync import Consumer
from tests.support.scripts.work import OPTIONS, URI, Document, say, say_report, wait_gate


class Connections(ConnectionPoolListener):
    """
    Counts the connections of a client.
    """

    def __init__(self) -> None:
        self.open = 0

    def connection_created(self, event: ConnectionCreatedEvent) -> None:
        self.open += 1

    def connection_closed(self, event: ConnectionClosedEvent) -> None:
        self.open -= 1

    def pool_created(self, event: PoolCreatedEvent) -> None: ...
    def pool_ready(self, event: PoolReadyEvent) -> None: ...
    def pool_cleared(self, event: PoolClearedEvent) -> None: ...
    def pool_closed(self, event: PoolClosedEvent) -> None: ...
    def connection_ready(self, event: ConnectionReadyEvent) -> None: ...
    def connection_check_out_started(self, event: ConnectionCheckOutStartedEvent) -> None: ...
    def connection_check_out_failed(self, event: ConnectionCheckOutFailedEvent) -> None: ...
    def connection_checked_out(self, event: ConnectionCheckedOutEvent) -> None: ...
    def connection_checked_in(self, event: ConnectionCheckedInEvent) -> None: ...


def main() -> None:
    connections = Connections()
    client: MongoClient[Document] = MongoClient(URI, event_listeners=[connections])
    tasks = client[sys.argv[2]].tasks

    def work(params: Any) -> Any:
        if params == "measure":
            kinds = Counter(t.name.split(":")[0] for t in threading.enumerate())
            return {"threads": dict(kinds), "connections": connections.open}
        if params == "gate":
            wait_gate("work")
        return params

    consumer = Consumer(tasks, work, **OPTIONS.get("consumer", {}))
    consumer.start()
    assert consumer.wait_started(60)
    say("ready", consumer.worker_id)
    say_report(consumer.run_forever())


if __name__ == "__main__":
    main()
