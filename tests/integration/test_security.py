"""
Servers with passwords and encryption, and what must never be said: passwords, params, results.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import subprocess
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pymongo
import pytest
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.errors import PyMongoError

from mscheduler_sync import (
    Consumer,
    Event,
    PermanentFailure,
    Producer,
    RetryLater,
    Snooze,
    StoreError,
    StoreRejected,
    StoreUnavailable,
    TaskContext,
)
from mscheduler_sync.embedded import EmbeddedServer, EmbeddedServerError, find_server_command
from tests.support import Document, wait_until

Tasks = Collection[Document]

SECRET = "s3cret-Pa55"
OPTIONS = "directConnection=true&retryWrites=false"


class Everything(logging.Handler):
    """
    Keeps every record of the library in full: message, fields, traceback.
    """

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        fields = {name: value for name, value in vars(record).items() if name != "exc_info"}
        lines = [record.getMessage(), repr(fields)]
        if record.exc_info:
            lines += traceback.format_exception(*record.exc_info)
        self.lines.append("\n".join(lines))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@pytest.fixture
def everything() -> Iterator[Everything]:
    """
    All that the library logs during the test, from DEBUG up.
    """
    handler, log = Everything(), logging.getLogger("mscheduler_sync")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    yield handler
    log.removeHandler(handler)
    log.setLevel(level)


@pytest.fixture(scope="module", autouse=True)
def command() -> str:
    """
    The command of the embedded server, which these tests start in their own ways.
    """
    try:
        return find_server_command()
    except EmbeddedServerError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


# -- passwords -------------------------------------------------------------------------------------


class Guarded:
    """
    A server that wants a password.
    """

    def __init__(self, server: EmbeddedServer) -> None:
        self.server = server
        self._clients: list[MongoClient[Document]] = []

    def uri(self, user: str, password: str, database: str = "shop") -> str:
        port = self.server.port
        return f"mongodb://{user}:{password}@127.0.0.1:{port}/?authSource={database}&{OPTIONS}"

    def tasks(self, name: str, *, uri: str, **options: Any) -> Tasks:
        client: MongoClient[Document] = MongoClient(uri, tz_aware=True, **options)
        self._clients.append(client)
        return client.shop[name]

    def close(self) -> None:
        for client in self._clients:
            client.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """
    A server with the users "root", who may everything, and "worker", who may read and write "shop".
    """
    path = tmp_path_factory.mktemp("guarded")
    with EmbeddedServer(path) as open_server:
        client = open_server.collection("any").database.client
        client.admin.command("createUser", "root", pwd="r00t", roles=["root"])
        client.shop.command("createUser", "worker", pwd=SECRET, roles=["readWrite"])
    with EmbeddedServer(path, args=("--auth",)) as server:
        guarded = Guarded(server)
        yield guarded
        guarded.close()


def test_a_user_who_may_read_and_write_is_enough(guarded: Guarded, everything: Everything) -> None:
    """
    With the role readWrite on its database a consumer has its indexes and its change stream.
    """
    tasks = guarded.tasks("plain", uri=guarded.uri("worker", SECRET))
    producer = Producer(tasks)
    producer.send("one", 1)
    with Consumer(tasks, lambda params: params + 1) as consumer:
        assert producer.result("one", 20) == 2
        wait_until(lambda: consumer.health().discovery == "stream", "the stream is open")
        producer.send("two", 2)
        assert producer.result("two", 20) == 3
        assert consumer.health().ok
        said = [repr(one) for one in (consumer, producer, consumer.health())]
    assert set(tasks.index_information()) >= {"key", "routes_due"}
    assert SECRET not in "\n".join([*said, everything.text])


@pytest.mark.parametrize(("user", "password"), [("worker", "wrong-Pa55"), ("nobody", "wrong-Pa55")])
def test_a_wrong_password_is_a_clear_error(guarded: Guarded, user: str, password: str) -> None:
    """
    A send says at once that the server refuses, and why; the password is not in it.
    """
    tasks = guarded.tasks("wrong", uri=guarded.uri(user, password))
    with pytest.raises(StoreRejected, match=r"(?i)authentication failed") as caught:
        Producer(tasks).send("one")
    assert isinstance(caught.value.__cause__, PyMongoError)
    assert password not in "".join(traceback.format_exception(caught.value))


def test_no_password_is_a_clear_error(guarded: Guarded) -> None:
    """
    Without credentials a send says that the server wants them.
    """
    tasks = guarded.tasks("wrong", uri=f"mongodb://127.0.0.1:{guarded.server.port}/?{OPTIONS}")
    with pytest.raises(StoreRejected, match=r"(?i)authenticat|authoriz"):
        Producer(tasks).send("one")


def test_a_consumer_with_a_wrong_password_keeps_trying(
    guarded: Guarded, everything: Everything
) -> None:
    """
    Its health says what is wrong; once the server knows the password, it works.
    """
    password = "later-Pa55"
    root = guarded.tasks("late", uri=guarded.uri("root", "r00t", "admin"))
    Producer(root).send("one")
    uri = guarded.uri("late", password)
    with Consumer(guarded.tasks("late", uri=uri), lambda _: "done") as consumer:
        assert not consumer.wait_started(1)
        wait_until(lambda: not consumer.health().ok, "health is bad", 25)
        components = consumer.health().components
        assert "uthentication" in str(components["fetch"].last_error)
        assert all(component.alive for component in components.values())
        said = [repr(consumer), repr(consumer.health()), str(components)]

        root.database.command("createUser", "late", pwd=password, roles=["readWrite"])
        assert Producer(root).result("one", 60) == "done"
        wait_until(lambda: consumer.health().ok, "health is good", 60)
    text = everything.text
    assert "uthentication" in text
    assert password not in "\n".join([*said, text])
    # LogThrottle do not repeat themselves with every try.
    assert text.count("store_trouble") <= 4


def test_no_error_says_the_password(guarded: Guarded, everything: Everything) -> None:
    """
    Wrong arguments and a server that has gone: no text and no traceback has the password in it.
    """
    tasks = guarded.tasks("plain", uri=guarded.uri("worker", SECRET), serverSelectionTimeoutMS=300)
    database, client = tasks.database, tasks.database.client
    mistakes: list[Callable[[], object]] = [
        lambda: Producer(database),  # type: ignore[arg-type]
        lambda: Producer(client),  # type: ignore[arg-type]
        lambda: Producer(guarded.uri("worker", SECRET)),  # type: ignore[arg-type]
        lambda: Consumer(database, print),  # type: ignore[arg-type]
        lambda: Consumer(client, print),  # type: ignore[arg-type]
        lambda: Consumer(guarded.uri("worker", SECRET), print),  # type: ignore[arg-type]
    ]
    said = []
    for mistake in mistakes:
        with pytest.raises(TypeError) as wrong:
            mistake()
        said += traceback.format_exception(wrong.value)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        uri = f"mongodb://worker:{SECRET}@127.0.0.1:{taken.getsockname()[1]}/?{OPTIONS}"
        away = guarded.tasks("plain", uri=uri, serverSelectionTimeoutMS=200)
        with pymongo.timeout(1), pytest.raises(StoreUnavailable) as gone:
            Producer(away).send("one")
        said += traceback.format_exception(gone.value)
        with Consumer(away, print, stop_timeout=1) as consumer:
            wait_until(lambda: not consumer.health().ok, "health is bad", 25)
            said += [repr(consumer.health()), repr(consumer)]
    lines = [line for line in said if SECRET in line]
    # A traceback shows the lines of this test, and nothing else has it.
    assert [line for line in lines if "SECRET" not in line] == []
    assert SECRET not in everything.text


# -- encryption ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    A folder with the self-signed certificates "right.pem" and "other.pem", and their keys.
    """
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("right", "other"):
        subprocess.run(
            [
                *(openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
                *("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"),
                *("-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem")),
            ],
            check=True,
            capture_output=True,
        )
    return folder


