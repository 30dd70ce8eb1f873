"""The smallest scheduler that can drive a model runner: block tables from one shuffled pool, and steps as told."""

from __future__ import annotations

import random
from collections.abc import Sequence as Many

import torch

from engine.model_runner import ModelRunner
from engine.models.decoder import TorchDecoder
from engine.sequence import Sampled, Sequence, Slice
from engine.wire import Sampling

BLOCK_SIZE = 16


class Stepper:
    """Gives sequences their blocks, in an order that no two neighbours share, and runs them to their end."""

    def __init__(self, runner: ModelRunner, *, blocks: int = 256, block_size: int = BLOCK_SIZE) -> None:
        self.runner = runner
        self._block_size = block_size
        runner.allocate(blocks, block_size)
        self._free = list(range(blocks))
        random.Random(1).shuffle(self._free)

    def poison(self) -> None:
        """Fills the whole cache with NaN, as a careless sequence before might have."""
        model = self.runner._model
        for caches in model.attention.caches if isinstance(model, TorchDecoder) else model.caches:
            for cache in caches:
                cache[:-1].fill_(torch.nan)

    def sequence(self, prompt: Many[int], sampling: Sampling) -> Sequence:
        return Sequence(id(prompt), list(prompt), len(prompt), sampling, credit=sampling.max_tokens)

    def run(self, sequences: list[Sequence], *, chunk: int = 10**9, stop_at_eos: bool = True) -> list[list[Sampled]]:
        """Each step gives every sequence that isn't at its end up to `chunk` tokens. Returns what was chosen."""
        chosen: list[list[Sampled]] = [[] for _ in sequences]
        running = list(range(len(sequences)))
        while running:
            slices = [self._slice(sequences[index], chunk) for index in running]
            answers = iter(self.runner.execute(slices))
            for index, each in zip(list(running), slices, strict=True):
                sequence = sequences[index]
                sequence.computed += each.count
                if not each.sample:
                    continue
                answer = next(answers)
                assert answer is not None
                chosen[index].append(answer)
                sequence.tokens.append(answer.token)
                ended = stop_at_eos and answer.token in self.runner.eos_ids
                if ended or answer.error or sequence.generated == sequence.sampling.max_tokens:
                    running.remove(index)
                    self._free += sequence.blocks
                    sequence.blocks = []
            assert next(answers, None) is None
        return chosen

    def generate(
        self, prompts: Many[Many[int]], sampling: Sampling, *, chunk: int = 10**9, stop_at_eos: bool = True
    ) -> list[list[int]]:
        """The ids chosen for each prompt."""
        sequences = [self.sequence(prompt, sampling) for prompt in prompts]
        answers = self.run(sequences, chunk=chunk, stop_at_eos=stop_at_eos)
        return [[answer.token for answer in each] for each in answers]

    def _slice(self, sequence: Sequence, chunk: int) -> Slice:
        left = len(sequence.tokens) - sequence.computed
        count = min(left, chunk)
        end = sequence.computed + count
        while len(sequence.blocks) * self._block_size < end:
            sequence.blocks.append(self._free.pop(0))
        return Slice(sequence, sequence.computed, count, sample=count == left)
