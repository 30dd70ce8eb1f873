"""The same generation read in every way that the server offers: whole, in each framing, by GET and over WebSocket.

Each way gives a `Reading`, so that a test can say that they agree. Imports tests.support.serving only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from tests.support.serving import Answer, Server, WebSocketClient, chat, joined

EVENT_STREAM = ("Accept", "text/event-stream")
NDJSON = ("Accept", "application/x-ndjson")
PLAIN = ("Accept", "text/plain")
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Reading:
    """What one choice gave. `reason` and `usage` are None in a framing that doesn't show them; so is `pieces`, the
    pieces of text as they came, where there is one piece."""

    text: str
    reason: str | None = None
    usage: dict[str, Any] | None = None
    pieces: tuple[str, ...] | None = None


Way = Callable[[Server, str, dict[str, Any]], Reading]


def of_chunks(chunks: list[Any]) -> Reading:
    """The first choice of chat or completion chunks, the usage chunk included."""
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == 0]
    reasons = [c["finish_reason"] for c in choices if c["finish_reason"]]
    assert len(reasons) == 1, chunks
    pieces = [c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices]
    usage = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    return Reading(joined(chunks), reasons[0], usage[-1] if usage else None, tuple(p for p in pieces if p))


def _checked(answer: Answer, kind: str) -> Answer:
    assert (answer.status, answer.end) == (200, "whole"), (answer.status, answer.end, bytes(answer.body))
    assert (answer.header("content-type") or "").startswith(kind)
    return answer


def chat_whole(server: Server, content: str, fields: dict[str, Any]) -> Reading:
    """POST /v1/chat/completions, answered in one piece."""
    document = _checked(server.ask("POST", "/v1/chat/completions", chat(content, **fields)), "application/json").json()
    choice = document["choices"][0]
    return Reading(choice["message"]["content"], choice["finish_reason"], document["usage"])


def completion_whole(server: Server, content: str, fields: dict[str, Any]) -> Reading:
    """POST /v1/completions, answered in one piece."""
    document = _checked(server.ask("POST", "/v1/completions", {"prompt": content, **fields}), "application/json").json()
    choice = document["choices"][0]
    return Reading(choice["text"], choice["finish_reason"], document["usage"])


def _posted(path: str, body: Callable[..., dict[str, Any]], accept: tuple[str, str]) -> Way:
    def read(server: Server, content: str, fields: dict[str, Any]) -> Reading:
        answer = _checked(server.ask("POST", path, body(content, **fields, **USAGE), [accept]), accept[1])
        return _framed(answer, accept)

    return read


def _got(accept: tuple[str, str]) -> Way:
    def read(server: Server, content: str, fields: dict[str, Any]) -> Reading:
        query = {
            name: ",".join(map(str, v)) if name == "stop_token_ids" else str(v).lower() if isinstance(v, bool) else v
            for name, v in fields.items()
        }
        answer = server.ask("GET", "/v1/generate?" + urlencode({"prompt": content, **query}), None, [accept])
        return _framed(_checked(answer, accept[1]), accept)

    return read


def _framed(answer: Answer, accept: tuple[str, str]) -> Reading:
    if accept == EVENT_STREAM:
        events = answer.events()
        assert [e.data for e in events].count("[DONE]") == 1 and events[-1].data == "[DONE]"
        return of_chunks(answer.chunks())
    if accept == NDJSON:
        *lines, last = answer.lines()
        assert last == {"done": True}
        return of_chunks(lines)
    return Reading(bytes(answer.body).decode())


def over_websocket(server: Server, content: str, fields: dict[str, Any]) -> Reading:
    """A generate message with the fields of a chat."""
    with WebSocketClient(server) as socket:
        socket.send_json(type="generate", id="a", **chat(content, **fields))
        messages = socket.receive_until("done", "error")
    last = messages.pop()
    assert last["type"] == "done", last
    pieces = tuple(m["text"] for m in messages if m["type"] == "token")
    return Reading("".join(pieces), last["finish_reason"], last["usage"], pieces)


def _prompt(content: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": content, **fields}


CHAT_WAYS: dict[str, Way] = {
    "chat": chat_whole,
    **{f"chat {a[1]}": _posted("/v1/chat/completions", chat, a) for a in (EVENT_STREAM, NDJSON, PLAIN)},
    **{f"generate {a[1]}": _got(a) for a in (EVENT_STREAM, NDJSON, PLAIN)},
    "websocket": over_websocket,
}
COMPLETION_WAYS: dict[str, Way] = {
    "completion": completion_whole,
    **{f"completion {a[1]}": _posted("/v1/completions", _prompt, a) for a in (EVENT_STREAM, NDJSON, PLAIN)},
}


def read_all(server: Server, content: str, **fields: Any) -> list[Reading]:
    """Every way in turn; a query holds one stop string at most, so more of them leave GET out."""
    queryable = not isinstance(fields.get("stop"), list)
    ways = {**CHAT_WAYS, **COMPLETION_WAYS}
    return [read(server, content, fields) for name, read in ways.items() if queryable or "generate" not in name]


def agree(readings: list[Reading]) -> Reading:
    """Check that all gave the same text, reason, counts and pieces; the one that they all are."""
    first = readings[0]
    for reading in readings:
        assert reading.text == first.text
        assert reading.reason in (None, first.reason)
        if reading.usage is not None and first.usage is not None:
            assert reading.usage["completion_tokens"] == first.usage["completion_tokens"]
    pieces = {reading.pieces for reading in readings if reading.pieces is not None}
    assert len(pieces) == 1, pieces
    return Reading(first.text, first.reason, first.usage, pieces.pop())
