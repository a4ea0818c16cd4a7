"""
Declaring tasks, and what their sends become: names, keys, arguments, options.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import types
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from pymongo import MongoClient

from mscheduler_sync import App, Consumer, DeclaredTask, Producer, SendResult, TaskContext, app
from mscheduler_sync._declared.options import (
    CallOptions,
    ConsumerOptions,
    TaskDefaults,
)
from tests.unit.test_invocation import CONTEXT

if TYPE_CHECKING:
    from missing_module import Elsewhere  # type: ignore[import-not-found]

ROOT = Path(__file__).parents[2]


@attrs.define
class Sent:
    """
    What reached the producer.
    """

    key: str | None
    params: Any
    options: dict[str, Any]


class Recorder:
    """
    In the place of a producer.
    """

    sent: list[Sent]

    def __init__(self, _collection: object) -> None:
        pass

    def send(self, key: str | None, params: Any, **options: Any) -> SendResult:
        self.sent.append(Sent(key, params, options))
        return SendResult(key or "made", True, False, "waiting")

    def send_many(self, items: list[tuple[str | None, Any]], **options: Any) -> list[SendResult]:
        return [self.send(key, params, **options) for key, params in items]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Sent]:
    """
    The sends of all apps of the test.
    """
    Recorder.sent = []
    monkeypatch.setattr(app, "Producer", Recorder)
    return Recorder.sent


@pytest.fixture
def client() -> Iterator[MongoClient[Any]]:
    with MongoClient[Any]("mongodb://127.0.0.1:1/", connect=False) as client:
        yield client


@pytest.fixture
def tasks(client: MongoClient[Any]) -> App:
    return App(client.shop.tasks)


def invoice(order_id: int, *, copy: bool = False) -> str:
    """
    Send an invoice.
    """
    return f"{order_id} {copy}"


# -- the function stays ----------------------------------------------------------------------


def test_a_declared_function_stays_a_function(tasks: App) -> None:
    """
    Called it runs here; its name, text and signature are those of the function.
    """
    task = tasks.task(invoice)
    assert task(42, copy=True) == "42 True"
    assert task.__name__ == "invoice"
    assert task.__doc__ == invoice.__doc__
    assert inspect.signature(task) == inspect.signature(invoice)
    assert task.function is invoice
    assert repr(task) == f"DeclaredTask('{__name__}.invoice')"


def test_bare_and_with_parentheses(tasks: App) -> None:
    """
    Both forms of the decorator.
    """

    @tasks.task
    def one() -> None: ...

    @tasks.task()
    def two() -> None: ...

    assert isinstance(one, DeclaredTask)
    assert isinstance(two, DeclaredTask)
    here = f"{__name__}.test_bare_and_with_parentheses.<locals>"
    assert tasks.names() == (f"{here}.one", f"{here}.two")


def test_no_io_when_made_and_declared() -> None:
    """
    A module with an app can be imported without settings and without a server.
    """

    def fail() -> Any:
        raise AssertionError

    App(fail).task(invoice)
    App("mongodb+srv://user:secret@no.such.host.invalid/shop", "tasks").task(invoice)


# -- what is refused -------------------------------------------------------------------------


async def coroutine() -> None: ...


async def async_generator() -> AsyncIterator[int]:
    yield 1


def generator() -> Iterator[int]:
    yield 1


def positional_only(a: int, /) -> None: ...


def variable(*numbers: int) -> None: ...


def method(self: object, a: int) -> None: ...


def two_contexts(a: TaskContext, b: TaskContext) -> None: ...


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (coroutine, "is async"),
        (async_generator, "is async"),
        (generator, "generator function"),
        (positional_only, "stored by name, but a is positional-only"),
        (variable, r"stored by name, but \*numbers is variable"),
        (method, "a method cannot be declared"),
        (two_contexts, "a and b both take the TaskContext"),
        (3, "a function is needed"),
    ],
)
def test_functions_that_cannot_be_tasks(tasks: App, function: Any, problem: str) -> None:
    """
    Refused when declared, with the reason.
    """
    with pytest.raises(TypeError, match=problem):
        tasks.task(name="task")(function)


@pytest.mark.parametrize(
    ("options", "error", "problem"),
    [
        (
            {"key": "invoice:{order}"},
            ValueError,
            "asks for .order., but the parameters are",
        ),
        ({"key": "invoice:{}"}, ValueError, "asks for ''"),
        ({"key": "invoice:{order_id"}, ValueError, "is no template"),
        ({"key": lambda order: "x"}, ValueError, "asks for 'order'"),
        ({"key": 3}, TypeError, "key must be a template or a function"),
        ({"aliases": {"order_id": "copy"}}, ValueError, "must be a former name"),
        ({"aliases": {"number": "order"}}, ValueError, "must be a former name"),
        ({"name": ""}, ValueError, "a task name must have"),
        ({"leases": 3}, TypeError, "unknown options: leases"),
        ({"session": None}, TypeError, "unknown options: session"),
        ({"priority": "high"}, TypeError, "task .*invoice': priority must be a whole number"),
        ({"lease": 0}, ValueError, "lease must be at least"),
        ({"lease": 30, "heartbeat": 20}, ValueError, "at most half the lease"),
        ({"retry_on": ("ValueError",)}, TypeError, "retry_on must be exception classes"),
        ({"give_up_on": int}, TypeError, "give_up_on must be exception classes"),
        ({"retry_delay": []}, ValueError, "retry_delay must not be empty"),
        ({"retry_delay": [1, -1]}, ValueError, "each of retry_delay must be at least 0"),
        ({"retry_delay": "5"}, TypeError, "retry_delay must be a number of seconds"),
        ({"retry_delay": [1], "retry_jitter": 2}, ValueError, "retry_jitter must be"),
    ],
)
def test_wrong_options_are_refused_when_declared(
    tasks: App, options: dict[str, Any], error: type[Exception], problem: str
) -> None:
    """
    Not at the first send, which may be far from here.
    """
    with pytest.raises(error, match=problem):
        tasks.task(**options)(invoice)
    assert tasks.names() == ()


def test_a_name_is_declared_once(tasks: App) -> None:
    """
    Two functions of one name are a mistake; a module that is loaded again is none.
    """
    tasks.task(name="one")(invoice)
    again = types.FunctionType(invoice.__code__, invoice.__globals__)
    again.__module__, again.__qualname__ = invoice.__module__, invoice.__qualname__
    assert tasks.task(name="one")(again).function is again
    with pytest.raises(ValueError, match="the name 'one' is taken by"):
        tasks.task(name="one")(method_less)


def method_less() -> None: ...


@pytest.mark.parametrize(
    ("arguments", "error", "problem"),
    [
        ((3,), TypeError, "a collection, a URI or a function that returns a collection"),
        (("http://localhost/shop", "tasks"), ValueError, "like mongodb://host/database"),
        (("mongodb://localhost", "tasks"), ValueError, "like mongodb://host/database"),
        (("mongodb://localhost/", "tasks"), ValueError, "like mongodb://host/database"),
        (("mongodb://localhost/shop",), ValueError, "the collection's name beside it"),
        ((invoice, "tasks"), TypeError, "only beside a URI"),
    ],
)
def test_a_wrong_collection_is_refused(
    arguments: Any, error: type[Exception], problem: str
) -> None:
    """
    When the app is made, as far as that can be known.
    """
    with pytest.raises(error, match=problem):
        App(*arguments)


def test_a_function_that_returns_no_collection_is_named_at_the_first_use() -> None:
    """
    It was not asked before.
    """
    with pytest.raises(TypeError, match="must return a pymongo Collection, got NoneType"):
        _ = App(lambda: None).producer  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"defaults": {"leases": 3}}, "defaults: unknown options: leases"),
        ({"defaults": {"key": "x"}}, "defaults: unknown options: key"),
        ({"hooks": [3]}, "each of hooks must be callable, got 3"),
        ({"on_failure": "log"}, "on_failure must be callable, got 'log'"),
    ],
)
def test_wrong_arguments_of_an_app(options: dict[str, Any], problem: str) -> None:
    """
    Named by what is wrong with them.
    """
    with pytest.raises(TypeError, match=problem):
        App(invoice, **options)  # type: ignore[arg-type]


# -- names -----------------------------------------------------------------------------------

PROGRAM = """
from mscheduler_sync import App
app = App(lambda: None)
@app.task
def work(): ...
print(work.name)
"""


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["shop/jobs.py"], "jobs.work"),
        (["-m", "shop.jobs"], "shop.jobs.work"),
        (["-c", "import shop.jobs"], "shop.jobs.work"),
        (["-c", PROGRAM], "__main__.work"),
    ],
)
def test_a_main_module_has_the_name_that_others_import_it_by(
    tmp_path: Path, command: list[str], name: str
) -> None:
    """
    A sender that is run as a program and a worker that imports it mean the same task.
    """
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "jobs.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == f"{name}\n"


def test_a_function_without_a_name_needs_one(tasks: App) -> None:
    """
    Sender and worker have to agree on something.
    """
    with pytest.raises(ValueError, match="declare it with name="):
        tasks.task(lambda: None)
    assert tasks.task(name="nothing")(lambda: None).name == "nothing"


# -- keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (None, None),
        ("all", "all"),
        ("invoice:{order_id}", "invoice:42"),
        ("{order_id:05d}:{copy}", "00042:False"),
        ("{order_id.real}", "42"),
        (lambda order_id: f"o{order_id}", "o42"),
        (lambda copy, order_id: f"{order_id}{copy}", "42False"),
        (lambda **arguments: "-".join(sorted(arguments)), "copy-order_id"),
    ],
)
def test_the_key_is_made_of_the_arguments(
    tasks: App, sent: list[Sent], key: Any, expected: str | None
) -> None:
    """
    By a template or a function; what is not sent counts with its default.
    """
    tasks.task(key=key)(invoice).send(42)
    assert [(one.key, one.params) for one in sent] == [(expected, {"order_id": 42})]


# -- arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs", "params"),
    [
        ((1,), {}, {"order_id": 1}),
        ((1,), {"copy": True}, {"order_id": 1, "copy": True}),
        ((), {"copy": False, "order_id": 1}, {"copy": False, "order_id": 1}),
    ],
)
def test_arguments_are_stored_by_name_without_defaults(
    tasks: App, sent: list[Sent], args: Any, kwargs: Any, params: Any
) -> None:
    """
    However they are given.
    """
    tasks.task(invoice).send(*args, **kwargs)
    assert [one.params for one in sent] == [params]


@pytest.mark.parametrize(
    ("args", "kwargs", "problem"),
    [
        ((), {}, "lacks the argument 'order_id'"),
        ((1, True), {}, "takes 1 positional arguments, 2 were given"),
        ((1,), {"order_id": 1}, "got two values for the argument 'order_id'"),
        ((1,), {"copies": 2}, "has no argument 'copies'; it takes order_id, copy"),
        (("1",), {}, "got a wrong argument: order_id must be int, is str"),
        ((1,), {"copy": None}, "got a wrong argument: copy must be bool, is NoneType"),
    ],
)
def test_a_wrong_argument_is_a_type_error_of_send(
    tasks: App, sent: list[Sent], args: Any, kwargs: Any, problem: str
) -> None:
    """
    It names the task and the argument, and nothing is sent.
    """
    with pytest.raises(TypeError, match=rf"task '{__name__}.invoice'.* {problem}"):
        tasks.task(invoice).send(*args, **kwargs)
    assert sent == []


def test_any_signature_binds_as_python_does(tasks: App, sent: list[Sent]) -> None:
    """
    Compared with `inspect.Signature.bind` for many calls of many functions.
    """

    def none() -> None: ...
    def one(a: Any) -> None: ...
    def two(a: Any, b: Any = 1) -> None: ...
    def named(a: Any, *, b: Any, c: Any = 1) -> None: ...
    def rest(a: Any = 0, **others: Any) -> None: ...

    names = ("a", "b", "c", "d")
    for function in (none, one, two, named, rest):
        task: Any = tasks.task(function)
        for count in range(4):
            for bits in range(16):
                args = tuple(range(count))
                kwargs = {name: 9 for n, name in enumerate(names) if bits >> n & 1}
                sent.clear()
                try:
                    bound = inspect.signature(function).bind(*args, **kwargs).arguments
                except TypeError:
                    with pytest.raises(TypeError, match=function.__name__):
                        task.send(*args, **kwargs)
                    continue
                task.send(*args, **kwargs)
                expected = {**bound.pop("others", {}), **bound}
                assert sent[0].params == expected, (args, kwargs)


def test_arguments_may_have_any_name(tasks: App, sent: list[Sent]) -> None:
    """
    Also those of the library's own parameters.
    """

    @tasks.task
    def odd(key: int, name: int, params: int, args: int, kwargs: int, options: int) -> None: ...

    odd.send(key=1, name=2, params=3, args=4, kwargs=5, options=6)
    assert list(sent[0].params) == ["key", "name", "params", "args", "kwargs", "options"]

    @tasks.task
    def rest(**rest: int) -> None: ...

    rest.send(self=1, rest=2)
    assert sent[1].params == {"self": 1, "rest": 2}
    with pytest.raises(TypeError, match="got a wrong argument: self must be int, is str"):
        rest.send(self="1")  # type: ignore[arg-type]


def with_context(url: str, context: TaskContext) -> None: ...
def with_optional_context(url: str, context: TaskContext | None = None) -> None: ...
def with_named_context(url: str, *, context: "TaskContext") -> None: ...  # noqa: UP037
def with_first_context(context: TaskContext, url: str) -> None: ...


@pytest.mark.parametrize(
    "function", [with_context, with_optional_context, with_named_context, with_first_context]
)
def test_the_context_is_not_sent(tasks: App, sent: list[Sent], function: Any) -> None:
    """
    Wherever it stands; giving it is an error that says so.
    """
    task = tasks.task(function)
    task.send("u")
    assert sent[0].params == {"url": "u"}
    with pytest.raises(TypeError, match="gets its argument 'context' from the worker"):
        task.send(url="u", context=CONTEXT)


@pytest.mark.parametrize(
    "annotation", ["TaskContext", "m.TaskContext", "TaskContext | None", "Optional[TaskContext]"]
)
def test_a_context_that_is_imported_for_type_checkers_only(
    tasks: App, sent: list[Sent], annotation: str
) -> None:
    """
    The text of the annotation says enough.
    """
    names: dict[str, Any] = {"__name__": "m"}
    exec(f"def f(url, context: {annotation!r}): ...", names)
    tasks.task(names["f"]).send("u")
    assert sent[0].params == {"url": "u"}


def test_an_annotation_that_cannot_be_resolved_counts_as_none(tasks: App, sent: list[Sent]) -> None:
    """
    The value is then stored with its type.
    """

    @tasks.task
    def work(thing: Elsewhere, day: uuid.UUID) -> None: ...

    value = uuid.uuid4()
    work.send(value, value)
    assert sent[0].params == {
        "thing": {"__type__": "uuid", "value": str(value)},
        "day": str(value),
    }


def test_an_annotation_may_name_what_is_defined_below(tasks: App, sent: list[Sent]) -> None:
    """
    It is read at the first use.
    """
    names: dict[str, Any] = {"__name__": "m", "task": tasks.task}
    code = "from __future__ import annotations\n@task\ndef f(x: Later = None): ...\n"
    exec(code + "from uuid import UUID as Later", names)
    value = uuid.uuid4()
    names["f"].send(value)
    names["f"].send(None)
    assert [one.params for one in sent] == [{"x": str(value)}, {"x": None}]


def test_a_value_that_holds_itself_is_refused(tasks: App, sent: list[Sent]) -> None:
    """
    Not an endless loop.
    """

    @tasks.task
    def work(x: Any) -> None: ...

    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="x is nested too deeply or in itself"):
        work.send(loop)


def test_send_many_takes_calls(tasks: App, sent: list[Sent]) -> None:
    """
    By name, by position, or a single argument; a wrong one does not stop the others.
    """
    task = tasks.task(key="i:{order_id}", priority=3)(invoice)
    results = task.send_many([1, (2,), {"order_id": 3, "copy": True}, "4", (5, 6), [7]])
    assert [one.params for one in sent] == [
        {"order_id": 1},
        {"order_id": 2},
        {"order_id": 3, "copy": True},
    ]
    assert {one.options["priority"] for one in sent} == {3}
    assert [result.inserted for result in results] == [True, True, True, False, False, False]
    assert [result.key for result in results] == ["i:1", "i:2", "i:3", "'4'", "(5, 6)", "[7]"]
    assert [type(result.error) for result in results[2:]] == [
        type(None),
        TypeError,
        TypeError,
        TypeError,
    ]
    assert task.send_many([]) == []


def test_a_tuple_and_a_mapping_can_be_arguments_of_send_many(tasks: App, sent: list[Sent]) -> None:
    """
    Inside of a tuple.
    """

    @tasks.task
    def work(x: Any) -> None: ...

    work.send_many([({"a": 1},), ([1],)])
    assert [one.params for one in sent] == [{"x": {"a": 1}}, {"x": [1]}]


# -- options ---------------------------------------------------------------------------------


def test_options_of_app_task_and_send(client: MongoClient[Any], sent: list[Sent]) -> None:
    """
    The nearer one counts; `using` changes nothing about the task itself.
    """
    tasks = App(client.shop.tasks, defaults={"max_attempts": 5, "priority": 1, "lease": 30})
    task = tasks.task(name="t", priority=2, tags=["a"])(invoice)
    task.send(1)
    task.using(priority=3, delay=60, key="k").using(lease=90).send(1)
    task.using(key=None, session=None).send(1)
    common = {"max_attempts": 5, "tags": ["a"], "name": "t"}
    assert [(one.key, one.options) for one in sent] == [
        (None, {**common, "priority": 2, "lease": 30, "heartbeat": 10}),
        ("k", {**common, "priority": 3, "lease": 90, "heartbeat": 30, "delay": 60}),
        (None, {**common, "priority": 2, "lease": 30, "heartbeat": 10, "session": None}),
    ]


@pytest.mark.parametrize(
    ("options", "error", "problem"),
    [
        ({"delays": 3}, TypeError, "task 't': unknown options: delays"),
        ({"name": "other"}, TypeError, "task 't': unknown options: name"),
        ({"retry_on": ValueError}, TypeError, "unknown options: retry_on"),
        ({"priority": -1}, ValueError, "task 't': priority must be"),
        (
            {"retry_delay": 3},
            ValueError,
            "computes its retry_delay where it runs",
        ),
    ],
)
def test_wrong_options_of_one_send(
    tasks: App, options: dict[str, Any], error: type[Exception], problem: str
) -> None:
    """
    Refused by `using`.
    """
    task = tasks.task(name="t", retry_delay=[1, 2])(invoice)
    with pytest.raises(error, match=problem):
        task.using(**options)


@pytest.mark.parametrize(
    ("given", "stored"), [(5, 5), ([2, 10], 2), (lambda attempt, error: 3, None), (None, None)]
)
def test_what_is_stored_of_a_retry_delay(
    tasks: App, sent: list[Sent], given: Any, stored: Any
) -> None:
    """
    What counts after a crash, where no function is left to decide.
    """
    options = {} if given is None else {"retry_delay": given}
    tasks.task(retry_on=ValueError, **options)(invoice).send(1)
    assert sent[0].options.get("retry_delay") == stored
    assert "retry_on" not in sent[0].options


def test_the_options_are_those_of_send() -> None:
    """
    Every option of `Producer.send` can be given, and none else; their types are the same.
    """
    signature = inspect.signature(Producer.send)
    of_send = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name != "name"
    }
    assert of_send == {
        name: hint.__forward_arg__
        for name, hint in CallOptions.__annotations__.items()
        if name != "key"
    }
    own = set(TaskDefaults.__annotations__) ^ set(CallOptions.__annotations__)
    assert own == {"retry_on", "give_up_on", "key", "session"}


def test_the_options_of_a_consumer_are_those_of_consumer() -> None:
    """
    With their types.
    """
    parameters = inspect.signature(Consumer.__init__).parameters.values()
    assert {one.name: one.annotation for one in parameters if one.kind is one.KEYWORD_ONLY} == {
        name: hint.__forward_arg__ for name, hint in ConsumerOptions.__annotations__.items()
    }


# -- apps ------------------------------------------------------------------------------------


def test_the_collection_is_found_once(client: MongoClient[Any]) -> None:
    """
    At the first use, and then kept.
    """
    calls: list[int] = []

    def find() -> Any:
        calls.append(1)
        return client.shop.tasks

    tasks = App(find)
    assert calls == []
    assert tasks.producer is tasks.producer
    tasks.task(invoice)
    assert isinstance(tasks.consumer(), Consumer)
    assert calls == [1]


def test_the_client_of_a_uri_is_closed() -> None:
    """
    By the app, which can go on to use another.
    """
    tasks = App("mongodb://127.0.0.1:1/shop?connect=false", "jobs")
    first = tasks.producer
    assert repr(first) == "Producer('shop.jobs')"
    assert tasks.producer is first
    tasks.close()
    tasks.close()
    assert tasks.producer is not first
    tasks.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_finds_its_own_collection() -> None:
    """
    A function is asked once more; a client that was given is kept.
    """
    program = """
