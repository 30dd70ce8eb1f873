"""What the decoder must know of a checkpoint, read from Hugging Face's config.json or from GGUF metadata.

Imports only the standard library, so that the catalog and the tests can use it without torch. Whatever the decoder
can't compute exactly is refused here with a ModelError, before any weight is read: a model that runs gives the
answers its authors meant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # llama.cpp calls Mistral "llama"
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")

# What transformers assumes where a config.json leaves a value out.
_CONTEXT_DEFAULTS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_MISTRAL_WINDOW_DEFAULT = 4096
_MAX_WINDOW_LAYERS_DEFAULT = 28
_THETA_DEFAULT = 10000.0


class ModelError(Exception):
    """A model can't be found, read or run; the message says what is wrong, where, and what would be right."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (arXiv 2104.09864) and how it is stretched over longer contexts.

    `kind` is one of ROPE_KINDS. linear: positions divided by `factor`. dynamic: NTK-aware base that grows with the
    position. llama3: low frequencies divided, with a smooth band between. yarn: arXiv 2309.00071.
    `original_context` is the context length of the pretraining. `divisors` divide the frequencies one by one
    (GGUF's rope_freqs); empty when the file has none.
    """

    theta: float = _THETA_DEFAULT
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and variants of one Llama-family decoder. Sizes are in elements, lengths in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int  # leading part of each head that is rotated
    rms_norm_eps: float
    context_tokens_max: int
    rope: Rope
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over each head of q and k (Qwen3)
    tied_embeddings: bool
    windows: tuple[int, ...]  # for each layer: how many positions, its own included, a token sees; 0: all


class _Reader:
    """Typed look-ups in one metadata mapping, with errors that name the key and the file."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.where}: {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.where}: {key} must be a number, not {value!r}")
        return float(value)

    def size(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value) or value < 1:
            raise ModelError(f"{self.where}: {key} must be a whole number above 0, not {value!r}")
        return int(value)


