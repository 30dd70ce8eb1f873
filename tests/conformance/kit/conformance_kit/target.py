"""The server under test, and how to ask it for what each profile needs: plain requests, a stream, a WebSocket."""

from __future__ import annotations

import importlib.util
import json
import socket
import ssl
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any
from urllib.parse import urlsplit

from conformance_kit.events import Event, parse
from conformance_kit.http2_wire import Closed, Fields, Wire, data
from conformance_kit.wire import Answer, Connection, Http1Connection, dial

# What refuses a request as such. Anything else, 404 or 500 included, is an answer to a request that was understood.
REFUSALS = frozenset({400, 408, 411, 413, 414, 417, 421, 426, 431, 501, 505})
ABSENT = frozenset({404, 405, 501})
PROMPT = "What is the capital of France?"
LONG_PROMPT = "Tell me a very long story, in many chapters."  # so that a stream has as many tokens as it may


@dataclass(frozen=True)
class Settings:
    """What the command line says about the server."""

    base_url: str
    api_key: str | None = field(default=None, repr=False)  # in no traceback
    model: str | None = None
    path: str = "/"  # of the requests that the http1 profile sends
    body: str | None = None  # their body; with one they are POSTs
    sse_path: str | None = None  # default: a streamed chat completion
    sse_body: str | None = None
    ws_path: str | None = None
    ws_message: str = '{"conformance": true}'  # a text message that the server answers and goes on, or closes with 1000
    ws_echo: bool = False  # the server sends every message back
    timeout_s: float = 30.0  # seconds that an answer may take, a model's work included; only a hang meets it
    http2: bool = False  # every profile speaks HTTP/2
    ca: str | None = None  # PEM file of certificates to trust; default: the system's
    ours: bool = False  # started by this suite on the synthetic engine, so nothing may be missing


