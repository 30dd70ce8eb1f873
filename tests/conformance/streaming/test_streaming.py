"""Streams as their readers feel them: when bytes come, and what a reader that leaves, stalls or half-closes does.

Nothing here needs a fast server, only one that sends tokens when it has them: bounds are shares of a stream's own time.
"""

# ruff: noqa: E501 (a row of a table is one line)

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from conformance_kit.events import parse
from conformance_kit.rules import http1_only, not_offered, row, rule
from conformance_kit.target import LONG_PROMPT, Target
from conformance_kit.wire import Answer, Connection

LONG = 120
SUITE = "this suite"


def begun(target: Target, tokens: int = LONG, receive_buffer: int | None = None) -> Connection:
    """A connection on which a stream was asked for, nothing of it read."""
    connection = target.connect(receive_buffer=receive_buffer)
    connection.send(target.stream_request(tokens))
    return connection


def read(connection: Connection) -> Answer:
    with connection:
        answer = connection.answer("POST")
    assert (answer.status, answer.end) == (200, "whole"), answer
    return answer


def text_of(answer: Answer) -> str:
    """The joined text, in OpenAI's chunks."""
    chunks = [json.loads(event.data) for event in parse(bytes(answer.body)) if event.data != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def duration(target: Target) -> float:
    """Seconds that a long stream takes, which other bounds are shares of."""
    start = time.monotonic()
    read(begun(target))
    return max(time.monotonic() - start, 0.05)


@rule("the head of a stream leaves before its last token is made", "B08")
def test_head_comes_early(target: Target) -> None:
    with begun(target) as connection:
        connection.begin("POST")
        head = time.monotonic()
        answer = connection.finish()
        assert answer.pieces[-1][0] > head, "everything came at once"
        assert len(answer.pieces) > 1


@rule("tokens arrive one by one, not in one burst", "B10, " + SUITE)
def test_tokens_come_apart(target: Target) -> None:
    """In many reads, and the first ones in the first half of the stream's time."""
    answer = read(begun(target))
    times = [at for at, _ in answer.pieces]
    assert len(set(times)) >= LONG / 8, f"{len(set(times))} reads"
    half = times[0] + (times[-1] - times[0]) / 2
    early = b"".join(data for at, data in answer.pieces if at <= half)
    share = len(parse(early)) / len(parse(bytes(answer.body)))
    assert 0.2 <= share <= 0.8, f"{share:.0%} of the events came in the first half of the time"


@rule("no read holds more than a few tokens while the reader keeps up", SUITE, "should")
def test_no_bursts(target: Target) -> None:
    sizes = sorted(len(parse(data)) for _, data in read(begun(target)).pieces)
    assert sizes[len(sizes) // 2] <= 3, f"half of the reads hold more than {sizes[len(sizes) // 2]} events"


@rule("each piece of a stream ends where an event ends, so that a reader can act on it", SUITE, "should")
def test_pieces_are_whole_events(target: Target) -> None:
    answer = read(begun(target))
    ends = sum(data.endswith(b"\n\n") for _, data in answer.pieces)
    assert ends >= 0.9 * len(answer.pieces), f"{ends} of {len(answer.pieces)}"


@rule("streams that run together get all their tokens, each", SUITE)
@pytest.mark.parametrize("count", [2, 8, 32])
def test_together(target: Target, count: int) -> None:
    alone = parse(bytes(read(begun(target)).body))
    connections = [begun(target) for _ in range(count)]
    answers = [read(connection) for connection in connections]
    assert {len(parse(bytes(answer.body))) for answer in answers} == {len(alone)}


@rule("at temperature 0 the joined deltas are the text of the answer in one piece", "D01")
@pytest.mark.parametrize("tokens", [1, 10, LONG])
def test_same_text(target: Target, tokens: int) -> None:
    if target.settings.sse_path is not None:
        not_offered("the stream is not OpenAI's (--sse-path)")
    body = target.chat(LONG_PROMPT, max_tokens=tokens)
    whole = target.ask("POST", "/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert text_of(read(begun(target, tokens))) == whole


def slowed(target: Target, count: int, leave: Any) -> tuple[float, float]:
    """Seconds of a long stream before and after `count` clients asked for very long ones and left."""
    before = duration(target)
    leavers = [begun(target, 100_000) for _ in range(count)]
    for connection in leavers:
        connection.begin("POST")
        connection.read_until(lambda answer: parse(bytes(answer.body)))
    for connection in leavers:
        leave(connection)
    return before, duration(target)


LEAVING = [
    row("FIN", lambda connection: connection.close(), text="who closes stops costing: its tokens aren't made any more", source="E01, " + SUITE),
    row("RST", lambda connection: connection.reset(), text="who resets stops costing: its tokens aren't made any more", source="E01, " + SUITE),
]  # fmt: skip


@pytest.mark.parametrize("leave", LEAVING)
def test_leaving(target: Target, leave: Any) -> None:
    """Seen by what others feel: a stream behind 16 left ones is about as fast as before."""
    before, after = slowed(target, 16, leave)
    assert after <= 3 * before + 0.5, f"{before:.2f} s before, {after:.2f} s after"


@rule("a reader that left in mid-stream doesn't harm the stream of another", SUITE)
def test_neighbour_of_a_leaver(target: Target) -> None:
    neighbour = begun(target)
    leaver = begun(target)
    leaver.begin("POST")
    leaver.reset()
    assert len(parse(bytes(read(neighbour).body))) == len(target.events(LONG))


@http1_only
@rule("a client that half-closes behind its request still gets its whole stream", "A13", "should")
def test_half_close(target: Target) -> None:
    connection = begun(target)
    connection.end_sending()
    assert len(parse(bytes(read(connection).body))) == len(target.events(LONG))


@http1_only
@rule("a client that half-closes in mid-stream still gets the rest", "A13", "should")
def test_half_close_later(target: Target) -> None:
    connection = begun(target)
    connection.begin("POST")
    connection.read_until(lambda answer: len(parse(bytes(answer.body))) >= 3)
    connection.end_sending()
    with connection:
        answer = connection.finish()
    assert answer.end == "whole" and len(parse(bytes(answer.body))) == len(target.events(LONG))


@rule("a reader that doesn't read holds back nobody else", "E05, " + SUITE)
def test_slow_neighbour(target: Target) -> None:
    before = duration(target)
    slow = [begun(target, 20_000, receive_buffer=4096) for _ in range(4)]
    after = duration(target)
    for connection in slow:
        connection.reset()
    assert after <= 3 * before + 0.5, f"{before:.2f} s without, {after:.2f} s with readers that don't read"


@rule("a reader that pauses gets everything once it reads on", SUITE)
def test_pausing_reader(target: Target) -> None:
    """It pauses for as long as another stream takes from its start to its end."""
    connection = begun(target, receive_buffer=4096)
    connection.begin("POST")
    read(begun(target))
    with connection:
        answer = connection.finish()
    assert answer.end == "whole" and len(parse(bytes(answer.body))) == len(target.events(LONG))


@rule("a reader that takes a few bytes at a time gets the same bytes", SUITE)
def test_dripping_reader(target: Target) -> None:
    connection = begun(target, 16)
    connection.read_bytes = 7
    assert len(parse(bytes(read(connection).body))) == len(target.events(16))


@http1_only
@rule("HTTP/1.0 gets its tokens one by one, too (nginx asks so by default)", "RFC 9112 section 6.1, B08")
def test_http_1_0(target: Target) -> None:
    with target.connect() as connection:
        connection.send(target.stream_request(LONG, version="1.0"))
        answer = connection.answer("POST")
    assert len(parse(bytes(answer.body))) == len(target.events(LONG))
    assert len({at for at, _ in answer.pieces}) >= LONG / 8


@rule("a request in pieces of one byte starts the same stream", "RFC 9112 section 2.1")
def test_request_in_pieces(target: Target) -> None:
    with target.connect() as connection:
        connection.send(target.stream_request(16), one_by_one=True)
        answer = connection.answer("POST")
    assert len(parse(bytes(answer.body))) == len(target.events(16))


@rule("short requests are answered while streams run", SUITE)
def test_short_requests_meanwhile(target: Target) -> None:
    streams = [begun(target, 400) for _ in range(8)]
    for _ in range(5):
        assert target.stream(1).status == 200
        with target.connect() as connection:
            connection.send(target.stream_request(1))
            assert connection.answer("POST").end == "whole"
    for connection in streams:
        connection.reset()


@rule("clients that come all at once are all served", SUITE)
@pytest.mark.parametrize("count", [50])
def test_crowd(target: Target, count: int) -> None:
    found: list[Answer] = []

    def ask() -> None:
        with target.connect() as connection:
            connection.send(target.stream_request(8))
            found.append(connection.answer("POST"))

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [(answer.status, answer.end) for answer in found] == [(200, "whole")] * count


@pytest.mark.synthetic
@rule("the head leaves before the first token is made", "B08")
def test_head_before_the_first_token(target: Target) -> None:
    """The script's first token takes longer than a ping's interval."""
    from conformance_kit.ours import SLOW_S

    with target.connect() as connection:
        start = time.monotonic()
        body = target.chat("say something late", stream=True)
        connection.send(target.json_request("POST", "/v1/chat/completions", body))
        connection.begin("POST")
        head = time.monotonic() - start
        answer = connection.read_until(lambda answer: b"late" in answer.body)
        token = time.monotonic() - start
    assert head < SLOW_S / 2 < SLOW_S <= token
    assert answer.pieces[0][0] - start < SLOW_S / 2, "the role comes with the head"
