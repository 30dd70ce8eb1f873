"""Alarms and the watch over stalled writes, on a loop whose time the test moves."""

from __future__ import annotations

import asyncio

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from server.flow import STALL_LOOKS, Alarm, StallWatch
from tests.support.clock import Clock


class Bell:
    """An alarm, and when it rang."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.rung: list[float] = []
        self.alarm = Alarm(self.clock, lambda: self.rung.append(self.clock.now))  # type: ignore[arg-type]


def test_an_alarm_rings_once_at_its_time() -> None:
    bell = Bell()
    bell.alarm.set(10)
    bell.clock.advance(9.9)
    assert bell.rung == []
    bell.clock.advance(100)
    assert bell.rung == [10]


@pytest.mark.parametrize("first_s", [0.0, 0.0004, 0.01])
def test_an_alarm_on_uvloop_is_set_anew_however_near_it_is(first_s: float) -> None:
    """What uvloop calls at once has a handle that tells no time."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        rung = asyncio.Event()
        alarm = Alarm(loop, rung.set)
        for seconds in (first_s, 0.0002, 0.0, 0.005, 0.0001):
            alarm.set(seconds)
        await asyncio.wait_for(rung.wait(), 10)

    uvloop.run(main())


def test_an_alarm_that_was_closed_does_not_ring() -> None:
    bell = Bell()
    bell.alarm.set(10)
    bell.alarm.close()
    bell.clock.advance(100)
    assert bell.rung == []


def test_an_alarm_that_is_set_anew_rings_later_and_makes_no_timer_each_time() -> None:
    bell = Bell()
    bell.alarm.set(10)
    for _ in range(1000):
        bell.alarm.set(10)
        bell.clock.advance(0.5)
    assert bell.rung == []
    assert bell.clock.timers_made <= 1000 * 0.5 / 9
    bell.clock.advance(10)
    assert bell.rung == [999 * 0.5 + 10]


def test_an_alarm_that_is_set_to_an_earlier_time_rings_then() -> None:
    bell = Bell()
    bell.alarm.set(75)
    bell.alarm.set(10)
    bell.clock.advance(100)
    assert bell.rung == [10]


def test_a_cleared_alarm_does_not_ring_and_can_be_set_again() -> None:
    bell = Bell()
    bell.alarm.set(10)
    bell.alarm.clear()
    bell.clock.advance(5)
    bell.alarm.set(20)
    bell.clock.advance(100)
    assert bell.rung == [25]


def test_a_closed_alarm_leaves_nothing_with_the_loop() -> None:
    bell = Bell()
    bell.alarm.set(10)
    bell.alarm.close()
    assert bell.clock.pending == 0
    bell.alarm.close()
    bell.clock.advance(100)
    assert bell.rung == []


def test_an_alarm_may_set_itself_again_when_it_rings() -> None:
    clock = Clock()
    times: list[float] = []

    def ring() -> None:
        times.append(clock.now)
        if len(times) < 3:
            alarm.set(5)

    alarm = Alarm(clock, ring)  # type: ignore[arg-type]
    alarm.set(5)
    clock.advance(100)
    assert times == [5, 10, 15]


@given(
    st.lists(
        st.one_of(
            st.floats(0, 20).map(lambda s: ("set", s)),
            st.just(("clear", 0.0)),
            st.floats(0, 15).map(lambda s: ("wait", s)),
        ),
        max_size=30,
    )
)
@settings(deadline=None)
def test_an_alarm_rings_exactly_when_the_last_word_says(history: list[tuple[str, float]]) -> None:
    bell = Bell()
    due: float | None = None
    expected: list[float] = []
    for word, seconds in [*history, ("wait", 1000.0)]:
        if word == "set":
            due = bell.clock.now + seconds
            bell.alarm.set(seconds)
        elif word == "clear":
            due = None
            bell.alarm.clear()
        else:
            if due is not None and due <= bell.clock.now + seconds:
                expected.append(due)
                due = None
            bell.clock.advance(seconds)
    assert bell.rung == pytest.approx(expected)


class Watch:
    """A stall watch over a buffer that the test drains."""

    def __init__(self, timeout_s: float = 120) -> None:
        self.clock = Clock()
        self.unsent = 100_000
        self.stalled: list[float] = []
        self.watch = StallWatch(
            self.clock,  # type: ignore[arg-type]
            lambda: self.unsent,
            timeout_s,
            lambda: self.stalled.append(self.clock.now),
        )


def test_a_write_of_which_nothing_drains_is_a_stall_after_the_timeout() -> None:
    watch = Watch(120)
    watch.watch.begin()
    watch.clock.advance(119)
    assert watch.stalled == []
    watch.clock.advance(1)
    assert watch.stalled == [120]
    watch.clock.advance(1000)
    assert watch.stalled == [120]


def test_a_slow_reader_that_drains_a_byte_now_and_then_lives() -> None:
    """E06, C12."""
    watch = Watch(120)
    watch.watch.begin()
    for _ in range(50):
        watch.clock.advance(100)
        watch.unsent -= 1
    assert watch.stalled == []


def test_a_client_that_shows_life_lives_though_nothing_drains() -> None:
    watch = Watch(120)
    watch.watch.begin()
    for _ in range(20):
        watch.clock.advance(80)
        watch.watch.progress()
    assert watch.stalled == []
    watch.clock.advance(200)
    assert len(watch.stalled) == 1


def test_a_buffer_that_grows_is_no_progress() -> None:
    watch = Watch(120)
    watch.watch.begin()
    for _ in range(STALL_LOOKS):
        watch.clock.advance(30)
        watch.unsent += 10
    assert len(watch.stalled) == 1


def test_below_low_water_nobody_watches_and_each_time_above_starts_anew() -> None:
    watch = Watch(120)
    watch.watch.begin()
    watch.clock.advance(100)
    watch.watch.end()
    watch.clock.advance(1000)
    watch.watch.begin()
    watch.clock.advance(119)
    assert watch.stalled == []
    watch.clock.advance(1)
    assert len(watch.stalled) == 1


def test_a_closed_watch_leaves_nothing_with_the_loop() -> None:
    watch = Watch()
    watch.watch.begin()
    watch.watch.close()
    assert watch.clock.pending == 0
