"""`python -m server top` beside a real server: as one plain snapshot, and in a terminal of its own (issue 11)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from server.top import KEY_VARIABLE, Source
from tests.support.http2 import make_certificate
from tests.support.http_client import DEADLINE_S, Client
from tests.support.serving import REPOSITORY, Server, chat, until

CHAT = "/v1/chat/completions"
PROMPT = "a secret that halts"
SCRIPTS: list[dict[str, Any]] = [{"match": "halts", "tokens": ["hidden", " words", {"pause_ms": 600_000}, " more"]}]
_sgr = re.compile(rb"\x1b\[[0-9;]*m")
# Takes the terminal as its controlling one, so that Ctrl-C and Ctrl-Z reach what it becomes.
_IN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)
# A shell with job control, which tells that its job was stopped, and goes on with it when a line comes.
_SHELL = ("sh", "-c", 'set -m; "$@"; echo STOPPED; read line; fg >/dev/null; echo ENDED $?', "sh")


def top(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """To its end, without a terminal."""
    command = [sys.executable, "-m", "server", "top", *argv]
    environment = {**os.environ, **environ}
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--drain-timeout", "0", scripts=SCRIPTS) as running:
        yield running


@contextmanager
def streaming(server: Server, request_id: str) -> Iterator[tuple[Client, str]]:
    """A stream that has made two tokens and makes no more; its whole id."""
    with server.connect() as client:
        client.request("POST", CHAT, chat(PROMPT, stream=True), [("X-Request-Id", request_id)])
        name = client.begin().header("x-stream-id")
        assert name is not None
        client.read_until(lambda answer: b" words" in answer.body)
        yield client, name
        server.ask("DELETE", f"/v1/streams/{name}")


def test_one_plain_snapshot(server: Server) -> None:
    """Without a terminal --once need not be said."""
    with streaming(server, "plain-1") as (_, name):
        for flags in ((), ("--once",)):
            done = top("--url", server.url, *flags)
            assert (done.returncode, done.stderr) == (0, "")
            assert "\x1b" not in done.stdout
            assert "synthetic" in done.stdout
            (row,) = [line for line in done.stdout.splitlines() if "plain-1" in line]
            assert row.split()[:3] == [name[:8], "running", "chat"]
            for secret in (name, "secret", "hidden"):
                assert secret not in done.stdout


def test_a_server_that_is_not_there(unused_port: int) -> None:
    done = top("--url", f"http://127.0.0.1:{unused_port}")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == f"server top: no answer from http://127.0.0.1:{unused_port}: Connection refused\n"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://127.0.0.1", "http://", "http://127.0.0.1/v1", "http://a:b"])
def test_an_address_that_is_none(url: str) -> None:
    done = top("--url", url)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_something_else_that_answers() -> None:
    with Server("--conformance-echo", engine=None) as echo:
        done = top("--url", echo.url)
    assert done.returncode == 1
    assert "no Sluice of this version" in done.stderr


def test_a_key_where_one_is_needed(tmp_path: Path) -> None:
    """From the command line or the environment, and never shown."""
    keys = tmp_path / "keys.toml"
    command = [sys.executable, "-m", "server", "keys", "add", "alice", "--api-keys", str(keys)]
    key = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60).stdout.strip()
    with Server("--api-keys", str(keys), "--metrics-access", "key") as server:
        refused = top("--url", server.url)
        assert refused.returncode == 1
        assert "401: an API key is needed" in refused.stderr
        assert KEY_VARIABLE in refused.stderr
        assert top("--url", server.url, "--key", "ключ\n").returncode == 2
        wrong = top("--url", server.url, "--key", "sk-sluice-wrong")
        assert (wrong.returncode, "sk-sluice-wrong" in wrong.stderr) == (1, False)
        for done in (top("--url", server.url, "--key", key), top("--url", server.url, **{KEY_VARIABLE: key})):
            assert (done.returncode, done.stderr) == (0, "")
            assert key not in done.stdout


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with Server("--uds", str(path)):
        done = top("--url", f"unix:{path}")
    assert done.returncode == 0
    assert f"unix:{path}" in done.stdout


def test_tls_with_a_certificate_of_its_own(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    with Server("--tls-cert", str(certificate), "--tls-key", str(key)) as server:
        url = f"https://localhost:{server.port}"
        done = top("--url", url, "--ca", str(certificate))
        assert (done.returncode, done.stderr) == (0, "")
        stranger = top("--url", url)
        assert stranger.returncode == 1
        assert "certificate" in stranger.stderr.lower()


def test_a_connection_that_was_idle_for_too_long_is_made_anew() -> None:
    with Server("--idle-timeout", "0.2") as server, contextlib.closing(Source(server.url)) as source:
        source.look()
        until(lambda: server.metrics()['sluice_connections{protocol="http1"}'] == 1, "only the scrape's own")
        assert source.look().now.engine.up


class Terminal:
    """`top` in a pseudo-terminal. `with`: it ends with the block, whatever happens."""

    def __init__(self, url: str, *, columns: int = 80, lines: int = 24, shell: tuple[str, ...] = ()) -> None:
        self.seen = b""
        self._ours, self._theirs = os.openpty()
        self.resize(columns, lines)
        self.modes = termios.tcgetattr(self._theirs)
        command = [*shell, sys.executable, "-m", "server", "top", "--url", url, "--interval", "0.1"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _IN_TERMINAL, *command],
            cwd=REPOSITORY,
            env={**os.environ, "TERM": "xterm", "PYTHONUTF8": "1"},
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        os.close(self._ours)
        os.close(self._theirs)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    @property
    def frames(self) -> list[list[bytes]]:
        """Whole ones, without colours."""
        whole = re.findall(rb"\x1b\[\?2026h\x1b\[H(.*?)\x1b\[J\x1b\[\?2026l", self.seen, re.DOTALL)
        return [[line.removesuffix(b"\x1b[K") for line in re.split(rb"\r*\n", _sgr.sub(b"", frame))] for frame in whole]

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        """Read until it holds."""
        end = time.monotonic() + DEADLINE_S
        while not condition():
            ready, _, _ = select.select([self._ours], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"not within {DEADLINE_S:g} s: {what}; seen: {self.seen[-2000:]!r}"
            self.seen += os.read(self._ours, 65536)

    def wait_frame(self, condition: Callable[[list[bytes]], Any], what: str) -> list[bytes]:
        """The first frame from now on for which it holds."""
        start = len(self.frames)
        self.wait(lambda: any(map(condition, self.frames[start:])), what)
        return next(frame for frame in self.frames[start:] if condition(frame))

    def ended(self) -> int:
        """Its exit code, with all that it wrote read."""
        end = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < end, "it does not end"
            self._drain(0.01)
        self._drain(0.0)
        return self.process.wait()

    def _drain(self, seconds: float) -> None:
        while select.select([self._ours], [], [], seconds)[0]:
            self.seen += os.read(self._ours, 65536)
            seconds = 0.0

    def check_restored(self, behind: bytes = b"") -> None:
        """The alternate screen is left, the cursor is there, and the modes are what they were. `behind`: what came
        then."""
        assert self.seen.rstrip(b"\r\n").endswith(b"\x1b[?7h\x1b[?25h\x1b[?1049l" + behind)
        assert termios.tcgetattr(self._theirs) == self.modes


def shows(text: str) -> Callable[[list[bytes]], bool]:
    return lambda frame: any(text.encode() in line for line in frame)


def test_streams_live(server: Server) -> None:
    """They come and go; the screen is never cleared, so it doesn't flicker."""
    with Terminal(server.url, columns=120) as terminal:
        terminal.wait_frame(shows("no streams"), "an idle server")
        with streaming(server, "live-1") as (_, name):
            frame = terminal.wait_frame(shows("live-1"), "the stream")
            assert any(line.startswith(name[:8].encode()) for line in frame)
        terminal.wait_frame(shows("no streams"), "its end")
        terminal.press(b"q")
        assert terminal.ended() == 0
        terminal.check_restored()
        assert b"\x1b[2J" not in terminal.seen
        assert name.encode() not in terminal.seen
        assert b"hidden" not in terminal.seen


