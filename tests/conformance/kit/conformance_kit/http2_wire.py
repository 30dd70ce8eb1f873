"""HTTP/2 frames as a case wants them, right or wrong, and a reader of what comes (RFC 9113 sections 3.4, 4 and 6).

Imports the standard library only, and hpack where a connection is made.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import ssl
from collections.abc import Callable, Iterable
from typing import NamedTuple, Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
ACK = END_STREAM = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITY = 0x20
FRAME_BYTES_MAX = 16_384  # until SETTINGS say otherwise
WINDOW_BYTES_MAX = (1 << 31) - 1
READ_BYTES = 64 * 1024

Fields = list[tuple[str, str]]
GET: Fields = [(":method", "GET"), (":scheme", "http"), (":authority", "localhost"), (":path", "/")]
POST: Fields = [(":method", "POST"), *GET[1:]]


class Kind(enum.IntEnum):
    """Types of frames (RFC 9113 6)."""

    DATA = 0x0
    HEADERS = 0x1
    PRIORITY = 0x2
    RST_STREAM = 0x3
    SETTINGS = 0x4
    PUSH_PROMISE = 0x5
    PING = 0x6
    GOAWAY = 0x7
    WINDOW_UPDATE = 0x8
    CONTINUATION = 0x9
    UNKNOWN = 0x16
    PRIORITY_UPDATE = 0x10  # RFC 9218


class Code(enum.IntEnum):
    """Error codes of RST_STREAM and GOAWAY (RFC 9113 7)."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    ENHANCE_YOUR_CALM = 0xB


