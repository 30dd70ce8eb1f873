"""One WebSocket connection, with wsproto's client as the peer and wsproto's server as the reference for frames."""

from __future__ import annotations

import base64
import itertools
import struct
import tracemalloc
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wsproto import ConnectionType, WSConnection
from wsproto import events as ws
from wsproto.connection import Connection
from wsproto.extensions import PerMessageDeflate

from protocols.http1 import Http1, Request
from protocols.websocket import Binary, Closed, Pong, Text, WebSocket, WsEvent, accept_key

KEY = base64.b64encode(b"0123456789abcdef")
MASK = b"\x01\x02\x03\x04"


def upgrade(*fields: bytes, key: bytes | None = KEY, version: bytes | None = b"13") -> Request:
    lines = [b"GET /v1/ws HTTP/1.1", b"Host: a", b"Connection: Upgrade", b"Upgrade: websocket", *fields]
    lines += [b"Sec-WebSocket-Key: " + key] if key is not None else []
    lines += [b"Sec-WebSocket-Version: " + version] if version is not None else []
    request = Http1(max_header=4096).receive(b"\r\n".join(lines) + b"\r\n\r\n")[0]
    assert isinstance(request, Request)
    return request


def connect(*fields: bytes, max_message: int = 1 << 20) -> WebSocket:
    socket = WebSocket(upgrade(*fields), max_message=max_message)
    assert socket.check() is None
    socket.accept()
    return socket


def frame(first: int, payload: bytes = b"") -> bytes:
    """A client's frame; `first` holds FIN, the reserved bits and the opcode."""
    length = len(payload)
    if length < 126:
        head = bytes((first, 0x80 | length))
    elif length < 1 << 16:
        head = struct.pack("!BBH", first, 0x80 | 126, length)
    else:
        head = struct.pack("!BBQ", first, 0x80 | 127, length)
    return head + MASK + bytes(byte ^ MASK[index % 4] for index, byte in enumerate(payload))


TEXT, BINARY, CLOSE, PING, PONG = 0x81, 0x82, 0x88, 0x89, 0x8A
TEXT_BEGINS, BINARY_BEGINS, GOES_ON, ENDS = 0x01, 0x02, 0x00, 0x80


def close_frame(code: int, reason: bytes = b"") -> bytes:
    return bytes((0x88, 2 + len(reason))) + code.to_bytes(2, "big") + reason


def ends_with(socket: WebSocket, data: bytes, code: int) -> list[WsEvent]:
    """`data` ends the connection with `code`, which the peer is told; the events before that."""
    events = socket.receive(data)
    assert isinstance(events[-1], Closed)
    assert events[-1].code == code
    assert socket.closed
    reply = socket.take_outgoing()
    assert reply == (b"\x88\x00" if code == 1005 else close_frame(code, reply[4:]))
    assert socket.receive(data) == [] and socket.take_outgoing() == b""
    assert socket.text(b"x") == socket.ping() == socket.close(1000) == b""
    return events[:-1]


# The handshake


def test_accept_key() -> None:
    """RFC 6455 1.3."""
    assert accept_key(b"dGhlIHNhbXBsZSBub25jZQ==") == b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


def test_the_101_response() -> None:
    assert WebSocket(upgrade(), max_message=10).accept(headers=[(b"X-Request-Id", b"1")]) == (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + accept_key(KEY) + b"\r\nX-Request-Id: 1\r\n\r\n"
    )


@pytest.mark.parametrize(
    "key", [None, b"", b"abc", b"a" * 24, base64.b64encode(b"x" * 15), KEY[:-1], KEY + b"\r\nSec-WebSocket-Key: " + KEY]
)
def test_c07_bad_key(key: bytes | None) -> None:
    """Case C07: a plain HTTP refusal, no 101."""
    refusal = WebSocket(upgrade(key=key), max_message=10).check()
    assert refusal
    assert refusal.status == 400


@pytest.mark.parametrize("version", [None, b"", b"12", b"13, 8", b"013", b"13\r\nSec-WebSocket-Version: 8"])
def test_wrong_version(version: bytes | None) -> None:
    """RFC 6455 4.4: 426 names the version that is spoken."""
    refusal = WebSocket(upgrade(version=version), max_message=10).check()
    assert refusal
    assert refusal.status == 426
    assert (b"Sec-WebSocket-Version", b"13") in refusal.headers
    assert (b"Upgrade", b"websocket") in refusal.headers


