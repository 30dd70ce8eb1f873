"""What passes between a connection and the program behind it: a request as the program sees it, and its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from protocols.http1 import Request
from server.outlet import Outlet, Pieces

if TYPE_CHECKING:
    from protocols.websocket import WsEvent
    from server.framing import Framing
    from server.readers import Gate, Source
    from server.stream import Stream

Headers = tuple[tuple[bytes, bytes], ...]


def _nothing(*_: object) -> None:
    pass


_NO_FIELDS: dict[bytes, bytes] = {}
_SHED = Request("", "", "1.1", (), None, chunked=False, expect_continue=False, keep_alive=False, upgrade=False)


class Call(msgspec.Struct, eq=False):
    """One request while it is answered. The program fills in what it finds out about it."""

    request: Request
    path: str  # percent-decoded, without the query
    query: str  # as it was sent
    client: str  # the peer's address; "" on a Unix socket
    request_id: str
    received_at: float  # time.monotonic() when its head was complete
    body: bytes = b""
    key: str = ""  # who asks, once that is known
    api: str = ""  # the family of a generation request, for metrics and the shape of errors
    stream_id: str = ""  # of the stream that it started or came back to
    began: bool = False  # it started that stream
    counted: bool = False  # as a request that began no stream
    guest: bool = False  # it came by another process of this server
    forwarded: bool = False  # another process answers it, counts it, and has it in its log
    on_stream: Callable[[Stream], None] = _nothing  # called with the stream that it started
    on_whole_answer: Callable[[], None] = _nothing  # called once a generation is collected to be sent in one piece
    _fields: dict[bytes, bytes] = _NO_FIELDS

    def __post_init__(self) -> None:
        self._fields = dict(reversed(self.request.headers))  # asked a dozen times for each request

    def shed(self) -> None:
        """The answer streams, perhaps for hours: nobody asks for the request any more."""
        self.request, self.path, self.query, self.body, self._fields = _SHED, "", "", b"", _NO_FIELDS
        self.on_stream = self.on_whole_answer = _nothing

    def has(self, name: bytes) -> bool:
        """Whether there is such a header, though it may be empty."""
        return name in self._fields

    def header(self, name: bytes) -> str:
        """The first value of a header, "" when absent; bytes beyond ASCII are read as Latin-1."""
        value = self._fields.get(name)
        return value.decode("latin-1") if value else ""


class Response(msgspec.Struct, frozen=True):
    """A whole answer."""

    status: int
    body: bytes = b""
    content_type: bytes = b"application/json"
    headers: Headers = ()


class Streaming(msgspec.Struct, frozen=True):
    """An answer that goes on: the events of `stream` from position `cursor` on, in a framing."""

    stream: Source
    framing: Framing
    cursor: int
    headers: Headers = ()
    status: int = 200


class Session(Protocol):
    """The program's side of an open WebSocket."""

    def receive(self, event: WsEvent) -> None:
        """A message, a pong, or the close."""
        ...

    def pump(self) -> None:
        """The socket takes more."""
        ...

    def drain(self) -> None:
        """The server is going to stop: close when there is nothing left to send."""
        ...

    def lost(self) -> None:
        """The connection is gone."""
        ...


class Upgrade(Protocol):
    """Makes the session of an accepted WebSocket, given where to write."""

    def __call__(self, socket: WebSocketChannel) -> Session: ...  # noqa: D102


class WebSocketChannel(Protocol):
    """Where a session writes its messages."""

    @property
    def writable(self) -> bool:
        """Whether it takes more tokens; replies may always be written."""
        ...

    @property
    def gate(self) -> Gate:
        """What says so."""
        ...

    def frame(self, payload: bytes) -> bytes:
        """The frame of one text message of UTF-8, for `write`."""
        ...

    def frame_binary(self, payload: bytes) -> bytes:
        """The frame of one binary message."""
        ...

    def write(self, frames: bytes) -> None:
        """Send frames."""
        ...

    def outlet(self, pieces: Pieces | None) -> Outlet | None:
        """A shorter way for tokens, if there is one."""
        ...

    def close(self, code: int, reason: str = "") -> None:
        """Begin the closing handshake."""
        ...

    def take_turn(self, act: Callable[[], None]) -> None:
        """Call `act`, which begins an answer, when it is its turn among all that clients ask."""
        ...


class Program(Protocol):
    """What a server serves: the API, or the conformance echo."""

    def refuse(self, call: Call) -> Response | None:
        """The answer that a request's head alone earns, or None to read its body."""
        ...

    async def answer(self, call: Call) -> Response | Streaming:
        """The answer to a whole request. Cancelled when the client leaves before there is one."""
        ...

    def upgrade(self, call: Call) -> Response | Upgrade:
        """The answer to a WebSocket request: a refusal, or what makes the session."""
        ...

    def malformed(self, call: Call | None, status: int, message: str) -> Response:
        """The answer to bytes that are no proper request; `call` is None when not even its head was understood."""
        ...

    def sent(self, call: Call, status: int) -> None:
        """The head of an answer went out: what the access log wants to know."""
        ...

    def left(self, call: Call) -> None:
        """The client left before there was an answer to its request, which was here whole."""
        ...


def json_response(value: object, status: int = 200, headers: Headers = ()) -> Response:
    """`value` as JSON."""
    return Response(status, msgspec.json.encode(value), headers=headers)
