"""Several engines as one: each new sequence goes where the least is left to do, counted in tokens.

What an engine knows already is not left to do, and is worth something more: so a conversation goes back to the engine
that has its cached blocks, unless that one has clearly more to do than the others. To tell, the prompts that each
engine was given are remembered by chained hashes of their beginnings, as its own prefix cache does with blocks.

An engine that dies takes no part until it is back. Its sequences are told to the listener, which submits them anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Protocol

import msgspec

from engine.wire import Gauges, Hello, Step, Submit
from server.engines import EngineFailed, Listener

# Of a generation whose end nobody knows at most so many tokens are counted: max_tokens is often the whole context.
EXPECTED_TOKENS_MAX = 512
# A known token counts so many times: to compute it again would also hold up those that decode meanwhile.
KNOWN_WEIGHT = 5
# An engine may so have this much more to do than others, or this part of their mean, beside what it knows: no more,
# since thousands of prompts may begin alike.
KNOWN_EXTRA_TOKENS, KNOWN_EXTRA_PART = 1024, 0.05
# Ends of the beginnings that are remembered: by blocks where conversations differ most, then in larger strides, up to
# where two prompts that agree so far are the same conversation.
FINE_TOKENS, FINE_STRIDE, COARSE_STRIDE, MARKED_TOKENS_MAX = 512, 16, 128, 8192
# Beginnings remembered of each engine, the oldest go: more than the prefix caches of most hold.
MARKS_MAX = 65_536
# A scrape waits so long for engines to say how they are: for the end of most steps.
REFRESH_WAIT_S = 0.5


class Link(Protocol):
    """One engine, as `EngineLink` keeps it."""

    hello: Hello | None

    def submit(self, message: Submit) -> None: ...  # noqa: D102
    def credit(self, sequence_id: int, total: int) -> None: ...  # noqa: D102
    def cancel(self, sequence_ids: list[int]) -> None: ...  # noqa: D102
    def listen(self, listener: Listener) -> None: ...  # noqa: D102
    def ask_gauges(self) -> None: ...  # noqa: D102
    async def start(self) -> Hello: ...  # noqa: D102
    def keep(self) -> None: ...  # noqa: D102
    async def close(self) -> None: ...  # noqa: D102


class Streams(Protocol):
    """Who has the sequences: the stream table."""

    def on_step(self, step: Step, more: bool) -> None: ...  # noqa: D102
    def on_engine_lost(self, sequence_ids: list[int]) -> None: ...  # noqa: D102
    def on_engine_ready(self) -> None: ...  # noqa: D102


class Member:
    """One engine, and what it was given."""

    def __init__(self, link: Link, balancer: Balancer) -> None:
        self.link = link
        self.gauges = Gauges()
        self.outstanding = 0  # tokens
        self.tokens: dict[int, int] = {}  # of each of its sequences
        self._unread: set[int] = set()  # sequences without a reader: they have nothing to do, and don't count
        self._balancer = balancer
        self._marks: dict[int, None] = {}
        self._told: asyncio.Future[None] | None = None

    def give(self, message: Submit, marks: list[tuple[int, int]]) -> None:
        """This engine's turn."""
        tokens = self.tokens[message.id] = outstanding_tokens(message)
        if message.credit:
            self.outstanding += tokens
        else:
            self._unread.add(message.id)
        for mark, _ in marks:
            self._marks.pop(mark, None)
            self._marks[mark] = None
        while len(self._marks) > MARKS_MAX:
            del self._marks[next(iter(self._marks))]
        self.link.submit(message)

    def credit(self, sequence_id: int, total: int) -> None:
        """Let one of its sequences go on, or (0) wait for a reader."""
        if total == 0 and sequence_id not in self._unread:
            self._unread.add(sequence_id)
            self.outstanding -= self.tokens[sequence_id]
        elif total and sequence_id in self._unread:
            self._unread.remove(sequence_id)
            self.outstanding += self.tokens[sequence_id]
        self.link.credit(sequence_id, total)

    def forget(self, sequence_id: int) -> None:
        """A sequence has ended."""
        tokens = self.tokens.pop(sequence_id, 0)
        if sequence_id in self._unread:
            self._unread.remove(sequence_id)
        else:
            self.outstanding -= tokens

    def known_tokens(self, marks: list[tuple[int, int]]) -> int:
        """How much of the beginning of a prompt it was given before."""
        known = 0
        for mark, end in marks:
            if mark not in self._marks:
                break
            known = end
        return known

    def told(self) -> asyncio.Future[None]:
        """Done when the engine has said how it is."""
        if self._told is None:
            self._told = asyncio.get_running_loop().create_future()
            self.link.ask_gauges()
        return self._told

    # What its link tells

    def on_step(self, step: Step, more: bool) -> None:
        """Its sequences go on."""
        self.gauges = step.gauges
        if self._told is not None:
            self._told.set_result(None)
            self._told = None
        self._balancer.on_step(self, step, more)

    def on_engine_lost(self) -> None:
        """It knows nothing any more."""
        lost = list(self.tokens)
        self.gauges, self.outstanding = Gauges(), 0
        self.tokens.clear()
        self._unread.clear()
        self._marks.clear()
        self._balancer.on_lost(lost)

    def on_engine_ready(self) -> None:
        """It takes part again."""
        self._balancer.on_ready()


