"""/v1/streams/{id}: come back to a stream, poll it, cancel it; and coming back by Last-Event-ID on any route."""

from __future__ import annotations

import re

from server.api import errors
from server.api.errors import ApiError, invalid
from server.api.generate import query_fields
from server.api.generation import FRAMINGS, PLAIN, SSE, Generation, check_one_choice, framing_named, streaming
from server.api.polling import poller_of
from server.framing import Plain, polled, unescaped
from server.http import Call, Response, Streaming, json_response
from server.metrics import Metrics
from server.outcome import CANCELLED, Outcome
from server.stream import Stream
from server.table import Busy

# A longer wait would meet the idle timeout of the proxies between.
POLL_WAIT_S_MAX = 30.0

_event_id = re.compile(r"(?P<stream>[A-Za-z0-9_-]{16,64}):(?P<position>[0-9]{1,15})")


async def read_stream(generation: Generation, metrics: Metrics, call: Call, stream_id: str) -> Response | Streaming:
    """GET /v1/streams/{id}: from the position in Last-Event-ID or `after` on. Raises ApiError."""
    fields = query_fields(call.query)
    unknown = fields.keys() - {"after", "after_bytes", "wait"}
    if unknown:
        name = min(unknown)
        raise invalid(name, f"{name} is not a parameter; after, after_bytes and wait are", "unknown_parameter")
    stream = find(generation, metrics, call, stream_id)
    accept = call.header(b"accept")
    kind = framing_named(accept)
    after = position(call, fields, stream_id)
    polls = kind is None and "application/json" in accept
    kind = kind or _own_framing(stream)
    if "after_bytes" in fields and (polls or kind != PLAIN):
        raise invalid("after_bytes", "after_bytes is for text/plain; the other framings take after")
    if polls:
        wait_s = number(fields, "wait", 0.0, POLL_WAIT_S_MAX)
        return await _poll(generation, metrics, call, stream, after, wait_s)
    if "after_bytes" in fields:
        skip = int(number(fields, "after_bytes", 0, 2**53))
        return _resume_plain(generation, metrics, stream, skip)
    return resume(generation, metrics, stream, kind, after, past_end=204)


def resume_named(generation: Generation, metrics: Metrics, call: Call) -> Streaming | Response | None:
    """The stream that the request's Last-Event-ID names, if it has one: no second generation is started."""
    value = call.header(b"last-event-id")
    if not value:
        return None
    found = _event_id.fullmatch(value)
    if found is None:
        raise invalid("Last-Event-ID", "Last-Event-ID is not a position of one of our streams (<stream>:<number>)")
    stream = find(generation, metrics, call, found["stream"])
    kind = framing_named(call.header(b"accept")) or _own_framing(stream)
    past_end = 204 if call.request.method == "GET" else 200
    return resume(generation, metrics, stream, kind, int(found["position"]), past_end=past_end)


def _own_framing(stream: Stream) -> str:
    """What a reader gets that names no framing: SSE where the stream began on a WebSocket, or was answered whole."""
    return stream.framing or SSE


def find(generation: Generation, metrics: Metrics, call: Call, stream_id: str) -> Stream:
    """The stream, if it is the caller's. Raises ApiError 404, or 410 for one that is no longer held."""
    stream = generation.table.find(stream_id, call.key)
    if stream is not None:
        call.stream_id = stream.id
        return stream
    if generation.table.was_dropped(stream_id, call.key):
        metrics.resumes["gone"] += 1
        raise ApiError(410, "this stream ended some time ago and is no longer held", code="stream_gone")
    metrics.resumes["unknown"] += 1
    raise ApiError(404, "there is no such stream", code="stream_not_found")


def resume(
    generation: Generation, metrics: Metrics, stream: Stream, kind: str, after: int, *, past_end: int
) -> Streaming | Response:
    """What comes behind position `after`, in a framing. `past_end`: the status when nothing ever will."""
    check_position(metrics, stream, after)
    if kind == PLAIN:
        check_one_choice(stream.choices, param="Accept")
    if stream.outcome is not None and after >= stream.log.end - 1:
        metrics.resumes["finished"] += 1
        if past_end == 204:
            return Response(204)
        return Response(200, content_type=FRAMINGS[kind].content_type)
    retake_slot(generation, stream)
    metrics.resumes["resumed"] += 1
    return streaming(stream, kind, after + 1)


