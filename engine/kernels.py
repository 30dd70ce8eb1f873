"""Finds the CUDA sources: beside this file in an installed copy, in the checkout's cuda/ folder otherwise.

They are data, not a package: the name `cuda` belongs to NVIDIA's namespace package, which CuPy and torch import.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_PLACES = (_HERE / "_kernels", _HERE.parent / "cuda")


def source(name: str) -> str:
    """The text of `name`.cu. Raises FileNotFoundError that says where it was looked for."""
    return _path(name).read_text(encoding="utf-8")


def options(name: str, constants: Mapping[str, int]) -> tuple[str, ...]:
    """What to tell the compiler of `name`.cu: its constants, where its own headers lie, and what they are: CuPy keeps
    what it compiled on disk by the text and the options, and would keep it when a header changes."""
    folder = _path(name).parent
    headers = blake2b(b"".join(path.read_bytes() for path in sorted(folder.glob("*.cuh"))), digest_size=8)
    defined = (f"-D{constant}={value}" for constant, value in constants.items())
    return ("-std=c++17", f"-I{folder}", f"-DHEADERS=0x{headers.hexdigest()}", *defined)


def _path(name: str) -> Path:
    for place in _PLACES:
        path = place / f"{name}.cu"
        if path.is_file():
            return path
    raise FileNotFoundError(f"no {name}.cu in {' or '.join(map(str, _PLACES))}")
