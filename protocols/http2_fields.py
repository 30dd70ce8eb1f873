"""The fields of an HTTP/2 request, checked and made into the Request that HTTP/1.1 has.

h2 would check them too, but ends the whole connection for one malformed request; here it ends the one stream. A test
shows that whatever h2 refuses is refused here, and what HTTP/1.1's guard refuses for its content is answered alike.

Imports the standard library and protocols/ only. Raises MalformedMessage and nothing else.
Rules: RFC 9113 sections 8.1.1, 8.2, 8.3, 8.5; RFC 8441 section 4; RFC 9110 sections 5.5, 8.6.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from protocols.http1 import Refusal, Request
from protocols.http1_guard import FIELDS_MAX, LENGTH_DIGITS_MAX, is_authority

Field = tuple[bytes, bytes]

# RFC 9113 6.5.2: what a field costs beside its name and value when a header list is measured.
FIELD_OVERHEAD_BYTES = 32
_TOO_LONG = 10**LENGTH_DIGITS_MAX  # stands for every content-length with more digits

_name = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_value = re.compile(rb"(?:[\x21-\x7e\x80-\xff](?:[\t \x21-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?)?")
_method = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_path = re.compile(rb"/[\x21\x22\x24-\x7e]*|\*")
_digits = re.compile(rb"[0-9]+")
# Of one connection of HTTP/1.1, and no part of an HTTP/2 message (RFC 9113 8.2.2).
CONNECTION_FIELDS = frozenset((b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"))
_pseudo_fields = frozenset((b":method", b":scheme", b":authority", b":path", b":protocol"))


class MalformedMessage(Exception):
    """Not a message of HTTP/2: its stream is reset with PROTOCOL_ERROR."""


def read_request(fields: list[Field], *, ended: bool, max_header: int) -> Request | Refusal:
    """`fields` as h2 decoded them, cookies joined. `ended`: no body follows. A Refusal is for what is well-formed and
    not served. The opening of a WebSocket (RFC 8441) has method GET and `upgrade`, like its HTTP/1.1 twin."""
    pseudo, regular = _split(fields)
    method = pseudo.get(b":method", b"")
    if not _method.fullmatch(method):
        raise MalformedMessage("no valid :method")
    tunnel = _check_shape(pseudo, method)
    host = _host(pseudo, regular)
    length = _content_length(regular)
    if ended and length:
        raise MalformedMessage("a content-length, and no body")
    refusal = _unserved(pseudo, regular, method, host, max_header)
    if refusal is not None:
        return refusal
    if tunnel and ended:
        return Refusal(400, "a WebSocket needs a stream that stays open")
    if length == _TOO_LONG:
        return Refusal(413, "Content-Length is beyond any body that this server takes")
    expect = dict(regular).get(b"expect", b"").lower()
    return Request(
        method="GET" if tunnel else method.decode(),
        target=pseudo[b":path"].decode(),
        http_version="2",
        headers=tuple(regular) if b"host" in dict(regular) else ((b"host", host), *regular),
        content_length=None if tunnel else length,
        chunked=False,
        expect_continue=expect == b"100-continue" and not ended and not tunnel,
        keep_alive=True,
        upgrade=tunnel,
    )


def is_sendable(value: bytes) -> bool:
    """Whether a client would take this field value."""
    return _value.fullmatch(value) is not None


def check_trailers(fields: Iterable[Field]) -> None:
    """Trailers are dropped; they must still be well-formed."""
    for name, value in fields:
        if name.startswith(b":"):
            raise MalformedMessage("a pseudo-header field in trailers")
        _check_field(name, value)


def _split(fields: list[Field]) -> tuple[dict[bytes, bytes], list[Field]]:
    """Pseudo-header fields and the others, each checked by itself."""
    pseudo: dict[bytes, bytes] = {}
    regular: list[Field] = []
    for name, value in fields:
        if name.startswith(b":"):
            if name not in _pseudo_fields:
                raise MalformedMessage(f"{name[:40]!r} is no pseudo-header field of a request")
            if name in pseudo:
                raise MalformedMessage(f"{name.decode()} comes twice")
            if regular:
                raise MalformedMessage("a pseudo-header field behind a regular one")
            if not _value.fullmatch(value):
                raise MalformedMessage(f"a character that is not allowed in {name.decode()}")
            pseudo[name] = value
        else:
            _check_field(name, value)
            regular.append((bytes(name), bytes(value)))
    return pseudo, regular


def _check_field(name: bytes, value: bytes) -> None:
    if not _name.fullmatch(name):
        raise MalformedMessage(f"a field name that is not lower case or no token: {name[:40]!r}")
    if not _value.fullmatch(value):
        raise MalformedMessage(f"a character that is not allowed, or space around it, in the value of {name[:40]!r}")
    if name in CONNECTION_FIELDS:
        raise MalformedMessage(f"the connection-specific field {name.decode()}")
    if name == b"te" and value.lower() != b"trailers":
        raise MalformedMessage("te may only be trailers")


def _check_shape(pseudo: dict[bytes, bytes], method: bytes) -> bool:
    """Which pseudo-header fields must be there (RFC 9113 8.3.1, 8.5); True for an extended CONNECT."""
    extended = b":protocol" in pseudo
    if extended and method != b"CONNECT":
        raise MalformedMessage(":protocol is for CONNECT")
    if method == b"CONNECT" and not extended:
        if b":scheme" in pseudo or b":path" in pseudo:
            raise MalformedMessage("a CONNECT without :protocol has neither :scheme nor :path")
        if b":authority" not in pseudo:
            raise MalformedMessage("a CONNECT needs :authority")
        return False
    for name in (b":scheme", b":path"):
        if not pseudo.get(name):
            raise MalformedMessage(f"no {name.decode()}")
    return extended


def _host(pseudo: dict[bytes, bytes], regular: list[Field]) -> bytes:
    """Whom the client addresses: :authority and Host, of which one must be there, and which must agree."""
    hosts = [value for name, value in regular if name == b"host"]
    authority = pseudo.get(b":authority")
    if len(hosts) > 1:
        raise MalformedMessage("more than one host field")
    if authority is None and not hosts:
        raise MalformedMessage("neither :authority nor host")
    if authority is not None and hosts and hosts[0] != authority:
        raise MalformedMessage(":authority and host differ")
    return hosts[0] if authority is None else authority


def _content_length(regular: list[Field]) -> int | None:
    values = [value for name, value in regular if name == b"content-length"]
    if not values:
        return None
    if len(values) > 1 or not _digits.fullmatch(values[0]):
        raise MalformedMessage("content-length must be one number")
    return int(values[0]) if len(values[0]) <= LENGTH_DIGITS_MAX else _TOO_LONG


def _unserved(
    pseudo: dict[bytes, bytes], regular: list[Field], method: bytes, host: bytes, max_header: int
) -> Refusal | None:
    """What a well-formed request can't have from this server, in the words of HTTP/1.1's guard."""
    size = sum(len(name) + len(value) + FIELD_OVERHEAD_BYTES for name, value in (*pseudo.items(), *regular))
    if size > max_header:
        return Refusal(431, f"the header section is larger than {max_header} bytes")
    if len(regular) > FIELDS_MAX:
        return Refusal(431, f"more than {FIELDS_MAX} header fields")
    if not is_authority(host):
        return Refusal(400, "malformed Host header")
    if method == b"CONNECT" and pseudo.get(b":protocol") != b"websocket":
        return Refusal(501, "this server opens no tunnels")
    path = pseudo[b":path"]
    if not _path.fullmatch(path) or (path == b"*" and method != b"OPTIONS"):
        return Refusal(400, "the request target must be a path, or * for OPTIONS")
    if pseudo[b":scheme"].lower() not in (b"http", b"https"):
        return Refusal(400, "the scheme must be http or https")
    return None