class Balancer:
    """The engine that a stream table sees."""

    def __init__(self, links: list[Link]) -> None:
        self.hello: Hello | None = None  # of all that are up, together
        self.members = [Member(link, self) for link in links]
        self._of: dict[int, Member] = {}  # by sequence id
        self._listener: Streams | None = None
        for member in self.members:
            member.link.listen(member)

    async def start(self) -> Hello:
        """Wait for every engine's first hello. One of several that others run may come later. Raises EngineFailed."""
        outcomes = await asyncio.gather(*(member.link.start() for member in self.members), return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        fatal = [failure for failure in failures if not isinstance(failure, EngineFailed) or failure.code == 2]
        if fatal or len(failures) == len(outcomes):
            await self.close()
            raise (fatal or failures)[0]
        for member, outcome in zip(self.members, outcomes, strict=True):
            if isinstance(outcome, EngineFailed):
                member.link.keep()
        self._join()
        assert self.hello is not None
        return self.hello

    async def refresh(self) -> None:
        """Have every engine that is up say how it is, for as long as that is worth waiting for."""
        waits = [member.told() for member in self.members if member.link.hello is not None]
        if waits:
            await asyncio.wait(waits, timeout=REFRESH_WAIT_S)

    async def close(self) -> None:
        """Let go of all."""
        for member in self.members:
            await member.link.close()

    def listen(self, listener: Streams) -> None:
        """Tell `listener` everything from now on."""
        self._listener = listener
        for member in self.members:
            member.link.listen(member)  # again: it asks for the gauges

    @property
    def gauges(self) -> Gauges:
        """Of all engines together."""
        known = [msgspec.structs.astuple(member.gauges) for member in self.members]
        return Gauges(*map(sum, zip(*known, strict=True)))

    # What streams ask

    def submit(self, message: Submit) -> None:
        """Start a sequence, on the engine that has the least left to do with it."""
        up = [member for member in self.members if member.link.hello is not None]
        if not up:
            return
        marks = list(prompt_marks(message)) if len(self.members) > 1 else []
        member = up[0] if len(up) == 1 else _least_busy(up, marks)
        self._of[message.id] = member
        member.give(message, marks)

    def credit(self, sequence_id: int, total: int) -> None:
        """Let a sequence reach `total` generated tokens."""
        if member := self._of.get(sequence_id):
            member.credit(sequence_id, total)

    def cancel(self, sequence_ids: list[int]) -> None:
        """Forget sequences."""
        told: dict[Member, list[int]] = {}
        for sequence_id in sequence_ids:
            if member := self._of.pop(sequence_id, None):
                member.forget(sequence_id)
                told.setdefault(member, []).append(sequence_id)
        for member, ids in told.items():
            member.link.cancel(ids)

    # What the members tell

    def on_step(self, member: Member, step: Step, more: bool) -> None:
        """Some sequences went on, some ended."""
        for end in step.ends:
            member.forget(end.id)
            self._of.pop(end.id, None)
        if self._listener is not None:
            self._listener.on_step(step, more)

    def on_lost(self, sequence_ids: list[int]) -> None:
        """An engine died with these."""
        for sequence_id in sequence_ids:
            del self._of[sequence_id]
        self._join()
        if self._listener is not None:
            self._listener.on_engine_lost(sequence_ids)

    def on_ready(self) -> None:
        """An engine is there, for the first time or again."""
        self._join()
        if self._listener is not None:
            self._listener.on_engine_ready()

    def _join(self) -> None:
        """What fits in all engines together; a single sequence must fit in each of them."""
        up = [hello for member in self.members if (hello := member.link.hello) is not None]
        self.hello = (
            up
            and msgspec.structs.replace(
                up[0],
                context_tokens_max=min(hello.context_tokens_max for hello in up),
                pool_tokens=sum(hello.pool_tokens for hello in up),
                running_max=sum(hello.running_max for hello in up),
            )
        ) or None


def _least_busy(members: list[Member], marks: list[tuple[int, int]]) -> Member:
    """The one that has the least left to do with a prompt of these marks."""
    mean = sum(member.outstanding for member in members) / len(members)
    extra = max(KNOWN_EXTRA_TOKENS, KNOWN_EXTRA_PART * mean)

    def left_to_do(member: Member) -> float:
        known = member.known_tokens(marks)
        return member.outstanding - min(KNOWN_WEIGHT * known, known + extra)

    return min(members, key=left_to_do)


def outstanding_tokens(message: Submit) -> int:
    """What an engine has to compute for a sequence, as far as that can be known."""
    left = message.sampling.max_tokens - len(message.generated)
    return len(message.prompt) + len(message.generated) + min(left, EXPECTED_TOKENS_MAX)


def prompt_marks(message: Submit) -> Iterator[tuple[int, int]]:
    """(hash, length) of the prompt's beginnings, each hash with all that is before it. Other clients' prompts are never
    the same."""
    prompt = tuple(message.prompt[:MARKED_TOKENS_MAX])
    mark, start = hash(message.salt), 0
    while True:
        end = start + (FINE_STRIDE if start < FINE_TOKENS else COARSE_STRIDE)
        if end > len(prompt):
            return
        mark = hash((mark, prompt[start:end]))
        yield mark, end
        start = end
