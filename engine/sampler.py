"""Chooses the next token of many sequences at once from their logits.

May import numpy, torch and the engine's wire types. A row's choice depends on its own logits and on its `Sampling`,
never on the rows beside it, and its randomness is a pure function of (seed, prompt index, choice index, token index).

Bias, penalties and bans come first (see engine.penalties), what a grammar doesn't allow among the bans (see
engine.constraints), and greedy choice obeys them too. Then filters apply in this
order: temperature, top_k, top_p over what top_k left, min_p relative to the likeliest token.
The draw inverts the cumulative distribution in the order of token ids, not of probabilities: two nearly equal
probabilities that trade places by a rounding difference would otherwise change the token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from engine.constraints import Bits
from engine.penalties import adjust, is_adjusted
from engine.sequence import Sampled, Sequence
from engine.wire import Logprob, Sampling

# Within float32's range with room for a quotient; at either end the choice is greedy, or uniform, already.
TEMPERATURE_MIN, TEMPERATURE_MAX = 1e-30, 1e30

# What stands for the logarithm of nothing, which JSON can't say; the same number as elsewhere in the field.
LOGPROB_MIN = -9999.0

# To pick so small a part of a row takes a fifth of the time that sorting it does.
_FEW = 64

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


NOT_FINITE = "the model's output holds no finite number to choose from"

# (logits [rows, vocab] without what must not come, a sequence for each row) -> tokens [rows] int64; -1: no finite one.
Pick = Callable[[torch.Tensor, list[Sequence]], torch.Tensor]

Array = np.ndarray[Any, np.dtype[Any]]
# (weights [rows, vocab] of 0 to 1, which may be written over; and [rows]: top_k, 1 to vocab, top_p, min_p, and chances
# of 0 to below 1) -> tokens [rows] int64, each where its chance falls in what the filters leave. A row with a NaN: any.
Choose = Callable[[torch.Tensor, Array, Array, Array, Array], torch.Tensor]


def is_plain(sequence: Sequence) -> bool:
    """Whether its next id is a function of its logits and its `Sampling`, and nothing else is asked for."""
    sampling = sequence.sampling
    return (
        sequence.constraint is None
        and sampling.logprobs < 0
        and sequence.next_index >= sampling.min_tokens
        and not is_adjusted(sampling)
    )


class Sampler:
    """`pick` is what chooses at last, by default torch. `eos_ids` are banned, with a sequence's own stop ids, until it
    has its min_tokens; and in a grammar where they are to be ignored, since it ends with the first of them."""

    def __init__(self, eos_ids: list[int], pick: Pick | None = None) -> None:
        self._eos_ids = eos_ids
        self._pick = pick or picked

    def choose(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[Sampled]:
        """logits [rows, vocab], float32, one row for each sequence -> one answer for each. A row with a NaN, with no
        finite logit or with an infinite one is answered with an error."""
        samplings = [each.sampling for each in sequences]
        allowed = self._adjusted(logits, sequences)
        tokens = self._pick(allowed, sequences)
        if allowed is not logits:  # a ban must not hide a number that is none
            tokens = tokens.where(logits.amax(-1).isfinite(), -1)
        answers = [
            Sampled(token) if token >= 0 else Sampled(-1, error=_fault(logits[row], sequences[row]))
            for row, token in enumerate(tokens.tolist())
        ]
        self._add_logprobs(logits, samplings, answers)
        return answers

    def _adjusted(self, logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
        """The logits with bias and penalties, and -inf at every id that must not come yet; a copy if there is any."""
        rows = [row for row, each in enumerate(sequences) if is_adjusted(each.sampling)]
        held = [row for row, each in enumerate(sequences) if each.constraint is not None]
        banned_rows, banned_ids = self._banned(logits.shape[1], sequences)
        if not rows and not held and not banned_rows:
            return logits
        adjusted = logits.clone()
        if rows:
            adjust(adjusted, rows, [sequences[row] for row in rows])
        if held:
            allowed = torch.from_numpy(_allowed([sequences[row] for row in held])).to(logits.device)
            adjusted[held] = adjusted[held].masked_fill(~allowed, -torch.inf)
        if banned_rows:
            adjusted[banned_rows, banned_ids] = -torch.inf
        return adjusted

    def _banned(self, vocab: int, sequences: list[Sequence]) -> tuple[list[int], list[int]]:
        """Rows, and for each an id that must not come yet."""
        rows: list[int] = []
        ids: list[int] = []
        for row, sequence in enumerate(sequences):
            sampling = sequence.sampling
            early = sequence.generated < sampling.min_tokens
            if early or (sampling.ignore_eos and sequence.constraint is not None):
                banned = {*self._eos_ids, *(sampling.stop_ids if early else ())}
                ids += [each for each in banned if 0 <= each < vocab]
                rows += [row] * (len(ids) - len(rows))
        return rows, ids

    def _add_logprobs(self, logits: torch.Tensor, samplings: list[Sampling], answers: list[Sampled]) -> None:
        """Log probabilities are the model's own: of the logits as they came, before any filter."""
        wanted = [row for row, each in enumerate(samplings) if each.logprobs >= 0 and not answers[row].error]
        if not wanted:
            return
        ids = [answers[row].token for row in wanted]
        counts = [samplings[row].logprobs for row in wanted]
        for row, best in zip(wanted, logprobs(logits[wanted], ids, counts), strict=True):
            answers[row].logprob = best


