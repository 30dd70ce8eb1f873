"""Traces of a real server, as a collector of OTLP gets them (issue 11): one for each request, whatever the API, with
its phases and their tokens; the client's own trace goes on in it; and a collector that is gone harms nobody."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.collector import Collector, DeafCollector, Span
from tests.support.messages import message
from tests.support.readings import NDJSON
from tests.support.serving import Answer, Server, WebSocketClient, chat, until

CHAT = "/v1/chat/completions"
PHASES = ["queue", "prefill", "decode", "stream"]
SERVER, INTERNAL = 2, 1  # kinds of spans, in OTLP
OK, ERROR = 0, 2
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SCRIPTS: list[dict[str, Any]] = [
    {"match": "faulty", "tokens": ["one", " two", {"error": "the engine is out of paper"}]},
    {"match": "halts", "tokens": ["one", {"pause_ms": 600_000}, " two"]},
    {"match": "", "tokens": ["one", " two", " three"]},
]


@contextmanager
def traced(url: str, *flags: str, **environ: str) -> Iterator[Server]:
    """A server that sends its traces there."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"ENDPOINT": url, "TIMEOUT": "10"}.items():
            patch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
        for name, value in {"OTEL_BSP_SCHEDULE_DELAY": "50", **environ}.items():
            patch.setenv(name, value)
        with Server("--log-format", "json", *flags, scripts=SCRIPTS) as server:
            yield server


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def server(collector: Collector) -> Iterator[Server]:
    with traced(collector.url) as running:
        yield running


def lines(server: Server, event: str) -> list[dict[str, Any]]:
    """Of the log."""
    records = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    return [record for record in records if record["event"] == event]


def check_phases(spans: list[Span]) -> None:
    """One trace: the request, and in it its phases, one after another."""
    whole, *parts = spans
    assert [part.name for part in parts] == PHASES
    assert {part.trace_id for part in parts} == {whole.trace_id}
    assert len({span.span_id for span in spans}) == len(spans)
    assert (whole.kind, {part.kind for part in parts}) == (SERVER, {INTERNAL})
    queue, prefill, decode, stream = parts
    times = [queue.start_ns, queue.end_ns, prefill.start_ns, prefill.end_ns, decode.start_ns, decode.end_ns]
    assert times == sorted(times)
    assert (queue.end_ns, prefill.end_ns) == (prefill.start_ns, decode.start_ns)
    assert (stream.start_ns, stream.end_ns) == (whole.start_ns, whole.end_ns)
    assert whole.start_ns == queue.start_ns
    assert decode.end_ns <= whole.end_ns


