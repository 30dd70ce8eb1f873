"""HTTP/2 on one connection to the server under test, by hyper's h2 as the strict reader (RFC 9113, RFC 8441).

A case writes its requests as HTTP/1.1 does, and they go out as a gateway would send them on: each on a stream of its
own, an upgrade to WebSocket as an extended CONNECT whose bytes are DATA. So one case judges both versions. A request
that HTTP/2 can't carry is a fault of the case, which must be marked `http1_only`.

Imports the standard library, h11, h2 and the kit only.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections import deque

import h11
from conformance_kit.rules import not_offered
from conformance_kit.wire import CLOSE_S, Answer, Connection
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    InformationalResponseReceived,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings

Head = list[tuple[bytes, bytes]]
WINDOW_BYTES = 1 << 20  # of a stream, so that no answer of a case waits for it; the connection's is far above all
CONNECTION_WINDOW_BYTES = 1 << 30
CANCEL = 0x8
# RFC 9113 8.2.2: they are about one HTTP/1.1 connection. RFC 8441 5: a tunnel's handshake needs no key.
DROPPED = frozenset({b"connection", b"host", b"keep-alive", b"transfer-encoding", b"upgrade", b"sec-websocket-key"})


class Http2Connection(Connection):
    """See the module. `stream_window`: bytes of an answer that may come before they are read."""

    switched = 200

    def __init__(
        self, connected: socket.socket, *, scheme: str, answer_s: float, stream_window: int = WINDOW_BYTES
    ) -> None:
        super().__init__(connected, answer_s=answer_s)
        self._scheme = scheme.encode()
        self._h2 = H2Connection(
            H2Configuration(
                client_side=True,
                header_encoding=None,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        values = {SettingCodes.ENABLE_PUSH: 0, SettingCodes.INITIAL_WINDOW_SIZE: stream_window}
        self._h2.local_settings = Settings(client=True, initial_values=values)
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(CONNECTION_WINDOW_BYTES)
        self._parser = h11.Connection(h11.SERVER)
        self._head: Head | None = None  # of the request that is being written, until its stream begins
        self._body = bytearray()  # of that request, not yet sent
        self._stream = 0  # the last one that began
        self._tunnel = False  # the last one carries bytes, not a message
        self._taken = 0  # of the tunnel's bytes
        self._asked: deque[int] = deque()  # streams whose answers nobody began to read
        self._answers: dict[int, Answer] = {}
        self._settled = False  # the server's SETTINGS came
        self._over = False
        self._flush()

    # What is sent

    def send(self, data: bytes, *, one_by_one: bool = False) -> None:
        """See Connection. `one_by_one`: the bytes of frames; in a WebSocket a frame for each byte."""
        if self._tunnel:
            self._send_body(data, end=False, size_max=1 if one_by_one else 1 << 24)
            return
        self._parser.receive_data(data)
        while self._step():
            pass
        self._flush(one_by_one=one_by_one)

    def _step(self) -> bool:
        """Take one event of the request's parser; whether there may be more."""
        try:
            event = self._parser.next_event()
        except h11.RemoteProtocolError as error:
            raise AssertionError(f"HTTP/2 can't carry this request ({error}): the case is for HTTP/1.1 only") from None
        if isinstance(event, h11.Request):
            self._head = self._translated(event)
        elif isinstance(event, h11.Data):
            self._body += event.data
        elif isinstance(event, h11.EndOfMessage):
            behind = bytes(self._parser.trailing_data[0])
            self._parser = h11.Connection(h11.SERVER)
            self._emit(end=not self._tunnel)
            if behind:
                self.send(behind)
            return False
        else:
            self._emit(end=False)
            return False
        return True

    def _translated(self, request: h11.Request) -> Head:
        fields = dict(request.headers)
        upgrade = fields.get(b"upgrade", b"").lower() == b"websocket" and b"connection" in fields
        authority = request.target if request.method == b"CONNECT" else fields.get(b"host", b"")
        head = [(b":method", b"CONNECT" if upgrade else request.method), (b":authority", authority)]
        if request.method != b"CONNECT":
            head += [(b":scheme", self._scheme), (b":path", request.target)]
        if upgrade:
            self._tunnel = True
            head.append((b":protocol", b"websocket"))
        return head + [(name, value) for name, value in request.headers if name not in DROPPED]

    def _emit(self, *, end: bool) -> None:
        """Send what is there of the request; `end`: there is no more."""
        head, self._head = self._head, None
        body, self._body = bytes(self._body), bytearray()
        if head is not None:
            self._begin_stream(head, end=end and not body)
        if body or (end and head is None):
            self._send_body(body, end=end)

    def _begin_stream(self, head: Head, *, end: bool) -> None:
        if self._tunnel and not self.tunnels:
            not_offered("SETTINGS_ENABLE_CONNECT_PROTOCOL isn't sent, so there is no WebSocket over HTTP/2 (RFC 8441)")
        self._stream = self._h2.get_next_available_stream_id()
        self._answers[self._stream] = Answer()
        self._asked.append(self._stream)
        self._taken = 0
        with contextlib.suppress(ProtocolError):  # the server is closing the connection: the answer tells
            self._h2.send_headers(self._stream, head, end_stream=end)

    def _send_body(self, data: bytes, *, end: bool, size_max: int = 1 << 24) -> None:
        """As the windows let it. What the server doesn't want any more is dropped."""
        limit = time.monotonic() + self.answer_s
        while True:
            try:
                room = self._h2.local_flow_control_window(self._stream)
            except ProtocolError:
                return
            size = min(len(data), size_max, room, self._h2.max_outbound_frame_size)
            if size or not data:
                with contextlib.suppress(ProtocolError):
                    self._h2.send_data(self._stream, data[:size], end_stream=end and size == len(data))
                self._flush()
                data = data[size:]
                limit = time.monotonic() + self.answer_s
                if not data:
                    return
                continue
            if self._over or self._answers[self._stream].end != "open":
                return
            assert time.monotonic() < limit, f"no window for the rest of a body within {self.answer_s:g} s"
            self._pump(limit - time.monotonic())

    def end_sending(self) -> None:
        """END_STREAM on a WebSocket: a request's own end says so already."""
        assert self._tunnel, "over HTTP/2 a connection has no half-close: the case is for HTTP/1.1 only"
        self._send_body(b"", end=True)

    def reset(self) -> None:
        """RST_STREAM with CANCEL on every stream that hasn't ended."""
        for stream, answer in self._answers.items():
            if answer.end == "open":
                answer.end = "reset"
                with contextlib.suppress(ProtocolError):
                    self._h2.reset_stream(stream, CANCEL)
        self._flush()

    def _flush(self, *, one_by_one: bool = False) -> None:
        data = self._h2.data_to_send()
        self.socket.settimeout(self.answer_s)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, ssl.SSLError):
            for piece in [data[i : i + 1] for i in range(len(data))] if one_by_one else [data]:
                self.socket.sendall(piece)

    # What comes

    @property
    def tunnels(self) -> bool:
        """The server's SETTINGS offer WebSockets (RFC 8441 3)."""
        limit = time.monotonic() + self.answer_s
        while not (self._settled or self._over) and (left := limit - time.monotonic()) > 0:
            self._pump(left)
        return bool(self._h2.remote_settings.enable_connect_protocol)

    def receive(self, seconds: float) -> bytes | None:
        """See Connection. A reset is an end, too."""
        answer = self._answers[self._stream]
        limit = time.monotonic() + seconds
        while len(answer.body) == self._taken:
            left = limit - time.monotonic()
            if answer.end != "open":
                return b""
            if left <= 0:
                return None
            self._pump(left)
        data = bytes(answer.body[self._taken :])
        self._taken = len(answer.body)
        return data

    def ends(self, seconds: float = CLOSE_S) -> str:
        """See Connection. Frames behind a stream's end are a fault that h2 sees."""
        limit = time.monotonic() + seconds
        while self.persistent and (left := limit - time.monotonic()) > 0:
            self._pump(left)
        return "open" if self.persistent else "closed"

    @property
    def persistent(self) -> bool:
        """See Connection."""
        return not self._over

    def _next_answer(self, method: str, upgrade: bool) -> Answer:
        assert self._asked, "the request was not whole"
        return self._answers[self._asked.popleft()]

    def _advance(self, answer: Answer) -> None:
        self._pump(self.socket.gettimeout() or 0.0)

    def _pump(self, seconds: float) -> None:
        """Read once, if something comes in time."""
        self.socket.settimeout(max(seconds, 1e-3))
        try:
            data = self.socket.recv(self.read_bytes)
        except TimeoutError:
            return
        except OSError:
            data = b""
        if not data:
            self._over = True
            for answer in self._answers.values():
                if answer.end == "open":
                    answer.end = "cut" if answer.status else "none"
            return
        try:
            events = self._h2.receive_data(data)
        except ProtocolError as error:
            raise AssertionError(f"the server sent what is not HTTP/2 ({error!r}): {data[:200]!r}") from None
        for event in events:
            self._take(event)
        self._flush()

    def _take(self, event: Event) -> None:
        if isinstance(event, RemoteSettingsChanged):
            self._settled = True
        elif isinstance(event, ConnectionTerminated):
            self._over = event.error_code != 0 or not any(answer.end == "open" for answer in self._answers.values())
        if (stream := getattr(event, "stream_id", None)) not in self._answers:
            return
        answer = self._answers[stream]
        if isinstance(event, InformationalResponseReceived):
            answer.interim.append(_status(event.headers))
        elif isinstance(event, ResponseReceived):
            answer.status = _status(event.headers)
            answer.headers = [(bytes(k), bytes(v)) for k, v in event.headers if not k.startswith(b":")]
        elif isinstance(event, DataReceived):
            answer.body += event.data
            answer.pieces.append((time.monotonic(), event.data))
            answer.chunk_ends.append(len(answer.body))
            self._h2.acknowledge_received_data(event.flow_controlled_length, stream)
        elif isinstance(event, StreamEnded):
            answer.end = "whole"
        elif isinstance(event, StreamReset) and answer.end == "open":
            answer.end = "reset"


def _status(head: Head) -> int:
    return next(int(value) for name, value in head if name == b":status")
