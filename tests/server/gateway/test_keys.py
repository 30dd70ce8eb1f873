"""API keys: the file's form, who a secret belongs to, and how many streams each has."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from server.gateway.keys import ANONYMOUS, Key, Keys, KeysError, read_keys


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def write(path: Path, text: str) -> str:
    file = path / "keys.toml"
    file.write_text(text)
    return str(file)


GOOD = f"""
[keys.alice]
sha256 = "{digest("secret of alice")}"
max_streams = 2

[keys.bob]
sha256 = "{digest("secret of bob")}"
"""


def test_a_secret_names_its_client(tmp_path: Path) -> None:
    keys = read_keys(write(tmp_path, GOOD))
    assert keys.required
    assert keys.name_of("secret of alice") == "alice"
    assert keys.name_of("secret of bob") == "bob"


@pytest.mark.parametrize(
    "secret", ["", "secret", "alice", "secret of alice ", "Secret of alice", "\udcff", "\x00", "x" * 10**6]
)
def test_any_other_secret_names_nobody(tmp_path: Path, secret: str) -> None:
    assert read_keys(write(tmp_path, GOOD)).name_of(secret) is None


def test_the_file_holds_no_key_that_could_be_used(tmp_path: Path) -> None:
    keys = read_keys(write(tmp_path, GOOD))
    assert keys.name_of(digest("secret of alice")) is None


def test_each_client_has_its_own_streams(tmp_path: Path) -> None:
    keys = read_keys(write(tmp_path, GOOD))
    assert [keys.take("alice") for _ in range(3)] == [True, True, False]
    assert not keys.has_room("alice")
    assert all(keys.take("bob") for _ in range(100))
    keys.give("alice")
    assert keys.has_room("alice")
    assert keys.take("alice")


def test_has_room_takes_nothing() -> None:
    keys = Keys([Key("alice", b"", 1)])
    assert keys.has_room("alice")
    assert keys.has_room("alice")
    assert keys.take("alice")


def test_giving_more_than_was_taken_is_a_mistake_at_once() -> None:
    keys = Keys([Key("alice", b"", 1)])
    with pytest.raises(KeyError):
        keys.give("alice")


def test_clients_without_streams_take_no_memory() -> None:
    keys = Keys(None)
    keys.take(ANONYMOUS)
    keys.give(ANONYMOUS)
    assert keys._streams == {}


def test_without_keys_everybody_is_the_same_client_without_a_limit() -> None:
    keys = Keys(None)
    assert not keys.required
    assert all(keys.take(ANONYMOUS) for _ in range(1000))


HASH = "0" * 64


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "names no key"),
        ("[keys]", "names no key"),
        ("keys = 5", "names no key"),
        ("[keys.alice", "is not TOML"),
        ("[keys]\nalice = 5", r"\[keys.alice\] is not a table"),
        ("[keys.alice]", "sha256 must be 64"),
        ('[keys.alice]\nsha256 = "abc"', "sha256 must be 64"),
        (f'[keys.alice]\nsha256 = "{"A" * 64}"', "lower-case"),
        (f'[keys.alice]\nsha256 = "{HASH}"\nkey = "plain"', "unknown field 'key'"),
        (f'[keys.alice]\nsha256 = "{HASH}"\nmax_streams = 0', "max_streams must be"),
        (f'[keys.alice]\nsha256 = "{HASH}"\nmax_streams = true', "max_streams must be"),
        (f'[keys.alice]\nsha256 = "{HASH}"\nmax_streams = "5"', "max_streams must be"),
    ],
)
def test_a_file_of_another_form_is_refused_with_its_name_and_place(tmp_path: Path, text: str, sentence: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(KeysError, match=sentence) as error:
        read_keys(path)
    assert str(error.value).startswith(path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(KeysError, match="is not TOML"):
        read_keys(str(tmp_path / "keys.toml"))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match=r"--api-keys: .*nowhere: No such file"):
        read_keys(str(tmp_path / "nowhere"))
