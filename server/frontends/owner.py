"""Questions of other server processes, answered here as if their clients had come to this one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, cast

from server.frontends.wire import (
    WINDOW_BYTES,
    Answer,
    Ask,
    Asked,
    Closed,
    Collecting,
    Count,
    Counted,
    End,
    Find,
    Found,
    Leave,
    Opened,
    Piece,
    Show,
    Status,
    Take,
    ToAsker,
    ToOwner,
    encode,
    owner_reader,
)
from server.http import Call, Response, Streaming
from server.outcome import CANCELLED, Outcome
from server.readers import ClientReader, Source


class Answering(Protocol):
    """What a process answers others by: its program."""

    async def answer(self, call: Call) -> Response | Streaming: ...  # noqa: D102
    async def show(self, call: Call, name: str, stream_id: str, after: int) -> Response | Streaming: ...  # noqa: D102
    def last_message(self, name: str, stream: Source) -> bytes: ...  # noqa: D102
    def counted(self) -> bytes: ...  # noqa: D102
    def status(self, *, names_keys: bool) -> bytes: ...  # noqa: D102
    def find(self, key: str, name: str, *, item: bool) -> tuple[bytes, bytes] | None: ...  # noqa: D102
    def sent(self, call: Call, status: int) -> None: ...  # noqa: D102
    def left(self, call: Call) -> None: ...  # noqa: D102


class Guest:
    """One call that came by another process: its task first, then the channel of its reader."""

    def __init__(
        self, owner: Owner, number: int, asked: Asked, last_message: Callable[[Source], bytes] | None = None
    ) -> None:
        self.number = number
        self.call = Call(
            request=asked.request,
            path=asked.path,
            query=asked.query,
            client=asked.client,
            request_id=asked.request_id,
            received_at=asked.received_at,
            body=asked.body,
            key=asked.key,
            api=asked.api,
            guest=True,
            on_whole_answer=lambda: owner.tell(Collecting(number)),
        )
        self.task: asyncio.Task[None] | None = None
        self._owner = owner
        self._last_message = last_message  # where a WebSocket shows the stream
        self._reader: ClientReader | None = None
        self._unread = 0  # bytes that the asking side has not taken

    def open(self, answer: Streaming) -> None:
        """The head of a streamed answer, and what its reader has."""
        framing = answer.framing
        reader = self._reader = ClientReader(answer.stream, framing, self, answer.cursor)
        answer.stream.attach(reader)
        self._owner.tell(
            Opened(
                self.number,
                answer.status,
                answer.headers,
                answer.stream.id,
                framing.content_type,
                framing.ping,
                framing.half_close,
            )
        )
        if self.call.request.method == "HEAD":
            reader.leave()
            self.finish()
        else:
            reader.pump()

    @property
    def gate(self) -> Guest:
        """See Channel."""
        return self

    @property
    def writable(self) -> bool:
        """See Gate."""
        return self._unread < WINDOW_BYTES

    def write_each(self, pieces: list[bytes]) -> None:
        """See Channel."""
        for data in pieces:
            self.write(data)

    def write(self, data: bytes) -> None:
        """See Channel."""
        self._unread += len(data)
        self._owner.tell(Piece(self.number, data))

    def finish(self) -> None:
        """See Channel."""
        reader, last = self._reader, self._last_message
        self._owner.close(self, whole=True, last=last(reader.stream) if last and reader else b"")

    def cut(self) -> None:
        """See Channel."""
        self._owner.close(self, whole=False)

    def take(self, size: int) -> None:
        """The asking side took some."""
        self._unread -= size
        if self._reader is not None and self.writable:
            self._reader.pump()

    def end(self, message: str) -> None:
        """Its client ends the stream."""
        if self._reader is not None:
            self._reader.stream.finish(Outcome(CANCELLED, message))

    def leave(self, program: Answering) -> None:
        """Its client is gone."""
        if self.task is not None:
            self.task.cancel()
            program.left(self.call)
        if self._reader is not None:
            self._reader.leave()


class Owner(asyncio.Protocol):
    """A connection from one other process. `guests`: of all connections, for a drain to wait for."""

    def __init__(self, program: Answering, guests: set[Guest]) -> None:
        self._program = program
        self._all_guests = guests
        self._guests: dict[int, Guest] = {}
        self._transport: asyncio.Transport
        self._reader = owner_reader()
        self._tasks: set[asyncio.Task[None]] = set()

    def tell(self, message: ToAsker) -> None:
        """Say something to the asking side."""
        if not self._transport.is_closing():
            self._transport.write(encode(message))

    def close(self, guest: Guest, *, whole: bool, last: bytes = b"") -> None:
        """A streamed answer is over."""
        self.tell(Closed(guest.number, whole, last))
        self._forget(guest)

    # The transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Another process may ask."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone, and its clients with it."""
        for guest in list(self._guests.values()):
            guest.leave(self._program)
            self._forget(guest)

    def data_received(self, data: bytes) -> None:
        """Questions came."""
        for message in self._reader.feed(data):
            self._handle(message)

    def _handle(self, message: ToOwner) -> None:
        program = self._program
        if isinstance(message, Ask):
            guest = self._receive(message.id, message.call)
            guest.task = self._begin(self._answer(guest, lambda: program.answer(guest.call)))
        elif isinstance(message, Show):
            show = message
            guest = self._receive(show.id, show.call, lambda stream: program.last_message(show.name, stream))
            answer = self._answer(guest, lambda: program.show(guest.call, show.name, show.stream, show.after))
            guest.task = self._begin(answer)
        elif isinstance(message, Count):
            self.tell(Counted(message.id, program.counted()))
        elif isinstance(message, Status):
            self.tell(Counted(message.id, program.status(names_keys=message.names_keys)))
        elif isinstance(message, Find):
            found = program.find(message.key, message.name, item=message.item)
            self.tell(Found(message.id, False) if found is None else Found(message.id, True, *found))
        elif guest_ := self._guests.get(message.id):
            self._on_guest(guest_, message)

    def _on_guest(self, guest: Guest, message: Take | End | Leave) -> None:
        if isinstance(message, Take):
            guest.take(message.size)
        elif isinstance(message, End):
            guest.end(message.message)
        else:
            guest.leave(self._program)
            self._forget(guest)

    def _receive(self, number: int, asked: Asked, last_message: Callable[[Source], bytes] | None = None) -> Guest:
        guest = self._guests[number] = Guest(self, number, asked, last_message)
        self._all_guests.add(guest)
        return guest

    def _forget(self, guest: Guest) -> None:
        self._guests.pop(guest.number, None)
        self._all_guests.discard(guest)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._tasks.discard)
        return task

    async def _answer(self, guest: Guest, answer: Callable[[], Awaitable[Response | Streaming]]) -> None:
        made = await answer()
        guest.task = None
        if isinstance(made, Response):
            self.tell(Answer(guest.number, made.status, made.body, made.content_type, made.headers))
            self._forget(guest)
            self._program.sent(guest.call, made.status)
        else:
            guest.open(made)
            self._program.sent(guest.call, made.status)
