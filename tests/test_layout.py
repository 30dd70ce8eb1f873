"""DESIGN section 3: who may import whom. Read from the sources, and from a server process that has just started."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("server", "protocols", "engine")
LINES_MAX = 500
SOURCES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# What server/ may know of engine/: the wire, the text and what a grammar may be, nothing that computes.
SHARED = {"engine", *(f"engine.{name}" for name in ("wire", "client", "tokenizer", "text", "grammar", "version"))}
# Where time and sockets come in as parameters.
SANS_IO = {
    "asyncio",
    "socket",
    "ssl",
    "select",
    "selectors",
    "threading",
    "time",
    "datetime",
    "uvloop",
    "server",
    "engine",
}


def imports(path: Path) -> Iterator[str]:
    """Every module that a source names, wherever in the file; `from a import b` as a and as a.b."""
    package = path.with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)}


def within(*folders: str) -> list[Path]:
    return [path for path in SOURCES if path.parts[0] in folders]


def module_exists(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_there_is_something_to_look_at() -> None:
    assert {path.parts[0] for path in SOURCES} == set(PACKAGES)
    assert {"engine", "engine.wire"} <= set(imports(Path("server/engines.py")))


@pytest.mark.parametrize("path", within("protocols"), ids=str)
def test_protocols_do_no_io_and_know_neither_side(path: Path) -> None:
    assert not tops(path) & SANS_IO


@pytest.mark.parametrize("path", within("engine"), ids=str)
def test_the_engine_knows_nothing_of_the_server(path: Path) -> None:
    assert not tops(path) & {"server", "protocols"}
    if path != Path("engine/client.py"):
        assert not tops(path) & {"asyncio", "uvloop"}


@pytest.mark.parametrize("path", within("server"), ids=str)
def test_the_server_sees_the_wire_and_the_text_of_the_engine_only(path: Path) -> None:
    of_engine = {name for name in imports(path) if name.partition(".")[0] == "engine" and module_exists(name)}
    assert of_engine <= SHARED


@pytest.mark.parametrize(
    "path", [Path(f"engine/{name}.py") for name in ("wire", "client", "tokenizer", "text", "grammar")], ids=str
)
def test_what_the_server_shares_leads_to_nothing_else(path: Path) -> None:
    assert {name for name in imports(path) if name.partition(".")[0] == "engine" and module_exists(name)} <= SHARED
    assert not tops(path) & {"torch", "numpy", "gguf", "cupy", "transformers"}


def test_cuda_is_no_package_and_holds_no_python() -> None:
    """CuPy and torch import NVIDIA's own namespace package of that name."""
    files = [path for path in (ROOT / "cuda").rglob("*") if path.is_file()]
    assert files
    assert {path.suffix for path in files} <= {".cu", ".cuh"}


def test_tests_are_no_packages() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_a_file_stays_readable(path: Path) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    assert len(source.splitlines()) <= LINES_MAX
    assert ast.get_docstring(ast.parse(source)), "a file says what its job is"


def test_a_server_process_never_loads_what_computes() -> None:
    script = (
        "import sys, server.__main__; "
        "print(*sorted({'torch', 'cupy', 'numpy', 'gguf', 'transformers', 'safetensors', 'opentelemetry'}"
        " & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
