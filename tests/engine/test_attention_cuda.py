"""The `cuda` backend, with its kernels launched on the CPU from their own source: it attends as the CPU's does, and a
model says the same through it, token for token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import Attention, StepBatch
from engine.attention.cpu import CPUAttention
from engine.attention.cuda import CUDAAttention, CUDAPointwise
from engine.block_pool import BlockPool
from engine.core import Core
from engine.model_runner import ModelRunner
from engine.models.config import ModelError
from engine.models.pointwise import Pointwise, TorchPointwise
from engine.scheduler import Scheduler
from engine.wire import Sampling, Step, Submit
from tests.cuda_on_cpu.device import CPUDevice
from tests.cuda_on_cpu.emulator import Emulated
from tests.engine.conftest import ATTENTION
from tests.support import checkpoints

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = 16
CONFIG = replace(ATTENTION, head_dim=32, rotary_dim=32, windows=(0, 21))
CPU = torch.device("cpu")


def pair(dtype: torch.dtype) -> list[tuple[Attention, Pointwise]]:
    """The backend that is tested, and the one it is compared with."""
    return [
        (CUDAAttention(CONFIG, dtype, CPU, Emulated), CUDAPointwise(CONFIG, device=CPU, dtype=dtype, load=Emulated)),
        (CPUAttention(CONFIG, dtype), TorchPointwise(CONFIG, device=CPU, dtype=dtype)),
    ]


def step_batch(tables: list[list[int]], slices: list[tuple[int, int, int]]) -> StepBatch:
    """(sequence, start, count) -> a step."""
    counts = [count for _, _, count in slices]
    positions = np.concatenate([np.arange(start, start + count) for _, start, count in slices])
    owners = np.repeat([sequence for sequence, _, _ in slices], counts)
    blocks = np.array([tables[owner][at // BLOCK] for owner, at in zip(owners, positions, strict=True)])
    contexts = np.array([start + count for _, start, count in slices])
    table = np.full((len(slices), -(-int(contexts.max()) // BLOCK)), -1)
    for row, (sequence, _, _), context in zip(table, slices, contexts, strict=True):
        used = -(-context // BLOCK)
        row[:used] = tables[sequence][:used]
    rows = np.concatenate(([0], np.cumsum(counts)))
    return StepBatch(positions, blocks * BLOCK + positions % BLOCK, rows, contexts, table)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    chunk=st.sampled_from([1, 2, 7, 64]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=15)
def test_any_cut_of_any_sequences(lengths: list[int], chunk: int, seed: int) -> None:
    """Each step gives every unfinished sequence a chunk; decode rows and prefill chunks share steps."""
    compare(lengths, chunk, seed, torch.float32, 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(dtype: torch.dtype) -> None:
    compare([40, 3, 290], 100, 0, dtype, 0.05)


def compare(lengths: list[int], chunk: int, seed: int, dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    width = CONFIG.heads + 2 * CONFIG.kv_heads
    heads = [torch.randn(length, width, CONFIG.head_dim, generator=generator).to(dtype) for length in lengths]
    needed = [-(-length // BLOCK) for length in lengths]
    free = torch.randperm(sum(needed), generator=generator).tolist()
    tables = [[free.pop() for _ in range(count)] for count in needed]
    backends = pair(dtype)
    for attention, _ in backends:
        attention.allocate(sum(needed), BLOCK)
    for at in range(0, max(lengths), chunk):
        slices = [(s, at, min(chunk, length - at)) for s, length in enumerate(lengths) if length > at]
        batch = step_batch(tables, slices)
        rows = torch.cat([heads[s][start : start + count] for s, start, count in slices])
        for layer in range(CONFIG.layers):
            outs = [attend(*backend, batch, layer, rows.clone()) for backend in backends]
            torch.testing.assert_close(outs[0].float(), outs[1].float(), atol=tolerance, rtol=tolerance)


def attend(
    attention: Attention, pointwise: Pointwise, batch: StepBatch, layer: int, rows: torch.Tensor
) -> torch.Tensor:
    """As the decoder does it."""
    rotated = CONFIG.heads + CONFIG.kv_heads
    angles = pointwise.angles(torch.from_numpy(batch.positions))
    qk = pointwise.rotated(rows[:, :rotated], None, angles)
    return attention.attend(
        attention.plan(batch), layer, qk[:, : CONFIG.heads], qk[:, CONFIG.heads :], rows[:, rotated:]
    )


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_a_model_says_the_same_as_on_the_cpu(family: str, tmp_path: Path) -> None:
    """In float32, with prompts in chunks beside decodes, preemption, windows, scaled rotation and head norms."""
    model = checkpoints.small_model(family, head_dim={"llama": 16, "mistral": 32, "qwen3": 32}[family])
    path = str(checkpoints.save(model, tmp_path))
    texts = []
    for device, gpu in (("cpu", None), ("cuda", CPUDevice())):
        runner = ModelRunner.load(path, device=device, dtype="float32", native=False, gpu=gpu, progress=lambda *_: None)
        texts.append(serve(runner))
    assert runner.operators == "computing with CUDA kernels"
    assert texts[0] == texts[1]
    assert all(len(ids) == 24 for ids in texts[0])


def serve(runner: ModelRunner) -> list[list[int]]:
    """Five generations by the engine's core in a pool that is too small for them all; the ids of each."""
    blocks = 10
    runner.allocate(blocks, BLOCK)
    pool = BlockPool(blocks, BLOCK)
    core = Core(runner, pool, Scheduler(pool, step_tokens_max=30, running_max=8), version="test")
    tokens: dict[int, list[int]] = {}

    def take(step: Step) -> None:
        for id_, token in zip(step.ids, step.tokens, strict=True):
            tokens[id_].append(token)
        assert not [end for end in step.ends if end.reason == "error"]

    peer = core.join(take)
    rng = np.random.default_rng(4)
    for id_ in range(5):
        prompt = rng.integers(0, 256, 8 + 9 * id_).tolist()
        sampling = Sampling(24, temperature=0.8 * (id_ % 2), seed=id_, ignore_eos=True)
        tokens[id_] = []
        core.receive(peer, Submit(id_, prompt, sampling, 24))
    for _ in range(500):
        if not peer.sequences:
            break
        core.step()
    return [tokens[id_] for id_ in range(5)]


def test_a_model_without_kernels_is_refused_with_the_reason(tmp_path: Path) -> None:
    attention = CUDAAttention(replace(CONFIG, head_dim=24, rotary_dim=24), torch.float32, CPU, Emulated)
    with pytest.raises(ModelError, match=r"heads of 24 .*use --device cpu"):
        attention.allocate(4, BLOCK)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_cuda_is_refused_and_auto_is_the_cpu(tmp_path: Path) -> None:
    path = str(checkpoints.save(checkpoints.small_model("llama"), tmp_path))
    with pytest.raises(ModelError, match=r"device 'cuda' is not available: there is no GPU .*; use auto or cpu"):
        ModelRunner.load(path, device="cuda", dtype="auto", progress=lambda *_: None)
    runner = ModelRunner.load(path, device="auto", dtype="auto", native=False, progress=lambda *_: None)
    assert runner.operators.startswith("computing in torch alone")
