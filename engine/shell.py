"""The engine's sockets: reads messages, runs steps, writes what they made. One thread, never blocked by a socket.

Steps run back to back while there is work; between two of them every socket is looked at without waiting.
Only an idle engine waits. A peer that doesn't read its steps can be owed no more than its credit allows; one
that is owed more than PEER_OWED_BYTES_MAX is broken, and is dropped.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
from pathlib import Path

from engine.core import Core, Peer
from engine.wire import FrameReader, Step, WireError, encode

# The credit of 100,000 streams in one unread answer; a Hello with the largest tokenizer fits too.
PEER_OWED_BYTES_MAX = 256 * 1024 * 1024
READ_BYTES = 256 * 1024
TOKEN_BYTES_MAX = 4096
# An engine with nothing to do but a grammar that is being compiled looks so often whether it is: most take as long.
PREPARING_S = 0.002


class _Connection:
    """One server's socket, with what it is owed."""

    def __init__(self, sock: socket.socket, core: Core, secret: bytes) -> None:
        self.socket = sock
        self.owed = bytearray()
        self.peer: Peer | None = None
        self._core = core
        self._secret = secret  # what it must send first, before it is told anything
        self._reader = FrameReader(engine_side=True)
        self._greeting = b""
        if not secret:
            self._join()

    def _join(self) -> None:
        self.owed += encode(self._core.hello)
        self.peer = self._core.join(self._send)

    def _send(self, step: Step) -> None:
        self.owed += encode(step)

    def receive(self) -> bool:
        """Take what has come. False when the connection is over."""
        try:
            data = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        if self.peer is None:
            self._greeting += data
            if len(self._greeting) < len(self._secret):
                return True
            head, data = self._greeting[: len(self._secret)], self._greeting[len(self._secret) :]
            if not hmac.compare_digest(head, self._secret):
                return False
            self._join()
        assert self.peer is not None
        try:
            for message in self._reader.feed(data):
                self._core.receive(self.peer, message)  # type: ignore[arg-type]
        except WireError:
            return False
        return True

    def flush(self) -> bool:
        """Write what the socket takes. False when the connection is over."""
        if not self.owed:
            return True
        try:
            sent = self.socket.send(self.owed)
        except BlockingIOError:
            sent = 0
        except OSError:
            return False
        del self.owed[:sent]
        return len(self.owed) <= PEER_OWED_BYTES_MAX

    def close(self) -> None:
        if self.peer is not None:
            self._core.leave(self.peer)
        self.socket.close()


class Shell:
    """Serves `core` on listening sockets, or on one connected socket whose end is the engine's end."""

    def __init__(self, core: Core, *, secret: bytes = b"") -> None:
        self._core = core
        self._secret = secret
        self._selector = selectors.DefaultSelector()
        self._connections: dict[socket.socket, _Connection] = {}
        self._parent: socket.socket | None = None

    def listen(self, sock: socket.socket) -> None:
        """Accept servers on `sock`."""
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ)

    def attach(self, sock: socket.socket, *, parent: bool = False) -> None:
        """Serve a connected socket; `run` returns when a `parent` is gone."""
        sock.setblocking(False)
        self._connections[sock] = _Connection(sock, self._core, b"" if parent else self._secret)
        self._selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE)
        if parent:
            self._parent = sock

    def run(self) -> None:
        """Serve until the parent is gone; for ever without one."""
        while True:
            wait_s = 0.0 if self._core.has_work else PREPARING_S if self._core.is_preparing else None
            for key, _ in self._selector.select(wait_s):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock not in self._connections:
                    self._accept(sock)
                elif not self._connections[sock].receive():
                    self._drop(sock)
            if self._core.has_work:
                self._core.step()
            for sock, connection in list(self._connections.items()):
                if connection.flush():
                    wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.owed else 0)
                    if self._selector.get_key(sock).events != wanted:
                        self._selector.modify(sock, wanted)
                else:
                    self._drop(sock)
            if self._parent is not None and self._parent not in self._connections:
                return

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return  # it was gone before we came, or there is no descriptor left; the others go on
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.attach(sock)

    def _drop(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        self._connections.pop(sock).close()


def bind(address: str) -> socket.socket:
    """A listening socket for `unix:/path` or `tcp://host:port`. Raises ValueError for anything else, and OSError."""
    if address.startswith("unix:"):
        sock = _bind_unix(address.removeprefix("unix:"))
    elif address.startswith("tcp://"):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"{address!r} is not of the form tcp://host:port")
        try:
            sock = socket.create_server((host.strip("[]"), int(port)))
        except OSError as error:
            raise OSError(f"can't listen on {address}: {error.strerror}") from None
    else:
        raise ValueError(f"{address!r} is neither unix:/path nor tcp://host:port")
    sock.listen(128)
    return sock


def unbind(address: str) -> None:
    """Remove what `bind` left in the file system."""
    if address.startswith("unix:"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address.removeprefix("unix:"))


def _bind_unix(path: str) -> socket.socket:
    """For this user only. Raises OSError when another engine answers there."""
    if Path(path).is_socket() and not _answers(path):
        os.unlink(path)  # left by an engine that is gone
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(path)
    except OSError as error:
        sock.close()
        raise OSError(f"can't listen on unix:{path}: {error.strerror}") from None
    os.chmod(path, 0o600)
    return sock


def read_token(path: str) -> bytes:
    """The shared secret in a file, without its line end. Raises OSError, or ValueError for an empty one."""
    with Path(path).open("rb") as file:
        token = file.read(TOKEN_BYTES_MAX).strip()
    if not token:
        raise ValueError(f"{path} holds no token")
    return token


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0
