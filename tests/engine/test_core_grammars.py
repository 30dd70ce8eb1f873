"""Sequences with a grammar in the core: they wait for it aside, follow it, and end with it."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from engine.block_pool import BlockPool
from engine.core import Core
from engine.scheduler import Scheduler
from engine.sequence import Sampled, Slice
from engine.wire import Cancel, Credit, Sampling, Step, Submit
from tests.support.engines import EOS, VOCAB, ChainRunner
from tests.support.serving import until

BLOCK = 4


class FollowingRunner(ChainRunner):
    """Takes the lowest id that the grammar allows, the end token last."""

    def _answer(self, part: Slice) -> Sampled | None:
        constraint = part.sequence.constraint
        if constraint is None or part.sequence.id in self.answers:
            return super()._answer(part)
        (row,) = constraint.allowed([constraint])
        return Sampled(int(row.argmax()))


class Rig:
    def __init__(self) -> None:
        self.pool = BlockPool(32, BLOCK)
        self.scheduler = Scheduler(self.pool, step_tokens_max=64, running_max=8)
        self.runner = FollowingRunner(32, BLOCK, eos_ids=(EOS,))
        self.core = Core(self.runner, self.pool, self.scheduler, version="test")
        self.steps: list[Step] = []
        self.peer = self.core.join(self.steps.append)

    def send(self, *messages: Any) -> None:
        for message in messages:
            self.core.receive(self.peer, message)

    def run(self, steps: int = 200) -> None:
        """Until there is nothing more to do."""
        for _ in range(steps):
            until(lambda: self.core.has_work or not self.core.is_preparing, "its grammar")
            if not self.core.has_work:
                return
            self.core.step()
        raise AssertionError(f"still at work after {steps} steps")

    def text(self, id_: int = 1) -> bytes:
        ids = [token for step in self.steps for i, token in zip(step.ids, step.tokens, strict=True) if i == id_]
        return bytes(token for token in ids if token < 256)

    def ends(self) -> list[tuple[int, str, bool, str]]:
        return [(end.id, end.reason, end.by_token, end.message) for step in self.steps for end in step.ends]

    def assert_idle(self) -> None:
        assert not self.peer.sequences and not self.core.is_preparing
        assert not (self.scheduler.running or self.scheduler.waiting or self.scheduler.parked)
        assert (self.pool.used, self.pool.available) == (0, self.pool.blocks)


def submit(id_: int = 1, grammar: str = 'start: "abc"', generated: list[int] | None = None, **sampling: Any) -> Submit:
    numbers = Sampling(**({"max_tokens": 50, "grammar": grammar} | sampling))
    return Submit(id_, [1, 2, 3], numbers, 1000, generated or [])


def test_an_answer_ends_with_its_grammar() -> None:
    rig = Rig()
    rig.send(submit(), submit(2, 'start: "de"'), submit(3, "", max_tokens=4))
    rig.run()
    assert (rig.text(1), rig.text(2), len(rig.text(3))) == (b"abc", b"de", 4)
    assert sorted(rig.ends()) == [(1, "stop", False, ""), (2, "stop", False, ""), (3, "length", False, "")]
    rig.assert_idle()


def test_an_end_token_ends_it_where_the_grammar_may_end() -> None:
    rig = Rig()
    rig.send(submit(grammar='start: "a" "b"?', generated=[ord("a")]))
    rig.runner.answers[1] = Sampled(EOS)
    rig.run()
    assert rig.ends() == [(1, "stop", True, "")]


def test_an_answer_that_max_tokens_cuts_is_a_prefix_and_one_that_is_whole_by_then_is_whole() -> None:
    rig = Rig()
    rig.send(submit(max_tokens=2), submit(2, max_tokens=3))
    rig.run()
    assert (rig.text(1), rig.text(2)) == (b"ab", b"abc")
    assert sorted(rig.ends()) == [(1, "length", False, ""), (2, "stop", False, "")]


@pytest.mark.parametrize("known", range(4))
def test_another_engine_goes_on_behind_what_was_generated(known: int) -> None:
    rig = Rig()
    rig.send(submit(generated=list(b"abc"[:known])))
    rig.run()
    assert rig.text() == b"abc"[known:]
    assert rig.ends() == [(1, "stop", False, "")]
    rig.assert_idle()


def test_parked_given_back_and_gone_on() -> None:
    rig = Rig()
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
    rig = Rig()
    rig.send(submit(2, "", max_tokens=5), submit(1, grammar, generated))
    rig.run()
    (bad,) = [end for end in rig.ends() if end[0] == 1]
    assert bad[1] == "error" and word in bad[3]
    assert len(rig.text(2)) == 5
    rig.assert_idle()


def test_a_choice_that_the_grammar_does_not_allow_is_an_error() -> None:
    rig = Rig()
    rig.send(submit())
    rig.runner.answers[1] = Sampled(ord("x"))
    rig.run()
    assert rig.ends() == [(1, "error", False, "the answer left its grammar")]


class Slow:
    """Holds every grammar back until `go`."""

    def __init__(self, rig: Rig) -> None:
        rig.core.prepare_grammars()
        assert rig.core._grammars is not None
        self.gate = threading.Event()
        compile_now = rig.core._grammars._compile

        def wait(grammar: str) -> Any:
            self.gate.wait()
            return compile_now(grammar)

        rig.core._grammars._compile = wait  # type: ignore[method-assign]


def test_a_slow_grammar_holds_nobody_up() -> None:
    rig = Rig()
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
    rig = Rig()
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
    rig = Rig()
    rig.core.prepare_grammars()
    broken: Future[Any] = Future()
    broken.set_exception(RuntimeError("on purpose"))
    assert rig.core._grammars is not None
    rig.core._grammars.compile = lambda _: broken  # type: ignore[method-assign]
    rig.send(submit(), submit(2, "", max_tokens=2))
    rig.run()
    assert [end[:2] for end in sorted(rig.ends())] == [(1, "error"), (2, "length")]
    rig.assert_idle()


def test_the_vocabulary_is_as_wide_as_the_logits() -> None:
    rig = Rig()
    rig.core.prepare_grammars()
    assert rig.core._grammars is not None
    constraint = rig.core._grammars.constraint(rig.core._grammars.compile('start: "a"').result(), [])
    assert constraint.allowed([constraint]).shape == (1, VOCAB)
