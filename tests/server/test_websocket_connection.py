"""server.websocket_connection: pings with a deadline, what is sent before a close, and how the connection ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import wsproto.events as ws

from server.connection import UNREAD_REPLIES_BYTES_MAX
from server.websocket_connection import CLOSE_HANDSHAKE_S
from tests.support.wire_side import DEADLINES, Session, Side, wire_side

PING_S = DEADLINES.keepalive_s


@pytest.fixture
def side() -> Iterator[Side]:
    with wire_side() as made:
        yield made


@pytest.fixture
def session(side: Side) -> Session:
    return side.upgrade()


def test_pings_and_no_pong(side: Side, session: Session) -> None:
    side.pass_time(PING_S)
    (ping,) = side.events()
    assert isinstance(ping, ws.Ping)
    side.pass_time(PING_S - 0.1)
    assert side.events() == []
    side.pass_time(0.1)
    (close,) = side.events()
    assert isinstance(close, ws.CloseConnection) and close.code == 1011
    assert session.losses == 1
    side.pass_time(CLOSE_HANDSHAKE_S)
    assert side.transport.lost
    assert session.losses == 1


@pytest.mark.parametrize("answer", [ws.Pong(), ws.TextMessage("x"), ws.Ping()])
def test_any_frame_shows_that_the_client_lives(side: Side, session: Session, answer: ws.Event) -> None:
    for _ in range(10):
        side.pass_time(PING_S)
        assert any(isinstance(event, ws.Ping) for event in side.events())
        side.send(side.frame(answer))
    assert session.losses == 0


def test_a_client_that_reads_late_gets_no_ping_but_the_stall_deadline(side: Side, session: Session) -> None:
    side.send(side.frame(ws.TextMessage("x" * 5000)))
    for _ in range(10):
        side.pass_time(DEADLINES.write_stall_s * 0.6)
        side.read(1)
    assert session.losses == 0
    side.pass_time(DEADLINES.write_stall_s * 1.3)
    assert side.transport.lost
    assert session.losses == 1


def test_a_message_is_answered_before_the_close_behind_it(side: Side, session: Session) -> None:
    side.send(side.frame(ws.TextMessage("last")) + side.frame(ws.Ping(b"p")) + side.frame(ws.CloseConnection(1000)))
    pong, text, close = side.events()
    assert (text.data, pong.payload, close.code) == ("last", b"p", 1000)
    assert side.transport.end == "eof"
    assert session.losses == 1


def test_a_peer_at_fault_can_read_the_code(side: Side, session: Session) -> None:
    """Case C03: the rest of what it sends is dropped, until it closes."""
    message = side.frame(ws.TextMessage("x" * 20_000))
    side.send(message[:100])
    (close,) = side.events()
    assert close.code == 1009
    assert side.transport.seen_eof and not side.transport.lost
    side.send(message[100:])
    side.transport.feed_eof()
    side.loop.rest()
    assert side.transport.end == "eof"
    assert session.losses == 1


def test_but_not_for_ever(side: Side, session: Session) -> None:
    side.send(b"\xff\xff")
    side.read()
    for _ in range(4):
        side.pass_time(CLOSE_HANDSHAKE_S / 4)
        if side.transport.readable:
            side.send(b"x")
    assert side.transport.lost


def test_a_close_waits_for_a_client_that_still_reads(side: Side, session: Session) -> None:
    side.send(side.frame(ws.TextMessage("x" * 900)))
    side.connection.drain()
    side.loop.rest()
    side.pass_time(CLOSE_HANDSHAKE_S)
    for _ in range(4):
        side.pass_time(DEADLINES.write_stall_s * 0.9)
        side.read(50)
    assert not side.transport.lost
    side.read_all()
    side.pass_time(DEADLINES.write_stall_s + CLOSE_HANDSHAKE_S)
    assert (side.transport.lost, side.transport.dropped) == (True, False)


def test_replies_that_are_not_read_stop_the_reading(side: Side, session: Session) -> None:
    pings = b"".join(side.frame(ws.Ping(b"p" * 125)) for _ in range(100))
    sent = 0
    while side.transport.readable:
        side.send(pings)
        sent += 100
        assert sent < 10_000
    assert side.transport.unsent_max < UNREAD_REPLIES_BYTES_MAX + 2 * len(pings)
    assert len(side.events()) == sent
    assert side.transport.readable


def test_what_comes_behind_our_close_is_not_shown_to_the_session(side: Side, session: Session) -> None:
    side.connection.drain()
    side.send(side.frame(ws.TextMessage("late")))
    (close,) = side.events()
    assert close.code == 1001
    side.send(side.frame(close.response()))
    assert side.transport.end == "eof"
    assert session.losses == 1
