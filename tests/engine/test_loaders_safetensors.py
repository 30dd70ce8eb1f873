"""Directories with safetensors files: one or many, and errors that name the file and the tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.loaders import open_checkpoint
from engine.loaders.safetensors import SafetensorsCheckpoint
from engine.models.config import ModelError
from tests.support import checkpoints

NORM = "model.norm.weight"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return checkpoints.save(checkpoints.small_model("qwen2"), tmp_path)


def rewrite(directory: Path, **values: object) -> None:
    """Changes keys of config.json; None removes one."""
    config = {**json.loads((directory / "config.json").read_text()), **values}
    kept = {key: value for key, value in config.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(kept))


def test_a_single_file(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    expected = load_file(directory / "model.safetensors")
    for name, weight in expected.items():
        assert torch.equal(checkpoint.tensor(name, tuple(weight.shape)), weight)


def test_shards_equal_the_single_file(directory: Path, tmp_path: Path) -> None:
    checkpoints.save(checkpoints.small_model("qwen2"), tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    checkpoint = open_checkpoint(tmp_path / "sharded")
    for name, weight in load_file(directory / "model.safetensors").items():
        assert torch.equal(checkpoint.tensor(name, tuple(weight.shape)), weight)


def test_the_tokenizer_comes_from_the_directory(directory: Path) -> None:
    spec = SafetensorsCheckpoint(directory).tokenizer()
    assert spec.special_ids == [256, 257, 258]
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        SafetensorsCheckpoint(directory).tokenizer()


def test_every_named_end_counts_once(directory: Path) -> None:
    rewrite(directory, eos_token_id=[257, 5])
    (directory / "generation_config.json").write_text('{"eos_token_id": 258}')
    tokenizer_config = {"eos_token": {"content": "<x>"}, "added_tokens_decoder": {"7": {"content": "<x>"}}}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    assert SafetensorsCheckpoint(directory).eos_ids == [258, 257, 5, 7]


def test_no_named_end(directory: Path) -> None:
    rewrite(directory, eos_token_id=None)
    (directory / "generation_config.json").unlink()
    assert SafetensorsCheckpoint(directory).eos_ids == []


def test_a_missing_tensor_is_named(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    del weights[NORM]
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(ModelError, match=r"tensor model\.norm\.weight is missing"):
        SafetensorsCheckpoint(directory).tensor(NORM, (64,))


def test_another_shape_is_named(directory: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \(64,\), not \(32,\)"):
        SafetensorsCheckpoint(directory).tensor(NORM, (32,))


def test_quantised_numbers_are_refused(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    save_file({**weights, NORM: weights[NORM].to(torch.int8)}, directory / "model.safetensors")
    with pytest.raises(ModelError, match=r"holds torch\.int8, not floating-point"):
        SafetensorsCheckpoint(directory).tensor(NORM, (64,))


@pytest.mark.parametrize("kept", [0, 4, 100, -50])
def test_a_truncated_file_is_named(directory: Path, kept: int) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model\.safetensors: not a readable safetensors file"):
        SafetensorsCheckpoint(directory)


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    checkpoints.save(checkpoints.small_model("qwen2"), tmp_path, max_shard_size="60KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shard = tmp_path / index["weight_map"][NORM]
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(ModelError, match=rf"{shard.name}: tensor model\.norm\.weight can't be read"):
        SafetensorsCheckpoint(tmp_path).tensor(NORM, (64,))
    shard.unlink()
    with pytest.raises(ModelError, match="the index names this file, but it is not there"):
        SafetensorsCheckpoint(tmp_path)


def test_an_index_never_leads_out_of_the_directory(directory: Path, tmp_path: Path) -> None:
    (directory / "model.safetensors").rename(tmp_path.parent / "outside.safetensors")
    index = {"weight_map": {NORM: "../outside.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="it is not there"):
        SafetensorsCheckpoint(directory)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, r"config\.json: this file is missing"),
        ("config.json", "{", r"config\.json: not readable JSON"),
        ("config.json", "[]", r"config\.json: it must hold a JSON object"),
        ("model.safetensors", None, r"neither model\.safetensors nor model\.safetensors\.index\.json"),
        ("model.safetensors.index.json", "{}", "weight_map is missing"),
        ("generation_config.json", "}", r"generation_config\.json: not readable JSON"),
    ],
)
def test_files_that_are_missing_or_broken_are_named(
    directory: Path, file: str, content: str | None, message: str
) -> None:
    (directory / file).unlink(missing_ok=True)
    if content is not None:
        (directory / file).write_text(content)
    with pytest.raises(ModelError, match=message):
        SafetensorsCheckpoint(directory)


def test_a_path_to_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file or directory"):
        open_checkpoint(tmp_path / "missing")
