"""`python -m bench transports`: every transport is measured, and its clients count what is really there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from bench.readers import TRANSPORTS, Failed, Http1, Http2, Polling, Seen, Tally, Text, WebSocket, WebSocketDeflate
from bench.transports import SHOWN
from tests.support.serving import REPOSITORY

RUN_S = 120
STREAMS, TOKENS = 3, 12


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", "transports", *flags]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=RUN_S)


def test_it_measures_every_transport(tmp_path: Path) -> None:
    kept = tmp_path / "figures.json"
    done = run("--streams", str(STREAMS), "--tokens", str(TOKENS), "--rounds", "1", "--no-profile", "--json", str(kept))
    assert done.returncode == 0, done.stderr
    figures = json.loads(kept.read_text())["figures"]
    assert figures.keys() == TRANSPORTS.keys()
    for name, each in figures.items():
        (found,) = each[str(STREAMS)]
        assert found["ttft_p50_ms"] > 0, name
        assert found["cpu_us"] > 0, name
        assert found["bytes_from"] > 5, name  # a token's own bytes
        assert any(line.startswith(f"| {name} ") for line in done.stdout.splitlines())
    one = {name: each[str(STREAMS)][0] for name, each in figures.items()}
    assert one["short polling"]["requests"] >= 2
    assert one["SSE, HTTP/1.1"]["requests"] == one["SSE, HTTP/2"]["requests"] == 1
    assert one["WebSocket"]["requests"] == 2
    assert one["chunked text"]["bytes_from"] < one["SSE, HTTP/1.1"]["bytes_from"]
    assert one["WebSocket, deflate"]["bytes_from"] < one["WebSocket"]["bytes_from"]


def test_it_compares_with_a_run_that_was_kept_and_names_what_dominates(tmp_path: Path) -> None:
    kept = tmp_path / "figures.json"
    flags = ("--transports", "SSE, HTTP/2", "--streams", "2", "--tokens", "20", "--rounds", "1")
    assert run(*flags, "--no-profile", "--json", str(kept)).returncode == 0
    done = run(*flags, "--compare", str(kept))
    assert done.returncode == 0, done.stderr
    assert re.search(r"SSE, HTTP/2 +\| 2 +\| [\d.]+ → [\d.]+", done.stdout)
    assert re.search(r"SSE, HTTP/2 is dominated by \w+\.\w+ \(\w+\.py:\d+\) \d+%", done.stdout)


def test_a_transport_that_is_none_is_named() -> None:
    done = run("--transports", "pigeon")
    assert done.returncode == 2
    assert "'pigeon' is no transport" in done.stderr


def test_the_tests_that_the_table_names_are_there() -> None:
    assert SHOWN.keys() == TRANSPORTS.keys()
    for cell in (cell for cells in SHOWN.values() for cell in cells if cell):
        path, *names = cell.rpartition(" ")[2].split("::")
        source = (REPOSITORY / path).read_text()
        assert all(re.search(rf"\b(class|def) {name}\b", source) for name in names), cell


def chunk(text: str) -> bytes:
    return f"{len(text):x}\r\n{text}\r\n".encode()


EVENTS = [f'data: {{"choices":[{{"delta":{{"content":" {n:04}"}}}}]}}\n\n' for n in range(5)]
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 7, 50, 10_000])
def test_tokens_are_counted_however_the_bytes_are_cut(size: int) -> None:
    seen = Seen(Tally())
    wire = Http1([seen], 5)
    data = HEAD + b"".join(map(chunk, EVENTS)) + b"0\r\n\r\n"
    for at in range(0, len(data), size):
        wire.feed(data[at : at + size], float(at))
    assert (seen.tokens, seen.done) == (5, True)
    assert len(seen.gaps_s) == 4


def test_text_counts_words_of_the_body_alone() -> None:
    seen = Seen(Tally())
    Text([seen], 2).feed(HEAD + chunk(" 0000") + chunk(" 0001") + b"0\r\n\r\n", 1.0)
    assert (seen.tokens, seen.done, seen.gaps_s) == (2, True, [0.0])


def test_a_refusal_is_no_stream() -> None:
    with pytest.raises(Failed):
        Http1([Seen(Tally())], 1).feed(b"HTTP/1.1 503 Service Unavailable\r\n\r\n", 1.0)


def test_polling_goes_on_from_where_it_is() -> None:
    seen = Seen(Tally())
    wire = Polling([seen], 2)
    first = wire.feed(b'HTTP/1.1 202 Accepted\r\nContent-Length: 14\r\n\r\n{"stream":"s"}', 1.0)
    assert first.startswith(b"GET /v1/streams/s?wait=0 HTTP/1.1\r\n")
    body = b'{"status":"running","events":[{"n":0,"data":{"content":" 0000"}}],"next":1,"outcome":null}'
    assert wire.feed(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body), 2.0) == b""
    assert wire.wake_at > 2.0
    assert wire.later().startswith(b"GET /v1/streams/s?wait=0&after=0 HTTP/1.1\r\n")
    assert (seen.tokens, seen.done) == (1, False)


TOLD = [b'{"type":"token","id":"a","n":1,"text":" 0000"}', b'{"type":"done","id":"a"}']


@pytest.mark.parametrize("size", [1, 3, 10_000])
@pytest.mark.parametrize("deflate", [False, True])
def test_messages_of_a_websocket(deflate: bool, size: int) -> None:
    seen = Seen(Tally())
    wire = (WebSocketDeflate if deflate else WebSocket)([seen], 1)
    deflater = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    data = b"HTTP/1.1 101 Switching Protocols\r\nSec-WebSocket-Extensions: permessage-deflate\r\n\r\n"
    for message in TOLD:
        packed = deflater.compress(message) + deflater.flush(zlib.Z_SYNC_FLUSH)
        payload = packed[:-4] if deflate else message
        data += bytes((0xC1 if deflate else 0x81, len(payload))) + payload
    for at in range(0, len(data), size):
        wire.feed(data[at : at + size], float(at))
    assert (seen.tokens, seen.done) == (1, True)


@pytest.mark.parametrize("size", [1, 11, 10_000])
def test_frames_of_http2(size: int) -> None:
    both = [Seen(Tally()), Seen(Tally())]
    wire = Http2(both, 1)
    wire.open()
    wire.ask()

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload

    data = frame(4, 0, 0, b"") + frame(1, 4, 1, b"\x88") + frame(0, 0, 1, EVENTS[0].encode())
    data += frame(1, 4, 3, b"\x88") + frame(0, 1, 3, EVENTS[0].encode()) + frame(6, 0, 0, b"12345678")
    answer = b"".join(wire.feed(data[at : at + size], float(at)) for at in range(0, len(data), size))
    assert answer == frame(4, 1, 0, b"") + frame(6, 1, 0, b"12345678")
    assert [(seen.tokens, seen.done) for seen in both] == [(1, False), (1, True)]
