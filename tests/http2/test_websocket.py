"""WebSocket over HTTP/2 (RFC 8441): the same sessions as over HTTP/1.1, each on a stream of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import wsproto.events as ws
from conformance_kit.http2_wire import GET, Wire, data
from h2.events import RemoteSettingsChanged
from h2.settings import SettingCodes
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.extensions import PerMessageDeflate

from protocols.http2_guard import Code, Kind
from tests.http2.conftest import Endpoint
from tests.support.http2 import Fields, Peer, dial
from tests.support.probes import PARKED
from tests.support.serving import Server


class Socket:
    """One WebSocket on a stream of a peer."""

    def __init__(
        self, peer: Peer, path: str = "/v1/ws", *, fields: Fields | None = None, deflate: bool = False
    ) -> None:
        self.peer = peer
        extension = PerMessageDeflate()
        offer = [("sec-websocket-extensions", f"permessage-deflate; {extension.offer()}")] if deflate else []
        self.stream = peer.h2.get_next_available_stream_id()
        head = [
            (":method", "CONNECT"),
            (":protocol", "websocket"),
            (":scheme", peer.scheme),
            (":path", path),
            (":authority", "localhost"),
            ("sec-websocket-version", "13"),
            *offer,
            *(fields or []),
        ]
        peer.h2.send_headers(self.stream, head)
        peer.bodies[self.stream] = bytearray()
        peer.flush()
        peer.wait(lambda: self.stream in peer.fields)
        self.status = peer.fields[self.stream][":status"]
        accepted = peer.fields[self.stream].get("sec-websocket-extensions")
        if accepted:
            extension.finalize(accepted)
        self._frames = Connection(ConnectionType.CLIENT, [extension] if accepted else [])
        self._read = 0
        self._text = ""
        self._pending: list[ws.Event] = []

    def send(self, event: ws.Event) -> None:
        """Any frame."""
        data = self._frames.send(event)
        while data:
            self.peer.wait(lambda: self.peer.h2.local_flow_control_window(self.stream) > 0)
            size = min(self.peer.h2.local_flow_control_window(self.stream), 16_384)
            self.peer.h2.send_data(self.stream, data[:size])
            data = data[size:]
            self.peer.flush()

    def say(self, **message: Any) -> None:
        """One message of the API."""
        self.send(ws.TextMessage(json.dumps(message)))

    def events(self) -> Iterator[ws.Event]:
        """What comes, to the end of the stream."""
        while True:
            if self._pending:
                yield self._pending.pop(0)
                continue
            body = self.peer.bodies[self.stream]
            if len(body) == self._read:
                if self.stream in self.peer.ended | self.peer.resets.keys():
                    return
                self.peer.pump()
                continue
            self._frames.receive_data(bytes(body[self._read :]))
            self._read = len(body)
            for event in self._frames.events():
                self._pending.append(event)
                if isinstance(event, ws.CloseConnection) and self._frames.state is ConnectionState.REMOTE_CLOSING:
                    self.send(event.response())

    def messages(self) -> Iterator[str]:
        """Whole text messages."""
        for event in self.events():
            if isinstance(event, ws.TextMessage):
                self._text += event.data
                if event.message_finished:
                    text, self._text = self._text, ""
                    yield text

    def until(self, *types: str) -> list[dict[str, Any]]:
        """Messages through the first of these types."""
        seen: list[dict[str, Any]] = []
        for message in self.messages():
            seen.append(json.loads(message))
            if seen[-1]["type"] in types:
                break
        return seen


def test_the_server_says_that_it_can(api: Endpoint) -> None:
    with api.peer() as peer:
        peer.wait(lambda: any(isinstance(event, RemoteSettingsChanged) for event in peer.events))
        assert peer.h2.remote_settings[SettingCodes.ENABLE_CONNECT_PROTOCOL] == 1


@pytest.mark.parametrize("deflate", [False, True])
def test_generations_beside_requests(api: Endpoint, deflate: bool) -> None:
    with api.peer() as peer:
        sockets = [Socket(peer, deflate=deflate) for _ in range(3)]
        assert [socket.status for socket in sockets] == ["200"] * 3
        assert ("sec-websocket-extensions" in peer.fields[sockets[0].stream]) is deflate
        stream = peer.ask("/v1/generate?prompt=a&max_tokens=20")
        for socket in sockets:
            for name in "ab":
                socket.say(type="generate", id=name, messages=[{"role": "user", "content": name}], max_tokens=25)
        for socket in sockets:
            seen = socket.until("done")
            seen += socket.until("done")
            assert [m["finish_reason"] for m in seen if m["type"] == "done"] == ["length"] * 2
            assert sum(m["type"] == "token" for m in seen) == 50
        assert peer.answer(stream)[1].endswith(b"data: [DONE]\n\n")


def test_a_bare_prompt_and_the_close() -> None:
    scripts = [{"match": "", "tokens": ["a", "b"], "finish": "length"}]
    with Server(scripts=scripts) as server, Peer(server.port) as peer:
        socket = Socket(peer)
        socket.send(ws.TextMessage("hello"))
        events = list(socket.events())
        assert [event.data for event in events[:-1] if isinstance(event, ws.TextMessage)] == ["a", "b"]
        assert isinstance(events[-1], ws.CloseConnection)
        assert (events[-1].code, events[-1].reason) == (1000, "length")


def test_the_client_closes(echo: Endpoint) -> None:
    with echo.peer() as peer:
        socket = Socket(peer)
        socket.send(ws.Message("hi"))
        assert next(socket.messages()) == "hi"
        socket.send(ws.CloseConnection(4000, "bye"))
        (end,) = socket.events()
        assert isinstance(end, ws.CloseConnection) and end.code == 4000
        assert socket.stream in peer.ended
        assert Socket(peer).status == "200"


def test_large_messages_and_pings(echo: Endpoint) -> None:
    """Beyond every window, both ways."""
    with echo.peer() as peer:
        socket = Socket(peer)
        socket.send(ws.Message("x" * 1_000_000))
        assert len(next(socket.messages())) == 1_000_000
        socket.send(ws.Ping(b"there?"))
        assert next(iter(socket.events())) == ws.Pong(b"there?")


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("/v1/models", [], "404"),
        ("/nowhere", [], "404"),
        ("/v1/ws", [("sec-websocket-extensions", "=")], "400"),
        ("/v1/ws", [("origin", "https://evil.example")], "403"),
    ],
)
def test_refusals(api: Endpoint, path: str, fields: Fields, status: str) -> None:
    with api.peer() as peer:
        socket = Socket(peer, path, fields=fields)
        assert socket.status == status
        peer.wait(lambda: socket.stream in peer.ended)
        assert "error" in json.loads(peer.bodies[socket.stream])
        assert peer.resets.get(socket.stream, 0) == Code.NO_ERROR


def test_another_version(api: Endpoint) -> None:
    with api.peer() as peer:
        stream = peer.ask(
            "/v1/ws", fields=[(":protocol", "websocket"), ("sec-websocket-version", "12")][1:], method="GET"
        )
        assert peer.answer(stream)[0][":status"] == "426"
        assert "upgrade" not in peer.fields[stream]


def test_a_reset_or_an_end_detaches_what_it_shows(api: Endpoint) -> None:
    for end in ("reset", "end"):
        with api.peer() as peer:
            socket = Socket(peer)
            socket.say(type="generate", id="a", messages=[{"role": "user", "content": "x"}], max_tokens=5000)
            (started, *_) = socket.until("token")
            if end == "reset":
                peer.h2.reset_stream(socket.stream, Code.CANCEL)
            else:
                peer.h2.end_stream(socket.stream)
            peer.flush()
            again = Socket(peer)
            again.say(type="resume", id="b", stream=started["stream"], after=1)
            assert again.until("token")[0]["type"] == "started"
            again.say(type="cancel", id="b")
            assert again.until("error")[-1]["error"]["code"] == "cancelled"


def test_a_window_that_is_closed_parks_what_it_shows() -> None:
    with Server("--synthetic-step-ms", "2") as server, Peer(server.port, window=2000) as peer:
        socket = Socket(peer)
        peer.stalled.add(socket.stream)
        socket.say(type="generate", id="a", messages=[{"role": "user", "content": "x"}], max_tokens=1000)
        peer.wait(lambda: len(peer.bodies[socket.stream]) == 2000)
        server.wait_metric(PARKED, 1)
        peer.stalled.clear()
        peer.h2.increment_flow_control_window(1 << 20, socket.stream)
        peer.flush()
        seen = socket.until("done")
        assert [m["n"] for m in seen if m["type"] == "token"] == list(range(1, 1001))


def test_a_client_that_does_not_read_its_echo_is_not_read(echo: Endpoint) -> None:
    """What waits for it is bounded: its own window closes."""
    with echo.peer(window=0) as peer:
        socket = Socket(peer)
        frames = Connection(ConnectionType.CLIENT)
        sent = 0
        while (room := min(peer.h2.local_flow_control_window(socket.stream), 16_000)) > 0 and sent < 4_000_000:
            message = frames.send(ws.BytesMessage(b"x" * max(1, room - 20)))[:room]
            peer.h2.send_data(socket.stream, message)
            peer.flush()
            sent += len(message)
            peer.h2.ping(b"12345678")
            peer.flush()
            before = len(peer.events)
            peer.wait(lambda: len(peer.events) > before)  # noqa: B023
        assert sent < 300_000
        other = peer.ask("/", b"another stream")
        peer.h2.increment_flow_control_window(1000, other)
        peer.flush()
        assert peer.answer(other)[1] == b"another stream"


def test_drain_says_goodbye() -> None:
    head = [(":method", "CONNECT"), (":protocol", "websocket"), *GET[1:3], (":path", "/v1/ws")]
    with Server() as server, Wire(dial(server.port, None)) as wire:
        wire.send(wire.headers(1, [*head, ("sec-websocket-version", "13")], end=False))
        wire.wait(lambda seen: seen.kind == Kind.HEADERS)
        server.terminate()
        frames = Connection(ConnectionType.CLIENT)
        frames.receive_data(wire.wait(lambda seen: seen.kind == Kind.DATA).payload)
        (end,) = frames.events()
        assert isinstance(end, ws.CloseConnection) and end.code == 1001
        wire.send(data(1, frames.send(end.response())))
        wire.connection_error(Code.NO_ERROR)
        assert server.wait() == 0
