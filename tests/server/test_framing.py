"""The framings of one log: the same events in each, read by independent parsers, and the same bytes however the log
is cut and wherever a reader comes back."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.wire import Logprob
from protocols import sse
from server.api.anthropic_messages import MessagesGrammar
from server.api.openai_completions import CompletionGrammar
from server.framing import DONE, RETRY_MS, Framing, Ndjson, Plain, Sse, polled, render, unescaped
from server.log import Event
from server.outcome import Outcome
from server.stream import Frame, Stream, escaped
from tests.support.tables import Rig

# Characters that end a line for some reader, that JSON must escape, or that take several bytes or two UTF-16 units.
CHARACTERS = st.one_of(
    st.sampled_from(list("\n\r\t\v\f\0\x1c\x1d\x1e\x7f\x85\u2028\u2029\ufeff\"\\/<>&:' {}[]👩‍🚀é世")),
    st.characters(exclude_categories=["Cs"]),
)
TEXTS = st.lists(st.text(CHARACTERS, min_size=1, max_size=6), max_size=8)
AWKWARD = ["a", "\n", "\r\nevent: x", "\r\ndata: [DONE]", "\u2028", "\x85", '"', "\\", "👩‍🚀", "\\u0041", "id: 9:9"]


def joined(framing: Framing, events: list[Event], first: int) -> bytes:
    return b"".join(render(framing, events, first))


def stream_of(texts: list[str], outcome: str = "stop") -> Stream:
    """A finished stream of one choice."""
    stream = Rig().start()
    for text in texts:
        stream.append(Event(0, escaped(text)))
    stream.finish(Outcome(outcome, "" if outcome == "stop" else "a reason\r\nevent: x"))
    return stream


def whole(stream: Stream, framing: Framing) -> bytes:
    return joined(framing, stream.log.slice(0, stream.log.end), 0)


def content(events: list[Any]) -> str:
    return "".join(c["delta"].get("content", "") for event in events for c in event.get("choices", ()))


# Grammars with types and numbers


def typed_stream(texts: list[str]) -> Stream:
    """A stream whose text events have a type and hold their own position, and which has no terminator."""
    stream = Rig().start()
    stream.grammar.frames = [Frame(b'{"delta":"', b'","sequence_number":', "some.delta", b',"z":"%d"}')]
    stream.grammar.closing = lambda stream, end: [Event(-1, b"", b'{"type":"over"}', "over")]  # type: ignore[method-assign]
    for text in texts:
        stream.append(Event(0, escaped(text)))
    stream.finish(Outcome("stop"))
    return stream


@given(TEXTS, st.integers(0, 8))
@settings(deadline=None)
def test_typed_events_hold_their_type_and_position_in_every_framing(texts: list[str], start: int) -> None:
    stream = typed_stream(texts)
    first = min(1 + start, stream.log.end - 1)
    events = stream.log.slice(first, stream.log.end)
    served = sse.Parser().feed(joined(Sse(stream), events, first))
    datas = [json.loads(event.data) for event in served]
    assert [event.event for event in served] == ["some.delta"] * (len(events) - 1) + ["over"]
    assert [data["sequence_number"] for data in datas[:-1]] == list(range(first, stream.log.end - 1))
    assert "".join(data["delta"] for data in datas[:-1]) == "".join(texts[first - 1 :])
    assert [json.loads(line) for line in joined(Ndjson(stream), events, first).splitlines()] == [*datas, {"done": True}]
    poll = json.loads(polled(stream, events, first))
    assert [(each["event"], each["data"]) for each in poll["events"]] == [
        (event.event, data) for event, data in zip(served, datas, strict=True)
    ]


def test_a_stream_without_a_terminator_is_not_done_before_its_end() -> None:
    stream = typed_stream(["a", "b"])
    framing = Ndjson(stream)
    parts = [joined(framing, stream.log.slice(n, n + 1), n) for n in range(stream.log.end)]
    assert b"".join(parts) == whole(stream, Ndjson(stream))
    assert [b"done" in part for part in parts] == [False] * (stream.log.end - 1) + [True]


# Server-sent events


@given(TEXTS)
@settings(deadline=None)
def test_sse_gives_a_strict_parser_every_event_with_its_position(texts: list[str]) -> None:
    """B01."""
    stream = stream_of(texts)
    events = sse.Parser().feed(whole(stream, Sse(stream)))
    assert [event.id for event in events] == [f"{stream.id}:{n}" for n in range(stream.log.end)]
    assert {event.event for event in events} == {"message"}
    assert events[-1].data == "[DONE]"
    assert content([json.loads(event.data) for event in events[:-1]]) == "".join(texts)


@given(TEXTS)
@settings(deadline=None)
def test_sse_gives_a_client_that_splits_lines_by_unicode_the_same(texts: list[str]) -> None:
    """B02: such clients use str.splitlines."""
    stream = stream_of(texts)
    lines = whole(stream, Sse(stream)).decode().splitlines()
    datas = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert len(datas) == stream.log.end
    assert content([json.loads(data) for data in datas[:-1]]) == "".join(texts)


def test_retry_is_a_line_of_the_first_events_block_and_of_no_other() -> None:
    stream = stream_of(["a"])
    data = whole(stream, Sse(stream))
    assert data.startswith(b"retry: %d\ndata: " % RETRY_MS)
    assert data.partition(b"\n\n")[0].endswith(b"\nid: %b:0" % stream.id.encode())
    assert data.count(b"retry:") == 1
    assert b"retry:" not in joined(Sse(stream), stream.log.slice(1, stream.log.end), 1)
    assert joined(Sse(stream), [], 0) == b""


def test_retry_comes_also_where_the_first_event_is_text() -> None:
    rig = Rig()
    grammar = CompletionGrammar("completions", "model", rig.tokenizer, ["echoed"])
    stream = Stream(rig.table, "", "req", grammar)
    (event,) = grammar.opening()
    (parsed,) = sse.Parser().feed(joined(Sse(stream), [event], 0))
    assert parsed.retry_ms == RETRY_MS
    assert json.loads(parsed.data)["choices"][0]["text"] == "echoed"


def test_every_block_ends_with_one_blank_line_and_has_data() -> None:
    stream = stream_of(AWKWARD)
    blocks = whole(stream, Sse(stream)).split(b"\n\n")
    assert blocks.pop() == b""
    assert all(sum(line.startswith(b"data: ") for line in block.split(b"\n")) == 1 for block in blocks)
    assert all(b"\r" not in block for block in blocks)


def test_events_of_a_named_type_have_it_in_sse_and_in_polls() -> None:
    stream = Rig().start()
    event = Event(-1, b"", b'{"type":"ping"}', "message_start")
    (parsed,) = sse.Parser().feed(joined(Sse(stream), [event], 3))
    assert (parsed.event, parsed.data, parsed.id) == ("message_start", '{"type":"ping"}', f"{stream.id}:3")
    assert json.loads(polled(stream, [event], 3))["events"] == [
        {"n": 3, "event": "message_start", "data": {"type": "ping"}}
    ]


@given(TEXTS, st.data())
@settings(deadline=None)
def test_a_ping_between_any_two_events_means_nothing(texts: list[str], data: st.DataObject) -> None:
    stream = stream_of(texts)
    framing = Sse(stream)
    pieces = [joined(framing, stream.log.slice(n, n + 1), n) for n in range(stream.log.end)]
    at = data.draw(st.integers(0, len(pieces)))
    pinged = [*pieces[:at], framing.ping, framing.ping, *pieces[at:]]
    assert sse.Parser().feed(b"".join(pinged)) == sse.Parser().feed(b"".join(pieces))
    assert b"\n\n" not in framing.ping


# NDJSON


@given(TEXTS)
@settings(deadline=None)
def test_ndjson_is_one_event_a_line(texts: list[str]) -> None:
    stream = stream_of(texts)
    body = whole(stream, Ndjson(stream))
    lines = body.split(b"\n")
    assert lines.pop() == b""
    assert len(lines) == stream.log.end == len(body.decode().splitlines())
    events = [json.loads(line) for line in lines]
    assert events[-1] == {"done": True}
    assert content(events) == "".join(texts)


def test_ndjsons_ping_is_an_empty_line() -> None:
    assert Ndjson.ping == b"\n"


# Plain text


@given(TEXTS)
@settings(deadline=None)
def test_plain_is_the_text_and_resumes_at_every_byte(texts: list[str]) -> None:
    stream = stream_of(texts)
    body = whole(stream, Plain(stream))
    assert body == "".join(texts).encode()
    for skip in range(len(body) + 2):
        framing = Plain(stream, skip)
        pieces = [joined(framing, stream.log.slice(n, n + 1), n) for n in range(stream.log.end)]
        assert b"".join(pieces) == body[skip:]


# Coming back


@pytest.mark.parametrize("kind", [Sse, Ndjson])
@given(texts=TEXTS, data=st.data(), outcome=st.sampled_from(["stop", "length", "cancelled", "error"]))
@settings(deadline=None, max_examples=60)
def test_any_cut_and_any_position_give_the_same_bytes(
    kind: type[Sse] | type[Ndjson], texts: list[str], data: st.DataObject, outcome: str
) -> None:
    """B11: position k goes on with k+1, once each, byte-identical."""
    stream = stream_of(texts, outcome)
    end = stream.log.end
    cuts = sorted({0, end, *data.draw(st.lists(st.integers(0, end), max_size=4))})
    framing = kind(stream)
    pieces = [joined(framing, stream.log.slice(a, b), a) for a, b in itertools.pairwise(cuts)]
    body = b"".join(pieces)
    assert body == whole(stream, kind(stream))
    for position in range(end):
        rest = joined(kind(stream), stream.log.slice(position + 1, end), position + 1)
        assert body.endswith(rest)
        assert joined(kind(stream), stream.log.slice(0, position + 1), 0) + rest == body


# Polls


@given(TEXTS, st.data())
@settings(deadline=None)
def test_a_poll_shows_the_same_events_as_the_stream(texts: list[str], data: st.DataObject) -> None:
    stream = stream_of(texts)
    start = data.draw(st.integers(0, stream.log.end))
    answer = json.loads(polled(stream, stream.log.slice(start, stream.log.end), start))
    streamed = sse.Parser().feed(whole(stream, Sse(stream)))[start:]
    assert [event["n"] for event in answer["events"]] == list(range(start, stream.log.end))
    shown = [e["data"] if isinstance(e["data"], str) else json.dumps(e["data"]) for e in answer["events"]]
    assert shown == [e.data if e.data == "[DONE]" else json.dumps(json.loads(e.data)) for e in streamed]
    assert {event["event"] for event in answer["events"]} <= {"message"}
    assert (answer["stream"], answer["status"]) == (stream.id, "finished")
    assert (answer["next"], answer["outcome"]) == (stream.log.end, "stop")


def test_a_poll_of_a_live_stream_has_no_outcome() -> None:
    rig = Rig()
    client = rig.open()
    answer = json.loads(polled(client.stream, [], 1))
    assert answer == {"stream": client.stream.id, "status": "queued", "events": [], "next": 1, "outcome": None}


# The pieces


@given(st.text(CHARACTERS, max_size=20))
@settings(deadline=None)
def test_unescaped_undoes_escaped(text: str) -> None:
    assert unescaped(escaped(text)) == text.encode()


@pytest.mark.parametrize("kind", [Sse, Ndjson, Plain])
def test_framings_say_what_a_half_close_and_an_error_look_like_in_them(kind: type[Sse | Ndjson | Plain]) -> None:
    framing = kind(stream_of([]))
    assert framing.content_type.endswith(b"; charset=utf-8")
    assert framing.half_close == bool(framing.ping)
    assert framing.lies_at_the_end == (kind is Plain)


@pytest.mark.parametrize("text", AWKWARD)
def test_log_probabilities_carry_text_as_safely(text: str) -> None:
    rig = Rig()
    client = rig.open()
    choice = client.stream.choices[0]
    choice.generated.append(65)
    data = client.stream.grammar.with_logprobs(choice, escaped(text), Logprob(0, -1.0, [65], [-1.0]))
    assert json.loads(data)["choices"][0]["delta"]["content"] == text
    assert len(data.decode().splitlines()) == 1


def test_a_grammar_gives_its_own_ping() -> None:
    stream = stream_of([])
    assert Sse(stream).ping == b": ping\n"
    stream.grammar = MessagesGrammar("model", 1)
    assert Sse(stream).ping == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert Ndjson(stream).ping == b"\n"


def test_done_is_the_terminator_of_the_openai_grammars() -> None:
    stream = stream_of([])
    assert stream.log.slice(stream.log.end - 1, stream.log.end) == [Event(-1, b"", DONE)]
