"""The request line: what must be refused, and what must not. Each verdict also holds when the bytes come one by one."""

# ruff: noqa: E501 (a row of a table is one line)

from __future__ import annotations

from typing import Any

import pytest
from conformance_kit.rules import http1_only, row
from conformance_kit.target import Target
from conformance_kit.verdicts import refused, understood

pytestmark = http1_only
RFC = "RFC 9112 section "


def bad(name: str, line: str, text: str, source: str, level: Any = "should", statuses: tuple[int, ...] = (400,)) -> Any:
    return row(name, line, frozenset(statuses), text=text, source=RFC + source, level=level)


INVALID = "an invalid request line is answered with 400"
REFUSED = [
    bad("two spaces", "METHOD  PATH HTTP/1.1", INVALID, "3"),
    bad("two spaces before the version", "METHOD PATH  HTTP/1.1", INVALID, "3"),
    bad("tab", "METHOD\tPATH HTTP/1.1", INVALID, "3"),
    bad("vertical tab", "METHOD\x0bPATH HTTP/1.1", INVALID, "3"),
    bad("leading space", " METHOD PATH HTTP/1.1", INVALID, "3"),
    bad("trailing space", "METHOD PATH HTTP/1.1 ", INVALID, "3"),
    bad("space in the target", "METHOD /a b HTTP/1.1", "white space in a request target is refused", "3.2"),
    bad("method only", "METHOD", INVALID, "3"),
    bad("no target", "METHOD HTTP/1.1", INVALID, "3"),
    bad("empty method", " PATH HTTP/1.1", INVALID, "3"),
    bad("method with a delimiter", "G(T PATH HTTP/1.1", "a method is a token", "3.1"),
    bad("method with a colon", "GET: PATH HTTP/1.1", "a method is a token", "3.1"),
    bad("method with a control character", "G\x01T PATH HTTP/1.1", "a method is a token", "3.1"),
    bad("control character in the target", "METHOD /a\x01b HTTP/1.1", "a target holds no control characters", "3.2"),
    bad("NUL in the target", "METHOD /a\0b HTTP/1.1", "a target holds no control characters", "3.2", "must"),
    bad("relative target", "METHOD a/b HTTP/1.1", "a target is in one of four forms", "3.2"),
    bad("asterisk for another method", "METHOD * HTTP/1.1", "the asterisk is for OPTIONS only", "3.2.4"),
    bad(
        "other scheme",
        "METHOD ftp://AUTHORITY/ HTTP/1.1",
        "no gateway to that scheme",
        "3.2.2",
        "should",
        (400, 421, 501),
    ),
    bad(
        "absolute without host",
        "METHOD http:///a HTTP/1.1",
        "an http URI with an empty host is invalid",
        "3.2.2",
        "must",
    ),
    bad("bare CR in the line", "METHOD PATH\r HTTP/1.1", "a bare CR makes the element invalid", "2.2", "must"),
    bad("version in lower case", "METHOD PATH http/1.1", "HTTP-name is case-sensitive", "2.3", "must", (400, 505)),
    bad("version without a minor", "METHOD PATH HTTP/1", "a version is DIGIT.DIGIT", "2.3", "must", (400, 505)),
    bad("version with two digits", "METHOD PATH HTTP/1.10", "a version is DIGIT.DIGIT", "2.3", "must", (400, 505)),
    bad("version with a leading zero", "METHOD PATH HTTP/01.1", "a version is DIGIT.DIGIT", "2.3", "must", (400, 505)),
    bad("version with a letter", "METHOD PATH HTTP/1.x", "a version is DIGIT.DIGIT", "2.3", "must", (400, 505)),
    bad(
        "version 2.0",
        "METHOD PATH HTTP/2.0",
        "a major version that isn't spoken is refused",
        "2.3",
        "should",
        (400, 505),
    ),
    bad(
        "version 3.0",
        "METHOD PATH HTTP/3.0",
        "a major version that isn't spoken is refused",
        "2.3",
        "should",
        (400, 505),
    ),
    bad("other protocol", "METHOD PATH ICY/1.1", "the protocol's name is HTTP", "2.3", "must", (400, 505)),
    bad("HTTP/0.9", "METHOD PATH", "a line without a version is no HTTP/1.x", "2.3", "should", (400, 505)),
]


@pytest.mark.parametrize("one_by_one", [False, True], ids=["whole", "bytes"])
@pytest.mark.parametrize(("line", "statuses"), REFUSED)
def test_refused(target: Target, line: str, statuses: frozenset[int], one_by_one: bool) -> None:
    refused(target, target.request(line), statuses=statuses, one_by_one=one_by_one)


NOT_HTTP = [
    row("TLS greeting", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 32 + b"\r\n\r\n", text=INVALID, source=RFC + "3", level="should"),
    row("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", text="without HTTP/2 its preface is an invalid request", source=RFC + "3", level="should"),
    row("binary", bytes(range(128, 256)) + b"\r\n\r\n", text=INVALID, source=RFC + "3", level="should"),
]  # fmt: skip


