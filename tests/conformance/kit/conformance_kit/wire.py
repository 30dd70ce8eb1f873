"""One connection to the server under test, and HTTP/1.1 on it. HTTP/2 is in http2.py.

Every wait has a deadline and fails with what was seen. Imports the standard library, h11 and the rules only.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import h11
from conformance_kit.rules import not_offered

READ_BYTES = 64 * 1024
# How long a server may take to close, or to show that it goes on, once it has answered.
CLOSE_S = 2.0


@dataclass(slots=True)
class Answer:
    """One response, as far as it came. `end`: open, whole (by its framing), cut, reset, or none (no answer at all)."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)
    raw: bytearray = field(default_factory=bytearray)  # may hold some of the next one
    interim: list[int] = field(default_factory=list)  # statuses of 1xx responses before it
    pieces: list[tuple[float, bytes]] = field(default_factory=list)  # when each read of the body came (monotonic s)
    chunk_ends: list[int] = field(default_factory=list)  # offsets in the body where an HTTP chunk, or DATA, ended
    end: str = "open"

    def header(self, name: str) -> str | None:
        """The value of a header, its lines joined by commas (RFC 9110 5.3); None when absent."""
        values = [value.decode("latin-1") for key, value in self.headers if key == name.lower().encode()]
        return ", ".join(values) if values else None

    def members(self, name: str) -> list[str]:
        """The members of a comma-separated header, lower-cased."""
        return [part.strip().lower() for part in (self.header(name) or "").split(",") if part.strip()]

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    def __str__(self) -> str:
        shown = bytes(self.body[:300])
        return f"{self.status or 'no status'}, end {self.end}, headers {self.headers}, body {shown!r}"


class Connection(ABC):
    """A client's side of one TCP (or TLS) connection, whichever HTTP it speaks. `answer_s`: what a server may take for
    an answer. Requests are sent as the bytes of HTTP/1.1, and their answers read in the order of the requests."""

    switched: int  # the status that opens a WebSocket

    def __init__(self, connected: socket.socket, *, answer_s: float) -> None:
        self.socket = connected
        self.answer_s = answer_s
        self.read_bytes = READ_BYTES  # of each read; fewer make a reader that drips
        self._answer: Answer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """FIN, or RST where unread bytes wait. It may be closed already."""
        self.socket.close()

    @abstractmethod
    def send(self, data: bytes, *, one_by_one: bool = False) -> None:
        """Write `data`. A server that has closed already is no fault here: its answer tells."""

    @abstractmethod
    def end_sending(self) -> None:
        """The client has nothing more to say, and still reads."""

    @abstractmethod
    def reset(self) -> None:
        """The client leaves without a word."""

    @abstractmethod
    def receive(self, seconds: float) -> bytes | None:
        """The next bytes of what is no message: none when it ended, None when nothing came in time."""

    @abstractmethod
    def ends(self, seconds: float = CLOSE_S) -> str:
        """What follows the answers read so far: "closed", "open" (nothing within `seconds`) or "more" (bytes)."""

    @property
    @abstractmethod
    def persistent(self) -> bool:
        """After a whole answer: both sides left the connection open for another request."""

    @abstractmethod
    def _next_answer(self, method: str, upgrade: bool) -> Answer:
        """What the answer to the next request is read into."""

    @abstractmethod
    def _advance(self, answer: Answer) -> None:
        """Read once, within the socket's timeout."""

    def begin(self, method: str = "GET", *, upgrade: bool = False, interim: bool = False) -> Answer:
        """The head of the next answer; `method` is the request's, which decides whether a body follows. `interim`: one
        before it will do, too."""
        if self._answer is not None:
            assert self.persistent, "the server said that it would close, so there is no other answer"
        self._answer = self._next_answer(method, upgrade)
        return self.read_until(lambda answer: answer.status or (interim and answer.interim))

    def read_until(self, condition: Callable[[Answer], Any]) -> Answer:
        """Read until `condition(answer)`, or the answer's end. AssertionError after `answer_s`."""
        answer = self._answer
        assert answer is not None
        seconds = self.answer_s
        limit = time.monotonic() + seconds
        while answer.end == "open" and not condition(answer):
            left = limit - time.monotonic()
            assert left > 0, f"no answer, or no more of it, within {seconds:g} s: {answer}"
            self.socket.settimeout(left)
            self._advance(answer)
        return answer

    def finish(self) -> Answer:
        """The rest of the answer that `begin` began."""
        return self.read_until(lambda _: False)

    def answer(self, method: str = "GET") -> Answer:
        """The next answer, whole."""
        self.begin(method)
        return self.finish()


