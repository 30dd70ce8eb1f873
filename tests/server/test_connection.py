"""server.connection: the deadline of each phase to the second, and what a client that doesn't read can cost."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from server.connection import HIGH_WATER_BYTES, PIPELINE_BYTES_MAX
from server.flow import LINGER_BYTES_MAX, LINGER_S
from server.http1_channel import HttpChannel
from tests.fuzz.transport import HIGH_WATER_DIVISOR
from tests.support.wire_side import BIG, DEADLINES, Side, get, wire_side

HEAD = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"


@pytest.fixture
def side() -> Iterator[Side]:
    with wire_side() as made:
        yield made


class TestDeadlines:
    """Case A11."""

    def test_a_silent_connection(self, side: Side) -> None:
        side.pass_time(DEADLINES.idle_s - 0.1)
        assert side.transport.end == ""
        side.pass_time(0.2)
        assert side.transport.end == "eof"
        assert side.read() == b""

    def test_a_head_is_not_put_off_by_its_bytes(self, side: Side) -> None:
        for byte in b"GET / HTT":
            side.send(bytes([byte]))
            side.pass_time(DEADLINES.header_s / 10)
        assert side.read() == b""
        side.pass_time(DEADLINES.header_s / 10)
        assert side.read().startswith(b"HTTP/1.1 408 ")

    def test_a_body_is_put_off_by_its_bytes(self, side: Side) -> None:
        side.send(HEAD)
        for _ in range(50):
            side.pass_time(DEADLINES.body_s - 1)
            side.send(b"x")
        side.pass_time(DEADLINES.body_s + 1)
        assert side.read().startswith(b"HTTP/1.1 408 ")

    def test_none_while_an_answer_is_made(self, side: Side) -> None:
        side.get("/wait")
        side.pass_time(100_000)
        side.program.go_on.set_result(None)
        side.loop.rest()
        assert side.read().startswith(b"HTTP/1.1 200 ")
        side.pass_time(DEADLINES.idle_s - 0.1)
        assert side.transport.end == ""
        side.pass_time(0.2)
        assert side.transport.end == "eof"

    def test_a_client_that_does_not_read_has_the_write_stall_deadline(self, side: Side) -> None:
        side.send(get("/big") * 3)
        for _ in range(20):
            side.pass_time(DEADLINES.write_stall_s * 0.7)
            side.read(10)
        assert not side.transport.lost
        side.pass_time(DEADLINES.write_stall_s * 1.3)
        assert (side.transport.lost, side.transport.dropped) == (True, True)


class TestUnreadAnswers:
    """A client that pipelines and does not read is held back."""

    def test_no_request_is_begun_above_the_high_water_mark(self, side: Side) -> None:
        side.send(get("/big") * 20)
        assert len(side.program.begun) == HIGH_WATER_BYTES // HIGH_WATER_DIVISOR // len(BIG) + 1
        assert side.read_all().count(b"HTTP/1.1 200 ") == 20
        assert side.transport.unsent_max < 2 * len(BIG)

    def test_its_socket_is_not_read_beyond_the_limit(self, side: Side) -> None:
        sent = 0
        while side.transport.readable:
            side.send(get("/big") * 100)
            sent += 100
            assert sent * len(get("/big")) < 2 * PIPELINE_BYTES_MAX
        assert side.read_all().count(b"HTTP/1.1 200 ") == sent
        assert side.transport.readable

    def test_all_are_answered_though_it_sends_no_more(self, side: Side) -> None:
        side.send(get("/big") * 10)
        side.transport.feed_eof()
        side.loop.rest()
        assert side.read_all().count(b"HTTP/1.1 200 ") == 10
        assert side.transport.end == "eof"


class TestLinger:
    """RFC 9112 9.6: behind the last answer the client's bytes are read and dropped, within bounds."""

    def test_until_the_client_closes(self, side: Side) -> None:
        side.send(HEAD.replace(b"/echo", b"/refused"))
        assert side.read().startswith(b"HTTP/1.1 403 ")
        assert side.transport.seen_eof
        side.send(b"x" * 1_000_000)
        assert not side.transport.lost
        side.transport.feed_eof()
        side.loop.rest()
        assert side.transport.end == "eof"

    def test_for_so_long(self, side: Side) -> None:
        side.send(HEAD.replace(b"/echo", b"/refused"))
        side.read()
        for _ in range(9):
            side.pass_time(LINGER_S / 10)
            side.send(b"x")
        assert not side.transport.lost
        side.pass_time(LINGER_S / 5)
        assert side.transport.lost

    def test_for_so_many_bytes(self, side: Side) -> None:
        side.send(get("/", "Connection: close"))
        piece = bytes(1 << 20)
        for _ in range(LINGER_BYTES_MAX // len(piece) - 1):
            side.send(piece)
        assert not side.transport.lost
        side.send(piece)
        assert side.transport.lost

    def test_a_slow_reader_is_not_cut_by_it(self, side: Side) -> None:
        side.get("/big", "Connection: close")
        side.pass_time(LINGER_S * 2)
        for _ in range(5):
            side.read(500)
            side.pass_time(DEADLINES.write_stall_s * 0.9)
        assert side.read_all() and not side.transport.lost
        assert side.transport.received.endswith(BIG)
        side.pass_time(DEADLINES.write_stall_s + LINGER_S)
        assert side.transport.lost

    def test_a_request_that_is_here_whole_costs_no_connection(self, side: Side) -> None:
        side.send(HEAD.replace(b"/echo", b"/refused") + b"x" * 100 + get("/next"))
        answers = side.read_all()
        assert answers.startswith(b"HTTP/1.1 403 ") and b"Connection: close" not in answers
        assert side.program.begun == ["/next"]


class TestEnd:
    def test_a_drain_closes_what_is_idle_and_lets_the_rest_finish(self, side: Side) -> None:
        busy, _ = side.transport, side.connection
        side.get("/wait")
        idle, _ = side.connect()
        idle.read_all()
        idle.feed(get("/"))
        side.loop.rest()
        assert idle.received.startswith(b"HTTP/1.1 200 ") and not idle.end
        side.host.draining = True
        for connection in list(side.host.connections):
            connection.drain()
        side.loop.rest()
        assert (idle.end, busy.end) == ("eof", "")
        side.program.go_on.set_result(None)
        side.loop.rest()
        assert b"\r\nConnection: close\r\n" in side.read()
        assert busy.end == "eof"

    @pytest.mark.parametrize("before", [True, False], ids=["connected before", "connected in the drain"])
    def test_a_drain_waits_for_the_first_request(self, side: Side, *, before: bool) -> None:
        made = [side.connect()[0] for _ in range(2)] if before else []
        side.host.draining = True
        for connection in list(side.host.connections):
            connection.drain()
        asks, silent = made or [side.connect()[0] for _ in range(2)]
        side.pass_time(DEADLINES.first_request_s - 0.1)
        assert (asks.end, silent.end) == ("", "")
        asks.feed(get("/"))
        asks.read_all()
        side.loop.rest()
        assert b"\r\nConnection: close\r\n" in asks.received
        assert asks.end == "eof"
        side.pass_time(0.2)
        assert silent.end == "eof"

    def test_a_client_that_leaves_stops_the_work(self, side: Side) -> None:
        side.get("/wait")
        side.transport.reset()
        side.loop.rest()
        assert side.program.go_on.cancelled()
        assert not side.host.connections

    def test_connections_above_the_limit_are_refused_and_closed(self) -> None:
        with wire_side(connections_max=1) as side:
            second, _ = side.connect()
            second.read_all()
            side.loop.rest()
            assert second.received.startswith(b"HTTP/1.1 503 ") and b"Retry-After" in second.received
            side.pass_time(LINGER_S)
            assert second.lost and not side.transport.lost


def test_readers_stop_at_an_abort_and_not_a_turn_later(side: Side) -> None:
    """An outlet's send may pass where the transport has dropped the token before."""
    connection = side.connection
    channel = connection._channel = HttpChannel(connection, writable=True)
    channel.reader = cast(Any, SimpleNamespace(leave=lambda: None))
    connection.pause_writing()
    connection.abort()
    connection.resume_writing()  # as uvloop says of what it throws away
    assert not (connection.writable or channel.writable)


def test_only_a_client_that_waited_for_an_answer_has_left_before_it(side: Side) -> None:
    side.get("/echo")
    side.read_all()
    side.get("/wait")
    side.transport.reset()
    side.loop.rest()
    assert side.program.go_on.cancelled()
    assert side.program.left_behind == ["/wait"]
    transport, _ = side.connect()
    transport.feed(HEAD)  # its body never comes
    transport.reset()
    side.loop.rest()
    assert side.program.left_behind == ["/wait"]
