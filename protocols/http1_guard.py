"""The strict byte guard in front of h11: what passes it means the same to every HTTP/1.1 recipient.

Strategy: bytes go in as they come, pieces come out that are checked and canonical: one whole head without the empty
lines before it, then body bytes, with a chunked body cut into chunks anew, without extensions and trailers. Verdicts
are given line by line and by position only, so they don't depend on how the bytes were split. Bytes behind the
request stay in the buffer, and each byte is looked at a bounded number of times.

Imports the standard library only. Raises Malformed, which names the answer's status, and nothing else.
Rules: RFC 9112 sections 2.2, 2.3, 3.2, 5.1, 5.2, 6.1, 6.3, 7.1; RFC 9110 sections 5.5, 7.2.
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

# Old clients send one CRLF behind a body (RFC 9112 2.2 asks to ignore at least one); a client that sends nothing but
# empty lines is no client.
EMPTY_LINES_MAX = 8
# hyper and Apache stop at 100 fields, Node at 2000; the size limit alone would allow thousands of two-byte fields.
FIELDS_MAX = 256
# The longest Content-Length that is still a number to us: 10**18 is far above any limit that a server sets.
LENGTH_DIGITS_MAX = 18
# 64 bits. Seventeen digits overflow some recipient's integer, which is how requests are smuggled.
CHUNK_DIGITS_MAX = 16
# A size line with its extensions; no known client sends extensions at all.
CHUNK_LINE_BYTES_MAX = 1024
# "GET / HTTP/1.1", its line end and an empty line: what comes in smaller pieces is read line by line.
HEAD_BYTES_MIN = 18
# RFC 9112 7.1.1 asks for a bound on the extensions of one request.
EXTENSION_BYTES_MAX = 16 * 1024

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
# A comma is legal in a reg-name, but here it is the trace of two Host fields that somebody joined.
_NAME = rb"(?:[A-Za-z0-9._~!$&'()*+;=\-]++|%[0-9A-Fa-f]{2})+"
_LITERAL = rb"\[(?:[0-9A-Fa-f:.]+|[vV][0-9A-Fa-f]+\.[A-Za-z0-9._~!$&'()*+;=:\-]+)\]"
_AUTHORITY = rb"(?P<host>" + _LITERAL + rb"|" + _NAME + rb")(?::(?P<port>[0-9]{0,5}))?"
_QUOTED = rb'"(?:[\t \x21\x23-\x5b\x5d-\x7e\x80-\xff]|\\[\t \x21-\x7e\x80-\xff])*"'

_first_of_method = frozenset(b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz\r\n")
_REQUEST = rb"(?P<method>" + _TOKEN + rb") (?P<target>[\x21-\x7e]+) HTTP/1\.[01]"
_FIELD = _TOKEN + rb":[\t \x21-\x7e\x80-\xff]*"
_request_line = re.compile(_REQUEST)
_field = re.compile(_FIELD)
_head = re.compile(_REQUEST + rb"\r\n(?:" + _FIELD + rb"\r\n)*\r\n")
_authority = re.compile(_AUTHORITY)
_absolute = re.compile(rb"(?i:https?)://" + _AUTHORITY + rb"(?:[/?].*)?")
_chunk_line = re.compile(
    rb"([0-9A-Fa-f]+)((?:[ \t]*;[ \t]*" + _TOKEN + rb"(?:[ \t]*=[ \t]*(?:" + _TOKEN + rb"|" + _QUOTED + rb"))?)*)"
)
_plain_chunk_line = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")
_digits = re.compile(rb"[0-9]+")
_framing_field = re.compile(rb"\n(?:(content-length)|(transfer-encoding)|(host)):([^\r]*)", re.IGNORECASE)


class Malformed(Exception):
    """The request must be refused with `status` and the connection closed: nothing behind it can be trusted."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Framing(NamedTuple):
    """How the body of a request is delimited: at most one of the two is set."""

    content_length: int | None = None
    chunked: bool = False


class _State(enum.Enum):
    REQUEST_LINE = enum.auto()
    FIELDS = enum.auto()
    FIXED = enum.auto()
    CHUNK_LINE = enum.auto()
    CHUNK_DATA = enum.auto()
    CHUNK_END = enum.auto()
    TRAILERS = enum.auto()
    COMPLETE = enum.auto()


