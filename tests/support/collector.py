"""A collector of traces that speaks OTLP over HTTP, and one that takes connections and never answers."""

from __future__ import annotations

import gzip
import http.server
import socket
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.support.serving import until


@dataclass(frozen=True, slots=True)
class Span:
    """One that came, as plain values."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str  # "" for none
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    status: int
    message: str
    events: list[str]
    resource: dict[str, Any] = field(repr=False)


class Collector:
    """Usable with `with`. `status`: what it answers."""

    def __init__(self, status: int = 200) -> None:
        self.spans: list[Span] = []
        self.requests = 0
        self.status = status
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector._take(self)

            def log_message(self, format: str, *args: Any) -> None:
                """Nobody reads it."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def trace(self, request_id: str) -> list[Span]:
        """All spans of the request's trace, once they are here; the first is the request's."""

        def found() -> list[Span]:
            roots = [span for span in self.spans if span.attributes.get("sluice.request_id") == request_id]
            return roots and [*roots, *(span for span in self.spans if span.parent_id == roots[0].span_id)]

        spans: list[Span] = until(found, f"the trace of {request_id}")
        return spans

    def _take(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers["content-length"]))
        if handler.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.requests += 1
        if self.status == 200:
            assert handler.path == "/v1/traces"
            assert handler.headers["content-type"] == "application/x-protobuf"
            self.spans += _spans(ExportTraceServiceRequest.FromString(body))
        answer = ExportTraceServiceResponse().SerializeToString()
        handler.send_response(self.status)
        handler.send_header("content-type", "application/x-protobuf")
        handler.send_header("content-length", str(len(answer)))
        handler.end_headers()
        handler.wfile.write(answer)


class DeafCollector:
    """Takes connections, and says nothing."""

    def __enter__(self) -> Self:
        self._socket = socket.create_server(("127.0.0.1", 0))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"


def _spans(request: ExportTraceServiceRequest) -> list[Span]:
    return [
        Span(
            span.name,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.kind,
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            _attributes(span.attributes),
            span.status.code,
            span.status.message,
            [event.name for event in span.events],
            _attributes(each.resource.attributes),
        )
        for each in request.resource_spans
        for scope in each.scope_spans
        for span in scope.spans
    ]


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
