"""HPACK for the heads of answers (RFC 7541): the few fields that come again and again are put into the client's table
once, and nothing else is.

hpack's encoder puts every field there, searches all of it for each, and makes Huffman codes of what will never be sent
again: a third of what an answer's head costs. Here an entry keeps its place, because nothing is ever pushed out: when
the room is taken, further fields are sent as they are.

Imports hpack only.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from hpack.hpack import Encoder, encode_integer
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hpack.table import HeaderTable, table_entry_size

# Unguessable or new in every answer: to be sent as they are, and so by whoever passes them on (RFC 7541 7.1.3).
NEVER_INDEXED = frozenset((b"x-stream-id", b"x-request-id", b"content-length"))
# Other in the next second or the next answer, and no secret.
_CHANGING = frozenset((b"date", b"retry-after", b"x-stream-from"))
_CHANGING_BEGINNING = b"x-ratelimit-"
# What all fields together that answers have again and again take there, several times.
TABLE_BYTES = 2048

_STATIC = HeaderTable.STATIC_TABLE_MAPPING  # name -> (an index, {value: its index})
_DYNAMIC_BEGIN = HeaderTable.STATIC_TABLE_LENGTH + 1
_INDEXED, _ADDED, _PLAIN, _NEVER, _SIZE = 0x80, 0x40, 0x00, 0x10, 0x20  # RFC 7541 6.1, 6.2.1 to 6.2.3, 6.3
_octets = [bytes([number]) for number in range(256)]
_huffman = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH)


class AnswerEncoder(Encoder):
    """Takes the place of hpack's in h2."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[tuple[bytes, bytes], int] = {}  # in the client's table, the oldest 0
        self._room = TABLE_BYTES
        self._updates: list[int] = []  # of the table's size, to be told

    @property
    def header_table_size(self) -> int:
        """What the client's table may have."""
        return super().header_table_size

    @header_table_size.setter
    def header_table_size(self, value: int) -> None:
        """The client's table begins anew, empty."""
        self.header_table.maxsize = value
        self._places.clear()
        self._room = min(TABLE_BYTES, value)
        self._updates = [0, value] if value else [0]

    def encode(self, headers: Iterable[Any], huffman: bool = True) -> bytes:
        """The block of fields, pairs of bytes with names in lower case. It is always written by this module's rules."""
        block = [_integer(_SIZE, 5, size) for size in self._updates]
        self._updates = []
        for name, value in headers:
            block.append(self._field(name, value))
        return b"".join(block)

    def _field(self, name: bytes, value: bytes) -> bytes:
        field = (name, value)
        if (place := self._places.get(field)) is not None:
            return _integer(_INDEXED, 7, _DYNAMIC_BEGIN + len(self._places) - 1 - place)
        if name in NEVER_INDEXED:
            return _name(name, _NEVER, 4) + _string(value)
        if name in _STATIC and (index := _STATIC[name][1].get(value)) is not None and value:
            return _integer(_INDEXED, 7, index)
        size = table_entry_size(name, value)
        if name in _CHANGING or name.startswith(_CHANGING_BEGINNING) or size > self._room:
            return _name(name, _PLAIN, 4) + _string(value)
        self._room -= size
        self._places[field] = len(self._places)
        return _name(name, _ADDED, 6) + _coded(value)


def _integer(pattern: int, bits: int, number: int) -> bytes:
    """RFC 7541 5.1, behind the bits of `pattern`."""
    if number < (1 << bits) - 1:
        return _octets[pattern | number]
    coded = encode_integer(number, bits)
    coded[0] |= pattern
    return bytes(coded)


def _string(value: bytes) -> bytes:
    """As it is (RFC 7541 5.2)."""
    return _integer(0, 7, len(value)) + value


def _coded(value: bytes) -> bytes:
    """By Huffman's code, if that is shorter."""
    coded = _huffman.encode(value)
    return _integer(0x80, 7, len(coded)) + coded if len(coded) < len(value) else _string(value)


@lru_cache(256)
def _name(name: bytes, pattern: int, bits: int) -> bytes:
    """The beginning of a literal: an index of the static table, or the name itself."""
    if name in _STATIC:
        return _integer(pattern, bits, _STATIC[name][0])
    return bytes([pattern]) + _coded(name)
