"""A WebSocket client that sends any frame, right or wrong, and reads frames strictly (RFC 6455 section 5).

Imports the standard library and the kit only.
"""

from __future__ import annotations

import base64
import hashlib
import os
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from conformance_kit.target import Target
from conformance_kit.wire import CLOSE_S, Answer, Connection

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
MASK = b"\x37\xfa\x21\x3d"  # the one of RFC 6455 5.7
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_DEFLATE_TAIL = b"\x00\x00\xff\xff"


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame from the server."""

    opcode: int
    payload: bytes
    fin: bool = True
    rsv: int = 0


@dataclass(frozen=True, slots=True)
class Closed:
    """The end: the close frame's code (1005: it had none; 1006: there was no close frame) and reason."""

    code: int
    reason: bytes = b""


def accept_for(key: str) -> str:
    """RFC 6455 4.2.2."""
    return base64.b64encode(hashlib.sha1(key.encode() + _GUID).digest()).decode()


def frame(
    opcode: int, payload: bytes = b"", *, fin: bool = True, rsv: int = 0, masked: bool = True, form: int = 0
) -> bytes:
    """One frame as a client sends it; `form` 126 or 127 forces the longer forms of the length."""
    length = len(payload)
    form = form or (length if length < 126 else 126 if length < 1 << 16 else 127)
    head = bytes((fin << 7 | rsv << 4 | opcode, masked << 7 | form))
    head += length.to_bytes(2 if form == 126 else 8, "big") if form >= 126 else b""
    return head + (MASK + mask(payload) if masked else payload)


