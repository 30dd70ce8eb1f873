"""Rotation equals transformers' for each scaling variant, whatever the chunking."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from engine.models.config import Rope, from_huggingface
from engine.models.rotary import Rotary, attention_factor, inverse_frequencies

DIM = 64
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn, not truncated": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "truncate": False,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
    "yarn, factor given": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 0.9,
    },
    "yarn, unstretched": {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 512},
}


def configs(parameters: dict[str, Any], **options: Any) -> tuple[LlamaConfig, Rope]:
    config = LlamaConfig(
        hidden_size=4 * DIM,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 50000.0, **parameters},
        **options,
    )
    values = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    return config, from_huggingface(values, "config.json").rope


@pytest.mark.parametrize("variant", VARIANTS)
def test_frequencies_equal_transformers(variant: str) -> None:
    config, rope = configs(VARIANTS[variant])
    if rope.kind == "default":
        expected, factor = LlamaRotaryEmbedding(config).inv_freq, 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(rope, DIM), expected, rtol=2e-6, atol=0)
    assert attention_factor(rope) == pytest.approx(factor)


@pytest.mark.parametrize("variant", VARIANTS)
def test_rotation_equals_transformers(variant: str) -> None:
    config, rope = configs(VARIANTS[variant])
    positions = torch.arange(400)
    q = torch.randn(400, 4, DIM, generator=torch.Generator().manual_seed(0))
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    expected, _ = apply_rotary_pos_emb(q.transpose(0, 1)[None], q.transpose(0, 1)[None], cos, sin)
    rotary = Rotary(rope, DIM, device=torch.device("cpu"), dtype=torch.float32)
    ours = rotary.rotate(q, rotary.angles(positions))
    torch.testing.assert_close(ours, expected[0].transpose(0, 1), atol=5e-4, rtol=0)


def test_dynamic_grows_as_step_by_step_decoding_does() -> None:
    """Beyond the original context transformers takes the base of the length so far: one token at a time, ours too."""
    config, rope = configs(VARIANTS["dynamic"])
    theirs = LlamaRotaryEmbedding(config)
    rotary = Rotary(rope, DIM, device=torch.device("cpu"), dtype=torch.float32)
    positions = torch.arange(500, 700)
    cos, _ = rotary.angles(positions)
    x = torch.zeros(1)
    for index in range(0, 200, 20):
        expected, _ = theirs(x, positions[index][None, None])
        torch.testing.assert_close(cos[index], expected[0], atol=1e-4, rtol=0)


def test_angles_depend_on_the_position_alone() -> None:
    for parameters in VARIANTS.values():
        rotary = Rotary(configs(parameters)[1], DIM, device=torch.device("cpu"), dtype=torch.float32)
        whole = rotary.angles(torch.arange(600))
        part = rotary.angles(torch.arange(550, 560))
        assert torch.equal(whole[0][550:560], part[0])
        assert torch.equal(whole[1][550:560], part[1])


def test_divisors_stretch_one_frequency_each() -> None:
    divisors = tuple(float(each) for each in range(1, DIM // 2 + 1))
    stretched = inverse_frequencies(Rope(divisors=divisors), DIM)
    torch.testing.assert_close(stretched * torch.tensor(divisors), inverse_frequencies(Rope(), DIM))


def test_partial_rotation_leaves_the_rest() -> None:
    rotary = Rotary(Rope(), 16, device=torch.device("cpu"), dtype=torch.float32)
    x = torch.randn(5, 2, DIM)
    turned = rotary.rotate(x, rotary.angles(torch.arange(5)))
    assert torch.equal(turned[..., 16:], x[..., 16:])
    assert torch.equal(turned[..., :16], rotary.rotate(x[..., :16], rotary.angles(torch.arange(5))))
