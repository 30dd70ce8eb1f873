"""protocols.http2_guard: frames cut anywhere, budgets that refill with time, bounds on what is kept and decoded."""

from __future__ import annotations

import itertools

import pytest
from conformance_kit.http2_wire import data, frame, settings, window_update
from hypothesis import given
from hypothesis import strategies as st

from protocols.http2_guard import (
    ACK,
    CONTINUATIONS_MAX,
    CONTROL_BURST,
    CONTROL_PER_S,
    ENCODER_TABLE_BYTES_MAX,
    END_HEADERS,
    FRAME_BYTES_MAX,
    PADDED,
    PREFACE,
    RESETS_BURST,
    RESETS_PER_S,
    SETTINGS_PER_FRAME_MAX,
    WINDOW_UPDATES_BURST,
    WINDOW_UPDATES_PER_DATA,
    Bucket,
    Code,
    Frame,
    FrameGuard,
    Http2Error,
    Kind,
    data_length,
)


def opened(*, max_header: int = 4096) -> FrameGuard:
    """A guard behind the connection's opening."""
    guard = FrameGuard(max_header=max_header)
    guard.feed(PREFACE + settings())
    assert guard.next_frame(0.0) is not None
    return guard


def played(guard: FrameGuard, *sent: bytes) -> tuple[int, Http2Error]:
    """How many of these frames pass, and the error that they end with."""
    guard.feed(b"".join(sent))
    count = 0
    try:
        while guard.next_frame(0.0) is not None:
            count += 1
    except Http2Error as error:
        return count, error
    raise AssertionError(f"{count} frames pass, and no error comes")


def fault(guard: FrameGuard, *sent: bytes) -> Http2Error:
    """The error that these frames end with."""
    return played(guard, *sent)[1]


def frames(guard: FrameGuard, now: float = 0.0) -> list[Frame]:
    return list(itertools.takewhile(lambda f: f is not None, iter(lambda: guard.next_frame(now), None)))


class TestFrames:
    """RFC 9113 section 4.1."""

    @given(
        sent=st.lists(
            st.tuples(st.sampled_from([Kind.DATA, Kind.PING, Kind.RST_STREAM, 0x42]), st.binary(max_size=40)),
            max_size=8,
        ),
        cuts=st.lists(st.integers(1, 30)),
    )
    def test_any_split_gives_the_same_frames(self, sent: list[tuple[int, bytes]], cuts: list[int]) -> None:
        wire = PREFACE + settings() + b"".join(frame(kind, 0, 5, payload) for kind, payload in sent)
        guard = FrameGuard(max_header=4096)
        seen = []
        while wire:
            size = cuts.pop() if cuts else len(wire)
            guard.feed(wire[:size])
            wire = wire[size:]
            seen += frames(guard)
            assert not guard.has_frame
        assert [(f.kind, f.payload) for f in seen] == [(Kind.SETTINGS, b""), *sent]

    def test_the_reserved_bit_is_ignored(self) -> None:
        guard = opened()
        guard.feed(frame(Kind.DATA, 0, 0x8000_0005, b"x"))
        assert frames(guard)[0].stream == 5

    def test_a_large_frame_is_refused_before_its_bytes_are_kept(self) -> None:
        error = fault(opened(), (FRAME_BYTES_MAX + 1).to_bytes(3, "big") + bytes(6))
        assert error.code == Code.FRAME_SIZE_ERROR

    def test_has_frame_tells_of_one_to_refuse_too(self) -> None:
        guard = opened()
        guard.feed(b"\xff\xff\xff" + bytes(6) + bytes(FRAME_BYTES_MAX))
        assert guard.has_frame

    def test_padding_is_no_data(self) -> None:
        assert data_length(Frame(Kind.DATA, PADDED, 1, frame(Kind.DATA, PADDED, 1, b"\x02abc\0\0"))) == 3
        assert data_length(Frame(Kind.DATA, PADDED, 1, frame(Kind.DATA, PADDED, 1, b"\x09abc"))) == 0
        assert data_length(Frame(Kind.DATA, PADDED, 1, frame(Kind.DATA, PADDED, 1))) == 0


