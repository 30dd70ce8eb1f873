"""Flow control: RFC 9113 sections 5.2, 6.5.2 and 6.9. A window that is closed holds back a body, and nothing else."""

# ruff: noqa: E501 (a row of a table is one line)

from __future__ import annotations

from typing import Any

import pytest
from conformance_kit.http2_verdicts import CONNECTION, STREAM, Send, ends, opened
from conformance_kit.http2_wire import (
    END_STREAM,
    WINDOW_BYTES_MAX,
    Code,
    Kind,
    Setting,
    Wire,
    frame,
    settings,
    window_update,
)
from conformance_kit.rules import not_offered, row, rule
from conformance_kit.target import Target

RFC = "RFC 9113 section "
PROTOCOL, FLOW = Code.PROTOCOL_ERROR, Code.FLOW_CONTROL_ERROR
FIRST_WINDOW_BYTES = 65_535
SMALL = 3


def bad(name: str, code: int, send: Send, ways: tuple[str, ...], text: str, source: str) -> Any:
    return row(name, (code,), send, ways, text=text, source=RFC + source)


ZERO = "a window is opened by at least one byte"
LARGE = "a window has at most 2^31-1 bytes"
REFUSED = [
    bad("an increment of 0 on the connection", PROTOCOL, lambda w: window_update(0, 0), (CONNECTION,), ZERO, "6.9"),
    bad("an increment of 0 on a stream", PROTOCOL, opened(lambda w: window_update(1, 0)), (STREAM, CONNECTION), ZERO, "6.9"),
    bad("the connection's window", FLOW, lambda w: [window_update(0, WINDOW_BYTES_MAX)] * 2, (CONNECTION,), LARGE, "6.9.1"),
    bad("a stream's window", FLOW, opened(lambda w: window_update(1, WINDOW_BYTES_MAX)), (STREAM, CONNECTION), LARGE, "6.9.1"),
    bad("a stream's window by INITIAL_WINDOW_SIZE", FLOW, opened(lambda w: window_update(1, WINDOW_BYTES_MAX - FIRST_WINDOW_BYTES) + settings((Setting.INITIAL_WINDOW_SIZE, 1 << 20))), (CONNECTION,), LARGE, "6.9.2"),
]  # fmt: skip


@pytest.mark.parametrize(("codes", "send", "ways"), REFUSED)
def test_refused(target: Target, codes: tuple[int, ...], send: Send, ways: tuple[str, ...]) -> None:
    ends(target, send, codes, ways)


def body(wire: Wire) -> bytes:
    """The next DATA frame's payload on stream 1."""
    return wire.wait(lambda seen: seen.kind == Kind.DATA and seen.stream == 1).payload


def with_body(target: Target, size: int) -> None:
    """Not offered where a plain request's answer is too short to tell."""
    with target.wire() as wire:
        wire.send(wire.plain())
        if len(wire.answer(1)[1]) < size:
            not_offered("the answer to a plain request is too short")


@rule("no more is sent than the window lets through", RFC + "6.9.1")
def test_a_window_of_one_byte(target: Target) -> None:
    with_body(target, 2)
    with target.wire() as wire:
        wire.send(settings((Setting.INITIAL_WINDOW_SIZE, 1)), wire.plain())
        assert len(body(wire)) == 1
        wire.alive()


@rule("an answer's head doesn't wait for a window", RFC + "5.2.1")
def test_the_head_comes_by_a_closed_window(target: Target) -> None:
    with target.wire() as wire:
        wire.send(settings((Setting.INITIAL_WINDOW_SIZE, 0)), wire.plain())
        wire.wait(lambda seen: seen.kind == Kind.HEADERS and seen.stream == 1)


@rule("INITIAL_WINDOW_SIZE changes the windows of streams that are there", RFC + "6.9.2")
def test_a_window_that_grows(target: Target) -> None:
    with_body(target, 2)
    with target.wire() as wire:
        wire.send(settings((Setting.INITIAL_WINDOW_SIZE, 0)), wire.plain())
        wire.alive()
        wire.send(settings((Setting.INITIAL_WINDOW_SIZE, 1)))
        assert len(body(wire)) == 1


@rule("INITIAL_WINDOW_SIZE may bring a window below zero, and then nothing is sent until it is above", RFC + "6.9.2")
def test_a_window_below_zero(target: Target) -> None:
    with_body(target, SMALL + 2)
    with target.wire() as wire:
        wire.send(settings((Setting.INITIAL_WINDOW_SIZE, SMALL)), wire.plain())
        assert len(body(wire)) == SMALL
        wire.send(settings((Setting.INITIAL_WINDOW_SIZE, SMALL - 1)), window_update(1, 1))
        assert sent(wire) == b"", "sent into a window of no bytes"
        wire.send(window_update(1, 1))
        assert len(body(wire)) == 1


def sent(wire: Wire) -> bytes:
    """What comes of stream 1's body before the answer to a ping."""
    found = b""
    wire.send(frame(Kind.PING, 0, 0, b"windows?"))
    while (seen := wire.read()).kind != Kind.PING:
        found += seen.payload if seen.kind == Kind.DATA and seen.stream == 1 else b""
    return found


@rule("a window that is opened lets the rest through", RFC + "6.9.1")
def test_an_answer_by_bytes(target: Target) -> None:
    """One byte at a time."""
    with target.wire() as whole:
        whole.send(whole.plain())
        size = min(len(whole.answer(1)[1]), 50)
    with target.wire() as wire:
        wire.send(settings((Setting.INITIAL_WINDOW_SIZE, 0)), wire.plain())
        for _ in range(size):
            wire.send(window_update(1, 1))
            assert len(body(wire)) == 1


@rule("the connection's window holds for all its streams together", RFC + "6.9.1")
def test_the_connection_s_window(service: Target) -> None:
    """Streams' own windows are wide; what comes in all is what the connection's lets through."""
    if why := service.missing("sse"):
        not_offered(why)
    tokens = 200
    size = len(service.stream(tokens).body)
    count = FIRST_WINDOW_BYTES // size + 2
    with service.wire() as wire:
        wire.send(settings((Setting.INITIAL_WINDOW_SIZE, 1 << 20)))
        for n in range(count):
            wire.send(service.http2_stream(wire, 1 + 2 * n, tokens))
        came = 0
        while came < FIRST_WINDOW_BYTES:
            seen = wire.read()
            came += len(seen.payload) if seen.kind == Kind.DATA else 0
        assert came == FIRST_WINDOW_BYTES, came
        wire.alive()
        wire.send(window_update(0, 1 << 28))
        over = 0
        while over < count:
            seen = wire.read()
            over += seen.kind in (Kind.DATA, Kind.HEADERS) and bool(seen.flags & END_STREAM)
