"""What a sequence's own history and its `logit_bias` do to its logits.

May import numpy, torch and the engine's types. Everything here is a function of the sequence's ids and its `Sampling`:
what is remembered between two steps is a count of ids that only grow, and whoever has the ids can count them again. So
preemption, parking and another engine change nothing.

First the bias is added, as in OpenAI's API. Then, as vLLM has it, the repetition penalty (Keskar et al. 2019, "CTRL")
divides the positive logits of all ids in the prompt and the generated text and multiplies the negative ones; then the
frequency penalty, times how often an id was generated, and the presence penalty, once for each id that was, come off.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch

from engine.sequence import Sequence
from engine.wire import Sampling

# Beyond either end a logit would leave float32's range; the choice is settled long before.
_REPETITION_MIN, _REPETITION_MAX = 1e-30, 1e30
_IDS_INITIAL = 64


def is_adjusted(sampling: Sampling) -> bool:
    """Whether there is anything to do."""
    return bool(sampling.logit_bias) or _has_penalty(sampling)


def _has_penalty(sampling: Sampling) -> bool:
    return bool(sampling.frequency_penalty or sampling.presence_penalty) or sampling.repetition_penalty != 1


class History:
    """The distinct ids of one sequence, and how often each was generated; and its bias as arrays. Holds at most one
    entry for each of the sequence's ids, and goes with the sequence."""

    def __init__(self, sequence: Sequence) -> None:
        sampling = sequence.sampling
        self.bias_ids = np.array([id_ for id_, _ in sampling.logit_bias], np.int64)
        self.bias = np.array([value for _, value in sampling.logit_bias], np.float32)
        prompt = sequence.tokens[: sequence.prompt_len] if sampling.repetition_penalty != 1 else []
        self._slots = {id_: slot for slot, id_ in enumerate(dict.fromkeys(prompt))}
        self._ids = np.zeros(len(self._slots) + _IDS_INITIAL, np.int64)
        self._ids[: len(self._slots)] = list(self._slots)
        self._counts = np.zeros(len(self._ids), np.float32)
        self._counts_ids = _has_penalty(sampling)
        self._counted = sequence.prompt_len  # ids of the sequence that were taken in

    @property
    def ids(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Each id once."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """How often each of `ids` was generated."""
        return self._counts[: len(self._slots)]

    def follow(self, tokens: list[int]) -> None:
        """Take in the ids that `tokens` has gained."""
        if self._counts_ids:
            for id_ in tokens[self._counted :]:
                slot = self._slot_of(id_)  # before the next line looks at the array: it may grow
                self._counts[slot] += 1
        self._counted = len(tokens)

    def _slot_of(self, id_: int) -> int:
        slot = self._slots.setdefault(id_, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[slot] = id_
        return slot


def adjust(logits: torch.Tensor, rows: list[int], sequences: list[Sequence]) -> None:
    """Change logits [all rows, vocab], float32 and contiguous, in place: row rows[i] as sequences[i] wants it."""
    histories = [_history(each) for each in sequences]
    flat = logits.view(-1)
    starts = np.array(rows, np.int64) * logits.shape[1]
    at = _places(starts, [each.bias_ids for each in histories], logits.device)
    if len(at):
        flat[at] += _joined([each.bias for each in histories], logits.device)
    at = _places(starts, [each.ids for each in histories], logits.device)
    if len(at):
        counts = _joined([each.counts for each in histories], logits.device)
        lengths = [len(each.ids) for each in histories]
        flat[at] = _penalised(flat[at], counts, [each.sampling for each in sequences], lengths)


def _history(sequence: Sequence) -> History:
    history = sequence.runner_state
    if not isinstance(history, History):
        history = sequence.runner_state = History(sequence)
    history.follow(sequence.tokens)
    return history


def _penalised(
    values: torch.Tensor, counts: torch.Tensor, samplings: list[Sampling], lengths: list[int]
) -> torch.Tensor:
    """values and counts [n]: the logits of all histories' ids in one row, lengths[i] of them of samplings[i]."""

    def column(numbers: list[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(numbers, np.float32), lengths)).to(values.device)

    clipped = np.clip([each.repetition_penalty for each in samplings], _REPETITION_MIN, _REPETITION_MAX)
    repetition = column(clipped.tolist())
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= column([each.frequency_penalty for each in samplings]) * counts
    return values.sub_(column([each.presence_penalty for each in samplings]) * (counts > 0))


def _places(
    starts: np.ndarray[tuple[int], np.dtype[np.int64]],
    ids: Many[np.ndarray[tuple[int], np.dtype[np.int64]]],
    device: torch.device,
) -> torch.Tensor:
    """Where each row's ids lie in the flattened logits; no place comes twice."""
    joined = np.concatenate(ids) + np.repeat(starts, [len(each) for each in ids])
    return torch.from_numpy(joined).to(device)


def _joined(values: Many[np.ndarray[tuple[int], np.dtype[np.float32]]], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(values)).to(device)
