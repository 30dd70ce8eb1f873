"""Runs a model for the engine core: one call for each step, token ids in, token ids out.

May import numpy, torch and the engine's model side. It holds no state of a sequence: what a step needs is in its
slices, and the KV cache belongs to the attention backend.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from engine import catalog, cpu_ops, cuda_device
from engine.attention import Attention, StepBatch
from engine.attention.cpu import CPUAttention
from engine.attention.cuda import CUDAAttention, CUDAPointwise
from engine.cuda_device import Device
from engine.cuda_kernels import E4M3
from engine.cuda_step import CUDAStep
from engine.loaders import Checkpoint, open_checkpoint
from engine.models.config import ModelError
from engine.models.decoder import Decoder, TorchDecoder
from engine.models.llama import LlamaDecoder
from engine.models.native import NativeDecoder, serves
from engine.models.pointwise import Pointwise, TorchPointwise
from engine.sampler import NOT_FINITE, Pick, Sampler, is_plain, logprobs, picked
from engine.sequence import Launched, Sampled, Slice
from engine.wire import TokenizerSpec

__all__ = ["ModelError", "ModelRunner"]

# Logits of so many prompt ids at a time: 12 MB where the vocabulary has 49,152.
PROMPT_ROWS_MAX = 64

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# In torch only float32 makes a text independent of its batch, so it is what nobody has to ask for.
_AUTO = torch.float32
_QUANTISED = ("int8", "gguf")  # by the C++ operators alone
_CACHES = {"auto": "", "fp8": E4M3}


class ModelRunner:
    """A loaded model. `allocate` comes before the first `execute`."""

    name: str
    tokenizer: TokenizerSpec
    vocab_size: int
    eos_ids: list[int]  # every id that ends a turn or a text
    operators: str  # a sentence for the operator of a server: what computes
    context_tokens_max: int  # what the model can attend to; the pool may hold less

    def __init__(
        self,
        name: str,
        tokenizer: TokenizerSpec,
        checkpoint: Checkpoint,
        *,
        decoder: Callable[[], tuple[Decoder, str]],
        gpu: Device | None,
    ) -> None:
        self.config = checkpoint.config
        self.name = name
        self.tokenizer = tokenizer
        self.vocab_size = self.config.vocab_size
        self.eos_ids = [each for each in checkpoint.eos_ids if 0 <= each < self.vocab_size]
        self.context_tokens_max = self.config.context_tokens_max
        self._gpu = gpu
        with torch.inference_mode():
            self._model, self.operators = decoder()
        self._cuda = None
        if gpu is not None:
            assert isinstance(self._model, TorchDecoder)
            self._cuda = CUDAStep(self._model, gpu, self.vocab_size)
        self._sampler = Sampler(self.eos_ids, self._pick())
        self._block_size = self._pool_tokens = 0

    @classmethod
    def load(
        cls,
        path_or_name: str,
        *,
        device: str,
        dtype: str,
        cache_dtype: str = "auto",
        native: bool = True,
        gpu: Device | None = None,
        progress: Callable[[str, int, int], None],
    ) -> ModelRunner:
        """Finds (see `catalog.resolve`), reads and prepares a model. `device`: auto, cpu, cuda. `dtype`: auto, float32,
        bfloat16, float16, and on the CPU int8 and gguf (weights stay quantised as a GGUF file holds them). `native`: by
        the C++ operators where they can be had. `cache_dtype`: auto, that of `dtype`, or on a GPU fp8. `gpu` takes the
        place of torch's. `progress(what, done, total)` is told of long work; total 0 means that it isn't known. Raises
        ModelError for whatever stands in the way."""
        if _is_cuda(device, gpu):
            gpu = gpu or cuda_device.GPU()
        if dtype not in ("auto", *_DTYPES, *_QUANTISED):
            raise ModelError(f"dtype {dtype!r} is not known; use auto, {', '.join((*_DTYPES, *_QUANTISED))}")
        if cache_dtype not in _CACHES:
            raise ModelError(f"KV cache dtype {cache_dtype!r} is not known; use {' or '.join(_CACHES)}")
        if gpu is None and cache_dtype != "auto":
            raise ModelError(f"a KV cache of {cache_dtype} needs --device cuda")
        if gpu is not None and dtype in _QUANTISED:
            raise ModelError(f"dtype {dtype} is computed on the CPU alone; use --device cpu, or another type")
        path = catalog.resolve(path_or_name, progress=progress)
        if dtype == "gguf" and path.is_dir():
            raise ModelError(
                f"{path}: dtype gguf needs a .gguf file; for this checkpoint use int8, bfloat16 or float32"
            )
        checkpoint = open_checkpoint(path)
        name = path_or_name if path_or_name in catalog.KNOWN else _name(path_or_name, path)

        def decoder() -> tuple[Decoder, str]:
            if gpu is not None:
                return _cuda_decoder(checkpoint, dtype, _CACHES[cache_dtype], gpu, progress)
            return _cpu_decoder(checkpoint, dtype, native, progress)

        return cls(name, checkpoint.tokenizer(), checkpoint, decoder=decoder, gpu=gpu)

    def _pick(self) -> Pick | None:
        if isinstance(self._model, NativeDecoder):
            return partial(picked, choose=self._model.library.draw)
        return self._cuda.draw if self._cuda else None

    def memory_free_bytes(self) -> int | None:
        """Of the device, where that isn't the host."""
        return self._gpu.memory_free_bytes() if self._gpu else None

    def block_bytes(self, block_size: int) -> int:
        """Memory of one block: keys and values of `block_size` tokens in all layers."""
        config = self.config
        return 2 * config.layers * config.kv_heads * config.head_dim * block_size * self._model.cache_dtype.itemsize

    def allocate(self, blocks: int, block_size: int) -> None:
        """Makes the KV cache. Raises ModelError when the memory can't be had."""
        self._block_size, self._pool_tokens = block_size, blocks * block_size
        try:
            (self._cuda or self._model).allocate(blocks, block_size)
        except RuntimeError:
            size = blocks * self.block_bytes(block_size) / 2**30
            raise ModelError(f"{blocks} KV blocks need {size:.1f} GiB of memory; ask for fewer") from None
        if self._cuda is not None:
            with torch.inference_mode():
                self._cuda.measure(blocks)

    @torch.inference_mode()
    def prepare(self, running_max: int, progress: Callable[[str, int, int], None]) -> None:
        """Makes ready for steps of up to so many sequences what a first step would have to: on a GPU, its graphs.
        Raises ModelError when there is no memory for them."""
        if self._cuda is None:
            return
        try:
            self._cuda.capture(running_max, min(self.context_tokens_max, self._pool_tokens), progress)
        except torch.OutOfMemoryError:
            raise ModelError(
                f"graphs of up to {running_max} sequences need more memory than {self._pool_tokens // self._block_size}"
                " KV blocks leave; ask for fewer blocks, or fewer running sequences"
            ) from None

    def execute(self, slices: list[Slice]) -> list[Sampled | None]:
        """Computes every slice and chooses the next token of those with `sample` set; one answer for each of these,
        in their order."""
        return self.launch(slices).answers()

    @torch.inference_mode()
    def launch(self, slices: list[Slice]) -> Launched:
        """See `AheadRunner`. On a CPU the step is computed by then."""
        batch = _batch(slices, self._block_size)
        if self._cuda is not None:
            return self._launch(self._cuda, slices, batch)
        answers = self._compute(slices, batch)
        return Launched(lambda: answers, ahead=False)

    def _launch(self, step: CUDAStep, slices: list[Slice], batch: StepBatch) -> Launched:
        """A step whose tokens depend on nothing that is known only here is left to itself."""
        logits, hidden = step.launch(slices, batch)
        if hidden is not None:
            self._tell_prompts(slices, batch, hidden)
        sequences = [each.sequence for each in slices if each.sample]
        if not sequences:
            return Launched(lambda: [], ahead=True)
        if not all(map(is_plain, sequences)):
            answers: list[Sampled | None] = list(self._sampler.choose(logits, sequences))
            return Launched(lambda: answers, ahead=False)
        if hidden is not None:
            step.draw(logits, sequences)
        tokens = step.tokens(sequences)

        def drawn() -> list[Sampled | None]:
            return [Sampled(each) if each >= 0 else Sampled(-1, error=NOT_FINITE) for each in tokens()]

        return Launched(drawn, ahead=True)

    def _compute(self, slices: list[Slice], batch: StepBatch) -> list[Sampled | None]:
        ids = np.fromiter(
            chain.from_iterable(each.sequence.tokens[each.start : each.start + each.count] for each in slices),
            np.int64,
            len(batch.positions),
        )
        hidden = self._model.forward(torch.from_numpy(ids), batch)
        self._tell_prompts(slices, batch, hidden)
        sampled = [index for index, each in enumerate(slices) if each.sample]
        if not sampled:
            return []
        last_rows = torch.from_numpy(batch.rows[1:][sampled] - 1)
        logits = self._model.logits(hidden.index_select(0, last_rows))
        return list(self._sampler.choose(logits, [slices[index].sequence for index in sampled]))

    def _tell_prompts(self, slices: list[Slice], batch: StepBatch, hidden: torch.Tensor) -> None:
        """Adds the log probabilities of prompt ids to the sequences that want them."""
        for number in [i for i, each in enumerate(slices) if each.sequence.sampling.prompt_logprobs >= 0]:
            each, first_row = slices[number], int(batch.rows[number])
            sequence, targets = each.sequence, each.prompt_targets
            for start in range(targets.start, targets.stop, PROMPT_ROWS_MAX):
                stop = min(start + PROMPT_ROWS_MAX, targets.stop)
                row = first_row + start - 1 - each.start
                logits = self._model.logits(hidden[row : row + stop - start])
                counts = [sequence.sampling.prompt_logprobs] * (stop - start)
                sequence.prompt_logprobs += logprobs(logits, sequence.tokens[start:stop], counts, start)


