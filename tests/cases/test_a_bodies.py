"""Cases A01, A02, A08 and A09: a request's body over HTTP/1.1, its length, its chunks and what may hide behind it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.http1_cases import CHAT, post, wait_let_go
from tests.support.played import KEY, MAX_BODY
from tests.support.serving import Server

pytestmark = pytest.mark.synthetic
STARTED = 'sluice_requests_started_total{api="chat"}'


class TestA01ContentLengthBeyondNumbers:
    @pytest.mark.parametrize("digits", [19, 46, 4000])
    def test_a01_is_refused_as_soon_as_the_head_is_here(self, server: Server, digits: int) -> None:
        with server.connect() as client, server.connect() as other:
            client.send(post(f"Content-Length: {'9' * digits}\r\n", b"11 bytes...")[:-4], b"....")
            answer = client.answer()
            answer.error(413)
            assert answer.header("connection") == "close"
            client.end_sending()
            assert client.closed() == "fin"
            other.request("GET", "/health")
            assert other.answer().status == 200

    def test_a01_a_number_above_the_limit_likewise(self, server: Server) -> None:
        with server.connect() as client:
            client.send(post(f"Content-Length: {MAX_BODY + 1}\r\n", b"{"))
            answer = client.answer()
            assert str(MAX_BODY) in answer.error(413)["message"]
            assert answer.header("connection") == "close"
            client.end_sending()
            assert client.closed() == "fin"

    def test_a01_the_limit_itself_is_taken(self, server: Server) -> None:
        body = b" " * MAX_BODY
        answer = server.ask("POST", CHAT, body)
        assert answer.error(400)["code"] == "invalid_json"

    def test_a01_the_client_is_let_go_even_if_it_never_closes(self, server: Server) -> None:
        with server.connect() as client:
            client.send(post("Content-Length: 99999999999999999999\r\n"))
            client.answer().error(413)
            assert client.closed() == "fin"  # the server's side is closed at once
            wait_let_go(client)

    def test_a01_a_chunked_body_is_refused_when_it_outgrows_the_limit(self, server: Server) -> None:
        with server.connect() as client:
            client.send(post("Transfer-Encoding: chunked\r\n"))
            chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
            for _ in range(MAX_BODY // 4096):
                client.send(chunk)
            client.send(chunk)
            answer = client.answer()
            answer.error(413)
            assert answer.header("connection") == "close"

    @pytest.mark.parametrize("size", [MAX_BODY + 1, 12 * 1024 * 1024])
    def test_a01_a_client_that_sends_it_all_first_still_sees_the_answer(self, server: Server, size: int) -> None:
        """RFC 9112 9.6: closing at once would reset the connection under the answer."""
        with server.connect() as client:
            client.send(post(f"Content-Length: {size}\r\n"), b" " * size)
            client.answer().error(413)
            client.end_sending()
            assert client.closed() == "fin"


class TestA02ExpectContinue:
    BODY = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":2}'

    def head(self, *, key: str = KEY, length: int | None = None, path: str = CHAT) -> bytes:
        length = len(self.BODY) if length is None else length
        return post(f"Authorization: Bearer {key}\r\nContent-Length: {length}\r\nExpect: 100-continue\r\n", path=path)

    @pytest.mark.parametrize(
        ("status", "change"), [(401, {"key": "wrong"}), (413, {"length": MAX_BODY + 1}), (404, {"path": "/v1/nothing"})]
    )
    def test_a02_no_100_where_the_head_is_refused(self, keyed: Server, status: int, change: dict[str, Any]) -> None:
        with keyed.connect() as client:
            client.send(self.head(**change))
            answer = client.answer()
            answer.error(status)
            assert answer.interim == []
            assert answer.header("connection") == "close"  # the body might follow all the same

    def test_a02_one_100_and_then_the_answer(self, keyed: Server) -> None:
        with keyed.connect() as client:
            client.send(self.head())
            interim = b"HTTP/1.1 100 Continue\r\n\r\n"
            assert client.socket.recv(1000) == interim
            client.send(self.BODY)
            answer = client.answer()
            assert (answer.status, answer.interim) == (200, [])
            client.request("GET", "/health")
            assert client.answer().status == 200

    def test_a02_none_when_the_body_comes_with_the_head(self, keyed: Server) -> None:
        with keyed.connect() as client:
            client.send(self.head() + self.BODY)
            answer = client.answer()
            assert answer.status == 200
            assert answer.interim in ([], [100])


class TestA08ChunkSizes:
    BODY = b'{"messages":[{"role":"user","content":"chunk"}],"max_tokens":2}'

    @pytest.mark.parametrize(
        "line", [b"+5", b"0x5", b"0_5", b"5\x0b", b"-0", b"", b"123456789012345678", b" 5", b"5 ", b"g", b"5;\n"]
    )
    def test_a08_what_is_no_number_is_refused(self, server: Server, line: bytes) -> None:
        before = server.metrics()
        with server.connect() as client:
            client.send(post("Transfer-Encoding: chunked\r\n"), line + b"\r\n", b"hello\r\n0\r\n\r\n")
            answer = client.answer()
            answer.error(400)
            assert answer.header("connection") == "close"
            client.end_sending()
            assert client.closed() == "fin"
        after = server.metrics()
        refused = 'sluice_requests_total{api="chat",outcome="refused"}'
        assert after[refused] == before[refused] + 1
        assert after["sluice_prompt_tokens_total"] == before["sluice_prompt_tokens_total"]

    @pytest.mark.parametrize("line", [b"%x", b"00%x", b"%x;ext=1", b'%x;a="b;c"', b"%X"])
    def test_a08_legal_forms_work(self, server: Server, line: bytes) -> None:
        with server.connect() as client:
            client.send(
                post("Transfer-Encoding: chunked\r\n"), line % len(self.BODY) + b"\r\n", self.BODY, b"\r\n0\r\n\r\n"
            )
            assert client.answer().status == 200


class TestA09Smuggling:
    HIDDEN = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"

    @pytest.mark.parametrize(
        "headers",
        [
            "Content-Length: 0\r\nTransfer-Encoding: chunked\r\n",
            "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
            "Transfer-Encoding: chunked, gzip\r\n",
            "Transfer-Encoding: gzip, chunked\r\n",
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
            "Transfer-Encoding: identity\r\n",
            "Transfer-Encoding: \x0bchunked\r\n",
            "Content-Length: 5, 6\r\n",
            "Content-Length: 5\r\nContent-Length: 6\r\n",
            "Content-Length: +5\r\n",
            "Content-Length : 5\r\n",
            "X: y\r\n Content-Length: 5\r\n",
            "X: y\nContent-Length: 5\r\n",
            "Host: other\r\n",
        ],
    )
    def test_a09_ambiguous_framing_is_refused(self, server: Server, headers: str) -> None:
        before = server.metrics()[STARTED]
        with server.connect() as client:
            client.send(post(headers, b"0\r\n\r\n" + self.HIDDEN))
            answer = client.answer()
            answer.error(400)
            assert answer.header("connection") == "close"
            client.end_sending()
            assert client.closed() == "fin"  # one answer, no second
        assert server.metrics()[STARTED] == before
