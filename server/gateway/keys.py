"""API keys: who asks, by a secret of which only the hash is known here.

A key is found by a hash of its hash under a secret of this process, and compared in constant time: so neither the time
of a look-up nor the number of keys tells anything about them.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from hashlib import blake2b, sha256

ANONYMOUS = ""  # everybody, on a server without keys

PEPPER_BYTES = 32
MARK_BYTES = 16


@dataclass(frozen=True, slots=True)
class Key:
    """One client. None: no limit of its own, so the command line's default holds; a rate of 0 is none at all."""

    name: str
    digest: bytes  # SHA-256 of the secret
    streams_max: int | None = None  # at once
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    models: frozenset[str] | None = None  # that it may use; None: all


class Keys:
    """Knows all clients. Without keys everybody is the same anonymous one."""

    def __init__(self, keys: list[Key] | None) -> None:
        self.required = keys is not None
        self._pepper = secrets.token_bytes(PEPPER_BYTES)
        self._by_name: dict[str, Key] = {}
        self._by_mark: dict[bytes, Key] = {}
        self.replace(keys or [])

    def replace(self, keys: list[Key]) -> None:
        """From now on these are the clients."""
        self._by_name = {key.name: key for key in keys}
        self._by_mark = {self._mark(key.digest): key for key in keys}

    def name_of(self, secret: str) -> str | None:
        """The client whose key this is."""
        digest = sha256(secret.encode("utf-8", "surrogateescape")).digest()
        key = self._by_mark.get(self._mark(digest))
        return key.name if key is not None and hmac.compare_digest(key.digest, digest) else None

    def get(self, name: str) -> Key | None:
        """The client of this name, if there is one."""
        return self._by_name.get(name)

    def is_known(self, name: str) -> bool:
        """Whether a client that was let in once is still to be."""
        return not self.required or name in self._by_name

    def may_use(self, name: str, model: str) -> bool:
        """Whether this client may have answers of a model."""
        key = self._by_name.get(name)
        return key is None or key.models is None or model in key.models

    def __len__(self) -> int:
        return len(self._by_name)

    def _mark(self, digest: bytes) -> bytes:
        return blake2b(digest, key=self._pepper, digest_size=MARK_BYTES).digest()
