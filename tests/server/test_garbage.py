"""server.garbage: requests leave nothing to Python's collector, which would look at all that lives to find it."""

from __future__ import annotations

import asyncio
import gc
import io

import pytest

from bench.request import Bench, requests


@pytest.mark.parametrize("name", requests())
def test_an_answer_that_has_ended_is_freed_without_the_collector(name: str) -> None:
    async def play() -> int:
        bench = Bench(io.StringIO(), asyncio.get_running_loop())
        data = requests()[name]
        await bench.play(data)
        await asyncio.sleep(0)  # the streams are forgotten
        gc.collect()
        await bench.play(data)
        await asyncio.sleep(0)
        return gc.collect()

    gc.disable()
    try:
        assert asyncio.run(play()) == 0
    finally:
        gc.enable()
