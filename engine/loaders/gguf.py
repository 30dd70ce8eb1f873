"""GGUF checkpoints (llama.cpp's format): metadata, tokenizer and quantised weights in one file.

May import numpy, torch and the gguf package. Weights are dequantised tensor by tensor to float32, or given as they are.
What was read leaves this process's memory again: pages of the file, and a vocabulary of Python objects.
"""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from engine import vocab
from engine.cpu_ops.packing import BLOCK, Blocks
from engine.models.config import ModelConfig, ModelError, from_gguf
from engine.wire import TokenizerSpec

_TOP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_MAGIC = b"GGUF"
# The gguf package needs several times the size of what it dequantises: some megabytes, not an embedding's hundreds.
_DEQUANTISED_ROWS = 4096
# The types of weights that are computed with as they are, and the bytes at the start of a block that hold its scale and
# any offset.
_BLOCK_HEADS = {"q8_0": 2, "q4_0": 2, "q4_1": 4}

# Control tokens that end a turn in the common chat formats. Converters name only one end token, and for many chat
# models it is the end of a text.
_TURN_ENDS = frozenset({"<|im_end|>", "<|eot_id|>", "<|end|>", "<|eom_id|>", "<end_of_turn>"})
_CONTROL = 3  # tokenizer.ggml.token_type


class GGUFCheckpoint:
    """One file, mapped; see `Checkpoint`."""

    # Weights kept quantised are faster still, but their greedy texts leave float32's sooner (bench/RESULTS.md).
    auto_dtype = "bfloat16"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = _open(path)
        self._tokenizer: TokenizerSpec | None = None
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        values = {key: _contents(field) for key, field in self._reader.fields.items()}
        divisors = self._tensors.get("rope_freqs.weight")
        self.config: ModelConfig = from_gguf(
            values,
            self._tensors.__contains__,
            () if divisors is None else tuple(_dequantised(divisors, path).ravel().tolist()),
            str(path),
        )
        self.eos_ids: list[int] = _eos_ids(values)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See `Checkpoint`."""
        stored = self._find(name, shape)
        numbers = np.ascontiguousarray(self._ordered(stored.name, _dequantised(stored, self._path)))
        self._reader.forget_pages()
        return torch.from_numpy(numbers)

    def blocks(self, name: str, shape: tuple[int, ...]) -> Blocks | None:
        """See `Checkpoint`."""
        stored = self._find(name, shape)
        kind = stored.tensor_type.name.lower()
        if kind not in _BLOCK_HEADS:
            return None
        rows = self._ordered(stored.name, stored.data.view(np.uint8).reshape(shape[0], -1))
        parts = rows.reshape(shape[0], shape[1] // BLOCK, -1)
        head = _BLOCK_HEADS[kind]
        scales = torch.from_numpy(parts[:, :, :head].copy().view(np.float16))
        if not scales.isfinite().all():
            raise ModelError(f"{self._path}: tensor {stored.name} has scales that are not finite")
        values = torch.from_numpy(parts[:, :, head:].copy())
        self._reader.forget_pages()
        return Blocks(kind, values, scales[..., 0].contiguous(), scales[..., 1].contiguous() if head > 2 else None)

    def _find(self, name: str, shape: tuple[int, ...]) -> Any:
        stored_name = _stored_name(name)
        stored = self._tensors.get(stored_name)
        if stored is None:
            raise ModelError(f"{self._path}: tensor {stored_name} is missing")
        found = tuple(int(size) for size in reversed(stored.shape))
        if found != shape:
            raise ModelError(f"{self._path}: tensor {stored_name} has shape {found}, not {shape}")
        return stored

    def _ordered(self, stored_name: str, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A tensor's rows in Hugging Face's order."""
        if self.config.architecture == "llama" and ("attn_q." in stored_name or "attn_k." in stored_name):
            return _unpermuted(rows, self.config.head_dim)
        return rows

    def tokenizer(self) -> TokenizerSpec:
        """See `Checkpoint`."""
        if self._tokenizer is None:
            try:
                self._tokenizer = vocab.from_gguf(self._reader)
            except vocab.VocabError as error:
                raise ModelError(f"{self._path}: {error}") from None
            self._reader.fields.clear()  # each token is several objects there, and nobody reads them any more
        return self._tokenizer


class _Reader(gguf.GGUFReader):
    """The package's reader on a plain view of the mapped file: parsing a vocabulary takes several slices for each
    token, and slices of a numpy memmap cost four times as much."""

    @property
    def data(self) -> Any:
        """The file's bytes."""
        return self._bytes

    @data.setter
    def data(self, mapped: Any) -> None:
        self._bytes = np.asarray(mapped)
        self._mapped = mapped

    def forget_pages(self) -> None:
        """The file's pages that were read stay in the system's cache, and count for this process no more."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._mapped._mmap.madvise(mmap.MADV_DONTNEED)


def _open(path: Path) -> _Reader:
    """The gguf package raises whatever numpy raises on a file that ends early, so that is translated here."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
        if magic != _MAGIC:
            raise ModelError(f"{path}: not a GGUF file (it starts with {magic!r}, not {_MAGIC!r})")
        return _Reader(path)
    except OSError as error:
        raise ModelError(f"{path}: can't be read: {error.strerror or error}") from None
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        raise ModelError(f"{path}: a damaged or truncated GGUF file: {error}") from None


def _contents(field: Any) -> Any:
    """A metadata value. Long arrays are the tokenizer's and are read by it; here only their length matters."""
    if field.types and field.types[0] == gguf.GGUFValueType.ARRAY:
        return _LazyArray(field)
    return field.contents()


class _LazyArray:
    """An array in the metadata, converted when it is looked into."""

    def __init__(self, field: Any) -> None:
        self._field = field

    def __len__(self) -> int:
        return len(self._field.data)

    def __getitem__(self, index: int) -> Any:
        return self._field.contents(index)


def _stored_name(name: str) -> str:
    """GGUF's name for a Hugging Face tensor name."""
    if match := _LAYER.fullmatch(name):
        layer, part, kind = match.groups()
        return f"blk.{layer}.{_LAYER_NAMES[part]}.{kind}"
    part, _, kind = name.rpartition(".")
    return f"{_TOP_NAMES[part]}.{kind}"


def _dequantised(tensor: Any, path: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
    values = np.empty(tuple(int(size) for size in reversed(tensor.shape)), np.float32)
    try:
        for at in range(0, len(values), _DEQUANTISED_ROWS):
            rows = slice(at, at + _DEQUANTISED_ROWS)
            values[rows] = gguf.dequantize(tensor.data[rows], tensor.tensor_type)
    except NotImplementedError:
        kind = tensor.tensor_type.name
        raise ModelError(f"{path}: tensor {tensor.name} is stored as {kind}, which can't be read") from None
    return values


def _unpermuted(values: np.ndarray[Any, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """q or k rows in Hugging Face's order. llama.cpp rotates neighbouring numbers (0 with 1, 2 with 3) in the llama
    architecture, so its converter stores the rows of each head with their two halves interleaved."""
    pairs = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _eos_ids(values: dict[str, Any]) -> list[int]:
    named = [values.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    ids = [int(each) for each in named if each is not None]
    tokens, kinds = values.get("tokenizer.ggml.tokens"), values.get("tokenizer.ggml.token_type")
    if tokens is not None and kinds is not None:
        controls = (index for index in range(min(len(tokens), len(kinds))) if kinds[index] == _CONTROL)
        ids += [index for index in controls if tokens[index] in _TURN_ENDS]
    return list(dict.fromkeys(ids))