def _batch(slices: list[Slice], block_size: int) -> StepBatch:
    starts = np.array([each.start for each in slices], np.int64)
    counts = np.array([each.count for each in slices], np.int64)
    rows = np.concatenate(([0], counts.cumsum()))
    contexts = starts + counts
    blocks = -(-contexts // block_size)
    tables = np.full((len(slices), int(blocks.max())), -1, np.int64)
    for table, count, each in zip(tables, blocks.tolist(), slices, strict=True):
        table[:count] = each.sequence.blocks[:count]
    owner = np.repeat(np.arange(len(slices)), counts)
    positions = np.arange(rows[-1]) + (starts - rows[:-1])[owner]
    slots = tables[owner, positions // block_size] * block_size + positions % block_size
    return StepBatch(positions, slots, rows, contexts, tables)


def _is_cuda(device: str, gpu: Device | None) -> bool:
    """What the device asked for comes to here; ModelError where it can't be had."""
    if device not in ("auto", "cpu", "cuda"):
        raise ModelError(f"device {device!r} is not known; use auto, cpu or cuda")
    if device != "cuda":  # auto is the CPU, with a GPU too, for as long as no GPU has run the kernels
        return False
    if gpu is None and (problem := cuda_device.problem()):
        raise ModelError(f"device 'cuda' is not available: {problem}; use auto or cpu")
    return True


def _cuda_decoder(
    checkpoint: Checkpoint, dtype: str, cache: str, gpu: Device, progress: Callable[[str, int, int], None]
) -> tuple[Decoder, str]:
    config, numbers = checkpoint.config, _DTYPES.get(dtype, _AUTO)
    pointwise = CUDAPointwise(config, device=gpu.place, dtype=numbers, load=gpu.load)
    attention = CUDAAttention(config, numbers, gpu.place, gpu.load, cache=cache)
    decoder = _torch_decoder(checkpoint, attention, pointwise, numbers, gpu.place, progress)
    return decoder, f"computing with CUDA kernels{', the KV cache in fp8' if cache else ''}"


def _torch_decoder(
    checkpoint: Checkpoint,
    attention: Attention,
    pointwise: Pointwise,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str, int, int], None],
) -> Decoder:
    config = checkpoint.config
    layers = LlamaDecoder(config, checkpoint, device=device, dtype=dtype, pointwise=pointwise, progress=progress)
    return TorchDecoder(layers, attention, device)


