"""The items of a response, as they come, and the events that tell of them.

Messages and calls never interleave: an item begins, goes on in deltas, and is told once more in whole when it ends.
`position` is always that of the first event that a method returns.
"""

from __future__ import annotations

import json
from typing import Any

from protocols.escape import json_value
from server.api.response_items import new_item_id
from server.api.response_types import (
    ContentPartAdded,
    ContentPartDone,
    FunctionArgumentsDelta,
    FunctionArgumentsDone,
    FunctionCall,
    ItemStatus,
    OutputItem,
    OutputItemAdded,
    OutputItemDone,
    OutputMessage,
    OutputText,
    OutputTextDone,
    ResponseEvent,
    TokenLogprob,
)
from server.log import Event
from server.stream import Choice
from server.tools.pieces import ToolArguments, ToolCallBegin

TEXT_DELTA = "response.output_text.delta"


def typed(event: ResponseEvent) -> Event:
    """The event as the log holds it."""
    return Event(-1, b"", json_value(event), str(event.__struct_config__.tag))


class Output:
    """The first item may be a message that is open from the start: the one with `first_id`."""

    def __init__(self) -> None:
        self.first_id = new_item_id("msg")
        self.items: list[OutputItem] = []  # those that have ended
        self._open: OutputItem | None = None
        self._text_from = 0  # which of the choice's pieces of text is the open message's first

    @property
    def in_message(self) -> bool:
        """Whether text that comes now is a message's."""
        return isinstance(self._open, OutputMessage)

    @property
    def place(self) -> dict[str, Any]:
        """Where the open message's text is."""
        return {
            "item_id": self._open.id if self._open else self.first_id,
            "output_index": len(self.items),
            "content_index": 0,
        }

    def open_message(self, position: int, text_from: int = 0) -> list[Event]:
        """A message, empty still."""
        id_ = new_item_id("msg") if self.items else self.first_id
        self._open = OutputMessage(id_, "in_progress", [])
        self._text_from = text_from
        added = OutputItemAdded(sequence_number=position, output_index=len(self.items), item=self._open)
        part = ContentPartAdded(sequence_number=position + 1, **self.place, part=OutputText(""))
        return [typed(added), typed(part)]

    def text(self, position: int, escaped: bytes) -> Event:
        """More text of a message that isn't the first item."""
        head = json_value({"type": TEXT_DELTA, **self.place, "logprobs": []})[:-1]
        data = b'%b,"delta":"%b","sequence_number":%d}' % (head, escaped, position)
        return Event(0, escaped, data, TEXT_DELTA)

    def open_call(self, position: int, begin: ToolCallBegin) -> list[Event]:
        """A call, without arguments still."""
        self._open = FunctionCall(new_item_id("fc"), begin.id, begin.name, "", "in_progress")
        return [typed(OutputItemAdded(sequence_number=position, output_index=len(self.items), item=self._open))]

    def arguments(self, position: int, piece: ToolArguments) -> Event:
        """More of a call's arguments."""
        assert isinstance(self._open, FunctionCall)
        delta = FunctionArgumentsDelta(
            sequence_number=position, item_id=self._open.id, output_index=len(self.items), delta=piece.text
        )
        return typed(delta)

    def close(self, position: int, choice: Choice, status: ItemStatus, told: list[TokenLogprob]) -> list[Event]:
        """The end of the item that is open, if one is. `told`: the log probabilities of its text."""
        item = self.unfinished(choice, status, told)
        if item is None:
            return []
        place, index = self.place, len(self.items)
        self.items.append(item)
        self._open = None
        events: list[ResponseEvent]
        if isinstance(item, OutputMessage):
            part = item.content[0]
            events = [
                OutputTextDone(sequence_number=position, **place, text=part.text, logprobs=part.logprobs),
                ContentPartDone(sequence_number=position + 1, **place, part=part),
            ]
        else:
            whole = FunctionArgumentsDone(
                sequence_number=position, item_id=item.id, output_index=index, arguments=item.arguments
            )
            events = [whole]
        done = OutputItemDone(sequence_number=position + len(events), output_index=index, item=item)
        return [typed(event) for event in [*events, done]]

    def unfinished(self, choice: Choice, status: ItemStatus, told: list[TokenLogprob]) -> OutputItem | None:
        """The item that is open, with what has come of it."""
        item = self._open
        if item is None:
            return None
        if isinstance(item, OutputMessage):
            text = "".join((choice.shown or [])[self._text_from :])
            return OutputMessage(item.id, status, [OutputText(text, logprobs=told)])
        arguments = choice.calls[-1].arguments if choice.calls else ""
        return FunctionCall(item.id, item.call_id, item.name, arguments, status)


def is_whole(arguments: str) -> bool:
    """Whether a call's arguments are an object: those of a call that max_tokens cut are not."""
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False
