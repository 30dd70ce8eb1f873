"""protocols.http2: no event, no memory and no state that a client could not have by right, whatever it sends."""

from __future__ import annotations

import pytest
from conformance_kit import http2_wire as wire
from h2.settings import SettingCodes
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.http1 import BodyEnd, Request
from protocols.http2 import (
    FRAMES_PER_TURN,
    RESETS_REMEMBERED,
    STREAMS_MAX,
    ConnectionClosed,
    Event,
    Http2,
    OnStream,
    StreamReset,
)
from protocols.http2_guard import CONTROL_BURST, END_HEADERS, PREFACE, RESETS_BURST, Code, Kind
from tests.support.http2_pair import FIELDS, MAX_HEADER, frames, head, raw, receive


class TestAttacks:
    def test_rapid_reset(self) -> None:
        """CVE-2023-44487: a request and its reset, again and again."""
        server = raw()
        pairs = [head(n) + wire.reset(n) for n in range(1, 4 * RESETS_BURST, 2)]
        events = receive(server, *pairs)
        assert isinstance(events[-1], ConnectionClosed) and events[-1].code == Code.ENHANCE_YOUR_CALM
        assert sum(isinstance(e, StreamReset) for e in events) == RESETS_BURST

    @pytest.mark.parametrize("provocation", ["window", "malformed", "zero", "half-closed"])
    def test_resets_that_the_client_makes_us_send(self, provocation: str) -> None:
        """CVE-2025-8671."""
        server = raw()
        bad = {
            "window": lambda n: head(n) + wire.window_update(n, (1 << 31) - 1),
            "malformed": lambda n: head(n, fields=FIELDS[1:]),
            "zero": lambda n: head(n) + wire.window_update(n, 0),
            "half-closed": lambda n: head(n) + wire.data(n, b"x"),
        }[provocation]
        events = receive(server, *[bad(n) for n in range(1, 4 * RESETS_BURST, 2)])
        assert isinstance(events[-1], ConnectionClosed) and events[-1].code == Code.ENHANCE_YOUR_CALM

    def test_resets_at_an_honest_pace(self) -> None:
        server = raw()
        for n in range(3 * RESETS_BURST):
            events = receive(server, head(1 + 2 * n), wire.reset(1 + 2 * n), now=n / 10)
            assert events[-1] == StreamReset(1 + 2 * n, Code.CANCEL)

    def test_more_streams_than_were_allowed(self) -> None:
        """RFC 9113 5.1.2: refused, so that the client may try again; and no work is begun."""
        server = raw()
        events = receive(server, *[head(1 + 2 * n) for n in range(STREAMS_MAX + 3)])
        begun = [e for e in events if isinstance(e, OnStream) and isinstance(e.event, Request)]
        assert len(begun) == STREAMS_MAX
        assert [f.code for f in frames(server.take_outgoing()) if f.kind == Kind.RST_STREAM] == [
            Code.REFUSED_STREAM
        ] * 3

    def test_data_and_headers_on_streams_that_are_over(self) -> None:
        for sent in (wire.data(1, b"x"), wire.window_update(1, 1), wire.reset(1)):
            server = raw()
            receive(server, head(1))
            server.head(1, 200, [], end=True)
            events = receive(server, sent * 2 * CONTROL_BURST)
            assert isinstance(events[-1], ConnectionClosed) and events[-1].code == Code.ENHANCE_YOUR_CALM

    def test_an_hpack_bomb(self) -> None:
        """A small block of references to one large field of the table."""
        server = raw()
        big = b"\x40\x01a\x7f\x81\x1d" + b"x" * 3840
        events = receive(server, wire.frame(Kind.HEADERS, END_HEADERS, 1, big))
        assert isinstance(events[-1], StreamReset)
        events = receive(server, wire.frame(Kind.HEADERS, END_HEADERS, 3, b"\xbe" * 4000))
        assert isinstance(events[-1], ConnectionClosed) and events[-1].code == Code.ENHANCE_YOUR_CALM

    def test_our_own_table_stays_small(self) -> None:
        server = raw()
        receive(server, wire.settings((SettingCodes.HEADER_TABLE_SIZE, (1 << 32) - 1)))
        for n in range(300):
            receive(server, head(1 + 2 * n))
            server.head(1 + 2 * n, 200, [(b"x-varies", b"%d" % n * 50)], end=True)
        assert server._h2.encoder.header_table_size <= 4096

    def test_what_is_remembered_is_bounded(self) -> None:
        server = raw()
        for n in range(3000):
            receive(server, head(1 + 2 * n, end=False), now=float(n))
            server.reset(1 + 2 * n, Code.CANCEL)
            server.take_outgoing()
        assert len(server._reset_by_us) == RESETS_REMEMBERED
        assert len(server._h2._closed_streams) <= 1024
        assert len(server._h2.streams) <= 2 and not server._streams

    def test_a_turn_is_bounded(self) -> None:
        server = raw()
        server.feed(head(1, end=False) + wire.data(1, b"x") * 1000)
        turns = 1
        total = len(server.receive(0.0))
        while server.behind:
            events = server.receive(0.0)
            assert len(events) <= FRAMES_PER_TURN
            total += len(events)
            turns += 1
        assert (total, turns) == (1001, -(-1001 // FRAMES_PER_TURN))


FRAMES = st.builds(
    wire.frame,
    st.sampled_from([*Kind, 0xA, 0x10, 0x42]),
    st.integers(0, 255),
    st.integers(0, 9),
    st.one_of(
        st.binary(max_size=12),
        st.just(head(1)[9:]),
        st.sampled_from([bytes(4), bytes(8), b"\0\0\0\x05", b"\x7f\xff\xff\xff", b"\0\x04\0\0\0\0", b"\x82\x86\x84"]),
    ),
)


class TestAnything:
    """`receive` never raises; what is over stays over; the pieces don't matter."""

    @settings(deadline=None, max_examples=150)
    @given(sent=st.lists(FRAMES, max_size=12), cut=st.integers(1, 40))
    def test_any_frames_in_any_pieces(self, sent: list[bytes], cut: int) -> None:
        data = wire.settings() + head(1, end=False) + b"".join(sent)
        whole, pieces = Http2(max_header=MAX_HEADER), Http2(max_header=MAX_HEADER)
        expected = receive(whole, PREFACE + data)
        seen: list[Event] = []
        for at in range(0, len(data), cut):
            seen += receive(pieces, (PREFACE if at == 0 else b"") + data[at : at + cut])
        assert seen == expected
        assert whole.take_outgoing() == pieces.take_outgoing()
        self.check(expected, whole)

    def check(self, events: list[Event], server: Http2) -> None:
        """No event behind the end of its stream, none behind the end of all."""
        over: set[int] = set()
        complete: set[int] = set()
        for number, event in enumerate(events):
            if isinstance(event, ConnectionClosed):
                assert number == len(events) - 1
            elif isinstance(event, StreamReset):
                assert event.stream not in over
                over.add(event.stream)
            elif isinstance(event, OnStream):
                assert event.stream not in over | complete
                if isinstance(event.event, BodyEnd):
                    complete.add(event.stream)
        for stream in over:
            assert server.room(stream) == 0

    @settings(deadline=None, max_examples=100)
    @given(data=st.binary(max_size=200))
    def test_any_bytes(self, data: bytes) -> None:
        for server, begin in ((Http2(max_header=MAX_HEADER), b""), (Http2(max_header=MAX_HEADER), PREFACE)):
            receive(server, begin + data)
