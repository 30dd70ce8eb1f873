"""Chromium's own EventSource, and fetch-event-source in it: the browser behaviours that WPT's eventsource tests list,
as far as a server has a part in them (issue 3, 5)."""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import quote

import pytest

from tests.clients.scripts import FAULT, FAULTY, FOREVER, HARD, HARD_TEXT, LONG, LONG_TEXT
from tests.support.cutter import Cutter
from tests.support.probes import GENERATED, kill_engine, outcomes, started
from tests.support.serving import Server, chat, joined, until

TEXTS = {HARD: HARD_TEXT, LONG: LONG_TEXT}
DEFAULT_RETRY_S, RETRY_S = 3.0, 1.0
CLOSED = 2

EVENT_SOURCE = """(url) => new Promise((resolve) => {
    const out = {data: [], ids: [], types: [], opens: 0, errors: 0};
    const source = new EventSource(url);
    source.onopen = () => out.opens++;
    source.onmessage = (event) => {
        out.data.push(event.data); out.ids.push(event.lastEventId); out.types.push(event.type);
    };
    source.onerror = () => {
        out.errors++;
        if (source.readyState === EventSource.CLOSED) resolve({...out, state: source.readyState});
    };
})"""

# The same, in pieces: the page goes on while the test looks at it and breaks things.
BEGIN = f"(url) => {{ window.ended = ({EVENT_SOURCE.replace('const out =', 'const out = window.seen =')})(url); }}"
SEEN, ENDED = "(count) => window.seen.data.length >= count", "() => window.ended"

LEAVES = """(url) => new Promise((resolve) => {
    const source = new EventSource(url);
    source.onmessage = (event) => {
        if (event.data.includes("first")) { source.close(); resolve(source.readyState); }
    };
})"""

FETCH_EVENT_SOURCE = """async ([url, body]) => {
    const {fetchEventSource} = await import("/node_modules/@microsoft/fetch-event-source/lib/esm/index.js");
    const out = {data: [], ids: [], errors: 0, closed: 0};
    await fetchEventSource(url, {
        method: "POST", body, headers: {"Content-Type": "application/json"}, openWhenHidden: true,
        onmessage: (event) => { out.data.push(event.data); out.ids.push(event.id); },
        onclose: () => { out.closed++; },
        onerror: () => { out.errors++; },
    });
    return out;
}"""

FETCH_HEADERS = """async (url) => {
    const answer = await fetch(url);
    await answer.text();
    return [answer.status, answer.headers.get("x-stream-id"), answer.headers.get("x-request-id")];
}"""


def _path(prompt: str) -> str:
    return f"/v1/generate?prompt={quote(prompt)}"


def _text(data: list[str]) -> str:
    assert data[-1] == "[DONE]"
    return joined([json.loads(each) for each in data[:-1]])


def _check_whole(got: Any, text: str) -> None:
    """Every event once, in order, and the text."""
    assert _text(got["data"]) == text
    assert [int(each.rpartition(":")[2]) for each in got["ids"]] == list(range(len(got["data"])))


# EventSource


@pytest.mark.parametrize("prompt", TEXTS)
def test_event_source(server: Server, page: Any, prompt: str) -> None:
    """Cross-origin, allowed by --cors-origin. Behind `[DONE]` it comes back, and 204 ends that."""
    with Cutter(server.port, []) as cutter:
        got = page.evaluate(EVENT_SOURCE, cutter.url + _path(prompt))
    _check_whole(got, TEXTS[prompt])
    assert (got["opens"], got["state"], set(got["types"])) == (1, CLOSED, {"message"})
    assert len(cutter.seen) == 2
    assert cutter.seen[0].header("accept") == "text/event-stream"


def test_event_source_of_the_same_origin(server: Server, page: Any) -> None:
    page.goto(f"{server.url}/health")
    _check_whole(page.evaluate(EVENT_SOURCE, _path(HARD)), HARD_TEXT)


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
def test_event_source_behind_cuts(server: Server, page: Any, reset: bool) -> None:
    """In the middle of events, before an answer, and right behind its head."""
    with Cutter(server.port, [2500, 9000, 0, 700], reset=reset) as cutter:
        got = page.evaluate(EVENT_SOURCE, cutter.url + _path(LONG))
    _check_whole(got, LONG_TEXT)
    first, *others = cutter.seen
    assert first.header("last-event-id") is None
    named = [other.header("last-event-id") for other in others]
    assert all(each in got["ids"] for each in named)
    assert named[-1] == got["ids"][-1]
    waits = [after.at - before.cut_at for before, after in zip(cutter.seen, others, strict=False) if before.cut_at]
    assert len(waits) >= 2
    assert min(waits) >= RETRY_S * 0.9
    assert min(waits) < DEFAULT_RETRY_S