@pytest.fixture(scope="module")
def tls_port(
    command: str, certificates: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[int]:
    """
    The port of a server that speaks nothing but TLS.
    """
    folder = tmp_path_factory.mktemp("tls")
    (folder / "empty.toml").touch()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                command,
                *("--config", "empty.toml", "--host", "127.0.0.1", "--port", str(port)),
                *("--storage-path", str(folder / "data"), "--log-level", "WARNING"),
                *("--tls-cert-file", str(certificates / "right.pem")),
                *("--tls-key-file", str(certificates / "right.key")),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            start_new_session=True,
        )
    try:
        with tls_client(port, certificates / "right.pem") as client:

            def answers() -> bool:
                assert process.poll() is None, (folder / "log").read_text()
                with contextlib.suppress(PyMongoError):
                    client.admin.command("ping")
                    return True
                return False

            wait_until(answers, "the server answers", 30)
        yield port
    finally:
        process.kill()
        process.wait()


def tls_client(port: int, authority: Path | None, **options: Any) -> MongoClient[Document]:
    """
    Return a client that trusts *authority*; None: one that does not encrypt.
    """
    if authority is not None:
        options |= {"tls": True, "tlsCAFile": str(authority)}
    return MongoClient(
        f"mongodb://127.0.0.1:{port}/?{OPTIONS}",
        serverSelectionTimeoutMS=1000,
        tz_aware=True,
        **options,
    )


