"""Clients of each transport, sans-I/O: the bytes that start a stream, and what the bytes that come say of it.

A `Wire` is one connection. `open` is what it sends before any stream begins (an upgrade, HTTP/2's settings), `ask` what
starts its streams; `take` gets what came, tells `Seen` of each token, and returns what is to be sent in answer. They
read as little of the bytes as counting tokens takes, so that thousands of streams fit on one core.
"""

from __future__ import annotations

import base64
import json
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes, Settings
from hpack.struct import NeverIndexedHeaderTuple

H2_STREAMS = 100  # on a connection, under the server's limit of 128
WINDOW_MAX = 2**31 - 1
HEARD_BYTES_MAX = 500  # of an answer's beginning, for whoever must be told of one that is wrong
_HEAD_END = b"\r\n\r\n"
# What stands in front of a token's text, once for each token. Words of the synthetic engine begin with a space.
_JSON_MARK = b'"content":" '
_WS_MARK = b'"text":" '


class Failed(Exception):
    """The server answered with something else than a stream: what it did, in the past tense."""


@dataclass(slots=True)
class Tally:
    """Of all streams of a run."""

    begun: int = 0
    ended: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Seen:
    """One stream as its client sees it; times in seconds of one clock."""

    tally: Tally
    asked: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # when, and how many tokens at once
    requests: int = 0
    done: bool = False

    def came(self, tokens: int, now: float) -> None:
        """So many tokens are there."""
        if tokens:
            self.tally.begun += not self.arrivals
            self.tally.tokens += tokens
            self.arrivals.append((now, tokens))

    def end(self) -> None:
        """The answer is complete."""
        self.tally.ended += not self.done
        self.done = True

    @property
    def tokens(self) -> int:
        """That have come."""
        return sum(count for _, count in self.arrivals)

    @property
    def ttft_s(self) -> float:
        """From the request to the first token."""
        return self.arrivals[0][0] - self.asked

    @property
    def gaps_s(self) -> list[float]:
        """Between a token and the next: nothing between those that came together."""
        gaps = [0.0] * (self.arrivals[0][1] - 1)
        for (before, _), (now, count) in pairwise(self.arrivals):
            gaps += [now - before, *[0.0] * (count - 1)]
        return gaps


class _Counter:
    """How often `mark` occurs in bytes that come in pieces."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._kept = len(mark) - 1
        self._tail = b""

    def take(self, data: bytes) -> int:
        """The occurrences that end in `data`."""
        whole = self._tail + data
        self._tail = whole[-self._kept :] if self._kept else b""
        return whole.count(self._mark)


JSON_FIELDS = ("Host: localhost", "Content-Type: application/json")


POSTED = "POST /v1/chat/completions HTTP/1.1"  # the first line of what `posted` makes, by default


def posted(
    body: Mapping[str, object], path: str = "/v1/chat/completions", fields: Sequence[str] = JSON_FIELDS
) -> bytes:
    """A request of JSON, over HTTP/1.1."""
    data = _json(body)
    head = "\r\n".join([f"POST {path} HTTP/1.1", *fields, f"Content-Length: {len(data)}", "", ""])
    return head.encode() + data


def _json(body: Mapping[str, object]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def _chat(tokens: int, **fields: object) -> dict[str, object]:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    return {"messages": messages, "max_tokens": tokens, **fields}


class Wire:
    """One connection; see this module's docstring."""

    streams_max = 1

    def __init__(self, streams: list[Seen], tokens: int) -> None:
        self.streams = streams
        self.tokens = tokens
        self.ready = True  # to ask
        self.wake_at = 0.0  # when `later` is wanted; 0: not
        self.asked = "nothing yet"
        self.heard = b""  # how the answer to that began

    def open(self) -> bytes:
        """What goes out with the connection."""
        return b""

    def ask(self) -> bytes:
        """What starts the streams."""
        raise NotImplementedError

    def take(self, data: bytes, now: float) -> bytes:
        """See this module's docstring. Raises Failed."""
        if len(self.heard) < HEARD_BYTES_MAX:
            self.heard += data[: HEARD_BYTES_MAX - len(self.heard)]
        try:
            return self.feed(data, now)
        except (ValueError, LookupError, zlib.error) as error:
            raise Failed("answered with what can't be read") from error

    def feed(self, data: bytes, now: float) -> bytes:
        """`take`, of a transport. Raises Failed, and whatever comes of bytes that were never expected."""
        raise NotImplementedError

    def _asks(self, request: bytes, name: str = "") -> bytes:
        """The request, which is told of as `name`, or by its first line."""
        self.asked = name or request.partition(b"\r\n")[0].decode()
        self.heard = b""
        return request

    def later(self) -> bytes:
        """What is to be sent at `wake_at`."""
        raise NotImplementedError


