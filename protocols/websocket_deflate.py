"""permessage-deflate and message limits, as one wsproto extension of our own (RFC 7692, RFC 6455 section 9).

wsproto's own extension inflates without a bound, raises ValueError on `client_max_window_bits=abc`, forgets that a
message is compressed when a ping comes between its fragments, and returns nothing any more once a sender used a final
block. This one counts what it inflates while it inflates, and takes part in every connection, compressed or not,
because a limit is best told at a frame's header, before its payload.

Imports wsproto and zlib only. Nothing here raises on what a peer sends: faults are close codes.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from wsproto.extensions import Extension
from wsproto.frame_protocol import CloseReason, FrameDecoder, FrameProtocol, Opcode, RsvBits

NAME = "permessage-deflate"

# A window of 4 KiB and memory level 5 cost 32 KiB a connection instead of 256 KiB, and lose little on messages of the
# size of a token. Fewer bits than negotiated are always legal for the sender.
_WINDOW_BITS_OWN_MAX = 12
_MEMORY_LEVEL = 5
# zlib writes no raw stream with a window of 2**8.
_WINDOW_BITS_MIN = 9
# Inflating with the largest window reads any sender's stream, those of encoders that take 8 for 9 too.
_WINDOW_BITS_INFLATE = 15
# What deflate may add to a message that it can't shrink: five bytes for each flush. A sender that flushes after every
# few bytes still fits; an endless run of empty blocks doesn't.
_WIRE_FACTOR, _WIRE_SLACK_BYTES = 2, 1024
# Final blocks end a zlib object; a message made of nothing else would cost a new one for every two bytes.
_FINAL_BLOCKS_MAX = 64
# Autobahn sends a handful. Each costs work and counts nothing towards the size of the message.
_EMPTY_FRAGMENTS_MAX = 1024

_EMPTY_BLOCK = b"\x00\x00\xff\xff"
_TOKEN = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_OWS = r"[ \t]*"
_parameter = re.compile(rf';{_OWS}({_TOKEN}){_OWS}(?:={_OWS}(?:({_TOKEN})|"((?:[^"\\]|\\.)*)"){_OWS})?')
_name = re.compile(rf"({_TOKEN}){_OWS}")
_separator = re.compile(r"[ \t,]*")
_bits = re.compile(r"[89]|1[0-5]")


class MalformedExtensions(Exception):
    """A Sec-WebSocket-Extensions header that isn't of its grammar; the handshake must fail (RFC 6455 9.1)."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What was agreed with the client."""

    server_window_bits: int | None = None  # as offered; None: not mentioned
    client_window_bits: int | None = None
    server_no_context_takeover: bool = False
    client_no_context_takeover: bool = False

    def header(self) -> bytes:
        """The value of Sec-WebSocket-Extensions in the 101 response."""
        parts = [NAME]
        if self.server_no_context_takeover:
            parts.append("server_no_context_takeover")
        if self.client_no_context_takeover:
            parts.append("client_no_context_takeover")
        if self.server_window_bits is not None:
            parts.append(f"server_max_window_bits={self.server_window_bits}")
        if self.client_window_bits is not None:
            parts.append(f"client_max_window_bits={self.client_window_bits}")
        return "; ".join(parts).encode()


Parameters = list[tuple[str, str | None]]


def negotiate(headers: Iterable[bytes]) -> Terms | None:
    """The terms of the first acceptable permessage-deflate offer, or None. Raises MalformedExtensions."""
    offers = [offer for value in headers for offer in _offers(value.decode("latin-1"))]
    for name, parameters in offers:
        if name == NAME and (terms := _accept(parameters)):
            return terms
    return None


def _offers(text: str) -> Iterator[tuple[str, Parameters]]:
    """extension-list of RFC 6455 9.1; empty list elements are allowed."""
    separator = _separator.match(text)
    at = separator.end() if separator else 0
    while at < len(text):
        name = _name.match(text, at)
        if not name:
            raise MalformedExtensions(f"not an extension list: {text[at : at + 40]!r}")
        at = name.end()
        parameters: Parameters = []
        while match := _parameter.match(text, at):
            key, plain, quoted = match.groups()
            parameters.append((key, plain if quoted is None else _unquote(quoted)))
            at = match.end()
        yield name[1], parameters
        if at < len(text) and text[at] != ",":
            raise MalformedExtensions(f"not an extension list: {text[at : at + 40]!r}")
        separator = _separator.match(text, at)
        at = separator.end() if separator else at


def _unquote(text: str) -> str:
    value = re.sub(r"\\(.)", r"\1", text)
    if not re.fullmatch(_TOKEN, value):
        raise MalformedExtensions("a quoted parameter must hold a token")
    return value


def _accept(parameters: Parameters) -> Terms | None:
    """RFC 7692 7.1: unknown, repeated and invalid parameters decline the offer."""
    given = dict(parameters)
    if len(given) < len(parameters):
        return None
    flags = {key: key in given for key in ("server_no_context_takeover", "client_no_context_takeover")}
    if any(given.pop(key) is not None for key, present in flags.items() if present):
        return None
    server_bits: int | None = None
    if "server_max_window_bits" in given:
        value = given.pop("server_max_window_bits")
        if value is None or not _bits.fullmatch(value) or int(value) < _WINDOW_BITS_MIN:
            return None
        server_bits = int(value)
    value = given.pop("client_max_window_bits", None)
    if given or (value is not None and not _bits.fullmatch(value)):
        return None
    client_bits = None if value is None else int(value)
    return Terms(
        server_window_bits=server_bits,
        client_window_bits=client_bits,
        server_no_context_takeover=flags["server_no_context_takeover"],
        client_no_context_takeover=flags["client_no_context_takeover"],
    )


