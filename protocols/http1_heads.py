"""Heads of requests like those that were read before: what says the same need not be read again.

A client sends the same head with each of its requests, but for the length of the body: so what is remembered of a head
is everything around that number. Others differ in a trace's id too, an Idempotency-Key, a date, a prompt in the target:
so the shape of a head is remembered as well, which is everything around its target and around the values of its fields.
What the guard and h11 let pass with one target and one set of values they let pass with any others of the plain form
that is cut out here, and it says the same but for these. A value that tells how the head or its body is to be read is
never cut out, but for the number. Heads that say more than how long the body is (an upgrade, chunks, an expectation)
are always read.

Imports msgspec and the guard. Raises nothing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from protocols.http1_guard import LENGTH_DIGITS_MAX

if TYPE_CHECKING:
    from protocols.http1 import Request

# Of so many heads and shapes together, each some 9 KB at most with what was made of it: under 5 MB. Over it both tables
# start anew.
HEADS_MAX = 512
# Heads that never come again are none of them: only their hashes are kept, and only what comes a second time is
# remembered.
HASHES_MAX = 4096
# Clients send 0.2 to 1 KB, in 3 to 20 fields.
HEAD_BYTES_MAX = 2048
FIELDS_MAX = 32

# A number above 0 as everybody writes it, and where there is but one such field (the guard sees to that).
_NUMBER = rb"[1-9][0-9]{0,%d}" % (LENGTH_DIGITS_MAX - 1)
# Fields of which the guard, h11 or `Request` make more than a name and a value. A test holds them to it.
_TELLING = rb"connection|expect|host|transfer-encoding|upgrade|content-length(?!: %b\r)" % _NUMBER
_length = re.compile(rb"\r\n(?i:content-length): (%b)\r\n" % _NUMBER)
# Name and value of any other, where the value is of the plainest form: visible ASCII, with spaces inside only.
_opaque = re.compile(rb"\r\n(?!(?i:%b):)([!-9;-~]++): ([!-~][ -~]*+)(?<! )(?=\r\n)" % _TELLING)
# A path, with whatever follows it but a fragment.
_plain_target = re.compile(rb'/[!"$-~]*')

# What is around a head's length; the whole head where there is none.
_Around = bytes | tuple[bytes, bytes]
# The method, and what is between the target and the first name; then each name, and what is between its value and the
# next name. With the target and the values in their places it is the head again: nothing of it is lost.
_Shape = tuple[bytes, ...]


class _Cut(NamedTuple):
    shape: _Shape
    target: bytes
    values: list[bytes]


class _Known(NamedTuple):
    """What a head says around its length."""

    request: Request | None  # None: it is one of those that are always read
    at: int  # the place of its Content-Length among the fields; -1: it has none


class _Sense(NamedTuple):
    """What a shape says."""

    request: Request  # without target and fields
    names: tuple[bytes, ...]  # of all fields
    told: tuple[tuple[int, bytes], ...]  # place and value of the fields whose values are part of it, first to last
    length_at: int  # the place of a Content-Length that isn't one of them; -1: there is none


class Unread(NamedTuple):
    """A head like none that is remembered."""

    around: _Around
    digits: bytes  # of its length
    cut: _Cut | None

    def keep(self, request: Request) -> None:
        """Remember what h11 made of it, which the guard let pass, where it or its shape comes for the second time."""
        if len(request.headers) > FIELDS_MAX or request.chunked or request.upgrade or request.expect_continue:
            _keep_head(self.around, self.digits, None)
            return
        _keep_head(self.around, self.digits, request)
        if self.cut is not None and _came_before(self.cut.shape):
            sense = _sense(self.cut.shape, request)
            if _said(sense, self.cut) == request:  # as h11, which has the last word, said it
                _make_room()
                _senses[self.cut.shape] = sense


_known: dict[_Around, _Known] = {}
_senses: dict[_Shape, _Sense] = {}
_came_once: set[int] = set()


def find(head: bytes) -> Request | Unread | None:
    """What a head says. Or what keeps it once it is read; None: nothing will."""
    if len(head) > HEAD_BYTES_MAX:
        return None
    around, digits = _around_length(head)
    known = _known.get(around)
    if known is not None:
        request, at = known
        if request is None or at < 0 or request.headers[at][1] == digits:
            return request
        return _with_length(request, at, digits)
    cut = _cut(head)
    sense = _senses.get(cut.shape) if cut is not None else None
    if cut is None or sense is None:
        return Unread(around, digits, cut)
    request = _said(sense, cut)
    _keep_head(around, digits, request)
    return request


def _around_length(head: bytes) -> tuple[_Around, bytes]:
    """What is around the length, and the length."""
    found = _length.search(head)
    if found is None:
        return head, b""
    start, end = found.span(1)
    return (head[:start], head[end:]), head[start:end]


def _with_length(request: Request, at: int, digits: bytes) -> Request:
    headers = request.headers
    return replace(
        request, headers=(*headers[:at], (b"content-length", digits), *headers[at + 1 :]), content_length=int(digits)
    )


def _cut(head: bytes) -> _Cut | None:
    """None where the target isn't plain."""
    parts = _opaque.split(head)
    method, _, rest = parts[0].partition(b" ")
    target, _, rest = rest.partition(b" ")
    if _plain_target.fullmatch(target) is None:
        return None
    values = parts[2::3]
    del parts[2::3]
    parts[:1] = method, rest
    return _Cut(tuple(parts), target, values)


def _sense(shape: _Shape, request: Request) -> _Sense:
    """What all heads of this shape say, as h11 read one of them."""
    opaque = []
    at = shape[1].count(b"\r\n")
    for behind in shape[3::2]:
        opaque.append(at)
        at += 1 + behind.count(b"\r\n")
    names = tuple([name for name, _ in request.headers])
    told = tuple([(at, value) for at, (_, value) in enumerate(request.headers) if at not in opaque])
    length_at = next((at for at in opaque if names[at] == b"content-length"), -1)
    return _Sense(replace(request, target="", headers=()), names, told, length_at)


def _said(sense: _Sense, cut: _Cut) -> Request:
    """What a head says whose shape says this."""
    request, names, told, length_at = sense
    values = cut.values.copy()
    for at, value in told:
        values.insert(at, value)
    headers = tuple(zip(names, values, strict=True))
    length = int(values[length_at]) if length_at >= 0 else request.content_length
    return replace(request, target=cut.target.decode(), headers=headers, content_length=length)


def _keep_head(around: _Around, digits: bytes, request: Request | None) -> None:
    if _came_before(around):
        _make_room()
        at = request.headers.index((b"content-length", digits)) if request is not None and digits else -1
        _known[around] = _Known(request, at)


def _came_before(key: _Around | _Shape) -> bool:
    mark = hash(key)
    if mark in _came_once:
        return True
    if len(_came_once) >= HASHES_MAX:
        _came_once.clear()
    _came_once.add(mark)
    return False


def _make_room() -> None:
    if len(_known) + len(_senses) >= HEADS_MAX:
        _known.clear()
        _senses.clear()


def count() -> tuple[int, int]:
    """How many heads and shapes are remembered, and of how many the hash."""
    return len(_known) + len(_senses), len(_came_once)


def forget() -> None:
    """Remember none, as at the start."""
    _known.clear()
    _senses.clear()
    _came_once.clear()