class Http1Connection(Connection):
    """HTTP/1.1: bytes out as they are, right or wrong, answers in with h11 as the strict reader."""

    switched = 101

    def __init__(self, connected: socket.socket, *, answer_s: float) -> None:
        super().__init__(connected, answer_s=answer_s)
        self._h11 = h11.Connection(h11.CLIENT)
        self._behind: bytes | None = None  # what came in one read with the end of an answer

    def send(self, data: bytes, *, one_by_one: bool = False) -> None:
        """See Connection."""
        pieces = [data[i : i + 1] for i in range(len(data))] if one_by_one else [data]
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for piece in pieces:
                self.socket.sendall(piece)

    def end_sending(self) -> None:
        """FIN, while this side still reads. Not offered over TLS, whose end is one for both directions in practice."""
        if isinstance(self.socket, ssl.SSLSocket):
            not_offered("TLS has no half-close that servers tell from an end")
        self.socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self.socket.close()

    def _next_answer(self, method: str, upgrade: bool) -> Answer:
        if self._answer is not None:
            assert self._answer.end == "whole", f"the answer before is not whole: {self._answer}"
            self._h11.start_next_cycle()
        fields = [("Host", "x")]
        if upgrade:
            fields += [("Connection", "upgrade"), ("Upgrade", "websocket")]
        self._h11.send(h11.Request(method=method, target="/", headers=fields))
        self._h11.send(h11.EndOfMessage())
        return Answer()

    def receive(self, seconds: float) -> bytes | None:
        """See Connection. The first are those that came behind the 101."""
        if self._behind is None:
            self._behind = bytes(self._h11.trailing_data[0])
            if self._behind:
                return self._behind
        self.socket.settimeout(seconds)
        try:
            return self.socket.recv(self.read_bytes)
        except TimeoutError:
            return None
        except OSError:
            return b""

    def ends(self, seconds: float = CLOSE_S) -> str:
        """See Connection."""
        if self._h11.trailing_data[0]:
            return "more"
        self.socket.settimeout(seconds)
        try:
            return "more" if self.socket.recv(READ_BYTES) else "closed"
        except TimeoutError:
            return "open"
        except (ConnectionResetError, ssl.SSLError):
            return "closed"

    @property
    def persistent(self) -> bool:
        """See Connection."""
        return self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE

    def _advance(self, answer: Answer) -> None:
        try:
            event = self._h11.next_event()
        except h11.RemoteProtocolError as error:
            if not self._h11.trailing_data[1]:
                shown = bytes(answer.raw[:500])
                raise AssertionError(f"the server sent what is no HTTP/1.1 response ({error}): {shown!r}") from None
            answer.end = "cut" if answer.status else "none"
            return
        if event is h11.NEED_DATA:
            self._receive(answer)
        elif isinstance(event, h11.InformationalResponse):
            answer.interim.append(event.status_code)
            if event.status_code == 101:
                answer.status, answer.headers, answer.end = 101, list(event.headers), "whole"
        elif isinstance(event, h11.Response):
            answer.status, answer.headers = event.status_code, list(event.headers)
        elif isinstance(event, h11.Data):
            answer.body += event.data
            answer.pieces.append((time.monotonic(), bytes(event.data)))
            if event.chunk_end:
                answer.chunk_ends.append(len(answer.body))
        elif isinstance(event, h11.EndOfMessage):
            answer.end = "whole"
        else:
            answer.end = "none"  # the connection ended in an orderly way, before an answer

    def _receive(self, answer: Answer) -> None:
        try:
            data = self.socket.recv(self.read_bytes)
        except (ConnectionResetError, BrokenPipeError):
            answer.end = "reset"
            return
        except TimeoutError:
            return  # the caller's deadline is over
        answer.raw += data
        self._h11.receive_data(data)


def dial(
    host: str, port: int, *, answer_s: float, tls: ssl.SSLContext | None = None, receive_buffer: int | None = None
) -> socket.socket:
    """A connection, by TLS where a context is given. A small `receive_buffer` (bytes) is full soon."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind, protocol)
    try:
        if receive_buffer is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)  # before connect, so that it counts
        made.settimeout(answer_s)
        made.connect(address)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made if tls is None else tls.wrap_socket(made, server_hostname=host)
    except OSError:
        made.close()
        raise
