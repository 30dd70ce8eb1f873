"""Steps on a GPU, with a CPU in its place (tests.cuda_on_cpu.device): replayed graphs say what is computed launch by
launch, and steps that are launched ahead of their tokens say what steps one by one say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention import sent
from engine.block_pool import BlockPool
from engine.core import Core, Peer
from engine.cuda_step import rows_ladder, splits_ladder
from engine.model_runner import ModelError, ModelRunner
from engine.scheduler import Scheduler
from engine.sequence import Launched, Slice
from engine.step_inputs import Layout
from engine.wire import Cancel, Credit, Sampling, Step, Submit
from tests.cuda_on_cpu.device import CountingGPU, CPUDevice
from tests.support import checkpoints
from tests.support.stepping import Stepper

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = 16
ROWS = 6  # graphs of 1, 2, 4 and 6 rows
# Long enough for two numbers of splits.
SIZES = {"num_hidden_layers": 2, "max_position_embeddings": 400, "head_dim": 16}
PROMPTS = [np.random.default_rng(each).integers(0, 256, 4 + 9 * each).tolist() for each in range(5)]
SAMPLINGS = [
    Sampling(20, temperature=0, ignore_eos=True),
    Sampling(20, temperature=0.9, top_p=0.9, seed=1, ignore_eos=True),
    Sampling(20, temperature=1.3, top_k=30, min_p=0.02, seed=2, ignore_eos=True),
]
ASKING = [
    Sampling(20, temperature=0.8, seed=3, repetition_penalty=1.2, ignore_eos=True),
    Sampling(20, temperature=0, logprobs=3, min_tokens=4),
]


Device = CPUDevice | CountingGPU


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> type[Device]:
    """What takes a GPU's place, or with --device cuda the GPU."""
    return CountingGPU if request.config.getoption("--device") == "cuda" else CPUDevice


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoints.save(checkpoints.small_model("llama", **SIZES), tmp_path_factory.mktemp("llama")))


class Rig:
    """A core over a model, and what it said of each sequence."""

    def __init__(
        self, path: str, *, gpu: Device | None, graphs: int = 0, blocks: int = 60, cache: str = "auto"
    ) -> None:
        device = "cuda" if gpu else "cpu"
        self.runner = ModelRunner.load(
            path, device=device, dtype="float32", cache_dtype=cache, native=False, gpu=gpu, progress=lambda *_: None
        )
        self.runner.allocate(blocks, BLOCK)
        if gpu:
            gpu.follow(self.runner)
            if graphs:
                self.runner.prepare(graphs, lambda *_: None)
        self.pool = BlockPool(blocks, BLOCK)
        self.scheduler = Scheduler(self.pool, step_tokens_max=30, running_max=ROWS)
        self.core = Core(self.runner, self.pool, self.scheduler, version="test")
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}
        self.cached: dict[int, int] = {}
        self.logprobs: list[float] = []
        self.discarded = 0
        self.peer: Peer = self.core.join(self.take)

    def take(self, step: Step) -> None:
        for id_, token in zip(step.ids, step.tokens, strict=True):
            self.tokens[id_].append(token)
        self.cached.update({each.id: each.cached_tokens for each in step.admitted})
        self.logprobs += [each.logprob for each in step.logprobs]
        self.ends.update({end.id: end.message or end.reason for end in step.ends})
        self.discarded = step.gauges.discarded

    def submit(self, id_: int, prompt: list[int], sampling: Sampling, credit: int = 10**6) -> None:
        self.tokens[id_] = []
        self.core.receive(self.peer, Submit(id_, prompt, sampling, credit))

    def run(self, steps: int = 1000) -> Rig:
        for _ in range(steps):
            if not self.core.has_work:
                break
            self.core.step()
        return self

    def serve(self, samplings: list[Sampling]) -> list[list[int]]:
        for id_, prompt in enumerate(PROMPTS):
            self.submit(id_, prompt, samplings[id_ % len(samplings)])
        self.run()
        assert len(self.ends) == len(PROMPTS)
        return [self.tokens[id_] for id_ in range(len(PROMPTS))]


