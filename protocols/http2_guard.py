"""The guard in front of h2: it cuts the client's bytes into frames, and stops what h2 would take but must not.

h2 knows the protocol's states; it does not know what a client may cost. Here are the bounds on that: the size of a
frame before its bytes are kept, the size of a header block before it is decoded, and budgets for every kind of frame
that costs the server something and brings no request further. A budget refills with time, which comes in as a
parameter, so that a client with an unusual but honest habit never meets it.

Imports the standard library only. Raises Http2Error, which names the code of the GOAWAY, and nothing else.
Rules: RFC 9113 sections 3.4, 4.1 to 4.3, 6.2, 6.5, 6.10, 10.5; RFC 7541 section 4.2; CVE-2023-44487 (rapid reset),
CVE-2019-9512/9514/9515/9518 (ping, reset, settings and empty-frame floods), CVE-2024-27316 (CONTINUATION),
CVE-2025-8671 (resets that the client makes the server send).
"""

from __future__ import annotations

import enum
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER_BYTES = 9
# The protocol's smallest maximum, in both directions: larger frames only make other streams wait behind them.
FRAME_BYTES_MAX = 16_384
# A header block in more pieces than its size needs is no client's; h2 gives up at 64.
CONTINUATIONS_MAX = 32
# There are eight settings; nghttp2 draws the same line. Each unknown one would be remembered by h2.
SETTINGS_PER_FRAME_MAX = 32
# RFC 7541 4.2: an encoder needs two size updates at most. hpack looks at thousands of them one by one.
TABLE_UPDATES_MAX = 2
# Our encoder's table: a client may allow gigabytes, and headers that differ in each answer would fill them.
ENCODER_TABLE_BYTES_MAX = 4096

# Resets of streams that aren't finished, by the client or because of it. A tab that closes cancels all its streams at
# once, so the burst is above the number of streams; each costs us a decoded head and a task that is thrown away.
RESETS_BURST, RESETS_PER_S = 400, 40
# PING, SETTINGS, PRIORITY, unknown frames, DATA without data, frames on streams that are closed. Clients measure
# round trips with pings, and some keep a priority tree: a few for each stream, and few in quiet times.
CONTROL_BURST, CONTROL_PER_S = 1000, 100
# WINDOW_UPDATE: honest ones answer DATA, so each DATA frame that we send earns some.
WINDOW_UPDATES_BURST, WINDOW_UPDATES_PER_S, WINDOW_UPDATES_PER_DATA = 1000, 100, 4


class Code(enum.IntEnum):
    """Error codes of RST_STREAM and GOAWAY (RFC 9113 7)."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    ENHANCE_YOUR_CALM = 0xB


class Kind(enum.IntEnum):
    """Types of frames (RFC 9113 6)."""

    DATA = 0x0
    HEADERS = 0x1
    PRIORITY = 0x2
    RST_STREAM = 0x3
    SETTINGS = 0x4
    PUSH_PROMISE = 0x5
    PING = 0x6
    GOAWAY = 0x7
    WINDOW_UPDATE = 0x8
    CONTINUATION = 0x9


ACK = END_STREAM = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITY = 0x20

_HEADER_TABLE_SIZE = 0x1
_known_settings = frozenset((0x1, 0x2, 0x3, 0x4, 0x5, 0x6, 0x8))


class Http2Error(Exception):
    """The connection can't go on: GOAWAY with `code`."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Frame(NamedTuple):
    """One frame as it came. `kind` is a plain number: a client may send any."""

    kind: int
    flags: int
    stream: int
    data: bytes  # with its header

    @property
    def payload(self) -> bytes:
        """What is behind the frame's header."""
        return self.data[FRAME_HEADER_BYTES:]

    @property
    def length(self) -> int:
        """Bytes of the payload."""
        return len(self.data) - FRAME_HEADER_BYTES


