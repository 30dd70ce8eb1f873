"""Real reverse proxies in front of a real server, each with a configuration of deploy/ or the least that it takes."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.serving import REPOSITORY, STOP_S, Reachable, Server, until
from tests.support.tools import tool

DEPLOY = REPOSITORY / "deploy"
Argv = Callable[[Path, str], list[str]]  # of a folder to work in and a configuration


def _nginx(folder: Path, text: str) -> list[str]:
    """Its files go to the folder; a worker that gave root away couldn't write there."""
    kept = "".join(f"{kind}_temp_path {kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    config = folder / "nginx.conf"
    config.write_text(text.replace("http {", f"http {{ access_log off; {kept}", 1))
    user = "user root;" if os.geteuid() == 0 else ""
    main = f"daemon off; worker_processes 1; pid {folder}/pid; {user}"
    return [tool("nginx", "nginx"), "-p", str(folder), "-c", str(config), "-e", "stderr", "-g", main]


def _haproxy(folder: Path, text: str) -> list[str]:
    config = folder / "haproxy.cfg"
    config.write_text(text)
    return [tool("haproxy", "haproxy"), "-db", "-q", "-f", str(config)]


def _caddy(folder: Path, text: str) -> list[str]:
    config = folder / "Caddyfile"
    config.write_text("{\n\tadmin off\n\tauto_https off\n}\n" + text)
    return [tool("caddy", "caddy"), "run", "--adapter", "caddyfile", "--config", str(config)]


def _environment(argv: list[str], folder: Path) -> dict[str, str]:
    """What the proxy finds there: Caddy's own folders, and what its 2.6.2 calls reading bodies first."""
    environment = {**os.environ, "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    if "caddyfile" in argv:
        version = subprocess.run([argv[0], "version"], capture_output=True, text=True, timeout=STOP_S, check=True)
        if version.stdout.split()[0].lstrip("v") == "2.6.2":
            environment["SLUICE_BUFFERS"] = "buffer_requests"
    return environment


def _least_nginx(extra: str = "") -> str:
    return (
        f"events {{}} http {{ server {{ listen 8080; location / {{ proxy_pass http://127.0.0.1:8000; {extra} }} }} }}"
    )


_LEAST_HAPROXY = """
defaults
    mode http
    timeout connect 5s
    timeout client 30s
    timeout server 30s
listen all
    bind :8080
    server one 127.0.0.1:8000
"""

# Name -> how it is started, and its configuration, with the ports of deploy/ in it.
PROXIES: dict[str, tuple[Argv, str]] = {
    "nginx as it comes, HTTP/1.0": (_nginx, _least_nginx()),
    "nginx with HTTP/1.1": (_nginx, _least_nginx('proxy_http_version 1.1; proxy_set_header Connection "";')),
    "haproxy as it comes": (_haproxy, _LEAST_HAPROXY),
    "deploy/nginx.conf": (_nginx, (DEPLOY / "nginx.conf").read_text()),
    "deploy/haproxy.cfg": (_haproxy, (DEPLOY / "haproxy.cfg").read_text()),
    "deploy/Caddyfile": (_caddy, (DEPLOY / "Caddyfile").read_text()),
}
DEPLOYED = [name for name in PROXIES if name.startswith("deploy/")]


class Proxy(Reachable):
    """A running proxy, usable with `with`; to clients it looks like a server."""

    def __init__(self, name: str, server: Server, port: int) -> None:
        self._argv, text = PROXIES[name]
        self._text = text.replace("8080", str(port)).replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
        self.port = port
        self._folder = tempfile.TemporaryDirectory(prefix="sluice-proxy-")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        folder = Path(self._folder.name)
        try:
            argv = self._argv(folder, self._text)
            environment = _environment(argv, folder)
            with (folder / "log").open("wb") as log:
                self._process = subprocess.Popen(
                    argv, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            until(self._listens, "the proxy listens")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """End it, and remove its files."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_S)
        self._folder.cleanup()

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"the proxy ended: {(Path(self._folder.name) / 'log').read_text()}"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0
