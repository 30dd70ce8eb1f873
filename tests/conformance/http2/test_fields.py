"""Requests as HTTP/2 writes them: field names and values, pseudo-header fields, bodies and their lengths (RFC 9113
section 8), and extended CONNECT (RFC 8441). What is malformed must not be run."""

# ruff: noqa: E501 (a row of a table is one line)

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from conformance_kit.http2_verdicts import ANSWER, CONNECTION, IGNORED, STREAM, Send, ends, joined, opened, understood
from conformance_kit.http2_wire import (
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES_MAX,
    Closed,
    Code,
    Kind,
    Setting,
    Wire,
    data,
    frame,
)
from conformance_kit.rules import not_offered, row, rule
from conformance_kit.target import Target

RFC = "RFC 9113 section "
PROTOCOL = Code.PROTOCOL_ERROR
MALFORMED = (STREAM, CONNECTION, ANSWER)


def bad(name: str, send: Send, text: str, source: str, level: Any = "must", ways: tuple[str, ...] = MALFORMED) -> Any:
    return row(name, send, ways, text=text, source=source if source[0] == "R" else RFC + source, level=level)


def request(*fields: tuple[str, str], drop: str = "") -> Send:
    """A plain request with more fields, and without one."""
    return lambda w: w.plain(fields=[*[f for f in w.fields if f[0] != drop], *fields])


def replaced(name: str, value: str) -> Send:
    return lambda w: w.plain(fields=[(k, value if k == name else v) for k, v in w.fields])


def twice(name: str) -> Send:
    return lambda w: w.plain(fields=[*[f for f in w.fields if f[0] == name], *w.fields])


def behind(name: str) -> Send:
    """One pseudo-header field stands behind a regular one."""
    return lambda w: w.plain(
        fields=[*[f for f in w.fields if f[0] != name], ("x-test", "ok"), *[f for f in w.fields if f[0] == name]]
    )


def sized(length: int, *rest: Any) -> Send:
    """A POST with a content-length, and what follows it."""
    return lambda w: [
        w.headers(1, [*w.post, ("content-length", str(length))], end=not rest),
        *[then(w) for then in rest],
    ]


NAMES = "a field name is in lower case, of visible characters, and has a colon at its front at most"
VALUES = "a value has no NUL, CR or LF, and no white space around it"
PSEUDO = "a request has the pseudo-header fields of requests, in front, and nowhere else"
HOP = "fields about one HTTP/1.1 connection don't come over HTTP/2"
ONCE = "a request has :method, :scheme and :path, once each, and not empty"
LENGTH = "a body is as long as its content-length"
CONNECTS = "CONNECT has :authority, and no :scheme and :path"
REFUSED = [
    bad("a name in upper case", request(("X-TEST", "ok")), NAMES, "8.2.1"),
    bad("a colon in a name", request(("x:test", "ok")), NAMES, "8.2.1"),
    bad("a space in a name", request(("x test", "ok")), NAMES, "8.2.1"),
    bad("an empty name", request(("", "ok")), NAMES, "8.2.1"),
    bad("a control character in a name", request(("x\x01", "ok")), NAMES, "8.2.1"),
    bad("a space before a value", request(("x-test", " ok")), VALUES, "8.2.1"),
    bad("a tab behind a value", request(("x-test", "ok\t")), VALUES, "8.2.1"),
    bad("a line feed in a value", request(("x-test", "a\nb")), VALUES, "8.2.1"),
    bad("a carriage return in a value", request(("x-test", "a\rb")), VALUES, "8.2.1"),
    bad("NUL in a value", request(("x-test", "a\0b")), VALUES, "8.2.1"),
    bad("an unknown pseudo-header field", lambda w: w.plain(fields=[*w.fields[:4], (":test", "ok"), *w.fields[4:]]), PSEUDO, "8.3"),
    bad("one of responses", lambda w: w.plain(fields=[*w.fields[:4], (":status", "200"), *w.fields[4:]]), PSEUDO, "8.3"),
    bad("one behind a regular field", behind(":path"), PSEUDO, "8.3"),
    bad("one in trailers", opened(lambda w: w.headers(1, [(":method", "GET")])), PSEUDO, "8.1"),
    bad("Connection", request(("connection", "keep-alive")), HOP, "8.2.2"),
    bad("Proxy-Connection", request(("proxy-connection", "keep-alive")), HOP, "8.2.2"),
    bad("Keep-Alive", request(("keep-alive", "timeout=5")), HOP, "8.2.2"),
    bad("Transfer-Encoding", request(("transfer-encoding", "chunked")), HOP, "8.2.2"),
    bad("Upgrade", request(("upgrade", "websocket")), HOP, "8.2.2"),
    bad("TE other than trailers", request(("te", "trailers, deflate")), HOP, "8.2.2"),
    bad("an empty :path", replaced(":path", ""), ONCE, "8.3.1"),
    bad("no :method", request(drop=":method"), ONCE, "8.3.1"),
    bad("no :scheme", request(drop=":scheme"), ONCE, "8.3.1"),
    bad("no :path", request(drop=":path"), ONCE, "8.3.1"),
    bad(":method twice", twice(":method"), ONCE, "8.3.1"),
    bad(":scheme twice", twice(":scheme"), ONCE, "8.3.1"),
    bad(":path twice", twice(":path"), ONCE, "8.3.1"),
    bad(":authority and host differ", request(("host", "other.example")), "a Host that names another entity than :authority makes a request malformed", "8.3.1", "should"),
    bad("neither :authority nor host", request(drop=":authority"), "a request names its host, as HTTP/1.1 must", "RFC 9110 section 7.2, RFC 9113 section 8.3.1", "should"),
    bad("a user in :authority", replaced(":authority", "me@localhost"), ":authority has no userinfo", "8.3.1", "should", (ANSWER, STREAM, CONNECTION)),
    bad("a body beyond its length", sized(1, lambda w: data(1, b"test", end=True)), LENGTH, "8.1.1"),
    bad("a body beyond its length, in two frames", sized(5, lambda w: data(1, b"test"), lambda w: data(1, b"test", end=True)), LENGTH, "8.1.1"),
    bad("a body that is too short", sized(9, lambda w: data(1, b"test", end=True)), LENGTH, "8.1.1"),
    bad("a length, and no body", sized(9), LENGTH, "8.1.1"),
    bad("a body that trailers cut short", sized(9, lambda w: data(1, b"test"), lambda w: w.headers(1, [("x-t", "1")])), LENGTH, "8.1.1"),
    bad("CONNECT with a :path", replaced(":method", "CONNECT"), CONNECTS, "8.5"),
    bad(":protocol without CONNECT", lambda w: w.plain(fields=[*w.fields[:4], (":protocol", "websocket"), *w.fields[4:]]), ":protocol is for CONNECT only", "RFC 8441 section 4"),
]  # fmt: skip


