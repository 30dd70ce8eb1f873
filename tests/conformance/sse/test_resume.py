"""Coming back by Last-Event-ID: WHATWG's HTML standard, section 9.2.4, and fault B11. For servers whose streams name
ids; what comes back must be the rest, once each."""

from __future__ import annotations

import pytest
from conformance_kit.events import Event, blocks, parse
from conformance_kit.rules import not_offered, rule
from conformance_kit.target import Target
from conformance_kit.wire import Answer

HTML = "WHATWG HTML section "
TOKENS = 12


def stream(target: Target) -> list[Event]:
    """A new stream, read to its end."""
    with target.connect() as connection:
        connection.send(target.stream_request(TOKENS))
        body = bytes(connection.answer("POST").body)
    if not any(block.values("id") for block in blocks(body)):
        not_offered("the stream names no ids, so nobody can come back to it")
    return parse(body)


def resumed(target: Target, last_id: str) -> Answer:
    """The same request with Last-Event-ID, as fetch-event-source sends it."""
    with target.connect() as connection:
        connection.send(target.stream_request(TOKENS, [("Last-Event-ID", last_id)]))
        return connection.answer("POST")


@rule("from position k the stream goes on with k+1, once each", HTML + "9.2.4, B11")
@pytest.mark.parametrize(
    "place", [0, 1, 5, -3, -2], ids=["first", "second", "middle", "third from last", "one before last"]
)
def test_rest(target: Target, place: int) -> None:
    events = stream(target)
    answer = resumed(target, events[place].id)
    assert answer.status == 200, answer
    assert parse(bytes(answer.body)) == events[place % len(events) + 1 :]


@rule("coming back twice from one place gives the same bytes", HTML + "9.2.4, B11")
def test_twice(target: Target) -> None:
    events = stream(target)
    first, second = resumed(target, events[4].id), resumed(target, events[4].id)
    assert bytes(first.body) == bytes(second.body)


@rule("behind the last event there is nothing: no second generation begins", "B04, B11")
def test_past_the_end(target: Target) -> None:
    events = stream(target)
    answer = resumed(target, events[-1].id)
    assert answer.status in (200, 204), answer
    assert parse(bytes(answer.body)) == []


@rule("an id that is not one of the server's is refused: never a silent restart", "B11")
@pytest.mark.parametrize(
    "last_id", ["no-such-stream:3", "AAAAAAAAAAAAAAAAAAAAAAAA:3", "garbage", "0", "../../x:1", ":", "a:b:c"]
)
def test_unknown(target: Target, last_id: str) -> None:
    stream(target)
    answer = resumed(target, last_id)
    assert answer.status in (400, 404, 410), answer


@rule("a position beyond the stream's end brings no event", "B11")
def test_beyond(target: Target) -> None:
    events = stream(target)
    name, colon, position = events[-1].id.rpartition(":")
    if not (colon and position.isdigit()):
        not_offered("its ids don't end in a number")
    answer = resumed(target, f"{name}:{int(position) + 1000}")
    assert parse(bytes(answer.body)) == [], answer


@rule("a stream that was cut goes on where it was, byte for byte", HTML + "9.2.3, B11")
def test_after_a_cut(target: Target) -> None:
    """Cut at the fifth event; the joined text is what an uncut client of the same stream sees."""
    stream(target)
    with target.connect() as connection:
        connection.send(target.stream_request(200))
        connection.begin("POST")
        answer = connection.read_until(lambda answer: len(parse(bytes(answer.body))) >= 5)
        seen = parse(bytes(answer.body))
    rest = parse(bytes(resumed(target, seen[-1].id).body))
    whole = parse(bytes(resumed(target, seen[0].id).body))
    assert seen + rest == [seen[0], *whole]
    assert len({event.id for event in seen + rest}) == len(seen + rest)


@rule("a GET that is past the end gets 204, which stops EventSource", HTML + "9.2.3", "should")
def test_event_source_stops(target: Target) -> None:
    events = stream(target)
    name = events[-1].id.rpartition(":")[0]
    answer = target.ask("GET", f"/v1/streams/{name}", headers=[("Last-Event-ID", events[-1].id)])
    if answer.status == 404:
        not_offered("GET /v1/streams/{id} is not there")
    assert (answer.status, answer.end, bytes(answer.body)) == (204, "whole", b""), answer


@rule("an empty Last-Event-ID means that there is none (EventSource sends none then)", HTML + "9.2.4", "should")
def test_empty(target: Target) -> None:
    stream(target)
    answer = resumed(target, "")
    assert answer.status == 200 and len(parse(bytes(answer.body))) > 3, answer
