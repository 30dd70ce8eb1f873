"""Traces of generations, in the terms of OpenTelemetry's conventions for generative AI.

One generation is one trace: the request itself, from its arrival until its readers have all of the answer, and in it
`queue` (its wait for a place in the batch), `prefill` (to its first token), `decode` (to its last) and `stream` (the
time in which its answer was read). Nothing is done for a token, and nothing at all without a tracer: a stream notes
some times and, at its end, hands plain values on (see server/otel.py, which alone knows OpenTelemetry's SDK).

As in the log, no span holds a prompt, a text or a whole stream id.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from server import outcome as outcomes

if TYPE_CHECKING:
    from server.http import Call
    from server.stream import Stream
    from server.table import Part

PROVIDER = "sluice"
ID_CHARS = 8  # of a stream's id: enough to find it in the log
# A reader may leave and come back as often as it likes; a trace tells of the first times.
NOTES_MAX = 32
# W3C Trace Context: a traceparent has 55 characters in the version that there is, a tracestate may have 512.
PARENT_CHARS_MAX, STATE_CHARS_MAX = 128, 512
MESSAGE_CHARS_MAX = 200
# Of the families of routes, that which continues bare text; in all others the model answers in a chat.
_OPERATIONS = {"completions": "text_completion"}
# A client that left is no fault of anybody's.
_FAULTS = (outcomes.ERROR, outcomes.EXPIRED)

Value = str | int | float | list[str]
Attributes = dict[str, Value]


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a trace; times are nanoseconds since 1970."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes
    events: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """All of one generation. The first span is the request's, the others are its parts."""

    traceparent: str  # as the client sent it; "" when it sent none
    tracestate: str
    spans: tuple[Span, ...]
    fault: str = ""  # for people, when it failed


class Exporter(Protocol):
    """Who sends traces off."""

    def put(self, trace: Trace) -> None:
        """Take a trace; never waits."""
        ...

    async def close(self, timeout_s: float) -> None:
        """Send what is there, for so long at most."""
        ...


class Tracer:
    """Makes the traces of one server. `clock` is its streams'; `now_ns` the time of day."""

    def __init__(
        self,
        exporter: Exporter,
        model: str,
        *,
        clock: Callable[[], float],
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.exporter = exporter
        self.clock = clock
        self._model = model
        self._now_ns = now_ns

    def begin(self, call: Call, parts: list[Part], *, seeded: bool) -> StreamTrace:
        """The trace of a stream that starts now."""
        sampling = parts[0].sampling
        operation = _OPERATIONS.get(call.api, "chat")
        attributes: Attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "http.request.method": call.request.method,
            "url.path": call.path,
            "sluice.api": call.api,
            "sluice.request_id": call.request_id,
        }
        for name, value, unset in (
            ("gen_ai.request.top_k", sampling.top_k, 0),
            ("gen_ai.request.frequency_penalty", sampling.frequency_penalty, 0.0),
            ("gen_ai.request.presence_penalty", sampling.presence_penalty, 0.0),
            ("gen_ai.request.choice.count", len(parts), 1),
            ("sluice.key", call.key, ""),
        ):
            if value != unset:
                attributes[name] = value
        if seeded and sampling.seed < 2**63:  # what an attribute holds
            attributes["gen_ai.request.seed"] = sampling.seed
        parent, state = _only(call, b"traceparent"), call.header(b"tracestate")
        if len(parent) > PARENT_CHARS_MAX or len(state) > STATE_CHARS_MAX:
            parent = state = ""
        return StreamTrace(self, f"{operation} {self._model}", parent, state, attributes)

    def wall(self) -> Callable[[float], int]:
        """Makes nanoseconds since 1970 of the clock's seconds."""
        now, now_ns = self.clock(), self._now_ns()
        return lambda at: now_ns - round((now - at) * 1e9)


