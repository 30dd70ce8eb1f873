"""A crowd that asks in one instant, over each protocol: streams that run get their tokens meanwhile, between stretches.

Time is a number that only the program's answers move, so what is counted is exact.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
import wsproto.events as ws
from conformance_kit import http2_wire as wire

from protocols.http2 import FRAMES_PER_TURN
from protocols.http2_guard import PREFACE, Kind
from protocols.websocket import Text
from server.echo import EchoSession
from server.http import Call, Response, Streaming, Upgrade, WebSocketChannel
from server.turns import STRETCH_S, Turns
from server.websocket_connection import TURN_BYTES
from tests.fuzz.transport import FakeTransport
from tests.server.api.test_websocket import Side as SessionSide
from tests.support.http2_pair import request
from tests.support.loops import in_loop, turns
from tests.support.wire_side import Side, get, wire_side

KEY = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="
UPGRADE = get("/ws", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", KEY)
COST_S = STRETCH_S / 4  # of planning one answer
CROWD = 40


class Planner(EchoSession):
    """Plans an answer to each message in a turn of its own, as the API does."""

    def __init__(self, socket: WebSocketChannel, crowd: Crowd) -> None:
        super().__init__(socket)
        self._crowd = crowd
        self._channel = socket

    def receive(self, event: ws.Event) -> None:
        """See Session."""
        if isinstance(event, Text):
            self._channel.take_turn(self._crowd.plan)


class Crowd:
    """A side whose program takes COST_S for each answer; `stand_still` is how long the loop was held at most."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.now = 0.0
        self.answered = 0
        self.note: Callable[[], None] = lambda: None
        side.host.turns = Turns(side.loop, lambda: self.now)
        program = side.program

        async def answer(call: Call) -> Response | Streaming:
            self.plan()
            return Response(200, b"{}")

        def upgrade(call: Call) -> Response | Upgrade:
            return lambda socket: Planner(socket, self)

        program.answer = answer  # type: ignore[method-assign]
        program.upgrade = upgrade  # type: ignore[method-assign]

    def plan(self) -> None:
        self.now += COST_S
        self.answered += 1
        self.note()

    def connect(self, count: int) -> list[FakeTransport]:
        """Clients that read whatever comes."""
        transports = [self.side.connect()[0] for _ in range(count)]
        for transport in transports:
            transport.read_all()
        return transports

    def open_sockets(self, count: int) -> list[FakeTransport]:
        """The same, with an open WebSocket each."""
        transports = self.connect(count)
        for transport in transports:
            transport.feed(UPGRADE)
        self.side.loop.rest()
        return transports

    def run(self) -> tuple[int, float]:
        """Until the loop rests: in how many turns answers were made, and how long the longest of these was."""
        turns, longest = 0, 0.0
        while self.side.loop._ready:
            before = self.now
            self.side.loop._run_once()
            turns += self.now > before
            longest = max(longest, self.now - before)
        return turns, longest


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    with wire_side() as side:
        side.host.connections_max = CROWD + 1
        yield Crowd(side)


def is_taken_in_stretches(crowd: Crowd, asked: int) -> None:
    turns, longest = crowd.run()
    assert crowd.answered == asked
    assert longest <= STRETCH_S + COST_S  # the last one began before the stretch was over
    assert turns >= asked * COST_S / (STRETCH_S + COST_S)


def test_http1(crowd: Crowd) -> None:
    for transport in crowd.connect(CROWD):
        transport.feed(get("/"))
    is_taken_in_stretches(crowd, CROWD)


@pytest.mark.parametrize("connections", [1, CROWD])
def test_http2(crowd: Crowd, connections: int) -> None:
    """On one connection, and on many."""
    requests = b"".join(request(1 + 2 * number) for number in range(CROWD // connections))
    for transport in crowd.connect(connections):
        transport.feed(PREFACE + wire.settings() + requests)
    is_taken_in_stretches(crowd, CROWD)


@pytest.mark.parametrize("sockets", [1, CROWD])
def test_websocket(crowd: Crowd, sockets: int) -> None:
    """On one socket, and on many."""
    message = crowd.side.frame(ws.TextMessage("a prompt"))
    for transport in crowd.open_sockets(sockets):
        transport.feed(message * (CROWD // sockets))
    is_taken_in_stretches(crowd, CROWD)


def written(transport: FakeTransport) -> int:
    return len(transport.received) + transport.get_write_buffer_size()


def test_a_long_run_of_frames_gives_others_their_turn(crowd: Crowd) -> None:
    """Whatever they ask for."""
    talker, other = crowd.connect(2)
    talker.feed(PREFACE + wire.settings())
    crowd.side.loop.rest()
    before, seen = written(talker), []
    crowd.note = lambda: seen.append(written(talker) - before)
    ping = wire.frame(Kind.PING, 0, 0, bytes(8))
    talker.feed(ping * FRAMES_PER_TURN * 3)
    other.feed(get("/"))
    crowd.side.loop.rest()
    assert seen == [len(ping) * FRAMES_PER_TURN]
    assert written(talker) - before == len(ping) * FRAMES_PER_TURN * 3


def test_a_long_run_of_messages_gives_others_their_turn(crowd: Crowd) -> None:
    (talker,) = crowd.open_sockets(1)
    (other,) = crowd.connect(1)
    before, seen = written(talker), []
    crowd.note = lambda: seen.append(written(talker) - before)
    ping, pong = crowd.side.frame(ws.Ping(b"p" * 120)), 122
    talker.feed(ping * 200)
    other.feed(get("/"))
    crowd.side.loop.rest()
    assert seen == [pong * (TURN_BYTES // len(ping))]
    assert written(talker) - before == pong * 200


def test_messages_that_came_before_the_end_are_heard(crowd: Crowd) -> None:
    """Of a client that leaves at once, however many there are."""
    (talker,) = crowd.open_sockets(1)
    before = written(talker)
    ping, pong = crowd.side.frame(ws.Ping(b"p" * 120)), 122
    talker.feed(ping * 200)
    talker.feed_eof()
    crowd.side.loop.rest()
    assert written(talker) - before == pong * 200
    assert talker.end == "eof"


@in_loop
async def test_a_generation_that_waits_for_its_turn_can_be_cancelled() -> None:
    """And is told so once; one that was never begun leaves no work behind."""
    side = SessionSide()
    side.generate("a")
    side.say(type="cancel", id="a")
    side.generate("b")
    side.session.lost()
    await turns()
    assert [message.get("id") for message in side.socket.messages] == ["a"]
    assert json.dumps(side.socket.messages[0]).count("cancelled before it began") == 1
    assert [outcome for outcome, _ in side.unbegun] == ["cancelled", "cancelled"]
    assert not list(side.rig.table.live)
