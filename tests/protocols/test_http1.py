"""One HTTP/1.1 connection, with h11 as the peer: what it reads, whose turn it is, and when it ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.http1 import Body, BodyEnd, Event, Http1, Refusal, Request
from protocols.http1_guard import Guard
from tests.support.http1_requests import GET, HEADERS, HOST, answer, connect, post


def merged(events: Iterable[Event]) -> list[Event]:
    """Neighbouring Body events joined: how a body is cut means nothing."""
    out: list[Event] = []
    for event in events:
        if isinstance(event, Body) and out and isinstance(out[-1], Body):
            out[-1] = Body(out[-1].data + event.data)
        else:
            out.append(event)
    return out


def body_of(events: Iterable[Event]) -> bytes:
    return b"".join(event.data for event in events if isinstance(event, Body))


# Requests


def test_request() -> None:
    http = Http1(max_header=4096)
    events = http.receive(post(b"hello", b"X-One: 1", b"x-one:  2 "))
    assert events == [
        Request(
            method="POST",
            target="/",
            http_version="1.1",
            headers=((b"host", b"a.example"), (b"content-length", b"5"), (b"x-one", b"1"), (b"x-one", b"2")),
            content_length=5,
            chunked=False,
            expect_continue=False,
            keep_alive=True,
            upgrade=False,
        ),
        Body(b"hello"),
        BodyEnd(),
    ]
    request = events[0]
    assert isinstance(request, Request)
    assert request.header(b"x-one") == b"1"
    assert request.header(b"x-two") is None


@pytest.mark.parametrize(
    ("target", "path", "host"),
    [
        (b"/a?b", "/a?b", "a.example"),
        (b"http://b.example:81/a?b", "/a?b", "b.example:81"),
        (b"http://[::1]?b", "/?b", "[::1]"),
        (b"http://b.example:", "/", "b.example"),
        (b"*", "*", "a.example"),
    ],
)
def test_target_forms(target: bytes, path: str, host: str) -> None:
    """RFC 9112 3.2: an absolute target beats the Host field."""
    request = Http1(max_header=4096).receive(b"OPTIONS %b HTTP/1.1\r\n" % target + HOST + b"\r\n")[0]
    assert isinstance(request, Request)
    assert (request.path, request.host) == (path, host)


@pytest.mark.parametrize(
    ("fields", "upgrade"),
    [
        ((b"Connection: keep-alive, Upgrade", b"Upgrade: WebSocket"), True),
        ((b"Connection: keep-alive", b"Connection: upgrade", b"Upgrade: h2c, websocket"), True),
        ((b"Connection: keep-alive", b"Upgrade: websocket"), False),
        ((b"Connection: upgrade", b"Upgrade: h2c"), False),
        ((b"Connection: upgrade", b"Upgrade: websocket", b"Content-Length: 5"), False),
    ],
)
def test_upgrade_is_recognised(fields: tuple[bytes, ...], upgrade: bool) -> None:
    data = b"GET / HTTP/1.1\r\n" + HOST + b"\r\n".join(fields) + b"\r\n\r\n"
    request = Http1(max_header=4096).receive(data)[0]
    assert isinstance(request, Request)
    assert request.upgrade is upgrade


def test_unknown_upgrades_are_ordinary_requests() -> None:
    """RFC 9110 7.8: a server may ignore Upgrade; the connection lives on."""
    http = connect(b"GET / HTTP/1.1\r\n" + HOST + b"Connection: upgrade\r\nUpgrade: h2c\r\n\r\n" + GET)
    answer(http)
    assert not http.must_close
    assert isinstance(http.next_request()[0], Request)


def test_upgrade_takes_the_bytes_behind_it() -> None:
    http = connect(b"GET / HTTP/1.1\r\n" + HOST + b"Connection: upgrade, close\r\nUpgrade: websocket\r\n\r\n\x81\x80")
    assert http.receive(b"1234") == []
    assert http.buffered == 6
    assert http.take_upgrade_bytes() == b"\x81\x801234"
    assert http.receive(b"more") == []
    with pytest.raises(RuntimeError):
        http.take_upgrade_bytes()
    with pytest.raises(RuntimeError):
        connect(GET).take_upgrade_bytes()


def test_refused_upgrade_closes() -> None:
    """Case C07: the bytes behind it may be frames already, so they are never read as a request."""
    http = connect(b"GET / HTTP/1.1\r\n" + HOST + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n" + GET)
    assert b"Connection: close\r\n" in answer(http)
    assert http.must_close


def test_refusal_is_told_once_and_can_be_answered() -> None:
    http = Http1(max_header=4096)
    assert [type(event) for event in http.receive(b"GET / HTTP/3.0\r\n" + HOST + b"\r\n")] == [Refusal]
    assert http.receive(GET) == [] == http.receive_eof()
    assert not (http.awaiting_request or http.head_started or http.buffered)
    data = http.head(400, HEADERS, length=2)
    assert data.startswith(b"HTTP/1.1 400 Bad Request\r\n") and b"Connection: close\r\n" in data
    assert http.body(b"no") + http.end() == b"no"
    assert http.must_close


def test_refusal_of_unknown_length_is_delimited_by_close() -> None:
    """Nobody knows yet what the peer understands; behind a good request it is known."""
    http = connect(b"nonsense\r\n")
    assert b"chunked" not in answer(http, b"no", length=False)
    http = connect(GET + b"nonsense\r\n")
    answer(http)
    assert isinstance(http.next_request()[0], Refusal)
    assert answer(http, b"no", length=False).endswith(b"\r\n\r\n2\r\nno\r\n0\r\n\r\n")
    assert http.must_close


def test_a09_nothing_behind_a_refused_body_runs() -> None:
    """Case A09: the bytes that look like a second request are dropped."""
    http = Http1(max_header=4096)
    chunked = b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
    events = http.receive(chunked + b"5\r\nhello\r\n+5\r\n" + GET)
    assert [type(event) for event in events] == [Request, Body, Refusal]
    answer(http)
    assert http.must_close
    with pytest.raises(RuntimeError):
        http.next_request()


def test_a01_huge_content_length() -> None:
    """Case A01: refused with 413 as soon as the head is there, with the socket kept open by the client."""
    data = b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: " + b"9" * 46 + b"\r\n\r\nhello world"
    refusal = Http1(max_header=4096).receive(data)[-1]
    assert isinstance(refusal, Refusal)
    assert refusal.status == 413


def test_limits_have_their_own_status() -> None:
    statuses = [
        event.status
        for data in (b"GET /" + b"a" * 5000, b"GET / HTTP/1.1\r\nX: " + b"a" * 5000)
        for event in Http1(max_header=4096).receive(data)
        if isinstance(event, Refusal)
    ]
    assert statuses == [414, 431]


def test_h11_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should the guard ever let something through that h11 refuses, it is a refusal like any other."""
    monkeypatch.setattr(Guard, "next_piece", lambda guard, head: b"nonsense\r\n\r\n")
    http = Http1(max_header=4096)
    (refusal,) = http.receive(b"x")
    assert isinstance(refusal, Refusal)
    assert refusal.status == 400
    answer(http)
    assert http.must_close