def test_ladders() -> None:
    assert rows_ladder(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert rows_ladder(1) == [1]
    assert rows_ladder(6) == [1, 2, 4, 6]
    assert rows_ladder(8) == [1, 2, 4, 8]
    assert rows_ladder(17) == [1, 2, 4, 8, 16, 17]
    assert rows_ladder(256)[10:] == [64, 80, 96, 112, 128, 160, 192, 224, 256]
    assert splits_ladder(100) == [1]
    assert splits_ladder(8192) == [1, 4, 16, 32]
    assert splits_ladder(131_072) == [1, 4, 16, 64, 256, 512]


@pytest.mark.parametrize(("rows", "stride"), [(1, 16), (3, 17), (8, 0)])
def test_inputs_lie_aligned_and_apart(rows: int, stride: int) -> None:
    layout = Layout(rows, stride)
    memory = torch.zeros(layout.size, dtype=torch.uint8)
    for number, view in enumerate(layout.tensors(memory).values()):
        assert view.data_ptr() % view.element_size() == 0
        assert (view == 0).all()
        view.fill_(number + 1)
    assert [int(view.unique()) for view in layout.tensors(memory).values() if view.numel()] == list(
        range(1, 11 + bool(stride))
    )


@pytest.fixture(scope="module")
def expected(path: str) -> list[list[int]]:
    return Rig(path, gpu=None).serve(SAMPLINGS)


def test_replayed_graphs_say_what_the_cpu_says(path: str, expected: list[list[int]], device: type[Device]) -> None:
    """Batches of 1 to 5 rows in graphs of 1, 2, 4 and 6: rows without a sequence change nothing."""
    gpu = device()
    rig = Rig(path, gpu=gpu, graphs=ROWS)
    assert rig.serve(SAMPLINGS) == expected
    assert len(gpu.replays) == 4 * 2
    assert sum(gpu.replays) > 15
    assert rig.pool.used == 0


def test_what_is_asked_of_logits_is_told_with_graphs_too(path: str, device: type[Device]) -> None:
    """Penalties and log probabilities hold a step until its tokens are known, beside sequences that need none."""
    texts = [Rig(path, gpu=None), Rig(path, gpu=device(), graphs=ROWS)]
    assert texts[0].serve(ASKING + SAMPLINGS) == texts[1].serve(ASKING + SAMPLINGS)
    assert len(texts[0].logprobs) > 4
    assert texts[0].logprobs == pytest.approx(texts[1].logprobs, abs=1e-4)


def test_sequences_that_lose_their_blocks_while_a_step_runs(
    path: str, expected: list[list[int]], device: type[Device]
) -> None:
    rig = Rig(path, gpu=device(), graphs=ROWS, blocks=8)
    assert rig.serve(SAMPLINGS) == expected
    assert rig.scheduler.preemptions > 0
    assert rig.pool.used == 0


def test_cached_blocks_are_attended_to(path: str, device: type[Device]) -> None:
    """Of a prompt that runs, of one that is over, and of an answer that becomes a prompt's part."""
    prompt, texts, rigs = PROMPTS[4][:36], [], (Rig(path, gpu=None), Rig(path, gpu=device(), graphs=ROWS))
    for rig in rigs:
        rig.submit(0, prompt, SAMPLINGS[1])
        rig.run(6).submit(1, [*prompt, 7], SAMPLINGS[0])
        rig.run().submit(2, [*prompt, *rig.tokens[0], 9], SAMPLINGS[2])
        rig.submit(3, prompt[:33], SAMPLINGS[0])
        texts.append(rig.run().tokens)
        assert rig.cached == {0: 0, 1: 2 * BLOCK, 2: 3 * BLOCK, 3: 2 * BLOCK}
    assert texts[0] == texts[1]
    assert all(len(each) == 20 for each in texts[0].values())


def test_graphs_see_a_layer_s_window_wherever_it_lies(tmp_path: Path, device: type[Device]) -> None:
    """Long enough for two numbers of splits, of which a layer with a window needs one."""
    path = str(checkpoints.save(checkpoints.small_model("mistral", **SIZES), tmp_path))
    prompt = np.random.default_rng(8).integers(0, 256, 250).tolist()
    texts, gpu = [], device()
    for rig in (Rig(path, gpu=None), Rig(path, gpu=gpu, graphs=2)):
        assert any(rig.runner.config.windows)
        rig.submit(0, prompt, SAMPLINGS[0])
        rig.submit(1, PROMPTS[2], SAMPLINGS[1])
        texts.append(rig.run().tokens)
    assert texts[0] == texts[1]
    assert sum(each > 0 for each in gpu.replays) >= 3


def test_a_sequence_grows_into_more_splits(path: str, device: type[Device]) -> None:
    prompt = np.random.default_rng(9).integers(0, 256, 250).tolist()
    texts, gpu = [], device()
    for rig in (Rig(path, gpu=None), Rig(path, gpu=gpu, graphs=1)):
        rig.submit(0, prompt, SAMPLINGS[0])
        texts.append(rig.run().tokens[0])
    assert texts[0] == texts[1]
    assert all(gpu.replays)  # one row, with one split and then with two


def test_tokens_behind_an_end_are_dropped_and_counted(
    path: str, expected: list[list[int]], device: type[Device]
) -> None:
    """A stop id ends a sequence when its next step runs already; a cancel comes between two steps."""
    rig = Rig(path, gpu=device())
    stop = expected[0][5]
    until = expected[0].index(stop) + 1
    rig.submit(0, PROMPTS[0], Sampling(20, temperature=0, ignore_eos=True, stop_ids=(stop,)))
    rig.submit(1, PROMPTS[1], SAMPLINGS[1])
    rig.run()
    assert rig.tokens == {0: expected[0][:until], 1: expected[1]}
    assert rig.ends == {0: "stop", 1: "length"}
    assert rig.discarded == 1
    rig.submit(2, PROMPTS[0], SAMPLINGS[0])
    rig.run(4)
    rig.core.receive(rig.peer, Cancel([2]))
    rig.run()
    assert rig.discarded == 2
    assert rig.tokens[2] == expected[0][: len(rig.tokens[2])]
    assert rig.pool.used == 0


def test_credit_is_kept_while_steps_run_ahead(path: str, expected: list[list[int]], device: type[Device]) -> None:
    rig = Rig(path, gpu=device())
    rig.submit(0, PROMPTS[0], SAMPLINGS[0], credit=4)
    rig.run()
    assert rig.tokens[0] == expected[0][:4]
    rig.core.receive(rig.peer, Credit([(0, 9)]))
    rig.core.step()
    rig.core.step()
    rig.core.receive(rig.peer, Credit([(0, 0)]))  # its reader left, and comes back before the step is over
    rig.core.receive(rig.peer, Credit([(0, 20)]))
    rig.run()
    assert rig.tokens[0] == expected[0]
    assert rig.discarded == 0


def test_a_server_that_leaves_takes_its_sequences_from_a_running_step(path: str, device: type[Device]) -> None:
    rig = Rig(path, gpu=device())
    rig.submit(0, PROMPTS[0], SAMPLINGS[0])
    rig.run(3)
    rig.core.leave(rig.peer)
    rig.run()
    assert not rig.core.has_work
    assert rig.pool.used == 0


def test_a_broken_row_ends_alone(tmp_path: Path, device: type[Device]) -> None:
    model = checkpoints.small_model("llama", **SIZES)
    with torch.no_grad():
        model.get_input_embeddings().weight[13] = torch.nan
    rig = Rig(str(checkpoints.save(model, tmp_path)), gpu=device(), graphs=2)
    rig.submit(0, [1, 2, 3], SAMPLINGS[1])
    rig.submit(1, [1, 13, 3], SAMPLINGS[0])
    rig.run()
    assert "no finite number" in rig.ends[1]
    assert len(rig.tokens[0]) == 20
    assert not rig.tokens[1]


@pytest.mark.parametrize("graphs", [0, ROWS])
def test_a_step_is_launched_without_waiting_for_the_device(
    path: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, graphs: int
) -> None:
    """It asks for no number, and copies to the device only as `sent` does."""
    rig = Rig(path, gpu=CPUDevice(), graphs=graphs)
    launch, to, launched = rig.runner.launch, torch.Tensor.to, 0

    def sends(self: torch.Tensor, *told: Any, **named: Any) -> torch.Tensor:
        where = next((each for each in told if isinstance(each, torch.device)), named.get("device"))
        assert where is None or named.get("non_blocking"), "a copy that waits"
        return to(self, *told, **named)

    def asks(*_: object) -> None:
        raise AssertionError("a number of the device's is asked for")

    def watched(slices: list[Slice]) -> Launched:
        nonlocal launched
        launched += 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "to", sends)
            for name in ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__"):
                patch.setattr(torch.Tensor, name, asks)
            return launch(slices)

    monkeypatch.setattr(rig.core, "_begin", watched)
    assert rig.serve(SAMPLINGS) == expected
    assert launched > 20


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_what_is_sent_to_a_gpu_goes_by_pinned_memory(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    pinned, calls = torch.ones(3), []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *told, **named: calls.append((self, told, named)))
    numbers, device = torch.zeros(3), torch.device(kind)
    sent(numbers, device)
    assert calls == [(pinned if kind == "cuda" else numbers, (device,), {"non_blocking": True})]


