"""A `Connection` on a virtual loop and a fake transport, with a small program behind it: for tests of deadlines and
buffers, which a real socket can show only slowly and roughly."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import wsproto.events as ws
from wsproto.connection import Connection as WsConnection
from wsproto.connection import ConnectionType

from server.connection import Connection
from server.echo import EchoProgram, EchoSession
from server.host import Deadlines, Host
from server.http import Call, Response, Streaming, Upgrade, WebSocketChannel
from tests.fuzz.transport import FakeTransport
from tests.fuzz.virtual_loop import VirtualLoop

DEADLINES = Deadlines()
BIG = b"b" * 4000


class Session(EchoSession):
    """Counts how often it was told that its socket is gone."""

    losses = 0

    def lost(self) -> None:
        """See http.Session."""
        self.losses += 1


class StubProgram(EchoProgram):
    """/wait answers when the test says so, /big at length, /refused by its head; the rest echoes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.begun: list[str] = []  # paths, in order
        self.go_on: asyncio.Future[None] = loop.create_future()
        self.sessions: list[Session] = []
        self.left_behind: list[str] = []  # paths whose clients left before there was an answer

    def refuse(self, call: Call) -> Response | None:
        """See Program."""
        return Response(403, b"{}") if call.path == "/refused" else None

    async def answer(self, call: Call) -> Response | Streaming:
        """See Program."""
        self.begun.append(call.path)
        if call.path == "/wait":
            await self.go_on
        if call.path == "/big":
            return Response(200, BIG)
        return await super().answer(call)

    def left(self, call: Call) -> None:
        """See Program."""
        self.left_behind.append(call.path)

    def upgrade(self, call: Call) -> Response | Upgrade:
        """See Program."""

        def open_session(socket: WebSocketChannel) -> Session:
            self.sessions.append(Session(socket))
            return self.sessions[-1]

        return open_session


class Side:
    """The client's side of one connection, and time."""

    def __init__(self, loop: VirtualLoop, *, connections_max: int = 10) -> None:
        self.loop = loop
        self.program = StubProgram(loop)
        self.host = Host(
            program=self.program,
            deadlines=DEADLINES,
            loop=loop,
            max_header=4096,
            max_body=10_000,
            max_ws_message=10_000,
            abort_on_half_close=True,
            connections_max=connections_max,
            new_request_id=lambda: "r",
            connections=set(),
        )
        self.transport, self.connection = self.connect()
        self.frames = WsConnection(ConnectionType.CLIENT)

    def connect(self) -> tuple[FakeTransport, Connection]:
        """One more connection to the same host."""
        transport, connection = FakeTransport(self.loop), Connection(self.host)
        transport.connect(connection)
        self.loop.rest()
        return transport, connection

    def send(self, data: bytes) -> None:
        """Bytes from the client."""
        self.transport.feed(data)
        self.loop.rest()

    def get(self, path: str, *fields: str) -> None:
        """A request."""
        self.send(get(path, *fields))

    def read(self, count: int = 1 << 30) -> bytes:
        """What the client reads now, at most so much; more may be written meanwhile."""
        before = len(self.transport.received)
        self.transport.drain(count)
        self.loop.rest()
        return bytes(self.transport.received[before:])

    def read_all(self) -> bytes:
        """Read until nothing more comes."""
        data = b""
        while piece := self.read():
            data += piece
        return data

    def pass_time(self, seconds: float) -> None:
        """Advance."""
        self.loop.advance(seconds)

    def upgrade(self) -> Session:
        """Open a WebSocket; the program's session of it."""
        key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="
        self.get("/ws", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", key)
        assert self.read().startswith(b"HTTP/1.1 101 ")
        return self.program.sessions[-1]

    def frame(self, event: ws.Event) -> bytes:
        """A client's frame."""
        return self.frames.send(event)

    def events(self) -> list[Any]:
        """The frames that the client reads now."""
        self.frames.receive_data(self.read_all())
        return list(self.frames.events())


def get(path: str, *fields: str) -> bytes:
    """The bytes of a GET request."""
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *fields, "", ""]).encode()


@contextlib.contextmanager
def wire_side(**options: Any) -> Iterator[Side]:
    """A connection; at the end nothing may be left of it on the loop, and no fault may have been told."""
    loop = VirtualLoop()
    with loop.running():
        side = Side(loop, **options)
        yield side
        for connection in list(side.host.connections):
            connection.abort()
        loop.rest()
        assert not side.host.connections
        assert loop.timers == 0
        assert loop.faults == []
