"""`python -m bench request`: what a streamed request costs our server beside its tokens, in microseconds.

In one process and without sockets: the connection's own class on a transport that drops what it is given, with the API,
the stream table and the access log behind it. Requests come on connections that are kept open, many in a turn; each
gets its tokens and its end from a scripted engine. Told apart are

begin   from the request's bytes to the answer's head, its first event and the engine's order
token   one token's way to the transport
end     from the engine's last message to the answer's end, the line in the log, and a connection that takes the next

A request that is refused by the last thing that is looked at in its fields has a begin only, with its whole answer and
its line in the log: what reading, routing, validating and logging take, without a prompt and a stream.

Times are the thread's own CPU time, the least of many rounds: other work on the machine can only add to them. What the
kernel takes for sockets is no part of it, nor is the connection itself, unless it is a row of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, cast

import uvloop

from bench import arguments
from bench.gateway import Engine, Server
from bench.machine import describe, markdown
from bench.processes import Wrong, synthetic_hello
from bench.readers import posted
from engine.synthetic import WORD_BASE
from engine.wire import Admitted, End, Gauges, Hello, Step, Submit
from server import garbage
from server.app import new_request_id
from server.connection import Connection
from server.gateway.forwarded import TrustedProxies
from server.host import Deadlines, Host

CONNECTIONS = 64
TOKENS = 16  # of each answer, without its first
TURNS_MAX = 10  # of the loop, from the engine's last message to the answer's end; an answer in one piece takes two
# What OpenAI's Python SDK sends, and what a client by hand does.
SDK_FIELDS = (
    "Host: 127.0.0.1:8000", "Accept-Encoding: gzip, deflate", "Connection: keep-alive", "Accept: application/json",
    "Content-Type: application/json", "User-Agent: OpenAI/Python 2.0.0", "X-Stainless-Lang: python",
    "X-Stainless-Package-Version: 2.0.0", "X-Stainless-OS: Linux", "X-Stainless-Arch: x64",
    "X-Stainless-Runtime: CPython", "X-Stainless-Runtime-Version: 3.11.7", "Authorization: Bearer none",
    "X-Stainless-Async: false", "x-stainless-retry-count: 0", "x-stainless-read-timeout: 600",
)  # fmt: skip
FIELDS = ("Host: localhost", "Accept: text/event-stream", "Content-Type: application/json")
# Other than what a client sends again and again, such a head is never one that was read before.
NEW = "0" * 32
REFUSED = b"HTTP/1.1 400"
HERE = "our server in this process"
TRACED_FIELDS = (*FIELDS, f"Traceparent: 00-{NEW}-b7ad6b7169203331-01")


class Orders(Engine):
    """Keeps the orders of one batch."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.ids: list[int] = []

    def submit(self, message: Submit) -> None:
        """See the table's Engine."""
        self.ids.append(message.id)


