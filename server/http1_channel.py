"""The body of one streamed answer over HTTP/1.1: where its reader writes. The connection does the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from server.readers import ClientReader

if TYPE_CHECKING:
    from server.connection import Connection


class HttpChannel:
    """A reader's way to the client: the body of one streamed answer, whose head was made before the first `write`.
    `wrote_at`: when a piece of it was last written, by the loop's clock."""

    __slots__ = ("_connection", "_frame", "_loop", "_write", "reader", "writable", "wrote_at")

    reader: ClientReader
    _frame: Callable[[bytes], bytes]

    def __init__(self, connection: Connection, *, writable: bool) -> None:
        self._connection = connection
        self._loop = connection.host.loop
        self._write = connection.transport.write
        self.writable = writable
        self.wrote_at = self._loop.time()

    @property
    def gate(self) -> HttpChannel:
        """See Channel."""
        return self

    def begin(self, frame: Callable[[bytes], bytes]) -> None:
        """The head was written; `frame` is what goes around each piece."""
        self._frame = frame

    def write(self, data: bytes) -> None:
        """One piece of the body."""
        self._write(self._frame(data))
        self.wrote_at = self._loop.time()

    def keep_alive(self) -> float:
        """It is time for a ping, if nothing was written meanwhile. Returns in how many seconds to look again."""
        keepalive_s = self._connection.host.deadlines.keepalive_s
        wait_s = self.wrote_at + keepalive_s - self._loop.time()
        if wait_s > 0:
            return wait_s
        if self.writable and self.reader.framing.ping:
            self.ping()
        return keepalive_s

    def ping(self) -> None:
        """Show that the server lives."""
        self.write(self.reader.framing.ping)

    def finish(self) -> None:
        """The body is whole."""
        self._connection.channel_ended(whole=True)

    def cut(self) -> None:
        """It isn't, and won't be."""
        self._connection.channel_ended(whole=False)
