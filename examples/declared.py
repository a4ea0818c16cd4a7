"""
A declared task with retries, and its worker.

    python examples/declared.py

Uses the embedded server (pip install 'mscheduler_sync[embedded]'), or the server that
MSCHEDULER_URI names, in a database of its own that is dropped at the end.
"""

from __future__ import annotations

import datetime as dt
import uuid
from decimal import Decimal
from typing import Any

from pymongo import MongoClient
from pymongo.collection import Collection

from mscheduler_sync import App, TaskContext, TaskFailed
from mscheduler_sync.embedded import open_server

DATABASE = f"example_{uuid.uuid4().hex[:8]}"
client: MongoClient[Any]


def open_tasks() -> Collection[Any]:
    # Called at the first send, not when this module is imported.
    return client[DATABASE].tasks


app = App(open_tasks, defaults={"max_attempts": 5})


@app.task(key="invoice:{order_id}", retry_on=ConnectionError, retry_delay=[0.2, 1, 10])
def send_invoice(context: TaskContext, order_id: int, total: Decimal, *, due: dt.date) -> str:
    if context.attempt < 3:
        raise ConnectionError("the mail server is busy")
    if total < 0:
        raise ValueError("nobody owes a negative sum")
    return f"{order_id}: {total} due on {due:%d %B}, sent in attempt {context.attempt}"


def run() -> None:
    christmas = dt.date(2026, 12, 24)
    print("new:", send_invoice.send(42, Decimal("19.90"), due=christmas).inserted)
    print("again:", send_invoice.send(42, Decimal("19.90"), due=christmas).inserted)
    send_invoice.using(priority=5).send(43, Decimal(-1), due=christmas)
    try:
        send_invoice.send("44", Decimal(1), due=christmas)  # type: ignore[arg-type]
    except TypeError as error:
        print("refused:", error)
    with app.consumer(max_workers=8):
        print("result:", send_invoice.result("invoice:42", timeout=30))
        try:
            send_invoice.result("invoice:43", timeout=30)
        except TaskFailed as error:
            print(error)


if __name__ == "__main__":
    with open_server() as uri, MongoClient(uri) as client:
        run()
        client.drop_database(DATABASE)
