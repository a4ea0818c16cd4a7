"""
The documentation: its examples run, and what it names exists.

A block marked ``python`` is run; blocks of one page share their names, as if typed one
after the other. ``<!-- not run: reason -->`` on the line above exempts one. Where a line
prints and ends with a comment, the comment is what it has to print (``...`` stands for
anything). ``MongoClient()`` is redirected to the test server, to databases of the test's own.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import attrs
import pymongo
import pytest
from pymongo import MongoClient
from pymongo.database import Database

import mscheduler_sync
from mscheduler_sync import Consumer, Event, Health, Producer, Reason, StopReport, TaskContext
from mscheduler_sync._storage import statements
from mscheduler_sync.embedded import EmbeddedServerError, find_server_command
from mscheduler_sync.pool import Node
from tests.support import Document, wait_until

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mscheduler_sync"
#: Everything but the dedicated pool, which has pages of its own.
SCHEDULER = [p for p in PACKAGE.rglob("*.py") if PACKAGE / "pool" not in p.parents]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = re.compile(r"<!-- not run: \S.* -->")
PRINTED = re.compile(r"^\s*print\(.*\)\s+# (.+)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
#: Runs a file as a program, its client redirected as in `redirected`.
LAUNCHER = """
import runpy, sys, pymongo
_, path, uri, prefix = sys.argv
class Redirected(pymongo.MongoClient):
    def __init__(self):
        super().__init__(uri)
    def __getitem__(self, name):
        return super().__getitem__(name if name == "admin" else prefix + name)
