"""Clients for HTTP/2. `Wire` sends frames as a test wants them, right or wrong, and reads what comes with its own eyes
(nothing of h2 but HPACK's decoder); `Peer` is a proper client on hyper's h2. Both over TCP or TLS, with deadlines."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Self

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
)
from h2.settings import SettingCodes
from hpack import Decoder, Encoder

from protocols.http2_guard import ACK, END_HEADERS, END_STREAM, PREFACE, Code, Kind
from tests.support.http_client import connected
from tests.support.serving import DEADLINE_S, READ_BYTES
from tests.support.tools import tool

Fields = list[tuple[str, str]]
GET: Fields = [(":method", "GET"), (":scheme", "http"), (":authority", "localhost"), (":path", "/")]
POST: Fields = [(":method", "POST"), *GET[1:]]


def make_certificate(folder: Path, name: str = "localhost") -> tuple[Path, Path]:
    """A self-signed certificate for localhost and its key, made by openssl; paths of the PEM files."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command = [tool("openssl", "openssl"), "req", *kind, *names, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S)
    return certificate, key


def dial(port: int, certificate: Path | None, *, receive_buffer: int | None = None, alpn: str = "h2") -> socket.socket:
    """A connection, with TLS when a certificate to trust is given."""
    raw = connected(port, receive_buffer=receive_buffer)
    if certificate is None:
        return raw
    context = ssl.create_default_context(cafile=certificate)
    context.set_alpn_protocols([alpn])
    tls = context.wrap_socket(raw, server_hostname="localhost")
    assert tls.selected_alpn_protocol() == alpn
    return tls


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


class Closed(Exception):
    """The server ended the connection."""


