"""`--frontends N`: what the processes share from the start (port, files, engines), and what can't start. Black-box."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.frontends import Frontends, begin_and_end
from tests.support.http2 import Peer, make_certificate
from tests.support.keys import add_key
from tests.support.serving import REPOSITORY, lone_engine, until

pytestmark = pytest.mark.synthetic


def test_one_ready_line_one_port_and_all_serve(server: Frontends) -> None:
    assert server.ready_line == f"sluice ready on http://127.0.0.1:{server.port}"
    assert server.log.count(" start token_sender=") == 1
    assert len(server.frontends) == 2 and len(server.engines) == 1
    for pid in server.frontends:
        with server.client(pid) as client:
            client.request("GET", "/ready")
            assert client.answer().status == 200


def test_a_unix_socket_is_shared(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with Frontends("--uds", str(path)) as server:
        assert server.ready_line == f"sluice ready on unix:{path}"
        names = set()
        for _ in range(40):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(path))
                sock.sendall(b"GET /v1/generate?prompt=x&max_tokens=1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                with sock.makefile("rb") as file:
                    head = file.read().decode()
            names.add(head.partition("X-Stream-Id: ")[2].split()[0][-1])
        assert names <= {"a", "b"} and names
    assert not path.exists()


def test_certificates_and_keys_are_read_again_by_all(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    keys = tmp_path / "keys.toml"
    alice = add_key(keys, "alice")
    with Frontends(
        "--tls-cert", str(certificate), "--tls-key", str(key), "--api-keys", str(keys), "--metrics-access", "open"
    ) as server:
        bob = add_key(keys, "bob")
        server.process.send_signal(signal.SIGHUP)
        until(lambda: server.log.count("keys result=reloaded") == 2, "read by both")
        assert server.log.count("certificates result=reloaded") == 2
        for pid in server.frontends:
            for secret in (alice, bob):
                with server.reach(pid, lambda: Peer(server.port, certificate)) as peer:
                    fields, _ = peer.answer(peer.ask("/v1/models", fields=[("authorization", f"Bearer {secret}")]))
                    assert fields[":status"] == "200"


def test_engines_that_run_elsewhere(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/engine.sock"
    with lone_engine(address), Frontends("--engine-url", address, engine=None) as server:
        assert server.engines == []
        for pid in server.frontends:
            begin_and_end(server, pid)


class TestWhatCantStart:
    def run(self, *flags: str) -> tuple[int, str]:
        argv = [sys.executable, "-m", "server", "--engine", "synthetic", "--frontends", "2", *flags]
        ended = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
        return ended.returncode, ended.stderr

    def test_a_port_in_use_is_refused_once(self, server: Frontends) -> None:
        code, said = self.run("--port", str(server.port))
        assert code == 1 and said.count("can't listen") == 1

    def test_bad_files_are_bad_usage(self, tmp_path: Path) -> None:
        keys = tmp_path / "keys.toml"
        keys.write_text("[keys]\n")
        code, said = self.run("--port", "0", "--api-keys", str(keys))
        assert code == 2 and said.count("server:") == 1
        script = tmp_path / "script.json"
        script.write_text(json.dumps({"scripts": 1}))
        code, said = self.run("--port", "0", "--synthetic-script", str(script))
        assert code == 2 and "its own words are above" in said

    def test_more_than_there_are_places(self) -> None:
        code, said = self.run("--frontends", "63")
        assert code == 2 and "at most 62" in said
