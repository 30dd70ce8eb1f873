"""The lines before the batch: every order of joining, leaving and admission gives each line's order, and turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.priority import FAIR_EVERY
from engine.sequence import Sequence
from engine.waiting import DEBT_TOKENS_MAX, STALE_PLACES_MAX, TURN_TOKENS, Waiting
from engine.wire import Sampling


def sequence(number: int, *, admitted: bool = False, salt: str = "", tokens: int = 1, priority: int = 0) -> Sequence:
    made = Sequence(number, [1] * tokens, tokens, Sampling(max_tokens=9), credit=9, salt=salt, priority=priority)
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
        for client in waiting._new._clients.values():
            for heap in (client._ranks, client._arrivals):
                assert len(heap) <= 2 * len(everyone) + STALE_PLACES_MAX
    assert drained(waiting) == sorted(there)


# Clients take turns by tokens


def admitted_tokens(waiting: Waiting, until: int) -> dict[str, int]:
    """How many tokens each client had when the first `until` were admitted."""
    had: dict[str, int] = {}
    while waiting and sum(had.values()) < until:
        first = waiting.first
        assert waiting.first is first
        waiting.admit(first)
        had[first.salt] = had.get(first.salt, 0) + len(first.tokens)
    return had


@pytest.mark.parametrize("admitted", [False, True])
def test_one_client_with_a_thousand_keeps_no_other_waiting(admitted: bool) -> None:
    waiting = Waiting()
    for number in range(1000):
        waiting.join(sequence(number, salt="crowd", tokens=100, admitted=admitted))
    for number in range(1000, 1003):
        waiting.join(sequence(number, salt="alone", tokens=100, admitted=admitted))
    order = drained(waiting)
    assert order[:2] == [0, 1]  # its turn had begun
    assert all(order.index(number) < 10 for number in range(1000, 1003))
    assert [number for number in order if number < 1000] == list(range(1000))


@pytest.mark.parametrize(("long", "short"), [(1000, 10), (TURN_TOKENS, 1), (77, 78), (5000, 300)])
def test_shares_are_equal_in_tokens_not_in_requests(long: int, short: int) -> None:
    waiting = Waiting()
    for number in range(20_000 // short):
        waiting.join(sequence(number, salt="short", tokens=short))
    for number in range(20_000 // long):
        waiting.join(sequence(10**6 + number, salt="long", tokens=long))
    had = admitted_tokens(waiting, 20_000)
    assert abs(had["long"] - had["short"]) <= 2 * (long + TURN_TOKENS)


def test_what_was_generated_is_paid_by_those_that_wait() -> None:
    waiting = Waiting()
    for number in range(100):
        waiting.join(sequence(number, salt="talks", tokens=10))
        waiting.join(sequence(100 + number, salt="listens", tokens=10))
    first = waiting.first
    waiting.admit(first)
    assert first.salt == "talks"
    first.tokens += [1] * 2 * TURN_TOKENS
    waiting.ended(first)
    # Its turn is over, and the next one too: the other has two turns' worth.
    assert [number >= 100 for number in drained(waiting)[: 2 * TURN_TOKENS // 10]].count(False) <= 1


def test_a_debt_has_an_end() -> None:
    waiting = Waiting()
    for number in range(2):
        waiting.join(sequence(number, salt="owes"))
    for number in range(10_000):
        waiting.join(sequence(100 + number, salt="other", tokens=10))
    first = waiting.first
    waiting.admit(first)
    first.tokens += [1] * 10**6
    waiting.ended(first)
    assert drained(waiting).index(1) <= (DEBT_TOKENS_MAX + 2 * TURN_TOKENS) // 10


def test_a_client_that_was_alone_owes_nothing_when_another_comes() -> None:
    waiting = Waiting()
    for number in range(100):
        waiting.join(sequence(number, salt="early", tokens=1000))
    for _ in range(50):
        waiting.admit(waiting.first)
    for number in range(200, 300):
        waiting.join(sequence(number, salt="late", tokens=1000))
    had = admitted_tokens(waiting, 20_000)
    assert abs(had["early"] - had["late"]) <= 2000


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 600)), min_size=1, max_size=40),
    st.lists(st.integers(0, 39)),
)
def test_everybody_has_a_turn_once_each_client_in_its_order(joins: list[tuple[str, int]], leaves: list[int]) -> None:
    waiting = Waiting()
    everyone = [sequence(n, salt=salt, tokens=tokens) for n, (salt, tokens) in enumerate(joins)]
    for each in everyone:
        waiting.join(each)
    gone = {number for number in leaves if number < len(everyone)}
    for number in gone:
        waiting.leave(everyone[number])
    order = drained(waiting)
    assert sorted(order) == sorted(set(range(len(everyone))) - gone)
    for salt in "abc":
        of_client = [number for number in order if everyone[number].salt == salt]
        assert of_client == sorted(of_client)


# Priorities are among a client's own


def test_the_lower_number_goes_first_equals_in_their_order_and_every_few_whoever_came_first() -> None:
    waiting = Waiting()
    for number, priority in enumerate([5, 0, -1, 0, 5, 2**63, -1]):
        waiting.join(sequence(number, priority=priority))
    assert FAIR_EVERY == 4
    assert drained(waiting) == [2, 6, 1, 0, 3, 4, 5]


@pytest.mark.parametrize("admitted", [False, True])
def test_an_endless_stream_of_better_ones_starves_nobody(admitted: bool) -> None:
    waiting = Waiting()
    waiting.join(sequence(0, priority=9, admitted=admitted))
    for number in range(1, 2 * FAIR_EVERY):
        waiting.join(sequence(number, admitted=admitted))
        first = waiting.first
        waiting.admit(first)
        if first.id == 0:
            return
    raise AssertionError("it waits still")


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(-3, 3), st.booleans()), min_size=1, max_size=40),
    st.integers(1, 600),
)
def test_priorities_never_change_whose_turn_it_is(joins: list[tuple[str, int, bool]], tokens: int) -> None:
    orders = []
    for counts in (0, 1):
        waiting = Waiting()
        everyone = [
            sequence(number, salt=salt, tokens=tokens, priority=counts * priority, admitted=admitted)
            for number, (salt, priority, admitted) in enumerate(joins)
        ]
        for each in everyone:
            waiting.join(each)
        order = drained(waiting)
        assert sorted(order) == list(range(len(joins)))
        orders.append([(joins[number][0], joins[number][2]) for number in order])
    assert orders[0] == orders[1]
