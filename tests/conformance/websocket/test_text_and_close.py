"""UTF-8 in text messages (RFC 6455 section 8.1) and the closing handshake (section 7)."""

# ruff: noqa: E501 (a row of a table is one line)

from __future__ import annotations

import pytest
from conformance_kit.frames import (
    CLOSE,
    CONTINUATION,
    PING,
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
from conformance_kit.sockets import DROPPED, fails
from conformance_kit.target import Target

RFC = "RFC 6455 section "
NOT_UTF8 = "text that is not UTF-8 fails the connection with 1007"
INVALID_TEXT = [
    ("lone continuation byte", b"\x80"),
    ("continuation byte behind text", b"hello\xbf"),
    ("byte FE", b"\xfe"),
    ("byte FF", b"\xff\xff"),
    ("overlong slash, two bytes", b"\xc0\xaf"),
    ("overlong slash, three bytes", b"\xe0\x80\xaf"),
    ("overlong slash, four bytes", b"\xf0\x80\x80\xaf"),
    ("overlong NUL", b"\xc0\x80"),
    ("overlong two bytes", b"\xc1\xbf"),
    ("overlong three bytes", b"\xe0\x9f\xbf"),
    ("overlong four bytes", b"\xf0\x8f\xbf\xbf"),
    ("high surrogate", b"\xed\xa0\x80"),
    ("low surrogate", b"\xed\xbf\xbf"),
    ("surrogate pair", b"\xed\xa0\xbd\xed\xb8\x80"),
    ("beyond U+10FFFF", b"\xf4\x90\x80\x80"),
    ("five bytes", b"\xf8\x88\x80\x80\x80"),
    ("six bytes", b"\xfc\x84\x80\x80\x80\x80"),
    ("two of three bytes", b"\xe4\xb8"),
    ("three of four bytes", b"\xf0\x9f\x98"),
    ("lead byte, then text", b"\xf0hello"),
    ("latin-1", b"caf\xe9"),
    ("behind a good character", "κόσμε".encode() + b"\xed\xa0\x80edited"),
]
TEXTS = [row(name, data, text=NOT_UTF8, source=RFC + "8.1, C10") for name, data in INVALID_TEXT]


@pytest.mark.parametrize("data", TEXTS)
def test_invalid_text(target: Target, data: bytes) -> None:
    fails(target, text(data), 1007)


@pytest.mark.parametrize("data", TEXTS)
def test_invalid_text_in_fragments(target: Target, data: bytes) -> None:
    """One byte a fragment: what is wrong is wrong however it was cut."""
    fails(target, b"".join(fragments(TEXT, [data[i : i + 1] for i in range(len(data))])), 1007)


@rule("text that can't become UTF-8 any more fails at once, not at the message's end", RFC + "8.1", "should")
def test_fails_fast(target: Target) -> None:
    fails(target, frame(TEXT, b"\xf4\x90\x80\x80", fin=False), 1007)


VALID_TEXT = [
    ("ASCII", b"Hello"),
    ("NUL", b"a\0b"),
    ("two bytes", "ÀÿΩ".encode()),
    ("three bytes", "世界…".encode()),
    ("four bytes", "🙂𝄞".encode()),
    ("highest code point", "\U0010ffff".encode()),
    ("non-characters", "\ufffe\uffff".encode()),
    ("byte order mark", "\ufeffx".encode()),
    ("around the surrogates", "\ud7ff\ue000".encode()),
    ("line separators", "\u2028\u2029\x85".encode()),
    ("joined emoji", "👩‍👩‍👧‍👦".encode()),
]


@pytest.mark.parametrize("size", [1, 2, 3, 1000], ids=["cut in 1", "cut in 2", "cut in 3", "whole"])
@pytest.mark.parametrize(
    "data",
    [
        row(name, data, text="every code point goes through, wherever its bytes are cut", source=RFC + "5.6, C10")
        for name, data in VALID_TEXT
    ],
)
def test_valid_text(echo: Target, data: bytes, size: int) -> None:
    with WebSocket(echo) as socket:
        socket.send(*fragments(TEXT, [data[i : i + size] for i in range(0, len(data), size)]))
        assert socket.receive() == Frame(TEXT, data)


FAULTS = [
    row("protocol error", frame(3, b"x"), 1002, text="a close frame tells the fault", source=RFC + "7.1.7", level="should"),
    row("unmasked", frame(TEXT, b"x", masked=False), 1002, text="a close frame tells the fault", source=RFC + "7.1.7", level="should"),
    row("invalid text", text(b"\xff"), 1007, text="a close frame tells the fault", source=RFC + "7.1.7", level="should"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "code"), FAULTS)
def test_fault_is_told(target: Target, data: bytes, code: int) -> None:
    with WebSocket(target) as socket:
        socket.send(data)
        assert socket.closed().code == code


CODES_GOOD = (1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 3000, 3999, 4000, 4999)


@pytest.mark.parametrize(
    "code",
    [
        row(
            str(code),
            code,
            text="a close frame is answered by one, typically with its code",
            source=RFC + "5.5.1 and 7.4",
        )
        for code in CODES_GOOD
    ],
)
def test_close_code(target: Target, code: int) -> None:
    """Then the server closes the TCP connection."""
    with WebSocket(target) as socket:
        socket.send(frame(CLOSE, close_payload(code)))
        assert socket.closed().code in {code, 1000, 1005}
        assert socket.ended(), "the server did not close the TCP connection (RFC 6455 7.1.1)"


CODES_BAD = (0, 1, 999, 1004, 1005, 1006, 1015, 1016, 1100, 2000, 2999, 5000, 65535)


@pytest.mark.parametrize(
    "code",
    [
        row(
            str(code),
            code,
            text="a code that may not be sent is a protocol error",
            source=RFC + "7.4.1 and 7.4.2, C10",
            level="must" if code in (1005, 1006, 1015) else "should",
        )
        for code in CODES_BAD
    ],
)
def test_close_code_refused(target: Target, code: int) -> None:
    fails(target, frame(CLOSE, close_payload(code)), 1002)


@rule("a close frame without a payload is answered by a close", RFC + "5.5.1")
def test_close_without_code(target: Target) -> None:
    with WebSocket(target) as socket:
        socket.send(frame(CLOSE))
        assert socket.closed().code in {1000, 1005}
        assert socket.ended()


@rule("a close frame with a payload of one byte is malformed", RFC + "5.5.1, C10")
def test_close_of_one_byte(target: Target) -> None:
    fails(target, frame(CLOSE, b"\x03"), 1002)


REASONS = [
    row("empty", b"", text="a reason may be empty", source=RFC + "5.5.1"),
    row("text", b"going home", text="a reason is text", source=RFC + "5.5.1"),
    row("123 bytes", b"r" * 123, text="a reason has at most 123 bytes", source=RFC + "5.5"),
    row("UTF-8", "grüße 🙂".encode(), text="a reason is UTF-8", source=RFC + "5.5.1"),
]


@pytest.mark.parametrize("reason", REASONS)
def test_close_reason(target: Target, reason: bytes) -> None:
    with WebSocket(target) as socket:
        socket.send(frame(CLOSE, close_payload(1000, reason)))
        assert socket.closed().code in {1000, 1005}
        assert socket.ended()


@rule("a reason that is not UTF-8 is a fault", RFC + "5.5.1, C10")
@pytest.mark.parametrize("reason", [b"\xff", b"ok\xed\xa0\x80", b"\xe4\xb8"], ids=["FF", "surrogate", "cut"])
def test_close_reason_refused(target: Target, reason: bytes) -> None:
    fails(target, frame(CLOSE, close_payload(1000, reason)), 1002, 1007)


@rule("nothing behind the client's close frame is answered", RFC + "5.5.1")
@pytest.mark.parametrize(
    "behind",
    [frame(PING, b"behind"), text("behind"), frame(3, b"x"), frame(CLOSE)],
    ids=["ping", "text", "fault", "close"],
)
def test_nothing_behind_a_close(target: Target, behind: bytes) -> None:
    with WebSocket(target) as socket:
        socket.send(frame(CLOSE, close_payload(1000)) + behind)
        found = socket.receive()
        assert isinstance(found, Closed) and found.code in {1000, 1005}, found
        assert socket.ended() and socket.pongs == []


@rule("a close within a fragmented message ends the connection, and the message is dropped", RFC + "5.4", "should")
def test_close_within_a_message(target: Target) -> None:
    with WebSocket(target) as socket:
        socket.send(frame(TEXT, b"never", fin=False), frame(CLOSE, close_payload(1000)), frame(CONTINUATION, b"ended"))
        found = socket.receive()
        assert isinstance(found, Closed) and found.code in {1000, 1005}, found


@rule("a message before the close is answered before the close", RFC + "5.5.1")
def test_message_before_a_close(echo: Target) -> None:
    with WebSocket(echo) as socket:
        socket.send(text("last words"), frame(CLOSE, close_payload(1000)))
        assert socket.receive() == Frame(TEXT, b"last words")
        assert socket.closed().code in {1000, 1005}


@rule("a client that closes the TCP connection without a close frame is let go", RFC + "7.1.4")
def test_fin_without_close(target: Target) -> None:
    with WebSocket(target) as socket:
        socket.end_sending()
        assert socket.closed().code in {DROPPED, 1000, 1001, 1005, 1006, 1011}
        assert socket.ended()
