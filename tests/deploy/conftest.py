"""What a server exports, for all that is checked against it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.promql import Labels, exported
from tests.support.serving import Server
from tests.support.tools import npm_packages

FOLDER = Path(__file__).parent


@pytest.fixture(scope="session")
def series() -> dict[str, list[Labels]]:
    """The series of `/metrics` of a server that has just started; they are always the same."""
    with Server() as server:
        return exported(server.ask("GET", "/metrics").body.decode())


@pytest.fixture(scope="session")
def node() -> str:
    """Node's path, with the packages of package.json installed in this folder."""
    return npm_packages(FOLDER)
