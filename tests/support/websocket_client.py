"""A WebSocket client on a raw socket, with wsproto for the frames; it can also send what no client should."""

from __future__ import annotations

import base64
import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, Self

import wsproto.events as ws
from wsproto.connection import Connection as WsConnection
from wsproto.connection import ConnectionState, ConnectionType
from wsproto.extensions import PerMessageDeflate

from tests.support.http_client import READ_BYTES, Answer, Client, Header


class Listener(Protocol):
    """What can be connected to: a Server."""

    def connect(self, *, receive_buffer: int | None = None) -> Client:
        """A new connection."""
        ...


@dataclass(frozen=True)
class Closed:
    """How a WebSocket ended: the close frame's code and reason, or code 1006 when there was none."""

    code: int
    reason: str = ""


class WebSocketRefused(Exception):
    """The server answered the handshake with something else than 101."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"{answer.status} {bytes(answer.body)!r}")
        self.answer = answer


class WebSocketClient:
    """One WebSocket. Raises WebSocketRefused. It answers pings unless `pong` is False."""

    def __init__(
        self,
        server: Listener,
        target: str = "/v1/ws",
        *,
        headers: Iterable[Header] = (),
        version: str = "13",
        deflate: bool = False,
        pong: bool = True,
        receive_buffer: int | None = None,
    ) -> None:
        self._client = server.connect(receive_buffer=receive_buffer)
        self.socket = self._client.socket
        self._pong = pong
        self._waiting: list[ws.Event] = []
        self._parts: list[Any] = []  # the fragments so far of a message
        self.pings = 0
        extension = PerMessageDeflate()
        offer = [("Sec-WebSocket-Extensions", f"permessage-deflate; {extension.offer()}")] if deflate else []
        fields = [
            ("Connection", "Upgrade"),
            ("Upgrade", "websocket"),
            ("Sec-WebSocket-Version", version),
            ("Sec-WebSocket-Key", base64.b64encode(os.urandom(16)).decode()),
            *offer,
            *headers,
        ]
        try:
            self._client.request("GET", target, None, fields)
            self.handshake = self._client.begin("GET", upgrade=True)
            if self.handshake.status != 101:
                self._client.finish()
                raise WebSocketRefused(self.handshake)
        except BaseException:
            self._client.close()
            raise
        accepted = self.handshake.header("sec-websocket-extensions")
        if accepted is not None:
            extension.finalize(accepted)
        self._frames = WsConnection(ConnectionType.CLIENT, [extension] if accepted is not None else [])
        if trailing := self._client.take_trailing():
            self._frames.receive_data(trailing)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, event: ws.Event) -> None:
        """Any frame that wsproto knows."""
        self.send_bytes(self.frame(event))

    def frame(self, event: ws.Event) -> bytes:
        """Its bytes; frames must be sent in the order in which they were made."""
        return self._frames.send(event)

    def send_bytes(self, data: bytes) -> None:
        """Bytes as they are."""
        self.socket.sendall(data)

    def send_text(self, text: str) -> None:
        """One text message."""
        self.send(ws.TextMessage(text))

    def send_json(self, **message: Any) -> None:
        """One message of the API."""
        self.send_text(json.dumps(message))

    def receive(self) -> str | bytes | Closed:
        """The next whole message, or the end."""
        while True:
            event = self._next()
            if isinstance(event, Closed):
                return event
            if isinstance(event, ws.TextMessage | ws.BytesMessage):
                self._parts.append(event.data)
                if event.message_finished:
                    parts, self._parts = self._parts, []
                    return "".join(parts) if isinstance(event, ws.TextMessage) else b"".join(parts)

    def receive_json(self) -> dict[str, Any]:
        """The next message, which must be text and hold a JSON object."""
        message = self.receive()
        assert isinstance(message, str), message
        value = json.loads(message)
        assert isinstance(value, dict)
        return value

    def receive_until(self, *types: str, id_: str | None = None) -> list[dict[str, Any]]:
        """Messages through the first one of these types (with this id, when given)."""
        messages: list[dict[str, Any]] = []
        while not messages or messages[-1]["type"] not in types or id_ not in (None, messages[-1].get("id")):
            messages.append(self.receive_json())
        return messages

    def close(self, code: int = 1000, reason: str = "") -> Closed:
        """Close, and read to the server's answer."""
        self.send(ws.CloseConnection(code=code, reason=reason))
        return self.closed()

    def closed(self) -> Closed:
        """Read to the end, whatever comes before it."""
        while True:
            event = self.receive()
            if isinstance(event, Closed):
                return event

    def _next(self) -> ws.Event | Closed:
        while not self._waiting:
            try:
                data = self.socket.recv(READ_BYTES)
            except ConnectionResetError:
                return Closed(1006, "reset")
            if not data:
                return Closed(1006, "no close frame")
            self._frames.receive_data(data)
            self._waiting += self._frames.events()
        event = self._waiting.pop(0)
        if isinstance(event, ws.Ping):
            self.pings += 1
            if self._pong and self._frames.state is ConnectionState.OPEN:  # a close may have come behind the ping
                self.send(event.response())
        elif isinstance(event, ws.CloseConnection):
            if self._frames.state is ConnectionState.REMOTE_CLOSING:
                with contextlib.suppress(OSError):
                    self.send(event.response())
            return Closed(int(event.code), event.reason or "")
        return event

    def ended(self) -> str:
        """Behind the close frame: how the TCP connection ends, "fin" or "reset"."""
        try:
            rest = self.socket.recv(READ_BYTES)
        except ConnectionResetError:
            return "reset"
        assert rest == b"", rest[:100]
        return "fin"
