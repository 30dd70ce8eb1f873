"""What loading took goes back to the system, and nothing that is still needed changes; what the engine imports."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.memory import give_back
from tests.support.checkpoints import save, small_model
from tests.support.serving import lone_engine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, which Linux has")

SIZE = 1024 * 1024
# What the engine has no use for on a CPU, and would take longest to import or most memory.
UNUSED = ("torch._dynamo", "torch._inductor", "sympy", "transformers", "huggingface_hub", "cupy", "scipy", "matplotlib")


def mappings(pid: int | str, part: str) -> Iterator[dict[str, int]]:
    """KiB by the names of /proc/PID/smaps, of each mapping whose line holds `part`."""
    found: dict[str, int] | None = None
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            if found:
                yield found
            found = {} if part in line else None
        elif found is not None and rest.endswith("kB"):
            found[name] = int(rest.split()[0])
    if found:
        yield found


def resident(path: Path) -> int:
    """KiB."""
    return sum(each["Rss:"] for each in mappings("self", str(path)))


def test_pages_of_files_that_nobody_wrote_to_go_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "library"
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as mapped:
        before = bytes(mapped)
        assert resident(path) == SIZE // 1024
        give_back()
        assert resident(path) == 0
        assert bytes(mapped) == before


def test_a_page_that_was_written_to_keeps_what_was_written(tmp_path: Path) -> None:
    """As the loader of programs writes addresses into pages that nobody may write to later."""
    path = tmp_path / "library"
    path.write_bytes(bytes(SIZE))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as mapped:
        mapped[5000] = 7
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        protect = ctypes.CDLL(None).mprotect
        protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        assert protect(address, SIZE, mmap.PROT_READ) == 0
        give_back()
        assert mapped[5000] == 7
        assert protect(address, SIZE, mmap.PROT_READ | mmap.PROT_WRITE) == 0


def test_an_engine_that_serves_holds_no_code_that_only_loading_ran(tmp_path: Path) -> None:
    """torch registers its operators when it is imported, which brings in some 48 MiB of its largest library."""
    model = save(small_model("llama"), tmp_path / "model")
    flags = ("--engine", "local", "--model", str(model), "--kv-blocks", "64")
    with lone_engine(f"unix:{tmp_path}/engine", *flags) as engine:
        library = list(mappings(engine.pid, "libtorch_cpu.so"))
    assert sum(each["Size:"] for each in library) > 100 * 1024
    assert sum(each["Rss:"] - each["Anonymous:"] for each in library) < 16 * 1024


def test_an_engine_imports_nothing_that_it_has_no_use_for(tmp_path: Path) -> None:
    model = save(small_model("llama"), tmp_path / "model")
    source = f"""
import sys
from engine.__main__ import _assemble, _load, _parser
options = _parser().parse_args(["--listen", "unix:x", "--model", {str(model)!r}, "--kv-blocks", "64"])
core = _assemble(options, *_load(options))
core.prepare_grammars()
print(*(name for name in {UNUSED} if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