pymongo.MongoClient = Redirected
runpy.run_path(path, run_name="__main__")
"""


@attrs.frozen
class Block:
    """
    One example of a page; *line* is that of its first line of code.
    """

    page: Path
    line: int
    code: str
    is_run: bool


def blocks_of(page: Path) -> list[Block]:
    """
    The blocks of *page* that are marked as Python.
    """
    blocks = []
    lines = page.read_text().splitlines()
    for number, text in enumerate(lines):
        if text == "```python":
            end = lines.index("```", number)
            is_run = not (number and NOT_RUN.fullmatch(lines[number - 1]))
            code = "\n".join(lines[number + 1 : end])
            blocks.append(Block(page, number + 2, code, is_run))
    return blocks


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


@pytest.fixture
def redirected(
    monkeypatch: pytest.MonkeyPatch, server_uri: str, client: MongoClient[Document]
) -> Iterator[str]:
    """
    Send each ``MongoClient()`` to the test server; yields the prefix of the databases' names.
    """
    prefix = f"docs_{uuid.uuid4().hex[:8]}_"
    clients: list[MongoClient[Any]] = []

    class Redirected(MongoClient[Document]):
        def __init__(self, *_: object, **options: Any) -> None:
            super().__init__(server_uri, **options)
            clients.append(self)

        def __getitem__(self, name: str) -> Database[Document]:
            # The driver's own commands go to admin.
            return super().__getitem__(name if name == "admin" else prefix + name)

    monkeypatch.setattr(pymongo, "MongoClient", Redirected)
    yield prefix
    for one in clients:
        one.close()
    for name in client.list_database_names():
        if name.startswith(prefix):
            client.drop_database(name)


@pytest.mark.usefixtures("redirected")
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if blocks_of(page)],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_examples_run_and_print_what_they_say(page: Path) -> None:
    """
    Every Python block runs, and prints what the comments behind its prints promise.
    """
    blocks = [block for block in blocks_of(page) if block.is_run]
    if any("EmbeddedServer(" in block.code for block in blocks):
        try:
            find_server_command()
        except EmbeddedServerError as error:
            pytest.skip(str(error))
    names: dict[str, Any] = {"__name__": "docs"}
    for block in blocks:
        # Blank lines in front, so that a traceback shows the line of the page.
        source = "\n" * (block.line - 1) + block.code
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(source, str(page), "exec", dont_inherit=True), names)
            for name, thing in list(names.items()):
                if name.startswith("test_") and name in block.code:
                    thing()
        printed = iter(output.getvalue().splitlines())
        for expected in PRINTED.findall(block.code):
            pattern = re.escape(expected.strip()).replace(re.escape("..."), ".*")
            # Taken in order: what stands before a match was printed by other lines.
            if not any(re.fullmatch(pattern, line) for line in printed):
                pytest.fail(f"{page.name}:{block.line} promises {expected!r}\n{output.getvalue()}")


def test_the_first_example_sends_one_invoice_from_two_processes(
    server_uri: str, client: MongoClient[Document], tmp_path: Path
) -> None:
    """
    The README's ten lines, run twice at once: one invoice, and SIGTERM ends both in order.
    """
    block = next(b for b in blocks_of(ROOT / "README.md") if '"__main__"' in b.code)
    program = tmp_path / "ten_lines.py"
    program.write_text(block.code)
    prefix = f"docs_{uuid.uuid4().hex[:8]}_"
    command = [sys.executable, "-u", "-c", LAUNCHER, str(program), server_uri, prefix]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    try:
        producer = Producer(client[f"{prefix}shop"].tasks)
        wait_until(lambda: producer.count(status="succeeded"), "the invoice is sent", 30)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        outputs = [process.communicate(timeout=30)[0] for process in processes]
        assert sorted(outputs) == ["", "invoice to orders@example.com\n"]
        assert [process.returncode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        client.drop_database(f"{prefix}shop")


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_lead_somewhere(page: Path) -> None:
    """
    Every relative link names a file that exists, and a heading that it has.
    """
    prose = FENCE.sub("", page.read_text())
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists() or (anchor and anchor not in anchors_of(linked)):
            wrong.append(target)
    assert wrong == []


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    """
    A file in code quotes exists, in the repository or in the package; a test named in it, too.
    """
    wrong = []
    for path, test in re.findall(r"`([\w./-]+\.(?:py|md|toml))(?:::(\w+))?`", page.read_text()):
        found = [base / path for base in (ROOT, PACKAGE) if (base / path).is_file()]
        if not found or (test and f"def {test}(" not in found[0].read_text()):
            wrong.append(f"{path}::{test}" if test else path)
    assert wrong == []


def test_the_architecture_names_every_module() -> None:
    """
    Each module of the scheduler has its place in docs/architecture.md.
    """
    named = set(re.findall(r"`([\w/]+\.py)`", text_of("docs/architecture.md")))
    modules = {path.relative_to(PACKAGE).as_posix() for path in SCHEDULER}
    assert {name for name in modules - named if not name.endswith("__init__.py")} == set()


def test_the_state_machine_names_every_statement_that_changes_a_task() -> None:
    """
    Each builder in docs/state_machine.md exists, and none that makes an Update is missing.
    """
    named = set(re.findall(r"`statements\.(\w+\.\w+)`", text_of("docs/state_machine.md")))
    builders = {
        f"{module}.{name}": inspect.signature(thing).return_annotation
        for module in statements.__all__
        for name, thing in inspect.getmembers(getattr(statements, module), inspect.isfunction)
        if thing.__module__ == f"{statements.__name__}.{module}" and not name.startswith("_")
    }
    writers = {name for name, answer in builders.items() if answer == "Update"}
    assert writers - named == set()
    assert named - builders.keys() == set()


def test_every_arrow_of_the_state_machine_has_a_test() -> None:
    """
    Each lettered arrow of docs/state_machine.md has a row that names a test.
    """
    page = text_of("docs/state_machine.md")
    drawn = set(re.findall(r"\(([a-z])\)", "".join(FENCE.findall(page))))
    rows = dict(re.findall(r"^\| ([a-z]) \|(.+)$", page, re.MULTILINE))
    assert drawn == set(rows)
    without = [letter for letter, row in rows.items() if not re.search(r"`tests/.+::\w+`", row)]
    assert without == []


@pytest.mark.parametrize(
    ("function", "page"),
    [
        (Producer.send, "docs/producer.md"),
        (Consumer, "docs/consumer.md"),
        (Node, "docs/pool.md"),
    ],
)
def test_every_option_is_documented_with_its_default(function: Any, page: str) -> None:
    """
    Each keyword option has a row ``| `name` | `default` |`` in its page.
    """
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", text_of(page), re.MULTILINE))
    options = {
        name: repr(parameter.default).replace("'", '"')
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    documented = {name: re.sub(r"(\d)_(?=\d)", r"\1", default) for name, default in rows.items()}
    assert {name: documented.get(name) for name in options} == options


@pytest.mark.parametrize("page", ["docs/crate.md", "docs/document.md"])
def test_every_name_of_the_crate_is_mapped(page: str) -> None:
    """
    The options of the Rust crate's send appear where a Rust user would look for them.
    """
    fields = [
        *("priority", "ping_interval_ms", "worker_timeout_ms", "specific_worker_ids"),
        *("max_unexpected_retries", "unexpected_retry_delay_ms"),
    ]
    assert [name for name in fields if name not in text_of(page)] == []


def test_every_public_method_is_documented() -> None:
    """
    Each public method or property of the main classes stands in code quotes in its page.
    """
    places = {Producer: "producer", Consumer: "consumer", TaskContext: "consumer"}
    missing = [
        f"{cls.__name__}.{name}"
        for cls, page in places.items()
        for name in vars(cls)
        if not name.startswith("_")
        and not re.search(rf"`[^`\n]*\b{name}\b", text_of(f"docs/{page}.md"))
        # Called by the library itself.
        and (cls, name) != (TaskContext, "cancel")
    ]
    assert missing == []


@pytest.mark.parametrize(("cls", "section"), [(Health, "Watching it"), (StopReport, "stop")])
def test_every_field_of_a_report_is_documented(cls: type, section: str) -> None:
    """
    Each field of what `health` and `stop` return has a row in its section of docs/consumer.md.
    """
    after = re.split(rf"^#+ {section}$", text_of("docs/consumer.md"), flags=re.MULTILINE)[1]
    rows = re.findall(r"^\| (`[^|]+`) \|", after.partition("\n#")[0], re.MULTILINE)
    documented = set(re.findall(r"`(\w+)`", " ".join(rows)))
    assert {field.name for field in attrs.fields(cls)} - documented == set()


def test_every_event_is_documented_with_its_fields() -> None:
    """
    Each event class of the scheduler has a row in docs/events.md, which names its fields.
    """
    rows = dict(re.findall(r"^\| `(\w+)` \|(.+)$", text_of("docs/events.md"), re.MULTILINE))
    for cls in Event.__subclasses__():
        if cls.__module__ != Event.__module__:
            continue
        assert cls.__name__ in rows
        fields = {field.name for field in attrs.fields(cls)} - {"key"}
        assert [name for name in fields if f"`{name}`" not in rows[cls.__name__]] == []


def test_every_log_event_is_documented() -> None:
    """
    Whatever the scheduler logs stands in docs/consumer.md with level and fields; nothing else.
    """
    logged = list(logged_events())
    names = {event for event, _, _ in logged}
    # Built when they are logged, from a state of the consumer or from a reason.
    built = {f"consumer_{state}" for state in ("running", "stopping", "stopped", "crashed")}
    built |= set(get_args(Reason))
    page = text_of("docs/consumer.md")
    rows = dict(re.findall(r"^\| `(\w+)` \| (`[A-Z]+`.+)$", page, re.MULTILINE))
    assert set(rows) == names | built
    shared = {"event", "worker_id", "task_key", "running_id", "attempt"}
    wrong = [
        (event, level, fields - shared)
        for event, level, fields in logged
        if not rows[event].startswith(f"`{level}`")
        or not all(f"`{field}`" in rows[event] for field in fields - shared)
    ]
    assert wrong == []


def logged_events() -> Iterator[tuple[str, str, set[str]]]:
    """
    Event, level and fields of each logging call of the scheduler, as far as they are constant.
    """
    for path in SCHEDULER:
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            fields = {keyword.arg: keyword.value for keyword in call.keywords}
            event = fields.pop("event", None)
            if isinstance(event, ast.Constant):
                told = {name for name in fields if name not in {None, "exc_info"}}
                yield str(event.value), call.func.attr.upper(), told


def test_every_public_name_is_mentioned() -> None:
    """
    Everything in ``mscheduler_sync.__all__`` occurs in the README or a page of docs/.
    """
    everything = "\n".join(page.read_text() for page in PAGES)
    names = set(mscheduler_sync.__all__) - {"__version__"}
    assert [name for name in names if not re.search(rf"\b{name}\b", everything)] == []