class TestOpening:
    """RFC 9113 section 3.4."""

    def test_another_preface(self) -> None:
        assert fault(FrameGuard(max_header=9), b"GET / HTTP/1.1\r\n").code == Code.PROTOCOL_ERROR

    def test_a_preface_byte_by_byte(self) -> None:
        guard = FrameGuard(max_header=9)
        for byte in PREFACE:
            assert guard.next_frame(0.0) is None
            guard.feed(bytes([byte]))
        assert guard.next_frame(0.0) is None
        assert guard.in_head

    def test_in_head_until_settings(self) -> None:
        guard = FrameGuard(max_header=9)
        assert not guard.in_head
        guard.feed(PREFACE[:3])
        assert guard.in_head
        guard.feed(PREFACE[3:] + settings())
        frames(guard)
        assert not guard.in_head

    @pytest.mark.parametrize("first", [frame(Kind.PING, 0, 0, bytes(8)), settings(flags=ACK), window_update(0, 1)])
    def test_settings_come_first(self, first: bytes) -> None:
        assert fault(FrameGuard(max_header=9), PREFACE, first).code == Code.PROTOCOL_ERROR


class TestHeaderBlocks:
    """CVE-2024-27316, and blocks that only cost."""

    def test_too_many_pieces(self) -> None:
        pieces = [frame(Kind.CONTINUATION, 0, 1)] * (CONTINUATIONS_MAX + 1)
        assert fault(opened(), frame(Kind.HEADERS, 0, 1), *pieces).code == Code.ENHANCE_YOUR_CALM

    def test_as_many_as_allowed(self) -> None:
        guard = opened()
        pieces = [frame(Kind.CONTINUATION, 0, 1)] * (CONTINUATIONS_MAX - 1)
        guard.feed(b"".join([frame(Kind.HEADERS, 0, 1), *pieces, frame(Kind.CONTINUATION, END_HEADERS, 1)]))
        assert len(frames(guard)) == CONTINUATIONS_MAX + 1
        assert not guard.in_head

    @pytest.mark.parametrize("first", [101, 51])
    def test_too_large(self, first: int) -> None:
        rest = frame(Kind.CONTINUATION, END_HEADERS, 1, bytes(50))
        error = fault(opened(max_header=100), frame(Kind.HEADERS, 0, 1, bytes(first)), rest)
        assert error.code == Code.ENHANCE_YOUR_CALM

    def test_padding_and_priority_do_not_count(self) -> None:
        guard = opened(max_header=10)
        payload = bytes([200]) + bytes(5) + b"\x88" * 10 + bytes(200)
        guard.feed(frame(Kind.HEADERS, END_HEADERS | PADDED | 0x20, 1, payload))
        assert len(frames(guard)) == 1

    @pytest.mark.parametrize("between", [frame(Kind.DATA, 0, 1), frame(0x42, 0, 1), frame(Kind.CONTINUATION, 0, 3)])
    def test_nothing_comes_between(self, between: bytes) -> None:
        assert fault(opened(), frame(Kind.HEADERS, 0, 1), between).code == Code.PROTOCOL_ERROR

    @pytest.mark.parametrize("block", [b"\x20" * 3, b"\x3f\xe1\x1f" * 3, b"\x20" * 4000])
    def test_table_size_updates(self, block: bytes) -> None:
        assert fault(opened(), frame(Kind.HEADERS, END_HEADERS, 1, block)).code == Code.COMPRESSION_ERROR

    def test_two_updates_are_fine(self) -> None:
        guard = opened()
        guard.feed(frame(Kind.HEADERS, END_HEADERS, 1, b"\x20\x3f\xe1\x1f\x82"))
        assert len(frames(guard)) == 1

    def test_updates_cut_into_pieces(self) -> None:
        pieces = [frame(Kind.CONTINUATION, END_HEADERS if n == 2 else 0, 1, b"\x20") for n in range(3)]
        assert fault(opened(), frame(Kind.HEADERS, 0, 1), *pieces).code == Code.COMPRESSION_ERROR


