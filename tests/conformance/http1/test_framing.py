"""Where a body ends: lengths, chunks, and everything by which two recipients could disagree about it (smuggling).

Every refused body has a good request behind it, which must not be run. Each verdict also holds byte by byte.
"""

# ruff: noqa: E501 (a row of a table is one line)

from __future__ import annotations

from typing import Any

import pytest
from conformance_kit.rules import http1_only, not_offered, row, rule
from conformance_kit.target import Target
from conformance_kit.verdicts import not_small, refused, understood

pytestmark = http1_only
RFC = "RFC 9112 section "
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
BAD, BAD_OR_LARGE, BAD_OR_UNKNOWN = frozenset({400}), frozenset({400, 413}), frozenset({400, 501})


def post(target: Target, *fields: str, body: bytes, version: str = "1.1") -> bytes:
    """A POST with framing fields of the caller's own."""
    return target.request(f"POST PATH HTTP/{version}", *fields, body=body, length=False)


def bad(
    name: str, field: str, body: bytes, text: str, source: str, level: Any = "must", statuses: frozenset[int] = BAD
) -> Any:
    return row(name, field, body, statuses, text=text, source=source, level=level)


CL = "an invalid Content-Length gets 400, and the connection closes"
AT_ONCE = "a length beyond any body is refused at once, not waited for"
LENGTHS = [
    bad("letters", "Content-Length: abc", b"hello", CL, RFC + "6.3"),
    bad("empty", "Content-Length:", b"hello", CL, RFC + "6.3"),
    bad("plus", "Content-Length: +5", b"hello", CL, RFC + "6.3"),
    bad("minus", "Content-Length: -5", b"hello", CL, RFC + "6.3"),
    bad("minus zero", "Content-Length: -0", b"", CL, RFC + "6.3"),
    bad("hexadecimal", "Content-Length: 0x5", b"hello", CL, RFC + "6.3"),
    bad("fraction", "Content-Length: 5.0", b"hello", CL, RFC + "6.3"),
    bad("underscore", "Content-Length: 0_5", b"hello", CL, RFC + "6.3, A08"),
    bad("inner space", "Content-Length: 5 5", b"hello", CL, RFC + "6.3"),
    bad("vertical tab", "Content-Length: 5\x0b", b"hello", CL, RFC + "6.3"),
    bad("superscript digit", "Content-Length: \xb2", b"hi", CL, RFC + "6.3"),
    bad("two that differ", "Content-Length: 5\r\nContent-Length: 6", b"hello1", CL, RFC + "6.3, A09"),
    bad("list that differs", "Content-Length: 5, 6", b"hello1", CL, RFC + "6.3, A09"),
    bad("list with an empty member", "Content-Length: 5,", b"hello", CL, RFC + "6.3", "should"),
    bad("46 digits", "Content-Length: " + "9" * 46, b"hello world", AT_ONCE, "RFC 9110 section 8.6, A01", "should", BAD_OR_LARGE),
    bad("2^64 + 5", "Content-Length: 18446744073709551621", b"hello", AT_ONCE, "RFC 9110 section 8.6, A01", "should", BAD_OR_LARGE),
]  # fmt: skip