@pytest.mark.parametrize(("send", "ways"), REFUSED)
def test_malformed(target: Target, send: Send, ways: tuple[str, ...]) -> None:
    ends(target, send, (PROTOCOL,), ways)


FINE = [
    row("cookies in pieces", request(("cookie", "a=1"), ("cookie", "b=2")), text="Cookie may come in pieces", source=RFC + "8.2.3"),
    row("TE: trailers", request(("te", "trailers")), text="TE may say trailers", source=RFC + "8.2.2"),
    row("obs-text in a value", request(("x-test", "café")), text="octets above 127 in a value are opaque data", source="RFC 9110 section 5.5"),
    row("an empty value", request(("x-test", "")), text="a value may be empty", source="RFC 9110 section 5.5"),
    row("fifty fields", request(*[(f"x-{i}", str(i)) for i in range(50)]), text="fifty fields are no attack", source="RFC 9110 section 5.4"),
    row("a value of 4000 octets", request(("x-test", "v" * 4000)), text="a value of a usual cookie's size is taken", source="RFC 9110 section 5.4"),
    row("host beside :authority", lambda w: w.plain(fields=[*w.fields, ("host", w.fields[2][1])]), text="a Host that agrees with :authority is no fault", source=RFC + "8.3.1"),
    row("host in place of :authority", lambda w: w.plain(fields=[*w.fields[:2], *w.fields[3:], ("host", w.fields[2][1])]), text="a request that was HTTP/1.1's may have Host alone", source=RFC + "8.3.1"),
]  # fmt: skip


@pytest.mark.parametrize("send", FINE)
def test_understood(target: Target, send: Send) -> None:
    understood(target, send)


OTHERS = [
    row("HEAD", lambda w: w.headers(1, [(":method", "HEAD"), *w.get[1:]]), text="HEAD ends with its header block", source="RFC 9110 section 9.3.2"),
    row("OPTIONS with an asterisk", lambda w: w.headers(1, [(":method", "OPTIONS"), *w.get[1:3], (":path", "*"), *w.get[4:]]), text="OPTIONS * asks about the server as a whole", source=RFC + "8.3.1"),
    row("a body with trailers", opened(lambda w: data(1, w.body or b"test") + w.headers(1, [("x-trailer", "ok")])), text="trailers end a request", source=RFC + "8.1"),
    row("a length, and its body", sized(4, lambda w: data(1, b"test", end=True)), text=LENGTH, source=RFC + "8.1.1"),
]  # fmt: skip


@pytest.mark.parametrize("send", OTHERS)
def test_answered(target: Target, send: Send) -> None:
    """With what is the application's business."""
    understood(target, send, like_baseline=False)