class TestSettings:
    """RFC 9113 section 6.5."""

    def test_unknown_ones_and_a_large_encoder_table_do_not_reach_h2(self) -> None:
        guard = opened()
        guard.feed(settings((0x99, 7), (1, 1 << 31), (4, 10), (8, 1)))
        (seen,) = frames(guard)
        assert seen.data == settings((1, ENCODER_TABLE_BYTES_MAX), (4, 10), (8, 1))

    def test_too_many_in_a_frame(self) -> None:
        many = settings(*[(0x99, n) for n in range(SETTINGS_PER_FRAME_MAX + 1)])
        assert fault(opened(), many).code == Code.ENHANCE_YOUR_CALM

    def test_an_acknowledgement_with_a_payload(self) -> None:
        assert fault(opened(), settings((1, 1), flags=ACK)).code == Code.FRAME_SIZE_ERROR


EMPTY = {
    "PING": frame(Kind.PING, 0, 0, bytes(8)),
    "SETTINGS": settings(),
    "PRIORITY": frame(Kind.PRIORITY, 0, 1, bytes(5)),
    "an unknown frame": frame(0x42, 0, 0),
    "empty DATA": data(1),
    "DATA of padding only": frame(Kind.DATA, PADDED, 1, b"\x05" + bytes(5)),
    "GOAWAY": frame(Kind.GOAWAY, 0, 0, bytes(8)),
}


class TestFloods:
    """CVE-2019-9512, 9515, 9518 and their kin."""

    @pytest.mark.parametrize("kind", EMPTY)
    def test_frames_that_bring_nothing(self, kind: str) -> None:
        served, error = played(opened(), EMPTY[kind] * (CONTROL_BURST + 5))
        assert error.code == Code.ENHANCE_YOUR_CALM
        assert CONTROL_BURST - 1 <= served <= CONTROL_BURST

    @pytest.mark.parametrize("kind", EMPTY)
    def test_they_are_fine_at_an_honest_pace(self, kind: str) -> None:
        guard = opened()
        for n in range(3 * CONTROL_BURST):
            guard.feed(EMPTY[kind])
            assert guard.next_frame(n / CONTROL_PER_S) is not None

    def test_data_is_no_flood(self) -> None:
        guard = opened()
        guard.feed(data(1, b"x") * 3 * CONTROL_BURST + data(1, end=True))
        assert len(frames(guard)) == 3 * CONTROL_BURST + 1

    def test_window_updates_are_earned_by_data(self) -> None:
        guard = opened()
        for _ in range(WINDOW_UPDATES_BURST):
            guard.feed(window_update(0, 1) * WINDOW_UPDATES_PER_DATA)
            guard.data_sent += 1
            assert len(frames(guard)) == WINDOW_UPDATES_PER_DATA
        assert fault(guard, window_update(0, 1) * 2 * WINDOW_UPDATES_BURST).code == Code.ENHANCE_YOUR_CALM

    def test_resets(self) -> None:
        guard = opened()
        for _ in range(RESETS_BURST):
            guard.reset(0.0)
        with pytest.raises(Http2Error):
            guard.reset(0.0)
        for n in range(RESETS_BURST):
            guard.reset(1.0 + n / RESETS_PER_S)


class TestBucket:
    def test_refills_up_to_its_burst(self) -> None:
        bucket = Bucket(2, 10)
        assert [bucket.take(0.0) for _ in range(3)] == [True, True, False]
        assert [bucket.take(0.1) for _ in range(2)] == [True, False]
        assert [bucket.take(100.0) for _ in range(3)] == [True, True, False]

    def test_earning_is_bounded_too(self) -> None:
        bucket = Bucket(2, 0)
        bucket.earn(100)
        assert [bucket.take(0.0) for _ in range(3)] == [True, True, False]