TE = "a request whose last transfer coding isn't chunked gets 400, and the connection closes"
BOTH = "both Transfer-Encoding and Content-Length: refused, since intermediaries may have read it otherwise"
CODINGS = [
    bad("chunked and a length", "Content-Length: 5\r\nTransfer-Encoding: chunked", b"0\r\n\r\n" + SMUGGLED, BOTH, RFC + "6.1 (refusing is a MAY), A09", "should"),
    bad("chunked and length zero", "Content-Length: 0\r\nTransfer-Encoding: chunked", b"0\r\n\r\n" + SMUGGLED, BOTH, RFC + "6.1 (refusing is a MAY), A09", "should"),
    bad("a length behind chunked", "Transfer-Encoding: chunked\r\nContent-Length: 5", b"0\r\n\r\n" + SMUGGLED, BOTH, RFC + "6.1 (refusing is a MAY), A09", "should"),
    bad("chunked, gzip", "Transfer-Encoding: chunked, gzip", b"5\r\nhello\r\n0\r\n\r\n", TE, RFC + "6.3, A09", "must", BAD_OR_UNKNOWN),
    bad("gzip alone", "Transfer-Encoding: gzip", b"hello", TE, RFC + "6.3", "must", BAD_OR_UNKNOWN),
    bad("identity", "Transfer-Encoding: identity", b"hello", TE, RFC + "6.3", "must", BAD_OR_UNKNOWN),
    bad("empty", "Transfer-Encoding:", b"hello", TE, RFC + "6.3", "should", BAD_OR_UNKNOWN),
    bad("unknown, chunked", "Transfer-Encoding: foo, chunked", b"0\r\n\r\n", "an unknown coding gets 501 (400 will do)", RFC + "6.1", "should", BAD_OR_UNKNOWN),
    bad("chunked twice", "Transfer-Encoding: chunked, chunked", b"0\r\n\r\n", "chunked is applied once only", RFC + "7.1", "should", BAD_OR_UNKNOWN),
    bad("two lines", "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", b"0\r\n\r\n", "chunked is applied once only", RFC + "7.1, A09", "should", BAD_OR_UNKNOWN),
    bad("two lines, identity first", "Transfer-Encoding: identity\r\nTransfer-Encoding: chunked", b"0\r\n\r\n", "an unknown coding gets 501 (400 will do)", RFC + "6.1, A09", "should", BAD_OR_UNKNOWN),
    bad("quoted", 'Transfer-Encoding: "chunked"', b"0\r\n\r\n", TE, RFC + "6.3", "must", BAD_OR_UNKNOWN),
    bad("prefix", "Transfer-Encoding: xchunked", b"0\r\n\r\n", TE, RFC + "6.3", "must", BAD_OR_UNKNOWN),
    bad("suffix", "Transfer-Encoding: chunkedx", b"0\r\n\r\n", TE, RFC + "6.3", "must", BAD_OR_UNKNOWN),
    bad("vertical tab", "Transfer-Encoding: \x0bchunked", b"0\r\n\r\n", TE, RFC + "6.3", "must", BAD_OR_UNKNOWN),
    bad("folded", "Transfer-Encoding:\r\n chunked", b"0\r\n\r\n", "obs-fold in a framing field is refused", RFC + "5.2", "should", BAD_OR_UNKNOWN),
]  # fmt: skip

SIZE = "a malformed chunk size is no size: the framing is lost, so 400 and a close"
DATA = "a chunk's data ends with CRLF exactly where its size says"


def broken(name: str, body: bytes, text: str, source: str, level: Any = "must") -> Any:
    return row(name, body, text=text, source=source, level=level)


