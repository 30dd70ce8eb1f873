"""Every control of the page, in a browser (issue 11, 1)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.playground.conftest import SENTENCES, Console, Open, Site
from tests.support.cutter import Cutter
from tests.support.probes import kill_engine, words
from tests.support.serving import Server, until

LANES = ("Polling", "Chunked", "SSE", "WebSocket")
WAIT_MS = 30_000
TIME = r"[\d.]+ m?s"  # as the page writes it
WINDOW = 64  # --credit-window


def expect(locator: Any) -> Any:
    """playwright's assertions, which wait."""
    from playwright.sync_api import expect as made

    made.set_options(timeout=WAIT_MS)
    return made(locator)


def say(page: Any, text: str, *, tokens: int = 400) -> Any:
    """Send a message; the model's turn."""
    if page.locator("#max-tokens").input_value() != str(tokens):
        page.click("summary")
        page.fill("#max-tokens", str(tokens))
        page.click("summary")
    page.fill("#message", text)
    page.click("#send")
    return page.locator(".turn.model").last


def text_of(turn: Any) -> str:
    """What the turn shows; the page leaves out a space at its begin."""
    return f" {turn.locator('.body').text_content()}"


def wait_text(turn: Any, length: int) -> str:
    """Until the turn has so many characters."""
    until(lambda: len(text_of(turn)) >= length, f"{length} characters")
    return text_of(turn)


def wait_done(turn: Any) -> None:
    expect(turn).to_have_attribute("data-state", "done")


def number(page: Any, selector: str) -> int:
    """The number that an element begins with; 0 for none."""
    found = re.match(r"[\d,]+", page.locator(selector).text_content())
    return int(found[0].replace(",", "")) if found else 0


# Chat


def test_a_chat_types_as_tokens_come(site: Site, open_page: Open) -> None:
    page = open_page(site)
    turn = say(page, "go", tokens=150)
    first = len(wait_text(turn, 20))
    assert first < 150 * 5
    wait_text(turn, first + 20)
    wait_done(turn)
    assert words(text_of(turn)) == 150
    expect(turn.locator(".meta")).to_contain_text("150 tokens · first after")
    expect(turn.locator(".ledger")).to_have_text("Ended at the limit in Settings: 150 tokens.")
    expect(page.locator("#send")).to_be_enabled()
    used = page.evaluate("performance.getEntriesByType('resource').map((entry) => entry.nextHopProtocol)")
    assert set(used) - {""} == {site.protocol}


def test_a_conversation_goes_on_and_a_new_one_begins(plain: Site, open_page: Open) -> None:
    page = open_page(plain)
    bodies: list[Any] = []
    page.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
    wait_done(say(page, "sentences"))
    wait_done(say(page, "and sentences"))
    roles = [[turn["role"] for turn in body["messages"]] for body in bodies]
    assert roles == [["user"], ["user", "assistant", "user"]]
    assert bodies[1]["messages"][1]["content"] == "".join(SENTENCES * 8)
    page.click("#new-chat")
    expect(page.locator(".turn")).to_have_count(0)
    page.click(".suggestions button >> nth=1")
    expect(page.locator(".turn.you")).to_have_text("Explain how a canal lock works.")
    page.click("#new-chat")  # in mid-answer
    expect(page.locator("#send")).to_be_enabled()
    wait_done(say(page, "go", tokens=5))
    assert [len(body["messages"]) for body in bodies[2:]] == [1, 1]


def test_settings_reach_the_model(plain: Site, open_page: Open) -> None:
    page = open_page(plain)
    page.click("summary")
    page.fill("#temperature", "0")
    page.click("summary")
    texts = []
    for _ in range(2):
        turn = say(page, "go", tokens=7)
        wait_done(turn)
        texts.append(text_of(turn))
        page.click("#new-chat")
    assert texts[0] == texts[1]
    assert words(texts[0]) == 7


