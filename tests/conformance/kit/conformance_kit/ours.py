"""The server of this repository as the one under test: its API on the synthetic engine, and its echo.

The only module of the kit that knows of the repository.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conformance_kit.target import Settings, Target

API_KEY = "conformance-key"
# A token every few milliseconds, so that what arrives token by token can be told from what arrives at once.
STEP_MS = 3
PING_S = 1.0
FLAGS = (
    "--synthetic-step-ms", str(STEP_MS),
    "--keepalive-interval", str(PING_S),
    "--drain-timeout", "1",  # streams that a case left wait for their reader's return
    "--on-half-close", "finish",  # the suite's clients half-close and read on: a flag says so for whole answers (A13)
)  # fmt: skip

# What the engine says when the prompt holds the words: for the cases that are marked synthetic.
LINE_ENDS = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei"
INJECTION = '\r\n\r\nevent: x\r\ndata: [DONE]\n\n: "quoted" \\ \x7f\r'
SLOW_S = 1.5 * PING_S
EMOJI = [{"hex": "f0"}, {"hex": "9f99"}, {"hex": "82"}, "👩\u200d", "👧", {"hex": "e4b8"}]  # the last one is cut
MARKER = ["<", "|im_", "end|>", {"special": "<|im_start|>"}, "x"]
SCRIPTS: list[dict[str, Any]] = [
    {"match": "say line separators", "tokens": list(LINE_ENDS)},
    {"match": "say an injection", "tokens": [INJECTION, " end"]},
    {"match": "say an emoji in bytes", "tokens": EMOJI},
    {"match": "say the alphabet", "tokens": ["ABC", "DEF", "G", "HI", "J", "KLM"]},
    {"match": "say no word", "tokens": []},
    {"match": "say something late", "tokens": ["late"], "prefill_ms": SLOW_S * 1000},
    {"match": "fail in the middle", "tokens": ["one", " two", " three", {"error": "the fault of a script"}, " four"]},
    {"match": "say a marker", "tokens": MARKER},
]  # fmt: skip


# Over HTTP/2 by TLS the host is this one; its address is known as its own, too.
TLS_HOST = "localhost"


@contextlib.contextmanager
def started() -> Iterator[dict[str, Target]]:
    """All of them, while the context lasts: each server's port in cleartext takes both versions, the one with TLS is
    asked for HTTP/2."""
    from tests.support.http2 import make_certificate
    from tests.support.serving import Server

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="conformance-")))
        keys = folder / "keys.toml"
        keys.write_text(f'[keys.suite]\nsha256 = "{hashlib.sha256(API_KEY.encode()).hexdigest()}"\n')
        certificate, key = make_certificate(folder)
        found: dict[str, Target] = {}
        for tls in ((), ("--tls-cert", str(certificate), "--tls-key", str(key))):
            api = stack.enter_context(Server("--api-keys", str(keys), *FLAGS, *tls, scripts=SCRIPTS))
            echo = stack.enter_context(Server("--conformance-echo", *tls, engine=None))
            for name, server, base in (("api", api, API), ("echo", echo, ECHO)):
                url = f"https://{TLS_HOST}:{server.port}" if tls else server.url
                settings = dataclasses.replace(base, base_url=url, ca=str(certificate))
                if not tls:
                    found[name] = Target(settings, name)
                name += "-h2" if tls else "-h2c"
                found[name] = Target(dataclasses.replace(settings, http2=True), name)
        yield found


API = Settings(
    "",
    api_key=API_KEY,
    path="/v1/chat/completions",
    body=json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    ours=True,
    ws_message='{"type": "x"}',
)
ECHO = Settings(
    "", model="none", path="/echo", body="hello", ws_path="/ws", ws_message="hello", ws_echo=True, ours=True
)
