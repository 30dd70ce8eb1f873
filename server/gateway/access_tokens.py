"""Tokens for browsers: EventSource and WebSocket can send no header, so a page with a key asks for a token first and
puts it in the address, where it is worth nothing a minute later.

A token names its client and its end, under a signature of this server: none is kept.
"""

from __future__ import annotations

import base64
import hmac
import secrets
import struct
from collections.abc import Callable

LIFE_S = 60
_SIGNATURE_BYTES = 32
_SECRET_BYTES = 32

_end = struct.Struct(">Q")


def new_secret() -> bytes:
    """What tokens are signed with."""
    return secrets.token_bytes(_SECRET_BYTES)


class AccessTokens:
    """`now` gives Unix seconds. `secret` signs them; one of this object's own where none is given."""

    def __init__(self, now: Callable[[], float], secret: bytes = b"") -> None:
        self._now = now
        self._secret = secret or new_secret()

    def issue(self, name: str) -> tuple[str, int]:
        """A token for this client, and its end in Unix seconds."""
        end = int(self._now()) + LIFE_S
        claim = _end.pack(end) + name.encode()
        return base64.urlsafe_b64encode(self._sign(claim) + claim).decode().rstrip("="), end

    def name_of(self, token: str) -> str | None:
        """The client whose token this is, if it is good still."""
        try:
            data = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        except ValueError:
            return None
        signature, claim = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
        if len(claim) < _end.size or not hmac.compare_digest(signature, self._sign(claim)):
            return None
        return claim[_end.size :].decode() if self._now() < _end.unpack_from(claim)[0] else None

    def _sign(self, claim: bytes) -> bytes:
        return hmac.digest(self._secret, claim, "sha256")


def split_token(query: str) -> tuple[str, str]:
    """The last `token` of a query, "" if there is none, and the query without any: it goes no further."""
    if "token" not in query:
        return "", query
    token, rest = "", []
    for field in query.split("&"):
        name, _, value = field.partition("=")
        if name == "token":
            token = value
        else:
            rest.append(field)
    return token, "&".join(rest)
