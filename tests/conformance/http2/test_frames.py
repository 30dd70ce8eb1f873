"""Frames, the connection's opening, and header blocks in pieces: RFC 9113 sections 3.4, 4, 5.5 and 6."""

# ruff: noqa: E501 (a row of a table is one line)

from __future__ import annotations

from typing import Any

import pytest
from conformance_kit.http2_verdicts import CONNECTION, IGNORED, STREAM, Send, ended, ends, joined, opened, understood
from conformance_kit.http2_wire import (
    ACK,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES_MAX,
    PADDED,
    PREFACE,
    PRIORITY,
    Closed,
    Code,
    Kind,
    Setting,
    Wire,
    data,
    dependency,
    frame,
    priority,
    reset,
    settings,
    window_update,
)
from conformance_kit.rules import row, rule
from conformance_kit.target import Target

RFC = "RFC 9113 section "
PROTOCOL, SIZE = Code.PROTOCOL_ERROR, Code.FRAME_SIZE_ERROR
TOO_LARGE = bytes(FRAME_BYTES_MAX + 1)


def bad(
    name: str, code: int, send: Send, text: str, source: str, level: Any = "must", ways: tuple[str, ...] = (CONNECTION,)
) -> Any:
    return row(name, (code,), send, ways, text=text, source=source, level=level)


LENGTH = "a frame whose length doesn't fit its type, or the maximum, is a FRAME_SIZE_ERROR"
BLOCK = "a header block is contiguous: no other frame comes within it"
ORPHAN = "CONTINUATION follows HEADERS (or CONTINUATION) without END_HEADERS"
WRONG_STREAM = "frames of this type are about {}, and nothing else"
PADDING = "padding that is longer than the frame is a PROTOCOL_ERROR"
VALUE = "a setting's value outside its range is a connection error"
ITSELF = "a dependency on itself is refused, or ignored like all priorities"
THE_CONNECTION, A_STREAM = WRONG_STREAM.format("the connection"), WRONG_STREAM.format("a stream")
ALSO_STREAM = (CONNECTION, STREAM)  # a stream error by its rule, which a server may make one of the connection

