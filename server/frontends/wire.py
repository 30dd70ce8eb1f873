"""The messages between server processes: frames as on the engine's wire (a length, then msgpack), over a Unix socket.

Who asks numbers its questions; everything that is said about one bears its number, in both directions. The bytes of a
streamed answer are bounded by what the asking side has taken: the owner stops at WINDOW_BYTES that were not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from engine.wire import Frames, framed
from protocols.http1 import Request

# Of one stream's bytes, beside what its client's socket holds: the size of its send buffer.
WINDOW_BYTES = 16 * 1024


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """A call, as far as its owner needs it. Who asks and whether they may has been found out."""

    request: Request
    path: str
    query: str
    client: str
    request_id: str
    received_at: float  # time.monotonic() is one clock to all processes
    body: bytes
    key: str
    api: str


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Answer a request."""

    id: int
    call: Asked


class Show(msgspec.Struct, frozen=True, array_like=True, tag="show"):
    """Give the messages of a stream behind a position, for the generation `name` on a WebSocket."""

    id: int
    call: Asked
    name: str
    stream: str
    after: int


class Find(msgspec.Struct, frozen=True, array_like=True, tag="find"):
    """Tell of a stored response, or of an item that came out of one."""

    id: int
    key: str
    name: str
    item: bool


class Count(msgspec.Struct, frozen=True, array_like=True, tag="count"):
    """Tell what you have counted, for /metrics."""

    id: int


class Status(msgspec.Struct, frozen=True, array_like=True, tag="status"):
    """Tell how you are, for /status."""

    id: int
    names_keys: bool


class Take(msgspec.Struct, frozen=True, array_like=True, tag="take"):
    """So many bytes of the answer were taken."""

    id: int
    size: int


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """End the stream that is being shown as cancelled."""

    id: int
    message: str


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """The client is gone."""

    id: int


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """The whole answer."""

    id: int
    status: int
    body: bytes
    content_type: bytes
    headers: tuple[tuple[bytes, bytes], ...]


class Collecting(msgspec.Struct, frozen=True, array_like=True, tag="collecting"):
    """A generation is being collected, to be answered in one piece."""

    id: int


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """The head of a streamed answer, and what the connection must know of its framing."""

    id: int
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    stream: str
    content_type: bytes
    ping: bytes
    half_close: bool


class Piece(msgspec.Struct, frozen=True, array_like=True, tag="piece"):
    """Whole events of the answer's body, or whole messages."""

    id: int
    data: bytes


class Closed(msgspec.Struct, frozen=True, array_like=True, tag="closed"):
    """The answer's body ends; `whole`: as it should. `last`: a WebSocket's message that tells how."""

    id: int
    whole: bool
    last: bytes = b""


class Found(msgspec.Struct, frozen=True, array_like=True, tag="found"):
    """A stored response (`final` is empty while it is made), or an item in `final`; `known`: there is one."""

    id: int
    known: bool
    items: bytes = b""
    final: bytes = b""


class Counted(msgspec.Struct, frozen=True, array_like=True, tag="counted"):
    """All of /metrics, or of /status."""

    id: int
    text: bytes


ToOwner = Ask | Show | Find | Count | Status | Take | End | Leave
ToAsker = Answer | Collecting | Opened | Piece | Closed | Found | Counted

Message = TypeVar("Message")

_encoder = msgspec.msgpack.Encoder()
_to_owner: msgspec.msgpack.Decoder[ToOwner] = msgspec.msgpack.Decoder(ToOwner)
_to_asker: msgspec.msgpack.Decoder[ToAsker] = msgspec.msgpack.Decoder(ToAsker)


def encode(message: ToOwner | ToAsker) -> bytes:
    """One frame."""
    return framed(_encoder.encode(message))


class MessageReader(Generic[Message]):
    """Messages from bytes as they come."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Message]) -> None:
        self._frames = Frames()
        self._decode = decoder.decode

    def feed(self, data: bytes) -> Iterator[Message]:
        """Every message that `data` completes."""
        return map(self._decode, self._frames.feed(data))


def owner_reader() -> MessageReader[ToOwner]:
    """Reads what an owner is asked."""
    return MessageReader(_to_owner)


def asker_reader() -> MessageReader[ToAsker]:
    """Reads what owners answer."""
    return MessageReader(_to_asker)
