"""`python -m bench first_token`: what the server adds to the first token of an answer, while others stream.

The bench is the client and the engine in one, so that its clock sees both of the server's sides: from a request's
bytes to the order that the engine gets (`in`), and from the step that has the first token to the text at the client
(`out`). The sum is what the server adds to what the engine takes. N - 1 streams run, with a token every 20 ms. The
engine makes one step for all of them, as one with a batch does, and the first token of one more comes with theirs;
between two steps the server sleeps, and its caches go to whoever has the machine. Or (`apart`) each has its tokens at a
time of its own, as from many engines, and the server is awake.

Beside it, as what this machine takes for the wakes of a process alone: a relay in the server's place, which passes a
request and a step on as they come.
"""

from __future__ import annotations

import argparse
import os
import random
import selectors
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from bench import arguments, processes
from bench.machine import REPOSITORY, describe, markdown, quantile
from bench.processes import OURS, SEQUENCES_MAX, Wrong, synthetic_hello
from bench.readers import POSTED, posted
from engine.synthetic import WORD_BASE
from engine.wire import Admitted, Cancel, End, FrameReader, Gauges, Step, Submit, encode

PACE_S = 0.020
RUNNING_TOKENS = 100_000
READ_BYTES = 64 * 1024
START_S_MAX = 60.0
DEADLINE_S = 10.0
GOAL_MS = 0.3
WARM_UP = 10  # requests that are not counted
FIELDS = ("Host: localhost", "Accept: text/event-stream", "Content-Type: application/json")

_RELAY = """
import asyncio, sys, uvloop
class End(asyncio.Protocol):
    other = None
    def connection_made(self, transport):
        self.transport = transport
        transport.set_write_buffer_limits(high=0)
    def data_received(self, data):
        self.other.transport.write(data)
async def main(path):
    loop = asyncio.get_running_loop()
    client, engine = End(), End()
    client.other, engine.other = engine, client
    await loop.create_unix_connection(lambda: engine, path)
    server = await loop.create_server(lambda: client, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.sleep(3600)
uvloop.run(main(sys.argv[1]))
"""


def main(argv: list[str]) -> int:
    """The exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    arguments.allow_open_files(parser, max(options.streams), "--streams")
    measured = [("a relay", measure_relay(options.requests))]
    for streams in options.streams:
        measured.append((f"{streams:,}", measure(streams, options.requests)))
        if streams > 1:
            measured.append((f"{streams:,}, apart", measure(streams, options.requests, apart=True)))
    rows = [[who, *_told(*times)] for who, times in measured]
    print(describe())
    print(f"{options.requests} requests each, p50 (p99) in ms; the goal at 64 streams is {GOAL_MS}\n")
    print(markdown(["streams", "in", "out", "both"], rows))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench first_token", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--streams", type=arguments.whole(1, SEQUENCES_MAX), nargs="+", default=[1, 64], metavar="N",
        help="that run at once, the one that is measured among them (default: 1 64)",
    )  # fmt: skip
    parser.add_argument(
        "--requests", type=arguments.whole(1, 10**6), default=500, metavar="N",
        help="that are measured, with each number of streams (default: 500)",
    )  # fmt: skip
    return parser


def _told(inward_s: list[float], outward_s: list[float]) -> list[str]:
    both = [sum(pair) for pair in zip(inward_s, outward_s, strict=True)]
    columns = ([each * 1000 for each in sorted(times)] for times in (inward_s, outward_s, both))
    return [f"{statistics.median(ms):.2f} ({quantile(ms, 0.99):.2f})" for ms in columns]


def _request(prompt: str, most: int) -> bytes:
    return posted(
        {"messages": [{"role": "user", "content": prompt}], "stream": True, "max_tokens": most}, fields=FIELDS
    )


@contextmanager
def _listening() -> Iterator[tuple[socket.socket, str]]:
    """Where an engine is attached to."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder, socket.socket(socket.AF_UNIX) as listener:
        path = str(Path(folder) / "engine.sock")
        listener.bind(path)
        listener.listen()
        listener.settimeout(START_S_MAX)
        yield listener, path


def _greet(listener: socket.socket) -> socket.socket:
    """The server's connection, on which it was told what is served."""
    sock, _ = listener.accept()
    sock.sendall(encode(synthetic_hello()))
    return sock


def _received(sock: socket.socket) -> bytes:
    data = sock.recv(READ_BYTES)
    if not data:
        raise ConnectionError("closed the connection")
    return data


@contextmanager
def _asking(client: socket.socket, answer: bytearray) -> Iterator[None]:
    """A server that doesn't do its part of the block is Wrong. `answer`: what the client has read so far."""
    try:
        yield
    except (OSError, GaveUp) as error:
        client.settimeout(0.0)
        with suppress(OSError):
            while data := client.recv(READ_BYTES):
                answer += data
        did = f"did nothing for {DEADLINE_S:g} s" if isinstance(error, TimeoutError) else str(error)
        raise Wrong(OURS, POSTED, did, bytes(answer)) from None


class GaveUp(Exception):
    """The server cancelled what it had ordered."""


