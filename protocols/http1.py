"""The server's side of one HTTP/1.1 connection: bytes to requests, responses to bytes.

h11 is the authority for messages and for connection state. In front of it stands `http1_guard`, so that h11 sees only
what every recipient reads in the same way. Each request has a parser of its own, which is gone once the request is here
whole, or only a body of known length is left to count; it has none where a head like it came before (`http1_heads`).
What frames an answer, and whether the connection outlives it, h11 says once for each kind of answer (`http1_answers`).
Body chunks are framed by hand, because a token's chunk must cost one formatting of bytes, and so are the fields of an
answer's head that say nothing about its framing, which h11 would check and copy four times. Tests prove all of that
identical to what h11 writes and decides.

Imports h11, msgspec and its neighbours; no sockets, no clock. `receive` never raises, whatever comes; the response
methods raise ValueError for content that can't be sent and RuntimeError when called out of turn.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable

import h11
import msgspec

from protocols import http1_heads
from protocols.http1_answers import Frame, frame_of, irregular_head, plain_lines
from protocols.http1_guard import Framing, Guard, Malformed, split_absolute

# h11 gets whole heads and small canonical lines only, never a part of one that grows; the guard holds the real limit.
_H11_SLACK_BYTES = 64 * 1024

# Chunk sizes whose line is kept: a token's event has some 250 bytes. bytes.join makes a chunk in 2/3 of the time that
# formatting takes.
SIZES_KEPT = 1024

_sizes = [b"%x\r\n" % size for size in range(SIZES_KEPT)]


class Request(msgspec.Struct, frozen=True):
    """The head of a request. Header names are lower-cased, values stripped; nothing repeats that may not repeat."""

    method: str
    target: str
    http_version: str  # "1.0" or "1.1"
    headers: tuple[tuple[bytes, bytes], ...]
    content_length: int | None
    chunked: bool
    expect_continue: bool  # the client waits for continue_100() before it sends the body
    keep_alive: bool  # as far as the client goes; `Http1.must_close` decides
    upgrade: bool  # a well-formed WebSocket upgrade

    def header(self, name: bytes) -> bytes | None:
        """The first value of `name` (lower case), or None."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    @property
    def path(self) -> str:
        """Path and query, whether or not the target is in absolute form; "*" for the server as a whole."""
        return self.target if self.target[:1] == "/" else split_absolute(self.target.encode())[1].decode()

    @property
    def host(self) -> str:
        """Host and port that the client addressed: an absolute target beats the Host field (RFC 9112 3.2.2)."""
        named = b"" if self.target[:1] == "/" else split_absolute(self.target.encode())[0]
        return (named or self.header(b"host") or b"").decode()


class Body(msgspec.Struct, frozen=True):
    """Bytes of the request's body, never empty."""

    data: bytes


class BodyEnd(msgspec.Struct, frozen=True):
    """The request is complete. Trailers are dropped."""


class Refusal(msgspec.Struct, frozen=True):
    """The bytes are no request that may be trusted: answer with `status` and close."""

    status: int
    message: str
    headers: tuple[tuple[bytes, bytes], ...] = ()  # that the answer must carry


Event = Request | Body | BodyEnd | Refusal


class _Write(enum.Enum):
    """What the response methods may do now."""

    HEAD = enum.auto()
    CHUNKED = enum.auto()
    LENGTH = enum.auto()
    UNTIL_CLOSE = enum.auto()
    NOTHING = enum.auto()  # HEAD, 204, 304: body bytes are swallowed
    ENDED = enum.auto()


# To find a member by its name takes longer than to compare two, and each token asks.
_HEAD, _CHUNKED, _LENGTH, _UNTIL_CLOSE, _NOTHING, _ENDED = _Write


