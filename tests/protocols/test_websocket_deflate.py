"""permessage-deflate: negotiation by RFC 7692, and inflating that never makes more than the limit."""

from __future__ import annotations

import contextlib
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wsproto import ConnectionType
from wsproto import events as ws
from wsproto.connection import Connection
from wsproto.extensions import PerMessageDeflate

from protocols.http1 import Http1, Request
from protocols.websocket import Closed, Text, WebSocket, WsEvent
from protocols.websocket_deflate import MalformedExtensions, negotiate

DEFLATE = b"permessage-deflate"
KEY = b"MDEyMzQ1Njc4OWFiY2RlZg=="


def connect(
    offer: bytes | None = DEFLATE, *, max_message: int = 1 << 20, deflate: bool = True
) -> tuple[WebSocket, bytes]:
    head = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    head += b"Sec-WebSocket-Key: " + KEY + b"\r\n" + (b"Sec-WebSocket-Extensions: %b\r\n" % offer if offer else b"")
    request = Http1(max_header=4096).receive(head + b"\r\n")[0]
    assert isinstance(request, Request)
    socket = WebSocket(request, max_message=max_message, deflate=deflate)
    assert socket.check() is None
    return socket, socket.accept()


def frame(first: int, payload: bytes) -> bytes:
    length = bytes((0x80 | len(payload),)) if len(payload) < 126 else b"\xff" + len(payload).to_bytes(8, "big")
    if 126 <= len(payload) < 1 << 16:
        length = b"\xfe" + len(payload).to_bytes(2, "big")
    return bytes((first,)) + length + b"\0\0\0\0" + payload


def squeeze(data: bytes, *, bits: int = 15) -> bytes:
    packer = zlib.compressobj(wbits=-bits)
    return (packer.compress(data) + packer.flush(zlib.Z_SYNC_FLUSH)).removesuffix(b"\0\0\xff\xff")


ACCEPTED = {
    DEFLATE: DEFLATE,
    b"permessage-deflate; client_max_window_bits": DEFLATE,
    b"permessage-deflate;client_max_window_bits=9": DEFLATE + b"; client_max_window_bits=9",
    b"permessage-deflate; client_max_window_bits=8": DEFLATE + b"; client_max_window_bits=8",
    b'permessage-deflate; client_max_window_bits="15"': DEFLATE + b"; client_max_window_bits=15",
    b"permessage-deflate; server_max_window_bits=9": DEFLATE + b"; server_max_window_bits=9",
    b"permessage-deflate ; server_max_window_bits = 15": DEFLATE + b"; server_max_window_bits=15",
    b"permessage-deflate; server_no_context_takeover": DEFLATE + b"; server_no_context_takeover",
    b"permessage-deflate; client_no_context_takeover": DEFLATE + b"; client_no_context_takeover",
    b"x-webkit-deflate-frame, permessage-deflate": DEFLATE,
    b"foo; a=b; c, , permessage-deflate,": DEFLATE,
    b"permessage-deflate; server_max_window_bits=8, permessage-deflate": DEFLATE,
    b"permessage-deflate; unknown=1, permessage-deflate; server_max_window_bits=10": DEFLATE
    + b"; server_max_window_bits=10",
    b"permessage-deflate; server_max_window_bits=12, permessage-deflate": DEFLATE + b"; server_max_window_bits=12",
}


@pytest.mark.parametrize(("offer", "answer"), ACCEPTED.items())
def test_c02_accepted_offers(offer: bytes, answer: bytes) -> None:
    """Case C02; RFC 7692 7.1: the first acceptable offer wins, and the answer holds nothing that wasn't offered."""
    socket, response = connect(offer)
    assert b"\r\nSec-WebSocket-Extensions: " + answer + b"\r\n" in response
    assert socket.receive(frame(0xC1, squeeze(b"hello"))) == [Text("hello")]


