"""Header fields and the Host: what must be refused, and what must not, in one piece and byte by byte."""

# ruff: noqa: E501 (a row of a table is one line)

from __future__ import annotations

from typing import Any

import pytest
from conformance_kit.rules import http1_only, row, rule
from conformance_kit.target import REFUSALS, Target
from conformance_kit.verdicts import refused, understood

pytestmark = http1_only
RFC = "RFC 9112 section "
SYNTAX = "a field that does not fit the grammar is refused"


def bad(name: str, field: str, text: str, source: str, level: Any = "must") -> Any:
    return row(name, field, text=text, source=source, level=level)


REFUSED = [
    bad("space before the colon", "X-A : 1", "white space between name and colon gets 400", RFC + "5.1"),
    bad("tab before the colon", "X-A\t: 1", "white space between name and colon gets 400", RFC + "5.1"),
    bad("space before the colon of Transfer-Encoding", "Transfer-Encoding : x", "white space between name and colon gets 400", RFC + "5.1"),
    bad("no colon", "X-A", SYNTAX, RFC + "5", "should"),
    bad("empty name", ": 1", SYNTAX, RFC + "5", "should"),
    bad("space in the name", "X A: 1", SYNTAX, RFC + "5.1"),
    bad("delimiter in the name", "X(A): 1", "a field name is a token", "RFC 9110 section 5.1", "should"),
    bad("slash in the name", "X/A: 1", "a field name is a token", "RFC 9110 section 5.1", "should"),
    bad("control character in the name", "X\x01A: 1", "a field name is a token", "RFC 9110 section 5.1", "should"),
    bad("NUL in the name", "X\0A: 1", "a field name is a token", "RFC 9110 section 5.1", "should"),
    bad("high byte in the name", "X\xe9A: 1", "a field name is a token", "RFC 9110 section 5.1", "should"),
    bad("NUL in the value", "X-A: a\0b", "NUL in a value is refused (or replaced)", "RFC 9110 section 5.5", "should"),
    bad("control character in the value", "X-A: a\x01b", "control characters in a value are invalid", "RFC 9110 section 5.5", "should"),
    bad("DEL in the value", "X-A: a\x7fb", "control characters in a value are invalid", "RFC 9110 section 5.5", "should"),
    bad("folded line", "X-A: 1\r\n 2", "obs-fold is refused with 400 (or unfolded)", RFC + "5.2", "should"),
    bad("folded line by tab", "X-A: 1\r\n\t2", "obs-fold is refused with 400 (or unfolded)", RFC + "5.2", "should"),
    bad("folded empty line", "X-A: 1\r\n \r\nX-B: 2", "obs-fold is refused with 400 (or unfolded)", RFC + "5.2", "should"),
]  # fmt: skip


@pytest.mark.parametrize("one_by_one", [False, True], ids=["whole", "bytes"])
@pytest.mark.parametrize("field", REFUSED)
def test_refused(target: Target, field: str, one_by_one: bool) -> None:
    refused(target, target.request(None, field), statuses={400}, one_by_one=one_by_one)


HOSTS_REFUSED = [
    row("none", None, text="a 1.1 request without Host gets 400", source=RFC + "3.2"),
    row("empty", " ", text="an http target needs a host, so an empty Host can't be right", source="RFC 9110 sections 4.2.1 and 7.2", level="should"),
    row("two", "AUTHORITY\r\nHost: AUTHORITY", text="a request with two Host fields gets 400", source=RFC + "3.2"),
    row("two different", "AUTHORITY\r\nHost: other.example", text="a request with two Host fields gets 400", source=RFC + "3.2"),
    row("list", "a.example, b.example", text="an invalid Host value gets 400", source=RFC + "3.2"),
    row("space", "a b.example", text="an invalid Host value gets 400", source=RFC + "3.2"),
    row("slash", "a.example/x", text="an invalid Host value gets 400", source=RFC + "3.2"),
    row("user", "me@a.example", text="an invalid Host value gets 400", source=RFC + "3.2"),
    row("port of letters", "a.example:x", text="an invalid Host value gets 400", source=RFC + "3.2"),
    row("port out of range", "a.example:99999", text="a port has 16 bits", source="RFC 9110 section 7.2", level="should"),
    row("open bracket", "[::1", text="an invalid Host value gets 400", source=RFC + "3.2"),
    row("scheme", "http://a.example", text="an invalid Host value gets 400", source=RFC + "3.2"),
    row("percent without digits", "a%zz.example", text="an invalid Host value gets 400", source=RFC + "3.2"),
    row("query", "a.example?x", text="an invalid Host value gets 400", source=RFC + "3.2"),
]  # fmt: skip


@pytest.mark.parametrize("one_by_one", [False, True], ids=["whole", "bytes"])
@pytest.mark.parametrize("host", HOSTS_REFUSED)
def test_host_refused(target: Target, host: str | None, one_by_one: bool) -> None:
    data = target.request(None, host=host and host.replace("AUTHORITY", target.authority))
    refused(target, data, statuses={400}, one_by_one=one_by_one)


