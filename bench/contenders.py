"""`python -m bench.contenders KIND …`: one contender of the engine benchmark, in a process of its own.

Prints one line of JSON, `Figures`. Every contender computes the same: random prompts, greedy, exactly `NEW_TOKENS`
new tokens for each sequence. The time of a decode is that between the first new token of the last sequence and the end,
so no prompt is in it. The process is measured whole, with the memory that loading took at its most.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench import signals

PROMPT_TOKENS = 128
NEW_TOKENS = 128
PREFILL_TOKENS = 1024
# Ids below are control tokens in the vocabularies at hand.
FIRST_ORDINARY_ID = 300
# What a warm-up makes: enough for every operator to have been called.
WARM_TOKENS = 4
BLOCK_SIZE = 16


@dataclass
class Figures:
    """`decode` by batch size and `prefill`: tokens a second."""

    prefill: float = 0.0
    decode: dict[str, float] = field(default_factory=dict)
    resident_mib: float = 0.0  # at its most
    outside: float | None = None  # the part of a step's time that is neither model nor sampler, at the largest batch


def kv_tokens(batches: list[int]) -> int:
    """What a contender's KV cache has room for, the same in each that has one of its own: its largest batch whole."""
    return max(max(batches) * (PROMPT_TOKENS + NEW_TOKENS), PREFILL_TOKENS + BLOCK_SIZE)


