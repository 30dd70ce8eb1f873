"""server.http1_channel: an answer's head leaves with the first piece of its body, and never stays behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from protocols.http1 import Http1
from server.http1_channel import HttpChannel


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
