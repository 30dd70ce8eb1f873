"""NVIDIA's compiler without a driver: `compile_kernel` makes a CUBIN, as CuPy does on a machine that has one.

May import the standard library and engine's kernels. The libraries are in the wheels nvidia-cuda-nvrtc-cu12 and
nvidia-cuda-runtime-cu12. `python -m tests.cuda_on_cpu.nvrtc` compiles every instance for every architecture (or for
those named behind it) and writes registers.tsv: how many registers each kernel takes and how many bytes it spills, the
most of any group and block size.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from engine.cuda_kernels import E4M3, KINDS, Shape
from engine.kernels import options, source
from tests.cuda_on_cpu.emulator import cuda_headers

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120")
HEAD_DIMS = (64, 80, 96, 128, 256)
GROUPS = (1, 7, 16)  # 16 rows are the most that a warp has
BLOCK_SIZES = (16, 32)
ATTENTION = ("paged_attention", "paged_prefill")
SHAPED = (*ATTENTION, "kv_write", "kv_gather")  # the last two don't depend on the group
CACHES = ("", E4M3)
KINDS_AND_CACHES = [f"{kind}/{cache}" if cache else kind for kind in KINDS for cache in CACHES]
ROWS = ("add_rms_norm", "silu_mul")  # depend on the type alone
PLAIN = ("block_copy", "block_swap", "sample")  # know nothing of shapes or types
TABLE = Path(__file__).with_name("registers.tsv")

# What CuPy 14 adds to the options of a RawModule (cupy/cuda/compiler.py), and the report of registers.
_CUPY = ("-ftz=true", "--device-as-default-execution-space")
_REPORT = "--ptxas-options=-v"
_USAGE = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


class CompileError(Exception):
    """The compiler refused or warned; the message is its log."""


@dataclass(frozen=True)
class Usage:
    """What ptxas gave a kernel."""

    kernel: str
    registers: int
    spilled_bytes: int


Key = tuple[str, str, int, str]  # kernel, kind, kind/cache or "any", head_dim or 0, architecture


def compile_kernel(name: str, constants: Mapping[str, int], architecture: str) -> list[Usage]:
    """The kernels of a source file. Warnings are errors."""
    return compile_text(source(name), (*options(name, constants), f"-I{cuda_headers()}"), architecture)


def ptx(name: str, constants: Mapping[str, int]) -> str:
    """What a source file becomes before it is made for one architecture."""
    library, program = _library(), ctypes.c_void_p()
    told = (*options(name, constants), f"-I{cuda_headers()}", *_CUPY, "-arch=compute_80")
    _check(library.nvrtcCreateProgram(ctypes.byref(program), source(name).encode(), b"kernel.cu", 0, None, None))
    _check(library.nvrtcCompileProgram(program, len(told), (ctypes.c_char_p * len(told))(*map(str.encode, told))))
    text = _text(library, "PTX", program).rstrip(b"\0").decode()
    _check(library.nvrtcDestroyProgram(ctypes.byref(program)))
    return text


def compile_text(text: str, told: tuple[str, ...], architecture: str) -> list[Usage]:
    """The kernels of a source text, compiled with these options and what CuPy adds to them."""
    library, program = _library(), ctypes.c_void_p()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None))
    told = (*told, *_CUPY, f"-arch={architecture}", _REPORT)
    result = library.nvrtcCompileProgram(program, len(told), (ctypes.c_char_p * len(told))(*map(str.encode, told)))
    log = _text(library, "ProgramLog", program).decode()
    usages = [
        Usage(each["name"], int(each["registers"]), int(each["stores"]) + int(each["loads"]))
        for each in _USAGE.finditer(log)
    ]
    if result or not usages or re.search(r"\bwarning\b", log):
        raise CompileError(f"{told}:\n{log}")
    assert _text(library, "CUBIN", program).startswith(b"\x7fELF")
    _check(library.nvrtcDestroyProgram(ctypes.byref(program)))
    return usages


def usages_of(shape: Shape, architecture: str) -> Iterator[tuple[Key, Usage]]:
    """Of all kernels that a shape compiles."""
    for name in files_of(shape):
        yield from _usages(name, shape, architecture)


def _usages(name: str, shape: Shape, architecture: str) -> Iterator[tuple[Key, Usage]]:
    kind = f"{shape.kind}/{shape.cache}" if shape.cache else shape.kind
    for usage in compile_kernel(name, shape.constants(), architecture):
        yield (usage.kernel, kind, shape.head_dim, architecture), usage


def files_of(shape: Shape) -> list[str]:
    """The source files that a shape compiles."""
    return [each for each in (SHAPED if shape.group == 1 else ATTENTION) if each != "kv_gather" or not shape.cache]


def plain_usages(architecture: str) -> Iterator[tuple[Key, Usage]]:
    """Of the kernels that depend on no shape."""
    for name in ROWS:
        for kind, number in KINDS.items():
            for usage in compile_kernel(name, {"KIND": number}, architecture):
                yield (usage.kernel, kind, 0, architecture), usage
    for name in PLAIN:
        for usage in compile_kernel(name, {}, architecture):
            yield (usage.kernel, "any", 0, architecture), usage


def shapes(kind: str, head_dim: int) -> Iterator[Shape]:
    """Every instance of a type and a head size."""
    for group in GROUPS:
        for block_size in BLOCK_SIZES:
            for held in CACHES:
                yield Shape(kind, group, 1, head_dim, head_dim, block_size, held)


def read_table() -> dict[Key, tuple[int, int]]:
    """(registers, spilled bytes) by key."""
    lines = [line.split("\t") for line in TABLE.read_text().splitlines()[1:]]
    return {
        (kernel, kind, int(dim), arch): (int(used), int(spilled)) for kernel, kind, dim, arch, used, spilled in lines
    }


def main(architectures: Sequence[str]) -> int:
    """The whole matrix, or of some architectures alone. The table is written after each."""
    compiled = spills = 0
    for architecture in architectures:
        most: dict[Key, tuple[int, int]] = {}
        for shape, found in _instances(architecture):
            compiled += 1
            for key, usage in found:
                used, spilled = most.get(key, (0, 0))
                most[key] = max(used, usage.registers), max(spilled, usage.spilled_bytes)
                if usage.spilled_bytes:
                    spills += 1
                    print(f"{usage} spills: {shape} {key}", flush=True)
        _write_table({**{key: counts for key, counts in read_table().items() if key[3] != architecture}, **most})
        print(f"{architecture}: {compiled} files compiled so far", flush=True)
    print(f"{compiled} files compiled, {spills} kernels spill")
    return 1 if spills else 0


def _instances(architecture: str) -> Iterator[tuple[Shape | None, list[tuple[Key, Usage]]]]:
    """What each compiled file holds."""
    for key, usage in plain_usages(architecture):
        yield None, [(key, usage)]
    for kind in KINDS:
        for head_dim in HEAD_DIMS:
            for shape in shapes(kind, head_dim):
                for name in files_of(shape):
                    yield shape, list(_usages(name, shape, architecture))


def _write_table(table: Mapping[Key, tuple[int, int]]) -> None:
    lines = ["\t".join(map(str, (*key, *counts))) for key, counts in sorted(table.items())]
    TABLE.write_text("\n".join(["kernel\tkind\thead_dim\tarchitecture\tregisters\tspilled_bytes", *lines]) + "\n")


@cache
def _library() -> ctypes.CDLL:
    import nvidia

    for place in nvidia.__path__:
        for path in Path(place, "cuda_nvrtc", "lib").glob("libnvrtc.so.*"):
            return ctypes.CDLL(str(path))
    raise FileNotFoundError("libnvrtc is missing; install nvidia-cuda-nvrtc-cu12")


def _check(result: int) -> None:
    assert result == 0, f"NVRTC error {result}"


def _text(library: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    content = ctypes.create_string_buffer(max(size.value, 1))
    _check(getattr(library, f"nvrtcGet{what}")(program, content))
    return content.raw[: size.value].rstrip(b"\0") if what == "ProgramLog" else content.raw[: size.value]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ARCHITECTURES))
