"""Our server's side of HTTP/2 without a socket: with h2's own client as the other side, or fed by hand."""

from __future__ import annotations

from typing import Any

import h2.events
from conformance_kit import http2_wire as wire
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes
from hpack import Encoder

from protocols.http2 import Event, Http2
from protocols.http2_guard import END_HEADERS, END_STREAM, PREFACE, Kind

MAX_HEADER = 4096
FIELDS = [(":method", "POST"), (":scheme", "http"), (":authority", "localhost"), (":path", "/echo")]


class Pair:
    """Our server's side, and a client on h2 that may break every rule that h2 lets it break."""

    def __init__(self, *, window: int = 65_535) -> None:
        self.server = Http2(max_header=MAX_HEADER)
        config = H2Configuration(
            client_side=True,
            header_encoding="utf-8",
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
        )
        self.client = H2Connection(config)
        self.client.initiate_connection()
        self.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.seen: list[h2.events.Event] = []
        self.now = 0.0
        self.exchange()

    def exchange(self) -> list[Event]:
        """Let both sides speak until they are silent; the server's events."""
        events: list[Event] = []
        while out := self.client.data_to_send():
            events += self.feed(out)
            self.seen += self.client.receive_data(self.server.take_outgoing())
        self.seen += self.client.receive_data(self.server.take_outgoing())
        return events

    def feed(self, data: bytes) -> list[Event]:
        """Bytes to the server; its events."""
        self.server.feed(data)
        events = self.server.receive(self.now)
        while self.server.behind:
            events += self.server.receive(self.now)
        return events

    def ask(self, fields: list[tuple[str, str]] = FIELDS, *, end: bool = True) -> int:
        """Begin a request; its stream."""
        stream = self.client.get_next_available_stream_id()
        self.client.send_headers(stream, fields, end_stream=end)
        return stream

    def take(self, kind: type[Any]) -> list[Any]:
        """What the client saw of one kind, since it was last asked."""
        found = [event for event in self.seen if isinstance(event, kind)]
        self.seen = [event for event in self.seen if not isinstance(event, kind)]
        return found


def raw() -> Http2:
    """A server's side whose client has sent its opening."""
    server = Http2(max_header=MAX_HEADER)
    assert receive(server, PREFACE + wire.settings()) == []
    server.take_outgoing()
    return server


def receive(server: Http2, *frames: bytes, now: float = 0.0) -> list[Event]:
    """Frames to a server's side, however many turns it takes; its events."""
    server.feed(b"".join(frames))
    events = server.receive(now)
    while server.behind:
        events += server.receive(now)
    return events


def head(stream: int, *, end: bool = True, fields: list[tuple[str, str]] = FIELDS) -> bytes:
    """HEADERS from an encoder without a memory."""
    block = b"".join(Encoder().encode([wire_field], huffman=False) for wire_field in fields)
    return wire.frame(Kind.HEADERS, END_HEADERS | (END_STREAM if end else 0), stream, block)


def request(
    stream: int, path: str = "/", *, method: str = "GET", end: bool = True, fields: wire.Fields | None = None
) -> bytes:
    """The head of an ordinary one."""
    ordinary = [(":method", method), (":scheme", "http"), (":authority", "localhost"), (":path", path)]
    return head(stream, end=end, fields=[*ordinary, *(fields or [])])


def frames(data: bytes) -> list[wire.Seen]:
    """Bytes cut into frames."""
    found = []
    while data:
        size = int.from_bytes(data[:3], "big")
        found.append(wire.Seen(data[3], data[4], int.from_bytes(data[5:9], "big"), data[9 : 9 + size]))
        data = data[9 + size :]
    return found
