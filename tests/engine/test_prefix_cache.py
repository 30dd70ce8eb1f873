"""The prefix cache never changes a text (E11): with a GGUF file of each family, whose text is transformers'."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine.block_pool import BlockPool
from engine.core import Core, Peer
from engine.model_runner import ModelRunner
from engine.scheduler import Scheduler
from engine.wire import Cancel, Sampling, Step, Submit
from tests.support import checkpoints

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK, NEW, CANCELS = 8, 16, 50
PROMPT = list(b"The sea is blue, and so is the sky above")
PROMPTS = {"A": PROMPT, "A and more": PROMPT + list(b" it, they say.")}


class Rig:
    """A core over a pool that holds all, and what it told of each sequence."""

    def __init__(self, runner: ModelRunner) -> None:
        runner.allocate(64, BLOCK)
        self.pool = BlockPool(64, BLOCK)
        self.core = Core(runner, self.pool, Scheduler(self.pool, step_tokens_max=30, running_max=8), version="test")
        self.tokens: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self.peer: Peer = self.core.join(self._take)

    def _take(self, step: Step) -> None:
        assert not [end for end in step.ends if end.reason == "error"]
        self.cached |= {each.id: each.cached_tokens for each in step.admitted}
        for id_, token in zip(step.ids, step.tokens, strict=True):
            self.tokens[id_].append(token)

    def submit(self, prompt: list[int], salt: str = "") -> int:
        id_ = len(self.tokens)
        self.tokens[id_] = []
        greedy = Sampling(NEW, temperature=0, seed=1, ignore_eos=True)
        self.core.receive(self.peer, Submit(id_, prompt, greedy, NEW, salt=salt))
        return id_

    def run(self) -> None:
        while self.core.has_work:
            self.core.step()


@torch.inference_mode()
def greedy_text(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    """By transformers, without any cache."""
    ids = list(prompt)
    for _ in range(NEW):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", sorted(checkpoints.FAMILIES))
def test_text_is_that_of_transformers_with_the_cache_and_without_after_many_cancels(
    family: str, tmp_path: Path
) -> None:
    """A sequence is cancelled at random tokens of its prompt and its text, and leaves only blocks that are whole."""
    model = checkpoints.plain_model(family)
    path = checkpoints.write_gguf(model, family, tmp_path / "x.gguf")
    rig = Rig(ModelRunner.load(str(path), device="cpu", dtype="float32", progress=lambda *_: None))
    rng = random.Random(11)
    for _ in range(CANCELS):
        id_ = rig.submit(PROMPT)
        for _ in range(rng.randrange(NEW)):
            rig.core.step()
        rig.core.receive(rig.peer, Cancel([id_]))
    rig.run()
    assert rig.pool.used == 0
    told = {
        (name, salt): rig.submit(prompt, salt=salt)
        for name, prompt in PROMPTS.items()
        for salt in ("", f"nobody's before {name}")
    }
    rig.run()
    expected = {name: greedy_text(model, prompt) for name, prompt in PROMPTS.items()}
    assert {key: rig.tokens[id_] for key, id_ in told.items()} == {key: expected[key[0]] for key in told}
    for (_, salt), id_ in told.items():
        assert (rig.cached[id_] > 0) == (salt == "")
    assert rig.pool.used == 0
