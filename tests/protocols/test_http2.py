"""protocols.http2: streams in HTTP/1.1's vocabulary, with h2's own client as the other side."""

from __future__ import annotations

import h2.events
import pytest
from conformance_kit import http2_wire as wire
from h2.errors import ErrorCodes

from protocols.http1 import Body, BodyEnd, Refusal, Request
from protocols.http2 import CONNECTION_WINDOW_BYTES, ConnectionClosed, GoAway, OnStream, PingAnswered, StreamReset
from protocols.http2_guard import FRAME_BYTES_MAX, Code, Kind
from tests.support.http2_pair import FIELDS, MAX_HEADER, Pair, frames, head, raw, receive


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
