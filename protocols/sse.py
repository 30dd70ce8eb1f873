"""Server-Sent Events, both ways, as WHATWG's HTML standard defines them (section 9.2).

Written: LF line ends, no BOM, one final blank line behind each event, never a block without data. Official clients of
the big APIs take such a block, or a blank line behind a comment, for an empty event and fail; so PING is one line.
Read: any of the three line ends, split anywhere, with a bound.

Imports the standard library only. Writers raise ValueError for what the format can't carry, the Parser only SseError.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

# One event of a server that this program talks to: a chunk with a long tool call or many logprobs stays far below.
EVENT_BYTES_MAX = 16 * 1024 * 1024
# Comments are kept for those who ask what the pings look like; the oldest go first.
COMMENTS_MAX = 256

PING = b": ping\n"

_line_end = re.compile(rb"\r\n|\r|\n")
_unfit = re.compile("[\r\n\x00]")
_retry = re.compile("[0-9]{1,18}")  # beyond that it is no time to wait
_BOM = b"\xef\xbb\xbf"


class SseError(Exception):
    """The stream holds an event above the parser's bound."""


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One dispatched event. `id` is the last one that the stream named, in this block or before; `retry_ms` is set
    when this block holds it."""

    event: str
    data: str
    id: str
    retry_ms: int | None = None


def event(data: bytes | str, *, event: str | None = None, id: str | None = None, retry_ms: int | None = None) -> bytes:
    """One event block; `data` (UTF-8) may hold line breaks of any kind, which readers see as LF.

    ValueError when `event` or `id` holds CR, LF or NUL, or `retry_ms` is negative."""
    head = ""
    if event is not None:
        head = f"event: {_fit(event, 'event')}\n"
    if retry_ms is not None:
        if retry_ms < 0:
            raise ValueError("retry_ms can't be negative")
        head += f"retry: {retry_ms:d}\n"
    payload = data.encode() if isinstance(data, str) else data
    if b"\n" in payload or b"\r" in payload:
        payload = b"\ndata: ".join(_line_end.split(payload))
    # Behind the data: some clients take an id for read once its line is there, and a cut may come in between.
    tail = "" if id is None else f"id: {_fit(id, 'id')}\n"
    return b"%bdata: %b\n%b\n" % (head.encode(), payload, tail.encode())


def comment(text: str) -> bytes:
    """`text` as comment lines, with no blank line behind them."""
    return b"".join(b": %b\n" % line for line in _line_end.split(text.encode()))


def _fit(value: str, what: str) -> str:
    if _unfit.search(value):
        raise ValueError(f"a line break or NUL in the {what} of a server-sent event: {value!r}")
    return value


class Parser:
    """Bytes of an event stream to events, incrementally. An event that the end of the stream cuts is never told."""

    def __init__(self, *, max_event: int = EVENT_BYTES_MAX) -> None:
        self.comments: deque[str] = deque(maxlen=COMMENTS_MAX)
        self.retry_ms: int | None = None  # the stream's last word on the reconnection time
        self.last_event_id = ""  # to reconnect with: of the last block that is complete
        self._id = ""  # of the block that isn't
        self._max_event = max_event
        self._line = bytearray()  # the incomplete line at the end
        self._at_start = True
        self._skip_lf = False  # the last byte was a CR: an LF now is the second half of its line end
        self._begin_block()

    def _begin_block(self) -> None:
        self._data: list[str] = []
        self._event = ""
        self._retry_ms: int | None = None
        self._block_bytes = 0

    def feed(self, data: bytes) -> list[ServerEvent]:
        """The events that `data` completes. SseError when one grows above the bound; the stream is lost then."""
        if self._skip_lf and data:
            self._skip_lf = False
            data = data.removeprefix(b"\n")
        events: list[ServerEvent] = []
        at = 0
        for match in _line_end.finditer(data):
            self._line += data[at : match.start()]
            at = match.end()
            self._check_size()
            line, self._line = bytes(self._line), bytearray()
            self._take_line(line, events)
            self._skip_lf = match[0] == b"\r" and at == len(data)
        self._line += data[at:]
        self._check_size()
        return events

    def _check_size(self) -> None:
        if self._block_bytes + len(self._line) > self._max_event:
            raise SseError(f"an event of more than {self._max_event} bytes")

    def _take_line(self, line: bytes, events: list[ServerEvent]) -> None:
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BOM)
        if not line:
            self._dispatch(events)
            return
        name, colon, raw = line.partition(b":")
        value = raw.removeprefix(b" ").decode("utf-8", "replace")
        if colon and not name:
            self.comments.append(value)
            return
        self._block_bytes += len(line)
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._event = value
        elif name == b"id":
            if "\x00" not in value:
                self._id = value
        elif name == b"retry" and _retry.fullmatch(value):
            self._retry_ms = self.retry_ms = int(value)

    def _dispatch(self, events: list[ServerEvent]) -> None:
        self.last_event_id = self._id
        if self._data:
            data = "\n".join(self._data)
            events.append(ServerEvent(self._event or "message", data, self.last_event_id, self._retry_ms))
        self._begin_block()
