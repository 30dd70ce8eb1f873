"""`python -m bench stalled`: what streams that nobody reads cost those that are read.

Two settings by turns, each on a fresh server with the synthetic engine at a steady pace: N streams that are read alone;
and the same N beside N more whose clients never read. From the N that are read come the step's time (how long a stream
takes for a token on average) and the inter-token latency (between the arrivals of two tokens at a client); from the
server process its resident memory. Ratios are of medians over the rounds of one run.

The memory of a stalled stream is what the server process grew by from the moment when the others were under way to the
moment when all stalled streams were parked, for each of them. What the kernel's socket buffers hold is no part of it;
what waits in the transport's own buffer above the socket is shown beside it.

`--http2` plays it on one connection of a hundred streams instead: all are read, or all but one whose window stays shut.
"""

from __future__ import annotations

import argparse
import os
import selectors
import socket
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from http.client import HTTPException

from bench import arguments
from bench.machine import REPOSITORY, describe, spread
from bench.processes import OURS, Wrong, ready_line, resident_bytes, started
from bench.readers import H2_STREAMS, HEARD_BYTES_MAX, POSTED, WINDOW_MAX, Failed, Http2, Seen, Tally, posted

STEP_MS = 20
# A client that stalls has a small receive buffer, as a phone's would be full: the kernel holds twice this.
STALLED_RECEIVE_BUFFER = 4096
SETTLE_S_MAX = 60.0
READ_BYTES = 64 * 1024
GOAL_BYTES = 20 * 1024
TOKENS = 100_000  # more than any round plays
ANSWERED = b"HTTP/1.1 200 "
PARKED = 'sluice_streams{state="parked"}'
SECONDS_MIN, SECONDS_MAX = 0.2, 1800.0  # some gaps in each stream; less than its tokens last


@dataclass(frozen=True)
class Round:
    """What one server showed."""

    step_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    stalled_bytes: float = 0.0  # for each stalled stream
    made_each: float = 0.0  # tokens made for each stalled stream


class Readers:
    """Streams that are read as they come, with the times at which their tokens did."""

    def __init__(self, port: int, count: int) -> None:
        self._selector = selectors.DefaultSelector()
        self.tokens = [0] * count
        self.gaps: list[float] = []
        self._last = [0.0] * count
        self.heard = [b""] * count  # how each answer began
        self._sockets = []
        for number in range(count):
            sock = _ask(port, f"reader {number}")
            sock.setblocking(False)
            self._sockets.append(sock)
            self._selector.register(sock, selectors.EVENT_READ, number)

    def read(self, seconds: float, *, measured: bool = False) -> None:
        """Read what comes within so long. `measured`: keep the gaps between tokens."""
        self._last = [0.0] * len(self._last)
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            ready = self._selector.select(left)
            now = time.perf_counter()
            for key, _ in ready:
                self._take(key.data, _received(key.fileobj), now, measured=measured)  # type: ignore[arg-type]

    def _take(self, number: int, data: bytes, now: float, *, measured: bool) -> None:
        heard = self.heard[number]
        if len(heard) < HEARD_BYTES_MAX:
            heard = self.heard[number] = heard + data
            if not heard.startswith(ANSWERED[: len(heard)]):
                raise Wrong(OURS, POSTED, "answered with something else than a stream", heard)
        if not data:
            raise Wrong(OURS, POSTED, "ended a stream", heard)
        count = data.count(b"data: ")
        if not count:
            return
        self.tokens[number] += count
        last = self._last[number]
        if measured and last:
            self.gaps.append(now - last)
            self.gaps += [0.0] * (count - 1)
        self._last[number] = now

    def close(self) -> None:
        """Leave."""
        self._selector.close()
        for sock in self._sockets:
            sock.close()


def _received(sock: socket.socket) -> bytes:
    """Nothing where the connection broke off."""
    try:
        return sock.recv(READ_BYTES)
    except ConnectionError:
        return b""


def _ask(port: int, content: str, *, receive_buffer: int | None = None) -> socket.socket:
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.connect(("127.0.0.1", port))
    messages = [{"role": "user", "content": content}]
    sock.sendall(posted({"messages": messages, "stream": True, "max_tokens": TOKENS}))
    return sock


