"""One call in JSON: `{"name": "f", "arguments": {…}}`, read a character at a time.

As soon as the name is known and the arguments' object opens, the call begins and its arguments stream. A call in
another order, or whose arguments are a JSON string, is told when it is whole. What turns out to be no call is given
back, to be shown as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from server.tools.json_scan import BAD, CLOSED, DONE, KEY, OPENED, QUOTE, STRING, JsonScanner

NAME, TYPE, ID = "name", "type", "id"
ARGUMENTS = ("arguments", "parameters")  # Llama says the latter
_MEMBERS = frozenset((NAME, TYPE, ID, *ARGUMENTS))
# What is held of a call that has not begun: its name, and at worst arguments before it. Beyond, it is no call.
HELD_CHARS_MAX = 65_536
HEAD, STREAMING, TAIL = "head", "streaming", "tail"
_INSIDE = re.compile(r'[^"\\\x00-\x1f]*')


class CallReader:
    """`begin(name)` is asked once whether there may be such a call, which then begins. `arguments` gets the text of
    the arguments' object in parts, and `end` is called behind the last one."""

    __slots__ = ("_arguments", "_begin", "_depth", "_end", "_held", "_key", "_name", "_scanner", "_state", "_string_at")

    def __init__(
        self,
        begin: Callable[[str], bool],
        arguments: Callable[[str], None],
        end: Callable[[], None],
        *,
        name: str = "",
    ) -> None:
        """`name`: the arguments' object alone is read, of a call by this name."""
        self._begin, self._arguments, self._end = begin, arguments, end
        self._scanner = JsonScanner()
        self._state = HEAD
        self._name = name
        self._key = ARGUMENTS[0] if name else ""
        self._depth = 1 if name else 2  # of what the arguments' object holds
        self._held: list[str] = []  # characters of the head or the tail
        self._string_at = 0  # where in them the latest string at the call's own level starts

    def step(self, char: str) -> int:
        """What the scanner says of the next character. BAD, which doesn't take it, also where no call has it."""
        kind = self._scanner.step(char)
        if kind == BAD:
            return BAD
        if self._state == STREAMING:
            self._arguments(char)
            if kind in (CLOSED, DONE) and self._scanner.depth < self._depth:
                self._state = TAIL
                self._end()
            return kind
        self._held.append(char)
        if self._state == HEAD:
            kind = self._in_head(char, kind)
        if kind == BAD or len(self._held) > HELD_CHARS_MAX:
            self._held.pop()
            return BAD
        if kind == DONE:
            self._held.clear()
        return kind

    def inside(self, text: str, at: int) -> int:
        """Take the characters from text[at] on that are within a string of the arguments, which need no steps; where
        they end."""
        if self._state != STREAMING or not self._scanner.in_string:
            return at
        found = _INSIDE.match(text, at)
        assert found is not None
        if found.end() > at:
            self._arguments(found[0])
        return found.end()

    @property
    def begun(self) -> bool:
        """Whether the call was told."""
        return self._state != HEAD

    def give_up(self) -> str:
        """No more of this call comes: ends it if it began. Returns what was read and not told."""
        if self._state == STREAMING:
            self._end()
        return "".join(self._held)

    def _in_head(self, char: str, kind: int) -> int:
        if kind == DONE:
            return BAD if self._depth == 1 else self._whole()
        depth = self._scanner.depth
        if kind == OPENED and char == "{" and depth == self._depth and self._key in ARGUMENTS and self._name:
            if not self._begin(self._name):
                return BAD
            self._state = STREAMING
            self._held.clear()
            self._arguments(char)
        elif depth == 1 and kind in (KEY, STRING):
            return self._member(kind)
        elif depth == 1 and kind == QUOTE:
            self._string_at = len(self._held) - 1
        return kind

    def _member(self, kind: int) -> int:
        text: Any = json.loads("".join(self._held[self._string_at :]))
        if kind == KEY:
            self._key = text
            return kind if text in _MEMBERS else BAD
        if self._key == NAME:
            self._name = text
        return kind

    def _whole(self) -> int:
        """A call that could not stream. Of repeated members the last one counts, as in json.loads."""
        call = json.loads("".join(self._held))
        given: Any = next((call[key] for key in ARGUMENTS if key in call), {})
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except (ValueError, RecursionError):
                return BAD
        name = call.get(NAME)
        if not isinstance(given, dict) or not isinstance(name, str) or not self._begin(name):
            return BAD
        self._state = TAIL
        self._arguments(json.dumps(given))
        self._end()
        return DONE
