"""Readers that don't write to a client: the collector of an answer in one piece, and the one that polls.

What ClientReader does is shown in test_stream.py, with the credit that it earns.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from server.outcome import Outcome
from server.readers import Collector, Poller
from server.stream import Stream
from tests.support.loops import in_loop, turns
from tests.support.tables import Client, Rig

# Collector


@in_loop
async def test_a_collector_consumes_as_the_log_grows() -> None:
    rig = Rig(credit_window=4)
    stream = rig.start(collect=True)
    waiting = asyncio.ensure_future(Collector(stream).wait())
    await turns()
    assert rig.run_dry(stream, steps_max=100) == 100
    assert not waiting.done()
    rig.end(stream)
    await waiting
    assert stream.readers == []
    assert len("".join(stream.choices[0].shown or ())) == 100


@in_loop
async def test_a_stream_that_ended_already_needs_no_waiting() -> None:
    rig = Rig()
    stream = rig.start(collect=True)
    stream.finish(Outcome("error", "early"))
    await Collector(stream).wait()
    assert stream.readers == []


@in_loop
async def test_a_collector_whose_client_left_is_detached() -> None:
    rig = Rig()
    stream = rig.start(collect=True)
    waiting = asyncio.ensure_future(Collector(stream).wait())
    await turns()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert stream.state == "detached"


@in_loop
async def test_a_collector_that_failed_says_so() -> None:
    rig = Rig()
    stream = rig.start(collect=True)
    collector = Collector(stream)
    collector.fail()
    with pytest.raises(RuntimeError, match="failed"):
        await collector.wait()


# Poller


class Poll:
    """A stream that is only polled."""

    def __init__(self, **limits: Any) -> None:
        self.rig = Rig(resume_ttl_s=30, **limits)
        self.stream: Stream = self.rig.start()
        self.poller = Poller(self.stream, 30, self.rig.clock.call_later)

    def start(self, after: int, wait_s: float = 30) -> asyncio.Future[None]:
        return asyncio.ensure_future(self.poller.events_after(after, wait_s))


@in_loop
async def test_a_poll_returns_at_once_when_there_is_something() -> None:
    poll = Poll()
    await asyncio.wait_for(poll.poller.events_after(-1, 30), 5)
    assert poll.stream.readers == [poll.poller]


@in_loop
async def test_a_poll_waits_for_the_next_event() -> None:
    poll = Poll()
    waiting = poll.start(after=0)
    await turns()
    assert not waiting.done()
    poll.rig.play(poll.stream, "a")
    await asyncio.wait_for(waiting, 5)


@in_loop
async def test_a_poll_that_waits_wakes_at_the_end() -> None:
    poll = Poll()
    waiting = poll.start(after=0)
    await turns()
    poll.stream.finish(Outcome("cancelled"))
    await asyncio.wait_for(waiting, 5)
    await asyncio.wait_for(poll.poller.events_after(99, 30), 5)


@in_loop
async def test_a_poll_returns_empty_handed_at_its_timeout() -> None:
    poll = Poll()
    await asyncio.wait_for(poll.poller.events_after(0, 0), 5)
    assert poll.stream.log.end == 1


@in_loop
async def test_several_polls_wait_side_by_side() -> None:
    poll = Poll()
    waiting = [poll.start(after=0) for _ in range(3)]
    await turns()
    poll.rig.play(poll.stream, "a")
    await asyncio.wait_for(asyncio.gather(*waiting), 5)
    assert poll.stream.readers == [poll.poller]


@in_loop
async def test_each_poll_leases_the_stream_and_without_one_it_is_detached() -> None:
    poll = Poll()
    clock = poll.rig.clock
    poll.rig.admit(poll.stream)
    for _ in range(5):
        await poll.poller.events_after(-1, 0)
        clock.advance(29)
        assert poll.stream.state == "running"
    clock.advance(2)
    assert poll.stream.state == "detached"
    await poll.poller.events_after(-1, 0)
    assert poll.stream.state == "running"
    clock.advance(61)
    assert poll.stream.outcome is not None
    assert poll.stream.outcome.kind == "cancelled"


@in_loop
async def test_a_poll_that_waits_longer_than_the_lease_holds_the_stream() -> None:
    """Whatever --resume-ttl is: who waits for an answer has not left."""
    poll = Poll()
    clock = poll.rig.clock
    poll.rig.admit(poll.stream)
    waiting = [poll.start(after=0) for _ in range(2)]
    await turns()
    clock.advance(100)
    assert poll.stream.readers == [poll.poller]
    poll.rig.play(poll.stream, "a")
    await asyncio.wait_for(asyncio.gather(*waiting), 5)
    clock.advance(29)
    assert poll.stream.state == "running"
    clock.advance(2)
    assert poll.stream.state == "detached"


@in_loop
async def test_a_poll_earns_a_window_and_between_polls_nothing_is_earned() -> None:
    poll = Poll(credit_window=4)
    await poll.poller.events_after(-1, 0)
    assert poll.rig.run_dry(poll.stream) == 4
    poll.stream.wake()
    assert poll.rig.run_dry(poll.stream) == 0
    await poll.poller.events_after(4, 0)
    assert poll.rig.run_dry(poll.stream) == 4


@in_loop
async def test_a_poller_does_not_hold_a_stream_that_has_ended() -> None:
    poll = Poll()
    await poll.poller.events_after(-1, 0)
    poll.stream.finish(Outcome("cancelled"))
    await poll.poller.events_after(-1, 0)
    poll.rig.clock.advance(31)
    assert poll.stream.readers == []
    assert poll.rig.clock.pending == 0


@in_loop
async def test_a_client_that_streams_goes_on_when_the_poller_leaves() -> None:
    poll = Poll()
    poll.rig.admit(poll.stream)
    await poll.poller.events_after(-1, 0)
    client = Client(poll.stream)
    poll.rig.clock.advance(31)
    assert poll.stream.readers == [client.reader]
    assert poll.stream.state == "running"


@in_loop
async def test_a_poll_whose_client_left_keeps_its_lease() -> None:
    poll = Poll()
    waiting = poll.start(after=0)
    await turns()
    waiting.cancel()
    await turns()
    assert poll.stream.readers == [poll.poller]
    poll.rig.clock.advance(31)
    assert poll.stream.state == "detached"