REQUESTS: dict[str, tuple[str, str, Any, str]] = {
    "chat": ("POST", CHAT, chat("hi", stream=True), "sse"),
    "chat, whole": ("POST", CHAT, chat("hi"), "whole"),
    "completions": ("POST", "/v1/completions", {"prompt": "hi", "stream": True}, "sse"),
    "responses": ("POST", "/v1/responses", {"input": "hi"}, "whole"),
    "messages": ("POST", "/v1/messages", message("hi", stream=True), "sse"),
    "generate": ("GET", "/v1/generate?prompt=hi", None, "ndjson"),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_one_request_is_one_trace_with_its_phases_and_tokens(server: Server, collector: Collector, name: str) -> None:
    method, target, body, framing = REQUESTS[name]
    accept = [NDJSON] if framing == "ndjson" else []
    request_id = f"one-{name.replace(', ', '-')}"
    before = server.metrics()["sluice_prompt_tokens_total"]
    answer = server.ask(method, target, body, [("X-Request-Id", request_id), *accept])
    assert answer.status == 200
    spans = collector.trace(request_id)
    check_phases(spans)
    whole, queue, prefill, decode, stream = spans
    prompt = int(server.metrics()["sluice_prompt_tokens_total"] - before)
    assert prompt > 0
    operation = "text_completion" if name == "completions" else "chat"
    assert whole.name == f"{operation} synthetic"
    assert whole.attributes["gen_ai.operation.name"] == operation
    assert whole.attributes["sluice.api"] == name.partition(",")[0]
    assert whole.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    for span in (whole, queue, prefill):
        assert span.attributes["gen_ai.usage.input_tokens"] == prompt
    for span in (whole, decode, stream):
        assert span.attributes["gen_ai.usage.output_tokens"] == 4  # the one that ends it is none that is shown
    assert stream.attributes["sluice.stream.framing"] == framing
    assert whole.resource["service.name"] == "sluice"
    assert whole.parent_id == ""


def test_generations_on_a_websocket_are_traces_of_their_own(server: Server, collector: Collector) -> None:
    parent = ("traceparent", f"00-{TRACE}-{PARENT}-01")
    with WebSocketClient(server, headers=[("X-Request-Id", "socket"), parent]) as client:
        for name in ("a", "b"):
            client.send_json(type="generate", id=name, **chat("hi"))
            client.receive_until("done")
    roots = until(
        lambda: (
            len(found := [s for s in collector.spans if s.attributes.get("sluice.request_id") == "socket"]) == 2
            and found
        ),
        "two traces",
    )
    assert {root.attributes["sluice.api"] for root in roots} == {"websocket"}
    streams = [span for span in collector.spans if (span.name, span.trace_id) == ("stream", TRACE)]
    assert {span.attributes["sluice.stream.framing"] for span in streams} == {"websocket"}
    assert {(root.trace_id, root.parent_id) for root in roots} == {(TRACE, PARENT)}
    assert len({root.span_id for root in roots}) == 2


def test_the_clients_trace_goes_on(server: Server, collector: Collector) -> None:
    headers = [("X-Request-Id", "parent"), ("traceparent", f"00-{TRACE}-{PARENT}-01"), ("tracestate", "vendor=1")]
    server.ask("POST", CHAT, chat("hi"), headers)
    spans = collector.trace("parent")
    check_phases(spans)
    assert (spans[0].trace_id, spans[0].parent_id) == (TRACE, PARENT)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("zero", f"00-{'0' * 32}-{PARENT}-01"),
        ("zero-parent", f"00-{TRACE}-{'0' * 16}-01"),
        ("version", f"ff-{TRACE}-{PARENT}-01"),
        ("capitals", f"00-{TRACE.upper()}-{PARENT}-01"),
        ("short", f"00-{TRACE[1:]}-{PARENT}-01"),
        ("more", f"00-{TRACE}-{PARENT}-01-what"),
        ("words", "not a traceparent"),
        ("latin", "00-ÿ"),
    ],
)
def test_a_parent_that_is_none_is_ignored(server: Server, collector: Collector, name: str, value: str) -> None:
    """W3C Trace Context 4.3: a trace of its own begins."""
    answer = server.ask("POST", CHAT, chat("hi"), [("X-Request-Id", f"bad-{name}"), ("traceparent", value)])
    assert answer.status == 200
    spans = collector.trace(f"bad-{name}")
    check_phases(spans)
    assert spans[0].parent_id == ""
    assert spans[0].trace_id != TRACE


def test_what_the_client_does_not_sample_is_not_sent(server: Server, collector: Collector) -> None:
    headers = [("X-Request-Id", "unsampled"), ("traceparent", f"00-{TRACE}-{PARENT}-00")]
    server.ask("POST", CHAT, chat("hi"), headers)
    server.ask("POST", CHAT, chat("hi"), [("X-Request-Id", "behind")])
    collector.trace("behind")  # sent later, and here
    assert not [span for span in collector.spans if span.attributes.get("sluice.request_id") == "unsampled"]


def test_a_fault_is_told(server: Server, collector: Collector) -> None:
    server.ask("POST", CHAT, chat("faulty", stream=True), [("X-Request-Id", "faulty")])
    spans = collector.trace("faulty")
    check_phases(spans)
    assert (spans[0].status, spans[0].message) == (ERROR, "the engine is out of paper")
    assert spans[0].attributes["error.type"] == "error"
    assert spans[0].attributes["gen_ai.response.finish_reasons"] == ["error"]


