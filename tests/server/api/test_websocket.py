"""A WebSocket's session (server/api/websocket) between its socket and the stream table, turn by turn of the loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from protocols.http1 import Http1, Request
from protocols.websocket import Text
from server.api.generation import Generation, Model
from server.api.websocket import GENERATIONS_MAX, ApiSession
from server.chat import ChatTemplate
from server.http import Call
from server.metrics import Metrics
from tests.support.engines import hello
from tests.support.loops import in_loop, turns
from tests.support.tables import Rig

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}:"


class Socket:
    """Takes every message, and the close."""

    def __init__(self) -> None:
        self.writable = True
        self.messages: list[Any] = []
        self.closed: list[int] = []

    @property
    def gate(self) -> Socket:
        return self

    def frame(self, payload: bytes) -> bytes:
        return payload + b"\n"

    def frame_binary(self, payload: bytes) -> bytes:
        raise AssertionError("the API writes text only")

    def write(self, frames: bytes) -> None:
        self.messages += [json.loads(line) for line in frames.splitlines()]

    def outlet(self, pieces: object) -> None:
        return None

    def close(self, code: int, reason: str = "") -> None:
        self.closed.append(code)

    def take_turn(self, act: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(act)


class Side:
    """One session."""

    def __init__(self) -> None:
        self.rig = Rig()
        self.socket = Socket()
        model = Model("model", hello(), self.rig.tokenizer, ChatTemplate(TEMPLATE), 0)
        head = b"GET /v1/ws HTTP/1.1\r\nHost: localhost\r\n\r\n"
        request = Http1(max_header=4096).receive(head)[0]
        assert isinstance(request, Request)
        handshake = Call(request, "/v1/ws", "", "127.0.0.1", "req", 0.0)
        generation = Generation(self.rig.table, model)
        self.unbegun: list[tuple[str, int]] = []
        self.session = ApiSession(
            generation, Metrics(), handshake, self.socket, lambda *told: self.unbegun.append(told)
        )

    def say(self, **message: Any) -> None:
        self.session.receive(Text(json.dumps(message)))

    def generate(self, id_: str = "a", **fields: Any) -> None:
        self.say(type="generate", id=id_, **({"messages": [{"role": "user", "content": "hi"}]} | fields))

    @property
    def types(self) -> list[str]:
        return [message["type"] for message in self.socket.messages]


@in_loop
async def test_a_cancel_right_behind_the_start_ends_what_was_started_once() -> None:
    """In the turn in which the generation began: its client was told that nothing had, while it went on."""
    side = Side()
    side.generate()
    asyncio.get_running_loop().call_soon(lambda: side.say(type="cancel", id="a"))
    await turns()
    (stream,) = side.rig.access
    assert stream.outcome is not None and stream.outcome.kind == "cancelled"
    assert side.types == ["started", "error"]
    assert side.socket.messages[-1]["error"]["code"] == "cancelled"


@in_loop
async def test_a_cancel_before_the_start_leaves_the_id_free_at_once() -> None:
    side = Side()
    side.generate()
    side.say(type="cancel", id="a")
    side.generate()
    await turns()
    assert side.types == ["error", "started"]
    assert len(list(side.rig.table.live)) == 1
    side.say(type="cancel", id="a")
    assert side.types == ["error", "started", "error"]
    assert side.unbegun == [("cancelled", 409)]


@in_loop
async def test_while_draining_a_start_that_fails_closes_the_socket() -> None:
    side = Side()
    side.generate(max_tokens=0)
    side.session.drain()
    assert side.socket.closed == []
    await turns()
    assert side.types == ["error"]
    assert side.socket.closed == [1012]


@in_loop
async def test_while_draining_a_start_that_is_cancelled_closes_the_socket() -> None:
    side = Side()
    side.generate()
    side.session.drain()
    side.say(type="cancel", id="a")
    assert side.socket.closed == [1012]
    await turns()
    assert side.types == ["error"]


@in_loop
async def test_a_client_that_leaves_while_a_start_is_planned_has_nothing_begun() -> None:
    side = Side()
    side.generate()
    side.session.drain()
    side.session.lost()
    await turns()
    assert (side.types, side.socket.closed) == ([], [])
    assert not list(side.rig.table.live)
    assert side.unbegun == [("cancelled", 499)]


@in_loop
async def test_the_limit_counts_generations_whichever_way_they_came() -> None:
    side = Side()
    side.generate("first")
    await turns()
    name = side.socket.messages[0]["stream"]
    for number in range(GENERATIONS_MAX - 1):
        side.say(type="resume", id=f"again {number}", stream=name)
    (stream,) = side.rig.table.live
    assert len(stream.readers) == GENERATIONS_MAX
    side.say(type="resume", id="over", stream=name)
    side.generate("over too")
    await turns()
    assert [m["error"]["code"] for m in side.socket.messages if m["type"] == "error"] == ["rate_limit_exceeded"] * 2
    assert len(stream.readers) == GENERATIONS_MAX


@in_loop
async def test_whatever_was_asked_for_and_never_began_is_told_of_once() -> None:
    side = Side()
    side.generate("a")
    side.generate("a")  # in use
    side.generate("b", max_tokens=0)
    side.generate("c", model="another")
    await turns()
    side.session.drain()
    side.generate("d")
    side.say(type="cancel", id="nobody")  # asks for no generation
    await turns()
    assert sorted(side.unbegun) == [("refused", 400), ("refused", 400), ("refused", 404), ("refused", 503)]
    assert [stream.outcome for stream in side.rig.table.live] == [None]


async def _fail(*_: object) -> None:
    raise ZeroDivisionError("a mistake of ours")


@in_loop
async def test_our_own_mistake_in_planning_is_told_of_too() -> None:
    side = Side()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("server.api.websocket.plan_chat", _fail)
        side.generate()
        await turns()
    assert side.unbegun == [("refused", 500)]
    assert len(side.rig.faults) == 1
