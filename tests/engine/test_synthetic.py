"""The synthetic token source: the same tokens for the same request, and scripts played to the letter."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine import synthetic
from engine.sequence import Sampled, Sequence, Slice
from engine.synthetic import IM_END, SCRIPT_TOKENS_MAX, WORD_BASE, WORDS, ScriptError, SyntheticRunner
from engine.wire import Sampling
from tests.support.clock import Clock

Play = Callable[..., SyntheticRunner]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Sleeping moves this clock and takes no time."""
    clock = Clock()
    monkeypatch.setattr(synthetic, "time", SimpleNamespace(monotonic=clock, sleep=clock.advance))
    return clock


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """A runner with a script."""

    def make(tokens: list[Any], *, step_ms: float = 0.0, **fields: Any) -> SyntheticRunner:
        return make_scripts([{"tokens": tokens, **fields}], step_ms=step_ms)

    def make_scripts(scripts: list[dict[str, Any]], *, step_ms: float = 0.0) -> SyntheticRunner:
        path = tmp_path / "script.json"
        path.write_text(json.dumps({"scripts": scripts}))
        return SyntheticRunner(step_ms=step_ms, script=str(path))

    make.scripts = make_scripts  # type: ignore[attr-defined]
    return make


def sequence(prompt: str = "hello", generated: list[int] | None = None, **sampling: Any) -> Sequence:
    ids = list(prompt.encode())
    return Sequence(1, ids + (generated or []), len(ids), Sampling(max_tokens=100, **sampling), credit=100)


def step(runner: SyntheticRunner, *sequences: Sequence) -> list[Sampled | None]:
    """One step for all; the tokens are appended as the core does it."""
    answers = runner.execute([Slice(s, len(s.tokens) - 1, 1, True) for s in sequences])
    for each, answer in zip(sequences, answers, strict=True):
        if answer is not None and not answer.error:
            each.tokens.append(answer.token)
    return answers


def text(runner: SyntheticRunner, each: Sequence) -> bytes:
    return b"".join(runner.tokenizer.token_bytes[token] for token in each.tokens[each.prompt_len :])


def run(runner: SyntheticRunner, each: Sequence, steps: int = 50) -> list[Sampled | None]:
    answers: list[Sampled | None] = []
    for _ in range(steps):
        answers += step(runner, each)
        if answers[-1] is not None and (answers[-1].finish or answers[-1].error):
            break
    return answers


# Without a script


def test_tokens_are_words_that_count_up_so_that_a_gap_or_a_repeat_shows() -> None:
    runner, each = SyntheticRunner(), sequence()
    run(runner, each)
    generated = each.tokens[each.prompt_len :]
    assert all(WORD_BASE <= token < WORD_BASE + WORDS for token in generated)
    assert all((b - a) % WORDS == 1 for a, b in pairwise(generated))
    assert len(text(runner, each)) == 5 * 50


def test_the_same_request_has_the_same_tokens_in_any_process_and_others_differ() -> None:
    def start(**changes: Any) -> int:
        each = sequence(changes.pop("prompt", "hello"), **changes)
        step(SyntheticRunner(), each)
        return each.tokens[-1]

    assert start() == start()
    different = [start(), start(prompt="hellp"), start(seed=1), start(prompt_index=1), start(choice_index=1)]
    assert len(set(different)) == len(different)


def test_a_sequence_goes_on_behind_what_an_earlier_engine_made() -> None:
    whole = sequence()
    run(SyntheticRunner(), whole)
    generated = whole.tokens[whole.prompt_len :]
    resumed = sequence(generated=generated[:20])
    run(SyntheticRunner(), resumed, steps=30)
    assert resumed.tokens == whole.tokens


def test_only_slices_that_sample_are_answered() -> None:
    each = sequence()
    assert SyntheticRunner().execute([Slice(each, 0, 2, False)]) == []