def check_position(metrics: Metrics, stream: Stream, after: int) -> None:
    """Raises ApiError unless the events behind `after` are held, or are still to come."""
    if after + 1 < stream.log.first:
        metrics.resumes["gone"] += 1
        message = f"position {after + 1} is no longer held; the first one that is held is {stream.log.first}"
        raise ApiError(410, message, param="after", code="position_gone")
    if stream.outcome is None and after >= stream.log.end:
        raise invalid("after", f"position {after} has not come yet; the stream is at {stream.log.end - 1}")


def retake_slot(generation: Generation, stream: Stream) -> None:
    """A returning reader needs its key's slot again. Raises ApiError 429."""
    try:
        generation.table.retake_slot(stream)
    except Busy as busy:
        raise errors.from_busy(busy) from None


def cancel_stream(generation: Generation, metrics: Metrics, call: Call, stream_id: str) -> Response:
    """DELETE /v1/streams/{id}. Cancelling a stream that has ended changes nothing. Raises ApiError."""
    stream = find(generation, metrics, call, stream_id)
    stream.finish(Outcome(CANCELLED, "the stream was cancelled by its client"))
    assert stream.outcome is not None
    return json_response({"stream": stream.id, "status": "finished", "outcome": stream.outcome.kind})


async def _poll(
    generation: Generation, metrics: Metrics, call: Call, stream: Stream, after: int, wait_s: float
) -> Response:
    check_position(metrics, stream, after)
    retake_slot(generation, stream)
    await poller_of(generation.table, stream).events_after(after, wait_s)
    check_position(metrics, stream, after)  # beside a faster reader its events may be gone by now
    events = stream.log.slice(after + 1, stream.log.end)
    return Response(200, polled(stream, events, after + 1), headers=((b"Cache-Control", b"no-store"),))


def _resume_plain(generation: Generation, metrics: Metrics, stream: Stream, skip: int) -> Streaming | Response:
    """The text behind its first `skip` bytes. Those must be held still, or be known to lie before what is."""
    check_one_choice(stream.choices, param="after_bytes")
    check_position(metrics, stream, -1)
    held = sum(len(unescaped(event.text)) for event in stream.log.slice(0, stream.log.end))
    if skip > held and stream.outcome is None:
        raise invalid("after_bytes", f"byte {skip} has not come yet; the stream is at {held}")
    if stream.outcome is not None and stream.outcome.success and skip >= held:
        metrics.resumes["finished"] += 1
        return Response(204)
    retake_slot(generation, stream)
    metrics.resumes["resumed"] += 1
    return streaming(stream, PLAIN, framing=Plain(stream, skip))


def position(call: Call, fields: dict[str, str], stream_id: str, name: str = "after") -> int:
    """The last position that the client has, by its Last-Event-ID or the parameter `name`; -1 for none."""
    header = call.header(b"last-event-id")
    if header:
        found = _event_id.fullmatch(header)
        if found is None or found["stream"] != stream_id:
            raise invalid("Last-Event-ID", "Last-Event-ID does not name a position of this stream")
        return int(found["position"])
    return int(number(fields, name, -1, 10**15)) if name in fields else -1


def number(fields: dict[str, str], name: str, low: float, high: float) -> float:
    """A parameter's value, `low` where it isn't given. Raises ApiError 400."""
    text = fields.get(name)
    if text is None:
        return low
    found = re.fullmatch(r"-?[0-9]{1,16}(\.[0-9]{1,6})?" if name == "wait" else r"-?[0-9]{1,16}", text)
    value = float(text) if found else float("nan")
    if not low <= value <= high:
        raise invalid(name, f"{name} must be a number from {low:g} to {high:g}")
    return value
