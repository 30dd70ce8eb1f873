"""Programs that some tests need and that no Python package brings."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

INSTALL_S = 240


def tool(name: str, package: str) -> str:
    """The path of a program. Where it is missing, CI fails with the Debian package's name; elsewhere the test is left
    out with the same sentence."""
    path = shutil.which(name)
    if path is not None:
        return path
    sentence = f"{name} is not installed; it comes with Debian's package {package}"
    if os.environ.get("CI") == "true":
        pytest.fail(sentence, pytrace=False)
    pytest.skip(sentence)


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Of all processes that test, one works in the folder while the others wait."""
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def npm_packages(folder: Path) -> str:
    """Node's path, with the packages of the folder's package.json installed beside it."""
    node, npm = tool("node", "nodejs"), tool("npm", "npm")
    stamp = folder / "node_modules" / ".installed"
    wanted = hashlib.sha256((folder / "package.json").read_bytes()).hexdigest()
    with one_at_a_time(folder):
        if not stamp.is_file() or stamp.read_text() != wanted:
            argv = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--no-package-lock"]
            done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False)
            assert done.returncode == 0, done.stderr
            stamp.write_text(wanted)
    return node
