"""Compiles a kernel's own source for the CPU (see language.h) and launches it.

May import numpy and the standard library. `Emulated` is a library in this process; `Sanitized` runs each launch in a
program of its own under AddressSanitizer or ThreadSanitizer. Both take numpy arrays and scalars, and `Emulated` takes
torch tensors too.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KERNELS = ROOT / "cuda"
BUILDS = ROOT / "build" / "cuda-on-cpu"  # by a hash of all that goes in; git ignores it

ORDERS = {"numbered": 0, "reversed": 1, "shuffled": 2}
LAUNCH_TIMEOUT_S = 120  # a launch takes milliseconds, under a sanitizer a second

_FLAGS = ["-std=c++17", "-O1", "-g1", "-fno-strict-aliasing", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
_SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-DCUDA_ON_CPU_ADDRESS"],
    "thread": ["-fsanitize=thread", "-DCUDA_ON_CPU_THREAD"],
}
_SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=66",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=66:report_signal_unsafe=0",
}

Constants = Mapping[str, int]


class LaunchError(Exception):
    """A launch went wrong: a divergent barrier, what a sanitizer found, or it has no end."""


class BuildError(Exception):
    """The compiler refused or warned: no kernel was run."""


def cuda_headers() -> Path:
    """Where cuda_fp16.h lies: in the wheel nvidia-cuda-runtime-cu12."""
    import nvidia

    for place in nvidia.__path__:
        folder = Path(place) / "cuda_runtime" / "include"
        if (folder / "cuda_fp16.h").is_file():
            return folder
    raise FileNotFoundError("cuda_fp16.h is missing; install nvidia-cuda-runtime-cu12")


class Emulated:
    """The kernels of one source file, compiled with `constants`, in this process."""

    def __init__(self, source: str, constants: Constants, *, kernels: Path = KERNELS, order: str = "numbered") -> None:
        self.order, self.seed = order, 0
        self._launch = ctypes.CDLL(str(build(source, constants, kernels=kernels))).cuda_on_cpu_launch
        self._launch.restype = ctypes.c_char_p

    def launch(
        self,
        name: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        shared_bytes: int,
        arguments: Sequence[Any],
    ) -> None:
        """Runs a grid to its end. Arguments are arrays, None for a null pointer, or scalars of the parameter's type."""
        addresses = (ctypes.c_void_p * len(arguments))()
        values = [_value(each) for each in arguments]
        for at, value in enumerate(values):
            addresses[at] = value.ctypes.data
        shape = [(ctypes.c_uint * 3)(*each, *[1] * (3 - len(each))) for each in (grid, block)]
        self.seed += 1
        error = self._launch(
            name.encode(),
            *shape,
            ctypes.c_size_t(shared_bytes),
            addresses,
            ORDERS[self.order],
            ctypes.c_uint(self.seed),
        )
        if error:
            raise LaunchError(f"{name}: {error.decode()}")


class Sanitized:
    """As `Emulated`, under a sanitizer: every array in memory of its own, of its exact size."""

    def __init__(
        self, source: str, constants: Constants, sanitizer: str, *, kernels: Path = KERNELS, order: str = "numbered"
    ) -> None:
        self.order, self.seed = order, 0
        self._program = build(source, constants, sanitizer, kernels)

    def launch(
        self,
        name: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        shared_bytes: int,
        arguments: Sequence[Any],
    ) -> None:
        """See `Emulated.launch`."""
        buffers: dict[int, np.ndarray[Any, Any]] = {}
        numbers: dict[int, int] = {}
        said = []
        for each in arguments:
            if isinstance(each, np.ndarray):
                numbers.setdefault(each.ctypes.data, len(buffers))
                buffers[each.ctypes.data] = each
                said.append(struct.pack("i", numbers[each.ctypes.data]))
            elif each is None:
                said.append(struct.pack("i", -2))
            else:
                said.append(struct.pack("i", -1) + _bytes(each.tobytes()))
        self.seed += 1
        shape = [*grid, *[1] * (3 - len(grid)), *block, *[1] * (3 - len(block))]
        message = [_bytes(name.encode()), struct.pack("=6IQiI", *shape, shared_bytes, ORDERS[self.order], self.seed)]
        message += [struct.pack("I", len(buffers)), *(_bytes(each.tobytes()) for each in buffers.values())]
        message += [struct.pack("I", len(said)), *said]
        self._take(name, self._run(name, b"".join(message)), list(buffers.values()))

    def _run(self, name: str, message: bytes) -> bytes:
        try:
            done = subprocess.run(
                [str(self._program)],
                input=message,
                capture_output=True,
                timeout=LAUNCH_TIMEOUT_S,
                env={**os.environ, **_SANITIZER_OPTIONS},
            )
        except subprocess.TimeoutExpired:
            raise LaunchError(f"{name}: no end after {LAUNCH_TIMEOUT_S} s") from None
        if done.returncode:
            raise LaunchError(f"{name}: exit code {done.returncode}\n{done.stderr.decode(errors='replace')[:6000]}")
        return done.stdout

    def _take(self, name: str, answer: bytes, buffers: list[np.ndarray[Any, Any]]) -> None:
        at = 0
        parts = []
        for _ in range(1 + len(buffers)):
            (size,) = struct.unpack_from("Q", answer, at)
            parts.append(answer[at + 8 : at + 8 + size])
            at += 8 + size
        if parts[0]:
            raise LaunchError(f"{name}: {parts[0].decode()}")
        for buffer, content in zip(buffers, parts[1:], strict=True):
            buffer.reshape(-1).view(np.uint8)[:] = np.frombuffer(content, np.uint8)