class MessageRules(Extension):
    """Bounds every message at `max_message` bytes after inflating; inflates and deflates when `terms` say so.

    wsproto asks for a header's verdict again when the masking key behind it hasn't come, so `frame_inbound_header`
    only looks; what was consumed is counted with the payload."""

    name = NAME

    def __init__(self, *, max_message: int, terms: Terms | None) -> None:
        self.fault = ""  # what was wrong, where the close code alone doesn't say
        self._max_message = max_message
        self._max_wire = max_message * _WIRE_FACTOR + _WIRE_SLACK_BYTES
        self._terms = terms
        self._inflater: zlib._Decompress | None = None
        self._deflater: zlib._Compress | None = None
        self._in_control = False
        self._in_message = False
        self._begin_message(compressed=False)

    def enabled(self) -> bool:
        """Always: the limit holds for plain messages too."""
        return True

    def offer(self) -> bool | str:
        """Never called: a server offers nothing."""
        return False

    def _begin_message(self, *, compressed: bool) -> None:
        self._compressed = compressed
        self._message_bytes = 0
        self._wire_bytes = 0
        self._frame_bytes = 0
        self._empty_fragments = 0
        self._final_blocks = 0

    def frame_inbound_header(
        self, proto: FrameDecoder | FrameProtocol, opcode: Opcode, rsv: RsvBits, payload_length: int
    ) -> CloseReason | RsvBits:
        """Which reserved bits may be set, or the close code for a frame that makes its message too long."""
        self._in_control = opcode.iscontrol()
        if self._in_control:
            return RsvBits(False, False, False)
        # wsproto's own check comes behind the payload, too late for one that may not inflate.
        if (opcode is Opcode.CONTINUATION) is not self._in_message:
            self.fault = "a message in the middle of another" if self._in_message else "a continuation of no message"
            return CloseReason.PROTOCOL_ERROR
        if not self._in_message:
            self._begin_message(compressed=rsv.rsv1 and self._terms is not None)
        self._frame_bytes = 0
        limit = self._max_wire if self._compressed else self._max_message
        if self._wire_bytes + payload_length > limit:
            return CloseReason.MESSAGE_TOO_BIG
        return RsvBits(self._terms is not None and not self._in_message, False, False)

    def frame_inbound_payload_data(self, proto: FrameDecoder | FrameProtocol, data: bytes) -> bytes | CloseReason:
        """A part of a frame's payload, inflated."""
        if self._in_control:
            return data
        self._wire_bytes += len(data)
        self._frame_bytes += len(data)
        return self._inflate(data) if self._compressed else data

    def frame_inbound_complete(self, proto: FrameDecoder | FrameProtocol, fin: bool) -> bytes | CloseReason | None:
        """What the end of a frame adds to its payload."""
        if self._in_control:
            return None
        self._in_message = not fin
        if not fin:
            self._empty_fragments += not self._frame_bytes
            return CloseReason.POLICY_VIOLATION if self._empty_fragments > _EMPTY_FRAGMENTS_MAX else None
        if not self._compressed:
            return None
        rest = self._inflate(_EMPTY_BLOCK)
        if self._terms and self._terms.client_no_context_takeover:
            self._inflater = None
        return rest

    def _inflate(self, data: bytes) -> bytes | CloseReason:
        """Never more than one byte above the limit is made, whatever `data` would inflate to."""
        parts: list[bytes] = []
        while True:
            if self._inflater is None:
                self._inflater = zlib.decompressobj(-_WINDOW_BITS_INFLATE)
            try:
                part = self._inflater.decompress(data, self._max_message - self._message_bytes + 1)
            except zlib.error:
                return CloseReason.INVALID_FRAME_PAYLOAD_DATA
            parts.append(part)
            self._message_bytes += len(part)
            if self._message_bytes > self._max_message:
                return CloseReason.MESSAGE_TOO_BIG
            if not self._inflater.eof:
                return b"".join(parts)
            # RFC 7692 7.2.3.4: a sender may flush by a final block; what follows is a new stream.
            data, self._inflater = self._inflater.unused_data, None
            self._final_blocks += 1
            if self._final_blocks > _FINAL_BLOCKS_MAX:
                return CloseReason.POLICY_VIOLATION
            if not data:
                return b"".join(parts)

    def deflate(self, data: bytes) -> bytes | None:
        """A whole message's payload deflated, or None for one that goes as it is: an empty one has no shorter form."""
        if self._terms is None or not data:
            return None
        if self._deflater is None:
            bits = min(self._terms.server_window_bits or _WINDOW_BITS_OWN_MAX, _WINDOW_BITS_OWN_MAX)
            self._deflater = zlib.compressobj(wbits=-bits, memLevel=_MEMORY_LEVEL)
        packed = self._deflater.compress(data) + self._deflater.flush(zlib.Z_SYNC_FLUSH)
        if self._terms.server_no_context_takeover:
            self._deflater = None
        return packed.removesuffix(_EMPTY_BLOCK)
