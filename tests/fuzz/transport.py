"""A transport without a socket: what was written waits until the peer reads it.

It is as strict as uvloop's where uvloop raises (a write behind `write_eof`, any write behind `connection_lost`), and
calls `pause_writing` and `resume_writing` at the same moments, so that what passes here is sound there.
"""

from __future__ import annotations

import asyncio
from typing import Any

# No kernel is below this transport to swallow the first bytes. With half of the connection's mark a peer that stops
# reading is felt after a few tokens, so that short inputs find the paths behind it.
HIGH_WATER_DIVISOR = 2


class LingerSocket:
    """What a connection may do to the socket below: ask that closing resets it, and send past the transport, which
    always fails here and is left to the transport by that."""

    def __init__(self) -> None:
        self.resets = False

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        """SO_LINGER, with a linger time of 0."""
        self.resets = True

    def fileno(self) -> int:
        """No descriptor."""
        return -1


class FakeTransport(asyncio.Transport):
    """`received` is what the peer has read; `end` is how the connection ended for it: "", "eof" or "reset"."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._protocol: Any = None
        self._unsent = bytearray()
        self._high = self._low = 0
        self._paused_writing = False
        self._eof_written = False
        self._eof_sent = False
        self._closing = False
        self._lost = False
        self._peer_done = False
        self._socket = LingerSocket()
        self.received = bytearray()
        self.end = ""
        self.reading = True
        self.unsent_max = 0
        self.dropped = False  # something unsent, by an abort
        self._reads_all = False

    def connect(self, protocol: Any) -> None:
        """Make the connection."""
        self._protocol = protocol
        protocol.connection_made(self)

    # The peer's side

    def feed(self, data: bytes) -> None:
        """Bytes from the peer; not called while the protocol has paused reading, as TCP wouldn't deliver them."""
        assert self.readable
        self._protocol.data_received(data)

    def feed_eof(self) -> None:
        """The peer sends no more."""
        assert self.readable
        self._peer_done = True
        if not self._protocol.eof_received():
            self.close()

    @property
    def readable(self) -> bool:
        """Whether the protocol is told what the peer sends."""
        return self.reading and not self._closing and not self._peer_done

    @property
    def seen_eof(self) -> bool:
        """The peer can tell, in an orderly way, that no more will come."""
        return self.end == "eof" or self._eof_sent

    @property
    def lost(self) -> bool:
        """The protocol was told that the connection is over."""
        return self._lost

    def drain(self, count: int) -> None:
        """The peer reads up to `count` bytes."""
        taken = bytes(self._unsent[:count])
        self.received += taken
        del self._unsent[: len(taken)]
        self._eof_sent |= self._eof_written and not self._unsent and not self.end
        if self._paused_writing and len(self._unsent) <= self._low and not self._lost:
            self._paused_writing = False
            self._protocol.resume_writing()
        if not self._unsent and self._closing:
            self._end("eof")

    def read_all(self) -> None:
        """From here on the peer reads whatever comes, at once."""
        self._reads_all = True
        self.drain(len(self._unsent))

    def reset(self) -> None:
        """The peer is gone."""
        self._unsent.clear()
        self._end("reset")

    def _end(self, how: str) -> None:
        self._closing = True
        if not self.end:
            self.end = how
            self._loop.call_soon(self._tell)

    def _tell(self) -> None:
        if not self._lost:
            self._lost = True
            self._protocol.connection_lost(None)

    # The protocol's side

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See asyncio.WriteTransport."""
        assert not self._lost, "a write behind connection_lost"
        assert not self._eof_written, "a write behind write_eof"
        if self._closing or not data:
            return
        self._unsent += data
        self.unsent_max = max(self.unsent_max, len(self._unsent))
        self._pause_if_full()
        if self._reads_all:
            self._loop.call_soon(self._drain_all)

    def _pause_if_full(self) -> None:
        if len(self._unsent) > self._high and not self._paused_writing:
            self._paused_writing = True
            self._protocol.pause_writing()

    def _drain_all(self) -> None:
        self.drain(len(self._unsent))

    def write_eof(self) -> None:
        """See asyncio.WriteTransport."""
        assert not self._lost, "write_eof behind connection_lost"
        if not self._closing:
            self._eof_written = True
            self._eof_sent = not self._unsent

    def can_write_eof(self) -> bool:
        """See asyncio.WriteTransport."""
        return True

    def close(self) -> None:
        """See asyncio.BaseTransport."""
        self._closing = True
        if not self._unsent:
            self._end("eof")

    def abort(self) -> None:
        """See asyncio.WriteTransport."""
        self.dropped |= bool(self._unsent)
        self._unsent.clear()
        self._end("reset" if self._socket.resets else "eof")

    def is_closing(self) -> bool:
        """See asyncio.BaseTransport."""
        return self._closing

    def pause_reading(self) -> None:
        """See asyncio.ReadTransport."""
        self.reading = False

    def resume_reading(self) -> None:
        """See asyncio.ReadTransport."""
        self.reading = True

    def get_write_buffer_size(self) -> int:
        """See asyncio.WriteTransport."""
        return len(self._unsent)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """See asyncio.WriteTransport."""
        assert high is not None
        self._high = high // HIGH_WATER_DIVISOR
        self._low = self._high // 4
        self._pause_if_full()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """See asyncio.BaseTransport."""
        return {"peername": ("127.0.0.1", 5), "socket": None if self._lost else self._socket}.get(name, default)
