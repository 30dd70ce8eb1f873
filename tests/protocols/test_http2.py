"""protocols.http2: streams in HTTP/1.1's vocabulary, with h2's own client as the other side; DATA frames that are
h2's to the byte; no event, no memory and no state that a client could not have by right."""

from __future__ import annotations

import random
from typing import Any

import h2.events
import pytest
from conformance_kit import http2_wire as wire
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hpack import Encoder
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.http1 import Body, BodyEnd, Refusal, Request
from protocols.http2 import (
    CONNECTION_WINDOW_BYTES,
    FRAMES_PER_TURN,
    RESETS_REMEMBERED,
    STREAM_WINDOW_BYTES,
    STREAMS_MAX,
    ConnectionClosed,
    Event,
    GoAway,
    Http2,
    OnStream,
    PingAnswered,
    StreamReset,
    WindowOpened,
)
from protocols.http2_guard import (
    CONTROL_BURST,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES_MAX,
    PREFACE,
    RESETS_BURST,
    Code,
    Kind,
)

MAX_HEADER = 4096
FIELDS = [(":method", "POST"), (":scheme", "http"), (":authority", "localhost"), (":path", "/echo")]


class Pair:
    """Our server's side, and a client on h2 that may break every rule that h2 lets it break."""

    def __init__(self, *, window: int = 65_535) -> None:
        self.server = Http2(max_header=MAX_HEADER)
        config = H2Configuration(
            client_side=True,
            header_encoding="utf-8",
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
        )
        self.client = H2Connection(config)
        self.client.initiate_connection()
        self.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.seen: list[h2.events.Event] = []
        self.now = 0.0
        self.exchange()

    def exchange(self) -> list[Event]:
        """Let both sides speak until they are silent; the server's events."""
        events: list[Event] = []
        while out := self.client.data_to_send():
            events += self.feed(out)
            self.seen += self.client.receive_data(self.server.take_outgoing())
        self.seen += self.client.receive_data(self.server.take_outgoing())
        return events

    def feed(self, data: bytes) -> list[Event]:
        """Bytes to the server; its events."""
        self.server.feed(data)
        events = self.server.receive(self.now)
        while self.server.behind:
            events += self.server.receive(self.now)
        return events

    def ask(self, fields: list[tuple[str, str]] = FIELDS, *, end: bool = True) -> int:
        """Begin a request; its stream."""
        stream = self.client.get_next_available_stream_id()
        self.client.send_headers(stream, fields, end_stream=end)
        return stream

    def take(self, kind: type[Any]) -> list[Any]:
        """What the client saw of one kind, since it was last asked."""
        found = [event for event in self.seen if isinstance(event, kind)]
        self.seen = [event for event in self.seen if not isinstance(event, kind)]
        return found


def raw() -> Http2:
    """A server's side whose client has sent its opening."""
    server = Http2(max_header=MAX_HEADER)
    assert receive(server, PREFACE + wire.settings()) == []
    server.take_outgoing()
    return server


def receive(server: Http2, *frames: bytes, now: float = 0.0) -> list[Event]:
    server.feed(b"".join(frames))
    events = server.receive(now)
    while server.behind:
        events += server.receive(now)
    return events


def head(stream: int, *, end: bool = True, fields: list[tuple[str, str]] = FIELDS) -> bytes:
    """HEADERS from an encoder without a memory."""
    block = b"".join(Encoder().encode([wire_field], huffman=False) for wire_field in fields)
    return wire.frame(Kind.HEADERS, END_HEADERS | (END_STREAM if end else 0), stream, block)


def frames(data: bytes) -> list[wire.Seen]:
    """Bytes cut into frames."""
    found = []
    while data:
        size = int.from_bytes(data[:3], "big")
        found.append(wire.Seen(data[3], data[4], int.from_bytes(data[5:9], "big"), data[9 : 9 + size]))
        data = data[9 + size :]
    return found