@dataclass(eq=False)
class Target:
    """One server. Its methods build bytes and open connections; nothing here judges."""

    settings: Settings
    name: str = "server"
    _streams: dict[int, Answer] = field(default_factory=dict, repr=False)
    _missing: dict[str, str] = field(default_factory=dict, repr=False)
    _open: list[Connection | Wire] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        url = urlsplit(self.settings.base_url)
        assert url.scheme in ("http", "https") and url.hostname, f"{self.settings.base_url!r} is no http(s) URL"
        self.scheme = url.scheme
        self.tls = url.scheme == "https"
        self.host = url.hostname
        self.port = url.port or (443 if self.tls else 80)
        self.prefix = url.path.rstrip("/").removesuffix("/v1")
        self.authority = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def connect(self, *, receive_buffer: int | None = None) -> Connection:
        """A new connection; `close_all` closes it at the latest. A small `receive_buffer` makes a reader that stalls
        stop the server soon."""
        if self.settings.http2:
            return self.connect_http2(stream_window=receive_buffer)
        connected = self._dial("http/1.1", receive_buffer)
        made = Http1Connection(connected, answer_s=self.settings.timeout_s)
        self._open.append(made)
        return made

    def connect_http2(self, *, stream_window: int | None = None) -> Connection:
        """The same, over HTTP/2 in any case: by ALPN on TLS, by prior knowledge in cleartext."""
        from conformance_kit.http2 import WINDOW_BYTES, Http2Connection

        window = stream_window or WINDOW_BYTES
        made = Http2Connection(
            self._dial("h2"), scheme=self.scheme, answer_s=self.settings.timeout_s, stream_window=window
        )
        self._open.append(made)
        return made

    def wire(self, *, opening: bytes | None = None) -> Wire:
        """A connection of raw HTTP/2 frames, whose requests are plain ones."""
        get, post = self.http2_fields("GET"), self.http2_fields("POST")
        made = Wire(self._dial("h2"), opening=opening, get=get, post=post, body=self.body)
        self._open.append(made)
        return made

    def _dial(self, protocol: str, receive_buffer: int | None = None) -> socket.socket:
        context = self.tls_context(protocol) if self.tls else None
        answer_s = self.settings.timeout_s
        return dial(self.host, self.port, answer_s=answer_s, tls=context, receive_buffer=receive_buffer)

    @cache  # noqa: B019 (there are few targets, and they live as long as the run)
    def tls_context(self, protocol: str) -> ssl.SSLContext:
        """Trusts what it should, and offers `protocol` by ALPN."""
        context = ssl.create_default_context(cafile=self.settings.ca)
        context.set_alpn_protocols([protocol])
        return context

    def close_all(self) -> None:
        """At a case's end, whatever it left."""
        for connection in self._open:
            connection.close()
        self._open.clear()

    # Plain requests

    @property
    def path(self) -> str:
        """Of plain requests."""
        return self.prefix + self.settings.path

    @property
    def method(self) -> str:
        """Of plain requests."""
        return "GET" if self.settings.body is None else "POST"

    @property
    def body(self) -> bytes:
        """Of plain requests."""
        return (self.settings.body or "").encode()

    def request(
        self,
        line: str | None = None,
        *fields: str,
        host: str | None = "",
        body: bytes | None = None,
        length: bool = True,
    ) -> bytes:
        """A plain request. In `line` PATH and METHOD stand for the target's own. `host` None leaves the field out, ""
        is the right one; `length` False leaves Content-Length out, for framing of the caller's own."""
        line = line or "METHOD PATH HTTP/1.1"
        lines = [self.filled(line.replace("METHOD", self.method).replace("PATH", self.path))]
        if host is not None:
            lines.append(f"Host: {host or self.authority}")
        lines += [self.filled(field) for field in fields]
        lines += [f"{name}: {value}" for name, value in self.auth]
        data = self.body if body is None else body
        if self.settings.body is not None:
            lines.append("Content-Type: application/json")
        if length and (data or self.settings.body is not None):
            lines.append(f"Content-Length: {len(data)}")
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + data

    def filled(self, text: str) -> str:
        """With this server's names in place of SCHEME and AUTHORITY."""
        return text.replace("SCHEME", self.scheme).replace("AUTHORITY", self.authority)

    def http2_fields(self, method: str) -> Fields:
        """Of a plain request with this method."""
        head = [(":method", method), (":scheme", self.scheme), (":authority", self.authority), (":path", self.path)]
        kind = [("content-type", "application/json")] if method == "POST" and self.settings.body is not None else []
        return [*head, *((name.lower(), value) for name, value in self.auth), *kind]

    @property
    def auth(self) -> list[tuple[str, str]]:
        """The header that shows the key."""
        key = self.settings.api_key
        return [("Authorization", f"Bearer {key}")] if key else []

    @cached_property
    def baseline(self) -> Answer:
        """The answer to a plain request, to which others are compared."""
        with self.connect() as connection:
            connection.send(self.request())
            return connection.answer(self.method)

    @cached_property
    def http2_status(self) -> str:
        """The status of a plain request over HTTP/2."""
        with self.wire() as wire:
            wire.send(wire.plain())
            return wire.answer(1)[0][":status"]

    # JSON routes

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: list[tuple[str, str]] | None = None,
        *,
        auth: bool = True,
    ) -> Answer:
        """One whole exchange on a connection of its own; a `body` that isn't bytes goes as JSON."""
        with self.connect() as connection:
            connection.send(self.json_request(method, path, body, headers, auth=auth))
            return connection.answer(method)

    def json_request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: list[tuple[str, str]] | None = None,
        *,
        auth: bool = True,
        version: str = "1.1",
    ) -> bytes:
        """A request as a client of the API writes it."""
        fields = [("Host", self.authority), *(self.auth if auth else []), *(headers or [])]
        data = b""
        if body is not None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            names = {name.lower() for name, _ in fields}
            fields.append(("Content-Length", str(len(data))))
            if "content-type" not in names:
                fields.append(("Content-Type", "application/json"))
        head = "".join(f"{name}: {value}\r\n" for name, value in fields)
        return f"{method} {self.prefix}{path} HTTP/{version}\r\n{head}\r\n".encode() + data

    @cached_property
    def model(self) -> str:
        """The model to ask for: the one given, or the first that the server lists."""
        if self.settings.model:
            return self.settings.model
        answer = self.ask("GET", "/v1/models")
        if answer.status != 200:
            return "default"
        return str(answer.json()["data"][0]["id"])

    def chat(self, content: Any = PROMPT, **fields: Any) -> dict[str, Any]:
        """The body of a chat request with one user message, short and greedy unless told otherwise."""
        body = {"model": self.model, "messages": [{"role": "user", "content": content}], "max_tokens": 8}
        return {**body, "temperature": 0, **fields}

    def completion(self, prompt: Any = "Once upon a time", **fields: Any) -> dict[str, Any]:
        """The same for a text completion."""
        return {"model": self.model, "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}

    # Streams

    def stream_request(
        self, tokens: int = 16, headers: list[tuple[str, str]] | None = None, version: str = "1.1"
    ) -> bytes:
        """The request of a stream with about so many tokens."""
        return self.json_request("POST", self.stream_path, self.stream_body(tokens), headers, version=version)

    def http2_stream(self, wire: Wire, number: int, tokens: int) -> bytes:
        """The frames that ask for a stream with about so many tokens."""
        path = self.prefix + self.stream_path
        fields = [(k, path if k == ":path" else v) for k, v in self.http2_fields("POST") if k != "content-type"]
        head = wire.headers(number, [*fields, ("content-type", "application/json")], end=False)
        return head + data(number, json.dumps(self.stream_body(tokens)).encode(), end=True)

    @property
    def stream_path(self) -> str:
        """Where streams are asked for."""
        return self.settings.sse_path or "/v1/chat/completions"

    def stream_body(self, tokens: int) -> dict[str, Any]:
        """Their body."""
        if self.settings.sse_path is None:
            return self.chat(LONG_PROMPT, stream=True, max_tokens=tokens)
        return {**json.loads(self.settings.sse_body or "{}"), "max_tokens": tokens}

    def stream(self, tokens: int = 16) -> Answer:
        """A whole stream; the same one for all cases that only look at it."""
        if tokens not in self._streams:
            with self.connect() as connection:
                connection.send(self.stream_request(tokens))
                self._streams[tokens] = connection.answer("POST")
        return self._streams[tokens]

    def events(self, tokens: int = 16) -> list[Event]:
        """Its events."""
        return parse(bytes(self.stream(tokens).body))

    @property
    def ws_path(self) -> str:
        """Where WebSockets are opened."""
        return self.prefix + (self.settings.ws_path or "/v1/ws")

    # What the server has

    def missing(self, profile: str) -> str:
        """Why a profile can't be judged; "" when it can. A server that fails in other ways has the profile, and fails
        its cases."""
        if profile not in self._missing:
            self._missing[profile] = self._look_for(profile)
        return self._missing[profile]

    def _look_for(self, profile: str) -> str:
        if (profile == "http2" or self.settings.http2) and (why := self._no_http2):
            return why
        if profile in ("sse", "streaming"):
            status = self.stream().status
            return f"POST {self.stream_path} answers {status}" if status in ABSENT else ""
        if profile == "openai":
            status = self.ask("POST", "/v1/chat/completions", self.chat()).status
            return f"POST /v1/chat/completions answers {status}" if status in ABSENT else ""
        if profile == "anthropic":
            body = {"model": self.model, "max_tokens": 1, "messages": [{"role": "user", "content": PROMPT}]}
            status = self.ask("POST", "/v1/messages", body).status
            return f"POST /v1/messages answers {status}" if status in ABSENT else ""
        if profile == "websocket" and (status := self._refused_upgrade()) in ABSENT | {200}:
            return f"an upgrade of {self.ws_path} gets {status}"
        return ""

    @cached_property
    def _no_http2(self) -> str:
        """Why HTTP/2 can't be spoken here."""
        if importlib.util.find_spec("h2") is None:
            return "the package h2 is not installed here"
        try:
            with self._dial("h2") as connected:
                if isinstance(connected, ssl.SSLSocket) and connected.selected_alpn_protocol() != "h2":
                    return "HTTP/2 isn't chosen by ALPN"
                Wire(connected)
        except (Closed, OSError):
            return "HTTP/2 isn't spoken" + ("" if self.tls else " in cleartext by prior knowledge")
        return ""

    def _refused_upgrade(self) -> int:
        """The status in place of the one that opens a WebSocket; 0 where it opens."""
        fields = ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
        fields += ["Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", f"Host: {self.authority}"]
        fields += [f"{name}: {value}" for name, value in self.auth]
        with self.connect() as connection:
            connection.send("\r\n".join([f"GET {self.ws_path} HTTP/1.1", *fields, "", ""]).encode())
            status = connection.begin("GET", upgrade=True).status
            return 0 if status == connection.switched else status