class StreamTrace:
    """What a stream remembers for its trace."""

    __slots__ = ("_attributes", "_finished_at", "_name", "_notes", "_parent", "_state", "_tracer")

    def __init__(self, tracer: Tracer, name: str, parent: str, state: str, attributes: Attributes) -> None:
        self._tracer = tracer
        self._name = name
        self._parent = parent
        self._state = state
        self._attributes = attributes
        self._notes: list[tuple[str, float]] = []
        self._finished_at = 0.0

    def note(self, name: str) -> None:
        """Something happened to its readers."""
        if len(self._notes) < NOTES_MAX:
            self._notes.append((name, self._tracer.clock()))

    def finish(self) -> None:
        """The stream has its outcome; its readers may not have all of it yet."""
        self._finished_at = self._tracer.clock()

    def close(self, stream: Stream) -> None:
        """Nobody reads the stream any more, which has its outcome."""
        wall, end = self._tracer.wall(), stream.outcome
        assert end is not None
        started_ns, closed_ns = wall(stream.created), wall(self._tracer.clock())
        whole = Span(self._name, started_ns, closed_ns, self._attributes | _result(stream))
        read: Attributes = {
            "gen_ai.usage.output_tokens": stream.completion_tokens,
            "sluice.stream.framing": self._framing(stream),
            "sluice.stream.events": stream.log.end,
        }
        notes = tuple((name, wall(at)) for name, at in self._notes)
        parts = [*self._phases(stream, wall), Span("stream", started_ns, closed_ns, read, notes)]
        fault = (end.message or end.kind)[:MESSAGE_CHARS_MAX] if end.kind in _FAULTS else ""
        self._tracer.exporter.put(Trace(self._parent, self._state, (whole, *parts), fault))

    def _framing(self, stream: Stream) -> str:
        """How its readers took it."""
        if self._attributes["sluice.api"] == "websocket":
            return "websocket"
        return "polling" if stream.poller is not None else stream.framing or "whole"

    def _phases(self, stream: Stream, wall: Callable[[float], int]) -> list[Span]:
        """As far as it came: one that never had its turn has a queue only."""
        prompt: Attributes = {"gen_ai.usage.input_tokens": stream.prompt_tokens}
        finished = self._finished_at
        admitted = stream.admitted_at or finished
        phases = [Span("queue", wall(stream.created), wall(admitted), prompt)]
        if stream.admitted_at:
            first = max(stream.first_token_at or finished, admitted)
            cached: Attributes = {"gen_ai.usage.cache_read.input_tokens": stream.cached_tokens}
            phases.append(Span("prefill", wall(admitted), wall(first), prompt | cached))
        if stream.first_token_at:
            made: Attributes = {"gen_ai.usage.output_tokens": stream.completion_tokens}
            phases.append(Span("decode", wall(stream.first_token_at), wall(stream.last_token_at), made))
        return phases


def _result(stream: Stream) -> Attributes:
    end = stream.outcome
    assert end is not None
    attributes: Attributes = {
        "gen_ai.response.finish_reasons": [choice.reason or end.kind for choice in stream.choices],
        "gen_ai.usage.input_tokens": stream.prompt_tokens,
        "gen_ai.usage.output_tokens": stream.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": stream.cached_tokens,
        "sluice.outcome": end.kind,
        "sluice.stream.id": stream.id[:ID_CHARS],
    }
    if end.kind in _FAULTS:
        attributes["error.type"] = end.kind
    return attributes


def _only(call: Call, name: bytes) -> str:
    """The value of a header that comes once; "" for one that comes more often, as W3C Trace Context 3.2.2 has it."""
    values = [value for key, value in call.request.headers if key == name]
    return values[0].decode("latin-1") if len(values) == 1 else ""


def open_exporter(environ: Mapping[str, str], log: Callable[[str], None]) -> Exporter | None:
    """What sends traces to where OTEL_* says; None where it says nothing, or nothing that is there, which `log` is
    told. The SDK is imported here, and nowhere else."""
    if not _asked(environ):
        return None
    kind = environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if kind != "otlp":
        log(f"no traces: OTEL_TRACES_EXPORTER is {kind!r}; otlp and none are there")
        return None
    if protocol and protocol.strip() != "http/protobuf":
        log(f"no traces: OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; http/protobuf is there")
        return None
    try:
        from server.otel import OtlpExporter
    except ImportError as error:
        log(f"no traces: OTEL_* asks for them, but the extra `otel` is not installed ({error})")
        return None
    try:
        return OtlpExporter(environ, log)
    except Exception as error:  # of the SDK, at a value that it can't read: the server goes on without
        log(f"no traces: {error}")
        return None


def _asked(environ: Mapping[str, str]) -> bool:
    """The SDK itself would send to localhost if nobody says where to; a server must be asked to."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if exporter := environ.get("OTEL_TRACES_EXPORTER", "").strip():
        return exporter != "none"
    return any(environ.get(name) for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"))
