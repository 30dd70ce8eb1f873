"""`--conformance-echo`: in place of the API, through the same connection code, an echo for conformance suites.

Every path and method is answered 200 with the request's body (`ok` when it is empty); a WebSocket on any path
echoes each message as it came, text as text and binary as binary.
"""

from __future__ import annotations

from protocols.websocket import Binary, Text, WsEvent
from server.api import errors
from server.api.errors import ApiError
from server.http import Call, Response, Streaming, Upgrade, WebSocketChannel


class EchoProgram:
    """The Program of an echo server."""

    def refuse(self, call: Call) -> Response | None:
        """Nothing is refused."""
        return None

    async def answer(self, call: Call) -> Response | Streaming:
        """The body."""
        return Response(200, call.body or b"ok", b"application/octet-stream" if call.body else b"text/plain")

    def upgrade(self, call: Call) -> Response | Upgrade:
        """Any path."""
        return EchoSession

    def malformed(self, call: Call | None, status: int, message: str) -> Response:
        """In the API's shape."""
        return errors.render(ApiError(status, message))

    def sent(self, call: Call, status: int) -> None:
        """No log: a suite sends thousands of requests."""

    def left(self, call: Call) -> None:
        """Likewise."""


class EchoSession:
    """One echoing socket."""

    def __init__(self, socket: WebSocketChannel) -> None:
        self._socket = socket

    def receive(self, event: WsEvent) -> None:
        """Send it back."""
        if isinstance(event, Text):
            self._socket.write(self._socket.frame(event.data.encode()))
        elif isinstance(event, Binary):
            self._socket.write(self._socket.frame_binary(event.data))

    def pump(self) -> None:
        """Nothing waits."""

    def drain(self) -> None:
        """The server is going to stop."""
        self._socket.close(1001, "the server is going to stop")

    def lost(self) -> None:
        """Nothing to free."""
