"""What `python -m server top` shows of a snapshot: lines of text for a terminal of any size. No I/O and no clock.

Whatever a server says is shown as plain characters: a name can't move the cursor.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

from server.api.answers import ServerNow, StreamNow

WIDTH_MIN = 20
BAR_MAX = 40
GAP = "  "
CUT = "~"  # where something is missing; every terminal has it

BOLD, DIM, RED, GREEN, YELLOW, BLUE = "1", "2", "31", "32", "33", "34"
_STATES = {"queued": BLUE, "running": GREEN, "parked": YELLOW, "detached": DIM}


@dataclass(frozen=True, slots=True)
class Look:
    """A snapshot, and when it was taken by a clock of seconds that only grow."""

    now: ServerNow
    at_s: float


@dataclass(frozen=True, slots=True)
class Size:
    """Of a terminal, in characters; `lines` None: as many as there are."""

    columns: int | None
    lines: int | None


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    cell: Callable[[StreamNow, float | None], str]  # of a stream and its tokens a second
    right: bool = True
    last: int = 0  # where room is short the columns with the highest go first


_COLUMNS = (
    _Column("STREAM", lambda stream, rate: stream.stream, right=False),
    _Column("STATE", lambda stream, rate: stream.state, right=False),
    _Column("KEY", lambda stream, rate: stream.key, right=False, last=4),
    _Column("API", lambda stream, rate: stream.api, right=False, last=5),
    _Column("AGE", lambda stream, rate: _duration(stream.age_s), last=2),
    _Column("TTFT", lambda stream, rate: _duration(stream.ttft_s), last=6),
    _Column("PROMPT", lambda stream, rate: str(stream.prompt_tokens), last=7),
    _Column("TOKENS", lambda stream, rate: str(stream.completion_tokens), last=1),
    _Column("TOK/S", lambda stream, rate: "-" if rate is None else f"{rate:.1f}", last=3),
    _Column("READERS", lambda stream, rate: str(stream.readers), last=8),
    _Column("REQUEST", lambda stream, rate: stream.request_id, right=False, last=9),
)


class Painter:
    """Styles text, or leaves it as it is."""

    def __init__(self, *, colour: bool) -> None:
        self._colour = colour

    def __call__(self, text: str, style: str) -> str:
        """`style`: the parameters of an SGR sequence."""
        return f"\x1b[{style}m{text}\x1b[0m" if self._colour and text and style else text


def render(look: Look, before: Look | None, url: str, size: Size, *, colour: bool, notice: str = "") -> list[str]:
    """The whole screen. Rates are those since `before`; `notice` is something to tell the user."""
    paint = Painter(colour=colour)
    width = size.columns if size.columns is None else max(size.columns, WIDTH_MIN)
    now = look.now
    head = [
        paint(_cut(f"{plain(now.model)}{GAP}{plain(url)}", width), BOLD),
        # Before what it makes doubtful, and so on a screen of any height.
        *([paint(_cut(plain(notice), width), RED)] if notice else []),
        *(paint(_cut(line, width), style) for line, style in _summary(look, before, width)),
    ]
    if not now.shown:
        return _fit([*head, "", "no streams"], size.lines)
    lines = _table(look, before, width, paint)
    hidden = sum((now.streams.queued, now.streams.running, now.streams.parked, now.streams.detached)) - len(now.shown)
    room = None if size.lines is None else max(1, size.lines - len(head) - 1)
    if room is not None and len(lines) > room:
        hidden += len(lines) - (room - 1)
        lines = lines[: room - 1]
    if hidden > 0:
        lines.append(paint(_cut(f"and {hidden} more", width), DIM))
    return _fit([*head, "", *lines], size.lines)


def _fit(lines: list[str], most: int | None) -> list[str]:
    return lines if most is None else lines[:most]


def _summary(look: Look, before: Look | None, width: int | None) -> list[tuple[str, str]]:
    """Lines without colour, and the style of each."""
    now = look.now
    engine, streams, tokens, blocks, connections = now.engine, now.streams, now.tokens, now.kv_blocks, now.connections
    rate = None
    if before is not None and look.at_s > before.at_s and tokens.generated >= before.now.tokens.generated:
        rate = (tokens.generated - before.now.tokens.generated) / (look.at_s - before.at_s)
    made = "-" if rate is None else f"{rate:,.1f}"
    open_connections = connections.http1 + connections.http2 + connections.websocket
    counts = f"restarts {engine.restarts}{GAP}preemptions {engine.preemptions}"
    return [
        (f"engine {'up' if engine.up else 'DOWN'}{GAP}tokens/s {made}{GAP}{counts}", "" if engine.up else RED),
        (
            f"streams{GAP}running {streams.running}{GAP}queued {streams.queued}{GAP}parked {streams.parked}"
            f"{GAP}detached {streams.detached}{GAP}connections {open_connections}",
            "",
        ),
        _gauge("tokens", tokens.running, tokens.waiting, tokens.capacity, width),
        _gauge("places", engine.running, engine.waiting, engine.running_max, width),
        _gauge(
            "blocks", blocks.used, 0, blocks.used + blocks.cached + blocks.free, width, note=f"{blocks.cached:,} cached"
        ),
    ]


def _gauge(name: str, held: int, waiting: int, capacity: int, width: int | None, note: str = "") -> tuple[str, str]:
    """A bar of what is held, and of what waits for room, over a capacity."""
    share = (held + waiting) / capacity if capacity else 0.0
    text = f"{share:4.0%}  {held:,} of {capacity:,}" + (f", {waiting:,} waiting" if waiting else "")
    text += f", {note}" if note else ""
    room = BAR_MAX if width is None else min(BAR_MAX, width - len(name) - len(text) - 5)
    bar = ""
    if room >= 5:
        full = min(room, round(room * held / capacity)) if capacity else 0
        more = min(room - full, -(-room * waiting // capacity)) if capacity else 0
        bar = f"[{'#' * full}{'+' * more}{'.' * (room - full - more)}] "
    return f"{name} {bar}{text}", RED if share >= 1 and waiting else YELLOW if share >= 0.75 and not note else ""


def _table(look: Look, before: Look | None, width: int | None, paint: Painter) -> list[str]:
    """Titles and a row for each stream, with as many columns as there is room for."""
    rates, streams = _rates(look, before), look.now.shown
    chosen = [column for column in _COLUMNS if column.title != "KEY" or any(stream.key for stream in streams)]
    while True:
        rows = [[column.title for column in chosen]]
        rows += [
            [plain(column.cell(each, rate)) for column in chosen] for each, rate in zip(streams, rates, strict=True)
        ]
        widths = [max(columns(row[place]) for row in rows) for place in range(len(chosen))]
        fits = width is None or sum(widths) + len(GAP) * (len(chosen) - 1) <= width
        if fits or len(chosen) == 2:
            break
        chosen.remove(max(chosen, key=lambda column: column.last))

    def line(row: list[str], style: str) -> str:
        parts = [_pad(text, wide, right=column.right) for text, wide, column in zip(row, widths, chosen, strict=True)]
        if not fits:
            return _cut(GAP.join(parts), width)
        parts[1] = paint(parts[1], style)
        return GAP.join(parts).rstrip()

    titles, *others = rows
    styles = [_STATES.get(stream.state, "") for stream in streams]
    return [paint(line(titles, ""), BOLD), *map(line, others, styles)]


def _rates(look: Look, before: Look | None) -> list[float | None]:
    """Tokens a second of each stream; None for one that was not there before."""
    if before is None or look.at_s <= before.at_s:
        return [None] * len(look.now.shown)
    known = {(each.stream, each.request_id): each.completion_tokens for each in before.now.shown}
    seconds = look.at_s - before.at_s

    def rate(stream: StreamNow) -> float | None:
        made = known.get((stream.stream, stream.request_id))
        return None if made is None else (stream.completion_tokens - made) / seconds

    return [rate(each) for each in look.now.shown]


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 100:
        return f"{seconds:.2f}s" if seconds < 10 else f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 100 else f"{minutes // 60}h{minutes % 60:02d}m"


def plain(text: str) -> str:
    """With nothing in it that a terminal would obey."""
    return "".join(char if char.isprintable() else "?" for char in text)


def columns(text: str) -> int:
    """How many a terminal needs for it."""
    return sum(_columns_of(char) for char in text)


def _columns_of(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _cut(text: str, width: int | None) -> str:
    if width is None or columns(text) <= width:
        return text
    kept, used = [], 1  # for the mark that something is missing
    for char in text:
        used += _columns_of(char)
        if used > width:
            break
        kept.append(char)
    return "".join(kept) + CUT


def _pad(text: str, width: int, *, right: bool) -> str:
    space = " " * (width - columns(text))
    return space + text if right else text + space
