"""The rounds, the load client's runs, and the tables."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import arguments, peers, plots, processes
from bench.machine import describe, markdown, spread
from bench.peers.contenders import BASELINE, MODES, OURS, PEERS, Target, build, missing, running, versions
from bench.readers import POSTED
from server import outlet

STEP_MS = 20.0
QUICK_TOKENS, TOKENS = 50, 150  # of each stream: one second when they are paced, and three
WARM_STREAMS, WARM_TOKENS, WARM_SETTLE_S = 64, 10, 0.05
RUN_S_MAX = 60
# Until the server has accepted every connection.
SETTLE_S = 0.3
ACCEPT = {"sse": "text/event-stream", "chunked": "text/plain"}
NAMES = {"sse": "SSE", "chunked": "chunked text", "ws": "WebSocket"}


@dataclass(frozen=True)
class Sample:
    """One run of the load client."""

    round: int
    contender: str
    mode: str
    step_ms: float
    streams: int
    cpu_us: float
    steady: bool
    engine_us: float | None
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    errors: int

    @property
    def setting(self) -> tuple[str, float, int]:
        """What contenders are compared in."""
        return self.mode, self.step_ms, self.streams


def main(argv: list[str]) -> int:
    """The exit code: 1 when a stream of any contender went wrong."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.plots:
        plots.check()
    chosen = [BASELINE, OURS, *(name for name in PEERS if name != BASELINE and name in options.contenders)]
    steps = options.steps if options.steps is not None else ([STEP_MS] if options.quick else [STEP_MS, 0.0])
    counts = options.streams or ([512] if options.quick else [512, 2000])
    rounds = options.rounds or (2 if options.quick else 5)
    tokens = options.tokens or (QUICK_TOKENS if options.quick else TOKENS)
    if tokens * max(steps) > RUN_S_MAX * 1000:
        parser.error(f"argument --steps: {tokens} tokens, {max(steps):g} ms each, take longer than {RUN_S_MAX} s")
    arguments.allow_open_files(parser, max(counts), "--streams")
    found = versions(options.python)
    before = os.getloadavg()[0]
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        build(Path(folder))
        race = Race(Path(folder), options.python, options.modes, found, tokens)
        for number in range(rounds):
            turned = chosen[number % len(chosen) :] + chosen[: number % len(chosen)]
            for step in steps:
                for name in turned:
                    race.run(name, step, counts, number, rounds)
        samples = race.samples
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    print(describe())
    print(", ".join(f"{name.lstrip('$')} {version}" for name, version in found.items()))
    print(f"{OURS} sends tokens by {'server/outlet.c' if outlet.make else 'Python: server/outlet.c is not compiled'}")
    print(f"load before and behind: {before:.1f}, {os.getloadavg()[0]:.1f} (this run's own is in the second)")
    print(f"{rounds} rounds; median (least to most)")
    for setting in dict.fromkeys(sample.setting for sample in samples):
        print(f"\n{title(*setting)}\n\n{table(samples, setting, chosen, found)}")
    kept = {"machine": describe(), "load": before, "versions": found, "samples": [asdict(each) for each in samples]}
    if options.json:
        arguments.keep(options.json, kept)
    if options.compare:
        print(f"\n{moved(options.compare, samples)}")
    if options.plots:
        print("\n" + "\n".join(map(str, plots.draw(kept, options.plots))))
    return int(any(sample.errors for sample in samples))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench peers",
        description=peers.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="2 rounds of 50 tokens, 512 streams, paced only")
    others = [name for name in PEERS if name != BASELINE]
    parser.add_argument(
        "--contenders", type=arguments.one_of([OURS, *PEERS], "contender"), nargs="+", metavar="NAME",
        default=list(PEERS),
        help=f"beside ours ({OURS!r}) and {BASELINE!r}, which always run: of {arguments.quoted(others)} "
        "(default: all that --python has)",
    )  # fmt: skip
    parser.add_argument(
        "--modes", type=arguments.one_of(MODES, "mode"), nargs="+", metavar="MODE", default=list(MODES),
        help=f"of {', '.join(f'{mode} ({NAMES[mode]})' for mode in MODES)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--streams", type=arguments.whole(1, arguments.STREAMS_MAX), nargs="+", metavar="N",
        help="at once (default: 512 2000; with --quick 512)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=arguments.real(0, RUN_S_MAX * 1000), nargs="+", metavar="MS",
        help=f"paces; 0 is as fast as it goes (default: {STEP_MS:g} 0; with --quick {STEP_MS:g})",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=arguments.whole(2, arguments.TOKENS_MAX), metavar="N",
        help=f"of each stream, from 2 for a gap (default: {TOKENS}; with --quick {QUICK_TOKENS})",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=arguments.whole(1, arguments.ROUNDS_MAX), metavar="N", help="(default: 5; with --quick 2)"
    )
    parser.add_argument(
        "--python", type=arguments.program, default=sys.executable,
        help="an interpreter that has the peers installed (default: this one)",
    )  # fmt: skip
    arguments.add_kept(parser, _samples, moved="which ratios moved")
    return parser


