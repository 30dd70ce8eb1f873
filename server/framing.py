"""How a stream's events look in each framing of an HTTP body. One object for each reader; nothing here does I/O.

What does not change from token to token is rendered once, when the reader is made: a token then costs one formatting
of bytes.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from server.log import Event
from server.outlet import PLAIN_TEXT, POSITION, TEXT, Pieces
from server.stream import Frame, Stream

# EventSource waits three seconds by default before it comes back; a local restart or a proxy's cut is over sooner.
RETRY_MS = 1000
# Positions whose digits are kept, for all streams: most answers are shorter. Later ones are rendered one by one.
DIGITS_KEPT = 4096
_RETRY = b"retry: %d\n" % RETRY_MS
DONE = b"[DONE]"
DONE_LINE = b'{"done":true}'  # the same in NDJSON


_digits = [b"%d" % position for position in range(DIGITS_KEPT)]


def digits(position: int) -> bytes:
    """`position` in decimal."""
    return _digits[position] if position < DIGITS_KEPT else b"%d" % position


class Framing(Protocol):
    """`ping` is what may be written at any time between two events, and means nothing."""

    content_type: bytes
    ping: bytes
    half_close: bool  # whether a client may have closed its sending side and still read
    lies_at_the_end: bool  # whether a whole body and one that an error cut look the same, unless the cut is shown

    def one(self, event: Event, position: int) -> bytes:
        """The event at `position`: a token's, on its way, is rendered here."""
        ...

    def pieces(self) -> Pieces | None:
        """What `one` makes of a token's text, behind position 0 and before the stream's end, for an Outlet. None: that
        differs from token to token."""
        ...


def render(framing: Framing, events: list[Event], first: int) -> list[bytes]:
    """Those of `events` that are shown, the first of which has position `first`."""
    one = framing.one
    return [data for position, event in enumerate(events, first) if (data := one(event, position))]


class Sse:
    """text/event-stream, with `id: <stream>:<position>` on every event.

    The id is the last line of its block: fetch-event-source takes an id for read as soon as its line is there, and
    would lose an event that was cut behind it. Not so for `[DONE]`, which holds nothing to lose: clients without a
    parser look for a body that ends with `data: [DONE]` and a blank line."""

    __slots__ = ("_frames", "_id", "ping")
    content_type = b"text/event-stream; charset=utf-8"
    half_close = True
    lies_at_the_end = False

    def __init__(self, stream: Stream) -> None:
        self.ping = stream.grammar.ping
        self._id = f"\nid: {stream.id}:".encode()
        self._frames = [self._around(frame) for frame in stream.grammar.frames]

    def _around(self, frame: Frame) -> tuple[bytes, bytes, bytes | None]:
        """A frame with SSE's lines around it."""
        before, behind, name, end = frame
        head = _type_line(name) + b"data: " + before
        return (head, behind + self._id, None) if end is None else (head, behind, end + self._id)

    def one(self, event: Event, position: int) -> bytes:
        """See Framing."""
        data = event.data
        number = _digits[position] if position < DIGITS_KEPT else digits(position)
        # Joined, which is one copy of each byte: bytes are formatted in half again the time.
        if data is None:
            before, behind, end = self._frames[event.choice]
            if end is None:
                block = b"".join((before, event.text, behind, number, b"\n\n"))
            else:
                block = b"".join((before, event.text, behind, number, end, number, b"\n\n"))
        elif data == DONE:
            block = b"".join((self._id[1:], number, b"\ndata: [DONE]\n\n"))
        else:
            block = b"".join((_type_line(event.name), b"data: ", data, self._id, number, b"\n\n"))
        return block if position else _RETRY + block

    def pieces(self) -> Pieces | None:
        """See Framing."""
        if len(self._frames) != 1:
            return None
        before, behind, end = self._frames[0]
        if end is None:
            return before, TEXT, behind, POSITION, b"\n\n"
        return before, TEXT, behind, POSITION, end, POSITION, b"\n\n"


def _type_line(name: str) -> bytes:
    return b"event: %b\n" % name.encode() if name else b""


class Ndjson:
    """application/x-ndjson: one event a line, and at the end `{"done":true}`: that is the terminator of grammars that
    have one, and in others a line behind the last event."""

    __slots__ = ("_frames", "_stream")
    content_type = b"application/x-ndjson; charset=utf-8"
    ping = b"\n"
    half_close = True
    lies_at_the_end = False

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._frames = stream.grammar.frames

    def one(self, event: Event, position: int) -> bytes:
        """See Framing."""
        data = event.data
        if data is None:
            before, behind, _, end = self._frames[event.choice]
            if end is None:
                line = b"".join((before, event.text, behind, b"\n"))
            else:
                line = b"".join((before, event.text, behind, b"%d" % position, end, b"\n"))
        elif data == DONE:
            return DONE_LINE + b"\n"
        else:
            line = data + b"\n"
        stream = self._stream
        if stream.outcome is not None and position + 1 == stream.log.end:
            return line + DONE_LINE + b"\n"
        return line

    def pieces(self) -> Pieces | None:
        """See Framing."""
        if len(self._frames) != 1:
            return None
        before, behind, _, end = self._frames[0]
        return (before, TEXT, behind + b"\n") if end is None else (before, TEXT, behind, POSITION, end + b"\n")


class Plain:
    """text/plain: the text alone. `skip_bytes` of it are left out at the start."""

    __slots__ = ("_skip",)
    content_type = b"text/plain; charset=utf-8"
    ping = b""
    half_close = False
    lies_at_the_end = True

    def __init__(self, stream: Stream, skip_bytes: int = 0) -> None:
        self._skip = skip_bytes

    def one(self, event: Event, position: int) -> bytes:
        """See Framing."""
        text = event.text
        data = text if b"\\" not in text else unescaped(text)
        if self._skip:
            skipped = min(self._skip, len(data))
            self._skip -= skipped
            data = data[skipped:]
        return data

    def pieces(self) -> Pieces | None:
        """See Framing."""
        return None if self._skip else (PLAIN_TEXT,)


def polled(stream: Stream, events: list[Event], first: int) -> bytes:
    """The JSON answer to a poll."""
    frames = stream.grammar.frames
    shown: list[bytes] = []
    for position, event in enumerate(events, first):
        data, name = event.data, event.name
        if data is None:
            data, name = frames[event.choice].data(event.text, position), frames[event.choice].name
        elif data == DONE:
            data = b'"[DONE]"'
        shown.append(b'{"n":%d,"event":"%b","data":%b}' % (position, name.encode() or b"message", data))
    end = stream.outcome
    return b'{"stream":"%b","status":"%b","events":[%b],"next":%d,"outcome":%b}' % (
        stream.id.encode(),
        stream.state.encode(),
        b",".join(shown),
        first + len(events),
        b"null" if end is None else msgspec.json.encode(end.kind),
    )


def unescaped(text: bytes) -> bytes:
    """The UTF-8 text whose JSON form `text` is."""
    if b"\\" not in text:
        return text
    return msgspec.json.decode(b'"%b"' % text, type=str).encode()
