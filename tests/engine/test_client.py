"""The server's end of the wire: what leaves together, what is told, and when the engine counts as lost."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from engine.client import STRETCH_S, TOGETHER_TOKENS_MAX, EngineClient
from engine.wire import Cancel, Credit, FrameReader, Gauges, Hello, Sampling, Step, Submit, encode
from tests.support.clock import Clock
from tests.support.engines import hello
from tests.support.loops import in_loop, turn

STEP = Step([1], [65], [], [], [], Gauges())


class Transport(asyncio.Transport):
    """Keeps what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.aborted = False
        self.reading = True

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    @property
    def messages(self) -> list[object]:
        return list(FrameReader(engine_side=True).feed(b"".join(self.writes)))


class Rig:
    """A client, its transport, and what it told."""

    def __init__(self, *, secret: bytes = b"", connect: bool = True) -> None:
        self.hellos: list[Hello] = []
        self.steps: list[Step] = []
        self.told_together: list[int] = []  # how many steps each time
        self._together = 0
        self.lost: list[str] = []
        self.clock = Clock()
        self.step_s = 0.0  # what it takes to handle one
        self.client = EngineClient(
            on_hello=self.hellos.append, on_step=self.take, on_lost=self.lost.append, secret=secret, clock=self.clock
        )
        self.transport = Transport()
        if connect:
            self.client.connection_made(self.transport)

    def take(self, step: Step, more: bool) -> None:
        assert not self.lost
        self.clock.advance(self.step_s)
        self.steps.append(step)
        self._together += 1
        if not more:
            self.told_together.append(self._together)
            self._together = 0


def submit(id_: int) -> Submit:
    return Submit(id_, [1], Sampling(max_tokens=1), 1)


@in_loop
async def test_what_one_turn_says_leaves_in_one_write_with_one_credit_message() -> None:
    rig = Rig()
    rig.client.credit(1, 5)
    rig.client.credit(2, 7)
    rig.client.submit(submit(3))
    rig.client.cancel([4])
    rig.client.credit(1, 9)
    assert rig.transport.writes == []
    await turn()
    assert len(rig.transport.writes) == 1
    assert rig.transport.messages == [submit(3), Cancel([4]), Credit([(1, 9), (2, 7)])]


@in_loop
async def test_the_first_new_sequence_of_a_turn_leaves_at_once_and_the_others_together() -> None:
    rig = Rig()
    for id_ in (1, 2, 3):
        rig.client.submit(submit(id_))
    assert rig.transport.writes == [encode(submit(1))]
    await turn()
    assert rig.transport.writes == [encode(submit(1)), encode(submit(2)) + encode(submit(3))]
    await turn()
    rig.client.submit(submit(4))
    assert len(rig.transport.writes) == 3


@in_loop
async def test_what_has_waited_for_an_engine_reaches_it_in_one_write() -> None:
    rig = Rig()
    rig.client._on_hello = lambda _: [rig.client.submit(submit(id_)) for id_ in (1, 2, 3)] and None
    rig.client.data_received(encode(hello()))
    assert rig.transport.writes == []
    await turn()
    assert rig.transport.writes == [b"".join(encode(submit(id_)) for id_ in (1, 2, 3))]


@in_loop
async def test_each_turn_has_its_own_write_and_a_quiet_one_has_none() -> None:
    rig = Rig()
    rig.client.credit(1, 5)
    await turn()
    await turn()
    rig.client.credit(1, 6)
    await turn()
    assert rig.transport.messages == [Credit([(1, 5)]), Credit([(1, 6)])]
    assert len(rig.transport.writes) == 2


@in_loop
async def test_a_cancelled_sequence_gets_no_credit_any_more() -> None:
    rig = Rig()
    rig.client.credit(1, 5)
    rig.client.cancel([1])
    await turn()
    assert rig.transport.messages == [Cancel([1])]


@in_loop
async def test_the_secret_comes_first() -> None:
    rig = Rig(secret=b"a secret")
    rig.client.submit(submit(1))
    await turn()
    assert rig.transport.writes == [b"a secret", encode(submit(1))]


