"""Hugging Face checkpoints: config.json beside one model.safetensors or the shards that an index names.

May import torch and the safetensors package. Nothing in a checkpoint is executed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine import vocab
from engine.cpu_ops.packing import Blocks
from engine.models.config import ModelConfig, ModelError, from_huggingface
from engine.wire import TokenizerSpec

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class SafetensorsCheckpoint:
    """One directory, read lazily; see `Checkpoint`."""

    auto_dtype = "float32"

    def __init__(self, path: Path) -> None:
        self._path = path
        values = _read_json(path / "config.json")
        self.config: ModelConfig = from_huggingface(values, str(path / "config.json"))
        self.eos_ids: list[int] = _eos_ids(path, values)
        self._files: dict[Path, Any] = {}  # open shards
        self._places = _places(path)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See `Checkpoint`."""
        place = self._places.get(name)
        if place is None:
            raise ModelError(f"{self._path}: tensor {name} is missing")
        try:
            handle = self._files.get(place) or self._files.setdefault(place, safe_open(place, framework="pt"))
            tensor: torch.Tensor = handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{place}: tensor {name} can't be read: {error}") from None
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{place}: tensor {name} has shape {tuple(tensor.shape)}, not {shape}")
        if not tensor.is_floating_point():
            raise ModelError(f"{place}: tensor {name} holds {tensor.dtype}, not floating-point numbers")
        return tensor

    def blocks(self, name: str, shape: tuple[int, ...]) -> Blocks | None:
        """See `Checkpoint`: here are floats only."""
        return None

    def tokenizer(self) -> TokenizerSpec:
        """See `Checkpoint`."""
        try:
            return vocab.from_directory(self._path)
        except vocab.VocabError as error:
            raise ModelError(str(error)) from None


def _places(path: Path) -> dict[str, Path]:
    """Which file holds each tensor."""
    index = path / _INDEX
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{index}: weight_map is missing")
        shards = {name: path / Path(str(file)).name for name, file in weight_map.items()}
        for shard in sorted(set(shards.values())):
            if not shard.is_file():
                raise ModelError(f"{shard}: the index names this file, but it is not there")
        return shards
    single = path / _SINGLE
    if not single.is_file():
        raise ModelError(f"{path}: there is neither {_SINGLE} nor {_INDEX}")
    try:
        with safe_open(single, framework="pt") as handle:
            return dict.fromkeys(handle.keys(), single)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{single}: not a readable safetensors file: {error}") from None


def _eos_ids(path: Path, config: dict[str, Any]) -> list[int]:
    """The ids that generation_config.json, config.json and tokenizer_config.json name as ends, without repeats. Chat
    models often name the end of a text in one of them and the end of a turn in another."""
    ids: list[int] = []
    for values in (_read_json(path / "generation_config.json", optional=True), config):
        named = values.get("eos_token_id")
        ids += named if isinstance(named, list) else [] if named is None else [named]
    tokenizer = _read_json(path / "tokenizer_config.json", optional=True)
    eos = tokenizer.get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    for key, token in (tokenizer.get("added_tokens_decoder") or {}).items():
        if text is not None and token.get("content") == text:
            ids.append(int(key))
    return list(dict.fromkeys(int(each) for each in ids))


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if optional:
            return {}
        raise ModelError(f"{path}: this file is missing") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not readable JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: it must hold a JSON object")
    return values
