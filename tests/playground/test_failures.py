"""What the page says and does when something goes wrong, or is left half done: no more than it knows, and no less."""

from __future__ import annotations

from typing import Any

import pytest

from tests.playground.conftest import Console, Open, Site
from tests.playground.test_page import LANES, expect, number, say, text_of, wait_done, wait_text
from tests.support.cutter import Cutter
from tests.support.probes import kill_engine, words
from tests.support.serving import Server, until

BROWSERS_OWN = ("Failed to load resource",)  # Chromium logs each refused request
REFUSED = {"status": 429, "json": {"error": {"message": "too many streams"}}}


def refuse(status: int, message: str) -> Any:
    return lambda route: route.fulfill(status=status, json={"error": {"message": message}})


def shown(server: Server) -> list[Any]:
    return list(server.ask("GET", "/status").json()["shown"])


def site_of(server: Server) -> Site:
    return Site(server, f"http://localhost:{server.port}/", "", "http/1.1")


# The slow reader


@pytest.mark.parametrize("rate", ["0", "1"])
def test_the_slowest_reader_keeps_its_stream(open_page: Open, rate: str) -> None:
    """However slow, it asks before the server takes it for gone."""
    lease_s = 2
    with Server("--synthetic-step-ms", "5", "--credit-window", "8", "--resume-ttl", str(lease_s)) as server:
        page = open_page(site_of(server))
        page.locator("#slow-rate").fill(rate)
        page.click("#slow-start")
        expect(page.locator("#slow-state")).to_have_text("parked")
        until(lambda: shown(server)[0]["age_s"] > 3 * lease_s, "several leases")
        assert shown(server)[0]["readers"] == 1
        expect(page.locator("#slow-state")).to_have_text("parked")
        page.locator("#slow-rate").fill("40")
        expect(page.locator("#slow-state")).to_have_text("finished")
        expect(page.locator("#announcements p")).to_have_text(
            [f"The slow reader's stream: {state}." for state in ("parked", "running", "finished")]
        )
        expect(page.locator("#slow-made")).to_have_text("1500 tokens")
        assert words(f" {page.locator('#slow-text').text_content().strip()}") == 1500
        page.context.close()


@pytest.mark.parametrize(
    ("status", "said"),
    [(404, "The server doesn't know this stream any more"), (410, "no longer held"), (401, "the API key is not known")],
)
def test_a_slow_reader_that_loses_its_stream_says_why_and_keeps_what_it_read(
    plain: Site, open_page: Open, console: Console, status: int, said: str
) -> None:
    console.allowed = BROWSERS_OWN
    page = open_page(plain)
    page.locator("#slow-rate").fill("40")
    page.click("#slow-start")
    until(lambda: number(page, "#slow-read") > 20, "some text")
    page.route("**/v1/streams/**", refuse(status, said))
    expect(page.locator("#slow-note")).to_contain_text(said)
    expect(page.locator("#slow-state")).to_have_text("not known")
    expect(page.locator("#announcements")).to_contain_text(said)
    assert words(f" {page.locator('#slow-text').text_content().strip()}") == number(page, "#slow-read")
    assert "finished" not in page.locator("#announcements").text_content()


def test_a_slow_reader_comes_back_to_a_server_that_was_silent(plain: Site, open_page: Open, console: Console) -> None:
    console.allowed = BROWSERS_OWN
    page = open_page(plain)
    page.locator("#slow-rate").fill("40")
    page.click("#slow-start")
    until(lambda: number(page, "#slow-read") > 20, "some text")
    tries: list[Any] = []
    page.route("**/v1/streams/**", lambda route: tries.append(route.abort()))
    until(lambda: page.evaluate("1") and len(tries) > 2, "several tries")
    expect(page.locator("#slow-note")).to_have_text("The server doesn't answer; trying again.")
    page.unroute("**/v1/streams/**")
    expect(page.locator("#slow-note")).to_be_empty()
    assert page.locator("#announcements").text_content().count("trying again") == 1
    expect(page.locator("#slow-state")).to_have_text("finished")
    assert words(f" {page.locator('#slow-text').text_content().strip()}") == 1500


