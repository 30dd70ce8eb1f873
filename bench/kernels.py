"""`python -m bench kernels`: the CUDA kernels and a decode step on a GPU, as fractions of what the card can do.

    python -m bench kernels --check     # each kernel against the float64 references of tests/cuda_on_cpu
    python -m bench kernels             # times

Decode attention is told as a fraction of the bandwidth of a copy on the device, measured in the same run; a decode step
as a multiple of the time in which its weights, keys and values pass at that bandwidth; prefill beside torch's flash
attention. Each figure is the median of some runs, with the least and the most. What repeats goes over more blocks than
the card's cache holds; attention is replayed from a graph, so that its figures are the card's and not the host's. Where
a figure can't be had its place says why, and the exit code is 1, as without a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import attention, functional

from bench.machine import describe, markdown, spread
from engine import cuda_device
from engine.attention import StepBatch
from engine.attention.cuda import CUDAAttention, CUDAPointwise
from engine.cuda_device import Device
from engine.cuda_kernels import E4M3, SPLIT_TOKENS, Cache, Kernels, Module, Shape, Tables
from engine.cuda_step import CUDAStep
from engine.models.config import ModelConfig, Rope
from engine.models.decoder import TorchDecoder
from engine.models.llama import LlamaDecoder
from engine.sequence import Sequence as Generation
from engine.sequence import Slice
from engine.wire import Sampling

BLOCK = 16
FAILED = "failed:"
HEADS = {"Llama-3-8B": (32, 8, 128), "Qwen2.5-0.5B": (14, 2, 64), "SmolLM2-135M": (9, 3, 64)}


@dataclass(frozen=True)
class Sizes:
    """What is measured; tests do with less."""

    batches: tuple[int, ...] = (1, 8, 64, 256)
    contexts: tuple[int, ...] = (512, 4096, 32_768)
    prompts: tuple[int, ...] = (512, 2048, 8192)
    prompt_repeats: int = 8  # of one graph
    copy_bytes: int = 2**30
    cache_bytes: int = 2**28  # that repeated work goes over at least: more than a card's own cache
    runs: int = 9
    step_batches: tuple[int, ...] = (1, 8, 64)
    step_context: int = 4096
    layers: int = 32
    hidden: int = 4096
    inner: int = 14_336
    vocab: int = 128_256
    kind: str = "bfloat16"


# (work, runs) -> seconds of each run
Clock = Callable[[Callable[[], None], int], list[float]]


def gpu_clock(work: Callable[[], None], runs: int) -> list[float]:
    """By the device's own events."""
    work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in itertools.pairwise(marks)]


def host_clock(work: Callable[[], None], runs: int) -> list[float]:
    """Where the host is the device."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


def main(argv: list[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench kernels", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="results instead of times")
    options = parser.parse_args(argv)
    if problem := cuda_device.problem():
        print(f"bench kernels needs a GPU: {problem}", file=sys.stderr)
        return 1
    print(f"{torch.cuda.get_device_name()}; {describe()}; torch {torch.__version__}")
    gpu = cuda_device.GPU()
    if options.check:
        return check(gpu)
    failed = False
    with torch.inference_mode():
        for piece in report(gpu, gpu_clock, Sizes()):
            failed |= FAILED in piece
            print(piece, flush=True)
    return 1 if failed else 0


def check(device: Device) -> int:
    """Every check of the kernels' tests for each of their shapes, the longest context, and blocks that go to the host's
    memory and back. The exit code: 1 if one fails."""
    from tests.cuda_on_cpu import checks
    from tests.cuda_on_cpu.test_kernels import SHAPES

    def load(name: str, constants: Mapping[str, int]) -> Uploading:
        return Uploading(device.load(name, constants), device.place)

    runs: list[tuple[str, Callable[[], None]]] = [
        (f"{name} {shape}", partial(run, load, shape, np.random.default_rng(1)))
        for shape in SHAPES
        for name, run in checks.CHECKS.items()
    ]
    runs.append(("the longest context", partial(checks.check_longest, load)))
    runs.append(("blocks to the host and back", partial(check_swap, device)))
    failed = 0
    for name, run in runs:
        try:
            run()
        except Exception as error:  # a fault of the device too: the others are worth a try
            failed += 1
            print(f"{name}: {_first_line(error)}", flush=True)
    print(f"{len(runs) - failed} of {len(runs)} checks hold", flush=True)
    return 1 if failed else 0


def check_swap(device: Device) -> None:
    """On a stream of its own, between the device's memory and pinned memory of the host, which kernels see."""
    blocks, block_bytes = 64, 16 * 1000
    shape = Shape("float32", 1, 1, 64, 64, BLOCK)
    kernels, place = Kernels(shape, device.load), device.place
    pool = torch.randint(0, 256, (blocks, block_bytes), dtype=torch.uint8, device=place)
    back, host = torch.zeros_like(pool), device.host(blocks * block_bytes)
    order = torch.randperm(blocks)
    out = torch.stack((torch.arange(blocks), order), 1).to(place)
    home = out.flip(1).contiguous()
    cuda = place.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()) if cuda else nullcontext():
        kernels.swap_blocks(host, pool, out, blocks, block_bytes)
        kernels.swap_blocks(back, host, home, blocks, block_bytes)
    if cuda:
        torch.cuda.synchronize()
    assert torch.equal(host.view(blocks, -1)[order], pool.cpu()), "blocks on the host"
    assert torch.equal(back, pool), "blocks that came back"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


