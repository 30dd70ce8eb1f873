"""Names tell which process made them; a single server's tell nothing."""

from __future__ import annotations

import pytest

from server import places
from server.places import FRONTENDS_MAX, PLACES, place_for, place_of, placed, take_place


def test_a_single_server_marks_nothing() -> None:
    assert placed("name") == "name"


def test_a_mark_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_mark", "")
    for index in range(FRONTENDS_MAX):
        take_place(index)
        assert place_of(placed("name")) == index
    assert len(set(PLACES)) == FRONTENDS_MAX


def test_what_bears_no_mark_is_of_no_process() -> None:
    assert place_of("") == place_of("name-") == place_of("name_") == -1


def test_a_clients_own_names_are_spread_and_always_go_to_the_same() -> None:
    found = [place_for("alice", f"key {n}", count=3) for n in range(300)]
    assert found == [place_for("alice", f"key {n}", count=3) for n in range(300)]
    assert all(found.count(place) > 60 for place in range(3))
    assert [place_for("bob", f"key {n}", count=3) for n in range(300)] != found