def build(source: str, constants: Constants, sanitizer: str = "", kernels: Path = KERNELS) -> Path:
    """Compiles `source`.cu: a library, or with a sanitizer a program. Made once for each content."""
    return _build(source, tuple(constants.items()), sanitizer, kernels)


@cache  # sources don't change while tests run
def _build(source: str, constants: tuple[tuple[str, int], ...], sanitizer: str, kernels: Path) -> Path:
    text = (kernels / f"{source}.cu").read_text()
    names = re.findall(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(', text)
    listed = " ".join(f"KERNEL({name})" for name in names)
    unit = f'#include "language.h"\n#define KERNELS {listed}\n#include "{source}.cu"\n#include "entry.h"\n'
    flags = [*_FLAGS, *_SANITIZERS.get(sanitizer, []), *(f"-D{name}={value}" for name, value in constants)]
    flags += ["-DCUDA_ON_CPU_PROGRAM"] if sanitizer else []
    read = [kernels / f"{source}.cu", *sorted(kernels.glob("*.cuh")), *sorted(HERE.glob("*.[hc]*"))]
    suffix = "" if sanitizer else ".so"

    def make(target: Path) -> None:
        path = target.with_name(target.name + ".cpp")
        path.write_text(unit)
        linked = [] if sanitizer else ["-shared"]
        includes = [f"-I{HERE}", f"-I{kernels}", "-isystem", str(cuda_headers())]
        _run([_compiler(), *flags, *includes, *linked, str(path), str(_scheduler(sanitizer)), "-o", str(target)])

    folder = BUILDS if kernels == KERNELS else kernels / "build"
    return _made_once(folder, f"{source}-{sanitizer or 'plain'}", suffix, (flags, unit), read, make)


def _scheduler(sanitizer: str) -> Path:
    """Its own bookkeeping is no part of what is checked, so it is compiled without instrumentation."""
    flags = [*_FLAGS, *(each for each in _SANITIZERS.get(sanitizer, []) if not each.startswith("-f"))]

    def make(target: Path) -> None:
        command = [_compiler(), *flags, f"-I{HERE}", "-isystem", str(cuda_headers())]
        _run([*command, "-c", str(HERE / "scheduler.cpp"), "-o", str(target)])

    return _made_once(BUILDS, f"scheduler-{sanitizer or 'plain'}", ".o", flags, sorted(HERE.glob("*.[hc]*")), make)


def _made_once(
    folder: Path, name: str, suffix: str, asked: Any, read: Sequence[Path], make: Callable[[Path], None]
) -> Path:
    """The file that `make` makes of what is asked and read; there whole or not at all."""
    state = hashlib.sha256(repr(asked).encode())
    for path in read:
        state.update(path.read_bytes())
    target = folder / f"{name}-{state.hexdigest()[:20]}{suffix}"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as part:
            made = Path(part) / target.name
            make(made)
            os.replace(made, target)
    return target


def _compiler() -> str:
    compiler = shutil.which("g++")
    assert compiler, "the CUDA kernels' tests need g++ (Debian package g++)"
    return compiler


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr[:8000]}")


def _value(argument: Any) -> np.ndarray[Any, Any]:
    """The argument's own bytes, in memory."""
    if argument is None:
        return np.zeros(1, np.uint64)
    if isinstance(argument, np.ndarray):
        return np.array([argument.ctypes.data], np.uint64)
    if hasattr(argument, "data_ptr"):  # a torch tensor
        return np.array([argument.data_ptr()], np.uint64)
    return np.array([argument], argument.dtype)


def _bytes(content: bytes) -> bytes:
    return struct.pack("Q", len(content)) + content