# To find a member by its name takes longer than to compare two.
_REQUEST_LINE, _FIELDS, _FIXED, _CHUNK_LINE, _CHUNK_DATA, _CHUNK_END, _TRAILERS, _COMPLETE = _State
_CHUNKED = (_CHUNK_LINE, _CHUNK_DATA, _CHUNK_END, _TRAILERS)


class Guard:
    """Checks one request after another. `buffer` holds what was received and not yet passed on."""

    __slots__ = (
        "_empty_lines", "_extension_bytes", "_fault", "_head", "_max_header", "_remaining", "_searched",
        "_section_bytes", "_state", "buffer", "framing",
    )  # fmt: skip

    def __init__(self, *, max_header: int) -> None:
        self.buffer = bytearray()
        self.framing = Framing()
        self._max_header = max_header
        self._reset()

    def _reset(self) -> None:
        self._state = _REQUEST_LINE
        self._searched = 0  # bytes at the buffer's start that hold no LF
        self._head: list[bytes] = []
        self._section_bytes = 0  # of the head, later of the trailers
        self._empty_lines = 0
        self._remaining = 0  # bytes of a fixed body, or of the current chunk
        self._extension_bytes = 0
        self._fault: Malformed | None = None  # found behind data that goes out first

    @property
    def complete(self) -> bool:
        """The whole request was passed on; what `buffer` holds belongs to the next one."""
        return self._state is _COMPLETE

    @property
    def awaiting(self) -> bool:
        """Nothing of a request has come yet, apart from empty lines."""
        return self._state is _REQUEST_LINE and bytes(self.buffer[:2]) in (b"", b"\r")

    @property
    def in_head(self) -> bool:
        """A request has begun and its head isn't complete."""
        return self._state in (_REQUEST_LINE, _FIELDS) and not self.awaiting

    def start_next(self) -> None:
        """Go on with the request behind a complete one."""
        assert self.complete
        self._reset()

    def next_piece(self, head: bytes | None = None) -> bytes | None:
        """The next checked bytes, or None when the request is complete or more bytes must come. `head` is the
        `whole_head` of a caller that has asked for it. Raises Malformed."""
        if self._state is _REQUEST_LINE:
            if (head := head or self.whole_head()) is not None and self._take_whole_head(head):
                return head
            if not self._read_request_line():
                return None
        if self._state is _FIELDS:
            return self._read_fields()
        if self._state is _FIXED:
            return self._read_fixed()
        return self._read_chunks() if self._state in _CHUNKED else None

    def _line(self, room: int, status: int, what: str) -> bytes | None:
        """The next line without its CRLF, or None. `room` bounds its bytes, the CRLF included."""
        end = self.buffer.find(b"\n", self._searched) + 1
        if (end or len(self.buffer)) > room:
            raise Malformed(status, f"{what} too long")
        if not end:
            self._searched = len(self.buffer)
            return None
        line = bytes(self.buffer[:end])
        del self.buffer[:end]
        self._searched = 0
        if not line.endswith(b"\r\n"):
            raise Malformed(400, f"a line feed without a carriage return in the {what}")
        line = line[:-2]
        if b"\r" in line:
            raise Malformed(400, f"a carriage return without a line feed in the {what}")
        return line

    def whole_head(self) -> bytes | None:
        """A head that is here whole, unchecked, where one may begin; it stays here. Never of bytes that drip: those are
        searched once, line by line."""
        if self._state is not _REQUEST_LINE or self._searched:
            return None
        buffer = self.buffer
        end = buffer.find(b"\r\n\r\n") + 4 if len(buffer) >= HEAD_BYTES_MIN else 0
        return bytes(buffer[:end]) if HEAD_BYTES_MIN <= end <= self._max_header else None

    def take_head(self, head: bytes, framing: Framing) -> None:
        """Pass the `whole_head` on, which is known to be good and to frame its body so."""
        del self.buffer[: len(head)]
        self.framing = framing
        self._begin_body(framing)

    def _take_whole_head(self, head: bytes) -> bool:
        """The short way for a head that is here whole. It takes nothing that the way line by line would refuse, and
        leaves it to that one to say what is wrong."""
        match = _head.fullmatch(head)
        if match is None or head.count(b"\n") > FIELDS_MAX + 2:
            return False
        _check_target(match["method"], match["target"])
        self.take_head(head, check_head(head))
        return True

    def _read_request_line(self) -> bool:
        while True:
            # Another protocol's greeting (TLS, say) is told at its first byte: it may never send a line feed.
            if self.buffer and self.buffer[0] not in _first_of_method:
                raise Malformed(400, "this is not an HTTP request")
            line = self._line(self._max_header, 414, "request line")
            if line is None:
                return False
            if line:
                break
            self._empty_lines += 1
            if self._empty_lines > EMPTY_LINES_MAX:
                raise Malformed(400, "too many empty lines before the request line")
        _check_request_line(line)
        self._head.append(line)
        self._section_bytes = len(line) + 2
        self._state = _FIELDS
        return True

    def _read_fields(self) -> bytes | None:
        while (line := self._section_line("header section")) is not None:
            self._head.append(line)
            if not line:
                head, self._head = b"\r\n".join(self._head) + b"\r\n", []
                self.framing = framing = check_head(head)
                self._begin_body(framing)
                return head
            if len(self._head) > FIELDS_MAX + 1:
                raise Malformed(431, f"more than {FIELDS_MAX} header fields")
        return None

    def _section_line(self, what: str) -> bytes | None:
        """One checked field line, or the empty line that ends the section."""
        line = self._line(self._max_header - self._section_bytes, 431, what)
        if line is None:
            return None
        self._section_bytes += len(line) + 2
        if line and not _field.fullmatch(line):
            raise Malformed(400, _field_fault(line))
        return line

    def _begin_body(self, framing: Framing) -> None:
        self._section_bytes = 0
        if framing.chunked:
            self._state = _CHUNK_LINE
        elif framing.content_length:
            self._remaining = framing.content_length
            self._state = _FIXED
        else:
            self._state = _COMPLETE

    def _take(self) -> bytes:
        """What has come of the `_remaining` bytes."""
        data = bytes(self.buffer[: self._remaining])
        del self.buffer[: len(data)]
        self._remaining -= len(data)
        return data

    def _read_fixed(self) -> bytes | None:
        data = self._take()
        if not self._remaining:
            self._state = _COMPLETE
        return data or None

    def _read_chunks(self) -> bytes | None:
        """All chunks that have come as one: a body of one-byte chunks must not cost an event for each."""
        if self._fault:
            raise self._fault
        parts: list[bytes] = []
        try:
            self._take_whole_chunks(parts)
            while self._state is not _COMPLETE and self._chunk_step(parts):
                self._take_whole_chunks(parts)
        except Malformed as fault:
            self._fault = fault  # told behind the data before it, as it would be had the bytes come one by one
            if not any(parts):
                raise
        data = b"".join(parts)
        piece = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        return piece + b"0\r\n\r\n" if self._state is _COMPLETE else piece or None

    def _take_whole_chunks(self, parts: list[bytes]) -> None:
        """The short way for plain chunks that have come whole; it takes nothing that `_chunk_step` would refuse."""
        if self._state is not _CHUNK_LINE:
            return
        at = 0
        while match := _plain_chunk_line.match(self.buffer, at):
            start = match.end()
            end = start + int(match[1], 16)
            if start == end or self.buffer[end : end + 2] != b"\r\n":
                break
            parts.append(bytes(self.buffer[start:end]))
            at = end + 2
        if at:
            del self.buffer[:at]
            self._searched = 0

    def _chunk_step(self, parts: list[bytes]) -> bool:
        """One transition of the chunked states; False when more bytes must come."""
        if self._state is _CHUNK_LINE:
            line = self._line(CHUNK_LINE_BYTES_MAX, 400, "chunk size line")
            if line is None:
                return False
            self._remaining = self._check_chunk_line(line)
            self._state = _CHUNK_DATA if self._remaining else _TRAILERS
        elif self._state is _CHUNK_DATA:
            parts.append(self._take())
            if self._remaining:
                return False
            self._state = _CHUNK_END
        elif self._state is _CHUNK_END:
            if not b"\r\n".startswith(self.buffer[:2]):
                raise Malformed(400, "a chunk's data must end with CRLF")
            if len(self.buffer) < 2:
                return False
            del self.buffer[:2]
            self._state = _CHUNK_LINE
        else:
            line = self._section_line("trailer section")
            if line is None:
                return False
            if not line:
                self._state = _COMPLETE
        return True

    def _check_chunk_line(self, line: bytes) -> int:
        match = _chunk_line.fullmatch(line)
        if not match:
            raise Malformed(400, "malformed chunk size or chunk extension")
        size, extensions = match.groups()
        if len(size) > CHUNK_DIGITS_MAX:
            raise Malformed(400, f"a chunk size has more than {CHUNK_DIGITS_MAX} digits")
        self._extension_bytes += len(extensions)
        if self._extension_bytes > EXTENSION_BYTES_MAX:
            raise Malformed(400, f"more than {EXTENSION_BYTES_MAX} bytes of chunk extensions")
        return int(size, 16)


