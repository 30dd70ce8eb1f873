"""Frames: RFC 6455 section 5. What fails a connection, and what a server must take; whole and byte by byte."""

# ruff: noqa: E501 (a row of a table is one line)

from __future__ import annotations

from typing import Any

import pytest
from conformance_kit.frames import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    Closed,
    Frame,
    WebSocket,
    close_payload,
    fragments,
    frame,
    text,
)
from conformance_kit.rules import row, rule
from conformance_kit.sockets import fails, goes_on
from conformance_kit.target import Target

RFC = "RFC 6455 section "
PROTOCOL_ERROR, TOO_BIG = 1002, 1009


def bad(name: str, data: bytes, text: str, source: str, *codes: int, level: Any = "must") -> Any:
    return row(name, data, codes or (PROTOCOL_ERROR,), text=text, source=RFC + source, level=level)


RESERVED = "a reserved opcode fails the connection"
BITS = "a reserved bit that no extension defined fails the connection"
CONTROL = "control frames have at most 125 bytes and are not fragmented"
ORDER = "the fragments of a message follow each other"
REFUSED = [
    bad("unmasked text", frame(TEXT, b"hello", masked=False), "a client's frame that isn't masked closes the connection", "5.1"),
    bad("unmasked ping", frame(PING, b"x", masked=False), "a client's frame that isn't masked closes the connection", "5.1"),
    bad("unmasked close", frame(CLOSE, b"\x03\xe8", masked=False), "a client's frame that isn't masked closes the connection", "5.1"),
    *[bad(f"RSV {rsv} on text", frame(TEXT, b"hello", rsv=rsv), BITS, "5.2") for rsv in range(1, 8)],
    *[bad(f"RSV {rsv} on a ping", frame(PING, b"x", rsv=rsv), BITS, "5.2") for rsv in (1, 2, 4)],
    *[bad(f"RSV {rsv} on a close", frame(CLOSE, b"\x03\xe8", rsv=rsv), BITS, "5.2") for rsv in (1, 4)],
    bad("RSV on a continuation", frame(TEXT, b"a", fin=False) + frame(CONTINUATION, b"b", rsv=4), BITS, "5.2"),
    *[bad(f"opcode {opcode}", frame(opcode, b"x"), RESERVED, "5.2") for opcode in (3, 4, 5, 6, 7, 11, 12, 13, 14, 15)],
    bad("reserved opcode without payload", frame(3), RESERVED, "5.2"),
    bad("reserved opcode in a message", frame(TEXT, b"a", fin=False) + frame(5, b"b"), RESERVED, "5.2"),
    bad("ping of 126 bytes", frame(PING, b"x" * 126), CONTROL, "5.5"),
    bad("pong of 126 bytes", frame(PONG, b"x" * 126), CONTROL, "5.5"),
    bad("close of 126 bytes", frame(CLOSE, close_payload(1000, b"x" * 124)), CONTROL, "5.5"),
    bad("ping of 65536 bytes", frame(PING, b"x" * 65536), CONTROL, "5.5"),
    bad("ping with a 16-bit length", frame(PING, b"x", form=126), "lengths have their shortest form", "5.2", level="should"),
    bad("fragmented ping", frame(PING, b"x", fin=False), CONTROL, "5.5"),
    bad("fragmented pong", frame(PONG, b"x", fin=False), CONTROL, "5.5"),
    bad("fragmented close", frame(CLOSE, b"\x03\xe8", fin=False), CONTROL, "5.5"),
    bad("continuation of nothing", frame(CONTINUATION, b"x"), ORDER, "5.4"),
    bad("continuation of nothing, unfinished", frame(CONTINUATION, b"x", fin=False), ORDER, "5.4"),
    bad("text within a message", frame(TEXT, b"a", fin=False) + frame(TEXT, b"b"), ORDER, "5.4"),
    bad("binary within a message", frame(TEXT, b"a", fin=False) + frame(BINARY, b"b"), ORDER, "5.4"),
    bad("text within fragments", frame(BINARY, b"a", fin=False) + frame(CONTINUATION, b"b", fin=False) + frame(TEXT, b"c"), ORDER, "5.4"),
    bad("length 5 in 16 bits", frame(TEXT, b"hello", form=126), "lengths have their shortest form", "5.2", level="should"),
    bad("length 5 in 64 bits", frame(TEXT, b"hello", form=127), "lengths have their shortest form", "5.2", level="should"),
    bad("length 200 in 64 bits", frame(BINARY, b"h" * 200, form=127), "lengths have their shortest form", "5.2", level="should"),
    bad("length with its highest bit", b"\x82\xff" + b"\xff" * 8 + b"\0" * 4, "the highest bit of a 64-bit length is 0", "5.2", PROTOCOL_ERROR, TOO_BIG),
    bad("length of 2^62", b"\x82\xff\x40" + b"\0" * 7 + b"\0" * 4 + b"x", "a frame beyond any limit is refused, not waited for", "10.4", TOO_BIG, PROTOCOL_ERROR, level="should"),
]  # fmt: skip


