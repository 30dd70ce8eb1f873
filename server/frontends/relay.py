"""A stream of another process, as its readers here see it: a log of pieces that the owner has framed already.

The pieces are events to the reader, which writes them as its connection takes them; so HTTP/1.1, HTTP/2 and WebSockets
need to know nothing of where a stream lives. When the reader has written all, the owner may send more.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from server.frontends.wire import WINDOW_BYTES, Closed, End, Leave, Opened, Take
from server.http import WebSocketChannel
from server.log import Event, Log
from server.outcome import ERROR, STOP, Outcome
from server.outlet import Outlet, Pieces
from server.stream import Reader

_LENGTH = struct.Struct(">I")
OWNER_DIED = "the server process that had this stream died"


class Relay:
    """One reader's view of a stream elsewhere. `tell`: says something to its owner."""

    def __init__(self, opened: Opened, tell: Callable[[Take | End | Leave], None]) -> None:
        self.id = opened.stream
        self.hungry = True  # for bytes, which are counted when they are taken
        self.outcome: Outcome | None = None  # known is only whether the body is whole
        self.last = b""  # a WebSocket's last message
        self.log = Log(0)  # what was written goes
        self.log.keep_from = 0
        self._number = opened.id
        self._tell = tell
        self._reader: Reader | None = None
        self._owed = 0  # bytes that came and weren't taken yet, as far as the owner knows

    def attach(self, reader: Reader) -> None:
        """The one reader."""
        self._reader = reader

    def detach(self, reader: Reader) -> None:
        """It is gone, or has all there is."""
        self._reader = None
        if self.outcome is None:
            self.outcome = Outcome(STOP)
            self._tell(Leave(self._number))

    def leaves_by(self, outlet: Outlet, reader: Reader, gate: object) -> None:
        """Nothing does: a piece may be of any kind."""

    def renew(self) -> None:
        """Everything was written: the owner learns it in halves of a window."""
        self.log.keep_from = self.log.end
        if self._owed >= WINDOW_BYTES // 2:
            self._tell(Take(self._number, self._owed))
            self._owed = 0

    def finish(self, end: Outcome) -> None:
        """Ask the owner to end the stream so."""
        if self.outcome is None:
            self._tell(End(self._number, end.message))

    # What the owner says

    def push(self, data: bytes) -> None:
        """A piece."""
        self.log.append(Event(-1, data))
        self._owed += len(data)
        self._wake()

    def close(self, closed: Closed) -> None:
        """The end."""
        self.last = closed.last
        self._end(Outcome(STOP) if closed.whole else Outcome(ERROR, "this reader fell behind what is held"))

    def lost(self) -> None:
        """The owner is gone."""
        self._end(Outcome(ERROR, OWNER_DIED, retriable=True))

    def _end(self, outcome: Outcome) -> None:
        if self.outcome is None:
            self.outcome = outcome
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None:
            self._reader.pump()


class RelayFraming:
    """The pieces as they are. An answer that the owner cut is cut here."""

    lies_at_the_end = True

    def __init__(self, opened: Opened) -> None:
        self.content_type = opened.content_type
        self.ping = opened.ping
        self.half_close = opened.half_close

    def one(self, event: Event, position: int) -> bytes:
        """See Framing."""
        return event.text

    def pieces(self) -> Pieces | None:
        """See Framing."""
        return None


class RelayedMessages:
    """The pieces are a WebSocket's messages, each with its length in front: its own frames go around them."""

    content_type = ping = b""
    half_close = lies_at_the_end = False

    def __init__(self, socket: WebSocketChannel) -> None:
        self.socket = socket

    def one(self, event: Event, position: int) -> bytes:
        """See Framing."""
        return b"".join([self.socket.frame(message) for message in _messages(event.text)])

    def pieces(self) -> Pieces | None:
        """See Framing."""
        return None


class Packed:
    """Where an owner writes such messages."""

    def frame(self, payload: bytes) -> bytes:
        """One of them."""
        return _LENGTH.pack(len(payload)) + payload


def _messages(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size + length
        yield data[at - length : at]
