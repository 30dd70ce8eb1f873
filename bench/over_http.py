"""`python -m bench engine --http`: our server beside other servers, whole, on the same weights and the same prompts.

    python -m bench engine --http --json race.json --llama-cpp FOLDER --vllm PROGRAM --transformers PROGRAM
    python -m bench engine --http --json race.json --contenders sluice:int8 llama.cpp:Q8_0 --batches 8 --rates

A contender is KIND:DTYPE, of `--model`, or KIND:PATH, a model of its own in the type that it has; without --contenders
it is three widths of weights, and every kind whose program is named. `llama.cpp` is its llama-server, from
`--llama-cpp FOLDER` (DTYPE is a type that llama-quantize knows, or as-is), or as the interpreter `--xllamacpp` has it
installed; `vllm` is `vllm serve`; `transformers` is `transformers serve` with continuous batching.

Each contender starts anew in each round, and the order turns. It gets text completions of random prompts of 128 ids (of
128 words of one token each where a server takes no ids), greedy, exactly 128 new tokens, over HTTP/1.1 as server-sent
events: first so many streams at once that each begin the next when they end (closed loop), then requests that come at
random (Poisson, `--rates` a second), the same ones at the same times for all; and `--prompts` of so many tokens, one
after another, for which the figure is the prompt's tokens a second until the first text. TTFT is from the request's
bytes to the first text, ITL between one text and the next. RSS and PSS are those of all its processes together, behind
the loads.

With --json every load is kept as soon as it is measured, and what the file has already is not measured again: a run
that was cut goes on, and a long one may be made in parts (by contenders, loads or rounds). All that the file has is
printed at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.contenders import NEW_TOKENS, PROMPT_TOKENS, prompts
from bench.http_servers import Contender, serving
from bench.machine import describe, markdown, quantile, spread
from bench.processes import Wrong
from bench.readers import HEARD_BYTES_MAX

ANSWER_S_MAX = 300.0
ASKED = "POST /v1/completions HTTP/1.1"
# Each stream of a closed loop makes this many requests, and there are this many at least.
REQUESTS_EACH, REQUESTS_MIN = 2, 4
# Prompts of one length, and what is made behind each: more than one token, so that one of them has text.
PROMPTS_READ, NEW_BEHIND_PROMPT = 6, 4
LOADS = ("at once", "a second", "of a prompt")
FIGURES = ("tokens_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
_TEXT = re.compile(rb'"text": ?"(?!")')

# What one contender showed in one round: figures by load, "8 at once" or "1 a second", and memory behind them.
Shown = dict[str, Any]


@dataclass
class Load:
    """What one load showed."""

    tokens_s: float = 0.0
    ttft_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)


def main(options: argparse.Namespace, model: str) -> int:
    """The exit code. `options` are those of bench.engine."""
    kept = Kept(options.json, f"{Path(model).name}, {describe().rpartition(', ')[0]}")
    loads = [f"{streams} at once" for streams in options.batches] + [f"{rate:g} a second" for rate in options.rates]
    loads += [f"{tokens} of a prompt" for tokens in options.prompts]
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as scratch:
        for number in range(options.rounds):
            turn = number % len(options.contenders)
            for each in options.contenders[turn:] + options.contenders[:turn]:
                missing = [load for load in loads if load not in kept.round(each, number)]
                if not missing:
                    continue
                if sys.stderr.isatty():
                    print(f"round {number + 1} of {options.rounds}: {each}", file=sys.stderr)
                with socket.socket() as free:
                    free.bind(("127.0.0.1", 0))
                    port = free.getsockname()[1]
                with serving(each, model, options, port, Path(scratch)) as contender:
                    measure(contender, missing, options, number, kept.round(each, number), kept.write)
    print(describe())
    print(f"{Path(model).name}; of each load the median (least to most) of its rounds\n")
    print(table(kept.rounds))
    return 0


class Kept:
    """What was measured, by contender and round; in a file too, if it is named. Only what one machine did with one
    model is kept in one file."""

    def __init__(self, path: str | None, of: str) -> None:
        self._path = Path(path) if path else None
        self._of = of
        self.rounds: dict[str, list[Shown]] = {}
        if self._path and self._path.exists():
            try:
                before = json.loads(self._path.read_text(encoding="utf-8"))
                found, self.rounds = before["of"], before["rounds"]
            except (ValueError, KeyError, TypeError):
                raise SystemExit(f"{path} holds something else than a race; name another file") from None
            if found != of:
                raise SystemExit(f"{path} is of {found}, this is {of}; name another file")

    def round(self, contender: str, number: int) -> Shown:
        """What this contender showed in this round so far, to be added to."""
        rounds = self.rounds.setdefault(contender, [])
        while len(rounds) <= number:
            rounds.append({})
        return rounds[number]

    def write(self) -> None:
        """Whatever happens next, the file is whole."""
        if self._path:
            whole = self._path.with_name(self._path.name + ".part")
            whole.write_text(json.dumps({"of": self._of, "rounds": self.rounds}, indent=1), encoding="utf-8")
            whole.replace(self._path)


def measure(
    contender: Contender,
    loads: list[str],
    options: argparse.Namespace,
    seed: int,
    shown: Shown,
    write: Callable[[], None],
) -> None:
    """Adds to `shown` what the contender shows under `loads`, and has each kept at once."""

    def drawn(count: int, of: int, tokens: int = PROMPT_TOKENS) -> list[list[int]]:
        return prompts(count, tokens, options.ids_max, seed * 1000 + of)

    _run(contender, _closed_loop(contender, 2, drawn(2, -1)))  # a warm-up
    for load in loads:
        size, _, kind = load.partition(" ")
        if kind == "at once":
            streams = int(size)
            asked = drawn(max(REQUESTS_EACH * streams, REQUESTS_MIN), streams)
            done = _run(contender, _closed_loop(contender, streams, asked))
        elif kind == "of a prompt":
            done = _run(contender, _read(contender, int(size), drawn(PROMPTS_READ, int(size), int(size))))
        else:
            asked = drawn(options.arrivals, 999)
            done = _run(contender, _poisson(contender, float(size), asked, random.Random(seed)))
        shown[load] = _figures(done)
        shown["rss_mib"], shown["pss_mib"] = memory_mib(contender.pid)
        write()


def _run(of: Contender, load: Coroutine[Any, Any, Load]) -> Load:
    """Raises Wrong, which would end the loop's tasks one by one if it came from within."""
    try:
        return asyncio.run(load)
    except _Failed as failed:
        raise Wrong(of.name, failed.asked, failed.did, failed.heard) from None


