"""server.http2_connection and http2_stream in virtual time: deadlines to the second, turns, and what a client that
doesn't read can cost. The bytes are checked by h2's client, and by tests/http2 over real sockets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conformance_kit import http2_wire as wire

from protocols.http2 import STREAM_WINDOW_BYTES
from protocols.http2_guard import ACK, FRAME_BYTES_MAX, PREFACE, Code, Kind
from server.connection import HIGH_WATER_BYTES
from server.http2_connection import UNREAD_REPLIES_BYTES_MAX
from server.http2_stream import STREAM_LINGER_S
from tests.fuzz.transport import HIGH_WATER_DIVISOR
from tests.support.http2_pair import request
from tests.support.wire_side import BIG, DEADLINES, Side, wire_side

OPENING = PREFACE + wire.settings()
HIGH = HIGH_WATER_BYTES // HIGH_WATER_DIVISOR
MAX_BODY = 10_000  # the side's


class Http2Side:
    """A side whose client speaks HTTP/2."""

    def __init__(self, side: Side, *, window: int = 65_535) -> None:
        self.side = side
        self._bytes = b""
        side.send(PREFACE + wire.settings((4, window)))
        self.frames()

    def send(self, *frames: bytes) -> None:
        self.side.send(b"".join(frames))

    def frames(self, count: int = 1 << 30) -> list[wire.Seen]:
        """The whole frames among the next bytes that the client reads; all there are, or so many bytes."""
        self._bytes += self.side.read_all() if count == 1 << 30 else self.side.read(count)
        found = []
        while len(self._bytes) >= 9 and len(self._bytes) >= 9 + int.from_bytes(self._bytes[:3], "big"):
            size, raw = int.from_bytes(self._bytes[:3], "big"), self._bytes
            found.append(wire.Seen(raw[3], raw[4], int.from_bytes(raw[5:9], "big"), raw[9 : 9 + size]))
            self._bytes = raw[9 + size :]
        return found

    def codes(self, kind: Kind) -> list[int]:
        """Error codes of the frames of one kind that come now."""
        return [seen.code for seen in self.frames() if seen.kind == kind]

    @property
    def over(self) -> bool:
        """Whether the client can tell that the connection is over."""
        return self.side.transport.seen_eof


@pytest.fixture
def side() -> Iterator[Side]:
    with wire_side() as made:
        yield made


@pytest.fixture
def http2(side: Side) -> Http2Side:
    return Http2Side(side)


class TestOpening:
    @pytest.mark.parametrize("cut", range(1, len(OPENING)))
    def test_a_preface_in_any_two_pieces(self, side: Side, cut: int) -> None:
        side.send(OPENING[:cut])
        side.send(OPENING[cut:] + request(1))
        assert side.connection.protocol == "http2"
        assert side.program.begun == ["/"]

    @pytest.mark.parametrize("method", ["P", "PR", "PRI", "POST", "PUT", "PATCH", "PROPFIND"])
    def test_methods_that_begin_alike_are_http1(self, side: Side, method: str) -> None:
        for byte in f"{method} / HTTP/1.1\r\nHost: localhost\r\n\r\n".encode():
            side.send(bytes([byte]))
        assert side.connection.protocol == "http1"
        assert side.read().startswith(b"HTTP/1.1 200 ")

    def test_what_is_no_request_either_is_refused(self, side: Side) -> None:
        side.send(b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n")
        assert side.read().startswith(b"HTTP/1.1 400 ")

    def test_half_a_preface_has_the_head_s_deadline(self, side: Side) -> None:
        for byte in PREFACE[:20]:
            side.send(bytes([byte]))
            side.pass_time(DEADLINES.header_s / 20 - 0.01)
        assert side.transport.end == ""
        side.pass_time(1)
        assert side.transport.end == "eof"

    def test_half_a_preface_and_eof(self, side: Side) -> None:
        side.send(PREFACE[:9])
        side.transport.feed_eof()
        side.loop.rest()
        side.read_all()
        assert side.transport.end == "eof"

    def test_too_many_connections(self) -> None:
        with wire_side(connections_max=1) as side:
            transport, connection = side.connect()
            transport.feed(OPENING)
            transport.drain(1 << 20)
            assert transport.received.startswith(b"HTTP/1.1 503 ")
            assert connection.protocol == "http1"
            side.loop.advance(1000)


class TestDeadlines:
    def test_idle(self, side: Side, http2: Http2Side) -> None:
        side.pass_time(DEADLINES.idle_s - 1)
        http2.send(wire.frame(Kind.PING, 0, 0, bytes(8)))
        assert [seen.flags for seen in http2.frames()] == [ACK]
        side.pass_time(1.1)
        assert http2.codes(Kind.GOAWAY) == [Code.NO_ERROR]
        assert http2.over

    def test_idle_begins_anew_behind_each_stream(self, side: Side, http2: Http2Side) -> None:
        for stream in (1, 3):
            side.pass_time(DEADLINES.idle_s - 1)
            http2.send(request(stream))
            assert http2.frames()
        side.pass_time(DEADLINES.idle_s - 1)
        assert not http2.over
        side.pass_time(1.1)
        assert http2.codes(Kind.GOAWAY) == [Code.NO_ERROR]

    def test_none_while_an_answer_is_made(self, side: Side, http2: Http2Side) -> None:
        http2.send(request(1, "/wait"))
        side.pass_time(10_000)
        side.program.go_on.set_result(None)
        side.loop.rest()
        assert [seen.kind for seen in http2.frames()] == [Kind.HEADERS, Kind.DATA, Kind.DATA]

    def test_a_head_is_not_put_off_by_its_pieces(self, side: Side, http2: Http2Side) -> None:
        http2.send(request(1, "/wait"), wire.frame(Kind.HEADERS, 1, 3, b"\x82"))
        for _ in range(9):
            side.pass_time(DEADLINES.header_s / 10)
            http2.send(wire.frame(Kind.CONTINUATION, 0, 3, b""))
        assert not http2.over
        side.pass_time(DEADLINES.header_s / 10)
        assert http2.codes(Kind.GOAWAY) == [Code.ENHANCE_YOUR_CALM]
        side.program.go_on.cancel()

    def test_a_body_is_put_off_by_its_pieces(self, side: Side, http2: Http2Side) -> None:
        http2.send(request(1, method="POST", end=False))
        for _ in range(20):
            side.pass_time(DEADLINES.body_s - 1)
            http2.send(wire.data(1, b"x"))
            assert http2.frames() == []
        side.pass_time(DEADLINES.body_s + 0.1)
        assert [seen.kind for seen in http2.frames()] == [Kind.HEADERS, Kind.DATA, Kind.DATA]
        side.pass_time(STREAM_LINGER_S)
        assert http2.codes(Kind.RST_STREAM) == [Code.NO_ERROR]
        assert not http2.over

    def test_a_window_that_stays_closed(self, side: Side) -> None:
        """A byte now and then keeps a stream alive; none for the deadline ends it, and it alone."""
        http2 = Http2Side(side, window=10)
        http2.send(request(1, "/big"), request(3, "/wait"))
        for _ in range(5):
            side.pass_time(DEADLINES.write_stall_s - 1)
            http2.send(wire.window_update(1, 1))
        assert not http2.codes(Kind.RST_STREAM)
        side.pass_time(DEADLINES.write_stall_s - 1)
        assert http2.frames() == []
        side.pass_time(DEADLINES.keepalive_s + 1)
        assert http2.codes(Kind.RST_STREAM) == [Code.CANCEL]
        side.program.go_on.set_result(None)
        side.loop.rest()
        assert [seen.stream for seen in http2.frames()] == [3, 3, 3]

    def test_a_socket_that_is_not_read(self, side: Side) -> None:
        http2 = Http2Side(side, window=1 << 20)
        http2.send(*[request(stream, "/big") for stream in range(1, 21, 2)])
        side.pass_time(DEADLINES.write_stall_s * 1.3)
        assert side.transport.lost and side.transport.dropped


class TestBodies:
    def test_expect_continue(self, side: Side, http2: Http2Side) -> None:
        http2.send(request(1, method="POST", end=False, fields=[("expect", "100-continue")]))
        (interim,) = http2.frames()
        assert interim.kind == Kind.HEADERS and not interim.flags & 1
        http2.send(wire.data(1, b"now", end=True))
        assert [seen.payload for seen in http2.frames()][1:] == [b"now", b""]

    def test_a_refusal_by_the_head_alone_is_answered_once(self, side: Side, http2: Http2Side) -> None:
        http2.send(request(1, "/refused", method="POST", end=False), wire.data(1, b"x", end=True))
        kinds = [seen.kind for seen in http2.frames()]
        assert kinds == [Kind.HEADERS, Kind.DATA, Kind.DATA]  # its body was here: nothing to reset
        http2.send(request(3, "/refused", method="POST", end=False))
        assert [seen.kind for seen in http2.frames()] == [Kind.HEADERS, Kind.DATA, Kind.DATA]
        http2.send(wire.data(3, b"late"))
        assert not side.connection.busy
        side.pass_time(STREAM_LINGER_S + 0.1)
        assert http2.codes(Kind.RST_STREAM) == [Code.NO_ERROR]
        http2.send(wire.data(3, b"later"))
        assert [seen.kind for seen in http2.frames()] == [Kind.WINDOW_UPDATE]

    def test_a_request_that_ends_behind_its_answer_is_not_reset(self, side: Side, http2: Http2Side) -> None:
        """curl 7.88 would take the reset for a failure."""
        http2.send(request(1, "/refused", method="POST", end=False))
        assert len(http2.frames()) == 3
        http2.send(wire.data(1, b"late", end=True))
        side.pass_time(2 * STREAM_LINGER_S)
        assert http2.frames() == []

    def test_above_the_limit_of_one_only_the_oldest_goes_on(self, side: Side, http2: Http2Side) -> None:
        """And the others are not timed out for waiting."""
        streams = range(1, 13, 2)
        http2.send(*[request(stream, method="POST", end=False) for stream in streams])
        sent = dict.fromkeys(streams, 0)
        for stream in streams:
            http2.send(wire.data(stream, bytes(MAX_BODY - 3)))
            sent[stream] += MAX_BODY - 3
        for _ in range(3):
            side.pass_time(DEADLINES.body_s - 1)
            http2.send(wire.data(1, b"x"))
        assert http2.frames() == []
        http2.send(wire.data(1, end=True))
        assert sum(len(seen.payload) for seen in http2.frames() if seen.kind == Kind.DATA) == MAX_BODY
        assert sent[3] < STREAM_WINDOW_BYTES

    def test_a_reset_frees_what_came(self, side: Side, http2: Http2Side) -> None:
        for stream in range(1, 200, 2):
            http2.send(
                request(stream, method="POST", end=False), wire.data(stream, bytes(MAX_BODY)), wire.reset(stream)
            )
            http2.frames()
            side.pass_time(1)
        http2.send(request(201, method="POST", end=False), wire.data(201, b"x", end=True))
        assert [seen.stream for seen in http2.frames() if seen.kind == Kind.DATA] == [201, 201]


class TestTurns:
    def test_long_answers_take_turns(self, side: Side) -> None:
        """Each client read lets about one frame through; the streams are served in a circle."""
        http2 = Http2Side(side, window=1 << 20)
        http2.send(*[request(stream, "/big") for stream in (1, 3, 5)])
        order: list[int] = []
        while side.transport.get_write_buffer_size():
            order += [seen.stream for seen in http2.frames(HIGH) if seen.kind == Kind.DATA and seen.payload]
        first_round = list(dict.fromkeys(order))
        assert first_round == [1, 3, 5]
        assert order.count(1) == order.count(3) == order.count(5)

    def test_one_stream_s_window_holds_up_no_other(self, side: Side) -> None:
        http2 = Http2Side(side, window=100)
        http2.send(request(1, "/big"), request(3, "/big"), wire.window_update(3, 1 << 20))
        sizes = {1: 0, 3: 0}
        for seen in http2.frames():
            if seen.kind == Kind.DATA:
                sizes[seen.stream] += len(seen.payload)
        assert sizes == {1: 100, 3: len(BIG)}

    def test_the_connection_s_window_is_shared(self, side: Side) -> None:
        http2 = Http2Side(side, window=1 << 20)
        count = 40  # of 4000 bytes each
        http2.send(*[request(stream, "/big") for stream in range(1, 2 * count, 2)])
        assert sum(len(seen.payload) for seen in http2.frames() if seen.kind == Kind.DATA) == 65_535
        http2.send(wire.window_update(0, 1 << 20))
        assert sum(len(seen.payload) for seen in http2.frames() if seen.kind == Kind.DATA) == count * 4000 - 65_535

    def test_frames_are_no_longer_than_any_client_takes(self, side: Side) -> None:
        http2 = Http2Side(side, window=1 << 20)
        http2.send(
            wire.settings((5, 1 << 20)), request(1, method="POST", end=False), wire.data(1, bytes(MAX_BODY), end=True)
        )
        assert max(len(seen.payload) for seen in http2.frames()) <= FRAME_BYTES_MAX


class TestUnreadReplies:
    def test_pings_that_are_not_read(self, side: Side, http2: Http2Side) -> None:
        """The client isn't read either, above the limit."""
        sent = 0
        while side.transport.readable and sent < 10_000:
            side.send(wire.frame(Kind.PING, 0, 0, bytes(8)) * 90)
            side.pass_time(1)
            sent += 90
        assert side.transport.unsent_max <= UNREAD_REPLIES_BYTES_MAX + 17 * 91
        assert not side.transport.readable
        side.read_all()
        assert side.transport.readable

    def test_many_frames_at_once_are_handled_in_turns(self, side: Side, http2: Http2Side) -> None:
        http2.send(request(1, method="POST", end=False))
        side.transport.feed(wire.data(1, b"x") * 1000 + wire.data(1, end=True))
        side.loop._run_once()
        assert not side.transport.readable  # until they are handled
        side.loop.rest()
        assert side.transport.readable
        assert sum(len(seen.payload) for seen in http2.frames() if seen.kind == Kind.DATA) == 1000