class Http1(Wire):
    """A chunked answer over HTTP/1.1: SSE, NDJSON or text."""

    accept, mark = "text/event-stream", _JSON_MARK

    def __init__(self, streams: list[Seen], tokens: int) -> None:
        super().__init__(streams, tokens)
        self._seen = streams[0]
        self._head = b""
        self._in_body = False
        self._counter = _Counter(self.mark)
        self._end = b""

    def ask(self) -> bytes:
        """See Wire."""
        self._seen.requests += 1
        return self._asks(posted(_chat(self.tokens, stream=True), fields=(*JSON_FIELDS, f"Accept: {self.accept}")))

    def feed(self, data: bytes, now: float) -> bytes:
        """See Wire."""
        if not self._in_body:
            self._head += data
            head, found, data = self._head.partition(_HEAD_END)
            if not found:
                return b""
            if not head.startswith(b"HTTP/1.1 200"):
                raise Failed("answered with something else than a stream")
            self._in_body = True
        self._seen.came(self._counter.take(data), now)
        self._end = (self._end + data)[-7:]
        if self._end == b"\r\n0\r\n\r\n":
            self._seen.end()
        return b""


class Ndjson(Http1):
    """A line of JSON for each event."""

    accept = "application/x-ndjson"


class Text(Http1):
    """The text alone."""

    accept, mark = "text/plain", b" "


