"""Traces to a collector, by OpenTelemetry's SDK and OTLP over HTTP, from threads of its own.

One thread makes the SDK's spans of what streams hand on, so that a thousand that end in one step hold up nobody; the
SDK's own sends them in batches and tries again. Both are daemons: a collector that hangs keeps no process alive. Two
queues are between them, both bounded; what is over a bound is dropped, and told.

Standard environment variables of OTEL_* set the endpoint, headers, sampler, resource, batches and limits.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping

from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine.version import VERSION
from server.tracing import Span, Trace

# Traces that wait for their spans to be made: a batch of streams that end in one step, and some.
QUEUE_MAX = 4096
# What goes wrong between here and the collector goes wrong again and again: it is told once in so many seconds.
COMPLAINT_PAUSE_S = 60.0
CLOSE_LOOK_S = 0.02
_query = re.compile(r"\?\S+")  # of an address: there may be a secret in it


class Complaints(logging.Handler):
    """The SDK's own log, one line of it now and then, without tracebacks."""

    def __init__(self, log: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        self._clock = clock
        self._quiet_until = 0.0
        self._unsaid = 0

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        self.say(_query.sub("?…", record.getMessage()))

    def say(self, sentence: str) -> None:
        """Now, or as one of those that went unsaid."""
        if self._clock() < self._quiet_until:
            self._unsaid += 1
            return
        more = f" (and {self._unsaid} more since the last time)" if self._unsaid else ""
        self._quiet_until, self._unsaid = self._clock() + COMPLAINT_PAUSE_S, 0
        self._log(sentence.splitlines()[0][:300] + more if sentence else "the SDK complains")


class OtlpExporter:
    """See server.tracing.Exporter. `log` takes sentences, from any thread."""

    def __init__(self, environ: Mapping[str, str], log: Callable[[str], None]) -> None:
        self._complaints = Complaints(log)
        logger = logging.getLogger("opentelemetry")
        logger.propagate = False
        logger.handlers = [self._complaints]
        self._provider = TracerProvider(resource=_resource(environ), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("sluice", VERSION)
        self._propagator = TraceContextTextMapPropagator()
        self._queue: queue.Queue[Trace | None] = queue.Queue(QUEUE_MAX)
        self._thread = threading.Thread(target=self._work, name="traces", daemon=True)
        self._thread.start()

    def put(self, trace: Trace) -> None:
        """See server.tracing.Exporter."""
        try:
            self._queue.put_nowait(trace)
        except queue.Full:
            self._complaints.say(f"a trace is dropped: {QUEUE_MAX} wait already")

    async def close(self, timeout_s: float) -> None:
        """See server.tracing.Exporter."""
        deadline = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < deadline:
            try:
                self._queue.put_nowait(None)
                break
            except queue.Full:
                await asyncio.sleep(CLOSE_LOOK_S)
        while self._thread.is_alive() and time.monotonic() < deadline:  # noqa: ASYNC110 (a few looks, once in a life)
            await asyncio.sleep(CLOSE_LOOK_S)

    def _work(self) -> None:
        while (trace := self._queue.get()) is not None:
            try:
                self._write(trace)
            except Exception as error:  # one trace that the SDK doesn't take; the next ones may be better
                self._complaints.say(f"a trace is lost: {error}")
        self._provider.shutdown()

    def _write(self, trace: Trace) -> None:
        """A span that the sampler doesn't want has no parts."""
        carrier = {"traceparent": trace.traceparent, "tracestate": trace.tracestate}
        parent = self._propagator.extract({name: value for name, value in carrier.items() if value})
        whole, *parts = trace.spans
        root = self._tracer.start_span(
            whole.name, parent, api.SpanKind.SERVER, whole.attributes, start_time=whole.start_ns
        )
        if root.is_recording():
            within = api.set_span_in_context(root, parent)
            for part in parts:
                self._write_part(part, within)
            if trace.fault:
                root.set_status(api.StatusCode.ERROR, trace.fault)
        root.end(whole.end_ns)

    def _write_part(self, part: Span, within: Context) -> None:
        span = self._tracer.start_span(part.name, within, attributes=part.attributes, start_time=part.start_ns)
        for name, at_ns in part.events:
            span.add_event(name, timestamp=at_ns)
        span.end(part.end_ns)


def _resource(environ: Mapping[str, str]) -> Resource:
    """The environment's own name for the service comes first."""
    attributes = {SERVICE_VERSION: VERSION}
    if not environ.get("OTEL_SERVICE_NAME") and f"{SERVICE_NAME}=" not in environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        attributes[SERVICE_NAME] = "sluice"
    return Resource.create(attributes)
