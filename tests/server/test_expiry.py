"""server.expiry: each key ends at its own time, by one timer for all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.expiry import EARLY_S, Expiry
from tests.support.clock import Clock

AFTER_S = 10.0


class Rig:
    """An Expiry, and when each key ended."""

    def __init__(self, rounded_s: float = 0.0) -> None:
        self.clock = Clock()
        self.ended: list[tuple[str, float]] = []

        def call_later(seconds: float, call: Callable[[], None]) -> Callable[[], None]:
            return self.clock.call_later(max(0.0, seconds - rounded_s), call)

        self.expiry: Expiry[str] = Expiry(AFTER_S, self._end, clock=self.clock, call_later=call_later)

    def _end(self, key: str) -> None:
        self.ended.append((key, self.clock.now))


@pytest.mark.parametrize("rounded_s", [0.0, EARLY_S / 2])
def test_each_ends_at_its_time_by_one_timer(rounded_s: float) -> None:
    rig = Rig(rounded_s)
    for key in "abc":
        rig.expiry.add(key)
        assert rig.clock.pending == 1
        rig.clock.advance(3)
    rig.clock.advance(100)
    assert [key for key, _ in rig.ended] == ["a", "b", "c"]
    assert [when for _, when in rig.ended] == pytest.approx([10, 13, 16], abs=2 * EARLY_S)
    assert (len(rig.expiry), rig.clock.pending) == (0, 0)


def test_what_is_discarded_does_not_end_and_the_last_one_takes_the_timer_along() -> None:
    rig = Rig()
    for key in "ab":
        rig.expiry.add(key)
    rig.expiry.discard("a")
    rig.expiry.discard("never added")
    assert (rig.expiry.oldest, rig.clock.pending) == ("b", 1)
    rig.expiry.discard("b")
    assert rig.clock.pending == 0
    rig.clock.advance(100)
    assert rig.ended == []


def test_an_end_may_add_and_discard() -> None:
    clock, ended = Clock(), list[str]()

    def end(key: str) -> None:
        ended.append(key)
        expiry.discard("b")
        if key == "a":
            expiry.add("c")

    expiry: Expiry[str] = Expiry(AFTER_S, end, clock=clock, call_later=clock.call_later)
    expiry.add("a")
    expiry.add("b")
    clock.advance(AFTER_S)
    assert (ended, clock.pending) == (["a"], 1)
    clock.advance(AFTER_S)
    assert (ended, clock.pending) == (["a", "c"], 0)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans(), st.floats(0, 8))))
def test_any_order(acts: list[tuple[str, bool, float]]) -> None:
    rig, due = Rig(), dict[str, float]()
    for key, add, pause_s in acts:
        if add and key not in due:
            rig.expiry.add(key)
            due[key] = rig.clock.now + AFTER_S
        elif not add:
            rig.expiry.discard(key)
            due.pop(key, None)
        rig.clock.advance(pause_s)
        late = [each for each, at in due.items() if at < rig.clock.now - 2 * EARLY_S]
        assert {each for each, _ in rig.ended} >= set(late)
        due = {each: at for each, at in due.items() if at > rig.clock.now}
        assert len(rig.expiry) <= len(due) + 1
        assert rig.clock.pending == min(1, len(rig.expiry))