def _check_request_line(line: bytes) -> None:
    match = _request_line.fullmatch(line)
    if not match:
        raise Malformed(400, "malformed request line: it must be METHOD SP target SP HTTP/1.1 (or HTTP/1.0)")
    _check_target(match["method"], match["target"])


def _check_target(method: bytes, target: bytes) -> None:
    if method == b"CONNECT":
        raise Malformed(501, "this server opens no tunnels")
    if b"#" in target:
        raise Malformed(400, "a request target holds no fragment")
    if target[:1] == b"/" or (target == b"*" and method == b"OPTIONS"):
        return
    absolute = _absolute.fullmatch(target)
    if not absolute or not _port_fits(absolute):
        raise Malformed(400, "the request target must be a path, an http(s) URI, or * for OPTIONS")


def _port_fits(match: re.Match[bytes]) -> bool:
    return int(match["port"] or 0) <= 65535


def _field_fault(line: bytes) -> str:
    """What is wrong with a field line, for people."""
    if line[:1] in b" \t":
        return "a folded header line (obsolete since RFC 7230)"
    name, colon, _ = line.partition(b":")
    if not colon:
        return "a header line without a colon"
    if name.rstrip(b" \t") != name:
        return "whitespace between a header's name and its colon"
    return "a header's name or value holds a character that is not allowed there"


