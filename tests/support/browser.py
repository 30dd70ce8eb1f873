"""Debian's Chromium, driven by playwright. Its own browser is never downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.tools import tool

_FLAGS = (
    "--no-sandbox",  # tests run as root in containers
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def chromium() -> Iterator[Any]:
    """Headless, with a profile of its own. Not for longer than a module: playwright keeps a loop running."""
    from playwright.sync_api import sync_playwright  # heavy, and only these tests need it

    executable = tool("chromium", "chromium")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=executable, headless=True, args=list(_FLAGS))
        yield running
        running.close()
