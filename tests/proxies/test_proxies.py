"""Behind nginx, HAProxy and Caddy, with default settings and with those of deploy/: each framing streams token by
token, errors and cuts are seen, a client that leaves or stalls reaches the scheduler, resume and WebSockets work
(issue 3, what must hold). Envoy is in no Debian package."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from wsproto.events import TextMessage

from tests.proxies.proxy import DEPLOYED, PROXIES, Proxy
from tests.support.probes import words
from tests.support.readings import EVENT_STREAM, NDJSON, PLAIN
from tests.support.serving import Server, WebSocketClient, chat

STEP_S = 0.03
FAULT = "the engine is out of paper"
SCRIPTS: list[dict[str, Any]] = [
    {"match": "faulty", "tokens": ["one", " two", {"pause_ms": 200}, {"error": FAULT}]},
    {"match": "short", "tokens": ["one"]},
    {"match": "halts", "tokens": ["one", " two", " three", {"pause_ms": 600_000}, " four"]},
    {"match": "slow", "tokens": ["one", {"pause_ms": 1200}, " two"]},
]
TOKENS = 16
ASKED_TOGETHER = 8
# Debian's Caddy 2.6 ends an answer in good order that its upstream cut (it logs "aborting with incomplete response").
HIDES_CUTS = "deploy/Caddyfile"
MEGABYTE = 1 << 20
BODY_MAX = 8 * MEGABYTE  # --max-body, as it comes


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--synthetic-step-ms", str(STEP_S * 1000), "--keepalive-interval", "0.3", "--drain-timeout", "1")
    with Server(*flags, scripts=SCRIPTS) as running:
        yield running


@pytest.fixture(scope="module")
def proxies(server: Server) -> Iterator[dict[str, Proxy]]:
    """Those that were asked for so far; all end with the module."""
    running: dict[str, Proxy] = {}
    yield running
    for proxy in running.values():
        proxy.stop()


@pytest.fixture
def proxy(request: pytest.FixtureRequest, server: Server, proxies: dict[str, Proxy]) -> Proxy:
    """The one that the test is parametrised with."""
    name: str = request.param
    if name not in proxies:
        proxies[name] = Proxy(name, server, _unused_port()).__enter__()
    return proxies[name]


behind_each = pytest.mark.parametrize("proxy", PROXIES, indirect=True)
behind_deployed = pytest.mark.parametrize("proxy", DEPLOYED, indirect=True)
in_each_framing = pytest.mark.parametrize("accept", [EVENT_STREAM, NDJSON, PLAIN], ids=["SSE", "NDJSON", "plain"])


def _unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _websocket(proxy: Proxy) -> WebSocketClient:
    return WebSocketClient(cast(Server, proxy))


@behind_each
@in_each_framing
def test_tokens_arrive_as_they_are_made(proxy: Proxy, accept: tuple[str, str]) -> None:
    """The last one that is made is here, though nothing follows it: nobody waits for more."""
    with proxy.connect() as client:
        client.request("GET", "/v1/generate?prompt=halts", None, [accept])
        answer = client.begin()
        assert answer.status == 200
        assert (answer.header("content-type") or "").startswith(accept[1])
        name = answer.header("x-stream-id")
        client.read_until(lambda answer: b" three" in answer.body)
        assert proxy.ask("DELETE", f"/v1/streams/{name}").json()["outcome"] == "cancelled"


@behind_each
def test_the_head_leaves_before_the_first_token_and_pings_pass(proxy: Proxy) -> None:
    with proxy.connect() as client:
        client.request("GET", "/v1/generate?prompt=slow")
        client.begin()
        client.read_until(lambda answer: "ping" in answer.comments())
        assert client.finish().text() == "one two"


@behind_each
def test_errors_arrive_in_the_stream(proxy: Proxy) -> None:
    answer = proxy.ask("POST", "/v1/chat/completions", chat("faulty", stream=True))
    assert (answer.status, answer.end) == (200, "whole")
    *_, error, done = answer.events()
    assert json.loads(error.data)["error"]["message"] == FAULT
    assert done.data == "[DONE]"


@pytest.mark.parametrize("proxy", [name for name in PROXIES if name != HIDES_CUTS], indirect=True)
def test_a_cut_of_bare_text_is_seen(proxy: Proxy) -> None:
    answer = proxy.ask("GET", "/v1/generate?prompt=faulty", None, [PLAIN])
    assert answer.status == 200
    assert b"one two".startswith(answer.body)
    assert answer.end in ("cut", "reset")


@behind_deployed
def test_answers_that_begin_at_once_are_whole(proxy: Proxy) -> None:
    """A proxy that still reads the request's body then must not give the answer up."""
    with ThreadPoolExecutor(ASKED_TOGETHER) as pool:
        answers = pool.map(lambda _: proxy.ask("POST", "/v1/chat/completions", chat("short", stream=True)), range(200))
        ends = {(answer.status, answer.end, answer.events()[-1].data) for answer in answers}
    assert ends == {(200, "whole", "[DONE]")}