def _cpu_decoder(
    checkpoint: Checkpoint, dtype: str, native: bool, progress: Callable[[str, int, int], None]
) -> tuple[Decoder, str]:
    """The model, by the C++ operators where they can be had and serve it, else in torch; and a sentence about it."""
    config = checkpoint.config
    reason = "C++ operators are switched off"
    if native and (dtype == "float16" or not serves(config)):
        reason = f"there are no C++ operators for {dtype} and heads of {config.head_dim}"
    elif native:
        try:
            library = cpu_ops.load(catalog.cache_folder().parent / "cpu-ops", progress)
        except cpu_ops.Unavailable as error:
            reason = str(error)
        else:
            model = NativeDecoder(
                config, checkpoint, library, checkpoint.auto_dtype if dtype == "auto" else dtype, progress
            )
            return model, f"computing with C++ operators ({library.level}); weights: {model.formats}"
    if dtype in _QUANTISED:
        raise ModelError(f"dtype {dtype} needs the C++ operators, but {reason}; use bfloat16 or float32")
    numbers, device = _DTYPES.get(dtype, _AUTO), torch.device("cpu")
    pointwise = TorchPointwise(config, device=device, dtype=numbers)
    decoder = _torch_decoder(checkpoint, CPUAttention(config, numbers), pointwise, numbers, device, progress)
    return decoder, f"computing in torch alone, which is slower: {reason}"


def _name(asked: str, path: Path) -> str:
    """What to call a model that the catalog doesn't know: org/name as asked, or the last part of its path."""
    return path.stem if path.is_file() else path.resolve().name if Path(asked).is_dir() else asked