def test_event_source_behind_cuts_and_the_engines_death(browser: Any, origin: str) -> None:
    """Issue 6: three cuts, and between the second and the third the engine is killed in mid-stream. The page, which has
    no code for any of it, sees every token once. The pause ends only with the engine that is in it."""
    before, after = [f" before{n:03}" for n in range(150)], [f" after{n:03}" for n in range(250)]
    script = {"match": "", "tokens": [*before, {"pause_ms": 600_000}, *after], "finish": "length"}
    flags = ("--cors-origin", origin, "--synthetic-step-ms", "2")
    with Server(*flags, scripts=[script]) as server, Cutter(server.port, [5_000, 9_000, 60_000]) as cutter:
        page = browser.new_page()
        page.goto(origin)
        page.evaluate(BEGIN, f"{cutter.url}/v1/generate?prompt=words")
        page.wait_for_function(SEEN, arg=1 + len(before))
        killed_at, killed = time.monotonic(), kill_engine(server)
        got = page.evaluate(ENDED)
        page.close()
        metrics = server.metrics()
        assert killed not in server.engine_pids
    _check_whole(got, "".join(before + after))
    assert (got["opens"], got["state"]) == (4, CLOSED)
    one, two, three, whole, last = cutter.seen
    assert one.cut_at and two.cut_at and three.cut_at
    assert one.cut_at < two.cut_at < killed_at < three.cut_at
    assert (whole.cut_at, last.header("last-event-id")) == (None, got["ids"][-1])
    assert metrics["sluice_engine_restarts_total"] == 1
    tokens = len(before) + len(after)
    assert (started(metrics), outcomes(metrics)["length"], metrics[GENERATED]) == (1, 1, tokens)


def test_an_error_in_the_stream_is_data_and_ends_it(server: Server, page: Any) -> None:
    got = page.evaluate(EVENT_SOURCE, server.url + _path(FAULTY))
    *chunks, error, done = got["data"]
    assert joined([json.loads(chunk) for chunk in chunks]) == "one two three"
    assert json.loads(error)["error"]["message"] == FAULT
    assert (done, got["state"]) == ("[DONE]", CLOSED)


@pytest.mark.parametrize(
    "path", ["/health", "/v1/generate", "/v1/streams/AAAAAAAAAAAAAAAAAAAAAAAA"], ids=["type", "400", "404"]
)
def test_what_is_no_stream_fails_at_once(server: Server, page: Any, path: str) -> None:
    """Another content type, or a status other than 200: no event, and no reconnection."""
    with Cutter(server.port, [], path="/") as cutter:
        got = page.evaluate(EVENT_SOURCE, cutter.url + path)
    assert (got["data"], got["opens"], got["state"], len(cutter.seen)) == ([], 0, CLOSED, 1)


def test_closing_reaches_the_scheduler(server: Server, page: Any) -> None:
    assert page.evaluate(LEAVES, server.url + _path(FOREVER)) == CLOSED
    server.wait_metric('sluice_streams{state="running"}', 0)
    until(lambda: server.metrics()['sluice_streams{state="detached"}'] >= 1, "a detached stream")


# Origins


def test_another_origin_is_kept_out(server: Server, browser: Any, origin: str) -> None:
    """The same page by another name is another origin."""
    page = browser.new_page()
    page.goto(origin.replace("127.0.0.1", "localhost"))
    got = page.evaluate(EVENT_SOURCE, server.url + _path(HARD))
    page.close()
    assert (got["data"], got["opens"], got["state"]) == ([], 0, CLOSED)


def test_headers_are_exposed(server: Server, page: Any) -> None:
    status, stream, request = page.evaluate(FETCH_HEADERS, server.url + _path(HARD))
    assert status == 200
    assert stream
    assert request


def test_without_the_flag_no_origin_is_let_in(browser: Any, origin: str) -> None:
    with Server("--resume-ttl", "0") as server:
        page = browser.new_page()
        page.goto(origin)
        got = page.evaluate(EVENT_SOURCE, server.url + _path(HARD))
        page.close()
    assert (got["data"], got["state"]) == ([], CLOSED)


# fetch-event-source: POST, with a preflight


@pytest.mark.parametrize("prompt", TEXTS)
def test_fetch_event_source(server: Server, page: Any, prompt: str) -> None:
    body = json.dumps(chat(prompt, stream=True))
    got = page.evaluate(FETCH_EVENT_SOURCE, [f"{server.url}/v1/chat/completions", body])
    _check_whole(got, TEXTS[prompt])
    assert (got["errors"], got["closed"]) == (0, 1)


def test_b04_fetch_event_source_behind_cuts(server: Server, page: Any) -> None:
    """It sends the same body again, with the last id: no second generation is begun."""
    before = server.metrics()['sluice_requests_started_total{api="chat"}']
    body = json.dumps(chat(LONG, stream=True))
    with Cutter(server.port, [2500, 9000]) as cutter:
        got = page.evaluate(FETCH_EVENT_SOURCE, [f"{cutter.url}/v1/chat/completions", body])
        posts = [seen for seen in cutter.seen if seen.head.startswith("POST")]
    _check_whole(got, LONG_TEXT)
    assert (got["errors"], got["closed"], len(posts)) == (2, 1, 3)
    assert all(seen.header("last-event-id") in got["ids"] for seen in posts[1:])
    assert server.metrics()['sluice_requests_started_total{api="chat"}'] == before + 1
