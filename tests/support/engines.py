"""Engines for tests: one that a StreamTable asks and a test plays, and a runner whose tokens depend on everything
that went before, so that any wrong turn of the scheduler shows."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from engine.sequence import Sampled, Sequence, Slice
from engine.tokenizer import Tokenizer
from engine.wire import WIRE_VERSION, Admitted, End, Gauges, Hello, Logprob, Step, Submit, TokenizerSpec
from tests.support.specs import bytes_spec

EOS = 256
VOCAB = 257


def spec() -> TokenizerSpec:
    """Bytes, and one end token behind them."""
    return bytes_spec(["<|end|>"])


def hello(*, running_max: int = 8) -> Hello:
    """What the scripted engine says of itself."""
    return Hello(WIRE_VERSION, "test", "scripted", spec(), "hash", VOCAB, [EOS], 4096, 65536, running_max)


class ScriptedEngine:
    """Keeps what it was asked, and makes steps of what the test says. Like the real one it never makes a token for
    a sequence that is out of credit: asking for that is the test's mistake."""

    def __init__(self, *, running_max: int = 8) -> None:
        self.hello: Hello | None = hello(running_max=running_max)
        self.submitted: list[Submit] = []
        self.credits: list[tuple[int, int]] = []  # every grant, in order
        self.cancelled: list[int] = []
        self.live: dict[int, Submit] = {}
        self.made: dict[int, int] = {}  # generated ids, those of an earlier engine included
        self.credit_of: dict[int, int] = {}

    def submit(self, message: Submit) -> None:
        """See the table's Engine."""
        assert message.id not in self.made, "sequence ids never repeat"
        self.submitted.append(message)
        self.live[message.id] = message
        self.made[message.id] = len(message.generated)
        self.credit_of[message.id] = message.credit

    def credit(self, sequence_id: int, total: int) -> None:
        """See the table's Engine."""
        assert sequence_id in self.live, "credit for a sequence that is gone"
        self.credits.append((sequence_id, total))
        self.credit_of[sequence_id] = total

    def cancel(self, sequence_ids: list[int]) -> None:
        """See the table's Engine."""
        for sequence_id in sequence_ids:
            assert sequence_id in self.made, "cancelled, and never submitted"
            assert sequence_id not in self.cancelled, "cancelled twice"
            self.live.pop(sequence_id, None)  # the end of a sequence and its cancel may cross
            self.cancelled.append(sequence_id)

    @property
    def runnable(self) -> list[int]:
        """Sequences with credit left."""
        return [id_ for id_ in self.live if self.made[id_] < self.credit_of[id_]]

    def admit(self, *ids: int, cached: int = 0, waited_s: float = 0.0) -> Step:
        """A step that takes sequences into the batch."""
        return Step([], [], [Admitted(id_, cached, waited_s) for id_ in ids], [], [], Gauges())

    def tokens(self, tokens: Iterable[tuple[int, int]], *ends: End) -> Step:
        """A step with (sequence id, token) pairs, and ends."""
        pairs = list(tokens)
        for id_, _ in pairs:
            if id_ in self.live:
                assert self.made[id_] < self.credit_of[id_], "the engine has no credit for this token"
                self.made[id_] += 1
        for end in ends:
            self.live.pop(end.id, None)
        return Step([id_ for id_, _ in pairs], [token for _, token in pairs], [], list(ends), [], Gauges())

    def die(self) -> None:
        """Gone, with all that it had."""
        self.hello = None
        self.live.clear()

    def revive(self) -> None:
        """A new one, which knows nothing."""
        self.hello = hello()


def tokenizer() -> Tokenizer:
    """The scripted engine's."""
    return Tokenizer(spec())


def expected(prompt: list[int], count: int) -> list[int]:
    """The ids that ChainRunner makes for a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def next_token(tokens: list[int]) -> int:
    """A byte that depends on every token so far."""
    return blake2b(bytes(token % 256 for token in tokens), digest_size=1).digest()[0]


class ChainRunner:
    """A model in miniature. Its KV cache is real: what a token adds is written to the sequence's blocks, and read back
    through the block table when the next one is chosen. A block that is shared wrongly, lost or not computed changes
    the tokens, or raises."""

    name = "chain"
    vocab_size = VOCAB

    def __init__(self, blocks: int, block_size: int, *, eos_ids: tuple[int, ...] = (), context: int = 4096) -> None:
        self.tokenizer = spec()
        self.eos_ids = list(eos_ids)
        self.context_tokens_max = context
        self.slots: list[int | None] = [None] * (blocks * block_size)
        self.block_size = block_size
        self.executed: list[list[tuple[int, int, int]]] = []  # for each step: (sequence id, start, count)
        self.fail_with: Exception | None = None
        self.answers: dict[int, Sampled | None] = {}  # by sequence id, in place of the next token, once

    def execute(self, slices: list[Slice]) -> list[Sampled | None]:
        """See the core's Runner."""
        self.executed.append([(part.sequence.id, part.start, part.count) for part in slices])
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            raise error
        for part in slices:
            for position in range(part.start, part.start + part.count):
                self.slots[self._slot(part.sequence, position)] = part.sequence.tokens[position]
        for part in slices:
            for place in part.prompt_targets:
                self._tell_prompt(part.sequence, place)
        return [self._answer(part) for part in slices if part.sample]

    def _tell_prompt(self, sequence: Sequence, place: int) -> None:
        held = [self.slots[self._slot(sequence, position)] for position in range(place)]
        assert held == sequence.tokens[:place], "the cache doesn't hold what the prompt is"
        assert place == len(sequence.prompt_logprobs) + 1, "told twice, or never"
        sequence.prompt_logprobs.append(Logprob(place, -float(sequence.tokens[place]), [], []))

    def _answer(self, part: Slice) -> Sampled | None:
        sequence = part.sequence
        if sequence.id in self.answers:
            return self.answers.pop(sequence.id)
        held = [self.slots[self._slot(sequence, position)] for position in range(part.start + part.count)]
        assert held == sequence.tokens, "the cache doesn't hold what the sequence is"
        return Sampled(next_token(sequence.tokens))

    def _slot(self, sequence: Sequence, position: int) -> int:
        return sequence.blocks[position // self.block_size] * self.block_size + position % self.block_size