class Uploading:
    """Takes the checks' arrays to the device and back at each launch."""

    def __init__(self, module: Module, place: torch.device) -> None:
        self._module = module
        self._place = place

    def launch(
        self, name: str, grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int, arguments: Sequence[Any], /
    ) -> None:
        """See `Module`."""
        arrays = {each.ctypes.data: each for each in arguments if isinstance(each, np.ndarray)}
        there = {at: torch.from_numpy(_bytes(each).copy()).to(self._place) for at, each in arrays.items()}
        told = [there[each.ctypes.data] if isinstance(each, np.ndarray) else each for each in arguments]
        self._module.launch(name, grid, block, shared_bytes, told)
        for at, each in arrays.items():
            _bytes(each)[:] = there[at].cpu().numpy()


def _bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.reshape(-1).view(np.uint8)


def report(device: Device, clock: Clock, sizes: Sizes) -> Iterator[str]:
    """The tables, piece by piece, what the issue's goals are about first."""
    bandwidth = copy_bandwidth(device, clock, sizes)
    yield f"copy on the device: {bandwidth / 1e9:,.0f} GB/s, read and written\n"
    yield from decode_tables(device, clock, sizes, "", bandwidth)
    yield "prefill, one prompt, µs; and times torch's flash attention\n"
    head = ["heads", *(f"{tokens:,} tokens" for tokens in sizes.prompts)]
    for name in HEADS:
        cells = [_told(partial(prefill_cell, device, clock, sizes, name, n)) for n in sizes.prompts]
        yield markdown(head, [[name, *cells]]) + "\n"
    yield f"decode step of {sizes.layers} layers, context {sizes.step_context:,}, ms; and times its floor\n"
    head = ["sequences", "with graphs", "launch by launch"]
    yield _told(lambda: markdown(head, step_rows(device, clock, sizes, bandwidth))) + "\n"
    yield from decode_tables(device, clock, sizes, E4M3, bandwidth)


def decode_tables(device: Device, clock: Clock, sizes: Sizes, cache: str, bandwidth: float) -> Iterator[str]:
    """One for each kind of heads."""
    yield f"decode attention, {cache or sizes.kind} cache: fraction of the copy's bandwidth, µs\n"
    head = ["heads, batch", *(f"context {context:,}" for context in sizes.contexts)]
    for name in HEADS:
        rows = []
        for batch in sizes.batches:
            cells = [
                _told(partial(decode_cell, device, clock, sizes, name, batch, context, cache, bandwidth))
                for context in sizes.contexts
            ]
            rows.append([f"{name}, {batch}", *cells])
        yield markdown(head, rows) + "\n"


def _told(figure: Callable[[], str]) -> str:
    """The figure, or why there is none: one that fails must not cost the others."""
    try:
        return figure()
    except Exception as error:
        return f"{FAILED} {_first_line(error)}"


def _replayed(device: Device, clock: Clock, works: Sequence[Callable[[], None]], runs: int) -> list[float]:
    """Seconds of one of these works, in each run of them all from a graph."""

    def all_of_them() -> None:
        for work in works:
            work()

    return [each / len(works) for each in clock(device.capture(all_of_them), runs)]


