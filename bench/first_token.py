"""`python -m bench first_token`: what the server adds to the first token of an answer, while others stream.

N - 1 streams run, each with a token every 20 ms at times of its own. Beside them one more is asked for, again and
again, of an engine that makes its first token as soon as it hears of it: over HTTP, as a chat completion on a
connection that is open, from the request's bytes to the first text; and, by turns with that, from the same engine over
its own wire, from the message to the step that has the token. What HTTP takes longer is the server's: reading,
checking, tokenising, the event and its write. The client reads the others' streams between two that it times.
"""

from __future__ import annotations

import argparse
import random
import selectors
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from bench import processes
from bench.machine import describe, markdown, quantile
from bench.readers import posted
from engine.wire import FrameReader, Sampling, Step, Submit, encode

PACE_MS = 20
GAP_MS = (2.0, 8.0)  # between two that are asked for
SETTLE_S = 1.0
RUNNING_TOKENS = 100_000
READ_BYTES = 64 * 1024
DEADLINE_S = 10.0
GOAL_MS = 0.3


def main(argv: list[str]) -> int:
    """The exit code."""
    options = _parser().parse_args(argv)
    rows = []
    for streams in options.streams:
        server_ms, wire_ms = measure(streams, options.requests)
        added = statistics.median(server_ms) - statistics.median(wire_ms)
        rows.append([f"{streams:,}", _told(server_ms), _told(wire_ms), f"{added:.2f}"])
    print(describe())
    print(f"{options.requests} requests each; the goal at 64 streams is {GOAL_MS} ms\n")
    print(markdown(["streams", "HTTP, p50 (p99) ms", "the engine's wire, p50 (p99) ms", "added, ms"], rows))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench first_token", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64], metavar="N")
    parser.add_argument("--requests", type=int, default=500)
    return parser


def _told(times_ms: list[float]) -> str:
    ordered = sorted(times_ms)
    return f"{statistics.median(ordered):.2f} ({quantile(ordered, 0.99):.2f})"


def measure(streams: int, requests: int) -> tuple[list[float], list[float]]:
    """Times to a first token in ms: over HTTP and over the engine's wire."""
    with ExitStack() as stack:
        attached = stack.enter_context(processes.engine(0, _script()))
        port = stack.enter_context(processes.server(attached)).port
        crowd = stack.enter_context(_crowd(port, streams - 1))
        ask = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        wire = stack.enter_context(socket.socket(socket.AF_UNIX))
        wire.connect(attached[0].removeprefix("unix:"))
        reader, draw = FrameReader(engine_side=False), random.Random(0)
        over_http: list[float] = []
        over_wire: list[float] = []
        for number in range(requests):
            crowd(draw.uniform(*GAP_MS) / 1000)
            over_http.append(_time_http(ask))
            crowd(draw.uniform(*GAP_MS) / 1000)
            over_wire.append(_time_wire(wire, reader, number + 1))
    return over_http, over_wire


def _script() -> dict[str, Any]:
    paced = [item for _ in range(1000) for item in ({"pause_ms": PACE_MS}, " on")]
    return {"scripts": [{"match": "run", "tokens": paced}, {"match": "now", "tokens": [" here"]}]}


def _request(prompt: str, most: int) -> bytes:
    return posted({"messages": [{"role": "user", "content": prompt}], "stream": True, "max_tokens": most})


@contextmanager
def _crowd(port: int, count: int) -> Iterator[Callable[[float], None]]:
    """So many streams that run; what is given reads them for so many seconds."""
    draw = random.Random(count)
    with ExitStack() as stack, selectors.DefaultSelector() as selector:

        def read(seconds: float) -> None:
            end = time.perf_counter() + seconds
            while (left := end - time.perf_counter()) > 0:
                for key, _ in selector.select(left):
                    assert key.fileobj.recv(READ_BYTES), "a stream ended"  # type: ignore[union-attr]

        for _ in range(count):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            sock.sendall(_request("run", RUNNING_TOKENS))
            selector.register(sock, selectors.EVENT_READ)
            read(draw.uniform(0, PACE_MS) / 1000)  # so that they are due at times of their own
        read(SETTLE_S)
        yield read


def _time_http(sock: socket.socket) -> float:
    """To the first text; then the rest of the answer is read."""
    sock.settimeout(DEADLINE_S)
    request = _request("now", 1)
    began = time.perf_counter()
    sock.sendall(request)
    answer, first = b"", 0.0
    while not answer.endswith(b"0\r\n\r\n"):
        answer += sock.recv(READ_BYTES)
        if not first and b'"content":" here"' in answer:
            first = time.perf_counter()
    assert first, answer
    return (first - began) * 1000


def _time_wire(sock: socket.socket, reader: FrameReader, number: int) -> float:
    sock.settimeout(DEADLINE_S)
    message = encode(Submit(number, list(b"now"), Sampling(max_tokens=1), credit=1))
    began = time.perf_counter()
    sock.sendall(message)
    while True:
        for step in reader.feed(sock.recv(READ_BYTES)):
            if isinstance(step, Step) and number in step.ids:
                return (time.perf_counter() - began) * 1000
