"""One generation: its choices, its log, its readers, its single outcome.

The engine's tokens are appended by `Choice.push`; readers pull from the log when their sockets take it. A reader that
has read all there is earns the next credit, so the engine never runs more than a window ahead of the furthest reader.
A stream whose last reader left is detached: its credit is 0 and its engine holds nothing for it.

No sockets and no asyncio: time comes in by the clock of the table that owns the stream.
"""

from __future__ import annotations

import os
import traceback
from array import array
from base64 import urlsafe_b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.text import TextStream
from engine.wire import Logprob, Sampling
from protocols.escape import json_text
from server import outcome as outcomes
from server.log import Event, Log
from server.outcome import Outcome
from server.places import placed
from server.tools.parser import ToolParser
from server.tools.pieces import Piece, TextPiece, ToolArguments, ToolCallBegin

if TYPE_CHECKING:
    from server.outlet import Outlet
    from server.table import StreamTable
    from server.tracing import StreamTrace

# 144 random bits (143.95: see new_stream_id): more than anyone can guess, and whole base64 characters.
STREAM_ID_BYTES = 18
# Events of texts already seen, shared by all streams: a token that repeats costs a log but a place in its list.
# A vocabulary has fewer; over it the table starts anew.
SHARED_EVENTS_MAX = 262_144
SHARED_CHARS_MAX = 64  # of such a text; a longer one is no token, but a prompt that is echoed, say
_shared: dict[str, Event] = {}


def new_stream_id() -> str:
    """Unguessable, and never used before. It begins with a letter or a digit: to a shell, "-" begins an option."""
    while not (drawn := urlsafe_b64encode(os.urandom(STREAM_ID_BYTES)).decode())[0].isalnum():
        pass
    return placed(drawn)


def text_event(choice: int, text: str) -> Event:
    """The event of a piece of text, escaped as the inside of a JSON string; the first choice's are remembered whole."""
    known = _shared.get(text)
    if known is None:
        if len(text) > SHARED_CHARS_MAX:
            return Event(choice, json_text(text))
        if len(_shared) >= SHARED_EVENTS_MAX:
            _shared.clear()
        known = _shared[text] = Event(0, json_text(text))
    return known if choice == 0 else Event(choice, known.text)


def escaped(text: str) -> bytes:
    """`text` as the inside of a JSON string; remembered, since tokens repeat."""
    return text_event(0, text).text


class Frame(NamedTuple):
    """The JSON around a piece of escaped text: `before`, the text, `behind`; in a grammar that numbers its events then
    the event's position, and `end`. `name`: the event's type, where there are types."""

    before: bytes
    behind: bytes
    name: str = ""
    end: bytes | None = None

    def data(self, text: bytes, position: int) -> bytes:
        """The whole JSON of one event."""
        if self.end is None:
            return self.before + text + self.behind
        return b"%b%b%b%d%b" % (self.before, text, self.behind, position, self.end)


class Grammar(Protocol):
    """How an API shows a stream. All bytes are JSON, without framing."""

    api: str  # a metric label
    stream_id: str
    frames: list[Frame]  # of each choice's text
    ping: bytes  # what a server-sent event stream shows while it is quiet

    def opening(self) -> list[Event]:
        """Events that leave before any token."""
        ...

    def with_logprobs(self, choice: Choice, text: bytes, logprob: Logprob) -> bytes:
        """The data of a piece of text that carries its token's log probability."""
        ...

    def pieces(self, choice: Choice, piece: Piece) -> list[Event]:
        """Events of a piece of an answer that may call tools; text without a parser never comes here."""
        ...

    def prompt_told(self, choice: Choice) -> list[Event]:
        """Events that show the prompt's log probabilities, which were just told; they come before the first token."""
        ...

    def choice_end(self, choice: Choice) -> list[Event]:
        """Events at the end of a choice, with its reason."""
        ...

    def closing(self, stream: Stream, end: Outcome) -> list[Event]:
        """The last events: usage, an error, the terminator."""
        ...

    def whole(self, stream: Stream) -> bytes:
        """The body of the answer that isn't streamed, of a stream that ended well."""
        ...

    def failure(self, stream: Stream, end: Outcome) -> bytes:
        """The error of a stream that didn't: the body of the answer in one piece, or an event's data."""
        ...


