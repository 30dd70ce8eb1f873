"""The bytes of an event stream: WHATWG's HTML standard, section 9.2, and what its clients need beyond it."""

# ruff: noqa: E501 (a row of a table is one line)

from __future__ import annotations

import json
import re

import pytest
from conformance_kit.events import FIELDS, blocks, lines_of, parse, split_line
from conformance_kit.rules import http1_only, not_offered, row, rule
from conformance_kit.target import Target
from conformance_kit.wire import Answer

HTML = "WHATWG HTML section "
LONG = 200


@rule("a stream is answered with 200", HTML + "9.2.2")
def test_status(target: Target) -> None:
    assert target.stream().status == 200, target.stream()


@rule("its type is text/event-stream, else EventSource fails the connection", HTML + "9.2.2")
def test_content_type(target: Target) -> None:
    assert (target.stream().header("content-type") or "").partition(";")[0].strip() == "text/event-stream"


@rule("the only encoding of an event stream is UTF-8, and the only parameter is charset", HTML + "9.2.5")
def test_charset(target: Target) -> None:
    parameters = (target.stream().header("content-type") or "").lower().split(";")[1:]
    assert [p.strip().replace('"', "") for p in parameters] in ([], ["charset=utf-8"]), parameters


@rule("charset=utf-8 is written out, since naive clients guess Latin-1", "RFC 9110 section 8.3.2, D08", "should")
def test_charset_is_named(target: Target) -> None:
    assert "charset=utf-8" in (target.stream().header("content-type") or "").lower()


@rule("a stream is not stored by caches", HTML + "9.2.8, RFC 9111 section 5.2.2", "should")
def test_cache_control(target: Target) -> None:
    directives = target.stream().members("cache-control")
    assert {"no-cache", "no-store"} & set(directives), directives


@rule("no-transform keeps proxies from compressing, and so holding back, what streams", "RFC 9111 5.2.2.6", "should")
def test_no_transform(target: Target) -> None:
    assert "no-transform" in target.stream().members("cache-control")


@rule("X-Accel-Buffering: no switches nginx's buffering off", "nginx, ngx_http_proxy_module", "should")
def test_no_buffering(target: Target) -> None:
    assert (target.stream().header("x-accel-buffering") or "").lower() == "no"


@rule("browsers don't guess another type", "WHATWG Fetch section 3.6", "should")
def test_nosniff(target: Target) -> None:
    assert (target.stream().header("x-content-type-options") or "").lower() == "nosniff"


@http1_only
@rule("a stream's length isn't known beforehand: chunked, without Content-Length", "RFC 9112 section 6.1", "should")
def test_chunked(target: Target) -> None:
    answer = target.stream()
    assert answer.members("transfer-encoding") == ["chunked"] and answer.header("content-length") is None, answer


@rule("the body ends by its framing, not by a cut", "RFC 9112 section 8, B05")
@pytest.mark.parametrize("tokens", [1, 16, LONG])
def test_whole(target: Target, tokens: int) -> None:
    assert target.stream(tokens).end == "whole"


def body_of(target: Target, tokens: int = LONG) -> bytes:
    return bytes(target.stream(tokens).body)


@rule("an event stream is UTF-8", HTML + "9.2.5")
def test_utf_8(target: Target) -> None:
    body_of(target).decode()


@rule("no byte order mark: naive clients take it for a part of the first field's name", HTML + "9.2.5", "should")
def test_no_bom(target: Target) -> None:
    assert not body_of(target).startswith(b"\xef\xbb\xbf")


@rule("lines end with LF alone: clients that split on LF keep a CR in the data", HTML + "9.2.5", "should")
def test_line_feeds(target: Target) -> None:
    assert b"\r" not in body_of(target)


@rule("the stream ends with a blank line, else its last event is never dispatched", HTML + "9.2.6, B07")
@pytest.mark.parametrize("tokens", [1, 16, LONG])
def test_final_blank_line(target: Target, tokens: int) -> None:
    assert body_of(target, tokens).replace(b"\r\n", b"\n").replace(b"\r", b"\n").endswith(b"\n\n")


