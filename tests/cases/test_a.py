"""Cases of kind A, HTTP/1.1 as bytes on a socket: what a server must answer, refuse, wait for and give up."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.played import KEY, MAX_BODY, MAX_HEADER
from tests.support.serving import Client, Server, chat, flood, request_bytes, until

pytestmark = pytest.mark.synthetic

FRAMINGS = ("text/event-stream", "application/x-ndjson", "text/plain")
CHAT = "/v1/chat/completions"
STARTED = 'sluice_requests_started_total{api="chat"}'
RUNNING = 'sluice_streams{state="running"}'
DETACHED = 'sluice_streams{state="detached"}'


def accept(framing: str) -> list[tuple[str, str]]:
    return [("Accept", framing)]


def post(headers: str, body: bytes = b"", path: str = CHAT) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode() + body


def text_of(framing: str, answer: Any) -> str:
    """The text that a chat stream in one of the framings carries."""
    if framing == "text/plain":
        return bytes(answer.body).decode()
    chunks = answer.chunks() if framing == "text/event-stream" else answer.lines()
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c.get("choices"))


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
            assert talk_until_cut(client)

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


def talk_until_cut(client: Client) -> bool:
    """Send a byte at a time until the server has none of it any more."""
    for _ in range(500):
        try:
            client.send(b".")
        except OSError:
            return True
        time.sleep(0.02)
    return False


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


class TestA04IdleTimerIsOffInFlight:
    def test_a04_two_slow_pipelined_requests(self, quick: Server) -> None:
        """Each takes longer than the idle timeout of one second, and the second is silent all the while."""
        with quick.connect() as client:
            first = request_bytes("POST", CHAT, chat("[pause] 1", stream=True))
            client.send(first + request_bytes("POST", CHAT, chat("[pause] 2")))
            assert client.answer().text() == "before after"
            assert client.answer().json()["choices"][0]["message"]["content"] == "before after"

    def test_a04_a_body_that_comes_slowly(self, quick: Server) -> None:
        """Each piece within the body timeout of one second, the whole above it and above the idle timeout."""
        body = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":2}'
        with quick.connect() as client:
            client.send(post(f"Content-Length: {len(body)}\r\n"))
            end = time.monotonic() + 1.6
            for i in range(8):
                client.send(body[i * 8 : i * 8 + 8])
                time.sleep(max(0.0, (end - time.monotonic()) / (8 - i)))
            assert client.answer().status == 200


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


class TestA11SilentClients:
    EACH = 100

    def test_a11_each_phase_has_its_deadline(self, quick: Server) -> None:
        files = quick.open_files
        silent = [quick.connect() for _ in range(self.EACH)]
        dripping = [quick.connect() for _ in range(self.EACH)]
        stopped = [quick.connect() for _ in range(self.EACH)]
        for client in stopped:
            client.send(post("Content-Length: 50\r\n", b'{"messages":'))
        latencies = [self.drip(quick, dripping, seconds=1.5)]
        for client in silent:
            assert client.closed() == "fin"
        for client in stopped + dripping:
            client.answer().error(408)
            client.close()
        for client in silent:
            client.close()
        until(lambda: quick.open_files <= files, "descriptors back to where they were")
        assert max(latencies) < 5

    def drip(self, server: Server, clients: list[Client], seconds: float) -> float:
        """Send a byte of a head on each connection five times a second; the longest exchange of a client beside."""
        head = b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * 100
        worst = 0.0
        start = time.monotonic()
        for at in range(int(seconds / 0.2)):
            for client in clients:
                try:
                    client.send(head[at : at + 1])
                except OSError:
                    assert time.monotonic() - start > 1  # closed by its deadline meanwhile
            begun = time.monotonic()
            assert server.ask("GET", "/health").status == 200
            worst = max(worst, time.monotonic() - begun)
            time.sleep(max(0.0, start + (at + 1) * 0.2 - time.monotonic()))
        return worst

    def test_a11_between_requests_too(self, quick: Server) -> None:
        with quick.connect() as client:
            client.request("GET", "/health")
            assert client.answer().status == 200
            assert client.closed() == "fin"

    def test_a11_a_refused_client_that_goes_on_sending_is_let_go(self, quick: Server) -> None:
        """The time to read a refusal is bounded too."""
        with quick.connect() as client:
            client.send(b"NOT HTTP\r\n\r\n")
            client.answer().error(400)
            assert talk_until_cut(client)

    def test_a11_connections_above_the_limit_are_told(self) -> None:
        with Server("--max-connections", "2", "--idle-timeout", "30") as server:
            first, second = server.connect(), server.connect()
            first.request("GET", "/health")
            second.request("GET", "/health")
            assert (first.answer().status, second.answer().status) == (200, 200)
            with server.connect() as third:
                answer = third.answer()
                answer.error(503)
                assert answer.header("retry-after") and answer.header("connection") == "close"
                third.end_sending()
                assert third.closed() == "fin"
            first.close()
            second.close()
            until(lambda: server.ask("GET", "/health").status == 200, "room again")

    def test_a11_a_stalled_reader_is_cut_and_its_stream_held(self) -> None:
        flags = ("--write-stall-timeout", "1", "--send-buffer", "4096", "--drain-timeout", "0")
        with Server(*flags) as server, server.connect(receive_buffer=4096) as client:
            client.request("POST", CHAT, chat("stall", stream=True, max_tokens=100_000))
            server.wait_metric('sluice_streams{state="parked"}', 1)
            server.wait_metric(DETACHED, 1)
            made = server.metrics()["sluice_generated_tokens_total"]
            client.begin()
            assert client.finish().end in ("cut", "reset")
            assert server.metrics()["sluice_generated_tokens_total"] == made


class TestA13HalfClose:
    SLOW = " w" * 12

    @pytest.mark.parametrize("framing", FRAMINGS[:2])
    @pytest.mark.parametrize("before_answer", [True, False])
    def test_a13_a_stream_goes_on(self, server: Server, framing: str, before_answer: bool) -> None:
        with server.connect() as client:
            client.request("POST", CHAT, chat("[slow]", stream=True), accept(framing))
            if not before_answer:
                client.begin()
            client.end_sending()
            if before_answer:
                client.begin()
            answer = client.finish()
            assert answer.end == "whole"
            assert text_of(framing, answer) == self.SLOW
            assert client.closed() == "fin"  # it can't ask again

    def test_a13_plain_text_has_no_ping_so_it_means_gone(self, server: Server) -> None:
        with server.connect() as client:
            client.request("POST", CHAT, chat("[slow]", stream=True), accept("text/plain"))
            client.begin()
            stream = client.read_until(lambda a: a.body).header("x-stream-id")
            client.end_sending()
            assert client.finish().end in ("reset", "cut")
        answer = server.ask("GET", f"/v1/streams/{stream}", headers=accept("text/event-stream"))
        assert answer.text() == self.SLOW

    def test_a13_an_answer_in_one_piece_is_given_up(self, server: Server) -> None:
        cancelled = 'sluice_requests_total{api="chat",outcome="cancelled"}'
        before = server.metrics()[cancelled]
        with server.connect() as client:
            client.request("POST", CHAT, chat("[slow]"))
            client.end_sending()
            client.begin()
            assert client.finish().end == "none" or client.finish().end == "reset"
        server.wait_metric(cancelled, before + 1)

    def test_a13_or_finished_where_the_flag_says_so(self) -> None:
        scripts = [{"match": "", "tokens": ["one", {"pause_ms": 300}, " two"]}]
        with Server("--on-half-close", "finish", scripts=scripts) as server, server.connect() as client:
            client.request("POST", CHAT, chat("half"))
            client.end_sending()
            answer = client.answer()
            assert answer.json()["choices"][0]["message"]["content"] == "one two"
            assert client.closed() == "fin"

    def test_a13_no_generation_is_in_question_for_other_routes(self, server: Server) -> None:
        with server.connect() as client:
            client.send(request_bytes("GET", "/v1/models"))
            client.end_sending()
            assert client.answer().status == 200
            assert client.closed() == "fin"

    @pytest.mark.parametrize("framing", FRAMINGS[:2])
    def test_a13_a_client_that_is_gone_is_told_from_one_that_reads(self, server: Server, framing: str) -> None:
        """FIN with nobody left to read: the probing pings are answered by resets."""
        held = server.metrics()[DETACHED]
        client = server.connect()
        client.request("POST", CHAT, chat("[prefill]", stream=True), accept(framing))
        stream = client.begin().header("x-stream-id")
        client.close()
        server.wait_metric(DETACHED, held + 1)
        assert server.ask("DELETE", f"/v1/streams/{stream}").status == 200

    @pytest.mark.parametrize("framing", FRAMINGS)
    def test_a13_a_reset_says_it_at_once(self, server: Server, framing: str) -> None:
        held = server.metrics()[DETACHED]
        client = server.connect()
        client.request("POST", CHAT, chat("[prefill]", stream=True), accept(framing))
        stream = client.begin().header("x-stream-id")
        client.reset()
        server.wait_metric(DETACHED, held + 1)
        assert server.ask("DELETE", f"/v1/streams/{stream}").status == 200

    def test_a13_pipelined_requests_before_the_end_are_all_answered(self, server: Server) -> None:
        """Also when the client reads late, so that the end comes while the server waits to write."""
        with server.connect(receive_buffer=4096) as client:
            client.send(request_bytes("GET", "/metrics") * 50)
            client.end_sending()
            for _ in range(50):
                assert client.answer().status == 200
            assert client.closed() == "fin"


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
