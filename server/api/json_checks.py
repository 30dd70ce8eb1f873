"""What is looked at in the JSON of a request besides its types.

Each value takes some microseconds of the loop that all streams share, so there is a limit of them.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from server.api.errors import invalid

# What is counted of a body: each name, value and container has one or two of these marks. A request of as many blocks
# of text as the APIs allow has two thirds of this; the worst of so many holds the loop for some tenths of a second.
MARKS_MAX = 131_072
_NAMES = (b"[", b"{", b":")
_string = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # matches at any quote, and so looks at each byte once


def refuse_crowds(body: bytes, *, ids: bool = False, what: str = "the body", param: str | None = None) -> None:
    """Raises ApiError 400 for JSON of more names and values than a request can need. `ids`: it may be a list of token
    ids, whose numbers cost little and are not counted."""
    counted = _NAMES if ids else (*_NAMES, b",")
    if len(body) <= MARKS_MAX or _count(body, counted) <= MARKS_MAX:  # as nearly always
        return
    if _strings(body) > MARKS_MAX or _count(_bare(body), counted) > MARKS_MAX:
        raise invalid(param, f"{what} holds more names, values and lists than a request may ({MARKS_MAX:,} in all)")


def _count(body: bytes, counted: tuple[bytes, ...]) -> int:
    return sum(map(body.count, counted))


def _strings(body: bytes) -> int:
    """How many there are at least; each is a name or a value."""
    return (body.count(b'"') - body.count(b'\\"')) // 2


def _bare(body: bytes) -> bytes:
    """Without its strings."""
    return _string.sub(b"", body)


def refuse_crowded_arguments(calls: list[str], param: str) -> None:
    """The same for the arguments of a request's calls, which are JSON within its strings."""
    if calls:
        document = b",".join([arguments.encode(errors="replace") for arguments in calls])
        refuse_crowds(document, what="what the calls are given", param=param)


def refuse_repeated_names(document: str) -> None:
    """Raises ApiError 400 when an object of this valid JSON has a name twice: parsers differ on which one counts (RFC
    8259 section 4), so what a proxy before us has checked may not be what we would do."""
    if not _loses_nothing(document):
        _names_only.decode(document)


def _loses_nothing(document: str) -> bool:
    """Whether all of this JSON is still there once it is decoded, and so no name was there twice: with one of two
    values its colon would be gone. False when in doubt: a string may hide a colon in an escape."""
    if "\\u003a" in document or "\\u003A" in document:
        return False
    try:
        kept = msgspec.json.encode(msgspec.json.decode(document))
    except (msgspec.DecodeError, RecursionError):  # of a number beyond all bounds, say, in a field that nobody reads
        return False
    return kept.count(b":") == document.count(":")


def _unrepeated(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) == len(pairs):
        return
    names: set[str] = set()
    for name, _ in pairs:
        if name in names:
            raise invalid(name, f"{name} is given twice in one object", "invalid_json")
        names.add(name)


_names_only = json.JSONDecoder(object_pairs_hook=_unrepeated, parse_int=str, parse_float=str)
