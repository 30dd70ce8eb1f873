"""axe-core finds no serious fault, in light and in dark, while everything on the page goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.playground.conftest import Open, Site
from tests.playground.test_page import expect, say, wait_done, wait_text
from tests.support.tools import npm_packages

AXE = "node_modules/axe-core/axe.min.js"
RUN = """() => axe.run(document, {resultTypes: ["violations"]}).then(({violations}) => violations.map(
    ({id, impact, nodes}) => [impact, id, ...nodes.map(({html, failureSummary}) => `${html} ${failureSummary}`)]))"""


@pytest.fixture(scope="session")
def axe() -> str:
    """Its source."""
    folder = Path(__file__).parent
    npm_packages(folder)
    return (folder / AXE).read_text()


def serious(page: Any, axe: str) -> list[Any]:
    page.evaluate(axe)
    return [found for found in page.evaluate(RUN) if found[0] in ("serious", "critical")]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1180), ("dark", 1180), ("light", 360)])
def test_no_serious_fault(keyed: Site, open_page: Open, axe: str, scheme: str, width: int) -> None:
    page = open_page(keyed, scheme=scheme, width=width)
    expect(page.locator("#health")).to_have_text("ready")
    assert serious(page, axe) == []
    page.click("#slow-start")
    page.click("#race-start")
    turn = say(page, "go", tokens=300)
    wait_text(turn, 60)
    page.click("#cut")
    expect(turn.locator(".ledger")).to_contain_text("Nobody reads now")
    assert serious(page, axe) == []
    wait_done(turn)
    expect(page.locator("#slow-state")).to_have_text("parked")
    expect(say(page, "fails").locator(".ledger")).to_have_text("a fault on purpose")
    page.click("summary")
    assert serious(page, axe) == []


def test_colours_follow_the_scheme(keyed: Site, open_page: Open) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    light, dark = (open_page(keyed, scheme=scheme) for scheme in ("light", "dark"))
    assert light.evaluate(colour) != dark.evaluate(colour)
    light.emulate_media(forced_colors="active")
    swatches = "['used', 'cached', 'free'].map((kind) => getComputedStyle(legend(kind), '::before').backgroundColor)"
    used = light.evaluate(f"{{ const legend = (kind) => document.querySelector(`[data-kind=${{kind}}]`); {swatches} }}")
    assert len({*used, light.evaluate(colour)}) == 4
