"""Questions to other server processes: one connection to each, made when there is something to ask."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import cast

from server.elsewhere import Unreachable
from server.frontends.relay import Relay
from server.frontends.wire import (
    Answer,
    Closed,
    Collecting,
    Counted,
    Found,
    Leave,
    Opened,
    Piece,
    ToAsker,
    ToOwner,
    asker_reader,
    encode,
)

Reply = Answer | Relay | Found | Counted


class Question:
    """One that waits for its reply."""

    def __init__(self, on_collecting: Callable[[], None]) -> None:
        self.reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.opened: Opened | None = None
        self.on_collecting = on_collecting


class Link(asyncio.Protocol):
    """A connection to one other process."""

    def __init__(self) -> None:
        self.up = True
        self._transport: asyncio.Transport
        self._reader = asker_reader()
        self._numbers = count(1)
        self._questions: dict[int, Question] = {}
        self._relays: dict[int, Relay] = {}

    async def ask(self, message: Callable[[int], ToOwner], question: Question) -> Reply:
        """The reply. Whoever is cancelled while it waits has left. Raises Unreachable."""
        number = next(self._numbers)
        self._questions[number] = question
        self.tell(message(number))
        try:
            return await question.reply
        except asyncio.CancelledError:
            relay = self._relays.pop(number, None)
            if relay is not None or self._questions.pop(number, None) is not None:
                self.tell(Leave(number))
            raise

    def tell(self, message: ToOwner) -> None:
        """Say something about a question."""
        if isinstance(message, Leave):
            self._relays.pop(message.id, None)
        if self.up:
            self._transport.write(encode(message))

    # The transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The other process is there."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Replies came."""
        for message in self._reader.feed(data):
            self._handle(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """The other process is gone, with all that it had."""
        self.up = False
        questions, self._questions = self._questions, {}
        relays, self._relays = self._relays, {}
        for question in questions.values():
            if not question.reply.done():
                question.reply.set_exception(Unreachable())
        for relay in relays.values():
            relay.lost()

    def _handle(self, message: ToAsker) -> None:
        if isinstance(message, Piece):
            if relay := self._relays.get(message.id):
                relay.push(message.data)
        elif isinstance(message, Closed):
            if relay := self._relays.pop(message.id, None):
                relay.close(message)
        elif isinstance(message, Collecting):
            if question := self._questions.get(message.id):
                question.on_collecting()
        elif (question := self._questions.pop(message.id, None)) and not question.reply.done():
            if isinstance(message, Opened):
                question.opened = message
                self._relays[message.id] = relay = Relay(message, self.tell)
                question.reply.set_result(relay)
            else:
                question.reply.set_result(message)


class Links:
    """To every other process. `path_of`: where a process listens."""

    def __init__(self, path_of: Callable[[int], str]) -> None:
        self._path_of = path_of
        self._links: dict[int, Link] = {}
        self._connecting: dict[int, asyncio.Lock] = {}

    async def ask(self, home: int, message: Callable[[int], ToOwner], question: Question) -> Reply:
        """The reply of process `home`. Raises Unreachable."""
        link = await self._link(home)
        return await link.ask(message, question)

    async def _link(self, home: int) -> Link:
        async with self._connecting.setdefault(home, asyncio.Lock()):
            link = self._links.get(home)
            if link is None or not link.up:
                try:
                    _, link = await asyncio.get_running_loop().create_unix_connection(Link, self._path_of(home))
                except OSError:
                    raise Unreachable from None
                self._links[home] = link
            return link
