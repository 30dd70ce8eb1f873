"""How the Responses API shows a stream: typed events, each with its position as `sequence_number`.

created, in_progress, the message's item and its text part, the text in deltas; then the text, the part and the item
once more in whole, and the response: completed, incomplete, failed or cancelled. Calls are items beside messages. Every
event but the deltas of text is rendered when it is appended, and never changes.
"""

from __future__ import annotations

import msgspec

from engine.tokenizer import Tokenizer
from engine.wire import Logprob
from protocols.escape import json_value
from server import outcome as outcomes
from server.api import errors
from server.api.generation import new_created
from server.api.openai_chat import OpenAIGrammar
from server.api.response_output import TEXT_DELTA, Output, is_whole, typed
from server.api.response_types import (
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputTokensDetails,
    ResponseCancelled,
    ResponseCompleted,
    ResponseCreated,
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
from server.stream import Choice, Frame, Stream, escaped, new_stream_id, text_event
from server.tools.pieces import Piece, ToolArguments, ToolCallBegin, ToolCallEnd

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

    def __init__(self, request: ResponseRequest, model: str, tokenizer: Tokenizer, *, may_call: bool = False) -> None:
        """`may_call`: the answer may begin with a call, so its message begins with its text."""
        self.stream_id = new_stream_id()
        self.response_id = f"resp_{self.stream_id}"
        self._tokenizer = tokenizer
        self._may_call = may_call
        self.response = begun(request, id=self.response_id, created_at=new_created(), model=model)
        self._output = Output()
        head = b'{"type":"%b","item_id":"%b","output_index":0,"content_index":0,"logprobs":[],"delta":"'
        head %= TEXT_DELTA.encode(), self._output.first_id.encode()
        self.frames = [Frame(head, b'","sequence_number":', TEXT_DELTA, b"}")]

    def opening(self) -> list[Event]:
        """The response, and its message if that is sure to come, empty still."""
        events = [
            typed(ResponseCreated(sequence_number=0, response=self.response)),
            typed(ResponseInProgress(sequence_number=1, response=self.response)),
        ]
        return events if self._may_call else events + self._output.open_message(2)

    def with_logprobs(self, choice: Choice, text: bytes, logprob: Logprob) -> bytes:
        """A delta with the log probability of the token that completed it."""
        shown = json_value([self._shown_logprob(choice.generated[-1], logprob)])
        head = json_value({"type": TEXT_DELTA, **self._output.place})[:-1]
        position = choice.stream.log.end
        return b'%b,"logprobs":%b,"delta":"%b","sequence_number":%d}' % (head, shown, text, position)

    def pieces(self, choice: Choice, piece: Piece) -> list[Event]:
        """Text and calls, each as an item of its own."""
        output, position = self._output, choice.stream.log.end
        if isinstance(piece, ToolArguments):
            return [output.arguments(position, piece)]
        if isinstance(piece, ToolCallEnd):
            whole = is_whole(choice.calls[-1].arguments)
            return output.close(position, choice, "completed" if whole else "incomplete", [])
        if isinstance(piece, ToolCallBegin):
            events = output.close(position, choice, "completed", [])
            return events + output.open_call(position + len(events), piece)
        events = [] if output.in_message else output.open_message(position, len(choice.shown or ()))
        if output.items:
            return [*events, output.text(position + len(events), escaped(piece.text))]
        return [*events, text_event(0, piece.text)]

    def prompt_told(self, choice: Choice) -> list[Event]:
        """There is no place for them."""
        return []

    def choice_end(self, choice: Choice) -> list[Event]:
        """The message that is open, whole."""
        return self._output.close(choice.stream.log.end, choice, _status(choice), self._logprobs(choice))

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
        (choice,) = stream.choices
        rest = self._output.unfinished(choice, "incomplete", self._logprobs(choice))
        response.output = [*self._output.items, *([] if rest is None else [rest])]
        return [typed(_LAST[response.status](sequence_number=stream.log.end, response=response))]

    def whole(self, stream: Stream) -> bytes:
        """The response as it is now."""
        if stream.outcome is None and stream.state == "queued":
            return json_value(msgspec.structs.replace(self.response, status="queued"))
        return json_value(self.response)

    def _logprobs(self, choice: Choice) -> list[TokenLogprob]:
        return [self._shown_logprob(token, logprob) for token, logprob in choice.logprobs or ()]

    def _shown_logprob(self, token: int, logprob: Logprob) -> TokenLogprob:
        pieces = map(self._tokenizer.bytes_of, logprob.top_ids)
        top = [
            TopLogprob(piece.decode("utf-8", "replace"), list(piece), value)
            for piece, value in zip(pieces, logprob.top_logprobs, strict=True)
        ]
        piece = self._tokenizer.bytes_of(token)
        return TokenLogprob(piece.decode("utf-8", "replace"), list(piece), logprob.logprob, top)


def _status(choice: Choice) -> ItemStatus:
    return "completed" if choice.reason in (outcomes.STOP, outcomes.TOOL_CALLS) else "incomplete"


def _usage(stream: Stream) -> ResponseUsage:
    prompt, completion = stream.prompt_tokens, stream.completion_tokens
    return ResponseUsage(
        prompt, InputTokensDetails(stream.cached_tokens), completion, OutputTokensDetails(), prompt + completion
    )