@pytest.mark.parametrize("top", [0, 3])
def test_log_probabilities_are_made_up_but_shaped_as_the_models(top: int) -> None:
    (answer,) = step(SyntheticRunner(), sequence(logprobs=top))
    assert answer is not None
    assert answer.logprob is not None
    assert answer.logprob.top_ids[:1] == [answer.token][:top]
    assert len(answer.logprob.top_ids) == len(answer.logprob.top_logprobs) == top
    assert answer.logprob.top_logprobs == sorted(answer.logprob.top_logprobs, reverse=True)


def test_no_log_probabilities_unless_asked() -> None:
    (answer,) = step(SyntheticRunner(), sequence())
    assert answer is not None
    assert answer.logprob is None


def test_steps_keep_their_pace(clock: Clock) -> None:
    runner, each = SyntheticRunner(step_ms=20), sequence()
    times = []
    for _ in range(4):
        step(runner, each)
        times.append(clock.now)
    assert [round(b - a, 6) for a, b in pairwise(times)] == [0.02, 0.02, 0.02]


def test_a_late_step_does_not_make_the_next_ones_hurry(clock: Clock) -> None:
    runner, each = SyntheticRunner(step_ms=20), sequence()
    step(runner, each)
    clock.advance(5)
    step(runner, each)
    before = clock.now
    step(runner, each)
    assert clock.now - before == pytest.approx(0.02)


# Scripts


def test_items_are_played_in_order_and_end_by_an_end_token(play: Play) -> None:
    runner = play(["Hello", {"hex": "f09f98"}, {"hex": "80"}, {"special": "<|im_start|>"}, {"repeat": "x", "times": 3}])
    each = sequence()
    answers = run(runner, each)
    assert text(runner, each) == b"Hello\xf0\x9f\x98\x80<|im_start|>xxx<|im_end|>"
    assert len(answers) == 8
    assert answers[-1] == Sampled(IM_END, finish="stop", by_token=True)
    assert all(answer is not None and not answer.finish for answer in answers[:-1])


@pytest.mark.parametrize("finish", ["length", "tool_calls"])
def test_other_finishes_come_with_the_last_token(play: Play, finish: str) -> None:
    runner = play(["a", "b"], finish=finish)
    answers = run(runner, sequence())
    assert [(a.finish, a.by_token) for a in answers if a] == [("", False), (finish, False)]


def test_an_empty_script_ends_at_once(play: Play) -> None:
    assert run(play([]), sequence()) == [Sampled(IM_END, finish="stop", by_token=True)]


def test_the_first_script_that_matches_the_prompt_is_played(play: Play) -> None:
    scripts = [{"match": "cat", "tokens": ["miaow"]}, {"match": "dog", "tokens": ["woof"]}, {"tokens": ["else"]}]
    runner = play.scripts(scripts)  # type: ignore[attr-defined]
    for prompt, answer in {"a cat": b"miaow", "a dog": b"woof", "a cat and a dog": b"miaow", "": b"else"}.items():
        each = sequence(prompt or " ")
        run(runner, each)
        assert text(runner, each) == answer + b"<|im_end|>"


def test_without_a_match_words_are_made(play: Play) -> None:
    each = sequence()
    (answer,) = step(play(["x"], match="nothing like it"), each)
    assert answer is not None
    assert WORD_BASE <= answer.token < WORD_BASE + WORDS


def test_equal_pieces_share_an_id_and_the_vocabulary_holds_them(play: Play) -> None:
    runner = play(["Hello", "Hello", "A", {"hex": "41"}])
    each = sequence()
    run(runner, each)
    first, second, third, fourth, _ = each.tokens[each.prompt_len :]
    assert first == second == WORD_BASE + WORDS
    assert third == fourth == WORD_BASE + WORDS + 1
    assert runner.vocab_size == len(runner.tokenizer.token_bytes) == WORD_BASE + WORDS + 2


def test_a_pause_holds_its_own_sequence_only(play: Play, clock: Clock) -> None:
    runner = play.scripts([{"match": "slow", "tokens": ["a", {"pause_ms": 500}, "b"]}])  # type: ignore[attr-defined]
    slow, quick = sequence("slow"), sequence("quick")
    step(runner, slow, quick)
    for _ in range(3):
        paused, other = step(runner, slow, quick)
        assert paused is None
        assert other is not None
    clock.advance(0.5)
    step(runner, slow, quick)
    assert text(runner, slow) == b"ab"


