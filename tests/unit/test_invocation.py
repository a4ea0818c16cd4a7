"""
How the user's function is called: with the params, or with the context as well.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from mscheduler_sync.context import TaskContext
from mscheduler_sync.invocation import invocation_of

CONTEXT = TaskContext(
    key="key",
    name=None,
    attempt=1,
    running_id="running",
    worker_id="worker",
    deadline=None,
    report=lambda value: None,
)


def got(*arguments: Any) -> tuple[Any, ...]:
    return arguments


class Callables:
    """
    Functions of every kind.
    """

    def method(self, params: Any) -> Any:
        return got(params)

    def method_with_context(self, params: Any, context: TaskContext) -> Any:
        return got(params, context)

    @classmethod
    def of_class(cls, params: Any, ctx: TaskContext) -> Any:
        return got(params, ctx)

    @staticmethod
    def of_nobody(params: Any, task: Any) -> Any:
        return got(params, task)

    def __call__(self, params: Any) -> Any:
        return got(params)


class CallableWithContext:
    """
    An object that is called like a function.
    """

    def __call__(self, params: Any, context: TaskContext) -> Any:
        return got(params, context)


def one(params: Any) -> Any:
    return got(params)


def two(params: Any, anything: Any) -> Any:
    return got(params, anything)


def second_is_context(params: Any, context: Any = None) -> Any:
    return got(params, context)


def second_is_ctx(params: Any, ctx: Any = None) -> Any:
    return got(params, ctx)


def second_is_task(params: Any, task: Any = None) -> Any:
    return got(params, task)


def second_is_task_context(params: Any, task_context: Any = None) -> Any:
    return got(params, task_context)


def second_is_an_option(params: Any, retries: int = 3) -> Any:
    return got(params, retries)


def context_comes_third(params: Any, retries: int = 3, context: Any = None) -> Any:
    return got(params, retries, context)


def third_is_an_option(params: Any, context: Any, retries: int = 3) -> Any:
    return got(params, context)


def positional_only(params: Any, context: Any, /) -> Any:
    return got(params, context)


def named_context(context: Any) -> Any:
    return got(context)


def with_default(params: Any = None) -> Any:
    return got(params)


def anything(*arguments: Any) -> Any:
    return got(*arguments)


def anything_more(params: Any, *arguments: Any) -> Any:
    return got(params, *arguments)


def keywords(params: Any, **options: Any) -> Any:
    return got(params)


def optional_keyword(params: Any, *, context: Any = None) -> Any:
    return got(params)


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    return wrapper


@pytest.mark.parametrize(
    "function",
    [
        one,
        lambda params: (params,),
        named_context,
        with_default,
        second_is_an_option,
        context_comes_third,
        anything,
        anything_more,
        keywords,
        optional_keyword,
        Callables().method,
        Callables(),
        functools.partial(two, anything="bound"),
        functools.partial(one),
        wrapped(one),
        mock.Mock(side_effect=got),
    ],
)
def test_functions_of_the_params_alone(function: Callable[..., Any]) -> None:
    """
    The context is not forced upon functions that did not ask for it.
    """
    result = invocation_of(function)({"a": 1}, CONTEXT)
    assert result[0] == {"a": 1}
    assert CONTEXT not in result


@pytest.mark.parametrize(
    "function",
    [
        two,
        lambda params, context: (params, context),
        second_is_context,
        second_is_ctx,
        second_is_task,
        second_is_task_context,
        third_is_an_option,
        positional_only,
        Callables().method_with_context,
        Callables.of_class,
        Callables.of_nobody,
        CallableWithContext(),
        functools.partial(lambda first, params, context: got(params, context), 0),
        wrapped(two),
    ],
)
def test_functions_of_params_and_context(function: Callable[..., Any]) -> None:
    """
    A second required argument, or one with a telling name, gets the context.
    """
    assert invocation_of(function)({"a": 1}, CONTEXT) == ({"a": 1}, CONTEXT)


@pytest.mark.parametrize("function", [dict, str, len, print, repr])
def test_builtin_functions_get_the_params(function: Callable[..., Any]) -> None:
    """
    Where no signature can be read, the params are passed alone.
    """
    assert invocation_of(function)([("a", 1)], CONTEXT) == function([("a", 1)])


def test_a_class_is_called_like_a_function() -> None:
    """
    What its constructor takes decides.
    """

    class Job:
        def __init__(self, params: Any) -> None:
            self.params = params

    class JobWithContext(Job):
        def __init__(self, params: Any, context: TaskContext) -> None:
            super().__init__(params)
            self.context = context

    assert invocation_of(Job)(5, CONTEXT).params == 5
    assert invocation_of(JobWithContext)(5, CONTEXT).context is CONTEXT


def none() -> None:
    pass


def three(params: Any, context: Any, more: Any) -> None:
    pass


def required_keyword(params: Any, *, context: Any) -> None:
    pass


def only_keywords(**options: Any) -> None:
    pass


@pytest.mark.parametrize(
    "function",
    [none, three, required_keyword, only_keywords, lambda: None, functools.partial(one, 1)],
)
def test_functions_that_cannot_take_the_params_are_refused(function: Callable[..., Any]) -> None:
    """
    A wrong signature is an error where the consumer is made, not at the first task.
    """
    with pytest.raises(TypeError) as caught:
        invocation_of(function)
    assert str(caught.value) == (
        f"{function!r} must be callable as function(params) or function(params, context)"
    )


@pytest.mark.parametrize("wrong", [None, 5, "module.function", [one]])
def test_what_is_no_function_is_refused(wrong: object) -> None:
    """
    The error shows what was given.
    """
    with pytest.raises(TypeError, match=r"^a function is needed, got ") as caught:
        invocation_of(wrong)  # type: ignore[arg-type]
    assert repr(wrong) in str(caught.value)


async def coroutine(params: Any) -> None:
    pass


async def async_generator(params: Any) -> AsyncIterator[int]:
    yield 1


def generator(params: Any) -> Iterator[int]:
    yield 1


class AsyncCallable:
    """
    An object whose call makes a coroutine.
    """

    async def __call__(self, params: Any) -> None:
        pass


class GeneratorCallable:
    """
    An object whose call makes a generator.
    """

    def __call__(self, params: Any) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize(
    ("function", "word"),
    [
        (coroutine, "is async"),
        (async_generator, "is async"),
        (functools.partial(coroutine), "is async"),
        (generator, "is a generator function"),
        (functools.partial(generator), "is a generator function"),
    ],
)
def test_functions_whose_body_would_never_run_are_refused(
    function: Callable[..., Any], word: str
) -> None:
    """
    A coroutine or generator function looks like a function, but calling it does nothing.
    """
    with pytest.raises(TypeError, match=word):
        invocation_of(function)


@pytest.mark.parametrize("function", [AsyncCallable(), GeneratorCallable()])
def test_objects_whose_body_would_never_run_are_refused(function: Callable[..., Any]) -> None:
    """
    The same holds for objects that are called like functions.
    """
    with pytest.raises(TypeError, match=r"is async|is a generator function"):
        invocation_of(function)