class Wire:
    """One connection of raw frames; `headers` encodes with a table of its own. The opening is done when it is made."""

    def __init__(self, port: int, certificate: Path | None = None, *, opening: bytes | None = None) -> None:
        self.socket = dial(port, certificate)
        self.encoder = Encoder()
        self._decoder = Decoder(1 << 20)
        self._buffer = bytearray()
        self.goaway: Seen | None = None
        self.send(PREFACE + settings() if opening is None else opening)
        if opening is None:
            self.wait(lambda seen: seen.kind == Kind.SETTINGS and not seen.flags & ACK)
            self.send(settings(flags=ACK))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *frames: bytes) -> None:
        """Send bytes as they are; a server that has closed already is no fault."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, ssl.SSLError):
            self.socket.sendall(b"".join(frames))

    def block(self, fields: Iterable[tuple[str, str]]) -> bytes:
        """An HPACK block."""
        return self.encoder.encode(list(fields))

    def headers(self, stream: int, fields: Iterable[tuple[str, str]] = GET, *, end: bool = True) -> bytes:
        """A HEADERS frame with a whole block."""
        return frame(Kind.HEADERS, END_HEADERS | (END_STREAM if end else 0), stream, self.block(fields))

    def read(self) -> Seen:
        """The next frame; Closed at the end."""
        while len(self._buffer) < 9 or len(self._buffer) < 9 + int.from_bytes(self._buffer[:3], "big"):
            try:
                piece = self.socket.recv(READ_BYTES)
            except (ConnectionResetError, ssl.SSLError):
                piece = b""
            if not piece:
                raise Closed
            self._buffer += piece
        length = int.from_bytes(self._buffer[:3], "big")
        head, payload = self._buffer[:9], bytes(self._buffer[9 : 9 + length])
        del self._buffer[: 9 + length]
        seen = Seen(head[3], head[4], int.from_bytes(head[5:9], "big"), payload)
        if seen.kind == Kind.GOAWAY:
            self.goaway = seen
        return seen

    def wait(self, condition: Callable[[Seen], bool]) -> Seen:
        """Read up to a frame."""
        while True:
            if condition(seen := self.read()):
                return seen

    def answer(self, stream: int) -> tuple[dict[str, str], bytes]:
        """Read to the end of an answer: its fields and its body. AssertionError when it is reset."""
        fields: dict[str, str] = {}
        body = b""
        while True:
            seen = self.read()
            assert seen.kind != Kind.GOAWAY or not seen.code, seen
            if seen.stream != stream:
                continue
            assert seen.kind != Kind.RST_STREAM, seen
            if seen.kind == Kind.HEADERS:
                fields = {str(k): str(v) for k, v in self._decoder.decode(seen.payload)}
            elif seen.kind == Kind.DATA:
                body += seen.payload
            if seen.flags & END_STREAM and seen.kind in (Kind.HEADERS, Kind.DATA) and fields.get(":status") != "100":
                return fields, body

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


class Peer:
    """A client on h2. Streams are opened with `ask`; `pump` reads once and sorts what came. It gives windows back as
    it reads, but not on streams in `stalled`."""

    def __init__(
        self,
        port: int,
        certificate: Path | None = None,
        *,
        window: int = 65_535,
        connection_window: int = 1 << 30,
        receive_buffer: int | None = None,
    ) -> None:
        self.socket = dial(port, certificate, receive_buffer=receive_buffer)
        self.scheme = "http" if certificate is None else "https"
        self.h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.local_settings[SettingCodes.ENABLE_PUSH] = 0
        self.h2.local_settings.acknowledge()
        self.h2.initiate_connection()
        self.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: window})
        if connection_window > 65_535:
            self.h2.increment_flow_control_window(connection_window - 65_535)
        self.stalled: set[int] = set()
        self.fields: dict[int, dict[str, str]] = {}
        self.bodies: dict[int, bytearray] = {}
        self.ended: set[int] = set()
        self.resets: dict[int, int] = {}
        self.goaway: ConnectionTerminated | None = None
        self.closed = False
        self.events: list[Event] = []
        try:
            self.flush()
        except BaseException:
            self.socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def flush(self) -> None:
        """Send what h2 has to say."""
        if out := self.h2.data_to_send():
            self.socket.sendall(out)

    def ask(
        self, path: str, body: Any = None, fields: Fields | None = None, *, method: str | None = None, end: bool = True
    ) -> int:
        """Open a stream with a request; a `body` that isn't bytes goes as JSON. Its number."""
        stream = self.h2.get_next_available_stream_id()
        head = [
            (":method", method or ("GET" if body is None else "POST")),
            (":scheme", self.scheme),
            (":authority", "localhost"),
            (":path", path),
            *(fields or []),
        ]
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            head.append(("content-type", "application/json"))
        self.h2.send_headers(stream, head, end_stream=end and body is None)
        self.bodies[stream] = bytearray()
        if body is not None:
            self.h2.send_data(stream, body, end_stream=end)
        self.flush()
        return stream

    def pump(self) -> list[Event]:
        """Read what is there, waiting for at least one byte; the events."""
        piece = self.socket.recv(READ_BYTES)
        if not piece:
            self.closed = True
            return []
        events = self.h2.receive_data(piece)
        for event in events:
            self._sort(event)
        self.flush()
        return events

    def _sort(self, event: Event) -> None:
        if isinstance(event, ResponseReceived):
            self.fields[event.stream_id] = {str(k): str(v) for k, v in event.headers}
        elif isinstance(event, DataReceived):
            self.bodies[event.stream_id] += event.data
            if event.stream_id not in self.stalled:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, StreamEnded):
            self.ended.add(event.stream_id)
        elif isinstance(event, StreamReset):
            self.resets[event.stream_id] = int(event.error_code or 0)
        elif isinstance(event, ConnectionTerminated):
            self.goaway = event
        else:
            self.events.append(event)

    def wait(self, condition: Callable[[], Any]) -> None:
        """Read until it holds."""
        while not condition():
            assert not self.closed, "the connection ended"
            self.pump()

    def answer(self, stream: int) -> tuple[dict[str, str], bytes]:
        """Read to the end of an answer, which must come whole."""
        self.wait(lambda: stream in self.ended or stream in self.resets)
        assert stream in self.ended, self.resets
        return self.fields[stream], bytes(self.bodies[stream])
