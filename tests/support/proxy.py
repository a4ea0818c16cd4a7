"""
A network that fails: a proxy between one client and the server.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

from pymongo.uri_parser import parse_uri

_HEADER = struct.Struct("<iiii")
_OP_MSG = 2013


class Proxy:
    """
    Passes the messages of one client on, and drops what it is told to drop.

    `drop_replies` loses replies to commands that were carried out. `silence` swallows the replies
    to a command and keeps the connection. `cut` closes all connections and takes no new ones.
    """

    def __init__(self, uri: str) -> None:
        ((host, port), *_) = parse_uri(uri)["nodelist"]
        self._target = (host, port)
        self._lock = threading.Lock()
        # All under _lock.
        self._dropping: dict[str, int] = {}
        self._silent: set[str] = set()
        self._is_cut = False
        self._connections: set[socket.socket] = set()
        self.dropped = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        options = uri.partition("?")[2]
        self.uri = f"mongodb://127.0.0.1:{self._listener.getsockname()[1]}/?{options}"
        self._start(self._accept)

    def drop_replies(self, command: str, times: int = 1) -> None:
        """
        Let the next *times* commands called *command* be carried out, and lose their replies.
        """
        with self._lock:
            self._dropping[command] = self._dropping.get(command, 0) + times

    def silence(self, *commands: str) -> None:
        """
        From now on swallow the replies to *commands*, as a dead connection would.
        """
        with self._lock:
            self._silent = set(commands)

    def cut(self) -> None:
        with self._lock:
            self._is_cut = True
            connections = list(self._connections)
        for connection in connections:
            _close(connection)

    def restore(self) -> None:
        with self._lock:
            self._is_cut = False

    def close(self) -> None:
        # A listener that is only closed would leave its thread in accept().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()

    # -- its threads -------------------------------------------------------------------------

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="proxy")  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with self._lock:
            if self._is_cut:
                client.close()
                return
            self._connections.add(client)
        try:
            with client, socket.create_connection(self._target) as server:
                with self._lock:
                    self._connections.add(server)
                self._pass_on(client, server)
        except OSError:
            return
        finally:
            with self._lock:
                self._connections.discard(client)

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        try:
            while True:
                request = _message(client)
                command = _command_of(request)
                server.sendall(request)
                reply = _message(server)
                with self._lock:
                    drops = self._dropping.get(command, 0) > 0
                    if drops:
                        self._dropping[command] -= 1
                        self.dropped += 1
                    is_silent = command in self._silent
                if drops:
                    return
                if not is_silent:
                    client.sendall(reply)
                # A server that was asked to may go on by itself.
                while _more_to_come(reply):
                    reply = _message(server)
                    client.sendall(reply)
        finally:
            with self._lock:
                self._connections.discard(server)


def _message(connection: socket.socket) -> bytes:
    header = _read(connection, _HEADER.size)
    length = _HEADER.unpack(header)[0]
    return header + _read(connection, length - len(header))


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise ConnectionResetError
        data += part
    return bytes(data)


def _command_of(message: bytes) -> str:
    """
    Return the name of the command in *message*: the first field of its document.
    """
    if _HEADER.unpack_from(message)[3] != _OP_MSG:
        return ""
    # Header, flags, kind of section, length of the document, type of the field.
    start = _HEADER.size + 4 + 1 + 4 + 1
    return message[start : message.index(b"\0", start)].decode()


def _more_to_come(message: bytes) -> bool:
    is_message = _HEADER.unpack_from(message)[3] == _OP_MSG
    return is_message and bool(struct.unpack_from("<I", message, _HEADER.size)[0] & 2)


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxy_to(uri: str) -> Iterator[Proxy]:
    """
    Run a proxy to the server of *uri*.
    """
    proxy = Proxy(uri)
    try:
        yield proxy
    finally:
        proxy.close()
