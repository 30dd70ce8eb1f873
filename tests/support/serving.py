"""A real server process, and clients that speak to it over real sockets.

`Server` starts `python -m server` (on the synthetic engine, unless told otherwise), waits for its ready line, and at
the end stops it and looks for tracebacks in what it logged. `Client` sends bytes as given and reads answers with h11
as the parser; `WebSocketClient` reads frames with wsproto. Every wait has a deadline, and fails with what was seen.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import h11
import wsproto.events as ws
from wsproto.connection import Connection as WsConnection
from wsproto.connection import ConnectionState, ConnectionType
from wsproto.extensions import PerMessageDeflate

from protocols import sse

REPOSITORY = Path(__file__).resolve().parents[2]
# Far above what anything here takes, on a machine that does other things too: only a hang meets it.
DEADLINE_S = 30.0
START_S = 60.0
STOP_S = 20.0
READ_BYTES = 64 * 1024
_POLL_S = 0.01

Header = tuple[str, str]


def until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Look until `condition()` is true, and return what it gave; AssertionError with `what` after the deadline."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {deadline_s:g} s: {what}"
        time.sleep(_POLL_S)
    return value


class Server:
    """A server process, usable with `with`. `scripts`: what the synthetic engine plays (see engine/synthetic.py).

    `faults_expected`: its log may hold tracebacks."""

    def __init__(
        self,
        *flags: str,
        scripts: list[dict[str, Any]] | None = None,
        engine: str | None = "synthetic",
        faults_expected: bool = False,
    ) -> None:
        self.flags = flags
        self._engine = engine
        self._scripts = scripts
        self._faults_expected = faults_expected
        self.process: subprocess.Popen[bytes]
        self.port = 0
        self.ready_line = ""
        self._folder = tempfile.TemporaryDirectory(prefix="sluice-test-")
        self._stderr = Path(self._folder.name) / "stderr"

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._folder.cleanup()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.stop()
            if kind is None:
                self.check_log()
        finally:
            self._folder.cleanup()

    def start(self) -> None:
        """Start and wait for the ready line."""
        argv = [sys.executable, "-m", "server", "--port", "0"]
        if self._engine:
            argv += ["--engine", self._engine]
        if self._scripts is not None:
            script = Path(self._folder.name) / "script.json"
            script.write_text(json.dumps({"scripts": self._scripts}), encoding="utf-8")
            argv += ["--synthetic-script", str(script)]
        with self._stderr.open("wb") as log:
            self.process = subprocess.Popen(
                [*argv, *self.flags], cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
            )
        try:
            self.ready_line = self._read_line()
            found = re.search(r":(\d+)$", self.ready_line)
            self.port = int(found[1]) if found else 0
        except BaseException:
            self.kill()
            raise

    def _read_line(self) -> str:
        stdout = self.process.stdout
        assert stdout is not None
        line = b""
        end = time.monotonic() + START_S
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                assert selector.select(max(0.0, end - time.monotonic())), f"no ready line; its log:\n{self.log}"
                piece = os.read(stdout.fileno(), 1024)
                assert piece, f"the server ended before it was ready; its log:\n{self.log}"
                line += piece
        return line.decode().strip()

    def terminate(self) -> None:
        """SIGTERM: begin to drain."""
        self.process.send_signal(signal.SIGTERM)

    def wait(self, deadline_s: float = STOP_S) -> int:
        """The exit code."""
        return self.process.wait(deadline_s)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL when that takes too long, which is an error."""
        if self.process.poll() is None:
            self.terminate()
        try:
            self.wait()
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server did not stop; its log:\n{self.log}") from None
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL; nothing to do when it has ended."""
        self.process.kill()
        self.process.wait(STOP_S)
        if self.process.stdout:
            self.process.stdout.close()

    @property
    def log(self) -> str:
        """What the server and its engine wrote to stderr."""
        return self._stderr.read_text(errors="replace")

    def check_log(self) -> None:
        """No traceback, no warning."""
        log = self.log
        if not self._faults_expected:
            for sign in ("Traceback", "Warning:", "never awaited", "never retrieved"):
                assert sign not in log, log

    @property
    def url(self) -> str:
        """The server's address, without a slash at its end."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine_pids(self) -> list[int]:
        """The child processes."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    @property
    def open_files(self) -> int:
        """Descriptors of the server process."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def resident_bytes(self) -> int:
        """The server process's memory (the engine's not)."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def connect(self, *, receive_buffer: int | None = None) -> Client:
        """A new connection; a small `receive_buffer` (bytes) makes a reader that stalls fill it soon."""
        return Client(self.port, receive_buffer=receive_buffer)

    def ask(self, method: str, target: str, body: Any = None, headers: Iterable[Header] = ()) -> Answer:
        """One whole exchange on a connection of its own."""
        with self.connect() as client:
            client.request(method, target, body, headers)
            return client.answer(method)

    def metrics(self) -> dict[str, float]:
        """Each series with its labels, as /metrics shows it: `sluice_streams{state="running"}` for example."""
        answer = self.ask("GET", "/metrics")
        assert answer.status == 200
        lines = [line for line in answer.body.decode().splitlines() if line and line[0] != "#"]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def wait_metric(self, series: str, value: float) -> None:
        """Until a series has this value."""
        seen: list[float] = []

        def reached() -> bool:
            seen.append(self.metrics()[series])
            return seen[-1] == value

        try:
            until(reached, "")
        except AssertionError:
            raise AssertionError(f"{series} is {seen[-1]:g}, not {value:g}; the log:\n{self.log}") from None


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


class Client:
    """One connection. `send` takes bytes as they are; `request` writes a proper one."""

    def __init__(self, port: int, *, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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


@dataclass(frozen=True)
class Closed:
    """How a WebSocket ended: the close frame's code and reason, or code 1006 when there was none."""

    code: int
    reason: str = ""


