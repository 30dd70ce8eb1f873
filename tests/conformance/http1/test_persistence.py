"""More than one request on a connection, and its end: keep-alive, pipelining, Connection, HTTP/1.0, half-close."""

# ruff: noqa: E501 (a row of a table is one line)

from __future__ import annotations

from typing import Any

import pytest
from conformance_kit.rules import http1_only, row, rule
from conformance_kit.target import Target

pytestmark = http1_only
RFC = "RFC 9112 section "


@rule("HTTP/1.1 connections persist by default", RFC + "9.3", "should")
def test_keep_alive(target: Target) -> None:
    with target.connect() as connection:
        for _ in range(5):
            connection.send(target.request())
            answer = connection.answer(target.method)
            assert (answer.status, answer.end) == (target.baseline.status, "whole"), answer
            assert connection.persistent, f"not persistent: {answer}"


@pytest.mark.parametrize(
    "count", [row(f"{n} requests", n, text="pipelined requests are answered in order, each once", source=RFC + "9.3.2") for n in (2, 5, 50)]
)  # fmt: skip
def test_pipelining(target: Target, count: int) -> None:
    with target.connect() as connection:
        connection.send(target.request() * count)
        for _ in range(count):
            answer = connection.answer(target.method)
            assert (answer.status, answer.end) == (target.baseline.status, "whole"), answer
        assert connection.ends(0.2) == "open", "more answers than requests"


@rule("pipelined answers come in the order of their requests", RFC + "9.3.2")
def test_pipelining_order(target: Target) -> None:
    """HEAD and others differ in whether a body follows: an answer out of place can't be read."""
    methods = [target.method, "HEAD", target.method, "HEAD"]
    with target.connect() as connection:
        connection.send(b"".join(target.request(f"{method} PATH HTTP/1.1") for method in methods))
        for index, method in enumerate(methods):
            answer = connection.answer(method)
            assert answer.end == "whole", answer
            if method == target.method:
                assert answer.status == target.baseline.status, answer
            if not connection.persistent:
                assert index % 2, "closed behind a plain request"
                return


@rule("pipelined requests that come in pieces of one byte are the same requests", RFC + "9.3.2")
def test_pipelining_in_pieces(target: Target) -> None:
    with target.connect() as connection:
        connection.send(target.request() * 3, one_by_one=True)
        for _ in range(3):
            assert connection.answer(target.method).status == target.baseline.status


@rule("pipelined bodies end where their framing says", RFC + "9.3.2")
def test_pipelined_bodies(target: Target) -> None:
    body = target.body
    data = target.request("POST PATH HTTP/1.1", body=body)
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
    chunked = target.request("POST PATH HTTP/1.1", "Transfer-Encoding: chunked", body=chunks, length=False)
    with target.connect() as connection:
        connection.send((data + chunked) * 3)
        statuses = []
        for _ in range(6):
            answer = connection.answer("POST")
            statuses.append(answer.status)
            if not connection.persistent:
                break
        assert len(set(statuses)) == 1, statuses


CLOSES = [
    row("close", "Connection: close", text="after a request with close the server closes behind its answer", source=RFC + "9.6"),
    row("capitals", "Connection: CLOSE", text="connection options are case-insensitive", source="RFC 9110 section 7.6.1"),
    row("in a list", "Connection: foo, close", text="close counts wherever it stands in the list", source="RFC 9110 section 7.6.1"),
    row("on a line of its own", "Connection: keep-alive\r\nConnection: close", text="close counts on any line, and beats keep-alive", source=RFC + "9.3"),
    row("with keep-alive", "Connection: keep-alive, close", text="close beats keep-alive", source=RFC + "9.3"),
]  # fmt: skip


@pytest.mark.parametrize("field", CLOSES)
def test_close(target: Target, field: str) -> None:
    with target.connect() as connection:
        connection.send(target.request(None, field))
        answer = connection.answer(target.method)
        assert (answer.status, answer.end) == (target.baseline.status, "whole"), answer
        assert connection.ends() == "closed"


@rule("what a client sends behind its close is dropped, and does no harm to the answer", RFC + "9.6", "should")
@pytest.mark.parametrize("together", [True, False], ids=["in one packet", "behind the answer"])
def test_bytes_behind_a_close(target: Target, together: bool) -> None:
    with target.connect() as connection:
        connection.send(target.request(None, "Connection: close") + target.request() * together)
        answer = connection.answer(target.method)
        assert (answer.status, answer.end) == (target.baseline.status, "whole"), answer
        connection.send(target.request() * (not together))
        assert connection.ends() == "closed"


