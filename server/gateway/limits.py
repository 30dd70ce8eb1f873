"""How much each client may have: streams at once, requests and tokens a minute.

A rate is a bucket that holds a minute's worth and fills evenly. A request takes one from the one, and its prompt's
tokens from the other, both or neither; the prompt of a sequence that never ran is given back. Generated tokens are
charged as they are made. That costs nothing for each of them: what streams made is counted when somebody asks for more,
when they end, and no oftener than every SETTLE_S. A bucket may so go below empty, by as much as the streams that it let
start can make, and then nothing starts until all of that has filled again. So over any long time no client gets more
than its rate, whatever the length of its answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from server.gateway.keys import Keys
from server.http import Headers
from server.stream import Stream
from server.table import Busy

MINUTE_S = 60.0
# A client with thousands of streams is not counted anew for each request of a burst. In this time it can make 1/600 of
# a minute's tokens too many.
SETTLE_S = 0.1
# Floats that were filled drop by drop: a wait that was told must be enough.
_DUST = 1e-6
_FREE = nullcontext()  # nobody else writes


class Bucket:
    """Holds `per_minute` at most; begins full."""

    __slots__ = ("_at", "level", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self.level = float(per_minute)
        self._at = now

    def fill(self, now: float) -> None:
        """What dripped in since the last time."""
        self.level = min(self.per_minute, self.level + (now - self._at) * self.per_minute / MINUTE_S)
        self._at = now

    def take(self, amount: float) -> None:
        """May leave less than nothing; a negative amount gives back."""
        self.level = min(self.per_minute, self.level - amount)

    def wait_s(self, amount: float) -> float:
        """Until so much is there."""
        lacking = amount - self.level
        return 0.0 if lacking <= _DUST else lacking * MINUTE_S / self.per_minute


@dataclass(frozen=True, slots=True)
class Rates:
    """What a key without limits of its own may have in a minute. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class Slots:
    """A client's streams at once."""

    __slots__ = ("_taken",)

    def __init__(self) -> None:
        self._taken = 0

    @property
    def taken(self) -> int:
        """How many."""
        return self._taken

    def add(self, more: int) -> None:
        """Take one, or give one back."""
        self._taken += more


class Book(Protocol):
    """Where it is kept what clients have taken: here, or in memory that several processes share."""

    def locked(self) -> AbstractContextManager[None]:
        """Held by whoever reads or writes it."""
        ...

    def slots(self, name: str) -> Slots:
        """A client's."""
        ...

    def bucket(self, name: str, per_minute: int, now: float, before: Bucket | None, *, of_tokens: bool) -> Bucket:
        """A full one, less what is lacking in the client's one before. Under a lower rate that fills in the same time:
        nobody waits for hours since a limit was changed."""
        ...


class OwnBook:
    """Of a single process."""

    def locked(self) -> AbstractContextManager[None]:
        """See Book."""
        return _FREE

    def slots(self, name: str) -> Slots:
        """See Book."""
        return Slots()

    def bucket(self, name: str, per_minute: int, now: float, before: Bucket | None, *, of_tokens: bool) -> Bucket:
        """See Book."""
        bucket = Bucket(per_minute, now)
        if before is not None:
            bucket.take((before.per_minute - before.level) * min(1.0, per_minute / before.per_minute))
        return bucket


