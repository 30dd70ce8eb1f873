"""One answer as it comes over HTTP/1.1 or HTTP/2, and the framings of its body. Everything has a deadline.

A feed turns a body's bytes into events with their positions, and checks that the positions are those that were asked
for, one after another.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from abc import ABC, abstractmethod
from typing import Any, Protocol

import h2.errors
import h2.exceptions
import msgspec

from tests.faults.grammars import DONE, is_last
from tests.faults.ledger import Ledger
from tests.faults.plan import SMALL_BUFFER_BYTES
from tests.support.http2 import Peer
from tests.support.serving import Header, Server

_LINGER_NOT_AT_ALL = struct.pack("ii", 1, 0)  # struct linger: closing sends a reset
# So small that a stream which isn't read is held back by it long before the socket.
HTTP2_WINDOW_SMALL = 2048


class Line(Protocol):
    """An answer. `end`: open, whole, cut or reset. `fed`: bytes of the body that its reader has taken up."""

    status: int
    body: bytearray
    fed: int

    @property
    def end(self) -> str:
        """How far it is."""
        ...

    @property
    def turned_away(self) -> bool:
        """The server said on the connection that it ends it, so the client may ask again elsewhere."""
        ...

    def header(self, name: str) -> str | None:
        """A field of its head."""
        ...

    def more(self) -> None:
        """Wait for more of the body, or for its end. Raises TimeoutError."""
        ...

    def be_patient(self, seconds: float) -> None:
        """`more` waits no longer than this."""
        ...

    def end_sending(self) -> None:
        """FIN, and read on."""
        ...

    def leave(self, *, reset: bool) -> None:
        """Close."""
        ...


class Http1Line:
    """A connection of its own."""

    def __init__(
        self,
        server: Server,
        method: str,
        target: str,
        body: Any,
        headers: list[Header],
        *,
        small: bool,
        patience_s: float,
    ) -> None:
        self._client = server.connect(receive_buffer=SMALL_BUFFER_BYTES if small else None)
        try:
            self._client.request(method, target, body, headers)
            self._client.socket.settimeout(patience_s)
            self._answer = self._client.begin(method)
        except BaseException:
            self._client.close()
            raise
        self.status = self._answer.status
        self.body = self._answer.body
        self.fed = 0

    @property
    def end(self) -> str:
        """See Line."""
        return self._answer.end

    @property
    def turned_away(self) -> bool:
        """See Line. Behind a first request HTTP/1.1 says so only with an answer."""
        return False

    def header(self, name: str) -> str | None:
        """See Line."""
        return self._answer.header(name)

    def more(self) -> None:
        """See Line."""
        known = len(self.body)
        self._client.read_until(lambda answer: len(answer.body) > known)

    def be_patient(self, seconds: float) -> None:
        """See Line."""
        self._client.socket.settimeout(seconds)

    def end_sending(self) -> None:
        """See Line."""
        with contextlib.suppress(OSError):
            self._client.end_sending()

    def leave(self, *, reset: bool) -> None:
        """See Line."""
        self._client.reset() if reset else self._client.close()


class Http2Line:
    """A connection of its own, without TLS."""

    def __init__(
        self,
        server: Server,
        method: str,
        target: str,
        body: Any,
        headers: list[Header],
        *,
        small: bool,
        patience_s: float,
    ) -> None:
        buffer = SMALL_BUFFER_BYTES if small else None
        self._past_goaway = False
        self._peer = Peer(server.port, window=HTTP2_WINDOW_SMALL if small else 65_535, receive_buffer=buffer)
        try:
            self._peer.socket.settimeout(patience_s)
            fields = [(name.lower(), value) for name, value in headers]
            self._stream = self._peer.ask(target, body, fields, method=method)
            while self._stream not in self._peer.fields and self.end == "open":
                self._pump()
        except BaseException:
            self._peer.socket.close()
            raise
        self._fields = self._peer.fields.get(self._stream, {})
        self.status = int(self._fields.get(":status", 0))
        self.body = self._peer.bodies[self._stream]
        self.fed = 0

    @property
    def end(self) -> str:
        """See Line."""
        if self._stream in self._peer.ended:
            return "whole"
        return "cut" if self._stream in self._peer.resets else "reset" if self._peer.closed else "open"

    @property
    def turned_away(self) -> bool:
        """See Line."""
        return self._past_goaway or self._peer.goaway is not None

    def header(self, name: str) -> str | None:
        """See Line."""
        return self._fields.get(name)

    def more(self) -> None:
        """See Line."""
        known = len(self.body)
        while len(self.body) == known and self.end == "open":
            self._pump()

    def _pump(self) -> None:
        try:
            self._peer.pump()
        except (ConnectionResetError, BrokenPipeError):
            self._peer.closed = True
        except h2.exceptions.ProtocolError as error:
            # To h2 a GOAWAY is the end, though the server's first one lets streams go on to theirs (RFC 9113 6.8), and
            # what comes behind it is an error, even in one packet with it. The judge knows whether the server drained.
            self._peer.closed = True
            self._past_goaway = "ConnectionState.CLOSED" in str(error)

    def be_patient(self, seconds: float) -> None:
        """See Line."""
        self._peer.socket.settimeout(seconds)

    def end_sending(self) -> None:
        """HTTP/2 has none that a client could read behind: the stream is reset instead, on a connection that lives."""
        with contextlib.suppress(OSError, h2.exceptions.ProtocolError):
            self._peer.h2.reset_stream(self._stream, h2.errors.ErrorCodes.CANCEL)
            self._peer.flush()
        self._peer.resets[self._stream] = int(h2.errors.ErrorCodes.CANCEL)

    def leave(self, *, reset: bool) -> None:
        """See Line."""
        if reset:
            self._peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT_AT_ALL)
        self._peer.socket.close()


class Feed(Protocol):
    """Takes a body as it comes. `count`: how many events (of bare text: words) there were; `whole`: its last one came,
    and nothing behind it."""

    count: int

    @property
    def whole(self) -> bool: ...

    def take(self, data: bytes) -> None:
        """More of the body."""
        ...


class EventFeed(ABC):
    """Events behind position `after`, each ended by `separator`."""

    separator: bytes

    def __init__(self, ledger: Ledger, after: int) -> None:
        self.count = 0
        self._ledger = ledger
        self._next = after + 1
        self._rest = b""
        self._ended = False

    @property
    def whole(self) -> bool:
        """See Feed."""
        return self._ended and not self._rest

    def take(self, data: bytes) -> None:
        """See Feed."""
        *pieces, self._rest = (self._rest + data).split(self.separator)
        for piece in pieces:
            self._take_piece(piece)

    @abstractmethod
    def _take_piece(self, piece: bytes) -> None: ...

    def _see(self, data: bytes) -> None:
        self._ledger.see(self._next, data)
        self._next += 1
        self.count += 1


class SseFeed(EventFeed):
    """text/event-stream."""

    separator = b"\n\n"

    def _take_piece(self, block: bytes) -> None:
        fields: dict[bytes, bytes] = {}
        for line in block.split(b"\n"):
            if line.startswith(b":"):
                continue
            name, _, value = line.partition(b": ")
            assert name not in fields, f"two fields {name!r} in {block!r}"
            fields[name] = value
        if fields.get(b"event") == b"ping":
            assert fields.keys() == {b"event", b"data"}, block
            return
        assert fields.keys() >= {b"data", b"id"}, f"a block without data or id: {block!r}"
        assert (b"retry" in fields) == (self._next == 0), block
        assert fields[b"id"] == f"{self._ledger.stream}:{self._next}".encode(), f"{block!r} at {self._next}"
        assert not self._ended, f"{block!r} behind the end"
        self._see(fields[b"data"])
        self._ended = is_last(fields[b"data"])


class NdjsonFeed(EventFeed):
    """application/x-ndjson."""

    separator = b"\n"

    def _take_piece(self, line: bytes) -> None:
        if not line:
            return
        assert not self._ended, f"{line!r} behind the end"
        self._ended = line == b'{"done":true}'
        if self._ended and is_last(self._ledger.events.get(self._next - 1, b"{}")):
            return  # that API's last event is a line of its own
        self._see(DONE if self._ended else line)


class PlainFeed:
    """text/plain behind so many bytes."""

    def __init__(self, ledger: Ledger, after_bytes: int) -> None:
        self.count = 0
        self._ledger = ledger
        self._offset = after_bytes

    @property
    def whole(self) -> bool:
        """Only how the body ends can tell."""
        return True

    def take(self, data: bytes) -> None:
        """See Feed."""
        self._ledger.see_slice(self._offset, data)
        self._offset += len(data)
        self.count += data.count(b" ")


class PolledEvent(msgspec.Struct):
    """One event of a poll; its data as it was sent."""

    n: int
    event: str
    data: msgspec.Raw


class Polled(msgspec.Struct):
    """The answer to a poll."""

    stream: str
    status: str
    events: list[PolledEvent]
    next: int
    outcome: str | None


def polled(ledger: Ledger, body: bytes, after: int) -> Polled:
    """A poll's answer, entered in the ledger."""
    document = msgspec.json.decode(body, type=Polled)
    assert [event.n for event in document.events] == list(range(after + 1, document.next)), body[:300]
    for event in document.events:
        data = bytes(event.data)
        ledger.see(event.n, DONE if data == b'"[DONE]"' else data)
    if document.outcome is not None:
        ledger.told(document.outcome)
    return document
