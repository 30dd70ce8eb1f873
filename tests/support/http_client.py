"""A client on a raw socket: sends bytes as given, reads answers with h11 as the parser. Every wait has a deadline."""

from __future__ import annotations

import json
import selectors
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import h11

from protocols import sse

# Far above what anything here takes, on a machine that does other things too: only a hang meets it.
DEADLINE_S = 30.0
READ_BYTES = 64 * 1024
SEGMENT_BYTES = 1460  # of TCP on Ethernet

Header = tuple[str, str]


@dataclass
class Answer:
    """One HTTP response, as far as it came. `end`: open, whole (by the framing), cut (the connection ended before the
    body did), reset, or none (the connection ended with no answer)."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)
    raw: bytearray = field(default_factory=bytearray)  # every byte of it, as received; may hold some of the next one
    interim: list[int] = field(default_factory=list)  # statuses of 1xx responses before it
    end: str = "open"

    def header(self, name: str) -> str | None:
        """The one value of a header; None when absent."""
        values = [value.decode("latin-1") for key, value in self.headers if key == name.lower().encode()]
        assert len(values) <= 1, f"{name} came {len(values)} times"
        return values[0] if values else None

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    def error(self, status: int) -> dict[str, Any]:
        """Check that this is a whole refusal in OpenAI's shape with a request id; its error object."""
        assert (self.status, self.end) == (status, "whole"), (self.status, self.end, bytes(self.body))
        assert self.header("x-request-id")
        assert self.header("content-type") == "application/json"
        document = self.json()
        assert document.keys() == {"error"}
        error: dict[str, Any] = document["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str) and error["message"]
        assert isinstance(error["type"], str)
        return error

    def events(self) -> list[sse.ServerEvent]:
        """The body's server-sent events so far."""
        return sse.Parser().feed(bytes(self.body))

    def comments(self) -> list[str]:
        """The comments among them: pings."""
        parser = sse.Parser()
        parser.feed(bytes(self.body))
        return list(parser.comments)

    def chunks(self) -> list[Any]:
        """The JSON of every event before `[DONE]`."""
        return [json.loads(event.data) for event in self.events() if event.data != "[DONE]"]

    def lines(self) -> list[Any]:
        """The body's NDJSON values, empty lines left out."""
        return [json.loads(line) for line in bytes(self.body).split(b"\n") if line]

    def text(self, index: int = 0) -> str:
        """The joined text of one choice of an OpenAI stream (SSE, chat or completions)."""
        return joined(self.chunks(), index)


def joined(chunks: Iterable[Any], index: int = 0) -> str:
    """The text of one choice in chat or completion chunks."""
    parts = [c for chunk in chunks for c in chunk.get("choices", ()) if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in parts)


def connected(address: int | str, *, receive_buffer: int | None = None) -> socket.socket:
    """A connection to a port of 127.0.0.1, or to the Unix socket of this path, with a deadline; nothing stays open when
    it is refused."""
    sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    try:
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            # As on a network. Loopback's 64 KB would be more than the buffer, and a kernel tells nobody of room for
            # less than a segment: a client that reads again would be heard at the next probe, seconds later.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
        sock.settimeout(DEADLINE_S)
        if isinstance(address, str):
            sock.connect(address)
        else:
            sock.connect(("127.0.0.1", address))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


class Client:
    """One connection. `send` takes bytes as they are; `request` writes a proper one."""

    def __init__(self, address: int | str, *, receive_buffer: int | None = None) -> None:
        """See `connected`."""
        self.socket = connected(address, receive_buffer=receive_buffer)
        self._h11 = h11.Connection(h11.CLIENT)
        self._answer: Answer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *pieces: bytes) -> None:
        """Each piece in a packet of its own, as far as that can be had."""
        for piece in pieces:
            self.socket.sendall(piece)

    def request(self, method: str, target: str, body: Any = None, headers: Iterable[Header] = ()) -> None:
        """Send a request; a `body` that isn't bytes goes as JSON."""
        self.send(request_bytes(method, target, body, headers))

    def end_sending(self) -> None:
        """FIN, while this side may still read."""
        self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """FIN, with nobody left to read."""
        self.socket.close()

    def reset(self) -> None:
        """RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self.socket.close()

    def begin(self, method: str = "GET", *, upgrade: bool = False) -> Answer:
        """The head of the next answer; `method` is the request's, which decides whether a body follows."""
        assert self._answer is None or self._answer.end == "whole", "the answer before isn't read to its end"
        if self._answer is not None:
            self._h11.start_next_cycle()
        extra = [("Connection", "upgrade"), ("Upgrade", "websocket")] if upgrade else []
        self._h11.send(h11.Request(method=method, target="/", headers=[("Host", "x"), *extra]))
        self._h11.send(h11.EndOfMessage())
        answer = self._answer = Answer()
        while not answer.status and answer.end == "open":
            self._advance()
        return answer

    def read_until(self, condition: Callable[[Answer], Any]) -> Answer:
        """Read until `condition(answer)`, or the answer's end."""
        answer = self._answer
        assert answer is not None
        while not condition(answer) and answer.end == "open":
            self._advance()
        return answer

    def read_events(self, count: int) -> Answer:
        """Until so many server-sent events are here, or the end."""
        return self.read_until(lambda answer: len(answer.events()) >= count)

    def finish(self) -> Answer:
        """The rest of the answer that `begin` began."""
        return self.read_until(lambda _: False)

    def answer(self, method: str = "GET") -> Answer:
        """The next answer, whole."""
        self.begin(method)
        return self.finish()

    def closed(self) -> str:
        """Read to the end of the connection, which must bring nothing more; "fin" or "reset"."""
        assert self._h11.trailing_data[0] in (b"", None), self._h11.trailing_data
        try:
            rest = self.socket.recv(READ_BYTES)
        except ConnectionResetError:
            return "reset"
        assert rest == b"", f"bytes behind the answer: {rest[:200]!r}"
        return "fin"

    def _advance(self) -> None:
        """Take one event from h11, or bytes for it from the socket."""
        answer = self._answer
        assert answer is not None
        try:
            event = self._h11.next_event()
        except h11.RemoteProtocolError:
            answer.end = "cut" if answer.status else "none"
            if self._h11.trailing_data[0]:
                raise
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
        elif isinstance(event, h11.EndOfMessage):
            answer.end = "whole"
        else:
            answer.end = "none"  # h11 saw the connection end in an orderly way, before an answer

    def _receive(self, answer: Answer) -> None:
        try:
            data = self.socket.recv(READ_BYTES)
        except ConnectionResetError:
            answer.end = "reset"
            return
        answer.raw += data
        self._h11.receive_data(data)

    def take_trailing(self) -> bytes:
        """Bytes that came behind a 101."""
        return self._h11.trailing_data[0]


def request_bytes(method: str, target: str, body: Any = None, headers: Iterable[Header] = ()) -> bytes:
    """A request as a client would write it; a `body` that isn't bytes goes as JSON."""
    fields = [("Host", "localhost"), *headers]
    data = b""
    if body is not None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields += [("Content-Length", str(len(data)))]
        if not isinstance(body, bytes):
            fields += [("Content-Type", "application/json")]
    head = "".join(f"{name}: {value}\r\n" for name, value in fields)
    return f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode() + data


def chat(content: str, **fields: Any) -> dict[str, Any]:
    """The body of a chat request with one user message."""
    return {"messages": [{"role": "user", "content": content}], **fields}


def flood(sock: socket.socket, data: bytes, total: int = 50_000_000, quiet_s: float = 1.0) -> int:
    """Send `data` again and again until the other side takes nothing for a while; how many bytes it took."""
    sock.setblocking(False)
    sent = 0
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_WRITE)
        while sent < total and selector.select(quiet_s):
            sent += sock.send(data[sent % len(data) :])
    assert sent < total, "the server took everything"
    return sent