def test_a_terminal_that_gets_narrow(server: Server) -> None:
    with streaming(server, "narrow-1"), Terminal(server.url, columns=120) as terminal:
        terminal.wait_frame(shows("narrow-1"), "a wide one")
        terminal.resize(30, 10)
        frame = terminal.wait_frame(lambda frame: len(frame) <= 10 and not shows("narrow-1")(frame), "a narrow one")
        assert [line for line in frame if len(line.decode()) > 30] == []
        assert shows("running")(frame)
        terminal.press(b"q")
        assert terminal.ended() == 0


@pytest.mark.parametrize("keys", [b"q", b"Q", b"\x03"], ids=["q", "Q", "Ctrl-C"])
def test_ways_to_leave(server: Server, keys: bytes) -> None:
    with Terminal(server.url) as terminal:
        terminal.wait_frame(shows("engine up"), "a frame")
        terminal.press(b"x")  # means nothing
        terminal.wait_frame(shows("engine up"), "another")
        terminal.press(keys)
        assert terminal.ended() == 0
        terminal.check_restored()
        assert b"Traceback" not in terminal.seen


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_terminal_as_it_was(server: Server, number: signal.Signals) -> None:
    with Terminal(server.url) as terminal:
        terminal.wait_frame(shows("engine up"), "a frame")
        terminal.process.send_signal(number)
        terminal.ended()
        terminal.check_restored()
        assert b"Traceback" not in terminal.seen