@pytest.mark.parametrize(
    ("answer", "state", "said"),
    [
        (refuse(401, "an API key is needed"), "not begun", "an API key is needed"),
        (lambda route: route.abort(), "not known", "The server doesn't answer."),
    ],
    ids=["refused", "silent"],
)
def test_a_slow_reader_that_cannot_begin_says_why(
    plain: Site, open_page: Open, console: Console, answer: Any, state: str, said: str
) -> None:
    console.allowed = BROWSERS_OWN
    page = open_page(plain)
    page.route("**/v1/generate*", answer)
    page.click("#slow-start")
    expect(page.locator("#slow-note")).to_have_text(said)
    expect(page.locator("#slow-state")).to_have_text(state)
    expect(page.locator("#slow-start")).to_be_enabled()


def test_a_dead_engine_takes_no_text_away(open_page: Open) -> None:
    flags = ("--synthetic-step-ms", "10", "--engine-restart-wait", "0")
    with Server(*flags, faults_expected=True) as server:
        page = open_page(site_of(server))
        page.click("#slow-start")
        until(lambda: number(page, "#slow-read") > 2, "some text")
        page.locator("#slow-rate").fill("40")
        kill_engine(server)
        expect(page.locator("#slow-state")).to_have_text("failed")
        expect(page.locator("#slow-note")).to_contain_text("engine")
        assert words(f" {page.locator('#slow-text').text_content().strip()}") > 2
        page.context.close()


# The chat


def test_a_server_that_is_silent_is_not_said_to_keep_a_stream(plain: Site, open_page: Open, console: Console) -> None:
    console.allowed = BROWSERS_OWN
    page = open_page(plain)
    page.route("**/v1/chat/completions", lambda route: route.abort())
    turn = say(page, "sentences")
    expect(turn.locator(".ledger")).to_have_text("The server doesn't answer; trying again.")
    expect(page.locator("#cut")).to_be_disabled()
    page.unroute("**/v1/chat/completions")
    wait_done(turn)
    expect(turn.locator(".ledger")).to_have_text("Answered after trying again.")
    told = page.locator("#announcements").text_content()
    assert "parked" not in told and "-1" not in told


def test_a_server_that_is_busy_is_not_called_silent(plain: Site, open_page: Open, console: Console) -> None:
    console.allowed = BROWSERS_OWN
    page = open_page(plain)
    turn = say(page, "go", tokens=300)
    wait_text(turn, 50)
    page.route("**/v1/streams/**", lambda route: route.fulfill(**REFUSED))
    page.click("#cut")
    expect(turn.locator(".ledger")).to_have_text("too many streams; trying again.")
    page.unroute("**/v1/streams/**")
    wait_done(turn)
    expect(turn.locator(".ledger")).to_contain_text("1 cut: 0 events lost, 0 doubled")
    assert words(text_of(turn)) == 300


def test_a_stream_that_the_server_forgot_is_lost(plain: Site, open_page: Open, console: Console) -> None:
    console.allowed = BROWSERS_OWN
    page = open_page(plain)
    turn = say(page, "go", tokens=300)
    wait_text(turn, 50)
    page.route("**/v1/streams/**", refuse(404, "there is no such stream"))
    page.click("#cut")
    expect(turn.locator(".ledger")).to_contain_text("the rest of the answer is lost")
    assert words(text_of(turn)) > 5


def test_what_got_no_answer_is_put_back(plain: Site, open_page: Open, console: Console) -> None:
    console.allowed = BROWSERS_OWN
    page = open_page(plain)
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=503, headers={"Retry-After": "7"}, json={"error": {"message": "no room"}}),
    )
    expect(say(page, "a long question").locator(".ledger")).to_have_text("no room; try again in 7 s")
    expect(page.locator("#message")).to_have_value("a long question")


