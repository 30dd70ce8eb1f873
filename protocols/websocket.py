"""The server's side of one WebSocket connection (RFC 6455, RFC 7692), after Http1 parsed the upgrade request;
or on one stream of HTTP/2 (RFC 8441), after Http2 parsed the extended CONNECT.

wsproto is the authority for what the peer sends, for control frames and for the state of the connection. Ours are the
handshake's answer, whole messages with a bound, the replies that the protocol itself demands (pongs, close frames),
and the frame header of a message, because a token's message must cost one concatenation (a test proves it identical
to wsproto's).

Imports wsproto and protocols/ only; no sockets, no clock. `receive` never raises, whatever comes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from wsproto import events as ws
from wsproto.connection import Connection, ConnectionState, ConnectionType

from protocols.http1 import Refusal, Request
from protocols.websocket_deflate import MalformedExtensions, MessageRules, negotiate

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455 1.3
_TEXT, _BINARY, _COMPRESSED = 0x81, 0x82, 0x40  # first byte of a whole message's frame: FIN and opcode; RSV1
_CONTROL_BYTES_MAX = 125  # RFC 6455 5.5
_LENGTH_SHORT = 126  # a shorter payload has its length in the header's second byte
_short = [bytes((_TEXT, length)) for length in range(_LENGTH_SHORT)]
_VERSION_HEADERS = ((b"Upgrade", b"websocket"), (b"Connection", b"Upgrade"), (b"Sec-WebSocket-Version", b"13"))
# What a peer is told about its fault; for a protocol error (1002) wsproto's own words are better.
_FAULTS = {1007: "invalid UTF-8 or compressed data", 1008: "too many empty fragments", 1009: "message too big"}

_token = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_unsendable = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Text:
    """A whole text message."""

    data: str


@dataclass(frozen=True, slots=True)
class Binary:
    """A whole binary message."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Pong:
    """An answer to a ping, or an unsolicited one."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class Closed:
    """The connection is over, always the last event: write `take_outgoing()`, then close the transport. The code is
    the peer's, or the one that it is told (1002, 1007, 1008, 1009) because it broke a rule; 1005 means that it gave
    none."""

    code: int
    reason: str


WsEvent = Text | Binary | Pong | Closed


def accept_key(key: bytes) -> bytes:
    """Sec-WebSocket-Accept for the client's Sec-WebSocket-Key (RFC 6455 4.2.2)."""
    return base64.b64encode(hashlib.sha1(key + _GUID).digest())


