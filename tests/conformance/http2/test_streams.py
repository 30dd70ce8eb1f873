"""The states of streams, their numbers, and how they and the connection end: RFC 9113 sections 5.1, 6.4, 6.8 and 8.1;
and that streams of one connection are independent of each other."""

# ruff: noqa: E501 (a row of a table is one line)

from __future__ import annotations

import time
from typing import Any

import pytest
from conformance_kit.events import parse
from conformance_kit.http2_verdicts import (
    CONNECTION,
    IGNORED,
    STREAM,
    Send,
    ended,
    ends,
    joined,
    opened,
    understood,
    was_reset,
)
from conformance_kit.http2_wire import (
    END_HEADERS,
    END_STREAM,
    Closed,
    Code,
    Kind,
    Setting,
    Wire,
    data,
    frame,
    reset,
    settings,
    window_update,
)
from conformance_kit.rules import not_offered, row, rule
from conformance_kit.target import Target

RFC = "RFC 9113 section "
SUITE = "this suite"
PROTOCOL, CLOSED = Code.PROTOCOL_ERROR, Code.STREAM_CLOSED
STREAMS_MAX = 1000  # a server that lets a client open more isn't judged by opening them
ANY = (CONNECTION, STREAM, IGNORED)


def bad(
    name: str, codes: tuple[int, ...], ways: tuple[str, ...], send: Send, text: str, source: str, level: Any = "must"
) -> Any:
    return row(name, codes, send, ways, text=text, source=RFC + source, level=level)


def continuation(wire: Wire) -> bytes:
    return frame(Kind.CONTINUATION, END_HEADERS, 1, wire.block(wire.get))


def unanswered(then: Send) -> Send:
    """Stream 1 is half-closed: the client ended it, and its window lets no answer through."""
    return lambda wire: [settings((Setting.INITIAL_WINDOW_SIZE, 0)), wire.headers(1), joined(then(wire))]


IDLE = "on an idle stream only HEADERS and PRIORITY may come"
HALF = "on a stream that the client ended no more of it may come: STREAM_CLOSED"
DONE = "on a stream that is closed nothing more may come: STREAM_CLOSED"
ORPHAN = "CONTINUATION follows HEADERS (or CONTINUATION) without END_HEADERS"
NUMBERS = "a client's streams have odd numbers, each higher than the ones before"
REFUSED = [
    bad("idle: DATA", (PROTOCOL,), (CONNECTION,), lambda w: data(1, b"x", end=True), IDLE, "5.1"),
    bad("idle: RST_STREAM", (PROTOCOL,), (CONNECTION,), lambda w: reset(1), IDLE, "5.1 and 6.4"),
    bad("idle: WINDOW_UPDATE", (PROTOCOL,), (CONNECTION,), lambda w: window_update(1, 100), IDLE, "5.1"),
    bad("idle: CONTINUATION", (PROTOCOL,), (CONNECTION,), continuation, ORPHAN, "5.1 and 6.10"),
    bad("half-closed: DATA", (CLOSED,), (STREAM, CONNECTION), unanswered(lambda w: data(1, b"x", end=True)), HALF, "5.1 and 6.1"),
    bad("half-closed: HEADERS", (CLOSED,), (STREAM, CONNECTION), unanswered(lambda w: w.headers(1)), HALF, "5.1"),
    bad("half-closed: CONTINUATION", (PROTOCOL, CLOSED), (CONNECTION,), lambda w: [w.headers(1), continuation(w)], ORPHAN, "6.10"),
    bad("reset: DATA", (CLOSED,), (STREAM, CONNECTION), was_reset(lambda w: data(1, b"x", end=True)), DONE, "5.1 and 6.1"),
    bad("reset: HEADERS", (CLOSED, PROTOCOL), (STREAM, CONNECTION), was_reset(lambda w: w.headers(1)), DONE, "5.1", "should"),
    bad("reset: CONTINUATION", (PROTOCOL, CLOSED), (CONNECTION,), was_reset(continuation), ORPHAN, "6.10"),
    bad("closed: DATA with END_STREAM", (CLOSED,), (STREAM, CONNECTION), ended(lambda w: data(1, b"x", end=True)), DONE, "5.1 and 6.1"),
    bad("closed: DATA", (CLOSED,), (STREAM, CONNECTION), ended(lambda w: data(1, b"x")), DONE, "6.1"),
    bad("closed: HEADERS", (CLOSED, PROTOCOL), (CONNECTION, STREAM), ended(lambda w: w.headers(1)), DONE, "5.1", "should"),
    bad("closed: CONTINUATION", (PROTOCOL, CLOSED), (CONNECTION,), ended(continuation), ORPHAN, "6.10"),
    bad("an even number", (PROTOCOL,), (CONNECTION,), lambda w: w.headers(2), NUMBERS, "5.1.1"),
    bad("a lower number", (PROTOCOL, CLOSED), (CONNECTION,), lambda w: [w.headers(5), w.headers(3)], NUMBERS, "5.1.1"),
    bad("a second HEADERS without END_STREAM", (PROTOCOL,), (CONNECTION, STREAM), opened(lambda w: w.headers(1, [("x-t", "1")], end=False)), "a request is HEADERS, DATA, and trailers that end it", "8.1"),
]  # fmt: skip


