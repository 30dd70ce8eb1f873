"""The shortest way of a token to its client: its event made of pieces and sent by compiled code, past the transport.

A token costs little more than its send(2) that way. It is taken where nothing is in between: a socket without TLS, one
choice, and a transport that holds nothing unsent, which `Gate.writable` means where there is an outlet. What the socket
doesn't take the transport does, in order; whatever is unusual goes by `Framing.one` and `Channel.write`, which say what
the bytes are: a test holds both against each other. Where the compiled code is missing (it is made at installation, on
Linux, by a C compiler) everything goes that way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Literal, Protocol

# A piece of an event is bytes, or one of these marks: the text as the inside of a JSON string, the event's position,
# the text alone.
TEXT, POSITION, PLAIN_TEXT = range(3)
Pieces = tuple[bytes | int, ...]
# What goes around an event: nothing, a chunk of HTTP/1.1, a WebSocket's frame.
BARE, CHUNK, FRAME = range(3)
VERSION = 2  # of what is compiled, as it is used here
# Of so many sequences the memory is asked for together: with many, one wait is for all of them; with too many, the
# first are out of the nearest cache again when their turn comes.
BLOCK = 16


class Outlet(Protocol):
    """`sent_at`: when it last sent, by the loop's clock."""

    sent_at: float

    def send(self, text: bytes, position: int) -> bool:
        """Send the event of a JSON-escaped text. False: nothing was sent, and it must go the other way."""
        ...

    def touches(self, *objects: object) -> None:
        """What each token touches beside this, for `ahead`; no reference is kept."""
        ...


Make = Callable[[int, int, Pieces, Callable[[bytes], None]], Outlet]
Prefetch = Callable[[dict[int, Outlet], list[int]], None]


def _find() -> tuple[Make, Prefetch] | tuple[None, None]:
    try:
        from server import _outlet  # type: ignore[attr-defined,unused-ignore]
    except ImportError:
        return None, None
    if getattr(_outlet, "VERSION", 0) != VERSION:  # of a checkout that was updated and not installed again
        return None, None
    return _outlet.Outlet, _outlet.prefetch


make, prefetch = _find()
Sender = Literal["compiled", "python"]


def sender() -> Sender:
    """What sends the tokens that can have an outlet, as an operator is told it."""
    return "python" if make is None else "compiled"


def outlet(transport: asyncio.Transport, envelope: int, pieces: Pieces | None) -> Outlet | None:
    """One for the socket of `transport`, if there can be one. To be used only while the transport lives, which owns the
    socket; from now on readers stop as soon as anything waits in it."""
    sock = transport.get_extra_info("socket")
    if make is None or pieces is None or sock is None:
        return None
    transport.set_write_buffer_limits(high=0)
    return make(sock.fileno(), envelope, pieces, transport.write)


def ahead(ids: list[int], outlets: dict[int, Outlet]) -> Iterable[int]:
    """`ids`. Before each few of them, what their tokens will touch is asked for: with hundreds of streams none of it is
    in the processor's caches, and each token would wait for one place after another."""
    return ids if prefetch is None else chain.from_iterable(_blocks(ids, outlets, prefetch))


def _blocks(ids: list[int], outlets: dict[int, Outlet], prefetch: Prefetch) -> Iterator[list[int]]:
    for start in range(0, len(ids), BLOCK):
        block = ids[start : start + BLOCK]
        prefetch(outlets, block)
        yield block
