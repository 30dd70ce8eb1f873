"""The core: what it refuses, how sequences end, and that nothing ends but what must."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_pool import BlockPool
from engine.core import BIASED_IDS_MAX, FIRST_COSTS_TOKENS, LOGPROBS_MAX, PROMPT_LOGPROBS_MAX, Core, Peer
from engine.scheduler import Scheduler
from engine.sequence import Sampled, Sequence
from engine.wire import Admitted, Cancel, Credit, End, Gauges, Logprob, Sampling, Stats, Step, Submit, ToEngine
from tests.support.clock import Clock
from tests.support.engines import EOS, VOCAB, ChainRunner, expected

BLOCK = 4


class Rig:
    """A core over a small pool, and what each server was sent."""

    def __init__(
        self, *, blocks: int = 16, step_tokens_max: int = 64, running_max: int = 8, context: int = 4096
    ) -> None:
        self.pool = BlockPool(blocks, BLOCK)
        self.scheduler = Scheduler(self.pool, step_tokens_max=step_tokens_max, running_max=running_max)
        self.runner = ChainRunner(blocks, BLOCK, eos_ids=(EOS,), context=context)
        self.clock = Clock()
        self.reports: list[str] = []
        self.core = Core(
            self.runner, self.pool, self.scheduler, version="test", clock=self.clock, report=self.reports.append
        )
        self.steps: list[Step] = []
        self.peer = self.core.join(self.steps.append)

    def send(self, *messages: ToEngine, peer: Peer | None = None) -> None:
        for message in messages:
            self.core.receive(peer or self.peer, message)

    def run(self, steps: int = 100) -> None:
        for _ in range(steps):
            if not self.core.has_work:
                return
            self.core.step()
        raise AssertionError(f"still at work after {steps} steps")

    def tokens(self, id_: int) -> list[int]:
        return [token for step in self.steps for i, token in zip(step.ids, step.tokens, strict=True) if i == id_]

    @property
    def ends(self) -> list[End]:
        return [end for step in self.steps for end in step.ends]

    @property
    def admitted(self) -> list[Admitted]:
        return [admitted for step in self.steps for admitted in step.admitted]

    def assert_idle(self) -> None:
        assert not self.peer.sequences
        assert not (self.scheduler.running or self.scheduler.waiting or self.scheduler.parked)
        assert (self.pool.used, self.pool.available) == (0, self.pool.blocks)


def submit(
    id_: int = 1,
    prompt: list[int] | None = None,
    *,
    credit: int = 1000,
    generated: Many[int] = (),
    max_tokens: int = 5,
    **sampling: object,
) -> Submit:
    numbers = Sampling(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    return Submit(id_, [1, 2, 3] if prompt is None else prompt, numbers, credit, list(generated))


# What is refused (E07)


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (submit(prompt=[]), "no token"),
        (submit(prompt=[1] * 64), "leave no room for a new one in 64"),
        (submit(prompt=[1] * 5000), "leave no room"),
        (submit(prompt=[1] * 60, generated=[1] * 4, max_tokens=9), "leave no room"),
        (submit(prompt=[-1]), "vocabulary"),
        (submit(prompt=[1, VOCAB]), "vocabulary"),
        (submit(prompt=[2**64 - 1]), "vocabulary"),
        (submit(generated=[VOCAB], max_tokens=9), "vocabulary"),
        (submit(generated=[1, 2], max_tokens=2), "reached already"),
        (submit(max_tokens=0), "max_tokens"),
        (submit(max_tokens=-(2**63)), "max_tokens"),
        (submit(temperature=-0.1), "temperature"),
        (submit(temperature=math.nan), "temperature"),
        (submit(temperature=math.inf), "temperature"),
        (submit(top_p=1.5), "top_p"),
        (submit(top_p=math.nan), "top_p"),
        (submit(min_p=-1.0), "min_p"),
        (submit(min_p=2.0), "min_p"),
        (submit(top_k=-1), "top_k"),
        (submit(seed=-1), "seed"),
        (submit(seed=2**64), "seed"),
        (submit(prompt_index=-1), "prompt_index"),
        (submit(choice_index=-1), "choice_index"),
        (submit(frequency_penalty=2.1), "frequency_penalty"),
        (submit(frequency_penalty=math.nan), "frequency_penalty"),
        (submit(presence_penalty=-2.1), "presence_penalty"),
        (submit(presence_penalty=math.inf), "presence_penalty"),
        (submit(repetition_penalty=0.0), "repetition_penalty"),
        (submit(repetition_penalty=-1.0), "repetition_penalty"),
        (submit(repetition_penalty=math.nan), "repetition_penalty"),
        (submit(repetition_penalty=math.inf), "repetition_penalty"),
        (submit(logit_bias=((VOCAB, 1.0),)), "logit_bias"),
        (submit(logit_bias=((-1, 1.0),)), "logit_bias"),
        (submit(logit_bias=((1, 100.5),)), "logit_bias"),
        (submit(logit_bias=((1, math.nan),)), "logit_bias"),
        (submit(logit_bias=((1, 1.0), (1, 2.0))), "names an id twice"),
        (submit(logit_bias=tuple((i, 1.0) for i in range(BIASED_IDS_MAX + 1))), "at most"),
        (submit(logprobs=-2), "logprobs"),
        (submit(prompt_logprobs=-2), "prompt_logprobs"),
        (submit(prompt_logprobs=LOGPROBS_MAX + 1), "prompt_logprobs"),
        (submit(logprobs=LOGPROBS_MAX + 1), "logprobs"),
    ],
)
def test_a_bad_submission_ends_with_an_error_and_nothing_else(message: Submit, sentence: str) -> None:
    rig = Rig()
    rig.send(submit(7), message, submit(8))
    rig.run()
    bad = [end for end in rig.ends if end.id == 1]
    assert [(end.reason, end.by_token) for end in bad] == [("error", False)]
    assert sentence in bad[0].message
    assert rig.tokens(1) == []
    assert rig.tokens(7) == rig.tokens(8) == expected([1, 2, 3], 5)
    assert {entry[0] for step in rig.runner.executed for entry in step} == {7, 8}
    rig.assert_idle()


INTEGERS = st.one_of(st.integers(-2, 3), st.integers(-(2**63), 2**64 - 1))
FLOATS = st.one_of(st.floats(0, 1), st.floats())


@settings(max_examples=150, deadline=None)
@given(
    st.builds(
        Submit,
        id=st.just(1),
        prompt=st.lists(st.one_of(st.integers(0, VOCAB - 1), INTEGERS), max_size=70),
        sampling=st.builds(
            Sampling,
            max_tokens=INTEGERS,
            temperature=FLOATS,
            top_k=INTEGERS,
            top_p=FLOATS,
            min_p=FLOATS,
            seed=INTEGERS,
            prompt_index=INTEGERS,
            choice_index=INTEGERS,
            min_tokens=INTEGERS,
            stop_ids=st.tuples(INTEGERS),
            logprobs=INTEGERS,
            prompt_logprobs=st.one_of(st.integers(-1, 2), INTEGERS),
            frequency_penalty=FLOATS,
            presence_penalty=FLOATS,
            repetition_penalty=FLOATS,
            logit_bias=st.lists(st.tuples(INTEGERS, FLOATS), max_size=2).map(tuple),
        ),
        credit=INTEGERS,
        generated=st.lists(st.one_of(st.integers(0, VOCAB - 1), INTEGERS), max_size=5),
        priority=INTEGERS,
    )
)
def test_hostile_numbers_never_end_the_loop_nor_touch_a_neighbour(message: Submit) -> None:
    rig = Rig()
    rig.send(submit(7), message)
    rig.run()
    assert rig.tokens(7) == expected([1, 2, 3], 5)
    assert len([end for end in rig.ends if end.id == 1]) <= 1
    rig.send(Credit([(1, 2**64 - 1)]))
    rig.run()
    assert len([end for end in rig.ends if end.id == 1]) == 1
    rig.assert_idle()


def test_an_impossible_prompt_does_not_stop_the_ones_behind_it() -> None:
    rig = Rig(blocks=2)
    rig.send(submit(1, [9] * 100), *[submit(id_, max_tokens=3) for id_ in range(2, 12)])
    rig.run()
    assert {end.id: end.reason for end in rig.ends} == {1: "error"} | dict.fromkeys(range(2, 12), "length")
    rig.assert_idle()


def test_growth_beyond_the_pool_ends_with_length() -> None:
    rig = Rig(blocks=3)
    rig.send(submit(1, [5], max_tokens=1000), submit(2, [6], max_tokens=3))
    rig.run()
    assert {end.id: end.reason for end in rig.ends} == {1: "length", 2: "length"}
    assert rig.tokens(1) == expected([5], rig.core.hello.context_tokens_max - 1)
    rig.assert_idle()


def test_hello_tells_what_fits() -> None:
    assert Rig(blocks=16).core.hello.context_tokens_max == 64
    assert Rig(blocks=16, context=40).core.hello.context_tokens_max == 40
    assert Rig(blocks=16).core.hello.pool_tokens == 64


def test_an_id_that_is_in_use_is_passed_over_and_its_owner_goes_on() -> None:
    rig = Rig()
    rig.send(submit(1), submit(1, [9, 9]))
    rig.run()
    assert rig.tokens(1) == expected([1, 2, 3], 5)
    assert [end.reason for end in rig.ends] == ["length"]


def test_an_id_may_be_used_again_after_its_end() -> None:
    rig = Rig()
    rig.send(submit(1))
    rig.run()
    rig.send(submit(1, [9, 9]))
    rig.run()
    assert rig.tokens(1) == expected([1, 2, 3], 5) + expected([9, 9], 5)


# How sequences end


def test_max_tokens_is_length() -> None:
    rig = Rig()
    rig.send(submit(max_tokens=3))
    rig.run()
    assert rig.ends == [End(1, "length")]
    assert rig.tokens(1) == expected([1, 2, 3], 3)


def test_one_token_ends_in_the_step_of_its_admission() -> None:
    rig = Rig()
    rig.send(submit(max_tokens=1))
    rig.core.step()
    (step,) = rig.steps
    assert (step.ids, step.admitted, step.ends) == ([1], [Admitted(1, 0)], [End(1, "length")])


def test_the_context_ends_with_length() -> None:
    rig = Rig(context=10)
    rig.send(submit(max_tokens=1000))
    rig.run()
    assert rig.ends == [End(1, "length")]
    assert len(rig.tokens(1)) == 7


@pytest.mark.parametrize("sampling", [{}, {"ignore_eos": True, "stop_ids": (EOS,)}])
def test_an_end_token_stops_and_is_sent(sampling: dict[str, object]) -> None:
    rig = Rig()
    rig.runner.answers[1] = Sampled(EOS)
    rig.send(submit(**sampling))
    rig.run()
    assert rig.tokens(1) == [EOS]
    assert rig.ends == [End(1, "stop", by_token=True)]


def test_ignore_eos_goes_on() -> None:
    rig = Rig()
    rig.runner.answers[1] = Sampled(EOS)
    rig.send(submit(ignore_eos=True, max_tokens=3))
    rig.run()
    assert rig.tokens(1) == [EOS, *expected([1, 2, 3, EOS], 2)]
    assert rig.ends == [End(1, "length")]


def test_a_stop_id_that_is_also_the_last_allowed_token_is_a_stop() -> None:
    rig = Rig()
    first = expected([1, 2, 3], 1)[0]
    rig.send(submit(max_tokens=1, stop_ids=(first,)))
    rig.run()
    assert rig.ends == [End(1, "stop", by_token=True)]


def test_the_runner_may_end_a_sequence_with_a_reason_of_its_own() -> None:
    rig = Rig()
    rig.runner.answers[1] = Sampled(65, finish="tool_calls")
    rig.send(submit())
    rig.run()
    assert (rig.tokens(1), rig.ends) == ([65], [End(1, "tool_calls")])


def test_a_sequence_that_can_not_go_on_ends_alone_and_without_a_token() -> None:
    rig = Rig()
    rig.runner.answers[1] = Sampled(-1, error="no finite number")
    rig.send(submit(1), submit(2))
    rig.run()
    assert rig.tokens(1) == []
    assert rig.tokens(2) == expected([1, 2, 3], 5)
    assert {end.id: (end.reason, end.message) for end in rig.ends} == {
        1: ("error", "no finite number"),
        2: ("length", ""),
    }
    rig.assert_idle()


def test_no_token_yet_is_asked_for_again() -> None:
    rig = Rig()
    rig.runner.answers[1] = None
    rig.send(submit(max_tokens=2))
    rig.core.step()
    assert rig.tokens(1) == []
    rig.run()
    assert rig.tokens(1) == expected([1, 2, 3], 2)


def test_an_exception_ends_the_sequences_of_that_step_and_nothing_else() -> None:
    rig = Rig(running_max=2)
    rig.send(submit(1, max_tokens=50), submit(2, max_tokens=50), submit(3), submit(4, credit=0))
    rig.core.step()
    rig.runner.fail_with = RuntimeError("a kernel said no")
    rig.core.step()
    ends = {end.id: end for end in rig.ends}
    assert {id_: end.reason for id_, end in ends.items()} == {1: "error", 2: "error"}
    assert ends[1].message == "the engine failed; its log says how"
    (report,) = rig.reports
    assert report.startswith("Traceback") and report.endswith("RuntimeError: a kernel said no\n")
    rig.send(Credit([(4, 1000)]))
    rig.run()
    assert rig.tokens(3) == rig.tokens(4) == expected([1, 2, 3], 5)
    rig.assert_idle()


def test_blocks_of_a_step_that_failed_are_not_shared() -> None:
    rig = Rig()
    rig.runner.fail_with = RuntimeError()
    rig.send(submit(1, list(range(12))))
    rig.run()
    assert rig.pool.cached == 0
    rig.send(submit(2, list(range(12))))
    rig.run()
    assert rig.admitted == [Admitted(1, 0), Admitted(2, 0)]
    assert rig.tokens(2) == expected(list(range(12)), 5)


def names_of_blocks(model: str = "chain", salt: str = "") -> list[bytes]:
    rig = Rig()
    rig.runner.name = model
    rig.core = Core(rig.runner, rig.pool, rig.scheduler, version="test")
    peer = rig.core.join(lambda step: None)
    rig.send(msgspec.structs.replace(submit(1, list(range(12))), salt=salt), peer=peer)
    (sequence,) = peer.sequences.values()
    rig.core.step()
    return list(sequence.hashes)


def test_a_blocks_name_says_which_model_and_whose_salt() -> None:
    known = [names_of_blocks(), names_of_blocks("other"), names_of_blocks(salt="a"), names_of_blocks("other", "a")]
    assert names_of_blocks() == known[0]
    assert len({name for names in known for name in names}) == 4 * len(known[0]) > 4


def told_prompts(rig: Rig) -> list[tuple[int, list[int]]]:
    """Sequences, and for each told place in the prompt the id that the runner knew there."""
    told = [each for step in rig.steps for each in step.prompt_logprobs]
    assert all([best.index for best in each.logprobs] == list(range(1, len(each.logprobs) + 1)) for each in told)
    return [(each.id, [-int(best.logprob) for best in each.logprobs]) for each in told]


def test_prompt_logprobs_are_told_once_with_the_first_token() -> None:
    rig = Rig(step_tokens_max=9, blocks=32)
    prompt = list(range(40))
    rig.send(submit(1, prompt, prompt_logprobs=0), submit(2, prompt))
    rig.run()
    assert told_prompts(rig) == [(1, prompt[1:])]
    (step,) = [step for step in rig.steps if step.prompt_logprobs]
    assert [token for id_, token in zip(step.ids, step.tokens, strict=True) if id_ == 1] == expected(prompt, 1)
    assert rig.tokens(1) == rig.tokens(2) == expected(prompt, 5)
    rig.assert_idle()


def test_prompt_logprobs_of_a_cached_prompt_are_computed_again() -> None:
    rig = Rig(blocks=32)
    prompt = list(range(20))
    rig.send(submit(1, prompt))
    rig.run()
    rig.send(submit(2, prompt, prompt_logprobs=0))
    rig.run()
    assert told_prompts(rig) == [(2, prompt[1:])]
    assert rig.admitted[-1] == Admitted(2, 0)


def test_a_prompt_that_loses_its_blocks_half_way_is_told_whole() -> None:
    rig = Rig(step_tokens_max=9, blocks=32)
    prompt = list(range(40))
    rig.send(submit(1, prompt, prompt_logprobs=0))
    for _ in range(3):
        rig.core.step()
        rig.send(Credit([(1, 0)]))
        rig.core.step()
        rig.send(submit(9, [7] * 120, max_tokens=1))  # takes every block
        rig.run()
        rig.send(Credit([(1, 1000)]))
    rig.run()
    assert told_prompts(rig) == [(1, prompt[1:])]
    assert rig.tokens(1) == expected(prompt, 5)


def test_a_prompt_of_one_id_has_nothing_to_tell_and_says_so() -> None:
    rig = Rig()
    rig.send(submit(1, [5], prompt_logprobs=3))
    rig.run()
    assert told_prompts(rig) == [(1, [])]


def test_another_engine_does_not_tell_the_prompt_again() -> None:
    """The first one told it with the first token."""
    rig = Rig()
    rig.send(submit(1, generated=expected([1, 2, 3], 1), prompt_logprobs=0))
    rig.run()
    assert told_prompts(rig) == []


def test_prompt_logprobs_that_are_no_numbers_end_their_own_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.send(submit(1, prompt_logprobs=0), submit(2, prompt_logprobs=0))

    def tell(sequence: Sequence, place: int) -> None:
        sequence.prompt_logprobs.append(Logprob(place, math.nan if sequence.id == 1 else -0.5, [], []))

    monkeypatch.setattr(rig.runner, "_tell_prompt", tell)
    rig.run()
    assert {end.id: end.reason for end in rig.ends} == {1: "error", 2: "length"}
    assert [each.id for step in rig.steps for each in step.prompt_logprobs] == [2]


def test_prompt_logprobs_of_a_long_prompt_are_bounded() -> None:
    rig = Rig(blocks=PROMPT_LOGPROBS_MAX // BLOCK, context=PROMPT_LOGPROBS_MAX)
    rig.send(submit(1, [1] * (PROMPT_LOGPROBS_MAX // 2 + 1), prompt_logprobs=1))
    rig.run()
    assert "prompt_logprobs" in rig.ends[0].message


# Cancel is safe in every phase


def test_cancel_while_queued_never_computes_anything() -> None:
    rig = Rig(running_max=1)
    rig.send(submit(1), submit(2), submit(3))
    rig.core.step()
    rig.send(Cancel([2]))
    rig.run()
    assert {entry[0] for step in rig.runner.executed for entry in step} == {1, 3}
    assert {end.id for end in rig.ends} == {1, 3}
    rig.assert_idle()


def test_cancel_before_the_first_step() -> None:
    rig = Rig()
    rig.send(submit(1), Cancel([1]))
    rig.run()
    assert (rig.runner.executed, rig.ends, rig.admitted) == ([], [], [])
    rig.assert_idle()


def test_cancel_between_chunks() -> None:
    rig = Rig(step_tokens_max=9)
    rig.send(submit(1, list(range(40))))
    rig.core.step()
    rig.send(Cancel([1]))
    rig.run()
    assert (rig.tokens(1), rig.ends) == ([], [])
    rig.assert_idle()


def test_cancel_while_running_is_out_of_the_next_step() -> None:
    rig = Rig()
    rig.send(submit(1, max_tokens=50), submit(2, max_tokens=4))
    rig.core.step()
    rig.send(Cancel([1]))
    rig.core.step()
    assert [entry[0] for entry in rig.runner.executed[-1]] == [2]
    rig.run()
    assert [end.id for end in rig.ends] == [2]
    rig.assert_idle()


def test_cancel_while_parked() -> None:
    rig = Rig()
    rig.send(submit(1, credit=2, max_tokens=50))
    rig.run()
    assert rig.scheduler.parked
    rig.send(Cancel([1]))
    rig.run()
    assert rig.tokens(1) == expected([1, 2, 3], 2)
    rig.assert_idle()


def test_cancel_and_credit_that_cross_the_end_change_nothing() -> None:
    rig = Rig()
    rig.send(submit(1, max_tokens=1))
    rig.core.step()
    rig.send(Cancel([1]), Credit([(1, 50), (99, 1)]), Cancel([99]))
    rig.run()
    assert rig.ends == [End(1, "length")]
    rig.assert_idle()


def test_a_server_that_leaves_takes_its_sequences_with_it_and_no_others() -> None:
    rig = Rig()
    others: list[Step] = []
    other = rig.core.join(others.append)
    rig.send(submit(1, max_tokens=50), submit(2, credit=0))
    rig.send(submit(1), peer=other)
    rig.core.step()
    rig.core.leave(rig.peer)
    scheduler = rig.scheduler
    left = [*scheduler.running, *scheduler.waiting, *scheduler.parked]
    assert [sequence.owner for sequence in left] == [other]
    rig.run()
    assert [token for step in others for token in step.tokens] == expected([1, 2, 3], 5)
    assert (rig.pool.used, rig.pool.available) == (0, rig.pool.blocks)


def test_each_server_is_told_of_its_own_sequences_only() -> None:
    rig = Rig()
    others: list[Step] = []
    other = rig.core.join(others.append)
    rig.send(submit(1, max_tokens=2))
    rig.send(submit(1, [9], max_tokens=2), peer=other)
    rig.run()
    assert rig.tokens(1) == expected([1, 2, 3], 2)
    assert [token for step in others for token in step.tokens] == expected([9], 2)
    assert [end for step in others for end in step.ends] == [End(1, "length")]


# What is told, and when


def test_admission_is_told_once_with_the_cached_tokens_of_that_moment() -> None:
    rig = Rig(blocks=8)
    prompt = list(range(10))
    rig.send(submit(1, prompt, max_tokens=1))
    rig.run()
    rig.send(submit(2, prompt, credit=2, max_tokens=9))
    rig.run()
    rig.send(Credit([(2, 0)]))
    rig.run()
    rig.send(Credit([(2, 9)]))
    rig.run()
    assert rig.admitted == [Admitted(1, 0), Admitted(2, 8)]
    assert rig.tokens(2) == expected(prompt, 9)


def test_admission_tells_how_long_the_sequence_waited() -> None:
    rig = Rig(running_max=1)
    rig.send(submit(1, max_tokens=2), submit(2, max_tokens=1))
    rig.core.step()
    rig.clock.advance(1.5)
    rig.run()
    assert rig.admitted == [Admitted(1, 0, 0.0), Admitted(2, 0, 1.5)]


def test_generated_ids_of_an_earlier_engine_are_context_and_never_sent_again() -> None:
    rig = Rig()
    whole = expected([1, 2, 3], 8)
    rig.send(submit(1, generated=whole[:3], max_tokens=8))
    rig.run()
    assert rig.tokens(1) == whole[3:]
    assert rig.ends == [End(1, "length")]


def test_credit_counts_the_generated_ids_of_an_earlier_engine() -> None:
    rig = Rig()
    whole = expected([1, 2, 3], 8)
    rig.send(submit(1, generated=whole[:3], credit=5, max_tokens=8))
    rig.run()
    assert rig.tokens(1) == whole[3:5]


def test_tokens_never_outrun_the_credit() -> None:
    rig = Rig()
    rig.send(submit(1, credit=2, max_tokens=9))
    rig.run()
    assert len(rig.tokens(1)) == 2
    rig.send(Credit([(1, 3)]))
    rig.run()
    rig.send(Credit([(1, 3)]))  # a total may repeat without harm
    rig.run()
    assert rig.tokens(1) == expected([1, 2, 3], 3)


def test_stats_asks_for_a_step_though_there_is_nothing_to_do() -> None:
    rig = Rig()
    rig.send(Stats())
    rig.run()
    (step,) = rig.steps
    assert msgspec.structs.replace(step, gauges=Gauges()) == Step([], [], [], [], [], Gauges())
    assert step.gauges.blocks_free == 16
    assert not rig.core.has_work


def test_a_cancel_shows_in_the_gauges_by_itself() -> None:
    """G01: the server knows the gauges of the last step only, so a change that no step follows makes one."""
    rig = Rig()
    rig.send(submit(1, credit=2, max_tokens=50))
    rig.run()
    assert rig.steps[-1].gauges.parked == 1
    rig.send(Cancel([1]))
    rig.run()
    gauges = rig.steps[-1].gauges
    assert (gauges.running, gauges.waiting, gauges.parked, gauges.blocks_used) == (0, 0, 0, 0)


def test_log_probabilities_carry_the_index_of_their_token_in_the_step() -> None:
    rig = Rig()
    best = Logprob(0, -0.5, [65], [-0.5])
    rig.runner.answers = {1: Sampled(65), 2: Sampled(66, logprob=best)}
    rig.send(submit(1), submit(2, logprobs=1))
    rig.core.step()
    (step,) = rig.steps
    assert (step.ids, step.tokens, step.logprobs) == ([1, 2], [65, 66], [msgspec.structs.replace(best, index=1)])


@pytest.mark.parametrize(("new", "lead"), [(1, True), (2, False)])
def test_first_tokens_lead_a_step_where_they_are_few(new: int, lead: bool) -> None:
    rig = Rig(blocks=64, running_max=16)
    running = list(range(1, FIRST_COSTS_TOKENS + 2))
    rig.send(*(submit(id_, max_tokens=10) for id_ in running))
    rig.core.step()
    assert rig.steps[-1].ids == running  # nobody streams yet
    firsts = [100 + number for number in range(new)]
    rig.send(*(submit(id_, max_tokens=10) for id_ in firsts))
    rig.core.step()
    ids = rig.steps[-1].ids
    assert ids == firsts + running if lead else ids[: len(running)] == running
    rig.run()
    assert {id_: rig.tokens(id_) for id_ in running + firsts} == {
        id_: expected([1, 2, 3], 10) for id_ in running + firsts
    }


def test_a_step_names_each_sequence_at_most_once() -> None:
    rig = Rig(running_max=3)
    rig.send(*[submit(id_, [id_], max_tokens=4) for id_ in range(1, 8)])
    rig.run()
    for step in rig.steps:
        assert len(set(step.ids)) == len(step.ids) == len(step.tokens)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_pools_and_credit_never_change_a_sequence(chunk: int) -> None:
    prompts = {id_: [(id_ * 31 + i) % 256 for i in range(5 + 3 * id_)] for id_ in range(1, 6)}
    rig = Rig(blocks=12, step_tokens_max=6 + chunk, running_max=5)
    rig.send(*[submit(id_, prompt, credit=id_, max_tokens=12) for id_, prompt in prompts.items()])
    for total in range(2, 14):
        rig.run()
        rig.send(Credit([(id_, max(id_, total)) for id_ in prompts]))
    rig.run()
    assert {id_: rig.tokens(id_) for id_ in prompts} == {id_: expected(p, 12) for id_, p in prompts.items()}
    rig.assert_idle()