@pytest.mark.parametrize(("codes", "send", "ways"), REFUSED)
def test_refused(target: Target, codes: tuple[int, ...], send: Send, ways: tuple[str, ...]) -> None:
    ends(target, send, codes, ways)


@rule("a stream beyond the limit is refused, by REFUSED_STREAM or PROTOCOL_ERROR", RFC + "5.1.2")
def test_more_streams_than_allowed(target: Target) -> None:
    """None can end, since their windows are closed."""
    with target.wire() as wire:
        limit = wire.settings.get(Setting.MAX_CONCURRENT_STREAMS, STREAMS_MAX + 1)
    if limit > STREAMS_MAX:
        not_offered("no limit on streams is told, or one that is too high to reach")
    last = 1 + 2 * limit

    def send(wire: Wire) -> list[bytes]:
        opening = [wire.headers(n, wire.post, end=False) for n in range(1, last, 2)]
        return [settings((Setting.INITIAL_WINDOW_SIZE, 0)), *opening, wire.headers(last, wire.post, end=False)]

    ends(target, send, (Code.REFUSED_STREAM, PROTOCOL), (STREAM, CONNECTION), stream=last)


@rule("WINDOW_UPDATE on a stream that the client ended is no fault", RFC + "5.1")
def test_window_of_a_half_closed_stream(target: Target) -> None:
    understood(target, lambda w: [w.plain(), window_update(1, 9)])


@rule("a client may reset a stream at any time, and the connection goes on", RFC + "6.4")
@pytest.mark.parametrize("whole", [True, False], ids=["behind the request", "within the request"])
@pytest.mark.parametrize("code", [Code.CANCEL, 0xFF], ids=["CANCEL", "a code that nobody knows"])
def test_reset(target: Target, whole: bool, code: int) -> None:
    with target.wire() as wire:
        wire.send(wire.plain() if whole else wire.headers(1, wire.post, end=False), reset(1, code))
        wire.alive()
        wire.send(wire.plain(3))
        assert wire.answer(3)[0][":status"] == target.http2_status


@rule("behind a reset nothing more of the stream is sent", RFC + "5.1")
def test_nothing_behind_a_reset(service: Target) -> None:
    """What was on its way may still come: the answer to a ping bounds that."""
    stream_or_not(service)
    with service.wire() as wire:
        wire.send(service.http2_stream(wire, 1, 2000))
        wire.wait(lambda seen: seen.kind == Kind.DATA)
        wire.send(reset(1))
        wire.alive()
        wire.send(service.http2_stream(wire, 3, 16))
        while not ((seen := wire.read()).stream == 3 and seen.flags & END_STREAM):
            assert seen.stream != 1, seen


@rule("a client's GOAWAY ends the connection once nothing is in flight", RFC + "6.8", "should")
@pytest.mark.parametrize(
    "code", [Code.NO_ERROR, Code.INTERNAL_ERROR, 0xFF], ids=["NO_ERROR", "an error", "a code that nobody knows"]
)
def test_goaway(target: Target, code: int) -> None:
    with target.wire() as wire:
        wire.send(frame(Kind.GOAWAY, 0, 0, bytes(4) + int(code).to_bytes(4, "big")))
        with pytest.raises(Closed):
            wire.wait(lambda seen: seen.kind == Kind.DATA)


