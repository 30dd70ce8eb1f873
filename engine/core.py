"""The engine's heart: messages in, one batch of tokens a step out. No sockets, no asyncio.

It trusts nothing that a `Submit` says: ids, lengths and numbers are checked here, and a sequence that can't be
served ends with an error of its own. No message and no sequence ends the loop.
"""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from engine.block_pool import BlockPool
from engine.scheduler import Scheduler
from engine.sequence import Launched, Sampled, Sequence, Slice
from engine.tokenizer import spec_hash
from engine.wire import (
    WIRE_VERSION,
    Admitted,
    Cancel,
    Credit,
    End,
    Hello,
    Logprob,
    PromptLogprobs,
    Sampling,
    Step,
    Submit,
    ToEngine,
    TokenizerSpec,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from engine.constraints import Constraint, Grammars

# More would make one sequence's log probabilities dominate the step's time and message.
LOGPROBS_MAX = 64
# Of one prompt, told in one message: some megabytes.
PROMPT_LOGPROBS_MAX = 262_144
# OpenAI's ranges; a factor beyond the last one leaves nothing of a logit.
PENALTY_MAX = 2.0
REPETITION_PENALTY_MAX = 100.0
BIAS_MAX = 100.0
# What a server does for a first token takes it as long as so many others do (`python -m bench first_token`).
FIRST_COSTS_TOKENS = 8
# More would be a list of most of a text's words; each costs time in every step.
BIASED_IDS_MAX = 1024


def _print_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Runner(Protocol):
    """A source of tokens: a model, or a script."""

    name: str
    tokenizer: TokenizerSpec
    vocab_size: int
    eos_ids: list[int]
    context_tokens_max: int  # of the model itself, whatever the pool holds

    def execute(self, slices: list[Slice]) -> list[Sampled | None]:
        """Compute all slices; one answer for each with `sample` set, in order. None: no token yet, try again."""
        ...


@runtime_checkable
class AheadRunner(Runner, Protocol):
    """One whose steps may overlap."""

    def launch(self, slices: list[Slice]) -> Launched:
        """Begin to compute all slices, behind what was launched before."""
        ...


@dataclass(slots=True, eq=False)
class Peer:
    """One connected server, with the parts of the step that it will be sent. Its ids mean nothing to another's."""

    send: Callable[[Step], None]
    sequences: dict[int, Sequence] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    admitted: list[Admitted] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    wants_step: bool = False  # even an empty one: the gauges changed, or were asked for


class Core:
    """Owns every sequence. One thread calls `receive` and `step` by turns."""

    def __init__(
        self,
        runner: Runner,
        pool: BlockPool,
        scheduler: Scheduler,
        *,
        version: str,
        clock: Callable[[], float] = time.monotonic,
        report: Callable[[str], None] = _print_to_stderr,
    ) -> None:
        """`report` is told the traceback of a fault in the runner: for the log, never for a client."""
        self._runner = runner
        self._begin = runner.launch if isinstance(runner, AheadRunner) else self._execute
        self._scheduler = scheduler
        self._eos = frozenset(runner.eos_ids)
        self._peers: list[Peer] = []
        self._grammars: Grammars | None = None
        self._preparing: dict[Sequence, Future[LLMatcher]] = {}  # their grammars are being compiled
        self._steps = 0
        self._flying: tuple[list[Slice], Launched] | None = None  # launched, and its answers not looked at
        self._discarded = 0
        self._clock = clock
        self._report = report
        self.hello = Hello(
            wire_version=WIRE_VERSION,
            engine_version=version,
            model=runner.name,
            tokenizer=runner.tokenizer,
            tokenizer_hash=spec_hash(runner.tokenizer),
            vocab_size=runner.vocab_size,
            eos_ids=runner.eos_ids,
            context_tokens_max=min(runner.context_tokens_max, pool.blocks * pool.block_size),
            pool_tokens=pool.blocks * pool.block_size,
            running_max=scheduler.running_max,
        )
        # Blocks of one model mean nothing to another, should a pool ever outlive its model or be shared.
        self._salt = f"{self.hello.model}\0{self.hello.tokenizer_hash}\0"

    def join(self, send: Callable[[Step], None]) -> Peer:
        """A server connected; `send` takes its steps."""
        peer = Peer(send)
        self._peers.append(peer)
        return peer

    def leave(self, peer: Peer) -> None:
        """A server is gone, and with it all that it asked for."""
        self._peers.remove(peer)
        for sequence in peer.sequences.values():
            self._remove(sequence)
        peer.sequences.clear()

    def receive(self, peer: Peer, message: ToEngine) -> None:
        """Apply one message. An id that is not known (any more) is passed over: its end was already sent."""
        peer.wants_step = True
        if isinstance(message, Submit):
            self._submit(peer, message)
        elif isinstance(message, Credit):
            for id_, total in message.totals:
                if sequence := peer.sequences.get(id_):
                    self._credit(sequence, total)
        elif isinstance(message, Cancel):
            for id_ in message.ids:
                if sequence := peer.sequences.pop(id_, None):
                    self._remove(sequence)

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to compute or to tell."""
        scheduler = self._scheduler
        return (
            bool(scheduler.running or scheduler.waiting or self._flying)
            or any(p.wants_step or p.ends for p in self._peers)
            or any(compiled.done() for compiled in self._preparing.values())
        )

    @property
    def is_preparing(self) -> bool:
        """Whether there will be work soon, of which nobody tells."""
        return bool(self._preparing)

    def prepare_grammars(self) -> None:
        """Make ready for grammars: left to the first one, it would delay every sequence that runs."""
        if self._grammars is None:
            from engine.constraints import Grammars  # and numpy, which takes longer to import than all the rest

            hello = self.hello
            self._grammars = Grammars(hello.tokenizer, hello.vocab_size, hello.eos_ids)

    def step(self) -> None:
        """Compute one step, and send each server its part of it."""
        if self._preparing:
            self._take_prepared()
        slices = self._scheduler.schedule()
        for sequence in self._scheduler.admitted:
            waited_s = self._clock() - sequence.submitted_at
            _owner(sequence).admitted.append(Admitted(sequence.id, sequence.cached_tokens, waited_s))
        self._scheduler.admitted.clear()
        if slices:
            self._steps += 1
            self._compute(slices)
        else:
            self._land()
        gauges = self._scheduler.gauges(self._steps, self._discarded)
        for peer in self._peers:
            if peer.ids or peer.ends or peer.admitted or peer.wants_step:
                peer.send(
                    Step(peer.ids, peer.tokens, peer.admitted, peer.ends, peer.logprobs, gauges, peer.prompt_logprobs)
                )
                peer.ids, peer.tokens, peer.admitted, peer.ends, peer.logprobs = [], [], [], [], []
                peer.prompt_logprobs = []
                peer.wants_step = False

    def _compute(self, slices: list[Slice]) -> None:
        """Begin a step. Where steps may overlap, the one before is taken in only then: the device has no pause while
        this step is scheduled and that one's tokens are sent."""
        began = self._clock()
        try:
            launched = self._begin(slices)
        except Exception:  # a fault in the model's code ends what was in the step, and nothing else
            self._report(traceback.format_exc())
            self._land()
            self._fail(slices)
            return
        if launched.ahead:
            for part in slices:
                self._scheduler.launched(part)
        self._land()
        self._flying = slices, launched
        if not launched.ahead:
            self._scheduler.chunks.took(slices, self._clock() - began)
            self._land()

    def _execute(self, slices: list[Slice]) -> Launched:
        answers = self._runner.execute(slices)
        return Launched(lambda: answers, ahead=False)

    def _land(self) -> None:
        """Take in the answers of the step that was launched last, if they were not yet."""
        if self._flying is None:
            return
        slices, launched = self._flying
        self._flying = None
        try:
            turns = _in_turn(slices, launched.answers())
        except Exception:
            self._report(traceback.format_exc())
            self._fail(slices)
            return
        scheduler = self._scheduler
        for part, sampled in turns:
            if launched.ahead:
                scheduler.landed(part)
            elif sampled is not None or not part.sample:
                scheduler.computed(part)
            if sampled is None:
                continue
            sequence = part.sequence
            peer = _owner(sequence)
            if peer.sequences.get(sequence.id) is sequence:
                self._append(peer, sequence, sampled)
            else:  # it ended, or was cancelled, when the step was under way already
                self._discarded += 1

    def _fail(self, slices: list[Slice]) -> None:
        for part in slices:
            if _owner(part.sequence).sequences.get(part.sequence.id) is part.sequence:
                self._end(part.sequence, "error", message="the engine failed; its log says how")

    def _append(self, peer: Peer, sequence: Sequence, sampled: Sampled) -> None:
        """Add a token to its sequence and to the server's step, and see whether the sequence ends or parks."""
        if sampled.error:
            self._end(sequence, "error", message=sampled.error)
            return
        token = sampled.token
        sampling = sequence.sampling
        generated = len(sequence.tokens) - sequence.prompt_len + 1
        if generated == 1 and sampling.prompt_logprobs >= 0:
            if not all(math.isfinite(each.logprob) for each in sequence.prompt_logprobs):
                self._end(sequence, "error", message="the model's output for the prompt holds numbers that are none")
                return
            peer.prompt_logprobs.append(PromptLogprobs(sequence.id, sequence.prompt_logprobs))
            sequence.prompt_logprobs = []
        if sampled.logprob is not None:
            best = sampled.logprob
            peer.logprobs.append(Logprob(len(peer.ids), best.logprob, best.top_ids, best.top_logprobs))
        peer.ids.append(sequence.id)
        peer.tokens.append(token)
        sequence.tokens.append(token)
        if sampled.finish:
            self._end(sequence, sampled.finish, by_token=sampled.by_token)
        elif (token in self._eos and not sampling.ignore_eos) or token in sampling.stop_ids:
            self._end(sequence, "stop", by_token=True)
        elif sequence.constraint is not None and sequence.constraint.follow(token):
            self._end_by_grammar(sequence, sequence.constraint)
        elif generated >= sampling.max_tokens or len(sequence.tokens) >= self.hello.context_tokens_max:
            self._end(sequence, "length")
        elif generated >= sequence.credit:
            self._scheduler.credit(sequence, sequence.credit)

    def _end(self, sequence: Sequence, reason: str, *, by_token: bool = False, message: str = "") -> None:
        peer = _owner(sequence)
        self._remove(sequence)
        del peer.sequences[sequence.id]
        peer.ends.append(End(sequence.id, reason, by_token, message))

    def _submit(self, peer: Peer, message: Submit) -> None:
        if message.id in peer.sequences:
            return  # the id's owner goes on undisturbed; a server that reuses one has lost count, not the user
        fault = self._fault(message)
        if fault:
            peer.ends.append(End(message.id, "error", message=fault))
            return
        sequence = Sequence(
            id=message.id,
            tokens=message.prompt + message.generated,
            prompt_len=len(message.prompt),
            sampling=message.sampling,
            credit=message.credit,
            salt=self._salt + message.salt,
            priority=message.priority,
            owner=peer,
            submitted_at=self._clock(),
        )
        peer.sequences[message.id] = sequence
        if message.sampling.grammar:
            self.prepare_grammars()
            assert self._grammars is not None
            self._preparing[sequence] = self._grammars.compile(message.sampling.grammar)
        else:
            self._scheduler.add(sequence)

    def _take_prepared(self) -> None:
        """Queue the sequences whose grammars are compiled. Until then they take no part in anything."""
        for sequence, compiled in [item for item in self._preparing.items() if item[1].done()]:
            del self._preparing[sequence]
            assert self._grammars is not None
            self._scheduler.add(sequence)
            if compiled.exception() is not None:
                self._report(repr(compiled.exception()))
                self._end(sequence, "error", message="the engine failed; its log says how")
                continue
            constraint = self._grammars.constraint(compiled.result(), sequence.tokens[sequence.prompt_len :])
            sequence.constraint = constraint
            if constraint.ended:
                self._end_by_grammar(sequence, constraint)

    def _end_by_grammar(self, sequence: Sequence, constraint: Constraint) -> None:
        self._end(sequence, "error" if constraint.fault else "stop", message=constraint.fault)

    def _credit(self, sequence: Sequence, total: int) -> None:
        if sequence in self._preparing:
            sequence.credit = total
        else:
            self._scheduler.credit(sequence, total)

    def _remove(self, sequence: Sequence) -> None:
        if self._preparing.pop(sequence, None) is None:
            self._scheduler.remove(sequence)

    def _fault(self, message: Submit) -> str:
        """What is wrong with a submission, as a sentence; "" when nothing is."""
        total = len(message.prompt) + len(message.generated)
        limit = self.hello.context_tokens_max
        if not message.prompt:
            return "the prompt holds no token"
        if total >= limit:
            return f"{total} tokens leave no room for a new one in {limit}"
        for ids in (message.prompt, message.generated):
            if ids and not (min(ids) >= 0 and max(ids) < self.hello.vocab_size):
                return f"a token id is not in the vocabulary of {self.hello.vocab_size}"
        if len(message.generated) >= message.sampling.max_tokens:
            return "max_tokens is reached already"
        if len(message.prompt) * (message.sampling.prompt_logprobs + 1) > PROMPT_LOGPROBS_MAX:
            return f"prompt_logprobs of this prompt are more than {PROMPT_LOGPROBS_MAX} numbers"
        return _sampling_fault(message.sampling) or _adjustment_fault(message.sampling, self.hello.vocab_size)


def _in_turn(slices: list[Slice], answers: list[Sampled | None]) -> Iterable[tuple[Slice, Sampled | None]]:
    """Each slice with its answer, None where it has none, in the order in which servers write to clients: prompts,
    which are a step's last slices, go first where they are few. Their first tokens would wait for all the others',
    which wait for hardly anything that way."""
    if len(answers) != len(slices):
        each = iter(answers)
        answers = [next(each) if part.sample else None for part in slices]
    begun = len(slices)
    while begun and not slices[begun - 1].sequence.generated:
        begun -= 1
    if 0 < (len(slices) - begun) * FIRST_COSTS_TOKENS <= begun:
        return zip(slices[begun:] + slices[:begun], answers[begun:] + answers[:begun], strict=True)
    return zip(slices, answers, strict=True)


def _owner(sequence: Sequence) -> Peer:
    assert isinstance(sequence.owner, Peer)
    return sequence.owner


def _sampling_fault(sampling: Sampling) -> str:
    numbers = (sampling.temperature, sampling.top_p, sampling.min_p)
    if not all(math.isfinite(x) and x >= 0 for x in numbers) or sampling.top_p > 1 or sampling.min_p > 1:
        return "temperature must be at least 0, and top_p and min_p from 0 to 1"
    if sampling.top_k < 0:
        return "top_k must be at least 0"
    if not all(0 <= x < 2**64 for x in (sampling.seed, sampling.prompt_index, sampling.choice_index)):
        return "seed, prompt_index and choice_index must be unsigned 64-bit numbers"
    if sampling.max_tokens < 1:
        return "max_tokens must be at least 1"
    if not all(-1 <= x <= LOGPROBS_MAX for x in (sampling.logprobs, sampling.prompt_logprobs)):
        return f"logprobs and prompt_logprobs must be from -1 to {LOGPROBS_MAX}"
    return ""


def _adjustment_fault(sampling: Sampling, vocab_size: int) -> str:
    """Written so that NaN is refused too."""
    if not all(-PENALTY_MAX <= x <= PENALTY_MAX for x in (sampling.frequency_penalty, sampling.presence_penalty)):
        return f"frequency_penalty and presence_penalty must be from {-PENALTY_MAX:g} to {PENALTY_MAX:g}"
    if not 0 < sampling.repetition_penalty <= REPETITION_PENALTY_MAX:
        return f"repetition_penalty must be above 0 and at most {REPETITION_PENALTY_MAX:g}"
    bias = sampling.logit_bias
    if len(bias) > BIASED_IDS_MAX:
        return f"logit_bias may name at most {BIASED_IDS_MAX} ids"
    if len({id_ for id_, _ in bias}) < len(bias):
        return "logit_bias names an id twice"
    if not all(0 <= id_ < vocab_size and -BIAS_MAX <= value <= BIAS_MAX for id_, value in bias):
        return f"logit_bias must hold ids below {vocab_size} and values from {-BIAS_MAX:g} to {BIAS_MAX:g}"
    return ""
