"""One client process with many streams: begin them all, read them to their ends, and say what they cost."""

from __future__ import annotations

import gc
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from bench.machine import quantile
from bench.plots import SHARES
from bench.processes import CLIENT_CORE, OURS, Ours, Wrong, cpu_s, resident_bytes
from bench.readers import Failed, Seen, Tally, Wire

READ_BYTES = 64 * 1024
WARM_STREAMS, WARM_TOKENS = 8, 10
# Until the server has accepted and, where that is a step of its own, upgraded every connection.
SETTLE_S = 0.2
SILENCE_S_MAX = 60.0


@dataclass(frozen=True)
class Figures:
    """What one server showed with one transport."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    bytes_from: float  # a token
    bytes_to: float
    requests: float  # an answer
    cpu_us: float  # a token
    steady: bool  # whether cpu_us is of the time when all streams were under way
    cpu_whole_us: float
    memory_kib: float  # a stream
    client_busy: float  # of a core: near 1 the client is what was measured
    ttft_at_ms: list[float]  # distributions, at the shares that bench.plots draws
    itl_at_ms: list[float]


def play(transport: Callable[[list[Seen], int], Wire], server: Ours, streams: int, tokens: int) -> Figures:
    """Begin so many streams at once, of so many tokens. Raises Wrong."""
    before = os.sched_getaffinity(0)
    if CLIENT_CORE is not None:
        os.sched_setaffinity(0, {CLIENT_CORE})
    gc.disable()
    try:
        with_few = Load(transport, server, min(streams, WARM_STREAMS), WARM_TOKENS)
        with_few.run()
        load = Load(transport, server, streams, tokens)
        load.run()
        return load.figures()
    finally:
        gc.enable()
        os.sched_setaffinity(0, before)


class Load:
    """Connections to a server, and their streams."""

    def __init__(self, transport: Callable[[list[Seen], int], Wire], server: Ours, streams: int, tokens: int) -> None:
        self._server = server
        self._tokens = tokens
        self._memory_before = resident_bytes(server.pid)
        self._tally = Tally()
        self.seen = [Seen(self._tally) for _ in range(streams)]
        self._wires: list[Wire] = []
        at = 0
        while at < streams:
            wire = transport(self.seen[at : at + 1], tokens)
            if wire.streams_max > 1:
                wire = transport(self.seen[at : at + wire.streams_max], tokens)
            self._wires.append(wire)
            at += len(wire.streams)
        self._selector = selectors.DefaultSelector()
        self._sockets: list[socket.socket] = []
        self._bytes_from = self._bytes_to = 0
        self._began = self._ended = self._cpu_before = self._cpu_after = 0.0
        self._client_cpu = 0.0
        self._steady: list[tuple[float, int]] = []  # the server's CPU time and the tokens so far, at both ends of it
        self._due: deque[tuple[float, int]] = deque()  # polls: when, and of which connection
        self._memory_after = 0

    def run(self) -> None:
        """From the connections to the last token. Raises Wrong."""
        try:
            for number in range(len(self._wires)):
                self._connect(number)
            self._settle()
            self._ask()
            self._to_the_end()
        finally:
            self._selector.close()
            for sock in self._sockets:
                with suppress(OSError):
                    sock.close()

    def _connect(self, number: int) -> None:
        try:
            sock = socket.create_connection(("127.0.0.1", self._server.port))
        except OSError as error:
            raise Wrong(OURS, "a connection", f"gave none ({error.strerror})") from None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        self._sockets.append(sock)
        self._selector.register(sock, selectors.EVENT_READ, number)
        self._send(number, self._wires[number].open())

    def _settle(self) -> None:
        began = time.perf_counter()
        while time.perf_counter() < began + SETTLE_S or not all(wire.ready for wire in self._wires):
            self._read(SETTLE_S / 10)
            if time.perf_counter() > began + SILENCE_S_MAX:
                number = next(n for n, wire in enumerate(self._wires) if not wire.ready)
                raise self._wrong(number, f"was not ready within {SILENCE_S_MAX:g} s")

    def _wrong(self, number: int, did: str) -> Wrong:
        """Of the server on one connection."""
        return Wrong(OURS, self._wires[number].asked, did, self._wires[number].heard)

    def _wire_of(self, is_wrong: Callable[[Seen], bool]) -> int:
        """The first connection with such a stream."""
        return next(n for n, wire in enumerate(self._wires) if any(map(is_wrong, wire.streams)))

    def _ask(self) -> None:
        self._cpu_before, self._client_cpu = cpu_s(self._server.pid), time.process_time()
        self._began = time.perf_counter()
        for number, wire in enumerate(self._wires):
            now = time.perf_counter()
            for seen in wire.streams:
                seen.asked = now
            self._send(number, wire.ask())

    def _to_the_end(self) -> None:
        heard = time.perf_counter()
        while self._tally.ended < len(self.seen):
            if self._read(max(0.0, self._due[0][0] - time.perf_counter()) if self._due else 1.0):
                heard = time.perf_counter()
            elif time.perf_counter() - heard > SILENCE_S_MAX:
                raise self._wrong(self._wire_of(lambda seen: not seen.done), f"was silent for {SILENCE_S_MAX:g} s")
            self._look()
            self._poll()
        self._ended, self._cpu_after = time.perf_counter(), cpu_s(self._server.pid)
        self._client_cpu = time.process_time() - self._client_cpu
        if short := [seen for seen in self.seen if seen.tokens != self._tokens]:
            did = f"sent {short[0].tokens} tokens, not {self._tokens}"
            raise self._wrong(self._wire_of(lambda seen: seen is short[0]), did)

    def _read(self, timeout_s: float) -> int:
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            sock: socket.socket = key.fileobj  # type: ignore[assignment]
            wire = self._wires[key.data]
            try:
                data = sock.recv(READ_BYTES)
                now = time.perf_counter()
                answer = wire.take(data, now) if data else b""
            except Failed as failed:
                raise self._wrong(key.data, str(failed)) from None
            except OSError as error:
                raise self._wrong(key.data, f"broke the connection off ({error.strerror})") from None
            if not data:
                if not all(seen.done for seen in wire.streams):
                    raise self._wrong(key.data, "closed the connection")
                self._selector.unregister(sock)
                continue
            self._bytes_from += len(data)
            self._send(key.data, answer)
            if wire.wake_at:
                self._due.append((wire.wake_at, key.data))
                wire.wake_at = 0.0
        return len(ready)

    def _send(self, number: int, data: bytes) -> None:
        if data:
            self._bytes_to += len(data)
            try:
                self._sockets[number].sendall(data)
            except OSError as error:
                raise self._wrong(number, f"broke the connection off ({error.strerror})") from None

    def _poll(self) -> None:
        """Those that are due. All wait equally long, so they stand in order."""
        now = time.perf_counter()
        while self._due and self._due[0][0] <= now:
            number = self._due.popleft()[1]
            self._send(number, self._wires[number].later())

    def _look(self) -> None:
        """Whether the time when all streams are under way begins, or is over."""
        begun, ended = self._tally.begun == len(self.seen), self._tally.ended > 0
        if (begun and not self._steady) or (ended and len(self._steady) == 1):
            self._steady.append((cpu_s(self._server.pid), self._tally.tokens))
            self._memory_after = self._memory_after or resident_bytes(self._server.pid)

    def figures(self) -> Figures:
        """Behind `run`."""
        all_tokens = len(self.seen) * self._tokens
        at_end = (self._cpu_after, self._tally.tokens)
        (cpu_0, tokens_0), (cpu_1, tokens_1) = (*self._steady, at_end, at_end)[:2]
        steady = tokens_1 - tokens_0 >= all_tokens / 4
        whole = (self._cpu_after - self._cpu_before) / all_tokens * 1e6
        first = sorted(seen.ttft_s * 1000 for seen in self.seen)
        gaps = sorted(gap * 1000 for seen in self.seen for gap in seen.gaps_s)
        return Figures(
            ttft_p50_ms=quantile(first, 0.5),
            ttft_p99_ms=quantile(first, 0.99),
            itl_p50_ms=quantile(gaps, 0.5),
            itl_p99_ms=quantile(gaps, 0.99),
            bytes_from=self._bytes_from / all_tokens,
            bytes_to=self._bytes_to / all_tokens,
            requests=sum(seen.requests for seen in self.seen) / len(self.seen),
            cpu_us=(cpu_1 - cpu_0) / (tokens_1 - tokens_0) * 1e6 if steady else whole,
            steady=steady,
            cpu_whole_us=whole,
            memory_kib=(self._memory_after - self._memory_before) / 1024 / len(self.seen),
            client_busy=self._client_cpu / (self._ended - self._began),
            ttft_at_ms=[round(quantile(first, share), 3) for share in SHARES],
            itl_at_ms=[round(quantile(gaps, share), 3) for share in SHARES],
        )
