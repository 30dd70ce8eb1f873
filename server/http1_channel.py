"""The body of one streamed answer over HTTP/1.1: where its reader writes. The connection does the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from server.readers import ClientReader

if TYPE_CHECKING:
    from server.connection import Connection


# A second ping so long after the first: the first one's answer, a reset from a client that is gone, is here by then.
HALF_CLOSE_PROBE_S = 0.05
# A client whose EOF came while the transport is full, so that no ping can be written, must take some of it within this.
# Its window may have been shut, and the kernel asks for a new one 200 ms later at the earliest (Linux's TCP_RTO_MIN).
HALF_CLOSE_DRAIN_S = 0.24


class HttpChannel:
    """A reader's way to the client: the body of one streamed answer. `wrote_at`: when a piece of it was last written,
    by the loop's clock."""

    __slots__ = ("_connection", "_frame", "_head", "_loop", "_write", "reader", "writable", "wrote_at")

    reader: ClientReader
    _frame: Callable[[bytes], bytes]

    def __init__(self, connection: Connection, *, writable: bool) -> None:
        self._connection = connection
        self._loop = connection.host.loop
        self._write: Callable[[bytes], None] = self._write_first
        self._head = b""  # until it leaves
        self.writable = writable
        self.wrote_at = self._loop.time()

    @property
    def gate(self) -> HttpChannel:
        """See Channel."""
        return self

    def begin(self, head: bytes, frame: Callable[[bytes], bytes]) -> None:
        """`head` leaves in one write with the first piece of the body, or by `flush`. `frame` is what goes around each
        piece."""
        self._head, self._frame = head, frame

    def flush(self) -> None:
        """Let the head leave, if it hasn't."""
        if self._head:
            self._write_first(b"")

    def _write_first(self, data: bytes) -> None:
        head, self._head = self._head, b""
        self._write = self._connection.transport.write
        self._write(head + data)

    def write(self, data: bytes) -> None:
        """One piece of the body."""
        self._write(self._frame(data))
        self.wrote_at = self._loop.time()

    def write_each(self, pieces: list[bytes]) -> None:
        """A chunk for each, as they would have had: of text alone they are all that tells tokens apart."""
        self._write(b"".join(map(self._frame, pieces)))
        self.wrote_at = self._loop.time()

    def keep_alive(self) -> float:
        """It is time for a ping, if nothing was written meanwhile. Returns in how many seconds to look again."""
        keepalive_s = self._connection.host.deadlines.keepalive_s
        outlet = self.reader.outlet
        wrote_at = self.wrote_at if outlet is None else max(self.wrote_at, outlet.sent_at)
        wait_s = wrote_at + keepalive_s - self._loop.time()
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
        self.flush()
        self._connection.channel_ended(whole=True)

    def cut(self) -> None:
        """It isn't, and won't be."""
        self.flush()
        self._connection.channel_ended(whole=False)

    def leave(self) -> None:
        """The client is gone."""
        self.reader.leave()
        self.part()

    def part(self) -> None:
        """From its reader, which has it: a cycle, which would keep both until Python's collector of garbage comes by.
        Nobody asks for the reader any more."""
        del self.reader

    def probe(self) -> None:
        """The client sends no more, and may still be reading: two pings tell, since writing to one that is gone fails
        by the second. A framing without pings has no half-close."""
        connection = self._connection
        if not self.reader.framing.half_close:
            connection.abort()
        elif self.writable:
            self.ping()
            self._loop.call_later(HALF_CLOSE_PROBE_S, self._probe_again)
        else:
            self._loop.call_later(HALF_CLOSE_DRAIN_S, self._probe_full, connection.unsent(), self.reader.cursor)

    def _probe_full(self, unsent: int, cursor: int) -> None:
        """The transport was full when the EOF came: a client that reads has drained some of it by now; or all of it,
        and the reader has filled it again, with more than before."""
        if not self._connection.shows(self):
            return
        if self.writable or self.reader.cursor > cursor or self._connection.unsent() < unsent:
            self.probe()
        else:
            self._connection.abort()

    def _probe_again(self) -> None:
        if self._connection.shows(self) and self.writable:
            self.ping()
