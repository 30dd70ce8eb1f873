"""A strict reader of event streams, written from WHATWG's HTML standard, section 9.2.6, independently of any server.

Imports the standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

FIELDS = frozenset({"data", "event", "id", "retry"})


@dataclass(frozen=True, slots=True)
class Event:
    """One dispatched event, with the last id that the stream named."""

    data: str
    type: str = "message"
    id: str = ""


@dataclass(frozen=True, slots=True)
class Block:
    """What stands between two blank lines: its lines, comments included."""

    lines: tuple[str, ...]

    def values(self, name: str) -> list[str]:
        """The values of one field."""
        return [value for key, value in map(split_line, self.lines) if key == name]

    @property
    def comments(self) -> list[str]:
        """Lines that begin with a colon."""
        return [line for line in self.lines if line.startswith(":")]


def lines_of(data: bytes) -> list[str]:
    """The lines, without their ends; text behind the last line end is a line that has not ended, and is left out."""
    text = data.decode("utf-8", "replace").removeprefix("\ufeff")
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")[:-1]


def blocks(data: bytes) -> list[Block]:
    """The blocks that a blank line ends; what the stream cuts is left out."""
    found: list[Block] = []
    lines: list[str] = []
    for line in lines_of(data):
        if line:
            lines.append(line)
        else:
            found.append(Block(tuple(lines)))
            lines = []
    return found


def split_line(line: str) -> tuple[str, str]:
    """Field name and value; the name of a comment is empty."""
    name, _, value = line.partition(":")
    return name, value.removeprefix(" ")


def parse(data: bytes) -> list[Event]:
    """The events that a client is told."""
    found: list[Event] = []
    last_id = ""
    for block in blocks(data):
        ids = [value for value in block.values("id") if "\0" not in value]
        last_id = ids[-1] if ids else last_id
        if values := block.values("data"):
            kinds = block.values("event")
            found.append(Event("\n".join(values), (kinds[-1] if kinds else "") or "message", last_id))
    return found
