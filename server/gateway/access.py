"""Who asks, by what a request's head says, and whether they may have anything at all."""

from __future__ import annotations

import time
from collections.abc import Callable

from server.api.errors import ApiError
from server.gateway.access_tokens import AccessTokens
from server.gateway.keys import ANONYMOUS, Keys
from server.gateway.limits import Book, Limiter, Rates
from server.http import Call


class Gateway:
    """Keys, their limits and their tokens, of a server for one model."""

    def __init__(
        self,
        keys: Keys,
        rates: Rates | None = None,
        *,
        model: str = "",
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        book: Book | None = None,
        token_secret: bytes = b"",
    ) -> None:
        """`book` and `token_secret` are what several processes of one server share."""
        self.keys = keys
        self.limiter = Limiter(keys, rates or Rates(), clock, model=model, book=book)
        self.tokens = AccessTokens(now, token_secret)

    def authenticate(self, call: Call, *, token: str = "") -> None:
        """Find out who asks: by `Authorization: Bearer`, by `x-api-key`, or by a token where the route takes one.
        Raises ApiError 401."""
        if not self.keys.required:
            call.key = ANONYMOUS
            return
        scheme, _, secret = call.header(b"authorization").partition(" ")
        if scheme.lower() != "bearer":
            secret = call.header(b"x-api-key")
        secret = secret.strip()
        name = self.keys.name_of(secret) if secret else self._holder(token)
        if name is None:
            message = "an API key is needed: Authorization: Bearer KEY"
            if secret or token:
                message = "the API key is not known" if secret else "the token is not known, or its minute is over"
            raise ApiError(401, message, code="invalid_api_key", headers=((b"WWW-Authenticate", b"Bearer"),))
        call.key = name

    def _holder(self, token: str) -> str | None:
        name = self.tokens.name_of(token) if token else None
        return name if name is not None and self.keys.is_known(name) else None