@pytest.mark.parametrize("one_by_one", [False, True], ids=["whole", "bytes"])
@pytest.mark.parametrize(("data", "codes"), REFUSED)
def test_refused(target: Target, data: bytes, codes: tuple[int, ...], one_by_one: bool) -> None:
    fails(target, data, *codes, one_by_one=one_by_one and len(data) < 1000)


PINGS = [
    row(f"{n} bytes", b"p" * n, text="a ping is answered by a pong with its payload", source=RFC + "5.5.2 and 5.5.3")
    for n in (0, 1, 2, 124, 125)
]
PINGS.append(
    row("bytes that are no text", bytes(range(0, 250, 2)), text="a ping's payload is any bytes", source=RFC + "5.5.2")
)


@pytest.mark.parametrize("one_by_one", [False, True], ids=["whole", "bytes"])
@pytest.mark.parametrize("payload", PINGS)
def test_ping(target: Target, payload: bytes, one_by_one: bool) -> None:
    with WebSocket(target) as socket:
        socket.send(frame(PING, payload), one_by_one=one_by_one)
        assert socket.pong() == payload


FLURRIES = [
    row("2", 2, text="pings that come together are answered, the last one at least", source=RFC + "5.5.3"),
    row("10", 10, text="pings that come together are answered, the last one at least", source=RFC + "5.5.3"),
    row("100", 100, text="a hundred pings are no flood yet", source=RFC + "5.5.3", level="should"),
]


@pytest.mark.parametrize("count", FLURRIES)
def test_many_pings(target: Target, count: int) -> None:
    with WebSocket(target) as socket:
        socket.send(*[frame(PING, b"%d" % i) for i in range(count)])
        seen = socket.pong()
        while seen != b"%d" % (count - 1):
            assert isinstance(seen, bytes), seen
            seen = socket.pong()


@rule("pongs that nobody asked for are ignored", RFC + "5.5.3")
@pytest.mark.parametrize("payload", [b"", b"unsolicited", b"x" * 125], ids=["empty", "text", "full"])
def test_unsolicited_pong(target: Target, payload: bytes) -> None:
    with WebSocket(target) as socket:
        socket.send(frame(PONG, payload) * 3)
        goes_on(target, socket)


def message_of(target: Target) -> bytes:
    """A text message that the server answers."""
    return "Grüße, 世界 🙂".encode() if target.settings.ws_echo else target.settings.ws_message.encode()