import os, threading
from pymongo import MongoClient
from mscheduler_sync import App
calls = []
given = MongoClient("mongodb://127.0.0.1:1/", connect=False)
def find():
    calls.append(os.getpid())
    return given.shop.tasks
apps = App(find), App("mongodb://127.0.0.1:1/shop?connect=false", "tasks"), App(given.shop.tasks)
before = [app.producer for app in apps]
child = os.fork()
after = [app.producer for app in apps]
same = [old is new for old, new in zip(before, after)]
if child:
    assert same == [True, True, True] and len(calls) == 1
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert same[1:] == [False, True] and len(calls) == 2, same
"""
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_app_without_tasks_makes_no_consumer(tasks: App) -> None:
    """
    It would never run anything.
    """
    with pytest.raises(ValueError, match="this app has no tasks"):
        tasks.consumer()


def test_a_late_declaration_is_told(tasks: App, caplog: pytest.LogCaptureFixture) -> None:
    """
    A consumer that was made before does not run it; sending it is fine.
    """
    tasks.task(name="early")(invoice)
    tasks.consumer()
    tasks.task(name="late")(method_less)
    told = [vars(one) for one in caplog.records]
    assert [(one["event"], one["task_name"]) for one in told] == [("late_declaration", "late")]


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """
    Makes modules of the test's own.
    """
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, code: str) -> None:
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return write


def test_modules_are_discovered_lazily(
    tasks: App, importable: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Imported by `names` and by `consumer`, once.
    """
    monkeypatch.setattr(sys.modules[__name__], "shared", tasks, raising=False)
    importable("found_tasks", f"from {__name__} import shared\n@shared.task\ndef work(): ...")
    tasks.discover("found_tasks")
    assert "found_tasks" not in sys.modules
    assert tasks.names() == ("found_tasks.work",)
    assert tasks.names() == ("found_tasks.work",)
    with pytest.raises(TypeError, match="a module is named by a string"):
        tasks.discover(sys)  # type: ignore[arg-type]