@dataclass(slots=True)
class ToolCall:
    """A call that an answer in one piece shows."""

    id: str
    name: str
    parts: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """JSON, as the model wrote it."""
        return "".join(self.parts)


class Reader(Protocol):
    """A cursor on a stream's log."""

    def pump(self) -> None:
        """Take what the log holds, if there is room. Called when the log grew or the stream ended."""
        ...

    def fail(self) -> None:
        """`pump` raised: leave, and let whoever reads see that something is missing."""
        ...


@dataclass(slots=True, eq=False)
class Choice:
    """One sequence of a request."""

    stream: Stream
    index: int  # as the API shows it
    prompt: array[int]  # as `generated`: a list would take ten times the memory
    sampling: Sampling
    text: TextStream
    sequence_id: int = 0  # the engine's name for it; a new one after the engine's death
    generated: array[int] = field(default_factory=lambda: array("I"))
    credit: int = 0
    due: int = 0  # with so many generated ids it needs its next credit
    reason: str = ""  # set when it ended: stop, length, …
    matched_stop: str | None = None
    admitted: bool = False
    cached_tokens: int = 0
    parser: ToolParser | None = None  # finds tool calls in the text; None: text is all that there is
    shown: list[str] | None = None  # the text so far, kept only for an answer in one piece
    calls: list[ToolCall] = field(default_factory=list)  # likewise
    logprobs: list[tuple[int, Logprob]] | None = None  # likewise
    at_once: bool = True  # its readers are woken for each token, and not once for a step's
    plain: bool = field(init=False)  # an event of its text is shared by all streams
    memo: dict[int, Event] | None = field(init=False)  # a whole piece's event, while a piece is shown as it is
    prompt_logprobs: list[Logprob] | None = None  # of its prompt's ids from the second on; None: not told

    def __post_init__(self) -> None:
        self.plain = self.index == 0 and self.parser is None and self.shown is None
        self._find_memo()

    def _find_memo(self) -> None:
        self.memo = self.text.memo if self.plain and self.text.direct else None

    def allow(self, total: int, window: int) -> None:
        """Let it reach `total` generated tokens. It needs its next credit when half a window of that is left."""
        self.credit = total
        self.due = total - window // 2
        if len(self.generated) >= self.due:
            self.stream.hungry = True

    def push(self, token: int, logprob: Logprob | None) -> bool:
        """Append a token to the log. True when a stop string was completed."""
        generated, memo = self.generated, self.memo
        generated.append(token)
        if len(generated) >= self.due:
            self.stream.hungry = True
        if memo is not None and logprob is None:  # as nearly always: a piece, whatever came before
            event = memo.get(token) or self._remember(token)
            if event is not None:
                self.stream.log.append(event)
                return False
        text = self.text.push(token)
        self._find_memo()
        if logprob is not None and self.logprobs is not None:
            self.logprobs.append((token, logprob))
        if text or logprob is not None:
            self._show(text, logprob)
        return self.text.stopped

    def _remember(self, token: int) -> Event | None:
        """The event of an id's whole piece, from now on for all streams; None if it has none."""
        text = self.text.whole(token)
        if not text:
            return None
        event = self.text.memo[token] = text_event(0, text)
        return event

    def tell_prompt(self, logprobs: list[Logprob]) -> None:
        """The prompt's log probabilities, kept only for an answer in one piece."""
        self.prompt_logprobs = logprobs
        for event in self.stream.grammar.prompt_told(self):
            self.stream.append(event)
        if self.shown is None:
            self.prompt_logprobs = None

    def close(self, reason: str) -> None:
        """Set the reason; text that was held for a stop string or a whole character goes out first."""
        tail = self.text.flush()
        if tail:
            self._show(tail, None)
        if self.parser is not None:
            self._show_pieces(self.parser.finish(cut=reason != outcomes.STOP), None)
            if self.parser.calls and reason == outcomes.STOP:
                reason = outcomes.TOOL_CALLS
        self.reason = reason
        self.matched_stop = self.text.matched
        for event in self.stream.grammar.choice_end(self):
            self.stream.append(event)

    def _show(self, text: str, logprob: Logprob | None) -> None:
        if self.parser is not None:
            self._show_pieces(self.parser.feed(text), logprob)
            if self.parser.full:
                self.text.stopped = True  # as if by a stop string: what the model makes from here on is dropped
            return
        event = text_event(self.index, text)
        stream = self.stream
        stream.append(event if logprob is None else self._with_logprobs(event, logprob))
        if self.shown is not None:
            self.shown.append(text)

    def _show_pieces(self, pieces: list[Piece], logprob: Logprob | None) -> None:
        """Show pieces of an answer that may call tools. A log probability rides on the first, if it is text, and else
        on empty text before it: tool syntax has no place for one."""
        stream = self.stream
        if logprob is not None:
            first = pieces[0] if pieces else None
            text = first.text if isinstance(first, TextPiece) else ""
            stream.append(self._with_logprobs(text_event(self.index, text), logprob))
            if text:
                self._keep(pieces.pop(0))
        for piece in pieces:
            for event in stream.grammar.pieces(self, piece):
                stream.append(event)
            self._keep(piece)

    def _with_logprobs(self, event: Event, logprob: Logprob) -> Event:
        grammar = self.stream.grammar
        data = grammar.with_logprobs(self, event.text, logprob)
        return Event(event.choice, event.text, data, grammar.frames[self.index].name)

    def _keep(self, piece: Piece) -> None:
        if self.shown is None:
            return
        if isinstance(piece, TextPiece):
            self.shown.append(piece.text)
        elif isinstance(piece, ToolCallBegin):
            self.calls.append(ToolCall(piece.id, piece.name))
        elif isinstance(piece, ToolArguments):
            self.calls[-1].parts.append(piece.text)


