"""What clients took, in memory that processes share: limits hold to the exact count, whoever counts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from server.gateway import ledger as ledgers
from server.gateway.keys import Key, Keys
from server.gateway.ledger import Ledger, LedgerFull
from server.gateway.limits import Limiter, Rates
from server.table import Busy
from tests.support.clock import Clock


class Shared:
    """Two processes' limiters, as far as one can play both: each with its own keys, one ledger, one clock."""

    def __init__(self, **fields: int) -> None:
        self.clock = Clock(1000.0)
        self.ledger = Ledger(2)
        self.keys = [Keys([Key("alice", b"a", **fields)]) for _ in range(2)]
        self.both = [Limiter(keys, Rates(), self.clock, book=self.ledger) for keys in self.keys]

    def take(self, column: int, tokens: int = 0) -> int:
        """0, or the status of the refusal."""
        self.ledger.take(column)
        try:
            self.both[column].start("alice", tokens)
        except Busy as busy:
            return busy.status
        return 0


def test_slots_are_counted_in_all_processes_and_given_back_by_each() -> None:
    shared = Shared(streams_max=3)
    assert [shared.take(column) for column in (0, 1, 0, 1, 0)] == [0, 0, 0, 429, 429]
    assert [limiter.streams("alice") for limiter in shared.both] == [3, 3]
    shared.both[1].leave("alice")
    assert shared.take(0) == 0 and shared.take(1) == 429


def test_a_process_that_died_has_no_streams() -> None:
    shared = Shared(streams_max=2)
    assert [shared.take(column) for column in (0, 1, 1)] == [0, 0, 429]
    shared.ledger.forget(0)
    assert shared.both[1].streams("alice") == 1
    assert [shared.take(1), shared.take(1)] == [0, 429]


def test_rates_are_one_bucket_that_fills_once() -> None:
    shared = Shared(requests_per_minute=60)
    assert [shared.take(n % 2) for n in range(61)] == [0] * 60 + [429]
    shared.clock.advance(2)
    assert [shared.take(n % 2) for n in range(3)] == [0, 0, 429]


def test_a_prompt_taken_here_is_lacking_there() -> None:
    shared = Shared(tokens_per_minute=100)
    assert (shared.take(0, 70), shared.take(1, 40), shared.take(1, 30)) == (0, 429, 0)


def test_a_lower_rate_is_carried_over_once_however_many_processes_read_it() -> None:
    shared = Shared(requests_per_minute=100)
    assert [shared.take(0) for _ in range(100)] == [0] * 100
    for keys, limiter in zip(shared.keys, shared.both, strict=True):
        keys.replace([Key("alice", b"a", requests_per_minute=10)])
        limiter.refresh()
    assert dict(shared.both[1].headers("alice"))[b"x-ratelimit-reset-requests"] == b"1m0s"
    shared.clock.advance(30)
    assert [shared.take(n % 2) for n in range(6)] == [0] * 5 + [429]


def test_names_that_share_a_hashs_row_have_rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "ROWS_MAX", 3)
    ledger = Ledger(1)
    with ledger.locked():
        slots = [ledger.slots(name) for name in "abc"]
        for count, each in enumerate(slots, 1):
            each.add(count)
        assert [each.taken for each in slots] == [1, 2, 3]
    with pytest.raises(LedgerFull, match="3 clients"):
        ledger.reserve("d")
    ledger.reserve("cab")


def in_children(count: int, work: Callable[[int], None]) -> None:
    """`work` in so many forked processes at once, all of which must end well."""
    pids = []
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            try:
                work(number)
                os._exit(0)
            finally:
                os._exit(1)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * count


def test_processes_that_count_at_once_lose_nothing(tmp_path: Path) -> None:
    ledger = Ledger(2)
    limit, tries = 150, 400

    def work(number: int) -> None:
        ledger.take(number)
        limiter = Limiter(Keys([Key("alice", b"a", requests_per_minute=limit)]), Rates(), lambda: 0.0, book=ledger)
        begun = 0
        for _ in range(tries):
            try:
                limiter.start("alice", 0)
            except Busy:
                continue
            begun += 1
        (tmp_path / str(number)).write_text(str(begun))

    in_children(2, work)
    assert sum(int((tmp_path / str(number)).read_text()) for number in range(2)) == limit
    with ledger.locked():
        assert ledger.slots("alice").taken == limit
