"""Servers for the tests of this folder: the echo and the API, each in cleartext and with TLS."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conformance_kit.http2_wire import Wire

from tests.support.http2 import Peer, dial, make_certificate
from tests.support.serving import Server


@dataclass(frozen=True)
class Endpoint:
    """One listening port."""

    server: Server
    certificate: Path | None

    @property
    def url(self) -> str:
        """Without a slash at its end."""
        scheme = "http" if self.certificate is None else "https"
        return f"{scheme}://localhost:{self.server.port}"

    def wire(self) -> Wire:
        """A connection of raw frames."""
        return Wire(dial(self.server.port, self.certificate))

    def peer(self, *, window: int = 65_535, connection_window: int = 1 << 30) -> Peer:
        """A connection of h2's client."""
        return Peer(self.server.port, self.certificate, window=window, connection_window=connection_window)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost, and its key."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


def _flags(certificate: tuple[Path, Path], port: str) -> list[str]:
    return ["--tls-cert", str(certificate[0]), "--tls-key", str(certificate[1])] if port == "tls" else []


@pytest.fixture(scope="session", params=["cleartext", "tls"])
def echo(request: pytest.FixtureRequest, certificate: tuple[Path, Path]) -> Iterator[Endpoint]:
    """The echo."""
    with Server("--conformance-echo", *_flags(certificate, request.param)) as server:
        yield Endpoint(server, certificate[0] if request.param == "tls" else None)


@pytest.fixture(scope="session", params=["cleartext", "tls"])
def api(request: pytest.FixtureRequest, certificate: tuple[Path, Path]) -> Iterator[Endpoint]:
    """The API on the synthetic engine, a token each 5 ms. What tests leave detached doesn't hold up its end."""
    flags = ("--synthetic-step-ms", "5", "--metrics-access", "open", "--drain-timeout", "0.5", "--resume-ttl", "4")
    with Server(*flags, *_flags(certificate, request.param)) as server:
        yield Endpoint(server, certificate[0] if request.param == "tls" else None)
