"""One server with scripted streams, the npm packages, and a browser, for all clients."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.clients.scripts import SCRIPTS
from tests.support.browser import chromium
from tests.support.serving import Server
from tests.support.tools import npm_packages

FOLDER = Path(__file__).parent


class Pages(http.server.SimpleHTTPRequestHandler):
    """An empty page at /, and the npm packages for import by pages; none of them names its files' endings."""

    def do_GET(self) -> None:
        """See BaseHTTPRequestHandler."""
        if self.path.startswith("/node_modules/"):
            path = Path(self.translate_path(self.path))
            self._answer((path if path.suffix else path.with_suffix(".js")).read_bytes(), "text/javascript")
        else:
            self._answer(b"<!doctype html><title>a page</title>", "text/html")

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""


@pytest.fixture(scope="session")
def origin(node: str) -> Iterator[str]:
    """The origin of pages that are not the server's own."""
    handler = partial(Pages, directory=str(FOLDER))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as pages:
        thread = threading.Thread(target=pages.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{pages.server_address[1]}"
        pages.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def server(origin: str) -> Iterator[Server]:
    """Pings come so often that every pause of the scripts has some."""
    flags = ("--keepalive-interval", "0.1", "--cors-origin", origin, "--drain-timeout", "1")
    with Server(*flags, scripts=SCRIPTS) as running:
        yield running


@pytest.fixture(scope="session")
def node() -> str:
    """Node's path, with the packages of package.json installed beside the scripts that import them."""
    return npm_packages(FOLDER)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """See tests.support.browser."""
    with chromium() as running:
        yield running


@pytest.fixture
def page(browser: Any, origin: str) -> Iterator[Any]:
    """An open page of `origin`, in a context of its own."""
    context = browser.new_context()
    opened = context.new_page()
    opened.goto(origin)
    yield opened
    context.close()