def test_only_upgrade_requests_are_accepted() -> None:
    request = Http1(max_header=4096).receive(b"POST / HTTP/1.1\r\nHost: a\r\n\r\n")[0]
    assert isinstance(request, Request)
    socket = WebSocket(request, max_message=10)
    refusal = socket.check()
    assert refusal
    assert refusal.status == 400
    with pytest.raises(RuntimeError):
        socket.accept()


def test_c08_subprotocols() -> None:
    """Case C08: one value of the offer, or none; nothing that wasn't offered."""
    lines = (b"Sec-WebSocket-Protocol: chat, , b\xe9d", b"Sec-WebSocket-Protocol: sluice")
    socket = WebSocket(upgrade(*lines), max_message=10)
    assert socket.offered_subprotocols == ("chat", "sluice")
    with pytest.raises(ValueError):
        socket.accept(subprotocol="other")
    data = socket.accept(subprotocol="sluice")
    assert data.count(b"Sec-WebSocket-Protocol") == data.count(b"\r\nSec-WebSocket-Protocol: sluice\r\n") == 1
    assert b"Sec-WebSocket-Protocol" not in WebSocket(upgrade(*lines), max_message=10).accept()
    assert WebSocket(upgrade(), max_message=10).offered_subprotocols == ()


@pytest.mark.parametrize("header", [(b"X", b"a\r\nb"), (b"X", b"\x00"), (b"X y", b"1"), (b"", b"1")])
def test_header_injection(header: tuple[bytes, bytes]) -> None:
    with pytest.raises(ValueError):
        WebSocket(upgrade(), max_message=10).accept(headers=[header])


def test_calls_before_the_handshake() -> None:
    socket = WebSocket(upgrade(), max_message=10)
    for call in (
        lambda: socket.text(b""),
        lambda: socket.ping(),
        lambda: socket.close(1000),
        lambda: socket.receive(b""),
    ):
        with pytest.raises(RuntimeError):
            call()
    socket.accept()
    with pytest.raises(RuntimeError):
        socket.accept()


# Messages


def test_messages() -> None:
    socket = connect()
    data = frame(TEXT, "é".encode()) + frame(BINARY, b"\xff") + frame(TEXT) + frame(BINARY)
    assert socket.receive(data) == [Text("é"), Binary(b"\xff"), Text(""), Binary(b"")]


def test_fragments_are_joined_with_control_frames_between() -> None:
    """RFC 6455 5.4, 5.5."""
    socket = connect()
    data = frame(TEXT_BEGINS, b"a") + frame(PING, b"p") + frame(GOES_ON) + frame(PONG, b"q") + frame(ENDS, b"b")
    assert socket.receive(data) == [Pong(b"q"), Text("ab")]
    assert socket.text(b"x") == b"\x8a\x01p\x81\x01x", "the pong leaves before what is sent behind it"
    assert socket.take_outgoing() == b""
    assert socket.receive(frame(BINARY_BEGINS) + frame(GOES_ON) + frame(ENDS)) == [Binary(b"")]


def test_every_ping_is_answered() -> None:
    socket = connect()
    assert socket.receive(frame(PING) + frame(PING, b"x" * 125)) == []
    assert socket.take_outgoing() == b"\x8a\x00\x8a\x7d" + b"x" * 125


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x81\x01a", id="unmasked"),
        pytest.param(frame(0x83), id="reserved opcode"),
        pytest.param(frame(0x8B), id="reserved control opcode"),
        pytest.param(frame(0xC1, b"a"), id="RSV1 without extension"),
        pytest.param(frame(0xA1), id="RSV2"),
        pytest.param(frame(0x91), id="RSV3"),
        pytest.param(frame(0xC9), id="RSV1 on a ping"),
        pytest.param(frame(0x09), id="fragmented ping"),
        pytest.param(frame(PING, b"x" * 126), id="long ping"),
        pytest.param(frame(ENDS, b"a"), id="continuation of nothing"),
        pytest.param(frame(TEXT_BEGINS) + frame(TEXT), id="message in a message"),
        pytest.param(b"\x82\xfe\x00\x7d" + MASK, id="length not minimal, 16 bits"),
        pytest.param(b"\x82\xff" + (65535).to_bytes(8, "big") + MASK, id="length not minimal, 64 bits"),
        pytest.param(frame(CLOSE, b"\x03"), id="C10: close payload of one byte"),
        pytest.param(frame(CLOSE, b"\x03\xed"), id="C10: close code 1005"),
        pytest.param(frame(CLOSE, b"\x03\xee"), id="close code 1006"),
        pytest.param(frame(CLOSE, b"\x03\xe7"), id="C10: close code 999"),
        pytest.param(frame(CLOSE, b"\x03\xec"), id="close code 1004"),
        pytest.param(frame(CLOSE, b"\x0b\xb7"), id="close code 2999"),
        pytest.param(frame(CLOSE, b"\x13\x88"), id="close code 5000"),
    ],
)
def test_protocol_errors(data: bytes) -> None:
    """RFC 6455 5.1, 5.2, 5.4, 5.5, 7.4; case C10. What came whole before the fault is still told."""
    assert ends_with(connect(), frame(TEXT, b"ok") + data, 1002) == [Text("ok")]


