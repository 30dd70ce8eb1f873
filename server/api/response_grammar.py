"""How the Responses API shows a stream: typed events, each with its position as `sequence_number`.

created, in_progress, the message's item and its text part (before any token, so that a cut then can be resumed), the
text in deltas; then the text, the part and the item once more in whole, and the response: completed, incomplete, failed
or cancelled. Every event but the deltas is rendered when it is appended, and never changes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.tokenizer import Tokenizer
from engine.wire import Logprob
from protocols.escape import json_value
from server import outcome as outcomes
from server.api import errors
from server.api.generation import new_created
from server.api.openai_chat import OpenAIGrammar
from server.api.response_items import new_item_id
from server.api.response_types import (
    ContentPartAdded,
    ContentPartDone,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputItemAdded,
    OutputItemDone,
    OutputMessage,
    OutputText,
    OutputTextDone,
    OutputTokensDetails,
    ResponseCancelled,
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseFailure,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseRequest,
    ResponseStatus,
    ResponseUsage,
    TokenLogprob,
    TopLogprob,
    begun,
)
from server.log import Event
from server.outcome import Outcome
from server.stream import Choice, Frame, Stream
from server.table import new_stream_id
from server.tools.pieces import Piece

_STATUSES: dict[str, ResponseStatus] = {
    outcomes.STOP: "completed",
    outcomes.TOOL_CALLS: "completed",
    outcomes.LENGTH: "incomplete",
    outcomes.CANCELLED: "cancelled",
}  # any other: failed
_LAST: dict[
    str, type[ResponseCompleted] | type[ResponseIncomplete] | type[ResponseCancelled] | type[ResponseFailed]
] = {
    "completed": ResponseCompleted,
    "incomplete": ResponseIncomplete,
    "cancelled": ResponseCancelled,
    "failed": ResponseFailed,
}


class ResponseGrammar(OpenAIGrammar):
    """`response` is what clients see of it as a whole."""

    api = "responses"

    def __init__(self, request: ResponseRequest, model: str, tokenizer: Tokenizer) -> None:
        self.stream_id = new_stream_id()
        self.response_id = f"resp_{self.stream_id}"
        self._tokenizer = tokenizer
        self.response = begun(request, id=self.response_id, created_at=new_created(), model=model)
        self._message_id = new_item_id("msg")
        self._place: dict[str, Any] = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        name = "response.output_text.delta"
        head = json_value({"type": name, **self._place, "logprobs": []})[:-1]
        self.frames = [Frame(head + b',"delta":"', b'","sequence_number":', name, b"}")]

    def opening(self) -> list[Event]:
        """The response, its one message and its text, all empty still."""
        message = OutputMessage(self._message_id, "in_progress", [])
        return [
            _event(ResponseCreated(sequence_number=0, response=self.response)),
            _event(ResponseInProgress(sequence_number=1, response=self.response)),
            _event(OutputItemAdded(sequence_number=2, output_index=0, item=message)),
            _event(ContentPartAdded(sequence_number=3, **self._place, part=OutputText(""))),
        ]

    def with_logprobs(self, choice: Choice, text: bytes, logprob: Logprob) -> bytes:
        """A delta with the log probability of the token that completed it."""
        shown = json_value([self._shown_logprob(choice.generated[-1], logprob)])
        head = json_value({"type": self.frames[0].name, **self._place})[:-1]
        position = choice.stream.log.end
        return b'%b,"logprobs":%b,"delta":"%b","sequence_number":%d}' % (head, shown, text, position)

    def pieces(self, choice: Choice, piece: Piece) -> list[Event]:
        """Its requests have no tools yet."""
        raise NotImplementedError

    def prompt_told(self, choice: Choice) -> list[Event]:
        """There is no place for them."""
        return []

    def choice_end(self, choice: Choice) -> list[Event]:
        """The text, its part and its message, whole."""
        position = choice.stream.log.end
        message = self._message(choice)
        part = message.content[0]
        whole = OutputTextDone(sequence_number=position, **self._place, text=part.text, logprobs=part.logprobs)
        return [
            _event(whole),
            _event(ContentPartDone(sequence_number=position + 1, **self._place, part=part)),
            _event(OutputItemDone(sequence_number=position + 2, output_index=0, item=message)),
        ]

    def closing(self, stream: Stream, end: Outcome) -> list[Event]:
        """The response as it ended; it is the terminator too."""
        response = self.response
        response.status = _STATUSES.get(end.kind, "failed")
        if end.kind == outcomes.LENGTH:
            response.incomplete_details = IncompleteDetails()
        elif response.status == "failed":
            response.error = ResponseFailure(end.message, errors.outcome_type(end))
        elif response.status == "completed":
            response.completed_at = new_created()
        response.usage = _usage(stream)
        response.output = [self._message(choice) for choice in stream.choices]
        return [_event(_LAST[response.status](sequence_number=stream.log.end, response=response))]

    def whole(self, stream: Stream) -> bytes:
        """The response as it is now."""
        if stream.outcome is None and stream.state == "queued":
            return json_value(msgspec.structs.replace(self.response, status="queued"))
        return json_value(self.response)

    def _message(self, choice: Choice) -> OutputMessage:
        """What the model has said so far."""
        status: ItemStatus = "completed" if choice.reason in (outcomes.STOP, outcomes.TOOL_CALLS) else "incomplete"
        logprobs = [self._shown_logprob(token, logprob) for token, logprob in choice.logprobs or ()]
        text = OutputText("".join(choice.shown or ()), logprobs=logprobs)
        return OutputMessage(self._message_id, status, [text])

    def _shown_logprob(self, token: int, logprob: Logprob) -> TokenLogprob:
        pieces = map(self._tokenizer.bytes_of, logprob.top_ids)
        top = [
            TopLogprob(piece.decode("utf-8", "replace"), list(piece), value)
            for piece, value in zip(pieces, logprob.top_logprobs, strict=True)
        ]
        piece = self._tokenizer.bytes_of(token)
        return TokenLogprob(piece.decode("utf-8", "replace"), list(piece), logprob.logprob, top)


def _event(event: ResponseEvent) -> Event:
    return Event(-1, b"", json_value(event), str(event.__struct_config__.tag))


def _usage(stream: Stream) -> ResponseUsage:
    prompt, completion = stream.prompt_tokens, stream.completion_tokens
    return ResponseUsage(
        prompt, InputTokensDetails(stream.cached_tokens), completion, OutputTokensDetails(), prompt + completion
    )
