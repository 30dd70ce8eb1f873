"""The C++ operators equal float64 references on every instruction set, for all shapes, beside unused slots of NaN."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import catalog, cpu_ops
from engine.cpu_ops import LEVELS, Library, Step, Unavailable
from engine.cpu_ops.build import BuildError, build, takes
from engine.models.config import Rope
from engine.models.rotary import Rotary
from engine.sampler import chosen

pytestmark = pytest.mark.usefixtures("two_threads")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
SILENT = lambda *_: None  # noqa: E731
EPS = 1e-5
COMPILES = pytest.mark.timeout(400)  # the compiler takes 15 s, with sanitizers a minute, and longer on a busy machine

seeds = st.integers(0, 10**6)
levels = st.sampled_from(sorted(LEVELS))
dtypes = st.sampled_from(sorted(TOLERANCES, key=str))


@pytest.fixture(scope="module")
def library() -> Library:
    return cpu_ops.load(catalog.cache_folder().parent / "cpu-ops", SILENT)


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[ours.dtype]
    torch.testing.assert_close(ours.double(), expected, atol=tolerance, rtol=4 * tolerance)


class Paged:
    """Sequences of random keys and values in blocks in random order, everything else in the cache NaN."""

    def __init__(
        self, seed: int, dtype: torch.dtype, shape: tuple[int, int, int], block_size: int, contexts: list[int]
    ):
        self.kv_heads, self.shared, self.dim = shape
        self.block_size = block_size
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)
        needed = [-(-each // block_size) for each in contexts]
        order = torch.randperm(sum(needed) + 2, generator=self.generator).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in needed]
        self.qkv = [self.random(each, self.kv_heads * (self.shared + 2), self.dim) for each in contexts]
        cache = (sum(needed) + 2, self.kv_heads, block_size, self.dim)
        self.caches = (torch.full(cache, torch.nan, dtype=dtype), torch.full(cache, torch.nan, dtype=dtype))

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def attend(self, library: Library, slices: list[tuple[int, int, int]], window: int) -> torch.Tensor:
        """(sequence, start, count) for each slice."""
        heads = self.kv_heads * self.shared
        places = [(s, at) for s, start, count in slices for at in range(start, start + count)]
        slots = [self.tables[s][at // self.block_size] * self.block_size + at % self.block_size for s, at in places]
        width = max(len(self.tables[s]) for s, _, _ in slices)
        tables = [self.tables[s] + [-1] * (width - len(self.tables[s])) for s, _, _ in slices]
        rows = np.cumsum([0, *(count for _, _, count in slices)])
        contexts = np.array([start + count for _, start, count in slices])
        arrays = (rows, contexts, np.array(tables), np.array(slots))
        step = Step(self.dtype, heads, self.kv_heads, self.dim, self.block_size, arrays)
        both = torch.cat([self.qkv[s][start : start + count] for s, start, count in slices])
        q, k, v = both.split((heads, self.kv_heads, self.kv_heads), 1)
        return library.attend(step, q, k.contiguous(), v, self.caches, window)

    def expected(self, slices: list[tuple[int, int, int]], window: int) -> torch.Tensor:
        heads, rows = self.kv_heads * self.shared, []
        for sequence, start, count in slices:
            q, k, v = self.qkv[sequence].double().split((heads, self.kv_heads, self.kv_heads), 1)
            k, v = k.repeat_interleave(self.shared, 1), v.repeat_interleave(self.shared, 1)
            own = torch.arange(start, start + count)[:, None, None]
            positions = torch.arange(start + count)
            seen = (positions <= own) & (positions > (own - window if window else -1))
            scores = torch.einsum("chd,phd->chp", q[start : start + count], k[: start + count]) / self.dim**0.5
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            rows.append(torch.einsum("chp,phd->chd", weights, v[: start + count]).flatten(1))
        return torch.cat(rows)


@given(
    seed=seeds,
    level=levels,
    dtype=dtypes,
    shape=st.tuples(st.integers(1, 3), st.integers(1, 36), st.sampled_from([2, 6, 8, 12, 16, 24, 64, 80, 256])),
    block_size=st.sampled_from([1, 3, 16, 32]),
    window=st.sampled_from([0, 0, 1, 7, 300]),
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=1, max_size=4),
)
@settings(max_examples=40, deadline=None)
def test_attention(
    library: Library,
    seed: int,
    level: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    block_size: int,
    window: int,
    lengths: list[tuple[int, int]],
) -> None:
    """A chunk of each sequence, then another or one token of it, in one step; and each alone, to the last bit."""
    library.use(level)
    paged = Paged(seed, dtype, shape, block_size, [first + second for first, second in lengths])
    for slices in (
        [(s, 0, first) for s, (first, _) in enumerate(lengths)],
        [(s, first, second) for s, (first, second) in enumerate(lengths) if second],
    ):
        if slices:
            together = paged.attend(library, slices, window)
            close(together, paged.expected(slices, window))
            alone = torch.cat([paged.attend(library, [each], window) for each in slices])
            assert torch.equal(together, alone)


@pytest.mark.parametrize("level", sorted(LEVELS))
@pytest.mark.parametrize("dtype", sorted(TOLERANCES, key=str), ids=str)
@pytest.mark.parametrize("window", [0, 20, 300])
def test_attention_over_several_parts(library: Library, level: str, dtype: torch.dtype, window: int) -> None:
    """Long contexts are spread over threads part by part, ragged beside short ones, and as chunks across parts."""
    library.use(level)
    contexts = [700, 5, 257, 256]
    paged = Paged(1, dtype, (2, 3, 32), 16, contexts)  # numbers enough for a tile of AMX
    for slices in (
        [(0, 0, 699), (1, 0, 4), (2, 0, 200), (3, 0, 255)],
        [(0, 699, 1), (1, 4, 1), (2, 200, 57), (3, 255, 1)],
    ):
        together = paged.attend(library, slices, window)
        close(together, paged.expected(slices, window))
        assert torch.equal(together, torch.cat([paged.attend(library, [each], window) for each in slices]))


@pytest.mark.parametrize("level", sorted(LEVELS))
@pytest.mark.parametrize("dtype", sorted(TOLERANCES, key=str), ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 64), (1, 9, 24), (3, 1, 6)])
@pytest.mark.parametrize("window", [0, 20])
def test_attention_is_the_same_to_the_bit_however_a_sequence_is_cut(
    library: Library, level: str, dtype: torch.dtype, shape: tuple[int, int, int], window: int
) -> None:
    library.use(level)
    total = 600  # of three parts
    paged = Paged(3, dtype, shape, 16, [total])
    whole = paged.attend(library, [(0, 0, total)], window)
    for chunk in (1, 3, 7, 64):
        starts = range(0, total, chunk)
        pieces = [paged.attend(library, [(0, start, min(chunk, total - start))], window) for start in starts]
        assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("level", sorted(LEVELS))
def test_attention_of_broken_numbers_is_nan_in_its_own_sequence_only(library: Library, level: str) -> None:
    library.use(level)
    paged = Paged(2, torch.float32, (2, 2, 32), 4, [40, 40, 40])
    paged.qkv[0][7] = torch.nan
    paged.qkv[1][7] = torch.inf
    slices = [(0, 0, 40), (1, 0, 40), (2, 0, 40)]
    ours = paged.attend(library, slices, 0)
    assert ours[39].isnan().all()
    assert ours[79].isnan().all()
    close(ours[80:], paged.expected(slices[2:], 0))


@given(seed=seeds, level=levels, dtype=dtypes, rows=st.integers(1, 70), size=st.integers(1, 400), more=st.booleans())
@settings(max_examples=25, deadline=None)
def test_norm(library: Library, seed: int, level: str, dtype: torch.dtype, rows: int, size: int, more: bool) -> None:
    library.use(level)
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, size, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(size, generator=generator).to(dtype)
    summed = x + y if more else x.clone()
    ours = library.norm(x, y if more else None, weight, EPS)
    assert torch.equal(x, summed)
    wide = summed.double()
    close(ours, wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double())


@given(
    seed=seeds,
    level=levels,
    dtype=dtypes,
    rows=st.integers(1, 70),
    shape=st.sampled_from([(1, 2, 2), (3, 16, 16), (12, 64, 64), (4, 64, 32), (5, 24, 24), (2, 256, 128)]),
    normed=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_rotate(
    library: Library,
    seed: int,
    level: str,
    dtype: torch.dtype,
    rows: int,
    shape: tuple[int, int, int],
    normed: bool,
) -> None:
    library.use(level)
    heads, dim, turned = shape
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(rows, heads + 2, dim, generator=generator).to(dtype)  # what lies beside isn't touched
    weight = torch.randn(heads, dim, generator=generator).to(dtype) if normed else None
    rotary = Rotary(Rope(), turned, device=torch.device("cpu"), dtype=torch.float32)
    angles = rotary.angles(torch.randint(0, 5000, (rows,), generator=generator))
    wide, beside = both[:, :heads].double(), both[:, heads:].clone()
    if weight is not None:
        wide = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    cos, sin = (each.double() for each in angles)
    expected = wide.clone()
    expected[..., :turned] = wide[..., :turned] * cos + wide[..., :turned].roll(turned // 2, -1) * sin
    library.rotate(both[:, :heads], angles, weight, EPS)
    close(both[:, :heads], expected)
    assert torch.equal(both[:, heads:], beside)


@given(seed=seeds, level=levels, dtype=dtypes, rows=st.integers(1, 70), size=st.integers(1, 400))
@settings(max_examples=25, deadline=None)
def test_silu_mul(library: Library, seed: int, level: str, dtype: torch.dtype, rows: int, size: int) -> None:
    library.use(level)
    x = (torch.randn(rows, 2 * size, generator=torch.Generator().manual_seed(seed)) * 6).to(dtype)
    gate, up = x.double().chunk(2, -1)
    close(library.silu_mul(x), gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize("level", sorted(LEVELS))
def test_silu_mul_of_extremes(library: Library, level: str) -> None:
    library.use(level)
    gate = torch.tensor([-1e30, -200.0, -90.0, 0.0, 90.0, 200.0, 1e30, torch.nan, torch.inf, -torch.inf] * 3)
    ours = library.silu_mul(torch.cat((gate, torch.ones(30)))[None])[0]
    finite = gate.isfinite()
    torch.testing.assert_close(ours[finite], torch.nn.functional.silu(gate[finite]), atol=1e-6, rtol=1e-6)
    assert ours[7].isnan()
    assert ours[8] == torch.inf


@pytest.mark.parametrize("top_p", [1.0, 0.95])
@pytest.mark.parametrize("top_k", [40, 20_000])
def test_draws_of_many_rows_at_once(library: Library, top_k: int, top_p: float) -> None:
    """Cut for two threads, from peaked and from flat weights, they are those of torch; engine/test_sampler.py has the
    particular cases."""
    generator = torch.Generator().manual_seed(5)
    weights = (torch.randn(9, 20_000, generator=generator) * torch.logspace(-6, 1, 9)[:, None]).exp()
    weights /= weights.amax(-1, keepdim=True)
    chances = torch.rand(9, generator=generator).double().numpy()
    settings = (np.full(9, top_k), np.full(9, top_p), np.array([0, 0, 0.5] * 3), chances)
    ours = library.draw(weights, *settings)
    assert torch.equal(ours, chosen(weights, *settings))


@pytest.mark.parametrize("filters", [(5, 1.0, 0.0), (2, 1.0, 0.0), (5, 0.5, 0.0), (5, 1.0, 0.5)])
@pytest.mark.parametrize("broken", [torch.nan, -torch.nan, torch.inf, 2.0, -1.0, None])
def test_a_draw_from_what_is_no_weight_is_told(
    library: Library, broken: float | None, filters: tuple[int, float, float]
) -> None:
    weights = torch.tensor([[1.0, 0, 0, 0, 0]] * 3)
    weights[1] = 0
    if broken is not None:
        weights[1, 3] = broken
    settings = (np.full(3, each) for each in (*filters, 0.9))
    assert library.draw(weights, *settings).tolist() == [0, -1, 0]


@pytest.mark.parametrize("level", sorted(LEVELS))
def test_bfloat16_is_rounded_as_torch_rounds(library: Library, level: str) -> None:
    """x + 0 / rms … leaves x itself: sums of bfloat16 numbers, ties among them."""
    library.use(level)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(50, 64, generator=generator).bfloat16()
    y = (x.float() * torch.tensor([0.0, 2.0**-8, -(2.0**-8), 3 * 2.0**-9])[torch.arange(64) % 4]).bfloat16()
    x[0, 0] = torch.nan
    expected = x + y
    library.norm(x, y, torch.ones(64, dtype=torch.bfloat16), EPS)
    torch.testing.assert_close(x, expected, atol=0, rtol=0, equal_nan=True)


def test_what_is_served() -> None:
    assert Library.serves(torch.float32, 64)
    assert Library.serves(torch.bfloat16, 256)
    assert not Library.serves(torch.float16, 64)
    assert not Library.serves(torch.float32, 65)
    assert not Library.serves(torch.float32, 258)


def test_amx_is_used_where_it_is(library: Library) -> None:
    """The kernel lists it for a processor that has it; the tests above fall back to vectors where there is none."""
    flags = Path("/proc/cpuinfo").read_text().split() if sys.platform == "linux" else []
    if not {"amx_tile", "amx_int8", "amx_bf16", "avx512_bf16"} <= set(flags):
        pytest.skip("this processor has no AMX")
    assert library.use("amx") == "amx"
    assert library.use("avx512_bf16") == "avx512_bf16"


@COMPILES
def test_an_older_compiler_does_without_amx(tmp_path: Path) -> None:
    refuses = tmp_path / "compiler"
    refuses.write_text('#!/bin/sh\ncase "$*" in *-mamx*) exit 1;; esac\nexec c++ "$@"\n')
    refuses.chmod(0o755)
    assert takes(["c++"], ())
    assert not takes([str(refuses)], ("-mamx-tile",))
    source = HERE.parents[1] / "engine" / "cpu_ops" / "tiles.cpp"
    done = subprocess.run([refuses, "-std=c++17", "-fsyntax-only", source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@COMPILES
def test_a_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ops, "HERE", tmp_path / "none")
    said: list[str] = []
    cpu_ops.load(tmp_path / "cache", lambda what, *_: said.append(what))
    assert said == ["compiling the CPU operators"]
    assert [each.name for each in (tmp_path / "cache").iterdir()] == [cpu_ops.file_name()]
    monkeypatch.setenv("CXX", "false")
    cpu_ops.load(tmp_path / "cache", lambda what, *_: said.append(what))
    assert len(said) == 1


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ops, "HERE", tmp_path / "none")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="there is no C\\+\\+ compiler"):
        cpu_ops.load(tmp_path / "cache", SILENT)
    for compiler, reason in ((f"{tmp_path}/absent", "No such file"), ("/bin/sh -c 'echo why >&2; exit 1'", "why")):
        monkeypatch.setenv("CXX", compiler)
        with pytest.raises(Unavailable, match=f"failed: .*{reason}"):
            cpu_ops.load(tmp_path / "cache", SILENT)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_damaged_library_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ops, "HERE", tmp_path)
    (tmp_path / cpu_ops.file_name()).write_bytes(b"not a library")
    with pytest.raises(Unavailable):
        cpu_ops.load(tmp_path, SILENT)
    with pytest.raises(BuildError):
        build(tmp_path / "x.so", extra=("--no-such-flag-at-all",))


@COMPILES
def test_no_operator_leaves_its_memory(tmp_path: Path) -> None:
    """Built with sanitizers that end the program at an access outside a block, or at undefined arithmetic."""
    program = tmp_path / "driver"
    # Without optimising: to compile it takes longer than to run it, and nothing is folded away that reads too far.
    flags = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    build(program, flags, HERE / "cpu_ops_driver.cpp")
    for level in LEVELS.values():
        done = subprocess.run([program, str(level)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@COMPILES
@pytest.mark.parametrize("compiler", ["", "false"])
def test_an_installation_brings_what_is_compiled_where_it_can(tmp_path: Path, compiler: str) -> None:
    copy = tmp_path / "checkout"
    shutil.copytree(ROOT / "engine", copy / "engine", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "README.md", "LICENSE", "pyproject.toml"):
        shutil.copy(ROOT / name, copy)
    for name in ("cuda", "server"):
        (copy / name).mkdir()
    shutil.copy(ROOT / "server" / "outlet.c", copy / "server")
    environment = {**os.environ, **({"CXX": compiler, "CC": compiler} if compiler else {})}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built = [each.name for each in (copy / "engine" / "cpu_ops").glob("*.so")]
    assert built == ([] if compiler else [cpu_ops.file_name()])
    assert len(list((copy / "server").glob("_outlet.*"))) == (sys.platform == "linux" and not compiler)


@pytest.mark.skipif(sys.platform != "linux", reason="where torch's OpenMP runtime is found by name")
def test_threads_are_those_of_torch() -> None:
    address = cpu_ops._gomp_parallel()
    assert address is not None
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [([int(end, 16) for end in span.split("-")], path) for span, *_, path in mapped]
    (owner,) = [path for (first, end), path in spans if first <= address < end]
    assert Path(owner).is_relative_to(Path(torch.__file__).parent)
