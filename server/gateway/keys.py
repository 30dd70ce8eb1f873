"""API keys: who may ask, and how many streams each may have at once.

The file is TOML. Keys are kept as SHA-256 hashes, so that reading the file gives nobody a key:

    [keys.alice]
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0bb822cd15d6c15b0f00a08"
    max_streams = 4
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

ANONYMOUS = ""  # everybody, on a server without keys

_hash = re.compile(r"[0-9a-f]{64}")


class KeysError(Exception):
    """The file is not of the form that this module's docstring shows."""


@dataclass(frozen=True, slots=True)
class Key:
    """One client. `streams_max` None: no limit of its own."""

    name: str
    digest: bytes
    streams_max: int | None


class Keys:
    """Looks keys up and counts their streams. Without keys everybody is the same anonymous client."""

    def __init__(self, keys: list[Key] | None) -> None:
        self.required = keys is not None
        self._keys = {key.name: key for key in keys or []}
        self._streams: dict[str, int] = {}

    def name_of(self, secret: str) -> str | None:
        """The client whose key this is. Every key is compared, in constant time."""
        digest = hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
        found = None
        for key in self._keys.values():
            if hmac.compare_digest(key.digest, digest):
                found = key.name
        return found

    def take(self, key: str) -> bool:
        """One more stream of this client, if it may."""
        used = self._streams.get(key, 0)
        known = self._keys.get(key)
        if known is not None and known.streams_max is not None and used >= known.streams_max:
            return False
        self._streams[key] = used + 1
        return True

    def has_room(self, key: str) -> bool:
        """Whether `take` would succeed."""
        known = self._keys.get(key)
        return known is None or known.streams_max is None or self._streams.get(key, 0) < known.streams_max

    def give(self, key: str) -> None:
        """One stream less."""
        self._streams[key] -= 1
        if not self._streams[key]:
            del self._streams[key]


def read_keys(path: str) -> Keys:
    """Raises KeysError that says what is wrong and where."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise KeysError(f"--api-keys: {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise KeysError(f"{path} is not TOML: {error}") from None
    entries = document.get("keys")
    if not isinstance(entries, dict) or not entries:
        raise KeysError(f'{path} names no key; each is a table [keys.NAME] with sha256 = "…"')
    return Keys([_read_key(path, name, entry) for name, entry in entries.items()])


def _read_key(path: str, name: str, entry: object) -> Key:
    where = f"{path}: [keys.{name}]"
    if not isinstance(entry, dict):
        raise KeysError(f"{where} is not a table")
    unknown = entry.keys() - {"sha256", "max_streams"}
    if unknown:
        raise KeysError(f"{where} has an unknown field {min(unknown)!r}")
    digest = entry.get("sha256")
    if not isinstance(digest, str) or not _hash.fullmatch(digest):
        raise KeysError(f"{where}: sha256 must be 64 lower-case hexadecimal digits")
    streams_max = entry.get("max_streams")
    if streams_max is not None and (type(streams_max) is not int or streams_max < 1):
        raise KeysError(f"{where}: max_streams must be a whole number of at least 1")
    return Key(name, bytes.fromhex(digest), streams_max)