class TestRequests:
    def test_a_request_without_a_body(self) -> None:
        pair = Pair()
        stream = pair.ask()
        first, last = pair.exchange()
        assert isinstance(first, OnStream) and isinstance(first.event, Request)
        assert (first.stream, first.event.method, first.event.host) == (stream, "POST", "localhost")
        assert last == OnStream(stream, BodyEnd())

    def test_a_body_in_pieces_with_padding_and_trailers(self) -> None:
        pair = Pair()
        stream = pair.ask([*FIELDS, ("content-length", "6")], end=False)
        pair.client.send_data(stream, b"abc", pad_length=20)
        pair.client.send_data(stream, b"def")
        pair.client.send_headers(stream, [("x-checksum", "1")], end_stream=True)
        events = [event.event for event in pair.exchange()[1:] if isinstance(event, OnStream)]
        assert events == [Body(b"abc"), Body(b"def"), BodyEnd()]

    def test_cookies_are_joined(self) -> None:
        """RFC 9113 8.2.3."""
        pair = Pair()
        pair.ask([*FIELDS, ("cookie", "a=1"), ("x-a", "1"), ("cookie", "b=2")])
        event = pair.exchange()[0]
        assert isinstance(event, OnStream) and isinstance(event.event, Request)
        assert event.event.header(b"cookie") == b"a=1; b=2"

    def test_what_is_not_served_is_refused_on_its_stream(self) -> None:
        pair = Pair()
        stream = pair.ask([*FIELDS, ("x-a", "b" * MAX_HEADER)])
        event = pair.exchange()[0]
        assert isinstance(event, OnStream) and isinstance(event.event, Refusal)
        assert (event.stream, event.event.status) == (stream, 431)

    def test_a_malformed_one_ends_its_stream_alone(self) -> None:
        pair = Pair()
        good, bad = pair.ask(), pair.ask([*FIELDS, ("X-Upper", "1")])
        assert StreamReset(bad, Code.PROTOCOL_ERROR) in pair.exchange()
        assert [event.stream_id for event in pair.take(h2.events.StreamReset)] == [bad]
        pair.server.head(good, 200, [], end=True)
        pair.exchange()
        assert [event.stream_id for event in pair.take(h2.events.ResponseReceived)] == [good]

    @pytest.mark.parametrize("size", [0, 4, 6])
    def test_a_body_of_another_length(self, size: int) -> None:
        """RFC 9113 8.1.1; the connection's window gets back what it took."""
        pair = Pair()
        stream = pair.ask([*FIELDS, ("content-length", "5")], end=False)
        pair.client.send_data(stream, bytes(size), end_stream=True)
        assert pair.exchange()[-1] == StreamReset(stream, Code.PROTOCOL_ERROR)
        assert pair.client.outbound_flow_control_window == CONNECTION_WINDOW_BYTES

    def test_what_follows_our_reset_is_dropped_without_another(self) -> None:
        pair = Pair()
        stream = pair.ask(end=False)
        pair.exchange()
        pair.server.reset(stream, Code.CANCEL)
        for _ in range(4):
            pair.client.send_data(stream, bytes(10_000))
        assert pair.feed(pair.client.data_to_send()) == []
        sent = frames(pair.server.take_outgoing())
        assert [f.kind for f in sent] == [Kind.RST_STREAM] + [Kind.WINDOW_UPDATE] * 4

    def test_informational_answers(self) -> None:
        pair = Pair()
        stream = pair.ask([*FIELDS, ("expect", "100-continue")], end=False)
        pair.exchange()
        pair.server.head(stream, 100, [])
        assert pair.server.room(stream) == 0
        pair.exchange()
        assert len(pair.take(h2.events.InformationalResponseReceived)) == 1


