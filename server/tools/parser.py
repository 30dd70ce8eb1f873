"""Finds tool calls in a model's text as it comes, in the formats of the model families.

`ToolParser.feed` takes any split of the text and returns pieces whose joined form doesn't depend on the split; `finish`
gives the rest. Text streams at once: what is held back is only what may still turn out to be syntax (the start of a
marker, a call's head up to its arguments, white space beside a call). What looks like a call and is none, however
broken, is shown as the text that it is; nothing is lost but the syntax around calls that were told.

Formats differ in data only (`Syntax`). Except for text without a marker in sight and the inside of strings in
arguments, which pass through whole, every character takes one step of a state machine; none is looked at twice but
those of a marker's start.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from server.tools.call import CallReader
from server.tools.json_scan import BAD, DONE
from server.tools.pieces import Piece, ToolArguments, ToolCallBegin, ToolCallEnd, add_text

# OpenAI allows 64 characters; what is much longer is no name.
NAME_CHARS_MAX = 256
# Held of syntax outside of a call's JSON: white space, a name and its markers.
HELD_CHARS_MAX = 512


@dataclass(frozen=True, slots=True)
class Syntax:
    """How a family of models writes its calls."""

    name: str
    marker: str  # opens one call, or a list of calls in JSON
    close: str = ""  # stands behind it
    separators: str = ""  # between calls that are in no list
    bare: bool = False  # an answer may begin with a call's JSON and no marker
    name_before: bool = False  # marker, name, `[ARGS]`, arguments: the newer form of Mistral's


HERMES = Syntax("hermes", "<tool_call>", close="</tool_call>")
LLAMA3 = Syntax("llama3", "<|python_tag|>", separators=";", bare=True)
MISTRAL = Syntax("mistral", "[TOOL_CALLS]", name_before=True)
CALL_ID, ARGS = "[CALL_ID]", "[ARGS]"

# TEXT: outside of calls. OPEN: behind a marker or a separator. NAME: in a name before its arguments. CALL: in JSON.
# BEHIND: behind a call. CLOSE: in the closing marker.
TEXT, OPEN, NAME, CALL, BEHIND, CLOSE = "text", "open", "name", "call", "behind", "close"
_SPACE = " \t\n\r"
_NO_NAME = frozenset('[]{}"<>,;: ')


class ToolParser:
    """One choice's. `known` names the functions that there are: a call of another that no marker precedes is text.
    `new_id` makes the calls' ids. Behind `calls_max` calls the answer is `full`: what follows is not looked at.
    `required`: a grammar lets nothing but calls come."""

    __slots__ = ("_arguments", "_at_start", "_behind_call", "_closing", "_held", "_known", "_list", "_marked", "_max",
                 "_name_at", "_new_id", "_out", "_reader", "_required", "_state", "_syntax", "calls",
                 "full")  # fmt: skip

    def __init__(
        self,
        syntax: Syntax,
        *,
        known: Collection[str],
        new_id: Callable[[], str],
        calls_max: int | None = None,
        required: bool = False,
    ) -> None:
        self._syntax = syntax
        self._known = known
        self._new_id = new_id
        self._max = calls_max
        self._required = required
        self._state = TEXT
        self._at_start = True  # only white space came so far
        self._behind_call = False  # likewise, since the last call
        self._held = ""  # characters outside of a call's JSON that are text if no call comes of them
        self._marked = False  # what is being read has a marker before it
        self._list = ""  # "in" a JSON list of calls, "behind" it, or "" without one
        self._name_at = 0  # where in what is held a name starts
        self._closing = 0  # characters of the closing marker that came
        self._reader: CallReader | None = None
        self._out: list[Piece] = []
        self._arguments: list[str] = []  # of the latest call, since the last piece
        self.calls = 0  # that began
        self.full = False

    def feed(self, text: str) -> list[Piece]:
        """The pieces that `text` completes."""
        at = 0
        while at < len(text) and not self.full:
            if self._state == TEXT and not (self._held or self._at_start or self._behind_call):
                marker_at = text.find(self._syntax.marker[0], at)
                add_text(self._out, text[at:] if marker_at < 0 else text[at:marker_at])
                if marker_at < 0:
                    break
                at = marker_at
            elif self._reader is not None and (inside := self._reader.inside(text, at)) > at:
                at = inside
                continue
            if len(self._held) < HELD_CHARS_MAX and _STEPS[self._state](self, text[at]):
                at += 1
            else:
                self._give_up()  # and the same character again, as text
        return self._taken()

    def finish(self, *, cut: bool) -> list[Piece]:
        """What was held, at the end of the answer. `cut`: it isn't the model that ended it; then a call that had not
        begun is left out, if it is marked as one or nothing but calls could come."""
        held, reader = self._held, self._reader
        begun = self._state in (BEHIND, CLOSE) or (self._state == TEXT and self._behind_call and not held.strip(_SPACE))
        if reader is not None:
            begun = reader.begun
            held += reader.give_up()
        unbegun = self._state != TEXT and ((cut and self._marked) or (self._list == "in" and self._behind_call))
        unbegun = unbegun or (cut and self._required)
        if not (begun or unbegun or self.full):
            add_text(self._out, held)
        self._state, self._held, self._reader = TEXT, "", None
        return self._taken()

    def _taken(self) -> list[Piece]:
        self._flush_arguments()
        out, self._out = self._out, []
        return out

    def _give_up(self) -> None:
        """What is held is no call: show it, but for an end that may start a marker."""
        held, self._held = self._held, ""
        if self._reader is not None:
            held += self._reader.give_up()
            self._reader = None
        was_text, self._state, self._list, self._marked = self._state == TEXT, TEXT, "", False
        keep = 0 if was_text else _overlap(held, self._syntax.marker)
        if self._behind_call and not was_text and not held[: len(held) - keep].strip(_SPACE):
            keep = len(held)
        self._show(held[: len(held) - keep])
        self._held = held[len(held) - keep :]

    def _show(self, text: str) -> None:
        if text:
            add_text(self._out, text)
            self._at_start = self._behind_call = False

    # What a call's reader tells

    def _begin(self, name: str) -> bool:
        if not (self._marked or name in self._known) or not _is_name(name):
            return False
        self._out.append(ToolCallBegin(self.calls, self._new_id(), name))
        self.calls += 1
        self._held = ""
        self._at_start = False
        return True

    def _end(self) -> None:
        self._flush_arguments()
        self._out.append(ToolCallEnd(self.calls - 1))
        self._behind_call = True

    def _flush_arguments(self) -> None:
        if self._arguments:
            self._out.append(ToolArguments(self.calls - 1, "".join(self._arguments)))
            self._arguments.clear()

    # One method for each state: takes the next character, or returns False where none such can come

    def _in_text(self, char: str) -> bool:
        held = self._held + char
        text = held.lstrip(_SPACE) if self._at_start or self._behind_call else held
        if self._syntax.bare and self._at_start and text == "{":
            self._held, self._list, self._marked = held[:-1], "", False
            return self._start_call(char)
        marker = self._syntax.marker
        keep = _overlap(text, marker) if text else 0
        if keep < len(text):
            self._show(held[: len(held) - keep])
            held = held[len(held) - keep :]
        self._held = held
        if keep == len(marker):
            self._state, self._list, self._marked = OPEN, "", True
        return True

    def _in_open(self, char: str) -> bool:
        if char == "{":
            return self._start_call(char)
        if char == "[":
            if self._list:
                return False
            self._list = "in"
        elif char not in _SPACE:
            if not (self._syntax.name_before and self._marked and not self._list and _is_name(char)):
                return False
            self._state, self._name_at = NAME, len(self._held)
        self._held += char
        return True

    def _in_name(self, char: str) -> bool:
        """`name[ARGS]` or `name[CALL_ID]id[ARGS]`. The model's id is left out: calls get ours."""
        name, bracket, rest = (self._held[self._name_at :] + char).partition("[")
        tail = bracket + rest
        if tail.startswith(CALL_ID):
            id_, bracket, rest = tail.removeprefix(CALL_ID).partition("[")
            tail = bracket + rest
            if not (id_.isalnum() or not id_) or not ARGS.startswith(tail):
                return False
        elif not (_is_name(name) and (ARGS.startswith(tail) or CALL_ID.startswith(tail))):
            return False
        self._held += char
        if tail == ARGS:
            self._read(CallReader(self._begin, self._arguments.append, self._end, name=name))
        return True

    def _start_call(self, char: str) -> bool:
        self._read(CallReader(self._begin, self._arguments.append, self._end))
        return self._in_call(char)

    def _read(self, reader: CallReader) -> None:
        self._reader = reader
        self._state = CALL

    def _in_call(self, char: str) -> bool:
        assert self._reader is not None
        kind = self._reader.step(char)
        if kind == DONE:
            self._reader = None
            self._state = BEHIND
            self.full = self.calls == self._max
        return kind != BAD

    def _in_behind(self, char: str) -> bool:
        if char in _SPACE:
            self._held += char
        elif self._list == "in":
            if char == "]":
                self._held, self._list = "", "behind"
            elif char == ",":
                self._held += char
                self._state = OPEN
            else:
                return False
        elif char == self._syntax.close[:1]:
            self._held += char
            self._state, self._closing = CLOSE, 1
        elif char == "{" and not self._list:
            return self._start_call(char)
        elif char in self._syntax.separators and not self._list:
            self._held += char
            self._state = OPEN
        else:
            return False
        return True

    def _in_close(self, char: str) -> bool:
        close = self._syntax.close
        if char != close[self._closing]:
            return False
        self._held += char
        self._closing += 1
        if self._closing == len(close):
            self._state, self._held, self._list, self._marked = TEXT, "", "", False
        return True


_STEPS = {
    TEXT: ToolParser._in_text,
    OPEN: ToolParser._in_open,
    NAME: ToolParser._in_name,
    CALL: ToolParser._in_call,
    BEHIND: ToolParser._in_behind,
    CLOSE: ToolParser._in_close,
}


def _overlap(text: str, marker: str) -> int:
    """The length of the longest end of `text` that `marker` starts with, the whole marker included."""
    for length in range(min(len(text), len(marker)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def _is_name(text: str) -> bool:
    return 0 < len(text) <= NAME_CHARS_MAX and text.isprintable() and not set(text) & _NO_NAME
