"""/v1/ws: many generations on one socket, each with an id that the client chose; or one bare prompt.

Client messages: generate (with the fields of a chat or text completion), cancel, resume. Server messages: started,
token, done, error. Every generation is a reader like any other: when the socket takes no more, all of them wait.
A first message that does not start with `{` is a prompt: its text comes back in one message a token, then a close. The
query of the socket's address says how it is generated, in the fields of GET /v1/generate.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from engine.tokenizer import refuse_surrogates
from protocols.escape import json_text
from protocols.websocket import Binary, Text, WsEvent
from server import outcome as outcomes
from server.access_log import CLIENT_LEFT
from server.api import errors, streams
from server.api.errors import ApiError, invalid
from server.api.generate import plan_generate, query_fields
from server.api.generation import Generation, check_one_choice
from server.api.json_checks import refuse_crowds, refuse_repeated_names
from server.api.openai_chat import plan_chat, usage_of
from server.api.openai_completions import plan_completion
from server.api.types import ChatRequest, CompletionRequest, GenerationFields, convert
from server.begun import begin
from server.elsewhere import Unreachable
from server.framing import digits, unescaped
from server.frontends.relay import Packed, Relay, RelayedMessages
from server.http import Call, Response, Streaming, WebSocketChannel
from server.log import Event
from server.metrics import Metrics
from server.outcome import Outcome
from server.outlet import PLAIN_TEXT, POSITION, TEXT, Pieces
from server.readers import ClientReader, Source
from server.stream import Grammar, Stream
from server.table import Part

# Generations at once on one socket. A page with more wants a second socket; without a bound one client could fill the
# table of streams.
GENERATIONS_MAX = 256
ID_CHARS_MAX = 256
# RFC 6455 7.4.1
NORMAL, GOING_AWAY, POLICY_VIOLATION, INTERNAL_ERROR = 1000, 1001, 1008, 1011
SERVICE_RESTART, TRY_AGAIN_LATER = 1012, 1013  # from IANA's registry


# Told of a generation that was asked for and never began: its outcome, and the status that tells why.
Unbegun = Callable[[str, int], None]


class ClientMessage(msgspec.Struct):
    """The part of a client's message that all types share."""

    type: str
    id: str


class ResumeMessage(msgspec.Struct, forbid_unknown_fields=True):
    """Go on with a stream behind position `after`."""

    type: str
    id: str
    stream: str
    after: int = -1


