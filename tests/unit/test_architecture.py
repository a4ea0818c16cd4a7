"""
Which layer may use which, read from the imports; and a few things that no module does.
"""

from __future__ import annotations

import ast
import collections
import functools
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

from mscheduler_sync._storage.server_codes import Passing

ROOT: Final = Path(__file__).parents[2]
PACKAGE: Final = ROOT / "mscheduler_sync"
#: The one place where it is written which layer may use which.
LAYERS: Final = ROOT / "docs" / "architecture.md"

#: Modules with more lines than this stand in `LONG`, with the reason.
MOST_LINES: Final = 350
LONG: Final = {
    "consumer": "the whole public surface of a consumer, most of it documentation",
    "producer": "the whole public surface of a producer, most of it documentation",
    "pool.engine": "every component of a node, and the order of their starts and ends",
    "pool.node": "the whole public surface of a node, most of it documentation",
    "embedded": "one process from finding its command to removing its files",
    "model": "one class a document part, and the reading of each",
    "pool.statements.jobs": "every step of a job's document once",
}
#: Outside of `_storage`: who may import the driver, and what of it ("*": anything).
DRIVER_USERS: Final = {
    "embedded": {"*"},
    "producer": {"Collection", "ClientSession"},
    "sender": {"ClientSession"},
    "consumer": {"Collection"},
    "app": {"Collection"},
    "_declared.options": {"ClientSession"},
    "pool.engine": {"Database"},
    "pool.node": {"Database"},
    "pool.store": {"Collection", "Database"},
}
THIRD_PARTY: Final = {"attr", "attrs", "bson", "cachetools", "pymongo"}
#: Packages of extras: who may import them, where they are used.
EXTRAS: Final = {"_declared.classes": {"cattrs"}}
#: Who imports modules by name: those that the application names.
IMPORTERS: Final = {"app"}

Module = tuple[str, Path]


@functools.cache
def modules() -> tuple[Module, ...]:
    """
    Every module of the package by its dotted name, without the package's own.
    """
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append((name, path))
    return tuple(found)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))


@functools.cache
def imports(path: Path, *, at_run_time: bool = False) -> tuple[tuple[str, str], ...]:
    """
    Everything that a module imports, at any place in it: (module, name or "").

    *at_run_time* leaves out what only type checkers import.
    """
    for_types = {
        node
        for block in nodes_of(path)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for one in block.body
        for node in ast.walk(one)
    }
    found = []
    for node in nodes_of(path):
        if at_run_time and node in for_types:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import in {path}, line {node.lineno}"
            found += [(node.module or "", alias.name) for alias in node.names]
    return tuple(found)


def own_imports(path: Path) -> Iterator[str]:
    """
    The modules of the package that a module imports at run time, by dotted name.
    """
    known = dict(modules())
    for module, name in imports(path, at_run_time=True):
        if module.split(".")[0] == "mscheduler_sync":
            inner = module.removeprefix("mscheduler_sync").removeprefix(".")
            full = f"{inner}.{name}".strip(".")
            yield full if full in known else inner


def layer_of(name: str) -> str:
    return name.split(".", maxsplit=1)[0] or "__init__"


@functools.cache
def graph() -> Mapping[str, frozenset[str]]:
    """
    Module -> the modules that it imports at run time.
    """
    return {name: frozenset(own_imports(path)) - {name} for name, path in modules()}


def ways_from(start: str, below: Mapping[str, Collection[str]]) -> dict[str, str]:
    """
    Everything that *start* reaches, directly or through others, and a shortest way to it.
    """
    ways = {start: start}
    queue = collections.deque([start])
    while queue:
        name = queue.popleft()
        for used in sorted(below[name]):
            if used not in ways:
                ways[used] = f"{ways[name]} -> {used or '__init__'}"
                queue.append(used)
    del ways[start]
    return ways


def layers() -> dict[str, list[str]]:
    """
    Layer -> the layers that it may use, as docs/architecture.md says.
    """
    table = LAYERS.read_text(encoding="utf-8").partition("| layer | may use |\n")[2]
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", table.partition("\n\n")[0], re.MULTILINE)
    return {name: re.findall(r"`(\w+)`", used) for name, used in rows}


def test_the_modules_were_found() -> None:
    """
    The checks below look at something.
    """
    names = {name for name, _ in modules()}
    assert {"", "errors", "_runtime.service", "_storage.store", "_stages.claimer"} <= names


def test_the_layers_are_those_of_the_package() -> None:
    """
    Every layer has a row, and no row is of a layer that has gone.
    """
    assert set(layers()) == {layer_of(name) for name in graph()}