class TestAnswers:
    def test_head_data_end(self) -> None:
        pair = Pair()
        stream = pair.ask()
        pair.exchange()
        pair.server.head(stream, 200, [(b"Content-Type", b"text/plain"), (b"Connection", b"close")])
        out = pair.server.take_outgoing() + pair.server.data(stream, b"hello")
        pair.server.end(stream)
        pair.seen += pair.client.receive_data(out + pair.server.take_outgoing())
        (response,) = pair.take(h2.events.ResponseReceived)
        assert [tuple(field) for field in response.headers] == [(":status", "200"), ("content-type", "text/plain")]
        assert [event.data for event in pair.take(h2.events.DataReceived) if event.data] == [b"hello"]
        assert len(pair.take(h2.events.StreamEnded)) == 1

    def test_an_early_answer_lets_the_request_come_to_its_end(self) -> None:
        """Its bytes are dropped, and their windows are given back to the connection only."""
        pair = Pair()
        stream = pair.ask([*FIELDS, ("content-length", "16010")], end=False)
        pair.exchange()
        pair.server.head(stream, 413, [], end=True)
        assert pair.server.open(stream) and pair.server.room(stream) == 0
        pair.client.send_data(stream, bytes(16_000))
        pair.client.send_data(stream, bytes(10), end_stream=True)
        assert pair.exchange() == [OnStream(stream, BodyEnd())]
        assert not pair.server.open(stream)
        assert pair.take(h2.events.StreamReset) == []

    def test_a_body_that_its_client_gives_up_behind_the_answer(self) -> None:
        pair = Pair()
        stream = pair.ask([*FIELDS, ("content-length", "99999")], end=False)
        pair.exchange()
        pair.server.head(stream, 413, [], end=True)
        pair.client.send_data(stream, bytes(10), end_stream=True)
        assert pair.exchange() == [StreamReset(stream, Code.NO_ERROR)]
        assert not pair.server.closed

    @pytest.mark.parametrize("by_client", [False, True])
    def test_or_be_reset_without_blame(self, by_client: bool) -> None:
        """RFC 9113 8.1."""
        pair = Pair()
        stream = pair.ask(end=False)
        pair.exchange()
        pair.server.head(stream, 413, [], end=True)
        if by_client:
            pair.client.reset_stream(stream)
            assert pair.exchange() == [StreamReset(stream, Code.NO_ERROR)]
        else:
            pair.server.reset(stream, Code.NO_ERROR)
            pair.exchange()
            assert [event.error_code for event in pair.take(h2.events.StreamReset)] == [ErrorCodes.NO_ERROR]
        assert not pair.server.open(stream)

    @pytest.mark.parametrize("value", [b"a\r\nb", b"a\0", b" a"])
    def test_a_value_that_can_not_be_sent(self, value: bytes) -> None:
        pair = Pair()
        stream = pair.ask()
        pair.exchange()
        with pytest.raises(ValueError):
            pair.server.head(stream, 200, [(b"x", value)])

    def test_what_names_one_answer_is_never_indexed(self) -> None:
        """RFC 7541 7.1.3: neither guessed by compression, nor kept in the table."""
        pair = Pair()
        stream = pair.ask()
        pair.exchange()
        pair.server.head(stream, 200, [(b"X-Stream-Id", b"secret"), (b"X-Other", b"1")], end=True)
        pair.exchange()
        (response,) = pair.take(h2.events.ResponseReceived)
        indexable = {field[0]: field.indexable for field in response.headers}
        assert indexable == {":status": True, "x-stream-id": False, "x-other": True}

    def test_nothing_can_be_sent_on_a_stream_that_is_over(self) -> None:
        pair = Pair()
        stream = pair.ask()
        pair.exchange()
        pair.server.reset(stream, Code.CANCEL)
        pair.server.reset(stream, Code.CANCEL)
        assert pair.server.room(stream) == 0
        with pytest.raises(KeyError):
            pair.server.head(stream, 200, [])
        with pytest.raises(ValueError):
            pair.server.data(stream, b"x")


