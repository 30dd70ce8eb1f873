"""Models by the C++ operators, in each type of weights: near float32, and what is kept in memory is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine import cpu_ops
from engine.model_runner import ModelError, ModelRunner
from engine.wire import Sampling
from tests.support import checkpoints
from tests.support.stepping import Stepper

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = list(b"The capital of France")


def load(path: Path, dtype: str, **options: bool) -> ModelRunner:
    return ModelRunner.load(str(path), device="cpu", dtype=dtype, progress=lambda *_: None, **options)


def told(runner: ModelRunner, chunk: int = 10**9) -> torch.Tensor:
    """Log probabilities of the prompt's ids."""
    stepper = Stepper(runner)
    sequence = stepper.sequence(PROMPT, Sampling(1, temperature=0, prompt_logprobs=0, logprobs=0))
    ((answer,),) = stepper.run([sequence], chunk=chunk)
    assert answer.logprob is not None
    return torch.tensor([each.logprob for each in sequence.prompt_logprobs])


@pytest.mark.parametrize("family", sorted(checkpoints.FAMILIES))
@pytest.mark.parametrize(("dtype", "distance"), [("bfloat16", 0.1), ("int8", 0.3)])
def test_follows_float32(tmp_path: Path, family: str, dtype: str, distance: float) -> None:
    path = checkpoints.save(checkpoints.small_model(family), tmp_path)
    expected = told(load(path, "float32"))
    assert (told(load(path, dtype)) - expected).abs().mean() < distance


@pytest.mark.parametrize("family", sorted(checkpoints.FAMILIES))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_same_to_the_bit_however_a_prompt_is_cut(tmp_path: Path, family: str, dtype: str) -> None:
    runner = load(checkpoints.save(checkpoints.small_model(family), tmp_path), dtype)
    whole = told(runner)
    for chunk in (1, 2, 5):
        assert torch.equal(told(runner, chunk), whole)


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # the rows of one are reordered, the table of the other is tied
@pytest.mark.parametrize("form", ["Q8_0", "Q4_0", "Q4_1"])
def test_a_quantised_file_follows_its_own_numbers(tmp_path: Path, family: str, form: str) -> None:
    path = checkpoints.write_gguf(checkpoints.small_model(family), family, tmp_path / "m.gguf", quantised=form)
    expected = told(load(path, "float32"))
    runner = load(path, "gguf")
    whole = told(runner)
    assert (whole - expected).abs().mean() < 0.2
    assert torch.equal(told(runner, 1), whole)
    assert f"{form.lower()} " in runner.operators
    assert "bfloat16 " in runner.operators  # rows of 112 hold no whole blocks


def test_a_file_of_other_types_is_bfloat16(tmp_path: Path) -> None:
    path = checkpoints.write_gguf(checkpoints.small_model("llama"), "llama", tmp_path / "m.gguf")
    runner = load(path, "gguf")
    assert "weights: bfloat16" in runner.operators
    assert torch.equal(told(runner), told(load(path, "bfloat16")))


def test_what_nobody_has_to_ask_for(tmp_path: Path) -> None:
    model = checkpoints.small_model("llama")
    gguf = checkpoints.write_gguf(model, "llama", tmp_path / "m.gguf")
    directory = checkpoints.save(model, tmp_path / "directory")
    assert "weights: bfloat16" in load(gguf, "auto").operators
    assert "weights: float32" in load(directory, "auto").operators


def test_scales_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    model = checkpoints.small_model("llama")
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 40] = 1e8  # its scale is beyond float16
    with np.errstate(over="ignore"):
        path = checkpoints.write_gguf(model, "llama", tmp_path / "m.gguf", quantised="Q8_0")
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight has scales that are not finite"):
        load(path, "gguf")


def test_what_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoints.save(checkpoints.small_model("llama"), tmp_path)
    with pytest.raises(ModelError, match=r"dtype gguf needs a \.gguf file"):
        load(path, "gguf")
    with pytest.raises(
        ModelError, match="dtype int8 needs the C\\+\\+ operators, but C\\+\\+ operators are switched off"
    ):
        load(path, "int8", native=False)

    def nothing(*_: object) -> cpu_ops.Library:
        raise cpu_ops.Unavailable("there is no C++ compiler")

    monkeypatch.setattr(cpu_ops, "load", nothing)
    with pytest.raises(ModelError, match="but there is no C\\+\\+ compiler; use bfloat16 or float32"):
        load(path, "int8")