# Pipelining, keep-alive, EOF


def test_pipelined_requests_wait_their_turn() -> None:
    """RFC 9112 9.3.2."""
    http = Http1(max_header=4096)
    assert len(http.receive(post(b"1") + post(b"2") + b"\r\n" + GET[:-2])) == 3
    assert http.buffered == len(post(b"2") + GET)
    answer(http)
    assert not http.must_close
    assert body_of(http.next_request()) == b"2"
    answer(http)
    assert http.next_request() == []
    assert http.head_started and not http.awaiting_request and not http.buffered
    assert [type(event) for event in http.receive(b"\r\n")] == [Request, BodyEnd]


def test_silence_between_requests() -> None:
    http = connect(GET)
    assert not http.awaiting_request
    answer(http)
    http.next_request()
    assert http.awaiting_request and not http.head_started
    http.receive(b"\r\n")
    assert http.awaiting_request
    http.receive(b"G")
    assert http.head_started


def test_bytes_behind_connection_close_are_ignored() -> None:
    """RFC 9112 9.6."""
    http = connect(post(b"hello", b"Connection: close") + GET)
    assert http.receive(GET) == []
    assert http.buffered == 0
    assert b"Connection: close\r\n" in answer(http)
    assert http.must_close


def test_close_on_the_servers_wish() -> None:
    http = connect(GET)
    data = http.head(200, HEADERS, length=0, close=True)
    assert data.count(b"Connection: close\r\n") == 1
    http.end()
    assert http.must_close


def test_http10_gets_no_chunks_and_no_keep_alive() -> None:
    """RFC 9112 6.1, 9.3."""
    http = Http1(max_header=4096)
    events = http.receive(post(b"hello", b"Connection: keep-alive", version=b"1.0"))
    assert isinstance(events[0], Request)
    assert not events[0].keep_alive
    data = answer(http, b"streamed", length=False)
    assert b"Transfer-Encoding" not in data and b"Connection: close\r\n" in data
    assert data.endswith(b"\r\n\r\nstreamed")
    assert http.must_close


@pytest.mark.parametrize("length", range(1, len(post(b"hello"))))
def test_eof_that_cuts_a_request(length: int) -> None:
    http = Http1(max_header=4096)
    events = http.receive(post(b"hello")[:length]) + http.receive_eof()
    assert isinstance(events[-1], Refusal)
    assert http.receive_eof() == []


def test_eof_between_requests_is_no_fault() -> None:
    """Case A13: after a half-close the response completes, then the connection ends."""
    for data in (b"", b"\r\n"):
        http = connect(data)
        assert http.receive_eof() == []
        assert http.must_close
    http = connect(GET + b"\r\n")
    assert http.receive_eof() == []
    answer(http)
    assert http.must_close