@dataclass(slots=True)
class Account:
    """One client's use."""

    slots: Slots
    streams_max: int | None = None
    requests: Bucket | None = None
    tokens: Bucket | None = None
    charged: dict[Stream, int] = field(default_factory=dict)  # live streams, and how many of their tokens were counted
    settled_at: float = -math.inf

    @property
    def limited(self) -> bool:
        """Whether anything is."""
        return self.streams_max is not None or self.requests is not None or self.tokens is not None

    def settle(self, now: float) -> None:
        """Charge what the client's streams made meanwhile."""
        if self.requests is not None:
            self.requests.fill(now)
        if self.tokens is not None:
            self.tokens.fill(now)
            if now - self.settled_at >= SETTLE_S:
                self.settled_at = now
                for stream in self.charged:
                    self._charge(stream, self.tokens)

    def end(self, stream: Stream, now: float) -> None:
        """A stream has ended: charge the rest, and give back what it did not use of its prompts."""
        if self.tokens is not None and stream in self.charged:
            self.tokens.fill(now)
            self._charge(stream, self.tokens)
            self.tokens.take(-unused_tokens(stream))
        self.charged.pop(stream, None)

    def _charge(self, stream: Stream, tokens: Bucket) -> None:
        made = stream.completion_tokens
        tokens.take(made - self.charged[stream])
        self.charged[stream] = made


def unused_tokens(stream: Stream) -> int:
    """Tokens of prompts that no engine took up."""
    choices = stream.choices
    used = {choice.sampling.prompt_index for choice in choices if choice.admitted}
    prompts = [c for c in choices if c.sampling.choice_index == 0 and c.sampling.prompt_index not in used]
    return sum(len(choice.prompt) for choice in prompts)


