"""A model that the C++ library computes whole: the structs of decoder.h, filled from packed weights.

May import torch and the modules beside it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.cpu_ops import KINDS, Library, Step, types_of
from engine.cpu_ops.packing import FORMATS, Packed


class _Product(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("format", "inputs", "outputs")),
        *((name, ctypes.c_void_p) for name in ("weights", "scales", "offsets", "bias")),
    )


class _Linear(ctypes.Structure):
    _fields_ = (("parts", ctypes.c_void_p), ("count", ctypes.c_int64))


class _Layer(ctypes.Structure):
    _fields_ = (
        ("attention_norm", ctypes.c_void_p),
        ("qkv", _Linear),
        ("qk_norm", ctypes.c_void_p),
        ("output", _Linear),
        ("mlp_norm", ctypes.c_void_p),
        ("gate_up", _Linear),
        ("down", _Linear),
        ("window", ctypes.c_int64),
        ("k_cache", ctypes.c_void_p),
        ("v_cache", ctypes.c_void_p),
    )


class _Decoder(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("kind", "layers", "hidden", "inner", "heads", "kv_heads", "head_dim", "rotary_dim")
        ),
        ("layer", ctypes.c_void_p),
        ("embedding", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("head", _Linear),
        ("eps", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class Part:
    """One product, with its bias [outputs] in float32 if it has one."""

    weights: Packed
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """Norms are float32 but for qk_norm [heads + kv_heads, head_dim], which is of the cache's type. Parts of a product
    have their outputs side by side, in the order of the name."""

    attention_norm: torch.Tensor
    qkv: Sequence[Part]
    qk_norm: torch.Tensor | None
    output: Sequence[Part]
    mlp_norm: torch.Tensor
    gate_up: Sequence[Part]
    down: Sequence[Part]
    window: int


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes in elements; see `ModelConfig`."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    vocabulary: int
    eps: float


class Decoder:
    """`dtype`, float32 or bfloat16, is that of queries, keys and values."""

    def __init__(
        self,
        library: Library,
        shape: Shape,
        dtype: torch.dtype,
        embedding: Packed,
        layers: Sequence[Layer],
        norm: torch.Tensor,
        head: Packed,
    ) -> None:
        self._kept: list[Any] = [library, embedding, layers, norm, head]  # what the structs point to
        self._shape = shape
        self._layers = (_Layer * len(layers))(*map(self._layer, layers))
        table = self._products([Part(embedding)])
        self._struct = _Decoder(
            kind=KINDS[dtype],
            layers=len(layers),
            hidden=shape.hidden,
            inner=shape.inner,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            rotary_dim=shape.rotary_dim,
            layer=ctypes.addressof(self._layers),
            embedding=ctypes.addressof(table),
            norm=norm.data_ptr(),
            head=self._linear([Part(head)]),
            eps=shape.eps,
        )
        self._address = ctypes.addressof(self._struct)
        self._space = torch.empty(0, dtype=torch.uint8)
        functions = library.functions
        self._space_of = functions.sluice_space
        self._space_of.argtypes, self._space_of.restype = types_of("ps"), ctypes.c_int64
        self._forward = functions.sluice_forward
        self._forward.argtypes, self._forward.restype = types_of("ppp ppp p s"), None
        self._logits = functions.sluice_logits
        self._logits.argtypes, self._logits.restype = types_of("p ps pp s"), None

    def use_caches(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Keys and values of each layer, [blocks, kv_heads, block_size, head_dim]."""
        self._caches = caches
        for layer, (keys, values) in zip(self._layers, caches, strict=True):
            layer.k_cache, layer.v_cache = keys.data_ptr(), values.data_ptr()

    def forward(self, ids: torch.Tensor, step: Step, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """ids [tokens] int64, angles as `Rotary` gives them, in float32 -> the last layer's output [tokens, hidden],
        float32."""
        cos, sin = angles
        hidden = torch.empty((len(ids), self._shape.hidden), dtype=torch.float32)
        self._forward(
            self._address,
            step.address,
            ids.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            hidden.data_ptr(),
            self._room(len(ids)),
            torch.get_num_threads(),
        )
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s output -> [rows, vocabulary], float32."""
        rows = hidden.contiguous()
        out = torch.empty((len(rows), self._shape.vocabulary), dtype=torch.float32)
        room = self._room(len(rows))
        self._logits(self._address, rows.data_ptr(), len(rows), out.data_ptr(), room, torch.get_num_threads())
        return out

    def _room(self, rows: int) -> int:
        """The address of memory for a step of so many rows, which is kept for the next one."""
        needed = self._space_of(self._address, rows)
        if needed > len(self._space):
            self._space = torch.empty(needed, dtype=torch.uint8)
        return self._space.data_ptr()

    def _layer(self, layer: Layer) -> _Layer:
        return _Layer(
            attention_norm=layer.attention_norm.data_ptr(),
            qkv=self._linear(layer.qkv),
            qk_norm=None if layer.qk_norm is None else layer.qk_norm.data_ptr(),
            output=self._linear(layer.output),
            mlp_norm=layer.mlp_norm.data_ptr(),
            gate_up=self._linear(layer.gate_up),
            down=self._linear(layer.down),
            window=layer.window,
        )

    def _linear(self, parts: Sequence[Part]) -> _Linear:
        return _Linear(ctypes.addressof(self._products(parts)), len(parts))

    def _products(self, parts: Sequence[Part]) -> Any:
        array = (_Product * len(parts))(*(_product(each.weights, each.bias) for each in parts))
        self._kept.append(array)
        return array


def multiply(
    library: Library,
    weights: Packed,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [rows, inputs], float32 or bfloat16 -> [rows, outputs], of `dtype` or x's."""
    function = library.functions.sluice_multiply
    function.argtypes, function.restype = types_of("p ps s ps s"), None
    out = torch.empty((len(x), weights.outputs), dtype=dtype or x.dtype)
    product = _product(weights, bias)
    function(
        ctypes.addressof(product),
        x.data_ptr(),
        KINDS[x.dtype],
        len(x),
        out.data_ptr(),
        KINDS[out.dtype],
        torch.get_num_threads(),
    )
    return out


def look_up(library: Library, weights: Packed, outputs: torch.Tensor) -> torch.Tensor:
    """Rows `outputs` [count] of the matrix, [count, inputs] in float32."""
    function = library.functions.sluice_look_up
    function.argtypes, function.restype = types_of("pps p"), None
    out = torch.empty((len(outputs), weights.inputs), dtype=torch.float32)
    product = _product(weights, None)
    function(ctypes.addressof(product), outputs.data_ptr(), len(outputs), out.data_ptr())
    return out


def _product(weights: Packed, bias: torch.Tensor | None) -> _Product:
    def place(tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    return _Product(
        format=FORMATS[weights.format],
        inputs=weights.inputs,
        outputs=weights.outputs,
        weights=weights.weights.data_ptr(),
        scales=place(weights.scales),
        offsets=place(weights.offsets),
        bias=place(bias),
    )