REFUSED = [
    bad("DATA beyond the maximum", SIZE, opened(lambda w: data(1, TOO_LARGE)), LENGTH, RFC + "4.2", ways=ALSO_STREAM),
    bad("HEADERS beyond the maximum", SIZE, lambda w: frame(Kind.HEADERS, END_HEADERS | END_STREAM, 1, TOO_LARGE), LENGTH, RFC + "4.2"),
    bad("PING of 6 bytes", SIZE, lambda w: frame(Kind.PING, 0, 0, bytes(6)), LENGTH, RFC + "6.7"),
    bad("PING of 7 bytes", SIZE, lambda w: frame(Kind.PING, 0, 0, bytes(7)), LENGTH, RFC + "6.7"),
    bad("PRIORITY of 4 bytes", SIZE, lambda w: frame(Kind.PRIORITY, 0, 1, bytes(4)), LENGTH, RFC + "6.3", ways=ALSO_STREAM),
    bad("RST_STREAM of 3 bytes", SIZE, opened(lambda w: frame(Kind.RST_STREAM, 0, 1, bytes(3))), LENGTH, RFC + "6.4"),
    bad("SETTINGS of 3 bytes", SIZE, lambda w: frame(Kind.SETTINGS, 0, 0, b"\0\3\0"), LENGTH, RFC + "6.5"),
    bad("SETTINGS with ACK and a payload", SIZE, lambda w: settings((1, 4096), flags=ACK), LENGTH, RFC + "6.5"),
    bad("WINDOW_UPDATE of 3 bytes", SIZE, lambda w: frame(Kind.WINDOW_UPDATE, 0, 0, b"\0\0\1"), LENGTH, RFC + "6.9"),
    bad("PRIORITY within a block", PROTOCOL, lambda w: [w.split(9)[0], priority(1, 0)], BLOCK, RFC + "6.2"),
    bad("PRIORITY within a block, cut early", PROTOCOL, lambda w: [w.split(5)[0], priority(1, 0)], BLOCK, RFC + "6.2"),
    bad("HEADERS of another stream within a block", PROTOCOL, lambda w: [w.split(9)[0], w.headers(3)], BLOCK, RFC + "6.2"),
    bad("DATA within a block", PROTOCOL, lambda w: [*w.split(9, 20)[:2], data(1, b"x")], BLOCK, RFC + "6.10"),
    bad("an unknown frame within a block", PROTOCOL, lambda w: [w.split(9)[0], frame(Kind.UNKNOWN, 0, 0, bytes(8))], BLOCK, RFC + "5.5"),
    bad("CONTINUATION on stream 0", PROTOCOL, lambda w: [w.split(9)[0], frame(Kind.CONTINUATION, END_HEADERS, 0)], BLOCK, RFC + "6.10"),
    bad("CONTINUATION behind END_HEADERS", PROTOCOL, lambda w: [w.headers(1, end=False), frame(Kind.CONTINUATION, END_HEADERS, 1)], ORPHAN, RFC + "6.10"),
    bad("CONTINUATION behind the last CONTINUATION", PROTOCOL, lambda w: [*w.split(9)[:2], frame(Kind.CONTINUATION, END_HEADERS, 1)], ORPHAN, RFC + "6.10"),
    bad("CONTINUATION behind DATA", PROTOCOL, opened(lambda w: data(1, b"x") + frame(Kind.CONTINUATION, END_HEADERS, 1)), ORPHAN, RFC + "6.10"),
    bad("DATA on stream 0", PROTOCOL, opened(lambda w: data(0, b"x")), A_STREAM, RFC + "6.1"),
    bad("HEADERS on stream 0", PROTOCOL, lambda w: w.headers(0), A_STREAM, RFC + "6.2"),
    bad("PRIORITY on stream 0", PROTOCOL, lambda w: priority(0, 1), A_STREAM, RFC + "6.3"),
    bad("RST_STREAM on stream 0", PROTOCOL, lambda w: reset(0), A_STREAM, RFC + "6.4"),
    bad("SETTINGS on a stream", PROTOCOL, lambda w: frame(Kind.SETTINGS, 0, 1, bytes([0, 3, 0, 0, 0, 100])), THE_CONNECTION, RFC + "6.5"),
    bad("PING on a stream", PROTOCOL, lambda w: frame(Kind.PING, 0, 1, bytes(8)), THE_CONNECTION, RFC + "6.7"),
    bad("PING on a stream that is idle", PROTOCOL, lambda w: frame(Kind.PING, 0, 3, bytes(8)), THE_CONNECTION, RFC + "6.7"),
    bad("GOAWAY on a stream", PROTOCOL, lambda w: frame(Kind.GOAWAY, 0, 1, bytes(8)), THE_CONNECTION, RFC + "6.8"),
    bad("DATA with too much padding", PROTOCOL, opened(lambda w: frame(Kind.DATA, END_STREAM | PADDED, 1, b"\x06test")), PADDING, RFC + "6.1"),
    bad("HEADERS with too much padding", PROTOCOL, lambda w: frame(Kind.HEADERS, END_HEADERS | END_STREAM | PADDED, 1, b"\xff" + w.block(w.get)), PADDING, RFC + "6.2"),
    bad("HEADERS that depend on themselves", PROTOCOL, lambda w: w.plain(flags=PRIORITY, before=dependency(1)), ITSELF, "RFC 7540 section 5.3.1", "should", (CONNECTION, STREAM, IGNORED)),
    bad("PRIORITY that depends on itself", PROTOCOL, lambda w: priority(1, 1), ITSELF, "RFC 7540 section 5.3.1", "should", (CONNECTION, STREAM, IGNORED)),
    bad("ENABLE_PUSH of 2", PROTOCOL, lambda w: settings((Setting.ENABLE_PUSH, 2)), VALUE, RFC + "6.5.2"),
    bad("INITIAL_WINDOW_SIZE of 2^31", Code.FLOW_CONTROL_ERROR, lambda w: settings((Setting.INITIAL_WINDOW_SIZE, 1 << 31)), VALUE, RFC + "6.5.2"),
    bad("MAX_FRAME_SIZE below 2^14", PROTOCOL, lambda w: settings((Setting.MAX_FRAME_SIZE, FRAME_BYTES_MAX - 1)), VALUE, RFC + "6.5.2"),
    bad("MAX_FRAME_SIZE of 2^24", PROTOCOL, lambda w: settings((Setting.MAX_FRAME_SIZE, 1 << 24)), VALUE, RFC + "6.5.2"),
    bad("PUSH_PROMISE", PROTOCOL, opened(lambda w: frame(Kind.PUSH_PROMISE, END_HEADERS, 1, bytes([0, 0, 0, 2]) + w.block(w.get))), "a client can't push", RFC + "8.4"),
]  # fmt: skip


@pytest.mark.parametrize(("codes", "send", "ways"), REFUSED)
def test_refused(target: Target, codes: tuple[int, ...], send: Send, ways: tuple[str, ...]) -> None:
    ends(target, send, codes, ways)