def check_head(head: bytes) -> Framing:
    """The body's framing as a head tells it whose lines are checked. Raises Malformed where two recipients could read
    it differently, and for the Host field."""
    lengths: list[bytes] = []
    codings: list[bytes] = []
    hosts: list[bytes] = []
    for length, coding, _, value in _framing_field.findall(head):
        (lengths if length else codings if coding else hosts).append(value.strip(b" \t"))
    modern = head.startswith(b"1.1", head.find(b"\r") - 3)
    _check_host(hosts, required=modern)
    if not codings:
        return Framing(content_length=_content_length(lengths))
    if not modern:
        raise Malformed(400, "Transfer-Encoding in an HTTP/1.0 request")
    if lengths:
        raise Malformed(400, "both Transfer-Encoding and Content-Length")
    if len(codings) > 1 or codings[0].lower() != b"chunked":
        raise Malformed(400, "the only transfer coding understood is a single `chunked`")
    return Framing(chunked=True)


def _content_length(values: list[bytes]) -> int | None:
    if not values:
        return None
    if len(values) > 1 or not _digits.fullmatch(values[0]):
        raise Malformed(400, "Content-Length must be one number")
    if len(values[0]) > LENGTH_DIGITS_MAX:
        raise Malformed(413, "Content-Length is beyond any body that this server takes")
    return int(values[0])


def _check_host(values: list[bytes], *, required: bool) -> None:
    if not values:
        if required:
            raise Malformed(400, "an HTTP/1.1 request needs a Host header")
        return
    if len(values) > 1:
        raise Malformed(400, "more than one Host header")
    if not is_authority(values[0]):
        raise Malformed(400, "malformed Host header")


def is_authority(value: bytes) -> bool:
    """Whether `value` is a host, with or without a port, as a Host field has it (RFC 9110 7.2)."""
    match = _authority.fullmatch(value)
    return match is not None and _port_fits(match)


def split_absolute(target: bytes) -> tuple[bytes, bytes]:
    """(authority, path and query) of a checked target; the authority is empty unless it is in absolute form."""
    if target[:1] in (b"/", b"*"):
        return b"", target
    match = _absolute.fullmatch(target)
    assert match
    authority = match["host"] + (b":" + match["port"] if match["port"] else b"")
    rest = target[match.end("port") if match["port"] is not None else match.end("host") :]
    return authority, rest if rest[:1] == b"/" else b"/" + rest
