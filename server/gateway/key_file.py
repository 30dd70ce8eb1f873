"""The file of keys, and `python -m server keys add NAME`, which makes a key and writes its hash there.

The file is TOML. Reading it gives nobody a key, since it holds hashes:

    [keys.alice]
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0bb822cd15d6c15b0f00a08"
    max_streams = 4              # at once
    rate_limit_requests = 60     # a minute; 0: none, whatever --rate-limit-requests says
    rate_limit_tokens = 100000   # a minute, of prompts and answers together
    models = ["smollm2-135m-instruct"]

Only sha256 must be there.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import sys
import tempfile
import tomllib
from hashlib import sha256
from pathlib import Path

from server.gateway.keys import Key

# 256 random bits: nobody guesses them, so a fast hash keeps them as well as a slow one.
SECRET_BYTES = 32
SECRET_PREFIX = "sk-sluice-"  # so that scanners for leaked secrets can know one
FIELDS = ("sha256", "max_streams", "rate_limit_requests", "rate_limit_tokens", "models")

_hash = re.compile(r"[0-9a-f]{64}")
_name = re.compile(r"[A-Za-z0-9_-]{1,64}")  # bare keys of TOML


class KeysError(Exception):
    """The file is not of the form that this module's docstring shows."""


def read_keys(path: str) -> list[Key]:
    """Raises KeysError that says what is wrong and where."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise KeysError(f"--api-keys: {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise KeysError(f"{path} is not TOML: {error}") from None
    if others := document.keys() - {"keys"}:
        raise KeysError(f"{path}: [{min(others)}] means nothing; each key is a table [keys.NAME]")
    entries = document.get("keys")
    if not isinstance(entries, dict) or not entries:
        raise KeysError(f'{path} names no key; each is a table [keys.NAME] with sha256 = "…"')
    keys = [_read_key(path, name, entry) for name, entry in entries.items()]
    owners: dict[bytes, str] = {}
    for key in keys:
        if owners.setdefault(key.digest, key.name) != key.name:
            raise KeysError(f"{path}: [keys.{key.name}] has the same sha256 as [keys.{owners[key.digest]}]")
    return keys


def _read_key(path: str, name: str, entry: object) -> Key:
    where = f"{path}: [keys.{name}]"
    if not name:
        raise KeysError(f"{where} needs a name")
    if not isinstance(entry, dict):
        raise KeysError(f"{where} is not a table")
    unknown = entry.keys() - set(FIELDS)
    if unknown:
        raise KeysError(f"{where} has an unknown field {min(unknown)!r}")
    digest = entry.get("sha256")
    if not isinstance(digest, str) or not _hash.fullmatch(digest):
        raise KeysError(f"{where}: sha256 must be 64 lower-case hexadecimal digits")
    models = entry.get("models")
    if models is not None and not (isinstance(models, list) and all(isinstance(model, str) for model in models)):
        raise KeysError(f"{where}: models must be a list of names")
    return Key(
        name,
        bytes.fromhex(digest),
        streams_max=_number(where, entry, "max_streams", 1),
        requests_per_minute=_number(where, entry, "rate_limit_requests", 0),
        tokens_per_minute=_number(where, entry, "rate_limit_tokens", 0),
        models=None if models is None else frozenset(models),
    )


def _number(where: str, entry: dict[str, object], name: str, least: int) -> int | None:
    value = entry.get(name)
    if value is None:
        return None
    if type(value) is not int or value < least:
        raise KeysError(f"{where}: {name} must be a whole number of at least {least}")
    return value


# python -m server keys add NAME


def main(argv: list[str]) -> int:
    """The exit code: 0, 2 for bad usage, 1 when the file can't be written."""
    options = _parser().parse_args(argv)
    secret = SECRET_PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    fields: dict[str, str | int | list[str] | None] = {
        "sha256": sha256(secret.encode()).hexdigest(),
        "max_streams": options.max_streams,
        "rate_limit_requests": options.rate_limit_requests,
        "rate_limit_tokens": options.rate_limit_tokens,
        "models": options.model,
    }
    try:
        _add(Path(options.api_keys), options.name, fields)
    except (KeysError, OSError) as error:
        print(f"server: {error}", file=sys.stderr)
        return 2 if isinstance(error, KeysError) else 1
    print(f"{options.name} is in {options.api_keys}. Its key is shown this once:", file=sys.stderr, flush=True)
    print(secret)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m server keys", description="Make keys for --api-keys. A running server reads them at SIGHUP."
    )
    add = parser.add_subparsers(required=True, metavar="add").add_parser("add", help="make a key, print it once")
    add.add_argument("name", metavar="NAME", type=_checked_name, help="the client's, as the log will show it")
    add.add_argument("--api-keys", metavar="FILE", default="keys.toml", help="made if it isn't there (%(default)s)")
    add.add_argument("--max-streams", type=_at_least(1), metavar="N", help="at once")
    add.add_argument("--rate-limit-requests", type=_at_least(0), metavar="N", help="a minute; 0: no limit")
    add.add_argument("--rate-limit-tokens", type=_at_least(0), metavar="N", help="a minute; 0: no limit")
    add.add_argument("--model", action="append", metavar="NAME", help="the key is for this model; may repeat")
    return parser


def _checked_name(text: str) -> str:
    if not _name.fullmatch(text):
        raise argparse.ArgumentTypeError("a name has 1 to 64 letters, digits, _ and -")
    return text


class _at_least:  # noqa: N801  (argparse names a type by its __name__ or shows this)
    def __init__(self, least: int) -> None:
        self._least = least

    def __call__(self, text: str) -> int:
        value = int(text)
        if value < self._least:
            raise argparse.ArgumentTypeError(f"must be at least {self._least}")
        return value


def _add(path: Path, name: str, fields: dict[str, str | int | list[str] | None]) -> None:
    """Append a table. The file is replaced whole, and only by one that reads well: a server that reads it meanwhile
    sees the old one or the new one. Raises KeysError and OSError."""
    before, mode = "", 0o600
    if path.exists():
        if any(key.name == name for key in read_keys(str(path))):
            raise KeysError(f"{path} has a key named {name} already")
        before, mode = path.read_text(encoding="utf-8").rstrip("\n") + "\n\n", path.stat().st_mode & 0o777
    table = "".join(f"{field} = {_toml(value)}\n" for field, value in fields.items() if value is not None)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f"{before}[keys.{name}]\n{table}")
        read_keys(temporary)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _toml(value: str | int | list[str]) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        return '"' + "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in value) + '"'
    return str(value)