@pytest.mark.parametrize("way", ["button", "key"])
def test_stop_reaches_the_engine(plain: Site, open_page: Open, way: str) -> None:
    page = open_page(plain)
    turn = say(page, "go", tokens=100_000)
    wait_text(turn, 30)
    if way == "button":
        page.click("#stop")
    else:
        page.keyboard.press("Escape")
    expect(turn.locator(".ledger")).to_have_text("Stopped.")
    until(lambda: not plain.server.ask("GET", "/status").json()["shown"], "no stream is left")
    expect(page.locator("#stop")).to_be_disabled()


def test_what_goes_wrong_is_said(plain: Site, open_page: Open, console: Console) -> None:
    page = open_page(plain)
    turn = say(page, "fails")
    expect(turn.locator(".ledger")).to_have_text("a fault on purpose")
    assert text_of(turn) == " one two"
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(status=503, json={"error": {"message": "no room"}})
    )
    console.allowed = ("Failed to load resource",)
    expect(say(page, "go").locator(".ledger")).to_have_text("no room")


def test_text_is_never_read_as_html(plain: Site, open_page: Open) -> None:
    page = open_page(plain)
    evil = "<img src=x onerror=alert(1)><b>go</b>"
    wait_done(say(page, evil, tokens=3))
    expect(page.locator(".turn.you .body")).to_have_text(evil)
    assert page.locator(".turn img, .turn b").count() == 0


# The cut


def test_neither_a_cut_nor_the_engine_s_death_loses_or_doubles_anything(site: Site, open_page: Open) -> None:
    """Both in the middle of one answer."""
    page = open_page(site)
    turn = say(page, "go", tokens=300)
    wait_text(turn, 30)
    page.click("#cut")
    expect(turn.locator(".ledger")).to_have_text(re.compile(r"Cut behind event \d+\. Nobody reads now"))
    expect(page.locator("#detached")).to_have_text("1")
    expect(page.locator("#cut")).to_be_disabled()
    assert turn.locator(".seam").count() == 1
    expect(turn.locator(".ledger")).to_have_text(re.compile(r"Cut behind event (\d+), resumed with event \d+\."))
    before, after = map(int, re.findall(r"\d+", turn.locator(".ledger").text_content()))
    assert after == before + 1
    kill_engine(site.server)
    expect(page.locator("#engine-note")).to_have_text("Restarts of the engine: 1.")
    wait_done(turn)
    verdict = "1 cut: 0 events lost, 0 doubled. Read again as a whole, the text is the same."
    verdict += " Ended at the limit in Settings: 300 tokens."
    expect(page.locator("#announcements p").last).to_have_text(verdict)
    expect(turn.locator(".ledger")).to_have_text(verdict)
    assert words(text_of(turn)) == 300
    expect(page.locator("#health")).to_have_text("ready")


def test_a_network_that_cuts_is_survived(plain: Site, open_page: Open, console: Console) -> None:
    """Also in the middle of an event, and before the first one."""
    console.allowed = ("Failed to load resource",)
    with Cutter(plain.server.port, [2000, 5000, 50], path="/v1/chat") as relay:
        page = open_page(Site(plain.server, f"{relay.url}/", "", "http/1.1"))
        turn = say(page, "go", tokens=120)
        wait_done(turn)
        assert words(text_of(turn)) == 120
        expect(turn.locator(".ledger")).to_contain_text("0 events lost, 0 doubled")


# The race