def test_a13_eof_behind_pipelined_requests() -> None:
    http = connect(GET + GET + GET[:5])
    http.receive_eof()
    answer(http)
    assert not http.must_close
    assert isinstance(http.next_request()[0], Request)
    answer(http)
    assert not http.must_close
    assert isinstance(http.next_request()[0], Refusal)
    answer(http)
    assert http.must_close


# Expect: 100-continue, and answers before the body


def test_a02_one_interim_response() -> None:
    """Case A02: exactly one complete 100, then the final response."""
    http = Http1(max_header=4096)
    head = post(b"hello", b"Expect: 100-Continue")[:-5]
    (request,) = http.receive(head)
    assert isinstance(request, Request)
    assert request.expect_continue
    assert http.continue_100() == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert http.continue_100() == b""
    assert http.receive(b"hello") == [Body(b"hello"), BodyEnd()]
    answer(http)
    assert not http.must_close


def test_no_interim_response_once_the_body_comes() -> None:
    http = connect(post(b"hello", b"Expect: 100-continue")[:-1])
    assert http.continue_100() == b""


@pytest.mark.parametrize(
    "data",
    [post(b"", b"Expect: 100-continue"), post(b"hello", b"Expect: 100-continue", version=b"1.0"), post(b"hello")],
)
def test_nobody_waits(data: bytes) -> None:
    request = Http1(max_header=4096).receive(data)[0]
    assert isinstance(request, Request)
    assert not request.expect_continue


@pytest.mark.parametrize("sent", [b"", b"hel"])
def test_a02_early_refusal_closes(sent: bytes) -> None:
    """Case A02: an answer before the body is complete; what still comes is dropped."""
    http = connect(post(b"hello", b"Expect: 100-continue")[:-5] + sent)
    assert b"Connection: close\r\n" in http.head(401, HEADERS, length=0)
    assert http.continue_100() == b""
    assert http.receive(b"hello"[len(sent) :] + GET) == []
    http.end()
    assert http.must_close


# In any pieces


@given(
    st.lists(
        st.tuples(st.sampled_from(["GET", "POST"]), st.binary(max_size=300), st.booleans()), min_size=1, max_size=4
    ),
    st.lists(st.integers(0, 1500)),
)
def test_h11_client_in_any_pieces(requests: list[tuple[str, bytes, bool]], cuts: list[int]) -> None:
    """What h11's client sends comes out the same, pipelined and cut anywhere; our answers satisfy h11's client."""
    http = Http1(max_header=4096)
    for method, body, chunked in requests:
        client = h11.Connection(h11.CLIENT)
        framing = ("Transfer-Encoding", "chunked") if chunked else ("Content-Length", str(len(body)))
        head = h11.Request(method=method, target="/x", headers=[("Host", "a"), framing])
        wire = client.send(head) + client.send(h11.Data(data=body)) + client.send(h11.EndOfMessage())
        edges = sorted({min(cut, len(wire)) for cut in cuts} | {0, len(wire)})
        events = [event for pair in itertools.pairwise(edges) for event in http.receive(wire[slice(*pair)])]
        assert body_of(events) == body
        assert [type(event) for event in merged(events)] == [Request, *[Body] * bool(body), BodyEnd]
        client.receive_data(answer(http, body, length=not chunked))
        received = b""
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            received += bytes(event.data) if isinstance(event, h11.Data) else b""
        assert received == body
        assert not http.must_close
        assert http.next_request() == []


FRAGMENTS = st.sampled_from(
    (
        *(GET, post(b"hello"), b"POST / HTTP/1.1\r\n", b"GET / HTTP/1.0\r\n", HOST, b"\r\n", b"\n", b"\r", b"hello"),
        *(b"Connection: close\r\n", b"Connection: upgrade\r\nUpgrade: websocket\r\n", b"Expect: 100-continue\r\n"),
        *(
            b"Content-Length: 5\r\n",
            b"Transfer-Encoding: chunked\r\n",
            b"5\r\nhello\r\n",
            b"0\r\n\r\n",
            b"CONNECT a:1 ",
        ),
    )
)


def serve(data: bytes, cuts: list[int]) -> tuple[list[Event], bytes]:
    """All events and answers of a connection that is fed `data` and then EOF; each request is answered at its end."""
    http = Http1(max_header=200)
    edges = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    events: list[Event] = []
    answers = b""
    batches = [lambda pair=pair: http.receive(data[slice(*pair)]) for pair in itertools.pairwise(edges)]
    for batch in [*batches, http.receive_eof]:
        new = batch()
        while new:
            events += new
            if not isinstance(new[-1], BodyEnd | Refusal):
                break
            answers += answer(http)
            if http.must_close:
                return merged(events), answers
            new = http.next_request()
    return merged(events), answers


@given(st.lists(FRAGMENTS, max_size=8).map(b"".join) | st.binary(max_size=60), st.lists(st.integers(0, 400)))
def test_any_bytes_in_any_pieces(data: bytes, cuts: list[int]) -> None:
    """Only events come out, the same ones however the bytes were cut, and the answers are well-formed HTTP."""
    whole = serve(data, [])
    for other in (serve(data, cuts), serve(data, list(range(len(data))))):
        assert other == whole