class Bucket:
    """A budget of `burst` that refills by `per_second`."""

    __slots__ = ("_at", "_burst", "_left", "_per_second")

    def __init__(self, burst: int, per_second: int) -> None:
        self._burst = self._left = float(burst)
        self._per_second = per_second
        self._at = 0.0

    def take(self, now: float) -> bool:
        """Spend one. False when there is none left at `now` (seconds that only grow)."""
        self._left = min(self._burst, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def earn(self, amount: int) -> None:
        """Put back what honest behaviour is worth."""
        self._left = min(self._burst, self._left + amount)


class FrameGuard:
    """Bytes in, checked frames out. `max_header`: bytes of one header block as it is on the wire."""

    def __init__(self, *, max_header: int) -> None:
        self._max_header = max_header
        self._buffer = bytearray()
        self._preface = PREFACE
        self._settled = False  # the first SETTINGS frame came
        self._block = bytearray()  # the header block so far, while one is open
        self._block_stream = 0  # 0: none is open
        self._continuations = 0
        self._resets = Bucket(RESETS_BURST, RESETS_PER_S)
        self._control = Bucket(CONTROL_BURST, CONTROL_PER_S)
        self._window_updates = Bucket(WINDOW_UPDATES_BURST, WINDOW_UPDATES_PER_S)
        self.data_sent = 0  # DATA frames that left, which may be answered, since the last WINDOW_UPDATE

    def feed(self, data: bytes) -> None:
        """Bytes came."""
        self._buffer += data

    @property
    def has_frame(self) -> bool:
        """Whether `next_frame` would give one now, or refuse it."""
        buffer = self._buffer
        if self._preface or len(buffer) < FRAME_HEADER_BYTES:
            return bool(self._preface and buffer)
        return len(buffer) >= FRAME_HEADER_BYTES + min(int.from_bytes(buffer[:3], "big"), FRAME_BYTES_MAX)

    @property
    def in_head(self) -> bool:
        """The connection's opening or a header block has begun, and isn't complete."""
        return bool(self._block_stream) or (not self._settled and bool(self._buffer or not self._preface))

    def next_frame(self, now: float) -> Frame | None:
        """The next whole frame; None when more bytes must come. Frames of a header block come one by one."""
        if self._preface and not self._take_preface():
            return None
        buffer = self._buffer
        if len(buffer) < FRAME_HEADER_BYTES:
            return None
        length = int.from_bytes(buffer[:3], "big")
        if length > FRAME_BYTES_MAX:
            raise Http2Error(Code.FRAME_SIZE_ERROR, f"a frame of {length} bytes; {FRAME_BYTES_MAX} is the maximum")
        end = FRAME_HEADER_BYTES + length
        if len(buffer) < end:
            return None
        frame = Frame(buffer[3], buffer[4], int.from_bytes(buffer[5:9], "big") & 0x7FFF_FFFF, bytes(buffer[:end]))
        del buffer[:end]
        return self._checked(frame, now)

    def reset(self, now: float) -> None:
        """A stream that wasn't finished was reset, by the client or through its fault."""
        if not self._resets.take(now):
            raise Http2Error(Code.ENHANCE_YOUR_CALM, "too many streams are begun and reset")

    def control(self, now: float) -> None:
        """A frame came that brings nothing further."""
        if not self._control.take(now):
            raise Http2Error(Code.ENHANCE_YOUR_CALM, "too many frames that bring no request further")

    def _take_preface(self) -> bool:
        """Strip what has come of the client's preface (RFC 9113 3.4); True when it is complete."""
        expected = self._preface
        come = bytes(self._buffer[: len(expected)])
        if come != expected[: len(come)]:
            raise Http2Error(Code.PROTOCOL_ERROR, "this is no HTTP/2 connection preface")
        del self._buffer[: len(come)]
        self._preface = expected[len(come) :]
        return not self._preface

    def _checked(self, frame: Frame, now: float) -> Frame:
        kind = frame.kind
        if not self._settled:
            if kind != Kind.SETTINGS or frame.flags & ACK:
                raise Http2Error(Code.PROTOCOL_ERROR, "the first frame must be SETTINGS")
            self._settled = True
        if self._block_stream or kind in (Kind.HEADERS, Kind.CONTINUATION):
            self._check_block(frame)
        elif kind == Kind.SETTINGS:
            self.control(now)
            return _trimmed_settings(frame)
        elif kind == Kind.WINDOW_UPDATE:
            self._window_updates.earn(WINDOW_UPDATES_PER_DATA * self.data_sent)
            self.data_sent = 0
            if not self._window_updates.take(now):
                raise Http2Error(Code.ENHANCE_YOUR_CALM, "too many WINDOW_UPDATE frames for the data that was sent")
        elif kind == Kind.DATA:
            if not data_length(frame) and not frame.flags & END_STREAM:
                self.control(now)
        elif kind != Kind.RST_STREAM:
            self.control(now)
        return frame

    def _check_block(self, frame: Frame) -> None:
        """Header blocks: contiguous, in few pieces, of bounded size, with few table size updates."""
        if not self._block_stream:
            if frame.kind == Kind.CONTINUATION:
                raise Http2Error(Code.PROTOCOL_ERROR, "CONTINUATION without a header block")
            self._block_stream = frame.stream
            self._continuations = 0
            self._block += _header_fragment(frame)
        else:
            if frame.kind != Kind.CONTINUATION or frame.stream != self._block_stream:
                raise Http2Error(Code.PROTOCOL_ERROR, "a header block was interrupted by another frame")
            self._continuations += 1
            if self._continuations > CONTINUATIONS_MAX:
                raise Http2Error(Code.ENHANCE_YOUR_CALM, f"a header block in more than {CONTINUATIONS_MAX} pieces")
            self._block += frame.payload
        if len(self._block) > self._max_header:
            raise Http2Error(Code.ENHANCE_YOUR_CALM, f"a header block of more than {self._max_header} bytes")
        if frame.flags & END_HEADERS:
            if _table_updates(self._block) > TABLE_UPDATES_MAX:
                raise Http2Error(Code.COMPRESSION_ERROR, f"more than {TABLE_UPDATES_MAX} table size updates")
            self._block.clear()
            self._block_stream = 0


def data_length(frame: Frame) -> int:
    """Bytes of a DATA frame's payload without its padding; 0 where the padding is malformed, which h2 refuses."""
    if not frame.flags & PADDED:
        return frame.length
    return max(0, frame.length - 1 - frame.data[FRAME_HEADER_BYTES]) if frame.length else 0


def _header_fragment(frame: Frame) -> bytes:
    """The part of the header block in a HEADERS frame; a frame that is malformed gives something, h2 refuses it."""
    payload = frame.payload
    start, end = 0, len(payload)
    if frame.flags & PADDED and payload:
        start, end = 1, end - payload[0]
    if frame.flags & PRIORITY:
        start += 5
    return payload[start : max(start, end)]


def _table_updates(block: bytearray) -> int:
    """Dynamic table size updates at the start of a header block (RFC 7541 6.3), counted up to one too many."""
    at = updates = 0
    while at < len(block) and block[at] & 0xE0 == 0x20 and updates <= TABLE_UPDATES_MAX:
        updates += 1
        if block[at] & 0x1F == 0x1F:
            at += 1
            while at < len(block) and block[at] & 0x80:
                at += 1
        at += 1
    return updates


def _trimmed_settings(frame: Frame) -> Frame:
    """The frame without settings that mean nothing to h2, and with an encoder's table that we can afford."""
    payload = frame.payload
    if frame.flags & ACK and payload and not frame.stream:
        raise Http2Error(Code.FRAME_SIZE_ERROR, "an acknowledgement of settings with a payload")
    if frame.flags & ACK or frame.stream or len(payload) % 6:
        return frame  # an acknowledgement, or one that h2 refuses
    if len(payload) > 6 * SETTINGS_PER_FRAME_MAX:
        raise Http2Error(Code.ENHANCE_YOUR_CALM, f"more than {SETTINGS_PER_FRAME_MAX} settings in a frame")
    kept = b""
    for at in range(0, len(payload), 6):
        setting, value = int.from_bytes(payload[at : at + 2], "big"), int.from_bytes(payload[at + 2 : at + 6], "big")
        if setting == _HEADER_TABLE_SIZE:
            value = min(value, ENCODER_TABLE_BYTES_MAX)
        if setting in _known_settings:
            kept += setting.to_bytes(2, "big") + value.to_bytes(4, "big")
    return frame._replace(data=len(kept).to_bytes(3, "big") + frame.data[3:FRAME_HEADER_BYTES] + kept)
