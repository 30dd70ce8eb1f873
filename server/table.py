"""All streams of a server: starts them, hands the engine's steps to them, holds them for their readers' return.

`on_step` is the hot path: one pass over a step's tokens, without a task, a queue or an await. Everything that a
stream takes (an engine sequence, its key's slot, credit, a place here) is given back in `release`, which
`Stream.finish` calls exactly once.
"""

from __future__ import annotations

import traceback
from array import array
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from typing import Protocol

import msgspec

from engine.text import TextStream
from engine.tokenizer import Tokenizer
from engine.wire import Admitted, End, Gauges, Hello, Logprob, Sampling, Step, Submit
from server import outcome as outcomes
from server.expiry import Expiry
from server.limits import Limits
from server.log import Total
from server.metrics import Metrics
from server.outcome import Outcome
from server.outlet import Outlet, ahead
from server.stream import Choice, Grammar, Stream
from server.tools.formats import CallFormat

# A request that was with two engines when they died is likely what killed them: it isn't given to a third.
ENGINE_DEATHS_MAX = 2
# Several engines may die in one instant. Before a stream is given to another one, that one's end would be known.
REGROUP_S = 0.02
# Streams that are no longer held are still told apart from those that never were, as long as this many came since.
GONE_MAX = 16_384


class Engine(Protocol):
    """What the table needs of an engine's client."""

    hello: Hello | None  # None: not connected

    def submit(self, message: Submit) -> None: ...  # noqa: D102
    def credit(self, sequence_id: int, total: int) -> None: ...  # noqa: D102
    def cancel(self, sequence_ids: list[int]) -> None: ...  # noqa: D102


class Allowance(Protocol):
    """What each key may have. `start` and `resume` take a slot, or raise Busy and take nothing; each slot is given back
    by one `leave`. `track` and `end` tell of a stream's begin and end, for the tokens that it makes."""

    @property
    def several(self) -> bool: ...  # noqa: D102  (there are others to leave room for)
    def start(self, key: str, prompt_tokens: int) -> None: ...  # noqa: D102
    def resume(self, key: str) -> None: ...  # noqa: D102
    def leave(self, key: str) -> None: ...  # noqa: D102
    def track(self, stream: Stream) -> None: ...  # noqa: D102
    def end(self, stream: Stream) -> None: ...  # noqa: D102


