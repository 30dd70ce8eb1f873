"""GGUF files give the same model as the safetensors that they were made from, and broken ones are named."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine.loaders import open_checkpoint
from engine.loaders.gguf import GGUFCheckpoint
from engine.models.config import ModelError
from engine.models.rotary import inverse_frequencies
from tests.support import checkpoints


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return checkpoints.write_gguf(checkpoints.plain_model("llama"), "llama", tmp_path / "small.gguf")


@pytest.mark.parametrize("family", sorted(checkpoints.FAMILIES))
def test_every_tensor_equals_its_safetensors_twin(family: str, tmp_path: Path) -> None:
    model = checkpoints.plain_model(family)
    twin = open_checkpoint(checkpoints.save(model, tmp_path))
    stored = open_checkpoint(checkpoints.write_gguf(model, family, tmp_path / "x.gguf"))
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and twin.config.tied_embeddings:
            continue
        shape = tuple(weight.shape)
        assert torch.equal(stored.tensor(name, shape), twin.tensor(name, shape)), name
    same = {"architecture": twin.config.architecture, "rms_norm_eps": twin.config.rms_norm_eps}
    assert {**vars(stored.config), **same, "rope": None} == {**vars(twin.config), "rope": None}
    assert stored.eos_ids[0] == checkpoints.EOS_ID


def test_rope_freqs_are_honoured(tmp_path: Path) -> None:
    """llama.cpp stores Llama 3's scaling as a divisor for each frequency."""
    scaled, plain = checkpoints.small_model("llama"), checkpoints.plain_model("llama")
    base = {"rope_type": "default", "rope_theta": checkpoints.LLAMA3_ROPE["rope_theta"]}
    plain.config.rope_parameters = base
    expected = inverse_frequencies(open_checkpoint(checkpoints.save(scaled, tmp_path)).config.rope, 16)
    unscaled = checkpoints.LLAMA3_ROPE["rope_theta"] ** -(torch.arange(0, 16, 2) / 16)
    divisors = {"rope_freqs.weight": (unscaled / expected).numpy()}
    rope = open_checkpoint(checkpoints.write_gguf(plain, "llama", tmp_path / "x.gguf", tensors=divisors)).config.rope
    torch.testing.assert_close(inverse_frequencies(rope, 16), expected)


def test_turn_ends_are_found_by_their_names(file: Path) -> None:
    """The file names <|end|>; <|im_end|> is a control token that ends a turn."""
    assert GGUFCheckpoint(file).eos_ids == [257, 258]


def test_a_named_turn_end_counts(tmp_path: Path) -> None:
    path = checkpoints.write_gguf(
        checkpoints.plain_model("qwen3"), "qwen3", tmp_path / "x.gguf", tokenizer__ggml__eot_token_id=40
    )
    assert GGUFCheckpoint(path).eos_ids == [257, 40, 258]


def test_the_tokenizer_comes_from_the_metadata(file: Path, tmp_path: Path) -> None:
    assert {256, 257, 258} <= set(GGUFCheckpoint(file).tokenizer().special_ids)
    path = checkpoints.write_gguf(checkpoints.plain_model("llama"), "llama", tmp_path / "x.gguf", vocabulary=False)
    with pytest.raises(ModelError, match=r"x\.gguf: .*tokenizer"):
        GGUFCheckpoint(path).tokenizer()


def test_quantised_tensors_are_dequantised() -> None:
    """SmolLM2's file holds Q4_1, Q8_0 and F32."""
    path = checkpoints.smollm2_path()
    checkpoint = GGUFCheckpoint(path)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}["blk.3.ffn_up.weight"]
    expected = gguf.dequantize(stored.data, stored.tensor_type)
    ours = checkpoint.tensor("model.layers.3.mlp.up_proj.weight", (1536, 576))
    assert np.array_equal(ours.numpy(), expected)
    assert checkpoint.eos_ids == [2]


def test_a_type_that_cannot_be_read_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(gguf, "dequantize", refuse)
    with pytest.raises(ModelError, match=r"tensor output_norm\.weight is stored as F32, which can't be read"):
        GGUFCheckpoint(file).tensor("model.norm.weight", (64,))


def test_missing_tensors_and_other_shapes_are_named(file: Path) -> None:
    checkpoint = GGUFCheckpoint(file)
    with pytest.raises(ModelError, match=r"tensor blk\.9\.attn_q\.weight is missing"):
        checkpoint.tensor("model.layers.9.self_attn.q_proj.weight", (64, 64))
    with pytest.raises(ModelError, match=r"tensor output_norm\.weight has shape \(64,\), not \(32,\)"):
        checkpoint.tensor("model.norm.weight", (32,))


def test_another_file_is_no_gguf(tmp_path: Path) -> None:
    for content in (b"", b"PK\3\4 something", b"GG"):
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(ModelError, match=r"x\.gguf: not a GGUF file"):
            GGUFCheckpoint(tmp_path / "x.gguf")


def test_a_file_cut_anywhere_is_named(file: Path) -> None:
    content = file.read_bytes()
    for kept in [4, 6, 8, 16, 23, 24, 100, 500, 2000, 6000, len(content) // 2, len(content) - 4]:
        file.write_bytes(content[:kept])
        with pytest.raises(ModelError, match=r"small\.gguf: a damaged or truncated GGUF file"):
            GGUFCheckpoint(file)


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="can't be read: Is a directory"):
        GGUFCheckpoint(tmp_path)
