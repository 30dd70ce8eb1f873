"""A proper client for HTTP/2 on hyper's h2, over TCP or TLS, with deadlines. What sends any frame, right or wrong, is
`Wire` of the conformance suite's kit."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

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

from tests.support.http_client import connected
from tests.support.serving import DEADLINE_S, READ_BYTES
from tests.support.tools import tool

Fields = list[tuple[str, str]]


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
