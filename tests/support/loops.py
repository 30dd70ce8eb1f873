"""Tests that run in an event loop of their own, turn by turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

P = ParamSpec("P")


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test that is a coroutine."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


async def turn() -> None:
    """The loop's next turn."""
    await asyncio.sleep(0)


async def turns() -> None:
    """Let whatever is ready run, and what that makes ready."""
    for _ in range(5):
        await turn()
