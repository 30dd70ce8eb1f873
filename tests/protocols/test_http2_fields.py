"""protocols.http2_fields: what is malformed, what is well-formed and not served, and h2 as the oracle for both."""

from __future__ import annotations

import pytest
from h2.exceptions import ProtocolError
from h2.utilities import HeaderValidationFlags, validate_headers
from hypothesis import given
from hypothesis import strategies as st

from protocols.http1 import Refusal, Request
from protocols.http1_guard import FIELDS_MAX, LENGTH_DIGITS_MAX
from protocols.http2_fields import (
    Field,
    MalformedMessage,
    check_trailers,
    is_sendable,
    read_request,
)

MAX = 4096
GET: list[Field] = [
    (b":method", b"GET"),
    (b":scheme", b"https"),
    (b":authority", b"localhost:8000"),
    (b":path", b"/a?b"),
]
OPEN_WS: list[Field] = [
    (b":method", b"CONNECT"),
    (b":protocol", b"websocket"),
    (b":scheme", b"https"),
    (b":path", b"/v1/ws"),
    (b":authority", b"localhost"),
    (b"sec-websocket-version", b"13"),
]


def changed(name: bytes, value: bytes | None) -> list[Field]:
    """GET with one field's value replaced, or without it."""
    fields = [(k, value if k == name and value is not None else v) for k, v in GET]
    return [field for field in fields if value is not None or field[0] != name]


def read(fields: list[Field], *, ended: bool = True) -> Request | Refusal:
    return read_request(fields, ended=ended, max_header=MAX)


def request(fields: list[Field], *, ended: bool = True) -> Request:
    found = read(fields, ended=ended)
    assert isinstance(found, Request)
    return found


class TestRequests:
    def test_the_same_form_as_http1(self) -> None:
        found = request([*GET, (b"accept", b"*/*")])
        assert found == Request(
            method="GET",
            target="/a?b",
            http_version="2",
            headers=((b"host", b"localhost:8000"), (b"accept", b"*/*")),
            content_length=None,
            chunked=False,
            expect_continue=False,
            keep_alive=True,
            upgrade=False,
        )
        assert (found.path, found.host) == ("/a?b", "localhost:8000")

    def test_host_in_place_of_authority_and_beside_it(self) -> None:
        for fields in (
            [*changed(b":authority", None), (b"host", b"h")],
            [*changed(b":authority", b"h"), (b"host", b"h")],
        ):
            assert request(fields).headers == ((b"host", b"h"),)

    def test_a_body(self) -> None:
        found = request([*GET, (b"content-length", b"5"), (b"expect", b"100-continue")], ended=False)
        assert (found.content_length, found.expect_continue) == (5, True)
        assert not request([*GET, (b"expect", b"100-continue")]).expect_continue

    def test_a_websocket_is_a_get_that_upgrades(self) -> None:
        """RFC 8441."""
        found = request(OPEN_WS, ended=False)
        assert (found.method, found.upgrade, found.path, found.content_length) == ("GET", True, "/v1/ws", None)

    def test_trailers_may_be_asked_for(self) -> None:
        assert request([*GET, (b"te", b"trailers")])


MALFORMED: dict[str, list[Field]] = {
    "upper case": [*GET, (b"X-A", b"1")],
    "an empty name": [*GET, (b"", b"1")],
    "a space in a name": [*GET, (b"x a", b"1")],
    "a colon in a name": [*GET, (b"x:a", b"1")],
    "not ASCII in a name": [*GET, ("x-ä".encode(), b"1")],
    "NUL in a value": [*GET, (b"x-a", b"1\0")],
    "CR in a value": [*GET, (b"x-a", b"1\r2")],
    "LF in a value": [*GET, (b"x-a", b"1\n2")],
    "DEL in a value": [*GET, (b"x-a", b"1\x7f")],
    "space before a value": [*GET, (b"x-a", b" 1")],
    "tab behind a value": [*GET, (b"x-a", b"1\t")],
    "a line feed in :path": changed(b":path", b"/\n"),
    "an empty :path": changed(b":path", b""),
    "an empty :method": changed(b":method", b""),
    "a space in :method": changed(b":method", b"G T"),
    "an empty :scheme": changed(b":scheme", b""),
    "no :method": changed(b":method", None),
    "no :scheme": changed(b":scheme", None),
    "no :path": changed(b":path", None),
    "no authority": changed(b":authority", None),
    ":path twice": [*GET[:3], (b":path", b"/"), GET[3]],
    "an unknown pseudo-header": [(b":x", b"1"), *GET],
    "one of responses": [(b":status", b"200"), *GET],
    "a pseudo-header behind a field": [*GET[:3], (b"x-a", b"1"), GET[3]],
    "connection": [*GET, (b"connection", b"close")],
    "te": [*GET, (b"te", b"gzip")],
    "two hosts": [*GET, (b"host", b"localhost:8000"), (b"host", b"localhost:8000")],
    "host differs": [*GET, (b"host", b"other")],
    "content-length twice": [*GET, (b"content-length", b"0"), (b"content-length", b"0")],
    "content-length of letters": [*GET, (b"content-length", b"1e3")],
    "content-length signed": [*GET, (b"content-length", b"+1")],
    "content-length without a body": [*GET, (b"content-length", b"1")],
    "CONNECT with :path": [(b":method", b"CONNECT"), *GET[2:]],
    "CONNECT without :authority": [(b":method", b"CONNECT"), (b"host", b"a:1")],
    ":protocol with GET": [*GET[:1], (b":protocol", b"websocket"), *GET[1:]],
    "extended CONNECT without :path": [f for f in OPEN_WS if f[0] != b":path"],
}