@rule("what was asked for before a GOAWAY is answered", RFC + "6.8", "should")
def test_requests_before_a_goaway(target: Target) -> None:
    body = target.body or b"still here"
    with target.wire() as wire:
        wire.send(wire.headers(1, wire.post, end=False), frame(Kind.GOAWAY, 0, 0, bytes(8)), data(1, body, end=True))
        found = wire.answer(1)[0][":status"]
        assert found == target.http2_status or not target.body, found


@rule("an answer before the request's end arrives whole; then the rest may be refused with NO_ERROR", RFC + "8.1")
def test_early_answer_arrives(target: Target) -> None:
    with target.wire() as wire:
        wire.send(wire.headers(1, [*wire.post, ("content-length", str(64 << 20))], end=False), data(1, bytes(16_000)))
        wire.send(wire.plain(3))
        assert wire.answer(3)[0][":status"] == target.http2_status  # one body isn't another's hindrance
        status = wire.heads.get(1, {}).get(":status")
        if status is None:
            not_offered("the server reads the whole body before it answers")
        assert status.startswith("4"), status


# Streams of one connection


def stream_or_not(service: Target) -> None:
    """Not offered where the server has no streams, or the suite doesn't know them."""
    if why := service.missing("sse"):
        not_offered(why)


@rule("streams of one connection get all their tokens, each", RFC + "5, " + SUITE)
@pytest.mark.parametrize("count", [2, 20, 100])
def test_together(service: Target, count: int) -> None:
    stream_or_not(service)
    with service.connect_http2() as connection:
        for _ in range(count):
            connection.send(service.stream_request(16))
        answers = [connection.answer("POST") for _ in range(count)]
    assert {(answer.status, answer.end) for answer in answers} == {(200, "whole")}
    assert {len(parse(bytes(answer.body))) for answer in answers} == {len(service.events(16))}


@rule("streams of one connection come side by side, not one behind the other", RFC + "5, " + SUITE)
def test_side_by_side(service: Target) -> None:
    """Each has begun before any has ended."""
    stream_or_not(service)
    with service.connect_http2() as connection:
        for _ in range(20):
            connection.send(service.stream_request(60))
        answers = [connection.answer("POST") for _ in range(20)]
    begun = [answer.pieces[0][0] for answer in answers]
    ended = [answer.pieces[-1][0] for answer in answers]
    assert max(begun) < min(ended), f"the last began {max(begun) - min(ended):.2f} s behind the end of the first"


@rule("a stream that isn't read holds back no other of its connection", RFC + "5.2, E05, " + SUITE)
def test_a_closed_window_beside_others(service: Target) -> None:
    """It stops where its window ends, and goes on when that is opened."""
    stream_or_not(service)
    with service.wire() as wire:
        wire.send(settings((Setting.INITIAL_WINDOW_SIZE, 100)), window_update(0, 1 << 24))
        sizes = {1: 0, 3: 0, 5: 0}
        for n in sizes:
            wire.send(service.http2_stream(wire, n, 60))
        wire.send(window_update(3, 1 << 20), window_update(5, 1 << 20))
        over: set[int] = set()
        while over != {3, 5}:
            seen = wire.read()
            if seen.kind == Kind.DATA:
                sizes[seen.stream] += len(seen.payload)
            if seen.kind in (Kind.DATA, Kind.HEADERS) and seen.flags & END_STREAM:
                over.add(seen.stream)
        assert sizes[1] == 100 and sizes[3] > 100 and sizes[5] > 100, sizes
        wire.send(window_update(1, 1 << 20))
        wire.answer(1)


@rule("the pace of one stream isn't slowed by hundreds that were reset", RFC + "5.4.2, E01, " + SUITE)
def test_leavers_beside_a_stream(service: Target) -> None:
    stream_or_not(service)
    with service.connect_http2() as connection:
        start = time.monotonic()
        connection.send(service.stream_request(60))
        connection.answer("POST")
        alone = time.monotonic() - start
    with service.connect_http2() as leavers, service.connect_http2() as connection:
        for _ in range(50):
            leavers.send(service.stream_request(10_000))
        leavers.reset()
        start = time.monotonic()
        connection.send(service.stream_request(60))
        answer = connection.answer("POST")
        took = time.monotonic() - start
    assert (answer.status, answer.end) == (200, "whole"), answer
    assert took <= 3 * alone + 0.5, f"{alone:.2f} s alone, {took:.2f} s behind 50 that were reset"