def test_ctrl_z_gives_the_terminal_back_and_takes_it_again(server: Server) -> None:
    with Terminal(server.url, shell=_SHELL) as terminal:
        terminal.wait_frame(shows("engine up"), "a frame")
        terminal.press(b"\x1a")
        terminal.wait(lambda: b"STOPPED" in terminal.seen, "that it stopped")
        terminal.check_restored(b"STOPPED")
        terminal.press(b"\n")
        terminal.wait_frame(shows("engine up"), "a frame again")
        terminal.press(b"q")
        terminal.wait(lambda: b"ENDED 0" in terminal.seen, "its end")
        terminal.check_restored(b"ENDED 0")


def test_a_server_that_goes_and_comes_back(unused_port: int) -> None:
    with Server("--port", str(unused_port)) as server, Terminal(server.url) as terminal:
        terminal.wait_frame(shows("engine up"), "a frame")
        server.kill()
        terminal.wait_frame(shows("no answer from"), "that it is gone")
        server.start()
        terminal.wait_frame(lambda frame: not shows("no answer")(frame), "that it is back")
        terminal.press(b"q")
        assert terminal.ended() == 0


def test_a_server_that_hangs_is_told_of() -> None:
    """It takes the connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        done = top("--url", f"http://127.0.0.1:{deaf.getsockname()[1]}")
    assert done.returncode == 1
    assert "timed out" in done.stderr


def test_an_answer_that_drips_is_given_up() -> None:
    """Each of its bytes comes in time, and the whole never."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                while not gone.wait(0.2):
                    connection.sendall(b" ")

        gone = threading.Event()
        thread = threading.Thread(target=drip)
        thread.start()
        done = top("--once", "--url", f"http://127.0.0.1:{listener.getsockname()[1]}")
        gone.set()
        thread.join(DEADLINE_S)
    assert done.returncode == 1
    assert "takes too long" in done.stderr


def test_a_terminal_that_is_closed_ends_it(server: Server) -> None:
    terminal = Terminal(server.url)
    try:
        terminal.wait_frame(shows("engine up"), "a frame")
        os.close(terminal._theirs)
        os.close(terminal._ours)
        assert terminal.process.wait(DEADLINE_S) in (0, 1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            terminal.process.kill()
        terminal.process.wait(DEADLINE_S)