def test_when_every_sequence_pauses_the_engine_does_not_spin(play: Play, clock: Clock) -> None:
    runner, each = play([{"pause_ms": 500}, "b"]), sequence()
    before = clock.now
    assert step(runner, each) == [None]
    assert clock.now > before


def test_a_prefill_takes_its_time_once(play: Play, clock: Clock) -> None:
    runner = play(["a"], prefill_ms=2000)
    each = sequence()
    assert step(runner, each) == [None]
    clock.advance(2)
    step(runner, each)
    assert text(runner, each) == b"a"


def test_a_hang_stops_the_whole_engine(play: Play, clock: Clock) -> None:
    runner, each = play([{"hang_ms": 3000}, "a"]), sequence()
    step(runner, each)
    assert clock.now == 3.0
    assert text(runner, each) == b"a"


def test_an_error_ends_the_sequence_and_a_raise_the_step(play: Play) -> None:
    answers = run(play(["a", {"error": "it broke"}]), sequence())
    assert answers[-1] == Sampled(0, error="it broke")
    with pytest.raises(RuntimeError, match="the model failed"):
        run(play(["a", {"raise": "the model failed"}]), sequence())


def test_die_ends_the_process_at_once(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    def died(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", died)
    runner, each = play(["a", {"die": True}]), sequence()
    with pytest.raises(SystemExit) as exit_:
        run(runner, each)
    assert exit_.value.code
    assert text(runner, each) == b"a"


@pytest.mark.parametrize("made", range(6))
def test_another_engine_goes_on_behind_the_tokens_made_and_the_fault_that_followed(play: Play, made: int) -> None:
    """A script that kills its engine at some token is gone through at the second try."""
    items = ["a", "b", {"pause_ms": 1}, {"die": True}, "c", "d", "e"]
    script = [ord(char) for char in "abcde"]
    runner = play(items if made >= 2 else [item for item in items if isinstance(item, str)])
    each = sequence(generated=script[:made])
    run(runner, each)
    assert text(runner, each) == b"abcde<|im_end|>"


def test_another_engine_plays_an_error_that_was_not_played(play: Play) -> None:
    """An error ends its sequence: one that goes on has not come to it."""
    each = sequence(generated=[ord("a")])
    assert run(play(["a", {"pause_ms": 1}, {"error": "it broke"}]), each)[-1] == Sampled(0, error="it broke")


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ("", "is no JSON"),
        ("[]", "is no script"),
        ("{}", "scripts"),
        ('{"scripts": [{}]}', "tokens"),
        ('{"scripts": [{"tokens": 1}]}', "is no script"),
        ('{"scripts": [{"tokens": [], "speed": 1}]}', "no field 'speed'"),
        ('{"scripts": [{"tokens": [], "finish": "error"}]}', "finish is"),
        ('{"scripts": [{"tokens": [{}]}]}', "neither a token nor a fault"),
        ('{"scripts": [{"tokens": [{"hex": "zz"}]}]}', "is no script"),
        ('{"scripts": [{"tokens": [{"special": "<|eot|>"}]}]}', "is no script"),
        ('{"scripts": [{"tokens": [{"repeat": "x", "times": 2000000}]}]}', f"at most {SCRIPT_TOKENS_MAX}"),
        ('{"scripts": [{"tokens": [1]}]}', "is no script"),
    ],
)
def test_a_script_of_another_form_is_refused_by_name(tmp_path: Path, document: str, sentence: str) -> None:
    path = tmp_path / "script.json"
    path.write_text(document)
    with pytest.raises(ScriptError, match=sentence):
        SyntheticRunner(script=str(path))


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"--synthetic-script: .*nowhere\.json: No such file"):
        SyntheticRunner(script=str(tmp_path / "nowhere.json"))