def pinged(then: Send, payload: bytes = b"\0" * 8, flags: int = 0, stream: int = 0) -> Send:
    """A PING before the rest."""
    return lambda wire: [frame(Kind.PING, flags, stream, payload), joined(then(wire))]


def plain(wire: Wire) -> bytes:
    return wire.plain()


def body_in(*pieces: Any) -> Send:
    """A plain request by POST whose body comes as `pieces(body)`."""
    return lambda wire: [wire.headers(1, wire.post, end=False), *[piece(wire.body or b"test") for piece in pieces]]


IGNORES = "what isn't known is ignored"
FINE = [
    row("the opening, and a request", plain, text="SETTINGS follow the preface, and requests them", source=RFC + "3.4"),
    row("HEADERS with padding", lambda w: w.plain(flags=PADDED, before=b"\3", behind=bytes(3)), text="padding is dropped", source=RFC + "6.2"),
    row("HEADERS with a priority", lambda w: w.plain(flags=PRIORITY, before=dependency(0, 255)), text="priorities may be ignored, and are no fault", source=RFC + "5.3.2"),
    row("PRIORITY on an idle stream", lambda w: [priority(1, 0), w.plain()], text="PRIORITY may come in any state", source=RFC + "6.3"),
    row("PRIORITY on a higher idle stream", lambda w: [priority(5, 0), w.plain()], text="PRIORITY opens no stream", source=RFC + "6.3"),
    row("PRIORITY on a stream in use", lambda w: [w.plain(), priority(1, 0)], text="PRIORITY may come in any state", source=RFC + "6.3"),
    row("PRIORITY of weight 1", lambda w: [w.plain(), priority(1, 0, 0)], text="PRIORITY may come in any state", source=RFC + "6.3"),
    row("PRIORITY of weight 256", lambda w: [w.plain(), priority(1, 0, 255)], text="PRIORITY may come in any state", source=RFC + "6.3"),
    row("PRIORITY with a dependency", lambda w: [w.plain(), priority(1, 3)], text="PRIORITY may name a stream that is idle", source=RFC + "6.3"),
    row("PRIORITY with an exclusive dependency", lambda w: [w.plain(), priority(1, 3, exclusive=True)], text="PRIORITY may name a stream that is idle", source=RFC + "6.3"),
    row("PRIORITY_UPDATE", lambda w: [frame(Kind.PRIORITY_UPDATE, 0, 0, b"\0\0\0\1u=3"), w.plain()], text=IGNORES, source="RFC 9218 section 7.1, RFC 9113 section 5.5"),
    row("SETTINGS", lambda w: [settings((Setting.MAX_CONCURRENT_STREAMS, 100)), w.plain()], text="SETTINGS may come at any time", source=RFC + "6.5"),
    row("an unknown setting", lambda w: [settings((0xFF, 1)), w.plain()], text=IGNORES, source=RFC + "6.5.2"),
    row("a setting twice", lambda w: [settings((Setting.INITIAL_WINDOW_SIZE, 0), (Setting.INITIAL_WINDOW_SIZE, 65_535)), w.plain()], text="settings are taken in order, so that the last value holds", source=RFC + "6.5.3"),
    row("PING", pinged(plain), text="PING may come at any time", source=RFC + "6.7"),
    row("PING with ACK", pinged(plain, flags=ACK), text="the answer to a ping is not answered", source=RFC + "6.7"),
    row("an undefined flag", pinged(plain, flags=0x16), text=IGNORES, source=RFC + "4.1"),
    row("the reserved bit", pinged(plain, stream=1 << 31), text="the reserved bit is ignored", source=RFC + "4.1"),
    row("WINDOW_UPDATE on the connection", lambda w: [window_update(0, 1), w.plain()], text="WINDOW_UPDATE may come at any time", source=RFC + "6.9"),
    row("a block in two pieces", lambda w: w.split(9), text="a block may be cut anywhere", source=RFC + "6.10"),
    row("a block in four pieces", lambda w: w.split(9, 20, 30), text="a block may be cut anywhere", source=RFC + "6.10"),
    row("a block in pieces of one byte", lambda w: w.split(1, 2, 3, 50), text="a block may be cut anywhere", source=RFC + "6.10"),
    row("an empty CONTINUATION", lambda w: w.split(9, 9), text="a piece of a block may be empty", source=RFC + "6.10"),
    row("a frame of an unknown type", lambda w: [frame(Kind.UNKNOWN, 0, 0, bytes(8)), w.plain()], text=IGNORES, source=RFC + "5.5"),
    row("a frame of an unknown type on a stream", lambda w: [w.headers(1, w.fields, end=False), frame(Kind.UNKNOWN, 0, 1, bytes(8)), data(1, w.body, end=True)], text=IGNORES, source=RFC + "5.5"),
]  # fmt: skip