@behind_deployed
@pytest.mark.parametrize("size", [BODY_MAX + 0x10000, BODY_MAX + MEGABYTE + 0x10000])
def test_a_body_over_the_limit_is_refused_and_not_cut(proxy: Proxy, size: int) -> None:
    """One whose length isn't known before is no shorter for that, though a proxy has a limit of its own."""
    chunks = b"10000\r\n%b\r\n" % bytes(0x10000) * (size // 0x10000)
    with proxy.connect() as client:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.send(head, chunks, b"0\r\n\r\n")
        assert client.answer("POST").status == 413


@behind_each
def test_refusals_pass(proxy: Proxy) -> None:
    assert proxy.ask("POST", "/v1/chat/completions", b"{").error(400)["code"] == "invalid_json"
    assert proxy.ask("GET", "/nowhere").error(404)["code"] == "unknown_route"


@behind_each
@pytest.mark.parametrize("leave", ["FIN", "RST"])
@in_each_framing
def test_a_client_that_leaves_reaches_the_scheduler(
    server: Server, proxy: Proxy, leave: str, accept: tuple[str, str]
) -> None:
    with proxy.connect() as client:
        client.request("GET", "/v1/generate?prompt=go", None, [accept])
        client.begin()
        client.read_until(lambda answer: len(answer.body) > 10)
        server.wait_metric('sluice_streams{state="running"}', 1)
        if leave == "RST":
            client.reset()
    server.wait_metric('sluice_streams{state="running"}', 0)


@pytest.mark.parametrize("name", PROXIES)
def test_a_client_that_stalls_reaches_the_scheduler(name: str) -> None:
    """Its own server: this one makes tokens as fast as it can, to fill what two sockets and a proxy hold."""
    with (
        Server("--resume-ttl", "0") as fast,
        Proxy(name, fast, _unused_port()) as own,
        own.connect(receive_buffer=4096) as client,
    ):
        client.request("GET", "/v1/generate?prompt=go&max_tokens=100000")
        client.begin()
        fast.wait_metric('sluice_streams{state="parked"}', 1)


@behind_each
def test_a_stream_is_resumed(proxy: Proxy) -> None:
    with proxy.connect() as client:
        client.request("GET", f"/v1/generate?prompt=go&max_tokens={TOKENS}")
        client.begin()
        seen = client.read_events(4).events()[:4]
    rest = proxy.ask("GET", "/v1/generate?prompt=go", None, [("Last-Event-ID", seen[-1].id)])
    events = [*seen, *rest.events()]
    assert [int(event.id.rpartition(":")[2]) for event in events] == list(range(len(events)))
    assert events[-1].data == "[DONE]"
    whole = proxy.ask("GET", f"/v1/streams/{seen[0].id.partition(':')[0]}")
    assert whole.events() == events


@behind_each
@pytest.mark.parametrize(("accept", "position"), [(NDJSON, "after"), (PLAIN, "after_bytes")], ids=["NDJSON", "plain"])
def test_a_stream_is_resumed_in_the_other_framings(proxy: Proxy, accept: tuple[str, str], position: str) -> None:
    with proxy.connect() as client:
        client.request("GET", f"/v1/generate?prompt=go&max_tokens={TOKENS}", None, [accept])
        name = client.begin().header("x-stream-id")
        answer = client.read_until(
            lambda answer: answer.body.count(b"\n") > 3 or (accept is PLAIN and len(answer.body) > 10)
        )
        seen = bytes(answer.body)
    if accept is NDJSON:
        seen = seen[: seen.rindex(b"\n") + 1]
    at = seen.count(b"\n") - 1 if accept is NDJSON else len(seen)
    rest = proxy.ask("GET", f"/v1/streams/{name}?{position}={at}")
    assert (rest.status, rest.end) == (200, "whole")
    assert seen + rest.body == proxy.ask("GET", f"/v1/streams/{name}").body


@behind_each
def test_a_stream_is_polled_and_cancelled(server: Server, proxy: Proxy) -> None:
    json_only = ("Accept", "application/json")
    name = proxy.ask("GET", "/v1/generate?prompt=go", None, [json_only]).json()["stream"]
    document = proxy.ask("GET", f"/v1/streams/{name}?after=0&wait=10", None, [json_only]).json()
    assert document["events"] and document["outcome"] is None
    assert proxy.ask("DELETE", f"/v1/streams/{name}").json()["outcome"] == "cancelled"
    server.wait_metric('sluice_streams{state="running"}', 0)


@behind_deployed
def test_a_websocket_shows_tokens_as_they_are_made_and_is_resumed(proxy: Proxy) -> None:
    """`go` has no end that this test would see: what comes, comes before it."""
    with _websocket(proxy) as client:
        client.send_json(type="generate", id="a", **chat("go"))
        started = client.receive_json()
        seen = [client.receive_json() for _ in range(3)]
    with _websocket(proxy) as client:
        client.send_json(type="resume", id="b", stream=started["stream"], after=seen[-1]["n"])
        assert client.receive_json() == {"type": "started", "id": "b", "stream": started["stream"]}
        seen += [client.receive_json() for _ in range(3)]
        client.send_json(type="cancel", id="b")
        assert client.receive_until("error")[-1]["error"]["code"] == "cancelled"
    assert words("".join(message["text"] for message in seen)) == 6


@behind_deployed
def test_websocket(proxy: Proxy) -> None:
    with _websocket(proxy) as client:
        client.send_json(type="generate", id="a", **chat("slow"))
        messages = client.receive_until("done")
        assert "".join(m["text"] for m in messages if m["type"] == "token") == "one two"
        assert client.pings >= 1
        assert client.close().code == 1000


@behind_deployed
def test_websocket_with_a_bare_prompt(proxy: Proxy) -> None:
    with _websocket(proxy) as client:
        client.send(TextMessage("slow"))
        assert [client.receive(), client.receive()] == ["one", " two"]
        assert client.closed().code == 1000


@behind_deployed
def test_a_websocket_that_goes_reaches_the_scheduler(server: Server, proxy: Proxy) -> None:
    with _websocket(proxy) as client:
        client.send_json(type="generate", id="a", **chat("go"))
        client.receive_until("token")
        server.wait_metric('sluice_streams{state="running"}', 1)
    server.wait_metric('sluice_streams{state="running"}', 0)


@behind_deployed
def test_large_bodies_pass(proxy: Proxy) -> None:
    """As JSON's white space, so that the prompt still fits."""
    body = json.dumps(chat("slow")).encode() + b" " * (4 * MEGABYTE)
    answer = proxy.ask("POST", "/v1/chat/completions", body, [("Content-Type", "application/json")])
    assert answer.json()["choices"][0]["message"]["content"] == "one two"


@behind_deployed
@pytest.mark.parametrize("path", ["/metrics", "/status", "/%73tatus", "/metric%73", "/status?x"])
def test_metrics_stay_inside(server: Server, proxy: Proxy, path: str) -> None:
    assert proxy.ask("GET", path).status == 403
    assert server.ask("GET", path).status == 200