class Http1:
    """One connection. Read with `receive`, answer with `head`, `body`, `end`, then `next_request` or close."""

    __slots__ = (
        "_counted", "_deaf", "_eof", "_frame", "_guard", "_left", "_max_header", "_parser", "_request", "_version",
        "_write",
    )  # fmt: skip

    def __init__(self, *, max_header: int) -> None:
        self._guard = Guard(max_header=max_header)
        self._max_header = max_header
        self._parser: h11.Connection | None = None  # of the request that is coming
        self._counted = False  # only the length of its body is left to come
        self._request: Request | None = None
        self._version: bytes | None = None  # of HTTP, as the latest request that was understood had it
        self._write = _HEAD
        self._left = 0  # bytes that the body must still get, where its length was told
        self._frame: Frame | None = None  # of the answer that has begun; None: or that has failed
        self._deaf = False  # what still comes is no part of any request
        self._eof = False

    # What the client sends

    def receive(self, data: bytes) -> list[Event]:
        """The events that `data` completes, of the current request only: behind BodyEnd the bytes wait for
        `next_request`, behind a Refusal and behind `Connection: close` they are dropped."""
        if self._deaf:
            return []
        self._guard.buffer += data
        return self._read()

    def receive_eof(self) -> list[Event]:
        """The client will send nothing more. A Refusal when that cuts the current request."""
        self._eof = True
        return self._read()

    def next_request(self) -> list[Event]:
        """Begin the next cycle, with what was pipelined. RuntimeError while `must_close` is set."""
        if self._write is not _ENDED or self.must_close:
            raise RuntimeError("the connection is not ready for another request")
        self._guard.start_next()
        self._request = None
        self._write = _HEAD
        self._frame = None
        return self._read() if self._guard.buffer else []

    @property
    def buffered(self) -> int:
        """Pipelined bytes that wait behind the current request."""
        return len(self._guard.buffer) if self._guard.complete else 0

    @property
    def awaiting_request(self) -> bool:
        """Nothing of the next request has come."""
        return self._guard.awaiting and not self._deaf

    @property
    def head_started(self) -> bool:
        """A request has begun, and its head isn't complete."""
        return self._guard.in_head and not self._deaf

    def take_upgrade_bytes(self) -> bytes:
        """The bytes behind an Upgrade request, which belong to the new protocol. This object is finished then."""
        if not (self._request and self._request.upgrade and self._guard.complete and self._write is _HEAD):
            raise RuntimeError("no upgrade is pending")
        data = bytes(self._guard.buffer)
        self._stop_reading()
        self._write = _ENDED
        return data

    def _stop_reading(self) -> None:
        self._deaf = True
        self._parser = None
        self._guard.buffer.clear()

    def _read(self) -> list[Event]:
        events: list[Event] = []
        try:
            while not (self._deaf or self._guard.complete) and self._read_piece(events):
                pass
            if self._eof and not self._deaf and not (self._guard.complete or self._guard.awaiting):
                raise Malformed(400, "the connection was closed in the middle of the request")
        except Malformed as fault:
            self._stop_reading()
            events.append(Refusal(fault.status, fault.message))
        except h11.RemoteProtocolError as fault:
            # The guard is stricter than h11 wherever we know of; h11 has the last word all the same.
            self._stop_reading()
            events.append(Refusal(400, str(fault)))
        return events

    def _read_piece(self, events: list[Event]) -> bool:
        """The head, or what has come of the body. False when more bytes must come."""
        guard = self._guard
        head = guard.whole_head()
        found = http1_heads.find(head) if head is not None else None
        if head is not None and type(found) is Request:
            guard.take_head(head, Framing(found.content_length))
            self._take_head(found, events)
        elif (piece := guard.next_piece(head)) is None:
            return False
        elif self._counted:
            self._take_counted(piece, events)
        else:
            self._parse(piece, events, found if piece is head and isinstance(found, http1_heads.Unread) else None)
        return True

    def _take_head(self, request: Request, events: list[Event]) -> None:
        self._version = b"1.1" if request.http_version == "1.1" else b"1.0"
        self._request = request
        events.append(request)
        # h11 would count the bytes of a body of known length, as the guard does.
        if not (request.chunked or request.expect_continue):
            self._parser = None
            self._counted = True
            self._take_counted(b"", events)

    def _take_counted(self, data: bytes, events: list[Event]) -> None:
        if data:
            events.append(Body(data))
        if self._guard.complete:
            self._end_request(events)

    def _end_request(self, events: list[Event]) -> None:
        self._parser = None
        self._counted = False
        events.append(BodyEnd())
        if self._request and not (self._request.keep_alive or self._request.upgrade):
            self._stop_reading()

    def _parse(self, piece: bytes, events: list[Event], unread: http1_heads.Unread | None) -> None:
        parser = self._parser
        if parser is None:
            size = self._max_header + _H11_SLACK_BYTES
            parser = self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=size)
        parser.receive_data(piece)
        while (event := parser.next_event()) is not h11.NEED_DATA and event is not h11.PAUSED:
            # Not isinstance: h11's events are abstract base classes, which take long to say what is none of theirs.
            if type(event) is h11.Request:
                request = _request(event, self._guard.framing)
                if unread is not None:
                    unread.keep(request)
                self._take_head(request, events)
                if self._parser is None:
                    break
            elif type(event) is h11.Data:
                events.append(Body(bytes(event.data)))
            elif type(event) is h11.EndOfMessage:
                self._end_request(events)
                break

    # What the server answers

    def continue_100(self) -> bytes:
        """The interim response that asks for the body; empty when the client no longer waits for it."""
        parser = self._parser
        if parser is None or self._write is not _HEAD or not parser.they_are_waiting_for_100_continue:
            return b""
        return parser.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))

    def head(
        self, status: int, headers: Iterable[tuple[bytes, bytes]], *, length: int | None, close: bool = False
    ) -> bytes:
        """Status line and headers. `length` None: the body is chunked, or delimited by the close towards HTTP/1.0.

        Adds Content-Length, Transfer-Encoding and Connection. An answer to a request that isn't complete closes the
        connection: whatever of it still comes is dropped. ValueError for headers that can't be sent."""
        if self._write is not _HEAD:
            raise RuntimeError("the response has begun already")
        request, complete = self._request, self._guard.complete
        close = close or self._deaf or not complete or bool(request and request.upgrade)
        is_head = request is not None and request.method == "HEAD"
        shown = None if status == 204 else length
        frame = frame_of(status, self._version, shown is not None, is_head=is_head, close=close)
        fields = tuple(headers)
        lines = plain_lines(fields)
        if lines is None:
            data = irregular_head(fields, status, self._version, shown, is_head=is_head, close=close)
        elif shown is None:
            data = b"%b%b%b" % (frame.status_line, lines, frame.framing)
        else:
            data = b"%b%b%b%d%b" % (frame.status_line, lines, frame.framing, shown, frame.behind_length)
        if not complete:
            self._stop_reading()
        self._request = None  # which may be large, and its answer last for hours
        self._frame = frame
        if is_head or status in (204, 304):
            self._write = _NOTHING
        elif length is not None:
            self._write, self._left = _LENGTH, length
        else:
            # h11's own rule: its peer's version is None until a request of this connection was understood.
            self._write = _CHUNKED if self._version == b"1.1" else _UNTIL_CLOSE
        return data

    def body(self, data: bytes) -> bytes:
        """`data` framed. Empty data gives nothing: an empty chunk would end the body."""
        if self._write is _CHUNKED:
            return chunk(data) if data else b""
        if self._write is _UNTIL_CLOSE:
            return data
        if self._write is _LENGTH:
            self._left -= len(data)
            if self._left < 0:
                self._frame = None
                raise ValueError("the body has more bytes than its head says")
            return data
        if self._write is _NOTHING:
            return b""
        raise RuntimeError("no response body is open")

    def framer(self) -> Callable[[bytes], bytes]:
        """What frames the pieces of this streamed body, none of them empty, until its `end`: as `body`, which asks each
        time anew what the head said."""
        if self._write is _CHUNKED:
            return chunk
        if self._write is _UNTIL_CLOSE:
            return _as_it_is
        raise RuntimeError("no streamed body is open")

    def end(self) -> bytes:
        """What ends the body; once for each response. ValueError when bytes of the length given are missing."""
        if self._write in (_HEAD, _ENDED):
            raise RuntimeError("no response body is open")
        if self._frame is None or self._left:
            self._frame = None
            raise ValueError("the body has not as many bytes as its head says")
        self._write = _ENDED
        return self._frame.end

    @property
    def must_close(self) -> bool:
        """After `end`: the connection can't be used for another request."""
        if self._eof and not self._guard.buffer.strip(b"\r\n"):
            return True
        return self._deaf or self._write is not _ENDED or self._frame is None or not self._frame.keeps


