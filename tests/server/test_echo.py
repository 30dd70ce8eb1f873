"""--conformance-echo: every request and every message comes back, through the connections of a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import wsproto.events as ws

from tests.support.serving import Server, WebSocketClient, request_bytes

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def echo() -> Iterator[Server]:
    with Server("--conformance-echo", engine=None) as running:
        yield running


def test_it_starts_no_engine(echo: Server) -> None:
    assert echo.engine_pids == []


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "BREW"])
def test_any_path_and_method_is_answered_with_the_body(echo: Server, method: str) -> None:
    with echo.connect() as client:
        for body in (b"body of it", bytes(range(256)) * 400):
            client.request(method, "/any/path?with=query", body)
            answer = client.answer()
            assert (answer.status, bytes(answer.body)) == (200, body)
        client.request(method, "/")
        assert client.answer().body == b"ok"


def test_chunks_come_back_as_one_body(echo: Server) -> None:
    with echo.connect() as client:
        head = b"POST / HTTP/1.1\r\nHost: anything.example\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.send(head, b"3\r\nabc\r\n", b"1;x=y\r\nd\r\n0\r\nTrailer: z\r\n\r\n")
        assert client.answer().body == b"abcd"


def test_head_has_no_body(echo: Server) -> None:
    with echo.connect() as client:
        client.request("HEAD", "/")
        answer = client.answer("HEAD")
        assert (answer.header("content-length"), bytes(answer.body)) == ("2", b"")


def test_what_is_no_request_is_refused(echo: Server) -> None:
    with echo.connect() as client:
        client.send(b"GET / HTTP/1.1\r\n\r\n")
        answer = client.answer()
        assert (answer.status, answer.header("connection")) == (400, "close")
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize("deflate", [False, True])
def test_messages_come_back_as_they_came(echo: Server, deflate: bool) -> None:
    with WebSocketClient(echo, "/any", deflate=deflate) as client:
        for message in ("", "text é 😀", "x" * 70_000):
            client.send_text(message)
            assert client.receive() == message
        for data in (b"", bytes(range(256)), b"y" * 70_000):
            client.send(ws.BytesMessage(data))
            assert client.receive() == data
        client.send(ws.TextMessage("in ", message_finished=False))
        client.send(ws.Ping(b"between"))
        client.send(ws.TextMessage("pieces"))
        assert client.receive() == "in pieces"
        assert client.close(1000, "bye").code == 1000
        assert client.ended() == "fin"


def test_messages_up_to_16_mib(echo: Server) -> None:
    with WebSocketClient(echo, deflate=True) as client:  # the bound is on what a message inflates to
        message = b"m" * 16 * MIB
        client.send(ws.BytesMessage(message))
        assert client.receive() == message
        client.send(ws.BytesMessage(message + b"m"))
        assert client.closed().code == 1009


def test_only_on_loopback(echo: Server) -> None:
    with pytest.raises(AssertionError, match="ended before it was ready"):
        Server("--conformance-echo", "--host", "0.0.0.0", "--insecure", engine=None).__enter__()


def test_requests_may_be_pipelined(echo: Server) -> None:
    with echo.connect() as client:
        client.send(request_bytes("POST", "/", b"one") + request_bytes("GET", "/"))
        assert [bytes(client.answer().body) for _ in range(2)] == [b"one", b"ok"]