@pytest.mark.parametrize(
    "extensions", [(), (b"Sec-WebSocket-Extensions: permessage-deflate",)], ids=["plain", "deflate"]
)
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (frame(ENDS, b"a"), "a continuation of no message"),
        (frame(TEXT_BEGINS) + frame(TEXT), "a message in the middle of another"),
        (frame(TEXT, b"x" * 1001), "message too big"),
        (frame(TEXT, b"\xff"), "invalid UTF-8 or compressed data"),
        (frame(0xA1), "Reserved bit set unexpectedly"),
    ],
)
def test_a_close_says_what_was_wrong(data: bytes, reason: str, extensions: tuple[bytes, ...]) -> None:
    """In words that are true whether or not an extension was agreed on."""
    (closed,) = connect(*extensions, max_message=1000).receive(data)
    assert isinstance(closed, Closed)
    assert closed.reason == reason


@pytest.mark.parametrize(
    "text",
    [
        b"\xff",
        b"\xc0\x80",
        b"\xed\xa0\x80",
        b"\xed\xb0\x80",
        b"\xf4\x90\x80\x80",
        b"a\x80",
        b"\xe2\x82",
        b"\xf8\x88\x80\x80\x80",
    ],
)
def test_c10_invalid_utf8(text: bytes) -> None:
    """Case C10: the message never gets through."""
    assert ends_with(connect(), frame(TEXT, text), 1007) == []
    assert ends_with(connect(), frame(TEXT_BEGINS, text) + frame(ENDS), 1007) == []
    assert ends_with(connect(b"Sec-WebSocket-Extensions: permessage-deflate"), frame(TEXT, text), 1007) == []
    assert connect().receive(frame(BINARY, text)) == [Binary(text)]


def test_c10_invalid_utf8_in_a_close_reason() -> None:
    ends_with(connect(), frame(CLOSE, b"\x03\xe8\xff"), 1007)


def test_c10_invalid_utf8_is_told_before_the_message_is_complete() -> None:
    """Case C10: at the first byte that can't be right, in the middle of a frame."""
    socket = connect()
    assert socket.receive(frame(TEXT, b"abc\xffdef")[:9]) == []
    ends_with(socket, frame(TEXT, b"abc\xffdef")[9:10], 1007)


def test_c10_characters_may_be_split_over_fragments() -> None:
    """Case C10; and surrogate pairs of UTF-16 are no business of UTF-8."""
    character = "\U0001f600".encode()
    for at in range(1, 4):
        data = frame(TEXT_BEGINS, character[:at]) + frame(GOES_ON) + frame(ENDS, character[at:])
        assert connect().receive(data) == [Text("\U0001f600")]


# Closing


@pytest.mark.parametrize("code", [1000, 1001, 1003, 1007, 1011, 1012, 3000, 4999])
def test_the_peers_close_is_answered(code: int) -> None:
    socket = connect()
    events = socket.receive(frame(CLOSE, code.to_bytes(2, "big") + "gé".encode()) + frame(TEXT, b"late"))
    assert events == [Closed(code, "gé")]
    assert socket.take_outgoing() == close_frame(code)


def test_close_without_a_code() -> None:
    ends_with(connect(), frame(CLOSE), 1005)


def test_messages_before_a_close_can_be_answered() -> None:
    """Both came in one piece; the answer must leave before our close frame does."""
    for fields in ((), (b"Sec-WebSocket-Extensions: permessage-deflate",)):
        socket = connect(*fields)
        events = socket.receive(frame(TEXT, b"a") + frame(PING, b"p") + frame(CLOSE, b"\x03\xe8"))
        assert events == [Text("a"), Closed(1000, "")]
        assert socket.text(b"b").startswith(b"\x8a\x01p")
        assert socket.take_outgoing() == close_frame(1000)
        assert socket.text(b"c") == b""