class Busy(Exception):
    """No room for another stream now. `status` is 429 (this key's limit) or 503 (the server's); with others waiting
    helps nothing, and `retry_after_s` is 0."""

    def __init__(self, status: int, message: str, retry_after_s: int, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.code = code


class Part(msgspec.Struct, frozen=True):
    """One sequence that a request asks for."""

    prompt: list[int]
    sampling: Sampling
    calls: CallFormat | None = None  # how its text may call tools; None: it is text, whatever it looks like


class TextOptions(msgspec.Struct, frozen=True):
    """How ids become text."""

    stops: tuple[str, ...] = ()
    skip_special: bool = True


class StreamTable:
    """`clock` gives seconds that only grow; `call_later(seconds, f)` returns what cancels the call."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        allowance: Allowance,
        metrics: Metrics,
        limits: Limits,
        *,
        clock: Callable[[], float],
        call_later: Callable[[float, Callable[[], None]], Callable[[], None]],
        log_access: Callable[[Stream], None],
        log_fault: Callable[[str, str], None],
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.limits = limits
        self.clock = clock
        self.logs = Total()
        self._allowance = allowance
        self._metrics = metrics
        self.call_later = call_later
        self._log_access = log_access
        self.log_fault = log_fault
        self._streams: dict[str, Stream] = {}
        self._by_name: dict[tuple[str, str], Stream] = {}  # by key and Idempotency-Key
        self._live: dict[Stream, None] = {}  # have no outcome yet
        waits = partial(Expiry[Stream], clock=clock, call_later=call_later)
        self._waiting = waits(limits.queue_timeout_s, self._expire_queued)
        self._finished = waits(limits.resume_ttl_s, self.forget)  # still readable
        self._with_slot: set[Stream] = set()
        self._choices: dict[int, Choice] = {}  # by sequence id
        self.outlets: dict[int, Outlet] = {}  # by sequence id, of those whose tokens leave by one
        self._unwoken: dict[Stream, None] = {}  # have tokens of steps that are told together
        self._sequence_ids = count(1)
        self._queued = 0  # sequences that were not admitted yet
        self._stepped_at = -1.0  # when the latest step came
        self._queued_of: dict[str, int] = {}  # the same by key
        self._gone: dict[str, str] = {}  # ids of streams that were dropped, and their keys, oldest first
        self._returning: Callable[[], None] | None = None  # cancels the wait for an engine

    # Starting and finding

    def start(
        self,
        grammar: Grammar,
        parts: list[Part],
        *,
        key: str,
        request_id: str,
        client: str = "",
        priority: int = 0,
        text: TextOptions,
        collect: bool = False,
    ) -> Stream:
        """A new stream, its sequences submitted. `collect` keeps each choice's text, for an answer in one piece.

        Raises Busy before any engine work. The caller attaches a reader at once."""
        self._take_room(key, parts)
        stream = Stream(self, key, request_id, grammar, client=client, priority=priority)
        self._streams[stream.id] = stream
        self._live[stream] = None
        self._with_slot.add(stream)
        self._allowance.track(stream)
        for index, part in enumerate(parts):
            choice = Choice(
                stream=stream,
                index=index,
                prompt=array("I", part.prompt),
                sampling=part.sampling,
                text=self._text_of(part, text),
                parser=part.calls.parser() if part.calls else None,
                shown=[] if collect else None,
                logprobs=[] if collect else None,
                at_once=len(parts) == 1,
            )
            choice.allow(self.limits.credit_window, self.limits.credit_window)
            stream.choices.append(choice)
            self._submit(choice, part.prompt, [])
        for event in grammar.opening():  # while the engine begins already
            stream.append(event)
        self._metrics.started[grammar.api] += 1
        self._arm_deadlines(stream)
        self.trim()
        return stream

    def _text_of(self, part: Part, text: TextOptions) -> TextStream:
        shown = part.calls.marker_ids if part.calls else frozenset()
        return TextStream(self.tokenizer, skip_special=text.skip_special, shown=shown, stops=text.stops)

    def find(self, stream_id: str, key: str) -> Stream | None:
        """The stream, if it is this key's and still held."""
        stream = self._streams.get(stream_id)
        return stream if stream is not None and stream.key == key else None

    def remember(self, stream: Stream, name: str, digest: bytes) -> None:
        """Let `recall` find the stream by its client's own name for the request, as long as it is held."""
        stream.idempotency = (name, digest)
        self._by_name[stream.key, name] = stream

    def recall(self, key: str, name: str) -> Stream | None:
        """The stream that this client began under this name."""
        return self._by_name.get((key, name))

    def was_dropped(self, stream_id: str, key: str) -> bool:
        """Whether a stream that `find` doesn't know was this key's, and is gone."""
        return self._gone.get(stream_id) == key

    def retake_slot(self, stream: Stream) -> None:
        """A reader returns to a detached stream. Raises Busy when its key's slots are taken meanwhile."""
        if stream.outcome is None and stream not in self._with_slot:
            self._allowance.resume(stream.key)
            self._with_slot.add(stream)

    @property
    def live(self) -> Iterable[Stream]:
        """The streams that have not ended."""
        return self._live.keys()

    def count_homeless(self, gauges: Gauges) -> Gauges:
        """The engines' gauges, and as waiting what waits for an engine to come back, if none is there."""
        if self.engine.hello is not None:
            return gauges
        homeless = [choice for stream in self._live for choice in stream.live]
        tokens = sum(len(choice.prompt) + len(choice.generated) for choice in homeless)
        waiting, waiting_tokens = gauges.waiting + len(homeless), gauges.waiting_tokens + tokens
        return msgspec.structs.replace(gauges, waiting=waiting, waiting_tokens=waiting_tokens)

    def _take_room(self, key: str, parts: list[Part]) -> None:
        """The server's room first: what is refused for lack of it costs a key nothing. Raises Busy."""
        hello = self.engine.hello
        if hello is None:
            raise Busy(503, "the engine is starting", 2)
        if len(self._live) >= self.limits.streams_max:
            raise Busy(503, f"the server's limit of streams ({len(self._live)}) is reached", 2)
        queued = self._queued + len(parts)
        free = self.limits.queue_max + hello.running_max - queued
        if free < 0:
            raise Busy(503, f"the server's limit of waiting sequences ({self._queued}) is reached", 5)
        if queued > hello.running_max and self._allowance.several:
            # A key may hold as much of the queue as it leaves free, so that others always find room.
            mine = self._queued_of.get(key, 0) + len(parts)
            if mine > free:
                raise Busy(429, f"this key's share of the queue is taken, by {mine - len(parts)} of its sequences", 5)
        self._allowance.start(key, sum([len(p.prompt) for p in parts if p.sampling.choice_index == 0]))

    def _count_queued(self, choice: Choice, more: int) -> None:
        key = choice.stream.key
        self._queued += more
        self._queued_of[key] = self._queued_of.get(key, 0) + more
        if not self._queued_of[key]:
            del self._queued_of[key]

    def _submit(self, choice: Choice, prompt: list[int], generated: list[int]) -> None:
        choice.sequence_id = next(self._sequence_ids)
        self._choices[choice.sequence_id] = choice
        if not choice.admitted:
            self._count_queued(choice, 1)
        stream = choice.stream
        self.engine.submit(
            Submit(choice.sequence_id, prompt, choice.sampling, choice.credit, generated, stream.key, stream.priority)
        )

    def _arm_deadlines(self, stream: Stream) -> None:
        self._waiting.add(stream)
        seconds = self.limits.request_timeout_s
        if seconds is not None:
            end = Outcome(outcomes.EXPIRED, f"the request took longer than {seconds:g} s")
            stream.on_finish.append(self.call_later(seconds, lambda: stream.finish(end)))

    def _expire_queued(self, stream: Stream) -> None:
        if stream.state == "queued" or not any(c.admitted for c in stream.choices):
            seconds = self.limits.queue_timeout_s
            stream.finish(Outcome(outcomes.EXPIRED, f"the request waited {seconds:g} s for its turn", True))

    # The engine's steps

    def on_step(self, step: Step, more: bool = False) -> None:
        """Give every stream its tokens, and let its readers write them: at once, while all of the stream is at hand, or
        where more belongs to it, of this step or of others (`more`: the next is told at once behind it), when that is
        there too."""
        now = self.clock()
        for admitted in step.admitted:
            if choice := self._choices.get(admitted.id):
                self._admit(choice, admitted)
        for told in step.prompt_logprobs:
            if choice := self._choices.get(told.id):
                try:
                    choice.tell_prompt(told.logprobs)  # its first token is in the same step, and wakes the readers
                except Exception:
                    self._fail(choice.stream)
        for end in step.ends:
            if choice := self._choices.get(end.id):
                choice.at_once = False
        touched: dict[Stream, None] = {}
        self._append(step, now, touched, alone=not (more or self._unwoken))
        self._stepped_at = now
        for end in step.ends:
            if choice := self._choices.get(end.id):
                self._ended(choice, end)
        self._unwoken.update(touched)
        if not more:
            self._wake_all()

    def _wake_all(self) -> None:
        unwoken, self._unwoken = self._unwoken, {}
        for stream in unwoken:
            stream.wake()
        self.trim()

    def _append(self, step: Step, now: float, touched: dict[Stream, None], *, alone: bool) -> None:
        """Each token to its stream's log. Streams that are to be woken behind the step are put into `touched`: all of
        them, unless it is told `alone`."""
        logprobs: list[Logprob | None] = [None] * len(step.ids)
        for best in step.logprobs:
            logprobs[best.index] = best
        unshown = {end.id for end in step.ends if end.by_token}
        choices, before = self._choices, self._stepped_at
        discarded = steady = 0
        for sequence_id, token, logprob in zip(ahead(step.ids, self.outlets), step.tokens, logprobs, strict=True):
            choice = choices.get(sequence_id)
            if choice is None:
                discarded += 1
                continue
            stream = choice.stream
            if stream not in touched:
                if stream.last_token_at == before:
                    steady += 1
                else:
                    self._observe(stream, now)  # before it can end: its access line holds the time to the first token
                stream.last_token_at = now
            try:
                if alone and choice.at_once:
                    if choice.push(token, logprob):
                        self._stopped(choice)
                    else:
                        stream.wake()
                    continue
                touched[stream] = None
                if sequence_id in unshown:
                    choice.generated.append(token)  # it counts, and ends the text without being any
                elif choice.push(token, logprob):
                    self._stopped(choice)
            except Exception:  # our own mistake ends this stream, not the step that all share
                self._fail(stream)
        if steady:  # most streams had a token in the step before, and the same time passed for all of them
            self._metrics.itl.observe(now - before, steady)
        self._metrics.generated_tokens += len(step.ids) - discarded
        self._metrics.discarded_tokens += discarded

    def _fail(self, stream: Stream) -> None:
        self.log_fault(stream.request_id, traceback.format_exc())
        stream.finish(Outcome(outcomes.ERROR, "the server failed; its log has this request's id"))

    def _observe(self, stream: Stream, now: float) -> None:
        if stream.last_token_at:
            self._metrics.itl.observe(now - stream.last_token_at)
        else:
            stream.first_token_at = now
            self._metrics.ttft.observe(now - stream.created)

    def _admit(self, choice: Choice, admitted: Admitted) -> None:
        if choice.admitted:
            return
        choice.admitted = True
        choice.cached_tokens = min(admitted.cached_tokens, len(choice.prompt))
        self._count_queued(choice, -1)
        stream = choice.stream
        if all(each.admitted for each in stream.choices):
            self._waiting.discard(stream)
        if choice is stream.choices[0]:
            # The engine knows: it tells only when the step is done. One that died took its own count with it.
            stream.admitted_at = self.clock() if stream.deaths else stream.created + admitted.waited_s
            self._metrics.queue.observe(admitted.waited_s)

    def _stopped(self, choice: Choice) -> None:
        """A stop string came: what the engine makes from here on is dropped."""
        self._drop(choice)
        self.engine.cancel([choice.sequence_id])
        choice.stream.end_choice(choice, outcomes.STOP)

    def _ended(self, choice: Choice, end: End) -> None:
        self._drop(choice)
        if end.reason in outcomes.SUCCESSES:
            choice.stream.end_choice(choice, end.reason)
        else:
            choice.stream.finish(Outcome(outcomes.ERROR, end.message))

    def _drop(self, choice: Choice) -> None:
        """The engine no longer has this sequence, or won't soon."""
        self.outlets.pop(choice.sequence_id, None)
        if self._choices.pop(choice.sequence_id, None) is not None and not choice.admitted:
            self._count_queued(choice, -1)

    def grant(self, choice: Choice, total: int) -> None:
        """Let a sequence reach `total` generated tokens."""
        if choice.generated and choice.credit <= len(choice.generated) < total and choice.stream.state == "parked":
            choice.stream.last_token_at = self.clock()  # how long its reader stood still is no latency of ours
        choice.allow(total, self.limits.credit_window)
        if choice.sequence_id in self._choices:
            self.engine.credit(choice.sequence_id, total)

    # Leaving, returning, ending

    def hold(self, stream: Stream) -> None:
        """The last reader left. The stream parks at once, and waits `resume_ttl_s` for one to come back."""
        ttl_s = self.limits.resume_ttl_s
        if ttl_s <= 0:
            stream.finish(Outcome(outcomes.CANCELLED, "the client left"))
            return
        for choice in stream.live:
            self.grant(choice, 0)
        self._give_slot(stream)
        stream.held_for = self.call_later(ttl_s, lambda: self._abandon(stream))

    def _abandon(self, stream: Stream) -> None:
        """Nobody came back in time. Whoever still does is told so (410), and gets no half of an answer."""
        stream.finish(Outcome(outcomes.CANCELLED, f"no reader came back within {self.limits.resume_ttl_s:g} s"))
        self.forget(stream)

    def release(self, stream: Stream) -> None:
        """`stream` has its outcome: free what it took, count it, and keep its log for late readers."""
        assert stream.outcome is not None
        left = [choice for choice in stream.choices if choice.sequence_id in self._choices]
        if left:
            self.engine.cancel([choice.sequence_id for choice in left])
            for choice in left:
                self._drop(choice)
        if stream.held_for is not None:
            stream.held_for()
            stream.held_for = None
        self._give_slot(stream)
        self._allowance.end(stream)
        del self._live[stream]
        metrics, api = self._metrics, stream.grammar.api
        metrics.ended[api, stream.outcome.kind] += 1
        metrics.request.observe(self.clock() - stream.created)
        metrics.prompt_tokens += stream.prompt_tokens
        metrics.cached_tokens += stream.cached_tokens
        self._log_access(stream)
        self._waiting.discard(stream)
        self._finished.add(stream)

    def trim(self) -> None:
        """Keep all logs together within their budget: the oldest finished ones go first."""
        while self.logs.bytes > self.limits.log_bytes and self._finished:
            self.forget(self._finished.oldest)

    def _give_slot(self, stream: Stream) -> None:
        if stream in self._with_slot:
            self._with_slot.remove(stream)
            self._allowance.leave(stream.key)

    def forget(self, stream: Stream) -> None:
        """Drop a finished stream; readers that are still at it keep the log alive until they are done."""
        if self._streams.pop(stream.id, None) is None:
            return
        self._finished.discard(stream)
        self.logs.bytes -= stream.log.size
        if stream.idempotency is not None:
            del self._by_name[stream.key, stream.idempotency[0]]
        self._gone[stream.id] = stream.key
        if len(self._gone) > GONE_MAX:
            del self._gone[next(iter(self._gone))]

    # The engine's death and return

    def on_engine_lost(self, sequence_ids: list[int] | None = None) -> None:
        """An engine is gone, with these sequences (None: the only one, with all). Their streams go on in another one,
        or wait for the next if it may come in time, else end with an error that says so."""
        lost = list(self._choices) if sequence_ids is None else sequence_ids
        choices = [choice for id_ in lost if (choice := self._choices.get(id_)) is not None]
        for choice in choices:
            self._drop(choice)
        wait_s = self.limits.engine_restart_wait_s
        for stream in dict.fromkeys(choice.stream for choice in choices):
            stream.deaths += 1
            if stream.trace is not None:
                stream.trace.note("the engine died")
            if wait_s <= 0 or stream.deaths >= ENGINE_DEATHS_MAX:
                stream.finish(Outcome(outcomes.ERROR, "the engine died", retriable=stream.deaths < ENGINE_DEATHS_MAX))
        if self.engine.hello is not None:
            self.call_later(REGROUP_S, self._submit_again)
        elif self._live and self._returning is None:
            self._returning = self.call_later(wait_s, self._give_up_waiting)

    def on_engine_ready(self) -> None:
        """An engine is there for those that wait for one."""
        if self._returning is not None:
            self._returning()
            self._returning = None
        self._submit_again()

    def _submit_again(self) -> None:
        """Every choice that no engine has, from its prompt and what it has generated."""
        if self.engine.hello is None:
            return
        for stream in list(self._live):
            for choice in stream.live:
                if choice.sequence_id not in self._choices:
                    self._submit(choice, choice.prompt.tolist(), choice.generated.tolist())

    def _give_up_waiting(self) -> None:
        self._returning = None
        for stream in list(self._live):
            stream.finish(Outcome(outcomes.ERROR, "the engine died and did not come back in time", retriable=True))
