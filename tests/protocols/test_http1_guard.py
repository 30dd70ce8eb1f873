"""The byte guard: what is refused, with which status, and that splitting the bytes changes nothing."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocols import http1_guard
from protocols.http1_guard import Guard, Malformed

HOST = b"Host: a.example\r\n"
HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: a.example\r\n\r\n"


def run(data: bytes, cuts: list[int] | None = None, *, max_header: int = 4096) -> tuple[bytes, tuple[int, str] | None]:
    """All pieces of the first request joined, chunks taken apart, and the refusal if there is one."""
    guard = Guard(max_header=max_header)
    edges = sorted({min(cut, len(data)) for cut in cuts or []} | {0, len(data)})
    out = bytearray()
    head_done = False
    try:
        for start, end in itertools.pairwise(edges):
            guard.buffer += data[start:end]
            while (piece := guard.next_piece()) is not None:
                out += dechunk(piece) if head_done and guard.framing.chunked else piece
                head_done = True
    except Malformed as fault:
        return bytes(out), (fault.status, fault.message)
    return bytes(out), None


def dechunk(piece: bytes) -> bytes:
    """The data of a canonical piece; a last chunk shows as a single LF."""
    ended = piece.endswith(b"0\r\n\r\n")
    piece = piece.removesuffix(b"0\r\n\r\n")
    size, _, rest = piece.partition(b"\r\n")
    assert not piece or len(rest) == int(size, 16) + 2
    return rest[:-2] + (b"\n" if ended else b"")


def verdict(data: bytes, **limits: int) -> int | None:
    """The status of the refusal, the same for the bytes in one piece and one by one."""
    whole = run(data, **limits)
    assert run(data, list(range(len(data))), **limits) == whole
    return whole[1] and whole[1][0]


def post(*fields: bytes, body: bytes = b"", version: bytes = b"1.1") -> bytes:
    return b"POST / HTTP/%b\r\n" % version + HOST + b"".join(field + b"\r\n" for field in fields) + b"\r\n" + body


REQUEST_LINES_REFUSED = {
    "three spaces": b"GET  / HTTP/1.1",
    "tab": b"GET\t/ HTTP/1.1",
    "no version": b"GET /",
    "trailing space": b"GET / HTTP/1.1 ",
    "leading space": b" GET / HTTP/1.1",
    "HTTP/3.0": b"GET / HTTP/3.0",
    "HTTP/2.0": b"PRI * HTTP/2.0",
    "HTTP/1.2": b"GET / HTTP/1.2",
    "HTTP/0.9": b"GET / HTTP/0.9",
    "HTTP/1.10": b"GET / HTTP/1.10",
    "lower case": b"GET / http/1.1",
    "empty method": b" / HTTP/1.1",
    "bad method": b"G(T / HTTP/1.1",
    "space in target": b"GET /a b HTTP/1.1",
    "control in target": b"GET /a\x01 HTTP/1.1",
    "high byte in target": b"GET /\xe9 HTTP/1.1",
    "fragment": b"GET /a#b HTTP/1.1",
    "no slash": b"GET a HTTP/1.1",
    "asterisk for GET": b"GET * HTTP/1.1",
    "other scheme": b"GET ftp://a/ HTTP/1.1",
    "absolute without host": b"GET http:///a HTTP/1.1",
    "absolute with user": b"GET http://me@a/ HTTP/1.1",
    "absolute with a port out of range": b"GET http://a:65536/ HTTP/1.1",
    "bare CR": b"GET /\r HTTP/1.1",
    "TLS": b"\x16\x03\x01\x02\x00",
}


@pytest.mark.parametrize("line", REQUEST_LINES_REFUSED.values(), ids=REQUEST_LINES_REFUSED)
def test_request_line_refused(line: bytes) -> None:
    """RFC 9112 2.3, 3, 3.2."""
    assert verdict(line + b"\r\n" + HOST + b"\r\n") == 400


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1",
        b"OPTIONS * HTTP/1.1",
        b"GET http://a.example/x?y HTTP/1.1",
        b"GET HTTPS://[::1]:8000 HTTP/1.1",
        b"GET http://a?q HTTP/1.1",
        b"M-SEARCH /%2f?a=<|> HTTP/1.0",
    ],
)
def test_request_line_accepted(line: bytes) -> None:
    assert verdict(line + b"\r\n" + HOST + b"\r\n") is None


def test_tls_is_told_at_its_first_byte() -> None:
    """A greeting of another protocol may never send a line feed."""
    assert verdict(b"\x16") == 400


def test_connect_is_not_implemented() -> None:
    assert verdict(b"CONNECT a.example:443 HTTP/1.1\r\n" + HOST + b"\r\n") == 501


FIELDS_REFUSED = {
    "space before the colon": b"X : 1",
    "tab before the colon": b"X\t: 1",
    "no colon": b"X",
    "empty name": b": 1",
    "obs-fold": b"X: 1\r\n 2",
    "obs-fold by tab": b"X: 1\r\n\t2",
    "bare LF": b"X: 1\nY: 2",
    "bare CR": b"X: 1\rY: 2",
    "NUL in value": b"X: 1\x002",
    "NUL in name": b"X\x00: 1",
    "control in value": b"X: \x01",
    "DEL in value": b"X: \x7f",
    "vertical tab in value": b"X: \x0b",
    "high byte in name": b"\xe9: 1",
    "second Host": b"Host: a.example",
    "Content-Length with sign": b"Content-Length: +5",
    "negative Content-Length": b"Content-Length: -5",
    "hexadecimal Content-Length": b"Content-Length: 0x5",
    "empty Content-Length": b"Content-Length:",
    "Content-Length with underscore": b"Content-Length: 0_5",
    "Content-Length with inner space": b"Content-Length: 5 5",
}


@pytest.mark.parametrize("field", FIELDS_REFUSED.values(), ids=FIELDS_REFUSED)
def test_field_refused(field: bytes) -> None:
    """RFC 9112 2.2, 5.1, 5.2; RFC 9110 5.5, 8.6."""
    assert verdict(post(field, body=b"hello")) == 400


def test_fold_before_the_first_field_is_refused() -> None:
    """RFC 9112 2.2: whitespace between the start line and the first field."""
    assert verdict(b"GET / HTTP/1.1\r\n X: 1\r\n" + HOST + b"\r\n") == 400


@pytest.mark.parametrize("field", [b"X:", b"X:1", b"X:\t 1 \t", b"X: \xff\x80", b"!#$%&'*+-.^_`|~0: ,;="])
def test_field_accepted(field: bytes) -> None:
    assert verdict(post(field)) is None


@pytest.mark.parametrize(
    "host",
    [
        b"",
        b" ",
        b"a b",
        b"a/b",
        b"a@b",
        b"a:b",
        b"a:65536",
        b"a:123456",
        b"[::1",
        b"[]",
        b"a,b",
        b"a%zz",
        b"a#",
        b"\xe9",
    ],
)
def test_host_refused(host: bytes) -> None:
    """RFC 9112 3.2, RFC 9110 7.2."""
    assert verdict(b"GET / HTTP/1.1\r\nHost:" + host + b"\r\n\r\n") == 400


@pytest.mark.parametrize("host", [b"a", b"a.example:80", b"127.0.0.1:", b"[::1]:8000", b"[v1.x:y]", b"a%20b", b"a_b"])
def test_host_accepted(host: bytes) -> None:
    assert verdict(b"GET / HTTP/1.1\r\nHost: " + host + b"\r\n\r\n") is None


def test_host_is_needed_in_http11_only() -> None:
    assert verdict(b"GET / HTTP/1.1\r\n\r\n") == 400
    assert verdict(b"GET / HTTP/1.0\r\n\r\n") is None


SMUGGLING = {
    "CL 0 and TE": (b"Content-Length: 0", b"Transfer-Encoding: chunked"),
    "CL 5 and TE": (b"Content-Length: 5", b"Transfer-Encoding: chunked"),
    "TE and CL": (b"Transfer-Encoding: chunked", b"Content-Length: 5"),
    "chunked, gzip": (b"Transfer-Encoding: chunked, gzip",),
    "gzip, chunked": (b"Transfer-Encoding: gzip, chunked",),
    "two TE": (b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
    "TE identity": (b"Transfer-Encoding: identity",),
    "TE empty": (b"Transfer-Encoding:",),
    "TE xchunked": (b"Transfer-Encoding: xchunked",),
    "TE quoted": (b'Transfer-Encoding: "chunked"',),
    "TE with parameter": (b"Transfer-Encoding: chunked;q=1",),
    "TE chunked twice": (b"Transfer-Encoding: chunked, chunked",),
    "CL 5, 6": (b"Content-Length: 5, 6",),
    "CL 5, 5": (b"Content-Length: 5, 5",),
    "CL 5 and CL 6": (b"Content-Length: 5", b"Content-Length: 6"),
    "CL 5 twice": (b"Content-Length: 5", b"Content-Length: 5"),
}


@pytest.mark.parametrize("fields", SMUGGLING.values(), ids=SMUGGLING)
def test_a09_ambiguous_framing_is_refused(fields: tuple[bytes, ...]) -> None:
    """Case A09; RFC 9112 6.1, 6.3: nothing of the body or behind it gets through."""
    data = post(*fields, body=b"0\r\n\r\n" + HIDDEN)
    assert verdict(data) == 400
    assert run(data)[0] == b""


def test_transfer_encoding_in_http10_is_refused() -> None:
    """RFC 9112 6.1."""
    assert verdict(post(b"Transfer-Encoding: chunked", version=b"1.0", body=b"0\r\n\r\n")) == 400


def test_coding_names_know_no_case() -> None:
    assert verdict(post(b"tRANSFER-eNCODING: \tChunKed ", body=b"0\r\n\r\n")) is None


def test_a01_huge_content_length() -> None:
    """Case A01: 46 digits are a size that nobody takes, known as soon as the head is."""
    assert verdict(post(b"Content-Length: " + b"9" * 46, body=b"hello world")) == 413
    assert verdict(post(b"Content-Length: " + b"9" * 18)) is None


def chunked(body: bytes) -> bytes:
    return post(b"Transfer-Encoding: chunked", body=body)


SIZES_REFUSED = [
    b"+5",
    b"0x5",
    b"0_5",
    b"5\x0b",
    b"-0",
    b"",
    b"1" * 18,
    b"0" * 17,
    b" 5",
    b"5 ",
    b"5\t",
    b"g",
    b"5,5",
    b"\xb5",
]


@pytest.mark.parametrize("size", SIZES_REFUSED)
def test_a08_malformed_chunk_size(size: bytes) -> None:
    """Case A08; RFC 9112 7.1."""
    data = chunked(size + b"\r\nhello\r\n0\r\n\r\n" + HIDDEN)
    assert verdict(data) == 400
    assert b"hello" not in run(data)[0]


EXTENSIONS_REFUSED = [
    b";",
    b";=",
    b";a=",
    b";a b",
    b";a=b c",
    b';a="b',
    b';a="\x01"',
    b";a;;b",
    b";a\r",
    b';a="b"c',
    b";a=\xff",
]


@pytest.mark.parametrize("extension", EXTENSIONS_REFUSED)
def test_malformed_chunk_extension(extension: bytes) -> None:
    """RFC 9112 7.1.1."""
    assert verdict(chunked(b"5" + extension + b"\r\nhello\r\n0\r\n\r\n")) == 400


@pytest.mark.parametrize(
    "size",
    [b"5", b"005", b"0000000000000005", b"5;ext=1", b"5;a", b"5 ; a = b", b'5;a="x\\";\xe9";b', b"5\t;a;b=c"],
)
def test_a08_legal_chunk_forms(size: bytes) -> None:
    """Case A08: legal forms still work; trailers are checked and dropped."""
    data = chunked(size + b"\r\nhello\r\n00;e\r\nX-Trailer: 1\r\n\r\n" + HIDDEN)
    assert verdict(data) is None
    assert run(data)[0].endswith(b"\r\n\r\nhello\n")


BODIES_REFUSED = {
    "LF behind the size": b"5\nhello\r\n0\r\n\r\n",
    "data too long": b"5\r\nhelloX\r\n0\r\n\r\n",
    "LF behind the data": b"5\r\nhello\n0\r\n\r\n",
    "CR behind the data": b"5\r\nhello\rX0\r\n\r\n",
    "CR in the size line": b"5\rX\r\n",
    "space in a trailer's name": b"0\r\nX : 1\r\n\r\n",
    "folded trailer": b"0\r\n X: 1\r\n\r\n",
    "trailer without colon": b"0\r\nX\r\n\r\n",
    "LF behind a trailer": b"0\r\nX: 1\n\r\n",
    "NUL in a trailer": b"0\r\nX: \x00\r\n\r\n",
    "LF for the last line": b"0\r\n\n",
}


@pytest.mark.parametrize("body", BODIES_REFUSED.values(), ids=BODIES_REFUSED)
def test_malformed_chunk_framing(body: bytes) -> None:
    """RFC 9112 2.2, 7.1, 7.1.2."""
    assert verdict(chunked(body)) == 400


def test_limits() -> None:
    """The request line has its own answer (414); the header section and the trailers share another (431)."""
    line = b"GET /%b HTTP/1.1\r\n"
    head = line % b"" + HOST
    assert verdict(line % (b"a" * 200) + HOST + b"\r\n", max_header=100) == 414
    assert verdict(b"GET /" + b"a" * 96, max_header=100) == 414
    assert verdict(b"GET /" + b"a" * 95, max_header=100) is None
    assert verdict(head + b"X: " + b"1" * 100 + b"\r\n\r\n", max_header=100) == 431
    assert verdict(head + b"X: " + b"1" * 100, max_header=100) == 431
    assert verdict(head + b"\r\n", max_header=len(head) + 2) is None
    assert verdict(head + b"\r\n", max_header=len(head) + 1) == 431
    assert verdict(chunked(b"0\r\nX: " + b"1" * 100 + b"\r\n\r\n"), max_header=100) == 431


def test_counted_limits() -> None:
    fields = [b"X%d: 1" % index for index in range(http1_guard.FIELDS_MAX)]
    assert verdict(post(*fields[1:])) is None
    assert verdict(post(*fields)) == 431
    assert verdict(chunked(b"1;" + b"a" * http1_guard.CHUNK_LINE_BYTES_MAX + b"\r\n")) == 400
    extended = b"1;" + b"a" * 1000 + b"\r\nx\r\n"
    assert verdict(chunked(extended * 16)) is None
    assert verdict(chunked(extended * 17)) == 400


def test_empty_lines_before_the_request() -> None:
    """RFC 9112 2.2 asks for one; more than a few are refused, bare LF always."""
    request = b"GET / HTTP/1.1\r\n" + HOST + b"\r\n"
    assert run(b"\r\n\r\n" + request) == (request, None)
    assert verdict(b"\r\n" * http1_guard.EMPTY_LINES_MAX + request) is None
    assert verdict(b"\r\n" * (http1_guard.EMPTY_LINES_MAX + 1)) == 400
    assert verdict(b"\n" + request) == 400


def test_one_request_after_another() -> None:
    guard = Guard(max_header=4096)
    guard.buffer += post(b"Content-Length: 2", body=b"ok") + HIDDEN
    assert [guard.next_piece(), guard.next_piece(), guard.next_piece()] == [post(b"Content-Length: 2"), b"ok", None]
    guard.start_next()
    assert guard.next_piece() == HIDDEN
    assert guard.complete and not guard.buffer


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        (b"/a?b", (b"", b"/a?b")),
        (b"*", (b"", b"*")),
        (b"HTTP://b:80/a?c", (b"b:80", b"/a?c")),
        (b"https://[::1]?c", (b"[::1]", b"/?c")),
        (b"http://b:", (b"b", b"/")),
    ],
)
def test_split_absolute(target: bytes, parts: tuple[bytes, bytes]) -> None:
    assert http1_guard.split_absolute(target) == parts


def test_many_chunks_become_one_piece() -> None:
    guard = Guard(max_header=4096)
    guard.buffer += chunked(b"1\r\nx\r\n" * 1000 + b"0\r\n\r\nGET")
    guard.next_piece()
    assert guard.next_piece() == b"3e8\r\n" + b"x" * 1000 + b"\r\n0\r\n\r\n"
    assert guard.complete and guard.next_piece() is None and guard.buffer == b"GET"


def test_state_as_the_shell_sees_it() -> None:
    guard = Guard(max_header=4096)
    seen = []
    for byte in b"\r\nGET / HTTP/1.1\r\n" + HOST + b"\r\n":
        guard.buffer.append(byte)
        guard.next_piece()
        seen.append((guard.awaiting, guard.in_head, guard.complete))
    assert seen[:2] == [(True, False, False)] * 2
    assert set(seen[2:-1]) == {(False, True, False)}
    assert seen[-1] == (False, False, True)


# Whatever is built of these is near enough to a request to reach every state.
FRAGMENTS = st.sampled_from(
    (
        *(b"GET / HTTP/1.1\r\n", b"POST http://a/ HTTP/1.1\r\n", b"POST /x HTTP/1.0\r\n", HOST, b"\r\n", b"\n", b"\r"),
        *(b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"X: 1\r\n", b": ", b" ", b"hello", b"\x00"),
        *(b"5\r\n", b"5;a=b\r\n", b"0\r\n", b"hello\r\n", b"+5\r\n", b"A" * 60),
    )
)


@given(st.lists(FRAGMENTS, max_size=12).map(b"".join) | st.binary(max_size=80), st.lists(st.integers(0, 200)))
@example(chunked(b"5\r\nhello\r\n+5\r\n"), [])
@example(chunked(b"5\r\nhello\r\n5\r\nhelloX"), [])
def test_splits_change_nothing(data: bytes, cuts: list[int]) -> None:
    whole = run(data, max_header=120)
    assert run(data, cuts, max_header=120) == whole
    assert run(data, list(range(len(data))), max_header=120) == whole


def test_dripped_bytes_cost_linear_work() -> None:
    """Each byte is searched once: the scan goes on where it ended, and the buffer isn't copied."""

    class Counting(bytearray):
        searched = 0

        def find(self, sub: bytes, start: int = 0) -> int:  # type: ignore[override]
            Counting.searched += len(self) - start
            return super().find(sub, start)

    guard = Guard(max_header=1 << 20)
    guard.buffer = Counting()
    data = b"GET /" + b"a" * 20_000
    for byte in data:
        guard.buffer.append(byte)
        guard.next_piece()
    assert Counting.searched == len(data)