def test_the_race(site: Site, open_page: Open) -> None:
    page = open_page(site)
    page.fill("#race-prompt", "a river")
    page.fill("#race-tokens", "60")
    page.click("#race-start")
    expect(page.locator("#race-stop")).to_be_enabled()
    expect(page.locator("#race-start")).to_be_enabled()
    lanes = page.locator(".lane")
    assert [name.split()[0] for name in lanes.locator("h3").all_text_contents()] == list(LANES)
    texts = lanes.locator(".text").all_text_contents()
    assert len(set(texts)) == 1 and words(texts[0]) == 60
    figures = [lane.locator("dd").all_text_contents() for lane in lanes.all()]
    for ttft, itl, gap, tokens, size, _ in figures:
        assert re.fullmatch(TIME, ttft) and re.fullmatch(TIME, itl)
        assert re.fullmatch(TIME, gap) or (itl, gap) == ("0.0 ms", "–")  # a browser that was busy reads all at once
        assert tokens == "60" and size.endswith("KB")
    requests = [int(each[-1]) for each in figures]
    assert requests[0] > 2 and requests[1:] == [1, 1, 1]
    kilobytes = dict(zip(LANES, (float(each[4].split()[0]) for each in figures), strict=True))
    assert kilobytes["WebSocket"] < kilobytes["Chunked"] < kilobytes["SSE"]
    assert page.evaluate(PAINTED, ".lane .strip")
    expect(page.locator("#announcements")).to_contain_text("The race is over. Polling: first text after")


PAINTED = """(selector) => {
    const canvas = document.querySelector(selector);
    const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return data.some((value) => value > 0);
}"""


def test_the_bytes_of_server_sent_events_are_those_of_the_body(plain: Site, open_page: Open) -> None:
    """An EventSource shows none: they are reckoned from its events."""
    page = open_page(plain)
    page.fill("#race-tokens", "1")
    page.click("#race-start")
    expect(page.locator("#race-start")).to_be_enabled()
    target = "/v1/generate?prompt=Describe+a+river+from+its+spring+to+the+sea.&max_tokens=1&temperature=0"
    length = len(plain.server.ask("GET", target).body)
    assert page.locator(".lane >> nth=2").locator("dd").all_text_contents()[4] == f"{length} B"


def test_a_race_is_stopped(plain: Site, open_page: Open) -> None:
    page = open_page(plain)
    page.fill("#race-tokens", "2000")
    page.click("#race-start")
    expect(page.locator(".lane >> nth=3").locator(".text")).not_to_be_empty()
    page.click("#race-stop")
    expect(page.locator("#race-start")).to_be_enabled()
    expect(page.locator("#running")).to_have_text("0")


# The slow reader


def test_a_slow_reader_parks_its_stream(site: Site, open_page: Open) -> None:
    page = open_page(site)
    assert number(page, "#slow-value") == 4
    page.click("#slow-start")
    expect(page.locator("#slow-state")).to_have_text("parked")
    expect(page.locator("#parked")).to_have_text("1")
    expect(page.locator("#streams")).to_contain_text("parked")
    read = number(page, "#slow-read")
    until(lambda: number(page, "#slow-read") > read, "it reads on")
    made, sent = (int(part.split()[0]) for part in page.locator("#slow-made, #slow-sent").all_text_contents())
    assert 0 <= made - sent <= WINDOW
    assert page.evaluate(PAINTED, "#slow-strip")
    page.locator("#slow-rate").fill("0")
    expect(page.locator("#slow-value")).to_have_text("nothing")
    page.locator("#slow-rate").fill("40")
    expect(page.locator("#slow-value")).to_have_text("all there is")
    made = number(page, "#slow-made")
    until(lambda: number(page, "#slow-made") > made + 2 * WINDOW, "it runs again")
    words(f" {page.locator('#slow-text').text_content().strip()}")
    page.click("#slow-stop")
    expect(page.locator("#slow-state")).to_have_text("cancelled")
    expect(page.locator("#slow-note")).to_have_text("Stopped.")
    expect(page.locator("#running")).to_have_text("0")
    expect(page.locator("#slow-start")).to_be_enabled()


# The engine


