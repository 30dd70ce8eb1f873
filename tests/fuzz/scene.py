"""One connection under fire: a real `Connection`, program and stream table, with time, the engine and the client's
socket in the fuzzer's hand.

`play(data)` plays any bytes (see ops.py) and raises AssertionError when something doesn't hold, whatever else was to
come: an exception of ours, a malformed or misplaced answer, a buffer beyond its bound, a connection that outlives its
deadlines, an alarm or a task that outlives its connection, a count in the metrics that doesn't add up.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TypeVar

from msgspec.structs import replace

from engine.tokenizer import Tokenizer
from engine.wire import Admitted, End, Gauges, Logprob, Step
from protocols.http1 import Request
from protocols.http2_guard import PREFACE
from server.access_log import AccessLog
from server.api.generation import Generation, Model
from server.app import App, Policy
from server.chat import ChatTemplate
from server.connection import PIPELINE_BYTES_MAX, Connection
from server.echo import EchoProgram
from server.gateway.access import Gateway
from server.gateway.keys import Keys
from server.host import Deadlines, Host
from server.http import Call, Program, Response, Streaming, Upgrade
from server.limits import Limits
from server.metrics import Metrics
from server.outcome import REFUSED
from server.stream import Stream
from server.table import StreamTable
from tests.fuzz import oracle
from tests.fuzz.ops import HTTP2, REQUESTS, STREAM, Kind, Op, decode, frame
from tests.fuzz.transport import FakeTransport
from tests.fuzz.virtual_loop import VirtualLoop
from tests.support.engines import EOS, ScriptedEngine, tokenizer

MAX_HEADER, MAX_BODY, MAX_WS_MESSAGE = 1024, 2048, 1024
LIMITS = Limits(
    credit_window=8,
    resume_ttl_s=20.0,
    log_bytes_per_stream=8 * 1024,
    log_bytes=16 * 1024,
    streams_max=6,
    queue_max=4,
    request_timeout_s=300.0,
)
# Behind the last operation: every deadline in turn (idle, request, write stall, resume) has passed by then.
AFTERLIFE_S = 2000.0
SECONDS = (0.0, 0.03, 0.06, 1.0, 2.5, 6.0, 11.0, 16.0, 31.0, 76.0, 121.0, 310.0)
# Above the high-water mark: one burst of a late reader, the answers to one piece of pipelined requests or of frames.
UNSENT_BYTES_MAX = 192 * 1024
PIECE_BYTES_MAX = 16 * 1024  # of what the client sends at once
TEMPLATE = ChatTemplate("{% for m in messages %}{{ m['content'] }}{% endfor %}", "", "<|end|>")
TOKENIZER: Tokenizer = tokenizer()


class _Engine(ScriptedEngine):
    """What the server cancels before it heard that it ended in the same step is no mistake."""

    def __init__(self, *, running_max: int) -> None:
        super().__init__(running_max=running_max)
        self._ending: set[int] = set()

    def end(self, *ends: End) -> None:
        """Forget sequences; the server hears of it next."""
        self._ending = {end.id for end in ends}
        for end in ends:
            del self.live[end.id]

    def cancel(self, sequence_ids: list[int]) -> None:
        """See the table's Engine."""
        super().cancel([id_ for id_ in sequence_ids if id_ not in self._ending])


class _NoLog:
    """Takes the log's lines and keeps the faults."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def write(self, text: str) -> int:
        if " fault " in text:
            self.faults.append(text)
        return len(text)


Answer = TypeVar("Answer", Response, Streaming, Response | Streaming)


@dataclass(slots=True)
class Asked:
    """One request whose head the program saw, and what became of it."""

    call: Call
    number: int
    request: Request  # which the call sheds once its answer streams
    query: str = ""
    answering: bool = False
    heads_sent: int = 0


class Watched:
    """A program between its connection and the checks: numbers each request, and marks its answer with the number."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.asked: list[Asked] = []
        self.streams: dict[str, Stream] = {}

    def _of(self, call: Call) -> Asked:
        (asked,) = (asked for asked in self.asked if asked.call is call)
        if call.request.http_version != "2":
            assert asked is self.asked[-1], "an answer to a request that is not the current one"
        return asked

    def refuse(self, call: Call) -> Response | None:
        """See Program."""
        if call.request.http_version != "2":
            assert not any(asked.answering for asked in self.asked), "a request begun before the last one was answered"
        asked = Asked(call, len(self.asked), call.request)
        self.asked.append(asked)
        answer = self._program.refuse(call)
        asked.query = call.query
        return None if answer is None else self._marked(call, answer)

    async def answer(self, call: Call) -> Response | Streaming:
        """See Program."""
        asked = self._of(call)
        assert not asked.answering, "dispatched twice"
        asked.answering = True
        try:
            answer = await self._program.answer(call)
        finally:
            asked.answering = False
        if isinstance(answer, Streaming):
            self.streams[answer.stream.id] = answer.stream
        return self._marked(call, answer)

    def upgrade(self, call: Call) -> Response | Upgrade:
        """See Program."""
        answer = self._program.upgrade(call)
        return self._marked(call, answer) if isinstance(answer, Response) else answer

    def malformed(self, call: Call | None, status: int, message: str) -> Response:
        """See Program."""
        answer = self._program.malformed(call, status, message)
        return self._marked(call, answer)

    def sent(self, call: Call, status: int) -> None:
        """See Program."""
        self._of(call).heads_sent += 1
        self._program.sent(call, status)

    def left(self, call: Call) -> None:
        """See Program."""
        asked = self._of(call)
        assert asked.answering or not asked.heads_sent, "left behind its answer"
        self._program.left(call)

    def _marked(self, call: Call | None, answer: Answer) -> Answer:
        number = b"none" if call is None else b"%d" % self._of(call).number
        return replace(answer, headers=(*answer.headers, (oracle.MARK, number)))


