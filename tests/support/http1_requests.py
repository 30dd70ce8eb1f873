"""Requests of HTTP/1.1 as bytes, and our server's side without a socket, which reads and answers them."""

from __future__ import annotations

from protocols.http1 import Http1

HOST = b"Host: a.example\r\n"
GET = b"GET / HTTP/1.1\r\n" + HOST + b"\r\n"
HEADERS = [(b"Date", b"Sun, 06 Nov 1994 08:49:37 GMT"), (b"Content-Type", b"text/plain")]


def post(body: bytes = b"", *fields: bytes, version: bytes = b"1.1") -> bytes:
    """With its length and a Host."""
    length = b"Content-Length: %d\r\n" % len(body)
    return b"POST / HTTP/%b\r\n" % version + HOST + length + b"".join(f + b"\r\n" for f in fields) + b"\r\n" + body


def connect(data: bytes = b"", *, max_header: int = 4096) -> Http1:
    """A server's side that has read this."""
    http = Http1(max_header=max_header)
    http.receive(data)
    return http


def answer(http: Http1, body: bytes = b"ok", *, length: bool = True) -> bytes:
    """A whole 200, as it is sent."""
    head = http.head(200, HEADERS, length=len(body) if length else None)
    return head + http.body(body) + http.end()
