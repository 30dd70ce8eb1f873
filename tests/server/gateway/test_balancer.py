"""Where sequences go: the least to do, the blocks that are there; what happens when an engine dies."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from engine.wire import End, Gauges, Hello, Sampling, Step, Submit
from server.engines import EngineFailed
from server.gateway.balancer import (
    EXPECTED_TOKENS_MAX,
    FINE_STRIDE,
    MARKED_TOKENS_MAX,
    Balancer,
    outstanding_tokens,
    prompt_marks,
)
from tests.support.engines import ScriptedEngine


class ScriptedLink(ScriptedEngine):
    """A link to an engine that the test plays."""

    def __init__(self, *, fails: EngineFailed | None = None) -> None:
        super().__init__()
        self.listener: Any = None
        self.fails = fails
        self.closed = 0
        self.kept = False
        if fails is not None:
            self.hello = None

    def listen(self, listener: Any) -> None:
        self.listener = listener

    async def start(self) -> Hello:
        if self.fails is not None:
            raise self.fails
        assert self.hello is not None
        return self.hello

    def keep(self) -> None:
        self.kept = True

    async def close(self) -> None:
        self.closed += 1

    def end(self, *ids: int) -> None:
        self.listener.on_step(self.tokens([], *(End(id_, "stop") for id_ in ids)), False)

    def lose(self) -> None:
        self.die()
        self.listener.on_engine_lost()

    def come_back(self) -> None:
        self.revive()
        self.listener.on_engine_ready()


class Told:
    """Takes what a stream table would be told."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.more: list[bool] = []
        self.lost: list[list[int]] = []
        self.ready = 0

    def on_step(self, step: Step, more: bool) -> None:
        self.steps.append(step)
        self.more.append(more)

    def on_engine_lost(self, sequence_ids: list[int]) -> None:
        self.lost.append(sequence_ids)

    def on_engine_ready(self) -> None:
        self.ready += 1


class Rig:
    def __init__(self, engines: int) -> None:
        self.links = [ScriptedLink() for _ in range(engines)]
        self.balancer = Balancer(list(self.links))
        self.told = Told()
        self.balancer.listen(self.told)
        asyncio.run(self.balancer.start())
        self._ids = iter(range(1, 10**6))

    def submit(self, prompt: list[int], *, max_tokens: int = 100, credit: int = 64, **fields: Any) -> int:
        id_ = next(self._ids)
        self.balancer.submit(Submit(id_, prompt, Sampling(max_tokens=max_tokens), credit, **fields))
        return id_

    def where(self, id_: int) -> int:
        (at,) = [at for at, link in enumerate(self.links) if id_ in link.live]
        return at

    @property
    def outstanding(self) -> list[int]:
        return [member.outstanding for member in self.balancer.members]


def numbers(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(count)]


def spread(rig: Rig) -> float:
    """How far the engines are from even."""
    mean = sum(rig.outstanding) / len(rig.outstanding)
    return max(abs(each - mean) for each in rig.outstanding) / mean


@pytest.mark.parametrize("engines", [2, 4])
def test_the_load_is_within_a_tenth_of_even_while_streams_come_and_end(engines: int) -> None:
    rig, draw = Rig(engines), random.Random(1)
    live: list[int] = []
    worst = 0.0
    for turn in range(2000):
        size = draw.choice([5, 40, 300, 2000])
        live.append(rig.submit(numbers(size, turn), max_tokens=draw.choice([1, 50, 4000])))
        if len(live) > 400:
            id_ = live.pop(draw.randrange(len(live)))
            rig.links[rig.where(id_)].end(id_)
            worst = max(worst, spread(rig))
    assert worst < 0.1
    assert all(outstanding > 0 for outstanding in rig.outstanding)
    for id_ in live:
        rig.balancer.cancel([id_])
    assert rig.outstanding == [0] * engines
    assert not rig.balancer._of


@pytest.mark.parametrize("engines", [2, 4])
def test_a_conversation_goes_on_where_its_blocks_are(engines: int) -> None:
    rig = Rig(engines)
    first = {seed: numbers(200 + seed, seed) for seed in range(40)}
    places = {seed: rig.where(rig.submit(prompt)) for seed, prompt in first.items()}
    assert len(set(places.values())) == engines
    for seed, prompt in first.items():
        second = rig.submit([*prompt, *numbers(90, 1000 + seed)], max_tokens=1)
        assert rig.where(second) == places[seed]
        rig.balancer.cancel([second])


def test_blocks_are_worth_what_they_save_and_no_more() -> None:
    rig = Rig(2)
    prompt = numbers(160, 1)
    home = rig.where(rig.submit(prompt, max_tokens=1))
    ids = [rig.submit([*prompt, *numbers(20, seed)], max_tokens=300) for seed in range(10)]
    assert {rig.where(id_) for id_ in ids} == {0, 1}, "a prompt that all share does not all go to one"
    assert rig.where(ids[0]) == home
    assert abs(rig.outstanding[0] - rig.outstanding[1]) <= 2 * 480


def test_clients_share_nothing() -> None:
    rig = Rig(2)
    prompt = numbers(400, 1)
    assert rig.where(rig.submit(prompt, salt="alice")) == 0
    assert rig.where(rig.submit(prompt, salt="bob")) == 1


