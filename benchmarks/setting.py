"""
Where the benchmarks run: the server, its process, the machine; how much is done.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import attrs
from pymongo import MongoClient
from pymongo.collection import Collection

import mscheduler_sync
from benchmarks import floor
from benchmarks.work import TASKS
from mscheduler_sync import Producer
from mscheduler_sync.embedded import EmbeddedServer

Document = dict[str, Any]

#: Of the calibration: tasks and threads of the hand-written loop.
_TRIAL_TASKS, _TRIAL_THREADS = 200, 8
_FEWEST, _MOST = 200, 20_000
_ANSWER_MS: Final = 5000


@attrs.frozen
class Scale:
    """
    How much is measured.
    """

    name: str
    repetitions: int
    #: How long a backlog is to last, in seconds.
    backlog_s: float
    latency_blocks: int
    latency_per_block: int
    idle_s: float
    #: Documents beside the work: finished and far in the future.
    others: tuple[int, ...]
    #: Lengths of backlogs of which only the head is worked off.
    waiting: tuple[int, ...]


QUICK: Final = Scale(
    name="quick",
    repetitions=3,
    backlog_s=0.7,
    latency_blocks=3,
    latency_per_block=20,
    idle_s=5.0,
    others=(0, 10_000),
    waiting=(1000, 10_000),
)
FULL: Final = Scale(
    name="full",
    repetitions=5,
    backlog_s=4.0,
    latency_blocks=5,
    latency_per_block=40,
    idle_s=35.0,
    others=(0, 10_000, 100_000),
    waiting=(1000, 10_000, 100_000),
)


class Bench:
    """
    The server under measurement, and what all measures need of it.
    """

    def __init__(self, uri: str, pid: int | None, scale: Scale, *, is_embedded: bool) -> None:
        self.uri: Final = uri
        self.scale: Final = scale
        self.is_embedded: Final = is_embedded
        self.client: Final[MongoClient[Document]] = MongoClient(
            uri, tz_aware=True, serverSelectionTimeoutMS=_ANSWER_MS
        )
        #: The server's process, where it runs on this machine.
        self.pid: Final = self._local_pid() if pid is None else pid
        self._prefix = f"benchmarks_{uuid.uuid4().hex[:8]}"
        self._databases = 0
        self._rate: float | None = None

    def close(self) -> None:
        self.client.close()

    def say(self, text: str) -> None:
        """
        Show what is being done.
        """
        print(f"  {text}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """
        The name of a new database, which is dropped at the end.
        """
        self._databases += 1
        name = f"{self._prefix}_{self._databases}"
        try:
            yield name
        finally:
            # The embedded server drops a full collection more slowly than it empties it.
            for collection in self.client[name].list_collection_names():
                self.client[name][collection].delete_many({})
            self.client.drop_database(name)

    def tasks(self, database: str) -> Collection[Document]:
        return self.client[database][TASKS]

    def template(self) -> Document:
        """
        Return the document of a task as `send` makes it.
        """
        with self.database() as name:
            Producer(self.tasks(name)).send(floor.key_of(0), params_of(0))
            document = self.tasks(name).find_one()
        if document is None:
            msg = "a task that was sent is not there"
            raise RuntimeError(msg)
        return document

    def backlog(self) -> int:
        """
        Return how many tasks the hand-written loop works off in the time that a backlog is to last.
        """
        if self._rate is None:
            template = self.template()
            with self.database() as name:
                collection = floor.prepared(self.client, name)
                keys = [floor.key_of(number) for number in range(_TRIAL_TASKS)]
                collection.insert_many(floor.copies(template, keys), ordered=False)
                began_s = time.monotonic()
                floor.drain(collection, _TRIAL_THREADS, shared=False)
                self._rate = _TRIAL_TASKS / (time.monotonic() - began_s)
        count = round(self._rate * self.scale.backlog_s)
        return max(_FEWEST, min(_MOST, count))

    def server_cpu_s(self) -> float | None:
        """
        Return the CPU seconds that the server's process has used, or None if that is unknown.
        """
        if self.pid is None:
            return None
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _local_pid(self) -> int | None:
        if urlsplit(self.uri).hostname not in {"127.0.0.1", "localhost", "::1"}:
            return None
        pid = self.client.admin.command("serverStatus").get("pid")
        return int(pid) if pid and Path(f"/proc/{pid}/stat").exists() else None

    def facts(self) -> Document:
        """
        Return what the result must say about where it was measured.
        """
        build = self.client.admin.command("buildInfo")
        hello = self.client.admin.command("hello")
        secantus = build.get("secantusVersion")
        return {
            "machine": {
                "cpu": _cpu_model(),
                "cores": _cores(),
                "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
                "system": platform.platform(),
            },
            "versions": {
                "mscheduler_sync": mscheduler_sync.__version__,
                "revision": _revision(),
                "python": f"{platform.python_implementation()} {platform.python_version()}",
                "pymongo": importlib.metadata.version("pymongo"),
            },
            "server": {
                "kind": "embedded" if self.is_embedded else "MSCHEDULER_URI",
                "product": "MongoDB" if secantus is None else f"SecantusDB {secantus}",
                "version": build.get("version"),
                "replica_set": hello.get("setName"),
                "on_this_machine": self.pid is not None,
            },
        }


@contextlib.contextmanager
def opened(scale: Scale) -> Iterator[Bench]:
    """
    The bench on the server of MSCHEDULER_URI, else on an embedded one.
    """
    with contextlib.ExitStack() as stack:
        uri = os.environ.get("MSCHEDULER_URI")
        if uri:
            bench = Bench(uri, None, scale, is_embedded=False)
        else:
            server = stack.enter_context(EmbeddedServer())
            bench = Bench(server.uri, server.pid, scale, is_embedded=True)
        stack.callback(bench.close)
        yield bench


def params_of(number: int) -> Document:
    return {"number": number}


def load() -> float:
    """
    Return how many processes wanted a core in the last minute.
    """
    return os.getloadavg()[0]


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _revision() -> str | None:
    """
    Return the commit of the checkout, with a ``+`` if the library was changed since; or None.
    """
    here = Path(__file__).parent.parent
    try:
        commit = _git(here, "rev-parse", "--short", "HEAD")
        changed = _git(here, "status", "--porcelain", "--", "mscheduler_sync")
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
