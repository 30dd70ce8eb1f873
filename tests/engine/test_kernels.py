"""The CUDA sources reach an installed copy, and the compiler is told all that their code depends on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from engine import kernels
from engine.kernels import options, source

ROOT = Path(__file__).resolve().parents[2]


def test_a_checkout_finds_its_sources() -> None:
    assert "__global__" in source("block_copy")
    with pytest.raises(FileNotFoundError, match=r"no absent\.cu in"):
        source("absent")


def test_a_wheel_holds_the_sources_and_no_package_named_cuda(tmp_path: Path) -> None:
    copy = tmp_path / "checkout"  # so that no build folder is left in ours
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "*.egg-info", "build", "node_modules", "tests"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        ".",
    ]
    no_compiler = {**os.environ, "CXX": "false"}  # the CPU's operators are optional, and take a minute
    subprocess.run(command, cwd=copy, check=True, capture_output=True, env=no_compiler)
    (wheel,) = tmp_path.glob("sluice-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "cuda").iterdir():
        assert f"engine/_kernels/{path.name}" in names
    assert not [name for name in names if name.startswith("cuda/")]
    assert {"server/__main__.py", "protocols/http1.py", "engine/__main__.py"} <= names


def test_another_header_is_another_compilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy keeps what it compiled by a source's text and the options, without what it includes."""
    shutil.copytree(ROOT / "cuda", tmp_path / "cuda")
    monkeypatch.setattr(kernels, "_PLACES", (tmp_path / "cuda",))
    told = options("sample", {"KIND": 0})
    assert told == options("sample", {"KIND": 0})
    assert "-DKIND=0" in told
    with (tmp_path / "cuda" / "warp.cuh").open("a") as header:
        header.write("// more\n")
    assert options("sample", {"KIND": 0}) != told