class _Failed(Exception):
    """See Wrong."""

    def __init__(self, asked: str, did: str, heard: bytes = b"") -> None:
        super().__init__(asked, did, heard)
        self.asked, self.did, self.heard = asked, did, heard


class _Request(asyncio.Protocol):
    """One streamed completion."""

    def __init__(self, contender: Contender, prompt: list[int], new: int) -> None:
        self._body = json.dumps({**contender.body(prompt), "max_tokens": new}).encode()
        self._last = contender.last
        self._tail = b""
        self.began = b""
        self.asked = 0.0
        self.arrivals: list[tuple[float, int]] = []  # when, and how many texts at once
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # what went wrong
        self.heard = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        head = f"{ASKED}\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json"
        assert isinstance(transport, asyncio.Transport)
        self.asked = time.perf_counter()
        transport.write(f"{head}\r\nContent-Length: {len(self._body)}\r\n\r\n".encode() + self._body)

    def data_received(self, data: bytes) -> None:
        """Count the texts; one that is split at its mark counts with its end."""
        if len(self.began) < HEARD_BYTES_MAX:
            self.began += data
        self.heard = (self.heard + data)[-4096:]
        joined = self._tail + data
        cut = joined.rfind(b"\n") + 1
        texts = len(_TEXT.findall(joined, 0, cut))
        self._tail = joined[cut:]
        if texts:
            self.arrivals.append((time.perf_counter(), texts))

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over, and must have been complete."""
        if self.over.done():
            return
        if exc is None and self._last in self.heard and b'"length"' in self.heard and self.arrivals:
            self.over.set_result("")
        else:
            self.over.set_result("ended before its answer was complete" + (f" ({exc})" if exc else ""))


async def _ask(of: Contender, prompt: list[int], new: int = NEW_TOKENS) -> _Request:
    loop = asyncio.get_running_loop()
    try:
        transport, request = await loop.create_connection(lambda: _Request(of, prompt, new), "127.0.0.1", of.port)
    except OSError as error:
        raise _Failed("a connection", f"gave none ({error.strerror})") from None
    try:
        ended, _ = await asyncio.wait([request.over], timeout=ANSWER_S_MAX)
    finally:
        transport.abort()  # that of an answer that is late, or of one that another's fault cuts short
    if wrong := request.over.result() if ended else f"had not ended its answer after {ANSWER_S_MAX:g} s":
        raise _Failed(ASKED, wrong, request.began)
    return request


async def _closed_loop(of: Contender, streams: int, left: list[list[int]]) -> Load:
    done: list[_Request] = []

    async def stream() -> None:
        while left:
            done.append(await _ask(of, left.pop()))

    await asyncio.gather(*(stream() for _ in range(streams)))
    return _load(done)


async def _read(of: Contender, tokens: int, each: list[list[int]]) -> Load:
    load = _load([await _ask(of, prompt, NEW_BEHIND_PROMPT) for prompt in each])
    load.tokens_s = tokens * 1000 / statistics.median(load.ttft_ms)
    return load


async def _poisson(of: Contender, rate: float, each: list[list[int]], draw: random.Random) -> Load:
    asked = []
    for prompt in each:
        asked.append(asyncio.ensure_future(_ask(of, prompt)))
        await asyncio.sleep(draw.expovariate(rate))
    return _load(list(await asyncio.gather(*asked)))


def _load(done: list[_Request]) -> Load:
    began = min(each.asked for each in done)
    ended = max(each.arrivals[-1][0] for each in done)
    gaps: list[float] = []
    for each in done:
        gaps += [0.0] * (each.arrivals[0][1] - 1)
        for (before, _), (now, texts) in pairwise(each.arrivals):
            gaps += [(now - before) * 1000, *[0.0] * (texts - 1)]
    first = [(each.arrivals[0][0] - each.asked) * 1000 for each in done]
    return Load(len(done) * NEW_TOKENS / (ended - began), sorted(first), sorted(gaps))


def memory_mib(pid: int) -> tuple[float, float]:
    """RSS and PSS of a process and of all that descend from it."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    family, found = {pid}, {pid}
    while found:
        found = {each for each, parent in parents.items() if parent in found} - family
        family |= found
    sizes = {"Rss": 0.0, "Pss": 0.0}
    for each in family:
        try:
            rollup = Path(f"/proc/{each}/smaps_rollup").read_text()
        except OSError:
            continue
        for name in sizes:
            line = re.search(rf"^{name}:\s+(\d+) kB", rollup, re.MULTILINE)
            sizes[name] += int(line[1]) / 1024 if line else 0.0
    return sizes["Rss"], sizes["Pss"]


def _figures(load: Load) -> dict[str, float]:
    times = [quantile(each, share) for each in (load.ttft_ms, load.itl_ms) for share in (0.5, 0.99)]
    return dict(zip(FIGURES, (load.tokens_s, *times), strict=True))


def table(rounds: dict[str, list[Shown]]) -> str:
    """A row for each load and contender."""
    head = ["load", "", "rounds", "tokens a second", "TTFT p50 ms", "TTFT p99", "ITL p50 ms", "ITL p99", "RSS, PSS MiB"]
    rows = []
    shown = [each for found in rounds.values() for each in found]
    for load in dict.fromkeys(key for each in shown for key in each if key.endswith(LOADS)):
        for name, found in rounds.items():
            having = [each for each in found if load in each]
            if having:
                cells = [spread([each[load][key] for each in having], 1) for key in FIGURES]
                sizes = [f"{statistics.median(each[key] for each in having):,.0f}" for key in ("rss_mib", "pss_mib")]
                label = name.rpartition(os.sep)[2] if os.sep in name else name
                rows.append([load, label, str(len(having)), *cells, ", ".join(sizes)])
    return markdown(head, rows)
