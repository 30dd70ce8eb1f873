"""What happens to a connection, as bytes: a fuzzer mutates them, hypothesis makes them from lists of `Op`.

One operation is a byte that says which, with QUIET set when the loop runs nothing before the next one, and its
argument: literal bytes behind their length, or one byte. Any bytes are a list of operations.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from h2.config import H2Configuration
from h2.connection import H2Connection

from protocols.http2_guard import PREFACE

QUIET = 0x80
OPS_MAX = 400


class Kind(enum.IntEnum):
    """What may happen."""

    DATA = 0  # the client sends literal bytes
    CANNED = 1  # … one of REQUESTS
    DRIPPED = 2  # … one of REQUESTS, byte by byte
    FRAME = 3  # … one of FRAMES
    EOF = 4  # … no more
    READ = 5  # the client reads some of what was written
    TIME = 6  # time passes
    STEP = 7  # the engine makes tokens for all that may run
    END = 8  # the engine ends the sequences that it has, with or without success
    DRAIN = 9  # the server is told to stop
    DIE = 10  # the engine dies, or another one comes
    RESET = 11  # the client is gone
    LONG = 12  # one byte of the client's, many times
    HTTP2 = 13  # one of HTTP2, the first with the preface before it


LITERAL = frozenset({Kind.DATA})


@dataclass(frozen=True, slots=True)
class Op:
    """One event: `data` for DATA, `argument` (0 to 255) for the others."""

    kind: Kind
    argument: int = 0
    data: bytes = b""
    quiet: bool = False


def encode(ops: Iterable[Op]) -> bytes:
    """The bytes that `decode` reads."""
    out = bytearray()
    for op in ops:
        out.append(op.kind | (QUIET if op.quiet else 0))
        if op.kind in LITERAL:
            out.append(len(op.data))
            out += op.data
        else:
            out.append(op.argument)
    return bytes(out)


def decode(data: bytes) -> list[Op]:
    """The operations that any bytes stand for."""
    ops: list[Op] = []
    at = 0
    while at + 1 < len(data) and len(ops) < OPS_MAX:
        kind = Kind((data[at] & ~QUIET) % len(Kind))
        argument = data[at + 1]
        quiet = bool(data[at] & QUIET)
        at += 2
        if kind in LITERAL:
            ops.append(Op(kind, 0, data[at : at + argument], quiet))
            at += argument
        else:
            ops.append(Op(kind, argument, b"", quiet))
    return ops


def _request(line: bytes, *fields: bytes, body: bytes = b"") -> bytes:
    length = (b"Content-Length: %d" % len(body),) if body else ()
    return b"\r\n".join([line, b"Host: localhost", *fields, *length, b"", body])


def _post(path: bytes, body: bytes, *fields: bytes) -> bytes:
    return _request(b"POST %b HTTP/1.1" % path, *fields, body=body)


def _get(target: bytes, *fields: bytes) -> bytes:
    return _request(b"GET %b HTTP/1.1" % target, *fields)


_SSE, _NDJSON = b"Accept: text/event-stream", b"Accept: application/x-ndjson"
_PLAIN, _JSON = b"Accept: text/plain", b"Accept: application/json"
_UPGRADE = (b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13")
_KEY = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
_CHAT = b"/v1/chat/completions"
_SAID = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":9'
_SLOW_BODY = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
STREAM = b"@STREAM@"  # stands for the id of the stream that was begun last

# Each in a place of its own: the corpus names them by number, so new ones go to the end.
REQUESTS: tuple[bytes, ...] = (
    _get(b"/health"),
    _get(b"/v1/generate?prompt=a"),
    _get(b"/v1/generate?prompt=b&max_tokens=3", _NDJSON),
    _get(b"/v1/generate?prompt=c&stop=x", _PLAIN),
    _get(b"/v1/generate?prompt=d", _JSON),
    _post(_CHAT, _SAID + b"}"),
    _post(_CHAT, _SAID + b',"stream":true,"n":2,"stream_options":{"include_usage":true}}'),
    _post(_CHAT, _SAID + b',"stream":true,"logprobs":true,"top_logprobs":2}', _NDJSON),
    _post(b"/v1/completions", b'{"prompt":["a","b"],"stream":true,"echo":true}'),
    _post(b"/v1/completions", b'{"prompt":"a","max_tokens":4,"stop":["b"]}'),
    _post(b"/v1/completions", b'{"prompt":'),
    _request(b"HEAD /health HTTP/1.1"),
    _request(b"OPTIONS * HTTP/1.1"),
    _request(b"DELETE /health HTTP/1.1"),
    _get(b"/nowhere"),
    _get(b"/metrics", b"Connection: close"),
    b"GET /v1/generate?prompt=e HTTP/1.0\r\n\r\n",
    b"GET /v1/generate?prompt=f HTTP/1.0\r\nAccept: text/plain\r\n\r\n",
    b"POST /v1/completions HTTP/1.0\r\nContent-Length: 14\r\n\r\n" + b'{"prompt":"a"}',
    _get(b"/v1/streams/@STREAM@", b"Last-Event-ID: @STREAM@:1"),
    _get(b"/v1/streams/@STREAM@?after=0&wait=2", _JSON),
    _get(b"/v1/streams/@STREAM@?after_bytes=1", _PLAIN),
    _get(b"/v1/generate?prompt=g", b"Last-Event-ID: @STREAM@:0"),
    _post(_CHAT, _SAID + b"}", b"Last-Event-ID: @STREAM@:99"),
    _request(b"DELETE /v1/streams/@STREAM@ HTTP/1.1"),
    _get(b"/v1/ws", *_UPGRADE, _KEY),
    _get(b"/v1/ws", *_UPGRADE, _KEY, b"Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits"),
    _get(b"/v1/ws", *_UPGRADE, b"Sec-WebSocket-Key: short"),
    _get(b"/v1/ws", *_UPGRADE, _KEY, b"Origin: http://elsewhere.example"),
    _get(b"/health", *_UPGRADE, _KEY),
    _SLOW_BODY + b'Transfer-Encoding: chunked\r\n\r\ne\r\n{"prompt":"a"}\r\n0\r\nx: y\r\n\r\n',
    _SLOW_BODY + b"Content-Length: 40\r\nExpect: 100-continue\r\n\r\n",
    _SLOW_BODY + b"Content-Length: 40\r\nConnection: close\r\n\r\n{",
    _SLOW_BODY + b"Content-Length: 99999\r\n\r\n",
    _SLOW_BODY + b"Transfer-Encoding: chunked\r\n\r\nffff\r\n",
    _SLOW_BODY + b"Content-Type: text/html\r\nContent-Length: 40\r\nExpect: 100-continue\r\n\r\n",
    _SLOW_BODY + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\r\n\r\n",
    b"\x16\x03\x01",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ",
    _post(_CHAT, _SAID + b',"stream":true}', b"Idempotency-Key: k"),
    _post(_CHAT, _SAID + b"}", b"Idempotency-Key: k"),
)


_MASK = b"\x01\x02\x03\x04"


def frame(number: int, stream_id: bytes) -> bytes:
    """One of FRAMES as a client sends it."""
    given = FRAMES[number % len(FRAMES)]
    if isinstance(given, bytes):
        return given
    first, payload = given
    payload = payload.replace(STREAM, stream_id)
    masked = bytes(byte ^ _MASK[i % 4] for i, byte in enumerate(payload))
    length = bytes([0x80 | len(payload)]) if len(payload) < 126 else b"\xfe" + len(payload).to_bytes(2, "big")
    return bytes([first]) + length + _MASK + masked


_GENERATE = b'{"type":"generate","id":"a","messages":[{"role":"user","content":"hi"}]}'

# First byte and payload; or a whole frame, which a client may not send.
FRAMES: tuple[tuple[int, bytes] | bytes, ...] = (
    (0x81, b"hello"),
    (0x81, _GENERATE),
    (0x81, _GENERATE.replace(b'"a"', b'"b"').replace(b"}]}", b'}],"n":2,"max_tokens":5}')),
    (0x81, b'{"type":"generate","id":"p","prompt":["a","b"],"max_tokens":3}'),
    (0x81, b'{"type":"cancel","id":"a"}'),
    (0x81, b'{"type":"resume","id":"r","stream":"@STREAM@","after":0}'),
    (0x81, b'{"type":"resume","id":"r","after":-7}'),
    (0x81, b'{"type":'),
    (0x82, b"\x00\xff"),
    (0x01, b'{"type":"can'),
    (0x00, b'cel",'),
    (0x80, b'"id":"zz"}'),
    (0x89, b"are you there"),
    (0x8A, b""),
    (0x88, b"\x03\xe8bye"),
    (0x88, b""),
    (0x88, b"\x03"),
    (0x81, b"\xff"),
    (0x81, b"x" * 2000),
    (0xC1, b"\xaaV*.)\xca\xccKW\xb2R\xcaH\xcd\xc9\xc9W\x8a\xad\x05\x00"),
    (0x83, b""),
    b"\x81\x05hello",
)


def _http2_client() -> tuple[bytes, ...]:
    """What an HTTP/2 client writes, piece by piece, behind the connection preface."""
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    opening = client.data_to_send().removeprefix(PREFACE)
    pieces = [opening]
    head = [(":method", "GET"), (":scheme", "http"), (":authority", "localhost")]

    def take() -> None:
        pieces.append(client.data_to_send())

    client.send_headers(1, [*head, (":path", "/v1/generate?prompt=a")], end_stream=True)
    take()
    client.send_headers(3, [(":method", "POST"), *head[1:], (":path", "/v1/completions")])
    take()
    client.send_data(3, b'{"prompt":"a","max_tokens":3}', end_stream=True)
    take()
    client.send_headers(5, [*head, (":path", "/health"), ("accept", "text/plain")], end_stream=True)
    take()
    client.increment_flow_control_window(1000)
    client.increment_flow_control_window(1000, 1)
    take()
    client.ping(b"12345678")
    take()
    client.reset_stream(1)
    take()
    client.close_connection()
    take()
    return tuple(pieces)


HTTP2 = _http2_client()
