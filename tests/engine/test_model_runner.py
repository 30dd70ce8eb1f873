"""Greedy text equals transformers' on the same weights, alone or in company and however the prompt is cut."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from engine import cpu_ops
from engine.model_runner import ModelError, ModelRunner
from engine.wire import Sampling
from tests.support import checkpoints
from tests.support.stepping import Stepper

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY_TOKENS = 64
LOGIT_TOLERANCE = 1e-3

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Count from 1 to 20.",
    "Explain how a bicycle stays upright, in two sentences.",
    "Translate 'good morning' into Spanish.",
    "List three uses of a brick.",
    "Why is the sky blue?",
    "Write a Python function that reverses a string.",
    "Who wrote Romeo and Juliet?",
    "Tell me a short story about a fox. " * 12,
]
TEXTS = [
    "Once upon a time",
    "The quick brown fox",
    "def fibonacci(n):\n",
    "In 1969, the first humans",
    "Photosynthesis is the process by which",
    "E = mc^2 means that",
    "Dear Sir or Madam,\n\n",
    "日本の首都は",
    "1, 1, 2, 3, 5, 8,",
    "a",
]


def load(path: Path | str, **options: Any) -> ModelRunner:
    options = {"device": "cpu", "dtype": "float32", **options}
    return ModelRunner.load(str(path), progress=lambda *_: None, **options)


@pytest.fixture(scope="module")
def smollm2() -> ModelRunner:
    return load("smollm2-135m-instruct")


def chat(question: str) -> str:
    turns = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
    return f"{turns}<|im_start|>assistant\n"


@torch.inference_mode()
def reference_greedy(prompts: list[list[int]]) -> list[list[int]]:
    """What transformers generates, batched with padding on the left, through the first end token."""
    model = checkpoints.smollm2_reference()
    width = max(map(len, prompts))
    ids = torch.tensor([[2] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(ids, attention_mask=mask, max_new_tokens=GREEDY_TOKENS, do_sample=False)
    return [row[: row.index(2) + 1] if 2 in row else row for row in out[:, width:].tolist()]


def test_smollm2_equals_transformers_over_20_prompts(smollm2: ModelRunner) -> None:
    tokenizer = tokenizers.Tokenizer.from_str(smollm2.tokenizer.json)
    prompts = [tokenizer.encode(text).ids for text in [*map(chat, QUESTIONS), *TEXTS]]
    greedy = Sampling(max_tokens=GREEDY_TOKENS, temperature=0)
    ours = Stepper(smollm2, blocks=512).generate(prompts, greedy, chunk=100)
    assert ours == reference_greedy(prompts)


def test_smollm2_knows_the_capital_of_france(smollm2: ModelRunner) -> None:
    tokenizer = tokenizers.Tokenizer.from_str(smollm2.tokenizer.json)
    prompt = tokenizer.encode(chat("What is the capital of France?")).ids
    (ids,) = Stepper(smollm2).generate([prompt], Sampling(max_tokens=20, temperature=0))
    assert tokenizer.decode(ids, skip_special_tokens=False) == "The capital of France is Paris.<|im_end|>"


def test_what_the_core_is_told_of_smollm2(smollm2: ModelRunner) -> None:
    assert smollm2.name == "smollm2-135m-instruct"
    assert (smollm2.vocab_size, smollm2.context_tokens_max, smollm2.eos_ids) == (49152, 8192, [2])
    assert smollm2.block_bytes(16) == 2 * 30 * 3 * 64 * 16 * 4


@pytest.fixture(scope="module", params=[True, False], ids=["native", "torch"])
def native(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module", params=sorted(checkpoints.FAMILIES))
def small(request: pytest.FixtureRequest, native: bool, tmp_path_factory: pytest.TempPathFactory) -> Small:
    family: str = request.param
    model = checkpoints.small_model(family)
    path = checkpoints.save(model, tmp_path_factory.mktemp(family))
    return Small(model, Stepper(load(path, native=native)))


class Small:
    """A small checkpoint in transformers and in the engine, and prompts for it."""

    def __init__(self, model: torch.nn.Module, stepper: Stepper) -> None:
        self.model = model
        self.stepper = stepper
        rng = random.Random(7)
        self.prompts = [[rng.randrange(256) for _ in range(rng.randrange(1, 70))] for _ in range(32)]

    @torch.inference_mode()
    def reference_logprobs(self, ids: list[int], start: int) -> torch.Tensor:
        """Log probabilities after each of ids[start:], from one pass over all ids."""
        return self.model(torch.tensor([ids])).logits[0, start:].log_softmax(-1)


WHOLE = Sampling(max_tokens=12, temperature=0, logprobs=checkpoints.VOCAB_SIZE)


def test_logits_equal_transformers(small: Small) -> None:
    """Checked at every generated position, in a batch of 32 mixed lengths and over a poisoned cache."""
    small.stepper.poison()
    sequences = [small.stepper.sequence(prompt, WHOLE) for prompt in small.prompts]
    for sequence, answers in zip(sequences, small.stepper.run(sequences, stop_at_eos=False), strict=True):
        expected = small.reference_logprobs(sequence.tokens[:-1], sequence.prompt_len - 1)
        for row, answer in zip(expected, answers, strict=True):
            assert answer.logprob is not None
            ours = torch.empty(checkpoints.VOCAB_SIZE)
            ours[answer.logprob.top_ids] = torch.tensor(answer.logprob.top_logprobs)
            torch.testing.assert_close(ours, row, atol=LOGIT_TOLERANCE, rtol=0)
            assert answer.token == int(row.argmax())


def test_prompt_logprobs_equal_transformers(small: Small) -> None:
    """Whatever the chunks, and beside sequences that want none."""
    count = 5
    for chunk in (10**9, 7):
        sequences = [
            small.stepper.sequence(prompt, Sampling(2, temperature=0, prompt_logprobs=count if index % 3 else -1))
            for index, prompt in enumerate(small.prompts)
        ]
        told = [each for index, each in enumerate(sequences) if index % 3]
        steps = small.stepper.run(sequences, chunk=chunk, stop_at_eos=False)
        assert all(not answer.error for answers in steps for answer in answers)
        for sequence in told:
            prompt = sequence.tokens[: sequence.prompt_len]
            reference = small.reference_logprobs(prompt, 0)[:-1]
            assert [each.index for each in sequence.prompt_logprobs] == list(range(1, len(prompt)))
            for row, each in zip(reference, sequence.prompt_logprobs, strict=True):
                assert each.logprob == pytest.approx(float(row[prompt[each.index]]), abs=LOGIT_TOLERANCE)
                best = row.topk(count).values.tolist()
                assert each.top_logprobs == pytest.approx(best, abs=LOGIT_TOLERANCE)
                assert row[each.top_ids].tolist() == pytest.approx(best, abs=LOGIT_TOLERANCE)


def test_text_is_the_same_alone_in_company_and_in_chunks(small: Small) -> None:
    greedy = Sampling(max_tokens=24, temperature=0)
    alone = [small.stepper.generate([prompt], greedy)[0] for prompt in small.prompts]
    assert len({tuple(ids) for ids in alone}) > 16  # the prompts matter
    for chunk in (1, 7, 64):
        small.stepper.poison()
        assert small.stepper.generate(small.prompts, greedy, chunk=chunk) == alone


def test_sampled_text_is_the_same_alone_and_in_company(small: Small) -> None:
    sampling = Sampling(max_tokens=24, temperature=0.9, top_p=0.9, seed=5)
    alone = [small.stepper.generate([prompt], sampling)[0] for prompt in small.prompts]
    assert small.stepper.generate(small.prompts, sampling, chunk=7) == alone


def test_block_size_does_not_matter(small: Small) -> None:
    greedy = Sampling(max_tokens=24, temperature=0)
    expected = small.stepper.generate(small.prompts, greedy)
    other = Stepper(small.stepper.runner, blocks=2000, block_size=5)
    other.poison()
    assert other.generate(small.prompts, greedy) == expected
    small.stepper = Stepper(small.stepper.runner)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_follows_float32(tmp_path: Path, dtype: str, native: bool) -> None:
    path = checkpoints.save(checkpoints.small_model("llama"), tmp_path)
    prompt = list(b"The capital of France")
    answers = {}
    for each in ("float32", dtype):
        stepper = Stepper(load(path, dtype=each, native=native))
        (answers[each],) = stepper.run([stepper.sequence(prompt, Sampling(1, temperature=0, logprobs=5))])[0]
    assert answers[dtype].token == answers["float32"].token
    assert answers[dtype].logprob.logprob == pytest.approx(answers["float32"].logprob.logprob, abs=0.1)


def test_a_broken_row_ends_alone(tmp_path: Path, native: bool) -> None:
    model = checkpoints.small_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[13] = torch.nan
    stepper = Stepper(load(checkpoints.save(model, tmp_path), native=native))
    greedy = Sampling(max_tokens=8, temperature=0)
    good, bad = stepper.sequence([1, 2, 3], greedy), stepper.sequence([1, 13, 3], greedy)
    (good_answers, bad_answers) = stepper.run([good, bad])
    assert len(bad_answers) == 1
    assert "no finite number" in bad_answers[0].error
    assert len(good_answers) > 1
    assert not any(answer.error for answer in good_answers)
    # The blocks that the broken one leaves are full of NaN; whoever gets them next must not notice.
    assert stepper.generate([[1, 2, 3]] * 8, greedy) == [[answer.token for answer in good_answers]] * 8


def test_a_step_without_samples_answers_nothing(tmp_path: Path) -> None:
    stepper = Stepper(load(checkpoints.save(checkpoints.small_model("qwen3"), tmp_path)))
    sequence = stepper.sequence(list(range(10)), Sampling(max_tokens=1))
    assert stepper.runner.execute([stepper._slice(sequence, 4)]) == []


def test_names_and_ends_of_a_directory(tmp_path: Path) -> None:
    path = checkpoints.save(checkpoints.small_model("qwen2"), tmp_path / "my-model")
    runner = load(f"{path}/")
    assert runner.name == "my-model"
    assert runner.eos_ids == [checkpoints.EOS_ID]
    assert runner.context_tokens_max == 256


def test_what_computes_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoints.save(checkpoints.small_model("llama"), tmp_path)
    assert load(path).operators.startswith("computing with C++ operators (")
    why = "computing in torch alone, which is slower: "
    assert load(path, native=False).operators == f"{why}C++ operators are switched off"
    assert load(path, dtype="float16").operators == f"{why}there are no C++ operators for float16 and heads of 16"

    def nothing(*_: object) -> cpu_ops.Library:
        raise cpu_ops.Unavailable("there is no C++ compiler")

    monkeypatch.setattr(cpu_ops, "load", nothing)
    runner = load(path)
    assert runner.operators == f"{why}there is no C++ compiler"
    assert Stepper(runner).generate([[1, 2, 3]], Sampling(max_tokens=2, temperature=0))


def test_progress_reaches_its_total(tmp_path: Path) -> None:
    path = checkpoints.save(checkpoints.small_model("llama"), tmp_path)
    seen: list[tuple[str, int, int]] = []
    ModelRunner.load(str(path), device="auto", dtype="auto", progress=lambda *each: seen.append(each))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1] == seen[-1][2] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [({"device": "cuda"}, "device 'cuda' is not available"), ({"dtype": "int3"}, "dtype 'int3' is not known")],
)
def test_what_is_not_there_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load("smollm2-135m-instruct", **options)


def test_a_pool_that_no_machine_holds_is_refused(tmp_path: Path) -> None:
    runner = load(checkpoints.save(checkpoints.small_model("llama"), tmp_path))
    with pytest.raises(ModelError, match="GiB of memory; ask for fewer"):
        runner.allocate(2**45, 16)
