"""protocols.http2: DATA frames that are h2's to the byte, and the windows on both sides."""

from __future__ import annotations

import random

import pytest
from conformance_kit import http2_wire as wire
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.http1 import Body
from protocols.http2 import (
    CONNECTION_WINDOW_BYTES,
    STREAM_WINDOW_BYTES,
    ConnectionClosed,
    Http2,
    OnStream,
    StreamReset,
    WindowOpened,
)
from protocols.http2_guard import FRAME_BYTES_MAX, PREFACE, Code, Kind
from tests.support.http2_pair import Pair, head, raw, receive


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
