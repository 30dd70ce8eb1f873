"""A model that knows nothing of JSON, held to grammars: many schemas and seeds in one batch."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import jsonschema
import pytest

from engine.block_pool import BlockPool
from engine.constraints import Grammars
from engine.core import Core
from engine.model_runner import ModelRunner
from engine.scheduler import Scheduler
from engine.tokenizer import Tokenizer
from engine.wire import End, Sampling, Step, Submit
from server.tools.grammars import json_grammar
from tests.support import checkpoints
from tests.support.schemas import SCHEMAS
from tests.support.serving import until

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCKS, BLOCK = 64, 16  # a quarter of what all need at once: they lose their blocks to each other
SEEDS = 4
TOKENS_MAX = 160
# Random weights close a string in one of 256 cases; so that most answers end, what closes is more likely.
CLOSING = tuple((byte, 6.0) for byte in b'"}]')


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    path: Path = checkpoints.save(checkpoints.small_model("llama"), tmp_path_factory.mktemp("model"))
    return ModelRunner.load(str(path), device="cpu", dtype="float32", progress=lambda *_: None)


def test_answers_that_end_are_valid_and_those_that_are_cut_could_have_been(runner: ModelRunner) -> None:
    runner.allocate(BLOCKS, BLOCK)
    scheduler = Scheduler(BlockPool(BLOCKS, BLOCK), step_tokens_max=200, running_max=24)
    core = Core(runner, scheduler.pool, scheduler, version="test")
    made: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, End] = {}

    def take(step: Step) -> None:
        for id_, token in zip(step.ids, step.tokens, strict=True):
            made[id_].append(token)
        for end in step.ends:
            ends[end.id] = end

    peer = core.join(take)
    asked = [(schema, seed) for schema in SCHEMAS.values() for seed in range(SEEDS)]
    for id_, (schema, seed) in enumerate(asked):
        sampling = Sampling(TOKENS_MAX, seed=seed, logit_bias=CLOSING, grammar=json_grammar(schema))
        core.receive(peer, Submit(id_, [1 + id_, 2, 3], sampling, TOKENS_MAX))
    until(lambda: all(compiled.done() for compiled in core._preparing.values()), "all grammars are compiled")
    while len(ends) < len(asked):
        core.step()
    assert scheduler.preemptions

    tokenizer = Tokenizer(runner.tokenizer)
    grammars = Grammars(runner.tokenizer, runner.vocab_size, runner.eos_ids)
    whole = 0
    for id_, (schema, _) in enumerate(asked):
        ids, end = made[id_], ends[id_]
        assert not end.message
        if end.reason == "stop":
            whole += 1
            text = tokenizer.decode(ids[:-1] if end.by_token else ids)
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
        else:
            assert (end.reason, len(ids)) == ("length", TOKENS_MAX)
            cut = grammars.constraint(grammars.compile(json_grammar(schema)).result(), ids)
            assert not cut.ended
    assert whole > 0.7 * len(asked)
