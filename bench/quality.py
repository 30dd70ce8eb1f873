"""`python -m bench quality`: what each type of weights costs in quality, against float32 of the same file.

For the passages of bench/texts, which were written for this and are under this repository's licence: the perplexity of
their tokens, and the share of places where the likeliest next token is the one that float32 finds likeliest. Then
greedy answers to each passage's beginning: how many are the same, and how many tokens come before the first difference.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path

from engine.model_runner import ModelError, ModelRunner
from engine.sequence import Sequence, Slice
from engine.tokenizer import Tokenizer
from engine.wire import Sampling
from server.config import DTYPES

TEXTS = Path(__file__).parent / "texts" / "passages.txt"
BLOCK_SIZE = 16
BLOCKS = 128
PROMPT_TOKENS = 24  # of each passage, for the free answers
ANSWER_TOKENS = 64


def main(argv: list[str]) -> int:
    """Prints a table; the exit code is 1 where a model can't be had."""
    parser = argparse.ArgumentParser(prog="python -m bench quality", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a known name, a directory, or a .gguf file")
    parser.add_argument(
        "--dtype", action="append", choices=DTYPES, help="may be repeated (default: bfloat16, int8 and gguf)"
    )
    options = parser.parse_args(argv)
    try:
        print(f"{options.model}, {TEXTS.name}: {PROMPT_TOKENS} tokens of prompt, {ANSWER_TOKENS} of answer\n")
        print(
            "| type | perplexity | to float32 | same likeliest token | same answers | same tokens before a difference |"
        )
        print("|---|---|---|---|---|---|")
        _compare(options.model, ["float32", *(options.dtype or ["bfloat16", "int8", "gguf"])])
    except ModelError as error:
        print(f"quality: {error}")
        return 1
    return 0


def _compare(model: str, dtypes: list[str]) -> None:
    base: Figures | None = None
    for dtype in dtypes:
        ours = Figures(ModelRunner.load(model, device="cpu", dtype=dtype, progress=lambda *_: None))
        base = base or ours
        likeliest = [a == b for a, b in zip(ours.likeliest, base.likeliest, strict=True)]
        lengths = [_common(a, b) for a, b in zip(ours.answers, base.answers, strict=True)]
        whole = sum(a == b for a, b in zip(ours.answers, base.answers, strict=True))
        more = ours.perplexity / base.perplexity - 1
        same = f"{statistics.mean(likeliest):.2%} of {len(likeliest)} | {whole} of {len(lengths)}"
        line = f"| {dtype} | {ours.perplexity:.3f} | {more:+.2%} | {same} | {statistics.mean(lengths):.1f} |"
        print(line, flush=True)


class Figures:
    """What one runner makes of the passages."""

    def __init__(self, runner: ModelRunner) -> None:
        runner.allocate(BLOCKS, BLOCK_SIZE)
        tokenizer = Tokenizer(runner.tokenizer)
        self.likeliest: list[int] = []
        self.answers: list[list[int]] = []
        logprobs: list[float] = []
        for passage in _passages():
            ids = tokenizer.encode(passage)
            told = _run(runner, ids, Sampling(max_tokens=1, temperature=0, prompt_logprobs=1)).prompt_logprobs
            logprobs += [each.logprob for each in told]
            self.likeliest += [each.top_ids[0] for each in told]
            sequence = _run(runner, ids[:PROMPT_TOKENS], Sampling(max_tokens=ANSWER_TOKENS, temperature=0))
            self.answers.append(sequence.tokens[PROMPT_TOKENS:])
        self.perplexity = math.exp(-statistics.mean(logprobs))


def _run(runner: ModelRunner, ids: list[int], sampling: Sampling) -> Sequence:
    sequence = Sequence(0, list(ids), len(ids), sampling, credit=sampling.max_tokens, blocks=list(range(BLOCKS)))
    while sequence.generated < sampling.max_tokens:
        left = len(sequence.tokens) - sequence.computed
        (answer,) = runner.execute([Slice(sequence, sequence.computed, left, sample=True)])
        assert answer is not None
        sequence.computed += left
        sequence.tokens.append(answer.token)
    return sequence


def _passages() -> list[str]:
    return [each.strip() for each in TEXTS.read_text(encoding="utf-8").split("\n=====\n")]


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
