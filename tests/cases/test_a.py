"""Cases of kind A, HTTP/1.1 as bytes on a socket: the framing of answers (A07), their order, HTTP/1.0, and refusals."""

from __future__ import annotations

import pytest

from tests.support.http1_cases import CHAT, FRAMINGS, accept, text_of
from tests.support.played import MAX_HEADER
from tests.support.serving import Server, chat, flood, request_bytes

pytestmark = pytest.mark.synthetic


class TestA07NoEmptyChunks:
    @pytest.mark.parametrize("framing", FRAMINGS)
    @pytest.mark.parametrize(("prompt", "text"), [("[empty]", ""), ("[specials]", ""), ("[late]", "😀")])
    def test_a07_one_zero_chunk_at_the_end(self, server: Server, framing: str, prompt: str, text: str) -> None:
        with server.connect() as client:
            for _ in range(2):
                client.request("POST", CHAT, chat(prompt, stream=True), accept(framing))
                answer = client.answer()
                assert text_of(framing, answer) == text
                body = bytes(answer.raw).partition(b"\r\n\r\n")[2]
                assert chunk_sizes(body).count(0) == 1
            client.request("GET", "/health")
            assert client.answer().json() == {"status": "ok"}


def chunk_sizes(body: bytes) -> list[int]:
    """Of a chunked body, which must end with its last chunk exactly."""
    sizes: list[int] = []
    while body:
        line, _, body = body.partition(b"\r\n")
        sizes.append(int(line, 16))
        assert body[sizes[-1] :][:2] == b"\r\n"
        body = body[sizes[-1] + 2 :]
    assert sizes[-1] == 0
    return sizes


class TestPipelining:
    def test_answers_come_in_order(self, server: Server) -> None:
        with server.connect() as client:
            ids = [f"r{i}" for i in range(100)]
            client.send(b"".join(request_bytes("GET", "/health", headers=[("X-Request-Id", i)]) for i in ids))
            assert [client.answer().header("x-request-id") for _ in ids] == ids

    def test_refusals_among_them_keep_their_place(self, server: Server) -> None:
        with server.connect() as client:
            paths = ["/health", "/nothing", "/v1/models", "/v1/chat/completions", "/health"] * 3
            client.send(b"".join(request_bytes("GET", path) for path in paths))
            answers = [client.answer() for _ in paths]
            assert [a.status for a in answers] == [200, 404, 200, 405, 200] * 3
            assert all(a.header("connection") is None for a in answers)

    def test_a_post_refused_by_its_head_keeps_the_connection_when_its_body_is_here(self, server: Server) -> None:
        with server.connect() as client:
            client.send(request_bytes("POST", "/nothing", {"a": 1}) + request_bytes("GET", "/health"))
            answer = client.answer()
            answer.error(404)
            assert answer.header("connection") is None
            assert client.answer().status == 200

    def test_bytes_behind_connection_close_are_dropped(self, server: Server) -> None:
        with server.connect() as client:
            close = request_bytes("GET", "/health", headers=[("Connection", "close")])
            client.send(close + request_bytes("GET", "/v1/models") * 3)
            assert client.answer().header("connection") == "close"
            client.end_sending()
            assert client.closed() == "fin"

    def test_so_are_many_of_them_and_the_answer_arrives(self, server: Server) -> None:
        with server.connect() as client:
            client.send(request_bytes("GET", "/metrics", headers=[("Connection", "close")]), b"x" * 500_000)
            answer = client.answer()
            assert (answer.status, answer.end) == (200, "whole")
            client.end_sending()
            assert client.closed() == "fin"

    @pytest.mark.parametrize("framing", FRAMINGS)
    def test_a_connection_serves_stream_after_stream(self, server: Server, framing: str) -> None:
        with server.connect() as client:
            for i in range(5):
                client.request("POST", CHAT, chat(f"again {i}", stream=True, max_tokens=3), accept(framing))
                assert len(text_of(framing, client.answer()).split()) == 3

    def test_streams_may_be_pipelined(self, server: Server) -> None:
        with server.connect() as client:
            sizes = [1, 40, 3, 200]
            client.send(b"".join(request_bytes("POST", CHAT, chat("p", stream=True, max_tokens=n)) for n in sizes))
            assert [len(client.answer().text().split()) for _ in sizes] == sizes

    def test_a_client_that_pipelines_and_never_reads_costs_little(self, server: Server) -> None:
        with server.connect(receive_buffer=4096) as client:
            before = server.resident_bytes
            sent = flood(client.socket, request_bytes("GET", "/metrics") * 1000)
            assert server.resident_bytes - before < 8 * 1024 * 1024, sent
            assert server.ask("GET", "/health").status == 200