class ApiSession:
    """One open socket."""

    def __init__(
        self, generation: Generation, metrics: Metrics, call: Call, socket: WebSocketChannel, unbegun: Unbegun
    ) -> None:
        self._generation = generation
        self._metrics = metrics
        self._call = call
        self.socket = socket
        self._unbegun = unbegun
        self._shown: dict[str, Shown] = {}  # by the client's id
        self._starting: dict[str, Start] = {}
        self._fetching: dict[str, asyncio.Task[None]] = {}  # streams of other processes
        self._bare = False
        self._first = True
        self._draining = False

    # What the connection tells

    def receive(self, event: WsEvent) -> None:
        """A message from the client."""
        if isinstance(event, Text):
            first, self._first = self._first, False
            if first and not event.data.lstrip().startswith("{"):
                self._bare = True
                self._begin("", lambda: self._start_bare(event.data))
            elif self._bare:
                self._error("", invalid(None, "this socket answers the one prompt that it began with"))
            else:
                self._take(event.data)
        elif isinstance(event, Binary):
            self.socket.close(1003, "messages are JSON text")

    def pump(self) -> None:
        """The socket takes more: every generation in turn, the one that was served last at the end."""
        for id_ in list(self._shown):
            if not self.socket.writable:
                return
            if shown := self._shown.pop(id_, None):
                self._shown[id_] = shown
                shown.reader.pump()

    def drain(self) -> None:
        """No new generations; close when the last one ended."""
        self._draining = True
        self._close_if_drained(GOING_AWAY)

    def lost(self) -> None:
        """The client is gone: its generations are detached."""
        self._draining = False  # there is nothing left to close
        for start in self._starting.values():
            start.cancel()
            self._unbegun(outcomes.CANCELLED, CLIENT_LEFT)
        self._starting.clear()
        for task in self._fetching.values():
            task.cancel()
        self._fetching.clear()
        for shown in list(self._shown.values()):
            shown.reader.leave()
        self._shown.clear()

    # Messages

    def _take(self, text: str) -> None:
        id_ = ""
        try:
            fields = _decode(text, self._generation.ids_max)
            message = _convert(fields, ClientMessage)
            id_ = _checked_id(message.id)
            if message.type == "generate":
                self._generate(id_, fields)
            elif message.type == "resume":
                self._resume(id_, _convert(fields, ResumeMessage))
            elif message.type == "cancel":
                self._cancel(id_)
            else:
                raise invalid("type", f"{message.type!r} is no type of message; generate, cancel and resume are")
        except ApiError as error:
            self._error(id_, error)

    def _generate(self, id_: str, fields: dict[str, Any]) -> None:
        try:
            self._check_room(id_)
            if self._draining:
                raise errors.busy(503, "the server is going to stop", 1)
        except ApiError as error:
            self._unbegun(outcomes.REFUSED, error.status)
            raise
        del fields["type"], fields["id"]
        self._begin(id_, lambda: self._start(id_, fields))

    def _check_room(self, id_: str) -> None:
        """Raises ApiError unless one more generation can be shown under this id."""
        if id_ in self._shown or id_ in self._starting or id_ in self._fetching:
            raise invalid("id", f"the id {id_!r} is in use on this socket")
        if len(self._shown) + len(self._starting) + len(self._fetching) >= GENERATIONS_MAX:
            raise errors.busy(429, f"{GENERATIONS_MAX} generations run on this socket, the limit", 1)

    def _begin(self, id_: str, plan: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def work() -> None:
            try:
                await plan()
            finally:
                self._has_begun(id_, start)

        start = self._starting[id_] = Start(work)
        self.socket.take_turn(start.begin)

    def _has_begun(self, id_: str, start: Start) -> None:
        """The work that `_begin` began is done, for better or worse. Not left to the task's own callback: a cancel that
        comes before that would be told that nothing had begun."""
        if self._starting.get(id_) is start:
            del self._starting[id_]
        self._close_if_drained(SERVICE_RESTART)

    async def _start(self, id_: str, fields: dict[str, Any]) -> None:
        stream: Stream | None = None
        try:
            request: GenerationFields
            grammar: Grammar
            if "prompt" in fields:
                request = convert(fields, CompletionRequest)
                grammar, parts = await plan_completion(self._generation, request, "websocket")
            else:
                request = convert(fields, ChatRequest)
                grammar, parts = await plan_chat(self._generation, request, "websocket")
            stream = self._submit(request, grammar, parts)
            self._show(id_, stream)
        except ApiError as error:
            self._unbegun(outcomes.REFUSED, error.status)
            self._error(id_, error)
        except Exception:
            self._log_fault(stream)
            self._error(id_, ApiError(500, "the server failed; its log has this request's id"))

    async def _start_bare(self, prompt: str) -> None:
        stream: Stream | None = None
        try:
            fields = {**query_fields(self._call.query), "prompt": prompt}
            request, grammar, parts = await plan_generate(self._generation, fields, "websocket")
            check_one_choice(parts, "a bare prompt is answered by one choice only; take a generate message for more")
            stream = self._submit(request, grammar, parts)
            self._show_bare(stream)
        except ApiError as error:
            self._unbegun(outcomes.REFUSED, error.status)
            code = TRY_AGAIN_LATER if error.status in (429, 503) else POLICY_VIOLATION
            self.socket.close(code, error.message)
        except Exception:
            self._log_fault(stream)
            self.socket.close(INTERNAL_ERROR, "the server failed")

    def _log_fault(self, stream: Stream | None) -> None:
        if stream is None:
            self._unbegun(outcomes.REFUSED, 500)
        self._generation.table.log_fault(self._call.request_id, traceback.format_exc())

    def _submit(self, request: GenerationFields, grammar: Grammar, parts: list[Part]) -> Stream:
        return self._generation.start(self._call, request, grammar, parts, collect=False)

    def _cancel(self, id_: str) -> None:
        if start := self._starting.pop(id_, None):
            start.cancel()
            self._unbegun(outcomes.CANCELLED, 409)
            self._error(id_, ApiError(409, "cancelled before it began", code=outcomes.CANCELLED))
            self._close_if_drained(SERVICE_RESTART)
        elif task := self._fetching.pop(id_, None):
            task.cancel()
            self._error(id_, ApiError(409, "cancelled before it was here", code=outcomes.CANCELLED))
            self._close_if_drained(SERVICE_RESTART)
        elif shown := self._shown.get(id_):
            shown.stream.finish(Outcome(outcomes.CANCELLED, "cancelled by its client"))
        else:
            raise ApiError(404, f"no generation with the id {id_!r} runs on this socket", param="id", code="not_found")

    def _resume(self, id_: str, message: ResumeMessage) -> None:
        self._check_room(id_)
        if message.after < -1:
            raise invalid("after", "after must be at least 0")
        if (home := self._generation.elsewhere.home_of(message.stream)) is not None:
            fetching = self._fetch(id_, home, message)
            self._fetching[id_] = asyncio.get_running_loop().create_task(fetching)
            return
        stream = resumed(self._generation, self._metrics, self._call, message.stream, message.after)
        self._show(id_, stream, message.after + 1)

    async def _fetch(self, id_: str, home: int, message: ResumeMessage) -> None:
        """Show a stream of another process."""
        try:
            answer = await self._generation.elsewhere.show(home, self._call, id_, message.stream, message.after)
        except Unreachable:  # and with it the stream
            self._metrics.resumes["unknown"] += 1
            answer = errors.render(ApiError(404, "there is no such stream", code="stream_not_found"))
        del self._fetching[id_]
        if isinstance(answer, Streaming):
            self._send_started(id_, answer.stream.id)
            self._attach(id_, Shown(self, id_, answer.stream, RelayedMessages(self.socket), 0))
        else:
            self._refuse(id_, answer)
            self._close_if_drained(SERVICE_RESTART)

    # Answers

    def _show(self, id_: str, stream: Stream, cursor: int = 0) -> None:
        self._send_started(id_, stream.id)
        self._attach(id_, Shown(self, id_, stream, TokenMessages(stream, id_, self.socket), cursor))

    def _send_started(self, id_: str, stream_id: str) -> None:
        self._send(b'{"type":"started","id":"%b","stream":"%b"}' % (json_text(id_), stream_id.encode()))

    def _show_bare(self, stream: Stream) -> None:
        self._attach("", Shown(self, "", stream, BareMessages(self.socket), 0))

    def _attach(self, id_: str, shown: Shown) -> None:
        self._shown[id_] = shown
        shown.stream.attach(shown.reader)
        shown.reader.pump()

    def ended(self, shown: Shown) -> None:
        """A generation was shown to its end, or can't be."""
        del self._shown[shown.id]
        stream, end = shown.stream, shown.stream.outcome
        if self._bare:
            self._close_bare(end)
            return
        if end is None:
            error = ApiError(410, "this reader fell behind what is held of the stream", code="position_gone")
            self._error(shown.id, error)
        elif isinstance(stream, Relay) and stream.last:
            self._send(stream.last)
        elif isinstance(stream, Stream):
            self._send(last_message(shown.id, stream, end))
        else:
            self._send(_error_message(shown.id, end))
        self._close_if_drained(SERVICE_RESTART)

    def _close_bare(self, end: Outcome | None) -> None:
        if end is not None and end.success:
            self.socket.close(NORMAL, end.kind)
        else:
            self.socket.close(INTERNAL_ERROR, end.message if end else "this reader fell behind")

    def _close_if_drained(self, code: int) -> None:
        if self._draining and not self._shown and not self._starting and not self._fetching:
            self.socket.close(code, "the server is going to stop")

    def _error(self, id_: str, error: ApiError) -> None:
        """A refusal that waiting helps against says how long, as Retry-After does."""
        self._refuse(id_, errors.render(error))

    def _refuse(self, id_: str, refusal: Response) -> None:
        wait = b"".join(b'"retry_after":%b,' % value for name, value in refusal.headers if name == b"Retry-After")
        self._send(b'{"type":"error","id":"%b",%b' % (json_text(id_), wait) + refusal.body[1:])

    def _send(self, payload: bytes) -> None:
        self.socket.write(self.socket.frame(payload))


class Start:
    """A generation that was asked for, from then until it has begun."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._work = work
        self._task: asyncio.Task[None] | None = None
        self._cancelled = False

    def begin(self) -> None:
        """It is its turn."""
        if not self._cancelled:
            self._task = begin(asyncio.get_running_loop(), self._work())

    def cancel(self) -> None:
        """Nobody wants it any more."""
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()


class Shown:
    """One generation on a socket: the channel of its reader."""

    def __init__(
        self,
        session: ApiSession,
        id_: str,
        stream: Source,
        framing: TokenMessages | BareMessages | RelayedMessages,
        cursor: int,
    ) -> None:
        self.id = id_
        self.stream = stream
        self.gate = session.socket.gate
        self.write = session.socket.write
        self.reader = ClientReader(stream, framing, self, cursor)
        self.reader.send_by(session.socket.outlet(framing.pieces()))
        self._session = session

    def write_each(self, pieces: list[bytes]) -> None:
        """See Channel. They are frames already."""
        self.write(b"".join(pieces))

    def finish(self) -> None:
        """Everything was shown."""
        self._session.ended(self)

    def cut(self) -> None:
        """The rest can't be shown."""
        self._session.ended(self)


class TokenMessages:
    """`{"type":"token",…}` for each event that has text; `index` tells choices apart where there are several."""

    content_type = ping = b""
    half_close = lies_at_the_end = False

    def __init__(self, stream: Stream, id_: str, socket: WebSocketChannel | Packed) -> None:
        self.socket = socket
        several = len(stream.choices) > 1
        head = b'{"type":"token","id":"%b",' % json_text(id_)
        self._heads = [head + (b'"index":%d,' % i if several else b"") + b'"n":' for i in range(len(stream.choices))]

    def one(self, event: Event, position: int) -> bytes:
        """A message, if the event has text."""
        text = event.text
        if not text:
            return b""
        return self.socket.frame(b"".join((self._heads[event.choice], digits(position), b',"text":"', text, b'"}')))

    def pieces(self) -> Pieces | None:
        """See Framing."""
        return (self._heads[0], POSITION, b',"text":"', TEXT, b'"}') if len(self._heads) == 1 else None


class BareMessages:
    """The text alone, one message a token."""

    content_type = ping = b""
    half_close = lies_at_the_end = False

    def __init__(self, socket: WebSocketChannel) -> None:
        self.socket = socket

    def one(self, event: Event, position: int) -> bytes:
        """A message, if the event has text."""
        text = event.text
        if not text:
            return b""
        return self.socket.frame(text if b"\\" not in text else unescaped(text))

    def pieces(self) -> Pieces | None:
        """See Framing."""
        return (PLAIN_TEXT,)


def resumed(generation: Generation, metrics: Metrics, call: Call, stream_id: str, after: int) -> Stream:
    """A stream that a reader comes back to behind a position. Raises ApiError."""
    stream = streams.find(generation, metrics, call, stream_id)
    streams.check_position(metrics, stream, after)
    streams.retake_slot(generation, stream)
    metrics.resumes["resumed"] += 1
    return stream


def packed(generation: Generation, metrics: Metrics, call: Call, id_: str, stream_id: str, after: int) -> Streaming:
    """The same for another process's socket. Raises ApiError."""
    stream = resumed(generation, metrics, call, stream_id, after)
    return Streaming(stream, TokenMessages(stream, id_, Packed()), after + 1)


def last_message(id_: str, stream: Stream, end: Outcome) -> bytes:
    """How a generation ended."""
    if not end.success:
        return _error_message(id_, end)
    usage, head = msgspec.json.encode(usage_of(stream)), (json_text(id_), msgspec.json.encode(end.kind))
    return b'{"type":"done","id":"%b","finish_reason":%b,"usage":%b}' % (*head, usage)


def _error_message(id_: str, end: Outcome) -> bytes:
    return b'{"type":"error","id":"%b",' % json_text(id_) + errors.outcome_body(end)[1:]


def _decode(text: str, ids_max: int) -> dict[str, Any]:
    data = text.encode()
    refuse_crowds(data, ids=ids_max)
    try:
        value = msgspec.json.decode(data)
        if isinstance(value, dict) and "messages" in value:
            refuse_crowds(data)
        refuse_repeated_names(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(None, f"the message is not valid JSON: {error}", "invalid_json") from None
    if not isinstance(value, dict):
        raise invalid(None, "a message is a JSON object")
    return value


def _convert(fields: dict[str, Any], kind: type[Any]) -> Any:
    try:
        return msgspec.convert(fields, type=kind)
    except msgspec.ValidationError as error:
        raise invalid(None, str(error)) from None


def _checked_id(id_: str) -> str:
    if not id_ or len(id_) > ID_CHARS_MAX:
        raise invalid("id", f"id must have 1 to {ID_CHARS_MAX} characters")
    try:
        refuse_surrogates(id_)
    except ValueError as error:
        raise invalid("id", str(error)) from None
    return id_