def prompts(count: int, tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    """`count` different prompts."""
    draw = random.Random(seed)
    return [[draw.randrange(FIRST_ORDINARY_ID, vocab_size) for _ in range(tokens)] for _ in range(count)]


class Sluice:
    """The engine's core without its socket: messages in, encoded steps out, as the shell around it would have them."""

    def __init__(self, model: str, dtype: str, batches: list[int]) -> None:
        from engine.__main__ import CPU_RUNNING_MAX, CPU_STEP_TOKENS, OPENMP_SPINS

        os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)  # as the engine has it, before torch is imported
        from engine.block_pool import BlockPool
        from engine.core import Core
        from engine.memory import give_back
        from engine.model_runner import ModelRunner
        from engine.scheduler import Scheduler

        self._runner = ModelRunner.load(model, device="cpu", dtype=dtype, progress=lambda *_: None)
        blocks = -(-kv_tokens(batches) // BLOCK_SIZE)
        self._runner.allocate(blocks, BLOCK_SIZE)
        launch = self._runner.launch  # on a CPU a step is computed by the time that it returns
        self._inside = 0.0

        def timed(slices: list[Any]) -> Any:
            began = time.perf_counter()
            launched = launch(slices)
            self._inside += time.perf_counter() - began
            return launched

        self._runner.launch = timed  # type: ignore[method-assign]
        pool = BlockPool(blocks, BLOCK_SIZE)
        scheduler = Scheduler(pool, step_tokens_max=CPU_STEP_TOKENS, running_max=CPU_RUNNING_MAX)
        self._core = Core(self._runner, pool, scheduler, version="bench")
        self._peer = self._core.join(self._sent)
        self._next_id = 1
        self._begun: set[int] = set()
        give_back()  # as the engine does when it has loaded

    def _sent(self, step: Any) -> None:
        from engine.wire import encode

        encode(step)
        self._begun.update(step.ids)

    def run(self, batch: int, prompt_tokens: int, new_tokens: int) -> tuple[float, float, float]:
        """Seconds to the last sequence's first token, seconds from there to the end, and how many of the latter were
        outside the runner. A sequence that has its first token waits for the others, so that all decode together."""
        from engine.wire import Credit, Sampling, Submit

        sampling = Sampling(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        self._begun.clear()
        began = time.perf_counter()
        for prompt in prompts(batch, prompt_tokens, self._runner.vocab_size, self._next_id):
            self._core.receive(self._peer, Submit(self._next_id, prompt, sampling, credit=1))
            self._next_id += 1
        while len(self._begun) < batch:
            self._core.step()
        middle = time.perf_counter()
        self._inside = 0.0
        self._core.receive(self._peer, Credit([(id_, new_tokens) for id_ in self._begun]))
        while self._core.has_work:
            self._core.step()
        decode_s = time.perf_counter() - middle
        return middle - began, decode_s, decode_s - self._inside

    def measure(self, batches: list[int]) -> Figures:
        """All figures, after a warm-up."""
        self.run(2, PROMPT_TOKENS, WARM_TOKENS)
        figures = Figures(prefill=PREFILL_TOKENS / self.run(1, PREFILL_TOKENS, 1)[0])
        for batch in batches:
            _, decode_s, outside_s = self.run(batch, PROMPT_TOKENS, NEW_TOKENS)
            figures.decode[str(batch)] = batch * (NEW_TOKENS - 1) / decode_s
            figures.outside = outside_s / decode_s
        return figures


def sluice(options: argparse.Namespace) -> Figures:
    """Ours."""
    return Sluice(options.model, options.dtype, options.batches).measure(options.batches)


def transformers(options: argparse.Namespace) -> Figures:
    """`generate` of Hugging Face's library, on a checkpoint folder or a GGUF file (whose weights it dequantises)."""
    import torch
    import transformers as library

    library.logging.set_verbosity_error()
    path = Path(options.model)
    where = {"gguf_file": path.name} if path.is_file() else {}
    model = library.AutoModelForCausalLM.from_pretrained(
        str(path.parent if path.is_file() else path), dtype=getattr(torch, options.dtype), **where
    ).eval()

    def generate(batch: int, tokens: int, new: int) -> float:
        ids = torch.tensor(prompts(batch, tokens, model.config.vocab_size, new))
        began = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False
        )
        return time.perf_counter() - began

    with torch.inference_mode():
        generate(2, PROMPT_TOKENS, WARM_TOKENS)
        figures = Figures(prefill=PREFILL_TOKENS / generate(1, PREFILL_TOKENS, 1))
        for batch in options.batches:
            first = generate(batch, PROMPT_TOKENS, 1)
            rest = generate(batch, PROMPT_TOKENS, NEW_TOKENS) - first
            figures.decode[str(batch)] = batch * (NEW_TOKENS - 1) / rest
    return figures


def quantised(folder: Path, model: str, dtype: str, scratch: Path) -> str:
    """A GGUF file in a type that llama-quantize (in `folder`) knows, made in `scratch` once; or `as-is`."""
    made = scratch / f"{dtype}.gguf"
    if dtype == "as-is":
        return model
    if not made.exists():
        command = [str(folder / "llama-quantize"), "--allow-requantize", "--pure", model, str(made), dtype]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return str(made)


def llama_cpp(options: argparse.Namespace) -> Figures:
    """llama.cpp's own benchmark program on a GGUF file; `dtype` is a type that llama-quantize knows, or `as-is`."""
    folder = Path(options.llama_cpp)
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as scratch:
        model = quantised(folder, options.model, options.dtype, Path(scratch))
        flags = ["-m", model, "-t", str(options.threads), "-tb", str(options.threads), "-ngl", "0"]
        flags += ["--output-format", "jsonl", "-ntg"]

        def run(prompt: int, new: int, batches: str, context: int) -> list[dict[str, Any]]:
            program = [str(folder / "llama-batched-bench"), *flags, str(new), "-npp", str(prompt), "-npl", batches]
            out = subprocess.run([*program, "-c", str(context)], check=True, capture_output=True, text=True).stdout
            return [json.loads(line) for line in out.splitlines() if line.startswith("{")]

        batches = ",".join(map(str, options.batches))
        decoded = run(PROMPT_TOKENS, NEW_TOKENS, batches, kv_tokens(options.batches))
        (prefilled,) = run(PREFILL_TOKENS, 1, "1", PREFILL_TOKENS + BLOCK_SIZE)
    return Figures(
        prefill=prefilled["speed_pp"],
        decode={str(row["pl"]): row["speed_tg"] for row in decoded},
        resident_mib=resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
    )


KINDS: dict[str, Callable[[argparse.Namespace], Figures]] = {
    "sluice": sluice,
    "transformers": transformers,
    "llama.cpp": llama_cpp,
}


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.contenders", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--batches", type=int, nargs="+", required=True)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--llama-cpp", default="", help="the folder of its programs")
    options = parser.parse_args()
    figures = KINDS[options.kind](options)
    figures.resident_mib = figures.resident_mib or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(asdict(figures)))
    return 0


if __name__ == "__main__":
    sys.exit(signals.guarded(main))
