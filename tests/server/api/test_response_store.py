"""What is kept of responses: for how long, how much, and for whom."""

from __future__ import annotations

import json

import msgspec
import pytest

from server.api import response_store
from server.api.response_store import ResponseStore, StoreLimits, conversation
from server.outcome import Outcome
from server.stream import Stream
from tests.support.tables import Rig


class Held:
    """A store and a table on one clock."""

    def __init__(self, *, ttl_s: float = 10, bytes_max: int = 1_000_000) -> None:
        self.rig = Rig()
        self.store = ResponseStore(StoreLimits(ttl_s, bytes_max), self.rig.clock)

    def keep(self, name: str, size: int = 10) -> Stream:
        """A response that has just begun."""
        stream = self.rig.start()
        self.store.keep(name, msgspec.json.encode(["x" * (size - 4)]), stream)
        return stream

    def end(self, name: str, size: int = 10) -> None:
        """One that has ended."""
        stream = self.keep(name, size)
        stream.grammar.whole = lambda stream: b'{"output":[{"id":"%b"}]}' % name.encode()  # type: ignore[method-assign]
        stream.finish(Outcome("stop"))

    def names(self, *names: str) -> list[str]:
        """Those that are held."""
        return [name for name in names if self.store.find(name, "") is not None]


def test_a_response_is_its_keys_alone() -> None:
    held = Held()
    held.keep("a")
    assert held.store.find("a", "") is not None
    assert held.store.find("a", "bob") is None
    assert held.store.find("b", "") is None


def test_its_time_begins_with_its_end() -> None:
    held = Held(ttl_s=10)
    stream = held.keep("running")
    held.end("ended")
    held.rig.clock.advance(9.9)
    assert held.names("running", "ended") == ["running", "ended"]
    held.rig.clock.advance(0.1)
    assert held.names("running", "ended") == ["running"]
    stream.grammar.whole = lambda stream: b'{"output":[]}'  # type: ignore[method-assign]
    stream.finish(Outcome("stop"))
    held.rig.clock.advance(9.9)
    assert held.names("running") == ["running"]


def test_the_oldest_that_ended_go_when_all_are_too_large() -> None:
    held = Held(bytes_max=1000)
    held.keep("running", 400)
    for name in ("a", "b", "c"):
        held.end(name, 277)  # and 23 of its end
    assert held.names("running", "a", "b", "c") == ["running", "b", "c"]
    assert held.store.bytes == 1000


def test_what_has_not_ended_stays_however_large() -> None:
    held = Held(bytes_max=100)
    held.keep("a", 80)
    held.keep("b", 80)
    assert held.names("a", "b") == ["a", "b"]


def test_one_that_is_too_large_by_itself_goes_at_its_end() -> None:
    held = Held(bytes_max=100)
    held.end("a", 200)
    assert held.names("a") == []
    assert held.store.bytes == 0


def test_there_are_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "RESPONSES_MAX", 2)
    held = Held()
    for name in ("a", "b", "c"):
        held.end(name)
    assert held.names("a", "b", "c") == ["b", "c"]


def test_dropping_gives_its_bytes_back_and_its_end_changes_nothing() -> None:
    held = Held()
    stream = held.keep("a")
    stored = held.store.find("a", "")
    assert stored is not None
    held.store.drop(stored)
    held.store.drop(stored)
    assert held.store.bytes == 0
    stream.finish(Outcome("stop"))
    assert (held.names("a"), held.store.bytes) == ([], 0)


def test_a_conversation_is_what_went_in_and_what_came_out() -> None:
    held = Held()
    held.end("a")
    stored = held.store.find("a", "")
    assert stored is not None and stored.stream is None
    assert conversation(stored.items, stored.final) == [*json.loads(stored.items), {"id": "a"}]


def test_an_item_is_found_as_long_as_the_response_that_made_it() -> None:
    held = Held()
    held.end("a")
    assert held.store.find_item("a", "") == {"id": "a"}
    assert held.store.find_item("a", "bob") is None
    held.rig.clock.advance(10)
    assert held.store.find_item("a", "") is None
