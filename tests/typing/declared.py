"""
What type checkers make of declared tasks; never run.

Each line with ``type: ignore`` is an error of a user's that has to be found: both checkers are told
to refuse such a comment where there is no error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mscheduler_sync import App, DeclaredTask, SendResult, TaskContext

if TYPE_CHECKING:
    from typing_extensions import assert_type

app = App("mongodb://localhost/shop", "tasks", defaults={"max_attempts": 5})
App("mongodb://localhost/shop", "tasks", defaults={"max_attempt": 5})  # type: ignore[arg-type]


@app.task
def bare(order_id: int, *, copy: bool = False) -> str:
    return str((order_id, copy))


@app.task(lease=30, retry_on=(ConnectionError,), retry_delay=[1, 10], key="invoice:{order_id}")
def with_options(order_id: int, *, copy: bool = False) -> str:
    return str((order_id, copy))


@app.task(retry_delay=lambda attempt, error: attempt * 2.0)
def told(context: TaskContext, url: str) -> int:
    return len(url) + context.attempt


@app.task
def told_perhaps(url: str, context: TaskContext | None = None) -> None: ...


def sends() -> None:
    assert_type(bare.send(42, copy=True), SendResult)
    assert_type(bare(42), str)
    assert_type(bare.result("k", 1.0), str)
    assert_type(with_options.using(delay=60, key=None, priority=5).send(order_id=42), SendResult)
    assert_type(with_options.using(delay=60).result("k"), str)
    assert_type(told.send("https://example.com"), SendResult)
    assert_type(told.result("k"), int)
    assert_type(told_perhaps.send("https://example.com"), SendResult)
    told.send_many(["a", "b"])
    taken: DeclaredTask[[str], int] = told
    taken.send("a")


def works() -> None:
    app.consumer(max_workers=8, watch=False).run_forever()
    assert_type(app.names(), tuple[str, ...])


def mistakes(context: TaskContext) -> None:
    bare.send("42")  # type: ignore[arg-type]
    app.consumer(max_worker=8)  # type: ignore[call-arg]
    bare.send()  # type: ignore[call-arg]
    bare.send(42, True)  # type: ignore[call-arg]
    bare.send(42, copies=True)  # type: ignore[call-arg]
    bare("42")  # type: ignore[arg-type]
    with_options.using(delay=60).send("42")  # type: ignore[arg-type]
    with_options.using(delays=60)  # type: ignore[call-arg]
    with_options.using(priority="high")  # type: ignore[arg-type]
    told.send(context, "https://example.com")  # type: ignore[call-arg, arg-type]
    told("https://example.com")  # type: ignore[call-arg, arg-type]
    told.send(42)  # type: ignore[arg-type]


@app.task(leases=30)  # type: ignore[call-overload, untyped-decorator]
def with_unknown_option() -> None: ...