def _allowed(sequences: list[Sequence]) -> Bits:
    constraints = [each.constraint for each in sequences if each.constraint is not None]
    return constraints[0].allowed(constraints)


def _fault(logits: torch.Tensor, sequence: Sequence) -> str:
    if sequence.constraint is not None and logits.amax().isfinite():
        return "the answer's grammar leaves nothing to go on with"
    return NOT_FINITE


def logprobs(logits: torch.Tensor, ids: list[int], counts: list[int], first: int = 0) -> list[Logprob]:
    """For each row of logits [rows, vocab] the log probability of ids[row] and the counts[row] most likely ids; the
    index of a row is its number plus `first`."""
    values = logits.log_softmax(-1).clamp_(min=LOGPROB_MIN)  # a NaN stays one
    chosen = values[range(len(ids)), ids].tolist()
    tops, top_ids = values.topk(min(max(counts), logits.shape[1]))
    rows = zip(chosen, top_ids.tolist(), tops.tolist(), counts, strict=True)
    return [
        Logprob(index, logprob, ids_of_row[:count], top[:count])
        for index, (logprob, ids_of_row, top, count) in enumerate(rows, first)
    ]


def picked(logits: torch.Tensor, sequences: list[Sequence], choose: Choose | None = None) -> torch.Tensor:
    """See `Pick`; in torch, but for what `choose` does, by default `chosen`."""
    best, tokens = _largest(logits)
    drawn = [row for row, each in enumerate(sequences) if each.sampling.temperature > 0]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        indices = [sequences[row].next_index for row in drawn]
        asked = logits.contiguous() if len(drawn) == len(sequences) else logits[rows]
        tokens[rows] = draw(asked, [sequences[row].sampling for row in drawn], indices, choose)
    return tokens.where(best.isfinite(), -1)


def draw(
    logits: torch.Tensor, samplings: list[Sampling], generated: list[int], choose: Choose | None = None
) -> torch.Tensor:
    """One token for each row of logits [rows, vocab], by temperature (above 0), filters and `uniform`: [rows] int64.
    `generated` is the index of the token that is drawn."""
    temperature = np.clip([each.temperature for each in samplings], TEMPERATURE_MIN, TEMPERATURE_MAX)
    # Relative to the likeliest token, which has weight 1, so that nothing overflows.
    weights = (logits - logits.amax(-1, keepdim=True)).div_(_column(temperature, logits)).exp_()
    vocab = logits.shape[1]
    top_k = np.array([each.top_k if 0 < each.top_k < vocab else vocab for each in samplings])
    top_p = np.array([each.top_p for each in samplings])
    min_p = np.array([each.min_p for each in samplings], np.float32)
    return (choose or chosen)(weights, top_k, top_p, min_p, uniform(samplings, generated))


