"""The lines before the batch: every order of joining, leaving and admission gives each line's order, and turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sequence import Sequence
from engine.waiting import Waiting
from engine.wire import Sampling


def sequence(number: int, *, admitted: bool = False) -> Sequence:
    made = Sequence(number, [1], 1, Sampling(max_tokens=9), credit=9)
    made.cached_tokens = 0 if admitted else -1
    return made


def drained(waiting: Waiting) -> list[int]:
    ids = []
    while waiting:
        first = waiting.first
        waiting.admit(first)
        ids.append(first.id)
    return ids


def test_nobody_waits() -> None:
    waiting = Waiting()
    assert not waiting
    with pytest.raises(IndexError):
        _ = waiting.first
    with pytest.raises(KeyError):
        waiting.leave(sequence(1))


def test_new_and_returned_ones_go_by_turns_each_line_in_its_order() -> None:
    waiting = Waiting()
    for number in range(4):
        waiting.join(sequence(number))
    for number in range(10, 13):
        waiting.join(sequence(number, admitted=True))
    assert drained(waiting) == [0, 10, 1, 11, 2, 12, 3]


def test_preempted_ones_go_first_the_last_one_before_the_others_and_use_no_turn_up() -> None:
    waiting = Waiting()
    waiting.join(sequence(0))
    waiting.join(sequence(1, admitted=True))
    for number in (20, 21):
        waiting.join_first(sequence(number, admitted=True))
    assert drained(waiting) == [21, 20, 0, 1]


def test_a_turn_is_used_up_by_admission_only() -> None:
    waiting = Waiting()
    new, other, returned = sequence(0), sequence(1), sequence(10, admitted=True)
    for each in (new, other, returned):
        waiting.join(each)
    assert waiting.first is waiting.first is new
    waiting.leave(new)
    assert waiting.first is other
    waiting.admit(other)
    assert waiting.first is returned


@given(st.lists(st.tuples(st.integers(0, 7), st.booleans())))
def test_who_leaves_and_joins_again_keeps_the_place(moves: list[tuple[int, bool]]) -> None:
    waiting = Waiting()
    everyone = [sequence(number) for number in range(8)]
    there = set()
    for each in everyone:
        waiting.join(each)
        there.add(each.id)
    for number, again in moves:
        if again and number not in there:
            waiting.join(everyone[number])
            there.add(number)
        elif not again and number in there:
            waiting.leave(everyone[number])
            there.remove(number)
        assert len(waiting) == len(there)
        assert {each.id for each in waiting} == there
        assert len(waiting._arrivals) <= len(everyone)
    assert drained(waiting) == sorted(there)
