"""How a server's verdict on HTTP/2 frames is told from outside: what ended, with which code, or that all goes on.

RFC 9113 section 5.4 leaves a server some choice. A stream error may be treated as a connection error (5.4.2), and a
connection may end without the GOAWAY that should come first (5.4.1). A request that is malformed may be answered before
its stream is reset (8.1.1). Our own server is held to the first of a case's `codes` and `ways`, with the GOAWAY.
"""

from __future__ import annotations

from collections.abc import Callable

from conformance_kit.http2_wire import ACK, END_STREAM, Closed, Code, Kind, Wire, frame
from conformance_kit.target import Target

CONNECTION, STREAM, ANSWER, IGNORED = "connection error", "stream error", "4xx", "ignored"
_CALL = b"all read"

Send = Callable[[Wire], bytes | list[bytes]]


def opened(then: Send) -> Send:
    """An open stream 1, and something behind it."""
    return lambda wire: [wire.headers(1, wire.post, end=False), joined(then(wire))]


def ended(then: Send) -> Send:
    """Stream 1 is closed: its answer was read to the end."""

    def send(wire: Wire) -> bytes:
        wire.send(wire.plain())
        wire.answer(1)
        return joined(then(wire))

    return send


def was_reset(then: Send) -> Send:
    """Stream 1 was open, and the client reset it."""
    return lambda wire: [
        wire.headers(1, wire.post, end=False),
        frame(Kind.RST_STREAM, 0, 1, Code.CANCEL.to_bytes(4, "big")),
        joined(then(wire)),
    ]


def joined(made: bytes | list[bytes]) -> bytes:
    """One or several frames."""
    return made if isinstance(made, bytes) else b"".join(made)


def ends(
    target: Target,
    send: Send,
    codes: tuple[int, ...],
    ways: tuple[str, ...],
    *,
    stream: int = 1,
    opening: bytes | None = None,
) -> None:
    """What `send` makes is an error with one of `codes`, in one of `ways`; the connection goes on if that isn't its
    end."""
    ours = target.settings.ours
    codes, ways = (codes[:1], ways[:1]) if ours else (codes, ways)
    with target.wire(opening=opening) as wire:
        wire.send(joined(send(wire)))
        if ways != (CONNECTION,):
            wire.send(frame(Kind.PING, 0, 0, _CALL))  # not within a header block, where it would be a fault itself
        way, code = _outcome(wire, stream, answered=ANSWER in ways)
        names = sorted(Code(code).name for code in codes)
        shown = f"{way}, {'no code' if code is None else f'code {code:#x}'}"
        assert way in ways, f"expected {names} as {' or '.join(ways)}, not {shown}"
        if way in (CONNECTION, STREAM):
            silent = code is None and way == CONNECTION and not ours
            assert silent or code in codes, f"expected {names}, not {shown}"
        if way != CONNECTION:
            wire.alive()


def _outcome(wire: Wire, stream: int, *, answered: bool) -> tuple[str, int | None]:
    """The first sign of a verdict, and its code. `answered`: behind the answer to the ping there may be one still."""
    try:
        while True:
            seen = wire.read()
            if seen.kind == Kind.RST_STREAM and seen.stream == stream:
                return STREAM, seen.code
            if seen.kind == Kind.GOAWAY and seen.code:
                break
            if seen.kind == Kind.PING and seen.flags & ACK and seen.payload == _CALL and not answered:
                return IGNORED, None
            if answered and seen.stream == stream and seen.flags & END_STREAM:
                status = wire.heads[stream][":status"]
                return (ANSWER if status.startswith("4") else f"an answer with {status}"), None
        while True:
            wire.read()  # to its end: an error that leaves the connection open is none (RFC 9113 5.4.1)
    except Closed:
        return CONNECTION, None if wire.goaway is None else wire.goaway.code


def understood(target: Target, send: Send, *, like_baseline: bool = True) -> None:
    """What `send` makes is answered on stream 1 as a plain request is (or at all), and the connection goes on."""
    status = target.http2_status
    with target.wire() as wire:
        wire.send(joined(send(wire)))
        found = wire.answer(1)[0][":status"]
        assert found == status or not like_baseline, f"answered with {found}; a plain request gets {status}"
        wire.alive()
