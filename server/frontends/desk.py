"""What a process answers others by: its program, and what only processes of one server tell each other."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from protocols.escape import json_value
from server.api import errors, websocket
from server.api.errors import ApiError
from server.api.generation import Generation
from server.http import Call, Program, Response, Streaming
from server.metrics import Live, Metrics
from server.readers import Source
from server.status import server_now
from server.stream import Stream


class Desk:
    """See Answering. `own`: what is true at the moment of this process alone, and nothing of the engines."""

    def __init__(self, program: Program, generation: Generation, metrics: Metrics, own: Callable[[], Live]) -> None:
        self._own = own
        self.answer = program.answer
        self.sent = program.sent
        self.left = program.left
        self._generation = generation
        self._metrics = metrics

    async def show(self, call: Call, name: str, stream_id: str, after: int) -> Response | Streaming:
        """A stream as the messages of generation `name` on another process's WebSocket, or a refusal."""
        try:
            return websocket.packed(self._generation, self._metrics, call, name, stream_id, after)
        except ApiError as error:
            return errors.render(error)

    def last_message(self, name: str, stream: Source) -> bytes:
        """How such a generation ended."""
        assert isinstance(stream, Stream)
        assert stream.outcome is not None
        return websocket.last_message(name, stream, stream.outcome)

    def counted(self) -> bytes:
        """This process's own /metrics."""
        return self._metrics.render_with(self._own())

    def status(self, *, names_keys: bool) -> bytes:
        """This process's own /status."""
        generation = self._generation
        now = server_now(generation.table, self._metrics, self._own(), generation.model.name, names_keys=names_keys)
        return msgspec.json.encode(now)

    def find(self, key: str, name: str, *, item: bool) -> tuple[bytes, bytes] | None:
        """A stored response, or an item that came out of one."""
        store = self._generation.responses
        if item:
            found = store.find_item(name, key)
            return None if found is None else (b"", json_value(found))
        stored = store.find(name, key)
        return None if stored is None else (stored.items, stored.final)
