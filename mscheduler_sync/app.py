"""
Declared tasks: functions that are sent with their own arguments, and run by any worker.

    app = App("mongodb://localhost/shop", "tasks")

    @app.task(max_attempts=5, key="invoice:{order_id}")
    def send_invoice(order_id: int, *, copy: bool = False) -> str: ...

    send_invoice.send(42, copy=True)         # a worker calls it
    app.consumer(max_workers=8).run_forever()  # a worker
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from pymongo.collection import Collection

from mscheduler_sync._declared.hooks import AfterRun, BeforeRun, Hook, Hooks, OnFailure
from mscheduler_sync._declared.naming import name_of
from mscheduler_sync._declared.options import ConsumerOptions, TaskDefaults, check_known
from mscheduler_sync._declared.table import Codec
from mscheduler_sync._declared.task import AppParts, ContextTask, DeclaredTask
from mscheduler_sync._declared.values import Values
from mscheduler_sync._runtime.log import logger
from mscheduler_sync._storage.connection import LazyCollection
from mscheduler_sync.consumer import Consumer
from mscheduler_sync.context import TaskContext
from mscheduler_sync.producer import Producer
from mscheduler_sync.router import Router
from mscheduler_sync.settings import check_name

if TYPE_CHECKING:
    from typing_extensions import Unpack

P = ParamSpec("P")
R = TypeVar("R")

_log = logger("app")


class _Declare(Protocol):
    """
    ``@app.task(...)``: what is left to do with the function.
    """

    @overload
    def __call__(
        self, function: Callable[Concatenate[TaskContext, P], R], /
    ) -> ContextTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> DeclaredTask[P, R]: ...


class App:
    """
    Declares tasks, sends them, and makes the consumers that run them. Thread-safe.

    *collection* is a pymongo collection; or a URI with a database, and *name* the collection's
    name; or a function that returns a collection. The latter two are asked at the
    first use, once per process, and once more in a forked child. Neither making an app nor
    declaring a task does I/O.

    Arguments:
        defaults: Options for all tasks, as those of `task`.
        codecs: How values of the application's own types are stored.
        hooks: Each is called with the attempt's `TaskContext` and returns a context manager,
            which is entered around the attempt, in its thread; the first is the outermost.
        before_run: Called with the context; what it raises fails the attempt.
        after_run: Called with the context and what the function returned.
        on_failure: Called with the context and the error. What these two raise is logged.

    Raises:
        TypeError, ValueError: If an argument is wrong; the text names it.
    """

    def __init__(
        self,
        collection: Collection[Any] | str | Callable[[], Collection[Any]],
        name: str | None = None,
        *,
        defaults: TaskDefaults | None = None,
        codecs: Iterable[Codec[Any]] = (),
        hooks: Iterable[Hook] = (),
        before_run: BeforeRun | None = None,
        after_run: AfterRun | None = None,
        on_failure: OnFailure | None = None,
    ) -> None:
        self._collection = LazyCollection(collection, name)
        self._defaults: dict[str, Any] = dict(defaults or {})
        check_known(self._defaults, TaskDefaults, "defaults")
        self._parts = AppParts(
            producer=self._current_producer,
            values=Values(codecs),
            hooks=Hooks.checked(hooks, before_run, after_run, on_failure),
        )
        self._lock = threading.Lock()
        # Under _lock.
        self._tasks: dict[str, DeclaredTask[..., Any]] = {}
        self._modules: list[str] = []
        self._has_consumer = False
        self._producer: Producer | None = None
        self._producer_collection: Collection[Any] | None = None

    # -- declaring ---------------------------------------------------------------------------

    @overload
    def task(self, function: Callable[Concatenate[TaskContext, P], R], /) -> ContextTask[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> DeclaredTask[P, R]: ...
    @overload
    def task(
        self,
        /,
        *,
        name: str | None = None,
        key: str | Callable[..., str] | None = None,
        aliases: Mapping[str, str] | None = None,
        **options: Unpack[TaskDefaults],
    ) -> _Declare: ...
    def task(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        key: str | Callable[..., str] | None = None,
        aliases: Mapping[str, str] | None = None,
        **options: Unpack[TaskDefaults],
    ) -> Any:
        """
        Declare a function as a task: ``@app.task`` or ``@app.task(max_attempts=5)``.

        The function's arguments are stored by name. A parameter that is annotated with
        `TaskContext` gets the attempt's, and is not sent.

        Arguments:
            name: The task's name. Default: that of the module and of the function.
            key: The key of each send, as a template over the arguments ("invoice:{order_id}") or
                as a function with parameters of the same names. Default: a unique one.
            aliases: Former names of parameters, as stored in older documents, to those of today.
            options: Those of `Producer.send`; ``retry_delay`` may also be a list or a
                function of the attempt's number and the error; ``retry_on``, ``give_up_on``:
                exception classes that alone are retried, that are not retried.

        Raises:
            TypeError: If the function is async, a generator or a method, has positional-only
                or variable positional parameters, or an option is of the wrong type.
            ValueError: If the name is taken, the key asks for no parameter, an option is wrong.
        """
        if function is not None:
            return self._declare(function, name, key, aliases or {}, options)

        def declare(function: Callable[..., Any]) -> Any:
            return self._declare(function, name, key, aliases or {}, options)

        return declare

    def _declare(
        self,
        function: Callable[..., Any],
        name: str | None,
        key: str | Callable[..., str] | None,
        aliases: Mapping[str, str],
        options: Mapping[str, Any],
    ) -> DeclaredTask[..., Any]:
        if name is None:
            name = name_of(function)
        check_name(name)
        check_known(options, TaskDefaults, f"task {name!r}")
        task: DeclaredTask[..., Any] = DeclaredTask(
            function,
            name,
            self._parts,
            key=key,
            aliases=aliases,
            options={**self._defaults, **options},
        )
        with self._lock:
            known = self._tasks.get(name)
            if known is not None and _place(known.function) != _place(function):
                msg = f"the name {name!r} is taken by {known.function!r}"
                raise ValueError(msg)
            # Of the same place: its module is loaded again, or a notebook's cell run again.
            self._tasks[name] = task
            late = self._has_consumer
        if late:
            _log.warning(
                "a task was declared after the app had made a consumer, which will not run it",
                event="late_declaration",
                task_name=name,
            )
        return task

    def discover(self, *modules: str) -> None:
        """
        Name modules that declare tasks of this app; `names` and `consumer` import them.

        Raises:
            TypeError: If a module is not given by its dotted name.
        """
        for module in modules:
            if not isinstance(module, str):
                msg = f"a module is named by a string, got {module!r}"
                raise TypeError(msg)
        with self._lock:
            self._modules += modules

    def names(self) -> tuple[str, ...]:
        """
        Return the names of all tasks, those of discovered modules included.

        Raises:
            ImportError: If a module cannot be imported; what it raised is the cause.
        """
        return tuple(self._discovered())

    def _discovered(self) -> dict[str, DeclaredTask[..., Any]]:
        # Not under the lock: the modules declare tasks.
        for module in tuple(self._modules):
            try:
                importlib.import_module(module)
            except Exception as error:
                msg = f"the module {module!r}, which is to declare tasks, cannot be imported"
                raise ImportError(msg, name=module) from error
        with self._lock:
            return dict(self._tasks)

    # -- working -----------------------------------------------------------------------------

    def consumer(self, **options: Unpack[ConsumerOptions]) -> Consumer:
        """
        Return a consumer of all tasks of this app; *options* are those of `Consumer`.

        Tasks that are declared later are not run by it.

        Raises:
            ImportError: If a discovered module cannot be imported, or a package is missing
                that the types of a task take.
            ValueError: If there are no tasks.
            TypeError, ValueError: As `Consumer`.
        """
        tasks = self._discovered()
        if not tasks:
            msg = "this app has no tasks; import their modules, or name them in discover()"
            raise ValueError(msg)
        router = Router()
        for name, task in tasks.items():
            task.prepare()
            router.add(name, task.run)
        consumer = Consumer(self._collection.get(), router, **options)
        with self._lock:
            self._has_consumer = True
        return consumer

    @property
    def producer(self) -> Producer:
        """
        The producer of this app's collection, for all that is not about one declared task.
        """
        return self._current_producer()

    def _current_producer(self) -> Producer:
        collection = self._collection.get()
        producer = self._producer
        if producer is None or self._producer_collection is not collection:
            # Two threads may make two at first: either does.
            producer = self._producer = Producer(collection)
            self._producer_collection = collection
        return producer

    def close(self) -> None:
        """
        Close the client that was made from a URI, which the interpreter's exit does too.

        Stop the consumers before. The next use opens another client. An application's own
        client stays open.
        """
        self._collection.close()

    def __repr__(self) -> str:
        return f"App({self._collection!r})"


def _place(function: Callable[..., Any]) -> tuple[object, object]:
    return getattr(function, "__module__", None), getattr(function, "__qualname__", function)