def test_everything_works_over_tls(tls_port: int, certificates: Path) -> None:
    """
    Sends, claims, results and the change stream go over an encrypted connection.
    """
    with tls_client(tls_port, certificates / "right.pem") as client:
        tasks = client.shop.tasks
        producer = Producer(tasks)
        with Consumer(tasks, lambda params: params * 2) as consumer:
            wait_until(lambda: consumer.health().discovery == "stream", "the stream is open")
            producer.send_many([(str(n), n) for n in range(20)])
            assert [producer.result(str(n), 20) for n in range(20)] == [2 * n for n in range(20)]
            assert consumer.health().ok


@pytest.mark.parametrize("trusted", ["other.pem", None], ids=["a wrong certificate", "no TLS"])
def test_a_connection_that_cannot_be_trusted_is_not_used(
    tls_port: int, certificates: Path, trusted: str | None
) -> None:
    """
    A send fails, a consumer keeps trying and says why; both end in time.
    """
    authority = None if trusted is None else certificates / trusted
    with tls_client(tls_port, authority, connectTimeoutMS=1000, socketTimeoutMS=1000) as client:
        tasks = client.shop.tasks
        with pymongo.timeout(2), pytest.raises(StoreUnavailable) as caught:
            Producer(tasks).send("never")
        if trusted is not None:
            assert "certificate" in str(caught.value)
        with Consumer(tasks, print, stop_timeout=1) as consumer:
            wait_until(lambda: not consumer.health().ok, "health is bad", 20)
            components = consumer.health().components
            assert all(component.alive for component in components.values())
            assert components["fetch"].last_error is not None
    with tls_client(tls_port, certificates / "right.pem") as client:
        assert client.shop.tasks.count_documents({"key": "never"}) == 0


# -- params and results ----------------------------------------------------------------------------

MARK = "MARK-4711"


class Odd:
    """
    Cannot be stored, and shows the mark when it is printed.
    """

    def __repr__(self) -> str:
        return MARK


class Work:
    """
    Does everything that can be logged, with the mark in its hands.
    """

    def __init__(self) -> None:
        self.snoozed = False

    def __call__(self, params: Any, context: TaskContext) -> Any:
        assert params["secret"] == MARK
        context.progress({"secret": MARK})
        what = params["do"]
        if what == "raise":
            raise KeyError("nothing of it")
        if what == "retry":
            raise RetryLater(0, "nothing of it")
        if what == "for good":
            raise PermanentFailure("nothing of it")
        if what == "snooze" and not self.snoozed:
            self.snoozed = True
            raise Snooze(0)
        if what == "slow":
            context.cancelled.wait(20)
            context.check()
        return {"return": {"secret": MARK}, **BAD}.get(what, MARK)


#: Results that cannot be stored, each with the mark in another place.
BAD: dict[str, Any] = {
    "an object": {"secret": Odd()},
    "a deep one": [{"a": [Odd()]}],
    "a key": {(MARK,): 1},
    "an odd key": {Odd(): 1},
    "nul": {f"{MARK}\0": 1},
    "too large": MARK * 400_000,
    "text": {"secret": f"{MARK}\ud800"},
    "a number": [MARK, 2**70],
    "a set": {MARK},
}


def test_params_results_and_progress_are_never_logged(
    collection: Tasks, everything: Everything
) -> None:
    """
    Whatever happens to a task, no log record and no event has anything of its values.
    """
    producer = Producer(collection)
    whats = ["return", "raise", "retry", "for good", "snooze", *BAD]
    events: list[Event] = []
    with Consumer(collection, Work(), stop_timeout=4) as consumer:
        with consumer.subscribe() as subscription:
            for what in whats:
                params = {"do": what, "secret": MARK}
                producer.send(what, params, max_attempts=2, retry_delay=0, tags=["tag"])
            producer.send("slow", {"do": "slow", "secret": MARK}, lease=2, heartbeat=0.1)
            producer.send("timed", {"do": "slow", "secret": MARK}, timeout=0.2, max_attempts=1)
            wait_until(
                lambda: (
                    producer.count(status="running") <= 1 and producer.count(status="waiting") == 0
                ),
                "all but the slow one have ended",
                30,
            )
            producer.cancel("slow")
            assert consumer.run_until_idle(30)
            while (event := subscription.get(0)) is not None:
                events.append(event)
        said = [repr(one) for one in (consumer, consumer.health(), consumer.stop())]
    assert producer.count(status="failed") == 4 + len(BAD)
    assert {event.key for event in events} >= set(whats)
    assert len(everything.lines) > 2 * len(whats)
    places = [*map(repr, events), *said, *everything.lines]
    assert [place for place in places if MARK in place] == []


def test_a_server_that_refuses_a_document_is_quoted_without_it(
    collection: Tasks, everything: Everything
) -> None:
    """
    What the server says of a document that is too large is passed on without its values.
    """
    producer = Producer(collection)
    with pytest.raises((StoreError, ValueError)) as caught:
        producer.send("one", MARK * 2_000_000)
    assert MARK not in str(caught.value)
    assert MARK not in everything.text
