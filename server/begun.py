"""Work that is begun at once, and becomes a task only where it has to wait.

Most requests are answered without waiting for anything: then there is no task, and whoever measures a turn has all of
the request's work in it. What runs before the first wait runs in no task of its own, so `asyncio.timeout` and
`asyncio.current_task` have no place there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any


def begin(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Run `work` up to its first wait. The task that goes on from there; None: it is done. Raises what it raises."""
    try:
        awaited = work.send(None)
    except StopIteration:
        return None
    return loop.create_task(_Begun(work, awaited))


class _Begun(Coroutine[Any, Any, None]):
    """`work`, as a coroutine that is still to be begun: its first step only tells what `work` waits for."""

    __slots__ = ("_awaited", "_told", "_work")

    def __init__(self, work: Coroutine[Any, Any, None], awaited: Any) -> None:
        self._work = work
        self._awaited = awaited
        self._told = False

    def send(self, value: Any) -> Any:
        """See Coroutine."""
        if self._told:
            return self._work.send(value)
        self._told = True
        awaited, self._awaited = self._awaited, None
        return awaited

    def throw(self, *fault: Any) -> Any:
        """See Coroutine. A cancellation may be the first that comes."""
        self._told = True
        self._awaited = None
        return self._work.throw(*fault)

    def close(self) -> None:
        """See Coroutine."""
        self._work.close()

    def __await__(self) -> Generator[Any, Any, None]:
        raise TypeError("only a task runs it")
