"""Cases of kind C, WebSocket: limits, refusals before the upgrade, orderly ends, and many generations on one socket."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import websockets.sync.client
import wsproto.events as ws

from tests.support.keys import bearer
from tests.support.played import KEY, MAX_WS_MESSAGE, SMALL_KEY
from tests.support.serving import (
    Answer,
    Closed,
    Server,
    WebSocketClient,
    WebSocketRefused,
    chat,
    flood,
    request_bytes,
    until,
)

pytestmark = pytest.mark.synthetic

WORDS = " w" * 12  # what [slow] says
REFUSED = 'sluice_requests_total{api="websocket",outcome="refused"}'
DETACHED = 'sluice_streams{state="detached"}'
UPGRADE = [
    ("Connection", "Upgrade"),
    ("Upgrade", "websocket"),
    ("Sec-WebSocket-Version", "13"),
    ("Sec-WebSocket-Key", "AAAAAAAAAAAAAAAAAAAAAA=="),
]


def refused(server: Server, target: str = "/v1/ws", **options: Any) -> Answer:
    """The answer to a handshake that must fail."""
    with pytest.raises(WebSocketRefused) as refusal:
        WebSocketClient(server, target, **options)
    return refusal.value.answer


def text_of(messages: list[dict[str, Any]], id_: str) -> str:
    return "".join(m["text"] for m in messages if m["type"] == "token" and m["id"] == id_)


def generate(id_: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"type": "generate", "id": id_, **chat(content), **fields}


def padded(size: int) -> str:
    """A proper message of so many bytes."""
    message = json.dumps({"type": "cancel", "id": "x", "pad": ""})
    return message[:-2] + "x" * (size - len(message)) + message[-2:]


class TestC03MessageLimit:
    @pytest.mark.parametrize("deflate", [False, True])
    def test_c03_the_limit_is_taken_and_one_more_is_not(self, server: Server, deflate: bool) -> None:
        with WebSocketClient(server, deflate=deflate) as client:
            client.send_text(padded(MAX_WS_MESSAGE))
            assert client.receive_json()["error"]["code"] == "not_found"
            client.send_text(padded(MAX_WS_MESSAGE + 1))
            assert client.closed().code == 1009
            assert client.ended() == "fin"

    @pytest.mark.parametrize("size", [1, 100, 4096])
    def test_c03_fragments_are_counted_together(self, server: Server, size: int) -> None:
        message = padded(MAX_WS_MESSAGE).encode()
        with WebSocketClient(server) as client:
            for text, ok in ((message, True), (message + b" ", False)):
                parts = [text[i : i + size].decode() for i in range(0, len(text), size)]
                frames = [client.frame(ws.TextMessage(part, message_finished=False)) for part in parts[:-1]]
                client.send_bytes(b"".join(frames) + client.frame(ws.TextMessage(parts[-1])))
                if ok:
                    assert client.receive_json()["error"]["code"] == "not_found"
            assert client.closed().code == 1009

    def test_c03_fragments_without_end(self, server: Server) -> None:
        before = server.resident_bytes
        peak = before
        with WebSocketClient(server) as client:
            piece = client.frame(ws.TextMessage("x" * 10, message_finished=False))
            rest = client.frame(ws.TextMessage("x" * 10, message_finished=False)) * 100
            try:
                client.send_bytes(piece)
                for _ in range(2000):
                    client.send_bytes(rest)
                    peak = max(peak, server.resident_bytes)
            except OSError:
                pass  # it was told 1009 meanwhile, and goes on sending
            assert client.closed().code in (1009, 1006)
        assert peak - before < 20 * MAX_WS_MESSAGE

    def test_c03_a_frame_is_refused_by_its_header(self, server: Server) -> None:
        with WebSocketClient(server) as client:
            client.send_bytes(b"\x81\xff" + (2**40).to_bytes(8, "big") + b"\0\0\0\0")
            assert client.closed().code == 1009

    def test_c03_a_message_that_inflates_beyond_it(self, server: Server) -> None:
        with WebSocketClient(server, deflate=True) as client:
            client.send_text("x" * 30 * MAX_WS_MESSAGE)
            assert client.closed().code == 1009

    def test_c03_pings_without_reading_cost_little(self, server: Server) -> None:
        with WebSocketClient(server, receive_buffer=4096) as client:
            before = server.resident_bytes
            pings = client.frame(ws.Ping(b"p" * 125)) * 500
            flood(client.socket, pings)
            assert server.resident_bytes - before < 8 * 1024 * 1024
            assert server.ask("GET", "/health").status == 200


class TestC05Drain:
    def test_c05_idle_and_busy_sockets_end_in_order(self) -> None:
        scripts = [{"match": "[slow]", "tokens": [" w", {"pause_ms": 60}] * 12}]
        with Server(scripts=scripts) as server, WebSocketClient(server) as idle, WebSocketClient(server) as busy:
            busy.send_json(**generate("a", "[slow]"))
            assert [busy.receive_json()["type"] for _ in range(2)] == ["started", "token"]
            server.terminate()
            assert idle.closed().code == 1001
            assert idle.ended() == "fin"
            busy.send_json(**generate("b", "late"))
            messages = busy.receive_until("done", id_="a")
            late = [m for m in messages if m["id"] == "b"]
            assert [m["type"] for m in late] == ["error"]
            assert late[0]["error"]["type"] == "overloaded_error"
            assert " w" + text_of(messages, "a") == WORDS
            assert busy.closed().code == 1012
            assert server.wait() == 0

    def test_c05_at_the_deadline_a_terminal_error_and_1012(self) -> None:
        scripts = [{"match": "", "tokens": ["a", {"pause_ms": 60_000}, "b"]}]
        with Server("--drain-timeout", "0.3", scripts=scripts) as server, WebSocketClient(server) as busy:
            busy.send_json(**generate("a", "x"))
            busy.receive_until("token")
            server.terminate()
            error = busy.receive_until("error")[-1]
            assert (error["id"], error["error"]["code"]) == ("a", "error")
            assert busy.closed().code == 1012
            assert server.wait() == 0

    def test_c05_a_client_that_never_answers_the_close_does_not_hold_it(self) -> None:
        with Server("--drain-timeout", "1") as server, WebSocketClient(server) as silent:
            server.terminate()
            assert server.wait() == 0
            assert silent.closed().code == 1001

    def test_c05_new_sockets_are_refused_meanwhile(self) -> None:
        scripts = [{"match": "[hold]", "tokens": ["a", {"pause_ms": 60_000}, "b"]}]
        with Server("--drain-timeout", "30", scripts=scripts) as server, WebSocketClient(server) as busy:
            busy.send_json(**generate("a", "[hold]"))
            busy.receive_until("token")
            server.terminate()
            until(lambda: server.ask("GET", "/ready").status == 503, "the drain")
            answer = refused(server)
            assert answer.error(503)["type"] == "overloaded_error"
            assert answer.header("retry-after")
            busy.send_json(type="cancel", id="a")  # served while it drains
            assert busy.receive_until("error")[-1]["error"]["code"] == "cancelled"
            assert busy.closed().code == 1012
            assert server.wait() == 0


class TestC07RefusedUpgrades:
    @pytest.mark.parametrize(
        ("target", "status"), [("/v1/nothing", 404), ("/health", 404), ("/v1/chat/completions", 405), ("/v1/ws/x", 404)]
    )
    def test_c07_paths_that_are_no_websocket(self, server: Server, target: str, status: int) -> None:
        answer = refused(server, target)
        answer.error(status)
        assert answer.header("connection") == "close"

    def test_c07_keys(self, keyed: Server) -> None:
        for headers in ([], bearer("wrong")):
            answer = refused(keyed, headers=headers)
            assert answer.error(401)["code"] == "invalid_api_key"
            assert answer.header("www-authenticate") == "Bearer"
        with WebSocketClient(keyed, headers=bearer(KEY)) as client:
            assert client.close().code == 1000

    def test_c07_a_key_at_its_limit(self, keyed: Server) -> None:
        with WebSocketClient(keyed, headers=bearer(SMALL_KEY)) as client:
            client.send_json(**generate("a", "[slow]"))
            client.receive_until("token")
            before = keyed.metrics()
            answer = refused(keyed, headers=bearer(SMALL_KEY))
            assert answer.error(429)["type"] == "rate_limit_error"
            assert answer.header("retry-after")
            after = keyed.metrics()
            assert after[REFUSED] == before[REFUSED] + 1
            client.send_json(**generate("b", "more"))  # and so is a second one on the same socket
            messages = client.receive_until("done", id_="a")
            assert [m["error"]["code"] for m in messages if m["id"] == "b"] == ["rate_limit_exceeded"]
            client.send_json(**generate("c", "again", max_tokens=2))
            assert client.receive_until("done", "error")[-1]["type"] == "done"

    @pytest.mark.parametrize(
        ("change", "status"),
        [
            ({"Sec-WebSocket-Version": "12"}, 426),
            ({"Sec-WebSocket-Version": ""}, 426),
            ({"Sec-WebSocket-Key": "short"}, 400),
            ({"Sec-WebSocket-Key": ""}, 400),
            ({"Upgrade": "h2c"}, 426),
            ({"Connection": "keep-alive"}, 426),
        ],
    )
    def test_c07_handshakes_that_are_none(self, server: Server, change: dict[str, str], status: int) -> None:
        before = server.metrics()[REFUSED]
        with server.connect() as client:
            headers = [(name, change.get(name, value)) for name, value in UPGRADE]
            client.request("GET", "/v1/ws", headers=headers)
            answer = client.answer()
            answer.error(status)
            if status == 426:
                assert answer.header("upgrade") == "websocket"
                (options,) = [value.lower() for name, value in answer.headers if name == b"connection"]
                assert options.split(b", ")[0] == b"upgrade"  # RFC 9110 7.8
        assert server.metrics()[REFUSED] == before + 1

    @pytest.mark.parametrize(
        ("origin", "allowed"),
        [("https://evil.example", False), ("null", False), ("http://localhost:1", False), ("http://localhost", True)],
    )
    def test_c07_foreign_origins(self, server: Server, origin: str, allowed: bool) -> None:
        if allowed:
            with WebSocketClient(server, headers=[("Origin", origin)]) as client:
                assert client.close().code == 1000
        else:
            assert refused(server, headers=[("Origin", origin)]).error(403)["code"] == "origin_not_allowed"

    def test_c07_frames_right_behind_a_refused_handshake_are_nothing(self, server: Server) -> None:
        with server.connect() as client:
            client.send(request_bytes("GET", "/v1/nothing", headers=UPGRADE) + request_bytes("GET", "/health"))
            client.answer().error(404)
            client.end_sending()
            assert client.closed() == "fin"


class TestGenerations:
    def test_many_on_one_socket(self, server: Server) -> None:
        with WebSocketClient(server, deflate=True) as client:
            for i in range(20):
                client.send_json(**generate(f"g{i}", f"prompt {i}", max_tokens=50))
            messages: list[dict[str, Any]] = []
            while sum(m["type"] == "done" for m in messages) < 20:
                messages.append(client.receive_json())
            for i in range(20):
                mine = [m for m in messages if m["id"] == f"g{i}"]
                assert [m["type"] for m in mine] == ["started"] + ["token"] * 50 + ["done"]
                assert [m["n"] for m in mine[1:-1]] == list(range(1, 51))
                assert mine[-1]["usage"]["completion_tokens"] == 50
                numbers = [int(m["text"]) for m in mine[1:-1]]
                assert [(n - numbers[0]) % 10_000 for n in numbers] == list(range(50))

    def test_several_choices_are_told_apart(self, server: Server) -> None:
        with WebSocketClient(server) as client:
            client.send_json(**generate("a", "x", n=2, max_tokens=3))
            messages = client.receive_until("done")
            assert sorted(m["index"] for m in messages if m["type"] == "token") == [0, 0, 0, 1, 1, 1]

    def test_cancel(self, server: Server) -> None:
        with WebSocketClient(server) as client:
            client.send_json(**generate("a", "[slow]"))
            client.send_json(**generate("b", "[slow]"))
            client.receive_until("token", id_="b")
            client.send_json(type="cancel", id="a")
            messages = client.receive_until("done")
            ends = [(m["id"], m["type"]) for m in messages if m["type"] in ("done", "error")]
            assert ends == [("a", "error"), ("b", "done")]
            error = next(m["error"] for m in messages if m["type"] == "error")
            assert (error["type"], error["code"]) == ("cancelled_error", "cancelled")
            client.send_json(type="cancel", id="a")
            assert client.receive_json()["error"]["code"] == "not_found"

    def test_resume_on_another_socket(self, server: Server) -> None:
        with WebSocketClient(server) as first:
            first.send_json(**generate("a", "[slow]"))
            seen = first.receive_until("token")
        stream = seen[0]["stream"]
        with WebSocketClient(server) as second:
            second.send_json(type="resume", id="again", stream=stream, after=seen[-1]["n"])
            messages = second.receive_until("done")
            assert messages[0] == {"type": "started", "id": "again", "stream": stream}
            assert text_of(seen, "a") + text_of(messages, "again") == WORDS
            second.send_json(type="resume", id="all", stream=stream)  # it has ended, and is held
            assert text_of(second.receive_until("done"), "all") == WORDS

    def test_a_socket_that_is_lost_detaches_its_generations(self, server: Server) -> None:
        held = server.metrics()[DETACHED]
        client = WebSocketClient(server)
        for id_ in "abc":
            client.send_json(**generate(id_, "[prefill]"))
        streams = [client.receive_until("started")[-1]["stream"] for _ in "abc"]
        client.socket.close()
        server.wait_metric(DETACHED, held + 3)
        for stream in streams:
            assert server.ask("DELETE", f"/v1/streams/{stream}").status == 200

    def test_a_bare_prompt(self, server: Server) -> None:
        with WebSocketClient(server) as client:
            client.send_text("[length] please")
            assert [client.receive() for _ in range(2)] == ["one", " two"]
            assert client.receive() == Closed(1000, "length")
            assert client.ended() == "fin"

    def test_a_bare_prompt_with_another_client_library(self, server: Server) -> None:
        with websockets.sync.client.connect(f"ws://127.0.0.1:{server.port}/v1/ws") as client:
            client.send("[late]")
            assert list(client) == ["😀"]
            assert (client.close_code, client.close_reason) == (1000, "stop")

    def test_binary_is_refused_and_what_ran_is_let_go(self, server: Server) -> None:
        held = server.metrics()[DETACHED]
        with WebSocketClient(server) as client:
            client.send_json(**generate("a", "[prefill]"))
            stream = client.receive_until("started")[-1]["stream"]
            late = generate("b", "too late")
            before = server.metrics()['sluice_requests_started_total{api="websocket"}']
            client.send_bytes(client.frame(ws.BytesMessage(b"{}")) + client.frame(ws.TextMessage(json.dumps(late))))
            server.wait_metric(DETACHED, held + 1)  # before the client says goodbye
            assert client.closed().code == 1003
            assert client.ended() == "fin"
        assert server.metrics()['sluice_requests_started_total{api="websocket"}'] == before
        assert server.ask("DELETE", f"/v1/streams/{stream}").status == 200

    @pytest.mark.parametrize(
        ("text", "param"),
        [
            ("{", None),
            ("{}", None),
            ('{"type":"dance","id":"a"}', "type"),
            ('{"type":"generate","id":""}', "id"),
            ('{"type":"generate","id":"%s"}' % ("x" * 300), "id"),
            ('{"type":"generate","id":7}', None),
            ('{"type":"generate","id":"a"}', "messages"),
            ('{"type":"generate","id":"a","messages":[],"nonsense":1}', "nonsense"),
            ('{"type":"generate","id":"a","prompt":""}', "prompt"),
            ('{"type":"generate","id":"a","prompt":"x","max_tokens":0}', "max_tokens"),
            ('{"type":"resume","id":"a","stream":"unknown"}', None),
            ('{"type":"resume","id":"a","stream":"unknown","after":-5}', "after"),
            ('{"type":"cancel","id":"a"}', "id"),
        ],
    )
    def test_a_bad_message_is_answered_and_the_socket_goes_on(
        self, server: Server, text: str, param: str | None
    ) -> None:
        with WebSocketClient(server) as client:
            client.send_text(text)
            message = client.receive_json()
            assert (message["type"], message["error"]["param"]) == ("error", param)
            client.send_json(**generate("fine", "[length]"))
            assert client.receive_until("done")[-1]["finish_reason"] == "length"

    def test_an_id_in_use(self, server: Server) -> None:
        with WebSocketClient(server) as client:
            client.send_json(**generate("a", "[slow]"))
            client.send_json(**generate("a", "[slow]"))
            messages = client.receive_until("done")
            assert [m["error"]["param"] for m in messages if m["type"] == "error"] == ["id"]
            assert text_of(messages, "a") == WORDS

    def test_requests_are_counted_once_each(self, server: Server) -> None:
        def sums() -> tuple[float, float]:
            metrics = server.metrics()
            ended = sum(v for k, v in metrics.items() if k.startswith('sluice_requests_total{api="websocket"'))
            return metrics['sluice_requests_started_total{api="websocket"}'], ended

        started, ended = sums()
        with WebSocketClient(server) as client:
            client.send_json(**generate("a", "[length]"))
            client.receive_until("done")
            client.send_json(**generate("b", "[error]"))
            client.receive_until("error")
            client.send_json(**generate("c", "x", nonsense=1))
            client.receive_until("error")
        assert sums() == (started + 3, ended + 3)


class TestC12Silence:
    """Whoever answers no ping is gone, its generations are detached; whoever reads slowly, and answers late, is not."""

    def test_no_pong_ends_it_with_1011(self, quick: Server) -> None:
        with WebSocketClient(quick, pong=False) as client:
            assert client.closed().code == 1011
            assert client.pings == 1

    def test_pongs_keep_it(self) -> None:
        """Idle, and while a generation pauses."""
        scripts = [{"match": "", "tokens": ["a", {"pause_ms": 2500}, "b"]}]
        with Server("--keepalive-interval", "0.7", scripts=scripts) as server, WebSocketClient(server) as client:
            client.send_json(**generate("a", "x"))
            assert text_of(client.receive_until("done"), "a") == "ab"
            assert client.pings >= 2
            assert client.close().code == 1000

    def test_a_generation_is_detached_when_no_pong_comes(self, quick: Server) -> None:
        held = quick.metrics()[DETACHED]
        with WebSocketClient(quick, pong=False) as client:
            client.send_json(**generate("a", "[prefill]"))
            stream = client.receive_until("started")[-1]["stream"]
            quick.wait_metric(DETACHED, held + 1)
            assert client.closed().code == 1011
        assert quick.ask("DELETE", f"/v1/streams/{stream}").status == 200

    def test_a_stalled_reader_is_cut_and_its_stream_held(self) -> None:
        flags = ("--write-stall-timeout", "1", "--send-buffer", "4096", "--drain-timeout", "0")
        with Server(*flags) as server, WebSocketClient(server, receive_buffer=4096) as client:
            client.send_json(**generate("a", "stall", max_tokens=100_000))
            server.wait_metric('sluice_streams{state="parked"}', 1)
            server.wait_metric(DETACHED, 1)
            assert client.closed().code == 1006

    def test_a_slow_reader_is_not(self) -> None:
        """It answers no ping in time, for it reads them late; but it reads."""
        flags = ("--write-stall-timeout", "2", "--keepalive-interval", "0.2", "--send-buffer", "4096")
        with Server(*flags) as server, WebSocketClient(server, receive_buffer=4096) as client:
            client.send_json(**generate("a", "slow", max_tokens=1500))
            server.wait_metric('sluice_streams{state="parked"}', 1)
            messages: list[dict[str, Any]] = []
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                messages.append(client.receive_json())
                time.sleep(0.01)  # the reader's pace, which is tested
            messages += client.receive_until("done")
            assert sum(m["type"] == "token" for m in messages) == 1500