def test_a_stop_that_the_server_did_not_hear_of_is_not_called_one(
    plain: Site, open_page: Open, console: Console
) -> None:
    console.allowed = BROWSERS_OWN
    page = open_page(plain)
    lost: list[str] = []

    def lose(route: Any) -> None:
        lost.append(route.request.url)
        route.abort()

    page.route("**/v1/streams/**", lose)
    turn = say(page, "go", tokens=100_000)
    wait_text(turn, 30)
    page.keyboard.press("Escape")
    expect(turn.locator(".ledger")).to_have_text(
        "Stopped here, but the server didn't confirm it. It ends a stream that nobody reads after 30 seconds."
    )
    plain.server.ask("DELETE", lost[0].removeprefix(plain.url[:-1]))


def test_a_request_that_waits_for_a_connection_says_so(plain: Site, open_page: Open) -> None:
    page = open_page(plain)
    expect(page.locator("#health")).to_have_text("ready")
    six = page.evaluate("""() => {
        const each = (prompt) => fetch(`v1/generate?prompt=${prompt}&max_tokens=100000`);
        return Promise.all([..."abcdef"].map(each)).then((six) => six.map(({headers}) => headers.get("X-Stream-Id")));
    }""")
    turn = say(page, "sentences")
    expect(turn.locator(".ledger")).to_contain_text("No answer yet. Over HTTP/1.1 browsers keep six connections")
    expect(page.locator("#health")).to_have_text("waiting")
    page.click("#race-start")
    for lane in page.locator(".lane").all():
        expect(lane.locator(".ledger")).to_contain_text("No answer yet.")
    page.click("#race-stop")
    for stream in six:
        plain.server.ask("DELETE", f"/v1/streams/{stream}")
    wait_done(turn)
    expect(turn.locator(".ledger")).to_be_empty()
    expect(page.locator("#health")).to_have_text("ready")


@pytest.mark.parametrize("value", ["0", "", "1.5"])
@pytest.mark.parametrize("way", ["button", "key"])
def test_settings_that_cannot_be_sent_are_shown(plain: Site, open_page: Open, value: str, way: str) -> None:
    page = open_page(plain)
    page.click("summary")
    page.fill("#max-tokens", value)
    page.click("summary")
    page.fill("#message", "go")
    if way == "button":
        page.click("#send")
    else:
        page.press("#message", "Enter")
    expect(page.locator("#max-tokens")).to_be_focused()
    assert page.locator(".turn").count() == 0
    page.fill("#max-tokens", "3")
    page.click("#send")
    wait_done(page.locator(".turn.model"))


# What is left before it has its name


def test_an_answer_stopped_before_it_begins_is_cancelled(plain: Site, open_page: Open) -> None:
    page = open_page(plain)
    held: list[Any] = []
    page.route("**/v1/chat/completions", lambda route: held.append(route))
    turn = say(page, "go", tokens=100_000)
    page.keyboard.press("Escape")
    expect(turn.locator(".ledger")).to_have_text("Stopped.")
    expect(page.locator("#send")).to_be_enabled()
    with page.expect_request(lambda request: request.method == "DELETE"):
        held[0].continue_()
    until(lambda: not shown(plain.server), "no stream is left")


def test_a_race_stopped_at_once_asks_for_nothing_more(keyed: Site, open_page: Open) -> None:
    page = open_page(keyed)
    expect(page.locator("#key-note")).to_contain_text("The key is good")
    held: list[Any] = []
    asked: list[str] = []
    page.route("**/v1/generate*", lambda route: held.append(route))
    page.on("request", lambda request: asked.append(request.url))
    page.on("websocket", lambda socket: asked.append(socket.url))
    page.click("#race-start")
    until(lambda: page.evaluate("1") and held, "the request that prepares")
    page.click("#race-stop")
    expect(page.locator("#race-start")).to_be_enabled()
    expect(page.locator("#announcements")).to_contain_text("The race was stopped.")
    held[0].continue_()
    until(lambda: page.evaluate("1") and not shown(keyed.server), "no stream is left")
    assert len([url for url in asked if "/v1/generate" in url]) == 1
    assert not [url for url in asked if "/v1/ws" in url or "access-tokens" in url]