class Stream:
    """Made by `StreamTable.start`; ended by `finish`, whoever comes first."""

    __slots__ = (
        "_sole", "admitted_at", "choices", "client", "created", "deaths", "first_token_at", "framing", "grammar",
        "held_for", "hungry", "id", "idempotency", "key", "last_token_at", "log", "on_finish", "outcome", "poller",
        "priority", "readers", "request_id", "table", "trace",
    )  # fmt: skip

    def __init__(
        self,
        table: StreamTable,
        key: str,
        request_id: str,
        grammar: Grammar,
        *,
        client: str = "",
        priority: int = 0,
    ) -> None:
        self.table = table
        self.id = grammar.stream_id
        self.key = key
        self.request_id = request_id
        self.client = client  # its first reader's address, for the log
        self.priority = priority  # among the requests of its key; lower goes first
        self.grammar = grammar
        self.choices: list[Choice] = []
        self.log = Log(table.limits.log_bytes_per_stream, table.logs)
        self.log.keep_from = 0
        self.readers: list[Reader] = []
        self._sole: Reader | None = None  # the reader, where there is one: each token asks
        self.poller: Reader | None = None  # the one reader that all polls share
        self.idempotency: tuple[str, bytes] | None = None  # the client's name for its request, and a digest of it
        self.framing = ""  # the one it was started in, which a reader that names none gets
        self.outcome: Outcome | None = None
        self.hungry = False  # a choice is due its next credit
        self.created = table.clock()
        self.admitted_at = self.first_token_at = self.last_token_at = 0.0  # 0: not yet
        self.deaths = 0  # engines that died under it
        self.held_for: Callable[[], None] | None = None  # cancels the timer that waits for a reader's return
        self.on_finish: list[Callable[[], None]] = []
        self.trace: StreamTrace | None = None  # until it is told, where somebody traces

    @property
    def live(self) -> list[Choice]:
        """The choices that have not ended."""
        return [choice for choice in self.choices if not choice.reason]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once however many choices it has."""
        return sum([len(c.prompt) for c in self.choices if c.sampling.choice_index == 0])

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices, the one that completed a stop string or ended the sequence included."""
        return sum([len(c.generated) for c in self.choices])

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were found in the prefix cache."""
        return sum([c.cached_tokens for c in self.choices if c.sampling.choice_index == 0])

    @property
    def state(self) -> str:
        """queued, running, parked, detached or finished."""
        if self.outcome is not None:
            return "finished"
        if not self.readers:
            return "detached"
        queued, parked = True, True
        for choice in self.choices:  # every scrape asks every stream: one pass, and nothing made for it
            if not choice.reason:
                queued = queued and not choice.admitted
                parked = parked and len(choice.generated) >= choice.credit
        return "queued" if queued else "parked" if parked else "running"

    def append(self, event: Event) -> None:
        """Add to the log; the readers see it at the next `wake`."""
        self.log.append(event)

    def wake(self) -> None:
        """Let every reader take what is new. Our own mistake in one of them ends that one, and not the step that all
        streams share."""
        reader = self._sole
        if reader is not None:
            try:
                reader.pump()
            except Exception:
                self._fail(reader)
            return
        for reader in tuple(self.readers):
            try:
                reader.pump()
            except Exception:
                self._fail(reader)

    def _fail(self, reader: Reader) -> None:
        self.table.log_fault(self.request_id, traceback.format_exc())
        reader.fail()

    def attach(self, reader: Reader) -> None:
        """Add a reader. The caller pumps it, and has asked the table for a slot if the stream was detached."""
        if self.held_for is not None:
            self.held_for()
            self.held_for = None
            if self.trace is not None:
                self.trace.note("a reader came back")
        self.readers.append(reader)
        self._find_sole()

    def detach(self, reader: Reader) -> None:
        """The reader is gone. The last one's leaving parks the stream, or cancels it where resuming is off."""
        if reader not in self.readers:
            return
        self.readers.remove(reader)
        for choice in self.choices:
            self.table.outlets.pop(choice.sequence_id, None)
        self._find_sole()
        if self.readers:
            return
        if self.outcome is None:
            if self.trace is not None:
                self.trace.note("the last reader left")
            self.table.hold(self)
        else:
            self._close_trace()

    def leaves_by(self, outlet: Outlet, reader: Reader, gate: object) -> None:
        """Tokens leave by `outlet` from now on: say what each of them touches."""
        (choice,) = self.choices
        outlet.touches(choice, choice.generated, self, *self.log.touched, reader, gate)
        self.table.outlets[choice.sequence_id] = outlet

    def _find_sole(self) -> None:
        self._sole = self.readers[0] if len(self.readers) == 1 else None

    def _close_trace(self) -> None:
        """It has ended, and nobody reads it any more; whoever still comes is no part of its trace."""
        trace, self.trace = self.trace, None
        if trace is not None:
            try:
                trace.close(self)
            except Exception:  # our own mistake, which is nobody's loss but its trace's
                self.table.log_fault(self.request_id, traceback.format_exc())

    def renew(self) -> None:
        """A reader has read everything: let the engine run a window ahead of it. Granted in halves of a window, when
        the stream is `hungry`."""
        self.hungry = False
        self.log.keep_from = self.log.end
        for choice in self.choices:
            made = len(choice.generated)
            if made >= choice.due and not choice.reason:
                self.table.grant(choice, made + self.table.limits.credit_window)

    def finish(self, end: Outcome) -> None:
        """Give the stream its one outcome, and free all that it holds. The first call wins; later ones do nothing."""
        if self.outcome is not None:
            return
        self.outcome = end
        if self.trace is not None:
            self.trace.finish()
        self.table.release(self)
        for event in self.grammar.closing(self, end):
            self.append(event)
        self.table.trim()  # only now does the log have its last size
        self.wake()
        for call in self.on_finish:
            call()
        if not self.readers:
            self._close_trace()
        for choice in self.choices:
            del choice.stream  # nothing asks for it now, and Python's collector has no cycle to find

    def end_choice(self, choice: Choice, reason: str) -> None:
        """A choice ended well. With the last one the stream ends."""
        choice.close(reason)
        if not self.live:
            self.finish(Outcome(outcomes.worst([c.reason for c in self.choices])))
