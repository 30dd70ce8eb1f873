"""Nothing that happens to a sequence changes its text: not preemption, not parking, not company, not chunks, not
another engine. With the C++ operators that is so in every type (DESIGN section 1 asks for float32). A real model, in
pools so small that every sequence loses its blocks many times, and with chunks as uneven as steps are long.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engine.block_pool import BlockPool
from engine.core import Core
from engine.model_runner import ModelRunner
from engine.scheduler import Scheduler
from engine.sequence import Slice
from engine.wire import Credit, Sampling, Step, Submit
from tests.support import checkpoints
from tests.support.serving import until

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = 8
PROMPT, NEW = 40, 40
LARGE_POOL = 512
SMALL_POOL = 12  # one sequence at its end takes 10
LIMIT_S = 0.1
LONG_PROMPTS = (213, 190, 201, 177, 215)
TURN = 6  # steps, in which everybody is put out once

SAMPLINGS = {
    "greedy": Sampling(NEW, temperature=0),
    "seeded": Sampling(NEW, temperature=0.9, top_p=0.95, top_k=40, seed=5),
    "greedy, penalties": Sampling(
        NEW, temperature=0, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=-0.4
    ),
    "seeded, all": Sampling(
        NEW,
        temperature=1.2,
        min_p=0.01,
        seed=2**64 - 1,
        repetition_penalty=1.1,
        presence_penalty=1.5,
        min_tokens=9,
        logit_bias=((65, 3.0), (66, -100.0)),
    ),
    "seeded, a grammar": Sampling(NEW, temperature=1.0, seed=8, grammar="start: /([a-z]{3} |[0-9]+\\n){100}/"),
}


MODELS = [
    *("llama float32", "mistral float32", "mistral bfloat16", "llama int8"),
    *("llama gguf Q4_1", "llama gguf Q4_0", "qwen3 gguf Q8_0"),
]


@pytest.fixture(scope="module", params=MODELS)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    family, dtype, *quantised = request.param.split()
    folder: Path = tmp_path_factory.mktemp("model")
    if quantised:
        model = checkpoints.plain_model(family)
        path = checkpoints.write_gguf(model, family, folder / "model.gguf", quantised=quantised[0])
    else:
        path = checkpoints.save(checkpoints.small_model(family), folder)
    return ModelRunner.load(str(path), device="cpu", dtype=dtype, progress=lambda *_: None)


class Rig:
    """A core over a pool, and the ids that it made for each sequence."""

    def __init__(
        self, runner: ModelRunner, *, blocks: int, budget: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """By the clock, chunks beside decodes are cut so that a step takes no more than LIMIT_S."""
        runner.allocate(blocks, BLOCK)
        pool = BlockPool(blocks, BLOCK)
        self.scheduler = Scheduler(pool, step_tokens_max=budget, running_max=8, beside_s=LIMIT_S)
        self.core = Core(runner, pool, self.scheduler, version="test", clock=clock)
        self.tokens: dict[int, list[int]] = {}
        self.losses: Counter[int] = Counter()  # how often each lost what was computed of it
        self._peer = self.core.join(self._take)

    def _take(self, step: Step) -> None:
        for id_, token in zip(step.ids, step.tokens, strict=True):
            self.tokens[id_].append(token)
        assert not [end for end in step.ends if end.reason == "error"]

    def submit(self, message: Submit) -> None:
        self.tokens[message.id] = []
        self.core.receive(self._peer, message)

    def run(self, *, disturb: bool = False) -> None:
        """To the end of all; when disturbed, one after the other loses its reader, and finds it again a step later."""
        away: list[int] = []
        for number in range(5000):
            self.core.receive(self._peer, Credit([(id_, NEW) for id_ in away]))
            live = list(self._peer.sequences.values())
            if not live:
                return
            until(lambda: self.core.has_work or not self.core.is_preparing, "the grammars")
            before = {each: each.computed for each in live}
            if disturb:
                away = [each.id for each in live if each.id % TURN == number % TURN and each.generated < NEW]
                self.core.receive(self._peer, Credit([(id_, 0) for id_ in away]))
            self.core.step()
            self.losses.update(each.id for each in live if each.computed < before[each])
        raise AssertionError("no end")


def submissions() -> list[Submit]:
    """Two choices of each prompt, prompts that begin alike, each with every kind of sampling."""
    rng = random.Random(3)
    head = [rng.randrange(256) for _ in range(20)]
    messages = []
    for prompt_index in range(2):
        prompt = head + [rng.randrange(256) for _ in range(PROMPT - len(head))]
        for sampling in SAMPLINGS.values():
            for choice in range(2):
                indexed = msgspec.structs.replace(
                    sampling, prompt_index=prompt_index, choice_index=choice, ignore_eos=True
                )
                messages.append(Submit(len(messages), prompt, indexed, NEW))
    return messages


def undisturbed(runner: ModelRunner) -> list[list[int]]:
    """Each alone, in one piece, with nothing in the cache."""
    texts = []
    for message in submissions():
        rig = Rig(runner, blocks=LARGE_POOL, budget=1000)
        rig.submit(message)
        rig.run()
        texts.append(rig.tokens[message.id])
    return texts


def test_sequences_that_lose_their_blocks_many_times_say_what_they_would_alone(runner: ModelRunner) -> None:
    expected = undisturbed(runner)
    assert all(len(ids) == NEW for ids in expected)
    assert len({tuple(ids) for ids in expected}) >= 10  # the choices, prompts and samplings matter
    rig = Rig(runner, blocks=SMALL_POOL, budget=50)
    for message in submissions():
        rig.submit(message)
    rig.run(disturb=True)
    assert [rig.tokens[id_] for id_ in range(len(expected))] == expected
    assert rig.scheduler.preemptions > 5
    assert min(rig.losses[id_] for id_ in range(len(expected))) >= 10


def test_another_engine_goes_on_from_any_token(runner: ModelRunner) -> None:
    for message in submissions()[2::3]:
        alone = Rig(runner, blocks=LARGE_POOL, budget=1000)
        alone.submit(message)
        alone.run()
        whole = alone.tokens[message.id]
        rig = Rig(runner, blocks=LARGE_POOL, budget=50)
        for made in range(0, NEW, 7):
            rig.submit(Submit(made, message.prompt, message.sampling, NEW, whole[:made]))
        rig.run()
        assert [rig.tokens[made] for made in range(0, NEW, 7)] == [whole[made:] for made in range(0, NEW, 7)]


def test_prompts_that_are_cut_beside_decodes_say_what_they_would_alone(runner: ModelRunner) -> None:
    """Steps seem to take any time from a tenth of the limit to ten times it, so no two prompts are cut alike."""
    draw = random.Random(11)
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += LIMIT_S * 10 ** draw.uniform(-1, 1)
        return now

    samplings = [SAMPLINGS["greedy"], SAMPLINGS["seeded"], SAMPLINGS["seeded, all"]]
    lengths = [8, 8, *LONG_PROMPTS]
    messages = [
        Submit(number, [draw.randrange(256) for _ in range(length)], samplings[number % len(samplings)], NEW)
        for number, length in enumerate(lengths)
    ]
    expected = []
    for message in messages:
        alone = Rig(runner, blocks=LARGE_POOL, budget=1000)
        alone.submit(message)
        alone.run()
        expected.append(alone.tokens[message.id])
    rig = Rig(runner, blocks=LARGE_POOL, budget=256, clock=clock)
    chunks: list[int] = []
    schedule = rig.scheduler.schedule

    def scheduled() -> list[Slice]:
        slices = schedule()
        if any(part.count == 1 for part in slices):
            chunks.extend(part.count for part in slices if part.count > 1)
        return slices

    rig.scheduler.schedule = scheduled  # type: ignore[method-assign]
    for message in messages:
        rig.submit(message)
        rig.core.step()  # each prompt comes while those before it are under way
    rig.run()
    assert [rig.tokens[message.id] for message in messages] == expected
    assert len(set(chunks)) >= 5, chunks
