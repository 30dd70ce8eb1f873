"""`python -m server top`: the streams of a running server, in a terminal. It asks `/status`, like any other client."""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import socket
import ssl
import sys
import time
from collections.abc import Callable
from functools import partial
from urllib.parse import urlsplit

import msgspec

from server.api.answers import ServerNow
from server.config import number
from server.terminal import Screen
from server.top_view import Look, Size, plain, render

KEY_VARIABLE = "SLUICE_API_KEY"
ANSWER_S = 3.0  # no screen should wait longer
ANSWER_BYTES_MAX = 8 * 1024 * 1024
INTERVAL_MIN_S = 0.1
WORDS_MAX = 200


class NoAnswer(Exception):
    """The server didn't tell; the message says why. `final`: asking again helps nothing."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=ANSWER_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Source:
    """Asks a server again and again, on one connection as long as it holds. `url`: http(s)://… or unix:/path."""

    def __init__(self, url: str, key: str = "", *, ca: str | None = None) -> None:
        """Raises ValueError for an address or a key that is none, and OSError for a certificate that can't be read."""
        if not (key.isascii() and key.isprintable()):
            raise ValueError("the key holds characters that no key has")
        self.url = url
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._connection = _connection(url, ca)

    def look(self) -> Look:
        """A snapshot. Raises NoAnswer."""
        again = True
        while True:
            try:
                return self._ask()
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()  # half an answer may be in it
                # One that was idle for too long says nothing of the server.
                if not (again and isinstance(error, BrokenPipeError | ConnectionResetError)):
                    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                    raise NoAnswer(f"no answer from {self.url}: {reason}") from None
                again = False

    def close(self) -> None:
        """Let go of the server."""
        self._connection.close()

    def _ask(self) -> Look:
        self._connection.request("GET", "/status", headers=self._headers)
        answer = self._connection.getresponse()
        body = _read(answer)
        if answer.status != 200:
            raise NoAnswer(_refusal(answer.status, body), final=answer.status < 500)
        try:
            return Look(msgspec.json.decode(body, type=ServerNow), time.monotonic())
        except msgspec.MsgspecError as error:
            raise NoAnswer(f"what answers there is no Sluice of this version: {error}", final=True) from None


def _read(answer: http.client.HTTPResponse) -> bytes:
    """Its body. Raises TimeoutError for one that drips: each read would be in time, and the whole never."""
    due, body = time.monotonic() + ANSWER_S, b""
    while len(body) < ANSWER_BYTES_MAX and (piece := answer.read1(ANSWER_BYTES_MAX - len(body))):
        body += piece
        if time.monotonic() > due:
            raise TimeoutError("its answer takes too long")
    answer.close()  # it was read in pieces, and would hold up the next one
    return body


def _connection(url: str, ca: str | None) -> http.client.HTTPConnection:
    if url.startswith("unix:"):
        return _UnixConnection(url.removeprefix("unix:"))
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
        raise ValueError(f"--url {url}: an address is http://host:port, https://host:port or unix:/path")
    if parts.scheme == "https":
        context = ssl.create_default_context(cafile=ca)
        return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=ANSWER_S, context=context)
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=ANSWER_S)


def _refusal(status: int, body: bytes) -> str:
    try:
        said = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        said = http.client.responses.get(status, "")
    hint = f"; --key or {KEY_VARIABLE} gives one" if status == 401 else ""
    return f"{status}: {plain(str(said)[:WORDS_MAX])}{hint}"


def main(argv: list[str]) -> int:
    """The exit code: 0, 1 when the server doesn't tell, 2 for bad usage."""
    parser = make_parser()
    options = parser.parse_args(argv)
    try:
        source = Source(options.url, options.key or os.environ.get(KEY_VARIABLE, ""), ca=options.ca)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    try:
        first = source.look()
        if options.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
            _print(first, source.url)
        else:
            _watch(source, first, options.interval)
    except NoAnswer as error:
        print(f"server top: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, EOFError):
        pass
    finally:
        source.close()
    return 0


def _print(look: Look, url: str) -> None:
    columns = os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else None
    text = "\n".join(render(look, None, url, Size(columns, None), colour=False))
    sys.stdout.buffer.write(text.encode(sys.stdout.encoding, "replace") + b"\n")


def _watch(source: Source, look: Look, interval_s: float) -> None:
    """Until q is pressed. An answer that doesn't come is told, and asked for again."""
    colour = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    before, notice = None, ""
    with Screen() as screen:
        while True:
            draw = partial(render, look, before, source.url, colour=colour, notice=notice)
            if not _wait(screen, draw, interval_s):
                return
            try:
                before, look, notice = look, source.look(), ""
            except NoAnswer as error:
                if error.final:
                    raise
                notice = f"old figures, asking again: {error}"


def _wait(screen: Screen, draw: Callable[[Size], list[str]], seconds: float) -> bool:
    """Show it for so long, in whatever size the screen gets; False once the user wants to leave."""
    due = time.monotonic() + seconds
    while True:
        screen.show(draw(screen.size))
        left = due - time.monotonic()
        if left <= 0:
            return True
        if {"q", "Q"} & set(screen.key(left)):
            return False


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m server top",
        description="Show the streams of a running server. q leaves.",
        epilog="Where stdin or stdout is no terminal it prints one snapshot, as --once does.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the server's address, or unix:/path (%(default)s)"
    )
    parser.add_argument("--key", help=f"an API key, where --metrics-access is key; better in {KEY_VARIABLE}")
    parser.add_argument("--ca", metavar="FILE", help="PEM: trust this certificate, too, of an https address")
    parser.add_argument("--once", action="store_true", help="print one snapshot")
    parser.add_argument("--interval", type=_interval, default=1.0, metavar="SECONDS", help="(%(default)s)")
    return parser


def _interval(text: str) -> float:
    value = number(text, float, 0.0)
    if not (math.isfinite(value) and value >= INTERVAL_MIN_S):
        raise argparse.ArgumentTypeError(f"must be at least {INTERVAL_MIN_S}")
    return value
