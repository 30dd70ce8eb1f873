"""Checkpoints for tests: small seeded ones that transformers makes, their GGUF twins, and SmolLM2 as transformers
computes it. What is here reads and writes weights by its own means, apart from the engine's loaders.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

from engine import catalog

VOCAB_SIZE = 300
EOS_ID = 257

CONFIGS: dict[str, type[transformers.PreTrainedConfig]] = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": EOS_ID,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# One variant of each family, each with what sets it apart; windows and original contexts are small enough to matter.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 11, "head_dim": 24},
    "qwen2": {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1},
    "qwen3": {"head_dim": 32},
}


def tokenizer() -> tokenizers.Tokenizer:
    """Each byte is a token, then <|begin|>, <|end|> and <|im_end|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>", "<|im_end|>"])
    return tokenizer


def small_model(family: str, **changes: Any) -> transformers.PreTrainedModel:
    """A float32 model with seeded random weights, large enough that its choices are far from uniform."""
    torch.manual_seed(sum(family.encode()))
    config = CONFIGS[family](**{**SMALL, **FAMILIES[family], **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(0, 0.2)
    return model


def plain_model(family: str) -> transformers.PreTrainedModel:
    """One without what GGUF keeps elsewhere (rope scaling) or not at all (windows)."""
    off = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}, "use_sliding_window": False}
    return small_model(family, **off, sliding_window=None)


def save(model: transformers.PreTrainedModel, path: Path, **options: Any) -> Path:
    """A directory as transformers leaves it, with a tokenizer."""
    model.save_pretrained(path, **options)
    tokenizer().save(str(path / "tokenizer.json"))
    return path


def write_gguf(
    model: transformers.PreTrainedModel,
    family: str,
    path: Path,
    *,
    vocabulary: bool = True,
    tensors: dict[str, np.ndarray] | None = None,
    quantised: str = "",
    **fields: Any,
) -> Path:
    """The model as llama.cpp's converter would write it, float32. Mistral goes by the name of llama. `tensors` are
    further ones by their GGUF names, `fields` further metadata (str, int or float; __ for a dot). `quantised` is
    the type of the matrices whose rows it fits: Q8_0, Q4_0 or Q4_1."""
    arch = "llama" if family == "mistral" else family
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if head_dim := getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    kinds = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in fields.items():
        kinds[type(value)](key.replace("__", "."), value)
    if vocabulary:
        _write_vocabulary(writer)
    else:
        writer.add_vocab_size(VOCAB_SIZE)
    _write_tensors(writer, model, arch, quantised)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_vocabulary(writer: gguf.GGUFWriter) -> None:
    known = {index: token for token, index in tokenizer().get_vocab(with_added_tokens=True).items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([known.get(index, f"[PAD{index}]") for index in range(VOCAB_SIZE)])
    control, normal, unused = 3, 1, 5
    writer.add_token_types(
        [unused if index not in known else control if index >= 256 else normal for index in range(VOCAB_SIZE)]
    )
    writer.add_token_merges([])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(EOS_ID)


def _write_tensors(writer: gguf.GGUFWriter, model: transformers.PreTrainedModel, arch: str, quantised: str) -> None:
    config = model.config
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[arch], config.num_hidden_layers)
    tied = config.tie_word_embeddings
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        values = weight.numpy()
        count = next((count for part, count in heads.items() if part in name), 0)
        if arch == "llama" and count:
            split = values.reshape(count, 2, values.shape[0] // count // 2, *values.shape[1:])
            values = split.swapaxes(1, 2).reshape(values.shape)
        stored_name, values = names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(values)
        if quantised and values.ndim == 2 and values.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType[quantised]
            writer.add_tensor(stored_name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored_name, values)


def smollm2_path() -> Path:
    """The default model's file, fetched once."""
    return catalog.resolve("smollm2-135m-instruct", progress=lambda *_: None)


def smollm2_reference() -> transformers.LlamaForCausalLM:
    """SmolLM2 in transformers, float32, from the same GGUF file. (transformers reads GGUF itself only when accelerate
    is installed, which nothing else here needs.)"""
    reader = gguf.GGUFReader(smollm2_path())
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    weights = {}
    for name in model.state_dict():
        tensor = stored.get(names.get_name(name, try_suffixes=(".weight",)) or "", stored["token_embd.weight"])
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if "q_proj" in name or "k_proj" in name:
            weight = torch.cat([torch.cat((head[0::2], head[1::2])) for head in weight.split(64)])
        weights[name] = weight
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(weights)
    return model.eval()
