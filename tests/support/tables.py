"""A stream table on a scripted engine and clock, and clients that read from it as fast as a test lets them."""

from __future__ import annotations

import json
from typing import Any

from engine.tokenizer import Tokenizer
from engine.wire import End, Sampling
from server.api.openai_chat import ChatGrammar
from server.framing import Framing, Ndjson
from server.gateway.keys import Key, Keys
from server.gateway.limits import Bucket, Limiter, Rates
from server.limits import Limits
from server.metrics import Metrics
from server.readers import ClientReader
from server.stream import Stream
from server.table import Part, StreamTable, TextOptions
from server.tools.formats import CallFormat
from tests.support.clock import Clock
from tests.support.engines import ScriptedEngine, tokenizer

START_S = 1000.0  # a clock that began long ago, as the real one


class Channel:
    """Where a reader writes: keeps everything, and is full when the test says so."""

    def __init__(self) -> None:
        self.writable = True
        self.data = b""
        self.writes = 0
        self.finished = 0
        self.cuts = 0

    @property
    def gate(self) -> Channel:
        """Its own."""
        return self

    def write(self, data: bytes) -> None:
        """Takes it, as a transport does even when it is full."""
        assert not self.finished
        assert not self.cuts
        self.data += data
        self.writes += 1

    def write_each(self, pieces: list[bytes]) -> None:
        """As one write."""
        self.write(b"".join(pieces))

    def finish(self) -> None:
        """The body is whole."""
        self.finished += 1

    def cut(self) -> None:
        """The body is not whole."""
        self.cuts += 1


class Client:
    """A reader with its channel."""

    def __init__(self, stream: Stream, cursor: int = 0, *, framing: Framing | None = None, reads: bool = True) -> None:
        self.stream = stream
        self.start = cursor
        self.channel = Channel()
        self.channel.writable = reads
        self.reader = ClientReader(stream, framing or Ndjson(stream), self.channel, cursor)
        stream.attach(self.reader)
        self.reader.pump()

    def stall(self) -> None:
        """Stop reading."""
        self.channel.writable = False

    def go_on(self) -> None:
        """Read again."""
        self.channel.writable = True
        self.reader.pump()

    def leave(self) -> None:
        """Disconnect."""
        self.reader.leave()

    @property
    def events(self) -> list[Any]:
        """What came, one JSON value a line."""
        return [json.loads(line) for line in self.channel.data.splitlines()]

    @property
    def text(self) -> str:
        """The first choice's text."""
        choices = [c for event in self.events for c in event.get("choices", ()) if c["index"] == 0]
        return "".join(choice["delta"].get("content", "") for choice in choices)


class StandingBucket(Bucket):
    """Nothing drips in: what was taken can be counted."""

    def fill(self, now: float) -> None:
        """Nothing."""


class Rig:
    """Everything around one table."""

    def __init__(
        self,
        *,
        keys: dict[str, int | None] | None = None,
        rates: Rates | None = None,
        running_max: int = 8,
        **limits: Any,
    ) -> None:
        """`keys`: how many streams each may have."""
        self.clock = Clock(START_S)
        self.engine = ScriptedEngine(running_max=running_max)
        self.tokenizer: Tokenizer = tokenizer()
        self.metrics = Metrics()
        self.keys = Keys(
            None if keys is None else [Key(name, name.encode(), streams_max) for name, streams_max in keys.items()]
        )
        self.limiter = Limiter(self.keys, rates or Rates(), self.clock)
        self.access: list[Stream] = []
        self.faults: list[tuple[str, str]] = []
        self.limits = Limits(**limits)
        self.table = StreamTable(
            self.engine,
            self.tokenizer,
            self.limiter,
            self.metrics,
            self.limits,
            clock=self.clock,
            call_later=self.clock.call_later,
            log_access=self.access.append,
            log_fault=lambda request_id, trace: self.faults.append((request_id, trace)),
        )

    def start(
        self,
        *,
        n: int = 1,
        prompts: int = 1,
        key: str = "",
        stops: tuple[str, ...] = (),
        calls: CallFormat | None = None,
        **options: Any,
    ) -> Stream:
        """A stream of n choices for each prompt; nobody reads it yet."""
        parts = [
            Part([10 + prompt, 1, 2], Sampling(max_tokens=1000, prompt_index=prompt, choice_index=choice), calls)
            for prompt in range(prompts)
            for choice in range(n)
        ]
        grammar = ChatGrammar("chat", "model", self.tokenizer, choices=len(parts), include_usage=True)
        text = TextOptions(stops=stops)
        return self.table.start(grammar, parts, key=key, request_id="req", text=text, **options)

    def open(self, **options: Any) -> Client:
        """A stream with its first reader."""
        return Client(self.start(**options))

    def admit(self, stream: Stream, cached: int = 0, waited_s: float = 0.0) -> None:
        """Its sequences enter the batch."""
        ids = [choice.sequence_id for choice in stream.live]
        self.table.on_step(self.engine.admit(*ids, cached=cached, waited_s=waited_s))

    def play(self, stream: Stream, text: str, choice: int = 0) -> None:
        """One step for each character of `text`."""
        for char in text:
            for byte in char.encode():
                self.table.on_step(self.engine.tokens([(stream.choices[choice].sequence_id, byte)]))

    def end(self, stream: Stream, reason: str = "stop", choice: int = 0, **fields: Any) -> None:
        """The engine ends a sequence."""
        end = End(stream.choices[choice].sequence_id, reason, **fields)
        self.table.on_step(self.engine.tokens([], end))

    def lose_engine(self) -> None:
        """It dies with all that it had, and the table is told."""
        self.engine.die()
        self.table.on_engine_lost()

    def regain_engine(self) -> None:
        """Another one is there, which knows nothing."""
        self.engine.revive()
        self.table.on_engine_ready()

    def run_dry(self, stream: Stream, steps_max: int = 1000) -> int:
        """Steps until the stream's sequences are out of credit; how many tokens came."""
        made = 0
        for _ in range(steps_max):
            ids = [choice.sequence_id for choice in stream.choices if choice.sequence_id in self.engine.runnable]
            if not ids:
                return made
            self.table.on_step(self.engine.tokens([(id_, 97 + made % 26) for id_ in ids]))
            made += 1
        return made