class Scene:
    """Everything around one connection. `echo`: the program of --conformance-echo in place of the API."""

    def __init__(self, loop: VirtualLoop, *, abort_on_half_close: bool = True, echo: bool = False) -> None:
        self.loop = loop
        self.engine = _Engine(running_max=4)
        self.metrics = Metrics()
        self._log = _NoLog()
        log = AccessLog("text", out=self._log, clock=loop.time, now=lambda: 0.0)  # type: ignore[arg-type]
        self._gateway = Gateway(Keys(None), clock=loop.time, now=loop.time)
        self.table = StreamTable(
            self.engine,
            TOKENIZER,
            self._gateway.limiter,
            self.metrics,
            LIMITS,
            clock=loop.time,
            call_later=lambda seconds, call: loop.call_later(seconds, call).cancel,
            log_access=log.stream,
            log_fault=log.fault,
        )
        self.program = Watched(EchoProgram() if echo else self._app(log))
        self._names = itertools.count()
        self.host = Host(
            program=self.program,
            deadlines=Deadlines(),
            loop=loop,
            max_header=MAX_HEADER,
            max_body=MAX_BODY,
            max_ws_message=MAX_WS_MESSAGE,
            abort_on_half_close=abort_on_half_close,
            connections_max=1,
            new_request_id=lambda: f"req-{next(self._names)}",
            connections=set(),
        )
        self.connection = Connection(self.host)
        self.transport = FakeTransport(loop)
        self._app_draining = False
        self._admitted: set[int] = set()
        self._waiting = bytearray()  # what the client sent while the connection didn't read
        self._at_end = False  # … and then it sent no more
        # The client went, sent EOF (whom to give up then is for the connection's own tests), or left bytes unread
        # while time passed.
        self.may_be_cut = False
        self.transport.connect(self.connection)

    def _app(self, log: AccessLog) -> App:
        assert self.engine.hello is not None
        model = Model("scripted", self.engine.hello, TOKENIZER, TEMPLATE, 0)
        self._application = App(
            Generation(self.table, model),
            self.metrics,
            self._gateway,
            Policy(),
            log,
            engine_up=lambda: self.engine.hello is not None,
        )
        return self._application

    # Operations

    def do(self, op: Op) -> None:
        """One event, and what follows from it at once."""
        argument = op.argument
        if op.kind is Kind.DATA:
            self._send(op.data)
        elif op.kind is Kind.CANNED:
            self._send(self._request(argument))
        elif op.kind is Kind.DRIPPED:
            for byte in self._request(argument):
                self._send(bytes([byte]))
        elif op.kind is Kind.FRAME:
            self._send(frame(argument, self._stream_id()))
        elif op.kind is Kind.HTTP2:
            number = argument % len(HTTP2)
            self._send((b"" if number else PREFACE) + HTTP2[number])
        elif op.kind is Kind.LONG:
            self._send(bytes([argument]) * (MAX_HEADER // 2))
        elif op.kind is Kind.EOF:
            self._at_end = self.may_be_cut = True
        elif op.kind is Kind.READ:
            self.transport.drain(argument * argument)
        elif op.kind is Kind.TIME:
            self.loop.advance(SECONDS[argument % len(SECONDS)])
            self.may_be_cut |= self.transport.get_write_buffer_size() > 0 or self.transport.dropped
        else:
            self._do_server(op.kind, argument)
        self._deliver()
        if not op.quiet:
            self.loop.rest()
        self.check_now()

    def _do_server(self, kind: Kind, argument: int) -> None:
        if kind is Kind.STEP:
            for turn in range(argument % 16 + 1):
                self._step(argument + turn)
        elif kind is Kind.END:
            self._end_sequences(("stop", "length", "error")[argument % 3], by_token=argument & 4 > 0)
        elif kind is Kind.DRAIN:
            self._drain()
        elif kind is Kind.DIE:
            self._die_or_revive()
        elif kind is Kind.RESET:
            self.may_be_cut = True
            self.transport.reset()

    def _request(self, number: int) -> bytes:
        return REQUESTS[number % len(REQUESTS)].replace(STREAM, self._stream_id())

    def _stream_id(self) -> bytes:
        held = list(self.table._streams)
        return held[-1].encode() if held else b"A" * 24

    def _send(self, data: bytes) -> None:
        if not self._at_end:
            self._waiting += data
            self._deliver()

    def _deliver(self) -> None:
        """As TCP does: only while the server reads, in pieces of a bounded size."""
        while self._waiting and self.transport.readable:
            piece = bytes(self._waiting[:PIECE_BYTES_MAX])
            del self._waiting[:PIECE_BYTES_MAX]
            self.transport.feed(piece)
        if self._at_end and not self._waiting and self.transport.readable:
            self.transport.feed_eof()

    def _step(self, salt: int) -> None:
        engine = self.engine
        if engine.hello is None:
            return
        admitted = [Admitted(id_, salt % 4) for id_ in engine.live if id_ not in self._admitted]
        self._admitted.update(a.id for a in admitted)
        ids = engine.runnable
        tokens = [(id_, b'a \xe2\x80\xa8\xf0\n"x'[(salt + i) % 9]) for i, id_ in enumerate(ids)]
        made = engine.tokens(tokens)
        logprobs = [
            Logprob(i, -0.5, [1, 2], [-0.5, -1.5])
            for i, id_ in enumerate(ids)
            if engine.live[id_].sampling.logprobs >= 0
        ]
        ends = [End(id_, "length") for id_ in ids if engine.made[id_] >= engine.live[id_].sampling.max_tokens]
        engine.end(*ends)
        self.table.on_step(Step(made.ids, made.tokens, admitted, ends, logprobs, Gauges(running=len(ids))))

    def _end_sequences(self, reason: str, *, by_token: bool) -> None:
        engine = self.engine
        ids = engine.runnable
        by_token = by_token and reason == "stop"
        ends = [End(id_, reason, by_token, "out of luck" if reason == "error" else "") for id_ in ids]
        made = engine.tokens([(id_, EOS) for id_ in ids] if by_token else [])
        engine.end(*ends)
        self.table.on_step(Step(made.ids, made.tokens, [], ends, [], Gauges()))

    def _drain(self) -> None:
        self.host.draining = True
        if hasattr(self, "_application"):
            self._application.draining = True
        if not self.transport.lost:
            self.connection.drain()

    def _die_or_revive(self) -> None:
        if self.engine.hello is not None:
            self.engine.die()
            self.table.on_engine_lost()
        else:
            self.engine.revive()
            self._admitted.clear()
            self.table.on_engine_ready()

    # What must hold

    def check_now(self) -> None:
        """At every moment."""
        assert not self.loop.faults, self.loop.faults
        assert not self._log.faults, self._log.faults
        assert self.transport.unsent_max <= UNSENT_BYTES_MAX, self.transport.unsent_max
        connection = self.connection
        assert connection._http.buffered <= PIPELINE_BYTES_MAX + PIECE_BYTES_MAX
        assert len(connection._http._guard.buffer) <= PIPELINE_BYTES_MAX + PIECE_BYTES_MAX
        assert len(connection._body) <= MAX_BODY + PIECE_BYTES_MAX
        assert all(asked.heads_sent <= 1 for asked in self.program.asked), "two answers to a request"

    def finish(self, ending: int) -> None:
        """The last act. Even endings: the client reads all, and is silent; odd ones: it does not even read."""
        reads = ending % 2 == 0
        if reads:
            self.transport.read_all()
        for _ in range(20):
            self.loop.advance(AFTERLIFE_S / 20)
            self._deliver()
            self.check_now()
        assert self.transport.lost, "a silent connection outlives its deadlines"
        assert self.connection not in self.host.connections
        self.loop.advance(AFTERLIFE_S)
        self.check_now()
        self._check_nothing_left()
        oracle.check(self, whole=reads)

    def _check_nothing_left(self) -> None:
        assert not list(self.table.live), "a stream outlives its deadlines"
        assert not self.engine.live, "a sequence that nobody cancelled"
        assert self.loop.timers == 0, [h for h in self.loop._scheduled if not h.cancelled()]
        assert not any(asked.answering for asked in self.program.asked), "a task that nobody cancelled"
        assert self.table.logs.bytes == 0
        ended = sum(count for (_, outcome), count in self.metrics.ended.items() if outcome != REFUSED)
        assert sum(self.metrics.started.values()) == ended + sum(
            count for (_, outcome), count in self.metrics.ended.items() if outcome == REFUSED
        ), "started is not the sum of the outcomes"


def play(data: bytes) -> None:
    """Play any bytes. The first one chooses the setting and the ending."""
    setting = data[0] if data else 0
    loop = VirtualLoop()
    with loop.running():
        scene = Scene(loop, abort_on_half_close=bool(setting & 2), echo=setting & 12 == 12)
        for op in decode(data[1:]):
            scene.do(op)
        scene.finish(setting)
