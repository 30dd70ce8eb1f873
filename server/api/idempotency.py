"""`Idempotency-Key`: a request that is sent again finds the generation that it began, and begins no second one.

A key is one client's own, and lives as long as its stream's log. The same request attaches to the stream from its first
event on, or waits for its whole answer; another request under the same key is refused with 422.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from hashlib import sha256

from server.api import streams
from server.api.errors import ApiError, invalid
from server.api.generation import SSE, Generation, collected, framing_named
from server.http import Call, Response, Streaming
from server.metrics import Metrics
from server.stream import Stream

KEY_CHARS_MAX = 255

Answer = Response | Streaming
Again = Callable[[Call, Stream], Response | None]


@dataclass(slots=True)
class Once:
    """The requests with a key that are being planned: one that comes meanwhile waits for what becomes of the first."""

    _planned: dict[tuple[str, str], asyncio.Event] = field(default_factory=dict)

    async def answer(
        self,
        generation: Generation,
        metrics: Metrics,
        call: Call,
        begin: Callable[[], Awaitable[Answer]],
        again: Again | None = None,
    ) -> Answer:
        """`begin()`, unless the call's key has begun already. `again`: answers that stream's client in the API's own
        way, or None where the stream or its whole answer will do. Raises ApiError."""
        name = call.header(b"idempotency-key")
        if not name:
            return await begin()
        if len(name) > KEY_CHARS_MAX:
            raise invalid("Idempotency-Key", f"an Idempotency-Key has at most {KEY_CHARS_MAX} characters")
        place = (call.key, name)
        while planned := self._planned.get(place):
            await planned.wait()
        digest = _digest(call)
        known = generation.table.recall(*place)
        if known is not None:
            _check_same(call, known, digest)
            return (again and again(call, known)) or await _again(generation, metrics, call, known)
        self._planned[place] = event = asyncio.Event()
        call.on_stream = lambda stream: self._began(generation, place, digest, stream)
        try:
            return await begin()
        finally:
            self._done(place, event)

    def _began(self, generation: Generation, place: tuple[str, str], digest: bytes, stream: Stream) -> None:
        generation.table.remember(stream, place[1], digest)
        if event := self._planned.get(place):
            self._done(place, event)

    def _done(self, place: tuple[str, str], event: asyncio.Event) -> None:
        if self._planned.get(place) is event:
            del self._planned[place]
        event.set()


def _check_same(call: Call, stream: Stream, digest: bytes) -> None:
    assert stream.idempotency is not None
    if stream.idempotency[1] != digest:
        message = "this Idempotency-Key was used for another request"
        raise ApiError(422, message, param="Idempotency-Key", code="idempotency_key_reused")
    call.stream_id = stream.id


async def _again(generation: Generation, metrics: Metrics, call: Call, stream: Stream) -> Answer:
    if not stream.framing:  # it is collected for an answer in one piece
        streams.retake_slot(generation, stream)
        return await collected(call, stream)
    kind = framing_named(call.header(b"accept")) or SSE
    return streams.resume(generation, metrics, stream, kind, -1, past_end=200)


def _digest(call: Call) -> bytes:
    """What makes two requests the same: route, query and body."""
    return sha256(f"{call.request.method} {call.path}?{call.query}\n".encode() + call.body).digest()
