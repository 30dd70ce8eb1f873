"""Keys files as the command line writes them, and what a client sends of a key."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from server.__main__ import main
from tests.support.serving import Header


def add_key(path: Path, name: str, *flags: str) -> str:
    """The new key's secret; `python -m server keys add`, without a process of its own."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["keys", "add", name, "--api-keys", str(path), *flags]) == 0
    return out.getvalue().strip()


def bearer(secret: str) -> list[Header]:
    """The header that shows it."""
    return [("Authorization", f"Bearer {secret}")]
