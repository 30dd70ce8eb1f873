"""Header compression: RFC 7541. What can't be decoded is a COMPRESSION_ERROR of the connection (RFC 9113 section 4.3),
since what comes behind it can't be decoded either."""

# ruff: noqa: E501 (a row of a table is one line)

from __future__ import annotations

from typing import Any

import pytest
from conformance_kit.http2_verdicts import CONNECTION, Send, ends, understood
from conformance_kit.http2_wire import END_HEADERS, END_STREAM, Code, Kind, frame
from conformance_kit.rules import row, rule
from conformance_kit.target import Target

RFC = "RFC 7541 section "


def behind(*parts: bytes) -> Send:
    """A plain request whose block has more parts behind it."""
    return lambda wire: wire.plain(behind=b"".join(parts))


def bad(name: str, send: Send, text: str, source: str, level: Any = "must") -> Any:
    return row(name, send, text=text, source=source, level=level)


INDEX = "an index that the tables don't have is an error"
HUFFMAN = "Huffman text ends with fewer than 8 bits of ones, and doesn't hold EOS"
UPDATE = "the table's size changes at a block's start, within the limit of SETTINGS_HEADER_TABLE_SIZE"
REFUSED = [
    bad("a literal that is cut", lambda w: frame(Kind.HEADERS, END_HEADERS | END_STREAM, 1, b"\x00"), "a block that can't be decoded is an error", "RFC 9113 section 4.3"),
    bad("index 0", behind(b"\x80"), INDEX, RFC + "6.1"),
    bad("an index beyond the tables", behind(b"\xc6"), INDEX, RFC + "2.3.3"),
    bad("a name's index beyond the tables", behind(b"\x7f\x20\x01a"), INDEX, RFC + "2.3.3"),
    bad("an integer without an end", behind(b"\xff" + b"\xff" * 100), "an integer that is too long is an error", RFC + "5.1"),
    bad("Huffman: padding of more than 7 bits", behind(b"\x00\x85\xf2\xb2\x4a\x84\xff\x84\x49\x50\x9f\xff"), HUFFMAN, RFC + "5.2"),
    bad("Huffman: padding of zeros", behind(b"\x00\x85\xf2\xb2\x4a\x84\xff\x83\x49\x50\x90"), HUFFMAN, RFC + "5.2"),
    bad("Huffman: EOS", behind(b"\x00\x85\xf2\xb2\x4a\x84\xff\x87\x49\x51\xff\xff\xff\xfa\x7f"), HUFFMAN, RFC + "5.2"),
    bad("a size update behind a field", behind(b"\x3f\x01"), UPDATE, RFC + "4.2"),
    bad("a size above the limit", lambda w: w.plain(before=b"\x3f\xe1\xff\x03"), UPDATE, RFC + "6.3"),
    bad("three size updates", lambda w: w.plain(before=b"\x20\x20\x20"), "two updates of the table's size are enough for any change", RFC + "4.2", "should"),
]  # fmt: skip


@pytest.mark.parametrize("send", REFUSED)
def test_refused(target: Target, send: Send) -> None:
    ends(target, send, (Code.COMPRESSION_ERROR,), (CONNECTION,))


FORM = "each form of a field is decoded"
FINE = [
    row("an indexed field", behind(b"\x90"), text=FORM, source=RFC + "6.1"),
    row("with indexing, name by index", behind(b"\x50\x02ok"), text=FORM, source=RFC + "6.2.1"),
    row("with indexing, new name", behind(b"\x40\x01a\x02ok"), text=FORM, source=RFC + "6.2.1"),
    row("without indexing, name by index", behind(b"\x0f\x01\x02ok"), text=FORM, source=RFC + "6.2.2"),
    row("without indexing, new name", behind(b"\x00\x01a\x02ok"), text=FORM, source=RFC + "6.2.2"),
    row("never indexed, name by index", behind(b"\x1f\x01\x02ok"), text=FORM, source=RFC + "6.2.3"),
    row("never indexed, new name", behind(b"\x10\x01a\x02ok"), text=FORM, source=RFC + "6.2.3"),
    row("Huffman", behind(b"\x40\x85\xf2\xb2\x4a\x84\xff\x83\x49\x50\x9f"), text="text may be in Huffman code", source=RFC + "5.2"),
    row("a size update", lambda w: w.plain(before=b"\x3f\xe1\x1f"), text="the table's size may change", source=RFC + "6.3"),
    row("two size updates", lambda w: w.plain(before=b"\x20\x3f\xe1\x1f"), text="the table's size may change twice: its lowest, and its last", source=RFC + "4.2"),
]  # fmt: skip


@pytest.mark.parametrize("send", FINE)
def test_understood(target: Target, send: Send) -> None:
    understood(target, send)


@rule("what was indexed by one request is known by its index to the next", RFC + "2.3.2")
def test_the_table_goes_on(target: Target) -> None:
    with target.wire() as wire:
        sizes = []
        for n in (1, 3, 5):
            request = wire.plain(n, fields=[*wire.fields, ("x-test", "the same each time")])
            sizes.append(len(request))
            wire.send(request)
            assert wire.answer(n)[0][":status"] == target.http2_status
    assert sizes[1] < sizes[0]
