"""The Llama-family decoder computed by the C++ operators: a whole step in one call, weights packed at load.

May import torch, the C++ operators and the modules beside it. The residual stream is float32; queries, keys and values
are float32 for float32 weights and bfloat16 for all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

import torch

from engine.attention import StepBatch
from engine.cpu_ops import HEAD_DIM_MAX, Library, Step
from engine.cpu_ops.decoder import Decoder, Layer, Part, Shape
from engine.cpu_ops.packing import Blocks, Packed, joined, pack, pack_blocks
from engine.cpu_ops.pages import Pages
from engine.models.config import ModelConfig
from engine.models.llama import Weights
from engine.models.rotary import Rotary


class StoredWeights(Weights, Protocol):
    """Where tensors come from that may be quantised already."""

    def blocks(self, name: str, shape: tuple[int, ...]) -> Blocks | None:
        """The tensor as the file holds it, if that is in blocks which the products take."""


class NativeDecoder:
    """See `engine.models.decoder.Decoder`. `numbers`: float32, bfloat16, int8, or gguf: matrices that a GGUF file holds
    in blocks stay so, others are bfloat16."""

    def __init__(
        self,
        config: ModelConfig,
        weights: StoredWeights,
        library: Library,
        numbers: str,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self.library = library
        self.cache_dtype = torch.float32 if numbers == "float32" else torch.bfloat16
        self._config = config
        self._weights = weights
        self._numbers = numbers
        self._packed: Counter[str] = Counter()  # bytes of the matrices of each format
        self._pages = Pages()
        self._block_size = 0
        self.caches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._rotary = Rotary(config.rope, config.rotary_dim, device=torch.device("cpu"), dtype=torch.float32)
        table = (config.vocab_size, config.hidden_size)
        steps = config.layers + 1
        progress("loading weights", 0, steps)
        # A table that is only looked up costs no time in bfloat16.
        embedding = self._pack("model.embed_tokens", *table, looked_up=not config.tied_embeddings).kept(self._pages)
        head = embedding if config.tied_embeddings else self._pack("lm_head", *table).kept(self._pages)
        norm = self._read("model.norm.weight", (config.hidden_size,))
        layers = []
        for layer in range(config.layers):
            progress("loading weights", layer + 1, steps)
            layers.append(self._read_layer(f"model.layers.{layer}.", config.windows[layer]))
        self._decoder = Decoder(library, _shape(config), self.cache_dtype, embedding, layers, norm, head)
        self.logits = self._decoder.logits
        del self._weights  # the file stays mapped, and its vocabulary in memory, for as long as anybody holds it
        progress("loading weights", steps, steps)

    @property
    def formats(self) -> str:
        """What the weights are, for the operator of a server."""
        sizes = (f"{name} {size / 2**20:.0f} MiB" for name, size in self._packed.most_common())
        return ", ".join(sizes)

    def allocate(self, blocks: int, block_size: int) -> None:
        """See `Decoder`."""
        self._block_size = block_size
        shape = (blocks, self._config.kv_heads, block_size, self._config.head_dim)
        self.caches = [
            (torch.empty(shape, dtype=self.cache_dtype), torch.empty(shape, dtype=self.cache_dtype))
            for _ in self._config.windows
        ]
        self._decoder.use_caches(self.caches)

    def forward(self, ids: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """See `Decoder`."""
        config = self._config
        arrays = batch.rows, batch.contexts, batch.tables, batch.slots
        step = Step(self.cache_dtype, config.heads, config.kv_heads, config.head_dim, self._block_size, arrays)
        return self._decoder.forward(ids, step, self._rotary.angles(torch.from_numpy(batch.positions)))

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._weights.tensor(name, shape).to(torch.float32).contiguous()

    def _read_layer(self, prefix: str, window: int) -> Layer:
        config = self._config
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        q, kv = config.heads * dim, config.kv_heads * dim
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        return Layer(
            attention_norm=self._read(f"{prefix}input_layernorm.weight", (hidden,)),
            qkv=self._parts(attention, {"q_proj": q, "k_proj": kv, "v_proj": kv}, hidden, bias=config.qkv_bias),
            qk_norm=self._read_qk_norm(attention) if config.qk_norm else None,
            output=self._parts(attention, {"o_proj": hidden}, q, bias=config.output_bias),
            mlp_norm=self._read(f"{prefix}post_attention_layernorm.weight", (hidden,)),
            gate_up=self._parts(mlp, {"gate_proj": inner, "up_proj": inner}, hidden, bias=config.mlp_bias),
            down=self._parts(mlp, {"down_proj": hidden}, inner, bias=config.mlp_bias),
            window=window,
        )

    def _parts(self, prefix: str, outputs: dict[str, int], inputs: int, *, bias: bool) -> list[Part]:
        """The named projections of one input: one product, if they can be."""
        packed = [self._pack(f"{prefix}{name}", rows, inputs) for name, rows in outputs.items()]
        biases = [self._read(f"{prefix}{name}.bias", (rows,)) for name, rows in outputs.items()] if bias else None
        if whole := joined(packed):
            return [Part(whole.kept(self._pages), None if biases is None else torch.cat(biases))]
        kept = [each.kept(self._pages) for each in packed]
        return [Part(each, None if biases is None else biases[index]) for index, each in enumerate(kept)]

    def _pack(self, name: str, outputs: int, inputs: int, *, looked_up: bool = False) -> Packed:
        """`looked_up`: it is a table, never multiplied by."""
        name, shape = f"{name}.weight", (outputs, inputs)
        blocks = self._weights.blocks(name, shape) if self._numbers == "gguf" else None
        if blocks is not None:
            packed = pack_blocks(blocks)
        else:
            form = "bfloat16" if self._numbers == "gguf" or (looked_up and self._numbers == "int8") else self._numbers
            packed = pack(self._weights.tensor(name, shape), form)
        self._packed[packed.format] += packed.bytes
        return packed

    def _read_qk_norm(self, prefix: str) -> torch.Tensor:
        dim = self._config.head_dim
        q, k = (self._read(f"{prefix}{name}_norm.weight", (dim,)) for name in "qk")
        both = torch.cat((q.expand(self._config.heads, dim), k.expand(self._config.kv_heads, dim)))
        return both.to(self.cache_dtype)


def serves(config: ModelConfig) -> bool:
    """Whether there are C++ operators for a model."""
    return config.head_dim % 2 == 0 and config.head_dim <= HEAD_DIM_MAX


def _shape(config: ModelConfig) -> Shape:
    return Shape(
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        rotary_dim=config.rotary_dim,
        vocabulary=config.vocab_size,
        eps=config.rms_norm_eps,
    )
