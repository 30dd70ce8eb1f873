"""Server-Sent Events: what is written reads back as written, by the standard's own rules."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocols import sse
from protocols.sse import PING, Parser, ServerEvent, SseError, comment, event

FIELD = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n\x00"), max_size=20)
DATA = st.text(st.sampled_from("\r\n: adé\u2028\x00\ufeff") | st.characters(exclude_categories=["Cs"]), max_size=30)


def parse(data: bytes, cuts: list[int] | None = None) -> list[ServerEvent]:
    parser = Parser()
    edges = sorted({min(cut, len(data)) for cut in cuts or []} | {0, len(data)})
    return [found for pair in itertools.pairwise(edges) for found in parser.feed(data[slice(*pair)])]


# Written


def test_event_bytes() -> None:
    assert event("x") == event(b"x") == b"data: x\n\n"
    assert event("") == b"data: \n\n"
    assert event("x", event="e", id="1", retry_ms=0) == b"event: e\nretry: 0\ndata: x\nid: 1\n\n"
    assert event(" x", id="") == b"data:  x\nid: \n\n"


def test_b01_line_breaks_in_data_are_split() -> None:
    """Case B01: a payload can't end its line and begin a field."""
    assert event("a\rb\nc\r\nd\n") == b"data: a\ndata: b\ndata: c\ndata: d\ndata: \n\n"
    injected = "x\r\nevent: evil\ndata: [DONE]\r\n\r\n"
    assert parse(event(injected)) == [ServerEvent("message", "x\nevent: evil\ndata: [DONE]\n\n", "")]


@pytest.mark.parametrize("bad", ["a\rb", "a\nb", "a\x00b", "\n", "a\r\nevent: x"])
def test_b01_line_breaks_elsewhere_are_refused(bad: str) -> None:
    """Case B01: id and event with CR, LF or NUL are rejected."""
    with pytest.raises(ValueError):
        event("x", id=bad)
    with pytest.raises(ValueError):
        event("x", event=bad)


def test_retry_is_never_negative() -> None:
    with pytest.raises(ValueError):
        event("x", retry_ms=-1)


def test_pings_are_single_lines() -> None:
    """B08: a blank line behind a comment would be an empty event to the official clients."""
    assert PING == comment("ping") == b": ping\n"
    assert comment("a\r\nb\rc") == b": a\n: b\n: c\n"
    parser = Parser()
    assert parser.feed(PING + event("x") + PING) == [ServerEvent("message", "x", "")]
    assert list(parser.comments) == ["ping", "ping"]


@given(
    st.lists(st.tuples(DATA, st.none() | FIELD, st.none() | FIELD, st.none() | st.integers(0, 10**18 - 1))), st.data()
)
def test_what_is_written_reads_back(
    blocks: list[tuple[str, str | None, str | None, int | None]], data: st.DataObject
) -> None:
    """Whatever the content, a reader sees exactly the events sent, cut anywhere."""
    wire = b"".join(event(text, event=name, id=ident, retry_ms=retry) for text, name, ident, retry in blocks)
    last_id = ""
    expected = []
    for text, name, ident, retry in blocks:
        last_id = last_id if ident is None else ident
        lines = text.replace("\r\n", "\n").replace("\r", "\n")
        expected.append(ServerEvent(name or "message", lines, last_id, retry))
    assert parse(wire, data.draw(st.lists(st.integers(0, len(wire))))) == expected
    assert parse(wire, list(range(len(wire)))) == expected