CHUNKS = [
    broken("plus", b"+SIZE\r\nDATA\r\n0\r\n\r\n", SIZE, RFC + "7.1, A08"),
    broken("minus zero", b"SIZE\r\nDATA\r\n-0\r\n\r\n", SIZE, RFC + "7.1, A08"),
    broken("0x", b"0xSIZE\r\nDATA\r\n0\r\n\r\n", SIZE, RFC + "7.1, A08"),
    broken("underscore", b"0_SIZE\r\nDATA\r\n0\r\n\r\n", SIZE, RFC + "7.1, A08"),
    broken("vertical tab", b"SIZE\x0b\r\nDATA\r\n0\r\n\r\n", SIZE, RFC + "7.1, A08"),
    broken("empty", b"\r\nDATA\r\n0\r\n\r\n", SIZE, RFC + "7.1, A08"),
    broken("letter", b"g\r\nDATA\r\n0\r\n\r\n", SIZE, RFC + "7.1"),
    broken("leading space", b" SIZE\r\nDATA\r\n0\r\n\r\n", SIZE, RFC + "7.1", "should"),
    broken("trailing space", b"SIZE \r\nDATA\r\n0\r\n\r\n", SIZE, RFC + "7.1", "should"),
    broken("18 digits", b"100000000000000005\r\nDATA\r\n0\r\n\r\n", AT_ONCE, RFC + "7.1, A08", "should"),
    broken("40 digits", b"f" * 40 + b"\r\nDATA\r\n0\r\n\r\n", AT_ONCE, RFC + "7.1, A08", "should"),
    broken("bare LF behind the size", b"SIZE\nDATA\r\n0\r\n\r\n", "chunk lines end with CRLF", RFC + "7.1", "should"),
    broken("bare CR behind the size", b"SIZE\rDATA\r\n0\r\n\r\n", "a bare CR makes the element invalid", RFC + "2.2"),
    broken("data too long", b"SIZE\r\nDATA!\r\n0\r\n\r\n", DATA, RFC + "7.1"),
    broken("data too short", b"SIZE\r\nCUT\r\n0\r\n\r\n", DATA, RFC + "7.1"),
    broken("data without an end", b"SIZE\r\nDATA0\r\n\r\n", DATA, RFC + "7.1"),
    broken("data ended by LF", b"SIZE\r\nDATA\n0\r\n\r\n", DATA, RFC + "7.1", "should"),
    broken("extension without a name", b"SIZE;\r\nDATA\r\n0\r\n\r\n", "an extension has a name", RFC + "7.1.1", "should"),
    broken("extension with a control character", b"SIZE;a\x01\r\nDATA\r\n0\r\n\r\n", "extensions are tokens and quoted strings", RFC + "7.1.1", "should"),
    broken("extension with an open quote", b'SIZE;a="\r\nDATA\r\n0\r\n\r\n', "extensions are tokens and quoted strings", RFC + "7.1.1", "should"),
    broken("extension with a bare LF", b"SIZE;a\nDATA\r\n0\r\n\r\n", "a bare LF hides in an extension: smuggling", RFC + "7.1.1", "should"),
    broken("extension of 64 kB", b"SIZE;" + b"a" * 65536 + b"\r\nDATA\r\n0\r\n\r\n", "the length of extensions is limited", RFC + "7.1.1", "should"),
    broken("malformed trailer", b"SIZE\r\nDATA\r\n0\r\nX A: 1\r\n\r\n", "trailer fields follow the grammar of fields", RFC + "7.1.2", "should"),
    broken("trailer with a bare LF", b"SIZE\r\nDATA\r\n0\r\nX: 1\n\r\n", "trailer lines end with CRLF", RFC + "7.1.2", "should"),
    broken("folded trailer", b"SIZE\r\nDATA\r\n0\r\nX: 1\r\n 2\r\n\r\n", "obs-fold is refused", RFC + "5.2", "should"),
]  # fmt: skip


@pytest.mark.parametrize("one_by_one", [False, True], ids=["whole", "bytes"])
@pytest.mark.parametrize(("field", "body", "statuses"), [*LENGTHS, *CODINGS])
def test_refused(target: Target, field: str, body: bytes, statuses: frozenset[int], one_by_one: bool) -> None:
    refused(target, post(target, field, body=body), statuses=statuses, one_by_one=one_by_one)


@pytest.mark.parametrize("one_by_one", [False, True], ids=["whole", "bytes"])
@pytest.mark.parametrize("template", CHUNKS)
def test_chunks_refused(target: Target, template: bytes, one_by_one: bool) -> None:
    """The data is that of a good request, so who overlooks the fault answers well. A server whose application has begun
    may know of no better answer than 500."""
    data = target.body or b"hello"
    body = template.replace(b"SIZE", b"%x" % len(data)).replace(b"DATA", data).replace(b"CUT", data[:-1])
    statuses = BAD_OR_LARGE if target.settings.ours else BAD_OR_LARGE | {500}
    request = post(target, "Transfer-Encoding: chunked", body=body)
    refused(target, request, statuses=statuses, one_by_one=one_by_one and len(body) < 10_000)


@rule("after a request with both framings the connection closes, whatever it was answered", RFC + "6.1, A09")
def test_both_framings_close(target: Target) -> None:
    """A strict server refuses it; a lenient one must at least trust nothing behind it."""
    data = post(target, "Content-Length: 5", "Transfer-Encoding: chunked", body=b"0\r\n\r\n")
    with target.connect() as connection:
        connection.send(data + target.request())
        answer = connection.answer("POST")
        assert answer.end == "whole", answer
        assert connection.ends() == "closed"