@in_loop
async def test_messages_are_told_however_they_are_split() -> None:
    rig = Rig()
    for byte in encode(hello()) + encode(STEP):
        rig.client.data_received(bytes([byte]))
    assert (rig.hellos, rig.steps) == ([hello()], [STEP])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff\xff\xff\xff", "over the limit"),
        (b"\x00\x00\x00\x01\xc1", "wire version"),
        (encode(msgspec.structs.replace(hello(), wire_version=99)), "speaks wire version 99"),
    ],
)
@in_loop
async def test_an_engine_that_speaks_otherwise_is_lost_with_the_reason(data: bytes, reason: str) -> None:
    rig = Rig()
    rig.client.data_received(data)
    assert rig.transport.aborted
    rig.client.connection_lost(None)
    assert len(rig.lost) == 1
    assert reason in rig.lost[0]
    assert not rig.hellos


@in_loop
async def test_a_closed_connection_is_lost_once_and_later_words_go_nowhere() -> None:
    rig = Rig()
    rig.client.credit(1, 2)
    rig.client.connection_lost(None)
    await turn()
    rig.client.submit(submit(2))
    rig.client.credit(1, 3)
    await turn()
    rig.client.close()
    assert rig.lost == ["the engine closed the connection"]
    assert rig.transport.writes == []


@in_loop
async def test_an_error_of_the_transport_is_the_reason() -> None:
    rig = Rig()
    rig.client.connection_lost(ConnectionResetError("reset"))
    assert rig.lost == ["reset"]


@in_loop
async def test_close_aborts() -> None:
    rig = Rig()
    rig.client.close()
    assert rig.transport.aborted


def several(count: int, size: int = 1) -> list[Step]:
    return [Step([1] * size, [token] * size, [], [], [], Gauges()) for token in range(count)]


def sent(steps: list[Step]) -> bytes:
    return b"".join(map(encode, steps))


@in_loop
async def test_steps_that_are_quickly_handled_are_handled_at_once() -> None:
    rig = Rig()
    steps = several(50)
    rig.step_s = STRETCH_S / 100
    rig.client.data_received(sent(steps))
    assert rig.steps == steps
    assert rig.told_together == [50]
    assert rig.transport.reading


@pytest.mark.parametrize(
    ("size", "together"),
    [
        (TOGETHER_TOKENS_MAX // 4, [4, 3]),
        (TOGETHER_TOKENS_MAX - 1, [2, 2, 2, 1]),
        (TOGETHER_TOKENS_MAX, [1] * 7),
    ],
)
@in_loop
async def test_steps_that_are_here_together_are_told_as_such_up_to_a_number_of_tokens(
    size: int, together: list[int]
) -> None:
    rig = Rig()
    rig.client.data_received(sent(several(7, size)))
    assert rig.told_together == together


@in_loop
async def test_a_hello_between_steps_leaves_none_of_them_waiting() -> None:
    rig = Rig()
    rig.client.data_received(encode(hello()) + encode(STEP) + encode(STEP) + encode(hello()) + encode(STEP))
    assert rig.told_together == [2, 1]


@in_loop
async def test_between_long_steps_the_loop_has_its_turns() -> None:
    """Nothing more is read meanwhile, so that an engine which is faster than its server waits for it."""
    rig = Rig()
    steps = several(4, TOGETHER_TOKENS_MAX)
    rig.step_s = STRETCH_S
    rig.client.data_received(sent(steps))
    for count in range(1, 4):
        assert (rig.steps, rig.transport.reading) == (steps[:count], False)
        await turn()
    assert (rig.steps, rig.transport.reading) == (steps, True)
    await turn()
    assert rig.steps == steps


@in_loop
async def test_what_an_engine_said_before_its_end_is_handled_before_that() -> None:
    rig = Rig()
    steps = several(3, TOGETHER_TOKENS_MAX)
    rig.step_s = STRETCH_S
    rig.client.data_received(sent(steps))
    rig.client.connection_lost(None)
    assert rig.steps == steps and len(rig.lost) == 1
    await turn()
    assert rig.steps == steps


@in_loop
async def test_after_our_close_nothing_is_handled() -> None:
    rig = Rig()
    rig.step_s = STRETCH_S
    rig.client.data_received(sent(several(3, TOGETHER_TOKENS_MAX)))
    rig.client.close()
    await turn()
    rig.client.connection_lost(None)
    assert len(rig.steps) == 1


@in_loop
async def test_what_came_before_a_fault_of_the_wire_is_handled() -> None:
    rig = Rig()
    steps = several(3, TOGETHER_TOKENS_MAX)
    rig.step_s = STRETCH_S
    rig.client.data_received(sent(steps) + b"\0\0\0\1\xc1")
    assert rig.steps == steps
    assert rig.transport.aborted and not rig.lost