DECLINED = [
    b"foo",
    b"permessage-deflate; unknown",
    b"permessage-deflate; unknown=1",
    b"permessage-deflate; server_no_context_takeover=1",
    b"permessage-deflate; client_no_context_takeover=true",
    b"permessage-deflate; client_no_context_takeover; client_no_context_takeover",
    b"permessage-deflate; server_max_window_bits=10; server_max_window_bits=10",
    b"permessage-deflate; server_max_window_bits",
    *(
        b"permessage-deflate; server_max_window_bits=" + bits
        for bits in (b"8", b"7", b"16", b"0", b"abc", b"09", b"-9")
    ),
    *(
        b"permessage-deflate; client_max_window_bits=" + bits
        for bits in (b"7", b"16", b"0", b"abc", b"09", b"1_0", b"'9'")
    ),
]


@pytest.mark.parametrize("offer", DECLINED)
def test_c02_declined_offers(offer: bytes) -> None:
    """Case C02: 101 without the extension, never an error."""
    socket, response = connect(offer)
    assert b"Sec-WebSocket-Extensions" not in response
    events = socket.receive(frame(0xC1, squeeze(b"hello")))
    assert isinstance(events[0], Closed)
    assert events[0].code == 1002


@pytest.mark.parametrize(
    "value", [b"a b", b";", b"a;", b"a; =1", b"a; b=", b'a; b="c', b'a; b="c d"', b'a; b=""', b"a=1", b"\xe9"]
)
def test_malformed_extension_lists(value: bytes) -> None:
    """RFC 6455 9.1: what isn't of the grammar fails the handshake, as a refusal."""
    with pytest.raises(MalformedExtensions):
        negotiate([DEFLATE, value])
    head = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    head += b"Sec-WebSocket-Key: " + KEY + b"\r\nSec-WebSocket-Extensions: " + value + b"\r\n\r\n"
    request = Http1(max_header=4096).receive(head)[0]
    assert isinstance(request, Request)
    refusal = WebSocket(request, max_message=10).check()
    assert refusal
    assert refusal.status == 400


@given(
    st.lists(
        st.text(st.sampled_from('abc;=," \\\t89') | st.characters(max_codepoint=255)).map(
            lambda text: text.encode("latin-1")
        )
    )
)
def test_any_header_is_a_verdict(values: list[bytes]) -> None:
    with contextlib.suppress(MalformedExtensions):
        negotiate(values)


def test_deflate_can_be_switched_off() -> None:
    socket, response = connect(deflate=False)
    assert b"Sec-WebSocket-Extensions" not in response
    assert socket.text(b"a" * 100) == b"\x81\x64" + b"a" * 100


def test_pings_between_compressed_fragments() -> None:
    """A control frame in between must not make the rest of the message count as plain."""
    packed = squeeze(b"hello " * 50)
    socket, _ = connect()
    data = (
        frame(0x41, packed[:3])
        + frame(0x89, b"")
        + frame(0x00, packed[3:5])
        + frame(0x8A, b"")
        + frame(0x80, packed[5:])
    )
    assert socket.receive(data)[-1] == Text("hello " * 50)


def test_plain_messages_between_compressed_ones() -> None:
    """RFC 7692 6: the first frame's RSV1 decides for each message, and the context goes on."""
    packer = zlib.compressobj(wbits=-15)

    def packed(data: bytes) -> bytes:
        return frame(0xC1, (packer.compress(data) + packer.flush(zlib.Z_SYNC_FLUSH))[:-4])

    socket, _ = connect()
    data = packed(b"hello world") + frame(0x81, b"plain") + packed(b"hello world")
    assert socket.receive(data) == [Text("hello world"), Text("plain"), Text("hello world")]


def test_final_blocks() -> None:
    """RFC 7692 7.2.3.4: the standard's own example, and the messages behind it."""
    socket, _ = connect()
    once = frame(0xC1, b"\xf3\x48\xcd\xc9\xc9\x07\x00\x00")
    assert socket.receive(once * 3) == [Text("Hello")] * 3
    split = frame(0x41, b"\xf3\x48\xcd\xc9\xc9\x07\x00") + frame(0x80, b"\x00")
    assert socket.receive(split) == [Text("Hello")]