def test_closing_handshake_of_ours() -> None:
    """After our close frame neither side's messages count; the peer's answer ends it."""
    socket = connect()
    assert socket.close(1000, "length") == close_frame(1000, b"length")
    assert socket.close(1000) == socket.text(b"x") == socket.binary(b"x") == socket.ping() == b""
    assert socket.receive(frame(TEXT, b"late") + frame(PING)) == []
    assert not socket.closed
    assert socket.receive(frame(CLOSE, b"\x03\xe8")) == [Closed(1000, "")]
    assert socket.take_outgoing() == b""
    assert socket.closed


def test_a_fault_after_our_close_sends_nothing() -> None:
    socket = connect()
    socket.close(1001)
    assert isinstance(socket.receive(frame(0x83))[0], Closed)
    assert socket.take_outgoing() == b""


def test_pongs_leave_before_our_close() -> None:
    socket = connect()
    socket.receive(frame(PING))
    assert socket.close(1001) == b"\x8a\x00" + close_frame(1001)


@pytest.mark.parametrize("code", [0, 999, 1004, 1005, 1006, 1015, 2999, 5000])
def test_codes_that_may_not_be_sent(code: int) -> None:
    with pytest.raises(ValueError):
        connect().close(code)


def test_control_payloads_are_bounded() -> None:
    socket = connect()
    assert socket.close(1000, "é" * 100) == close_frame(1000, "é".encode() * 61)
    with pytest.raises(ValueError):
        connect().ping(b"x" * 126)


# What is sent


@given(st.lists(st.text() | st.binary(), max_size=5))
def test_frames_are_wsprotos(messages: list[str | bytes]) -> None:
    """The hand-written headers are those that wsproto would have written."""
    socket, reference = connect(), Connection(ConnectionType.SERVER)
    for message in messages:
        theirs = reference.send(ws.Message(data=message))
        assert (socket.text(message.encode()) if isinstance(message, str) else socket.binary(message)) == theirs
    assert socket.ping(b"p") == reference.send(ws.Ping(payload=b"p"))
    assert socket.close(1000, "r") == reference.send(ws.CloseConnection(code=1000, reason="r"))


@pytest.mark.parametrize("length", [0, 125, 126, 127, 65535, 65536, 65537])
def test_frame_lengths_are_wsprotos(length: int) -> None:
    reference = Connection(ConnectionType.SERVER)
    assert connect().text(b"a" * length) == reference.send(ws.TextMessage(data="a" * length))
    assert connect().binary(b"a" * length) == reference.send(ws.BytesMessage(data=b"a" * length))


# Any bytes


def talk(socket: WebSocket, data: bytes, cuts: Iterable[int]) -> tuple[list[WsEvent], bytes]:
    edges = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    events = [event for pair in itertools.pairwise(edges) for event in socket.receive(data[slice(*pair)])]
    return events, socket.take_outgoing()


def verdict(outcome: tuple[list[WsEvent], bytes]) -> tuple[list[WsEvent], bytes]:
    """1007 and 1009 taken as one: of a compressed message that is too long and invalid too, either may be found
    first."""
    events, sent = outcome
    if events and isinstance(events[-1], Closed) and events[-1].code == 1009:
        return [*events[:-1], Closed(1007, FAULT)], sent.replace(close_frame(1009, b"message too big"), b"")
    return events, sent.replace(close_frame(1007, FAULT.encode()), b"")


FAULT = "invalid UTF-8 or compressed data"
FRAMES = st.builds(
    frame,
    st.sampled_from([TEXT, BINARY, TEXT_BEGINS, BINARY_BEGINS, GOES_ON, ENDS, PING, PONG, CLOSE, 0xC1, 0x41, 0xC0]),
    st.binary(max_size=8) | st.text(max_size=4).map(str.encode) | st.sampled_from([b"\x03\xe8", b"\xca\x48\x04\x00"]),
)