REFUSED: dict[str, tuple[int, list[Field]]] = {
    "CONNECT": (501, [(b":method", b"CONNECT"), (b":authority", b"other:443")]),
    "another :protocol": (501, [(k, b"connect-udp" if k == b":protocol" else v) for k, v in OPEN_WS]),
    "a path of another form": (400, changed(b":path", b"a")),
    "an absolute path": (400, changed(b":path", b"http://a/")),
    "a fragment": (400, changed(b":path", b"/#a")),
    "a path that is not ASCII": (400, changed(b":path", "/ä".encode())),
    "* for GET": (400, changed(b":path", b"*")),
    "user information": (400, changed(b":authority", b"me@host")),
    "an empty authority": (400, changed(b":authority", b"")),
    "a port out of range": (400, changed(b":authority", b"a:99999")),
    "another scheme": (400, changed(b":scheme", b"ftp")),
    "too many fields": (431, [*GET, *[(b"a", b"b")] * (FIELDS_MAX + 1)]),
    "too large": (431, [*GET, (b"x-a", b"b" * MAX)]),
    "too long a body": (413, [*GET, (b"content-length", b"1" * (LENGTH_DIGITS_MAX + 1))]),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed(case: str) -> None:
    """RFC 9113 sections 8.1.1, 8.2 and 8.3."""
    with pytest.raises(MalformedMessage):
        read(MALFORMED[case])


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    status, fields = REFUSED[case]
    found = read(fields, ended=False)
    assert isinstance(found, Refusal)
    assert found.status == status


def test_a_websocket_whose_stream_has_ended_is_refused() -> None:
    found = read(OPEN_WS, ended=True)
    assert isinstance(found, Refusal) and found.status == 400


class TestTrailers:
    def test_plain_ones(self) -> None:
        check_trailers([(b"x-checksum", b"abc")])

    @pytest.mark.parametrize("field", [(b":path", b"/"), (b"X-A", b"1"), (b"connection", b"close"), (b"x", b"\n")])
    def test_malformed(self, field: Field) -> None:
        with pytest.raises(MalformedMessage):
            check_trailers([field])


NAMES = st.sampled_from(
    [
        *(name for name, _ in GET),
        *(b":protocol", b":status", b":x", b"host", b"te", b"connection", b"cookie", b"x-a", b"X-A", b"", b":", b"a:b"),
    ]
) | st.binary(max_size=6)
VALUES = st.sampled_from(
    [b"GET", b"CONNECT", b"https", b"localhost", b"/", b"", b" a", b"a\n", b"trailers", b"websocket", b"\xff"]
) | st.binary(max_size=6)


class TestAgainstH2:
    """h2's own checks are off, because they end the connection; ours must refuse no less."""

    @given(fields=st.lists(st.tuples(NAMES, VALUES), max_size=8), behind=st.booleans())
    def test_what_h2_refuses_is_refused(self, fields: list[Field], behind: bool) -> None:
        fields = [*GET, *fields] if behind else fields
        flags = HeaderValidationFlags(
            is_client=False, is_trailer=False, is_response_header=False, is_push_promise=False
        )
        try:
            list(validate_headers(fields, flags))
        except (ProtocolError, IndexError):  # an empty name runs into h2's first index
            with pytest.raises(MalformedMessage):
                read(fields)

    @given(fields=st.lists(st.tuples(NAMES, VALUES), max_size=4))
    def test_in_trailers_too(self, fields: list[Field]) -> None:
        flags = HeaderValidationFlags(is_client=False, is_trailer=True, is_response_header=False, is_push_promise=False)
        try:
            list(validate_headers(fields, flags))
        except (ProtocolError, IndexError):
            with pytest.raises(MalformedMessage):
                check_trailers(fields)

    @given(value=st.binary(max_size=8))
    def test_values_that_are_sent(self, value: bytes) -> None:
        flags = HeaderValidationFlags(is_client=True, is_trailer=False, is_response_header=True, is_push_promise=False)
        if is_sendable(value):
            list(validate_headers([(b":status", b"200"), (b"x", value)], flags))
