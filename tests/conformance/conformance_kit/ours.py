"""The server of this repository as the one under test: its API on the synthetic engine, and its echo.

The only module of the kit that knows of the repository.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from conformance_kit.target import Settings, Target

API_KEY = "conformance-key"
# A token every few milliseconds, so that what arrives token by token can be told from what arrives at once.
STEP_MS = 3
# The suite's clients half-close and go on reading, which a flag allows for answers in one piece (case A13).
FLAGS = ("--synthetic-step-ms", str(STEP_MS), "--on-half-close", "finish")


@contextlib.contextmanager
def started() -> Iterator[dict[str, Target]]:
    """Both servers, while the context lasts."""
    from tests.support.serving import Server

    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        keys = Path(folder) / "keys.toml"
        keys.write_text(f'[keys.suite]\nsha256 = "{hashlib.sha256(API_KEY.encode()).hexdigest()}"\n')
        with Server("--api-keys", str(keys), *FLAGS) as api, Server("--conformance-echo", engine=None) as echo:
            yield {"api": _api(api.url), "echo": _echo(echo.url)}


def _api(url: str) -> Target:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    settings = Settings(
        url, api_key=API_KEY, path="/v1/chat/completions", body=json.dumps(body), ours=True, ws_message='{"type": "x"}'
    )
    return Target(settings, "api")


def _echo(url: str) -> Target:
    settings = Settings(
        url, model="none", path="/echo", body="hello", ws_path="/ws", ws_message="hello", ws_echo=True, ours=True
    )
    return Target(settings, "echo")
