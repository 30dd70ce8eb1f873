"""The C++ operators of the CPU engine, called on the memory of torch's tensors.

May import numpy, torch and the standard library. `load` finds the library that setup.py built beside this file, else
one in the user's cache folder, else it compiles one into that folder: a checkout that was never installed is as fast as
an installation. Where there is no compiler the engine computes in torch.

A row's result never depends on the rows beside it. Work is cut for as many threads as torch uses, and runs on torch's
own. The engine computes whole steps (`decoder`); the operators here are the parts of one, by themselves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.cpu_ops.build import HERE, BuildError, build, file_name

__all__ = ["KINDS", "LEVELS", "Library", "Step", "Unavailable", "load", "types_of"]

LEVELS = {"base": 0, "avx2": 1, "avx512": 2, "avx512_vnni": 3, "avx512_bf16": 4, "amx": 5}
HEAD_DIM_MAX = 256  # as in kernels.h
KINDS = {torch.float32: 0, torch.bfloat16: 1}

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]


class Unavailable(Exception):
    """Why there is no library."""


class _Attend(ctypes.Structure):
    """`Attend` of kernels.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "slices", "heads", "kv_heads", "head_dim", "block_size")),
        *((name, ctypes.c_int64) for name in ("window", "table_stride")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("rows", "contexts", "tables", "slots", "q", "k", "v")),
        *((name, ctypes.c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, ctypes.c_void_p) for name in ("k_cache", "v_cache", "out")),
    )


class Step:
    """What attention needs of one step, for all layers: S slices, T tokens.

    rows [S + 1], contexts [S], tables [S, most blocks] and slots [T] as in `engine.attention.StepBatch`.
    """

    def __init__(
        self, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block_size: int, arrays: tuple[Ints, ...]
    ) -> None:
        rows, contexts, tables, slots = self._arrays = tuple(np.ascontiguousarray(each, np.int64) for each in arrays)
        self._struct = _Attend(
            kind=KINDS[dtype],
            slices=len(contexts),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            table_stride=tables.shape[1],
            scale=head_dim**-0.5,
            rows=rows.ctypes.data,
            contexts=contexts.ctypes.data,
            tables=tables.ctypes.data,
            slots=slots.ctypes.data,
        )
        self.address = ctypes.addressof(self._struct)


class Library:
    """The loaded operators. `level` is the most that it may use of the processor: a key of LEVELS.

    Tensors are on the CPU, in float32 or bfloat16, one type in a call, with the last dimension dense.
    """

    def __init__(self, path: Path, level: str = "amx") -> None:
        library = self.functions = ctypes.CDLL(str(path))
        library.sluice_ops_init.restype = ctypes.c_char_p
        library.sluice_ops_init.argtypes = (ctypes.c_int, ctypes.c_void_p)
        self._attend = library.sluice_attend
        self._attend.argtypes = types_of("pps ps ps ppp ss")
        self._norm = library.sluice_norm
        self._norm.argtypes = types_of("s pppp ss f s")
        self._rotate = library.sluice_rotate
        self._rotate.argtypes = types_of("s pppp sssss f s")
        self._silu_mul = library.sluice_silu_mul
        self._silu_mul.argtypes = types_of("s pp ss s")
        self._draw = library.sluice_draw
        self._draw.argtypes = types_of("p ss ppp p p s")
        for function in (self._attend, self._norm, self._rotate, self._silu_mul, self._draw):
            function.restype = None
        self._init = library.sluice_ops_init
        self.level = self.use(level)

    def use(self, level: str) -> str:
        """Computes with `level`, or the best below it that there is; its name."""
        self.level = self._init(LEVELS[level], _gomp_parallel()).decode()
        return self.level

    @staticmethod
    def serves(dtype: torch.dtype, head_dim: int) -> bool:
        """Whether there are operators for a model of this type."""
        return dtype in KINDS and head_dim % 2 == 0 and 0 < head_dim <= HEAD_DIM_MAX

    def attend(
        self,
        step: Step,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        window: int,
    ) -> torch.Tensor:
        """See `engine.attention.Attention.attend`; caches are [blocks, kv_heads, block_size, head_dim]."""
        out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype)
        k_cache, v_cache = caches
        self._attend(
            step.address,
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            out.data_ptr(),
            window,
            torch.get_num_threads(),
        )
        return out

    def norm(self, x: torch.Tensor, y: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [rows, size] += y if there is a y, in place. Returns x / rms(x) * weight [size]. All are contiguous."""
        rows, size = x.shape
        out = torch.empty_like(x)
        self._norm(
            KINDS[x.dtype],
            x.data_ptr(),
            None if y is None else y.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            size,
            eps,
            torch.get_num_threads(),
        )
        return out

    def rotate(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        weight: torch.Tensor | None,
        eps: float,
    ) -> None:
        """In place: x [rows, heads, head_dim], heads side by side, is normed for each head where there is a weight
        [heads, head_dim], then rotated as `engine.models.rotary.Rotary` does, by its angles in float32."""
        rows, heads, head_dim = x.shape
        cos, sin = angles
        self._rotate(
            KINDS[x.dtype],
            x.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            None if weight is None else weight.data_ptr(),
            rows,
            heads,
            head_dim,
            cos.shape[-1],
            x.stride(0),
            eps,
            torch.get_num_threads(),
        )

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, 2 * size], contiguous -> silu of the first half times the second, [rows, size]."""
        rows, size = x.shape[0], x.shape[1] // 2
        out = torch.empty((rows, size), dtype=x.dtype)
        self._silu_mul(KINDS[x.dtype], x.data_ptr(), out.data_ptr(), rows, size, torch.get_num_threads())
        return out

    def draw(self, weights: torch.Tensor, top_k: Ints, top_p: Floats, min_p: Floats, chances: Floats) -> torch.Tensor:
        """See `engine.sampler.Choose`; float32. A row that holds no number above 0, or one that isn't of 0 to 1, is
        answered with -1."""
        rows, vocab = weights.shape
        weights = weights.contiguous()
        settings = [
            np.ascontiguousarray(each, dtype)
            for each, dtype in ((top_k, np.int64), (top_p, np.float64), (min_p, np.float32), (chances, np.float64))
        ]
        tokens = torch.empty(rows, dtype=torch.int64)
        addresses = [each.ctypes.data for each in settings]
        self._draw(weights.data_ptr(), rows, vocab, *addresses, tokens.data_ptr(), torch.get_num_threads())
        return tokens


def load(cache_folder: Path, progress: Callable[[str, int, int], None]) -> Library:
    """The library; compiled into `cache_folder` where there is none yet, which takes some seconds. Raises
    Unavailable."""
    name = file_name()
    try:
        path = next((each for each in (HERE / name, cache_folder / name) if each.is_file()), None)
        if path is None:
            progress("compiling the CPU operators", 0, 0)
            path = cache_folder / name
            build(path)
        return Library(path)
    except (BuildError, OSError, AttributeError) as error:
        raise Unavailable(str(error)) from None


def types_of(letters: str) -> list[Any]:
    """The argument types of a C function's arguments: p a pointer, s a size, f a number."""
    named = {"p": ctypes.c_void_p, "s": ctypes.c_int64, "f": ctypes.c_float}
    return [named[each] for each in letters.replace(" ", "")]


def _gomp_parallel() -> int | None:
    """The address of the entry by which torch's own OpenMP runtime starts a parallel region: torch puts its runtime
    where every library finds it. None if torch was built without one."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError, TypeError):
        return None
