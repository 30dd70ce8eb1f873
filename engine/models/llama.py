"""The Llama-family decoder: Llama, SmolLM, Mistral, Qwen2 and Qwen3 differ only in what ModelConfig says.

May import torch, the config and the modules beside it. It knows nothing of sequences, blocks or steps: tokens come as
one flat row of ids with their positions, and attention over the cache is the `Attend` that the caller passes in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from engine.models.config import ModelConfig
from engine.models.linear import Linear
from engine.models.pointwise import Pointwise

# (layer, q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]) -> [tokens, heads * head_dim]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Weights(Protocol):
    """Where the tensors come from, by their Hugging Face names."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A float tensor of this shape on the CPU; ModelError when it is missing or has another shape."""


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: Linear  # rows of q, then of k, then of v
    qk_norm: torch.Tensor | None  # [heads + kv_heads, head_dim]
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear  # rows of gate, then of up
    down: Linear


class LlamaDecoder:
    """Weights on `device` in `dtype`; forward passes only, without gradients."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        device: torch.device,
        dtype: torch.dtype,
        pointwise: Pointwise,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self.config = config
        self._weights = weights
        self._device = device
        self._dtype = dtype
        self._pointwise = pointwise
        steps = config.layers + 1
        progress("loading weights", 0, steps)
        embedding = self._read("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self._embedding = embedding
        self._norm = self._read("model.norm.weight", (config.hidden_size,))
        if config.tied_embeddings:
            self._head = Linear(embedding)
        else:
            self._head = Linear(self._read("lm_head.weight", (config.vocab_size, config.hidden_size)))
        self._layers = []
        for layer in range(config.layers):
            progress("loading weights", layer + 1, steps)
            self._layers.append(self._read_layer(f"model.layers.{layer}."))
        progress("loading weights", steps, steps)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """ids and positions [tokens], int64 -> the last layer's output [tokens, hidden], before the final norm."""
        config, pointwise = self.config, self._pointwise
        tokens = len(ids)
        query_and_key_heads = config.heads + config.kv_heads
        angles = pointwise.angles(positions)
        x = functional.embedding(ids, self._embedding)
        more = None  # the last product's output, which the next norm adds to x
        for index, layer in enumerate(self._layers):
            heads = layer.qkv(pointwise.normed(x, more, layer.attention_norm)).view(tokens, -1, config.head_dim)
            qk, v = heads[:, :query_and_key_heads], heads[:, query_and_key_heads:]
            qk = pointwise.rotated(qk, layer.qk_norm, angles)
            mixed = layer.output(attend(index, qk[:, : config.heads], qk[:, config.heads :], v))
            more = layer.down(pointwise.gated(layer.gate_up(pointwise.normed(x, mixed, layer.mlp_norm))))
        return x if more is None else x.add_(more)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s output -> [rows, vocab_size], float32."""
        return self._head(self._pointwise.normed(hidden, None, self._norm)).float()

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._weights.tensor(name, shape).to(self._device, self._dtype)

    def _read_layer(self, prefix: str) -> _Layer:
        config = self.config
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        q, kv = config.heads * dim, config.kv_heads * dim
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        return _Layer(
            attention_norm=self._read(f"{prefix}input_layernorm.weight", (hidden,)),
            qkv=self._linear(attention, {"q_proj": q, "k_proj": kv, "v_proj": kv}, hidden, bias=config.qkv_bias),
            qk_norm=self._read_qk_norm(attention) if config.qk_norm else None,
            output=self._linear(attention, {"o_proj": hidden}, q, bias=config.output_bias),
            mlp_norm=self._read(f"{prefix}post_attention_layernorm.weight", (hidden,)),
            gate_up=self._linear(mlp, {"gate_proj": inner, "up_proj": inner}, hidden, bias=config.mlp_bias),
            down=self._linear(mlp, {"down_proj": hidden}, inner, bias=config.mlp_bias),
        )

    def _linear(self, prefix: str, outputs: dict[str, int], inputs: int, *, bias: bool) -> Linear:
        """The named projections of one input, stacked into one product."""
        weight = torch.cat([self._read(f"{prefix}{name}.weight", (rows, inputs)) for name, rows in outputs.items()])
        biases = [self._read(f"{prefix}{name}.bias", (rows,)) for name, rows in outputs.items()] if bias else None
        return Linear(weight, None if biases is None else torch.cat(biases))

    def _read_qk_norm(self, prefix: str) -> torch.Tensor:
        dim = self.config.head_dim
        q, k = (self._read(f"{prefix}{name}_norm.weight", (dim,)) for name in "qk")
        return torch.cat((q.expand(self.config.heads, dim), k.expand(self.config.kv_heads, dim)))
