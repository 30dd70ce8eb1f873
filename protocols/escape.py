"""Text and values to JSON that is safe for clients which split a stream into lines by Unicode's rules.

Python's str.splitlines, which naive clients use, ends a line at U+000B, U+000C, U+001C-U+001E, U+0085, U+2028 and
U+2029 too. JSON must escape only those below U+0020; the others are escaped here, so that no payload holds anything
that some client takes for a line end. Imports msgspec only.
"""

from __future__ import annotations

import re

import msgspec

# U+007F and the C1 controls end no line, but terminals and logs act on them.
_risky = re.compile("[\x7f-\x9f\u2028\u2029]")
_surrogate = re.compile("[\ud800-\udfff]")
_encode = msgspec.json.Encoder().encode


def json_text(text: str) -> bytes:
    """The UTF-8 bytes between a JSON string's quotes that stand for `text`. Lone surrogates are escaped."""
    try:
        inner = _encode(text)[1:-1]
    except UnicodeEncodeError:
        pieces = _surrogate.split(text)
        found = _surrogate.findall(text)
        escaped = [_escape(match) for match in found]
        return b"".join(json_text(piece) + tail for piece, tail in zip(pieces, [*escaped, b""], strict=True))
    return _without_risk(inner)


def json_value(value: object) -> bytes:
    """Any value as JSON, likewise; what isn't ASCII is in its strings. TypeError for what JSON can't hold, and
    UnicodeEncodeError for lone surrogates."""
    return _without_risk(_encode(value))


def _without_risk(data: bytes) -> bytes:
    if data.isascii() and b"\x7f" not in data:
        return data
    return _risky.sub(lambda match: _escape(match[0]).decode(), data.decode()).encode()


def _escape(character: str) -> bytes:
    return b"\\u%04x" % ord(character)
