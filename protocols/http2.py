"""The server's side of one HTTP/2 connection: bytes to requests on streams, answers on streams to bytes.

h2 is the authority for the states of connection and streams, for HPACK and for flow control. In front of it stands
`http2_guard`, which bounds what a client may cost; `http2_fields` checks requests, so that a malformed one ends its
stream and not the connection; and DATA frames are written by hand, because a token's frame must cost one
concatenation (a test proves them identical to h2's, windows included). GOAWAY is ours too: h2 sends nothing behind
one, and a server that drains must.

Imports h2 and protocols/ only; no sockets, no clock (time comes in as seconds that only grow). `receive` never
raises, whatever comes. What the connection has to send waits in `take_outgoing`, in the order in which it must leave.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from h2 import events as h2_events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.exceptions import H2Error, ProtocolError
from h2.settings import SettingCodes, Settings
from h2.stream import H2Stream
from hpack.exceptions import HPACKError
from hyperframe.exceptions import HyperframeError
from hyperframe.frame import GoAwayFrame, WindowUpdateFrame

from protocols.http1 import Body, BodyEnd, Refusal, Request
from protocols.http2_answers import AnswerEncoder
from protocols.http2_fields import CONNECTION_FIELDS, Field, MalformedMessage, check_trailers, is_sendable, read_request
from protocols.http2_guard import (
    END_STREAM,
    FRAME_BYTES_MAX,
    PREFACE,
    Code,
    Frame,
    FrameGuard,
    Http2Error,
    Kind,
    data_length,
)

# Requests at once on a connection. Envoy and nginx say 128; six connections of HTTP/1.1 are what a browser had before.
STREAMS_MAX = 128
# Bytes of a body that may be under way on a stream before it is asked for more; the protocol's default.
STREAM_WINDOW_BYTES = 65_535
# All stream windows together, so that bodies which are held back can't keep another one from coming to its end.
CONNECTION_WINDOW_BYTES = STREAM_WINDOW_BYTES * (STREAMS_MAX + 1)
# A larger header list than the limit still gets its 431, up to this multiple; then its decoding stops (an HPACK bomb).
HEADER_LIST_BOMB_FACTOR = 2
# Streams that we reset while their client was still sending: its frames under way are dropped without another reset.
RESETS_REMEMBERED = 256
# Ended streams that h2 remembers to tell late frames from wrong ones; its own 65,536 would cost megabytes.
CLOSED_REMEMBERED = 1024
# Frames of one client that are handled in one go: those of some 30 requests, in 3 ms. A megabyte of the smallest would
# take more than a second.
FRAMES_PER_TURN = 64

_STREAM_ID_MAX = 2**31 - 1
_GOAWAY_TEXT_BYTES_MAX = 200
_UNDECODABLE = "the header block can't be decoded"
_data_header = struct.Struct(">BHBBL")


@dataclass(frozen=True, slots=True)
class OnStream:
    """Part of a request, in HTTP/1.1's vocabulary. A Refusal comes in place of the Request and ends reading it."""

    stream: int
    event: Request | Body | BodyEnd | Refusal


@dataclass(frozen=True, slots=True)
class StreamReset:
    """The stream is over, by the client's will or because it broke a rule. Nothing more may be sent on it."""

    stream: int
    code: int


@dataclass(frozen=True, slots=True)
class WindowOpened:
    """`room` was 0 and isn't any more, on this stream; on all of them when `stream` is 0."""

    stream: int


@dataclass(frozen=True, slots=True)
class PingAnswered:
    """The client has seen everything that was sent before the ping."""


@dataclass(frozen=True, slots=True)
class GoAway:
    """The client will send no more requests; those that it has sent are answered."""


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """The connection is over, always the last event: write `take_outgoing()`, then close the transport."""

    code: int
    message: str


Event = OnStream | StreamReset | WindowOpened | PingAnswered | GoAway | ConnectionClosed


class _Authority(H2Connection):
    MAX_CLOSED_STREAMS = CLOSED_REMEMBERED


