"""`python -m bench gateway`: what the gateway costs a request, in microseconds, and a token: nothing.

For a request, in one process and without sockets: the look at its head (route, origin, key, limits), its place in the
table (taking and giving back a slot, a request and tokens) with the headers that tell what is left, and the choice of
an engine. Each beside the same without keys and limits, by turns. Times are the thread's own, so that other processes
of a busy machine count little.

For a token: a step of many streams through the stream table, each read to its end, with and without limits on its key.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from collections.abc import Callable
from hashlib import sha256
from typing import TextIO, cast

from bench import arguments
from bench.machine import describe, markdown, spread
from engine.tokenizer import Tokenizer
from engine.wire import WIRE_VERSION, Gauges, Hello, Sampling, Step, Submit, TokenizerSpec
from protocols.http1 import Http1, Request
from server.access_log import AccessLog
from server.api.generation import Generation, Model
from server.api.openai_chat import ChatGrammar
from server.app import App, Policy
from server.chat import ChatTemplate
from server.gateway.access import Gateway
from server.gateway.balancer import Balancer, Link
from server.gateway.keys import Key, Keys
from server.gateway.limits import Rates
from server.http import Call
from server.limits import Limits
from server.metrics import Metrics
from server.outcome import CANCELLED, Outcome
from server.stream import Stream
from server.table import Part, StreamTable, TextOptions

SECRET = "sk-sluice-of-the-benchmark"
KEYS = 1000  # in the file
PLENTY = 10**9  # a limit that is looked at and never reached
SPEC = TokenizerSpec("", [bytes([byte]) for byte in range(256)], [])
HELLO = Hello(WIRE_VERSION, "bench", "bench", SPEC, "hash", 256, [], 131_072, 10**7, 10_000)
# As a client of OpenAI's SDK sends them.
FIELDS = (
    "Host: localhost:8000", "Accept: application/json", "Content-Type: application/json", "Content-Length: 80",
    "User-Agent: OpenAI/Python 2.0.0", "X-Stainless-Lang: python", "X-Stainless-OS: Linux", "Accept-Encoding: gzip",
)  # fmt: skip


CallLater = Callable[[float, Callable[[], None]], Callable[[], None]]


def _never(seconds: float, call: Callable[[], None]) -> Callable[[], None]:
    return lambda: None


class Engine:
    """Takes everything and says nothing."""

    hello: Hello | None = HELLO

    def submit(self, message: Submit) -> None: ...  # noqa: D102
    def credit(self, sequence_id: int, total: int) -> None: ...  # noqa: D102
    def cancel(self, sequence_ids: list[int]) -> None: ...  # noqa: D102
    def listen(self, listener: object) -> None: ...  # noqa: D102


class Reader:
    """Reads everything at once."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def pump(self) -> None:
        """Earn the next credit."""
        if self._stream.outcome is None:
            self._stream.renew()

    def fail(self) -> None:
        """Never called."""


