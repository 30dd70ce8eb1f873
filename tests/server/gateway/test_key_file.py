"""The key file: its form, and `python -m server keys add`."""

from __future__ import annotations

import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from server.gateway.key_file import KeysError, main, read_keys
from server.gateway.keys import Key, Keys

ROOT = Path(__file__).resolve().parents[3]


def write(path: Path, text: str) -> str:
    file = path / "keys.toml"
    file.write_text(text)
    return str(file)


def test_every_field_is_read(tmp_path: Path) -> None:
    fields = 'max_streams = 2\nrate_limit_requests = 3\nrate_limit_tokens = 0\nmodels = ["m"]'
    path = write(tmp_path, f'[keys.alice]\nsha256 = "{HASH}"\n{fields}\n[keys.bob]\nsha256 = "{"1" * 64}"\n')
    assert read_keys(path) == [
        Key("alice", bytes(32), 2, 3, 0, frozenset(["m"])),
        Key("bob", b"\x11" * 32, None, None, None, None),
    ]


HASH = "0" * 64


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "names no key"),
        ("[keys]", "names no key"),
        ("keys = 5", "names no key"),
        ('[keys.a]\nsha256 = "0"\n[key.bob]\n', r"\[key\] means nothing"),
        ("[keys.alice", "is not TOML"),
        ("[keys]\nalice = 5", r"\[keys.alice\] is not a table"),
        ("[keys.alice]", "sha256 must be 64"),
        ('[keys.alice]\nsha256 = "abc"', "sha256 must be 64"),
        (f'[keys.alice]\nsha256 = "{"A" * 64}"', "lower-case"),
        (f'[keys.alice]\nsha256 = "{HASH}"\nkey = "plain"', "unknown field 'key'"),
        (f'[keys.alice]\nsha256 = "{HASH}"\nmax_streams = 0', "max_streams must be"),
        (f'[keys.alice]\nsha256 = "{HASH}"\nmax_streams = true', "max_streams must be"),
        (f'[keys.alice]\nsha256 = "{HASH}"\nmax_streams = "5"', "max_streams must be"),
        (f'[keys.alice]\nsha256 = "{HASH}"\nrate_limit_tokens = -1', "rate_limit_tokens must be"),
        (f'[keys.alice]\nsha256 = "{HASH}"\nrate_limit_requests = 1.5', "rate_limit_requests must be"),
        (f'[keys.alice]\nsha256 = "{HASH}"\nmodels = "m"', "models must be a list"),
        (f'[keys.alice]\nsha256 = "{HASH}"\nmodels = [1]', "models must be a list"),
        (f'[keys.""]\nsha256 = "{HASH}"', "needs a name"),
        (f'[keys.a]\nsha256 = "{HASH}"\n[keys.b]\nsha256 = "{HASH}"', r"\[keys.b\] has the same sha256 as \[keys.a\]"),
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


class TestAdd:
    """python -m server keys add NAME"""

    def test_it_prints_the_key_once_and_writes_its_hash_only(self, tmp_path: Path) -> None:
        path = tmp_path / "keys.toml"
        argv = [sys.executable, "-m", "server", "keys", "add", "alice", "--api-keys", str(path)]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        secret = done.stdout.strip()
        assert secret.startswith("sk-sluice-") and len(secret) > 50 and "\n" not in secret
        assert secret not in done.stderr and secret not in path.read_text()
        assert sha256(secret.encode()).hexdigest() in path.read_text()
        assert path.stat().st_mode & 0o777 == 0o600
        assert Keys(read_keys(str(path))).name_of(secret) == "alice"

    def test_what_is_there_stays(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "keys.toml"
        path.write_text(f'# ours\n[keys.bob]\nsha256 = "{HASH}"  # of bob')
        path.chmod(0o640)
        limits = ["--max-streams", "4", "--rate-limit-requests", "60", "--rate-limit-tokens", "0", "--model", 'a"\\\n']
        assert main(["add", "alice", "--api-keys", str(path), *limits]) == 0
        bob, alice = read_keys(str(path))
        assert bob == Key("bob", bytes(32))
        assert alice == Key("alice", alice.digest, 4, 60, 0, frozenset(['a"\\\n']))
        assert path.read_text().startswith("# ours\n")
        assert path.stat().st_mode & 0o777 == 0o640
        assert sorted(p.name for p in tmp_path.iterdir()) == ["keys.toml"]
        first = capsys.readouterr().out
        assert main(["add", "carol", "--api-keys", str(path)]) == 0
        assert capsys.readouterr().out != first

    def test_a_name_that_is_taken_or_a_file_that_is_bad_changes_nothing(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "keys.toml"
        for text, sentence in ((f'[keys.bob]\nsha256 = "{HASH}"', "has a key named bob already"), ("x", "is not TOML")):
            path.write_text(text)
            assert main(["add", "bob", "--api-keys", str(path)]) == 2
            out, err = capsys.readouterr()
            assert (out, path.read_text()) == ("", text)
            assert sentence in err
        assert main(["add", "bob", "--api-keys", str(tmp_path / "no" / "keys.toml")]) == 1

    @pytest.mark.parametrize("argv", [[], ["add"], ["add", "a b"], ["add", ""], ["add", "x", "--max-streams", "0"]])
    def test_bad_usage_is_2(self, argv: list[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert ended.value.code == 2
