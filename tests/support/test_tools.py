"""What several test processes need is installed by one of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.tools import npm_packages

NPM = """#!/bin/sh
mkdir busy || exit 1
sleep 0.1
mkdir -p node_modules
echo "$@" >> calls
rmdir busy
"""


def test_packages_are_installed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flock(2) holds between two opened files, so threads stand for processes here."""
    programs, folder = tmp_path / "bin", tmp_path / "clients"
    programs.mkdir()
    folder.mkdir()
    for name in ("node", "npm"):
        (programs / name).write_text(NPM)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    (folder / "package.json").write_text("{}")
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(npm_packages, [folder] * 4)) == {str(programs / "node")}
    assert len((folder / "calls").read_text().splitlines()) == 1