class TestHttp10:
    @pytest.mark.parametrize("framing", FRAMINGS)
    def test_a_stream_ends_with_the_connection(self, server: Server, framing: str) -> None:
        with server.connect() as client:
            request = request_bytes("POST", CHAT, chat("old", stream=True, max_tokens=4), accept(framing))
            client.send(request.replace(b"HTTP/1.1", b"HTTP/1.0"))
            answer = client.answer()
            assert (answer.status, answer.end) == (200, "whole")
            assert answer.header("transfer-encoding") is None and answer.header("content-length") is None
            assert len(text_of(framing, answer).split()) == 4

    @pytest.mark.parametrize("framing", FRAMINGS[:2])
    def test_an_error_is_told_in_the_body(self, server: Server, framing: str) -> None:
        with server.connect() as client:
            request = request_bytes("POST", CHAT, chat("[error]", stream=True), accept(framing))
            client.send(request.replace(b"HTTP/1.1", b"HTTP/1.0"))
            answer = client.answer()
            assert answer.end == "whole"
            assert b'"error":{' in answer.body

    def test_plain_text_that_an_error_cut_ends_with_a_reset(self, server: Server) -> None:
        """There the end of the connection alone says that the text is whole."""
        with server.connect() as client:
            request = request_bytes("POST", CHAT, chat("[error]", stream=True), accept("text/plain"))
            client.send(request.replace(b"HTTP/1.1", b"HTTP/1.0"))
            assert client.answer().end == "reset"

    def test_a_whole_answer_has_its_length(self, server: Server) -> None:
        with server.connect() as client:
            client.send(b"GET /health HTTP/1.0\r\n\r\n")
            answer = client.answer()
            assert answer.header("content-length") == "15"
            assert client.closed() == "fin"


class TestRefusals:
    @pytest.mark.parametrize(
        ("request_", "status"),
        [
            (request_bytes("GET", "/nothing"), 404),
            (request_bytes("GET", "/v1/streams/unknown-stream-id"), 404),
            (request_bytes("GET", "/v1/models/unknown"), 404),
            (request_bytes("GET", CHAT), 405),
            (request_bytes("HEAD", "/v1/generate?prompt=x"), 405),
            (request_bytes("DELETE", "/health"), 405),
            (request_bytes("BREW", "/health"), 405),
            (request_bytes("POST", CHAT, b"<a/>", [("Content-Type", "text/xml")]), 415),
            (request_bytes("POST", CHAT, b"{"), 400),
            (request_bytes("POST", CHAT, b"\xff\xfe"), 400),
            (request_bytes("POST", CHAT, {"messages": [], "nonsense": 1}), 400),
            (request_bytes("GET", "/" + "x" * MAX_HEADER), 414),
            (request_bytes("GET", "/health", headers=[("X-Large", "x" * MAX_HEADER)]), 431),
            (request_bytes("GET", "/health", headers=[("X", "")] * 300), 431),
            (b"GET /health HTTP/1.1\r\n\r\n", 400),
            (b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403),
            (b"GET /health HTTP/2.0\r\nHost: localhost\r\n\r\n", 400),
            (b"\x16\x03\x01\x02\x00\x01\x00", 400),
            (request_bytes("GET", "/a%00b"), 400),
            (request_bytes("GET", "/a%ffb"), 404),
            (request_bytes("GET", "/v1/ws"), 426),
        ],
    )
    def test_all_are_json_with_a_request_id(self, server: Server, request_: bytes, status: int) -> None:
        with server.connect() as client:
            client.send(request_)
            method = "HEAD" if request_.startswith(b"HEAD") else "GET"
            answer = client.answer(method)
            assert answer.status == status
            if method == "HEAD":
                assert answer.header("x-request-id")
            else:
                answer.error(status)
            assert (answer.header("allow") is not None) == (status == 405)

    def test_a_clients_request_id_is_used_and_a_bad_one_is_not(self, server: Server) -> None:
        for given, kept in (("abc-123", True), ("a b", False), ("x" * 129, False), ("é", False)):
            answer = server.ask("GET", "/nothing", headers=[("X-Request-Id", given)])
            answer.error(404)
            assert (answer.header("x-request-id") == given) == kept

    def test_head_has_the_headers_of_get_and_no_body(self, server: Server) -> None:
        with server.connect() as client:
            for target in ("/health", "/v1/models", "/nothing"):
                client.request("GET", target)
                whole = client.answer()
                client.request("HEAD", target)
                head = client.answer("HEAD")
                assert (head.status, bytes(head.body)) == (whole.status, b"")
                assert head.header("content-length") == str(len(whole.body))

    def test_options(self, server: Server) -> None:
        with server.connect() as client:
            client.request("OPTIONS", "*")
            answer = client.answer()
            assert (answer.status, bytes(answer.body)) == (204, b"") and answer.header("allow")
            client.request("OPTIONS", CHAT)
            assert client.answer().header("allow") == "POST, OPTIONS"

    def test_the_absolute_form(self, server: Server) -> None:
        with server.connect() as client:
            client.request("GET", f"{server.url}/health?x=1")
            assert client.answer().json() == {"status": "ok"}
            client.request("GET", "http://evil.example/health")
            client.answer().error(403)

    def test_every_answer_to_a_stream_has_the_headers_that_keep_it_flowing(self, server: Server) -> None:
        for framing in FRAMINGS:
            answer = server.ask("POST", CHAT, chat("h", stream=True, max_tokens=1), accept(framing))
            assert answer.header("content-type") == f"{framing}; charset=utf-8"
            assert answer.header("cache-control") == "no-cache, no-transform"
            assert answer.header("x-accel-buffering") == "no"
            assert answer.header("x-content-type-options") == "nosniff"
            assert answer.header("x-stream-id") and answer.header("x-request-id")