def mask(payload: bytes) -> bytes:
    """The payload under MASK."""
    key = (MASK * (len(payload) // 4 + 1))[: len(payload)]
    return (int.from_bytes(payload, "big") ^ int.from_bytes(key, "big")).to_bytes(len(payload), "big")


def close_payload(code: int, reason: bytes = b"") -> bytes:
    """Of a close frame."""
    return code.to_bytes(2, "big") + reason


def upgrade(
    target: Target, *fields: str, line: str = "GET PATH HTTP/1.1", host: bool = True, key: str | None = None
) -> bytes:
    """An upgrade request. A field named in `fields` takes the place of the usual one; one with an empty value leaves
    it out."""
    named = {field.partition(":")[0].strip().lower() for field in fields}
    usual = {
        "Host": target.authority if host else "",
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": key or base64.b64encode(os.urandom(16)).decode(),
        **dict(target.auth),
    }
    lines = [line.replace("PATH", target.ws_path)]
    lines += [f"{name}: {value}" for name, value in usual.items() if value and name.lower() not in named]
    lines += [target.filled(field) for field in fields if field.partition(":")[2].strip()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def handshake(connection: Connection, data: bytes, *, one_by_one: bool = False) -> Answer:
    """Send an upgrade request; the answer, whole unless it opens the WebSocket (101; over HTTP/2 200)."""
    connection.send(data, one_by_one=one_by_one)
    answer = connection.begin("GET", upgrade=True)
    return answer if answer.status == connection.switched else connection.finish()


class WebSocket:
    """One open WebSocket; AssertionError when the server does not open it."""

    def __init__(self, target: Target, *fields: str, behind: bytes = b"") -> None:
        """`behind`: bytes that are sent in one packet with the upgrade request."""
        self._connection = target.connect()
        self.handshake = handshake(self._connection, upgrade(target, *fields) + behind)
        assert self.handshake.status == self._connection.switched, f"the upgrade was answered with {self.handshake}"
        self._buffer = bytearray()
        self._over = False
        self.pongs: list[bytes] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def send(self, *frames: bytes, one_by_one: bool = False) -> None:
        """Bytes, in one write."""
        self._connection.send(b"".join(frames), one_by_one=one_by_one)

    def end_sending(self) -> None:
        """FIN (END_STREAM) without a close frame."""
        self._connection.end_sending()

    def abort(self) -> None:
        """RST (RST_STREAM)."""
        self._connection.reset()

    def receive_frame(self) -> Frame | Closed:
        """The next frame; Closed(1006) when the connection ends without one. AssertionError after the wait for an
        answer."""
        seconds = self._connection.answer_s
        limit = time.monotonic() + seconds
        while (found := self._take_frame()) is None:
            if self._over:
                return Closed(1006)
            left = limit - time.monotonic()
            assert left > 0, f"no frame, and no end of the connection, within {seconds:g} s"
            self._read(left)
        if found.opcode == CLOSE:
            return _closed(found.payload)
        return found

    def receive(self) -> Frame | Closed:
        """The next whole data message, as one frame, or the end. Pongs are kept, pings answered."""
        parts: list[Frame] = []
        while True:
            found = self.receive_frame()
            if isinstance(found, Closed):
                return found
            if found.opcode == PONG:
                self.pongs.append(found.payload)
            elif found.opcode == PING:
                self.send(frame(PONG, found.payload))
            else:
                assert (found.opcode == CONTINUATION) is bool(parts), f"a frame out of order: {found}"
                parts.append(found)
                if found.fin:
                    return Frame(parts[0].opcode, b"".join(part.payload for part in parts), True, parts[0].rsv)

    def closed(self) -> Closed:
        """The close frame, whatever messages come before it."""
        while True:
            found = self.receive()
            if isinstance(found, Closed):
                return found

    def pong(self) -> bytes | Closed:
        """The next pong's payload, or the end."""
        while not self.pongs:
            found = self.receive_frame()
            if isinstance(found, Closed):
                return found
            if found.opcode == PONG:
                self.pongs.append(found.payload)
        return self.pongs.pop(0)

    def ended(self, seconds: float = CLOSE_S) -> bool:
        """Behind the close frame: whether the server closes the TCP connection (the stream) by itself."""
        limit = time.monotonic() + seconds
        while not self._over and (left := limit - time.monotonic()) > 0:
            self._read(left)
        return self._over

    def _read(self, seconds: float) -> None:
        data = self._connection.receive(seconds)
        if data is not None:
            self._over = not data
            self._buffer += data

    def _take_frame(self) -> Frame | None:
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        first, second = buffer[0], buffer[1]
        assert not second & 0x80, "a server's frame is masked (RFC 6455 5.1)"
        size, start = second & 0x7F, 2
        if size >= 126:
            start = 4 if size == 126 else 10
            if len(buffer) < start:
                return None
            size = int.from_bytes(buffer[2:start], "big")
            assert size >= (126 if start == 4 else 1 << 16), "a length not in its shortest form (RFC 6455 5.2)"
        if len(buffer) < start + size:
            return None
        payload = bytes(buffer[start : start + size])
        del buffer[: start + size]
        found = Frame(first & 0x0F, payload, bool(first & 0x80), first >> 4 & 0x07)
        assert found.opcode in (CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG), f"a reserved opcode: {found}"
        assert found.opcode < CLOSE or (found.fin and size <= 125), f"a control frame too long or fragmented: {found}"
        return found


def _closed(payload: bytes) -> Closed:
    assert len(payload) != 1, "a close frame with one byte of payload (RFC 6455 5.5.1)"
    if not payload:
        return Closed(1005)
    payload[2:].decode()  # its reason must be UTF-8
    return Closed(int.from_bytes(payload[:2], "big"), payload[2:])


class Deflate:
    """permessage-deflate as a client does it (RFC 7692 7.2)."""

    def __init__(self, bits: int = 15, inflate_bits: int = 15) -> None:
        self._compressor = zlib.compressobj(wbits=-bits)
        self._decompressor = zlib.decompressobj(-inflate_bits)

    def compress(self, data: bytes) -> bytes:
        """A message's payload."""
        packed = self._compressor.compress(data) + self._compressor.flush(zlib.Z_SYNC_FLUSH)
        return packed.removesuffix(_DEFLATE_TAIL)

    def decompress(self, data: bytes) -> bytes:
        """The message of a payload."""
        return self._decompressor.decompress(data + _DEFLATE_TAIL)


def parameters(extension: str) -> dict[str, str | None]:
    """Of one accepted extension: name -> value."""
    found: dict[str, str | None] = {}
    for part in extension.split(";")[1:]:
        name, sign, value = part.strip().partition("=")
        assert name not in found, f"the parameter {name} comes twice"
        found[name] = value.strip('"') if sign else None
    return found


def text(message: str | bytes, **options: bool) -> bytes:
    """A whole text message."""
    return frame(TEXT, message.encode() if isinstance(message, str) else message, **options)


def fragments(opcode: int, parts: Iterable[bytes]) -> list[bytes]:
    """One message in several frames."""
    pieces = list(parts)
    last = len(pieces) - 1
    return [frame(opcode if i == 0 else CONTINUATION, piece, fin=i == last) for i, piece in enumerate(pieces)]