class TestEnd:
    def test_eof_means_gone(self, side: Side, http2: Http2Side) -> None:
        http2.send(request(1, "/wait"))
        side.transport.feed_eof()
        side.loop.rest()
        side.read_all()
        assert side.transport.end == "eof"
        assert side.program.go_on.cancelled() or not side.program.go_on.done()

    def test_a_reset_comes_before_the_answer_has_its_turn(self, side: Side, http2: Http2Side) -> None:
        http2.send(request(1, "/late") + wire.reset(1) + request(3))
        assert side.program.begun == ["/"]
        assert side.program.left_behind == ["/late"]
        assert not side.connection.busy

    def test_a_reset_cancels_the_answer(self, side: Side, http2: Http2Side) -> None:
        http2.send(request(1, "/wait"))
        assert side.connection.busy
        http2.send(wire.reset(1))
        side.loop.rest()
        assert not side.connection.busy
        assert side.program.go_on.cancelled()
        assert side.program.left_behind == ["/wait"]

    def test_an_error_of_the_connection_cancels_all(self, side: Side, http2: Http2Side) -> None:
        http2.send(request(1, "/wait"))
        http2.send(wire.data(0, b"x"))
        assert http2.codes(Kind.GOAWAY) == [Code.PROTOCOL_ERROR]
        assert http2.over and not side.connection.busy
        side.loop.rest()
        assert side.program.go_on.cancelled()

    def test_drain_waits_for_streams(self, side: Side, http2: Http2Side) -> None:
        http2.send(request(1, "/wait"))
        side.host.draining = True
        side.connection.drain()
        assert [seen.kind for seen in http2.frames()] == [Kind.GOAWAY, Kind.PING]
        http2.send(wire.frame(Kind.PING, ACK, 0, bytes(8)), request(3))
        assert {seen.stream for seen in http2.frames()} == {3}
        side.program.go_on.set_result(None)
        side.loop.rest()
        seen = http2.frames()
        assert [frame.kind for frame in seen] == [Kind.HEADERS, Kind.DATA, Kind.DATA, Kind.GOAWAY]
        assert seen[-1].payload[:4] == b"\0\0\0\x03"
        assert side.transport.end == "eof"

    def test_drain_lets_requests_under_way_arrive(self, side: Side, http2: Http2Side) -> None:
        """Until the client has seen the GOAWAY, its requests are answered (RFC 9113 6.8)."""
        side.connection.drain()
        http2.send(request(1))
        assert Kind.HEADERS in [seen.kind for seen in http2.frames()]
        assert side.transport.end == ""
        http2.send(wire.frame(Kind.PING, ACK, 0, bytes(8)))
        side.read_all()
        assert side.transport.end == "eof"

    def test_a_second_drain_waits_no_longer(self, side: Side, http2: Http2Side) -> None:
        side.connection.drain()
        side.connection.drain()
        side.read_all()
        assert side.transport.end == "eof"

    def test_a_client_that_leaves(self, side: Side, http2: Http2Side) -> None:
        http2.send(request(1, "/wait"), wire.frame(Kind.GOAWAY, 0, 0, bytes(8)))
        assert side.transport.end == ""
        side.program.go_on.set_result(None)
        side.loop.rest()
        assert [seen.kind for seen in http2.frames()] == [Kind.HEADERS, Kind.DATA, Kind.DATA, Kind.GOAWAY]
        assert side.transport.end == "eof"

    def test_a_goodbye_that_is_not_read(self, side: Side) -> None:
        http2 = Http2Side(side, window=1 << 20)
        http2.send(request(1, "/big"), wire.frame(Kind.GOAWAY, 0, 0, bytes(8)))
        side.pass_time(DEADLINES.write_stall_s * 1.3)
        assert side.transport.lost
