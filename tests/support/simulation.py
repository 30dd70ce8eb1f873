"""A server's table and metrics on a real engine core, in one thread and on a clock that only steps and waits move: what
`/metrics` would show of any load, to the bit, in no time.

A step takes what a processor would: a part for itself (the weights are read once) and a part for each token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.core import Core
from engine.scheduler import Scheduler
from engine.sequence import Sampled, Slice
from engine.synthetic import SyntheticRunner
from engine.tokenizer import Tokenizer
from engine.wire import Cancel, Credit, Gauges, Hello, Sampling, Step, Submit
from server.api.openai_chat import ChatGrammar
from server.gateway.keys import Keys
from server.gateway.limits import Limiter, Rates
from server.limits import Limits
from server.metrics import PROTOCOLS, STATES, Live, Metrics
from server.table import Part, StreamTable, TextOptions
from tests.support.clock import Clock
from tests.support.tables import Client

BLOCK_SIZE = 16
STEP_TOKENS_MAX = 512
STEP_S = 0.02
TOKEN_S = 0.0001


@dataclass(frozen=True, slots=True)
class Request:
    """One of a load."""

    at_s: float
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Scrape:
    """What was true at a time."""

    at_s: float
    text: str  # of /metrics
    utilisation: float  # of the processor since the scrape before: the part of the time in which it had something to do


class _PacedRunner(SyntheticRunner):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self.busy_s = 0.0

    def execute(self, slices: list[Slice]) -> list[Sampled | None]:
        """As SyntheticRunner's, in the time that a processor would take."""
        seconds = STEP_S + TOKEN_S * sum(part.count for part in slices)
        self._clock.advance(seconds)
        self.busy_s += seconds
        return super().execute(slices)


class _Engine:
    """The core, as a StreamTable sees an engine."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.hello: Hello | None = core.hello
        self.gauges = Gauges()
        self.table: StreamTable | None = None
        self._peer = core.join(self._tell)

    def submit(self, message: Submit) -> None:
        self.core.receive(self._peer, message)

    def credit(self, sequence_id: int, total: int) -> None:
        self.core.receive(self._peer, Credit([(sequence_id, total)]))

    def cancel(self, sequence_ids: list[int]) -> None:
        self.core.receive(self._peer, Cancel(sequence_ids))

    def _tell(self, step: Step) -> None:
        self.gauges = step.gauges
        assert self.table is not None
        self.table.on_step(step)


class Simulation:
    """A server with a pool of `pool_tokens` and `running_max` places in the batch."""

    def __init__(self, *, pool_tokens: int, running_max: int) -> None:
        self._clock = Clock()
        self._runner = _PacedRunner(self._clock)
        pool = BlockPool(pool_tokens // BLOCK_SIZE, BLOCK_SIZE)
        scheduler = Scheduler(pool, step_tokens_max=STEP_TOKENS_MAX, running_max=running_max)
        self._engine = _Engine(Core(self._runner, pool, scheduler, version="test", clock=self._clock))
        self._tokenizer = Tokenizer(self._runner.tokenizer)
        self._metrics = Metrics()
        self._metrics.live = self._live
        self._table = self._engine.table = StreamTable(
            self._engine,
            self._tokenizer,
            Limiter(Keys(None), Rates(), self._clock),
            self._metrics,
            Limits(),
            clock=self._clock,
            call_later=self._clock.call_later,
            log_access=lambda stream: None,
            log_fault=lambda request_id, trace: None,
        )
        self._started = 0

    def play(self, load: list[Request], *, scrape_every_s: float, until_s: float) -> Iterator[Scrape]:
        """Scrapes at even times, as near as steps end."""
        arrivals = iter(sorted(load, key=lambda request: request.at_s))
        following = next(arrivals, None)
        scrape_at, busy_before = scrape_every_s, 0.0
        clock, core = self._clock, self._engine.core
        while clock.now < until_s:
            while following is not None and following.at_s <= clock.now:
                self._start(following)
                following = next(arrivals, None)
            if core.has_work:
                core.step()
            else:
                clock.advance(min(following.at_s if following else until_s, scrape_at) - clock.now)
            if clock.now >= scrape_at:
                busy_s, busy_before = self._runner.busy_s - busy_before, self._runner.busy_s
                yield Scrape(scrape_at, self._metrics.render().decode(), min(1.0, busy_s / scrape_every_s))
                scrape_at += scrape_every_s

    def _start(self, request: Request) -> None:
        """Each prompt is another one, so that none is in the prefix cache."""
        self._started += 1
        prompt = [self._started // 256 % 256, self._started % 256] + [65] * (request.prompt_tokens - 2)
        grammar = ChatGrammar("chat", "model", self._tokenizer, choices=1, include_usage=True)
        part = Part(prompt, Sampling(max_tokens=request.answer_tokens))
        Client(self._table.start(grammar, [part], key="", request_id="simulated", text=TextOptions()))

    def _live(self) -> Live:
        streams = dict.fromkeys(STATES, 0)
        for stream in self._table.live:
            streams[stream.state] += 1
        hello = self._engine.core.hello
        connections = dict.fromkeys(PROTOCOLS, 0)
        return Live(streams, connections, self._engine.gauges, hello.pool_tokens, hello.running_max)