@pytest.mark.parametrize("code", ["1 / 0", "import no_such_module", "syntax error"])
def test_an_error_in_a_discovered_module_is_shown(
    tasks: App, importable: Callable[[str, str], None], code: str
) -> None:
    """
    With its cause, each time.
    """
    importable("broken_tasks", code)
    tasks.discover("broken_tasks")
    for _ in range(2):
        with pytest.raises(ImportError, match="'broken_tasks', which is to declare") as caught:
            tasks.consumer()
        cause = caught.value.__cause__
        assert isinstance(cause, (ZeroDivisionError, ModuleNotFoundError, SyntaxError))


def test_a_missing_package_is_told_before_a_consumer_runs(
    tasks: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Otherwise every task with such an argument would fail for good.
    """
    monkeypatch.setitem(sys.modules, "cattrs", None)
    tasks.task(takes_class)
    with pytest.raises(ImportError, match="pip install"):
        tasks.consumer()


def takes_class(sent: Sent) -> None: ...


def test_nothing_heavy_is_imported() -> None:
    """
    Neither cattrs nor pydantic, until a type needs them.
    """
    program = (
        "import sys; from mscheduler_sync import App; app = App(lambda: None);"
        "app.task(name='t')(lambda x: None);"
        "sys.exit(bool({'cattrs', 'pydantic', 'typing_extensions'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert (
        subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode
        == 0
    )
