"""The core: how sequences end, that nothing ends but what must, and what is told of it, and when."""

from __future__ import annotations

import msgspec
import pytest

from engine.core import FIRST_COSTS_TOKENS, Core
from engine.sequence import Sampled
from engine.wire import Admitted, Cancel, Credit, End, Gauges, Logprob, Stats, Step
from tests.support.cores import Rig, submit
from tests.support.engines import EOS, expected

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