class _Engine:
    """The engine's side of the wire."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader = FrameReader(engine_side=True)
        self._made = 0
        sock.settimeout(DEADLINE_S)

    def hear(self) -> tuple[int, float]:
        """The next order of a new sequence, and when it came."""
        while True:
            data = _received(self._socket)
            now = time.perf_counter()
            for message in self._reader.feed(data):
                if isinstance(message, Submit):
                    return message.id, now
                if isinstance(message, Cancel):
                    raise GaveUp("gave a stream up")

    def step(self, ids: list[int], new: int = 0) -> float:
        """A token for those that run and, as engine/core.py has it, for the new one before them; when it left."""
        ids = [new, *ids] if new else ids
        self._made += 1
        token = WORD_BASE + self._made % 1000
        admitted = [Admitted(new, 0)] if new else []
        message = encode(Step(ids, [token] * len(ids), admitted, [], [], Gauges()))
        began = time.perf_counter()
        self._socket.sendall(message)
        return began

    def admit(self, id_: int) -> None:
        """One of those that run. Its request would expire if it waited for its turn for as long as a run may take."""
        self._socket.sendall(encode(Step([], [], [Admitted(id_, 0)], [], [], Gauges())))

    def end(self, id_: int) -> None:
        """The new one's end."""
        self._socket.sendall(encode(Step([], [], [], [End(id_, "length")], [], Gauges())))


class _Crowd:
    """Those who stream: their tokens, and what they read."""

    def __init__(self, engine: _Engine, selector: selectors.BaseSelector, *, apart: bool) -> None:
        self._engine = engine
        self._selector = selector
        self._ids: list[int] = []
        self._apart = apart
        self._turn = 0

    def add(self, id_: int, sock: socket.socket) -> None:
        """One more."""
        self._engine.admit(id_)
        self._ids.append(id_)
        self._selector.register(sock, selectors.EVENT_READ)

    def step(self, new: int = 0) -> float:
        """A step with the new one's first token; when it left."""
        return self._engine.step([] if self._apart else self._ids, new)

    def play(self, until: float) -> None:
        """Up to a time: read, and where each has its own time make the tokens."""
        due = time.perf_counter()
        while (left := until - time.perf_counter()) > 0:
            if self._apart and time.perf_counter() >= due:
                self._turn = (self._turn + 1) % len(self._ids)
                self._engine.step([self._ids[self._turn]])
                due += PACE_S / len(self._ids)
            wait_s = min(left, max(0.0, due - time.perf_counter())) if self._apart else left
            for key, _ in self._selector.select(wait_s):
                _received(key.fileobj)  # type: ignore[arg-type]


def measure(streams: int, requests: int, *, apart: bool = False) -> tuple[list[float], list[float]]:
    """Seconds that the server takes inward and outward, for each request."""
    with ExitStack() as stack:
        listener, path = stack.enter_context(_listening())
        pool = stack.enter_context(ThreadPoolExecutor(1))
        greeted = pool.submit(_greet, listener)  # while the server waits for its engine
        port = stack.enter_context(processes.server((f"unix:{path}", os.getpid()))).port
        engine = _Engine(stack.enter_context(greeted.result()))
        crowd = _Crowd(engine, stack.enter_context(selectors.DefaultSelector()), apart=apart)
        for _ in range(streams - 1):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            with _asking(sock, bytearray()):
                sock.sendall(_request("run", RUNNING_TOKENS))
                crowd.add(engine.hear()[0], sock)
        client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        client.settimeout(DEADLINE_S)
        draw = random.Random(0)
        inward, outward = [], []
        for _ in range(WARM_UP + requests):
            answer = bytearray()
            with _asking(client, answer):
                into, out = _ask(client, engine, crowd, draw, answer)
            inward.append(into)
            outward.append(out)
    return inward[WARM_UP:], outward[WARM_UP:]


def _ask(
    client: socket.socket, engine: _Engine, crowd: _Crowd, draw: random.Random, answer: bytearray
) -> tuple[float, float]:
    """One request, at some moment between two steps; its first token comes with the second. Fills `answer`."""
    next_step = crowd.step() + PACE_S
    crowd.play(time.perf_counter() + draw.uniform(PACE_S / 4, PACE_S * 3 / 4))
    request = _request("now", 2)
    asked = time.perf_counter()
    client.sendall(request)
    id_, heard = engine.hear()
    crowd.play(next_step)
    began = crowd.step(new=id_)
    while b'"content":" ' not in answer:
        answer += _received(client)
    came = time.perf_counter()
    engine.end(id_)
    while not answer.endswith(b"0\r\n\r\n"):
        answer += _received(client)
    crowd.play(began + PACE_S)
    return heard - asked, came - began


def measure_relay(requests: int) -> tuple[list[float], list[float]]:
    """As `measure`, of a process that only passes on what comes."""
    with ExitStack() as stack:
        listener, path = stack.enter_context(_listening())
        command = [*processes.on_core(processes.SERVER_CORE), sys.executable, "-c", _RELAY, path]
        process = stack.enter_context(processes.started("the relay", command, REPOSITORY))
        engine = stack.enter_context(listener.accept()[0])
        client = stack.enter_context(socket.create_connection(("127.0.0.1", int(processes.ready_line(process)))))
        draw = random.Random(0)
        passed = [_pass(client, engine, draw) for _ in range(WARM_UP + requests)][WARM_UP:]
    return [into for into, _ in passed], [out for _, out in passed]


def _pass(client: socket.socket, engine: socket.socket, draw: random.Random) -> tuple[float, float]:
    """A request's bytes one way and a step's the other."""
    times = []
    for sender, receiver in ((client, engine), (engine, client)):
        time.sleep(draw.uniform(PACE_S / 4, PACE_S * 3 / 4))
        began = time.perf_counter()
        sender.sendall(bytes(200))
        _received(receiver)
        times.append(time.perf_counter() - began)
    return times[0], times[1]