@rule("there are events, one for each token or nearly so", HTML + "9.2.6")
def test_events(target: Target) -> None:
    assert len(target.events(LONG)) >= LONG // 4


@rule("fields are data, event, id and retry; others are ignored by clients, and so lost", HTML + "9.2.6", "should")
def test_known_fields(target: Target) -> None:
    names = {split_line(line)[0] for line in lines_of(body_of(target)) if line}
    assert names <= FIELDS | {""}, names


@rule("no NUL in the stream: an id with one is dropped", HTML + "9.2.6", "should")
def test_no_nul(target: Target) -> None:
    assert b"\0" not in body_of(target)


@rule("retry is ASCII digits only", HTML + "9.2.6")
def test_retry(target: Target) -> None:
    for block in blocks(body_of(target)):
        for value in block.values("retry"):
            assert re.fullmatch(r"[0-9]+", value), value


@rule(
    "no block without data: official clients take it for an empty event, and fail",
    "measured on official SDKs, B08",
    "should",
)
def test_no_block_without_data(target: Target) -> None:
    for block in blocks(body_of(target)):
        assert block.values("data"), block


@rule("one event, one block: blank lines come singly", HTML + "9.2.5", "should")
def test_no_doubled_blank_lines(target: Target) -> None:
    assert b"\n\n\n" not in body_of(target).replace(b"\r\n", b"\n")


@rule("data, event and id come once in a block of JSON", "OpenAI and Anthropic SDKs", "should")
@pytest.mark.parametrize("name", ["data", "event", "id"])
def test_single_fields(target: Target, name: str) -> None:
    for block in blocks(body_of(target)):
        assert len(block.values(name)) <= 1, block


@rule("each event's data is one JSON value, or the terminator", "OpenAI API reference, streaming")
def test_json(target: Target) -> None:
    for event in target.events(LONG):
        assert event.data == "[DONE]" or json.loads(event.data) is not None


@rule(
    "a space follows the colon of data: some clients strip five characters, others six", "measured on clients", "should"
)
def test_space_behind_the_colon(target: Target) -> None:
    for line in lines_of(body_of(target)):
        assert not line.startswith("data:") or line.startswith("data: "), line


@rule("a naive client, which splits at Unicode line ends too, sees the same events", "B02", "should")
def test_naive_split(target: Target) -> None:
    found = [line[6:] for line in body_of(target).decode().splitlines() if line.startswith("data: ")]
    assert found == [event.data for event in target.events(LONG)]


@rule("where the network splits the bytes has no meaning", HTML + "9.2.5")
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])
def test_line_ends_have_no_meaning(target: Target, line_end: str) -> None:
    """The stream rewritten with each line end holds the same events, so it relies on none."""
    text = body_of(target).decode()
    assert parse(text.replace("\n", line_end).encode()) == target.events(LONG)


@rule("each chunk (HTTP/2: DATA frame) ends where an event ends: nobody holds anything back", "RFC 9112 7.1", "should")
def test_chunks_are_whole_events(target: Target) -> None:
    answer = target.stream(LONG)
    body = bytes(answer.body)
    torn = [end for end in answer.chunk_ends if not body[:end].endswith((b"\n\n", b"\n"))]
    assert answer.chunk_ends and not torn, torn[:5]


@rule("ids are unique within a stream, so that each names one place", HTML + "9.2.4")
def test_ids_are_unique(target: Target) -> None:
    ids = [value for block in blocks(body_of(target)) for value in block.values("id")]
    if not ids:
        not_offered("the stream names no ids")
    assert len(set(ids)) == len(ids)


@rule("ids of different streams differ", HTML + "9.2.4, B11")
def test_ids_of_two_streams(target: Target) -> None:
    def ids() -> set[str]:
        with target.connect() as connection:
            connection.send(target.stream_request(4))
            found = blocks(bytes(connection.answer("POST").body))
        return {value for block in found for value in block.values("id")}

    first, second = ids(), ids()
    if not first:
        not_offered("the stream names no ids")
    assert not first & second