def test_graphs_without_memory_are_refused_with_what_to_change(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(self: CPUDevice, work: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(CPUDevice, "capture", capture)
    with pytest.raises(
        ModelError, match=r"graphs of up to 6 sequences need more memory than 60 KV blocks leave; ask for"
    ):
        Rig(path, gpu=CPUDevice(), graphs=ROWS)


def test_inputs_need_two_places_while_a_step_may_wait(path: str, expected: list[list[int]]) -> None:
    """The stand-in for a GPU finds host memory that is written before it was read."""
    rig = Rig(path, gpu=CPUDevice(), graphs=ROWS)
    step = rig.runner._cuda
    assert step is not None
    step._told = [step._told[0]] * 2
    assert rig.serve(SAMPLINGS) != expected


def test_a_cache_of_bytes(path: str, device: type[Device]) -> None:
    """The same with graphs and without, and about what float32 says."""
    fp8 = [Rig(path, gpu=device(), graphs=graphs, cache="fp8") for graphs in (0, ROWS)]
    assert fp8[0].serve(SAMPLINGS) == fp8[1].serve(SAMPLINGS)
    assert fp8[0].runner.operators == "computing with CUDA kernels, the KV cache in fp8"
    assert fp8[0].runner.block_bytes(BLOCK) * 4 == Rig(path, gpu=None).runner.block_bytes(BLOCK)
    sampling = Sampling(1, temperature=0, logprobs=5)
    answers = []
    for rig in (fp8[0], Rig(path, gpu=None)):
        stepper = Stepper(rig.runner)
        answers.append(stepper.run([stepper.sequence(PROMPTS[4], sampling)])[0][0].logprob)
    assert answers[0].logprob == pytest.approx(answers[1].logprob, abs=0.3)


def test_bytes_are_scaled_by_each_head_s_own_numbers(path: str, tmp_path: Path, device: type[Device]) -> None:
    """Keys 16,384 times as large for queries as much smaller, and values as much smaller for a larger output, are the
    same model; in e4m3 itself the ones would be 448 and the others 0."""
    model = checkpoints.small_model("llama", **SIZES)
    with torch.no_grad():
        for layer in model.model.layers:
            heads = layer.self_attn
            for linear, factor in ((heads.k_proj, 2.0**14), (heads.q_proj, 2.0**-14), (heads.v_proj, 2.0**-14)):
                for each in linear.parameters():
                    each.mul_(factor)
            heads.o_proj.weight.mul_(2.0**14)
    other = str(checkpoints.save(model, tmp_path))
    texts = [Rig(each, gpu=device(), cache="fp8").serve(SAMPLINGS) for each in (path, other)]
    assert texts[0] == texts[1]


def test_a_cache_of_bytes_needs_a_gpu(path: str) -> None:
    with pytest.raises(ModelError, match="a KV cache of fp8 needs --device cuda"):
        ModelRunner.load(path, device="cpu", dtype="float32", cache_dtype="fp8", progress=lambda *_: None)