def test_the_engine_is_shown_as_it_is(plain: Site, open_page: Open) -> None:
    page = open_page(plain)
    expect(page.locator("#model")).to_have_text("synthetic")
    expect(page.locator("#health")).to_have_text("ready")
    expect(page.locator("#streams")).to_have_text("none now")
    turn = say(page, "go", tokens=100_000)
    expect(page.locator("#running")).to_have_text("1")
    expect(page.locator("#streams")).to_contain_text("chat")
    until(lambda: number(page, "#rate") > 10, "tokens a second")
    until(lambda: number(page, "#blocks-used") > 1, "blocks")
    shown = page.locator(".legend").text_content().replace(",", "")  # all of one moment
    pool = plain.server.ask("GET", "/status").json()["kv_blocks"]
    assert sum(map(int, re.findall(r"\d+", shown))) == sum(pool[kind] for kind in ("used", "cached", "free"))
    assert page.evaluate(PAINTED, "#blocks")
    until(lambda: re.search(r"[1-9]\d* used", page.get_attribute("#blocks", "aria-label")), "the picture in words")
    page.click("#stop")
    wait_done(turn)
    expect(page.locator("#running")).to_have_text("0")


def test_a_view_that_is_not_for_all_says_so(plain: Site, open_page: Open, console: Console) -> None:
    console.allowed = ("Failed to load resource",)
    page = open_page(plain)
    expect(page.locator("#health")).to_have_text("ready")
    page.route(
        "**/status", lambda route: route.fulfill(status=403, json={"error": {"message": "for this machine only"}})
    )
    said = "The operator keeps the engine's view inside: for this machine only."
    expect(page.locator("#engine-note")).to_have_text(said)
    expect(page.locator("#health")).to_have_text("not shown")
    wait_done(say(page, "go", tokens=3))


# Keys


def test_the_key_is_asked_for_and_forgotten(keyed: Site, open_page: Open, console: Console) -> None:
    console.allowed = ("Failed to load resource",)  # a browser says each 401
    page = open_page(keyed, key="")
    expect(page.locator("#key-note")).to_have_text("This server asks for a key.")
    expect(page.locator("#key")).to_be_focused()
    expect(page.locator("#health")).to_have_text("ready")  # --metrics-access loopback
    assert console.errors == []  # it asks for nothing that it would be refused
    expect(say(page, "go", tokens=3).locator(".ledger")).to_contain_text("an API key is needed")
    page.fill("#key", "wrong")
    page.click("text=Use key")
    expect(say(page, "go", tokens=3).locator(".ledger")).to_contain_text("the API key is not known")
    page.fill("#key", keyed.key)
    page.click("text=Use key")
    wait_done(say(page, "go", tokens=3))
    kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
    assert keyed.key not in kept + page.content() + page.url
    page.reload()
    assert page.locator("#key").input_value() == ""
    expect(say(page, "go", tokens=3).locator(".ledger")).to_contain_text("an API key is needed")


def test_a_view_that_needs_the_key_waits_for_it(alice: tuple[Path, str], open_page: Open) -> None:
    with Server("--metrics-access", "key", "--api-keys", str(alice[0])) as server:
        page = open_page(Site(server, f"http://localhost:{server.port}/", alice[1], "http/1.1"), key="")
        expect(page.locator("#engine-note")).to_have_text("The engine's view needs the key.")
        page.fill("#key", alice[1])
        page.press("#key", "Enter")
        expect(page.locator("#health")).to_have_text("ready")
        expect(page.locator("#engine-note")).to_be_empty()
        page.context.close()  # before the server: the page would say that it is gone


def test_without_keys_there_is_no_field_for_one(plain: Site, open_page: Open) -> None:
    expect(open_page(plain).locator("#key-form")).to_be_hidden()


# By keyboard, by ear, on a phone


def test_everything_is_reached_by_the_keyboard(keyed: Site, open_page: Open) -> None:
    page = open_page(keyed)
    page.locator("body").press("Home")
    page.evaluate("document.activeElement.blur()")
    controls = "a, button:enabled, input, textarea, summary, [tabindex='0']"
    wanted = page.evaluate(
        "(of) => [...document.querySelectorAll(of)].filter((e) => e.checkVisibility()).length", controls
    )
    reached = set()
    for _ in range(wanted + 2):
        page.keyboard.press("Tab")
        if name := page.evaluate("[...document.querySelectorAll('*')].indexOf(document.activeElement)"):
            reached.add(name)
    assert len(reached - {1}) >= wanted