class Setting(enum.IntEnum):
    """Identifiers in SETTINGS (RFC 9113 6.5.2, RFC 8441 3)."""

    HEADER_TABLE_SIZE = 0x1
    ENABLE_PUSH = 0x2
    MAX_CONCURRENT_STREAMS = 0x3
    INITIAL_WINDOW_SIZE = 0x4
    MAX_FRAME_SIZE = 0x5
    ENABLE_CONNECT_PROTOCOL = 0x8


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """The bytes of a frame."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def settings(*pairs: tuple[int, int], flags: int = 0) -> bytes:
    """A SETTINGS frame."""
    return frame(Kind.SETTINGS, flags, 0, b"".join(k.to_bytes(2, "big") + v.to_bytes(4, "big") for k, v in pairs))


def window_update(stream: int, increment: int) -> bytes:
    """A WINDOW_UPDATE frame."""
    return frame(Kind.WINDOW_UPDATE, 0, stream, increment.to_bytes(4, "big"))


def reset(stream: int, code: int = Code.CANCEL) -> bytes:
    """An RST_STREAM frame."""
    return frame(Kind.RST_STREAM, 0, stream, code.to_bytes(4, "big"))


def data(stream: int, payload: bytes = b"", *, end: bool = False) -> bytes:
    """A DATA frame."""
    return frame(Kind.DATA, END_STREAM if end else 0, stream, payload)


def dependency(on: int, weight: int = 15, *, exclusive: bool = False) -> bytes:
    """What PRIORITY holds, and HEADERS with that flag (RFC 9113 6.3)."""
    return (on | (1 << 31 if exclusive else 0)).to_bytes(4, "big") + bytes([weight])


def priority(stream: int, on: int, weight: int = 15, *, exclusive: bool = False) -> bytes:
    """A PRIORITY frame."""
    return frame(Kind.PRIORITY, 0, stream, dependency(on, weight, exclusive=exclusive))


class Seen(NamedTuple):
    """A frame that came."""

    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def code(self) -> int:
        """The error code of RST_STREAM or GOAWAY."""
        return int.from_bytes(self.payload[4:8] if self.kind == Kind.GOAWAY else self.payload[:4], "big")

    @property
    def pairs(self) -> dict[int, int]:
        """What SETTINGS say."""
        at = range(0, len(self.payload), 6)
        return {
            int.from_bytes(self.payload[i : i + 2], "big"): int.from_bytes(self.payload[i + 2 : i + 6], "big")
            for i in at
        }


class Closed(Exception):
    """The server ended the connection."""


class Wire:
    """One connection of raw frames; `headers` encodes with a table of its own. The opening is done when it is made.

    `get`, `post`: the fields of requests that the server understands. `body`: what `plain` sends, by `post` then."""

    def __init__(
        self,
        connected: socket.socket,
        *,
        opening: bytes | None = None,
        get: Fields = GET,
        post: Fields = POST,
        body: bytes = b"",
    ) -> None:
        from hpack import Decoder, Encoder

        self.socket = connected
        self.get, self.post, self.body = get, post, body
        self.encoder = Encoder()
        self._decoder = Decoder(1 << 20)
        self._buffer = bytearray()
        self.goaway: Seen | None = None
        self.settings: dict[int, int] = {}  # the server's
        self.heads: dict[int, dict[str, str]] = {}  # of each stream's answer
        self.send(PREFACE + settings() if opening is None else opening)
        if opening is None:
            self.wait(lambda seen: seen.kind == Kind.SETTINGS and not seen.flags & ACK)
            self.send(settings(flags=ACK))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The TCP connection; it may be closed already."""
        self.socket.close()

    # What is sent

    def send(self, *frames: bytes) -> None:
        """Send bytes as they are; a server that has closed already is no fault."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, ssl.SSLError):
            self.socket.sendall(b"".join(frames))

    def block(self, fields: Iterable[tuple[str, str]]) -> bytes:
        """An HPACK block."""
        return bytes(self.encoder.encode(list(fields)))

    def headers(self, stream: int, fields: Fields | None = None, *, end: bool = True) -> bytes:
        """A HEADERS frame with a whole block, of `get` unless told otherwise."""
        flags = END_HEADERS | (END_STREAM if end else 0)
        return frame(Kind.HEADERS, flags, stream, self.block(self.get if fields is None else fields))

    @property
    def fields(self) -> Fields:
        """Of a plain request."""
        return self.post if self.body else self.get

    def plain(
        self,
        stream: int = 1,
        *,
        fields: Fields | None = None,
        flags: int = 0,
        before: bytes = b"",
        behind: bytes = b"",
    ) -> bytes:
        """The frames of a plain request, with bytes around its header block."""
        flags |= END_HEADERS | (0 if self.body else END_STREAM)
        head = frame(Kind.HEADERS, flags, stream, before + self.block(fields or self.fields) + behind)
        return head + (data(stream, self.body, end=True) if self.body else b"")

    def split(self, *cuts: int) -> list[bytes]:
        """A plain request whose block comes in pieces: HEADERS, CONTINUATIONs, DATA."""
        block = self.block([*self.fields, ("x-long", "y" * 100)])
        pieces = [block[a:b] for a, b in zip((0, *cuts), (*cuts, len(block)), strict=True)]
        first = frame(Kind.HEADERS, 0 if self.body else END_STREAM, 1, pieces[0])
        rest = [frame(Kind.CONTINUATION, 0, 1, piece) for piece in pieces[1:-1]]
        last = frame(Kind.CONTINUATION, END_HEADERS, 1, pieces[-1])
        return [first, *rest, last, *([data(1, self.body, end=True)] if self.body else [])]

    # What comes

    def read(self) -> Seen:
        """The next frame; Closed at the end, TimeoutError when the socket's deadline is over."""
        while len(self._buffer) < 9 or len(self._buffer) < 9 + int.from_bytes(self._buffer[:3], "big"):
            try:
                piece = self.socket.recv(READ_BYTES)
            except TimeoutError:
                raise TimeoutError("nothing more came in the time for an answer") from None
            except (ConnectionResetError, ssl.SSLError):
                piece = b""
            if not piece:
                raise Closed("the server ended the connection")
            self._buffer += piece
        length = int.from_bytes(self._buffer[:3], "big")
        head, payload = self._buffer[:9], bytes(self._buffer[9 : 9 + length])
        del self._buffer[: 9 + length]
        seen = Seen(head[3], head[4], int.from_bytes(head[5:9], "big"), payload)
        if seen.kind == Kind.GOAWAY:
            self.goaway = seen
        elif seen.kind == Kind.SETTINGS and not seen.flags & ACK:
            self.settings |= seen.pairs
        elif seen.kind == Kind.HEADERS:
            # Each one is decoded, whoever waits for it: the encoder's table goes on over all of them.
            found = {str(k): str(v) for k, v in self._decoder.decode(seen.payload)}
            self.heads[seen.stream] = {**self.heads.get(seen.stream, {}), **found}
        return seen

    def wait(self, condition: Callable[[Seen], bool]) -> Seen:
        """Read up to a frame."""
        while True:
            if condition(seen := self.read()):
                return seen

    def answer(self, stream: int) -> tuple[dict[str, str], bytes]:
        """Read to the end of an answer: its fields, trailers among them, and its body. AssertionError when it is
        reset."""
        body = b""
        while True:
            seen = self.read()
            assert seen.kind != Kind.GOAWAY or not seen.code, seen
            if seen.stream != stream:
                continue
            assert seen.kind != Kind.RST_STREAM, seen
            if seen.kind == Kind.DATA:
                body += seen.payload
            if seen.flags & END_STREAM and seen.kind in (Kind.HEADERS, Kind.DATA):
                return self.heads[stream], body

    def alive(self) -> None:
        """A ping is answered, and there was no GOAWAY before it."""
        self.send(frame(Kind.PING, 0, 0, b"are you?"))
        self.wait(lambda seen: seen.kind == Kind.PING and seen.flags == ACK and seen.payload == b"are you?")
        assert self.goaway is None, self.goaway

    def connection_error(self, *codes: int) -> None:
        """The connection ends, after a GOAWAY with one of these codes."""
        try:
            while True:
                self.read()
        except Closed:
            pass
        assert self.goaway is not None, "no GOAWAY"
        assert self.goaway.code in codes, self.goaway

    def stream_error(self, stream: int, *codes: int) -> None:
        """The stream is reset with one of these codes, and the connection goes on."""
        seen = self.wait(lambda seen: seen.kind == Kind.RST_STREAM and seen.stream == stream)
        assert seen.code in codes, seen
        self.alive()
