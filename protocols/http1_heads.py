"""Heads of requests that were read before: the same bytes say the same, and need not be read again.

A client sends the same head with each of its requests, but for the length of the body. So what is remembered of a head
is everything around that number. What the guard and h11 let pass with one number they let pass with any other of those
that are looked for here, and it says the same but for that number. Heads that say more than how long the body is (an
upgrade, chunks, an expectation) are always read.

Imports msgspec and the guard. Raises nothing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from protocols.http1_guard import LENGTH_DIGITS_MAX, Framing

if TYPE_CHECKING:
    from protocols.http1 import Request

# Of so many shapes, each some 9 KB at most with what was made of it: under 5 MB. Over it the table starts anew.
HEADS_MAX = 512
# Heads that never come again (a prompt in the target, a trace's id) are none of them: only their hashes are kept, and
# only what comes a second time is remembered.
HASHES_MAX = 4096
# Clients send 0.2 to 1 KB, in 3 to 20 fields.
HEAD_BYTES_MAX = 2048
FIELDS_MAX = 32

# A number above 0 as everybody writes it, and where there is but one such field (the guard sees to that).
_length = re.compile(rb"\r\n(?i:content-length): ([1-9][0-9]{0,%d})\r\n" % (LENGTH_DIGITS_MAX - 1))


class _Known(NamedTuple):
    request: Request
    at: int  # the place of its Content-Length among the fields; -1: it has none


_known: dict[bytes | tuple[bytes, bytes], _Known] = {}
_came_once: set[int] = set()


def _shape(head: bytes) -> tuple[bytes | tuple[bytes, bytes], bytes]:
    """What is around the length, and the length; the whole head where there is none."""
    found = _length.search(head)
    if found is None:
        return head, b""
    start, end = found.span(1)
    return (head[:start], head[end:]), head[start:end]


def find(head: bytes) -> Request | None:
    """What a head says that was read before."""
    if len(head) > HEAD_BYTES_MAX:
        return None
    shape, digits = _shape(head)
    known = _known.get(shape)
    if known is None:
        return None
    request, at = known
    if at < 0 or request.headers[at][1] == digits:
        return request
    headers = request.headers
    return replace(
        request, headers=(*headers[:at], (b"content-length", digits), *headers[at + 1 :]), content_length=int(digits)
    )


def keep(head: bytes, request: Request) -> None:
    """Remember what h11 made of a head that the guard let pass, if it comes for the second time."""
    if (
        len(head) > HEAD_BYTES_MAX
        or len(request.headers) > FIELDS_MAX
        or request.chunked
        or request.upgrade
        or request.expect_continue
    ):
        return
    shape, digits = _shape(head)
    mark = hash(shape)
    if mark not in _came_once:
        if len(_came_once) >= HASHES_MAX:
            _came_once.clear()
        _came_once.add(mark)
        return
    if len(_known) >= HEADS_MAX:
        _known.clear()
    _known[shape] = _Known(request, request.headers.index((b"content-length", digits)) if digits else -1)


def framing_of(request: Request) -> Framing:
    """As the guard told it."""
    return Framing(request.content_length, request.chunked)


def count() -> tuple[int, int]:
    """How many are remembered, and of how many the hash."""
    return len(_known), len(_came_once)


def forget() -> None:
    """Remember none, as at the start."""
    _known.clear()
    _came_once.clear()