class Limiter:
    """The accounts of all clients of `model`. `clock` gives seconds that only grow; who share `book` share it."""

    def __init__(
        self, keys: Keys, rates: Rates, clock: Callable[[], float], *, model: str = "", book: Book | None = None
    ) -> None:
        self.model = model
        self._book = book or OwnBook()
        self._keys = keys
        self._rates = rates
        self._clock = clock
        self._accounts: dict[str, Account] = {}

    @property
    def several(self) -> bool:
        """Whether clients must leave room for one another."""
        return len(self._keys) > 1

    def check(self, key: str, prompt_tokens: int = 0) -> None:
        """Raises Busy when no request of this client with such a prompt could start now; 0: its length isn't known yet,
        and so no wait for tokens could be told. Takes nothing."""
        self._check_key(key)
        account = self._accounts.get(key)
        if account is not None and not account.limited:
            return
        with self._book.locked():
            self._check(self._settled(key), prompt_tokens)

    def start(self, key: str, prompt_tokens: int) -> None:
        """A slot, a request and the prompt's tokens; or Busy, and nothing is taken."""
        self._check_key(key)
        with self._book.locked():
            account = self._account(key)
            if account.limited:
                account.settle(self._clock())
                self._check(account, prompt_tokens)
            account.slots.add(1)
            if account.requests is not None:
                account.requests.take(1)
            if account.tokens is not None:
                account.tokens.take(prompt_tokens)

    def track(self, stream: Stream) -> None:
        """Charge what this stream makes to its client, from now on until `end`."""
        account = self._accounts[stream.key]
        if account.tokens is not None:
            account.charged[stream] = 0

    def end(self, stream: Stream) -> None:
        """The stream has its outcome."""
        account = self._accounts.get(stream.key)  # None: its key is gone, and nobody read it
        if account is not None and stream in account.charged:
            with self._book.locked():
                account.end(stream, self._clock())

    def settle(self) -> None:
        """Charge what all streams here made, so that other processes know."""
        with self._book.locked():
            now = self._clock()
            for account in self._accounts.values():
                if account.charged:
                    account.settle(now)

    def resume(self, key: str) -> None:
        """A slot for a stream whose reader comes back; or Busy."""
        self._check_key(key)
        with self._book.locked():
            account = self._account(key)
            _check_slot(account)
            account.slots.add(1)

    def leave(self, key: str) -> None:
        """One slot back."""
        with self._book.locked():
            account = self._accounts[key]
            assert account.slots.taken > 0, "a slot was given back twice"
            account.slots.add(-1)

    def streams(self, key: str) -> int:
        """Slots that a client has taken."""
        account = self._accounts.get(key)
        return account.slots.taken if account else 0

    def headers(self, key: str) -> Headers:
        """`x-ratelimit-…`, as OpenAI's API has them, for what is limited."""
        if not self._keys.is_known(key):
            return ()
        with self._book.locked():
            account = self._account(key)
            if account.requests is None and account.tokens is None:
                return ()
            account.settle(self._clock())
            return (*_headers(b"requests", account.requests), *_headers(b"tokens", account.tokens))

    def refresh(self) -> None:
        """The keys were read anew: limits change, what was used stays. Of clients that are gone nothing is kept once
        their last stream ended."""
        with self._book.locked():
            for name, account in list(self._accounts.items()):
                if self._keys.is_known(name):
                    self._set_limits(name, account)
                elif not account.slots.taken and not account.charged:
                    del self._accounts[name]

    def _check_key(self, key: str) -> None:
        if not self._keys.required:
            return
        if not self._keys.is_known(key):
            raise Busy(401, "the API key is no longer known", 0, "invalid_api_key")
        if not self._keys.may_use(key, self.model):
            raise Busy(403, f"this API key is not for the model {self.model!r}", 0, "model_not_allowed")

    def _check(self, account: Account, prompt_tokens: int) -> None:
        _check_slot(account)
        requests, tokens = account.requests, account.tokens
        if tokens is not None and prompt_tokens > tokens.per_minute:
            message = f"the prompt has {prompt_tokens} tokens; this key may have {tokens.per_minute} a minute"
            raise Busy(400, message, 0, "prompt_over_rate_limit")
        for_requests = requests.wait_s(1) if requests is not None else 0.0
        for_tokens = tokens.wait_s(prompt_tokens) if tokens is not None and prompt_tokens else 0.0
        if wait_s := max(for_requests, for_tokens):
            bucket, what = (requests, "requests") if for_requests >= for_tokens else (tokens, "tokens")
            assert bucket is not None
            raise Busy(429, f"this key's limit of {what} a minute ({bucket.per_minute}) is reached", _whole(wait_s))

    def _settled(self, key: str) -> Account:
        account = self._account(key)
        account.settle(self._clock())
        return account

    def _account(self, key: str) -> Account:
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = Account(self._book.slots(key))
            self._set_limits(key, account)
        return account

    def _set_limits(self, name: str, account: Account) -> None:
        key, rates = self._keys.get(name), self._rates
        requests, tokens = rates.requests_per_minute, rates.tokens_per_minute
        if key is not None:
            account.streams_max = key.streams_max
            requests = requests if key.requests_per_minute is None else key.requests_per_minute
            tokens = tokens if key.tokens_per_minute is None else key.tokens_per_minute
        now, bucket = self._clock(), self._book.bucket
        account.requests = bucket(name, requests, now, account.requests, of_tokens=False) if requests else None
        account.tokens = bucket(name, tokens, now, account.tokens, of_tokens=True) if tokens else None


def _check_slot(account: Account) -> None:
    if account.streams_max is not None and account.slots.taken >= account.streams_max:
        raise Busy(429, "this key's streams are all in use", 1)


def _whole(seconds: float) -> int:
    """Seconds as Retry-After has them: enough, and at least one."""
    return max(1, math.ceil(seconds - _DUST))


def _headers(what: bytes, bucket: Bucket | None) -> Iterator[tuple[bytes, bytes]]:
    if bucket is not None:
        yield b"x-ratelimit-limit-" + what, b"%d" % bucket.per_minute
        yield b"x-ratelimit-remaining-" + what, b"%d" % max(0, int(bucket.level + _DUST))
        yield b"x-ratelimit-reset-" + what, duration(bucket.wait_s(bucket.per_minute))


def duration(seconds: float) -> bytes:
    """As OpenAI writes it: `120ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return b"%dms" % math.ceil(seconds * 1000)
    if (tenths := math.ceil(seconds * 10)) < MINUTE_S * 10:
        return b"%gs" % (tenths / 10)
    whole = math.ceil(seconds)
    return b"%dm%ds" % divmod(whole, 60)