GOOD = [
    row("names in any case", "x-LOWER-upper: 1", text="field names are case-insensitive", source="RFC 9110 section 5.1"),
    row("no space behind the colon", "X-A:1", text="white space around a value is optional", source=RFC + "5"),
    row("white space around the value", "X-A: \t 1 \t ", text="white space around a value is optional", source=RFC + "5"),
    row("empty value", "X-A:", text="a value may be empty", source="RFC 9110 section 5.5"),
    row("token characters", "!#$%&'*+-.^_`|~9a: 1", text="a field name is any token", source="RFC 9110 section 5.1"),
    row("obs-text", "X-A: caf\xe9", text="octets above 127 in a value are opaque data", source="RFC 9110 section 5.5", level="should"),
    row("quoted string", 'X-A: "a, b; c=\\"d\\""', text="quotes have no meaning to the message's parser", source="RFC 9110 section 5.6.4"),
    row("repeated", "X-A: 1\r\nX-A: 2", text="a field may come on several lines", source="RFC 9110 section 5.3"),
    row("value of 4000 octets", "X-A: " + "v" * 4000, text="a value of a usual cookie's size is taken", source="RFC 9110 section 5.4", level="should"),
    row("fifty fields", "\r\n".join(f"X-{i}: {i}" for i in range(50)), text="fifty fields are no attack", source="RFC 9110 section 5.4", level="should"),
    row("connection with unknown options", "Connection: keep-alive, X-Unknown", text="unknown connection options are ignored", source="RFC 9110 section 7.6.1"),
    row("upgrade that isn't known", "Connection: Upgrade\r\nUpgrade: foo/9", text="an Upgrade that isn't known is ignored, and the request answered", source="RFC 9110 section 7.8", level="should"),
    row("h2c upgrade", "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA", text="an Upgrade that isn't known is ignored, and the request answered", source="RFC 9110 section 7.8", level="should"),
]  # fmt: skip


@pytest.mark.parametrize("one_by_one", [False, True], ids=["whole", "bytes"])
@pytest.mark.parametrize("field", GOOD)
def test_understood(target: Target, field: str, one_by_one: bool) -> None:
    understood(target, target.request(None, field), one_by_one=one_by_one, like_baseline=True)


HOSTS_GOOD = [
    row("with port", "AUTHORITY", text="a Host has a port where it isn't the scheme's", source="RFC 9110 section 7.2"),
    row("name", "localhost", text="a Host may go without a port", source="RFC 9110 section 7.2"),
    row("empty port", "localhost:", text="port = *DIGIT", source="RFC 3986 section 3.2.3", level="should"),
    row("capitals", "LOCALHOST", text="hosts are case-insensitive", source="RFC 3986 section 3.2.2"),
    row("IPv4", "127.0.0.1", text="a Host may be an address", source="RFC 3986 section 3.2.2"),
    row("IPv6", "[::1]:8000", text="a Host may be an IPv6 literal", source="RFC 3986 section 3.2.2"),
]  # fmt: skip


@pytest.mark.parametrize("host", HOSTS_GOOD)
def test_host_understood(target: Target, host: str) -> None:
    """Its syntax is right; a server may still not be the one that is meant (421, 403, 404)."""
    with target.connect() as connection:
        connection.send(target.request(None, host=host.replace("AUTHORITY", target.authority)))
        answer = connection.answer(target.method)
    assert answer.end == "whole" and answer.status not in REFUSALS - {421}, answer


@rule("the authority of an absolute target replaces the Host field", RFC + "3.2.2")
def test_absolute_form_with_another_host(target: Target) -> None:
    data = target.request("METHOD http://AUTHORITYPATH HTTP/1.1", host="other.example")
    understood(target, data, like_baseline=True)


LARGE = frozenset({400, 413, 431})
LIMITS = [
    row("one field of 200 kB", "X-A: " + "v" * 200_000, text="a field has a limit, beyond which it gets a 4xx and a close", source="RFC 9110 section 5.4, RFC 6585 section 5", level="should"),
    row("fields of 200 kB together", "\r\n".join(f"X-{i}: {'v' * 1000}" for i in range(200)), text="a head has a limit, beyond which it gets a 4xx and a close", source="RFC 9110 section 5.4, RFC 6585 section 5", level="should"),
    row("twenty thousand fields", "\r\n".join(f"X{i}: 1" for i in range(20_000)), text="the number of fields has a limit", source="RFC 6585 section 5", level="should"),
]  # fmt: skip


@pytest.mark.parametrize("fields", LIMITS)
def test_limits(target: Target, fields: str) -> None:
    refused(target, target.request(None, fields), statuses=LARGE)


@rule("a target of 200 kB is longer than any, and gets 414 (431 or 400 will do) and a close", RFC + "3", "should")
def test_target_too_long(target: Target) -> None:
    refused(target, target.request("METHOD PATH?" + "q" * 200_000 + " HTTP/1.1"), statuses={400, 414, 431})


@rule(
    "a field section that never ends does not grow for ever: it is refused at the limit",
    "RFC 9110 section 5.4, A11",
    "should",
)
def test_endless_field(target: Target) -> None:
    with target.connect() as connection:
        connection.send(target.request()[: -2 - len(target.body)] + b"X-A: ")
        for _ in range(64):
            connection.send(b"v" * 65536)
        answer = connection.answer(target.method)
        assert answer.status in {400, 413, 431} or answer.end in ("none", "reset"), answer
        assert connection.ends() == "closed"
