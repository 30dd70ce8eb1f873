"""`python -m bench engine --http`: our server beside other servers, whole, on the same weights and the same prompts.

    python -m bench engine --http --xllamacpp PYTHON --contenders sluice:gguf llama.cpp:FILE.gguf
    python -m bench engine --http --vllm PROGRAM --contenders sluice:bfloat16 vllm:CHECKPOINT

A contender is KIND:DTYPE, of `--model`, or KIND:PATH, a model of its own in the type that it has. `llama.cpp` is its
llama-server, from `--llama-cpp FOLDER` or as the interpreter `--xllamacpp` has it installed; `vllm` is `vllm serve`.
Each contender starts anew in each round, and the order turns. It gets text completions of random prompts of 128 ids,
greedy, exactly 128 new tokens, over HTTP/1.1 as server-sent events: first so many streams at once that each begin the
next when they end (closed loop), then requests that come at random (Poisson, `--rates` a second), the same ones at the
same times for all. TTFT is from the request's bytes to the first text, ITL between one text and the next. RSS and PSS
are those of all its processes together, behind the load.
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
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from bench.contenders import NEW_TOKENS, PROMPT_TOKENS, prompts
from bench.machine import REPOSITORY, describe, markdown, spread
from bench.processes import started

KINDS = ("sluice", "llama.cpp", "vllm")
READY_S_MAX = 300.0
ANSWER_S_MAX = 300.0
STREAMS_MAX = 32
# Each stream of a closed loop makes this many requests, and there are this many at least.
REQUESTS_EACH, REQUESTS_MIN = 2, 4
_TEXT = re.compile(rb'"text": ?"(?!")')

# What an interpreter with xllamacpp runs: llama.cpp's own server, which that library has inside.
_XLLAMACPP = """
import signal, sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])
params.n_parallel, params.n_ctx = int(sys.argv[3]), int(sys.argv[4])
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[5])
server = xllamacpp.Server(params)
signal.pause()
"""


@dataclass
class Load:
    """What one load showed."""

    tokens_s: float = 0.0
    ttft_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)


@dataclass
class Shown:
    """What one contender showed in one round: by the streams of a closed loop, and by the requests of a second."""

    closed: dict[int, Load] = field(default_factory=dict)
    random: dict[float, Load] = field(default_factory=dict)
    rss_mib: float = 0.0
    pss_mib: float = 0.0


def main(options: argparse.Namespace, model: str) -> int:
    """The exit code. `options` are those of bench.engine."""
    rounds: dict[str, list[Shown]] = {each: [] for each in options.contenders}
    for number in range(options.rounds):
        turned = options.contenders[number % len(rounds) :] + options.contenders[: number % len(rounds)]
        for each in turned:
            if sys.stderr.isatty():
                print(f"round {number + 1} of {options.rounds}: {each}", file=sys.stderr)
            rounds[each].append(measure(each, model, options, seed=number))
    print(describe())
    print(f"{Path(model).name}, {options.rounds} rounds: median (least to most)\n")
    print(table(rounds))
    if options.json:
        kept = {
            each: [
                {
                    "closed": {streams: _figures(load) for streams, load in shown.closed.items()},
                    "random": {rate: _figures(load) for rate, load in shown.random.items()},
                    "rss_mib": shown.rss_mib,
                    "pss_mib": shown.pss_mib,
                }
                for shown in found
            ]
            for each, found in rounds.items()
        }
        Path(options.json).write_text(json.dumps({"machine": describe(), "rounds": kept}, indent=1), encoding="utf-8")
    return 0


def measure(contender: str, model: str, options: argparse.Namespace, seed: int) -> Shown:
    """One contender's round."""
    shown = Shown()

    def drawn(count: int, of: int) -> list[list[int]]:
        return prompts(count, PROMPT_TOKENS, options.ids_max, seed * 1000 + of)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with _serving(contender, model, options, port) as pid:
        asyncio.run(_closed_loop(port, 2, drawn(2, -1)))  # a warm-up
        for streams in options.batches:
            count = max(REQUESTS_EACH * streams, REQUESTS_MIN)
            shown.closed[streams] = asyncio.run(_closed_loop(port, streams, drawn(count, streams)))
        for rate in options.rates:
            shown.random[rate] = asyncio.run(_poisson(port, rate, drawn(options.arrivals, 999), random.Random(seed)))
        shown.rss_mib, shown.pss_mib = memory_mib(pid)
    return shown


