"""The log: positions, its bound, and what is gone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.log import EVENT_OVERHEAD_BYTES, TRIM_EVENTS_MIN, Event, Log

EVENTS = st.builds(
    Event, choice=st.just(0), text=st.binary(max_size=40), data=st.one_of(st.none(), st.binary(max_size=80))
)


def cost(event: Event) -> int:
    return EVENT_OVERHEAD_BYTES + len(event.text) + len(event.data or b"")


def test_positions_count_from_0_without_gaps() -> None:
    log = Log(10**6)
    assert (log.first, log.end) == (0, 0)
    for n in range(3):
        assert log.end == n
        log.append(Event(0, b"%d" % n))
    assert [event.text for event in log.slice(0, 3)] == [b"0", b"1", b"2"]
    assert [event.text for event in log.slice(1, 2)] == [b"1"]
    assert log.slice(3, 3) == []


def test_over_the_bound_the_oldest_go_and_the_rest_keep_their_positions() -> None:
    log = Log(3 * (EVENT_OVERHEAD_BYTES + 1))
    for n in range(5):
        log.append(Event(0, b"%d" % n))
    assert (log.first, log.end) == (2, 5)
    assert [event.text for event in log.slice(2, 5)] == [b"2", b"3", b"4"]
    with pytest.raises(LookupError, match="position 1 is no longer held; the first one is 2"):
        log.slice(1, 5)


def test_the_last_event_stays_whatever_its_size() -> None:
    log = Log(10)
    log.append(Event(0, b"small"))
    log.append(Event(0, b"x" * 1000))
    assert (log.first, log.end) == (1, 2)
    assert log.slice(1, 2) == [Event(0, b"x" * 1000)]
    assert log.size == EVENT_OVERHEAD_BYTES + 1000


def test_what_the_furthest_reader_has_not_read_stays_whatever_the_bound() -> None:
    log = Log(3 * (EVENT_OVERHEAD_BYTES + 1))
    log.keep_from = 0
    for n in range(5):
        log.append(Event(0, b"%d" % n))
    assert (log.first, log.end) == (0, 5)
    log.keep_from = 4
    log.append(Event(0, b"5"))
    assert (log.first, log.end) == (3, 6)
    assert [event.text for event in log.slice(3, 6)] == [b"3", b"4", b"5"]


@settings(deadline=None)
@given(st.integers(1, 4000), st.lists(EVENTS, max_size=60))
def test_what_is_held_is_a_suffix_within_the_bound_and_never_changes(bytes_max: int, events: list[Event]) -> None:
    log = Log(bytes_max)
    for n, event in enumerate(events):
        first_before = log.first
        log.append(event)
        assert log.end == n + 1
        assert first_before <= log.first <= n
        held = events[log.first : log.end]
        assert log.slice(log.first, log.end) == held
        assert log.size == sum(map(cost, held))
        assert log.size <= bytes_max or len(held) == 1
        if log.first:  # no more went than had to
            assert log.size + cost(events[log.first - 1]) > bytes_max or len(held) == 1


def test_the_list_is_cut_now_and_then_so_that_it_stays_short() -> None:
    log = Log(10 * EVENT_OVERHEAD_BYTES)
    for n in range(10 * TRIM_EVENTS_MIN):
        log.append(Event(0, b""))
        assert len(log._events) <= TRIM_EVENTS_MIN + 10
        assert log.end == n + 1
    assert log.first == log.end - 10