def test_the_work_is_done_by_the_keyboard(plain: Site, open_page: Open) -> None:
    page = open_page(plain)
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#message")).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("sentences")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.you .body")).to_have_text("one\nsentences")
    wait_done(page.locator(".turn.model"))
    expect(page.locator("#message")).to_be_focused()
    page.focus("#slow-rate")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#slow-value")).to_have_text("5 pieces a second")
    assert page.get_attribute("#slow-rate", "aria-valuetext") == "5 pieces a second"


def test_a_screen_reader_is_told_sentences_and_no_tokens(plain: Site, open_page: Open) -> None:
    page = open_page(plain)
    news = page.locator("#announcements")
    assert news.get_attribute("aria-live") == "polite"
    assert page.locator("[aria-live]").count() == 1
    wait_done(say(page, "sentences"))
    expect(news.locator("p").last).to_have_text("The answer ends after 73 tokens.")  # one ends it, and has no text
    said = news.locator("p").all_text_contents()
    assert " ".join(said[:-1]) == "".join(SENTENCES * 8).strip()
    assert all(sentence.endswith(".") for sentence in said)
    assert len(said) <= 17  # two sentences in each of the eight lines


def test_text_without_sentences_is_told_after_a_while_and_at_its_pauses(plain: Site, open_page: Open) -> None:
    page = open_page(plain)
    turn = say(page, "go", tokens=300)
    wait_text(turn, 30)
    expect(page.locator("#announcements p")).to_have_count(0)
    page.evaluate("{ const now = performance.now.bind(performance); performance.now = () => now() + 5000; }")
    expect(page.locator("#announcements p")).to_have_count(1)
    assert turn.get_attribute("data-state") == "typing"
    wait_done(turn)
    begin, rest, _ = page.locator("#announcements p").all_text_contents()
    assert f"{begin} {rest}" == text_of(turn).strip()


def test_what_is_new_is_in_sight_unless_somebody_reads_above(plain: Site, open_page: Open) -> None:
    page = open_page(plain, width=360, height=740)
    gap = "(({scrollHeight, scrollTop, clientHeight}) => scrollHeight - scrollTop - clientHeight)(log)"
    wait_done(say(page, "go", tokens=120))
    turn = say(page, "go on", tokens=400)
    wait_text(turn, 600)
    assert page.evaluate(gap) < 40
    page.click("#cut")
    expect(turn.locator(".ledger")).to_contain_text("Nobody reads now")
    assert page.evaluate(gap) < 40
    page.evaluate("log.scrollTop = 0")
    expect(turn.locator(".ledger")).to_contain_text("resumed")
    wait_text(turn, len(text_of(turn)) + 50)
    assert page.evaluate("log.scrollTop") == 0


def test_the_browser_s_text_size_is_that_of_all_text(plain: Site, open_page: Open) -> None:
    page = open_page(plain, width=480)
    size = "[document.body, message, send].map((part) => parseFloat(getComputedStyle(part).fontSize))"
    before = page.evaluate(size)
    page.context.new_cdp_session(page).send("Page.setFontSizes", {"fontSizes": {"standard": 32}})
    assert page.evaluate(size) == [2 * each for each in before]
    assert page.evaluate("document.documentElement.scrollWidth") <= 480


@pytest.mark.parametrize("width", [240, 360, 800, 1180])
def test_it_fits_a_phone(keyed: Site, open_page: Open, width: int) -> None:
    page = open_page(keyed, width=width, height=740)
    wait_done(say(page, "go", tokens=40))
    page.click("summary")
    page.click("#max-tokens", trial=True)
    page.click("#message", trial=True)  # nothing lies over it
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for control in page.locator("button, input, textarea, summary").all():
        if control.is_visible():
            box = control.bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= width
            assert box["height"] >= 24  # WCAG 2.2, 2.5.8
