"""server.tracing: the phases of a generation by a scripted clock, when its trace is closed, and who asks for traces."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from protocols.http1 import Request
from server.http import Call
from server.outcome import Outcome
from server.readers import Poller
from server.stream import Stream
from server.table import Part
from server.tracing import NOTES_MAX, Exporter, Span, Trace, Tracer, open_exporter
from tests.support.tables import Client, Rig

DAY_NS = 1_800_000_000_000_000_000  # the time of day when the rig's clock is at its start
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


class Kept:
    """An exporter that keeps what it is given."""

    def __init__(self) -> None:
        self.traces: list[Trace] = []

    def put(self, trace: Trace) -> None:
        self.traces.append(trace)

    async def close(self, timeout_s: float) -> None: ...


class Traced(Rig):
    """A rig whose streams are traced."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.exporter = Kept()
        start = self.clock.now
        self.tracer = Tracer(
            self.exporter,
            "model",
            clock=self.clock,
            now_ns=lambda: DAY_NS + round((self.clock.now - start) * 1e9),
        )

    def begin(self, *headers: tuple[bytes, bytes], **options: Any) -> Client:
        """A stream that is traced, and its reader."""
        stream = self.start(**options)
        request = Request("POST", "/v1/chat/completions", "1.1", headers, 0, False, False, True, False)
        call = Call(request, "/v1/chat/completions", "", "127.0.0.1", "req-1", 0.0, api="chat", key=stream.key)
        parts = [Part(choice.prompt.tolist(), choice.sampling) for choice in stream.choices]
        stream.trace = self.tracer.begin(call, parts, seeded=False)
        return Client(stream)

    @property
    def spans(self) -> dict[str, Span]:
        """Of the one trace that was closed: each span by its name, the request's as "request"."""
        (trace,) = self.exporter.traces
        whole, *parts = trace.spans
        return {"request": whole, **{part.name: part for part in parts}}


def seconds(span: Span) -> tuple[float, float]:
    """From the rig's start."""
    return (span.start_ns - DAY_NS) / 1e9, (span.end_ns - DAY_NS) / 1e9


def usage(span: Span) -> dict[str, Any]:
    """Its counts of tokens."""
    prefix = "gen_ai.usage."
    return {name.removeprefix(prefix): value for name, value in span.attributes.items() if name.startswith(prefix)}


def play(rig: Traced, stream: Stream) -> None:
    """Half a second in the queue, a quarter for the prompt, and four tokens with a tenth between two."""
    rig.clock.advance(0.5)
    rig.admit(stream, cached=2, waited_s=0.5)
    rig.clock.advance(0.25)
    for letter in "abcd":
        rig.play(stream, letter)
        rig.clock.advance(0.1)


def test_the_phases_of_a_generation_and_their_tokens() -> None:
    rig = Traced()
    client = rig.begin()
    play(rig, client.stream)
    rig.end(client.stream)
    spans = rig.spans
    assert list(spans) == ["request", "queue", "prefill", "decode", "stream"]
    assert seconds(spans["queue"]) == (0.0, 0.5)
    assert seconds(spans["prefill"]) == (0.5, 0.75)
    assert seconds(spans["decode"]) == pytest.approx((0.75, 1.05))
    assert seconds(spans["request"]) == seconds(spans["stream"]) == pytest.approx((0.0, 1.15))
    assert {name: usage(span) for name, span in spans.items()} == {
        "request": {"input_tokens": 3, "output_tokens": 4, "cache_read.input_tokens": 2},
        "queue": {"input_tokens": 3},
        "prefill": {"input_tokens": 3, "cache_read.input_tokens": 2},
        "decode": {"output_tokens": 4},
        "stream": {"output_tokens": 4},
    }


def test_what_is_told_of_a_request() -> None:
    rig = Traced(keys={"alice": None})
    client = rig.begin(key="alice", n=2)
    stream = client.stream
    rig.admit(stream)
    rig.end(stream, "length", choice=1)
    rig.end(stream, "stop")
    attributes = rig.spans["request"].attributes
    assert rig.spans["request"].name == "chat model"
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.provider.name"] == "sluice"
    assert attributes["gen_ai.request.choice.count"] == 2
    assert attributes["gen_ai.response.finish_reasons"] == ["stop", "length"]
    assert attributes["sluice.key"] == "alice"
    assert attributes["sluice.outcome"] == "length"
    assert "error.type" not in attributes
    assert not {"gen_ai.request.seed", "gen_ai.request.top_k"} & attributes.keys()  # nobody asked for them


def test_no_span_holds_a_text_or_a_whole_stream_id() -> None:
    rig = Traced()
    client = rig.begin()
    play(rig, client.stream)
    rig.end(client.stream)
    told = repr(rig.exporter.traces)
    assert "abcd" not in told
    assert client.stream.id not in told
    assert rig.spans["request"].attributes["sluice.stream.id"] == client.stream.id[:8]


def test_one_that_never_had_its_turn_has_a_queue_only() -> None:
    rig = Traced(queue_timeout_s=5)
    rig.begin()
    rig.clock.advance(6)
    assert list(rig.spans) == ["request", "queue", "stream"]
    assert seconds(rig.spans["queue"]) == (0.0, 5.0)
    assert rig.spans["request"].attributes["error.type"] == "expired"
    assert rig.exporter.traces[0].fault == "the request waited 5 s for its turn"


