"""Sequences with a grammar in the core: they wait for it aside, follow it, and end with it."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from engine.sequence import Sampled, Slice
from engine.wire import Cancel, Credit, End, Sampling, Submit
from tests.support.cores import Rig
from tests.support.engines import EOS, VOCAB, ChainRunner
from tests.support.serving import until


class FollowingRunner(ChainRunner):
    """Takes the lowest id that the grammar allows, the end token last."""

    def _answer(self, part: Slice) -> Sampled | None:
        constraint = part.sequence.constraint
        if constraint is None or part.sequence.id in self.answers:
            return super()._answer(part)
        (row,) = constraint.allowed([constraint])
        return Sampled(int(row.argmax()))


class GrammarRig(Rig):
    """Its grammars are prepared beside the steps, so `run` waits for them."""

    def __init__(self) -> None:
        super().__init__(FollowingRunner, blocks=32)

    def run(self, steps: int = 200) -> None:
        for _ in range(steps):
            until(lambda: self.core.has_work or not self.core.is_preparing, "its grammar")
            if not self.core.has_work:
                return
            self.core.step()
        raise AssertionError(f"still at work after {steps} steps")

    def text(self, id_: int = 1) -> bytes:
        return bytes(token for token in self.tokens(id_) if token < 256)


def submit(id_: int = 1, grammar: str = 'start: "abc"', generated: list[int] | None = None, **sampling: Any) -> Submit:
    numbers = Sampling(**({"max_tokens": 50, "grammar": grammar} | sampling))
    return Submit(id_, [1, 2, 3], numbers, 1000, generated or [])


def test_an_answer_ends_with_its_grammar() -> None:
    rig = GrammarRig()
    rig.send(submit(), submit(2, 'start: "de"'), submit(3, "", max_tokens=4))
    rig.run()
    assert (rig.text(1), rig.text(2), len(rig.text(3))) == (b"abc", b"de", 4)
    assert sorted(rig.ends, key=lambda end: end.id) == [End(1, "stop"), End(2, "stop"), End(3, "length")]
    rig.assert_idle()


def test_an_end_token_ends_it_where_the_grammar_may_end() -> None:
    rig = GrammarRig()
    rig.send(submit(grammar='start: "a" "b"?', generated=[ord("a")]))
    rig.runner.answers[1] = Sampled(EOS)
    rig.run()
    assert rig.ends == [End(1, "stop", by_token=True)]


def test_an_answer_that_max_tokens_cuts_is_a_prefix_and_one_that_is_whole_by_then_is_whole() -> None:
    rig = GrammarRig()
    rig.send(submit(max_tokens=2), submit(2, max_tokens=3))
    rig.run()
    assert (rig.text(1), rig.text(2)) == (b"ab", b"abc")
    assert sorted(rig.ends, key=lambda end: end.id) == [End(1, "length"), End(2, "stop")]


@pytest.mark.parametrize("known", range(4))
def test_another_engine_goes_on_behind_what_was_generated(known: int) -> None:
    rig = GrammarRig()
    rig.send(submit(generated=list(b"abc"[:known])))
    rig.run()
    assert rig.text() == b"abc"[known:]
    assert rig.ends == [End(1, "stop")]
    rig.assert_idle()


def test_parked_given_back_and_gone_on() -> None:
    rig = GrammarRig()
    rig.send(submit())
    until(lambda: rig.core.has_work and not any(not f.done() for f in rig.core._preparing.values()), "its grammar")
    rig.core.step()
    rig.send(Credit([(1, 0)]))
    rig.run()
    assert rig.pool.used == 0 and rig.text() == b"a"
    rig.send(Credit([(1, 100)]))
    rig.run()
    assert rig.text() == b"abc"
    rig.assert_idle()


@pytest.mark.parametrize(
    ("grammar", "generated", "word"),
    [("nonsense", [], "compiled"), ('start: "abc"', [ord("x")], "left"), ("start: %json false", [], "compiled")],
)
def test_a_bad_grammar_ends_its_own_sequence_only(grammar: str, generated: list[int], word: str) -> None:
    rig = GrammarRig()
    rig.send(submit(2, "", max_tokens=5), submit(1, grammar, generated))
    rig.run()
    (bad,) = [end for end in rig.ends if end.id == 1]
    assert bad.reason == "error" and word in bad.message
    assert len(rig.text(2)) == 5
    rig.assert_idle()


def test_a_choice_that_the_grammar_does_not_allow_is_an_error() -> None:
    rig = GrammarRig()
    rig.send(submit())
    rig.runner.answers[1] = Sampled(ord("x"))
    rig.run()
    assert rig.ends == [End(1, "error", message="the answer left its grammar")]


class Slow:
    """Holds every grammar back until `go`."""

    def __init__(self, rig: GrammarRig) -> None:
        rig.core.prepare_grammars()
        assert rig.core._grammars is not None
        self.gate = threading.Event()
        compile_now = rig.core._grammars._compile

        def wait(grammar: str) -> Any:
            self.gate.wait()
            return compile_now(grammar)

        rig.core._grammars._compile = wait  # type: ignore[method-assign]


def test_a_slow_grammar_holds_nobody_up() -> None:
    rig = GrammarRig()
    slow = Slow(rig)
    rig.send(submit(), submit(2, "", max_tokens=20))
    while rig.core.has_work:
        rig.core.step()
    assert len(rig.text(2)) == 20 and rig.text(1) == b""
    assert rig.core.is_preparing
    slow.gate.set()
    rig.run()
    assert rig.text(1) == b"abc"
    rig.assert_idle()


def test_what_comes_while_it_is_prepared() -> None:
    """Credit, a cancel, and the server's leaving."""
    rig = GrammarRig()
    slow = Slow(rig)
    rig.send(submit(1), submit(2), submit(3))
    rig.send(Credit([(1, 1), (3, 0)]), Cancel([2]))
    slow.gate.set()
    rig.run()
    assert (rig.text(1), rig.text(2), rig.text(3)) == (b"a", b"", b"")
    rig.send(Credit([(1, 9), (3, 9)]))
    rig.run()
    assert (rig.text(1), rig.text(3)) == (b"abc", b"abc")
    slow.gate.clear()
    rig.send(submit(4, 'start: "new"'))
    rig.core.leave(rig.peer)
    slow.gate.set()
    assert not rig.core.is_preparing
    assert not (rig.scheduler.running or rig.scheduler.waiting or rig.scheduler.parked)


def test_a_compiler_that_fails_ends_what_waits_for_it() -> None:
    rig = GrammarRig()
    rig.core.prepare_grammars()
    broken: Future[Any] = Future()
    broken.set_exception(RuntimeError("on purpose"))
    assert rig.core._grammars is not None
    rig.core._grammars.compile = lambda _: broken  # type: ignore[method-assign]
    rig.send(submit(), submit(2, "", max_tokens=2))
    rig.run()
    assert {end.id: end.reason for end in rig.ends} == {1: "error", 2: "length"}
    rig.assert_idle()


def test_the_vocabulary_is_as_wide_as_the_logits() -> None:
    rig = GrammarRig()
    rig.core.prepare_grammars()
    assert rig.core._grammars is not None
    constraint = rig.core._grammars.constraint(rig.core._grammars.compile('start: "a"').result(), [])
    assert constraint.allowed([constraint]).shape == (1, VOCAB)