@rule("a server that will close says so", RFC + "9.6", "should")
def test_close_is_announced(target: Target) -> None:
    with target.connect() as connection:
        connection.send(target.request(None, "Connection: close"))
        assert "close" in connection.answer(target.method).members("connection")


@rule("HTTP/1.0 without keep-alive: the connection closes behind the answer", RFC + "9.3")
def test_http_1_0(target: Target) -> None:
    with target.connect() as connection:
        connection.send(target.request("METHOD PATH HTTP/1.0"))
        answer = connection.answer(target.method)
        assert (answer.status, answer.end) == (target.baseline.status, "whole"), answer
        assert connection.ends() == "closed"


@rule("HTTP/1.0 needs no Host", RFC + "3.2, RFC 1945 section 5")
def test_http_1_0_without_host(target: Target) -> None:
    with target.connect() as connection:
        connection.send(target.request("METHOD PATH HTTP/1.0", host=None))
        assert connection.answer(target.method).status == target.baseline.status


@rule("an HTTP/1.0 client is never sent chunked", RFC + "6.1")
def test_http_1_0_gets_no_chunks(target: Target) -> None:
    with target.connect() as connection:
        connection.send(target.request("METHOD PATH HTTP/1.0"))
        answer = connection.answer(target.method)
        assert answer.header("transfer-encoding") is None, answer


@rule("HTTP/1.0 with keep-alive: the connection persists only if the server says so", RFC + "9.3 and C.2.2")
def test_http_1_0_keep_alive(target: Target) -> None:
    with target.connect() as connection:
        connection.send(target.request("METHOD PATH HTTP/1.0", "Connection: keep-alive"))
        answer = connection.answer(target.method)
        assert (answer.status, answer.end) == (target.baseline.status, "whole"), answer
        if "keep-alive" not in answer.members("connection"):
            assert connection.ends() == "closed"


@rule("an answer to HTTP/1.0 has the server's own version", "RFC 9110 section 2.5", "should")
def test_http_1_0_version_of_the_answer(target: Target) -> None:
    with target.connect() as connection:
        connection.send(target.request("METHOD PATH HTTP/1.0"))
        assert connection.answer(target.method).raw.startswith(b"HTTP/1.1 ")


@rule("a client that closed its sending side still gets the answer to its whole request", RFC + "9.6, A13", "should")
def test_half_close(target: Target) -> None:
    with target.connect() as connection:
        connection.send(target.request())
        connection.end_sending()
        answer = connection.answer(target.method)
        assert (answer.status, answer.end) == (target.baseline.status, "whole"), answer
        assert connection.ends() == "closed"


@rule("pipelined requests before a half-close are all answered", RFC + "9.6, A13", "should")
def test_half_close_behind_pipelined_requests(target: Target) -> None:
    with target.connect() as connection:
        connection.send(target.request() * 3)
        connection.end_sending()
        for _ in range(3):
            assert connection.answer(target.method).status == target.baseline.status
        assert connection.ends() == "closed"


@rule("an idle connection that the client closes is closed by the server too", RFC + "9.6", "should")
def test_close_of_an_idle_connection(target: Target) -> None:
    with target.connect() as connection:
        connection.send(target.request())
        connection.answer(target.method)
        connection.end_sending()
        assert connection.ends() == "closed"


@rule("a refusal doesn't hurt other connections", "A01")
def test_others_go_on(target: Target) -> None:
    with target.connect() as bad, target.connect() as good:
        bad.send(target.request(None, "Content-Length: " + "9" * 46, length=False))
        good.send(target.request())
        assert good.answer(target.method).status == target.baseline.status


@rule("clients that vanish in the middle of a request don't hurt others", "A11")
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_vanishing_clients(target: Target, part: float) -> None:
    data = target.request()
    for _ in range(20):
        with target.connect() as connection:
            connection.send(data[: int(len(data) * part)])
            connection.reset()
    with target.connect() as connection:
        connection.send(data)
        assert connection.answer(target.method).status == target.baseline.status


def statuses_of(target: Target, pieces: list[bytes]) -> list[Any]:
    with target.connect() as connection:
        for piece in pieces:
            connection.send(piece)
        return [connection.answer(target.method).status]


@rule("where the bytes of a request are split has no meaning", RFC + "2.1")
def test_every_split(target: Target) -> None:
    """A request in two pieces, cut at each of its first and last bytes."""
    data = target.request()
    cuts = [*range(1, min(40, len(data))), *range(max(1, len(data) - 40), len(data))]
    for cut in cuts:
        assert statuses_of(target, [data[:cut], data[cut:]]) == [target.baseline.status], f"cut at {cut}"