@rule("Transfer-Encoding in an HTTP/1.0 request is faulty framing: the connection closes", RFC + "6.1")
def test_chunked_in_http_1_0(target: Target) -> None:
    data = post(target, "Transfer-Encoding: chunked", "Connection: keep-alive", body=b"0\r\n\r\n", version="1.0")
    with target.connect() as connection:
        connection.send(data + target.request())
        answer = connection.answer("POST")
        assert answer.end in ("whole", "none"), answer
        assert connection.ends() == "closed"


HUGE = [
    row("Content-Length of 46 digits", "Content-Length: " + "9" * 46, b"", text="a length beyond the recipient's integers is no small one", source="RFC 9110 section 8.6, A01"),
    row("Content-Length of 2^64", "Content-Length: 18446744073709551616", b"", text="a length beyond the recipient's integers is no small one", source="RFC 9110 section 8.6"),
    row("Content-Length of 2^32", "Content-Length: 4294967296", b"", text="a length beyond the recipient's integers is no small one", source="RFC 9110 section 8.6"),
    row("chunk of 2^64", "Transfer-Encoding: chunked", b"10000000000000000\r\n\r\n0\r\n\r\n", text="a chunk beyond the recipient's integers is no small one", source=RFC + "7.1, A08"),
    row("chunk of 2^32", "Transfer-Encoding: chunked", b"100000000\r\n\r\n0\r\n\r\n", text="a chunk beyond the recipient's integers is no small one", source=RFC + "7.1"),
    row("chunk of 40 digits", "Transfer-Encoding: chunked", b"f" * 40 + b"\r\n\r\n0\r\n\r\n", text="a chunk beyond the recipient's integers is no small one", source=RFC + "7.1, A08"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "body"), HUGE)
def test_huge_is_not_small(target: Target, field: str, body: bytes) -> None:
    """The good body of a plain request stands where the huge one would begin."""
    chunk = b"%x\r\n%b\r\n" % (len(target.body), target.body) if body and target.body else b""
    not_small(target, post(target, field, body=chunk + (body or target.body)))


def chunked(data: bytes, size: int) -> bytes:
    """`data` in chunks of `size` bytes."""
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


GOOD = [
    row("one chunk", lambda d: b"%x\r\n%b\r\n0\r\n\r\n" % (len(d), d), text="a recipient parses chunked", source=RFC + "7.1"),
    row("chunks of one byte", lambda d: chunked(d, 1), text="chunks may have any size", source=RFC + "7.1"),
    row("chunks of seven bytes", lambda d: chunked(d, 7), text="chunks may have any size", source=RFC + "7.1"),
    row("capital digits", lambda d: b"%X\r\n%b\r\n0\r\n\r\n" % (len(d), d), text="hexadecimal digits come in both cases", source=RFC + "7.1"),
    row("leading zeros", lambda d: b"000%x\r\n%b\r\n000\r\n\r\n" % (len(d), d), text="a size may have leading zeros", source=RFC + "7.1, A08"),
    row("extension", lambda d: b"%x;a=1\r\n%b\r\n0\r\n\r\n" % (len(d), d), text="unknown extensions are ignored", source=RFC + "7.1.1, A08"),
    row("extension without a value", lambda d: b"%x;a\r\n%b\r\n0;b\r\n\r\n" % (len(d), d), text="unknown extensions are ignored", source=RFC + "7.1.1"),
    row("quoted extension", lambda d: b'%x;a="b;\\"c"\r\n%b\r\n0\r\n\r\n' % (len(d), d), text="unknown extensions are ignored", source=RFC + "7.1.1"),
    row("white space around an extension", lambda d: b"%x ; a = 1\r\n%b\r\n0\r\n\r\n" % (len(d), d), text="white space around an extension is parsed", source=RFC + "7.1.1", level="should"),
    row("trailer", lambda d: chunked(d, 9)[:-2] + b"X-A: 1\r\nX-B: 2\r\n\r\n", text="trailer fields may be dropped, but are parsed", source=RFC + "7.1.2"),
]  # fmt: skip


