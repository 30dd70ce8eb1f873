"""Servers that the cases share: one as it comes, one with short deadlines, one with keys."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.played import KEY, MAX_BODY, MAX_HEADER, MAX_WS_MESSAGE, SCRIPTS, SMALL_KEY
from tests.support.serving import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    flags = ("--max-body", str(MAX_BODY), "--max-header", str(MAX_HEADER), "--max-ws-message", str(MAX_WS_MESSAGE))
    with Server(*flags, scripts=SCRIPTS) as running:
        yield running


@pytest.fixture(scope="session")
def quick() -> Iterator[Server]:
    """Every deadline on a silent client is one second, and pings come five times a second."""
    flags = ("--idle-timeout", "1", "--header-timeout", "1", "--body-timeout", "1", "--keepalive-interval", "0.2")
    with Server(*flags, "--max-body", str(MAX_BODY), scripts=SCRIPTS) as running:
        yield running


@pytest.fixture(scope="session")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    alice, bob = (hashlib.sha256(secret.encode()).hexdigest() for secret in (KEY, SMALL_KEY))
    path.write_text(f'[keys.alice]\nsha256 = "{alice}"\n[keys.bob]\nsha256 = "{bob}"\nmax_streams = 1\n')
    return path


@pytest.fixture(scope="session")
def keyed(keys_file: Path) -> Iterator[Server]:
    with Server("--api-keys", str(keys_file), "--max-body", str(MAX_BODY), scripts=SCRIPTS) as running:
        yield running
