"""server.http1_channel: an answer's head leaves with the first piece of its body, and never stays behind; a quiet one
is pinged; whether a client that sends no more still reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from protocols.http1 import Http1
from server.http1_channel import HALF_CLOSE_DRAIN_S, HttpChannel
from tests.support.clock import Clock


class Scene:
    """A channel on a connection that only notes what is written, and how the answer ended."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        http = Http1(max_header=4096)
        http.receive(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        connection = SimpleNamespace(
            transport=SimpleNamespace(write=self.writes.append),
            host=SimpleNamespace(loop=SimpleNamespace(time=lambda: 0.0)),
            channel_ended=lambda *, whole: self.writes.append(b"whole" if whole else b"cut"),
        )
        self.channel = HttpChannel(cast(Any, connection), writable=True)
        self.head = http.head(200, [], length=None)
        self.channel.begin(self.head, http.framer())


def test_with_the_first_piece() -> None:
    scene = Scene()
    scene.channel.write(b"one")
    scene.channel.flush()
    scene.channel.write(b"two")
    assert scene.writes == [scene.head + b"3\r\none\r\n", b"3\r\ntwo\r\n"]


def test_several_pieces_are_one_write_and_a_chunk_for_each() -> None:
    scene = Scene()
    scene.channel.write_each([b"one", b"two"])
    scene.channel.write_each([b"three", b"four"])
    assert scene.writes == [scene.head + b"3\r\none\r\n3\r\ntwo\r\n", b"5\r\nthree\r\n4\r\nfour\r\n"]


def test_alone_where_there_is_none() -> None:
    scene = Scene()
    scene.channel.flush()
    scene.channel.flush()
    assert scene.writes == [scene.head]


@pytest.mark.parametrize("whole", [True, False])
def test_before_an_end_without_a_body(whole: bool) -> None:
    scene = Scene()
    if whole:
        scene.channel.finish()
    else:
        scene.channel.cut()
    assert scene.writes == [scene.head, b"whole" if whole else b"cut"]


# Silence

KEEPALIVE_S = 15.0


class Quiet:
    """A channel whose head was written, in a time that the test moves."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.writes: list[bytes] = []
        self.unsent = 0
        self.aborted = 0
        connection = SimpleNamespace(
            transport=SimpleNamespace(write=self.writes.append),
            host=SimpleNamespace(loop=self.clock, deadlines=SimpleNamespace(keepalive_s=KEEPALIVE_S)),
            unsent=lambda: self.unsent,
            shows=lambda channel: channel is self.channel,
            abort=self.abort,
        )
        self.channel = HttpChannel(cast(Any, connection), writable=True)
        self.channel.begin(b"head", lambda data: data)
        self.channel.flush()
        framing = SimpleNamespace(ping=b": ping\n", half_close=True)
        self.channel.reader = cast(Any, SimpleNamespace(framing=framing, cursor=7, outlet=None))

    def abort(self) -> None:
        self.aborted += 1


def test_an_answer_is_pinged_a_whole_interval_behind_its_last_piece() -> None:
    scene = Quiet()
    scene.clock.advance(10.0)
    scene.channel.write(b"one")
    scene.clock.advance(5.0)
    assert scene.channel.keep_alive() == 10.0  # the alarm of its begin rings; the piece was written since
    scene.clock.advance(10.0)
    assert scene.channel.keep_alive() == KEEPALIVE_S
    assert scene.writes == [b"head", b"one", b": ping\n"]


def test_what_an_outlet_sent_was_written_too() -> None:
    scene = Quiet()
    outlet = cast(Any, SimpleNamespace(sent_at=0.0))
    scene.channel.reader.outlet = outlet
    scene.clock.advance(KEEPALIVE_S)
    outlet.sent_at = scene.clock.time() - 5.0
    assert scene.channel.keep_alive() == KEEPALIVE_S - 5.0
    scene.clock.advance(KEEPALIVE_S - 5.0)
    assert scene.channel.keep_alive() == KEEPALIVE_S
    assert scene.writes == [b"head", b": ping\n"]


def test_a_full_transport_is_not_pinged() -> None:
    scene = Quiet()
    scene.channel.writable = False
    scene.clock.advance(KEEPALIVE_S)
    assert scene.channel.keep_alive() == KEEPALIVE_S
    assert scene.writes == [b"head"]


@pytest.mark.parametrize(("read", "refilled", "gone"), [(0, 0, True), (1, 0, False), (4000, 9000, False)])
def test_a_client_that_took_something_since_its_eof_is_there(read: int, refilled: int, gone: bool) -> None:
    """The transport was full then, and still is; the reader may have filled it with more than it held before."""
    scene = Quiet()
    scene.channel.writable = False
    scene.unsent = 4000
    scene.channel.probe()
    scene.unsent -= read
    if refilled:
        scene.unsent, scene.channel.reader.cursor = refilled, 70
    scene.clock.advance(HALF_CLOSE_DRAIN_S)
    assert scene.aborted == gone