class TestDataFrames:
    """DESIGN section 6: written by hand, and h2's to the byte."""

    @settings(deadline=None, max_examples=60)
    @given(
        sizes=st.lists(st.integers(1, FRAME_BYTES_MAX), min_size=1, max_size=12),
        windows=st.lists(st.integers(1, 100_000), min_size=1, max_size=6),
        window=st.integers(0, 200_000),
        seed=st.integers(0, 9),
    )
    def test_bytes_and_windows_are_those_of_h2(
        self, sizes: list[int], windows: list[int], window: int, seed: int
    ) -> None:
        """The same steps on our server and on h2's, each with its own client."""
        ours = raw()
        theirs = H2Connection(H2Configuration(client_side=False))
        theirs.initiate_connection()
        opening = wire.settings((SettingCodes.INITIAL_WINDOW_SIZE, window)) + head(1) + head(3)
        receive(ours, opening)
        theirs.receive_data(PREFACE + wire.settings() + opening)
        for stream in (1, 3):
            ours.head(stream, 200, [])
            theirs.send_headers(stream, [(":status", "200")])
        ours.take_outgoing(), theirs.data_to_send()
        chance = random.Random(seed)
        for size in sizes:
            stream = chance.choice((1, 3))
            room = ours.room(stream)
            assert room == max(0, min(theirs.local_flow_control_window(stream), FRAME_BYTES_MAX))
            if room:
                piece = chance.randbytes(min(size, room))
                theirs.send_data(stream, piece)
                assert ours.data(stream, memoryview(piece)) == theirs.data_to_send()
            else:
                update = wire.window_update(chance.choice((0, 1, 3)), windows[size % len(windows)])
                receive(ours, update)
                theirs.receive_data(update)
            assert ours.window == theirs.outbound_flow_control_window
        for stream in (1, 3):
            ours.end(stream)
            theirs.end_stream(stream)
        assert ours.take_outgoing() == theirs.data_to_send()

    @pytest.mark.parametrize("size", [0, FRAME_BYTES_MAX + 1])
    def test_only_what_there_is_room_for(self, size: int) -> None:
        pair = Pair(window=1 << 20)
        stream = pair.ask()
        pair.exchange()
        pair.server.head(stream, 200, [])
        with pytest.raises(ValueError):
            pair.server.data(stream, bytes(size))

    def test_what_does_not_fit_takes_no_window(self) -> None:
        server = raw()
        receive(server, wire.settings((SettingCodes.INITIAL_WINDOW_SIZE, 10)), head(1))
        server.head(1, 200, [])
        before = server.window
        assert (server.fit(1, bytes(11)), server.fit(1, b""), server.fit(3, b"x")) == (b"", b"", b"")
        assert (server.room(1), server.window) == (10, before)
        assert server.fit(1, bytes(10)) == wire.frame(Kind.DATA, 0, 1, bytes(10))
        assert (server.room(1), server.window) == (0, before - 10)