def copy_bandwidth(device: Device, clock: Clock, sizes: Sizes) -> float:
    """Bytes a second."""
    source = torch.randint(0, 256, (sizes.copy_bytes,), dtype=torch.uint8, device=device.place)
    target = torch.empty_like(source)
    return 2 * sizes.copy_bytes / statistics.median(clock(lambda: _copy(target, source), sizes.runs))


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def decode_cell(
    device: Device, clock: Clock, sizes: Sizes, name: str, batch: int, context: int, held: str, bandwidth: float
) -> str:
    """One figure of decode attention, or why there is none."""
    shape = _shape(name, sizes.kind, held)
    number = torch.uint8 if held else getattr(torch, sizes.kind)
    row_bytes = 2 * batch * context * shape.kv_heads * shape.head_dim * number.itemsize
    blocks_each = -(-context // BLOCK)
    turns = max(1, -(-sizes.cache_bytes // row_bytes))
    free = device.memory_free_bytes()
    if free is not None and row_bytes * turns > 0.9 * free:
        return "no room"
    place = device.place
    blocks = turns * batch * blocks_each
    pool = (blocks, shape.kv_heads, BLOCK, shape.head_dim)
    k, v = (torch.empty(pool, dtype=number, device=place) for _ in range(2))
    for each in (k, v):
        each.random_(0, 0x78) if held else each.normal_()  # codes of numbers below 256
    scales = torch.ones((2, shape.kv_heads), device=place) if held else None
    order = torch.randperm(blocks, dtype=torch.int32, device=place).view(turns, batch, blocks_each)
    contexts = torch.full((batch,), context, dtype=torch.int32, device=place)
    rows = torch.arange(batch, dtype=torch.int32, device=place)
    kernels, splits = Kernels(shape, device.load), -(-context // SPLIT_TOKENS)
    partials = torch.empty(kernels.partials_floats(batch, splits), device=place)
    q = torch.empty((batch, shape.heads * shape.head_dim), dtype=getattr(torch, sizes.kind), device=place).normal_()
    out, cache = torch.empty_like(q), Cache(k, v, scales)

    def work(turn: int) -> None:
        tables = Tables(order[turn], blocks_each, contexts)
        kernels.decode(out, partials, (q, q.shape[1]), cache, tables, rows, batch, splits=splits, window=0)

    times = _replayed(device, clock, [partial(work, turn) for turn in range(turns)], sizes.runs)
    fraction = row_bytes / statistics.median(times) / bandwidth
    return f"{fraction:.2f}, {spread([1e6 * each for each in times])}"


def prefill_cell(device: Device, clock: Clock, sizes: Sizes, name: str, tokens: int) -> str:
    """One prompt's attention, and how many times as fast as torch's it is."""
    shape, place, number = _shape(name, sizes.kind, ""), device.place, getattr(torch, sizes.kind)
    blocks = -(-tokens // BLOCK)
    keys, values = (
        torch.randn((blocks, shape.kv_heads, BLOCK, shape.head_dim), device=place).to(number) for _ in range(2)
    )
    q = torch.randn((tokens, shape.heads, shape.head_dim), device=place).to(number)
    kernels = Kernels(shape, device.load)
    tiles = torch.from_numpy(kernels.prefill_tiles([tokens])).to(place)
    rows = torch.tensor([0, tokens], dtype=torch.int32, device=place)
    table = torch.arange(blocks, dtype=torch.int32, device=place)[None]
    tables, out = Tables(table, blocks, torch.tensor([tokens], dtype=torch.int32, device=place)), torch.empty_like(q)
    arguments = (out, (q, q.stride(0)), Cache(keys, values), tables, rows, tiles, len(tiles))
    ours = _replayed(device, clock, [lambda: kernels.prefill(*arguments, window=0)] * sizes.prompt_repeats, sizes.runs)
    k, v = (each.transpose(0, 1).flatten(1, 2)[None, :, :tokens].contiguous() for each in (keys, values))
    query = q.transpose(0, 1)[None].contiguous()
    flash = attention.SDPBackend.FLASH_ATTENTION if place.type == "cuda" else attention.SDPBackend.MATH

    def theirs() -> None:
        with attention.sdpa_kernel(flash):
            functional.scaled_dot_product_attention(query, k, v, is_causal=True, enable_gqa=True)

    torchs = _replayed(device, clock, [theirs] * sizes.prompt_repeats, sizes.runs)
    ratio = statistics.median(torchs) / statistics.median(ours)
    return f"{spread([1e6 * each for each in ours])}; {ratio:.2f}"


def step_rows(device: Device, clock: Clock, sizes: Sizes, bandwidth: float) -> list[list[str]]:
    """A decode step's time with and without graphs, as rows of a table."""
    config = _config(sizes)
    step, weights = _step(device, sizes, config)
    blocks_each = -(-(sizes.step_context + 1) // BLOCK)
    most = max(sizes.step_batches)
    step.allocate(most * blocks_each, BLOCK)
    for cache in step._attention._caches:  # of what lay there before, a NaN would end the draw at once
        cache.k.normal_(), cache.v.normal_()
    batches = {count: _decode_batch(count, sizes.step_context, blocks_each) for count in sizes.step_batches}
    eager = {count: clock(partial(_run, step, *each), sizes.runs) for count, each in batches.items()}
    step.capture(most, sizes.step_context + 1, lambda *_: None)
    graphs = {count: clock(partial(_run, step, *each), sizes.runs) for count, each in batches.items()}
    token = 2 * config.layers * config.kv_heads * config.head_dim * getattr(torch, sizes.kind).itemsize
    rows = []
    for count in sizes.step_batches:
        floor = (weights + count * sizes.step_context * token) / bandwidth
        cells = [
            f"{spread([1e3 * each for each in times], 2)}; {statistics.median(times) / floor:.2f}"
            for times in (graphs[count], eager[count])
        ]
        rows.append([str(count), *cells])
    return rows


def _run(step: CUDAStep, slices: list[Slice], batch: StepBatch) -> None:
    """A whole step, from its inputs to the tokens on the host."""
    sequences = [each.sequence for each in slices]
    logits, hidden = step.launch(slices, batch)
    if hidden is not None:
        step.draw(logits, sequences)
    step.tokens(sequences)()


def _decode_batch(count: int, context: int, blocks_each: int) -> tuple[list[Slice], StepBatch]:
    sampling = Sampling(2, temperature=0.8, top_p=0.95)
    slices = [
        Slice(Generation(at, [1] * (context + 1), context + 1, sampling, credit=2), context, 1, True)
        for at in range(count)
    ]
    positions = np.full(count, context, np.int64)
    tables = np.arange(count * blocks_each, dtype=np.int64).reshape(count, blocks_each)
    slots = tables[:, context // BLOCK] * BLOCK + context % BLOCK
    return slices, StepBatch(positions, slots, np.arange(count + 1), positions + 1, tables)


class _Random:
    """See `Weights`: numbers that keep a forward pass finite, made where they are wanted, and their bytes."""

    def __init__(self, number: torch.dtype, place: torch.device) -> None:
        self._number = number
        self._place = place
        self.bytes = 0

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See `Weights`."""
        self.bytes += int(np.prod(shape)) * self._number.itemsize if "embed_tokens" not in name else 0
        made = torch.empty(shape, dtype=self._number, device=self._place)
        return made.fill_(1.0) if len(shape) == 1 else made.normal_(0, shape[-1] ** -0.5)


def _step(device: Device, sizes: Sizes, config: ModelConfig) -> tuple[CUDAStep, int]:
    """A model of this shape, and the bytes of weights that a step reads."""
    number = getattr(torch, sizes.kind)
    weights = _Random(number, device.place)
    told: Mapping[str, Any] = {"device": device.place, "dtype": number}
    pointwise = CUDAPointwise(config, **told, load=device.load)
    layers = LlamaDecoder(config, weights, **told, pointwise=pointwise, progress=lambda *_: None)
    decoder = TorchDecoder(layers, CUDAAttention(config, number, device.place, device.load), device.place)
    return CUDAStep(decoder, device, config.vocab_size), weights.bytes


def _config(sizes: Sizes) -> ModelConfig:
    """Llama-3-8B's, where the sizes are the default."""
    heads, kv_heads, head_dim = HEADS["Llama-3-8B"]
    return ModelConfig(
        architecture="llama",
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        layers=sizes.layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=head_dim,
        rms_norm_eps=1e-5,
        context_tokens_max=sizes.step_context + 1,
        rope=Rope(theta=500_000.0),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tied_embeddings=False,
        windows=(0,) * sizes.layers,
    )


def _shape(name: str, kind: str, held: str) -> Shape:
    heads, kv_heads, head_dim = HEADS[name]
    return Shape(kind, heads, kv_heads, head_dim, head_dim, BLOCK, held)
