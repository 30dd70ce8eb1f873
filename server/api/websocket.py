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
from server.api.openai_chat import plan_chat, usage_of
from server.api.openai_completions import plan_completion
from server.api.types import (
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    convert,
    refuse_repeated_names,
)
from server.framing import unescaped
from server.http import Call, WebSocketChannel
from server.log import Event
from server.metrics import Metrics
from server.outcome import Outcome
from server.readers import ClientReader
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
        self._socket = socket
        self._unbegun = unbegun
        self._shown: dict[str, Shown] = {}  # by the client's id
        self._starting: dict[str, asyncio.Task[None]] = {}
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
                self._begin("", self._start_bare(event.data))
            elif self._bare:
                self._error("", invalid(None, "this socket answers the one prompt that it began with"))
            else:
                self._take(event.data)
        elif isinstance(event, Binary):
            self._socket.close(1003, "messages are JSON text")

    def pump(self) -> None:
        """The socket takes more: every generation in turn, the one that was served last at the end."""
        for id_ in list(self._shown):
            if not self._socket.writable:
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
        for task in self._starting.values():
            task.cancel()
            self._unbegun(outcomes.CANCELLED, CLIENT_LEFT)
        self._starting.clear()
        for shown in list(self._shown.values()):
            shown.reader.leave()
        self._shown.clear()

    # Messages

    def _take(self, text: str) -> None:
        id_ = ""
        try:
            fields = _decode(text)
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
        self._begin(id_, self._start(id_, fields))

    def _check_room(self, id_: str) -> None:
        """Raises ApiError unless one more generation can be shown under this id."""
        if id_ in self._shown or id_ in self._starting:
            raise invalid("id", f"the id {id_!r} is in use on this socket")
        if len(self._shown) + len(self._starting) >= GENERATIONS_MAX:
            raise errors.busy(429, f"{GENERATIONS_MAX} generations run on this socket, the limit", 1)

    def _begin(self, id_: str, work: Coroutine[Any, Any, None]) -> None:
        self._starting[id_] = asyncio.get_running_loop().create_task(work)

    def _has_begun(self, id_: str) -> None:
        """The work that `_begin` began is done, for better or worse. Not left to the task's own callback: a cancel that
        comes before that would be told that nothing had begun."""
        if self._starting.get(id_) is asyncio.current_task():
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
        finally:
            self._has_begun(id_)

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
            self._socket.close(code, error.message)
        except Exception:
            self._log_fault(stream)
            self._socket.close(INTERNAL_ERROR, "the server failed")
        finally:
            self._has_begun("")

    def _log_fault(self, stream: Stream | None) -> None:
        if stream is None:
            self._unbegun(outcomes.REFUSED, 500)
        self._generation.table.log_fault(self._call.request_id, traceback.format_exc())

    def _submit(self, request: GenerationFields, grammar: Grammar, parts: list[Part]) -> Stream:
        return self._generation.start(self._call, request, grammar, parts, collect=False)

    def _cancel(self, id_: str) -> None:
        if task := self._starting.pop(id_, None):
            task.cancel()
            self._unbegun(outcomes.CANCELLED, 409)
            self._error(id_, ApiError(409, "cancelled before it began", code=outcomes.CANCELLED))
            self._close_if_drained(SERVICE_RESTART)
        elif shown := self._shown.get(id_):
            shown.stream.finish(Outcome(outcomes.CANCELLED, "cancelled by its client"))
        else:
            raise ApiError(404, f"no generation with the id {id_!r} runs on this socket", param="id", code="not_found")

    def _resume(self, id_: str, message: ResumeMessage) -> None:
        self._check_room(id_)
        if message.after < -1:
            raise invalid("after", "after must be at least 0")
        stream = streams.find(self._generation, self._metrics, self._call, message.stream)
        streams.check_position(self._metrics, stream, message.after)
        streams.retake_slot(self._generation, stream)
        self._metrics.resumes["resumed"] += 1
        self._show(id_, stream, message.after + 1)

    # Answers

    def _show(self, id_: str, stream: Stream, cursor: int = 0) -> None:
        self._send(b'{"type":"started","id":"%b","stream":"%b"}' % (json_text(id_), stream.id.encode()))
        self._attach(id_, Shown(self, id_, stream, TokenMessages(stream, id_, self._socket), cursor))

    def _show_bare(self, stream: Stream) -> None:
        self._attach("", Shown(self, "", stream, BareMessages(self._socket), 0))

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
        elif end.success:
            usage = msgspec.json.encode(usage_of(stream))
            head = (json_text(shown.id), msgspec.json.encode(end.kind))
            self._send(b'{"type":"done","id":"%b","finish_reason":%b,"usage":%b}' % (*head, usage))
        else:
            self._send(b'{"type":"error","id":"%b",' % json_text(shown.id) + errors.outcome_body(end)[1:])
        self._close_if_drained(SERVICE_RESTART)

    def _close_bare(self, end: Outcome | None) -> None:
        if end is not None and end.success:
            self._socket.close(NORMAL, end.kind)
        else:
            self._socket.close(INTERNAL_ERROR, end.message if end else "this reader fell behind")

    def _close_if_drained(self, code: int) -> None:
        if self._draining and not self._shown and not self._starting:
            self._socket.close(code, "the server is going to stop")

    def _error(self, id_: str, error: ApiError) -> None:
        """A refusal that waiting helps against says how long, as Retry-After does."""
        body = errors.render(error).body
        wait = b"".join(b'"retry_after":%b,' % value for name, value in error.headers if name == b"Retry-After")
        self._send(b'{"type":"error","id":"%b",%b' % (json_text(id_), wait) + body[1:])

    def _send(self, payload: bytes) -> None:
        self._socket.write(self._socket.frame(payload))


class Shown:
    """One generation on a socket: the channel of its reader."""

    def __init__(
        self, session: ApiSession, id_: str, stream: Stream, framing: TokenMessages | BareMessages, cursor: int
    ) -> None:
        self.id = id_
        self.stream = stream
        self.reader = ClientReader(stream, framing, self, cursor)
        self._session = session
        self._socket = framing.socket

    @property
    def writable(self) -> bool:
        """Whether the socket takes more."""
        return self._socket.writable

    def write(self, data: bytes) -> None:
        """Frames of messages."""
        self._socket.write(data)

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

    def __init__(self, stream: Stream, id_: str, socket: WebSocketChannel) -> None:
        self.socket = socket
        several = len(stream.choices) > 1
        head = b'{"type":"token","id":"%b",' % json_text(id_)
        self._heads = [head + (b'"index":%d,' % i if several else b"") + b'"n":' for i in range(len(stream.choices))]

    def render(self, events: list[Event], first: int) -> bytes:
        """One message for each event with text."""
        frame = self.socket.frame
        return b"".join(
            [
                frame(b'%b%d,"text":"%b"}' % (self._heads[event.choice], n, event.text))
                for n, event in enumerate(events, first)
                if event.text
            ]
        )


class BareMessages:
    """The text alone, one message a token."""

    content_type = ping = b""
    half_close = lies_at_the_end = False

    def __init__(self, socket: WebSocketChannel) -> None:
        self.socket = socket

    def render(self, events: list[Event], first: int) -> bytes:
        """One message for each event with text."""
        return b"".join([self.socket.frame(unescaped(event.text)) for event in events if event.text])


def _decode(text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
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
