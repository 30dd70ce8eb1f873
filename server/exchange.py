"""What every version of HTTP does alike with a request and an answer: the Call, the fields of the answer's head."""

from __future__ import annotations

import time
from collections.abc import Callable
from email.utils import formatdate
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import unquote

from protocols.http1 import Request
from server.http import Call, Headers, Response, Streaming

if TYPE_CHECKING:
    from server.host import Host


def new_call(host: Host, request: Request, client: str, on_whole_answer: Callable[[], None] = lambda: None) -> Call:
    """The call of a request whose head is complete. `client` is the socket's peer: a proxy's, perhaps."""
    path, _, query = request.path.partition("?")
    call = Call(
        request=request,
        path=unquote(path, errors="replace") if "%" in path else path,
        query=query,
        client=client,
        request_id=host.new_request_id(),
        received_at=time.monotonic(),
        on_whole_answer=on_whole_answer,
    )
    if call.has(b"x-forwarded-for"):
        forwarded = b",".join([value for name, value in request.headers if name == b"x-forwarded-for"])
        call.client = host.trusted.client(client, forwarded.decode("latin-1"))
    return call


def refusal_of(host: Host, call: Call) -> Response | None:
    """What the head of a request earns by itself, if anything."""
    refusal = host.program.refuse(call)
    if refusal is None and (call.request.content_length or 0) > host.max_body:
        return too_large(host, call)
    return refusal


def too_large(host: Host, call: Call) -> Response:
    """The answer to a body over the limit."""
    return host.program.malformed(call, 413, f"the body is larger than {host.max_body} bytes")


def whole_fields(answer: Response, extra: Headers = ()) -> list[tuple[bytes, bytes]]:
    """The fields of a whole answer's head, without its length."""
    fields = [(b"Date", date()), *answer.headers, *extra]
    if answer.body or answer.status == 200:
        fields.append((b"Content-Type", answer.content_type))
    return fields


def streaming_fields(answer: Streaming) -> list[tuple[bytes, bytes]]:
    """The fields of a streamed answer's head."""
    return [
        (b"Date", date()),
        (b"Content-Type", answer.framing.content_type),
        (b"Cache-Control", b"no-cache, no-transform"),
        (b"X-Accel-Buffering", b"no"),
        *answer.headers,
    ]


@lru_cache(maxsize=1)
def _date_at(second: int) -> bytes:
    return formatdate(second, usegmt=True).encode()


def date() -> bytes:
    """The Date header's value (RFC 9110 6.6.1), rendered once a second."""
    return _date_at(int(time.time()))
