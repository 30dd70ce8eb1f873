"""All processes of a server as one of them sees them: who has what, what to ask them, and being asked."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from server.elsewhere import Told, Unreachable
from server.frontends.links import Links, Question, Reply
from server.frontends.owner import Answering, Guest, Owner
from server.frontends.relay import Relay, RelayFraming
from server.frontends.wire import Answer, Ask, Asked, Count, Counted, Find, Found, Show, Status, ToOwner
from server.http import Call, Response, Streaming
from server.places import place_for, place_of

# A scrape that one process keeps waiting so long fails: a sum without it would be none.
COUNT_WAIT_S = 2.0
BACKLOG = 128


def _nothing() -> None:
    pass


class Mesh:
    """See Elsewhere. `folder`: where each process has its socket; `index`: this one's of `count`."""

    several = True

    def __init__(self, folder: str, index: int, count: int) -> None:
        self.guests: set[Guest] = set()  # calls of other processes that are being answered here
        self._index = index
        self._count = count
        self._folder = folder
        self._links = Links(self._path)
        self._server: asyncio.Server | None = None

    def _path(self, index: int) -> str:
        return f"{self._folder}/frontend-{index}.sock"

    async def listen(self, program: Answering) -> None:
        """Answer what others ask, by `program`."""
        path = self._path(self._index)
        with suppress(FileNotFoundError):
            os.unlink(path)  # of the one that died here
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: Owner(program, self.guests), path, backlog=BACKLOG)

    def home_of(self, name: str) -> int | None:
        """See Elsewhere."""
        place = place_of(name)
        return place if 0 <= place < self._count and place != self._index else None

    def home_for(self, key: str, name: str) -> int | None:
        """See Elsewhere."""
        place = place_for(key, name, count=self._count)
        return place if place != self._index else None

    async def answer(self, home: int, call: Call) -> Response | Streaming:
        """See Elsewhere."""
        question = Question(call.on_whole_answer)
        return self._shown(question, await self._links.ask(home, lambda id: Ask(id, _asked(call)), question))

    async def show(self, home: int, call: Call, id_: str, stream_id: str, after: int) -> Response | Streaming:
        """See Elsewhere."""
        question = Question(_nothing)
        asked = _asked(call)
        reply = await self._links.ask(home, lambda id: Show(id, asked, id_, stream_id, after), question)
        return self._shown(question, reply)

    def _shown(self, question: Question, reply: Reply) -> Response | Streaming:
        if isinstance(reply, Answer):
            return Response(reply.status, reply.body, reply.content_type, reply.headers)
        assert isinstance(reply, Relay)
        assert question.opened is not None
        return Streaming(reply, RelayFraming(question.opened), 0, question.opened.headers, question.opened.status)

    async def stored(self, home: int, key: str, response_id: str) -> Told | None:
        """See Elsewhere."""
        found = await self._find(home, lambda id: Find(id, key, response_id, False))
        return Told(found.items, found.final) if found.known else None

    async def item(self, home: int, key: str, item_id: str) -> dict[str, Any] | None:
        """See Elsewhere."""
        found = await self._find(home, lambda id: Find(id, key, item_id, True))
        return msgspec.json.decode(found.final, type=dict[str, Any]) if found.known else None

    async def _find(self, home: int, message: Callable[[int], ToOwner]) -> Found:
        found = await self._links.ask(home, message, Question(_nothing))
        assert isinstance(found, Found)
        return found

    async def count(self) -> list[bytes]:
        """See Elsewhere."""
        return await self._ask_all(Count)

    async def status(self, *, names_keys: bool) -> list[bytes]:
        """See Elsewhere."""
        return await self._ask_all(lambda id: Status(id, names_keys))

    async def _ask_all(self, message: Callable[[int], ToOwner]) -> list[bytes]:
        """What each other process tells. One that is down has counted nothing. Raises TimeoutError where one that is up
        doesn't reply."""
        others = [index for index in range(self._count) if index != self._index]
        await asyncio.sleep(0)  # in a task from here on, see server/begun
        async with asyncio.timeout(COUNT_WAIT_S):
            counted = await asyncio.gather(*(self._count_of(index, message) for index in others))
        return [text for text in counted if text]

    async def _count_of(self, index: int, message: Callable[[int], ToOwner]) -> bytes:
        try:
            counted = await self._links.ask(index, message, Question(_nothing))
        except Unreachable:
            return b""
        assert isinstance(counted, Counted)
        return counted.text


def _asked(call: Call) -> Asked:
    return Asked(
        call.request,
        call.path,
        call.query,
        call.client,
        call.request_id,
        call.received_at,
        call.body,
        call.key,
        call.api,
    )