@rule("an answer's fields are in lower case, :status comes first, and nothing is about one connection", RFC + "8.2")
def test_fields_of_an_answer(target: Target) -> None:
    with target.wire() as wire:
        wire.send(wire.plain())
        fields = wire.answer(1)[0]
    assert next(iter(fields)) == ":status" and fields[":status"].isdigit(), fields
    assert all(name == name.lower() for name in fields), fields
    assert not {"connection", "keep-alive", "transfer-encoding", "upgrade", "proxy-connection"} & set(fields), fields


@rule("CONNECT to a server that is no proxy opens no tunnel", RFC + "8.5, RFC 9110 section 9.3.6")
def test_connect(target: Target) -> None:
    with target.wire() as wire:
        wire.send(wire.headers(1, [(":method", "CONNECT"), (":authority", "example.com:443")], end=False))
        refused(wire)


def refused(wire: Wire) -> None:
    """Stream 1 gets an error, is reset, or ends with the connection."""
    with contextlib.suppress(Closed):
        seen = wire.wait(lambda seen: seen.stream == 1)
        assert seen.kind == Kind.RST_STREAM or wire.heads[1][":status"][0] in "45", wire.heads
        wire.alive()


LARGE = [
    row("one field of 200 kB", [("x-test", "v" * 200_000)], (CONNECTION, STREAM, ANSWER), text="fields have a limit, beyond which the stream or the connection ends", source=RFC + "10.5.1", level="should"),
    row("fields of 200 kB together", [(f"x-{i}", "v" * 1000) for i in range(200)], (CONNECTION, STREAM, ANSWER), text="fields have a limit, beyond which the stream or the connection ends", source=RFC + "10.5.1", level="should"),
    row("two thousand fields", [(f"x{i}", "1") for i in range(2000)], (ANSWER, STREAM, CONNECTION), text="fields have a limit, beyond which the stream or the connection ends", source=RFC + "10.5.1", level="should"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "ways"), LARGE)
def test_limits(target: Target, fields: list[tuple[str, str]], ways: tuple[str, ...]) -> None:
    codes = (Code.ENHANCE_YOUR_CALM, Code.PROTOCOL_ERROR, Code.COMPRESSION_ERROR, Code.INTERNAL_ERROR, Code.CANCEL)

    def send(wire: Wire) -> list[bytes]:
        block = wire.encoder.encode([*wire.get, *fields], huffman=False)  # which would take seconds
        pieces = [block[i : i + FRAME_BYTES_MAX] for i in range(0, len(block), FRAME_BYTES_MAX)]
        kinds = [(Kind.HEADERS, END_STREAM), *[(Kind.CONTINUATION, 0)] * (len(pieces) - 1)]
        flags = [flag | (END_HEADERS if i == len(pieces) - 1 else 0) for i, (_, flag) in enumerate(kinds)]
        return [frame(kind, flag, 1, piece) for (kind, _), flag, piece in zip(kinds, flags, pieces, strict=True)]

    ends(target, send, codes, ways)


# Extended CONNECT (RFC 8441)


def tunnel(protocol: str = "websocket", *fields: tuple[str, str], drop: str = "") -> Send:
    """The request that opens a WebSocket, or not quite."""

    def send(wire: Wire) -> bytes:
        head = [(":method", "CONNECT"), (":protocol", protocol), *wire.get[1:]]
        return wire.headers(
            1, [*[f for f in head if f[0] != drop], ("sec-websocket-version", "13"), *fields], end=False
        )

    return send


def tunnels(target: Target) -> None:
    """Not offered where the server doesn't say that it can."""
    with target.wire() as wire:
        if not wire.settings.get(Setting.ENABLE_CONNECT_PROTOCOL):
            not_offered("SETTINGS_ENABLE_CONNECT_PROTOCOL isn't sent")


TUNNELS = [
    row("an unknown protocol", tunnel("no-such-protocol"), text="a protocol that isn't spoken gets 501", source="RFC 9220 section 3, RFC 8441 section 4", level="should"),
    row("no :scheme", tunnel(drop=":scheme"), text="an extended CONNECT has :scheme and :path", source="RFC 8441 section 4"),
    row("no :path", tunnel(drop=":path"), text="an extended CONNECT has :scheme and :path", source="RFC 8441 section 4"),
    row("Upgrade", tunnel("websocket", ("upgrade", "websocket")), text=HOP, source="RFC 8441 section 5.1, RFC 9113 section 8.2.2"),
]  # fmt: skip


@pytest.mark.parametrize("send", TUNNELS)
def test_tunnel_refused(target: Target, send: Send) -> None:
    tunnels(target)
    with target.wire() as wire:
        wire.send(joined(send(wire)))
        refused(wire)


@rule("an extended CONNECT before the server said that it can is its own risk, and no harm", "RFC 8441 section 3")
def test_tunnel_where_there_is_none(target: Target) -> None:
    with target.wire() as wire:
        if wire.settings.get(Setting.ENABLE_CONNECT_PROTOCOL):
            return
    ends(target, tunnel(), (PROTOCOL,), (STREAM, CONNECTION, ANSWER, IGNORED))