@dataclass(slots=True)
class _Stream:
    """What is known of a stream beside what h2 knows."""

    h2: H2Stream
    body_left: int | None  # by its content-length
    unacknowledged: int = 0  # bytes of DATA for which no window was given back
    request_ended: bool = False
    answering: bool = False  # the answer's head went out, and its end didn't
    answered: bool = False  # its end went out, before the request's end came


class Http2:
    """One connection. Read with `feed` and `receive`, answer with `head`, `data` and `end`. `max_header`: bytes of a
    request's header list, by RFC 9113's measure (6.5.2), and of its compressed form."""

    def __init__(self, *, max_header: int) -> None:
        self._max_header = max_header
        self._guard = FrameGuard(max_header=max_header)
        self._h2 = _authority(max_header)
        self._streams: dict[int, _Stream] = {}
        self._reset_by_us: dict[int, None] = {}
        self._outgoing = bytearray()
        self._now = 0.0
        self.closed = False

    # What the client sends

    def feed(self, data: bytes) -> None:
        """Bytes came; `receive` looks at them."""
        if not self.closed:
            self._guard.feed(data)

    def receive(self, now: float) -> list[Event]:
        """The events of at most FRAMES_PER_TURN frames that came until `now`; see `behind`."""
        events: list[Event] = []
        self._now = now
        try:
            for _ in range(FRAMES_PER_TURN):
                if self.closed or (frame := self._guard.next_frame(now)) is None:
                    break
                self._take(frame, events)
        except Http2Error as fault:
            self._fail(fault.code, str(fault), events)
        except (H2Error, HyperframeError, HPACKError) as fault:
            self._h2.clear_outbound_data_buffer()  # h2's own GOAWAY, which gives no reason
            code = _code_of(fault)
            # hpack's words hold addresses of our memory.
            self._fail(code, _UNDECODABLE if code == Code.COMPRESSION_ERROR else str(fault), events)
        return events

    @property
    def behind(self) -> bool:
        """Frames wait for another `receive`; until then the client need not be read."""
        return not self.closed and self._guard.has_frame

    @property
    def in_head(self) -> bool:
        """The connection's opening or a request's head has begun, and isn't complete."""
        return self._guard.in_head

    def acknowledge(self, stream: int) -> None:
        """Let the client send as much more of a body as has come."""
        state = self._streams.get(stream)
        if state is not None and state.unacknowledged:
            size, state.unacknowledged = state.unacknowledged, 0
            self._h2.acknowledge_received_data(size, stream)

    def _take(self, frame: Frame, events: list[Event]) -> None:
        """Give a frame to h2, unless it is one that h2 would take wrongly."""
        kind, known = frame.kind, self._streams.get(frame.stream)
        if kind > Kind.CONTINUATION or (kind == Kind.GOAWAY and self._took_goaway(frame, events)):
            return
        if kind == Kind.DATA and self._dropped(frame, known, events):
            return
        if kind == Kind.RST_STREAM:
            self._check_reset(frame, known)
        elif kind == Kind.WINDOW_UPDATE:
            self._take_window_update(frame, known, events)
            return
        elif kind == Kind.HEADERS and known is None and frame.stream <= self._h2.highest_inbound_stream_id:
            self._guard.control(self._now)
        self._feed(frame, events)

    def _feed(self, frame: Frame, events: list[Event]) -> None:
        self._outgoing += self._h2.data_to_send()
        for event in self._h2.receive_data(frame.data):
            self._translate(event, events)

    def _took_goaway(self, frame: Frame, events: list[Event]) -> bool:
        """h2 would send nothing more behind a client's GOAWAY; but the requests before it want their answers."""
        if frame.stream or frame.length < 8:
            return False
        code = int.from_bytes(frame.payload[4:8], "big")
        if code == Code.NO_ERROR:
            events.append(GoAway())
        else:
            self.closed = True
            events.append(ConnectionClosed(code, "the client gave up the connection"))
        return True

    def _dropped(self, frame: Frame, known: _Stream | None, events: list[Event]) -> bool:
        """DATA that goes no further: of a body that isn't as long as its head said, or behind our reset."""
        if known is None:
            self._guard.control(self._now)
            if frame.stream not in self._reset_by_us:
                return False
        elif known.request_ended or known.body_left is None:
            return False
        else:
            known.body_left -= data_length(frame)
            if known.body_left >= 0 and (known.body_left == 0 or not frame.flags & END_STREAM):
                return False
            if known.answered:  # who has its answer may well give up sending
                self.reset(frame.stream, Code.NO_ERROR)
                events.append(StreamReset(frame.stream, Code.NO_ERROR))
            else:
                self._refuse_stream(frame.stream, Code.PROTOCOL_ERROR, events)
        if frame.length:  # it counts in the connection's window all the same
            self._outgoing += self._h2.data_to_send()
            self._outgoing += WindowUpdateFrame(0, window_increment=frame.length).serialize()
        return True

    def _check_reset(self, frame: Frame, known: _Stream | None) -> None:
        """h2 ignores the reset of a stream that never was (RFC 9113 6.4: a connection error)."""
        if known is not None:
            self._guard.reset(self._now)
        elif frame.stream > self._h2.highest_inbound_stream_id:
            raise Http2Error(Code.PROTOCOL_ERROR, "RST_STREAM on an idle stream")
        else:
            self._guard.control(self._now)

    def _take_window_update(self, frame: Frame, known: _Stream | None, events: list[Event]) -> None:
        """Of the windows' news only that one opened matters. An increment of 0 ends its stream (RFC 9113 6.9)."""
        if known is not None and frame.payload == b"\0\0\0\0":
            self._refuse_stream(frame.stream, Code.PROTOCOL_ERROR, events)
            return
        connection_before = self._h2.outbound_flow_control_window
        stream_before = known.h2.outbound_flow_control_window if known is not None else 1
        self._feed(frame, events)
        if not frame.stream and connection_before <= 0 < self._h2.outbound_flow_control_window:
            events.append(WindowOpened(0))
        elif known is not None and stream_before <= 0 < known.h2.outbound_flow_control_window:
            events.append(WindowOpened(frame.stream))

    def _translate(self, event: h2_events.Event, events: list[Event]) -> None:
        if isinstance(event, h2_events.RequestReceived):
            self._begin(event, events)
        elif isinstance(event, h2_events.DataReceived):
            if (state := self._streams.get(event.stream_id)) is not None:
                state.unacknowledged += event.flow_controlled_length
                if event.data and not state.answered:
                    events.append(OnStream(event.stream_id, Body(event.data)))
        elif isinstance(event, h2_events.TrailersReceived):
            self._check_trailers(event, events)
        elif isinstance(event, h2_events.StreamEnded):
            if (state := self._streams.get(event.stream_id)) is not None and not state.request_ended:
                state.request_ended = True
                events.append(OnStream(event.stream_id, BodyEnd()))
                if state.answered:
                    self._forget(event.stream_id)
        elif isinstance(event, h2_events.StreamReset):
            if not event.remote_reset:
                self._guard.reset(self._now)
            if event.stream_id in self._streams:
                self._forget(event.stream_id)
                events.append(StreamReset(event.stream_id, int(event.error_code or 0)))
        elif isinstance(event, h2_events.RemoteSettingsChanged):
            if SettingCodes.INITIAL_WINDOW_SIZE in event.changed_settings:
                events.append(WindowOpened(0))
        elif isinstance(event, h2_events.PingAckReceived):
            events.append(PingAnswered())

    def _begin(self, event: h2_events.RequestReceived, events: list[Event]) -> None:
        stream, ended = event.stream_id, event.stream_ended is not None
        state = self._streams[stream] = _Stream(self._h2.streams[stream], None, request_ended=ended)
        if len(self._streams) > STREAMS_MAX:
            self._refuse_stream(stream, Code.REFUSED_STREAM, events)
            return
        try:
            request = read_request(_plain(event.headers), ended=ended, max_header=self._max_header)
        except MalformedMessage:
            self._refuse_stream(stream, Code.PROTOCOL_ERROR, events)
            return
        if isinstance(request, Request):
            state.body_left = request.content_length
        events.append(OnStream(stream, request))
        if ended:
            events.append(OnStream(stream, BodyEnd()))

    def _check_trailers(self, event: h2_events.TrailersReceived, events: list[Event]) -> None:
        state = self._streams.get(event.stream_id)
        if state is None or state.answered:
            return
        try:
            if state.body_left:
                raise MalformedMessage("the body is shorter than its content-length")
            check_trailers(_plain(event.headers))
        except MalformedMessage:
            self._refuse_stream(event.stream_id, Code.PROTOCOL_ERROR, events)

    def _refuse_stream(self, stream: int, code: Code, events: list[Event]) -> None:
        """Reset a stream for its client's fault."""
        self._guard.reset(self._now)
        self.reset(stream, code)
        events.append(StreamReset(stream, code))

    def _fail(self, code: int, message: str, events: list[Event]) -> None:
        self.close(code, message)
        events.append(ConnectionClosed(code, message))

    # What the server sends

    def take_outgoing(self) -> bytes:
        """What must be written now: settings, acknowledgements, windows, heads, resets."""
        self._outgoing += self._h2.data_to_send()
        data = bytes(self._outgoing)
        self._outgoing.clear()
        return data

    def head(self, stream: int, status: int, headers: Iterable[Field], *, end: bool = False) -> None:
        """The head of an answer, or an interim one (1xx). Connection-specific fields are left out. `end`: it has no
        body. ValueError for headers that can't be sent; KeyError for a stream that is over."""
        state = self._streams[stream]
        fields = [(b":status", b"%d" % status)]
        for name, value in headers:
            if not is_sendable(value):
                raise ValueError(f"a character that is not allowed in the value of {name!r}")
            if (lowered := name.lower()) not in CONNECTION_FIELDS:
                fields.append((lowered, value))
        self._h2.send_headers(stream, fields, end_stream=end)
        if status >= 200:
            state.answering = not end
        if end:
            self._finish(stream, state)

    def room(self, stream: int) -> int:
        """Bytes that `data` takes now: what both windows let through, and at most one frame; 0 for a stream that is
        over or whose answer hasn't begun."""
        state = self._streams.get(stream)
        if state is None or not state.answering or self.closed:
            return 0
        window, together = state.h2.outbound_flow_control_window, self._h2.outbound_flow_control_window
        if together < window:  # by comparisons: each token asks, and three calls of min and max are most of it
            window = together
        if window >= FRAME_BYTES_MAX:
            return FRAME_BYTES_MAX
        return window if window > 0 else 0

    @property
    def window(self) -> int:
        """Bytes that the connection's window lets through on all streams together."""
        return self._h2.outbound_flow_control_window

    def data(self, stream: int, data: bytes | memoryview) -> bytes:
        """The frame of 1 to `room(stream)` bytes of an answer's body, to be written behind `take_outgoing()`.
        ValueError for any other number."""
        frame = self.fit(stream, data)
        if not frame:
            raise ValueError(f"{len(data)} bytes where {self.room(stream)} may be sent")
        return frame

    def fit(self, stream: int, data: bytes | memoryview) -> bytes:
        """The same; empty, and nothing has changed, for any other number."""
        size = len(data)
        if not 0 < size <= self.room(stream):
            return b""
        self._streams[stream].h2.outbound_flow_control_window -= size
        self._h2.outbound_flow_control_window -= size
        self._guard.data_sent += 1
        return b"".join((_data_header.pack(0, size, Kind.DATA, 0, stream), data))

    def end(self, stream: int) -> None:
        """The answer is whole. When the request hasn't come to its end the stream is still `open`: BodyEnd or
        StreamReset may come, and nothing else; or `reset` it without blame (NO_ERROR, RFC 9113 8.1)."""
        state = self._streams[stream]
        self._h2.end_stream(stream)
        self._finish(stream, state)

    def open(self, stream: int) -> bool:
        """Whether either side may still send on it."""
        return stream in self._streams

    def reset(self, stream: int, code: int) -> None:
        """End a stream now, with what it lacks. Nothing to do when it is over."""
        state = self._streams.get(stream)
        if state is None or self.closed:
            return
        if state.h2.open:
            self._h2.reset_stream(stream, code)
        self._reset_by_us[stream] = None
        if len(self._reset_by_us) > RESETS_REMEMBERED:
            del self._reset_by_us[next(iter(self._reset_by_us))]
        self._forget(stream)

    def _finish(self, stream: int, state: _Stream) -> None:
        if state.request_ended:
            self._forget(stream)
        else:
            state.answering, state.answered = False, True

    def _forget(self, stream: int) -> None:
        """The stream is over: what its body took of the connection's window is given back."""
        state = self._streams.pop(stream)
        if state.unacknowledged:
            self._h2.acknowledge_received_data(state.unacknowledged, stream)

    def ping(self) -> None:
        """Ask for a PingAnswered."""
        self._h2.ping(bytes(8))

    def go_away(self) -> None:
        """Tell the client to send further requests elsewhere; those that come all the same are still served."""
        self._outgoing += self._h2.data_to_send()
        self._outgoing += GoAwayFrame(0, last_stream_id=_STREAM_ID_MAX).serialize()

    def close(self, code: int = Code.NO_ERROR, message: str = "") -> None:
        """The last GOAWAY, which names the last stream that was begun."""
        if self.closed:
            return
        self.closed = True
        self._outgoing += self._h2.data_to_send()
        text = message.encode("ascii", "replace")[:_GOAWAY_TEXT_BYTES_MAX]
        last = self._h2.highest_inbound_stream_id
        self._outgoing += GoAwayFrame(0, last_stream_id=last, error_code=code, additional_data=text).serialize()


