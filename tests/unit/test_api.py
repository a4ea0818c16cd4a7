"""
The public surface: names, signatures, and the tree of errors.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, get_args

import attrs
import pytest

import mscheduler_sync
from mscheduler_sync import (
    Consumer,
    Event,
    MSchedulerError,
    Producer,
    Router,
    StopReport,
    Subscription,
    TaskContext,
    errors,
)
from mscheduler_sync._storage.sending import SendOptions, SendOptionsDict, SharedOptionsDict
from mscheduler_sync.pool import Node
from mscheduler_sync.pool.settings import NodeOptions
from mscheduler_sync.settings import ConsumerOptions

EMPTY = inspect.Parameter.empty

#: Of `Producer.send`, in order.
SEND_OPTIONS: dict[str, Any] = {
    "run_at": None,
    "delay": None,
    "priority": 0,
    "concurrency": 1,
    "max_attempts": 3,
    "retry_delay": 10,
    "retry_backoff": 1.0,
    "retry_max_delay": None,
    "retry_jitter": 0.0,
    "retry_scope": "task",
    "lease": 60,
    "heartbeat": 20,
    "timeout": None,
    "keep_finished": None,
    "worker_ids": (),
    "name": None,
    "tags": (),
    "if_exists": "keep",
    "if_running": "apply",
    "clean_success": False,
    "clean_failed": False,
    "session": None,
}


def defaults(function: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """
    The positional and the keyword-only parameters of a function, with their defaults.
    """
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    keyword = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    return positional, keyword


def defaults_of_options(cls: type[attrs.AttrsInstance]) -> dict[str, Any]:
    """
    The arguments of a class of options, in order, with their defaults.
    """
    fields = attrs.fields(cls)
    return {
        str(field.alias): field.default for field in fields if field.default is not attrs.NOTHING
    }


def public() -> dict[str, object]:
    return {name: getattr(mscheduler_sync, name) for name in mscheduler_sync.__all__}


def test_every_public_name_exists_once() -> None:
    """
    What is announced can be imported, and nothing is announced twice.
    """
    assert len(set(mscheduler_sync.__all__)) == len(mscheduler_sync.__all__)
    assert set(public()) == set(mscheduler_sync.__all__)


def test_nothing_public_is_missing_from_the_list() -> None:
    """
    Every class that the package imports is announced.
    """
    classes = {
        name
        for name, value in vars(mscheduler_sync).items()
        if isinstance(value, type) and not name.startswith("_")
    }
    assert classes <= set(mscheduler_sync.__all__)


def test_the_names_that_were_promised() -> None:
    """
    These names are fixed: others may come, none may go.
    """
    assert {
        "Producer",
        "SendResult",
        "Consumer",
        "StopReport",
        "Router",
        "TaskContext",
        "TaskFound",
        "QueueEmpty",
        "AttemptStarted",
        "AttemptEnded",
        "TaskSucceeded",
        "MSchedulerError",
        "TaskExists",
        "TaskRunning",
        "TaskNotFound",
        "TaskFailed",
        "TaskCancelled",
        "LeaseLost",
        "StoreError",
        "StoreUnavailable",
        "StoreRejected",
        "ComponentCrashed",
    } <= set(mscheduler_sync.__all__)


def test_the_version_is_a_version() -> None:
    """
    Three numbers.
    """
    assert len([int(part) for part in mscheduler_sync.__version__.split(".")]) == 3


def test_every_public_class_and_function_is_documented() -> None:
    """
    Each has a description of its own, and so has each method that applications call.
    """
    for name, value in public().items():
        if isinstance(value, type) or inspect.isfunction(value):
            assert value.__doc__, name
    methods = [Subscription.get, Subscription.wait_for, Subscription.close]
    for kind in (Producer, Consumer, Router, TaskContext):
        methods += [method for name, method in vars(kind).items() if name[0] != "_"]
    assert [method for method in methods if callable(method) and not method.__doc__] == []


def test_the_signature_of_send() -> None:
    """
    A key, params, and everything else by keyword only.
    """
    positional, keyword = defaults(Producer.send)
    assert positional == {"key": EMPTY, "params": None}
    assert keyword == SEND_OPTIONS
    assert list(keyword) == list(SEND_OPTIONS)


@pytest.mark.parametrize(
    ("function", "options", "others"),
    [
        (Producer.send, SendOptions, {"session": None}),
        (Consumer.__init__, ConsumerOptions, {}),
        (Node.__init__, NodeOptions, {}),
    ],
)
def test_a_signature_lists_the_options_of_its_class(
    function: Callable[..., Any], options: type[attrs.AttrsInstance], others: dict[str, Any]
) -> None:
    """
    The same names in the same order, by keyword only, with the same defaults.
    """
    expected = {**defaults_of_options(options), **others}
    _, keyword = defaults(function)
    assert keyword == expected
    assert list(keyword) == list(expected)
    assert [type(value) for value in keyword.values()] == [type(v) for v in expected.values()]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (Producer.send.__doc__, SendOptions),
        (Consumer.__doc__, ConsumerOptions),
        (Node.__doc__, NodeOptions),
    ],
)
def test_a_docstring_describes_every_option_of_its_class(
    text: str, options: type[attrs.AttrsInstance]
) -> None:
    """
    Each stands before a colon under "Arguments", alone or with others, and nothing else does.
    """
    section = text.partition("Arguments")[2].partition("Raises:")[0]
    named = {
        name
        for line in re.findall(r"^ {8,12}(\w+(?:, \w+)*): ", section, re.MULTILINE)
        for name in line.split(", ")
    }
    assert named - {"params", "session", "database", "pool"} == set(defaults_of_options(options))


def test_the_types_for_editors_are_those_of_the_signature() -> None:
    """
    What `send_many` and `update` take by keyword is what `send` takes, name by name.
    """
    written = {
        name: parameter.annotation
        for name, parameter in inspect.signature(Producer.send).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name != "session"
    }
    typed = {name: hint.__forward_arg__ for name, hint in SendOptionsDict.__annotations__.items()}
    assert typed == written
    shared = SharedOptionsDict.__annotations__
    assert list(shared) == [name for name in written if name in shared]
    for function in (Producer.send_many, Producer.update, SendOptions.checked):
        assert function.__annotations__["options"] == "Unpack[SendOptionsDict]"


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("send_many", ["items"]),
        ("get", ["key"]),
        ("list", []),
        ("count", []),
        ("result", ["key", "timeout"]),
        ("update", ["key", "params"]),
        ("cancel", ["key"]),
        ("retry", ["key"]),
        ("delete", ["key"]),
        ("delete_finished", ["older_than"]),
    ],
)
def test_the_methods_of_a_producer(name: str, first: list[str]) -> None:
    """
    What they take by position is fixed.
    """
    positional, _ = defaults(getattr(Producer, name))
    assert list(positional) == first


def test_the_signature_of_a_producer() -> None:
    """
    A collection, nothing else.
    """
    assert defaults(Producer.__init__) == ({"collection": EMPTY}, {})


def test_the_signature_of_a_consumer() -> None:
    """
    A collection, a function or a router, and everything else by keyword only.
    """
    positional, keyword = defaults(Consumer.__init__)
    assert positional == {"collection": EMPTY, "func_or_router": EMPTY}
    expected = {"worker_id": None, "max_workers": None, "around": None, "watch": True}
    assert expected.items() <= keyword.items()
    assert EMPTY not in keyword.values()


@pytest.mark.parametrize(
    ("name", "positional"),
    [
        ("start", {}),
        ("wait_started", {"timeout": None}),
        ("stop", {"timeout": None}),
        ("run_forever", {}),
        ("run_until_idle", {"timeout": None}),
        ("wait_for_event", {"predicate": EMPTY, "timeout": None}),
        ("health", {}),
    ],
)
def test_the_methods_of_a_consumer(name: str, positional: dict[str, Any]) -> None:
    """
    What they take is fixed.
    """
    assert defaults(getattr(Consumer, name))[0] == positional


@pytest.mark.parametrize("name", ["worker_id", "max_workers", "running_count"])
def test_the_properties_of_a_consumer(name: str) -> None:
    """
    They are read without a call; only the number of workers can be set.
    """
    found = inspect.getattr_static(Consumer, name)
    assert isinstance(found, property)
    assert (found.fset is not None) == (name == "max_workers")


def test_consumers_are_context_managers() -> None:
    """
    Entering starts, leaving stops.
    """
    assert {"__enter__", "__exit__"} <= set(vars(Consumer))


def test_a_stop_report_tells_three_things() -> None:
    """
    What finished, what was given back, what was left behind; all empty at first.
    """
    assert {"finished", "released", "abandoned"} <= {f.name for f in attrs.fields(StopReport)}
    assert set(attrs.astuple(StopReport())) == {()}


def test_a_router_is_used_as_a_decorator_or_with_a_default() -> None:
    """
    The two ways to fill it.
    """
    assert defaults(Router.__init__) == ({}, {"default": None})
    assert defaults(Router.task) == ({"name": EMPTY}, {})


def test_all_errors_are_in_one_tree() -> None:
    """
    One class catches all; what steers a task is not an error and stands apart.
    """
    found = [
        value
        for value in public().values()
        if isinstance(value, type) and issubclass(value, BaseException)
    ]
    steering = {errors.RetryLater, errors.PermanentFailure, errors.Snooze}
    assert {one for one in found if not issubclass(one, MSchedulerError)} == steering
    assert issubclass(errors.StoreUnavailable, errors.StoreError)
    assert issubclass(errors.StoreRejected, errors.StoreError)
    in_module = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    assert in_module == set(found)


def test_no_event_shares_a_name_with_an_error() -> None:
    """
    A log or a traceback with the name alone is clear.
    """
    kinds = [value for value in public().values() if isinstance(value, type)]
    events = {kind.__name__ for kind in kinds if issubclass(kind, Event)}
    raised = {kind.__name__ for kind in kinds if issubclass(kind, BaseException)}
    assert events
    assert not events & raised


@pytest.mark.parametrize(
    "error",
    [
        errors.TaskExists("k"),
        errors.TaskRunning("k"),
        errors.TaskNotFound("k"),
        errors.TaskFailed("k", "first line\nsecond line"),
        errors.TaskFailed("k", None),
        errors.TaskFailed("k", ""),
        errors.TaskCancelled("k"),
        errors.InvalidTask("k", "task_option.priority", "must be a number"),
        errors.LeaseLost("k", "r"),
    ],
    ids=repr,
)
def test_errors_about_a_task_carry_its_key(error: Any) -> None:
    """
    The key is there for programs, and in the text for people.
    """
    assert error.key == "k"
    assert "'k'" in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize("kind", [errors.RetryLater, errors.Snooze])
@pytest.mark.parametrize(
    ("delay", "error"),
    [
        (-1, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        (10**12, ValueError),
        (True, TypeError),
        ("5", TypeError),
        (None, TypeError),
    ],
)
def test_a_wrong_delay_is_refused_where_it_is_raised(
    kind: type[Exception], delay: object, error: type[Exception]
) -> None:
    """
    The function's own error shows the mistake.
    """
    with pytest.raises(error, match="delay must be"):
        kind(delay)


def test_steering_by_raising() -> None:
    """
    What a function may raise to say how its attempt ends.
    """
    assert errors.RetryLater(2).delay_s == 2.0
    assert errors.Snooze(0.5).delay_s == 0.5
    assert str(errors.RetryLater(2, "busy")) == "busy"
    assert str(errors.PermanentFailure("never")) == "never"


def test_statuses_are_words() -> None:
    """
    The five states of a task.
    """
    assert get_args(mscheduler_sync.Status) == (
        "waiting",
        "running",
        "succeeded",
        "failed",
        "cancelled",
    )
