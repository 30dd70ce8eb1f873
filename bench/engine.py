"""`python -m bench engine`: our engine beside others on the same weights, by turns in one run.

    python -m bench engine                                            # ours, in every type that it offers
    python -m bench engine --llama-cpp build/bin                      # beside llama.cpp, where its programs are
    python -m bench engine --contenders sluice:bfloat16 transformers:bfloat16

A contender is KIND:DTYPE. `sluice` is our core with its scheduler, sampler and wire format, without sockets;
`transformers` is `generate`; `llama.cpp` is llama-batched-bench. Each runs in a fresh process in each round, and the
order turns from round to round. Figures are tokens a second: a prompt of 1,024 tokens read, and 128 tokens made behind
prompts of 128 by 1, 8 and 32 sequences at once, the prompts' own time left out.

With --http whole servers answer requests; `bench/over_http.py` says how they are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from bench import arguments, http_servers, over_http
from bench.contenders import FIRST_ORDINARY_ID, KINDS, Figures
from bench.machine import REPOSITORY, describe, markdown, spread
from bench.processes import started
from engine import catalog
from engine.models.config import ModelError

OURS = ["sluice:float32", "sluice:bfloat16", "sluice:int8", "sluice:gguf"]
TRANSFORMERS = ["transformers:bfloat16"]
LLAMA_CPP = ["llama.cpp:BF16", "llama.cpp:Q8_0", "llama.cpp:as-is"]
ROUND_S_MAX = 900


def main(argv: list[str]) -> int:
    """The exit code."""
    options = _parsed(argv)
    kinds = http_servers.KINDS if options.http else tuple(KINDS)
    all_ = OURS + TRANSFORMERS + (LLAMA_CPP if options.llama_cpp else [])
    contenders = options.contenders = options.contenders or (http_servers.contenders(options) if options.http else all_)
    for each in contenders:
        kind, _, dtype = each.partition(":")
        if kind not in kinds or not dtype:
            print(f"{each!r} is no contender: {', '.join(kinds)}, each with :DTYPE", file=sys.stderr)
            return 2
        if kind == "llama.cpp" and (missing := _missing_program(options, dtype)):
            print(f"{each!r} needs {missing}: name its folder with --llama-cpp", file=sys.stderr)
            return 2
    try:
        model = str(_model(options.model))
    except ModelError as error:
        print(f"argument --model: {error}", file=sys.stderr)
        return 2
    if options.http:
        return over_http.main(options, model)
    rounds: dict[str, list[Figures]] = {each: [] for each in contenders}
    for number in range(options.rounds):
        turned = contenders[number % len(contenders) :] + contenders[: number % len(contenders)]
        for place, each in enumerate(turned):
            if sys.stderr.isatty():
                left = f"round {number + 1} of {options.rounds}, {place + 1} of {len(turned)}: {each}"
                print(f"\r\033[K{left}", end="", file=sys.stderr, flush=True)
            rounds[each].append(_measure(each, model, options))
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    print(describe())
    print(f"{Path(model).name}, {options.rounds} rounds; tokens a second: median (least to most)\n")
    print(table(rounds, options.batches))
    if options.json:
        kept = {each: [asdict(figures) for figures in found] for each, found in rounds.items()}
        Path(options.json).write_text(json.dumps({"machine": describe(), "rounds": kept}, indent=1), encoding="utf-8")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a known name, a folder or a .gguf file (default: the server's default model)")
    parser.add_argument("--contenders", nargs="+", metavar="KIND:DTYPE", help="(default: all that can be had)")
    parser.add_argument(
        "--batches", type=arguments.whole(1, 10_000), nargs="+", metavar="N", default=[1, 8, 32],
        help="sequences at once (default: 1 8 32)",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=arguments.whole(1, arguments.ROUNDS_MAX), metavar="N", default=3, help="(default: 3)"
    )
    parser.add_argument("--llama-cpp", default="", metavar="FOLDER", help="where llama-batched-bench and others are")
    parser.add_argument(
        "--json", type=arguments.new_file, metavar="FILE", help="keep every round's figures; with --http, go on with it"
    )
    parser.add_argument("--http", action="store_true", help="whole servers instead, as their clients see them")
    parser.add_argument(
        "--xllamacpp", type=arguments.program, metavar="PYTHON", help="an interpreter that has llama.cpp as xllamacpp"
    )
    parser.add_argument("--vllm", type=arguments.program, metavar="PROGRAM", help="vLLM's program")
    parser.add_argument("--transformers", type=arguments.program, metavar="PROGRAM", help="transformers' program")
    parser.add_argument(
        "--rates", type=arguments.real(0.001, 100_000), nargs="*", metavar="R", default=[1.0],
        help="requests a second that come at random (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--ids-max", type=arguments.whole(FIRST_ORDINARY_ID + 1, 10**7), metavar="N", default=32_000,
        help="prompts have ids below it (default: 32000)",
    )  # fmt: skip
    parser.add_argument(
        "--prompts", type=arguments.whole(1, 10**6), nargs="+", default=[], metavar="TOKENS",
        help="with --http: long prompts, read alone",
    )  # fmt: skip
    parser.add_argument(
        "--arrivals", type=arguments.whole(1, 10**6), metavar="N", default=24,
        help="how many requests come at random (default: 24)",
    )  # fmt: skip
    return parser


def _parsed(argv: list[str]) -> argparse.Namespace:
    """The command line, with the folder that it names there."""
    line = parser()
    options = line.parse_args(argv)
    if options.llama_cpp and not Path(options.llama_cpp).is_dir():
        line.error(f"argument --llama-cpp: there is no folder {options.llama_cpp!r}")
    arguments.allow_open_files(line, max(options.batches) if options.http else 0, "--batches")
    return options


def _missing_program(options: argparse.Namespace, dtype: str) -> str:
    """Which of llama.cpp's programs isn't there; "" for none."""
    needed = ["llama-server" if options.http else "llama-batched-bench"]
    if options.http and options.xllamacpp:
        needed = []
    if dtype != "as-is" and os.sep not in dtype:
        needed.append("llama-quantize")
    return next((name for name in needed if shutil.which(Path(options.llama_cpp) / name) is None), "")


def _model(name: str | None) -> Path:
    """Raises ModelError."""
    return catalog.resolve(name or next(iter(catalog.KNOWN)), progress=lambda *_: None)


def _measure(contender: str, model: str, options: argparse.Namespace) -> Figures:
    kind, _, dtype = contender.partition(":")
    command = [sys.executable, "-m", "bench.contenders", kind, "--model", model, "--dtype", dtype]
    command += ["--batches", *map(str, options.batches), "--llama-cpp", options.llama_cpp]
    with started(contender, command, REPOSITORY, stderr=subprocess.PIPE) as process:
        out, log = process.communicate(timeout=ROUND_S_MAX)
    if process.returncode:
        raise SystemExit(f"{contender} failed:\n{log.decode(errors='replace')[-4000:]}")
    return Figures(**json.loads(out.splitlines()[-1]))


def table(rounds: dict[str, list[Figures]], batches: list[int]) -> str:
    """One row for each contender."""
    head = ["", *(f"decode {batch}" for batch in batches), f"prefill {1024}", "RSS MiB", "outside"]
    rows = []
    for name, found in rounds.items():
        decodes = [spread([figures.decode[str(batch)] for figures in found]) for batch in batches]
        outside = [figures.outside for figures in found if figures.outside is not None]
        rows.append(
            [
                name,
                *decodes,
                spread([figures.prefill for figures in found]),
                f"{statistics.median([figures.resident_mib for figures in found]):,.0f}",
                f"{statistics.median(outside):.1%}" if outside else "",
            ]
        )
    return markdown(head, rows)