# The race


def test_every_lane_says_why_it_got_nothing(keyed: Site, open_page: Open, console: Console) -> None:
    console.allowed = BROWSERS_OWN
    page = open_page(keyed, key="")
    page.click("#race-start")
    for lane in page.locator(".lane").all():
        expect(lane.locator(".ledger")).to_contain_text("an API key is needed")
    expect(page.locator("#announcements p").last).to_have_text(
        "The race brought no text. "
        + " ".join(f"{name}: an API key is needed: Authorization: Bearer KEY." for name in LANES)
    )
    assert all(error.startswith(BROWSERS_OWN) for error in console.errors) and len(console.errors) == 1


def test_a_refused_event_source_says_why(plain: Site, open_page: Open, console: Console) -> None:
    console.allowed = BROWSERS_OWN
    page = open_page(plain)
    page.route(
        "**/v1/generate*",
        lambda route: route.continue_() if "max_tokens=1&" in route.request.url else route.fulfill(**REFUSED),
    )
    page.click("#race-start")
    expect(page.locator("#race-start")).to_be_enabled()
    for n in range(3):  # a WebSocket is another route
        expect(page.locator(f".lane >> nth={n}").locator(".ledger")).to_have_text("too many streams")


def test_lanes_that_can_come_back_to_their_stream_do(keyed: Site, open_page: Open, console: Console) -> None:
    """The SSE lane's connection is cut when the token in its address is too old, and for a while nothing else is
    answered."""
    console.allowed = BROWSERS_OWN
    too_old = refuse(401, "the token is not known, or its minute is over")
    asked: list[str] = []

    def answer(route: Any) -> None:
        asked.append(route.request.url)
        route.continue_() if len(asked) == 1 else too_old(route)

    with Cutter(keyed.server.port, [10_000], path="/v1/generate?token=") as relay:
        page = open_page(Site(keyed.server, f"{relay.url}/", keyed.key, "http/1.1"))
        expect(page.locator("#key-note")).to_contain_text("The key is good")
        page.fill("#race-tokens", "200")
        polling, _, sse, _ = page.locator(".lane").all()
        page.route("**/v1/generate?token=*", answer)
        page.click("#race-start")
        expect(polling.locator(".text")).not_to_be_empty()
        page.route("**/v1/streams/**", lambda route: route.abort())
        for lane in (polling, sse):
            expect(lane.locator(".ledger")).to_have_text("The server doesn't answer; trying again.")
        page.unroute("**/v1/streams/**")
        expect(page.locator("#race-start")).to_be_enabled()
        for lane in page.locator(".lane").all():
            expect(lane).to_have_attribute("data-state", "done")
            expect(lane.locator(".ledger")).to_be_empty()
            assert words(lane.locator(".text").text_content()) == 200
        assert len(asked) == 2
        page.context.close()


@pytest.mark.parametrize(
    ("field", "value", "button"),
    [
        ("#race-tokens", "", "#race-start"),
        ("#race-prompt", "", "#race-start"),
        ("#race-prompt", " ", "#race-start"),
        ("#message", "", "#send"),
        ("#message", " ", "#send"),
    ],
)
def test_nothing_is_not_sent(plain: Site, open_page: Open, field: str, value: str, button: str) -> None:
    page = open_page(plain)
    page.fill(field, value)
    page.click(button)
    expect(page.locator(field)).to_be_focused()
    assert page.evaluate("document.activeElement.validationMessage")
    expect(page.locator("#race-stop")).to_be_disabled()
    expect(page.locator("#stop")).to_be_disabled()
    page.locator(field).press("1")
    assert not page.evaluate("document.activeElement.validationMessage")


