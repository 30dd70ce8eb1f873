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
# Token ids of a body, which cost a tenth of other values. A prompt of a longer context may have as many as fit in that.
BODY_IDS_MAX = 262_144
# No number that means anything is written so long, and the time for an integer grows with the square of its length.
# Every one of twice as many digits is found, and some that are shorter.
DIGITS_MAX = 128
_NAMES = (b"[", b"{", b":")
_VALUES = (*_NAMES, b",")
_pair = re.compile(rb"[0-9](?=[0-9])")
_long_number = re.compile(rb"[0-9]{%d}" % (DIGITS_MAX + 1))
_ids_prompt = re.compile(rb'"prompt"\s*+:\s*+\[\s*+[0-9-]')


def refuse_crowds(body: bytes, *, ids: int = 0, what: str = "the body", param: str | None = None) -> None:
    """Raises ApiError 400 for JSON of more names and values than a request can need, and for numbers that are too long.
    `ids`: so many of the values may be token ids, which cost little."""
    if len(body) <= MARKS_MAX:  # as nearly always
        return
    if not (_is_crowd(body, ids) or _has_many_ids(body, ids) or _may_have_long_numbers(body)):
        return
    bare = b"" if (many := _strings(body) > max(MARKS_MAX, ids)) else _bare(body)
    if many or _is_crowd(bare, ids):
        raise invalid(param, f"{what} holds more names, values and lists than a request may ({MARKS_MAX:,} in all)")
    if _has_many_ids(bare, ids):
        raise invalid(param, f"{what} holds more token ids than a request may ({ids:,} in all)")
    if _long_number.search(bare):
        raise invalid(param, f"{what} holds a number of more than {DIGITS_MAX} digits")


def ids_in_prompt(body: bytes) -> int:
    """How many token ids a JSON body's prompt has, where it is one list of them; 0 where it is anything else."""
    at = body.find(b'"prompt"')
    if at < 0 or _ids_prompt.match(body, at) is None:
        return 0
    return body.count(b",", at, body.find(b"]", at)) + 1


def _may_have_long_numbers(body: bytes) -> bool:
    """Looks at one byte of DIGITS_MAX, and on only where two in a row are digits."""
    for found in _pair.finditer(body[::DIGITS_MAX]):
        at = found.start() * DIGITS_MAX
        if body[at : at + DIGITS_MAX].isdigit():
            return True
    return False


def _is_crowd(body: bytes, ids: int) -> bool:
    return sum(map(body.count, _NAMES if ids else _VALUES)) > MARKS_MAX


def _has_many_ids(body: bytes, ids: int) -> bool:
    return ids > 0 and body.count(b",") > ids


def _strings(body: bytes) -> int:
    """How many there are at least; each is a name or a value."""
    return (body.count(b'"') - body.count(b'\\"')) // 2


def _bare(body: bytes) -> bytes:
    """Without its strings. What is no JSON comes out as anything."""
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(body.split(b'"')[::2])


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
