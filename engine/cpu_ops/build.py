"""Compiles the C++ operators: one shared library with kernels for every instruction set of the architecture.

May import the standard library only, and runs as a file too: setup.py calls it where torch isn't installed. The library
links to nothing of Python or torch, so it serves every version of both; its name holds a hash of all that went into it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
HEADERS = (
    "vectors.h",
    "kernels.h",
    "products.h",
    "panels.h",
    "tiles.h",
    "attend_tiles.h",
    "team.h",
    "ops.h",
    "decoder.h",
)
UNITS = ("team.cpp", "ops.cpp", "decoder.cpp", "sampling.cpp")
COMPILERS = ("c++", "g++", "clang++")
COMPILE_TIMEOUT_S = 300  # it takes 15 s; what takes longer than this is stuck

# Comparisons with NaN stay exact: a sequence whose numbers broke must be seen to be broken.
_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"),
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-unknown-pragmas"),
)
# Rounding is the source's own: activations get the same 8 bits on every processor.
_FLAGS_OF = {"products.cpp": ("-ffp-contract=off",), "tiles.cpp": ("-ffp-contract=off",)}
# Each level's name, the floats in a register, the rows of sums that fit in all registers, its compiler flags, and the
# sources that gain by it.
_BOTH = ("kernels.cpp", "products.cpp")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512")
_AMX = ("-mamx-tile", "-mamx-int8", "-mamx-bf16")  # of GCC 11 and Clang 12; what is compiled without them is never used
_AVX512_BF16 = (*_AVX512, "-mavx512vnni", "-mavx512bf16")
_BASE = (("base", 4, 2, (), _BOTH),)
_X86_64 = (
    *_BASE,
    ("avx2", 8, 2, ("-mavx2", "-mfma", "-mf16c"), _BOTH),
    ("avx512", 16, 3, _AVX512, _BOTH),
    ("avx512_vnni", 16, 3, (*_AVX512, "-mavx512vnni"), ("products.cpp",)),
    ("avx512_bf16", 16, 3, _AVX512_BF16, ("products.cpp",)),
    ("amx", 16, 3, (*_AVX512_BF16, *_AMX), ("kernels.cpp", "tiles.cpp")),
)
LEVELS = _X86_64 if platform.machine().lower() in ("x86_64", "amd64") else _BASE


class BuildError(Exception):
    """There is no compiler, or it refused."""


def file_name() -> str:
    """What the library of these sources is called, on this system and architecture."""
    state = hashlib.sha256(repr((sys.platform, platform.machine(), LEVELS, _FLAGS, _FLAGS_OF)).encode())
    for name in (*HEADERS, *UNITS, *dict.fromkeys(source for *_, sources in LEVELS for source in sources)):
        state.update((HERE / name).read_bytes())
    return f"ops-{state.hexdigest()[:16]}.so"


def build(target: Path, extra: tuple[str, ...] = (), program: Path | None = None) -> None:
    """Compiles to `target`, which is there whole or not at all. `extra` are more flags, and with `program`, a source
    file with a main(), an executable is made. Raises BuildError."""
    compiler = _compiler()
    amx = takes(compiler, _AMX)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as folder:
        commands = [
            [
                *_FLAGS,
                *(flag for flag in flags if amx or flag not in _AMX),
                *_macros(level, lanes, pairs),
                *_FLAGS_OF.get(source, ()),
                *extra,
                "-c",
                str(HERE / source),
                "-o",
                f"{level}-{source}.o",
            ]
            for level, lanes, pairs, flags, sources in LEVELS
            for source in sources
        ]
        commands += [
            [*_FLAGS, *extra, f"-I{HERE}", "-c", str(source), "-o", f"{source.stem}.o"]
            for source in (*(HERE / unit for unit in UNITS), *([program] if program else []))
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda command: _run([*compiler, *command], folder), commands))
        link = [command[-1] for command in commands] + ["-o", "linked"]
        # The C++ runtime goes in: a user's cache folder may be shared by machines that have different ones.
        static = ("-static-libstdc++", "-static-libgcc") if sys.platform == "linux" and not program else ()
        _run([*compiler, *([] if program else ["-shared"]), *static, *extra, *link], folder)
        os.replace(Path(folder, "linked"), target)


def _macros(level: str, lanes: int, pairs: int) -> tuple[str, ...]:
    return (f"-DSLUICE_LEVEL={level}", f"-DSLUICE_LANES={lanes}", f"-DSLUICE_PAIRS={pairs}")


def _compiler() -> list[str]:
    if asked := os.environ.get("CXX"):
        return shlex.split(asked)
    for name in COMPILERS:
        if found := shutil.which(name):
            return [found]
    raise BuildError(f"there is no C++ compiler ({', '.join(COMPILERS)}, or $CXX)")


def takes(compiler: list[str], flags: tuple[str, ...]) -> bool:
    """Whether the compiler knows them."""
    try:
        _run([*compiler, *flags, "-x", "c++", "-fsyntax-only", os.devnull], os.getcwd())
    except BuildError:
        return False
    return True


def _run(command: list[str], folder: str) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMPILE_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the C++ compiler {command[0]} failed: {error}") from None
    if done.returncode:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0]
        raise BuildError(f"the C++ compiler {command[0]} failed: {reason}")