@contextmanager
def _serving(contender: str, model: str, options: argparse.Namespace, port: int) -> Iterator[int]:
    kind, _, dtype = contender.partition(":")
    its_model = dtype if os.sep in dtype else model
    threads, context = os.cpu_count() or 1, STREAMS_MAX * (PROMPT_TOKENS + NEW_TOKENS + 16)
    env = dict(os.environ)
    if kind == "sluice":
        command = [sys.executable, "-m", "server", "--model", its_model, "--port", str(port)]
        command += [] if os.sep in dtype else ["--dtype", dtype]
    elif kind == "llama.cpp" and options.xllamacpp:
        command = [options.xllamacpp, "-c", _XLLAMACPP, its_model]
        command += map(str, (port, STREAMS_MAX, context, threads))
    elif kind == "llama.cpp":
        command = [str(Path(options.llama_cpp) / "llama-server"), "-m", its_model, "--port", str(port)]
        command += ["-np", str(STREAMS_MAX), "-c", str(context), "-t", str(threads), "-tb", str(threads)]
    else:
        command = [options.vllm, "serve", its_model, "--port", str(port), "--dtype", "bfloat16"]
        command += ["--max-model-len", "1024", "--max-num-seqs", str(STREAMS_MAX), "--uvicorn-log-level", "error"]
        env |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with started(command, REPOSITORY, env) as process:
        until = time.monotonic() + READY_S_MAX
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{contender} did not start: exit code {process.poll()}")
            time.sleep(0.5)
        yield process.pid


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


class _Request(asyncio.Protocol):
    """One streamed completion."""

    def __init__(self, prompt: list[int]) -> None:
        fields = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        self._body = json.dumps(fields).encode()
        self._tail = b""
        self.asked = 0.0
        self.arrivals: list[tuple[float, int]] = []  # when, and how many texts at once
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.heard = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json"
        assert isinstance(transport, asyncio.Transport)
        self.asked = time.perf_counter()
        transport.write(f"{head}\r\nContent-Length: {len(self._body)}\r\n\r\n".encode() + self._body)

    def data_received(self, data: bytes) -> None:
        """Count the texts; one that is split at its mark counts with its end."""
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
        if exc is None and b"[DONE]" in self.heard and b'"length"' in self.heard and self.arrivals:
            self.over.set_result(None)
        else:
            self.over.set_exception(SystemExit(f"an answer was not complete: {self.heard[-500:]!r}"))


async def _ask(port: int, prompt: list[int]) -> _Request:
    _, request = await asyncio.get_running_loop().create_connection(lambda: _Request(prompt), "127.0.0.1", port)
    await asyncio.wait_for(request.over, ANSWER_S_MAX)
    return request


async def _closed_loop(port: int, streams: int, left: list[list[int]]) -> Load:
    done: list[_Request] = []

    async def stream() -> None:
        while left:
            done.append(await _ask(port, left.pop()))

    await asyncio.gather(*(stream() for _ in range(streams)))
    return _load(done)


async def _poisson(port: int, rate: float, each: list[list[int]], draw: random.Random) -> Load:
    asked = []
    for prompt in each:
        asked.append(asyncio.ensure_future(_ask(port, prompt)))
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


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[round(share * (len(ordered) - 1))]


def _figures(load: Load) -> dict[str, float]:
    return {
        "tokens_s": load.tokens_s,
        "ttft_p50_ms": _quantile(load.ttft_ms, 0.5),
        "ttft_p99_ms": _quantile(load.ttft_ms, 0.99),
        "itl_p50_ms": _quantile(load.itl_ms, 0.5),
        "itl_p99_ms": _quantile(load.itl_ms, 0.99),
    }


def table(rounds: dict[str, list[Shown]]) -> str:
    """A row for each load and contender."""
    head = ["load", "", "tokens a second", "TTFT p50 ms", "TTFT p99", "ITL p50 ms", "ITL p99", "RSS, PSS MiB"]
    rows = []
    first = next(iter(rounds.values()))[0]
    loads: list[tuple[str, str, float]] = [(f"{streams} at once", "closed", streams) for streams in first.closed]
    loads += [(f"{rate:g} a second", "random", rate) for rate in first.random]
    for label, kind, at in loads:
        for name, found in rounds.items():
            figures = [_figures(getattr(shown, kind)[at]) for shown in found]
            cells = [spread([each[key] for each in figures], 1) for key in figures[0]]
            sizes = ", ".join(
                f"{statistics.median(getattr(s, key) for s in found):,.0f}" for key in ("rss_mib", "pss_mib")
            )
            rows.append([label, name.rpartition(os.sep)[2] if os.sep in name else name, *cells, sizes])
    return markdown(head, rows)