class Multiplexed(Http2):
    """The streams of one connection, the last of which has a window that stays shut if `stalled`."""

    window = 300  # less than two events

    def __init__(self, port: int, count: int, *, stalled: bool) -> None:
        super().__init__([Seen(Tally()) for _ in range(count)], TOKENS)
        self._taken = self.streams[: count - stalled]
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.sendall(self.open() + self.ask())

    def ask(self) -> bytes:
        """See Wire."""
        asked = super().ask()
        for number in list(self._by_id)[: len(self._taken)]:
            self._h2.increment_flow_control_window(WINDOW_MAX - self.window, number)
        return asked + self._h2.data_to_send()

    def read(self, seconds: float) -> None:
        """Read what comes within so long; only of this keep what came."""
        for seen in self.streams:
            seen.arrivals.clear()
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            self._socket.settimeout(left)
            with suppress(TimeoutError):
                self._exchange()

    def _exchange(self) -> None:
        try:
            data = _received(self._socket)
            if not data:
                raise Failed("closed the connection")
            self._socket.sendall(self.take(data, time.perf_counter()))
        except Failed as failed:
            raise Wrong(OURS, self.asked, str(failed), self.heard) from None

    @property
    def made(self) -> list[int]:
        """Tokens of each stream that is read, since `read` began."""
        return [seen.tokens for seen in self._taken]

    @property
    def gaps(self) -> list[float]:
        """Between the tokens of each, in seconds."""
        return [gap for seen in self._taken for gap in seen.gaps_s]

    def close(self) -> None:
        """Leave."""
        self._socket.close()


@contextmanager
def _server() -> Iterator[tuple[int, int]]:
    """A server; its port and process id."""
    flags = ["--port", "0", "--engine", "synthetic", "--synthetic-step-ms", str(STEP_MS), "--drain-timeout", "0"]
    with started(OURS, [sys.executable, "-m", "server", *flags], REPOSITORY) as process:
        yield int(ready_line(process).rpartition(":")[2]), process.pid


def _metric(port: int, series: str) -> float:
    asked, heard = "GET /metrics HTTP/1.1", b""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SETTLE_S_MAX) as answer:
            heard = answer.read()
        for line in heard.decode().splitlines():
            if line.startswith(f"{series} "):
                return float(line.rpartition(" ")[2])
    except urllib.error.HTTPError as error:
        with error:
            raise Wrong(OURS, asked, f"answered with {error.code}", error.read()) from None
    except (OSError, ValueError, HTTPException) as error:
        raise Wrong(OURS, asked, f"answered with what can't be read ({error!r})", heard) from None
    raise Wrong(OURS, asked, f"told of no {series}", heard)


def play(count: int, seconds: float, *, stalled: bool) -> Round:
    """One server: `count` readers, and as many stalled streams if wanted."""
    with _server() as (port, pid):
        readers = Readers(port, count)
        sleepers: list[socket.socket] = []
        try:
            readers.read(2.0)
            stalled_bytes = made_each = 0.0
            if stalled:
                before, made = (
                    resident_bytes(pid),
                    _metric(port, "sluice_generated_tokens_total") - sum(readers.tokens),
                )
                quiet = _growth_of_readers(readers, pid, 1.0)
                began = time.perf_counter()
                sleepers = [_ask(port, f"s {n}", receive_buffer=STALLED_RECEIVE_BUFFER) for n in range(count)]
                while (parked := _metric(port, PARKED)) < count:
                    readers.read(0.5)
                    if time.perf_counter() - began > SETTLE_S_MAX:
                        raise SystemExit(f"{OURS} parked {parked:.0f} of {count} streams that nobody reads")
                grown = resident_bytes(pid) - before - quiet * (time.perf_counter() - began + 1.0)
                stalled_bytes = grown / count
                now = _metric(port, "sluice_generated_tokens_total") - sum(readers.tokens)
                made_each = (now - made) / count
            else:
                readers.read(2.0)
            return _measure(readers, seconds, stalled_bytes, made_each)
        finally:
            readers.close()
            for sock in sleepers:
                with suppress(OSError):
                    sock.close()


def _growth_of_readers(readers: Readers, pid: int, seconds: float) -> float:
    """Bytes a second by which the server grows for those that are read: their logs."""
    before = resident_bytes(pid)
    readers.read(seconds)
    return (resident_bytes(pid) - before) / seconds


