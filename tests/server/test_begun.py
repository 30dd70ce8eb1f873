"""server.begun: what needs no wait is done at once; what waits goes on as a task would, and is cancelled like one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from server.begun import begin
from tests.fuzz.virtual_loop import VirtualLoop


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop()
    with made.running():
        yield made


def test_work_that_does_not_wait(loop: VirtualLoop) -> None:
    seen = []

    async def work() -> None:
        seen.append(1)

    assert begin(loop, work()) is None
    assert seen == [1]


def test_its_fault_is_the_callers(loop: VirtualLoop) -> None:
    async def work() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        begin(loop, work())


@pytest.mark.parametrize("early", [True, False])
def test_work_that_waits(loop: VirtualLoop, early: bool) -> None:
    """Also where what it waits for comes before the task's first step."""
    first, second = loop.create_future(), loop.create_future()
    seen: list[object] = []

    async def work() -> None:
        seen.append("begun")
        seen.append(await first)
        await asyncio.sleep(0)
        async with asyncio.timeout(5):  # it is a task now
            seen.append(await second)

    task = begin(loop, work())
    assert task is not None
    assert seen == ["begun"]
    if not early:
        loop.rest()
    first.set_result("one")
    loop.rest()
    assert seen == ["begun", "one"]
    second.set_result("two")
    loop.rest()
    assert seen == ["begun", "one", "two"]
    assert task.done() and not task.cancelled()


def test_a_fault_behind_a_wait(loop: VirtualLoop) -> None:
    future = loop.create_future()

    async def work() -> None:
        await future

    task = begin(loop, work())
    assert task is not None
    future.set_exception(LookupError())
    loop.rest()
    assert isinstance(task.exception(), LookupError)


@pytest.mark.parametrize("early", [True, False])
def test_a_cancellation_is_felt_inside(loop: VirtualLoop, early: bool) -> None:
    """Before the task's first step as behind it; and work that goes on all the same may wait again."""
    seen: list[str] = []
    future, more = loop.create_future(), loop.create_future()

    async def work() -> None:
        try:
            await future
        except asyncio.CancelledError:
            seen.append("cancelled")
            await more
            raise

    task = begin(loop, work())
    assert task is not None
    if not early:
        loop.rest()
    task.cancel()
    loop.rest()
    assert (seen, task.done()) == (["cancelled"], False)
    more.set_result(None)
    loop.rest()
    assert task.cancelled()
    assert loop.faults == []