def asked(target: Target, *headers: tuple[str, str], version: str = "1.1") -> Answer:
    with target.connect() as connection:
        connection.send(target.stream_request(8, list(headers), version))
        return connection.answer("POST")


ACCEPTS = ["text/event-stream", "*/*", "application/json", "text/event-stream, application/json;q=0.9", "text/html"]


@pytest.mark.parametrize(
    "accept",
    [row(a, a, text="who asked for a stream in the body gets it, whatever Accept says", source="official SDKs send application/json") for a in ACCEPTS],
)  # fmt: skip
def test_accept(target: Target, accept: str) -> None:
    answer = asked(target, ("Accept", accept))
    assert (answer.status, answer.end) == (200, "whole"), answer
    assert (answer.header("content-type") or "").startswith("text/event-stream"), answer


ENCODINGS = ["gzip", "br", "gzip, deflate, br, zstd", "identity"]


@pytest.mark.parametrize(
    "encoding",
    [row(e, e, text="a stream is not compressed: compressors hold tokens back", source="B10", level="should") for e in ENCODINGS],
)  # fmt: skip
def test_not_compressed(target: Target, encoding: str) -> None:
    answer = asked(target, ("Accept-Encoding", encoding))
    assert answer.header("content-encoding") in (None, "identity"), answer
    assert parse(bytes(answer.body)), answer


@http1_only
@rule("HTTP/1.0 gets the stream until the close, without chunks (nginx asks so by default)", "RFC 9112 section 6.1")
def test_http_1_0(target: Target) -> None:
    answer = asked(target, version="1.0")
    assert answer.header("transfer-encoding") is None, answer
    assert len(parse(bytes(answer.body))) >= 3, answer


@rule("behind a stream the connection serves the next request", "RFC 9112 section 9.3, B05", "should")
def test_connection_goes_on(target: Target) -> None:
    with target.connect() as connection:
        for _ in range(3):
            connection.send(target.stream_request(4))
            assert connection.answer("POST").status == 200
            assert connection.persistent


@http1_only
@rule("pipelined behind a stream, a request is answered behind it", "RFC 9112 section 9.3.2")
def test_pipelined_streams(target: Target) -> None:
    with target.connect() as connection:
        connection.send(target.stream_request(4) * 2)
        for _ in range(2):
            answer = connection.answer("POST")
            assert (answer.status, answer.end) == (200, "whole"), answer


@pytest.mark.synthetic
@rule("a quiet stream shows that it lives: a comment, with no blank line behind it", HTML + "9.2.7, B08")
def test_pings(target: Target) -> None:
    with target.connect() as connection:
        connection.send(
            target.json_request("POST", target.stream_path, target.chat("say something late", stream=True))
        )  # fmt: skip
        answer = connection.answer("POST")
    lines = lines_of(bytes(answer.body))
    pings = [index for index, line in enumerate(lines) if line.startswith(":")]
    assert pings, answer
    assert all(lines[index + 1] for index in pings)
    assert all(block.values("data") for block in blocks(bytes(answer.body)))


@pytest.mark.synthetic
@rule("text can't break out of its event, whatever it holds", HTML + "9.2.5, B01, B02")
@pytest.mark.parametrize("words", ["say line separators", "say an injection"])
def test_injection(target: Target, words: str) -> None:
    from conformance_kit.ours import INJECTION, LINE_ENDS

    body = target.chat(words, stream=True, max_tokens=64)
    answer = target.ask("POST", "/v1/chat/completions", body)
    events = parse(bytes(answer.body))
    assert {event.type for event in events} == {"message"}
    chunks = [json.loads(event.data) for event in events[:-1]]
    joined = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert joined == (LINE_ENDS if "line" in words else INJECTION + " end")
    naive = [line for line in bytes(answer.body).decode().splitlines() if line.startswith("data: ")]
    assert len(naive) == len(events)
