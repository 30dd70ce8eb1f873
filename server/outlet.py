"""The shortest way of a token to its client: its event made of pieces and sent by compiled code, past the transport.

A token costs little more than its send(2) that way. It is taken where nothing is in between: a socket without TLS, one
choice, and a transport that holds nothing unsent, which `Gate.writable` means where there is an outlet. What the socket
doesn't take the transport does, in order; whatever is unusual goes by `Framing.one` and `Channel.write`, which say what
the bytes are: a test holds both against each other. Where the compiled code is missing (it is made at installation, on
Linux, by a C compiler) everything goes that way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

# A piece of an event is bytes, or one of these marks: the text as the inside of a JSON string, the event's position,
# the text alone.
TEXT, POSITION, PLAIN_TEXT = range(3)
Pieces = tuple[bytes | int, ...]
# What goes around an event: nothing, a chunk of HTTP/1.1, a WebSocket's frame.
BARE, CHUNK, FRAME = range(3)


class Outlet(Protocol):
    """`sent_at`: when it last sent, by the loop's clock."""

    sent_at: float

    def send(self, text: bytes, position: int) -> bool:
        """Send the event of a JSON-escaped text. False: nothing was sent, and it must go the other way."""
        ...


Make = Callable[[int, int, Pieces, Callable[[bytes], None]], Outlet]


def _find() -> Make | None:
    try:
        from server._outlet import Outlet as Compiled  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return None
    make: Make = Compiled
    return make


make: Make | None = _find()


def outlet(transport: asyncio.Transport, envelope: int, pieces: Pieces | None) -> Outlet | None:
    """One for the socket of `transport`, if there can be one. To be used only while the transport lives, which owns the
    socket; from now on readers stop as soon as anything waits in it."""
    sock = transport.get_extra_info("socket")
    if make is None or pieces is None or sock is None:
        return None
    transport.set_write_buffer_limits(high=0)
    return make(sock.fileno(), envelope, pieces, transport.write)
