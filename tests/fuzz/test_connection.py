"""The connection as a whole: whatever comes, in whatever order, what its client reads is well-formed (issue 3, 10).

See scene.py for what is checked at every step and at the end.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.ops import FRAMES, LITERAL, REQUESTS, Kind, Op, decode, encode
from tests.fuzz.scene import play

READS, SILENT = 0, 1  # how the client ends
HTTP10_SSE, HTTP10_PLAIN, METRICS_AND_CLOSE, CHAT_WHOLE, RESUME, PLAIN, EMPTY_LINES = 16, 17, 15, 5, 19, 3, 38


def _op(kind: Kind, argument: int = 0, *, quiet: bool = False) -> Op:
    return Op(kind, argument, b"", quiet)


FOUND: dict[str, tuple[int, list[Op]]] = {
    "an answer above high water that closes: draining it is no call for the next request": (
        READS,
        [_op(Kind.CANNED, METRICS_AND_CLOSE), _op(Kind.READ, 200)],
    ),
    "a stalled HTTP/1.0 client must not take the cut for the body's end": (
        SILENT,
        [_op(Kind.CANNED, HTTP10_SSE), _op(Kind.READ, 245), _op(Kind.STEP, 232), _op(Kind.READ, 52)],
    ),
    "a stream that was answered whole, read by a client that names no framing": (
        SILENT,
        [_op(Kind.CANNED, CHAT_WHOLE), _op(Kind.CANNED, RESUME)],
    ),
    "EOF behind empty lines, between the end of an answer and the next request's turn": (
        READS,
        [
            _op(Kind.CANNED, PLAIN),
            _op(Kind.STEP, 166, quiet=True),
            _op(Kind.CANNED, EMPTY_LINES, quiet=True),
            _op(Kind.EOF),
        ],
    ),
    "a drain while an HTTP/2 connection that broke a rule lingers": (
        READS,
        [_op(Kind.HTTP2, 0, quiet=True), _op(Kind.CANNED, 1), _op(Kind.DRAIN)],
    ),
    "an error in the same turn as the head": (
        READS,
        [_op(Kind.CANNED, HTTP10_PLAIN, quiet=True), _op(Kind.END, 2)],
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    setting, ops = FOUND[name]
    play(bytes([setting]) + encode(ops))


def _ops() -> st.SearchStrategy[list[Op]]:
    """Mostly whole requests and frames: what random bytes reach is the parser alone."""
    byte, quiet = st.integers(0, 255), st.booleans()
    data = st.builds(Op, st.just(Kind.DATA), st.just(0), st.binary(max_size=40), quiet)
    requests = st.builds(Op, st.just(Kind.CANNED), st.integers(0, len(REQUESTS) - 1), st.just(b""), quiet)
    frames = st.builds(Op, st.just(Kind.FRAME), st.integers(0, len(FRAMES) - 1), st.just(b""), quiet)
    others = st.sampled_from([kind for kind in Kind if kind not in LITERAL])
    return st.lists(requests | frames | st.builds(Op, others, byte, st.just(b""), quiet) | data, max_size=25)


@settings(max_examples=300)
@given(st.integers(0, 15), _ops())
def test_any_events_in_any_order(setting: int, ops: list[Op]) -> None:
    play(bytes([setting]) + encode(ops))


@given(_ops())
def test_bytes_stand_for_operations(ops: list[Op]) -> None:
    assert decode(encode(ops)) == ops


@given(st.binary(max_size=200))
def test_any_bytes_are_a_scene(data: bytes) -> None:
    play(data)
