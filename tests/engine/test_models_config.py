"""A checkpoint's own words become the decoder's numbers, and what it can't compute exactly is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.models.config import HF_ARCHITECTURES, ModelConfig, ModelError, from_gguf, from_huggingface
from tests.support import checkpoints

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
}
GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 4,
    "llama.context_length": 2048,
    "llama.embedding_length": 512,
    "llama.feed_forward_length": 1024,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 1000,
}


def huggingface(**changes: Any) -> ModelConfig:
    return from_huggingface({**LLAMA, **changes}, "config.json")


def gguf(tensors: tuple[str, ...] = (), divisors: tuple[float, ...] = (), **changes: Any) -> ModelConfig:
    values = {**GGUF, **{key.replace("__", "."): value for key, value in changes.items()}}
    return from_gguf(values, tensors.__contains__, divisors, "x.gguf")


def test_defaults_of_an_old_llama() -> None:
    config = huggingface()
    assert (config.kv_heads, config.head_dim, config.rotary_dim) == (32, 128, 128)
    assert (config.context_tokens_max, config.rms_norm_eps, config.rope.theta) == (2048, 1e-6, 10000.0)
    assert not (config.qkv_bias or config.output_bias or config.mlp_bias or config.qk_norm or config.tied_embeddings)
    assert config.windows == (0, 0, 0, 0)


@pytest.mark.parametrize("family", sorted(checkpoints.CONFIGS))
def test_defaults_are_those_of_transformers(family: str) -> None:
    theirs = checkpoints.CONFIGS[family]()
    name = {value: key for key, value in HF_ARCHITECTURES.items()}
    bare = {key: getattr(theirs, key) for key in LLAMA if key != "architectures"}
    config = from_huggingface({"architectures": [name[family]], **bare}, "config.json")
    assert config.context_tokens_max == theirs.max_position_embeddings
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.tied_embeddings == theirs.tie_word_embeddings
    assert config.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    window = getattr(theirs, "sliding_window", None) or 0
    assert config.windows == (window,) * theirs.num_hidden_layers


def test_biases_and_norms_by_family() -> None:
    flags = {
        name: (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm)
        for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
        for config in [huggingface(architectures=[f"{name}ForCausalLM"], attention_bias=True, mlp_bias=True)]
    }
    assert flags == {
        "Llama": (True, True, True, False),
        "Mistral": (True, True, False, False),
        "Qwen2": (True, False, False, False),
        "Qwen3": (True, True, False, True),
    }


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (0, 0, 0, 0)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 100}, (100, 100, 100, 100)),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 100}, (0, 0, 0, 0)),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            (0, 0, 0, 9),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (9, 0, 9, 0),
        ),
        ({"sliding_window": 100}, (0, 0, 0, 0)),
    ],
)
def test_windows(changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert huggingface(**changes).windows == windows


def test_rope_in_the_old_and_in_the_new_spelling() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 512}
    old = huggingface(rope_theta=5e5, rope_scaling={"type": "yarn", **scaling}, max_position_embeddings=512)
    new = huggingface(rope_parameters={"rope_type": "yarn", "rope_theta": 5e5, **scaling}, max_position_embeddings=512)
    assert old == new
    assert (old.rope.kind, old.rope.theta, old.context_tokens_max) == ("yarn", 5e5, 2048)


def test_a_yarn_factor_follows_from_the_two_lengths() -> None:
    scaling = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512}
    config = huggingface(rope_scaling=scaling, max_position_embeddings=2048)
    assert (config.rope.factor, config.context_tokens_max) == (4.0, 2048)


def test_dynamic_scaling_stretches_the_stated_length() -> None:
    config = huggingface(rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=100)
    assert (config.context_tokens_max, config.rope.original_context) == (200, 100)


def test_partial_rotation() -> None:
    assert huggingface(partial_rotary_factor=0.5).rotary_dim == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; these are: LlamaForCausalLM, "),
        ({"architectures": None}, "architecture none is not supported"),
        ({"architectures": None, "model_type": "mamba"}, "architecture mamba is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantised \(awq\); use a float checkpoint or a GGUF"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": "big"}, "hidden_size must be a number, not 'big'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number above 0"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers must be a whole number above 0"),
        ({"vocab_size": True}, "vocab_size must be a number"),
        ({"num_key_value_heads": 5}, "32 attention heads can't share 5"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported; these are: default"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "must be above 0"),
        ({"rope_scaling": "linear"}, "rope parameters must be an object"),
        ({"partial_rotary_factor": 0.004}, "0 rotary dimensions don't fit"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["chunked_attention"] * 4,
            },
            "layer_types must hold",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"^config.json.*{message}"):
        huggingface(**changes)


def test_a_model_type_alone_names_the_architecture() -> None:
    assert huggingface(architectures=None, model_type="qwen3").architecture == "qwen3"


def test_gguf_metadata() -> None:
    config = gguf()
    assert (config.heads, config.kv_heads, config.head_dim, config.windows) == (8, 2, 64, (0,) * 4)
    assert config.tied_embeddings
    assert not (config.qkv_bias or config.output_bias or config.mlp_bias or config.qk_norm)


def test_gguf_declares_by_what_it_holds() -> None:
    held = ("output.weight", "blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_gate.bias")
    config = gguf((*held, "blk.0.attn_q_norm.weight"))
    assert config.qkv_bias and config.output_bias and config.mlp_bias and config.qk_norm
    assert not config.tied_embeddings


def test_gguf_rope_scaling() -> None:
    assert gguf(llama__rope__scale_linear=4.0).rope.kind == "linear"
    yarn = gguf(llama__rope__scaling__type="yarn", llama__rope__scaling__factor=4.0)
    assert (yarn.rope.kind, yarn.rope.factor, yarn.context_tokens_max) == ("yarn", 4.0, 8192)
    assert gguf(divisors=(1.0,) * 32).rope.divisors == (1.0,) * 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "gemma3"}, "'gemma3' is not supported; these are: llama, qwen2, qwen3"),
        ({"general__architecture": None}, "None is not supported"),
        ({"llama__expert_count": 8}, "mixture of experts"),
        ({"llama__rope__scaling__type": "longrope"}, "rope scaling 'longrope' is not supported"),
        ({"llama__rope__dimension_count": 32}, "partly rotated heads"),
        ({"llama__attention__value_length": 32}, "keys and values of different sizes"),
        ({"llama__block_count": None}, "block_count is missing"),
        ({"divisors": (1.0, 2.0)}, "rope_freqs holds 2 factors, not 32"),
    ],
)
def test_what_a_gguf_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"^x.gguf.*{message}"):
        gguf(**changes)


def test_configs_that_transformers_writes_are_read(tmp_path: Path) -> None:
    for family in checkpoints.FAMILIES:
        config = checkpoints.CONFIGS[family](**{**checkpoints.SMALL, **checkpoints.FAMILIES[family]})
        config.architectures = [f"{family.capitalize()}ForCausalLM"]
        config.save_pretrained(tmp_path)
        values = json.loads((tmp_path / "config.json").read_text())
        assert from_huggingface(values, "config.json").architecture == family