class TestDeath:
    def test_its_sequences_are_told_and_the_others_go_on(self) -> None:
        rig = Rig(2)
        ids = [rig.submit(numbers(20, seed)) for seed in range(10)]
        on_first = [id_ for id_ in ids if rig.where(id_) == 0]
        kept = rig.outstanding[1]
        rig.links[0].lose()
        assert rig.told.lost == [on_first]
        assert rig.outstanding == [0, kept]
        assert rig.balancer.hello is not None and rig.balancer.hello.running_max == 8
        again = [rig.submit(numbers(20, id_)) for id_ in on_first]
        assert {rig.where(id_) for id_ in again} == {1}
        rig.balancer.credit(on_first[0], 5)  # of a sequence that is gone: to nobody
        rig.balancer.cancel(on_first)
        assert rig.links[0].credits == rig.links[0].cancelled == rig.links[1].cancelled == []

    def test_it_comes_back_empty_and_gets_the_next(self) -> None:
        rig = Rig(2)
        prompt = numbers(300, 1)
        assert rig.where(rig.submit(prompt)) == 0
        rig.links[0].lose()
        assert rig.where(rig.submit(prompt)) == 1
        rig.links[0].come_back()
        assert rig.told.ready == 1
        assert rig.where(rig.submit(numbers(300, 2))) == 0
        assert rig.where(rig.submit(prompt, max_tokens=1)) == 1  # its blocks went with the engine

    def test_without_any_there_is_no_engine(self) -> None:
        rig = Rig(2)
        for link in rig.links:
            link.lose()
        assert rig.balancer.hello is None
        rig.submit([1])
        assert rig.outstanding == [0, 0]
        rig.links[1].come_back()
        assert rig.where(rig.submit([1])) == 1


def test_streams_that_nobody_reads_have_nothing_to_do() -> None:
    rig = Rig(2)
    ids = [rig.submit(numbers(100, seed)) for seed in range(20)]
    on_first = [id_ for id_ in ids if rig.where(id_) == 0]
    for id_ in on_first:
        rig.balancer.credit(id_, 0)
        rig.balancer.credit(id_, 0)
    assert rig.outstanding == [0, 2000]
    rig.balancer.credit(on_first[0], 64)
    rig.balancer.credit(on_first[0], 96)
    assert rig.outstanding == [200, 2000]
    rig.links[0].end(on_first[1])
    rig.balancer.cancel(on_first[2:])
    assert rig.outstanding == [200, 2000]
    rig.balancer.credit(on_first[0], 0)
    rig.links[0].lose()
    assert rig.outstanding == [0, 2000]
    rig.links[0].come_back()
    again = rig.submit(numbers(100, 1), credit=0)
    assert rig.outstanding == [0, 2000]
    rig.balancer.credit(again, 64)
    assert rig.outstanding == [200, 2000]


def test_credit_and_cancel_go_where_the_sequence_is() -> None:
    rig = Rig(2)
    one, two, three = (rig.submit(numbers(100, seed)) for seed in range(3))
    rig.balancer.credit(two, 77)
    assert rig.links[1].credits == [(two, 77)]
    rig.balancer.cancel([one, two, three])
    assert (rig.links[0].cancelled, rig.links[1].cancelled) == ([one, three], [two])


def test_what_fits_in_all_together_and_gauges_are_added_up() -> None:
    rig = Rig(3)
    hello = rig.balancer.hello
    assert hello is not None
    assert (hello.running_max, hello.pool_tokens, hello.context_tokens_max) == (24, 3 * 65536, 4096)
    for at, link in enumerate(rig.links):
        link.listener.on_step(Step([], [], [], [], [], Gauges(running=at + 1, blocks_used=10)), at < 2)
    assert rig.told.more == [True, True, False]
    assert (rig.balancer.gauges.running, rig.balancer.gauges.blocks_used) == (6, 30)
    rig.links[2].lose()
    assert (rig.balancer.gauges.running, rig.balancer.gauges.blocks_used) == (3, 20)


class TestStart:
    def start(self, *links: ScriptedLink) -> Balancer:
        balancer = Balancer(list(links))
        asyncio.run(balancer.start())
        return balancer

    def test_one_that_is_not_there_may_come_later(self) -> None:
        late = ScriptedLink(fails=EngineFailed("no answer", 1))
        balancer = self.start(ScriptedLink(), late)
        assert balancer.hello is not None and balancer.hello.running_max == 8
        assert [member.link.kept for member in balancer.members] == [False, True]  # type: ignore[attr-defined]
        late.come_back()
        assert balancer.hello.running_max == 16

    @pytest.mark.parametrize(
        "links",
        [
            lambda: [ScriptedLink(fails=EngineFailed("no answer", 1)) for _ in range(2)],
            lambda: [ScriptedLink(), ScriptedLink(fails=EngineFailed("bad usage", 2))],
        ],
    )
    def test_none_at_all_or_a_mistake_of_ours_ends_the_server(self, links: Callable[[], list[ScriptedLink]]) -> None:
        made = links()
        with pytest.raises(EngineFailed):
            self.start(*made)
        assert [link.closed for link in made] == [1, 1]


def test_marks_tell_beginnings_apart() -> None:
    def marks(prompt: list[int], salt: str = "") -> list[tuple[int, int]]:
        return list(prompt_marks(Submit(1, prompt, Sampling(max_tokens=1), 1, salt=salt)))

    long = numbers(20_000, 1)
    assert [end for _, end in marks(long)][-1] == MARKED_TOKENS_MAX
    assert marks(long[: FINE_STRIDE - 1]) == []
    assert marks(long[:100]) == marks(long)[:6]
    assert marks(long, "salt")[0] != marks(long)[0]
    assert not set(marks([*long[:50], 999, *long[51:]])[3:]) & set(marks(long))


def test_what_is_outstanding() -> None:
    def tokens(max_tokens: int, generated: int) -> int:
        return outstanding_tokens(Submit(1, [1] * 10, Sampling(max_tokens=max_tokens), 1, [1] * generated))

    assert tokens(5, 0) == 15
    assert tokens(5, 3) == 15
    assert tokens(10**6, 3) == 13 + EXPECTED_TOKENS_MAX