class Sink(asyncio.Transport):
    """Takes everything at once and keeps the last of it."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 50_000)})
        self.last = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Gone."""
        self.last = bytes(data)

    @property
    def whole(self) -> bool:
        """The last of it is an answer's end."""
        return self.last.endswith(b"0\r\n\r\n") or b"Content-Length" in self.last

    @property
    def is_refused(self) -> bool:
        """The last of it is the head of no stream."""
        return self.last.startswith(b"HTTP/1.1 ") and not self.last.startswith(b"HTTP/1.1 200")

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Never reached."""

    def get_write_buffer_size(self) -> int:
        """Nothing waits."""
        return 0

    def is_closing(self) -> bool:
        """It never does."""
        return False

    def resume_reading(self) -> None:
        """It never stopped."""

    def abort(self) -> None:
        """At the end."""


@dataclass
class Cost:
    """Microseconds of one request."""

    begin: float
    token: float = 0.0
    end: float = 0.0

    @property
    def own(self) -> float:
        """Without its tokens."""
        return self.begin + self.end


class Bench:
    """One server, and connections to it."""

    def __init__(self, log: TextIO, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = Orders(synthetic_hello())
        self.server = Server(
            limited=False,
            engine=self.engine,
            log=log,
            call_later=lambda seconds, call: loop.call_later(seconds, call).cancel,
        )
        self.host = Host(
            program=self.server.app,
            deadlines=Deadlines(),
            loop=loop,
            max_header=65_536,
            max_body=8 * 2**20,
            max_ws_message=2**20,
            abort_on_half_close=True,
            connections_max=10**6,
            new_request_id=new_request_id,
            connections=set(),
            trusted=TrustedProxies("127.0.0.1"),
        )
        self.connections = [self.connect() for _ in range(CONNECTIONS)]
        self.asked = 0

    def connect(self) -> Connection:
        """One more connection."""
        connection = Connection(self.host)
        connection.connection_made(Sink())
        return connection

    async def play(self, request: bytes) -> Cost:
        """The request once on each connection, its tokens, its end."""
        clock, ids = time.thread_time, self.engine.ids
        ids.clear()
        sinks = [cast(Sink, connection.transport) for connection in self.connections]
        each_own = [request.replace(NEW.encode(), b"%032x" % (self.asked + n)) for n in range(1, len(sinks) + 1)]
        self.asked += len(sinks)
        for sink in sinks:
            sink.last = b""
        began = clock()
        for connection, data in zip(self.connections, each_own, strict=True):
            connection.data_received(data)
        while len(ids) < len(sinks) and not sinks[-1].is_refused:  # noqa: ASYNC110 (turns of the loop)
            await asyncio.sleep(0)
        begun = clock()
        if sinks[-1].last.startswith(REFUSED):
            return Cost((begun - began) / len(sinks) * 1e6)
        asked = request.partition(b"\r\n")[0].decode()
        if len(ids) < len(sinks):
            raise Wrong(HERE, asked, "started no stream", sinks[-1].last)
        step = self.server.table.on_step
        words = [WORD_BASE + number for number in range(len(ids))]
        step(Step(ids, words, [Admitted(id_, 0) for id_ in ids], [], [], Gauges()))
        steps = [Step(ids, words, [], [], [], Gauges()) for _ in range(TOKENS)]
        told = clock()
        for each in steps:
            step(each)
        made = clock()
        step(Step([], [], [], [End(id_, "length") for id_ in ids], [], Gauges()))
        for _ in range(TURNS_MAX):
            await asyncio.sleep(0)
            if all(sink.whole for sink in sinks):
                break
        ended = clock()
        if part := [sink.last for sink in sinks if not sink.whole]:
            raise Wrong(HERE, asked, f"ended with {part[0]!r}")
        share = 1e6 / len(ids)
        return Cost((begun - began) * share, (made - told) * share / TOKENS, (ended - made) * share)


def fetched(target: str) -> bytes:
    """A GET, as a page's EventSource sends it."""
    return f"GET {target} HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n".encode()


def requests() -> dict[str, bytes]:
    """What is asked, by name."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "bench", "messages": messages, "max_tokens": 1000}
    target = "/v1/generate?prompt=What+is+the+capital+of+France%3F&max_tokens=1000"
    return {
        "chat": posted({**body, "stream": True}, fields=FIELDS),
        "chat, OpenAI's SDK": posted({**body, "stream": True}, fields=SDK_FIELDS),
        "chat, each head new": posted({**body, "stream": True}, fields=TRACED_FIELDS),
        "chat, in one piece": posted(body, fields=FIELDS),
        "generate": fetched(target),
        "generate, each head new": fetched(target.replace("France", NEW)),
        "chat, refused": posted({**body, "stream": True, "logit_bias": {"Paris": 1}}, fields=FIELDS),
        "messages": posted({**body, "stream": True}, "/v1/messages", FIELDS),
        "responses": posted({"input": "What is the capital?", "stream": True, "store": False}, "/v1/responses", FIELDS),
    }


async def measure(rounds: int, names: list[str], log: TextIO) -> dict[str, Cost]:
    """The least of each request's parts."""
    bench = Bench(log, asyncio.get_running_loop())
    asked = {name: data for name, data in requests().items() if name in names}
    seen: dict[str, list[Cost]] = {name: [] for name in asked}
    garbage.settle()  # as the server does
    for _ in range(rounds):
        for name, data in asked.items():
            seen[name].append(await bench.play(data))
            await asyncio.sleep(0)  # the streams are forgotten
    return {
        name: Cost(*(min(getattr(cost, part) for cost in costs) for part in ("begin", "token", "end")))
        for name, costs in seen.items()
    }


def main(argv: list[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench request", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=arguments.whole(1, arguments.ROUNDS_MAX), metavar="N", default=50, help="(default: 50)"
    )
    parser.add_argument(
        "--requests", type=arguments.one_of(requests(), "request"), nargs="+", metavar="NAME",
        default=list(requests()), help=f"of {arguments.quoted(requests())} (default: all)",
    )  # fmt: skip
    options = parser.parse_args(argv)
    with Path("/dev/null").open("w", buffering=1) as log:  # a write for each line, as on stderr
        costs = uvloop.run(measure(options.rounds, options.requests, log))
    print(f"{describe()}; the least of {options.rounds} rounds of {CONNECTIONS} requests\n")
    rows = [[name, *(f"{n:.1f}" for n in (c.begin, c.end, c.own, c.token))] for name, c in costs.items()]
    print(markdown(["µs", "begin", "end", "both", "a token"], rows))
    return 0