class TestWindows:
    def answering(self, *, window: int) -> tuple[Http2, int]:
        server = raw()
        receive(server, wire.settings((SettingCodes.INITIAL_WINDOW_SIZE, window)), head(1), head(3))
        for stream in (1, 3):
            server.head(stream, 200, [])
        server.take_outgoing()
        return server, 1

    def test_a_closed_window_is_the_stream_s_own(self) -> None:
        server, stream = self.answering(window=10)
        server.data(stream, bytes(10))
        assert (server.room(stream), server.room(3)) == (0, 10)
        assert receive(server, wire.window_update(3, 5)) == []
        assert receive(server, wire.window_update(stream, 5)) == [WindowOpened(stream)]
        assert server.room(stream) == 5
        assert receive(server, wire.window_update(stream, 5)) == []

    def test_the_connection_s_is_everybody_s(self) -> None:
        server, stream = self.answering(window=1 << 20)
        while room := server.room(stream):
            server.data(stream, bytes(room))
        assert server.room(3) == server.window == 0
        assert receive(server, wire.window_update(0, 7)) == [WindowOpened(0)]
        assert server.room(3) == 7

    def test_one_below_zero_opens_above_zero(self) -> None:
        """RFC 9113 6.9.2."""
        server, stream = self.answering(window=10)
        server.data(stream, bytes(10))
        assert receive(server, wire.settings((SettingCodes.INITIAL_WINDOW_SIZE, 4))) == [WindowOpened(0)]
        assert server.room(stream) == 0
        assert receive(server, wire.window_update(stream, 6)) == []
        assert receive(server, wire.window_update(stream, 1)) == [WindowOpened(stream)]
        assert server.room(stream) == 1

    def test_an_overflow_ends_the_stream(self) -> None:
        server, stream = self.answering(window=10)
        assert receive(server, wire.window_update(stream, (1 << 31) - 1)) == [
            StreamReset(stream, Code.FLOW_CONTROL_ERROR)
        ]

    def test_a_client_that_sends_more_than_its_window(self) -> None:
        server = raw()
        events = receive(server, head(1, end=False), *[wire.data(1, bytes(FRAME_BYTES_MAX))] * 5)
        assert isinstance(events[-1], ConnectionClosed) and events[-1].code == Code.FLOW_CONTROL_ERROR

    def test_what_is_acknowledged_may_be_sent_again(self) -> None:
        server = raw()
        receive(server, head(1, end=False))
        total = 0
        for _ in range(3):
            events = receive(server, *[wire.data(1, bytes(FRAME_BYTES_MAX))] * 3)
            total += sum(len(e.event.data) for e in events if isinstance(e, OnStream) and isinstance(e.event, Body))
            server.acknowledge(1)
        assert total == 9 * FRAME_BYTES_MAX > 2 * STREAM_WINDOW_BYTES

    def test_a_body_that_is_cut_off_gives_the_connection_its_window_back(self) -> None:
        pair = Pair()
        for _ in range(CONNECTION_WINDOW_BYTES // 60_000 + 5):
            stream = pair.ask(end=False)
            for _ in range(4):
                pair.client.send_data(stream, bytes(15_000))
            pair.client.reset_stream(stream)
            pair.now += 1.0
            pair.exchange()
        assert not pair.server.closed
        assert pair.client.outbound_flow_control_window > CONNECTION_WINDOW_BYTES // 3


class TestEnd:
    def test_going_away_and_served_all_the_same(self) -> None:
        pair = Pair()
        stream = pair.ask()
        pair.exchange()
        pair.server.go_away()
        pair.server.ping()
        seen = frames(pair.server.take_outgoing())
        assert [f.kind for f in seen] == [Kind.GOAWAY, Kind.PING]
        assert seen[0].payload == b"\x7f\xff\xff\xff" + bytes(4)
        late = pair.ask()
        events = pair.feed(pair.client.data_to_send())
        assert [event.stream for event in events if isinstance(event, OnStream)] == [late, late]
        for number in (stream, late):
            pair.server.head(number, 200, [], end=True)
        assert len(frames(pair.server.take_outgoing())) == 2

    def test_the_answer_to_our_ping(self) -> None:
        pair = Pair()
        pair.server.ping()
        pair.seen += pair.client.receive_data(pair.server.take_outgoing())
        assert pair.exchange() == [PingAnswered()]

    def test_the_last_goaway_names_the_last_stream(self) -> None:
        server = raw()
        receive(server, head(1), head(7))
        server.close(Code.NO_ERROR, "goodbye é")
        server.close(Code.INTERNAL_ERROR)
        (seen,) = [f for f in frames(server.take_outgoing()) if f.kind == Kind.GOAWAY]
        assert seen.payload == b"\0\0\0\x07" + bytes(4) + b"goodbye ?"
        assert receive(server, head(9)) == []

    def test_a_client_that_leaves_gets_its_answers(self) -> None:
        server = raw()
        events = receive(server, head(1), wire.frame(Kind.GOAWAY, 0, 0, bytes(8)))
        assert events[-1] == GoAway()
        server.head(1, 200, [])
        assert server.room(1) == FRAME_BYTES_MAX

    def test_a_client_that_gives_up(self) -> None:
        server = raw()
        events = receive(server, head(1), wire.frame(Kind.GOAWAY, 0, 0, bytes(4) + b"\0\0\0\x02"))
        assert isinstance(events[-1], ConnectionClosed) and events[-1].code == 2
        assert server.closed and server.room(1) == 0


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