def from_huggingface(values: Mapping[str, Any], where: str) -> ModelConfig:
    """Reads a parsed config.json. `where` names the file in errors."""
    reader = _Reader(values, where)
    kind = _huggingface_architecture(values, where)
    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method", "an unknown method")
        raise ModelError(f"{where}: its weights are quantised ({method}); use a float checkpoint or a GGUF file")
    if (act := values.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ModelError(f"{where}: hidden_act is {act!r}; only silu is supported")
    heads = reader.size("num_attention_heads")
    hidden = reader.size("hidden_size")
    layers = reader.size("num_hidden_layers")
    head_dim = reader.size("head_dim", 128 if kind == "qwen3" else hidden // heads)
    context = reader.size("max_position_embeddings", _CONTEXT_DEFAULTS[kind])
    rope, rotary_dim = _huggingface_rope(values, where, head_dim, context)
    attention_bias = bool(values.get("attention_bias", False))
    return _checked(
        ModelConfig(
            architecture=kind,
            vocab_size=reader.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=reader.size("intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=reader.size("num_key_value_heads", 8 if kind == "mistral" else heads),
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            context_tokens_max=_stretched_context(rope, context),
            rope=rope,
            qkv_bias=kind == "qwen2" or attention_bias,
            output_bias=kind != "qwen2" and attention_bias,
            mlp_bias=kind == "llama" and bool(values.get("mlp_bias", False)),
            qk_norm=kind == "qwen3",
            tied_embeddings=bool(values.get("tie_word_embeddings", False)),
            windows=_huggingface_windows(reader, kind, layers),
        ),
        where,
    )


def _huggingface_architecture(values: Mapping[str, Any], where: str) -> str:
    named = values.get("architectures") or []
    for name in named:
        if name in HF_ARCHITECTURES:
            return HF_ARCHITECTURES[name]
    model_type = values.get("model_type")
    if not named and model_type in HF_ARCHITECTURES.values():
        return str(model_type)
    found = ", ".join(map(str, named)) or model_type or "none"
    raise ModelError(f"{where}: architecture {found} is not supported; these are: {', '.join(HF_ARCHITECTURES)}")


def _huggingface_windows(reader: _Reader, kind: str, layers: int) -> tuple[int, ...]:
    values = reader.values
    if kind == "llama":
        return (0,) * layers
    if kind == "mistral":
        window = values.get("sliding_window", _MISTRAL_WINDOW_DEFAULT)
        return (int(window or 0),) * layers
    if not values.get("use_sliding_window", False) or values.get("sliding_window") is None:
        return (0,) * layers
    window = reader.size("sliding_window")
    kinds = values.get("layer_types")
    if kinds:
        if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
            raise ModelError(
                f"{reader.where}: layer_types must hold full_attention or sliding_attention {layers} times"
            )
        return tuple(window if each == "sliding_attention" else 0 for each in kinds)
    full = int(values.get("max_window_layers", _MAX_WINDOW_LAYERS_DEFAULT))
    return tuple(0 if layer < full else window for layer in range(layers))


def _huggingface_rope(values: Mapping[str, Any], where: str, head_dim: int, context: int) -> tuple[Rope, int]:
    """The rope and how much of each head it rotates. transformers 5 writes `rope_parameters`; before that there were
    `rope_theta` and `rope_scaling`."""
    parameters = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise ModelError(f"{where}: the rope parameters must be an object, not {parameters!r}")
    reader = _Reader(parameters, f"{where}: rope parameters")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ModelError(f"{where}: rope type {kind!r} is not supported; these are: {', '.join(ROPE_KINDS)}")
    outer = _Reader(values, where)
    original = reader.size(
        "original_max_position_embeddings", values.get("original_max_position_embeddings") or context
    )
    if parameters.get("factor") is None and kind == "yarn":
        factor = context / original
    else:
        factor = reader.number("factor", 1.0 if kind == "default" else None)
    attention_factor = parameters.get("attention_factor")
    rope = Rope(
        theta=reader.number("rope_theta", outer.number("rope_theta", _THETA_DEFAULT)),
        kind=kind,
        factor=factor,
        original_context=context if kind == "dynamic" else original,
        low_freq_factor=reader.number("low_freq_factor", 1.0),
        high_freq_factor=reader.number("high_freq_factor", 4.0),
        attention_factor=None if attention_factor is None else float(attention_factor),
        mscale=reader.number("mscale", 0.0),
        mscale_all_dim=reader.number("mscale_all_dim", 0.0),
        beta_fast=reader.number("beta_fast", 32.0) or 32.0,
        beta_slow=reader.number("beta_slow", 1.0) or 1.0,
        truncate=bool(parameters.get("truncate", True)),
    )
    partial = reader.number("partial_rotary_factor", outer.number("partial_rotary_factor", 1.0))
    return rope, int(head_dim * partial)


def _stretched_context(rope: Rope, context: int) -> int:
    """The longest context a rope variant makes usable. Configs with linear or llama3 scaling state the stretched
    length already; with yarn some do and some state the original one; dynamic starts to act beyond the stated one."""
    if rope.kind == "yarn":
        return max(context, int(rope.original_context * rope.factor))
    if rope.kind == "dynamic":
        return int(context * rope.factor)
    return context


def from_gguf(
    values: Mapping[str, Any], has: Callable[[str], bool], divisors: tuple[float, ...], where: str
) -> ModelConfig:
    """Reads GGUF metadata (keys as in the file). `has` tells whether the file holds a tensor, by its GGUF name: biases
    and a separate output matrix are declared by nothing but their presence. `divisors` is the rope_freqs tensor."""
    kind = values.get("general.architecture")
    if kind not in GGUF_ARCHITECTURES:
        raise ModelError(
            f"{where}: GGUF architecture {kind!r} is not supported; these are: {', '.join(GGUF_ARCHITECTURES)}"
        )
    prefix = f"{kind}."
    reader = _Reader({key.removeprefix(prefix): value for key, value in values.items()}, where)
    if reader.values.get("expert_count"):
        raise ModelError(f"{where}: it is a mixture of experts, which is not supported")
    heads = reader.size("attention.head_count")
    head_dim = reader.size("attention.key_length", reader.size("embedding_length") // heads)
    if reader.size("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{where}: keys and values of different sizes are not supported")
    if kind == "llama" and reader.size("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{where}: partly rotated heads are not supported in GGUF's llama architecture")
    layers = reader.size("block_count")
    context = reader.size("context_length")
    window = int(reader.number("attention.sliding_window", 0.0))
    rope = _gguf_rope(reader, context, divisors)
    tokens = values.get("tokenizer.ggml.tokens")
    return _checked(
        ModelConfig(
            architecture=kind,
            vocab_size=len(tokens) if tokens else reader.size("vocab_size"),
            hidden_size=reader.size("embedding_length"),
            intermediate_size=reader.size("feed_forward_length"),
            layers=layers,
            heads=heads,
            kv_heads=reader.size("attention.head_count_kv", heads),
            head_dim=head_dim,
            rotary_dim=reader.size("rope.dimension_count", head_dim),
            rms_norm_eps=reader.number("attention.layer_norm_rms_epsilon"),
            context_tokens_max=_stretched_context(rope, context),
            rope=rope,
            qkv_bias=has("blk.0.attn_q.bias"),
            output_bias=has("blk.0.attn_output.bias"),
            mlp_bias=has("blk.0.ffn_gate.bias"),
            qk_norm=has("blk.0.attn_q_norm.weight"),
            tied_embeddings=not has("output.weight"),
            windows=(window,) * layers,
        ),
        where,
    )


def _gguf_rope(reader: _Reader, context: int, divisors: tuple[float, ...]) -> Rope:
    kind = reader.values.get("rope.scaling.type") or "none"
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(f"{reader.where}: rope scaling {kind!r} is not supported; these are: none, linear, yarn")
    # Old files state a linear factor alone, under another name.
    old_factor = reader.number("rope.scale_linear", 1.0)
    if kind == "none" and old_factor != 1.0:
        kind = "linear"
    return Rope(
        theta=reader.number("rope.freq_base", _THETA_DEFAULT),
        kind="default" if kind == "none" else kind,
        factor=1.0 if kind == "none" else reader.number("rope.scaling.factor", old_factor),
        original_context=reader.size("rope.scaling.original_context_length", context),
        divisors=divisors,
    )


def _checked(config: ModelConfig, where: str) -> ModelConfig:
    """The config, if its numbers agree with each other."""
    if config.heads % config.kv_heads:
        raise ModelError(f"{where}: {config.heads} attention heads can't share {config.kv_heads} key-value heads")
    if config.rotary_dim % 2 or not 0 < config.rotary_dim <= config.head_dim:
        raise ModelError(f"{where}: {config.rotary_dim} rotary dimensions don't fit a head of {config.head_dim}")
    if config.rope.divisors and len(config.rope.divisors) != config.rotary_dim // 2:
        raise ModelError(f"{where}: rope_freqs holds {len(config.rope.divisors)} factors, not {config.rotary_dim // 2}")
    if config.rope.factor <= 0 or config.rope.theta <= 0:
        raise ModelError(f"{where}: rope factor {config.rope.factor} and base {config.rope.theta} must be above 0")
    return config
