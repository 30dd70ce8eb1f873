"""Tokens in an address: whose they are, how long they hold, and that nobody else can make one."""

from __future__ import annotations

import pytest

from server.gateway.access_tokens import LIFE_S, AccessTokens, split_token
from tests.support.clock import Clock


def test_a_token_names_its_client_for_a_minute() -> None:
    clock = Clock(1_000_000.0)
    tokens = AccessTokens(clock)
    token, end = tokens.issue("alice")
    assert end == 1_000_060
    clock.advance(LIFE_S - 0.5)
    assert tokens.name_of(token) == "alice"
    clock.advance(0.5)
    assert tokens.name_of(token) is None


def test_it_can_stand_in_an_address_as_it_is() -> None:
    token, _ = AccessTokens(Clock()).issue("älice?&=#")
    assert token.replace("-", "").replace("_", "").isalnum() and token.isascii()
    assert split_token(f"a=1&token={token}&b=2") == (token, "a=1&b=2")


def test_another_process_and_another_name_do_not_do() -> None:
    clock = Clock()
    tokens = AccessTokens(clock)
    token, _ = tokens.issue("alice")
    assert AccessTokens(clock).name_of(token) is None
    forged = token[:-4] + ("AAAA" if token[-4:] != "AAAA" else "BBBB")
    assert tokens.name_of(forged) is None


@pytest.mark.parametrize("token", ["", "x", "====", "a" * 40, "\udcff", "é", "A" * 100_000, " "])
def test_what_is_no_token_names_nobody(token: str) -> None:
    assert AccessTokens(Clock()).name_of(token) is None


@pytest.mark.parametrize(
    ("query", "parts"),
    [
        ("", ("", "")),
        ("token=x", ("x", "")),
        ("a=1&token=x", ("x", "a=1")),
        ("token=x&token=y&a=%20", ("y", "a=%20")),
        ("token", ("", "")),
        ("tokens=x&a&&", ("", "tokens=x&a&&")),
    ],
)
def test_a_query_goes_on_without_its_tokens(query: str, parts: tuple[str, str]) -> None:
    assert split_token(query) == parts
