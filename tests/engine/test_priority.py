"""Whose place in the batch goes first: that of the client that was admitted last, and of its own the worst."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.priority import LOSSES_MAX, by_rank, rank
from engine.sequence import Sequence
from engine.wire import Sampling

SEQUENCES = st.lists(
    st.builds(
        lambda salt, priority, losses: Sequence(
            0, [1], 1, Sampling(max_tokens=9), 9, salt=salt, priority=priority, losses=losses
        ),
        st.sampled_from("abc"),
        st.integers(-3, 3),
        st.integers(0, LOSSES_MAX + 1),
    ),
    max_size=20,
)


def test_without_priorities_it_is_the_order_of_admission() -> None:
    batch = [Sequence(n, [1], 1, Sampling(max_tokens=9), 9, salt="ab"[n % 2]) for n in range(6)]
    assert by_rank(batch) == batch


@given(SEQUENCES)
def test_places_stay_with_their_clients_whose_own_are_in_order(batch: list[Sequence]) -> None:
    order = by_rank(batch)
    assert {id(each) for each in order} == {id(each) for each in batch}
    assert [each.salt for each in order] == [each.salt for each in batch]
    if any(each.priority for each in batch):
        for salt in "abc":
            theirs = [each for each in batch if each.salt == salt]
            assert [each for each in order if each.salt == salt] == sorted(theirs, key=rank)


def test_who_lost_its_place_too_often_is_outranked_by_nobody() -> None:
    often = Sequence(0, [1], 1, Sampling(max_tokens=9), 9, priority=9, losses=LOSSES_MAX)
    best = Sequence(1, [1], 1, Sampling(max_tokens=9), 9, priority=-(2**63))
    assert by_rank([best, often]) == [often, best]
