"""API keys: who a secret belongs to, and that nothing that is known here could be used as one."""

from __future__ import annotations

import hashlib

import pytest

from server.gateway.keys import ANONYMOUS, Key, Keys


def digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


@pytest.fixture
def keys() -> Keys:
    return Keys([Key("alice", digest("secret of alice"), models=frozenset("m")), Key("bob", digest("secret of bob"))])


def test_a_secret_names_its_client(keys: Keys) -> None:
    assert keys.required
    assert keys.name_of("secret of alice") == "alice"
    assert keys.name_of("secret of bob") == "bob"


@pytest.mark.parametrize(
    "secret", ["", "secret", "alice", "secret of alice ", "Secret of alice", "\udcff", "\x00", "x" * 10**6]
)
def test_any_other_secret_names_nobody(keys: Keys, secret: str) -> None:
    assert keys.name_of(secret) is None


def test_the_hash_is_no_key(keys: Keys) -> None:
    assert keys.name_of(digest("secret of alice").hex()) is None


def test_nothing_that_is_kept_shows_a_secret(keys: Keys) -> None:
    assert "secret of" not in repr(vars(keys))


def test_the_same_key_is_found_by_another_mark_in_each_process() -> None:
    """So the time that a look-up takes tells nothing that could be gathered."""
    key = Key("alice", digest("x"))
    assert set(Keys([key])._by_mark) != set(Keys([key])._by_mark)


def test_clients_may_change(keys: Keys) -> None:
    keys.replace([Key("alice", digest("new"))])
    assert keys.name_of("new") == "alice"
    assert keys.name_of("secret of alice") is keys.name_of("secret of bob") is None
    assert (keys.is_known("alice"), keys.is_known("bob"), len(keys)) == (True, False, 1)


def test_models(keys: Keys) -> None:
    assert keys.may_use("alice", "m")
    assert not keys.may_use("alice", "other")
    assert keys.may_use("bob", "other")


def test_without_keys_everybody_is_the_same_client() -> None:
    keys = Keys(None)
    assert not keys.required
    assert keys.is_known(ANONYMOUS)
    assert keys.may_use(ANONYMOUS, "m")
    assert keys.name_of("anything") is None
