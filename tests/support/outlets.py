"""The compiled outlet, made anew from its source: whatever is installed, the tests are of what is in the checkout."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[2] / "server" / "outlet.c"
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers")


def compile_outlet(folder: Path, *flags: str) -> Path:
    """The extension module."""
    target = folder / "_outlet.abi3.so"
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")[:1]
    includes = [f"-I{sysconfig.get_path(name)}" for name in ("include", "platinclude")]
    command = [*compiler, "-O2", "-shared", "-fPIC", *WARNINGS, *includes, *flags, str(SOURCE), "-o", str(target)]
    subprocess.run(command, check=True)
    return target


def load_outlet(path: Path) -> Any:
    """The module."""
    spec = importlib.util.spec_from_file_location("_outlet", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