class Race:
    """Runs contenders and keeps what they showed."""

    def __init__(self, binaries: Path, python: str, modes: Sequence[str], found: dict[str, str], tokens: int) -> None:
        self._binaries, self._python, self._modes, self._found = binaries, python, modes, found
        self._tokens = tokens
        self.samples: list[Sample] = []

    def run(self, name: str, step_ms: float, counts: list[int], number: int, rounds: int) -> None:
        """One contender's turn: every mode, every number of streams. One that isn't installed has none."""
        offered = MODES if name == OURS else PEERS[name].modes
        modes = [mode for mode in self._modes if mode in offered and not missing(name, mode, self._found)]
        for count in counts if modes else []:
            with running(name, step_ms, self._tokens, self._python, self._binaries) as target:
                for mode in modes:
                    if sys.stderr.isatty():
                        text = f"round {number + 1} of {rounds}, {count} streams at {step_ms:g} ms: {name}, {mode}"
                        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
                    warm = self._tokens if name == OURS else WARM_TOKENS  # ours says what its script has
                    self._load(name, target, mode, step_ms, min(count, WARM_STREAMS), warm, WARM_SETTLE_S)
                    self.samples.append(self._sample(name, target, mode, step_ms, count, number))

    def _sample(self, name: str, target: Target, mode: str, step_ms: float, count: int, number: int) -> Sample:
        engine_before = processes.cpu_s(target.engine_pid) if target.engine_pid else 0.0
        shown = self._load(name, target, mode, step_ms, count, self._tokens, SETTLE_S)
        engine_s = processes.cpu_s(target.engine_pid) - engine_before if target.engine_pid else 0.0
        steady = shown.get("steady", {"tokens": 0})
        is_steady = steady["tokens"] >= shown["tokens"] / 4
        return Sample(
            round=number,
            contender=name,
            mode=mode,
            step_ms=step_ms,
            streams=count,
            cpu_us=(steady if is_steady else shown["server"])["cpu_us_per_token"],
            steady=is_steady,
            engine_us=engine_s / max(1, shown["tokens"]) * 1e6 if target.engine_pid else None,
            ttft_p50_ms=shown["ttft_ms"]["p50"],
            ttft_p99_ms=shown["ttft_ms"]["p99"],
            gap_p50_ms=shown["gap_ms"]["p50"],
            gap_p99_ms=shown["gap_ms"]["p99"],
            errors=shown["errors"],
        )

    def _load(
        self, name: str, target: Target, mode: str, step_ms: float, count: int, tokens: int, settle_s: float
    ) -> dict[str, Any]:
        """What the load client reports of one run."""
        command = [*processes.on_core(processes.CLIENT_CORE), str(self._binaries / "sload")]
        command += ["--mode", mode, "--port", str(target.port), "--pid", str(target.pid), "--n", str(count)]
        command += ["--k", str(tokens), "--step-ms", f"{step_ms:g}", "--settle", str(settle_s)]
        command += ["--max-time", str(RUN_S_MAX)]
        command += self._asking(mode) if name == OURS else self._path(name, mode)
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=RUN_S_MAX * 2)
        try:
            report: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            raise SystemExit(f"{name}, {mode}: the load client failed: {done.stderr[-2000:]}") from None
        if not report["tokens"]:
            kind, _, heard = done.stderr.partition(": ")
            did = f"sent no token ({kind or 'in time'})"
            raise processes.Wrong(name, self._asked(name, mode), did, heard.rstrip("\n").encode())
        return report

    def _asked(self, name: str, mode: str) -> str:
        if name != OURS:
            return f"GET {self._path(name, mode)[1]} HTTP/1.1"
        return "GET /v1/ws HTTP/1.1" if mode == "ws" else POSTED

    def _path(self, name: str, mode: str) -> list[str]:
        return ["--path", PEERS[name].sse if mode == "sse" else f"/{mode}"]

    def _asking(self, mode: str) -> list[str]:
        """Our own requests. What an answer has beside its tokens (a role, a finish reason) is no token, so that SSE's
        events are not counted against `--k`."""
        path = self._binaries / f"request-{mode}"
        if mode == "ws":
            path.write_bytes(b"What is the capital of France?")
            return ["--path", "/v1/ws", "--message", str(path)]
        body = json.dumps({"messages": [{"role": "user", "content": "x" * 200}], "stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAccept: {ACCEPT[mode]}\r\n"
        path.write_bytes(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        return ["--request", str(path), *(["--lead", "1", "--trail", "1"] if mode == "sse" else [])]


def title(mode: str, step_ms: float, streams: int) -> str:
    """Of a setting."""
    pace = f"a token every {step_ms:g} ms" if step_ms else "as fast as it goes"
    return f"{NAMES[mode]}, {streams:,} streams, {pace}"


def ratios(samples: list[Sample], name: str, setting: tuple[str, float, int]) -> list[float]:
    """Of a contender's CPU time to the C writer's, round by round."""
    by_round: dict[tuple[int, str], float] = {
        (sample.round, sample.contender): sample.cpu_us for sample in samples if sample.setting == setting
    }
    return [cpu / by_round[number, BASELINE] for (number, who), cpu in by_round.items() if who == name]


def table(samples: list[Sample], setting: tuple[str, float, int], chosen: list[str], found: dict[str, str]) -> str:
    """A row for each contender, the cheapest first; what isn't installed stands last."""
    rows: list[tuple[float, list[str]]] = []
    for name in chosen:
        mine = [sample for sample in samples if sample.setting == setting and sample.contender == name]
        if mine:
            ratio = ratios(samples, name, setting)
            rows.append((statistics.median(ratio), _row(name, mine, ratio)))
        elif name != OURS and setting[0] in PEERS[name].modes:
            lacks = ", ".join(missing(name, setting[0], found))
            rows.append((float("inf"), [name, f"not installed: {lacks}", *[""] * 5]))
    head = ["server", "CPU µs a token", "× C writer", "TTFT p50, p99 ms", "gap p50, p99 ms", "engine µs", "errors"]
    return markdown(head, [row for _, row in sorted(rows, key=lambda each: each[0])])


def _row(name: str, mine: list[Sample], ratio: list[float]) -> list[str]:
    def both(first: str, second: str) -> str:
        return ", ".join(f"{statistics.median(getattr(each, field) for each in mine):.1f}" for field in (first, second))

    engine = [sample.engine_us for sample in mine if sample.engine_us is not None]
    star = "" if all(sample.steady for sample in mine) else " *"
    return [
        name,
        spread([sample.cpu_us for sample in mine], 1) + star,
        spread(ratio, 2),
        both("ttft_p50_ms", "ttft_p99_ms"),
        both("gap_p50_ms", "gap_p99_ms"),
        spread(engine, 1) if engine else "",
        f"{sum(sample.errors for sample in mine)}",
    ]


def moved(old: dict[str, Any], samples: list[Sample]) -> str:
    """Ratios then and now, of every contender and setting that both runs have."""
    before = _samples(old)
    rows = []
    for name, setting in dict.fromkeys((sample.contender, sample.setting) for sample in samples):
        then, now = ratios(before, name, setting), ratios(samples, name, setting)
        if then and now and name != BASELINE:
            change = statistics.median(now) / statistics.median(then)
            rows.append([name, title(*setting), spread(then, 2), spread(now, 2), f"× {change:.2f}"])
    since = f"× C writer, since {old['machine']}, load {old['load']:.1f}:"
    if not rows:
        return f"{since} nothing to compare, the runs have no server with the same setting in common."
    return f"{since}\n\n" + markdown(["server", "setting", "then", "now", "change"], rows)


def _samples(old: dict[str, Any]) -> list[Sample]:
    """Of a run that was kept, each round with its writer."""
    samples = [Sample(**each) for each in old["samples"]]
    for name, setting in {(sample.contender, sample.setting) for sample in samples}:
        ratios(samples, name, setting)
    return samples
