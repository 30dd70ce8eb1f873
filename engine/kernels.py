"""Finds the CUDA sources: beside this file in an installed copy, in the checkout's cuda/ folder otherwise.

They are data, not a package: the name `cuda` belongs to NVIDIA's namespace package, which CuPy and torch import.
"""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent
_PLACES = (_HERE / "_kernels", _HERE.parent / "cuda")


def source(name: str) -> str:
    """The text of `name`.cu. Raises FileNotFoundError that says where it was looked for."""
    for place in _PLACES:
        path = place / f"{name}.cu"
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise FileNotFoundError(f"no {name}.cu in {' or '.join(map(str, _PLACES))}")
