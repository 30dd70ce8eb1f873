"""What HTTP means beyond its framing: HEAD, OPTIONS, Expect, 405, and what every answer must carry."""

# ruff: noqa: E501 (a row of a table is one line)

from __future__ import annotations

import re

import pytest
from conformance_kit.rules import http1_only, not_offered, row, rule
from conformance_kit.target import Target
from conformance_kit.verdicts import understood

RFC = "RFC 9110 section "
_DATE = re.compile(r"(Mon|Tue|Wed|Thu|Fri|Sat|Sun), \d\d [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d GMT")


@rule("an answer has a Date, in the fixed form", RFC + "6.6.1")
def test_date(target: Target) -> None:
    assert _DATE.fullmatch(target.baseline.header("date") or ""), target.baseline


@http1_only
@rule("an answer never has both Content-Length and Transfer-Encoding", "RFC 9112 section 6.2")
def test_one_framing(target: Target) -> None:
    answer = target.baseline
    assert not (answer.header("content-length") and answer.header("transfer-encoding")), answer


@rule("an answer's fields that may come once come once", RFC + "5.3")
@pytest.mark.parametrize("name", ["content-length", "content-type", "date", "transfer-encoding", "server"])
def test_single_fields(target: Target, name: str) -> None:
    assert len([key for key, _ in target.baseline.headers if key == name.encode()]) <= 1, target.baseline


@rule("an answer with a body says what it is", RFC + "8.3", "should")
def test_content_type(target: Target) -> None:
    assert not target.baseline.body or target.baseline.header("content-type"), target.baseline


@rule("an answer to HEAD has no body", RFC + "9.3.2")
def test_head(target: Target) -> None:
    """A body behind it would be taken for the next answer."""
    with target.connect() as connection:
        connection.send(target.request("HEAD PATH HTTP/1.1"))
        answer = connection.answer("HEAD")
        assert answer.end == "whole", answer
        if connection.persistent:
            assert connection.ends(0.2) == "open"


@rule("HEAD is answered with the status of GET", RFC + "9.3.2", "should")
def test_head_status(target: Target) -> None:
    with target.connect() as connection:
        connection.send(target.request("HEAD PATH HTTP/1.1"))
        head = connection.answer("HEAD")
    with target.connect() as connection:
        connection.send(target.request("GET PATH HTTP/1.1"))
        get = connection.answer("GET")
    assert head.status == get.status, (head.status, get.status)


@rule("behind an answer to HEAD the connection goes on", RFC + "9.3.2")
def test_head_then_others(target: Target) -> None:
    understood(target, target.request("HEAD PATH HTTP/1.1"), method="HEAD")


OPTIONS = [
    row("asterisk", "OPTIONS * HTTP/1.1", text="OPTIONS * asks about the server as a whole", source=RFC + "9.3.7"),
    row("path", "OPTIONS PATH HTTP/1.1", text="OPTIONS asks about a resource; it may be refused with 405", source=RFC + "9.3.7"),
    row("absolute, no path", "OPTIONS http://AUTHORITY HTTP/1.1", text="an absolute target without a path is the asterisk's other form", source="RFC 9112 section 3.2.4", marks=(http1_only,)),
]  # fmt: skip


@pytest.mark.parametrize("line", OPTIONS)
def test_options(target: Target, line: str) -> None:
    understood(target, target.request(line), method="OPTIONS")


@rule("405 names the methods that are allowed", RFC + "15.5.6")
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
def test_405_has_allow(target: Target, method: str) -> None:
    with target.connect() as connection:
        connection.send(target.request(f"{method} PATH HTTP/1.1"))
        answer = connection.answer(method)
    assert answer.end == "whole", answer
    assert answer.status != 405 or answer.header("allow") is not None, answer


@rule("CONNECT to a server that is no proxy opens no tunnel", RFC + "9.3.6")
def test_connect(target: Target) -> None:
    with target.connect() as connection:
        connection.send(b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n")
        answer = connection.begin("GET")
        assert answer.end == "none" or answer.status >= 400, answer


@rule("TRACE is refused, or answered without the sensitive fields", RFC + "9.3.8")
def test_trace(target: Target) -> None:
    with target.connect() as connection:
        connection.send(target.request("TRACE PATH HTTP/1.1", "Cookie: secret=1"))
        answer = connection.answer("TRACE")
    assert b"secret=1" not in answer.body, answer


def expecting(target: Target, *fields: str, version: str = "1.1", body: bytes | None = None) -> bytes:
    """The head of a POST that waits for 100, without its body."""
    data = target.body if body is None else body
    fields = (*fields, "Expect: 100-continue", f"Content-Length: {len(data)}")
    return target.request(f"POST PATH HTTP/{version}", *fields, body=b"", length=False)


@rule("a client that waits for 100 Continue gets it, once, before it sends the body", RFC + "10.1.1, A02")
def test_expect(target: Target) -> None:
    if not target.body:
        not_offered("no request with a body is known (--body)")
    with target.connect() as connection:
        connection.send(expecting(target))
        answer = connection.begin("POST", interim=True)
        assert (answer.interim, answer.status) == ([100], 0), f"no 100 Continue: {answer}"
        connection.send(target.body)
        answer = connection.finish()
        assert (answer.status, answer.end, answer.interim) == (target.baseline.status, "whole", [100]), answer


@rule("a body that comes with the expectation is simply read", RFC + "10.1.1", "must")
def test_expect_with_the_body_at_once(target: Target) -> None:
    with target.connect() as connection:
        connection.send(expecting(target) + target.body)
        answer = connection.answer("POST")
        assert answer.end == "whole" and set(answer.interim) <= {100}, answer
        assert not target.body or answer.status == target.baseline.status, answer


@http1_only
@rule("100 Continue is not sent to HTTP/1.0", RFC + "10.1.1")
def test_expect_in_http_1_0(target: Target) -> None:
    with target.connect() as connection:
        connection.send(expecting(target, version="1.0") + target.body)
        answer = connection.answer("POST")
        assert (answer.end, answer.interim) == ("whole", []), answer


@rule("an expectation that isn't known is refused with 417, or ignored", RFC + "10.1.1")
def test_unknown_expectation(target: Target) -> None:
    with target.connect() as connection:
        connection.send(target.request(None, "Expect: 200-maybe"))
        answer = connection.answer(target.method)
        assert answer.end == "whole" and answer.status in {417, target.baseline.status}, answer


@http1_only
@rule("a server that refuses a body while it is still coming gets its answer through", "RFC 9112 section 9.6", "should")
def test_early_answer_arrives(target: Target) -> None:
    """A close at once would reset the connection, and lose the answer."""
    size = 64 * 1024 * 1024
    with target.connect() as connection:
        head = target.request("POST PATH HTTP/1.1", f"Content-Length: {size}", body=b"", length=False)
        connection.send(head + b"x" * 256 * 1024)
        connection.end_sending()
        answer = connection.answer("POST")
        assert answer.end == "none" or (answer.end == "whole" and answer.status >= 400), answer


@rule("an unknown path is 404, in a whole answer", RFC + "15.5.5", "should")
def test_404(service: Target) -> None:
    with service.connect() as connection:
        connection.send(service.request(f"METHOD {service.prefix}/no/such/path HTTP/1.1"))
        answer = connection.answer(service.method)
    if answer.status == service.baseline.status:
        not_offered("the application answers every path")
    assert (answer.status, answer.end) == (404, "whole"), answer