@given(
    st.lists(FRAMES | st.binary(max_size=4), max_size=8).map(b"".join),
    st.lists(st.integers(0, 120)),
    st.sampled_from([(), (b"Sec-WebSocket-Extensions: permessage-deflate",)]),
)
def test_any_bytes_in_any_pieces(data: bytes, cuts: list[int], fields: tuple[bytes, ...]) -> None:
    """Only events come out, the same ones however the bytes were cut; all that is sent is well-formed."""
    whole = talk(connect(*fields, max_message=16), data, [])
    for other in (cuts, range(len(data))):
        assert verdict(talk(connect(*fields, max_message=16), data, other)) == verdict(whole)
    client = Connection(ConnectionType.CLIENT)
    client.receive_data(whole[1])
    assert all(isinstance(event, ws.Pong | ws.CloseConnection) for event in client.events())


@given(
    st.lists(st.tuples(st.text(max_size=40) | st.binary(max_size=40), st.booleans()), max_size=6),
    st.sampled_from([[], [PerMessageDeflate()], [PerMessageDeflate(client_no_context_takeover=True)]]),
    st.lists(st.integers(0, 2000)),
)
def test_wsproto_client_in_any_pieces(
    messages: list[tuple[str | bytes, bool]], extensions: list[PerMessageDeflate], cuts: list[int]
) -> None:
    """An echo through wsproto's own client, handshake included, fragmented or not, compressed or not."""
    extensions = [PerMessageDeflate(each.client_no_context_takeover) for each in extensions]
    client = WSConnection(ConnectionType.CLIENT)
    request = Http1(max_header=4096).receive(client.send(ws.Request(host="a", target="/", extensions=extensions)))[0]
    assert isinstance(request, Request)
    socket = WebSocket(request, max_message=1000)
    assert socket.check() is None
    client.receive_data(socket.accept())
    (accepted,) = client.events()
    assert isinstance(accepted, ws.AcceptConnection)
    assert bool(accepted.extensions) is bool(extensions)

    wire = b""
    for message, split in messages:
        half = len(message) // 2 if split else 0
        wire += client.send(ws.Message(data=message[:half], message_finished=False)) if split else b""
        wire += client.send(ws.Ping()) + client.send(ws.Message(data=message[half:]))
    events, pongs = talk(socket, wire, cuts)
    assert [event.data for event in events if isinstance(event, Text | Binary)] == [message for message, _ in messages]
    assert pongs == b"\x8a\x00" * len(messages)
    for event in events:
        echo = socket.text(event.data.encode()) if isinstance(event, Text) else socket.binary(event.data)
        client.receive_data(echo)
        assert [reply.data for reply in client.events()] == [event.data]


# Limits


def test_c03_the_limit_itself_is_accepted() -> None:
    """Case C03: exactly at the limit in one frame and in fragments; one byte more closes with 1009."""
    for data in (frame(TEXT, b"a" * 100), frame(TEXT_BEGINS, b"a" * 60) + frame(ENDS, b"a" * 40)):
        assert connect(max_message=100).receive(data) == [Text("a" * 100)]
    ends_with(connect(max_message=100), frame(TEXT, b"a" * 101), 1009)
    ends_with(connect(max_message=100), frame(BINARY_BEGINS, b"a" * 60) + frame(ENDS, b"a" * 41), 1009)


def test_c03_the_header_alone_is_enough() -> None:
    """Case C03: promptly, before any of the payload came."""
    ends_with(connect(max_message=100), b"\x82\xff" + (1 << 40).to_bytes(8, "big") + MASK, 1009)


def test_c03_small_continuations_cost_little() -> None:
    """Case C03: an endless run of tiny fragments ends at the limit, with memory near the limit."""
    limit = 32 * 1024
    socket = connect(max_message=limit)
    one = frame(GOES_ON, b"ab") * 1024
    socket.receive(frame(TEXT_BEGINS, b"ab"))
    tracemalloc.start()
    for _ in range(limit // 2048 - 1):
        assert socket.receive(one) == []
    assert tracemalloc.get_traced_memory()[1] < 4 * limit
    tracemalloc.stop()
    ends_with(socket, one, 1009)


def test_c03_empty_continuations_are_bounded() -> None:
    """Case C03: they add nothing to the size of the message, and can't go on for ever."""
    socket = connect()
    assert socket.receive(frame(TEXT_BEGINS) + frame(GOES_ON) * 1000) == []
    ends_with(socket, frame(GOES_ON) * 100, 1008)
    socket = connect()
    for _ in range(3):
        assert socket.receive(frame(TEXT_BEGINS) + frame(GOES_ON) * 1000 + frame(ENDS)) == [Text("")]
