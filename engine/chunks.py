"""How the prompts in progress share a step's tokens, and how many they have beside decodes.

While nobody decodes, prompts have the whole budget. A step that has decodes too delays their next tokens by the
chunks in it, so it has fewer prompt tokens where the machine is slow: about as many as keep it within a time, as steps
before it tell. Time is never the same twice, but how a prompt is cut changes no text: that is so for any chunks.
"""

from __future__ import annotations

import math
from operator import attrgetter

from engine.sequence import Sequence, Slice

# When several prompts are being computed, each gets at least this many tokens of a step: smaller chunks would
# spend more on the step than on the tokens.
CHUNK_TOKENS_MIN = 64
# Where decodes alone take long, a step may take so many times as long as they do: prompts have two thirds of the time.
# With less they come to wait behind a full batch for many times longer, and what they wait the batch gains once.
DECODES_MAX = 3
_COUNT = attrgetter("count")  # in C: each decode of each step is counted


class Chunks:
    """`tokens_max`: budget of a step. `beside_s`: what a step with decodes in it may take, in seconds."""

    def __init__(self, tokens_max: int, beside_s: float = math.inf) -> None:
        self.beside = tokens_max  # prompt tokens of a step that has decodes, at most
        self._tokens_max = tokens_max
        self._beside_s = beside_s
        self._decodes_s = 0.0  # of the latest step that had no chunk
        self._turn = 0  # which of the prompts in progress is served first

    def cut(self, behind: list[Sequence], decodes: int) -> list[Slice]:
        """What a step computes of the prompts `behind` beside so many decodes, each in turn being the first."""
        budget = self._tokens_max - decodes
        if decodes:
            budget = min(budget, self.beside)
        first = self._turn % len(behind)
        self._turn += 1
        slices: list[Slice] = []
        for sequence in behind[first:] + behind[:first]:
            if budget <= 0:
                break
            gap = len(sequence.tokens) - sequence.computed
            fair = budget // (len(behind) - len(slices))
            count = min(gap, budget, max(CHUNK_TOKENS_MIN, fair))
            slices.append(Slice(sequence, sequence.computed, count, count == gap))
            sequence.tried = sequence.computed
            budget -= count
        return slices

    def took(self, slices: list[Slice], seconds: float) -> None:
        """A step took so long. Short chunks say little of long ones, and are not asked for less."""
        if sum(map(_COUNT, slices)) == len(slices):
            self._decodes_s = seconds
            return
        tokens = sum(part.count for part in slices if part.count > 1)
        if tokens >= CHUNK_TOKENS_MIN:
            limit_s = max(self._beside_s, DECODES_MAX * self._decodes_s)
            fits = self._tokens_max * seconds <= tokens * limit_s
            self.beside = self._tokens_max if fits else max(CHUNK_TOKENS_MIN, int(tokens * limit_s / seconds))