@pytest.mark.parametrize("one_by_one", [False, True], ids=["whole", "bytes"])
@pytest.mark.parametrize("encode", GOOD)
def test_chunks_understood(target: Target, encode: Any, one_by_one: bool) -> None:
    """The body has its meaning: the answer is that of a plain request."""
    body = target.body
    data = post(target, "Transfer-Encoding: chunked", body=encode(body) if body else b"0\r\n\r\n")
    answer = understood(target, data, method="POST", one_by_one=one_by_one, like_baseline=bool(body))
    if target.settings.ws_echo and body:
        assert bytes(answer.body) == body


CODINGS_GOOD = [
    row("capitals", "Transfer-Encoding: CHUNKED", text="transfer codings are case-insensitive", source=RFC + "7"),
    row("white space", "Transfer-Encoding: \t chunked \t", text="white space around a value is no part of it", source=RFC + "5"),
    row("field name in capitals", "TRANSFER-ENCODING: chunked", text="field names are case-insensitive", source="RFC 9110 section 5.1"),
]  # fmt: skip


@pytest.mark.parametrize("field", CODINGS_GOOD)
def test_coding_understood(target: Target, field: str) -> None:
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(target.body), target.body) if target.body else b"0\r\n\r\n"
    understood(target, post(target, field, body=body), method="POST", like_baseline=bool(target.body))


LENGTHS_GOOD = [
    row("leading zeros", "Content-Length: 000%d", text="Content-Length is 1*DIGIT", source="RFC 9110 section 8.6"),
    row("white space", "Content-Length: \t %d \t", text="white space around a value is no part of it", source=RFC + "5"),
    row("field name in capitals", "CONTENT-LENGTH: %d", text="field names are case-insensitive", source="RFC 9110 section 5.1"),
]  # fmt: skip


@pytest.mark.parametrize("field", LENGTHS_GOOD)
def test_length_understood(target: Target, field: str) -> None:
    body = target.body
    data = post(target, field % len(body), body=body)
    understood(target, data, method="POST", like_baseline=bool(body))


CUTS = [
    row("a length", "Content-Length: 100", b"hello", text="a body that its length says is incomplete is not processed as whole", source=RFC + "8"),
    row("chunked", "Transfer-Encoding: chunked", b"5\r\nhello\r\n", text="a chunked body without its last chunk is incomplete", source=RFC + "8"),
    row("within a chunk", "Transfer-Encoding: chunked", b"ff\r\nhello", text="a chunked body without its last chunk is incomplete", source=RFC + "8"),
    row("without the final CRLF", "Transfer-Encoding: chunked", b"0\r\n", text="a chunked body without its end is incomplete", source=RFC + "8"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "body"), CUTS)
def test_cut_body(target: Target, field: str, body: bytes) -> None:
    """FIN in the middle of a body: no success."""
    with target.connect() as connection:
        connection.send(post(target, field, body=body))
        connection.end_sending()
        answer = connection.answer("POST")
        assert answer.end in ("none", "reset") or answer.status >= 400, answer


@rule("a head that is cut is no request", RFC + "8")
def test_cut_head(target: Target) -> None:
    with target.connect() as connection:
        connection.send(target.request()[:25])
        connection.end_sending()
        answer = connection.answer(target.method)
        assert answer.end in ("none", "reset") or answer.status in {400, 408}, answer


@rule("a request may have a body of no bytes in each framing, and the next one follows at once", RFC + "6.3")
@pytest.mark.parametrize("field", ["Content-Length: 0", "Transfer-Encoding: chunked"])
def test_empty_body(target: Target, field: str) -> None:
    """The application may not like it; the connection's framing must hold."""
    body = b"0\r\n\r\n" if "chunked" in field else b""
    with target.connect() as connection:
        connection.send(post(target, field, body=body))
        answer = connection.answer("POST")
        if answer.end == "none" and not target.settings.ours:
            not_offered("the application closes where it gets no body")
        assert answer.end == "whole", answer
        if connection.persistent:
            connection.send(target.request())
            assert connection.answer(target.method).status == target.baseline.status