class WebSocketRefused(Exception):
    """The server answered the handshake with something else than 101."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"{answer.status} {bytes(answer.body)!r}")
        self.answer = answer


class WebSocketClient:
    """One WebSocket. Raises WebSocketRefused. It answers pings unless `pong` is False."""

    def __init__(
        self,
        server: Server,
        target: str = "/v1/ws",
        *,
        headers: Iterable[Header] = (),
        version: str = "13",
        deflate: bool = False,
        pong: bool = True,
        receive_buffer: int | None = None,
    ) -> None:
        self._client = server.connect(receive_buffer=receive_buffer)
        self.socket = self._client.socket
        self._pong = pong
        self._waiting: list[ws.Event] = []
        self._parts: list[Any] = []  # the fragments so far of a message
        self.pings = 0
        extension = PerMessageDeflate()
        offer = [("Sec-WebSocket-Extensions", f"permessage-deflate; {extension.offer()}")] if deflate else []
        fields = [
            ("Connection", "Upgrade"),
            ("Upgrade", "websocket"),
            ("Sec-WebSocket-Version", version),
            ("Sec-WebSocket-Key", base64.b64encode(os.urandom(16)).decode()),
            *offer,
            *headers,
        ]
        self._client.request("GET", target, None, fields)
        self.handshake = self._client.begin("GET", upgrade=True)
        if self.handshake.status != 101:
            self._client.finish()
            self._client.close()
            raise WebSocketRefused(self.handshake)
        accepted = self.handshake.header("sec-websocket-extensions")
        if accepted is not None:
            extension.finalize(accepted)
        self._frames = WsConnection(ConnectionType.CLIENT, [extension] if accepted is not None else [])
        if trailing := self._client.take_trailing():
            self._frames.receive_data(trailing)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, event: ws.Event) -> None:
        """Any frame that wsproto knows."""
        self.send_bytes(self.frame(event))

    def frame(self, event: ws.Event) -> bytes:
        """Its bytes; frames must be sent in the order in which they were made."""
        return self._frames.send(event)

    def send_bytes(self, data: bytes) -> None:
        """Bytes as they are."""
        self.socket.sendall(data)

    def send_text(self, text: str) -> None:
        """One text message."""
        self.send(ws.TextMessage(text))

    def send_json(self, **message: Any) -> None:
        """One message of the API."""
        self.send_text(json.dumps(message))

    def receive(self) -> str | bytes | Closed:
        """The next whole message, or the end."""
        while True:
            event = self._next()
            if isinstance(event, Closed):
                return event
            if isinstance(event, ws.TextMessage | ws.BytesMessage):
                self._parts.append(event.data)
                if event.message_finished:
                    parts, self._parts = self._parts, []
                    return "".join(parts) if isinstance(event, ws.TextMessage) else b"".join(parts)

    def receive_json(self) -> dict[str, Any]:
        """The next message, which must be text and hold a JSON object."""
        message = self.receive()
        assert isinstance(message, str), message
        value = json.loads(message)
        assert isinstance(value, dict)
        return value

    def receive_until(self, *types: str, id_: str | None = None) -> list[dict[str, Any]]:
        """Messages through the first one of these types (with this id, when given)."""
        messages: list[dict[str, Any]] = []
        while not messages or messages[-1]["type"] not in types or id_ not in (None, messages[-1].get("id")):
            messages.append(self.receive_json())
        return messages

    def close(self, code: int = 1000, reason: str = "") -> Closed:
        """Close, and read to the server's answer."""
        self.send(ws.CloseConnection(code=code, reason=reason))
        return self.closed()

    def closed(self) -> Closed:
        """Read to the end, whatever comes before it."""
        while True:
            event = self.receive()
            if isinstance(event, Closed):
                return event

    def _next(self) -> ws.Event | Closed:
        while not self._waiting:
            try:
                data = self.socket.recv(READ_BYTES)
            except ConnectionResetError:
                return Closed(1006, "reset")
            if not data:
                return Closed(1006, "no close frame")
            self._frames.receive_data(data)
            self._waiting += self._frames.events()
        event = self._waiting.pop(0)
        if isinstance(event, ws.Ping):
            self.pings += 1
            if self._pong:
                self.send(event.response())
        elif isinstance(event, ws.CloseConnection):
            if self._frames.state is ConnectionState.REMOTE_CLOSING:
                with contextlib.suppress(OSError):
                    self.send(event.response())
            return Closed(int(event.code), event.reason or "")
        return event

    def ended(self) -> str:
        """Behind the close frame: how the TCP connection ends, "fin" or "reset"."""
        try:
            rest = self.socket.recv(READ_BYTES)
        except ConnectionResetError:
            return "reset"
        assert rest == b"", rest[:100]
        return "fin"
