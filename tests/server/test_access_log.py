"""Access lines: one for each request, with its real outcome, and nothing that a client could smuggle in."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.http1 import Request
from server.access_log import SHOWN_CHARS_MAX, AccessLog
from server.http import Call
from server.outcome import Outcome
from tests.support.clock import Clock
from tests.support.tables import START_S, Rig


class Log:
    """An access log that writes to memory."""

    def __init__(self, style: str = "json", clock: Clock | None = None) -> None:
        self.out = io.StringIO()
        self.clock = clock or Clock(START_S)
        self.log = AccessLog(style, out=self.out, clock=self.clock, now=lambda: 1_700_000_000.0)

    @property
    def lines(self) -> list[str]:
        return self.out.getvalue().splitlines()

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


def call(path: str = "/v1/models", **fields: Any) -> Call:
    request = Request("GET", "/", "1.1", (), None, False, False, True, False)
    values = {"query": "token=secret", "client": "127.0.0.1", "request_id": "req-1", "received_at": START_S}
    return Call(request=request, path=path, **{**values, **fields})


def test_an_answer_has_its_line_and_no_query() -> None:
    log = Log()
    log.clock.advance(0.0123)
    log.log.request(call(key="alice"), 404)
    assert log.records == [
        {
            "time": "2023-11-14T22:13:20Z",
            "event": "request",
            "request_id": "req-1",
            "client": "127.0.0.1",
            "method": "GET",
            "path": "/v1/models",
            "status": 404,
            "key": "alice",
            "ms": 12.3,
        }
    ]


def test_a_generation_that_never_began_has_a_line_with_its_outcome() -> None:
    log = Log()
    log.log.unbegun(call("/v1/ws", api="websocket", key="alice"), "cancelled", 409)
    (record,) = log.records
    del record["time"]
    assert record == {
        "event": "request",
        "request_id": "req-1",
        "client": "127.0.0.1",
        "api": "websocket",
        "outcome": "cancelled",
        "status": 409,
        "key": "alice",
    }


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_probes_write_none(path: str) -> None:
    log = Log()
    log.log.request(call(path), 200)
    assert log.lines == []


def test_a_stream_has_one_line_with_its_outcome_and_its_counts() -> None:
    rig = Rig()
    log = Log(clock=rig.clock)
    rig.table._log_access = log.log.stream
    client = rig.open()
    rig.clock.advance(0.5)
    rig.admit(client.stream, cached=2)
    rig.play(client.stream, "abc")
    rig.clock.advance(0.25)
    rig.end(client.stream)
    client.stream.finish(Outcome("error", "too late"))
    (record,) = log.records
    del record["time"]
    assert record == {
        "event": "stream",
        "request_id": "req",
        "client": "",
        "api": "chat",
        "stream": client.stream.id[:8],
        "key": "",
        "outcome": "stop",
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "completion_tokens": 3,
        "ttft_ms": 500.0,
        "ms": 750.0,
    }


def test_a_stream_without_a_token_has_no_time_to_its_first_one() -> None:
    rig = Rig()
    log = Log("text", clock=rig.clock)
    rig.table._log_access = log.log.stream
    rig.open().stream.finish(Outcome("cancelled", "the client left"))
    (line,) = log.lines
    assert "ttft_ms" not in line
    assert "outcome=cancelled" in line
    assert 'message="the client left"' in line


@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
)
@settings(deadline=None)
def test_what_a_client_chose_never_makes_a_second_line_or_a_second_field(path: str, request_id: str) -> None:
    text, structured = Log("text"), Log("json")
    for log in (text, structured):
        log.log.request(call("/" + path, request_id=request_id), 400)
    assert len(text.lines) == len(structured.lines) == 1
    (record,) = structured.records
    assert (record["path"], record["request_id"]) == ("/" + path, request_id)
    assert text.lines[0].isascii()
    assert text.lines[0].isprintable()
    assert text.lines[0].rsplit(" ms=", 1)[0].endswith("status=400")


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/v1/streams/ABCDEFGH-and-what-lets-others-attach", "/v1/streams/ABCDEFGH"),
        ("/v1/streams/short", "/v1/streams/short"),
        ("/v1/responses/resp_ABCDEFGH-and-more/cancel", "/v1/responses/resp_ABCDEFGH/cancel"),
        ("/v1/responses", "/v1/responses"),
        ("/v1/models/a-model-with-a-long-name", "/v1/models/a-model-with-a-long-name"),
    ],
)
def test_no_line_holds_a_stream_s_whole_name(path: str, shown: str) -> None:
    """Whether or not it is known: it may be another client's."""
    log = Log()
    log.log.request(call(path), 404)
    assert log.records[0]["path"] == shown


def test_long_values_are_cut() -> None:
    log = Log()
    log.log.request(call("/" + "x" * 5000), 404)
    assert len(log.records[0]["path"]) == SHOWN_CHARS_MAX


def test_faults_and_events_are_lines_too() -> None:
    log = Log()
    log.log.fault("req-1", "Traceback\n  line\n")
    log.log.event("engine_ready", model="m", pool_tokens=5)
    fault, ready = log.records
    assert (fault["event"], fault["trace"]) == ("fault", "Traceback\n  line\n")
    assert (ready["event"], ready["model"], ready["pool_tokens"]) == ("engine_ready", "m", 5)


@pytest.mark.parametrize("error", [BrokenPipeError, ValueError])
def test_a_log_that_nobody_reads_any_more_stops_nothing(error: type[Exception]) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    AccessLog("text", out=Closed(), clock=Clock()).event("drain")