def test_fragments_in_the_wrong_place() -> None:
    """RFC 6455 5.4, told at the header: what isn't part of a message is never inflated."""
    for data in (frame(0x80, b"\x07"), frame(0x41, squeeze(b"a")) + frame(0xC1, b"\x07")):
        events = connect()[0].receive(data)
        assert last_code(events) == 1002


@pytest.mark.parametrize(
    "packed",
    [b"\xf2\x48\xcd\xc9\xc9\x07\x00", b"\xf2\x00\x11\x00\x00", b"\x00\x05\x00\xfa\xffHello\x00", b"\x00", b"\x02\x00"],
)
def test_other_forms_of_deflate(packed: bytes) -> None:
    """RFC 7692 7.2.3: the standard's examples; the second needs the first one's window."""
    socket, _ = connect()
    socket.receive(frame(0xC1, squeeze(b"Hello")))
    (event,) = socket.receive(frame(0xC1, packed))
    assert event in (Text("Hello"), Text(""))


@pytest.mark.parametrize("data", [frame(0xC1, b"\xff\xff\xff"), frame(0x41, b"\x07") + frame(0x80, b"\xff")])
def test_corrupt_data(data: bytes) -> None:
    (event,) = connect()[0].receive(data)
    assert isinstance(event, Closed)
    assert event.code == 1007


@pytest.mark.parametrize("first", [0xC0, 0xC9])
def test_rsv1_in_the_wrong_place(first: int) -> None:
    """RFC 7692 6.1: on continuations and control frames it is an error."""
    (event,) = connect()[0].receive(frame(0x41, b"") + frame(first, b""))
    assert isinstance(event, Closed)
    assert event.code == 1002


def last_code(events: list[WsEvent]) -> int:
    assert isinstance(events[-1], Closed)
    return events[-1].code


def test_c03_inflated_bytes_are_what_counts() -> None:
    """Case C03: at the limit it is accepted, one byte above it isn't."""
    assert connect(max_message=1000)[0].receive(frame(0xC1, squeeze(b"a" * 1000))) == [Text("a" * 1000)]
    assert last_code(connect(max_message=1000)[0].receive(frame(0xC1, squeeze(b"a" * 1001)))) == 1009


def test_c03_a_bomb_is_never_inflated() -> None:
    """Case C03: 64 MiB in 64 KiB; memory stays near the limit."""
    bomb = frame(0xC1, squeeze(b"\0" * (64 << 20)))
    socket, _ = connect(max_message=100_000)
    tracemalloc.start()
    assert last_code(socket.receive(bomb)) == 1009
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_c03_blocks_that_inflate_to_nothing_are_bounded() -> None:
    """Case C03: empty blocks count on the wire, final ones by their number."""
    socket, _ = connect(max_message=1000)
    assert last_code(socket.receive(frame(0x41, b"") + frame(0x00, b"\0\0\0\xff\xff" * 100) * 10)) == 1009
    socket, _ = connect()
    assert last_code(socket.receive(frame(0x41, b"\x03\0" * 100))) == 1008


@given(st.lists(st.text(max_size=200), max_size=5), st.sampled_from(list(ACCEPTED)))
def test_wsproto_inflates_what_we_deflate(messages: list[str], offer: bytes) -> None:
    socket, response = connect(offer)
    extension = PerMessageDeflate()
    terms = response.split(b"Sec-WebSocket-Extensions: ")[1].split(b"\r\n")[0].decode()
    extension.finalize(terms.replace("client_max_window_bits=8", "client_max_window_bits=9"))
    client = Connection(ConnectionType.CLIENT, [extension])
    for message in messages:
        client.receive_data(socket.text(message.encode()))
        assert [event.data for event in client.events() if isinstance(event, ws.TextMessage)] == [message]


def test_compression_pays() -> None:
    """The context goes on between messages, so that a token's message shrinks to a few bytes."""
    socket, _ = connect()
    message = b'{"type":"token","id":"a","n":%d,"text":" word"}'
    sizes = [len(socket.text(message % n)) for n in range(20)]
    assert max(sizes[1:]) < 20 < min(sizes[0], len(message))