def chunk(data: bytes) -> bytes:
    """One chunk of a body; `data` is not empty, since an empty chunk would end it."""
    size = len(data)
    return b"".join((_sizes[size] if size < SIZES_KEPT else b"%x\r\n" % size, data, b"\r\n"))


def _as_it_is(data: bytes) -> bytes:
    return data


def _request(event: h11.Request, framing: Framing) -> Request:
    headers = tuple([(name.lower(), value) for name, value in event.headers.raw_items()])
    version = event.http_version.decode()
    connection = _tokens(headers, b"connection")
    has_body = framing.chunked or bool(framing.content_length)
    upgrade = event.method == b"GET" and version == "1.1" and not has_body and b"upgrade" in connection
    return Request(
        method=event.method.decode(),
        target=event.target.decode(),
        http_version=version,
        headers=headers,
        content_length=framing.content_length,
        chunked=framing.chunked,
        expect_continue=has_body and version == "1.1" and b"100-continue" in _tokens(headers, b"expect"),
        keep_alive=version == "1.1" and b"close" not in connection,
        upgrade=upgrade and b"websocket" in _tokens(headers, b"upgrade"),
    )


def _tokens(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    """The members of a comma-separated field, lower-cased, over all its lines."""
    return [token.strip(b" \t").lower() for key, value in headers if key == name for token in value.split(b",")]