HTTP2_FRAME = b"\0\0"  # a length below 64 KiB: the SETTINGS with which an HTTP/2 server answers the preface


@pytest.mark.parametrize("data", NOT_HTTP)
def test_not_http(target: Target, data: bytes) -> None:
    """An answer or a close, and no answer that counts as success; HTTP/2 is fine where it is spoken."""
    with target.connect() as connection:
        connection.send(data)
        first = connection.receive(connection.answer_s) or b""
        if first.startswith(HTTP2_FRAME):
            return
        assert first == b"" or first[9:12] in (b"400", b"501", b"505"), first[:200]
        assert first == b"" or connection.ends() == "closed"


LINE_ENDS = [
    row("bare LF", lambda data: data.replace(b"\r\n", b"\n"), text="a head of bare LFs is refused: other recipients read it differently", source=RFC + "2.2 (accepting is a MAY), smuggling", level="should"),
    row("bare LF behind the line", lambda data: data.replace(b"\r\n", b"\n", 1), text="a bare LF behind the request line is refused", source=RFC + "2.2 (accepting is a MAY), smuggling", level="should"),
    row("bare LF behind a field", lambda data: data.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r\nX: y\n", 1), text="a bare LF behind a field is refused", source=RFC + "2.2 (accepting is a MAY), smuggling", level="should"),
    row("bare CR behind a field", lambda data: data.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r\nX: y\rZ: 1\r\n", 1), text="a bare CR makes the element invalid", source=RFC + "2.2", level="must"),
    row("CR CR LF", lambda data: data.replace(b"\r\n", b"\r\r\n", 1), text="a bare CR makes the element invalid", source=RFC + "2.2", level="must"),
    row("space before the first field", lambda data: data.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r\n \r\n", 1), text="white space between start line and first field: refused, or its lines are ignored", source=RFC + "2.2", level="should"),
]  # fmt: skip


@pytest.mark.parametrize("one_by_one", [False, True], ids=["whole", "bytes"])
@pytest.mark.parametrize("change", LINE_ENDS)
def test_line_ends(target: Target, change: Any, one_by_one: bool) -> None:
    refused(target, change(target.request()), statuses={400}, one_by_one=one_by_one)


GOOD = [
    row("origin form", "METHOD PATH HTTP/1.1", text="the most common form", source=RFC + "3.2.1"),
    row("absolute form", "METHOD http://AUTHORITYPATH HTTP/1.1", text="a server accepts the absolute form", source=RFC + "3.2.2"),
    row("absolute form, scheme in capitals", "METHOD HTTP://AUTHORITYPATH HTTP/1.1", text="schemes are case-insensitive", source="RFC 3986 section 3.1"),
    row("query", "METHOD PATH?a=1&b=%20 HTTP/1.1", text="a query may follow the path", source=RFC + "3.2.1"),
    row("empty query", "METHOD PATH? HTTP/1.1", text="a query may be empty", source="RFC 3986 section 3.4"),
    row("sub-delimiters", "METHOD PATH?a=!$&'()*+,;=:@/? HTTP/1.1", text="these are legal in a query", source="RFC 3986 section 3.4"),
    row("long query", "METHOD PATH?" + "q" * 4000 + " HTTP/1.1", text="request lines of 8000 octets are taken", source=RFC + "3", level="should"),
]  # fmt: skip


@pytest.mark.parametrize("one_by_one", [False, True], ids=["whole", "bytes"])
@pytest.mark.parametrize("line", GOOD)
def test_understood(target: Target, line: str, one_by_one: bool) -> None:
    understood(target, target.request(line), one_by_one=one_by_one, like_baseline=True)


METHODS = [
    row("unknown method", "BREW", text="an unknown method is answered with 501 or 405, or by the resource", source="RFC 9110 section 9.1", level="should"),
    row("token characters", "M-S!#$%&'*+.^_`|~9", text="a method is any token", source=RFC + "3.1", level="should"),
    row("lower case", "get", text="methods are case-sensitive: get is another method, and no fault of syntax", source=RFC + "3.1", level="should"),
]  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_methods(target: Target, method: str) -> None:
    with target.connect() as connection:
        connection.send(target.request(f"{method} PATH HTTP/1.1"))
        answer = connection.answer(method)
    assert answer.end == "whole" and answer.status not in {400, 414, 431, 505}, answer


EMPTY_LINES = [
    row("one", b"\r\n", text="at least one empty line before the request line is ignored", source=RFC + "2.2", level="should"),
    row("two", b"\r\n\r\n", text="empty lines before the request line are ignored", source=RFC + "2.2", level="should"),
]  # fmt: skip


@pytest.mark.parametrize("one_by_one", [False, True], ids=["whole", "bytes"])
@pytest.mark.parametrize("before", EMPTY_LINES)
def test_empty_lines(target: Target, before: bytes, one_by_one: bool) -> None:
    understood(target, before + target.request(), one_by_one=one_by_one, like_baseline=True)
