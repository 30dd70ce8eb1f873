"""HTTP/2's limits, each by the README's row: its number is the one in force, what just fits is served, and what is
beyond it meets the end that the row names. What needs virtual time is in tests/protocols and tests/server."""

# ruff: noqa: E501 (a row of a table is one line)

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pytest
from conformance_kit.http2_wire import (
    ACK,
    END_HEADERS,
    END_STREAM,
    GET,
    POST,
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

from protocols import http1_guard, http2, http2_guard
from protocols.http2_guard import Code
from server import http2_connection, http2_stream
from server.config import parse
from tests.http2.conftest import Endpoint
from tests.support.serving import REPOSITORY

KIB = 1024


def kib(size: int) -> str:
    """As the README writes it."""
    return f"{round(size / KIB)} KiB"


# The first words of a row, and what its second column says, from the constants.
ROWS = {
    "streams of a connection at once": f"{http2.STREAMS_MAX}",
    "a frame": kib(http2_guard.FRAME_BYTES_MAX),
    "a request's fields, and their size": f"{http1_guard.FIELDS_MAX}, `--max-header`",
    "a header block; its CONTINUATION frames": f"`--max-header`; {http2_guard.CONTINUATIONS_MAX}",
    "HPACK table: size updates in a block; ours": f"{http2_guard.TABLE_UPDATES_MAX}; "
    + kib(http2_guard.ENCODER_TABLE_BYTES_MAX),
    "settings in a frame": f"{http2_guard.SETTINGS_PER_FRAME_MAX}",
    "resets by the client": f"{http2_guard.RESETS_BURST}, and {http2_guard.RESETS_PER_S} a second",
    "PING, SETTINGS, PRIORITY, empty DATA and unknown frames": f"{http2_guard.CONTROL_BURST}, and "
    f"{http2_guard.CONTROL_PER_S} a second",
    "WINDOW_UPDATE": f"{http2_guard.WINDOW_UPDATES_BURST}, {http2_guard.WINDOW_UPDATES_PER_S} a second, and "
    f"{http2_guard.WINDOW_UPDATES_PER_DATA} for each DATA frame sent",
    "a stream's inbound window; bodies of a connection together": f"{kib(http2.STREAM_WINDOW_BYTES)}; `--max-body`",
    "control replies that the client doesn't read": kib(http2_connection.UNREAD_REPLIES_BYTES_MAX),
    "a window that stays closed": "`--write-stall-timeout`",
    "the rest of a request that was answered early": f"{http2_stream.STREAM_LINGER_S:g} s",
}


def test_the_readme_has_every_row() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    table = readme.partition("On HTTP/2 also")[2].partition("\n\n`python -m server --help`")[0]
    rows = {row[0]: row[1] for row in re.findall(r"^\| (.+?) \| (.+?) \|", table, re.MULTILINE)[1:]}
    turns = rows.pop("frames handled, and bytes or events written for one stream, before others have a turn")
    assert turns.startswith(f"{http2.FRAMES_PER_TURN}; {kib(http2_stream.TURN_BYTES)} or ")
    assert rows == ROWS


def is_answered(wire: Wire, status: str = "200") -> None:
    assert wire.answer(1)[0][":status"] == status
    wire.alive()


def fields(count: int, size: int = 0) -> list[tuple[str, str]]:
    """A GET with so many fields beside the pseudo-header's, the last of them of `size` bytes."""
    return [*GET, *[(f"x{i}", "1") for i in range(count - 1)], ("y", "1" * size)]


def block_in(wire: Wire, pieces: int) -> list[bytes]:
    """A GET whose block comes in HEADERS and so many CONTINUATIONs."""
    block = wire.block([*GET, ("x-long", "y" * 200)])
    cuts = [*range(pieces), len(block)]
    first = frame(Kind.HEADERS, END_STREAM, 1, b"")
    rest = [block[a:b] for a, b in itertools.pairwise(cuts)]
    return [first, *[frame(Kind.CONTINUATION, END_HEADERS if p is rest[-1] else 0, 1, p) for p in rest]]


Sent = Callable[[Wire], list[bytes]]
MAX_HEADER = parse([]).max_header

FITS: dict[str, Sent] = {
    "fields": lambda w: [w.headers(1, fields(http1_guard.FIELDS_MAX))],
    "CONTINUATION frames": lambda w: block_in(w, http2_guard.CONTINUATIONS_MAX),
    "table size updates": lambda w: [w.plain(before=b"\x20" * http2_guard.TABLE_UPDATES_MAX)],
    "settings": lambda w: [settings(*[(Setting.MAX_CONCURRENT_STREAMS, 1)] * http2_guard.SETTINGS_PER_FRAME_MAX), w.plain()],
    "resets": lambda w: [
        *[w.headers(n, POST, end=False) + reset(n) for n in range(3, 3 + 2 * (http2_guard.RESETS_BURST - 1), 2)],
    ],
    "PINGs": lambda w: [*[frame(Kind.PING, ACK, 0, bytes(8))] * (http2_guard.CONTROL_BURST - 10)],
    "PRIORITY frames": lambda w: [*[priority(1, 0)] * (http2_guard.CONTROL_BURST - 10)],
    "WINDOW_UPDATEs": lambda w: [*[window_update(0, 1)] * (http2_guard.WINDOW_UPDATES_BURST - 10)],
}  # fmt: skip


@pytest.mark.parametrize("what", FITS)
def test_what_just_fits(echo: Endpoint, what: str) -> None:
    with echo.wire() as wire:
        wire.send(*FITS[what](wire))
        if what in ("resets", "PINGs", "PRIORITY frames", "WINDOW_UPDATEs"):
            wire.alive()
        else:
            is_answered(wire)


CALM, COMPRESSION, FLOW = Code.ENHANCE_YOUR_CALM, Code.COMPRESSION_ERROR, Code.FLOW_CONTROL_ERROR
BEYOND: dict[str, tuple[int, Sent]] = {
    "a field list of twice the size": (CALM, lambda w: indexed(w, 2 * MAX_HEADER)),
    "a header block": (CALM, lambda w: large_block(w, MAX_HEADER + 1)),
    "CONTINUATION frames": (CALM, lambda w: block_in(w, http2_guard.CONTINUATIONS_MAX + 1)),
    "table size updates": (COMPRESSION, lambda w: [w.plain(before=b"\x20" * (http2_guard.TABLE_UPDATES_MAX + 1))]),
    "settings": (CALM, lambda w: [settings(*[(Setting.MAX_CONCURRENT_STREAMS, 1)] * (http2_guard.SETTINGS_PER_FRAME_MAX + 1))]),
    "resets": (CALM, lambda w: [w.headers(n, POST, end=False) + reset(n) for n in range(1, 4 * http2_guard.RESETS_BURST, 2)]),
    "PINGs": (CALM, lambda w: [frame(Kind.PING, 0, 0, bytes(8))] * (2 * http2_guard.CONTROL_BURST)),
    "SETTINGS frames": (CALM, lambda w: [settings()] * (2 * http2_guard.CONTROL_BURST)),
    "PRIORITY frames": (CALM, lambda w: [priority(1, 0)] * (2 * http2_guard.CONTROL_BURST)),
    "empty DATA frames": (CALM, lambda w: [w.headers(1, POST, end=False), *[data(1)] * (2 * http2_guard.CONTROL_BURST)]),
    "unknown frames": (CALM, lambda w: [frame(Kind.UNKNOWN, 0, 0)] * (2 * http2_guard.CONTROL_BURST)),
    "WINDOW_UPDATEs": (CALM, lambda w: [window_update(0, 1)] * (2 * http2_guard.WINDOW_UPDATES_BURST)),
    "a frame": (Code.FRAME_SIZE_ERROR, lambda w: [w.headers(1, POST, end=False), data(1, bytes(http2_guard.FRAME_BYTES_MAX + 1))]),
}  # fmt: skip


def large_block(wire: Wire, size: int) -> list[bytes]:
    """A GET with a block of more than `size` bytes, in as few frames as hold it."""
    block = wire.encoder.encode([*GET, ("y", "1" * size)], huffman=False)
    pieces = [block[at : at + http2_guard.FRAME_BYTES_MAX] for at in range(0, len(block), http2_guard.FRAME_BYTES_MAX)]
    first = frame(Kind.HEADERS, END_STREAM, 1, pieces[0])
    return [first, *[frame(Kind.CONTINUATION, END_HEADERS if p is pieces[-1] else 0, 1, p) for p in pieces[1:]]]


def indexed(wire: Wire, size: int) -> list[bytes]:
    """Two requests: the first one indexes a field of 3900 bytes, the second repeats it until its list has `size`."""
    first = frame(Kind.HEADERS, END_HEADERS | END_STREAM, 1, wire.block([*GET, ("x", "y" * 3900)]))
    return [first, frame(Kind.HEADERS, END_HEADERS | END_STREAM, 3, wire.block(GET) + b"\xbe" * (size // 3900 + 1))]


@pytest.mark.parametrize("what", BEYOND)
def test_what_is_beyond(echo: Endpoint, what: str) -> None:
    code, sent = BEYOND[what]
    with echo.wire() as wire:
        wire.send(*sent(wire))
        wire.connection_error(code)


@pytest.mark.parametrize("what", ["fields", "size"])
def test_more_fields_or_a_larger_list_get_431(echo: Endpoint, what: str) -> None:
    """And the connection goes on."""
    with echo.wire() as wire:
        if what == "fields":
            wire.send(wire.headers(1, fields(http1_guard.FIELDS_MAX + 1)))
            is_answered(wire, "431")
        else:
            wire.send(*indexed(wire, MAX_HEADER))
            assert wire.answer(3)[0][":status"] == "431"
            wire.alive()


def test_a_stream_beyond_the_limit_is_refused(echo: Endpoint) -> None:
    """Those before it are served when their bodies come to their end."""
    last = 1 + 2 * http2.STREAMS_MAX
    with echo.wire() as wire:
        assert wire.settings[Setting.MAX_CONCURRENT_STREAMS] == http2.STREAMS_MAX
        wire.send(*[wire.headers(n, POST, end=False) for n in range(1, last + 1, 2)])
        wire.stream_error(last, Code.REFUSED_STREAM)
        wire.send(*[data(n, b"x", end=True) for n in range(1, last, 2)])
        ended = 0
        while ended < http2.STREAMS_MAX:
            seen = wire.read()
            assert seen.kind != Kind.RST_STREAM, seen
            ended += bool(seen.flags & END_STREAM and seen.kind == Kind.DATA)