def test_a_prompt_that_fits_no_address_is_said_to_be_too_long(plain: Site, open_page: Open, console: Console) -> None:
    console.allowed = BROWSERS_OWN
    page = open_page(plain)
    page.fill("#race-prompt", "a" * 70_000)
    page.click("#race-start")
    for lane in page.locator(".lane").all():
        expect(lane.locator(".ledger")).to_contain_text("The prompt is too long for an address")


# Keys


def test_a_key_that_is_none_is_refused_at_once(keyed: Site, open_page: Open, console: Console) -> None:
    console.allowed = BROWSERS_OWN
    page = open_page(keyed, key="")
    page.click("#slow-start")
    page.click("#race-start")
    notes = page.locator("#slow-note, .lane .ledger")
    for note in notes.all():
        expect(note).to_contain_text("an API key is needed")
    page.fill("#key", "ключ")
    page.press("#key", "Enter")
    expect(page.locator("#key-note")).to_contain_text("This can't be a key")
    expect(page.locator("#health")).to_have_text("ready")
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    expect(page.locator("#key-note")).to_contain_text("the API key is not known")
    page.fill("#key", keyed.key)
    page.press("#key", "Enter")
    expect(page.locator("#key-note")).to_contain_text("The key is good")
    assert set(notes.all_text_contents()) == {""}


def test_an_answer_goes_on_once_the_key_is_good_again(keyed: Site, open_page: Open, console: Console) -> None:
    console.allowed = BROWSERS_OWN
    page = open_page(keyed)
    expect(page.locator("#key-note")).to_contain_text("The key is good")
    page.click("#slow-start")
    page.locator("#slow-rate").fill("40")
    turn = say(page, "go", tokens=200)
    wait_text(turn, 50)
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    page.click("#cut")
    for note in (turn.locator(".ledger"), page.locator("#slow-note")):
        expect(note).to_have_text("the API key is not known; with a good one it goes on.")
    page.fill("#key", keyed.key)
    page.press("#key", "Enter")
    wait_done(turn)
    expect(turn.locator(".ledger")).to_contain_text("1 cut: 0 events lost, 0 doubled")
    assert words(text_of(turn)) == 200
    expect(page.locator("#slow-note")).to_be_empty()
    page.click("#slow-stop")


# The engine


def test_no_figure_outlives_what_it_came_from(plain: Site, open_page: Open, console: Console) -> None:
    console.allowed = BROWSERS_OWN
    page = open_page(plain)
    page.click("#slow-start")
    expect(page.locator("#slow-state")).to_have_text("parked")
    page.route("**/status", lambda route: route.abort())
    expect(page.locator("#health")).to_have_text("no connection")
    expect(page.locator("#engine-note")).to_contain_text("No answer from the server")
    expect(page.locator("#streams")).to_have_text("not known")
    figures = page.locator(".engine dd, .legend span, #rate, #slow-made").all_text_contents()
    assert set(figures) == {"–"}
    expect(page.locator("#slow-state")).to_have_text("not known")
    page.unroute("**/status")
    expect(page.locator("#slow-state")).to_have_text("parked")
    page.click("#slow-stop")


# By keyboard


def test_the_focus_stays_where_the_work_is_done(plain: Site, open_page: Open) -> None:
    page = open_page(plain)
    page.fill("#race-tokens", "2000")
    turn = say(page, "go", tokens=2000)
    wait_text(turn, 30)
    for name in ("race-start", "race-stop", "slow-start", "slow-stop", "cut", "stop"):
        button = page.locator(f"#{name}")
        expect(button).to_be_enabled()
        button.focus()
        page.keyboard.press("Enter")
        expect(button).to_be_disabled()
        expect(button).to_be_focused()
        page.keyboard.press("Enter")  # does nothing
    expect(turn.locator(".ledger")).to_have_text("Stopped.")
