"""permessage-deflate in use: RFC 7692. A server that declines it is not judged."""

# ruff: noqa: E501 (a row of a table is one line)

from __future__ import annotations

import os

import pytest
from conformance_kit.frames import (
    BINARY,
    CONTINUATION,
    PING,
    TEXT,
    Closed,
    Deflate,
    Frame,
    WebSocket,
    frame,
    parameters,
)
from conformance_kit.rules import not_offered, row, rule
from conformance_kit.sockets import goes_on
from conformance_kit.target import Target

RFC = "RFC 7692 section "
COMPRESSED = 4  # RSV1, as the kit numbers reserved bits


def opened(target: Target, offer: str = "") -> tuple[WebSocket, Deflate]:
    """A WebSocket with the extension, and the codec that fits what was agreed."""
    socket = WebSocket(target, f"Sec-WebSocket-Extensions: permessage-deflate{offer}")
    chosen = socket.handshake.header("sec-websocket-extensions")
    if chosen is None:
        socket.__exit__()
        not_offered("permessage-deflate was declined")
    agreed = parameters(chosen)
    bits = agreed.get("client_max_window_bits") or "15"
    return socket, Deflate(max(9, int(bits)), int(agreed.get("server_max_window_bits") or 15))


def plain(codec: Deflate, found: Frame | Closed) -> bytes:
    """A message's payload as it was meant."""
    assert isinstance(found, Frame), found
    return codec.decompress(found.payload) if found.rsv & COMPRESSED else found.payload


MESSAGES = [
    row("empty", b"", text="an empty message can be compressed", source=RFC + "7.2.3.6"),
    row("short", b"Hello", text="the example of the standard", source=RFC + "7.2.3.1"),
    row("repeats", b"token " * 10_000, text="what compresses well", source=RFC + "7.2"),
    row("noise", os.urandom(20_000).hex().encode(), text="what hardly compresses", source=RFC + "7.2"),
    row("characters", "世界🙂".encode() * 500, text="UTF-8 is checked behind the compression", source=RFC + "6.2"),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_messages(echo: Target, message: bytes) -> None:
    socket, codec = opened(echo)
    with socket:
        socket.send(frame(TEXT, codec.compress(message), rsv=COMPRESSED))
        assert plain(codec, socket.receive()) == message


OFFERS = [
    "",
    "; client_max_window_bits",
    "; server_max_window_bits=9",
    "; client_max_window_bits=9",
    "; server_no_context_takeover",
    "; client_no_context_takeover",
    "; server_max_window_bits=15; client_max_window_bits=15",
]


@pytest.mark.parametrize(
    "offer",
    [
        row(
            offer.strip("; ") or "plain",
            offer,
            text="the agreed window and context hold over many messages",
            source=RFC + "7.1 and 7.2.3.2",
        )
        for offer in OFFERS
    ],
)
def test_context(echo: Target, offer: str) -> None:
    socket, codec = opened(echo, offer)
    agreed = parameters(socket.handshake.header("sec-websocket-extensions") or "")
    with socket:
        for number in range(20):
            message = b"message %d of the same kind, message %d " % (number, number) * 50
            bits = int(agreed.get("client_max_window_bits") or 15)
            packer = Deflate(max(9, bits)) if "client_no_context_takeover" in agreed else codec
            socket.send(frame(TEXT, packer.compress(message), rsv=COMPRESSED))
            found = socket.receive()
            unpacker = Deflate() if "server_no_context_takeover" in agreed else codec
            assert plain(unpacker, found) == message


@rule("with the extension agreed, a message may still come uncompressed", RFC + "6")
def test_uncompressed(echo: Target) -> None:
    socket, codec = opened(echo)
    with socket:
        socket.send(frame(TEXT, b"plain"), frame(TEXT, codec.compress(b"packed"), rsv=COMPRESSED), frame(BINARY, b"\0"))
        assert [plain(codec, socket.receive()) for _ in range(3)] == [b"plain", b"packed", b"\0"]


@rule("a compressed message may be fragmented, with the bit on its first frame only", RFC + "6.1")
def test_fragments(echo: Target) -> None:
    socket, codec = opened(echo)
    message = b"a fragmented and compressed message " * 20
    with socket:
        packed = codec.compress(message)
        pieces = [packed[i : i + 7] for i in range(0, len(packed), 7)]
        socket.send(frame(TEXT, pieces[0], fin=False, rsv=COMPRESSED), frame(PING, b"mid"))
        socket.send(*[frame(CONTINUATION, piece, fin=piece is pieces[-1]) for piece in pieces[1:]])
        assert plain(codec, socket.receive()) == message


FAULTS = [
    row("the bit on a control frame", frame(PING, b"x", rsv=COMPRESSED), {1002}, text="control frames are not compressed", source=RFC + "6"),
    row("the bit on a continuation", frame(TEXT, b"\xf2H", fin=False, rsv=COMPRESSED) + frame(CONTINUATION, b"x", rsv=COMPRESSED), {1002}, text="the bit is on a message's first frame only", source=RFC + "6.1"),
    row("another reserved bit", frame(TEXT, b"\xf2H", rsv=COMPRESSED | 2), {1002}, text="other reserved bits stay reserved", source="RFC 6455 section 5.2"),
    row("no deflate data", frame(TEXT, b"\xff" * 20, rsv=COMPRESSED), {1002, 1003, 1007, 1009, 1011}, text="data that can't be inflated fails the connection", source=RFC + "7.2.2"),
    row("text that isn't UTF-8", frame(TEXT, Deflate().compress(b"\xff\xfe"), rsv=COMPRESSED), {1007}, text="UTF-8 is checked behind the compression", source="RFC 6455 section 8.1"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "codes"), FAULTS)
def test_faults(target: Target, data: bytes, codes: set[int]) -> None:
    socket, _ = opened(target)
    with socket:
        socket.send(data)
        assert socket.closed().code in codes | (set() if target.settings.ours else {1005, 1006})


@rule("the bit of an extension that wasn't agreed on fails the connection", RFC + "6")
def test_not_agreed(target: Target) -> None:
    with WebSocket(target) as socket:
        socket.send(frame(TEXT, Deflate().compress(b"Hello"), rsv=COMPRESSED))
        assert socket.closed().code in ({1002} if target.settings.ours else {1002, 1005, 1006})


@rule(
    "the limit on a message holds behind the compression: a few kilobytes don't become gigabytes",
    RFC + "8, C03",
    "should",
)
@pytest.mark.parametrize("megabytes", [64, 256])
def test_bomb(target: Target, megabytes: int) -> None:
    """Zeros compress a thousandfold. That takes a while, so it is done before the server waits for anything."""
    bomb = Deflate().compress(bytes(megabytes << 20))
    socket, _ = opened(target)
    with socket:
        socket.send(frame(BINARY, bomb, rsv=COMPRESSED))
        assert socket.closed().code in {1009, 1006, 1008}
    with WebSocket(target) as other:
        goes_on(target, other)