class Server:
    """A table and an app, with or without keys and limits. `call_later`: see StreamTable."""

    def __init__(
        self,
        *,
        limited: bool,
        engine: Engine | None = None,
        log: TextIO | None = None,
        call_later: CallLater = _never,
    ) -> None:
        names = [f"key-{number}" for number in range(KEYS)]
        digests = [sha256((SECRET if name == names[-1] else name).encode()).digest() for name in names]
        keys = [Key(name, digest, streams_max=PLENTY) for name, digest in zip(names, digests, strict=True)]
        rates = Rates(PLENTY, PLENTY) if limited else Rates()
        self.gateway = Gateway(Keys(keys if limited else None), rates, model="bench")
        self.key = names[-1] if limited else ""
        engine = engine or Engine()
        assert engine.hello is not None
        spec = engine.hello.tokenizer
        self.tokenizer = Tokenizer(spec)
        access_log = AccessLog("text", out=log or io.StringIO(), clock=time.monotonic)
        metrics = Metrics()
        self.table = StreamTable(
            engine,
            self.tokenizer,
            self.gateway.limiter,
            metrics,
            Limits(streams_max=10**6, queue_max=10**6, resume_ttl_s=0.0),
            clock=time.monotonic,
            call_later=call_later,
            log_access=access_log.stream if log else (lambda stream: None),
            log_fault=access_log.fault,
        )
        template = ChatTemplate(spec.chat_template, spec.bos_token, spec.eos_token)
        model = Model("bench", engine.hello, self.tokenizer, template, 0)
        policy = Policy(loopback_hosts_only=not limited)
        generation = Generation(self.table, model)
        self.app = App(generation, metrics, self.gateway, policy, access_log, engine_up=lambda: True)
        fields = (*FIELDS, f"Authorization: Bearer {SECRET}") if limited else FIELDS
        head = "\r\n".join(["POST /v1/chat/completions HTTP/1.1", *fields, "", ""]).encode()
        request = Http1(max_header=4096).receive(head)[0]
        assert isinstance(request, Request)
        self.request = request

    def look(self) -> None:
        """At a request's head."""
        call = Call(self.request, "/v1/chat/completions", "", "127.0.0.1", "req", 0.0)
        assert self.app.refuse(call) is None

    def start(self) -> Stream:
        """A stream, read as it grows."""
        grammar = ChatGrammar("chat", "bench", self.tokenizer, choices=1, include_usage=False)
        parts = [Part([1] * 100, Sampling(max_tokens=100_000))]
        stream = self.table.start(grammar, parts, key=self.key, request_id="req", text=TextOptions())
        stream.attach(Reader(stream))
        return stream

    def begin_and_end(self) -> None:
        """A stream, and the headers of its answer."""
        stream = self.start()
        self.gateway.limiter.headers(self.key)
        stream.finish(Outcome(CANCELLED))
        self.table.forget(stream)


def choose(engines: int, prompt: int) -> Callable[[], None]:
    """A sequence finds its engine and is forgotten again."""
    balancer = Balancer([cast(Link, Engine()) for _ in range(engines)])
    message = Submit(1, [number * 31 % 256 for number in range(prompt)], Sampling(max_tokens=100), 64)

    def once() -> None:
        balancer.submit(message)
        balancer.cancel([1])

    return once


def microseconds(work: Callable[[], object], times: int) -> float:
    """Of one call."""
    began = time.thread_time()
    for _ in range(times):
        work()
    return (time.thread_time() - began) / times * 1e6


def steps(server: Server, streams: int) -> Callable[[], None]:
    """A step in which each of so many streams gets a token."""
    ids = [server.start().choices[0].sequence_id for _ in range(streams)]
    tokens = [97] * streams

    def once() -> None:
        server.table.on_step(Step(ids, tokens, [], [], [], Gauges()))

    return once


def _row(name: str, without: list[float], with_: list[float]) -> list[str]:
    difference = statistics.median(with_) - statistics.median(without)
    return [name, spread(without, 2), spread(with_, 2), f"{difference:.2f}"]


def main(argv: list[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench gateway", description=__doc__)
    rounds, times = arguments.whole(1, arguments.ROUNDS_MAX), arguments.whole(1, 10**7)
    parser.add_argument("--rounds", type=rounds, metavar="N", default=15, help="of each setting (default: 15)")
    parser.add_argument("--times", type=times, metavar="N", default=5000, help="each thing in a round (default: 5000)")
    parser.add_argument(
        "--streams", type=arguments.whole(1, 10_000), metavar="N", default=200, help="in a step (default: 200)"
    )
    options = parser.parse_args(argv)
    plain, limited = Server(limited=False), Server(limited=True)
    step_plain, step_limited = (steps(Server(limited=on), options.streams) for on in (False, True))
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object], int]] = {
        "a request's head": (plain.look, limited.look, 1),
        "a stream's begin, headers and end": (plain.begin_and_end, limited.begin_and_end, 1),
        **{
            f"an engine of {engines}, {prompt} tokens": (choose(1, prompt), choose(engines, prompt), 1)
            for engines in (2, 4)
            for prompt in (100, 2000)
        },
        f"a token, {options.streams} streams a step": (step_plain, step_limited, options.streams),
    }
    rows = []
    for name, (without, with_, share) in pairs.items():
        times = max(1, options.times // share)
        seen: tuple[list[float], list[float]] = ([], [])
        for _ in range(options.rounds):
            for work, values in zip((without, with_), seen, strict=True):
                values.append(microseconds(work, times) / share)
        rows.append(_row(name, *seen))
    print(f"{describe()}; {KEYS} keys\n")
    print(markdown([f"µs, {options.rounds} rounds", "no keys, one engine", "keys and limits, engines", "more"], rows))
    return 0