def test_rooms_use_only_what_lies_below_them() -> None:
    """
    No module reaches, by whatever way, a layer that its own may not use.
    """
    below = layers()
    wrong = []
    for name in graph():
        allowed = {layer_of(name), *ways_from(layer_of(name), below)}
        wrong += [
            way for used, way in ways_from(name, graph()).items() if layer_of(used) not in allowed
        ]
    assert wrong == []


def test_no_layer_lies_below_itself() -> None:
    """
    The table allows no circle of layers.
    """
    below = layers()
    assert [
        name for name, used in below.items() if any(name in ways_from(one, below) for one in used)
    ] == []


def test_a_way_through_other_modules_is_found() -> None:
    """
    Through how many modules it goes does not matter.
    """
    below = {"sending": ["settings"], "settings": ["limits", "executor"], "executor": ["sending"]}
    assert ways_from("sending", {**below, "limits": []}) == {
        "settings": "sending -> settings",
        "executor": "sending -> settings -> executor",
        "limits": "sending -> settings -> limits",
    }


def test_only_storage_talks_to_the_driver() -> None:
    """
    Elsewhere the driver is imported only for the types of arguments.
    """
    for name, path in modules():
        used = {
            imported or module
            for module, imported in imports(path)
            if module.split(".")[0] in {"pymongo", "gridfs", "motor"}
        }
        allowed = {"*"} if layer_of(name) == "_storage" else DRIVER_USERS.get(name, set())
        assert allowed == {"*"} or used <= allowed, name


def test_no_other_dependencies() -> None:
    """
    The standard library and three packages; the embedded server is never imported.
    """
    for name, path in modules():
        tops = {module.split(".")[0] for module, _ in imports(path, at_run_time=True)}
        others = tops - set(sys.stdlib_module_names) - {"mscheduler_sync"}
        assert others <= THIRD_PARTY | EXTRAS.get(name, set()), name
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and name not in IMPORTERS:
                assert _called(node) not in {"import_module", "__import__"}, name


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


#: Owner -> names that sleep, or read a clock that people set.
FORBIDDEN: Final = {
    "time": {"sleep", "time", "time_ns", "localtime", "gmtime"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}


def test_nobody_sleeps_or_reads_the_wall_clock() -> None:
    """
    Every wait can be ended by a stop, and time is the server's or monotonic.
    """
    for name, path in modules():
        for node in nodes_of(path):
            if isinstance(node, ast.Attribute):
                owner = getattr(node.value, "id", getattr(node.value, "attr", ""))
                assert node.attr not in FORBIDDEN.get(owner, set()), (name, node.lineno)
        for module, imported in imports(path):
            assert module != "time" or imported not in FORBIDDEN["time"], name


def test_server_codes_have_names() -> None:
    """
    No code of an error is compared with a bare number, and none stands in a set of such.
    """
    for name, path in modules():
        for node in nodes_of(path):
            if isinstance(node, ast.Set):
                assert not any(map(_is_code, node.elts)), (name, node.lineno)
            elif isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                is_about_codes = any("code" in ast.unparse(side).lower() for side in sides)
                assert not (is_about_codes and any(map(_is_code, sides))), (name, node.lineno)


def _is_code(node: ast.AST) -> bool:
    # No code below these means anything to us.
    return isinstance(node, ast.Constant) and type(node.value) is int and node.value >= min(Passing)


def test_every_thread_has_a_name() -> None:
    """
    A thread of the library says whose it is, and none keeps the interpreter from ending.
    """
    for name, path in modules():
        for node in nodes_of(path):
            if not isinstance(node, ast.Call):
                continue
            given = {keyword.arg for keyword in node.keywords}
            if _called(node) == "Thread":
                assert {"target", "name", "daemon"} <= given, (name, node.lineno)
            elif _called(node) == "ThreadPoolExecutor":
                assert "thread_name_prefix" in given, (name, node.lineno)


def test_no_module_is_long_without_a_reason() -> None:
    """
    A module that has grown has either a reason or two jobs.
    """
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in modules()}
    assert {name: n for name, n in lines.items() if n > MOST_LINES and name not in LONG} == {}


def test_reasons_are_of_modules_that_exist() -> None:
    """
    The lists of exceptions name no module that has gone.
    """
    names = {name for name, _ in modules()}
    assert set(LONG) | set(DRIVER_USERS) | set(EXTRAS) | IMPORTERS <= names


def test_every_module_says_what_it_is_for() -> None:
    """
    Apart from empty ones, each begins with its own description.
    """
    trees = {name: tree_of(path) for name, path in modules()}
    assert [name for name, tree in trees.items() if tree.body and not ast.get_docstring(tree)] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """
    The layers stand on each other; none stands, by whatever way, on itself.
    """
    below = {name: used - {""} for name, used in graph().items() if name}
    while free := {name for name, used in below.items() if not used & set(below)}:
        for name in free:
            del below[name]
    assert below == {}
