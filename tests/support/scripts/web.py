"""
A web application with background threads beside its request threads.

The producer stands at module level; the consumer is started by an explicit call, as a web server's
hook does it. No framework: WSGI from the standard library.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from mscheduler_sync import Consumer, Producer, TaskContext, TaskNotFound
from tests.support.invariants import Witness
from tests.support.scripts.work import OPTIONS, client, say, speak

database = client()[sys.argv[2]]
producer = Producer(database.tasks)
witness = Witness(database.witness)

#: As a framework keeps its current application.
current_app: contextvars.ContextVar[str] = contextvars.ContextVar("current_app")


@contextlib.contextmanager
def app_context() -> Iterator[None]:
    token = current_app.set("shop")
    try:
        yield
    finally:
        current_app.reset(token)


def work(params: Any, context: TaskContext) -> dict[str, Any]:
    with witness.running(context):
        time.sleep(params.get("seconds", 0))
        return {"order": params["order"], "app": current_app.get()}


consumer = Consumer(database.tasks, work, around=app_context, max_workers=2)


def answer(method: str, path: str) -> tuple[str, object]:
    _, what, *rest = path.split("/")
    if method == "POST" and what == "orders":
        order, seconds = int(rest[0]), float(rest[1])
        return "201 Created", producer.send(None, {"order": order, "seconds": seconds}).key
    if what == "results":
        try:
            return "200 OK", producer.result(rest[0], timeout=30)
        except TaskNotFound:
            return "404 Not Found", None
    if what == "health":
        health = consumer.health()
        status = "200 OK" if health.ok else "503 Service Unavailable"
        return status, {"slots": f"{health.slots_taken}/{health.slots}", "state": health.state}
    return "404 Not Found", None


def application(
    environ: dict[str, Any], start_response: Callable[[str, list[tuple[str, str]]], Any]
) -> Iterable[bytes]:
    with app_context():
        status, body = answer(environ["REQUEST_METHOD"], environ["PATH_INFO"])
    start_response(status, [("Content-Type", "application/json")])
    return [json.dumps(body).encode()]


class ThreadingServer(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 64


class Silent(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def main() -> None:
    speak()
    if OPTIONS.get("consume", True):
        consumer.start()
    with make_server("127.0.0.1", 0, application, ThreadingServer, Silent) as server:
        say("port", server.server_port)
        say("threads", threading.current_thread().name)
        server.serve_forever()


if __name__ == "__main__":
    main()
