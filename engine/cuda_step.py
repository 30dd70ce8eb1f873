"""Computes steps on a GPU without waiting for it: decode steps by CUDA graphs, others launch by launch.

May import numpy, torch and the engine's model side. The tokens that a step draws stay in one place on the device, where
the next step finds them, so it may be launched before anybody here knows them. What torch.cuda does comes in as a
`Device`; in tests a CPU takes its place.

A graph is for so many rows and splits, each from a short ladder: a step takes the smallest that it fits in, and fills
it up with rows that have no sequence (engine.step_inputs). Its kernels' arithmetic in a row depends on neither. All
graphs read their inputs in one place and write logits and tokens to one place, since none runs beside another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Many
from itertools import chain
from typing import Any

import numpy as np
import torch

from engine.attention import StepBatch, sent
from engine.attention.cuda import CUDAAttention
from engine.cuda_device import Device
from engine.cuda_kernels import SPLIT_TOKENS, SampleKernel
from engine.models.decoder import TorchDecoder
from engine.sequence import Sequence, Slice
from engine.step_inputs import SETTINGS, Layout, tell_settings

# Between two sizes the rows that no sequence has cost little: below 8 a step's time is its weights' whatever the rows,
# above 16 less than a quarter of them is empty.
_FEW_ROWS = (1, 2, 4, 8)
_ROWS_STEP = 8
# From one number of splits to the next. Those that a sequence lacks cost only room for their parts.
_SPLITS_FACTOR = 4
# So many tokens tell how large keys and values become, where they are stored as bytes.
_MEASURED_TOKENS = 256


def rows_ladder(most: int) -> list[int]:
    """The sizes of batches up to `most` that have graphs: 1, 2, 4, 8, 16, 24, … 64, 80, … 128, 160, …"""
    ladder = [each for each in _FEW_ROWS if each < most]
    rows = 2 * _ROWS_STEP
    while rows < most:
        ladder.append(rows)
        rows += max(_ROWS_STEP, 1 << rows.bit_length() - 3)
    return [*ladder, most]


def splits_ladder(context_tokens_max: int) -> list[int]:
    """The numbers of splits that have graphs: 1, 4, 16, …, the last one enough for the longest sequence."""
    last = -(-context_tokens_max // SPLIT_TOKENS)
    ladder = [1]
    while ladder[-1] < last:
        ladder.append(min(ladder[-1] * _SPLITS_FACTOR, last))
    return ladder


def _sample_text(vocab: int, blocks: int, block_size: int) -> tuple[torch.Tensor, StepBatch]:
    """Ids from all over the vocabulary, always the same, as one prompt in the first blocks."""
    count = min(_MEASURED_TOKENS, vocab, blocks * block_size)
    ids = np.random.default_rng(0).permutation(vocab)[:count].astype(np.int64)
    positions = np.arange(count)
    tables = np.arange(-(-count // block_size))[None]
    return torch.from_numpy(ids), StepBatch(positions, positions, np.array([0, count]), np.array([count]), tables)


class CUDAStep:
    """One model's steps. `allocate` comes before the first `launch`, and graphs are there after `capture`."""

    def __init__(self, decoder: TorchDecoder, device: Device, vocab: int) -> None:
        assert isinstance(decoder.attention, CUDAAttention)
        self._decoder = decoder
        self._attention = decoder.attention
        self._device = device
        self._vocab = vocab
        self._sample = SampleKernel(device.load)
        self._block_size = 0
        self._tokens = torch.zeros(0, dtype=torch.int64, device=device.place)  # drawn by the last step
        self._row_of: dict[Sequence, int] = {}  # in these
        self._logits = torch.empty(0)
        self._rows: list[int] = []
        self._splits: list[int] = []
        self._replays: dict[tuple[int, int], Callable[[], None]] = {}
        self._inputs = torch.empty(0)
        self._told: list[torch.Tensor] = []  # two, since the device may not have read the last step's inputs yet
        self._fetched: list[torch.Tensor] = []  # as many, for tokens
        self._turn = 0

    def allocate(self, blocks: int, block_size: int) -> None:
        """See `Decoder`."""
        self._decoder.allocate(blocks, block_size)
        self._block_size = block_size
        self._replays.clear()  # they know where the cache was

    def measure(self, blocks: int) -> None:
        """How large keys and values become, where they are stored as bytes; before anything is in the cache."""
        if self._attention.scaled:
            with self._attention.measure():
                self._decoder.forward(*_sample_text(self._vocab, blocks, self._block_size))

    def capture(self, rows_max: int, context_tokens_max: int, progress: Callable[[str, int, int], None]) -> None:
        """Makes the graphs of decode steps: up to so many sequences of up to so many tokens."""
        self._rows, self._splits = rows_ladder(rows_max), splits_ladder(context_tokens_max)
        place = self._device.place
        self._make_room(rows_max)
        self._logits = torch.empty((rows_max, self._vocab), dtype=torch.float32, device=place)
        size = self._layout(rows_max, self._splits[-1]).size
        self._inputs = torch.empty(size, dtype=torch.uint8, device=place)
        self._told = [self._device.host(size) for _ in range(2)]
        keys = [(rows, splits) for splits in self._splits for rows in self._rows]
        for number, key in enumerate(keys):
            progress("capturing CUDA graphs", number, len(keys))
            layout = self._layout(*key)
            told = self._device.host(layout.size)
            layout.arrays(told)
            self._device.upload(self._inputs[: layout.size], told)
            self._replays[key] = self._device.capture(self._decode_of(layout, key[1]))
        progress("capturing CUDA graphs", len(keys), len(keys))

    def launch(self, slices: Many[Slice], batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Starts to compute a step. Returns the logits [rows, vocab] of the slices with `sample` set, on the device,
        which hold until the next launch; and unless a graph computed it all slices' hidden states."""
        if self._replays and self._is_decode(slices, batch):
            return self._replay(slices, batch), None
        return self._compute(slices, batch)

    def draw(self, logits: torch.Tensor, sequences: Many[Sequence]) -> torch.Tensor:
        """The next tokens of these sequences, from these logits; see `Pick`. The next step finds them."""
        layout = Layout(len(sequences), 0)
        told = torch.empty(layout.size, dtype=torch.uint8)
        tell_settings(layout.arrays(told), sequences, self._vocab)
        self._make_room(len(sequences))
        self._draw(logits, layout.tensors(sent(told, self._device.place)))
        return self._tokens[: len(sequences)]

    def tokens(self, sequences: Many[Sequence]) -> Callable[[], list[int]]:
        """What was drawn for these sequences, once it is known: a graph has drawn with its step, `draw` otherwise. -1:
        its logits hold no finite number."""
        count = len(sequences)
        self._row_of = {sequence: row for row, sequence in enumerate(sequences)}
        fetched = self._fetched[self._turn][: 8 * count].view(torch.int64)
        wait = self._device.fetch(fetched, self._tokens[:count])
        self._turn ^= 1

        def result() -> list[int]:
            wait()
            return [int(each) for each in fetched.tolist()]

        return result

    def _is_decode(self, slices: Many[Slice], batch: StepBatch) -> bool:
        return (
            len(slices) <= self._rows[-1]
            and all(each.count == 1 and each.sample and not each.prompt_targets for each in slices)
            and int(batch.contexts.max()) <= self._splits[-1] * SPLIT_TOKENS
        )

    def _replay(self, slices: Many[Slice], batch: StepBatch) -> torch.Tensor:
        rows = self._rows[bisect_left(self._rows, len(slices))]
        splits = self._splits[bisect_left(self._splits, -(-int(batch.contexts.max()) // SPLIT_TOKENS))]
        layout, told = self._layout(rows, splits), self._told[self._turn]
        inputs, count = layout.arrays(told), len(slices)
        inputs["ids"][:count], inputs["sources"][:count] = self._ids(slices, count)
        inputs["positions"][:count] = batch.positions
        inputs["slots"][:count] = batch.slots
        inputs["contexts"][:count] = batch.contexts
        inputs["tables"][:count, : batch.tables.shape[1]] = batch.tables
        tell_settings(inputs, [each.sequence for each in slices], self._vocab)
        self._device.upload(self._inputs[: layout.size], told[: layout.size])
        self._replays[rows, splits]()
        return self._logits[:count]

    def _compute(self, slices: Many[Slice], batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        place = self._device.place
        ids, sources = self._ids(slices, len(batch.positions))
        on_device = sent(torch.from_numpy(np.stack((ids, sources))), place)
        hidden = self._decoder.forward(self._known(*on_device), batch)
        sampled = [index for index, each in enumerate(slices) if each.sample]
        if not sampled:  # a launch of no rows would be an error
            return hidden[:0], hidden
        last_rows = sent(torch.from_numpy(batch.rows[1:][sampled] - 1), place)
        return self._decoder.logits(hidden.index_select(0, last_rows)), hidden

    def _decode_of(self, layout: Layout, splits: int) -> Callable[[], None]:
        """All that a graph does."""
        inputs = layout.tensors(self._inputs)

        def decode() -> None:
            plan = self._attention.decode_plan(
                inputs["positions"], inputs["slots"], inputs["contexts"], inputs["tables"], splits
            )
            hidden = self._decoder.run(self._known(inputs["ids"], inputs["sources"]), inputs["positions"], plan)
            logits = self._logits[: layout.rows].copy_(self._decoder.logits(hidden))
            self._draw(logits, inputs)

        return decode

    def _draw(self, logits: torch.Tensor, inputs: dict[str, torch.Tensor]) -> None:
        settings = [inputs[name] for name in SETTINGS]
        self._sample.draw(self._tokens, torch.empty_like(logits), logits, settings, *logits.shape)

    def _ids(self, slices: Many[Slice], count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Ids [count] of the step's tokens, and for each that isn't known here its row in the last step."""
        parts = [each.sequence.tokens[each.start : each.start + each.count] or (0,) for each in slices]
        ids = np.fromiter(chain.from_iterable(parts), np.int64, count)
        sources = np.full(count, -1, np.int64)
        row = 0
        for each in slices:
            if each.start == len(each.sequence.tokens):
                sources[row] = self._row_of[each.sequence]
            row += each.count
        return ids, sources

    def _known(self, ids: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        """Ids with those that the last step drew; 0 where it drew none, in a row that ends."""
        if not len(self._tokens):
            return ids
        return torch.where(sources < 0, ids, self._tokens[sources.clamp(min=0)]).clamp(min=0)

    def _make_room(self, rows: int) -> None:
        """For the tokens of so many rows; no graph may know where they were."""
        if len(self._tokens) < rows:
            assert not self._replays
            self._tokens = torch.zeros(rows, dtype=torch.int64, device=self._device.place)
            self._row_of = {}
            self._fetched = [self._device.host(8 * rows) for _ in range(2)]

    def _layout(self, rows: int, splits: int) -> Layout:
        return Layout(rows, -(-splits * SPLIT_TOKENS // self._block_size))
