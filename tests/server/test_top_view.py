"""server.top_view: what is shown fits the terminal, whatever its size and whatever a server says."""

from __future__ import annotations

import re
from typing import Any

import pytest

from server.api.answers import BlocksNow, ConnectionsNow, EngineNow, ServerNow, StreamNow, StreamsNow, TokensNow
from server.top_view import WIDTH_MIN, Look, Size, columns, render

URL = "http://127.0.0.1:8000"
EVERYTHING = Size(None, None)
_sgr = re.compile(r"\x1b\[[0-9;]*m")


def stream(number: int, **fields: Any) -> StreamNow:
    known: dict[str, Any] = {
        "stream": f"stream{number:02d}",
        "request_id": f"req-{number:024d}",
        "api": "chat",
        "key": "",
        "state": "running",
        "readers": 1,
        "prompt_tokens": 300,
        "completion_tokens": 20,
        "age_s": 1.5,
        "ttft_s": 0.25,
    }
    return StreamNow(**{**known, **fields})


def look(*shown: StreamNow, at_s: float = 0.0, up: bool = True, generated: int = 0, **counts: int) -> Look:
    states = {
        state: sum(each.state == state for each in shown) for state in ("queued", "running", "parked", "detached")
    }
    tokens = {"waiting": 100, "running": 3000, "capacity": 4000, **counts}
    now = ServerNow(
        model="model",
        token_sender="python",
        engine=EngineNow(up=up, restarts=1, preemptions=2, waiting=3, running=6, parked=0, running_max=8 if up else 0),
        streams=StreamsNow(**states),
        tokens=TokensNow(generated=generated, **tokens),
        kv_blocks=BlocksNow(used=10, cached=5, free=85, tokens_each=16),
        connections=ConnectionsNow(http1=1, http2=2, websocket=3),
        shown=list(shown),
    )
    return Look(now, at_s)


def plain(now: Look, before: Look | None = None, size: Size = EVERYTHING, notice: str = "") -> list[str]:
    return render(now, before, URL, size, colour=False, notice=notice)


def row(lines: list[str], name: str) -> dict[str, str]:
    """A stream's cells by their titles."""
    (titles,) = [line for line in lines if line.startswith("STREAM")]
    (cells,) = [line for line in lines if line.startswith(name)]
    return dict(zip(titles.split(), cells.split(), strict=True))


def test_a_server_and_its_streams() -> None:
    lines = plain(look(stream(1), stream(2, state="queued", ttft_s=None, completion_tokens=0)))
    assert lines[0] == f"model  {URL}"
    assert lines[1] == "engine up  tokens/s -  restarts 1  preemptions 2"
    assert lines[2] == "streams  running 1  queued 1  parked 0  detached 0  connections 6"
    assert lines[3] == "tokens [##############################+.........]  78%  3,000 of 4,000, 100 waiting"
    assert lines[4].endswith("112%  6 of 8, 3 waiting")
    assert lines[5].endswith(" 10%  10 of 100, 5 cached")
    assert row(lines, "stream01") == {
        "STREAM": "stream01",
        "STATE": "running",
        "API": "chat",
        "AGE": "1.50s",
        "TTFT": "0.25s",
        "PROMPT": "300",
        "TOKENS": "20",
        "TOK/S": "-",
        "READERS": "1",
        "REQUEST": f"req-{1:024d}",
    }
    assert row(lines, "stream02")["TTFT"] == "-"


def test_rates_are_those_since_the_look_before() -> None:
    before = look(stream(1, completion_tokens=20), generated=1000)
    now = look(stream(1, completion_tokens=50), stream(2), at_s=2.0, generated=1100)
    lines = plain(now, before)
    assert "tokens/s 50.0" in lines[1]
    assert row(lines, "stream01")["TOK/S"] == "15.0"
    assert row(lines, "stream02")["TOK/S"] == "-"  # it is new


def test_a_server_that_began_anew_has_no_rate() -> None:
    assert "tokens/s -" in plain(look(at_s=1.0, generated=5), look(generated=1000))[1]


