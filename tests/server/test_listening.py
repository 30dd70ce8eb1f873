"""server.listening: what happens to clients while a listener goes away."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from server.listening import accept_rest, turn_away
from tests.support.http_client import DEADLINE_S

SYN_SENT = 2  # the first byte of tcp_info (linux/tcp_states.h)


def test_who_has_connected_is_accepted_and_nobody_else_connects() -> None:
    with socket.socket() as listener, socket.socket() as early, socket.socket() as late:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(DEADLINE_S)
        early.connect(listener.getsockname())
        turn_away(listener)
        late.setblocking(False)
        late.connect_ex(listener.getsockname())
        if sys.platform == "linux":
            assert late.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == SYN_SENT
        accepted, address = listener.accept()
        with accepted:
            assert address == early.getsockname()
            early.sendall(b"asks")
            assert accepted.recv(4) == b"asks"


@contextmanager
def on_path(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)
        yield listener


def rest_of(listener: socket.socket, wait_s: float = DEADLINE_S, *, taken: asyncio.Event | None = None) -> list[bytes]:
    """What each of the rest says. `taken`: none of them is before this."""
    said = []

    async def serve(sock: socket.socket) -> None:
        with sock:
            if taken is not None:
                await taken.wait()
            said.append(await asyncio.get_running_loop().sock_recv(sock, 9))

    asyncio.run(accept_rest(listener, serve, wait_s))
    return said


def test_on_a_unix_socket_the_path_goes_and_who_looked_it_up_is_refused(tmp_path: Path) -> None:
    path, looked_up = tmp_path / "s.sock", tmp_path / "looked-up"
    with on_path(path) as listener, socket.socket(socket.AF_UNIX) as early, socket.socket(socket.AF_UNIX) as late:
        os.link(path, looked_up)
        early.connect(str(path))
        early.sendall(b"asks")
        turn_away(listener)
        assert not path.exists()
        with pytest.raises(ConnectionRefusedError):
            late.connect(str(looked_up))
        turn_away(listener)  # nothing more happens
        assert rest_of(listener.dup()) == [b"asks"]
        assert rest_of(listener.dup()) == []


def test_who_is_not_taken_in_time_is_left(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with on_path(path) as listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        assert rest_of(listener.dup(), 0.01, taken=asyncio.Event()) == []
        client.settimeout(DEADLINE_S)
        assert client.recv(1) == b""


def test_the_rest_waits_for_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, tries = tmp_path / "s.sock", []

    class Scarce(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            tries.append(1)
            if len(tries) < 3:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    monkeypatch.setattr("server.listening.RETRY_S", 0)
    with on_path(path) as listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(b"asks")
        scarce = Scarce(listener.family, listener.type, fileno=os.dup(listener.fileno()))
        assert rest_of(scarce) == [b"asks"]
    assert len(tries) == 4
