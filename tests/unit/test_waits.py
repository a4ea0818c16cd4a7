"""
Every wait of the package ends when something stops: nobody waits for what nobody can set.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

import pytest

from tests.unit.test_architecture import modules, tree_of

#: (module, function) -> why its wait can be ended by nothing but its own deadline.
ALLOWED: Final = {
    ("producer", "result"): "a producer has no threads and no end: its caller alone waits",
    ("pool.engine", "finish_shutdown"): "the node is closed: nothing of it is left to be stopped",
}
_MADE_TO_WAIT: Final = {"Event", "Condition", "Barrier", "Semaphore"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def deaf_waits(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """
    Yield function and line of each sleep, and of each wait for what is known in one place only.
    """
    for function in ast.walk(tree):
        if isinstance(function, _Function):
            private = _private(function)
            for node in _own_nodes(function):
                if _is_deaf(node, private):
                    yield function.name, node.lineno


def _own_nodes(function: _Function) -> Iterator[ast.Call]:
    """
    The calls in a function, without those of functions in it.
    """
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call):
            yield node
        if not isinstance(node, _Function):
            waiting += ast.iter_child_nodes(node)


def _is_deaf(call: ast.Call, private: set[str]) -> bool:
    name, owner = call.func, None
    if isinstance(call.func, ast.Attribute):
        owner = call.func.value
    called = getattr(name, "attr", getattr(name, "id", ""))
    if called == "sleep":
        return True
    return called in {"wait", "wait_for"} and (
        (isinstance(owner, ast.Call) and _makes_something_to_wait_for(owner))
        or (isinstance(owner, ast.Name) and owner.id in private)
    )


def _makes_something_to_wait_for(call: ast.Call) -> bool:
    made = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return made in _MADE_TO_WAIT


def _private(function: _Function) -> set[str]:
    """
    The names of what is made in *function* to be waited for, and known to nobody else.

    Known to others is what is handed on, returned, stored, or used by a function in it.
    """
    nodes = list(ast.walk(function))
    made = {
        target.id
        for node in nodes
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        and isinstance(node.value, ast.Call)
        and _makes_something_to_wait_for(node.value)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    if not made:
        return made
    only_asked = {
        id(node.value)
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr in {"wait", "wait_for", "is_set"}
    }
    inner = [one for one in nodes if isinstance(one, (_Function, ast.Lambda))]
    captured = {id(node) for one in inner if one is not function for node in ast.walk(one)}
    handed_on = {
        node.id
        for node in nodes
        if isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Load)
        and (id(node) not in only_asked or id(node) in captured)
    }
    return made - handed_on


@pytest.mark.parametrize(
    ("body", "is_deaf"),
    [
        ("threading.Event().wait(1)", True),
        ("Event().wait(1)", True),
        ("pause = threading.Event()\n    pause.wait(1)", True),
        ("pause: Event = Event()\n    while not pause.is_set():\n        pause.wait(1)", True),
        ("threading.Condition().wait_for(done, 1)", True),
        ("time.sleep(1)", True),
        ("sleep(1)", True),
        ("self._stop.wait(1)", False),
        ("stop.wait(1)", False),
        ("pause = threading.Event()\n    run(pause)\n    pause.wait(1)", False),
        ("pause = threading.Event()\n    self.pause = pause\n    pause.wait(1)", False),
        ("pause = threading.Event()\n    run(lambda: pause.set())\n    pause.wait(1)", False),
        ("pause = threading.Event()\n    pause.set()\n    pause.wait(1)", False),
        ("changed = self._changed\n    changed.wait(1)", False),
    ],
)
def test_a_wait_that_nobody_can_end_is_found(body: str, is_deaf: bool) -> None:
    """
    Whether what is waited for is made on the spot or a line above, if it stays there.
    """
    found = list(deaf_waits(ast.parse(f"def f(self, stop):\n    {body}\n")))
    assert bool(found) == is_deaf


def test_all_waits_of_the_package_can_be_ended() -> None:
    """
    But for those of callers who have nothing that stops; none of these is a former one.
    """
    found = {
        (name, function) for name, path in modules() for function, _ in deaf_waits(tree_of(path))
    }
    assert found == set(ALLOWED)
