"""A server that answers with something else than a benchmark reads: one sentence says which, what it was asked and how
its answer began; exit code 1."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import load, over_http
from bench.http_servers import Contender
from bench.processes import Ours, Wrong
from bench.readers import TRANSPORTS
from tests.support.serving import REPOSITORY
from tests.support.wrong_server import REFUSAL, in_place_of_ours, wrong_server

RUN_S = 60
ASKED = {
    "short polling": "GET /v1/generate?",
    "long polling": "GET /v1/generate?",
    "SSE, HTTP/2": "HTTP/2",
    "WebSocket": "GET /v1/ws HTTP/1.1",
    "WebSocket, deflate": "GET /v1/ws HTTP/1.1",
}
ANSWERS = {
    "a refusal": REFUSAL,
    "another protocol": b"220 mail.example.org ESMTP ready\r\n\r\n",
    "no length": b"HTTP/1.1 200 OK\r\n\r\n[]",
    "no JSON": b"HTTP/1.1 202 Accepted\r\nContent-Length: 3\r\n\r\nyes",
    "no tokens": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "no deflate": b"HTTP/1.1 101 Switching Protocols\r\n\r\n\x88\x02\x03\xe8",
    "another frame": b"\0\0\x08\x07\0\0\0\0\0" + bytes(8),
    "settings, then a stream of nobody's": b"\0\0\0\x04\0\0\0\0\0" + b"\0\0\x01\x01\x05\0\0\0\x09\x88",
    "nothing": b"",
}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "SILENCE_S_MAX", 1.0)
    monkeypatch.setattr(load, "SETTLE_S", 0.01)


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_says_so(transport: str, answer: str) -> None:
    with wrong_server(ANSWERS[answer]) as port, pytest.raises(Wrong) as raised:
        load.play(TRANSPORTS[transport], Ours(port, os.getpid(), os.getpid()), 2, 5)
    said = str(raised.value)
    assert said.startswith(f"our server, asked for {ASKED.get(transport, 'POST /v1/chat/completions HTTP/1.1')}")
    began = repr(ANSWERS[answer])[:20] if answer != "nothing" else "it had not answered"
    assert f"; its answer began {began}" in said if answer != "nothing" else said.endswith(began)
    assert "\n" not in said


def test_nobody_listens() -> None:
    with wrong_server(b"") as port:
        pass
    with pytest.raises(Wrong, match=r"^our server, asked for a connection, gave none \(Connection refused\); "):
        load.play(TRANSPORTS["WebSocket"], Ours(port, os.getpid(), os.getpid()), 1, 2)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=RUN_S, check=False
    )


BENCHES = {
    "transports": ["--streams", "2", "--tokens", "5", "--rounds", "1", "--transports", "chunked NDJSON"],
    "stalled": ["--streams", "2", "--rounds", "1", "--seconds", "0.2"],
    "stalled --http2": ["--http2", "--rounds", "1", "--seconds", "0.2"],
    "first_token": ["--streams", "2", "--requests", "1"],
    "peers": [
        *("--contenders", "C writer", "--modes", "sse", "--streams", "2", "--tokens", "5"),
        *("--steps", "5", "--rounds", "1"),
    ],
}


@pytest.mark.synthetic
@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_ends_with_that(name: str, tmp_path: Path) -> None:
    in_place_of_ours(tmp_path, REPOSITORY, REFUSAL)
    done = run(
        "import pathlib, sys\n"
        "from bench import __main__, first_token, machine\n"
        "from bench import processes, stalled\n"
        f"machine.REPOSITORY = processes.REPOSITORY = stalled.REPOSITORY = pathlib.Path({str(tmp_path)!r})\n"
        "first_token.DEADLINE_S = 1.0\n"
        f"sys.exit(__main__.main([{name.partition(' ')[0]!r}, *{BENCHES[name]!r}]))"
    )
    asked = "POST /v1/chat/completions HTTP/" if "http2" not in name else "POST /v1/chat/completions HTTP/2"
    who = "sluice" if name == "peers" else "our server"
    assert done.stderr.startswith(f"{who}, asked for {asked}"), done.stderr
    assert "; its answer began b'HTTP/1.1 400 Bad Request" in done.stderr
    assert done.stderr.count("\n") == 1
    assert (done.returncode, done.stdout) == (1, "")


def test_of_another_s_server_too() -> None:
    with wrong_server(REFUSAL) as port:
        done = run(
            "import argparse\n"
            "from bench import over_http\n"
            "from bench.http_servers import Contender\n"
            "over_http.ANSWER_S_MAX = 1.0\n"
            f"contender = Contender('vllm:bfloat16', 0, {port}, lambda ids: {{}}, b'')\n"
            "options = argparse.Namespace(ids_max=1000, arrivals=2)\n"
            "over_http.measure(contender, ['1 at once'], options, 0, {}, lambda: None)"
        )
    assert done.stderr.startswith("vllm:bfloat16, asked for POST /v1/completions HTTP/1.1, had not ended its answer ")
    assert "; its answer began b'HTTP/1.1 400 Bad Request" in done.stderr
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr


def test_and_one_that_closes_or_is_not_there() -> None:
    def measure(port: int) -> str:
        contender = Contender("it", 0, port, lambda ids: {}, b"")
        options = argparse.Namespace(ids_max=1000, arrivals=2)
        with pytest.raises(Wrong) as raised:
            over_http.measure(contender, ["1 at once"], options, 0, {}, lambda: None)
        return str(raised.value)

    with wrong_server(b"") as port:
        assert measure(port).endswith(", ended before its answer was complete; it had not answered")
    assert measure(port).startswith("it, asked for a connection, gave none (")