class WebSocket:
    """One connection: `check`, then `accept`, then frames both ways. Messages above `max_message` bytes (inflated)
    close it with 1009."""

    def __init__(self, request: Request, *, max_message: int, deflate: bool = True) -> None:
        self._request = request
        self._max_message = max_message
        self._deflate = deflate
        self._connection: Connection | None = None
        self._rules: MessageRules | None = None
        self._outgoing = bytearray()  # pongs
        self._reply: ws.CloseConnection | None = None  # a close frame that is owed
        self._close_sent = False
        self.direct = False  # accepted, without deflate, and no close frame was made: a message is a header and itself
        self._partial: bytearray | None = None  # the fragments so far of a message; text as UTF-8
        self.closed = False  # nothing more is read or written
        self.faulted = False  # closed because the peer broke a rule: it may still be sending

    # The handshake

    @property
    def offered_subprotocols(self) -> tuple[str, ...]:
        """The subprotocols that the client offers, in its order."""
        values = [value.strip(b" \t") for line in self._values(b"sec-websocket-protocol") for value in line.split(b",")]
        return tuple(value.decode() for value in values if _token.fullmatch(value))

    def check(self) -> Refusal | None:
        """What is wrong with the request, to be answered in place of the 101."""
        if not self._request.upgrade:
            return Refusal(400, "not a WebSocket upgrade: it takes GET, Connection: upgrade and Upgrade: websocket")
        if self._values(b"sec-websocket-version") != [b"13"]:
            return Refusal(426, "the WebSocket version must be 13", _VERSION_HEADERS)
        keys = self._values(b"sec-websocket-key")
        if self._request.http_version != "2" and (len(keys) != 1 or not _is_key(keys[0])):
            return Refusal(400, "Sec-WebSocket-Key must be the base64 form of 16 bytes")
        try:
            negotiate(self._values(b"sec-websocket-extensions"))
        except MalformedExtensions as fault:
            return Refusal(400, f"Sec-WebSocket-Extensions: {fault}")
        return None

    def accept(self, *, subprotocol: str | None = None, headers: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
        """The 101 response. Only after `check` found nothing. ValueError for a subprotocol that wasn't offered and
        for headers that can't be sent."""
        fields = [
            (b"Upgrade", b"websocket"),
            (b"Connection", b"Upgrade"),
            *self.accept_fields(subprotocol=subprotocol, headers=headers),
        ]
        fields.insert(2, (b"Sec-WebSocket-Accept", accept_key(self._values(b"sec-websocket-key")[0])))
        return b"HTTP/1.1 101 Switching Protocols\r\n%b\r\n" % b"".join(b"%b: %b\r\n" % field for field in fields)

    def accept_fields(
        self, *, subprotocol: str | None = None, headers: Iterable[tuple[bytes, bytes]] = ()
    ) -> list[tuple[bytes, bytes]]:
        """What accepts the request over HTTP/2, beside the status 200 (RFC 8441 5); the rest is as for `accept`."""
        if self._connection or self.check():
            raise RuntimeError("this request can't be accepted (again)")
        fields = []
        if subprotocol is not None:
            if subprotocol not in self.offered_subprotocols:
                raise ValueError("the client didn't offer this subprotocol")
            fields.append((b"Sec-WebSocket-Protocol", subprotocol.encode()))
        terms = negotiate(self._values(b"sec-websocket-extensions")) if self._deflate else None
        if terms:
            fields.append((b"Sec-WebSocket-Extensions", terms.header()))
        for name, value in headers:
            if not _token.fullmatch(name) or _unsendable.search(value):
                raise ValueError(f"the header {name!r} can't be sent")
            fields.append((name, value))
        self._rules = MessageRules(max_message=self._max_message, terms=terms)
        self._connection = Connection(ConnectionType.SERVER, [self._rules])
        self.direct = terms is None
        return fields

    def _values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self._request.headers if key == name]

    # What the client sends

    def receive(self, data: bytes) -> list[WsEvent]:
        """The events that `data` completes. What must be sent in answer waits in `take_outgoing`; take it behind the
        events, so that answers to messages before a close still leave. Nothing comes after Closed, and no message
        after `close`."""
        connection = self._open_connection()
        events: list[WsEvent] = []
        if self.closed:
            return events
        connection.receive_data(data)
        for event in connection.events():
            if isinstance(event, ws.TextMessage | ws.BytesMessage):
                self._join(event, events)
            elif isinstance(event, ws.Ping):
                if connection.state is ConnectionState.OPEN:
                    self._outgoing += connection.send(event.response())
            elif isinstance(event, ws.Pong):
                events.append(Pong(bytes(event.payload)))
            elif isinstance(event, ws.CloseConnection):
                events.append(self._finish(event))
        return events

    def take_outgoing(self) -> bytes:
        """Pongs, and the close frame that ends the connection, to be written now."""
        data = self._take_pongs()
        reply, self._reply = self._reply, None
        if reply is None or self._close_sent:
            return data
        self._close_sent, self.direct = True, False
        return data + self._open_connection().send(reply)

    def _take_pongs(self) -> bytes:
        data = bytes(self._outgoing)
        self._outgoing.clear()
        return data

    def _join(self, event: ws.TextMessage | ws.BytesMessage, events: list[WsEvent]) -> None:
        """Fragments go to one buffer: a list of them would cost many times the message."""
        is_text = isinstance(event, ws.TextMessage)
        whole = event.data
        if self._partial is not None or not event.message_finished:
            self._partial = self._partial or bytearray()
            self._partial += whole.encode() if isinstance(whole, str) else whole
            if not event.message_finished:
                return
            whole = self._partial.decode() if is_text else self._partial
            self._partial = None
        if not self._close_sent:
            events.append(Text(whole) if isinstance(whole, str) else Binary(bytes(whole)))

    def _finish(self, event: ws.CloseConnection) -> Closed:
        """The peer closed or answered our close; or else it broke a rule, and the state hasn't changed."""
        self.closed = True
        self._partial = None
        reason = event.reason or ""
        if self._open_connection().state in (ConnectionState.REMOTE_CLOSING, ConnectionState.CLOSED):
            self._reply = ws.CloseConnection(code=event.code)
        else:
            self.faulted = True
            reason = (self._rules and self._rules.fault) or _FAULTS.get(event.code, reason)
            self._reply = ws.CloseConnection(code=event.code, reason=reason)
        return Closed(int(event.code), reason)

    # What the server sends

    def text(self, data: bytes) -> bytes:
        """One text message from UTF-8 bytes, behind the pongs that wait. Frames must be written in the order in which
        they were made. Empty once a close frame was made, as for all frames here."""
        if self.direct and len(data) < _LENGTH_SHORT and not self._outgoing:  # a token's
            return _short[len(data)] + data
        return self._message(_TEXT, data)

    def binary(self, data: bytes) -> bytes:
        """One binary message."""
        return self._message(_BINARY, data)

    def _message(self, first: int, data: bytes) -> bytes:
        if self._close_sent:
            return b""
        if self._rules is None:
            raise RuntimeError("the upgrade wasn't accepted yet")
        if (packed := self._rules.deflate(data)) is not None:
            first, data = first | _COMPRESSED, packed
        frame = _header(first, len(data)) + data
        return self._take_pongs() + frame if self._outgoing else frame

    def ping(self, payload: bytes = b"") -> bytes:
        """A ping frame. ValueError when the payload has more than 125 bytes."""
        if len(payload) > _CONTROL_BYTES_MAX:
            raise ValueError(f"a ping holds at most {_CONTROL_BYTES_MAX} bytes")
        connection = self._open_connection()
        return connection.send(ws.Ping(payload=payload)) if connection.state is ConnectionState.OPEN else b""

    def close(self, code: int, reason: str = "") -> bytes:
        """The close frame that begins the closing handshake; its end comes as Closed. A reason that is too long is
        cut. ValueError for a code that may not be sent."""
        if not (1000 <= code <= 1014 and code not in (1004, 1005, 1006)) and not 3000 <= code <= 4999:
            raise ValueError(f"{code} is no close code that may be sent")
        connection = self._open_connection()
        if self._close_sent:
            return b""
        self._close_sent, self.direct = True, False
        return self._take_pongs() + connection.send(ws.CloseConnection(code=code, reason=reason))

    def _open_connection(self) -> Connection:
        if self._connection is None:
            raise RuntimeError("the upgrade wasn't accepted yet")
        return self._connection


def _header(first: int, length: int) -> bytes:
    """A server's frame header, unmasked (RFC 6455 5.2)."""
    if length < _LENGTH_SHORT:
        return bytes((first, length))
    if length < 1 << 16:
        return bytes((first, 126)) + length.to_bytes(2, "big")
    return bytes((first, 127)) + length.to_bytes(8, "big")


def _is_key(value: bytes) -> bool:
    try:
        return len(base64.b64decode(value, validate=True)) == 16
    except binascii.Error:
        return False