def test_a_cancel_is_told_and_is_no_fault(server: Server, collector: Collector) -> None:
    with server.connect() as client:
        client.request("POST", CHAT, chat("halts", stream=True), [("X-Request-Id", "cancelled")])
        name = client.begin().header("x-stream-id")
        client.read_until(lambda answer: b"one" in answer.body)
        server.ask("DELETE", f"/v1/streams/{name}")
    spans = collector.trace("cancelled")
    check_phases(spans)
    assert spans[0].status == OK
    assert spans[0].attributes["sluice.outcome"] == "cancelled"
    assert "error.type" not in spans[0].attributes


def test_what_starts_no_stream_makes_no_trace(server: Server, collector: Collector) -> None:
    for target in ("/health", "/metrics", "/v1/models"):
        server.ask("GET", target, None, [("X-Request-Id", "no-stream")])
    server.ask("POST", CHAT, b"{", [("X-Request-Id", "no-stream")])
    server.ask("POST", CHAT, chat("hi"), [("X-Request-Id", "last")])
    collector.trace("last")
    assert not [span for span in collector.spans if span.attributes.get("sluice.request_id") == "no-stream"]


def test_the_environment_names_service_and_resource() -> None:
    environ = {"OTEL_SERVICE_NAME": "mine", "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test"}
    with Collector() as own, traced(own.url, **environ) as server:
        server.ask("POST", CHAT, chat("hi"), [("X-Request-Id", "named")])
        resource = own.trace("named")[0].resource
    assert (resource["service.name"], resource["deployment.environment.name"]) == ("mine", "test")


def test_what_is_not_sent_yet_is_sent_at_the_end() -> None:
    """Nothing else would send it: a batch is due in an hour."""
    with Collector() as own:
        with traced(own.url, OTEL_BSP_SCHEDULE_DELAY="3600000") as server:
            for number in range(20):
                server.ask("POST", CHAT, chat("hi"), [("X-Request-Id", f"last-{number}")])
            assert own.spans == []
            server.terminate()
            assert server.wait() == 0
        for number in range(20):
            check_phases(own.trace(f"last-{number}"))


def serve_many(server: Server, count: int) -> None:
    """More than the SDK's queue holds."""
    with server.connect() as client:
        for _ in range(count):
            client.request("POST", CHAT, chat("hi"))
            answer: Answer = client.answer()
            assert answer.status == 200


def test_a_collector_that_is_gone_harms_nobody(unused_port: int) -> None:
    """Requests are answered, what waits is bounded, the log has one line and no traceback, and the server ends."""
    queue = {"OTEL_BSP_MAX_QUEUE_SIZE": "64", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "32"}
    with traced(f"http://127.0.0.1:{unused_port}/?token=hush", **queue) as server:
        serve_many(server, 50)
        files, before = server.open_files, server.resident_bytes
        serve_many(server, 300)
        until(lambda: lines(server, "traces"), "a complaint")
        assert server.open_files <= files + 2
        assert server.resident_bytes - before < 20_000_000
        assert server.metrics()['sluice_requests_total{api="chat",outcome="stop"}'] == 350
        server.terminate()
        assert server.wait() == 0
        assert len(lines(server, "traces")) == 1
        assert "hush" not in server.log


@pytest.mark.parametrize("status", [400, 503])
def test_a_collector_that_refuses_harms_nobody(status: int) -> None:
    with Collector(status) as own, traced(own.url) as server:
        serve_many(server, 20)
        until(lambda: lines(server, "traces"), "a complaint")
        server.terminate()
        assert server.wait() == 0
    assert own.requests > 0


def test_a_collector_that_hangs_harms_nobody() -> None:
    """At the end it is given some seconds, and not the 10 that a batch may take."""
    with DeafCollector() as deaf, traced(deaf.url, OTEL_EXPORTER_OTLP_TIMEOUT="600000") as server:
        serve_many(server, 20)
        server.terminate()
        assert server.wait() == 0
        assert lines(server, "traces") == []


def loads_protobuf(server: Server) -> bool:
    """What every exporter does."""
    return "google/_upb" in Path(f"/proc/{server.process.pid}/maps").read_text()


def test_a_server_that_is_not_asked_loads_nothing_for_it(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)
    with Server(scripts=SCRIPTS) as unasked:
        unasked.ask("POST", CHAT, chat("hi"))
        assert not loads_protobuf(unasked)
    assert loads_protobuf(server)