def test_one_that_ends_before_its_first_token_has_no_decode() -> None:
    rig = Traced()
    client = rig.begin()
    rig.admit(client.stream)
    rig.clock.advance(1)
    client.stream.finish(Outcome("cancelled", "on purpose"))
    assert list(rig.spans) == ["request", "queue", "prefill", "stream"]
    assert seconds(rig.spans["prefill"]) == (0.0, 1.0)
    assert rig.exporter.traces[0].fault == ""  # nobody's


def test_the_stream_lasts_until_its_reader_has_all() -> None:
    rig = Traced()
    client = rig.begin()
    rig.admit(client.stream)
    rig.play(client.stream, "a")
    client.stall()
    rig.play(client.stream, "b")
    rig.end(client.stream)
    assert rig.exporter.traces == []
    rig.clock.advance(7)
    client.go_on()
    assert seconds(rig.spans["stream"]) == (0.0, 7.0)
    assert seconds(rig.spans["decode"]) == (0.0, 0.0)
    Client(client.stream)  # one that comes late is another request's
    assert len(rig.exporter.traces) == 1


def test_a_polled_stream_lasts_until_it_has_ended_and_no_longer() -> None:
    """And not until its reader's lease is over."""
    rig = Traced()
    stream = rig.begin().stream
    poller = stream.poller = Poller(stream, 30.0, rig.clock.call_later)
    poller.renew_lease()
    stream.readers[0].fail()  # it polls from here on
    rig.admit(stream)
    rig.clock.advance(2)
    rig.end(stream)
    assert seconds(rig.spans["stream"]) == (0.0, 2.0)
    assert rig.spans["stream"].attributes["sluice.stream.framing"] == "polling"
    timers = rig.clock.pending
    poller.renew_lease()  # a late poll of what has ended
    assert rig.clock.pending == timers
    assert stream.readers == []


def test_a_mistake_of_ours_costs_the_trace_and_nothing_else() -> None:
    rig = Traced()
    client = rig.begin()
    rig.exporter.put = lambda trace: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    rig.admit(client.stream)
    rig.end(client.stream)
    assert client.channel.finished
    ((request_id, trace),) = rig.faults
    assert request_id == "req"
    assert "ZeroDivisionError" in trace


def test_readers_that_leave_and_come_back_are_noted() -> None:
    rig = Traced()
    client = rig.begin()
    rig.admit(client.stream)
    rig.clock.advance(1)
    client.leave()
    rig.clock.advance(2)
    back = Client(client.stream)
    rig.end(client.stream)
    events = [(name, (at - DAY_NS) / 1e9) for name, at in rig.spans["stream"].events]
    assert events == [("the last reader left", 1.0), ("a reader came back", 3.0)]
    assert back.channel.finished


def test_notes_have_a_bound() -> None:
    rig = Traced()
    client = rig.begin()
    for _ in range(NOTES_MAX):
        client.leave()
        client = Client(client.stream)
    client.stream.finish(Outcome("cancelled"))
    assert len(rig.spans["stream"].events) == NOTES_MAX


def test_one_whose_reader_never_came_back_is_told_once() -> None:
    rig = Traced(resume_ttl_s=30)
    client = rig.begin()
    client.leave()
    rig.clock.advance(31)
    assert seconds(rig.spans["request"]) == (0.0, 30.0)
    assert rig.spans["request"].attributes["sluice.outcome"] == "cancelled"


def test_after_an_engines_death_the_queue_lasts_until_another_has_it() -> None:
    rig = Traced()
    client = rig.begin()
    rig.lose_engine()
    rig.clock.advance(4)
    rig.regain_engine()
    rig.admit(client.stream, waited_s=0.01)
    rig.end(client.stream)
    assert seconds(rig.spans["queue"]) == (0.0, 4.0)
    assert [name for name, _ in rig.spans["stream"].events] == ["the engine died"]


@pytest.mark.parametrize(
    ("headers", "parent"),
    [
        ([], ""),
        ([(b"traceparent", PARENT.encode())], PARENT),
        ([(b"traceparent", PARENT.encode())] * 2, ""),
        ([(b"traceparent", b"x" * 129)], ""),
        ([(b"traceparent", PARENT.encode()), (b"tracestate", b"a=" + b"x" * 511)], ""),
    ],
    ids=["none", "one", "two", "long", "long state"],
)
def test_a_parent_is_taken_as_it_is_within_bounds(headers: list[tuple[bytes, bytes]], parent: str) -> None:
    rig = Traced()
    rig.begin(*headers).stream.finish(Outcome("cancelled"))
    assert rig.exporter.traces[0].traceparent == parent


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_SERVICE_NAME": "mine"},
        {**ENDPOINT, "OTEL_SDK_DISABLED": "true"},
        {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"},
    ],
    ids=["nothing", "no endpoint", "disabled", "none"],
)
def test_nobody_who_does_not_ask_gets_traces(environ: dict[str, str]) -> None:
    said: list[str] = []
    assert open_exporter(environ, said.append) is None
    assert said == []


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"OTEL_TRACES_EXPORTER": "console"}, "no traces: OTEL_TRACES_EXPORTER is 'console'; otlp and none are there"),
        (
            {**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "no traces: OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'; http/protobuf is there",
        ),
    ],
)
def test_what_is_not_there_is_said(environ: dict[str, str], sentence: str) -> None:
    said: list[str] = []
    assert open_exporter(environ, said.append) is None
    assert said == [sentence]


def test_without_the_extra_a_server_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "server.otel", None)
    said: list[str] = []
    assert open_exporter(ENDPOINT, said.append) is None
    (sentence,) = said
    assert "the extra `otel` is not installed" in sentence


def test_an_exporter_is_one() -> None:
    exporter: Exporter = Kept()  # by the types
    assert exporter
