"""server.turns: a stretch is bounded by time, the order is that of coming, and nobody is forgotten."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from server.turns import STRETCH_S, Turns
from tests.fuzz.virtual_loop import VirtualLoop


class Crowd:
    """Acts that each take `cost_s`; between two turns of the loop it notes a line."""

    def __init__(self, loop: VirtualLoop, cost_s: float) -> None:
        self.now = 0.0
        self.cost_s = cost_s
        self.seen: list[object] = []
        self.turns = Turns(loop, lambda: self.now)

    def act(self, name: object) -> None:
        self.now += self.cost_s
        self.seen.append(name)


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop()
    with made.running():
        yield made


def test_a_crowd_is_taken_in_stretches(loop: VirtualLoop) -> None:
    crowd = Crowd(loop, STRETCH_S / 2)
    for number in range(5):
        crowd.turns.add(lambda number=number: crowd.act(number))
    assert crowd.seen == []
    counts = []
    while len(crowd.seen) < 5:
        loop._run_once()
        counts.append(len(crowd.seen))
    assert crowd.seen == [0, 1, 2, 3, 4]
    assert counts == [2, 4, 5]


def test_what_comes_meanwhile_is_last(loop: VirtualLoop) -> None:
    crowd = Crowd(loop, 0.0)

    def first() -> None:
        crowd.turns.add(lambda: crowd.act("third"))
        crowd.act("first")

    crowd.turns.add(first)
    crowd.turns.add(lambda: crowd.act("second"))
    loop.rest()
    assert crowd.seen == ["first", "second", "third"]
    crowd.turns.add(lambda: crowd.act("again"))
    loop.rest()
    assert crowd.seen[-1] == "again"


def test_a_fault_costs_the_others_nothing(loop: VirtualLoop) -> None:
    crowd = Crowd(loop, 0.0)
    crowd.turns.add(lambda: 1 // 0)
    crowd.turns.add(lambda: crowd.act("second"))
    loop.rest()
    assert crowd.seen == ["second"]
    assert isinstance(loop.faults.pop()["exception"], ZeroDivisionError)