# Read: the examples and rules of the standard's section 9.2.6


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"data: a\n\n", ["a"]),
        (b"data: a\r\n\r\n", ["a"]),
        (b"data: a\r\r", ["a"]),
        (b"data: a\r\n\ndata: b\n\r\n", ["a", "b"]),
        (b"data:a\n\n", ["a"]),
        (b"data:  a\n\n", [" a"]),
        (b"data\n\ndata\ndata\n\ndata:", ["", "\n"]),
        (b"data: \n\n", [""]),
        (b"data: a", []),
        (b"data: a\n", []),
        (b": only a comment\n\n", []),
        (b"event: x\n\n", []),
        (b"id: 1\n\n", []),
        (b"retry: 5\n\n", []),
        (b"\n\n\n", []),
        (b"Data: a\n data: b\nunknown: c\nunknown\n\n", []),
        (b"data: a\nevent: x\ndata: b\n\n", ["a\nb"]),
        (b"data: a:b\n\n", ["a:b"]),
        (b"\xef\xbb\xbfdata: a\n\n", ["a"]),
        (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\n", []),
        (b"data: \xff\xc3\n\n", ["\ufffd\ufffd"]),
        (b"data: a\x00b\n\n", ["a\x00b"]),
    ],
)
def test_reading(stream: bytes, expected: list[str]) -> None:
    for cuts in ([], list(range(len(stream)))):
        assert [found.data for found in parse(stream, cuts)] == expected


def test_event_names_last_for_one_block() -> None:
    found = parse(b"event: x\nevent: y\ndata: 1\n\ndata: 2\n\nevent:\ndata: 3\n\n")
    assert [each.event for each in found] == ["y", "message", "message"]


def test_a_block_that_was_cut_is_not_the_last_one() -> None:
    """WHATWG 9.2.6: the id to reconnect with is set when its block is dispatched."""
    parser = Parser()
    parser.feed(b"data: a\nid: 1\n\ndata: b\nid: 2\n")
    assert parser.last_event_id == "1"
    parser.feed(b"\n")
    assert parser.last_event_id == "2"


def test_ids_last_until_the_next_one() -> None:
    found = parse(b"id: 1\n\ndata: a\n\nid: 2\ndata: b\n\nid: 3\x00\ndata: c\n\nid\ndata: d\n\n")
    assert [each.id for each in found] == ["1", "2", "2", ""]


def test_retry_takes_digits_only() -> None:
    parser = Parser()
    for value in (b"", b"-1", b"1.5", b"5s", "٣".encode(), b"9" * 5000):
        parser.feed(b"retry: " + value + b"\n\n")
    assert parser.retry_ms is None
    assert parser.feed(b"retry: 0050\ndata: a\n\ndata: b\n\n")[0].retry_ms == 50
    assert parser.retry_ms == 50


def test_a_crlf_that_is_split_ends_one_line() -> None:
    parser = Parser()
    assert parser.feed(b"data: a\r") == []
    assert parser.feed(b"\ndata: b\r") == []
    assert parser.feed(b"") == []
    assert [found.data for found in parser.feed(b"\n\r")] == ["a\nb"]
    assert parser.feed(b"\n") == []


def test_events_are_bounded() -> None:
    """The line, and the block of many lines, count alike; blocks that fit never add up."""
    parser = Parser(max_event=100)
    for _ in range(10):
        assert len(parser.feed(b"data: " + b"a" * 90 + b"\n\n")) == 1
    for stream in (b"data: " + b"a" * 100, b"data: aaaa\n" * 11, b":" + b"a" * 101):
        with pytest.raises(SseError):
            Parser(max_event=100).feed(stream)


def test_comments_are_bounded() -> None:
    parser = Parser()
    parser.feed(b"".join(b":%d\n" % index for index in range(sse.COMMENTS_MAX + 5)))
    assert (len(parser.comments), parser.comments[0]) == (sse.COMMENTS_MAX, "5")


PIECES = st.sampled_from(
    [b"data", b"id", b"event", b"retry", b":", b" ", b"\r", b"\n", b"\r\n", b"1", b"\x00", b"\xef\xbb\xbf"]
)


@given(st.lists(PIECES | st.binary(max_size=4)).map(b"".join), st.lists(st.integers(0, 100)))
@example(b"data\r\n\r\n", [6])
def test_any_bytes_in_any_pieces(stream: bytes, cuts: list[int]) -> None:
    whole = parse(stream)
    assert parse(stream, cuts) == whole
    assert parse(stream, list(range(len(stream)))) == whole