@pytest.mark.parametrize("send", FINE)
def test_understood(target: Target, send: Send) -> None:
    understood(target, send)


BODIES = [
    row("DATA in one frame", body_in(lambda b: data(1, b, end=True)), text="a body may come in any number of frames", source=RFC + "6.1"),
    row("DATA in two frames", body_in(lambda b: data(1, b[:2]), lambda b: data(1, b[2:], end=True)), text="a body may come in any number of frames", source=RFC + "6.1"),
    row("DATA that ends with an empty frame", body_in(lambda b: data(1, b), lambda b: data(1, end=True)), text="a body may come in any number of frames", source=RFC + "6.1"),
    row("DATA with padding", body_in(lambda b: frame(Kind.DATA, END_STREAM | PADDED, 1, b"\3" + b + bytes(3))), text="padding is dropped", source=RFC + "6.1"),
]  # fmt: skip


@pytest.mark.parametrize("send", BODIES)
def test_bodies_understood(target: Target, send: Send) -> None:
    understood(target, send, like_baseline=bool(target.body))


@rule("every server takes frames of 2^14 bytes", RFC + "4.2")
def test_data_of_the_maximum(target: Target) -> None:
    """The application may not like the body."""
    understood(target, opened(lambda w: data(1, bytes(FRAME_BYTES_MAX), end=True)), like_baseline=False)


@rule("PRIORITY on a closed stream is no fault", RFC + "6.3")
def test_priority_on_a_closed_stream(target: Target) -> None:
    with target.wire() as wire:
        wire.send(joined(ended(lambda w: priority(1, 0))(wire)))
        wire.alive()


@rule("what isn't the preface is no HTTP/2: a connection error, or another protocol's business", RFC + "3.4")
def test_invalid_preface(target: Target) -> None:
    """On a port with TLS, HTTP/2 was chosen, so it can't be HTTP/1.1."""
    with target.wire(opening=b"INVALID CONNECTION PREFACE\r\n\r\n") as wire:
        if not target.tls:
            first = wire.socket.recv(12)
            assert first == b"HTTP/1.1 400" or (not target.settings.ours and first[9:10] != b"2"), first
            return
        with pytest.raises(Closed):
            wire.wait(lambda seen: seen.kind == Kind.HEADERS)
        assert wire.goaway is None or wire.goaway.code == PROTOCOL, wire.goaway
        assert wire.goaway is not None or not target.settings.ours, "no GOAWAY"


@rule("the first frame is SETTINGS", RFC + "3.4")
def test_first_frame(target: Target) -> None:
    opening = PREFACE + frame(Kind.PING, 0, 0, bytes(8))
    ends(target, lambda w: b"", (PROTOCOL,), (CONNECTION,), opening=opening)


@rule("SETTINGS are acknowledged", RFC + "6.5.3")
def test_settings_are_acknowledged(target: Target) -> None:
    with target.wire() as wire:
        wire.alive()  # what acknowledges the opening's is read
        wire.send(settings((Setting.MAX_CONCURRENT_STREAMS, 100)))
        assert wire.wait(lambda seen: seen.kind == Kind.SETTINGS and bool(seen.flags & ACK)).payload == b""


@rule("a ping is answered with its payload", RFC + "6.7")
def test_ping(target: Target) -> None:
    with target.wire() as wire:
        wire.send(frame(Kind.PING, 0, 0, b"payload!"))
        seen = wire.wait(lambda seen: seen.kind == Kind.PING)
        assert (seen.flags, seen.payload) == (ACK, b"payload!")


@rule("the server's settings are in their ranges, and it doesn't offer to push", RFC + "6.5.2")
def test_settings_of_the_server(target: Target) -> None:
    with target.wire() as wire:
        found = wire.settings
    assert found.get(Setting.ENABLE_PUSH, 0) == 0, found
    assert found.get(Setting.INITIAL_WINDOW_SIZE, 0) < 1 << 31, found
    assert FRAME_BYTES_MAX <= found.get(Setting.MAX_FRAME_SIZE, FRAME_BYTES_MAX) < 1 << 24, found
    assert found.get(Setting.ENABLE_CONNECT_PROTOCOL, 0) in (0, 1), found


@rule("the limit on streams at once is told, and is no less than 100", RFC + "6.5.2", "should")
def test_limit_on_streams(target: Target) -> None:
    with target.wire() as wire:
        assert wire.settings.get(Setting.MAX_CONCURRENT_STREAMS, 0) >= 100, wire.settings
