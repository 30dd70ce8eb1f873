"""The page in Chromium, over HTTP/1.1 and HTTP/2, with a key and without; what it writes to the console is a fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import chromium
from tests.support.http2 import make_certificate
from tests.support.serving import Server

STEP_MS = 10
SENTENCES = [" Rain", " falls.", " The", " river", " rises,", " and", " the", " lock", " fills."]
SCRIPTS: list[dict[str, Any]] = [
    {"match": "sentences", "tokens": SENTENCES * 8},
    {"match": "fails", "tokens": [" one", " two", {"error": "a fault on purpose"}]},
]
FLAGS = ("--synthetic-step-ms", str(STEP_MS), "--drain-timeout", "0.2")


@dataclass(frozen=True)
class Site:
    """Where the page is, and what it needs."""

    server: Server
    url: str
    key: str
    protocol: str  # as browsers name it


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost, and its key."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="session")
def alice(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A file of keys, and the one key in it."""
    path, secret = tmp_path_factory.mktemp("keys") / "keys.toml", "sk-playground"
    path.write_text(f'[keys.alice]\nsha256 = "{sha256(secret.encode()).hexdigest()}"\n')
    return path, secret


@contextmanager
def serve(certificate: tuple[Path, Path], alice: tuple[Path, str], *, tls: bool, keyed: bool) -> Iterator[Site]:
    """A server of the synthetic engine."""
    flags = [*FLAGS]
    flags += ["--tls-cert", str(certificate[0]), "--tls-key", str(certificate[1])] if tls else []
    flags += ["--api-keys", str(alice[0])] if keyed else []
    with Server(*flags, scripts=SCRIPTS) as server:
        url = f"{'https' if tls else 'http'}://localhost:{server.port}/"
        yield Site(server, url, alice[1] if keyed else "", "h2" if tls else "http/1.1")


@pytest.fixture(
    scope="module",
    params=[(False, False), (False, True), (True, False), (True, True)],
    ids=["http1", "http1-key", "http2", "http2-key"],
)
def site(request: pytest.FixtureRequest, certificate: tuple[Path, Path], alice: tuple[Path, str]) -> Iterator[Site]:
    """Every way to serve it."""
    tls, keyed = request.param
    with serve(certificate, alice, tls=tls, keyed=keyed) as made:
        yield made


@pytest.fixture(scope="module")
def plain(certificate: tuple[Path, Path], alice: tuple[Path, str]) -> Iterator[Site]:
    """Without TLS and key, as most people meet it."""
    with serve(certificate, alice, tls=False, keyed=False) as made:
        yield made


@pytest.fixture(scope="module")
def keyed(certificate: tuple[Path, Path], alice: tuple[Path, str]) -> Iterator[Site]:
    """With keys."""
    with serve(certificate, alice, tls=False, keyed=True) as made:
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """See tests.support.browser."""
    with chromium() as running:
        yield running


@dataclass
class Console:
    """What the page complained about. `allowed`: the beginnings of what a test provokes."""

    errors: list[str]
    allowed: tuple[str, ...] = ()

    def unexpected(self) -> list[str]:
        """What no test provoked."""
        return [error for error in self.errors if not error.startswith(self.allowed or ("\0",))]


Open = Callable[..., Any]


@pytest.fixture
def console() -> Iterator[Console]:
    """Checked at the test's end."""
    seen = Console([])
    yield seen
    assert seen.unexpected() == []


@pytest.fixture
def open_page(browser: Any, console: Console) -> Iterator[Open]:
    """Open a site: `width` by `height` CSS pixels, `scheme` light or dark. The site's key is used, unless `key` is
    another one; "" leaves the field empty."""
    contexts: list[Any] = []

    def open_site(
        site: Site, *, width: int = 1180, height: int = 860, scheme: str = "light", key: str | None = None
    ) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, ignore_https_errors=True
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda message: message.type in ("error", "warning") and console.errors.append(message.text))
        page.on("pageerror", lambda error: console.errors.append(f"uncaught: {error}"))
        page.goto(site.url)
        given = site.key if key is None else key
        if given:
            page.fill("#key", given)
            page.press("#key", "Enter")
        return page

    yield open_site
    for context in contexts:
        context.close()