def split(data: bytes, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


FRAGMENTED = [
    row("one frame", lambda data: [text(data)], text="a message may be one frame", source=RFC + "5.4"),
    row("two fragments", lambda data: fragments(TEXT, [data[:4], data[4:]]), text="a message may be fragmented", source=RFC + "5.4"),
    row("fragments of one byte", lambda data: fragments(TEXT, split(data, 1)), text="fragments may cut characters", source=RFC + "5.6"),
    row("empty first fragment", lambda data: fragments(TEXT, [b"", data]), text="a fragment may be empty", source=RFC + "5.4"),
    row("empty last fragment", lambda data: fragments(TEXT, [data, b""]), text="a fragment may be empty", source=RFC + "5.4"),
    row("empty fragments between", lambda data: fragments(TEXT, [data[:3], b"", b"", data[3:]]), text="a fragment may be empty", source=RFC + "5.4"),
    row("a ping between fragments", lambda data: [frame(TEXT, data[:5], fin=False), frame(PING, b"mid"), frame(CONTINUATION, data[5:])], text="control frames may come between fragments", source=RFC + "5.4"),
    row("pings between all", lambda data: [part for piece in fragments(TEXT, split(data, 2)) for part in (piece, frame(PING, b"mid"))], text="control frames may come between fragments", source=RFC + "5.4"),
    row("a pong between fragments", lambda data: [frame(TEXT, data[:5], fin=False), frame(PONG, b"mid"), frame(CONTINUATION, data[5:])], text="control frames may come between fragments", source=RFC + "5.4"),
]  # fmt: skip


@pytest.mark.parametrize("one_by_one", [False, True], ids=["whole", "bytes"])
@pytest.mark.parametrize("cut", FRAGMENTED)
def test_fragments(target: Target, cut: Any, one_by_one: bool) -> None:
    message = message_of(target)
    with WebSocket(target) as socket:
        socket.send(*cut(message), one_by_one=one_by_one)
        goes_on(target, socket, message=message)


@rule("a ping within a message is answered before the message's end", RFC + "5.4")
def test_ping_is_answered_within_a_message(target: Target) -> None:
    message = message_of(target)
    with WebSocket(target) as socket:
        socket.send(frame(TEXT, message[:5], fin=False), frame(PING, b"mid"))
        assert socket.pong() == b"mid"
        socket.send(frame(CONTINUATION, message[5:]))
        goes_on(target, socket, message=message)


SIZES = (0, 1, 124, 125, 126, 127, 128, 255, 256, 65_534, 65_535, 65_536, 65_537, 131_072, 500_000)


@pytest.mark.parametrize("opcode", [TEXT, BINARY], ids=["text", "binary"])
@pytest.mark.parametrize(
    "size",
    [
        row(
            f"{n} bytes",
            n,
            text="each form of the length is read, and written in its shortest form",
            source=RFC + "5.2",
        )
        for n in SIZES
    ],
)
def test_sizes(echo: Target, size: int, opcode: int) -> None:
    payload = bytes(48 + i % 10 for i in range(size)) if opcode == TEXT else bytes(i & 255 for i in range(size))
    with WebSocket(echo) as socket:
        socket.send(frame(opcode, payload))
        assert socket.receive() == Frame(opcode, payload)


@rule("messages that come together are answered in order", RFC + "5.4")
@pytest.mark.parametrize("count", [2, 100])
def test_many_messages(echo: Target, count: int) -> None:
    messages = [b"message %d" % i for i in range(count)]
    with WebSocket(echo) as socket:
        socket.send(*map(text, messages))
        assert [socket.receive() for _ in messages] == [Frame(TEXT, message) for message in messages]


@rule("a message's type is kept: binary stays binary, and is not checked as text", RFC + "5.6")
def test_binary_is_any_bytes(echo: Target) -> None:
    payload = bytes(range(256))
    with WebSocket(echo) as socket:
        socket.send(*fragments(BINARY, split(payload, 100)))
        assert socket.receive() == Frame(BINARY, payload)


@rule("a mask of zeros is a mask", RFC + "5.3")
def test_mask_of_zeros(target: Target) -> None:
    message = message_of(target)
    head = bytes((0x81, 0x80 | len(message)))
    with WebSocket(target) as socket:
        socket.send(head + b"\0\0\0\0" + message)
        goes_on(target, socket, message=message)


@rule("a run of small fragments without an end is refused before it fills memory", RFC + "10.4, C03", "should")
def test_endless_fragments(target: Target) -> None:
    """64 MiB in fragments of 64 KiB; the server stops it on the way, with 1009 or a cut."""
    piece = frame(CONTINUATION, b"x" * 65536, fin=False)
    with WebSocket(target) as socket:
        socket.send(frame(TEXT, b"x", fin=False))
        for _ in range(1024):
            socket.send(piece)
        found = socket.closed()
        assert found.code in (TOO_BIG, 1008, 1006), found


@rule("a client that vanishes in the middle of a frame doesn't hurt others", RFC + "7.1.1")
def test_vanishing_clients(target: Target) -> None:
    for _ in range(10):
        with WebSocket(target) as socket:
            socket.send(frame(BINARY, b"x" * 1000)[:500])
            socket.abort()
    with WebSocket(target) as socket:
        goes_on(target, socket)


@rule("after a fault nothing more of the connection is taken", RFC + "7.1.7")
def test_nothing_behind_a_fault(target: Target) -> None:
    with WebSocket(target) as socket:
        socket.send(frame(3, b"x"), frame(PING, b"behind"))
        assert isinstance(socket.receive(), Closed)
        assert socket.pongs == []
