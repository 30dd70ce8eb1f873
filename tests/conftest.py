"""Fixtures for tests anywhere."""

from __future__ import annotations

import signal
import socket

import pytest
from hypothesis import settings

# How long an example takes says more about the machine than about the code; a failure is replayed by its blob.
settings.register_profile("sluice", deadline=None, print_blob=True)
settings.load_profile("sluice")

# A script's background job ignores SIGINT, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: steps on a GPU, not on its stand-in"
    )


@pytest.fixture
def unused_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
