"""Requests for what another process of this server has: a stream, a response, a generation that its client named."""

from __future__ import annotations

from typing import Protocol

from server.api import errors
from server.elsewhere import Elsewhere, Unreachable
from server.http import Call, Response, Streaming


class Route(Protocol):
    """What must be known of a request's route."""

    @property
    def generates(self) -> str: ...  # noqa: D102
    @property
    def websocket(self) -> bool: ...  # noqa: D102
    @property
    def kept(self) -> bool: ...  # noqa: D102


def home_of(elsewhere: Elsewhere, call: Call, route: Route, name: str) -> int | None:
    """The other process that a request is for. `name`: of what its path names."""
    if call.guest or not elsewhere.several:
        return None
    if route.kept:
        return elsewhere.home_of(name)
    if route.generates and not route.websocket:
        if last := call.header(b"last-event-id"):
            return elsewhere.home_of(last.partition(":")[0])
        if key := call.header(b"idempotency-key"):
            return elsewhere.home_for(call.key, key)
    return None


async def answer_elsewhere(elsewhere: Elsewhere, call: Call, route: Route, name: str) -> Response | Streaming | None:
    """What that process answers. None: there is none; or it is gone, and what it had with it. Raises ApiError where
    that can't be said of a request that may begin a generation."""
    home = home_of(elsewhere, call, route, name)
    if home is None:
        return None
    call.forwarded = True
    try:
        return await elsewhere.answer(home, call)
    except Unreachable:
        call.forwarded = False
        if route.kept or call.header(b"last-event-id"):
            return None
        raise errors.busy(503, "the process that answers for this Idempotency-Key is starting", 1) from None