def play_http2(count: int, seconds: float, *, stalled: bool) -> Round:
    """One server, one connection: `count` streams, all of which are read, or all but one."""
    with _server() as (port, _):
        streams = Multiplexed(port, count, stalled=stalled)
        try:
            streams.read(2.0)
            if stalled and (parked := _metric(port, PARKED)) != 1:
                raise SystemExit(f"{OURS} parked {parked:.0f} streams, not the one that nobody reads")
            streams.read(seconds)
            return _round(seconds, streams.made, streams.gaps, (streams.asked, streams.heard))
        finally:
            streams.close()


def _measure(readers: Readers, seconds: float, stalled_bytes: float, made_each: float) -> Round:
    before = list(readers.tokens)
    readers.read(seconds, measured=True)
    each = [now - was for now, was in zip(readers.tokens, before, strict=True)]
    shown = _round(seconds, each, readers.gaps, (POSTED, readers.heard[0]))
    return replace(shown, stalled_bytes=stalled_bytes, made_each=made_each)


def _round(seconds: float, each: list[int], gaps: list[float], said: tuple[str, bytes]) -> Round:
    """Of what each stream's tokens were in so long, and the gaps between them. `said`: what was asked, and how one
    answer began."""
    if not gaps or not statistics.median(each):
        raise Wrong(OURS, said[0], f"sent most streams no two tokens within {seconds:g} s", said[1])
    gaps = sorted(gaps)
    return Round(
        step_ms=seconds * 1000 / statistics.median(each),
        itl_p50_ms=gaps[len(gaps) // 2] * 1000,
        itl_p99_ms=gaps[len(gaps) * 99 // 100] * 1000,
    )


def _row(name: str, alone: list[float], beside: list[float]) -> str:
    ratio = statistics.median(beside) / statistics.median(alone)
    return f"{name:12} {spread(alone, 2):>30} {spread(beside, 2):>30} {ratio:8.3f}"


def main(argv: list[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench stalled", description=__doc__)
    parser.add_argument(
        "--streams", type=arguments.whole(1, arguments.STREAMS_MAX), metavar="N", default=500,
        help="that are read, and that are not (default: 500)",
    )  # fmt: skip
    parser.add_argument("--http2", action="store_true", help=f"{H2_STREAMS} streams of one connection, one not read")
    parser.add_argument(
        "--rounds", type=arguments.whole(1, arguments.ROUNDS_MAX), metavar="N", default=3,
        help="of each setting (default: 3)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=arguments.real(SECONDS_MIN, SECONDS_MAX), metavar="S", default=8.0,
        help="that a round is measured for (default: 8)",
    )  # fmt: skip
    options = parser.parse_args(argv)
    one_round, count = (play_http2, H2_STREAMS) if options.http2 else (play, options.streams)
    arguments.allow_open_files(parser, 2 * count + 1, "--streams")  # the server's; its metrics are asked for
    load = os.getloadavg()[0]  # of the last minute: other work makes a few long steps, and p99 is of those
    alone: list[Round] = []
    beside: list[Round] = []
    for number in range(options.rounds):
        if sys.stderr.isatty():
            print(f"\rround {number + 1} of {options.rounds}", end="", file=sys.stderr, flush=True)
        alone.append(one_round(count, options.seconds, stalled=False))
        beside.append(one_round(count, options.seconds, stalled=True))
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(f"{describe()}, {STEP_MS} ms a step")
    print(f"load before and behind: {load:.1f}, {os.getloadavg()[0]:.1f} (this run's own is in the second)")
    print(f"{options.rounds} rounds of {options.seconds:g} s; median (least to most)\n")
    names = ("all are read", "one is not") if options.http2 else (f"{count} alone", f"beside {count} stalled")
    print(f"{'ms':12} {names[0]:>30} {names[1]:>30} {'ratio':>8}")
    for name in ("step_ms", "itl_p50_ms", "itl_p99_ms"):
        print(_row(name.removesuffix("_ms"), [getattr(r, name) for r in alone], [getattr(r, name) for r in beside]))
    if not options.http2:
        each = statistics.median([r.stalled_bytes for r in beside]) / 1024
        print(f"\nmemory of a stalled stream: {each:.1f} KiB (goal: under {GOAL_BYTES / 1024:.0f})")
        print(f"tokens made for a stalled stream: {statistics.median([r.made_each for r in beside]):.0f}")
    return 0