class Polling(Wire):
    """Ask for what has come since, over and over, on one connection that stays."""

    wait_s = 0
    interval_s = 0.25

    def __init__(self, streams: list[Seen], tokens: int) -> None:
        super().__init__(streams, tokens)
        self._seen = streams[0]
        self._buffer = b""
        self._stream = ""
        self._after = -1

    def ask(self) -> bytes:
        """See Wire."""
        self._seen.requests += 1
        return self._get(f"/v1/generate?prompt=What+is+the+capital+of+France%3F&max_tokens={self.tokens}")

    def later(self) -> bytes:
        """See Wire."""
        self._seen.requests += 1
        after = f"&after={self._after}" if self._after >= 0 else ""
        return self._get(f"/v1/streams/{self._stream}?wait={self.wait_s}{after}")

    def _get(self, target: str) -> bytes:
        return self._asks(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n\r\n".encode())

    def feed(self, data: bytes, now: float) -> bytes:
        """See Wire."""
        self._buffer += data
        head, found, body = self._buffer.partition(_HEAD_END)
        if not found:
            return b""
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(body) < length:
            return b""
        self._buffer = b""
        if head.startswith(b"HTTP/1.1 202"):
            self._stream = json.loads(body)["stream"]
            return self.later()
        if not head.startswith(b"HTTP/1.1 200"):
            raise Failed("answered with something else than events")
        self._seen.came(body.count(_JSON_MARK), now)
        self._after = int(body.rpartition(b'"next":')[2].partition(b",")[0]) - 1
        if b'"status":"finished"' in body[:100]:
            self._seen.end()
            return b""
        if self.wait_s:
            return self.later()
        self.wake_at = now + self.interval_s
        return b""


class LongPolling(Polling):
    """The server answers when there is something."""

    wait_s = 30


class WebSocket(Wire):
    """A generation on a WebSocket that is open already."""

    offer = ""

    def __init__(self, streams: list[Seen], tokens: int) -> None:
        super().__init__(streams, tokens)
        self._seen = streams[0]
        self.ready = False
        self._buffer = b""
        self._inflater: zlib._Decompress | None = None

    def open(self) -> bytes:
        """See Wire."""
        self._seen.requests += 1
        key = base64.b64encode(os.urandom(16)).decode()
        head = "GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        return self._asks(f"{head}Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n{self.offer}\r\n".encode())

    def ask(self) -> bytes:
        """See Wire."""
        self._seen.requests += 1
        frame = _client_frame(0x81, _json(_chat(self.tokens, type="generate", id="a")))
        return self._asks(frame, "a generation on the WebSocket /v1/ws")

    def feed(self, data: bytes, now: float) -> bytes:
        """See Wire."""
        self._buffer += data
        if not self.ready:
            head, found, rest = self._buffer.partition(_HEAD_END)
            if not found:
                return b""
            if not head.startswith(b"HTTP/1.1 101"):
                raise Failed("made no WebSocket of the connection")
            if self.offer:
                if b"permessage-deflate" not in head:
                    raise Failed("didn't take deflate")
                self._inflater = zlib.decompressobj(-zlib.MAX_WBITS)
            self.ready, self._buffer = True, rest
        answer = b""
        while (frame := self._next_frame()) is not None:
            answer += self._take(*frame, now)
        return answer

    def _next_frame(self) -> tuple[int, bytes] | None:
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        length, at = buffer[1], 2
        if length >= 126:
            at = 4 if length == 126 else 10
            length = int.from_bytes(buffer[2:at])
        if len(buffer) < at + length:
            return None
        self._buffer = buffer[at + length :]
        return buffer[0], buffer[at : at + length]

    def _take(self, first: int, payload: bytes, now: float) -> bytes:
        opcode = first & 0x0F
        if opcode == 0x9:
            return _client_frame(0x8A, payload)
        if opcode == 0x8:
            raise Failed(f"closed the WebSocket with {payload!r}")
        if self._inflater is not None and first & 0x40:
            payload = self._inflater.decompress(payload + b"\0\0\xff\xff")
        self._seen.came(payload.count(_WS_MARK), now)
        if payload.startswith(b'{"type":"error"'):
            raise Failed(f"ended with {payload!r}")
        if payload.startswith(b'{"type":"done"'):
            self._seen.end()
        return b""


class WebSocketDeflate(WebSocket):
    """With permessage-deflate, its context kept from message to message."""

    offer = "Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits\r\n"


def _client_frame(first: int, payload: bytes) -> bytes:
    """Masked with zeros, which leave the payload as it is."""
    length = bytes((0x80 | len(payload),)) if len(payload) < 126 else b"\xfe" + len(payload).to_bytes(2)
    return bytes((first,)) + length + b"\0\0\0\0" + payload


class Http2(Wire):
    """SSE on the streams of one connection, whose windows are never an obstacle."""

    streams_max = H2_STREAMS
    window = WINDOW_MAX  # of a stream, when it begins

    def __init__(self, streams: list[Seen], tokens: int) -> None:
        super().__init__(streams, tokens)
        self._by_id: dict[int, tuple[Seen, _Counter]] = {}
        self._buffer = b""
        self._greeted = False
        self._h2 = H2Connection(H2Configuration(client_side=True))

    def open(self) -> bytes:
        """See Wire."""
        told = {SettingCodes.INITIAL_WINDOW_SIZE: self.window, SettingCodes.ENABLE_PUSH: 0}
        self._h2.local_settings = Settings(client=True, initial_values=told)
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(WINDOW_MAX - 65_535)
        return self._asks(self._h2.data_to_send(), "HTTP/2")

    def ask(self) -> bytes:
        """See Wire."""
        body = _json(_chat(self.tokens, stream=True))
        fields = {
            ":method": "POST",
            ":path": "/v1/chat/completions",
            ":scheme": "http",
            ":authority": "localhost",
            "accept": "text/event-stream",
            "content-type": "application/json",
            "content-length": str(len(body)),
        }
        for seen in self.streams:
            seen.requests += 1
            number = self._h2.get_next_available_stream_id()
            self._by_id[number] = (seen, _Counter(_JSON_MARK))
            self._h2.send_headers(number, [NeverIndexedHeaderTuple(*field) for field in fields.items()])
            self._h2.send_data(number, body, end_stream=True)
        return self._asks(self._h2.data_to_send(), "POST /v1/chat/completions HTTP/2")

    def feed(self, data: bytes, now: float) -> bytes:
        """See Wire."""
        buffer, at, answer = self._buffer + data, 0, b""
        if not self._greeted and len(buffer) >= 9:
            if buffer[3] != 4:  # SETTINGS
                raise Failed("spoke no HTTP/2")
            self._greeted = True
        while len(buffer) - at >= 9:
            length, kind, flags = int.from_bytes(buffer[at : at + 3]), buffer[at + 3], buffer[at + 4]
            if len(buffer) - at - 9 < length:
                break
            stream = int.from_bytes(buffer[at + 5 : at + 9])
            payload = buffer[at + 9 : at + 9 + length]
            at += 9 + length
            if kind <= 1:
                self._take(stream, kind, flags, payload, now)
            elif kind in (3, 7):
                raise Failed(f"sent {'RST_STREAM' if kind == 3 else 'GOAWAY'} with {payload!r}")
            elif kind in (4, 6) and not flags & 1:
                answer += struct.pack(">HBBBL", 0, 0 if kind == 4 else 8, kind, 1, 0) + (payload if kind == 6 else b"")
        self._buffer = buffer[at:]
        return answer

    def _take(self, stream: int, kind: int, flags: int, payload: bytes, now: float) -> None:
        """HEADERS or DATA."""
        seen, counter = self._by_id[stream]
        if kind == 0:
            seen.came(counter.take(payload), now)
        if flags & 1:
            seen.end()


TRANSPORTS: dict[str, Callable[[list[Seen], int], Wire]] = {
    "short polling": Polling,
    "long polling": LongPolling,
    "chunked NDJSON": Ndjson,
    "chunked text": Text,
    "SSE, HTTP/1.1": Http1,
    "SSE, HTTP/2": Http2,
    "WebSocket": WebSocket,
    "WebSocket, deflate": WebSocketDeflate,
}
