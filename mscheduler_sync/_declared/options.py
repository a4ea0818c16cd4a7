"""
The options of declared tasks: of the app, of a task, of one send; each overrides those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from pymongo.client_session import ClientSession

from mscheduler_sync._declared.retries import RetryDelay
from mscheduler_sync._storage.sending import SendOptions, SharedOptionsDict
from mscheduler_sync.settings import Duration, seconds


class TaskDefaults(SharedOptionsDict, total=False):
    """
    Options of ``@app.task``, and of ``App(defaults=...)``.
    """

    #: A pause; one for each failure in turn, the last for all others; or a function that is
    #: given the attempt's number and the error.
    retry_delay: RetryDelay
    #: Only these exceptions are retried.
    retry_on: type[BaseException] | Sequence[type[BaseException]] | None
    #: These exceptions are not retried.
    give_up_on: type[BaseException] | Sequence[type[BaseException]] | None


class CallOptions(SharedOptionsDict, total=False):
    """
    Options of `DeclaredTask.using`.
    """

    #: Instead of the key that the task makes of the arguments; None makes a unique one.
    key: str | None
    retry_delay: Duration
    #: Take part in the caller's transaction.
    session: ClientSession | None


class ConsumerOptions(TypedDict, total=False):
    """
    Options of `Consumer`, as they are there.
    """

    worker_id: str | None
    max_workers: int | None
    around: Callable[[], Any] | None
    watch: bool
    poll_interval: float
    queue_limit: int
    stop_timeout: float
    lease_margin: float | None
    max_result_bytes: int
    rust_interop: bool


#: Decided by the worker, and not stored as they are given.
WORKER_OPTIONS = frozenset({"retry_on", "give_up_on", "retry_delay"})
#: What belongs to the computation of a delay, and cannot be changed for one send.
DELAY_OPTIONS = frozenset({"retry_delay", "retry_backoff", "retry_max_delay", "retry_jitter"})


def check_known(options: Mapping[str, Any], allowed: type, owner: str) -> None:
    """
    Raises:
        TypeError: If an option is not one of the class *allowed*.
    """
    unknown = sorted(set(options) - set(allowed.__annotations__))
    if unknown:
        msg = f"{owner}: unknown options: {', '.join(unknown)}"
        raise TypeError(msg)


def checked(options: Mapping[str, Any], task: str) -> dict[str, Any]:
    """
    Return the *options* of a send, complete with what follows from them.

    Raises:
        TypeError, ValueError: Naming the task, the option and the rule.
    """
    complete = {**options, "name": task}
    if "lease" in options and "heartbeat" not in options:
        # Three chances, whatever the lease.
        complete["heartbeat"] = seconds(options["lease"], "lease") / 3
    try:
        SendOptions.checked(**{k: v for k, v in complete.items() if k != "session"})
    except (TypeError, ValueError) as error:
        msg = f"task {task!r}: {error}"
        raise type(error)(msg) from error
    return complete