def _authority(max_header: int) -> H2Connection:
    """h2's side of the connection, with our SETTINGS ready to be sent and the client's preface read."""
    # Cookies are joined by h2's normalisation. All checks are ours: of requests in http2_fields, of answers in `head`.
    config = H2Configuration(
        client_side=False,
        header_encoding=None,
        validate_inbound_headers=False,
        validate_outbound_headers=False,
        normalize_outbound_headers=False,
    )
    connection = _Authority(config)
    connection.encoder = AnswerEncoder()
    told = {
        SettingCodes.MAX_CONCURRENT_STREAMS: STREAMS_MAX,
        SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
        SettingCodes.MAX_FRAME_SIZE: FRAME_BYTES_MAX,
        SettingCodes.MAX_HEADER_LIST_SIZE: max_header,
        SettingCodes.ENABLE_CONNECT_PROTOCOL: 1,
    }
    connection.local_settings = Settings(client=False, initial_values=told)
    connection.decoder.max_header_list_size = max_header * HEADER_LIST_BOMB_FACTOR
    connection.initiate_connection()
    connection.increment_flow_control_window(CONNECTION_WINDOW_BYTES - STREAM_WINDOW_BYTES)
    # One stream too many would end the connection in h2; ours is the count, and it refuses that stream alone.
    connection.local_settings = Settings(
        client=False, initial_values={**told, SettingCodes.MAX_CONCURRENT_STREAMS: _STREAM_ID_MAX}
    )
    connection.receive_data(PREFACE)
    return connection


def _plain(headers: Iterable[tuple[bytes, bytes]]) -> list[Field]:
    return [(bytes(name), bytes(value)) for name, value in headers]


def _code_of(fault: Exception) -> int:
    """The code that RFC 9113 wants for what h2 refused."""
    if isinstance(fault.__cause__, HPACKError) and getattr(fault, "error_code", 0) != Code.ENHANCE_YOUR_CALM:
        return Code.COMPRESSION_ERROR
    return int(fault.error_code) if isinstance(fault, ProtocolError) else Code.PROTOCOL_ERROR
