"""What h11 writes around the body of an answer, and whether it would keep the connection.

That depends on little: the status, the client's version of HTTP, whether it asked by HEAD, whether a length is told and
whether we want to close. So h11 is asked once for each of these kinds, on a connection of its own, and what it said is
kept. The other fields of a head stand as h11 would write them, or are given to it.

Imports h11 and msgspec. Raises ValueError for what can't be sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from http import HTTPStatus

import h11
import msgspec

# Statuses that are in use, times the other things that make a kind: far fewer.
KINDS_KEPT = 256
# Names of fields that answers have together: some thirty such lists are in use.
NAMES_KEPT = 256

# What a value may hold, besides the white space that it may not begin or end with.
_SENDABLE = bytes([0x09, *range(0x20, 0x7F), *range(0x80, 0x100)])
_SPECIAL = frozenset({b"connection", b"content-length", b"host", b"transfer-encoding"})
_OURS = frozenset({b"content-length", b"transfer-encoding"})
_name = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_unsendable = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_connection = re.compile(rb"\r\nconnection: ([^\r\n]*)", re.IGNORECASE)

Fields = tuple[tuple[bytes, bytes], ...]


class Frame(msgspec.Struct, frozen=True):
    """One kind of answer: `status_line`, then its other fields, then `framing`; where there is a length, its digits and
    `behind_length`; then the body and `end`."""

    status_line: bytes
    framing: bytes
    behind_length: bytes
    end: bytes
    keeps: bool  # another request may follow


@lru_cache(maxsize=KINDS_KEPT)
def frame_of(status: int, version: bytes | None, with_length: bool, *, is_head: bool, close: bool) -> Frame:
    """What h11 makes of an answer to a whole request of this version; None: no request was understood."""
    connection = _asked(version, is_head=is_head)
    head = connection.send(_response(status, (), 0 if with_length else None, close))
    status_line, _, rest = head.partition(b"\r\n")
    before, length, behind = rest.partition(b"Content-Length: 0") if with_length else (rest, b"", b"")
    end = connection.send(h11.EndOfMessage())
    keeps = connection.our_state is h11.DONE and connection.their_state is h11.DONE
    return Frame(status_line + b"\r\n", before + length[:-1], behind, end, keeps)


def plain_lines(fields: Fields) -> bytes | None:
    """The lines of these fields, if h11 would write them just so, whatever is beside them. None when in doubt."""
    for _, value in fields:
        if not value or value.strip() is not value:  # white space around it
            return None
    lines = b"\r\n".join([*map(b": ".join, fields), b""])
    plain = lines.translate(None, _SENDABLE) == b"\r\n" * len(fields)
    return lines if plain and _are_plain_names(tuple([name for name, _ in fields])) else None


def irregular_head(
    fields: Fields, status: int, version: bytes | None, length: int | None, *, is_head: bool, close: bool
) -> bytes:
    """A whole head as h11 writes it. Raises ValueError where it wouldn't."""
    for name, value in fields:
        if _unsendable.search(value):
            raise ValueError(f"a control character in the value of {name!r}")
        if name.lower() in _OURS:
            raise ValueError(f"{name!r} is chosen by `length`")
    return _with_one_connection_field(_asked(version, is_head=is_head).send(_response(status, fields, length, close)))


def _asked(version: bytes | None, *, is_head: bool) -> h11.Connection:
    """A connection on which a request came whole."""
    connection = h11.Connection(h11.SERVER)
    if version is not None:
        method = b"HEAD" if is_head else b"GET"
        connection.receive_data(b"%b / HTTP/%b\r\nHost: a\r\n\r\n" % (method, version))
        while not isinstance(connection.next_event(), h11.EndOfMessage):
            pass
    return connection


def _response(status: int, fields: Iterable[tuple[bytes, bytes]], length: int | None, close: bool) -> h11.Response:
    """Raises ValueError for what can't be sent."""
    fields = list(fields)
    if length is not None:
        fields.append((b"Content-Length", b"%d" % length))
    if close:
        fields.append((b"Connection", b"close"))
    try:
        return h11.Response(status_code=status, headers=fields, reason=_reason(status))
    except h11.LocalProtocolError as fault:
        raise ValueError(str(fault)) from None


@lru_cache(maxsize=NAMES_KEPT)
def _are_plain_names(names: tuple[bytes, ...]) -> bool:
    return all(_name.fullmatch(name) is not None and name.lower() not in _SPECIAL for name in names)


def _with_one_connection_field(head: bytes) -> bytes:
    """h11 writes each connection option on a line of its own; clients that look at one line would miss the others."""
    options = _connection.findall(head)
    if len(options) < 2:
        return head
    return _connection.sub(b"", head)[:-4] + b"\r\nConnection: %b\r\n\r\n" % b", ".join(options)


def _reason(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""