def chosen(weights: torch.Tensor, top_k: Array, top_p: Array, min_p: Array, chances: Array) -> torch.Tensor:
    """See `Choose`; in torch."""
    narrowed = np.flatnonzero((top_k < weights.shape[1]) | (top_p < 1))
    if len(narrowed):
        weights[narrowed] = _narrowed(weights[narrowed], top_k[narrowed], top_p[narrowed])
    if min_p.any():
        weights *= weights >= _column(min_p, weights)
    return _invert(weights, _column(chances, weights, torch.float64))


def _narrowed(weights: torch.Tensor, top_k: Array, top_p: Array) -> torch.Tensor:
    """The weights [rows, vocab] with 0 for what top_k and top_p drop. Among equals the lower ids stay."""
    falling = _falling(weights, int(top_k.max()))
    reached = falling.cumsum(-1, dtype=torch.float64)
    most = torch.tensor(top_k, device=weights.device)[:, None]
    share = _column(top_p, weights, torch.float64)
    needed = torch.searchsorted(reached, share * reached.gather(-1, most - 1)) + 1
    kept = torch.where(share < 1, torch.minimum(needed, most), most)
    threshold = falling.gather(-1, kept - 1)
    above, equal = weights > threshold, weights == threshold
    spare = kept - above.sum(-1, keepdim=True)
    if (equal.sum(-1, keepdim=True) > spare).any():
        equal &= equal.cumsum(-1) <= spare
    return weights * (above | equal)


def _falling(weights: torch.Tensor, most: int) -> torch.Tensor:
    """The `most` largest of each row, and perhaps more, in falling order."""
    if most * _FEW < weights.shape[1]:
        return weights.topk(most).values
    if weights.device.type == "cpu":  # numpy sorts with vector instructions, 30 times as fast as torch
        return torch.from_numpy(np.sort(weights.numpy(), -1)).flip(-1)
    return weights.sort(-1).values.flip(-1)


def _largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each row and its id; a NaN counts as that."""
    if logits.device.type == "cpu":  # numpy's search is 5 times as fast as torch's
        ids = torch.from_numpy(logits.numpy().argmax(-1))
        return logits.gather(-1, ids[:, None])[:, 0], ids
    best, ids = logits.max(-1)
    return best, ids


def _column(values: Any, like: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]


def _invert(weights: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    """The column of weights [rows, n] in which `chance` [rows, 1] of each row's sum falls; never one of weight 0."""
    reached = weights.cumsum(-1, dtype=torch.float64)
    # A chance is at most 1 - 2⁻⁵³, which takes more than half a unit in the last place off the total: the target is
    # below it even when rounded. Only a row with a NaN finds no column, and its token is never used.
    target = chance * reached[:, -1:]
    return torch.searchsorted(reached, target, right=True)[:, 0].clamp_(max=weights.shape[1] - 1)


def uniform(samplings: list[Sampling], generated: list[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """A number in [0, 1) for each row, 53 random bits: a hash of its seed, prompt index, choice index and the index of
    the token to come. Each word goes through SplitMix64's finaliser (Steele, Lea, Flood 2014), which is a bijection,
    so rows that differ in one word alone never share a state."""
    words = np.array(
        [
            (each.seed, each.prompt_index, each.choice_index, index)
            for each, index in zip(samplings, generated, strict=True)
        ],
        dtype=np.uint64,
    )
    state = np.zeros(len(words), np.uint64)
    for column in words.T:
        state = _mix((state ^ column) + _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