def test_keys_are_shown_where_there_are_some() -> None:
    assert "KEY" not in " ".join(plain(look(stream(1))))
    lines = plain(look(stream(1, key="alice"), stream(2)))
    assert "alice" in next(line for line in lines if line.startswith("stream01"))


def test_no_streams() -> None:
    assert plain(look())[-1] == "no streams"


def test_an_engine_that_is_down() -> None:
    lines = plain(look(up=False, capacity=0, running=0, waiting=50))
    assert lines[1].startswith("engine DOWN")
    assert "0 of 0, 50 waiting" in lines[3]


def test_what_to_tell_is_told() -> None:
    """Above what it makes doubtful, so that it is there on the lowest screen."""
    assert plain(look(), size=Size(80, 2), notice="no answer")[1] == "no answer"


@pytest.mark.parametrize("width", [1, WIDTH_MIN, 24, 30, 36, 40, 60, 80, 120, 300])
@pytest.mark.parametrize("height", [1, 5, 10, 24, 80])
@pytest.mark.parametrize("colour", [False, True])
def test_it_fits(width: int, height: int, colour: bool) -> None:
    shown = [stream(number, key="a rather long name of a client", state="parked") for number in range(40)]
    lines = render(look(*shown), None, URL, Size(width, height), colour=colour, notice="x" * 400)
    assert len(lines) <= height
    assert all(columns(_sgr.sub("", line)) <= max(width, WIDTH_MIN) for line in lines)
    if height >= 24:
        assert _sgr.sub("", lines[-1]).startswith("and " if height == 24 else "stream39")
        assert any("stream00" in line and "parked" in line for line in lines)


@pytest.mark.parametrize("height", [9, 10, 11, 12, 13, 40])
def test_none_is_lost_without_a_word(height: int) -> None:
    lines = plain(look(*map(stream, range(5))), None, Size(80, height))
    seen = sum(line.startswith("stream") and not line.startswith("streams") for line in lines)
    more = [int(line.split()[1]) for line in lines if line.startswith("and ")]
    assert seen + sum(more) == 5


def test_those_that_the_server_did_not_show_are_counted() -> None:
    now = look(stream(1))
    now.now.streams.parked = 700
    assert plain(now)[-1] == "and 700 more"


@pytest.mark.parametrize("width", range(WIDTH_MIN, 130, 3))
def test_columns_go_in_the_order_of_their_worth(width: int) -> None:
    titles = next(line for line in plain(look(stream(1)), None, Size(width, None)) if line.startswith("STREAM")).split()
    worth = ["STREAM", "STATE", "TOKENS", "AGE", "TOK/S", "API", "TTFT", "PROMPT", "READERS", "REQUEST"]
    assert set(titles) == set(worth[: len(titles)])


@pytest.mark.parametrize("text", ["\x1b[2J", "\x1b]0;title\x07", "a\nb", "\x9b31m", "\u202eabc", "\r"])
def test_names_move_no_cursor(text: str) -> None:
    lines = plain(look(stream(1, key=text, request_id=text)), notice=text)
    assert all(char.isprintable() for line in lines for char in line)


def test_wide_characters_take_their_room() -> None:
    lines = plain(look(stream(1, key="模型模型"), stream(2, key="abcdefgh")), None, Size(60, None))
    rows = [line for line in lines if line.startswith("stream0")]
    assert len({columns(line[: line.index("chat")]) for line in rows if "chat" in line}) <= 1
    assert all(columns(line) <= 60 for line in rows)


def test_a_state_has_its_colour_and_the_text_none() -> None:
    (line,) = [
        line
        for line in render(look(stream(1, state="parked")), None, URL, EVERYTHING, colour=True)
        if "stream01" in line
    ]
    assert line.count("\x1b[") == 2
    assert re.search(r"\x1b\[33mparked *\x1b\[0m", line)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.00s"), (9.994, "9.99s"), (12.34, "12.3s"), (100.0, "1m40s"), (5999.0, "99m59s"), (6000.0, "1h40m")],
)
def test_durations(seconds: float, text: str) -> None:
    assert row(plain(look(stream(1, age_s=seconds))), "stream01")["AGE"] == text
