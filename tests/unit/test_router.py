"""
Functions by task name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mscheduler_sync.router import Router
from tests.unit.test_invocation import CONTEXT


def echo(params: Any) -> Any:
    return params


def call(router: Router, name: str | None, params: Any) -> Any:
    invocation = router.find(name)
    assert invocation is not None
    return invocation(params, CONTEXT)


def test_a_decorated_function_serves_its_name_and_stays_as_it_is() -> None:
    """
    Two names lead to two functions, which can still be called directly.
    """
    router = Router()

    @router.task("double")
    def double(params: int) -> int:
        return 2 * params

    @router.task("with context")
    def with_context(params: int, context: Any) -> Any:
        return params, context.key

    assert double(2) == 4
    assert call(router, "double", 3) == 6
    assert call(router, "with context", 3) == (3, "key")
    assert router.names == ("double", "with context")


def test_names_that_are_not_served_lead_nowhere() -> None:
    """
    Neither another name nor no name at all is served without being asked for.
    """
    router = Router()
    router.add("one", echo)
    assert router.find("two") is None
    assert router.find(None) is None


def test_one_function_may_serve_several_names() -> None:
    """
    Names are what is unique.
    """
    router = Router()
    router.add("one", echo)
    router.task("two")(echo)
    assert call(router, "one", 1) == call(router, "two", 1) == 1


def test_a_default_serves_tasks_without_a_name_only() -> None:
    """
    The default function is not for unknown names.
    """
    router = Router(default=lambda params: ("default", params))
    router.add("one", echo)
    assert router.names == (None, "one")
    assert call(router, None, 1) == ("default", 1)
    assert router.find("two") is None


def test_a_name_is_taken_once() -> None:
    """
    A second function under a name is refused, and the first stays.
    """
    router = Router()
    router.add("one", echo)
    with pytest.raises(ValueError, match=r"^the name 'one' is taken$"):
        router.add("one", lambda params: "other")
    assert call(router, "one", 1) == 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("", ValueError),
        ("n" * 201, ValueError),
        ("\udcff", ValueError),
        (None, TypeError),
        (5, TypeError),
        (b"one", TypeError),
        (echo, TypeError),
    ],
)
def test_a_wrong_name_is_refused_at_once(name: object, kind: type[Exception]) -> None:
    """
    Also the decorator raises where it is written, not when it is applied.
    """
    router = Router()
    calls: list[Callable[[], object]] = [
        lambda: router.task(name),  # type: ignore[arg-type]
        lambda: router.add(name, echo),  # type: ignore[arg-type]
    ]
    for one in calls:
        with pytest.raises(kind, match="a task name must"):
            one()
    assert router.names == ()


@pytest.mark.parametrize("name", ["n" * 200, "é" * 200, " ", "$name", "a.b", "=a"])
def test_names_may_hold_anything_else(name: str) -> None:
    """
    Up to 200 characters, whatever they mean elsewhere.
    """
    router = Router()
    router.add(name, echo)
    assert call(router, name, 1) == 1


@pytest.mark.parametrize("function", [None, 5, lambda: None, lambda a, b, c: None])
def test_a_wrong_function_is_refused(function: Any) -> None:
    """
    A function that could not be called is no default, and takes no name.
    """
    router = Router()
    with pytest.raises(TypeError):
        router.add("one", function)
    with pytest.raises(TypeError):
        router.task("one")(function)
    assert router.names == ()
    if function is not None:
        with pytest.raises(TypeError):
            Router(default=function)


def test_after_a_consumer_has_started_it_is_too_late() -> None:
    """
    A consumer looks for the names that it knew at its start; later ones would never be found.
    """
    router = Router()
    router.add("one", echo)
    router.freeze()
    router.freeze()
    with pytest.raises(ValueError, match=r"^'two' comes too late: a consumer has started"):
        router.add("two", echo)
    assert router.names == ("one",)
    assert call(router, "one", 1) == 1


def test_names_may_be_registered_from_many_threads() -> None:
    """
    Of threads that want one name, exactly one gets it.
    """
    router = Router()
    start = threading.Barrier(8)

    def register(_: int) -> int:
        start.wait(10)
        won = 0
        for number in range(50):
            try:
                router.add(str(number), echo)
            except ValueError:
                continue
            won += 1
        return won

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(register, range(8))) == 50
    assert len(router.names) == 50
