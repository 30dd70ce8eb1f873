"""Polling (server/api/streams) beside other readers, turn by turn of the loop."""

from __future__ import annotations

import asyncio

import pytest

from protocols.http1 import Http1, Request
from server.api.errors import ApiError
from server.api.generation import Generation, Model
from server.api.streams import read_stream
from server.chat import ChatTemplate
from server.http import Call
from tests.support.engines import hello
from tests.support.loops import in_loop, turn
from tests.support.tables import Rig


@in_loop
async def test_a_poll_whose_events_were_dropped_while_it_waited_is_told_so() -> None:
    """It got what was held, from a later position on, as if nothing lay between."""
    rig = Rig(log_bytes_per_stream=2000)
    client = rig.open()
    generation = Generation(rig.table, Model("model", hello(), rig.tokenizer, ChatTemplate("x"), 0))
    head = b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n\r\n"
    request = Http1(max_header=4096).receive(head)[0]
    assert isinstance(request, Request)
    call = Call(request, "/", "after=0&wait=10", "", "req", 0.0)
    waiting = asyncio.ensure_future(read_stream(generation, rig.metrics, call, client.stream.id))
    await turn()
    rig.play(client.stream, "x" * 50)  # the faster reader takes them all in the turn that wakes the poll
    with pytest.raises(ApiError) as error:
        await waiting
    assert (error.value.status, error.value.code) == (410, "position_gone")
